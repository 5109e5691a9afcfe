"""Read from torch's counters what torch.compile did in this process."""

import sys


def graphs() -> int:
    """Graphs that were compiled, each variant of a recompiled one counted."""
    return _counters().get("stats", {}).get("unique_graphs", 0)


def graph_breaks() -> int:
    return sum(_counters().get("graph_break", {}).values())


def cache_counts() -> dict[str, int]:
    """Compiled graphs that were found on disk, and those that were not."""
    whole, inner = _counters().get("aot_autograd", {}), _counters().get("inductor", {})
    return {f"cache_{end}": max(whole.get(f"autograd_cache_{one}", 0), inner.get(f"fxgraph_cache_{one}", 0))
            for end, one in (("hits", "hit"), ("misses", "miss"))}


def shut_workers() -> None:
    """End Inductor's processes, as many as there are cores: warm cells have no use for them."""
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        compiler.shutdown_compile_workers()


def _counters() -> dict:
    """Nothing where torch.compile was never used: an eager cell need not import it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters if dynamo else {}
