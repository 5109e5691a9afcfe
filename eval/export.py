"""Turn a run into a folder that Hugging Face's transformers loads, or such a folder into a run.

    python -m eval.export out/RUN DIR                 the newest checkpoint -> DIR
    python -m eval.export out/RUN DIR float8=rowwise  its Linears as float8 weights, for torchao's inference
    python -m eval.export --from-hf DIR out/RUN       a Llama-family checkpoint -> a run, to sample, score, continue

DIR must be new or empty. It gets the weights (model.safetensors, in several files beyond 5 GB),
config.json, the tokenizer, generation_config.json and a model card, README.md; written under
another name, synced and renamed: whole or not there. Nothing here needs transformers. The weights
are held in fp32 meanwhile: 4 bytes a parameter.

Source: configuration and modelling of both in transformers 5.23; both rotate RoPE by halves, as
model.py does."""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import ModelCardData, split_state_dict_into_shards_factory

# a BaseException: `except Exception` misses it
from torch.distributed.checkpoint.api import CheckpointException

from eval.sample import Recipe, load_for_inference, read_json
from fp8.recipes import RECIPES
from fp8.rounding import cast, scale_of
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import alone
from lib.text import grid, listed
from lib.values import FilePath, type_problems
from model import GPTConfig
from runtime import tokenizer as gpt2
from runtime.checkpoint import (
    FORMAT_VERSION,
    cause,
    describe,
    dump,
    name_of,
    read_manifest,
    seal,
    sync_folder,
)
from runtime.config import Config, DataConfig, OptimConfig, config_from_dict
from runtime.tokenizer import (
    END_OF_TEXT,
    FOLDER_FILES,
    GENERATION_FILE,
    Tokenizer,
    end_ids,
    keep_tokenizer,
    load_tokenizer,
    read_roles,
    with_ends,
)

FILE_BYTES = 5 * 10**9  # of weights in one file, where one tensor is no larger
# the format's
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
ALIGNMENT = 64  # bytes, a cache line; torch allocates so
FLOAT8 = torch.float8_e4m3fn
# Classes of transformers that compute what model.py does -> the model_type by which transformers
# finds each.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
}
FILE_CLASS = "PreTrainedTokenizerFast"  # transformers' class that applies tokenizer.json as it is
Parts = dict[str, dict[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    run: FilePath  # folder of a run
    folder: FilePath  # the folder to write
    # fp32, the weights' own: then the logits of both sides are equal bit by bit
    dtype: Literal["bf16", "fp32"] = "bf16"
    float8: Recipe = "off"  # a recipe of training: which Linears, and how they are rounded
    license: str = "other"  # the model's, as the Hub names it (apache-2.0, mit, ..), for the card
    step: int | None = None  # of a checkpoint that was kept; none = the newest


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    from_hf: FilePath  # a folder in Hugging Face's format
    run: FilePath  # the run to make


def main(argv: list[str]) -> int:
    if any(word.startswith(("--from-hf", "--from_hf", "from_hf=")) for word in argv):
        return command(__doc__, ImportOptions, "run")(
            lambda o: import_checkpoint(o.from_hf, o.run)
        )(argv)
    return command(__doc__, Options, "run", "folder")(export)(argv)


def export(options: Options) -> str:
    """Writes the folder; returns the line that tells people of it."""
    # "." has no name to put a temporary one beside
    run_dir, target = Path(options.run), Path(os.path.abspath(options.folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is there already and not an empty folder: name a new one")
    recipe, dtype = options.float8, "float32" if options.dtype == "fp32" else "bfloat16"
    loadable = [
        name
        for name, r in RECIPES.items()
        if r.weight.format is FLOAT8 and r.weight.scaling in ("tensor", "row")
    ]
    if recipe not in ("off", *loadable):
        raise UserError(
            f"float8={recipe} has no counterpart that torchao's inference loads: use one of"
            f" {', '.join(loadable)}"
        )
    model, tokenizer, _, layers, step = load_for_inference(
        str(run_dir), "cpu", dtype, recipe, options.step
    )
    # of the converted Linears in fp32
    weights = {name: p.data for name, p in model.named_parameters()}
    del model  # its weights go as they are cast
    manifest = read_manifest(run_dir / "checkpoints" / name_of(step))
    config = config_from_dict(manifest["config"])
    chosen = [f"{layer.name}.weight" for layer in layers if layer.recipe and layer.name != "head"]
    form = (
        f"{len(chosen)} Linears in float8 ({recipe}), the head and the rest bf16"
        if chosen
        else options.dtype
    )
    with new_folder(target) as tmp:
        for name in weights.keys() - chosen:  # one after the other: what is cast is freed
            weights[name] = weights[name].to(getattr(torch, dtype))
        about = hf_config(config.model, dtype) | write_tokenizer(
            tokenizer, config.model.n_ctx, config.model.vocab_padded, tmp
        )
        tensors, metadata = to_hf(config.model, weights), {}
        if chosen:
            tensors, metadata, about["quantization_config"] = store_float8(
                config.model, tensors, weights, chosen, recipe
            )
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda t: t.nbytes,
            max_shard_size=FILE_BYTES,
            filename_pattern="model{suffix}.safetensors",
        )
        for file, names in split.filename_to_tensors.items():
            write_safetensors(
                tmp / file, {name: tensors[name] for name in names}, {"format": "pt", **metadata}
            )
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (tmp / "model.safetensors.index.json").write_text(as_json(index))
        (tmp / "config.json").write_text(as_json(about))
        (tmp / "README.md").write_text(
            model_card(run_dir, config, manifest, form, options.license), encoding="utf-8"
        )
    return (
        f"step {step}: {about['architectures'][0]}, {form},"
        f" {split.metadata['total_size'] / 2**20:.1f} MiB -> {target}"
    )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `target`, an empty one at most, when all in there is on the
    disk: whole or not there."""
    part = target.with_name(f".tmp_{target.name}")
    with alone(target.parent):  # srun starts as many commands as there are tasks
        shutil.rmtree(part, ignore_errors=True)  # what a kill left
        part.mkdir()
        try:
            yield part
            for path in (*part.rglob("*"), part):
                sync_folder(path)
            os.replace(part, target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """One file: 8 bytes of header length, little-endian, a JSON header, the tensors' bytes, one
    after the other.

    Source: the format's description at github.com/huggingface/safetensors. Written here because the
    package's own writer aligns to 8 bytes: of one token's matmul the last bit depends on where in
    memory the weights begin, and readers map the file."""
    # odd ones push nobody out of line
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT != 0))
    header, end = {"__metadata__": metadata}, 0
    for name, t in tensors.items():
        begin, end = end, end + t.nbytes
        header[name] = {
            "dtype": NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            # The bytes as they lie: numpy knows no bfloat16.
            file.write(t.contiguous().flatten().view(torch.uint8).numpy().data)


def hf_config(config: GPTConfig, dtype: str) -> dict:
    """The content of config.json for weights stored as `dtype` ("float32" or "bfloat16"), without
    the roles of tokens.

    The position encoding stands there twice: as transformers 5 writes it, and as the versions
    before read it."""
    scaling = (
        None
        if config.rope_factor is None
        else {
            "rope_type": "llama3",
            **{theirs: getattr(config, ours) for ours, theirs in ROPE.items()},
        }
    )
    architecture = _architecture_of(config)
    # else its default of 4,096 tokens
    window = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        **window,
        "vocab_size": config.vocab_padded,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_ffn,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.n_ctx,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "rope_parameters": {
            **(scaling or {"rope_type": "default"}),
            "rope_theta": config.rope_theta,
        },
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _architecture_of(config: GPTConfig) -> str:
    """The class of transformers that computes what model.py does.

    LlamaConfig refuses a width that is no multiple of the heads, whatever head_dim says; Mistral's,
    a Llama but for its window, takes it."""
    if config.qk_norm:
        return "Qwen3ForCausalLM"
    if config.n_embd % config.n_head:
        return "MistralForCausalLM"
    return "LlamaForCausalLM"


def layout(config: GPTConfig) -> Parts:
    """Our name -> {name: shape} of the tensors that lie in it, one below the other; in the order of
    the modules."""
    C, D, H, K, F, V = (
        config.n_embd,
        config.head_dim,
        config.n_head,
        config.kv_heads,
        config.n_ffn,
        config.vocab_padded,
    )
    out: Parts = {"wte.weight": {"model.embed_tokens.weight": (V, C)}}
    for i in range(config.n_layer):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        block: Parts = {
            "norm1.weight": {"input_layernorm.weight": (C,)},
            "attn.qkv.weight": {
                f"self_attn.{name}_proj.weight": (n * D, C)
                for name, n in (("q", H), ("k", K), ("v", K))
            },
            "attn.out.weight": {"self_attn.o_proj.weight": (C, H * D)},
            "norm2.weight": {"post_attention_layernorm.weight": (C,)},
            "mlp.gate_up.weight": {"mlp.gate_proj.weight": (F, C), "mlp.up_proj.weight": (F, C)},
            "mlp.down.weight": {"mlp.down_proj.weight": (C, F)},
        }
        if config.qk_norm:
            block |= {
                f"attn.{name}.weight": {f"self_attn.{name}.weight": (D,)}
                for name in ("q_norm", "k_norm")
            }
        out |= {
            ours + name: {theirs + part: shape for part, shape in parts.items()}
            for name, parts in block.items()
        }
    out["norm.weight"] = {"model.norm.weight": (C,)}
    if not config.tied:
        out["head.weight"] = {"lm_head.weight": (V, C)}
    return out


def to_hf(config: GPTConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under their names: views of `weights`, which has the names of
    GPT.named_parameters()."""
    out = {}
    for ours, parts in layout(config).items():
        out |= dict(
            zip(parts, weights[ours].split([shape[0] for shape in parts.values()]), strict=True)
        )
    return out


# The Linears are those that the run converts, or the recipe's defaults. Each fused matrix is
# rounded as its recipe rounds it in training, from the fp32 weights, then cut in Hugging Face's
# parts: the float8 values and scales are those which the run's own matmuls saw (fp8/).
# Activations are scaled while running, per tensor or per row as the recipe does, by torchao's rule,
# which knows no powers of two. The head, like the embedding, stays BF16. Source: torchao 0.18,
# Float8Tensor with its layout in safetensors files; transformers reads it from quantization_config.


def store_float8(
    config: GPTConfig,
    tensors: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    chosen: list[str],
    recipe: str,
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict]:
    """to_hf()'s `tensors` of our `weights`, the chosen ones in fp32, which leave both dicts one by
    one -> what lies in the files, the files' metadata, and the part of config.json by which
    transformers finds torchao."""
    # torchao's of extensions for other hardware, of a deprecated call of its own
    logging.disable(logging.WARNING)
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8Tensor,
        PerRow,
        PerTensor,
    )
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    logging.disable(logging.NOTSET)
    is_row = RECIPES[recipe].weight.scaling == "row"
    settings = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow() if is_row else PerTensor()
    )
    activations = QuantizeTensorToFloat8Kwargs(FLOAT8, settings.granularity[0])
    kept = ["lm_head"]
    for ours, parts in layout(config).items():
        if ours in chosen:
            weight, rows = weights.pop(ours), [shape[0] for shape in parts.values()]
            scale = scale_of(weight, RECIPES[recipe].weight)
            # what each row is multiplied by, (N, 1) fp32
            inverse = scale.reciprocal() * torch.ones(len(weight), 1)
            values = cast(weight, scale, FLOAT8)
            for (name, shape), part, factor in zip(
                parts.items(), values.split(rows), inverse.split(rows), strict=True
            ):
                tensors[name] = Float8Tensor(
                    part,
                    factor.contiguous() if is_row else factor[:1].clone(),
                    mm_config=settings.mm_config,
                    block_size=[1 if is_row else shape[0], shape[1]],
                    act_quant_kwargs=activations,
                    dtype=torch.bfloat16,
                )
        elif ours.startswith("layers.") and "norm" not in ours:  # a Linear that stays BF16
            kept += [name.removesuffix(".weight") for name in parts]
    return *flatten_tensor_state_dict(tensors), {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(settings)},
        "modules_to_not_convert": kept,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def write_tokenizer(tokenizer: Tokenizer, n_ctx: int, vocab_padded: int, folder: Path) -> dict:
    """Put the tokenizer's files and generation_config.json into `folder`; returns the roles that
    config.json repeats.

    A built-in tokenizer becomes tokenizer.json (for the package tokenizers), vocab.json and
    merges.txt (for readers of GPT-2's own format) and the tokens' roles; an imported one is copied,
    but for the name of its class. The ids of every text are those of runtime/tokenizer.py but
    for one thing: a text that spells a special token is text here, and the token there (unless
    split_special_tokens=True is set). vocab_padded: rows of the embedding; the ids behind the
    tokenizer's own are never generated, there as in eval/sample.py."""
    if tokenizer.kind == "folder":
        for path in filter(Path.is_file, [Path(tokenizer.name) / name for name in FOLDER_FILES]):
            shutil.copyfile(path, folder / path.name)
        _let_the_file_decide(folder / "tokenizer_config.json")
    else:
        for name, content in _tokenizer_files(tokenizer, n_ctx).items():
            (folder / name).write_text(content, encoding="utf-8")
    path = folder / GENERATION_FILE
    ends = with_ends(end_ids(path), tokenizer.ends)
    roles = {"bos_token_id": tokenizer.start, "eos_token_id": ends}
    # transformers' generate() stops at what this file names alone, whatever config.json says.
    generation = (
        json.loads(path.read_bytes()) | {"eos_token_id": ends} if path.is_file() else dict(roles)
    )
    if unused := set(range(tokenizer.vocab_size, vocab_padded)):
        generation["suppress_tokens"] = sorted(
            unused | set(generation.get("suppress_tokens") or [])
        )
    path.write_text(as_json(generation))
    return roles


def _let_the_file_decide(path: Path) -> None:
    """Change a copied tokenizer_config.json so that transformers makes the ids of tokenizer.json.

    By the name of one of its own classes (LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer)
    transformers 5 takes vocabulary and merges alone from tokenizer.json and splits text by the
    rules of the class: not the ids that the model was trained on. An auto_map names code, which no
    export has. The class of that name also leaves to tokenizer.json what is put around a text,
    whatever add_bos_token says."""
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    # Beside some keys of this file transformers does not read special_tokens_map.json.
    roles = read_roles(path.parent)
    missing = {}
    for role in ("bos_token", "eos_token"):
        token = roles.get(role)
        if token is not None and settings.get(role) is None:
            missing[role] = token["content"] if isinstance(token, dict) else token
    changed = {key: value for key, value in (settings | missing).items() if key != "auto_map"}
    changed["tokenizer_class"] = FILE_CLASS
    if changed != settings:
        path.write_text(as_json(changed), encoding="utf-8")


def as_json(content) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _tokenizer_files(tokenizer: Tokenizer, n_ctx: int) -> dict[str, str]:
    """Name of each file -> its content, for gpt2 and byte."""
    letters, roles = gpt2.BYTE_LETTERS, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if tokenizer.kind == "gpt2":
        merges = gpt2.vocab_bpe().decode()
        tokens = ["".join(letters[b] for b in token) for token in gpt2.token_bytes()]
    else:
        merges, tokens = "#version: 0.2\n", [letters[b] for b in range(256)]
    vocab = {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {
        "id": tokenizer.eot,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    rules = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        # Bytes need no pieces: nothing is ever merged.
        "pre_tokenizer": {**pieces, "use_regex": tokenizer.kind == "gpt2"},
        "post_processor": {**pieces, "trim_offsets": False, "use_regex": True},
        "decoder": {**pieces, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges.splitlines()[1:],
        },
    }
    kind = (
        {"tokenizer_class": "GPT2Tokenizer", "unk_token": END_OF_TEXT}
        if tokenizer.kind == "gpt2"
        else {
            # Else transformers 4 gives token_type_ids too, which generate() refuses.
            "tokenizer_class": FILE_CLASS,
            "model_input_names": ["input_ids", "attention_mask"],
        }
    )
    settings = {
        **kind,
        **roles,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx,
        "added_tokens_decoder": {
            str(tokenizer.eot): {k: v for k, v in special.items() if k != "id"}
        },
    }
    return {
        "tokenizer.json": json.dumps(rules, ensure_ascii=False),
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": merges,
        "tokenizer_config.json": as_json(settings),
        "special_tokens_map.json": as_json(roles),
    }


CARD = """---
{head}
---

# {run}

A language model of {params:,} parameters, {made}. It continues text. The weights here: {form}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")      # this folder
tokenizer = AutoTokenizer.from_pretrained("DIR")
ids = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```

## Data

{data}

## Training

{training}

## Scores

{scores}

## Limits

- It may write what is false, offensive or private: nothing was done to prevent it, and bias was not measured.
- Its context is {n_ctx:,} tokens. What it was not trained on, other languages above all, it does badly.
- {licence} The data, and weights that it goes back to, keep theirs.
"""


def model_card(run_dir: Path, config: Config, manifest: dict, form: str, license: str) -> str:
    """README.md, of what config.json, summary.json, eval/*.json and each source's index.json say,
    as far as they are there."""
    from eval.table import read_rows, sort_columns, table_of
    from lib.plots import name_recipe

    step, data, state, summary = (
        manifest["step"],
        config.data,
        manifest["state"],
        read_json(run_dir / "summary.json"),
    )
    sources = (
        {}
        if "imported" in state
        else {name: read_json(Path(data.dir) / name / "index.json") for name in data.mixture}
    )
    on_hub = {
        index["dataset"]
        for index in sources.values()
        if re.fullmatch("[0-9a-f]{40}", index.get("revision", ""))
    }
    # the precision of the trunk, if another
    recipe, before = config.fp8.label, state.get("switched_from")
    head = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        datasets=sorted(on_hub) or None,
        tags=["nanofp8", *["fp8"] * (recipe != "bf16" or before not in (None, "bf16"))],
    )
    shown = [["source", "share", "data set", "revision", "licence"]]
    for name, index in sources.items():
        shown.append(
            [
                name,
                f"{data.mixture[name] / sum(data.mixture.values()):.1%}",
                *(str(index.get(key, "not known")) for key in ("dataset", "revision", "license")),
            ]
        )
    base = (state.get("imported") or state.get("origin") or {}).get("folder")
    if "imported" in state:
        made, training = f"imported into nanoFP8 from {base} and not trained there", ""
    else:
        begin = (
            f"the weights of {base or '{} at step {}'.format(*config.parent)}"
            if config.parent
            else "scratch"
        )
        made = (
            f"trained with nanoFP8 from {begin}, {step:,} of {config.total_steps:,} steps of"
            f" {data.tokens_per_step:,} tokens"
        )
        optimizer = ", ".join(f"{key} {value}" for key, value in asdict(config.optim).items())
        training = f"Optimizer: {optimizer}. Precision of the matmuls: {name_recipe(recipe)}" + (
            f", before the branch point {name_recipe(before)}." if before else "."
        )
    if summary.get("steps") == step:  # else it tells of other weights
        training += (
            f" Validation loss {summary.get('loss_as_trained')} as trained,"
            f" {summary.get('loss_bf16')} in BF16 (nats per token)."
        )
    try:  # what the harness wrote of these weights on whole tasks, FP8 inference beside BF16
        rows = [
            row for row in read_rows([run_dir]) if (row.step or summary.get("steps", 0)) == step
        ]
        scores = grid(
            table_of(rows, [column for column in sort_columns(rows) if column.limit is None])
        )
    except UserError as error:
        scores = f"None: {error}"
    return CARD.format(
        head=head.to_yaml(),
        run=config.run,
        params=config.model.params_total,
        made=made,
        form=form,
        data=grid(shown),
        training=training,
        scores=scores,
        n_ctx=config.model.n_ctx,
        licence=(
            "These weights come without a licence."
            if license == "other"
            else "The licence above is of these weights."
        ),
    )


# ------------------------------------------------------------------------------------------ import

EXACT = (torch.float32, torch.bfloat16, torch.float16)  # fp32 holds each of their values
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_ffn": "intermediate_size",
    "n_ctx": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
ORIGINAL_CTX = "original_max_position_embeddings"
ROPE = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_ctx": ORIGINAL_CTX,
}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE.values()}


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """The keys of a config.json that decide what is computed, with transformers' types; the
    defaults are LlamaConfig's."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    num_key_value_heads: int | None = None  # none = num_attention_heads
    head_dim: int | None = None  # none = hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    # of versions that have no rope_parameters, whose own counts before it
    rope_theta: float | None = 10_000.0
    rope_parameters: dict | None = None  # as transformers 5 writes it
    # as the versions before wrote it; counts before rope_parameters
    rope_scaling: dict | None = None
    original_max_position_embeddings: int | None = None  # counts before the one in rope_parameters
    partial_rotary_factor: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int | None = 1
    is_causal: bool = True
    layer_types: list | None = None
    sliding_window: int | None = None  # tokens that a token sees
    use_sliding_window: bool = False  # Qwen3 alone: whether sliding_window applies
    max_window_layers: int = 28  # Qwen3 alone: layers before this one have no window
    per_layer_config: dict | None = None  # layer -> keys that differ there
    quantization_config: dict | None = None
    compression_config: dict | None = None
    auto_map: dict | None = None  # names code in the folder
    # the file or index to read instead of model.safetensors
    transformers_weights: str | None = None
    attention_dropout: float | None = 0.0  # in training alone


# What the architectures leave to their own defaults, where another than LlamaConfig's.
DEFAULTS: dict[str, dict] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
# transformers refuses null there
NEVER_NULL = {"MistralForCausalLM": "num_key_value_heads", "Qwen3ForCausalLM": "head_dim"}


def import_checkpoint(folder: str, run_dir: str) -> Path:
    """Write the run, weights and tokenizer as they are; returns the folder of its checkpoint: fp32
    weights, no optimizer. Of its config.json the model section and data.tokenizer alone say
    something: nothing was trained here.

    In fp32 on the CPU the logits are transformers' own, bit for bit (transformers 5.23, torch
    2.13), where intermediate_size is a multiple of 32, as in every published model: beyond it
    SiLU's last bit depends on where its vectors end.

    Memory: the whole model as fp32 on the host and one matrix more. Raises UserError where `folder`
    holds no model that can be held exactly (pickles, which can run code, are refused by their
    names, unopened) or `run_dir` exists; OSError where writing failed: then nothing is left."""
    source, target = Path(folder), Path(run_dir)
    if os.path.lexists(target):
        raise UserError(f"{target} exists: choose another out/RUN, or remove that one")
    raw = _read_object(source / "config.json", f"{folder} is no downloaded model")
    model = gpt_config(raw)
    if dropout := raw.get("attention_dropout"):
        print(
            f"config.json's attention_dropout={dropout} is left out: nothing is dropped in training"
            " here"
        )
    files, tokenizer = (
        _open_weights(source, raw.get("transformers_weights")),
        load_tokenizer(str(source)),
    )
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{source}: its tokenizer has {tokenizer.vocab_size} ids, config.json"
            f" vocab_size={model.vocab_size}"
        )
    config = Config(
        run=target.name,
        out=str(target.parent),
        model=model,
        steps=1,
        optim=OptimConfig(lr=2e-5),
        data=DataConfig(
            dir="data",
            mixture={"imported": 1.0},
            tokens_per_step=model.n_ctx,
            micro_batch=1,
            tokenizer=str(target / "tokenizer"),
        ),
    )
    with new_folder(target) as part:
        checkpoint = part / "checkpoints" / name_of(0)
        checkpoint.mkdir(parents=True)
        keep_tokenizer(part, folder)
        weights = dict(from_hf(model, files, lambda name: files[name].get_tensor(name)))
        write_checkpoint(
            checkpoint,
            config,
            weights,
            {
                "imported": {
                    "folder": source.resolve().name,
                    "architecture": architecture_named(raw),
                    "tokenizer_sha256": tokenizer.sha256,
                }
            },
        )
        (part / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    return target / "checkpoints" / name_of(0)


def write_checkpoint(
    path: Path, config: Config, weights: dict[str, torch.Tensor], state: dict
) -> None:
    """Write the folder `path`, which is there and empty, as a checkpoint of step 0 with `weights`
    (our names) and no moments.

    `state` is plain JSON. Raises OSError. As runtime/checkpoint.py writes them from training, but
    for temporary name and rename."""
    tensors = {f"model.{name}": t for name, t in weights.items()}
    try:
        files = dump(path, tensors)
    except CheckpointException as error:
        raise OSError(f"{path} could not be written ({cause(error)})") from error
    seal(
        path,
        {
            "format_version": FORMAT_VERSION,
            "step": 0,
            "state": state,
            "config": asdict(config),
            "torch": str(torch.__version__),
            "world_size": 1,
            "tensors": describe(tensors),
            "files": files,
        },
    )


def _read_object(path: Path, otherwise: str) -> dict:
    """The JSON object that a file holds. Raises UserError, which begins with `otherwise`, where it
    holds none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{otherwise}: its {path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{otherwise}: its {path.name} holds {type(content).__name__} where an object, {{...}},"
            " is needed"
        )
    return content


def weight_files(source: Path, named: str | None = None) -> list[Path]:
    """The safetensors files that transformers would read: `named` (config.json's
    transformers_weights) or else model.safetensors, else those of its index, else all there are.
    Prints which others are left out.

    Raises UserError where there is none, one of the index is not there, or the folder is an
    adapter's."""
    every = sorted(source.glob("*.safetensors"))
    if not every:
        raise UserError(
            f"{source} has no *.safetensors: get the model in that format; pickles (.bin, .pth) can"
            " run code"
        )
    if (source / "adapter_config.json").exists():
        raise UserError(
            f"{source} has an adapter_config.json: transformers would load another model and put"
            " this adapter on it; merge it first (peft's merge_and_unload, then save_pretrained),"
            " or remove adapter_config.json if model.safetensors is the whole model"
        )
    single, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if named is not None:
        single = index = _inside(source, named, "config.json's transformers_weights")
    if single.is_file() and single.suffix == ".safetensors":
        chosen, because = [single], "is the model"
    elif index.is_file():
        chosen, because = _files_of_index(index), f"are what {index.name} names"
    elif named is not None:
        raise UserError(
            f"config.json has transformers_weights={named!r}, but {source} has no such file:"
            " download it again"
        )
    else:
        return every
    if left_out := [path.name for path in every if path not in chosen]:
        print(
            f"{source}: left out {listed(left_out, 5)}:"
            f" {listed([path.name for path in chosen], 5)} {because}",
            flush=True,
        )
    return chosen


def _files_of_index(index: Path) -> list[Path]:
    """The files that a *.safetensors.index.json names, each once. Raises UserError."""
    weight_map = _read_object(index, f"{index.parent} is no whole model").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise UserError(
            f"{index} has no weight_map of tensor names to file names: download it again"
        )
    names = sorted(set(weight_map.values()))
    if not names:
        raise UserError(f"{index} names no file: download it again")
    files = [_inside(index.parent, name, str(index)) for name in names]
    if absent := [path.name for path in files if not path.is_file()]:
        raise UserError(
            f"{index} names {listed(absent, 3)}, which the folder lacks: the download is"
            " incomplete, repeat it"
        )
    return files


def _inside(folder: Path, name: str, where: str) -> Path:
    """A file of the folder that `where` names. Raises UserError where the name leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(
            f"{where} names {name!r}, which lies outside {folder}: only files of that folder are"
            " read"
        )
    return folder / name


def _open_weights(source: Path, named: str | None = None) -> dict:
    """The open file of each tensor; its header is checked against its length, nothing is read
    yet."""
    from safetensors import SafetensorError, safe_open

    files: dict = {}
    for path in weight_files(source, named):
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UserError(
                f"{path} is no whole safetensors file ({error}): the download is incomplete,"
                " repeat it"
            ) from error
        if twice := files.keys() & opened.keys():
            raise UserError(
                f"{path} and another file of the folder both hold {listed(sorted(twice), 3)}: keep"
                " those of one download"
            )
        files |= dict.fromkeys(opened.keys(), opened)
    return files


def architecture_named(raw: dict) -> str:
    """The class that a config.json names, by architectures or, where that is left out, model_type.

    Raises UserError where it is none that model.py computes, or the two say different things:
    transformers goes by model_type, vLLM by architectures."""
    known = ", ".join(MODEL_TYPES)
    named, model_type = raw.get("architectures"), raw.get("model_type")
    if named is None:
        architecture = next(
            (name for name, kind in MODEL_TYPES.items() if kind == model_type), None
        )
        if architecture is None:
            raise UserError(
                f"config.json has architectures=None and model_type={model_type!r}: only"
                f" {known} can be held here"
            )
        return architecture
    if isinstance(named, str):
        raise UserError(
            f"config.json has architectures={named!r}, a text, where a list is needed: write"
            f" [{json.dumps(named)}]"
        )
    if not isinstance(named, list) or len(named) != 1 or named[0] not in MODEL_TYPES:
        biased = " (Qwen2's q, k and v have biases)" if named == ["Qwen2ForCausalLM"] else ""
        raise UserError(
            f"config.json has architectures={named!r}: only {known} can be held here{biased}"
        )
    architecture = named[0]
    if model_type not in (None, MODEL_TYPES[architecture]):
        raise UserError(
            f"config.json has model_type={model_type!r} but architectures={named!r}, whose"
            f" model_type is {MODEL_TYPES[architecture]!r}: transformers would compute another"
            " model than vLLM; correct the one that is wrong"
        )
    return architecture


def gpt_config(raw: dict) -> GPTConfig:
    """The model that a config.json describes. What the file leaves out has the default of its
    architecture.

    Raises UserError in one sentence for whatever model.py cannot compute exactly, or where a size
    is missing."""
    architecture = architecture_named(raw)
    if missing := [theirs for theirs in SIZES.values() if not raw.get(theirs)]:
        raise UserError(f"config.json lacks {', '.join(missing)}: download it again")
    known = {f.name for f in fields(HFConfig)}
    given = HFConfig(
        **DEFAULTS[architecture] | {key: value for key, value in raw.items() if key in known}
    )
    if problems := type_problems("", given):
        raise UserError(
            f"config.json has a value of the wrong kind: {'; '.join(problems)}; correct it or"
            " download it again"
        )
    never_null = NEVER_NULL.get(architecture)
    if never_null and getattr(given, never_null) is None:
        default = DEFAULTS[architecture][never_null]
        raise UserError(
            f"config.json has {never_null}=None: {architecture} needs a number, or the key left out"
            f" for {default}"
        )
    if refused := [*_refused(given, architecture), *_refused_rope(given)]:
        raise UserError(f"config.json has {'; '.join(refused)}; this model cannot be held exactly")
    sizes = {ours: getattr(given, theirs) for ours, theirs in SIZES.items()}
    is_equal_share = (
        given.head_dim is None or given.head_dim * given.num_attention_heads == given.hidden_size
    )
    config = GPTConfig(
        **sizes,
        **_rope_of(given),
        n_kv_head=given.num_key_value_heads or given.num_attention_heads,
        head_size=None if is_equal_share else given.head_dim,
        qk_norm=architecture == "Qwen3ForCausalLM",
        vocab_multiple=1 if given.vocab_size % 128 else 128,
        tied=given.tie_word_embeddings,
        norm_eps=given.rms_norm_eps,
    )
    if problems := type_problems("model.", config) or config.problems():
        raise UserError(
            "config.json describes no model that can be built:"
            f" {_in_their_words('; '.join(problems))}"
        )
    return config


def _refused(given: HFConfig, architecture: str) -> list[str]:
    """One phrase, with the key, its value and what would fit, for each value by which the
    computation is another than model.py's."""
    fits = {  # key -> the values with which it is the same, what would fit
        "attention_bias": ((False,), "false: there are no biases here"),
        "mlp_bias": ((False,), "false: there are no biases here"),
        "hidden_act": (("silu", "swish"), "silu or swish"),
        "pretraining_tp": ((None, 1), "1: sums in slices round otherwise"),
        "is_causal": ((True,), "true: a token sees those before it alone"),
        "partial_rotary_factor": ((None, 1), "1: the whole head is rotated"),
        "per_layer_config": ((None, {}), "none: all layers are of one kind"),
        "quantization_config": ((None, {}), "none: get the model in 16 or 32 bits"),
        "compression_config": ((None, {}), "none: get the model in 16 or 32 bits"),
        "auto_map": ((None, {}), "none: the folder's own code is never run"),
    }
    phrases = [
        f"{key}={getattr(given, key)!r} where what fits is {what}"
        for key, (values, what) in fits.items()
        if getattr(given, key) not in values
    ]
    n_layer, n_ctx = given.num_hidden_layers, given.max_position_embeddings
    if given.layer_types is not None:
        if not all(kind in ("full_attention", "attention") for kind in given.layer_types):
            phrases.append(
                f"layer_types={given.layer_types!r} where what fits is full_attention in every"
                " layer"
            )
        elif len(given.layer_types) != n_layer:
            phrases.append(
                f"layer_types of {len(given.layer_types)} layers where what fits is"
                f" num_hidden_layers={n_layer}"
            )
    window = _window_of(given, architecture)
    if window is not None and window < n_ctx:
        switch = (
            f"use_sliding_window={given.use_sliding_window} and "
            if architecture == "Qwen3ForCausalLM"
            else ""
        )
        phrases.append(
            f"{switch}sliding_window={window} where what fits is none, or at least"
            f" max_position_embeddings={n_ctx} (in texts of {window} tokens no window is felt:"
            f" max_position_embeddings={window} fits too)"
        )
    return phrases


def _window_of(given: HFConfig, architecture: str) -> int | None:
    """Tokens that a token sees in some layer, none = all before it."""
    if architecture == "Qwen3ForCausalLM":
        has_windows = given.use_sliding_window and given.max_window_layers < given.num_hidden_layers
        if not has_windows or given.layer_types is not None:  # which say it of each layer
            return None
    return given.sliding_window


def _rope_dict(given: HFConfig) -> dict:
    """What a config.json says of the position encoding in an object, where transformers looks, in
    the same order."""
    return given.rope_scaling or given.rope_parameters or {}


def _rope_type(given: HFConfig):
    rope = _rope_dict(given)
    return rope.get("rope_type", rope.get("type", "default"))


def _refused_rope(given: HFConfig) -> list[str]:
    """The same as _refused() for the position encoding."""
    rope, kind, phrases = _rope_dict(given), _rope_type(given), []
    if kind not in ("default", "llama3"):
        phrases.append(f"rope_type={kind!r} where what fits is default or llama3")
    if unknown := sorted(map(str, rope.keys() - ROPE_KEYS)):
        phrases.append(
            f"rope_keys={unknown!r} where what fits is one encoding for all layers, of"
            f" {', '.join(sorted(ROPE_KEYS))}"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        phrases.append(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} where what fits is 1: the"
            " whole head is rotated"
        )
    numbers = {"rope_theta": rope.get("rope_theta", given.rope_theta)}
    if kind == "llama3":
        numbers |= {key: rope.get(key) for key in ROPE.values() if key != ORIGINAL_CTX}
    phrases += [
        f"{key}={value!r} where what fits is a positive number"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ]
    return phrases


def _rope_of(given: HFConfig) -> dict:
    """The keys of GPTConfig that say how positions are encoded."""
    rope = _rope_dict(given)
    keys = {"rope_theta": float(rope.get("rope_theta", given.rope_theta))}
    if _rope_type(given) == "llama3":
        keys |= {ours: rope.get(theirs) for ours, theirs in ROPE.items()}
        keys["rope_original_ctx"] = (
            given.original_max_position_embeddings
            or rope.get(ORIGINAL_CTX)
            or given.max_position_embeddings
        )
    return keys


def _in_their_words(sentence: str) -> str:
    """A sentence about keys of the model section with the names of config.json."""
    theirs = (
        SIZES
        | ROPE
        | {
            "n_kv_head": "num_key_value_heads",
            "head_size": "head_dim",
            "norm_eps": "rms_norm_eps",
            "rope_theta": "rope_theta",
            "tied": "tie_word_embeddings",
        }
    )
    return re.sub(r"\bmodel\.(\w+)", lambda match: theirs.get(match[1], match[0]), sentence)


def from_hf(
    config: GPTConfig, names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our name and the fp32 tensor, one after the other, of a checkpoint that holds `names`;
    read(name) gives one.

    Raises UserError, before anything is read, where a tensor is missing or has no place in the
    model, then where one has another shape than config.json says, a dtype that fp32 cannot hold, or
    a tied head differs from the embedding."""
    names, head = set(names), "lm_head.weight"
    if config.n_layer > len(names):  # of a layout of a billion layers nothing is built
        raise UserError(
            f"config.json has num_hidden_layers={config.n_layer}, but the files hold"
            f" {len(names)} tensors: take config.json and weights of one download"
        )
    parts_of = layout(config)
    wanted = {name for parts in parts_of.values() for name in parts}
    # Old checkpoints carry the frequencies of RoPE, which follow from config.json.
    there = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    missing, strange = wanted - there, there - wanted - {head}
    if missing or strange:
        lacking = missing and f"of config.json's model the files lack {listed(sorted(missing), 3)}"
        extra = strange and f"{listed(sorted(strange), 3)} has no place in the model of config.json"
        raise UserError(
            "; ".join(filter(None, (lacking, extra)))
            + ": take config.json and weights of one download"
        )
    for ours, parts in parts_of.items():
        tensors = {name: read(name) for name in parts}
        for name, tensor in tensors.items():
            if tensor.dtype not in EXACT or tuple(tensor.shape) != parts[name]:
                raise UserError(
                    f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, but must be"
                    f" {parts[name]} in 16 or 32 bits"
                )
        whole = torch.cat([tensor.float() for tensor in tensors.values()])
        if (
            ours == "wte.weight"
            and config.tied
            and head in there
            and not torch.equal(read(head).float(), whole)
        ):
            raise UserError(
                f"{head} is not the embedding: set tie_word_embeddings to false in config.json if"
                " it shall not be"
            )
        yield ours, whole


if __name__ == "__main__":
    raise SystemExit(run_command(main))
