"""eval/export.py: transformers computes the same logits bit by bit and makes the same tokens; float8 weights; the card."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from eval_runs import documents, generate, write_run
from huggingface_hub import ModelCard
from safetensors import safe_open

from eval import export
from eval.export import write_safetensors
from eval.from_hf import import_checkpoint
from eval.sample import load_for_inference
from runtime.checkpoint import load_model
from runtime.config import FP8Config
from runtime.tokenizer import END_OF_TEXT, load_tokenizer
from tests.conftest import ROOT
from tests.test_model import tokens

LLAMA3 = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_ctx": 16}
VARIANTS = {
    "plain": {},
    "gpt2_gqa": {"tokenizer": "gpt2", "n_kv_head": 2},
    "untied_llama3": {"tied": False, "n_kv_head": 1, **LLAMA3},
    "qwen3": {"qk_norm": True, "n_kv_head": 2},
    "everything": {"tied": False, "qk_norm": True, "norm_eps": 1e-3, **LLAMA3},
}


def auto_model(folder):
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_computes_the_same_bits(tmp_path, name):
    config, ours = write_run(tmp_path / "run", **VARIANTS[name])
    folder, back, again = (tmp_path / part for part in ("hf", "back", "again"))
    assert export.main([str(tmp_path / "run"), str(folder), "dtype=fp32"]) == 0
    theirs = auto_model(folder)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if config.model.qk_norm else "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    for shape in ((1, 1), (1, 2), (1, 7), (3, 24)):
        x = tokens(config.model, *shape)
        assert torch.equal(theirs(x).logits, ours(x)), shape

    # Greedy text is the same, token by token, up to the first end of text; rows that pad the vocabulary never come out, though
    # the rough models' padded rows are as likely as any.
    prompt, eot = tokens(config.model, 2, 5), load_tokenizer(config.data.tokenizer).eot
    texts = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=15, pad_token_id=eot)
    assert torch.equal(texts[:, 5:], generate(ours, prompt, 15, eot=eot))
    assert name != "plain" or (ours(tokens(config.model, 16, 24)).argmax(-1) >= 257).float().mean() > 0.1

    # And back: the weights' bits, the tokenizer's files; the second export is the first one.
    import_checkpoint(str(folder), str(back))
    found, wanted = (dict(load_model(folder)[0].named_parameters()) for folder in (back, tmp_path / "run"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    assert export.main([str(back), str(again), "dtype=fp32"]) == 0
    for file in folder.iterdir():
        assert file.name == "README.md" or (again / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_the_tokens_of_300_documents(tmp_path, name):
    from transformers import AutoTokenizer
    write_run(tmp_path / "run", tokenizer=name)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    ours, file, texts = load_tokenizer(name), load_tokenizer(str(tmp_path / "hf")), documents()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    spelled = [END_OF_TEXT in text for text in texts]
    assert len(texts) == 300 and 5 < sum(spelled) < 150
    for text, is_spelled in zip(texts, spelled, strict=True):
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, split_special_tokens=True) == ids
        assert file.encode(text).tolist() == ids        # tokenizer.json alone; of gpt2 transformers reads the other files
        assert (theirs.encode(text) == ids) != is_spelled     # Hugging Face reads the token where the text spells it
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (file.prefix, file.vocab_size) == (ours.prefix, ours.vocab_size)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (ours.vocab_size, ours.eot, ours.eot)
    assert theirs.decode([ours.eot]) == ours.decode([ours.eot]) == END_OF_TEXT
    assert theirs.decode(range(128, 160)) == ours.decode(range(128, 160))       # bytes that are no text
    assert theirs.model_max_length == 24 and set(theirs("a")) == {"input_ids", "attention_mask"} == set(theirs.model_input_names)
    # Versions of transformers differ in what a tokenizer gives where its file does not say it.
    about = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "GPT2Tokenizer" or about["model_input_names"] == ["input_ids", "attention_mask"]


def test_bf16_is_the_default_and_large_models_lie_in_several_files(tmp_path, monkeypatch):
    _, ours = write_run(tmp_path / "run", tied=False)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "one")]) == 0
    about = json.loads((tmp_path / "one" / "config.json").read_text())
    assert about["dtype"] == "bfloat16" and about["eos_token_id"] == about["bos_token_id"] == 256
    monkeypatch.setattr(export, "FILE_BYTES", 60_000)       # the embedding takes 49,152, gate and up 12,288 each
    (tmp_path / "many").mkdir()
    assert export.main([str(tmp_path / "run"), str(tmp_path / "many")]) == 0
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert files == sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in ours.parameters())
    one, many = auto_model(tmp_path / "one"), auto_model(tmp_path / "many")
    assert one.dtype == torch.bfloat16 and torch.equal(one.lm_head.weight, ours.head.weight.bfloat16())
    assert torch.equal(one.model.layers[1].self_attn.k_proj.weight, ours.layers[1].attn.qkv.weight[64:128].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), many.state_dict().values(), strict=True))


def test_the_newest_weights_are_exported_or_those_of_a_step(tmp_path):
    _, earlier = write_run(tmp_path / "run", step=3, tied=False)
    _, newest = write_run(tmp_path / "run", step=6, tied=False, seed=2)
    for arguments, ours in ([], newest), (["step=3"], earlier):
        assert export.main([str(tmp_path / "run"), str(folder := tmp_path / f"hf{len(arguments)}"), *arguments]) == 0
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("lm_head.weight"), ours.head.weight.bfloat16())


def test_the_package_reads_the_file_and_the_weights_begin_at_cache_lines(tmp_path):
    tensors = {"odd": torch.arange(3.0), "bf16": torch.randn(5, 32).bfloat16(), "view": torch.randn(64, 16)[16:48],
               "f8": torch.randn(16, 16).to(torch.float8_e4m3fn), "across": torch.randn(16, 32).t(), "scale": torch.ones(1, 1)}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"a": "é"})
    data = (tmp_path / "x.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + n])
    spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    assert (8 + n) % 64 == 0 and [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), len(data) - 8 - n]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"a": "é"} and set(file.keys()) == set(tensors)
        for name, wanted in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float())
            assert name in ("odd", "scale") or found.data_ptr() % 64 == 0


def independently(weight, recipe):
    """The float8 values that torchao's training makes of the whole matrix, and what it divides them by."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    cast = hp_tensor_to_float8_dynamic(
        weight, torch.float8_e4m3fn, LinearMMConfig(), axiswise_dim=-1, round_scales_to_power_of_2=recipe == "rowwise",
        scaling_granularity=ScalingGranularity[{"tensorwise": "TENSORWISE", "rowwise": "AXISWISE"}[recipe]])
    return cast._data, cast._scale.reciprocal()


def near(a, b):
    """Size of the difference, relative."""
    return ((a - b).float().norm() / b.float().norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("recipe, several", [("tensorwise", False), ("rowwise", True)])
def test_transformers_and_torchao_load_what_the_matmuls_saw(tmp_path, monkeypatch, recipe, several, emulated_scaled_mm):
    monkeypatch.setattr(export, "FILE_BYTES", 60_000 if several else 10**9)
    fp8 = FP8Config(recipe=recipe, skip=("layers.1.attn.out",))
    config, ours = write_run(tmp_path / "run", fp8=fp8, n_kv_head=2, n_layer=2)
    assert export.main([str(tmp_path / "run"), str(tmp_path / "f8"), f"float8={recipe}"]) == 0
    assert len(list((tmp_path / "f8").glob("*.safetensors"))) == (3 if several else 1)
    theirs = auto_model(tmp_path / "f8")
    from torchao.quantization import Float8Tensor
    block, other = ours.layers[0], theirs.model.layers[0]
    for fused, parts in ((block.attn.qkv, [other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj]),
                         (block.mlp.gate_up, [other.mlp.gate_proj, other.mlp.up_proj]),
                         (block.attn.out, [other.self_attn.o_proj]), (block.mlp.down, [other.mlp.down_proj])):
        assert all(type(part.weight.data) is Float8Tensor and part.weight.qdata.dtype is torch.float8_e4m3fn for part in parts)
        values, scale = independently(fused.weight, recipe)
        assert torch.equal(torch.cat([part.weight.qdata for part in parts]).float(), values.float())
        assert torch.equal(torch.cat([part.weight.scale.expand(len(part.weight), 1) for part in parts]),
                           scale.expand(len(values), 1))
    # What the run kept in BF16 stays so, with the head, embedding, norms.
    kept = theirs.model.layers[1].self_attn.o_proj.weight
    assert type(kept.data) is torch.Tensor and torch.equal(kept, ours.layers[1].attn.out.weight.bfloat16())
    assert torch.equal(theirs.lm_head.weight, ours.wte.weight.bfloat16())

    # The matmuls run on this CPU too. Per tensor, activations are scaled as in the run; per row, the run rounds scales to
    # powers of two and torchao's inference does not, so that the two round apart. From BF16 both are equally far.
    run = str(tmp_path / "run")
    own, bf16 = (load_for_inference(run, "cpu", "bfloat16", name).model for name in (recipe, "off"))
    h = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.cat([part(h) for part in (other.self_attn.q_proj, other.self_attn.k_proj, other.self_attn.v_proj)], -1)
    assert near(y, own.layers[0].attn.qkv(h)) < (0.02 if recipe == "tensorwise" else 0.05)
    x = tokens(config.model, 4, 24)
    assert 0.5 < near(theirs(x).logits, bf16(x)) / near(own(x), bf16(x)) < 1.5
    assert theirs.generate(x[:1, :5], max_new_tokens=4, do_sample=False).shape == (1, 9)


def test_a_bf16_run_gets_the_recipe_s_own_choice_never_the_head(tmp_path, capsys):
    write_run(tmp_path / "run", tied=False)
    write_run(tmp_path / "head", tied=False, fp8=FP8Config(recipe="rowwise_with_gw_hp", head=True))
    for name in ("head", "run"):
        assert export.main([str(tmp_path / name), str(tmp_path / f"f8_{name}"), "float8=rowwise_with_gw_hp"]) == 0
        assert "8 Linears in float8 (rowwise_with_gw_hp), the head and the rest bf16" in capsys.readouterr().out
    assert len({(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("f8_run", "f8_head")}) == 1
    about = json.loads((tmp_path / "f8_run" / "config.json").read_text())["quantization_config"]
    assert about["modules_to_not_convert"] == ["lm_head"]
    with safe_open(tmp_path / "f8_run" / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}    # noqa: SIM118  no dict
    assert dtypes["model.layers.1.mlp.up_proj._weight_qdata"] == torch.float8_e4m3fn
    assert dtypes["lm_head.weight"] == dtypes["model.embed_tokens.weight"] == torch.bfloat16
    assert len(dtypes) == 2 * 7 * 2 + 2 * 2 + 1 + 2      # weight and scale of each Linear; norms; embedding and head


@pytest.mark.parametrize("arguments, sizes, told", [
    ("{tmp}/nowhere {tmp}/hf", {}, "is no run: it has no config.json"), ("{tmp}/run", {}, "folder is missing: give folder=VALUE"),
    ("{tmp}/run {tmp}/run", {}, "is there already and not an empty folder"),
    ("{tmp}/run {tmp}/hf dtype=fp32 float8=rowwise", {}, "drop one of the two"),
    ("{tmp}/run {tmp}/hf float8=mxfp8", {}, "has no counterpart that torchao's inference loads: use one of tensorwise,"),
    ("{tmp}/run {tmp}/hf float8=tensorwise", {"n_ffn": 36}, "cannot convert layers.0.mlp.gate_up of 64 x 72"),
    ("--from-hf {tmp}/run {tmp}/new license=mit", {}, "there is no key 'license'; there are: from_hf, run")])
def test_mistakes_get_a_sentence(tmp_path, capsys, arguments, sizes, told):
    write_run(tmp_path / "run", **sizes)
    before = sorted(tmp_path.rglob("*"))
    assert export.main([a.format(tmp=tmp_path) for a in arguments.split(" ")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_nothing_and_a_kill_no_half_folder_and_nothing_needs_transformers(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")

    def write(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))
    with monkeypatch.context() as patch:
        patch.setattr(export, "write_safetensors", write)
        assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 1
    assert "No space left on device" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["run"]
    code = ("import os, signal, sys; sys.modules['transformers'] = None\nfrom eval import export\n"
            "export.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"      # all is written, nothing renamed
            "sys.exit(export.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "hf")], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "hf").exists() and (next(tmp_path.glob(".hf.*.tmp")) / "README.md").is_file()
    assert export.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0      # what was left is in nobody's way


COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
SUMMARY = {"steps": 6, "loss_as_trained": 3.2104, "loss_bf16": 3.2011}
RECORD = {"tasks": {"sciq": {"acc": 0.75, "acc_se": 0.0137, "chance": 0.25, "docs_sha256": "x"}}, "limit": None, "fp8": "off",
          "run": "run", "dtype": "bfloat16", "step": 6, "time": "2026-02-02T00:00:00+00:00"}


def card_of(run, folder, *arguments):
    assert export.main([str(run), str(folder), *arguments]) == 0
    return (folder / "README.md").read_text(encoding="utf-8")


def rows(card, begin):
    """The cells of the table lines that begin so."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith(f"| {begin}")]


def test_the_card_says_what_the_runs_files_say_of_these_weights(tmp_path):
    run = tmp_path / "run"
    write_run(run, data_dir=tmp_path / "data", fp8=FP8Config(recipe="tensorwise"))
    text = card_of(run, tmp_path / "bare")      # a run that left nothing else
    assert rows(text, "web") == [["web", "75.0%", "not known", "not known", "not known"]] and "None: no scores in" in text
    assert ModelCard(text).data.license == "other"
    for source, index in (("web", {"dataset": "HuggingFaceFW/fineweb-edu", "revision": COMMIT, "license": "ODC-By 1.0"}),
                          ("code", {"dataset": "local: a/b.jsonl", "revision": "-", "license": "x, y"})):
        (tmp_path / "data" / source).mkdir(parents=True)
        (tmp_path / "data" / source / "index.json").write_text(json.dumps(index))
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "eval").mkdir()
    older = {"time": "2026-01-01T00:00:00+00:00", "tasks": {"sciq": RECORD["tasks"]["sciq"] | {"acc": 0.1}}}
    for name, change in (("new", {}), ("old", older), ("part", {"limit": 5}), ("other", {"step": 3}), ("f8", {"fp8": "rowwise"})):
        (run / "eval" / f"{name}.json").write_text(json.dumps(RECORD | change))
    text = card_of(run, tmp_path / "hf", "license=apache-2.0")
    head = ModelCard(text).data
    assert head.license == "apache-2.0" and head.library_name == "transformers" and head.pipeline_tag == "text-generation"
    assert head.datasets == ["HuggingFaceFW/fineweb-edu"] and head.tags == ["nanofp8", "fp8"]
    assert rows(text, "web") == [["web", "75.0%", "HuggingFaceFW/fineweb-edu", COMMIT, "ODC-By 1.0"]]
    assert "trained with nanoFP8 from scratch, 6 of 6 steps of 384 tokens" in text
    assert "Precision of the matmuls: FP8 tensorwise." in text and "3.2104 as trained, 3.2011 in BF16" in text
    assert rows(text, "run ")[0][-1] == rows(text, "run, FP8 inference (rowwise)")[0][-1] == "75.0 ± 1.4"
    (run / "summary.json").write_text(json.dumps(SUMMARY | {"steps": 12}))
    assert "3.2011" not in card_of(run, tmp_path / "later") and str(tmp_path) not in text


def test_the_card_of_an_imported_model_and_of_one_trained_on(tmp_path):
    write_run(tmp_path / "run", tied=False)
    card_of(tmp_path / "run", tmp_path / "a")
    import_checkpoint(str(tmp_path / "a"), str(tmp_path / "back"))
    assert "imported into nanoFP8 from a and not trained there" in card_of(tmp_path / "back", tmp_path / "b")
    write_run(tmp_path / "on", state={"origin": {"folder": "Base-1B"}}, start_from="out/base/checkpoints/step_00000000")
    assert "from the weights of Base-1B, 6 of 6 steps" in card_of(tmp_path / "on", tmp_path / "c")
    write_run(tmp_path / "branch", state={"switched_from": "rowwise"}, start_from="out/trunk/checkpoints/step_00000004")
    text = card_of(tmp_path / "branch", tmp_path / "d")
    assert "from the weights of trunk at step 4, 6 of 6 steps" in text and ModelCard(text).data.tags == ["nanofp8", "fp8"]
    assert "Precision of the matmuls: BF16, before the branch point FP8 rowwise." in text
