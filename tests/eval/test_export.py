"""eval/export.py: transformers computes the same logits bit by bit and makes the same tokens;
float8 weights; the card; a Llama that transformers made comes in bit for bit, learns, goes out
again; what is refused, by name."""

import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import prepare_data
from configs.continue_llama import config as LLAMA_8B
from eval import export
from eval.hf import config as hf_config
from eval.hf import export as hf_export
from eval.hf import files as hf_files
from eval.hf import weights as hf_weights
from eval.hf.config import MODEL_TYPES, gpt_config
from eval.hf.importing import import_checkpoint
from eval.inference import load_for_inference
from lib.errors import UserError
from lib.files import read_rows
from runtime.checkpoint import branch, checkpoints, load_model, read_manifest
from runtime.config import FP8Config, read_config
from runtime.data import Data
from runtime.tokenizer import END_OF_TEXT, load_tokenizer
from tests.conftest import ROOT, changed, process
from tests.fp8.test_linears import OPERANDS, distance, quantised
from tests.helpers.eval_runs import call, generate, make_llama, refused, write_run
from tests.helpers.scaling_runs import edit
from tests.helpers.text_files import BEGINS, DIGITS_APART, write_sentencepiece, write_tokenizer
from tests.runtime.test_tokenizer import TEXTS
from tests.test_model import TINY, build, build_rough, tokens

LLAMA3 = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_ctx": 16}


def exported(run: Path, folder: Path, *arguments: object):
    call(export, run, folder, *arguments)
    return folder


def documents():
    """300 of code, prose, all scripts, emoji, white space, line ends, numbers, control characters,
    special tokens' spelling."""
    rng = random.Random(0)
    lines = [
        line
        for path in ("README.md", "model.py")
        for line in (ROOT / path).read_text().splitlines()
    ]
    blanks = [" ", "  ", "\n", "\t", "\r\n", "\u3000", "", "\n\n\n", " \t\r\x0b\u00a0\u2003 "]
    kinds = (
        lines,
        blanks,
        TEXTS[:11],
        [chr(code) for code in (*range(0xD800), *range(0x1F000, 0x1FB00))],
    )
    return [
        *TEXTS,
        *(
            "".join(
                rng.choice(rng.choice(kinds)) + rng.choice(blanks) for _ in range(rng.randrange(60))
            )
            for _ in range(300 - len(TEXTS))
        ),
    ]


def auto_model(folder: Path):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tokenizer": "gpt2", "n_kv_head": 2},
        {"tied": False, "n_kv_head": 1, **LLAMA3},
        {"qk_norm": True, "n_kv_head": 2},
        {"tied": False, "qk_norm": True, "norm_eps": 1e-3, **LLAMA3},
        {"head_size": 32, "n_kv_head": 2, "qk_norm": True},
        {"head_size": 24, "tied": False, "n_kv_head": 1, **LLAMA3},
        # 64 channels that no 3 heads share: LlamaConfig refuses them, Mistral's does not
        {"head_size": 16, "n_head": 3},
    ],
)
def test_transformers_computes_the_same_bits(tmp_path: Path, variant):
    config, ours = write_run(tmp_path / "run", **variant)
    theirs = auto_model(folder := exported(tmp_path / "run", tmp_path / "hf", "dtype=fp32"))
    for x in (tokens(config.model, *shape) for shape in ((1, 1), (1, 2), (1, 7), (3, 24))):
        assert torch.equal(theirs(x).logits, ours(x)), x.shape

    # Greedy text is the same, token by token, up to the first end of text or until the context is
    # full; rows that pad the vocabulary never come out, though the rough models' padded rows are as
    # likely as any.
    prompt, eot = tokens(config.model, 2, 5), load_tokenizer(config.data.tokenizer).eot
    texts = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=eot,
    )
    assert torch.equal(texts[:, 5:], generate(ours, prompt, 99, ends=(eot,))) and not torch.equal(
        *texts[:, 5:]
    )
    assert texts.size(1) == 24 + 1  # the last token needs no place
    assert variant or (ours(tokens(config.model, 16, 24)).argmax(-1) >= 257).float().mean() > 0.1

    # And back: the weights' bits, the tokenizer's files; the second export is the first one, but
    # for the name of the class, which then leaves all rules to tokenizer.json.
    import_checkpoint(str(folder), str(tmp_path / "back"))
    found, wanted = (
        dict(load_model(tmp_path / run)[0].named_parameters()) for run in ("back", "run")
    )
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)
    again = exported(tmp_path / "back", tmp_path / "again", "dtype=fp32")
    for file in folder.iterdir():
        if file.name == "tokenizer_config.json":
            first, second = (json.loads((path / file.name).read_text()) for path in (folder, again))
            assert second == first | {"tokenizer_class": "PreTrainedTokenizerFast"}
        elif file.name != "README.md":
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_the_tokens_of_300_documents(tmp_path: Path, name: str):
    write_run(tmp_path / "run", tokenizer=name)
    folder, texts = exported(tmp_path / "run", tmp_path / "hf"), documents()
    ours, file, theirs = (
        load_tokenizer(name),
        load_tokenizer(str(folder)),
        AutoTokenizer.from_pretrained(folder),
    )
    spelled = [END_OF_TEXT in text for text in texts]
    assert len(texts) == 300 and 100 < sum(spelled) < 300
    for text, is_spelled in zip(texts, spelled, strict=True):
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, split_special_tokens=True) == ids
        # tokenizer.json alone; of gpt2 transformers reads the other files
        assert file.encode(text).tolist() == ids
        # Hugging Face reads the token where the text spells it
        assert (theirs.encode(text) == ids) != is_spelled
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (file.prefix, file.vocab_size) == (ours.prefix, ours.vocab_size)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (
        ours.vocab_size,
        ours.eot,
        ours.eot,
    )
    assert theirs.decode(range(128, 160)) == ours.decode(range(128, 160))  # bytes that are no text
    assert theirs.model_max_length == 24 and set(theirs("a")) == {
        "input_ids",
        "attention_mask",
    } == set(theirs.model_input_names)
    # Versions of transformers differ in what a tokenizer gives where its file does not say it.
    about = json.loads((folder / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "GPT2Tokenizer" or about["model_input_names"] == [
        "input_ids",
        "attention_mask",
    ]


BYTE_LEVEL_ROLES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("kind", ["sentencepiece", "byte level"])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", None]
)
def test_transformers_makes_the_ids_of_tokenizer_json_by_any_class(
    tmp_path: Path, kind: str, name: str | None
):
    """Documents that begin with blanks, runs of digits: where the rules of transformers' classes
    differ."""
    roles = {} if name is None else {"tokenizer_class": name}
    source = tmp_path / "tokenizer"
    if kind == "sentencepiece":
        write_sentencepiece(source, **roles)
    else:
        write_tokenizer(source, BYTE_LEVEL_ROLES | roles, pre_tokenizer=DIGITS_APART)
    write_run(tmp_path / "run", tokenizer=str(source))
    folder = exported(tmp_path / "run", tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(folder)
    reference = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    texts = [text for text in documents() if "<|" not in text]
    texts += [f" {text}" for text in texts] + ["1234 x56"]
    for text in texts:
        assert (
            theirs.encode(text, add_special_tokens=False)
            == reference.encode(text, add_special_tokens=False).ids
        )
        assert theirs.encode(text) == reference.encode(text).ids
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "adds", [{"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
@pytest.mark.parametrize("frame", [{}, {"post_processor": BEGINS}])
def test_tokenizer_json_decides_what_is_put_around_a_text(
    tmp_path: Path, adds: dict[str, bool], frame: dict[str, Any]
):
    write_tokenizer(tmp_path / "tokenizer", BYTE_LEVEL_ROLES | adds, **frame)
    write_run(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    folder = exported(tmp_path / "run", tmp_path / "hf")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(folder).encode("a word") == reference.encode("a word").ids


def test_an_export_is_of_the_newest_weights_in_bf16_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, earlier = write_run(run := tmp_path / "run", step=3, tied=False, seed=2)
    _, ours = write_run(run, tied=False)
    one = auto_model(exported(run, tmp_path / "one"))
    assert one.config.eos_token_id == one.config.bos_token_id == 256
    assert one.dtype == torch.bfloat16 and torch.equal(
        one.lm_head.weight, ours.head.weight.bfloat16()
    )
    old = load_file(exported(run, tmp_path / "old", "step=3", "dtype=fp32") / "model.safetensors")
    assert torch.equal(old["lm_head.weight"], earlier.head.weight)
    # the embedding takes 49,152, gate and up 12,288 each
    monkeypatch.setattr(hf_export, "FILE_BYTES", 60_000)
    (tmp_path / "many").mkdir()
    many = exported(run, tmp_path / "many")
    files, index = (
        sorted(many.glob("*.safetensors")),
        json.loads((many / "model.safetensors.index.json").read_text()),
    )
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)
    ]
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in ours.parameters())
    assert all(map(torch.equal, one.state_dict().values(), auto_model(many).state_dict().values()))


@torch.no_grad()
@pytest.mark.parametrize(
    "own, recipe, kept",
    [
        (
            FP8Config(recipe="tensorwise", skip=("layers.1.attn.out",)),
            "tensorwise",
            ["model.layers.1.self_attn.o_proj"],
        ),
        (FP8Config(), "rowwise", []),
        (FP8Config(recipe="rowwise_with_gw_hp", head=True), "rowwise_with_gw_hp", []),
    ],
)
def test_transformers_and_torchao_load_what_the_matmuls_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own, recipe, kept, emulated_scaled_mm: None
):
    """What the run kept in BF16 stays so, with the head, whatever the run did; a BF16 run gets the
    recipe's own choice."""
    monkeypatch.setattr(hf_export, "FILE_BYTES", 60_000 if recipe == "rowwise" else 10**9)
    head_size = 32 if recipe == "rowwise" else None  # twice its share of the width
    config, ours = write_run(
        tmp_path / "run", fp8=own, n_kv_head=2, tied=not own.head, head_size=head_size
    )
    folder = exported(tmp_path / "run", tmp_path / "f8", f"float8={recipe}")
    assert len(list(folder.glob("*.safetensors"))) == (3 if recipe == "rowwise" else 1)
    theirs, about = (
        auto_model(folder),
        json.loads((folder / "config.json").read_text())["quantization_config"],
    )
    assert about["modules_to_not_convert"] == ["lm_head", *kept]
    for fused, names in hf_weights.layout(config.model).items():
        weight, parts = (
            ours.get_parameter(fused),
            [theirs.get_parameter(name).data for name in names],
        )
        if (
            weight.ndim == 1
            or "layers." not in fused
            or next(iter(names)).removesuffix(".weight") in kept
        ):
            assert all(type(part) is torch.Tensor for part in parts) and torch.equal(
                torch.cat(parts), weight.bfloat16()
            )
            continue
        assert all(
            type(part) is Float8Tensor and part.qdata.dtype is torch.float8_e4m3fn for part in parts
        )
        # of the whole matrix by fp64 arithmetic
        values, scale = quantised(weight, OPERANDS[recipe][1], 1)
        assert torch.equal(
            torch.cat([part.qdata for part in parts]).float(), (values * scale).float()
        )
        assert torch.equal(
            torch.cat([part.scale.expand(len(part), 1) for part in parts]),
            scale.float().reciprocal().expand(len(values), 1),
        )

    # The matmuls run on this CPU too. Per tensor, activations are scaled as in the run; per row,
    # the run rounds scales to powers of two and torchao's inference does not, so that the two round
    # apart. From BF16 both are equally far.
    own, bf16 = (
        load_for_inference(str(tmp_path / "run"), "cpu", "bfloat16", name).model
        for name in (recipe, "off")
    )
    h = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.cat(
        [getattr(theirs.model.layers[0].self_attn, f"{name}_proj")(h) for name in "qkv"], -1
    )
    assert distance(y, own.layers[0].attn.qkv(h)) < (0.02 if recipe == "tensorwise" else 0.05)
    x = tokens(config.model, 4, 24)
    assert 0.5 < distance(theirs(x).logits, bf16(x)) / distance(own(x), bf16(x)) < 1.5


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("run", "folder is missing: give folder=VALUE"),
        ("run run", "is there already and not an empty folder"),
        (
            "run hf float8=mxfp8",
            "has no counterpart that torchao's inference loads: use one of tensorwise,",
        ),
        ("run hf float8=tensorwise", "cannot convert layers.*.mlp.gate_up of 64 x 72"),
        ("--from-hf run new license=mit", "there is no key 'license'; there are: from_hf, run"),
        ("--from-hf nowhere run", "run exists: choose another"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    told: str,
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", n_ffn=36)
    before = sorted(tmp_path.rglob("*"))
    assert (
        told in refused(capsys, export, *arguments.split(" "))
        and sorted(tmp_path.rglob("*")) == before
    )


def test_an_export_that_fails_leaves_no_half_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path / "run")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "run/config.json/hf")]) == 1
    assert "run/config.json" in capsys.readouterr().err
    code = (
        "import os, signal, sys; sys.modules['transformers'] = None\n"
        "from eval import export; from eval.hf import files\n"
        # all is written, nothing renamed
        "files.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(export.main(sys.argv[1:]))"
    )
    done = process("-c", code, tmp_path / "run", tmp_path / "hf")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "hf").exists() and (tmp_path / ".tmp_hf/README.md").is_file()
    exported(tmp_path / "run", tmp_path / "hf")  # what was left is in nobody's way


def test_a_second_process_does_not_clear_the_folder_of_the_first(tmp_path: Path):
    with hf_files.new_folder(tmp_path / "hf") as part:
        (part / "config.json").touch()
        second = threading.Thread(
            target=hf_files.new_folder(tmp_path / "hf").__enter__, daemon=True
        )
        second.start()
        second.join(0.5)
        assert second.is_alive() and (part / "config.json").exists()


def card_of(run: Path, *arguments: object):
    """The model card of an export: its text, and what the Hub reads of it."""
    folder = exported(run, run.with_name(f"hf{len(list(run.parent.iterdir()))}"), *arguments)
    return (text := (folder / "README.md").read_text(encoding="utf-8")), ModelCard(text).data


def test_the_card_says_what_the_runs_files_say_of_these_weights(tmp_path: Path):
    run, commit, scores = (
        tmp_path / "run",
        "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        {"acc": 0.75, "acc_se": 0.0137},
    )
    write_run(run, data_dir=tmp_path / "data", fp8=FP8Config(recipe="tensorwise"))
    for source, index in (
        (
            "web",
            {"dataset": "HuggingFaceFW/fineweb-edu", "revision": commit, "license": "ODC-By 1.0"},
        ),
        ("code", {"dataset": "local: a/b.jsonl", "revision": "-", "license": "x, y"}),
    ):
        edit(tmp_path / "data" / source / "index.json", **index)
    edit(run / "summary.json", steps=6, loss_as_trained=3.2104, loss_bf16=3.2011)
    record = {
        "tasks": {"sciq": scores | {"docs_sha256": "x"}},
        "limit": None,
        "fp8": "off",
        "run": "run",
        "dtype": "bfloat16",
    }
    for name, change in (
        ("new", {}),
        ("part", {"limit": 5}),
        ("other", {"step": 3}),
        ("f8", {"fp8": "rowwise"}),
    ):
        edit(run / "eval" / f"{name}.json", **record | {"step": 6} | change)
    text, head = card_of(run, "license=apache-2.0")
    assert (head.license, head.library_name, head.pipeline_tag) == (
        "apache-2.0",
        "transformers",
        "text-generation",
    )
    assert head.datasets == ["HuggingFaceFW/fineweb-edu"] and head.tags == ["nanofp8", "fp8"]
    assert f"| HuggingFaceFW/fineweb-edu | {commit} | ODC-By 1.0 |" in text and "lr 0.01, " in text
    assert "trained with nanoFP8 from scratch, 6 of 6 steps of 384 tokens" in text
    assert (
        "Precision of the matmuls: FP8 tensorwise." in text
        and "3.2104 as trained, 3.2011 in BF16" in text
    )
    assert (
        "The licence above" in text
        and text.count("75.0 ± 1.4") == 2
        and "| run, FP8 inference (rowwise) |" in text
    )
    edit(run / "summary.json", steps=12)  # of other weights
    assert "3.2011" not in (text := card_of(run)[0]) and str(tmp_path) not in text


@pytest.mark.parametrize(
    "state, start_from, told",
    [
        ({"imported": {"folder": "a"}}, None, "imported into nanoFP8 from a and not trained there"),
        (
            {"origin": {"folder": "Base-1B"}},
            "out/base/checkpoints/step_00000000",
            "from the weights of Base-1B, 6 of 6 steps",
        ),
        (
            {},
            "out/trunk/checkpoints/step_00000004",
            "from the weights of trunk at step 4, 6 of 6 steps",
        ),
        (
            {"switched_from": "rowwise"},
            None,
            "Precision of the matmuls: BF16, before the branch point FP8 rowwise.",
        ),
    ],
)
def test_the_card_says_where_the_weights_come_from_and_what_is_not_known(
    tmp_path: Path, state: dict[str, Any], start_from: str | None, told: str
):
    write_run(tmp_path / "run", data_dir=tmp_path / "data", state=state, start_from=start_from)
    text, head = card_of(tmp_path / "run")
    assert (
        told in text
        and "come without a licence" in text
        and head.tags == ["nanofp8", *["fp8"] * ("switched_from" in state)]
    )
    assert ("| web    | 75.0% | not known | not known | not known |" in text) is (
        "imported" not in state
    )


# ------------------------------------------------------------------------------------------ import

# Sizes and position encoding as the published files state them; of a Llama that says no more all
# else has its own default.
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
LLAMA_31_8B = SIZES | {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
OURS_31_8B = replace(LLAMA_8B.model, n_ctx=131072, loss_chunk=None)
QWEN3 = SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_configurations_are_read_as_they_are_meant():
    assert gpt_config(LLAMA_31_8B) == OURS_31_8B and OURS_31_8B.params_total == 8_030_261_248
    least, qwen = gpt_config(SIZES), gpt_config(QWEN3)
    assert (least.rope_theta, least.rope_factor, least.kv_heads, least.norm_eps, least.tied) == (
        1e4,
        None,
        32,
        1e-6,
        False,
    )
    # transformers 5 reads one
    for gone in ({}, {"rope_theta": None, "rope_scaling": None}, {"rope_parameters": None}):
        assert gpt_config(hf_config.hf_config(OURS_31_8B, "bfloat16") | gone) == OURS_31_8B
    assert qwen.qk_norm and qwen.rope_theta == 1e6 and qwen.params_total == 8_190_735_360
    # its own default
    assert gpt_config({key: QWEN3[key] for key in QWEN3.keys() - {"head_dim"}}).head_dim == 128
    assert qwen.head_size is None, (
        "the equal share is no size of its own: an import of before is the same model"
    )
    # padded by no row that it does not have
    assert gpt_config({**LLAMA_31_8B, "vocab_size": 32001}).vocab_padded == 32001


def sizes_of(
    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, **more: object
):
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        **more,
    }


MISTRAL = SIZES | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    "raw, params_total",
    [
        # Qwen3-0.6B: heads twice their share
        (QWEN3 | sizes_of(1024, 3072, 28, 16, tie_word_embeddings=True), 596_049_920),
        (QWEN3 | sizes_of(2560, 9728, 36, 32, tie_word_embeddings=True), 4_022_468_096),  # Qwen3-4B
        (
            QWEN3 | sizes_of(5120, 25600, 64, 64, tie_word_embeddings=False),
            32_762_123_264,
        ),  # Qwen3-32B
        (
            MISTRAL | sizes_of(4096, 14336, 32, 32, vocab_size=32768),
            7_248_023_552,
        ),  # Mistral-7B-v0.3
        # Mistral-Nemo: heads under their share
        (MISTRAL | sizes_of(5120, 14336, 40, 32, vocab_size=131072), 12_247_782_400),
    ],
)
def test_models_with_heads_of_their_own_width_have_the_published_sizes(
    raw: dict[str, Any], params_total: int
):
    config = gpt_config(raw)
    assert (config.params_total, config.head_dim) == (params_total, 128)
    assert gpt_config(hf_config.hf_config(config, "bfloat16")) == config


@pytest.mark.parametrize(
    "window, n_ctx, is_felt", [(4096, 32768, True), (4096, 4096, False), (4096, 2048, False)]
)
def test_a_window_that_no_text_reaches_is_none(window: int, n_ctx: int, is_felt: bool):
    changes = {"sliding_window": window, "max_position_embeddings": n_ctx}
    for raw in (MISTRAL | changes, QWEN3 | changes | {"use_sliding_window": True}):
        with (
            pytest.raises(UserError, match=f"max_position_embeddings={window} fits too")
            if is_felt
            else nullcontext()
        ):
            assert gpt_config(raw).n_ctx == n_ctx
    # MistralConfig's default is 4096
    told = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="sliding_window=4096 where"):
        gpt_config(told)
    assert (
        gpt_config(QWEN3 | changes | {"use_sliding_window": True, "max_window_layers": 36}).n_layer
        == 36
    ), "in no layer"


@pytest.mark.parametrize(
    "base, change, words",
    [
        *(
            (LLAMA_31_8B, {key: value}, f"{key}={value!r}")
            for key, value in {
                "architectures": ["MixtralForCausalLM"],
                "attention_bias": True,
                "mlp_bias": True,
                "hidden_act": "gelu",
                "head_dim": 65,
                "pretraining_tp": 2,
                "sliding_window": 4096,
                "layer_types": ["sliding_attention"],
                "partial_rotary_factor": 0.5,
                "quantization_config": {"quant_method": "fp8"},
                "auto_map": {"x": "y"},
            }.items()
        ),
        (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"full_attention": {"rope_type": "llama3"}}},
            "rope_keys=['full_attention']",
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor=None",
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"type": None}},
            "rope_type=None where what fits is default or llama3",
        ),
        (LLAMA_31_8B, {"architectures": ["Qwen2ForCausalLM"]}, "biases"),
        (
            LLAMA_31_8B,
            {"architectures": ["LlamaForCausalLM", "X"]},
            "only LlamaForCausalLM, MistralForCausalLM",
        ),
        (LLAMA_31_8B, {"architectures": None, "model_type": "gpt2"}, "model_type='gpt2'"),
        (
            LLAMA_31_8B,
            {"model_type": "gemma"},
            "model_type='gemma' but architectures=['LlamaForCausalLM'], whose model_type",
        ),
        (QWEN3, {"head_dim": None}, "head_dim=None"),
        (
            QWEN3,
            {"layer_types": ["full_attention"]},
            "layer_types of 1 layers where what fits is num_hidden_layers=36",
        ),
        (LLAMA_31_8B, {"hidden_size": None}, "lacks hidden_size"),
        (LLAMA_31_8B, {"num_key_value_heads": 7}, "not divisible"),
        (LLAMA_31_8B, {"num_attention_heads": 0}, "lacks num_attention_heads"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
    ],
)
def test_what_cannot_be_held_exactly_is_refused_in_a_sentence(
    base: dict[str, Any], change: dict[str, Any], words: str
):
    with pytest.raises(UserError, match=rf"^config.json .*{re.escape(words)}.*$"):
        gpt_config(base | change)


# Every attribute of transformers' four configurations: read (a field of HFConfig), a role of
# tokens, which the tokenizer's part keeps, or without effect on logits and gradients, with the
# reason.
WITHOUT_EFFECT = {
    "initializer_range": "of new weights alone",
    "use_cache": "of speed alone",
    "dtype": "the files' own counts",
    "transformers_version": "a remark",
    "output_hidden_states": "of what is returned beside the logits",
    "return_dict": "of the form of what is returned",
    "chunk_size_feed_forward": "these classes do not read it",
    "is_encoder_decoder": "these classes do not read it",
    "id2label": "of classifiers",
    "label2id": "of classifiers",
    "problem_type": "of classifiers",
}
TOKEN_ROLES = {"pad_token_id", "bos_token_id", "eos_token_id"}
READ_FIRST = {"architectures"}  # and model_type, which is the class's own


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"])
def test_every_attribute_of_transformers_configs_is_read_or_without_effect(
    name: str,
):
    attributes = {f.name for f in fields(getattr(transformers, name))}
    known = (
        {f.name for f in fields(hf_config.HFConfig)}
        | WITHOUT_EFFECT.keys()
        | TOKEN_ROLES
        | READ_FIRST
    )
    assert attributes - known == set()


# Values that a config.json may have, as JSON reads them; None in place of a change takes the key
# away.
VALUES = {
    "hidden_act": ["gelu", "swish", None, 5],
    "rms_norm_eps": [1e-3, "1e-3", None, 0.0],
    "head_dim": [32, 6, 7, None, 0, "16", 16.0],
    "num_key_value_heads": [1, 4, 3, None, "2", [2]],
    "num_attention_heads": [2, 3, 0, "4", [4], None],
    "hidden_size": [48, "64", None, 64.0],
    "num_hidden_layers": [1, "2", None],
    "vocab_size": [128, "96"],
    "tie_word_embeddings": [True, None, "false", 1],
    "attention_bias": [True, None, "no"],
    "mlp_bias": [True, None],
    "pretraining_tp": [2, 1],
    "is_causal": [False, True],
    "layer_types": [
        ["full_attention"] * 2,
        ["attention"] * 2,
        ["full_attention"],
        ["sliding_attention"] * 2,
        3,
        "full_attention",
        [1, 2],
    ],
    "sliding_window": [4, 24, 25, 4096, None, "4"],
    "use_sliding_window": [True, False, "true"],
    "max_window_layers": [0, 1, 2, "1"],
    "partial_rotary_factor": [0.5, 1, 1.0],
    "attention_dropout": [0.5, "0.5"],
    "per_layer_config": [{"0": {"sliding_window": 4}}, {}],
    "rope_theta": [100.0, 1000, "10000", None, 0],
    "rope_scaling": [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default"},
        {"type": None},
        "yarn",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        [],
        {"rope_type": "mrope", "mrope_section": [1]},
    ],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope_theta": 50.0},
        {"rope_theta": "50"},
        {"rope_theta": None},
        {},
        7,
        {
            "rope_type": "llama3",
            "rope_theta": 50.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4},
        {"rope_type": "llama3", "factor": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": None, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "default", "rope_theta": 9.0}},
    ],
    "original_max_position_embeddings": [8, 12, "8"],
    "final_logit_softcapping": [30.0],
    "logit_scale": [0.1],
    "several keys": [
        {"use_sliding_window": True, "sliding_window": 4},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": 25, "max_window_layers": 0},
        {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": 7.0},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 7.0},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 100},
    ],
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 24,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}


def cases_of(key: str):
    """Configurations with each value of the key, and one without it."""
    base = dict(SMALL)
    if key == "several keys":
        return [base | changes for changes in VALUES[key]]
    if key.startswith("rope"):
        del base["rope_parameters"]
    without = {name: value for name, value in base.items() if name != key}
    return [*(base | {key: value} for value in VALUES[key]), without]


def their_model(architecture: str, raw):
    """The model that transformers builds of a config.json, with rough weights; None where it
    refuses the file."""
    try:
        config = transformers.CONFIG_MAPPING[MODEL_TYPES[architecture]].from_dict(raw)
        model = getattr(transformers, architecture)(config).eval()
        generator = torch.Generator().manual_seed(0)
        for name, p in model.named_parameters():
            p.data = torch.randn(p.shape, generator=generator) * 0.2 + ("norm" in name)
        with torch.no_grad():
            return model, model(tokens(TINY, 2, 24) % config.vocab_size).logits
    except Exception:
        # transformers refuses by errors of many classes, of which some come with the first pass
        return None


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_no_value_of_a_config_json_changes_the_computation_without_a_word(
    architecture: str, key: str
):
    """What is taken computes transformers' logits; all else, and all that transformers itself
    refuses, is refused."""
    taken = 0
    for raw in cases_of(key):
        raw = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], **raw}
        try:
            config = gpt_config(raw)
        except UserError as error:
            assert str(error).startswith("config.json ") and str(error).count("\n") == 0
            continue
        theirs = their_model(architecture, json.loads(json.dumps(raw)))
        assert theirs is not None, f"transformers refuses {raw}"
        model, logits = theirs
        weights = model.state_dict()
        ours = build(config, 0)
        ours.load_state_dict(
            dict(hf_weights.from_hf(config, weights, weights.__getitem__)), strict=False
        )
        with torch.no_grad():
            torch.testing.assert_close(
                ours(tokens(TINY, 2, 24) % config.vocab_size),
                logits,
                rtol=0,
                atol=1e-5,
                msg=str(raw),
            )
        taken += 1
    assert taken


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"model.layers.1.self_attn.q_proj.weight": None, "model.norm.weight": None},
            "q_proj.weight, model.norm.weight",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)},
            "model.layers.0.self_attn.q_proj.bias has no place",
        ),
        ({"model.norm.weight": torch.ones(49)}, "of (49,), but must be (48,)"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.float64)}, "is torch.float64 of"),
        (
            {"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)},
            "is torch.float8_e4m3fn of",
        ),
        ({"lm_head.weight": torch.ones(256, 48)}, "lm_head.weight is not the embedding"),
        ({}, None),
    ],
)
def test_an_import_is_exact_in_fp32_and_names_foreign_tensors(
    changes: dict[str, Any], words: str | None
):
    for dtype in (torch.bfloat16, torch.float16):
        ours = {name: p.detach().to(dtype) for name, p in build_rough(TINY).named_parameters()}
        known = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
            "lm_head.weight": ours["wte.weight"],
        }
        theirs = {
            name: t
            for name, t in (hf_weights.to_hf(TINY, ours) | known | changes).items()
            if t is not None
        }
        with (
            pytest.raises(UserError, match=rf"^.*{re.escape(words)}.*$") if words else nullcontext()
        ):
            found = dict(hf_weights.from_hf(TINY, theirs, theirs.__getitem__))
            assert found.keys() == ours.keys()
            assert all(
                found[k].dtype == torch.float32 and torch.equal(found[k], ours[k].float())
                for k in ours
            )


@pytest.mark.parametrize(
    "made",
    [
        {"max_position_embeddings": 5000},  # GQA, llama3 RoPE, untied, an odd vocabulary
        {
            "architecture": "Qwen3",
            "tie_word_embeddings": True,
            "vocab_size": 512,
            "shard_size": "100KB",
        },
        # in Qwen3-0.6B's ratio to the width
        {"architecture": "Qwen3", "tie_word_embeddings": True, "head_dim": 32},
        # in Qwen3-4B's and 32B's
        {"architecture": "Qwen3", "hidden_size": 80, "num_attention_heads": 8},
        {"head_dim": 32},
        {"architecture": "Mistral", "head_dim": 12, "sliding_window": None},
        {"architecture": "Mistral", "sliding_window": 65},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "num_key_value_heads": 4,
            "dtype": torch.float16,
        },
    ],
)
def test_logits_are_transformers_bit_for_bit_and_the_run_is_whole(
    made: dict[str, Any], tmp_path: Path
):
    real, source, run_dir = (
        make_llama(tmp_path / "hub", **made),
        tmp_path / "0a1b",
        tmp_path / "out/run",
    )
    # Links, as the Hub's own client keeps its downloads.
    shutil.copytree(real, source, copy_function=lambda path, link: os.symlink(path, link))
    assert import_checkpoint(str(source), str(run_dir)) == run_dir / "checkpoints/step_00000000"
    # In fp32 its weights move to aligned memory: a product with one row depends on that.
    (ours, _), theirs = load_model(run_dir, compute_dtype=torch.float32), auto_model(source).float()
    # far beyond the texts below
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(len(ours.cos))[None])
    assert torch.equal(ours.cos.repeat(1, 2), cos[0]) and torch.equal(ours.sin.repeat(1, 2), sin[0])
    for B, T in ((1, 1), (1, 2), (4, 1), (3, 64), (1, 63)):
        x = torch.randint(400, (B, T), generator=torch.Generator().manual_seed(T))
        with torch.no_grad():
            expected = theirs(x).logits
            assert torch.equal(ours(x), expected) and expected.std() > 0.5, (B, T)
    assert read_config(run_dir).data.tokenizer == str(run_dir / "tokenizer")
    for file in (run_dir / "tokenizer").iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()
    manifest = read_manifest(checkpoints(run_dir)[0])
    facts = manifest["state"]["imported"]
    assert (facts["folder"], facts["architecture"]) == (source.name, theirs.config.architectures[0])
    assert not any(path.is_symlink() for path in run_dir.rglob("*"))


@torch.no_grad()
@pytest.mark.parametrize(
    "named",
    [
        {"config.json": [1, 5]},
        {"generation_config.json": [5, 1]},
        {"generation_config.json": 5, "config.json": 7},
    ],
)
def test_every_end_of_a_text_is_kept_at_import_and_written_back_at_export(tmp_path: Path, named):
    """transformers' generate() stops where one of the ends comes out."""
    folder = make_llama(tmp_path / "hub")
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    for name, ends in named.items():
        edit(folder / name, eos_token_id=ends)
    import_checkpoint(str(folder), str(tmp_path / "out/run"))
    back = exported(tmp_path / "out/run", tmp_path / "back", "dtype=fp32")
    ends = load_for_inference(str(tmp_path / "out/run"), "cpu", "float32").tokenizer.ends
    model = auto_model(back)
    assert set(model.generation_config.eos_token_id) == set(ends)
    assert set(model.config.eos_token_id) == set(ends)
    assert set(ends) == {
        1,
        *(end for ids in named.values() for end in (ids if type(ids) is list else [ids])),
    }
    prompt = torch.tensor([[0, 9, 11]])
    for end in ends:
        # The head prefers one token alone, whatever the text.
        model.lm_head.weight.zero_()
        model.lm_head.register_forward_hook(
            lambda _, x, logits, end=end: logits.index_fill(-1, torch.tensor(end), 9.0)
        )
        assert model.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist() == [
            0,
            9,
            11,
            end,
        ]
        model.lm_head._forward_hooks.clear()


source = pytest.fixture(lambda tmp_path: make_llama(tmp_path / "source", shard_size="100KB"))
FIRST, SECOND = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda s: edit(s / "config.json", vocab_size=300), "its tokenizer has 326 ids"),
        (
            lambda s: (s / "config.json").write_text('{"architectures": ['),
            "its config.json cannot be read",
        ),
        (
            lambda s: [part.rename(part.with_suffix(".bin")) for part in s.glob("*.safetensors")],
            "pickles (.bin, .pth) can run code",
        ),
        (lambda s: (s / SECOND).unlink(), f"names {SECOND}, which the folder lacks"),
        (lambda s: os.truncate(s / FIRST, 5000), "no whole safetensors file"),
        (lambda s: (s / INDEX).unlink() or (s / SECOND).unlink(), "the files lack"),
        (
            lambda s: (s / INDEX).unlink() or shutil.copy(s / SECOND, s / "old.safetensors"),
            "keep those of one download",
        ),
        (
            lambda s: edit(s / "config.json", num_hidden_layers=10**9),
            "num_hidden_layers=1000000000, but the files hold 21 tensors",
        ),
        (lambda s: (s / INDEX).write_text("[1]"), "its model.safetensors.index.json holds list"),
        (
            lambda s: (s / INDEX).write_text('{"weight_map": 5}'),
            "has no weight_map of tensor names to file names",
        ),
        (
            lambda s: (s / INDEX).write_text('{"weight_map": {"x": "../x.safetensors"}}'),
            "lies outside",
        ),
        (
            lambda s: edit(s / "config.json", transformers_weights="x.safetensors"),
            "transformers_weights='x.safetensors'",
        ),
        (lambda s: (s / "adapter_config.json").write_text("{}"), "merge it first"),
        (
            lambda s: (s / "config.json").write_text("[1, 2]"),
            "its config.json holds list where an object",
        ),
        (lambda s: (s / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_a_damaged_or_unsafe_folder_is_refused_and_nothing_is_left(
    harm: Callable[..., Any], words: str, source, tmp_path: Path
):
    harm(source)
    with pytest.raises(UserError, match=rf"^.*{re.escape(words)}.*$"):
        import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert not list(tmp_path.glob("out/*"))


def weights_of(run: Path):
    return dict(load_model(run)[0].named_parameters())


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "adapter_model.safetensors", "model_old.safetensors"]
)
def test_a_stray_file_beside_an_index_is_left_out_and_named(
    name: str, source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import_checkpoint(str(source), str(tmp_path / "clean"))
    assert "left out" not in capsys.readouterr().out
    save_file({"model.norm.weight": torch.ones(64)}, source / name)
    import_checkpoint(str(source), str(tmp_path / "run"))
    assert f"left out {name}: {FIRST}" in capsys.readouterr().out
    clean, found = weights_of(tmp_path / "clean"), weights_of(tmp_path / "run")
    assert all(torch.equal(found[key], clean[key]) for key in clean)


@pytest.mark.parametrize(
    "key, name", [(None, "model.safetensors"), ("transformers_weights", "ours.safetensors")]
)
def test_a_single_file_counts_before_the_index_as_in_transformers(
    key: str | None, name: str, source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = make_llama(tmp_path / "other", tie_word_embeddings=True)
    shutil.copy(other / "model.safetensors", source / name)
    edit(source / "config.json", tie_word_embeddings=True, **({key: name} if key else {}))
    import_checkpoint(str(source), str(tmp_path / "run"))
    assert "left out model-00001-of-00003.safetensors" in capsys.readouterr().out
    with torch.no_grad():
        x, model = (
            torch.arange(9)[None],
            load_model(tmp_path / "run", compute_dtype=torch.float32)[0],
        )
        assert torch.equal(model(x), auto_model(source).float()(x).logits)


def test_an_imported_llama_learns_its_responses_and_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., str]
):
    # 128 channels of attention in a width of 64
    source = make_llama(tmp_path / "source", head_dim=32)
    monkeypatch.chdir(tmp_path)
    call(export, "--from-hf", source, "out/llama")
    Path("chat.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{i}: ", "response": f"say {i % 7} {i % 11}."}) + "\n"
            for i in range(300)
        )
    )
    call(
        prepare_data,
        "local",
        "chat.jsonl",
        "name=chat",
        "instruct=true",
        "tokenizer=out/llama/tokenizer",
        "out=data",
        "val_share=0.1",
        "processes=1",
    )
    config = changed(
        replace(LLAMA_8B, model=replace(read_config("out/llama").model, n_ctx=32, loss_chunk=48)),
        "steps=8 start_from=out/llama/checkpoints/step_00000000 data.tokenizer=out/llama/tokenizer"
        " data.tokens_per_step=512 data.micro_batch=8 data.max_epochs=9 optim.lr=5e-3"
        " parallel.shard=none parallel.compile=off eval.every=none eval.tokens=640"
        " checkpoint.every=none checkpoint.best=false",
    )
    with pytest.raises(UserError, match="model.head_size is 32 there, 16 here"):
        branch(replace(config, model=replace(config.model, head_size=None)), "0" * 64, {}, None)
    with pytest.raises(UserError, match="data.tokenizer is out/llama/tokenizer there, "):
        branch(config, ("0" * 64,), {}, None)
    data, theirs = (
        Data(config, load_tokenizer("out/llama/tokenizer").sha256),
        auto_model(source).float(),
    )
    x, y = (
        torch.cat(both)
        for both in zip(*(data.batch(0, micro, 0, 1) for micro in range(2)), strict=True)
    )
    assert (n := int((y >= 0).sum())) == data.targets(0) and 0.2 < n / 512 < 0.8
    # of the responses' tokens alone
    expected = F.cross_entropy(theirs(x).logits[y >= 0], y[y >= 0])
    expected.backward()
    expected_norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm().item()
    for recipe, rel in (("off", 0.02), ("tensorwise", 0.05)):
        arm = replace(config, run=f"arm_{recipe}", fp8=FP8Config(recipe=recipe))
        run(arm)
        first, *_, last = (
            row for row in read_rows(arm.run_dir / "metrics.jsonl") if row.get("kind") == "train"
        )
        # Against fp32 on weights that are large; with the prompts the mean would be another by far
        # more.
        assert first["loss"] == pytest.approx(expected.item(), rel=rel)
        assert (
            first["grad_norm"] == pytest.approx(expected_norm, rel=5 * rel)
            and last["loss"] < first["loss"] - 1.5
        )
        assert (arm.run_dir / "tokenizer/tokenizer.json").read_bytes() == (
            source / "tokenizer.json"
        ).read_bytes()
    call(export, config.run_dir.parent / "arm_tensorwise", "back", "dtype=fp32")
    ours, theirs = (
        load_model("out/arm_tensorwise", compute_dtype=torch.float32)[0],
        auto_model("back"),
    )
    with torch.no_grad():
        assert torch.equal(ours(x[:8]), theirs(x[:8]).logits)
