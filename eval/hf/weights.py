"""The weights under both sides' names, and the safetensors files that hold them."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from eval.hf.files import read_object
from lib.errors import UserError
from lib.text import listed
from model import GPTConfig

FILE_BYTES = 5 * 10**9  # of weights in one file, where one tensor is no larger
# the format's
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
ALIGNMENT = 64  # bytes, a cache line; torch allocates so
Parts = dict[str, dict[str, tuple[int, ...]]]


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


EXACT = (torch.float32, torch.bfloat16, torch.float16)  # fp32 holds each of their values


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
    weight_map = read_object(index, f"{index.parent} is no whole model").get("weight_map")
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


def open_weights(source: Path, named: str | None = None) -> dict:
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
