"""Where the time of a micro-step goes: the kernels in the rows of bench.throughput, by kind and by
name."""

from collections import Counter
from collections.abc import Mapping, Sequence

from bench.rows import Kernel
from lib.text import grid

KINDS = {  # kind -> beginnings of the kernels' names
    "matmuls": ("nvjet_", "cutlass", "sm90_xmma_gemm", "sm100_xmma_gemm"),
    "attention": (
        "cudnn_generated_fort_native_sdpa",
        "void cudnn::fusion::",
        "void pytorch_flash::",
        "flash_",
    ),
    "torch.compile's kernels": ("triton_",),
    # fp8/triton_kernels.py, fp8/producer_kernels.py
    "our kernels": ("cast_both", "cross_entropy_grad", "copy", "norm", "swiglu", "rope_grad"),
}
OTHER = "other kernels"
NAME_WIDTH = 60  # characters of a kernel's name that tell it from others


def kernel_kind(kernel: str) -> str:
    for kind, beginnings in KINDS.items():
        if kernel.startswith(beginnings):
            return kind
    return OTHER


def milliseconds_by_kind(kernels: Sequence[Kernel]) -> Counter[str]:
    """Sums over the kernels of a kind."""
    sums: Counter[str] = Counter()
    for name, milliseconds in kernels:
        sums[kernel_kind(name)] += milliseconds  # type: ignore[assignment]  # a Counter of floats
    return sums


def table_of_kinds(columns: Mapping[str, Sequence[Kernel]]) -> str:
    """Markdown: a row a kind, a column a precision. columns: title -> the longest kernels of one
    micro-step."""
    sums = {title: milliseconds_by_kind(kernels) for title, kernels in columns.items()}
    number = max(len(kernels) for kernels in columns.values())
    lines = [[f"ms of a micro-step, its {number} longest kernels", *columns]]
    for kind in (*KINDS, OTHER):
        lines.append([kind, *(f"{of_column[kind]:.1f}" for of_column in sums.values())])
    lines.append(["together", *(f"{sum(of_column.values()):.1f}" for of_column in sums.values())])
    return grid(lines)


def table_of_kernels(kernels: Sequence[Kernel]) -> str:
    """Markdown: the kernels of one micro-step in their order, the longest first."""
    lines = [["kernel", "kind", "ms"]]
    for name, milliseconds in kernels:
        lines.append([name[:NAME_WIDTH], kernel_kind(name), f"{milliseconds:.2f}"])
    return grid(lines)
