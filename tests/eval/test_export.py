"""eval/export.py: transformers computes the same logits bit by bit and makes the same tokens;
float8 weights; the card; a Llama that transformers made comes in bit for bit, learns, goes out
again; what is refused, by name."""

import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import prepare_data
import train
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
from model import GPT, GPTConfig
from runtime.checkpoint import branch, checkpoints, load_model, read_manifest
from runtime.config import Config, FP8Config, read_config
from runtime.data import Data
from runtime.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from tests.conftest import ROOT, changed, process, write_config
from tests.fp8.test_linears import OPERANDS, distance, quantised
from tests.helpers.eval_runs import call, generate, make_llama, refused, write_run
from tests.helpers.scaling_runs import edit
from tests.helpers.text_files import BEGINS, DIGITS_APART, write_sentencepiece, write_tokenizer
from tests.runtime.test_tokenizer import TEXTS
from tests.test_model import TINY, build, build_rough, tokens


def exported(run: Path, folder: Path, *arguments: object) -> Path:
    """`folder`, after exporting the run to it."""
    call(export, run, folder, *arguments)
    return folder


def auto_model(folder: Path) -> PreTrainedModel:
    """The model that transformers loads, all of whose tensors are in the files."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(run)
    return dict(model.named_parameters())


def line_with(words: str) -> str:
    """A pattern of one line that holds `words`."""
    return rf"^.*{re.escape(words)}.*$"


# ------------------------------------------------------------------------------- logits and texts

LLAMA3 = {"rope_theta": 500.0, "rope_factor": 8.0, "rope_original_ctx": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt2_gqa": {"tokenizer": "gpt2", "n_kv_head": 2},
    "untied_llama3": {"tied": False, "n_kv_head": 1, **LLAMA3},
    "qk_norm_gqa": {"qk_norm": True, "n_kv_head": 2},
    "untied_qk_norm_llama3": {"tied": False, "qk_norm": True, "norm_eps": 1e-3, **LLAMA3},
    "wide_heads": {"head_size": 32, "n_kv_head": 2, "qk_norm": True},
    "untied_wide_heads_llama3": {"head_size": 24, "tied": False, "n_kv_head": 1, **LLAMA3},
    # 64 channels that no 3 heads share: LlamaConfig refuses them, Mistral's does not
    "three_heads": {"head_size": 16, "n_head": 3},
}


@dataclass(frozen=True)
class Export:
    """A run of rough weights, its export in fp32, and the model of each."""

    run: Path
    folder: Path
    config: Config
    ours: GPT
    theirs: PreTrainedModel


@pytest.fixture(scope="module", params=VARIANTS)
def fp32_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    parent = tmp_path_factory.mktemp("fp32")
    config, ours = write_run(parent / "run", **VARIANTS[request.param])
    folder = exported(parent / "run", parent / "hf", "dtype=fp32")
    return Export(parent / "run", folder, config, ours, auto_model(folder))


@torch.no_grad()
def test_transformers_computes_the_same_bits(fp32_export: Export) -> None:
    for shape in (1, 1), (1, 2), (1, 7), (3, 24):
        x = tokens(fp32_export.config.model, *shape)
        assert torch.equal(fp32_export.theirs(x).logits, fp32_export.ours(x)), shape


@dataclass(frozen=True)
class GreedyTexts:
    """The tokens that each side adds to the same two prompts, (2, T)."""

    ours: torch.Tensor
    theirs: torch.Tensor


PROMPT_TOKENS = 5


@pytest.fixture(scope="module")
@torch.no_grad()
def greedy_texts(fp32_export: Export) -> GreedyTexts:
    """Up to the first end of text or until the context is full."""
    prompt = tokens(fp32_export.config.model, 2, PROMPT_TOKENS)
    eot = load_tokenizer(fp32_export.config.data.tokenizer).eot
    texts = fp32_export.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=eot,
    )
    ours = generate(fp32_export.ours, prompt, 99, ends=(eot,))
    return GreedyTexts(ours, texts[:, PROMPT_TOKENS:])


def test_greedy_texts_are_the_same_token_by_token(greedy_texts: GreedyTexts) -> None:
    assert torch.equal(greedy_texts.theirs, greedy_texts.ours)


def test_greedy_texts_depend_on_the_prompt(greedy_texts: GreedyTexts) -> None:
    assert not torch.equal(*greedy_texts.theirs)


def test_a_text_goes_one_token_beyond_the_context(greedy_texts: GreedyTexts) -> None:
    """The last token needs no place."""
    assert PROMPT_TOKENS + greedy_texts.theirs.size(1) == 24 + 1


@torch.no_grad()
@pytest.mark.parametrize("fp32_export", ["plain"], indirect=True)
def test_rows_that_pad_the_vocabulary_never_come_out(
    fp32_export: Export, greedy_texts: GreedyTexts
) -> None:
    """Though they are as likely as any row of the rough model."""
    x = tokens(fp32_export.config.model, 16, 24)
    is_padding = fp32_export.ours(x).argmax(-1) >= 257
    assert is_padding.float().mean() > 0.1
    assert greedy_texts.theirs.max() < 257


@dataclass(frozen=True)
class RoundTrip:
    """An export that was imported as a run, and the export of that run."""

    run: Path
    folder: Path


@pytest.fixture(scope="module")
def round_trip(fp32_export: Export, tmp_path_factory: pytest.TempPathFactory) -> RoundTrip:
    parent = tmp_path_factory.mktemp("round_trip")
    import_checkpoint(str(fp32_export.folder), str(parent / "run"))
    return RoundTrip(parent / "run", exported(parent / "run", parent / "again", "dtype=fp32"))


def test_an_export_is_imported_with_the_same_weights(
    fp32_export: Export, round_trip: RoundTrip
) -> None:
    weights = weights_of(round_trip.run)
    expected = weights_of(fp32_export.run)
    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def test_the_second_export_has_the_bytes_of_the_first(
    fp32_export: Export, round_trip: RoundTrip
) -> None:
    for file in fp32_export.folder.iterdir():
        if file.name not in ("tokenizer_config.json", "README.md"):
            assert (round_trip.folder / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_second_export_leaves_all_rules_to_tokenizer_json(
    fp32_export: Export, round_trip: RoundTrip
) -> None:
    """By the name of the class alone."""
    first = json.loads((fp32_export.folder / "tokenizer_config.json").read_text())
    second = json.loads((round_trip.folder / "tokenizer_config.json").read_text())
    assert second == first | {"tokenizer_class": "PreTrainedTokenizerFast"}


# -------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """300 of code, prose, all scripts, emoji, white space, line ends, numbers, control characters,
    special tokens' spelling."""
    rng = random.Random(0)
    lines = []
    for name in "README.md", "model.py":
        lines += (ROOT / name).read_text().splitlines()
    blanks = [" ", "  ", "\n", "\t", "\r\n", "\u3000", "", "\n\n\n", " \t\r\x0b\u00a0\u2003 "]
    characters = [chr(code) for code in (*range(0xD800), *range(0x1F000, 0x1FB00))]
    kinds = (lines, blanks, TEXTS[:11], characters)

    def document() -> str:
        text = ""
        for _ in range(rng.randrange(60)):
            text += rng.choice(rng.choice(kinds)) + rng.choice(blanks)
        return text

    return [*TEXTS, *(document() for _ in range(300 - len(TEXTS)))]


@dataclass(frozen=True)
class TokenizerExport:
    """A built-in tokenizer, its export, and the tokenizers that are loaded from there."""

    folder: Path
    ours: Tokenizer
    from_file: Tokenizer  # ours again, by the export's tokenizer.json alone
    theirs: PreTrainedTokenizerBase  # of gpt2 transformers reads the other files
    ids: list[list[int]]  # of each of the documents, by the built-in tokenizer


@pytest.fixture(scope="module", params=["gpt2", "byte"])
def tokenizer_export(
    request: pytest.FixtureRequest,
    documents: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> TokenizerExport:
    parent = tmp_path_factory.mktemp("tokenizer")
    write_run(parent / "run", tokenizer=request.param)
    folder = exported(parent / "run", parent / "hf")
    ours = load_tokenizer(request.param)
    return TokenizerExport(
        folder=folder,
        ours=ours,
        from_file=load_tokenizer(str(folder)),
        theirs=AutoTokenizer.from_pretrained(folder),
        ids=[ours.encode(text).tolist() for text in documents],
    )


def test_of_the_300_documents_many_spell_the_end_of_text(documents: list[str]) -> None:
    spelling = [text for text in documents if END_OF_TEXT in text]
    assert len(documents) == 300
    assert 100 < len(spelling) < 300


def test_transformers_makes_the_same_ids(
    tokenizer_export: TokenizerExport, documents: list[str]
) -> None:
    for text, ids in zip(documents, tokenizer_export.ids, strict=True):
        assert tokenizer_export.theirs.encode(text, split_special_tokens=True) == ids


def test_tokenizer_json_alone_makes_the_same_ids(
    tokenizer_export: TokenizerExport, documents: list[str]
) -> None:
    for text, ids in zip(documents, tokenizer_export.ids, strict=True):
        assert tokenizer_export.from_file.encode(text).tolist() == ids


def test_transformers_reads_a_special_token_where_the_text_spells_it(
    tokenizer_export: TokenizerExport, documents: list[str]
) -> None:
    """And nowhere else."""
    for text, ids in zip(documents, tokenizer_export.ids, strict=True):
        their_ids = tokenizer_export.theirs.encode(text)
        if END_OF_TEXT in text:
            assert their_ids != ids, text
        else:
            assert their_ids == ids, text


def test_both_decode_the_ids_to_the_text(
    tokenizer_export: TokenizerExport, documents: list[str]
) -> None:
    for text, ids in zip(documents, tokenizer_export.ids, strict=True):
        assert tokenizer_export.theirs.decode(ids) == text
        assert tokenizer_export.ours.decode(ids) == text


def test_both_decode_bytes_that_are_no_text_alike(tokenizer_export: TokenizerExport) -> None:
    ids = range(128, 160)
    assert tokenizer_export.theirs.decode(ids) == tokenizer_export.ours.decode(ids)


def test_tokenizer_json_has_the_prefix_and_the_vocabulary_of_the_built_in(
    tokenizer_export: TokenizerExport,
) -> None:
    assert tokenizer_export.from_file.prefix == tokenizer_export.ours.prefix
    assert tokenizer_export.from_file.vocab_size == tokenizer_export.ours.vocab_size


def test_transformers_has_the_vocabulary_and_its_end_of_text(
    tokenizer_export: TokenizerExport,
) -> None:
    assert len(tokenizer_export.theirs) == tokenizer_export.ours.vocab_size
    assert tokenizer_export.theirs.eos_token_id == tokenizer_export.ours.eot
    assert tokenizer_export.theirs.bos_token_id == tokenizer_export.ours.eot


def test_the_tokenizer_has_the_context_of_the_model(tokenizer_export: TokenizerExport) -> None:
    assert tokenizer_export.theirs.model_max_length == 24


def test_the_tokenizer_gives_the_inputs_of_the_model(tokenizer_export: TokenizerExport) -> None:
    inputs = {"input_ids", "attention_mask"}
    assert set(tokenizer_export.theirs("a")) == inputs
    assert set(tokenizer_export.theirs.model_input_names) == inputs


# What tells transformers the inputs: the class of gpt2, the file of byte.
TELLS_INPUTS: dict[str, dict[str, Any]] = {
    "gpt2": {"tokenizer_class": "GPT2Tokenizer"},
    "byte": {"model_input_names": ["input_ids", "attention_mask"]},
}


def test_the_tokenizers_class_or_its_file_tells_the_inputs(
    tokenizer_export: TokenizerExport,
) -> None:
    """Versions of transformers differ in what a tokenizer gives where neither does."""
    settings = json.loads((tokenizer_export.folder / "tokenizer_config.json").read_text())
    assert settings == settings | TELLS_INPUTS[tokenizer_export.ours.name]


BYTE_LEVEL_ROLES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
KINDS = ["sentencepiece", "byte level"]
CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", None]
FOREIGN = {f"{kind}, {name}": (kind, name) for kind, name in itertools.product(KINDS, CLASSES)}


@dataclass(frozen=True)
class ForeignTokenizer:
    """A tokenizer that is a folder, and the export of a run with it."""

    source: Path
    folder: Path
    theirs: PreTrainedTokenizerBase  # of the export
    reference: tokenizers.Tokenizer  # of the source's tokenizer.json


@pytest.fixture(scope="module", params=FOREIGN)
def foreign_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ForeignTokenizer:
    """Of each kind, with each class named in tokenizer_config.json, or none."""
    kind, name = FOREIGN[request.param]
    parent = tmp_path_factory.mktemp("foreign")
    roles = {} if name is None else {"tokenizer_class": name}
    source = parent / "tokenizer"
    if kind == "sentencepiece":
        write_sentencepiece(source, **roles)
    else:
        write_tokenizer(source, BYTE_LEVEL_ROLES | roles, pre_tokenizer=DIGITS_APART)
    write_run(parent / "run", tokenizer=str(source))
    folder = exported(parent / "run", parent / "hf")
    return ForeignTokenizer(
        source=source,
        folder=folder,
        theirs=AutoTokenizer.from_pretrained(folder),
        reference=tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")),
    )


@pytest.fixture(scope="module")
def texts(documents: list[str]) -> list[str]:
    """Documents that begin with blanks, runs of digits: where the rules of transformers' classes
    differ."""
    unmarked = [text for text in documents if "<|" not in text]
    indented = [f" {text}" for text in unmarked]
    return [*unmarked, *indented, "1234 x56"]


def test_transformers_makes_the_ids_of_tokenizer_json_by_any_class(
    foreign_tokenizer: ForeignTokenizer, texts: list[str]
) -> None:
    for text in texts:
        ids = foreign_tokenizer.theirs.encode(text, add_special_tokens=False)
        expected = foreign_tokenizer.reference.encode(text, add_special_tokens=False)
        assert ids == expected.ids


def test_transformers_adds_special_tokens_of_tokenizer_json_by_any_class(
    foreign_tokenizer: ForeignTokenizer, texts: list[str]
) -> None:
    for text in texts:
        ids = foreign_tokenizer.theirs.encode(text)
        assert ids == foreign_tokenizer.reference.encode(text).ids


def test_tokenizer_json_is_copied_byte_by_byte(foreign_tokenizer: ForeignTokenizer) -> None:
    source = foreign_tokenizer.source / "tokenizer.json"
    assert (foreign_tokenizer.folder / "tokenizer.json").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "adds", [{"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
@pytest.mark.parametrize("frame", [{}, {"post_processor": BEGINS}])
def test_tokenizer_json_decides_what_is_put_around_a_text(
    tmp_path: Path, adds: dict[str, bool], frame: dict[str, Any]
) -> None:
    write_tokenizer(tmp_path / "tokenizer", BYTE_LEVEL_ROLES | adds, **frame)
    write_run(tmp_path / "run", tokenizer=str(tmp_path / "tokenizer"))
    folder = exported(tmp_path / "run", tmp_path / "hf")
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert AutoTokenizer.from_pretrained(folder).encode("a word") == reference.encode("a word").ids


# ------------------------------------------------------------------------------- weights and files


@dataclass(frozen=True)
class TwoCheckpoints:
    run: Path
    step_3: GPT
    step_6: GPT


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> TwoCheckpoints:
    run = tmp_path_factory.mktemp("two_checkpoints") / "run"
    _, step_3 = write_run(run, step=3, tied=False, seed=2)
    _, step_6 = write_run(run, tied=False)
    return TwoCheckpoints(run, step_3, step_6)


@pytest.fixture(scope="module")
def from_one_file(two_checkpoints: TwoCheckpoints) -> PreTrainedModel:
    """The model of an export with no options."""
    return auto_model(exported(two_checkpoints.run, two_checkpoints.run.with_name("one")))


@pytest.fixture(scope="module")
def several_files(two_checkpoints: TwoCheckpoints) -> Path:
    """An export of the same weights in several files."""
    with pytest.MonkeyPatch.context() as patch:
        # the embedding takes 49,152, gate and up 12,288 each
        patch.setattr(hf_export, "FILE_BYTES", 60_000)
        return exported(two_checkpoints.run, two_checkpoints.run.with_name("many"))


def test_an_export_is_in_bf16(from_one_file: PreTrainedModel) -> None:
    assert from_one_file.dtype == torch.bfloat16


def test_an_export_is_of_the_newest_weights(
    two_checkpoints: TwoCheckpoints, from_one_file: PreTrainedModel
) -> None:
    expected = two_checkpoints.step_6.head.weight.bfloat16()
    assert torch.equal(from_one_file.lm_head.weight, expected)


def test_an_export_of_a_step_is_of_its_weights(
    two_checkpoints: TwoCheckpoints, tmp_path: Path
) -> None:
    folder = exported(two_checkpoints.run, tmp_path / "hf", "step=3", "dtype=fp32")
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], two_checkpoints.step_3.head.weight)


def test_config_json_names_the_end_of_text(from_one_file: PreTrainedModel) -> None:
    assert from_one_file.config.eos_token_id == 256
    assert from_one_file.config.bos_token_id == 256


def test_weights_beyond_the_limit_lie_in_several_files(several_files: Path) -> None:
    names = sorted(file.name for file in several_files.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]


def test_the_index_has_the_bytes_of_all_files(
    two_checkpoints: TwoCheckpoints, several_files: Path
) -> None:
    index = json.loads((several_files / "model.safetensors.index.json").read_text())
    n_params = sum(p.numel() for p in two_checkpoints.step_6.parameters())
    assert index["metadata"]["total_size"] == 2 * n_params


def test_several_files_hold_the_weights_of_one(
    from_one_file: PreTrainedModel, several_files: Path
) -> None:
    weights = auto_model(several_files).state_dict()
    expected = from_one_file.state_dict()
    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def test_an_export_may_fill_an_empty_folder(
    two_checkpoints: TwoCheckpoints, tmp_path: Path
) -> None:
    folder = exported(two_checkpoints.run, tmp_path)
    assert (folder / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------ float8


@dataclass(frozen=True)
class Float8Case:
    fp8: FP8Config  # of the run
    recipe: str  # of the export
    # Linears that stay in BF16 beside the head, by transformers' names
    kept: tuple[str, ...] = ()
    head_size: int | None = None
    file_bytes: int = 10**9  # at most, of a file of weights
    n_files: int = 1


# What the run kept in BF16 stays so, with the head, whatever the run did; a BF16 run gets the
# recipe's own choice.
FLOAT8_CASES = {
    "tensorwise": Float8Case(
        FP8Config(recipe="tensorwise", skip=("layers.1.attn.out",)),
        "tensorwise",
        kept=("model.layers.1.self_attn.o_proj",),
    ),
    "rowwise": Float8Case(
        FP8Config(),
        "rowwise",
        head_size=32,  # twice its share of the width
        file_bytes=60_000,
        n_files=3,
    ),
    "rowwise_with_gw_hp": Float8Case(
        FP8Config(recipe="rowwise_with_gw_hp", head=True), "rowwise_with_gw_hp"
    ),
}


@dataclass(frozen=True)
class Float8Export:
    """A run, its export in float8, and the model of each."""

    case: Float8Case
    run: Path
    folder: Path
    config: Config
    ours: GPT
    theirs: PreTrainedModel

    def weights(self, in_float8: bool) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Our weights that the export holds in float8, or all others; each with the tensors there
        that lie in it, one below the other."""
        chosen = []
        for name, parts in hf_weights.layout(self.config.model).items():
            weight = self.ours.get_parameter(name)
            linear = next(iter(parts)).removesuffix(".weight")
            is_matrix_of_block = weight.ndim == 2 and "layers." in name
            if in_float8 == (is_matrix_of_block and linear not in self.case.kept):
                tensors = [self.theirs.get_parameter(part).data for part in parts]
                chosen.append((weight, tensors))
        return chosen

    def inference(self, recipe: str) -> GPT:
        """Our model of the run for inference by a recipe."""
        return load_for_inference(str(self.run), "cpu", "bfloat16", recipe).model


@pytest.fixture(scope="module", params=FLOAT8_CASES)
def float8_export(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Float8Export:
    case = FLOAT8_CASES[request.param]
    parent = tmp_path_factory.mktemp("float8")
    config, ours = write_run(
        parent / "run",
        fp8=case.fp8,
        n_kv_head=2,
        tied=not case.fp8.head,
        head_size=case.head_size,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_export, "FILE_BYTES", case.file_bytes)
        folder = exported(parent / "run", parent / "f8", f"float8={case.recipe}")
    return Float8Export(case, parent / "run", folder, config, ours, auto_model(folder))


def test_float8_weights_may_lie_in_several_files(float8_export: Float8Export) -> None:
    files = list(float8_export.folder.glob("*.safetensors"))
    assert len(files) == float8_export.case.n_files


def test_config_json_names_the_linears_that_are_not_in_float8(
    float8_export: Float8Export,
) -> None:
    content = json.loads((float8_export.folder / "config.json").read_text())
    kept = content["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", *float8_export.case.kept]


def test_weights_that_are_not_in_float8_are_those_of_the_run_in_bf16(
    float8_export: Float8Export,
) -> None:
    for weight, tensors in float8_export.weights(in_float8=False):
        for tensor in tensors:
            assert type(tensor) is torch.Tensor
        assert torch.equal(torch.cat(tensors), weight.bfloat16())


def test_all_other_linears_of_the_blocks_are_torchaos_float8(
    float8_export: Float8Export,
) -> None:
    weights = float8_export.weights(in_float8=True)
    assert len(weights) == 2 * 4 - len(float8_export.case.kept)  # 2 blocks of 4 Linears
    for _, tensors in weights:
        for tensor in tensors:
            assert type(tensor) is Float8Tensor
            assert tensor.qdata.dtype is torch.float8_e4m3fn


def test_float8_values_are_what_the_matmuls_saw(float8_export: Float8Export) -> None:
    """Of the whole matrix by fp64 arithmetic."""
    for weight, tensors in float8_export.weights(in_float8=True):
        values, scale = quantised(weight, OPERANDS[float8_export.case.recipe][1], 1)
        qdata = torch.cat([tensor.qdata for tensor in tensors])
        assert torch.equal(qdata.float(), (values * scale).float())


def test_float8_scales_are_what_the_matmuls_saw(float8_export: Float8Export) -> None:
    for weight, tensors in float8_export.weights(in_float8=True):
        values, scale = quantised(weight, OPERANDS[float8_export.case.recipe][1], 1)
        scales = torch.cat([tensor.scale.expand(len(tensor), 1) for tensor in tensors])
        assert torch.equal(scales, scale.float().reciprocal().expand(len(values), 1))


@torch.no_grad()
def test_a_float8_matmul_is_near_the_runs(
    float8_export: Float8Export, emulated_scaled_mm: None
) -> None:
    """Per tensor, activations are scaled as in the run; per row, the run rounds scales to powers of
    two and torchao's inference does not, so that the two round apart."""
    recipe = float8_export.case.recipe
    h = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    attention = float8_export.theirs.model.layers[0].self_attn
    theirs = torch.cat([attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)], -1)
    ours = float8_export.inference(recipe).layers[0].attn.qkv(h)
    assert distance(theirs, ours) < (0.02 if recipe == "tensorwise" else 0.05)


@torch.no_grad()
def test_float8_logits_are_as_far_from_bf16_as_the_runs(
    float8_export: Float8Export, emulated_scaled_mm: None
) -> None:
    x = tokens(float8_export.config.model, 4, 24)
    bf16 = float8_export.inference("off")(x)
    ours = distance(float8_export.inference(float8_export.case.recipe)(x), bf16)
    theirs = distance(float8_export.theirs(x).logits, bf16)
    assert 0.5 < theirs / ours < 1.5


# ----------------------------------------------------------------------- mistakes and interruptions


@pytest.mark.parametrize(
    "arguments, words",
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
def test_mistakes_get_a_sentence_and_change_no_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", n_ffn=36)
    before = sorted(tmp_path.rglob("*"))
    assert words in refused(capsys, export, *arguments.split(" "))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_with_an_unknown_key_is_refused_and_no_file_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hf_config, "KNOWN_KEYS", hf_config.KNOWN_KEYS - {"n_ffn"})
    write_run(tmp_path / "run", n_ffn=36)
    assert "model.n_ffn=36" in refused(capsys, export, f"{tmp_path}/run", f"{tmp_path}/hf")
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "run/config.json/hf")]) == 1
    assert "run/config.json" in capsys.readouterr().err


@pytest.fixture(scope="module")
def killed_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and what its export to hf has left, killed when all was written and
    nothing renamed; the process had no transformers."""
    parent = tmp_path_factory.mktemp("killed")
    write_run(parent / "run")
    code = (
        "import os, signal, sys; sys.modules['transformers'] = None\n"
        "from eval import export; from eval.hf import files\n"
        "files.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(export.main(sys.argv[1:]))"
    )
    done = process("-c", code, parent / "run", parent / "hf")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return parent


def test_an_export_that_is_killed_leaves_no_half_folder(killed_export: Path) -> None:
    assert not (killed_export / "hf").exists()
    assert (killed_export / ".tmp_hf/README.md").is_file()


def test_what_a_killed_export_left_is_in_nobodys_way(killed_export: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(killed_export, tmp_path / "copy")
    exported(parent / "run", parent / "hf")
    assert (parent / "hf/README.md").is_file()


def test_a_second_process_does_not_clear_the_folder_of_the_first(tmp_path: Path) -> None:
    with hf_files.new_folder(tmp_path / "hf") as part:
        (part / "config.json").touch()
        second = threading.Thread(
            target=hf_files.new_folder(tmp_path / "hf").__enter__, daemon=True
        )
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert (part / "config.json").exists()


# -------------------------------------------------------------------------------------------- card


@dataclass(frozen=True)
class Card:
    """The model card of an export: its text, and what the Hub reads of it."""

    text: str
    head: ModelCardData


def card_of(run: Path, *arguments: object) -> Card:
    """The card of an export beside the run."""
    path = exported(run, run.with_name("hf"), *arguments) / "README.md"
    text = path.read_text(encoding="utf-8")
    return Card(text, ModelCard(text).data)


COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sources, losses and scores are known; in the folder of its data."""
    parent = tmp_path_factory.mktemp("scored")
    run = parent / "run"
    write_run(run, data_dir=str(parent / "data"), fp8=FP8Config(recipe="tensorwise"))
    edit(
        parent / "data/web/index.json",
        dataset="HuggingFaceFW/fineweb-edu",
        revision=COMMIT,
        license="ODC-By 1.0",
    )
    edit(
        parent / "data/code/index.json",
        dataset="local: a/b.jsonl",
        revision="-",
        license="x, y",
    )
    edit(run / "summary.json", steps=6, loss_as_trained=3.210404837533, loss_bf16=3.201068538511)
    record = {
        "tasks": {"sciq": {"acc": 0.75, "acc_se": 0.0137, "docs_sha256": "x"}},
        "limit": None,
        "fp8": "off",
        "run": "run",
        "dtype": "bfloat16",
        "step": 6,
    }
    edit(run / "eval/new.json", **record)
    edit(run / "eval/part.json", **record | {"limit": 5})
    edit(run / "eval/other.json", **record | {"step": 3})
    edit(run / "eval/f8.json", **record | {"fp8": "rowwise"})
    return run


@pytest.fixture(scope="module")
def card(scored_run: Path) -> Card:
    return card_of(scored_run, "license=apache-2.0")


@pytest.fixture(scope="module")
def card_beside_other_losses(scored_run: Path) -> Card:
    """The card of the same run where its summary.json is of other weights."""
    run = shutil.copytree(scored_run, scored_run.with_name("copy") / "run")
    edit(run / "summary.json", steps=12)
    return card_of(run)


def test_the_hub_reads_licence_library_and_task(card: Card) -> None:
    assert card.head.license == "apache-2.0"
    assert card.head.library_name == "transformers"
    assert card.head.pipeline_tag == "text-generation"


def test_the_hub_reads_data_sets_that_it_has(card: Card) -> None:
    assert card.head.datasets == ["HuggingFaceFW/fineweb-edu"]


def test_the_hub_reads_that_the_run_was_in_fp8(card: Card) -> None:
    assert card.head.tags == ["nanofp8", "fp8"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"| HuggingFaceFW/fineweb-edu | {COMMIT} | ODC-By 1.0 |", id="data"),
        pytest.param("lr 0.01, ", id="optimizer"),
        pytest.param(
            "trained with nanoFP8 from scratch, 6 of 6 steps of 384 tokens", id="training"
        ),
        pytest.param("Precision of the matmuls: FP8 tensorwise.", id="precision"),
        pytest.param("3.2104 as trained, 3.2011 in BF16", id="losses"),
        pytest.param("| run, FP8 inference (rowwise) |", id="scores in fp8"),
        pytest.param("The licence above", id="licence"),
    ],
)
def test_the_card_says_what_the_runs_files_say_of_these_weights(card: Card, words: str) -> None:
    assert words in card.text


def test_the_card_has_the_scores_of_these_weights_on_whole_tasks_alone(card: Card) -> None:
    """In BF16 and in FP8."""
    assert card.text.count("75.0 ± 1.4") == 2


def test_the_card_leaves_out_the_losses_of_other_weights(card_beside_other_losses: Card) -> None:
    assert "3.2011" not in card_beside_other_losses.text


def test_the_card_has_no_path_of_this_machine(
    card: Card, card_beside_other_losses: Card, scored_run: Path
) -> None:
    assert str(scored_run.parent) not in card.text
    assert str(scored_run.parent) not in card_beside_other_losses.text


@dataclass(frozen=True)
class Origin:
    """What weights come from, and what their card says of it."""

    words: str
    state: dict[str, Any]
    start_from: str | None = None
    tags: tuple[str, ...] = ("nanofp8",)
    has_data: bool = True


ORIGINS = {
    "imported": Origin(
        "imported into nanoFP8 from a and not trained there",
        state={"imported": {"folder": "a"}},
        has_data=False,
    ),
    "from imported weights": Origin(
        "from the weights of Base-1B, 6 of 6 steps",
        state={"origin": {"folder": "Base-1B"}},
        start_from="out/base/checkpoints/step_00000000",
    ),
    "from a trunk": Origin(
        "from the weights of trunk at step 4, 6 of 6 steps",
        state={},
        start_from="out/trunk/checkpoints/step_00000004",
    ),
    "from a trunk in fp8": Origin(
        "Precision of the matmuls: BF16, before the branch point FP8 rowwise.",
        state={"switched_from": "rowwise"},
        tags=("nanofp8", "fp8"),
    ),
}


@pytest.fixture(scope="module", params=ORIGINS)
def origin_and_card(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Origin, Card]:
    origin = ORIGINS[request.param]
    parent = tmp_path_factory.mktemp("origin")
    write_run(
        parent / "run",
        data_dir=str(parent / "data"),
        state=origin.state,
        start_from=origin.start_from,
    )
    return origin, card_of(parent / "run")


def test_the_card_says_where_the_weights_come_from(origin_and_card: tuple[Origin, Card]) -> None:
    origin, card = origin_and_card
    assert origin.words in card.text


def test_the_card_says_that_no_licence_was_given(origin_and_card: tuple[Origin, Card]) -> None:
    _, card = origin_and_card
    assert "come without a licence" in card.text


def test_weights_that_were_in_fp8_at_any_time_are_tagged(
    origin_and_card: tuple[Origin, Card],
) -> None:
    origin, card = origin_and_card
    assert card.head.tags == list(origin.tags)


def test_the_card_lists_the_data_that_weights_were_trained_on_here(
    origin_and_card: tuple[Origin, Card],
) -> None:
    origin, card = origin_and_card
    row = "| web    | 75.0% | not known | not known | not known |"
    assert (row in card.text) is origin.has_data


# ------------------------------------------------------------------------- import of a config.json

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


@dataclass(frozen=True, kw_only=True)
class VariantConfig(GPTConfig):
    """model.py with a key that no class of transformers has."""

    parallel_blocks: bool = False


def test_a_key_that_transformers_lacks_is_refused_where_it_is_set():
    """Without its own refusal a variant was exported as a Llama, which computes something else."""
    variant = VariantConfig(**asdict(OURS_31_8B), parallel_blocks=True)
    with pytest.raises(UserError, match="model.parallel_blocks=true"):
        hf_config.check_keys(variant)


def test_a_key_that_transformers_lacks_is_no_hindrance_at_its_default():
    hf_config.check_keys(VariantConfig(**asdict(OURS_31_8B)))


def test_llama_31_8b_is_read_as_it_is_meant() -> None:
    assert gpt_config(LLAMA_31_8B) == OURS_31_8B


def test_llama_31_8b_has_the_published_size() -> None:
    assert OURS_31_8B.params_total == 8_030_261_248


def test_what_a_llama_does_not_state_is_transformers_default() -> None:
    config = gpt_config(SIZES)
    assert config.rope_theta == 1e4
    assert config.rope_factor is None
    assert config.kv_heads == 32
    assert config.norm_eps == 1e-6
    assert config.tied is False


@pytest.mark.parametrize(
    "absent",
    [
        pytest.param({}, id="both forms"),
        pytest.param({"rope_theta": None, "rope_scaling": None}, id="transformers 5"),
        pytest.param({"rope_parameters": None}, id="transformers 4"),
    ],
)
def test_our_config_json_is_read_by_either_form_of_rope(absent: dict[str, None]) -> None:
    assert gpt_config(hf_config.hf_config(OURS_31_8B, "bfloat16") | absent) == OURS_31_8B


def test_qwen3_8b_is_read_as_it_is_meant() -> None:
    config = gpt_config(QWEN3)
    assert config.qk_norm
    assert config.rope_theta == 1e6
    assert config.params_total == 8_190_735_360


def test_qwen3s_heads_have_128_channels_where_it_states_none() -> None:
    stated = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert gpt_config(stated).head_dim == 128


def test_heads_of_the_equal_share_have_no_size_of_their_own() -> None:
    """An import of before is the same model."""
    assert gpt_config(QWEN3).head_size is None


def test_an_imported_vocabulary_is_padded_by_no_row() -> None:
    assert gpt_config(LLAMA_31_8B | {"vocab_size": 32001}).vocab_padded == 32001


def sizes_of(width: int, ffn_width: int, layers: int, heads: int, **more: object) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": ffn_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
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
QWEN3_06B = QWEN3 | sizes_of(1024, 3072, 28, 16, tie_word_embeddings=True)
QWEN3_4B = QWEN3 | sizes_of(2560, 9728, 36, 32, tie_word_embeddings=True)
QWEN3_32B = QWEN3 | sizes_of(5120, 25600, 64, 64, tie_word_embeddings=False)
MISTRAL_7B = MISTRAL | sizes_of(4096, 14336, 32, 32, vocab_size=32768)
MISTRAL_NEMO = MISTRAL | sizes_of(5120, 14336, 40, 32, vocab_size=131072)
PUBLISHED = [
    pytest.param(QWEN3_06B, 596_049_920, id="Qwen3-0.6B"),  # heads twice their share
    pytest.param(QWEN3_4B, 4_022_468_096, id="Qwen3-4B"),
    pytest.param(QWEN3_32B, 32_762_123_264, id="Qwen3-32B"),
    pytest.param(MISTRAL_7B, 7_248_023_552, id="Mistral-7B-v0.3"),
    pytest.param(MISTRAL_NEMO, 12_247_782_400, id="Mistral-Nemo"),  # heads under their share
]


@pytest.mark.parametrize("raw, params_total", PUBLISHED)
def test_models_with_heads_of_their_own_width_have_the_published_sizes(
    raw: dict[str, Any], params_total: int
) -> None:
    config = gpt_config(raw)
    assert config.params_total == params_total
    assert config.head_dim == 128


@pytest.mark.parametrize("raw, params_total", PUBLISHED)
def test_models_with_heads_of_their_own_width_are_written_and_read_back(
    raw: dict[str, Any], params_total: int
) -> None:
    config = gpt_config(raw)
    assert gpt_config(hf_config.hf_config(config, "bfloat16")) == config


def windowed(architecture: str, n_ctx: int) -> dict[str, Any]:
    """A config.json with a window of 4,096 tokens."""
    changes = {"sliding_window": 4096, "max_position_embeddings": n_ctx}
    if architecture == "Mistral":
        return MISTRAL | changes
    return QWEN3 | changes | {"use_sliding_window": True}


@pytest.mark.parametrize("architecture", ["Mistral", "Qwen3"])
@pytest.mark.parametrize("n_ctx", [4096, 2048])
def test_a_window_that_no_text_reaches_is_none(architecture: str, n_ctx: int) -> None:
    assert gpt_config(windowed(architecture, n_ctx)).n_ctx == n_ctx


@pytest.mark.parametrize("architecture", ["Mistral", "Qwen3"])
def test_a_window_that_texts_reach_is_refused_with_the_context_that_fits(
    architecture: str,
) -> None:
    with pytest.raises(UserError, match="max_position_embeddings=4096 fits too"):
        gpt_config(windowed(architecture, 32768))


def test_a_mistral_that_states_no_window_has_transformers_default() -> None:
    stated = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="sliding_window=4096 where"):
        gpt_config(stated)


@pytest.mark.parametrize("n_ctx", [32768, 4096, 2048])
def test_a_window_in_no_layer_is_none(n_ctx: int) -> None:
    assert gpt_config(windowed("Qwen3", n_ctx) | {"max_window_layers": 36}).n_layer == 36


def assert_refused(raw: dict[str, Any], words: str) -> None:
    """gpt_config() refuses it in one line that names the file and holds `words`."""
    with pytest.raises(UserError, match=rf"^config.json .*{re.escape(words)}.*$"):
        gpt_config(raw)


@pytest.mark.parametrize(
    "key, value",
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("head_dim", 65),
        ("pretraining_tp", 2),
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("auto_map", {"x": "y"}),
    ],
)
def test_a_value_that_cannot_be_held_exactly_is_refused_with_its_key(
    key: str, value: object
) -> None:
    assert_refused(LLAMA_31_8B | {key: value}, f"{key}={value!r}")


@pytest.mark.parametrize(
    "base, change, words",
    [
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
) -> None:
    assert_refused(base | change, words)


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
def test_every_attribute_of_transformers_configs_is_read_or_without_effect(name: str) -> None:
    attributes = {field.name for field in fields(getattr(transformers, name))}
    read = {field.name for field in fields(hf_config.HFConfig)} | TOKEN_ROLES | READ_FIRST
    assert attributes - read - WITHOUT_EFFECT.keys() == set()


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


def cases_of(architecture: str, key: str) -> list[dict[str, Any]]:
    """Configurations with each value of the key, and one without it."""
    base = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture], **SMALL}
    if key == "several keys":
        return [base | changes for changes in VALUES[key]]
    if key.startswith("rope"):
        del base["rope_parameters"]
    without = {name: value for name, value in base.items() if name != key}
    return [*(base | {key: value} for value in VALUES[key]), without]


def refusal_of(raw: dict[str, Any]) -> str | None:
    """What gpt_config() says where it refuses a config.json."""
    try:
        gpt_config(raw)
    except UserError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class TheirModel:
    """The model that transformers builds of a config.json, with rough weights."""

    weights: dict[str, torch.Tensor]
    logits: torch.Tensor


def their_model(architecture: str, raw: dict[str, Any]) -> TheirModel | None:
    """None where transformers refuses the file."""
    try:
        config = transformers.CONFIG_MAPPING[MODEL_TYPES[architecture]].from_dict(raw)
        model = getattr(transformers, architecture)(config).eval()
        generator = torch.Generator().manual_seed(0)
        for name, p in model.named_parameters():
            p.data = torch.randn(p.shape, generator=generator) * 0.2 + ("norm" in name)
        with torch.no_grad():
            logits = model(tokens(TINY, 2, 24) % config.vocab_size).logits
    except Exception:
        # transformers refuses by errors of many classes, of which some come with the first pass
        return None
    return TheirModel(model.state_dict(), logits)


def our_logits(config: GPTConfig, their_weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model = build(config, 0)
    weights = hf_weights.from_hf(config, their_weights, their_weights.__getitem__)
    model.load_state_dict(dict(weights), strict=False)
    with torch.no_grad():
        return model(tokens(TINY, 2, 24) % config.vocab_size)


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_a_config_json_that_is_refused_gets_one_line(architecture: str, key: str) -> None:
    for raw in cases_of(architecture, key):
        refusal = refusal_of(raw)
        if refusal is not None:
            assert refusal.startswith("config.json ")
            assert refusal.count("\n") == 0


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_no_value_of_a_config_json_changes_the_computation_without_a_word(
    architecture: str, key: str
) -> None:
    """What is taken computes transformers' logits; all else, and all that transformers itself
    refuses, is refused."""
    taken = [raw for raw in cases_of(architecture, key) if refusal_of(raw) is None]
    assert taken
    for raw in taken:
        theirs = their_model(architecture, json.loads(json.dumps(raw)))
        assert theirs is not None, f"transformers refuses {raw}"
        ours = our_logits(gpt_config(raw), theirs.weights)
        torch.testing.assert_close(ours, theirs.logits, rtol=0, atol=1e-5, msg=str(raw))


# ------------------------------------------------------------------------------ import of a folder


def named_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Ours in a file's dtype, by our names."""
    return {name: p.detach().to(dtype) for name, p in build_rough(TINY).named_parameters()}


def hf_tensors(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in Hugging Face's form, with tensors that older files have beside them."""
    known = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
        "lm_head.weight": ours["wte.weight"],
    }
    return hf_weights.to_hf(TINY, ours) | known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_import_is_exact_in_fp32(dtype: torch.dtype) -> None:
    ours = named_weights(dtype)
    theirs = hf_tensors(ours)
    imported = dict(hf_weights.from_hf(TINY, theirs, theirs.__getitem__))
    assert imported.keys() == ours.keys()
    for name in ours:
        assert imported[name].dtype == torch.float32
        assert torch.equal(imported[name], ours[name].float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
    ],
)
def test_an_import_names_tensors_that_do_not_fit(
    changes: dict[str, torch.Tensor | None], words: str, dtype: torch.dtype
) -> None:
    tensors = hf_tensors(named_weights(dtype)) | changes
    theirs = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(UserError, match=line_with(words)):
        dict(hf_weights.from_hf(TINY, theirs, theirs.__getitem__))


MADE: dict[str, dict[str, Any]] = {
    # GQA, llama3 RoPE, untied, an odd vocabulary
    "Llama": {"max_position_embeddings": 5000},
    "Qwen3 in several files": {
        "architecture": "Qwen3",
        "tie_word_embeddings": True,
        "vocab_size": 512,
        "shard_size": "100KB",
    },
    # in Qwen3-0.6B's ratio to the width
    "Qwen3 with wide heads": {
        "architecture": "Qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
    },
    # in Qwen3-4B's and 32B's
    "Qwen3 of more heads": {"architecture": "Qwen3", "hidden_size": 80, "num_attention_heads": 8},
    "Llama with wide heads": {"head_dim": 32},
    "Mistral with narrow heads": {
        "architecture": "Mistral",
        "head_dim": 12,
        "sliding_window": None,
    },
    "Mistral with a window": {"architecture": "Mistral", "sliding_window": 65},
    "Llama in fp16": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "num_key_value_heads": 4,
        "dtype": torch.float16,
    },
}


@dataclass(frozen=True)
class Import:
    """A folder that transformers made, imported as a run, and the model of each in fp32."""

    source: Path
    run: Path
    checkpoint: Path  # as import_checkpoint() names it
    ours: GPT
    theirs: PreTrainedModel


@pytest.fixture(scope="module", params=MADE)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Import:
    parent = tmp_path_factory.mktemp("imported")
    real, source, run = parent / "hub", parent / "0a1b", parent / "out/run"
    make_llama(real, **MADE[request.param])
    # Links, as the Hub's own client keeps its downloads.
    shutil.copytree(real, source, copy_function=os.symlink)
    checkpoint = import_checkpoint(str(source), str(run))
    ours, _ = load_model(run, compute_dtype=torch.float32)
    # In fp32 its weights move to aligned memory: a product with one row depends on that.
    return Import(source, run, checkpoint, ours, auto_model(source).float())


def test_an_import_is_step_0_of_a_run(imported: Import) -> None:
    assert imported.checkpoint == imported.run / "checkpoints/step_00000000"


@torch.no_grad()
def test_imported_logits_are_transformers_bit_for_bit(imported: Import) -> None:
    for B, T in (1, 1), (1, 2), (4, 1), (3, 64), (1, 63):
        x = torch.randint(400, (B, T), generator=torch.Generator().manual_seed(T))
        expected = imported.theirs(x).logits
        assert torch.equal(imported.ours(x), expected), (B, T)
        assert expected.std() > 0.5, (B, T)  # weights that all matter


def test_rope_is_transformers_bit_for_bit_up_to_the_end_of_the_context(imported: Import) -> None:
    """Far beyond the texts of the other tests."""
    positions = torch.arange(len(imported.ours.cos))[None]
    cos, sin = imported.theirs.model.rotary_emb(torch.zeros(1), positions)
    assert torch.equal(imported.ours.cos.repeat(1, 2), cos[0])
    assert torch.equal(imported.ours.sin.repeat(1, 2), sin[0])


def test_an_imported_run_has_the_tokenizer_as_its_own(imported: Import) -> None:
    assert read_config(imported.run).data.tokenizer == str(imported.run / "tokenizer")


def test_an_imported_tokenizer_has_the_sources_bytes(imported: Import) -> None:
    for file in (imported.run / "tokenizer").iterdir():
        assert file.read_bytes() == (imported.source / file.name).read_bytes(), file.name


def test_an_imported_run_says_what_it_was_made_of(imported: Import) -> None:
    facts = read_manifest(checkpoints(imported.run)[0])["state"]["imported"]
    assert facts["folder"] == imported.source.name
    assert facts["architecture"] == imported.theirs.config.architectures[0]


def test_an_imported_run_has_no_links(imported: Import) -> None:
    links = [path for path in imported.run.rglob("*") if path.is_symlink()]
    assert not links


# File -> the ends of a text that it names; and all ends, with the 1 of the tokenizer.
NAMED_ENDS: list[tuple[dict[str, Any], set[int]]] = [
    ({"config.json": [1, 5]}, {1, 5}),
    ({"generation_config.json": [5, 1]}, {1, 5}),
    ({"generation_config.json": 5, "config.json": 7}, {1, 5, 7}),
]


@dataclass(frozen=True)
class Ends:
    """An imported run whose texts have several ends, exported again."""

    expected: set[int]
    run: Path
    theirs: PreTrainedModel  # of the export


@pytest.fixture(scope="module", params=NAMED_ENDS, ids=["config", "generation_config", "both"])
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    named, expected = request.param
    parent = tmp_path_factory.mktemp("ends")
    folder = make_llama(parent / "hub")
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    for name, ids in named.items():
        edit(folder / name, eos_token_id=ids)
    run = parent / "out/run"
    import_checkpoint(str(folder), str(run))
    return Ends(expected, run, auto_model(exported(run, parent / "back", "dtype=fp32")))


def test_every_end_of_a_text_is_kept_at_import(ends: Ends) -> None:
    tokenizer = load_for_inference(str(ends.run), "cpu", "float32").tokenizer
    assert set(tokenizer.ends) == ends.expected


def test_every_end_of_a_text_is_written_back_at_export(ends: Ends) -> None:
    assert set(ends.theirs.generation_config.eos_token_id) == ends.expected
    assert set(ends.theirs.config.eos_token_id) == ends.expected


def preferring(token: int) -> Callable[..., torch.Tensor]:
    """A hook by which the head prefers one token alone, whatever the text."""

    def change(_: torch.nn.Module, x: tuple[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill(-1, torch.tensor(token), 9.0)

    return change


@torch.no_grad()
def test_transformers_ends_a_text_at_each_of_its_ends(ends: Ends) -> None:
    prompt = torch.tensor([[0, 9, 11]])
    for end in ends.expected:
        hook = ends.theirs.lm_head.register_forward_hook(preferring(end))
        text = ends.theirs.generate(prompt, do_sample=False, max_new_tokens=12)
        hook.remove()
        assert text[0].tolist() == [0, 9, 11, end]


# --------------------------------------------------------------- folders that are damaged or unsafe


@pytest.fixture(scope="module")
def sharded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in three files; no test may change it."""
    return make_llama(tmp_path_factory.mktemp("sharded") / "source", shard_size="100KB")


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in one file, with other tensors; no test may change it."""
    return make_llama(tmp_path_factory.mktemp("tied") / "source", tie_word_embeddings=True)


@pytest.fixture
def source(sharded_llama: Path, tmp_path: Path) -> Path:
    """A copy of sharded_llama for a test to change."""
    return shutil.copytree(sharded_llama, tmp_path / "source")


FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def pickle_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))


def remove_second_and_index(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / INDEX).unlink()


def copy_second_and_remove_index(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / "old.safetensors")
    (folder / INDEX).unlink()


@pytest.mark.parametrize(
    "harm, words",
    [
        (
            lambda folder: edit(folder / "config.json", vocab_size=300),
            "its tokenizer has 326 ids",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ['),
            "its config.json cannot be read",
        ),
        (pickle_weights, "pickles (.bin, .pth) can run code"),
        (
            lambda folder: (folder / SECOND).unlink(),
            f"names {SECOND}, which the folder lacks",
        ),
        (lambda folder: os.truncate(folder / FIRST, 5000), "no whole safetensors file"),
        (remove_second_and_index, "the files lack"),
        (copy_second_and_remove_index, "keep those of one download"),
        (
            lambda folder: edit(folder / "config.json", num_hidden_layers=10**9),
            "num_hidden_layers=1000000000, but the files hold 21 tensors",
        ),
        (
            lambda folder: (folder / INDEX).write_text("[1]"),
            "its model.safetensors.index.json holds list",
        ),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": 5}'),
            "has no weight_map of tensor names to file names",
        ),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"x": "../x.safetensors"}}'),
            "lies outside",
        ),
        (
            lambda folder: edit(folder / "config.json", transformers_weights="x.safetensors"),
            "transformers_weights='x.safetensors'",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "merge it first",
        ),
        (
            lambda folder: (folder / "config.json").write_text("[1, 2]"),
            "its config.json holds list where an object",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_a_damaged_or_unsafe_folder_is_refused_and_nothing_is_left(
    harm: Callable[[Path], object], words: str, source: Path, tmp_path: Path
) -> None:
    harm(source)
    with pytest.raises(UserError, match=line_with(words)):
        import_checkpoint(str(source), str(tmp_path / "out/run"))
    assert not list(tmp_path.glob("out/*"))


def test_no_file_of_a_whole_folder_is_left_out(
    sharded_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_checkpoint(str(sharded_llama), str(tmp_path / "run"))
    assert "left out" not in capsys.readouterr().out


STRAY_FILES = ["consolidated.safetensors", "adapter_model.safetensors", "model_old.safetensors"]


@pytest.mark.parametrize("name", STRAY_FILES)
def test_a_stray_file_beside_an_index_is_left_out_and_named(
    name: str,
    source: Path,
    sharded_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, source / name)
    import_checkpoint(str(source), str(tmp_path / "run"))
    assert f"left out {name}: {FIRST}" in capsys.readouterr().out
    import_checkpoint(str(sharded_llama), str(tmp_path / "clean"))
    weights = weights_of(tmp_path / "run")
    expected = weights_of(tmp_path / "clean")
    for key in expected:
        assert torch.equal(weights[key], expected[key]), key


@pytest.fixture(
    params=[(None, "model.safetensors"), ("transformers_weights", "ours.safetensors")],
    ids=["by its name", "by config.json"],
)
def single_file_source(request: pytest.FixtureRequest, source: Path, tied_llama: Path) -> Path:
    """A folder with an index and, of other weights, one file that counts before it."""
    key, name = request.param
    shutil.copy(tied_llama / "model.safetensors", source / name)
    edit(source / "config.json", tie_word_embeddings=True)
    if key is not None:
        edit(source / "config.json", **{key: name})
    return source


def test_the_files_of_an_index_that_does_not_count_are_named(
    single_file_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_checkpoint(str(single_file_source), str(tmp_path / "run"))
    assert f"left out {FIRST}" in capsys.readouterr().out


@torch.no_grad()
def test_a_single_file_counts_before_the_index_as_in_transformers(
    single_file_source: Path, tmp_path: Path
) -> None:
    import_checkpoint(str(single_file_source), str(tmp_path / "run"))
    ours, _ = load_model(tmp_path / "run", compute_dtype=torch.float32)
    x = torch.arange(9)[None]
    assert torch.equal(ours(x), auto_model(single_file_source).float()(x).logits)


# -------------------------------------------------- an imported Llama learns and goes out again


@dataclass(frozen=True)
class Chat:
    """An imported Llama and the chat that it is to learn, both in a folder that is the working
    directory of all commands."""

    folder: Path
    source: Path  # the Llama as transformers made it
    config: Config  # of 8 steps on the chat from the imported weights
    x: torch.Tensor  # (B, T), of the first step
    y: torch.Tensor
    n_targets: int  # of the first step as Data counts them


def write_chat(path: Path) -> None:
    with open(path, "w") as file:
        for i in range(300):
            row = {"prompt": f"{i}: ", "response": f"say {i % 7} {i % 11}."}
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("chat")
    # 128 channels of attention in a width of 64
    source = make_llama(folder / "source", head_dim=32)
    write_chat(folder / "chat.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call(export, "--from-hf", source, "out/llama")
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
        model = replace(read_config("out/llama").model, n_ctx=32, loss_chunk=48)
        config = changed(
            replace(LLAMA_8B, model=model),
            "steps=8 start_from=out/llama/checkpoints/step_00000000"
            " data.tokenizer=out/llama/tokenizer"
            " data.tokens_per_step=512 data.micro_batch=8 data.max_epochs=9 optim.lr=5e-3"
            " parallel.shard=none parallel.compile=off eval.every=none eval.tokens=640"
            " checkpoint.every=none checkpoint.best=false",
        )
        data = Data(config, load_tokenizer("out/llama/tokenizer").sha256)
        x_first, y_first = data.batch(0, 0, 0, 1)
        x_second, y_second = data.batch(0, 1, 0, 1)
        return Chat(
            folder=folder,
            source=source,
            config=config,
            x=torch.cat([x_first, x_second]),
            y=torch.cat([y_first, y_second]),
            n_targets=data.targets(0),
        )


@dataclass(frozen=True)
class Arm:
    """The run of one recipe on the chat."""

    run: Path
    first: dict[str, Any]  # row of metrics.jsonl
    last: dict[str, Any]


def train_arm(config: Config) -> Arm:
    """Train in the working directory."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        code = train.main([str(write_config(config, Path(f"{config.run}.py")))])
    assert code == 0, stderr.getvalue()
    assert stderr.getvalue() == ""
    rows = read_rows(config.run_dir / "metrics.jsonl")
    steps = [row for row in rows if row.get("kind") == "train"]
    return Arm(config.run_dir.absolute(), steps[0], steps[-1])


@pytest.fixture(scope="module")
def arms(chat: Chat) -> dict[str, Arm]:
    arms = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(chat.folder)
        for recipe in "off", "tensorwise":
            config = replace(chat.config, run=f"arm_{recipe}", fp8=FP8Config(recipe=recipe))
            arms[recipe] = train_arm(config)
    return arms


@dataclass(frozen=True)
class FirstStep:
    """What transformers computes of the first step."""

    loss: float
    grad_norm: float


@pytest.fixture(scope="module")
def expected_step(chat: Chat) -> FirstStep:
    """Of the responses' tokens alone."""
    theirs = auto_model(chat.source).float()
    is_target = chat.y >= 0
    loss = F.cross_entropy(theirs(chat.x).logits[is_target], chat.y[is_target])
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in theirs.parameters()])
    return FirstStep(loss.item(), grads.norm().item())


def test_a_branch_with_heads_of_another_size_is_refused(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chat.folder)
    config = replace(chat.config, model=replace(chat.config.model, head_size=None))
    with pytest.raises(UserError, match="model.head_size is 32 there, 16 here"):
        branch(config, "0" * 64, {}, None)


def test_a_branch_with_another_tokenizer_is_refused(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chat.folder)
    with pytest.raises(UserError, match="data.tokenizer is out/llama/tokenizer there, "):
        branch(chat.config, ("0" * 64,), {}, None)


def test_the_targets_are_a_part_of_the_tokens_and_counted(chat: Chat) -> None:
    n_targets = int((chat.y >= 0).sum())
    assert n_targets == chat.n_targets
    assert 0.2 < n_targets / 512 < 0.8


# Against fp32 on weights that are large; with the prompts the mean would be another by far more.
RECIPE_TOLERANCES = [("off", 0.02), ("tensorwise", 0.05)]


@pytest.mark.parametrize("recipe, rel", RECIPE_TOLERANCES)
def test_the_first_loss_is_transformers(
    arms: dict[str, Arm], expected_step: FirstStep, recipe: str, rel: float
) -> None:
    assert arms[recipe].first["loss"] == pytest.approx(expected_step.loss, rel=rel)


@pytest.mark.parametrize("recipe, rel", RECIPE_TOLERANCES)
def test_the_first_grad_norm_is_transformers(
    arms: dict[str, Arm], expected_step: FirstStep, recipe: str, rel: float
) -> None:
    grad_norm = arms[recipe].first["grad_norm"]
    assert grad_norm == pytest.approx(expected_step.grad_norm, rel=5 * rel)


@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_an_imported_llama_learns_its_responses(arms: dict[str, Arm], recipe: str) -> None:
    assert arms[recipe].last["loss"] < arms[recipe].first["loss"] - 1.5


@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_a_run_from_an_imported_llama_keeps_its_tokenizer(
    chat: Chat, arms: dict[str, Arm], recipe: str
) -> None:
    kept = arms[recipe].run / "tokenizer/tokenizer.json"
    assert kept.read_bytes() == (chat.source / "tokenizer.json").read_bytes()


@torch.no_grad()
@pytest.mark.usefixtures("arms")
def test_a_trained_llama_goes_back_to_transformers(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chat.folder)
    theirs = auto_model(exported(Path("out/arm_tensorwise"), Path("back"), "dtype=fp32"))
    ours, _ = load_model("out/arm_tensorwise", compute_dtype=torch.float32)
    assert torch.equal(ours(chat.x[:8]), theirs(chat.x[:8]).logits)
