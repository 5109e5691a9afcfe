"""Build nanoGPT and nanochat, from checkouts kept outside this repository, as subjects of the benchmark.

    nanogpt         github.com/karpathy/nanoGPT: 124M and XL, autocast to BF16, compiled, fused AdamW
    nanochat_bf16   github.com/karpathy/nanochat: d12 and d26, weights cast to BF16 by each Linear, compiled, Muon with AdamW
    nanochat_fp8    the same after nanochat's own FP8 conversion (tensorwise, head included)

Each trains a micro-step and an update as its own training script does, with that script's defaults; batches, T and the
stopwatch are ours. Left out are data loading, learning rate schedules and nanochat's setting of the CUDA allocator, which is
for fragmentation. What is not theirs, and why, each subject says in `describe`:

    FlashAttention 3   comes from a hub; without it nanochat falls back to torch's attention, as it says itself. That knows no
                       sliding window, so window_pattern is "L" (whole context), which nanochat recommends for that case.
    zero weights       nanochat begins with attn.c_proj and mlp.c_proj at zero: without updates, two of the three matmuls of
                       every other Linear of a block would multiply zeros, which a GPU does faster. They get random values.

FLOPs per token are ours (model.GPT.counts): 6 a weight of a Linear, the head once, plus 12 L H D T. Lookups count nothing,
so nanochat's value embeddings, half of d12's parameters, do not; nor do Muon's matmuls, which are part of the update.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn as nn

from bench.subject import Subject
from runtime.cli import UserError, nearest

NAMES = ("nanogpt", "nanochat_bf16", "nanochat_fp8")
# Sizes in the peers' own words. nanochat's depth d has width 64 d, rounded up to heads of 128.
SIZES = {
    "nanogpt_124m": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "nanogpt_xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "nanochat_d12": {"n_layer": 12, "n_head": 6, "n_kv_head": 6, "n_embd": 768},
    "nanochat_d26": {"n_layer": 26, "n_head": 13, "n_kv_head": 13, "n_embd": 1664},
}
# Our own model at nanochat's dimensions: the same work within 1 % (a SwiGLU of 8/3 C has as many weights as their MLP of
# 4 C), without value embeddings, smear, backout and Muon. Keys of model.GPTConfig; n_ctx is the cell's T.
_OURS = {"vocab_size": 32768, "tied": False, "qk_norm": True}
OURS = {
    "ours_d12": {"n_layer": 12, "n_head": 6, "n_embd": 768, "n_ffn": 2048, **_OURS},
    "ours_d26": {"n_layer": 26, "n_head": 13, "n_embd": 1664, "n_ffn": 4480, **_OURS},     # 8/3 x 1664 = 4437, to tiles of 128
}
# What is used of each checkout, by file; commit and SHA-256 of the files, in this order, that this was written for.
USED = {
    "nanogpt": {"model.py": ("GPTConfig.block_size", "GPTConfig.vocab_size", "GPTConfig.n_layer", "GPTConfig.n_head",
                             "GPTConfig.n_embd", "GPTConfig.dropout", "GPTConfig.bias", "GPT.forward",
                             "GPT.configure_optimizers")},
    "nanochat": {"nanochat/__init__.py": (),
                 "nanochat/common.py": ("COMPUTE_DTYPE",),
                 "nanochat/optim.py": ("MuonAdamW.step",),
                 "nanochat/flash_attention.py": ("USE_FA3",),
                 "nanochat/fp8.py": ("Float8Linear", "Float8LinearConfig.from_recipe_name", "convert_to_float8_training"),
                 "nanochat/gpt.py": ("GPTConfig.sequence_len", "GPTConfig.vocab_size", "GPTConfig.n_layer", "GPTConfig.n_head",
                                     "GPTConfig.n_kv_head", "GPTConfig.n_embd", "GPTConfig.window_pattern", "Linear",
                                     "GPT.init_weights", "GPT.setup_optimizer", "GPT.forward")},
}
WRITTEN_FOR = {"nanogpt": ("3adf61e", "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c"),
               "nanochat": ("92d63d4", "db8f978f3b79917faf305d94e2f1c81ca758e51fd6bdd445c0fd8e9232778ac8")}


def check(name: str, folder: str) -> str:
    """What the checkout in `folder` is, in words, read without running it.

    Raises UserError for an unknown name, and where the folder is no checkout or of a version that lacks what is used here."""
    peer = _peer(name)
    root = Path(folder).expanduser()
    for file, needed in USED[peer].items():
        if not (root / file).is_file():
            raise UserError(f"{peer}={folder} is no checkout of {peer}: it has no {file}; give the folder that "
                              f"git clone https://github.com/karpathy/{'nanoGPT' if peer == 'nanogpt' else peer} makes")
        try:
            defined = _defined(ast.parse((root / file).read_bytes()))
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{root / file} is no Python ({error}): check {peer} out anew") from error
        if missing := [n for n in needed if n not in defined]:
            raise UserError(f"{root / file} is of a version that this benchmark does not know: it lacks {', '.join(missing)}; "
                              f"check out {peer} at commit {WRITTEN_FOR[peer][0]}")
    commit, digest = WRITTEN_FOR[peer]
    found = hashlib.sha256(b"".join((root / file).read_bytes() for file in USED[peer])).hexdigest()
    return f"{peer} {commit}" if found == digest else f"{peer}, another version than {commit}: SHA-256 {found[:12]}"


def load(name: str, folder: str, size: str, micro_batch: int, T: int, device: torch.device, *, tokens_per_step: int,
         seed: int, overrides: dict | None = None) -> Subject:
    """The peer `name` of `size` on `device`, initialised and set to compile at its first micro-step.

    overrides: fields of the peer's GPTConfig, for rehearsals. Imports the checkout's code, sets the process's matmul
    precision as the peer does, and, for nanochat, two variables of the environment: meant for a process of its own.
    Raises UserError: see check(); a size of another peer, an unknown field, a step that is no whole number of micro-batches.
    """
    version, peer = check(name, folder), _peer(name)
    sizes = [s for s in SIZES if s.startswith(peer)]
    if size not in sizes:
        raise UserError(f"size={size!r} is no size of {name}{nearest(size, sizes)}")
    if tokens_per_step % (micro_batch * T):
        raise UserError(f"tokens_per_step={tokens_per_step} is not a whole number of micro-batches of {micro_batch} x {T} "
                          f"tokens: change either")
    accumulation = tokens_per_step // (micro_batch * T)
    torch.manual_seed(seed)
    build = _nanogpt if peer == "nanogpt" else partial(_nanochat, is_fp8=name == "nanochat_fp8")
    subject = build(Path(folder).expanduser().resolve(), {**SIZES[size], **(overrides or {})}, T, device, accumulation)
    subject.describe.insert(0, f"{size}: {version}, under torch {torch.__version__}")
    return subject


# ------------------------------------------------------------------------------------------------------------ nanoGPT

def _nanogpt(root: Path, size: dict, T: int, device: torch.device, accumulation: int) -> Subject:
    # Under another name than its own: there is a model.py here, too.
    module = _import("nanogpt_model", root / "model.py")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    config = _config(module, "nanogpt", {"block_size": T, "vocab_size": 50304, "dropout": 0.0, "bias": False} | size)
    with device:    # drawn there: the CPU would need a minute for XL
        model = module.GPT(config)
    compiled = torch.compile(model)

    def autocast():     # nanoGPT's own rule: none on a CPU, where it trains in fp32
        return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

    def micro_step(x, y):
        with autocast():
            _, loss = compiled(x, y)
            scaled = loss / accumulation
        scaled.backward()
        return loss.detach()

    def update(optimizers):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _step(optimizers)

    return Subject(
        model, config.vocab_size, micro_step,
        lambda: [model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)], update,
        counts=_counts(model, nn.Linear, config, T), of=_count(model, nn.Linear),
        describe=["nanogpt: LayerNorm and Linears without bias, no dropout, tied head of 50304: the defaults of its train.py",
                  *([] if device.type == "cuda" else ["nanogpt: fp32 on this device, as it does: not the numbers of a GPU"])])


# ----------------------------------------------------------------------------------------------------------- nanochat

def _nanochat(root: Path, size: dict, T: int, device: torch.device, accumulation: int, is_fp8: bool) -> Subject:
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"           # its choice on an H100; its CPU default is fp32
    os.environ.setdefault("HF_HUB_OFFLINE", "1")        # a benchmark downloads no attention kernel
    gpt, fp8, attention = (_import_nanochat(root, room) for room in ("gpt", "fp8", "flash_attention"))
    torch.set_float32_matmul_precision("high")
    config = _config(gpt, "nanochat", {"sequence_len": T, "vocab_size": 32768, "window_pattern": "L"} | size)
    with torch.device("meta"):
        model = gpt.GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    filled = _fill_zero_matrices(model)
    linears = _count(model, gpt.Linear)
    counts = _counts(model, gpt.Linear, config, T)
    if is_fp8:
        fp8.convert_to_float8_training(model, config=fp8.Float8LinearConfig.from_recipe_name("tensorwise"),
                                       module_filter_fn=_is_for_fp8)
        counts["fp8_flops_per_token"] = 6 * _weights(model, fp8.Float8Linear)
    compiled = torch.compile(model, dynamic=False)

    def micro_step(x, y):
        loss = compiled(x, y)
        (loss / accumulation).backward()
        return loss.detach()

    def optimizers():
        return [model.setup_optimizer(unembedding_lr=0.008, embedding_lr=0.3, scalar_lr=0.5, matrix_lr=0.02, weight_decay=0.28)]

    return Subject(
        model, config.vocab_size, micro_step, optimizers, _step, counts=counts,
        converted=_count(model, fp8.Float8Linear), of=linears,
        describe=[f"nanochat: attention by {'FlashAttention 3' if attention.USE_FA3 else 'torch (no FlashAttention 3 here)'}, "
                  f"window_pattern {config.window_pattern}: whole context, where its own default is SSSL",
                  f"nanochat: {filled} weights that begin at zero were given random values: zeros multiply faster",
                  "nanochat: its update is Muon with AdamW, without clipping; vocabulary 32768; value embeddings count no FLOPs"])


def _is_for_fp8(module: nn.Module, name: str) -> bool:
    """The Linears that nanochat's base_train converts."""
    n = (module.in_features, module.out_features)
    return all(size % 16 == 0 for size in n) and min(n) >= 128


@torch.no_grad()
def _fill_zero_matrices(model: nn.Module) -> int:
    """Random values, of the size that nanochat gives mlp.c_fc, for every matrix of zeros; returns how many there were."""
    zeros = [p for p in model.parameters() if p.ndim == 2 and not p.count_nonzero()]
    for p in zeros:
        nn.init.normal_(p, std=0.4 * p.size(1) ** -0.5)
    return len(zeros)


# -------------------------------------------------------------------------------------------------------------- common

def _step(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _counts(model: nn.Module, linear: type, config, T: int) -> dict[str, int]:
    matmul = _weights(model, linear)
    attention = 12 * config.n_layer * config.n_embd * T     # n_embd = heads x head size
    return {"flops_per_token": 6 * matmul + attention, "flops_per_token_causal": 6 * matmul + attention // 2,
            "fp8_flops_per_token": 0, "params_total": sum(p.numel() for p in model.parameters()), "params_matmul": matmul}


def _weights(model: nn.Module, cls: type) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, cls))


def _count(model: nn.Module, cls: type) -> int:
    return sum(isinstance(m, cls) for m in model.modules())


def _config(module: ModuleType, peer: str, values: dict):
    known = [f.name for f in fields(module.GPTConfig)]
    for key in values:
        if key not in known:
            raise UserError(f"model.{key} is no field of {peer}'s GPTConfig{nearest(key, known)}")
    return module.GPTConfig(**values)


def _peer(name: str) -> str:
    if name not in NAMES:
        raise UserError(f"peer {name!r} is none of {', '.join(NAMES)}")
    return name.partition("_")[0]


def _defined(tree: ast.Module) -> set[str]:
    """What a file binds at its top level and, as Class.name, in its classes, without running it."""
    names = set()
    for prefix, body in [("", tree.body)] + [(f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef)]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(prefix + node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            names |= {prefix + n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def _import_nanochat(root: Path, room: str) -> ModuleType:
    """nanochat.<room> of this checkout. Its package alone becomes importable, not the folders beside it (tasks, tests)."""
    package = sys.modules.get("nanochat")
    if package is None or list(package.__path__) != [str(root / "nanochat")]:
        for loaded in [n for n in sys.modules if n.partition(".")[0] == "nanochat"]:
            del sys.modules[loaded]
        _import("nanochat", root / "nanochat" / "__init__.py", [str(root / "nanochat")])
    return _guarded(root / "nanochat" / f"{room}.py", lambda: importlib.import_module(f"nanochat.{room}"))


def _import(name: str, path: Path, search: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=search)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)      # dataclasses look their module up there
    _guarded(path, lambda: spec.loader.exec_module(module))
    return module


def _guarded(path: Path, run: Callable):
    try:
        return run()
    except Exception as error:      # whatever a stranger's file may do
        raise UserError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
