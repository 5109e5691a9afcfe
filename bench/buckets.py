"""Say from a trace's kernel names what the time of a step went to.

    matmul      of Linears, BF16 or FP8, with what cuBLAS adds to one (split-K sums)
    cast        kernels that only serve FP8 or change the number format: largest magnitudes, scales, copies in both layouts
    attention   forward and backward, with its helper kernels
    pointwise   norms, RoPE, SwiGLU, residuals, sums of gradients; a largest magnitude that a norm takes of its own output on
                the way is counted here, so that what FP8 costs is `cast` plus the growth of `pointwise` over BF16
    loss        softmax and cross-entropy, forward and backward
    optimizer   whatever the update runs, but for casts: clipping, AdamW
    other       copies between memories, fills by the driver, names that nobody here knows

Inductor calls a kernel triton_<kind>_fused_<operations>_<number> (on a CPU cpp_fused_..), its operations those of the graph
before decomposition. They include operations whose output is merely read or written: a pointwise kernel in front of a matmul
may have scaled_mm in its name. Hence such names are judged by their words, all others by patterns.
"""

import re
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

BUCKETS = ("matmul", "cast", "attention", "pointwise", "loss", "optimizer", "other")
GENERATED = re.compile(r"(?:^|_)(triton|cpp)_(?:(poi|per|red|tem|for|spl|mix)_)?fused_?(.*?)_?\d*$")
LOSS = {"softmax", "nll", "logsumexp", "cross", "gather"}
SUMS = {"mean", "rsqrt", "pow", "sum", "add", "embedding", "index", "norm"}     # norms, their backward, residuals, embedding
SHAPED = {"silu", "cat", "neg", "sub", "sigmoid", "attention", "exp"}           # SwiGLU, RoPE
# Vendors' kernels, torch's own, ours; the first that is found counts. Attention stands before matmul: its kernels are built
# from CUTLASS, too, and cuDNN computes nothing else here.
PATTERNS = (
    ("loss", r"cross_entropy|softmax|nll_loss|logsumexp"),
    ("cast", r"cast_both|copy_kernel|aten::(_to_copy|to|copy_|clone|contiguous|clamp\w*|abs|a?max)$"),
    ("optimizer", r"multi_tensor_apply|fused_?adam|lpnorm|_foreach_"),
    ("attention", r"cudnn|sdpa|flash|fmha|attention|\bmha"),
    ("matmul", r"nvjet|cutlass|gemm|gemv|xmma|cublas|splitk|scaled_mm|matmul|aten::(mm|addmm|bmm|linear)$"),
    ("other", r"^mem(cpy|set)|nccl"),
    ("pointwise", r"at::native|aten::|elementwise|reduce_kernel|index|compiledfxgraph"),
)


class ProfilerError(RuntimeError):
    """This machine's profiler tells nothing; what was to be traced has run all the same, or was not begun."""


def bucket_of(name: str) -> str:
    """The one of BUCKETS that a kernel, or on a CPU an operator, belongs to by its name."""
    if generated := GENERATED.search(name):
        return _of_words(generated[2], set(generated[3].split("_")))
    low = name.lower()
    return next((bucket for bucket, pattern in PATTERNS if re.search(pattern, low)), "other")


def _of_words(kind: str | None, words: set[str]) -> str:
    if kind == "tem":       # a template that Inductor filled in: a matmul, or flex attention
        return "attention" if "attention" in words else "matmul"
    if words & LOSS and "pow" not in words:     # the last norm's backward pass divides by the loss's own count
        return "loss"
    if words & SUMS:
        return "pointwise"
    if "clamp" in words:    # a scale, or an FP8 copy: what is computed again on the way, such as SwiGLU, saves a read
        return "cast"
    if words & {"abs", "amax"}:     # torchao's `max` of SwiGLU writes nothing else, our `amax` rides on what writes SwiGLU
        return "pointwise" if "cat" in words or {"silu", "amax"} <= words else "cast"
    return "cast" if words & {"copy", "clone"} and not words & SHAPED else "pointwise"


def sums(kernels: Iterable[tuple[str, float, float]], update: bool = False) -> dict[str, float]:
    """Seconds by bucket, of kernels (name, seconds, calls); of an optimizer's update all that is no cast is the optimizer."""
    out = dict.fromkeys(BUCKETS, 0.0)
    for name, seconds, _ in kernels:
        bucket = bucket_of(name)
        out["optimizer" if update and bucket != "cast" else bucket] += seconds
    return out


def trace(act: Callable[[], object], device: torch.device) -> tuple[list[tuple[str, float, float]], float]:
    """Run `act` under the profiler: ([(name, seconds, calls)] with the longest first, seconds from first to last).

    On a GPU its kernels, copies and fills; on a CPU the operators, each without those it calls. Nothing else is recorded, so
    that launching stays quick. Raises ProfilerError where nothing can be seen (no CUPTI, or no right to use it)."""
    on_gpu = device.type == "cuda"
    try:
        found = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
        found.start()
    except Exception as error:
        raise ProfilerError(f"the profiler did not start: {type(error).__name__}: {error}") from error
    try:
        act()
        if on_gpu:
            torch.cuda.synchronize(device)
    finally:
        found.stop()
    # Of a GPU the raw events: the lists that torch makes of them take seconds for some 10,000 kernels. A range of kernels
    # that somebody gave a name is no kernel.
    raw = [e for e in found.profiler.kineto_results.events() if not e.is_user_annotation()]
    total: dict[str, list[float]] = {}
    if on_gpu:
        raw = [e for e in raw if e.device_type() == torch.autograd.DeviceType.CUDA]
        for e in raw:
            entry = total.setdefault(e.name(), [0.0, 0])
            entry[0] += e.duration_ns() / 1e9
            entry[1] += 1
    else:
        total = {e.key: [e.self_cpu_time_total / 1e6, e.count] for e in found.key_averages()}
    if not total:
        raise ProfilerError("the profiler saw nothing run")
    span = (max(e.end_ns() for e in raw) - min(e.start_ns() for e in raw)) / 1e9
    return sorted(((name, s, n) for name, (s, n) in total.items()), key=lambda row: -row[1]), span
