"""Tests of eval/model_card.py: the card says what the run's files say, no more, whatever they hold."""

import json
import re

import pytest
from export_runs import write_run
from huggingface_hub import ModelCard
from matplotlib.image import imread
from tiny_llama import write_tokenizer

from eval import export
from eval.from_hf import import_checkpoint
from runtime.config import FP8Config

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
INDEX = {"web": {"dataset": "HuggingFaceFW/fineweb-edu", "revision": COMMIT, "license": "ODC-By 1.0"},
         "code": {"dataset": "local: a/b.jsonl; column text", "revision": "-", "license": "not stated"}}
SUMMARY = {"steps": 6, "wall_s": 7200, "tok_per_s_median": 12345.6, "n_gpu": 4, "device": "NVIDIA H100", "git_commit": "abc123",
           "loss_as_trained": 3.2104, "loss_bf16": 3.2011, "sources": {"web": {"loss_bf16": 3.1, "bpb_bf16": 1.2345}},
           "precision": {"recipe": "tensorwise", "layers_converted": [f"layers.{i}.mlp.down" for i in range(12)],
                         "layers_skipped": {"head": "head (fp8.head=false)", "layers.0.attn.qkv": "fp8.skip=layers.0.*"}},
           "eval": {"piqa": {"acc": 0.6, "acc_se": 0.01, "chance": 0.5, "n": 1838},
                    "old": {"acc": 0.5, "acc_se": 0.02, "chance": 0.25, "n": 40, "limit": 40}}}
RECORD = {"tasks": {"sciq": {"acc": 0.75, "acc_se": 0.0137, "acc_norm": 0.7, "acc_norm_se": None, "chance": 0.25, "n": 1000},
                    "old": {"acc": 0.4, "acc_se": 0.03, "chance": 0.25, "n": 400}}, "limit": None, "fp8": "off"}


def write_all(tmp_path, **config):
    run = tmp_path / "run"
    write_run(run, data_dir=tmp_path / "data", **config)
    for source, index in INDEX.items():
        (tmp_path / "data" / source).mkdir(parents=True)
        (tmp_path / "data" / source / "index.json").write_text(json.dumps(index))
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "eval").mkdir()
    (run / "eval" / "core.json").write_text(json.dumps(RECORD))
    (run / "eval" / "try.json").write_text(json.dumps({"tasks": {"old": {"acc": 0.1, "acc_se": 0.1}}, "limit": 5}))
    (run / "eval" / "core_fp8_rowwise.json").write_text(json.dumps({**RECORD, "fp8": "rowwise", "limit": 10}))
    return run


def card_of(run, folder, *arguments):
    assert export.main([str(run), str(folder), *arguments]) == 0
    return (folder / "README.md").read_text(encoding="utf-8")


def rows(card, begin):
    """The cells of the table lines that begin so."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith(f"| {begin}")]


def test_the_card_of_a_finished_run(tmp_path):
    run = write_all(tmp_path, fp8=FP8Config(recipe="tensorwise"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(
        {"kind": "train", "step": i, "loss": 5 - i / 4, "verdict": "OK", "grad_norm": 1.0, "lr": 1e-3, "tok_per_s": 1e4}) + "\n"
        for i in range(1, 7)))
    text = card_of(run, tmp_path / "hf", "license=apache-2.0")
    head = ModelCard(text).data
    assert head.license == "apache-2.0" and head.library_name == "transformers" and head.pipeline_tag == "text-generation"
    assert head.datasets == ["HuggingFaceFW/fineweb-edu"] and head.tags == ["nanofp8", "fp8"]
    assert rows(text, "web") == [["web", "75.0%", "HuggingFaceFW/fineweb-edu", COMMIT, "ODC-By 1.0"], ["web", "3.1000", "1.2345"]]
    assert rows(text, "code")[0][:3] == ["code", "25.0%", "local: a/b.jsonl; column text"]
    assert "trained from scratch on 2.3k tokens (6 steps of 384) with nanoFP8. It is a base model" in text
    assert "each document began after &lt;\\|endoftext\\|> (`eos`); the tokenizer adds none of them by itself." in text
    assert "4 x NVIDIA H100 in 2.00 hours at 12,346 tokens/s" in text and "abc123" in text
    assert "recipe `tensorwise`" in text and "- FP8: `layers.*.mlp.down` (12)" in text
    assert "- BF16, fp8.skip=layers.0.\\*: `layers.*.attn.qkv` (1)" in text
    assert "through the FP8 matmuls 3.2104, through BF16 ones from the same weights 3.2011" in text
    assert rows(text, "sciq") == [["sciq", "acc", "0.7500", "0.0137", "0.25", "1000"],
                                  ["sciq", "acc\\_norm", "0.7000", "-", "0.25", "1000"],
                                  ["sciq (FP8 matmuls, rowwise)", "acc", "0.7500", "0.0137", "0.25", "1000 (a part: limit=10)"],
                                  ["sciq (FP8 matmuls, rowwise)", "acc\\_norm", "0.7000", "-", "0.25", "1000 (a part: limit=10)"]]
    assert rows(text, "piqa") == [["piqa", "acc", "0.6000", "0.0100", "0.50", "1838"]]
    assert rows(text, "old")[0] == ["old", "acc", "0.4000", "0.0300", "0.25", "400"]      # the whole task, not its part
    assert "![Training curves](training.png)" in text and imread(tmp_path / "hf" / "training.png").shape[0] > 400
    assert "not-chosen" not in text and str(tmp_path) not in text


def test_the_card_of_a_float8_export(tmp_path):
    run = write_all(tmp_path)
    text = card_of(run, tmp_path / "hf", "float8=rowwise")
    assert ModelCard(text).data.tags == ["nanofp8", "torchao"] and ModelCard(text).data.license == "other"
    assert "`layers.*.attn.qkv` (2)" in text and "scales by `rowwise`" in text and "need the package torchao" in text
    assert "Trained in BF16 with fp32 weights." in text and "No licence was chosen" in text


def test_a_run_that_left_nothing_else(tmp_path):
    write_run(tmp_path / "run")
    text = card_of(tmp_path / "run", tmp_path / "hf")
    assert ModelCard(text).data.datasets is None
    assert rows(text, "web") == [["web", "75.0%", "not known", "not known", "not known"]]
    assert "Not scored" in text and "there are no curves" in text and "run/summary.json is not there" in text
    assert not (tmp_path / "hf" / "training.png").exists()


def test_the_card_of_an_imported_model(tmp_path):
    write_run(tmp_path / "run", tied=False)
    text = card_of(tmp_path / "run", tmp_path / "a", "license=mit")
    import_checkpoint(str(tmp_path / "a"), str(tmp_path / "back"))
    text = card_of(tmp_path / "back", tmp_path / "b")
    assert "imported into nanoFP8 and not trained there" in text and "## Data" not in text and "is not there" not in text
    assert rows(text, "folder") == [["folder", "a"]] and rows(text, "license") == [["license", "mit"]]
    assert len(rows(text, "model.safetensors")[0][1]) == 64 and ModelCard(text).data.license == "mit"


ORIGIN = {"model": "some-org/Base-1B", "folder": "0a1b2c", "architecture": "LlamaForCausalLM", "tokenizer_sha256": None,
          "license": "llama3.1", "files": {"model.safetensors": "ab" * 32}}


def test_the_card_of_an_imported_model_that_was_trained_on(tmp_path):
    """It is the base model's child: name, licence, files, and what of all that was its own training."""
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer")
    run = write_all(tmp_path, tokenizer=str(tmp_path / "tokenizer"), vocab_size=420, state={"origin": ORIGIN},
                    start_from="out/base/checkpoints/step_00000000")
    (tmp_path / "data" / "web" / "index.json").write_text(json.dumps(INDEX["web"] | {"is_masked": True}))
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"wall_s": 150}))
    text = card_of(run, tmp_path / "hf")
    head = ModelCard(text).data
    assert head.license == "llama3.1" and head.base_model == "some-org/Base-1B" and "not-chosen" not in text
    assert "trained on from the weights of some-org/Base-1B, an imported model, on 2.3k tokens (6 steps of 384)" in text
    assert "It was tuned on prompts and responses." in text and "in 2.5 minutes at" in text
    assert "## Where it comes from" in text and rows(text, "model.safetensors") == [["model.safetensors", "ab" * 32]]
    assert "These came after what some-org/Base-1B was trained on before it was imported" in text and "## Training" in text
    assert "after &lt;\\|end\\_of\\_text\\|> (`eos`) then &lt;\\|begin\\_of\\_text\\|> (`bos`); the tokenizer adds the" in text
    assert "Of web the losses, in training and here, count the responses alone." in text
    assert ModelCard(card_of(run, tmp_path / "mine", "license=mit")).data.license == "mit"


def test_a_licence_that_is_not_known_is_not_made_up(tmp_path):
    write_run(tmp_path / "run", state={"origin": {"folder": "base", "license": None}}, start_from="o/a/checkpoints/step_00000000")
    text = card_of(tmp_path / "run", tmp_path / "hf")
    assert ModelCard(text).data.license == "other" and ModelCard(text).data.base_model is None
    assert "That of the weights that it went on from (base) holds for these too; it is not known here." in text
    assert "It was trained on plain text after base." in text


def test_the_card_of_a_branch_tells_its_own_steps(tmp_path):
    write_run(tmp_path / "run", start_from="out/trunk/checkpoints/step_00000004")
    assert ("trained from the weights of trunk at step 4 to step 6, 2 steps of 384 tokens with nanoFP8. It is a base model"
            in card_of(tmp_path / "run", tmp_path / "hf"))


def test_scores_of_other_weights_are_left_out_the_newest_of_these_counts(tmp_path):
    run = write_all(tmp_path)
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"eval": {"copa": {"acc": 0.9, "acc_se": 0.1, "step": 3}}}))
    for name, more in (("core", {"step": 3}), ("a", {"step": 6, "time": "2026-02-02T00:00:00Z", "acc": 0.6}),
                       ("b", {"step": 6, "time": "2026-01-01T00:00:00Z", "acc": 0.5}), ("old", {"acc": 0.4}),
                       ("a_float32", {"step": 6, "dtype": "float32", "acc": 0.7}), ("c", {"step": 6, "time": 5, "acc": "x"})):
        tasks = {"boolq": {"acc": more.pop("acc", 0.1), "acc_se": 0.01, "n": 9}}
        (run / "eval" / f"{name}.json").write_text(json.dumps({"tasks": tasks, "limit": None, "fp8": "off", **more}))
    text = card_of(run, tmp_path / "hf")
    assert [row[:3] for row in rows(text, "boolq")] == [["boolq", "acc", "0.6000"], ["boolq (float32)", "acc", "0.7000"]]
    assert "eval/core.json is of step 3, the weights are of step 6: its scores are missing here" in text
    assert not rows(text, "copa")


def test_a_summary_of_other_weights_is_not_told_of_these(tmp_path):
    run = write_all(tmp_path)
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"steps": 12}))
    text = card_of(run, tmp_path / "hf")
    assert "3.2011" not in text and "H100" not in text and "summary.json tells of step 12, the weights are of step 6" in text


@pytest.mark.parametrize("content", [
    b"", b"[]", b"\xff\xfe", b"{", b"[" * 100_000,
    b'{"sources": [1], "precision": 3, "eval": {"a": [], "b": {"acc": "x"}}, "steps": 6}',
    b'{"steps": 6, "wall_s": NaN, "tok_per_s_median": "<b>", "sources": {"web": null, "code": {"loss_bf16": true}}}',
    b'{"tasks": {"x": {"acc": 1, "acc_se": 0}}, "dtype": "<b>", "time": {}, "step": [], "is_masked": true}',
    b'{"tasks": {"x": {"acc": 1e999, "acc_se": 0}, "<script>|\\n": {"acc": 1, "acc_se": {}, "n": "|"}}, "steps": 6, "fp8": []}'])
def test_hostile_files_do_no_harm(tmp_path, content):
    run = write_all(tmp_path)
    for file in ("run/summary.json", "run/eval/core.json", "run/metrics.jsonl", "data/web/index.json"):
        (tmp_path / file).write_bytes(content)
    text = card_of(run, tmp_path / "hf")
    assert "<script" not in text and "<b>" not in text and "nan" not in re.sub("nanofp8", "", text.lower())
    assert ModelCard(text).data.library_name == "transformers"


def test_what_files_say_is_text(tmp_path):
    run = write_all(tmp_path)
    evil = "x|y\n---\n# big `code` <img src=x> [a](javascript:b)"
    (tmp_path / "data" / "web" / "index.json").write_text(json.dumps({"dataset": evil, "revision": COMMIT, "license": evil}))
    text = card_of(run, tmp_path / "hf")
    cells = re.split(r"(?<!\\)\|", next(line for line in text.splitlines() if line.startswith("| web | 75")))
    assert len(cells) == 7 and "<img" not in text and not re.search(r"(?<!\\)\]\(java", text) and "\n# big" not in text
