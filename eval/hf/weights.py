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
    in_order = sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT != 0)
    header: dict[str, dict] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in in_order:
            # The bytes as they lie: numpy knows no bfloat16.
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def layout(config: GPTConfig) -> Parts:
    """Our name -> {name: shape} of the tensors that lie in it, one below the other; in the order of
    the modules."""
    C, V = config.n_embd, config.vocab_padded
    parts: Parts = {"wte.weight": {"model.embed_tokens.weight": (V, C)}}
    for i in range(config.n_layer):
        for name, parts_of_name in _block(config).items():
            parts[f"layers.{i}.{name}"] = {
                f"model.layers.{i}.{part}": shape for part, shape in parts_of_name.items()
            }
    parts["norm.weight"] = {"model.norm.weight": (C,)}
    if not config.tied:
        parts["head.weight"] = {"lm_head.weight": (V, C)}
    return parts


def _block(config: GPTConfig) -> Parts:
    """layout() within one block."""
    C, D, F = config.n_embd, config.head_dim, config.n_ffn
    q_rows, kv_rows = config.n_head * D, config.kv_heads * D
    block: Parts = {
        "norm1.weight": {"input_layernorm.weight": (C,)},
        "attn.qkv.weight": {
            "self_attn.q_proj.weight": (q_rows, C),
            "self_attn.k_proj.weight": (kv_rows, C),
            "self_attn.v_proj.weight": (kv_rows, C),
        },
        "attn.out.weight": {"self_attn.o_proj.weight": (C, q_rows)},
        "norm2.weight": {"post_attention_layernorm.weight": (C,)},
        "mlp.gate_up.weight": {"mlp.gate_proj.weight": (F, C), "mlp.up_proj.weight": (F, C)},
        "mlp.down.weight": {"mlp.down_proj.weight": (C, F)},
    }
    if config.qk_norm:
        block["attn.q_norm.weight"] = {"self_attn.q_norm.weight": (D,)}
        block["attn.k_norm.weight"] = {"self_attn.k_norm.weight": (D,)}
    return block


def to_hf(config: GPTConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under their names: views of `weights`, which has the names of
    GPT.named_parameters()."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parts in layout(config).items():
        rows = [shape[0] for shape in parts.values()]
        tensors |= dict(zip(parts, weights[name].split(rows), strict=True))
    return tensors


HEAD = "lm_head.weight"
EXACT = (torch.float32, torch.bfloat16, torch.float16)  # fp32 holds each of their values


def weight_files(source: Path, named: str | None = None) -> list[Path]:
    """The safetensors files that transformers would read: `named` (config.json's
    transformers_weights) or else model.safetensors, else those of its index, else all there are.
    Prints which others are left out.

    Raises UserError where there is none, one of the index is not there, or the folder is an
    adapter's."""
    all_files = sorted(source.glob("*.safetensors"))
    _refuse_no_model(source, all_files)
    single, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if named is not None:
        single = index = _inside(source, named, "config.json's transformers_weights")
    if single.is_file() and single.suffix == ".safetensors":
        files, reason = [single], "is the model"
    elif index.is_file():
        files, reason = _files_of_index(index), f"are what {index.name} names"
    elif named is not None:
        raise UserError(
            f"config.json has transformers_weights={named!r}, but {source} has no such file:"
            " download it again"
        )
    else:
        return all_files
    left_out = [path.name for path in all_files if path not in files]
    if left_out:
        names = [path.name for path in files]
        print(f"{source}: left out {listed(left_out, 5)}: {listed(names, 5)} {reason}", flush=True)
    return files


def _refuse_no_model(source: Path, files: list[Path]) -> None:
    if not files:
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
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UserError(
            f"{index} names {listed(absent, 3)}, which the folder lacks: the download is"
            " incomplete, repeat it"
        )
    return files


def _inside(folder: Path, name: str, holder: str) -> Path:
    """A file of the folder that `holder` names. Raises UserError where the name leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(
            f"{holder} names {name!r}, which lies outside {folder}: only files of that folder are"
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
        twice = files.keys() & opened.keys()
        if twice:
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
    names = set(names)
    if config.n_layer > len(names):  # of a layout of a billion layers nothing is built
        raise UserError(
            f"config.json has num_hidden_layers={config.n_layer}, but the files hold"
            f" {len(names)} tensors: take config.json and weights of one download"
        )
    parts_of = layout(config)
    _check_names(parts_of, names)
    for our_name, parts in parts_of.items():
        tensors = []
        for name, shape in parts.items():
            tensor = read(name)
            _check_tensor(name, tensor, shape)
            tensors.append(tensor.float())
        whole = torch.cat(tensors)
        if our_name == "wte.weight" and config.tied and HEAD in names:
            _check_tied_head(read(HEAD), whole)
        yield our_name, whole


def _check_names(parts_of: Parts, names: set[str]) -> None:
    """Raises UserError where the files lack a tensor of the model, or hold one that has no place in
    it."""
    needed = {name for parts in parts_of.values() for name in parts}
    # Old checkpoints carry the frequencies of RoPE, which follow from config.json.
    held = {name for name in names if not name.endswith("rotary_emb.inv_freq")}
    missing, surplus = needed - held, held - needed - {HEAD}
    problems = []
    if missing:
        problems.append(f"of config.json's model the files lack {listed(sorted(missing), 3)}")
    if surplus:
        problems.append(f"{listed(sorted(surplus), 3)} has no place in the model of config.json")
    if problems:
        raise UserError(f"{'; '.join(problems)}: take config.json and weights of one download")


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in EXACT or tuple(tensor.shape) != shape:
        raise UserError(
            f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, but must be"
            f" {shape} in 16 or 32 bits"
        )


def _check_tied_head(head: torch.Tensor, embedding: torch.Tensor) -> None:
    if not torch.equal(head.float(), embedding):
        raise UserError(
            f"{HEAD} is not the embedding: set tie_word_embeddings to false in config.json if"
            " it shall not be"
        )
