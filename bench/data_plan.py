"""Work out the plan of a real run from what bench/data.py measured."""

import statistics
from collections.abc import Iterator

from configs.mixture import MIXTURE

# Bytes a token: of text, and of what the Hub sends; sizes and token counts on the data sets' cards, arXiv's text a guess of them.
# FineWeb-Edu's text column is 2.05 bytes a token of its files' 2.9, but almost all of a file is sent: its parts are asked for in
# blocks of 32 MiB (prepare/hub_files.py), which hold the other columns of their row groups too.
TEXT_BYTES = {"fineweb_edu": 4.6, "python": 2.2, "c": 2.3, "arxiv": 4.0}
DOWNLOAD_BYTES = {"fineweb_edu": 2.9, "python": 1.49, "c": 1.49, "arxiv": 1.19}
VAL_SHARE = 0.005               # on top of the training tokens
BYTES_PER_DOCUMENT = 16 + 8 + 1     # a row of a piece's table, of hashes.npy, of the mask of what is kept
DOCUMENT_TOKENS = 1_000


def medians(rows: list[dict]) -> dict[tuple[str, int], dict[str, float]]:
    """(backend, processes) -> the median of each number over its turns."""
    groups = {}
    for row in rows:
        groups.setdefault((row["backend"], row["processes"]), []).append(row)
    return {key: {name: statistics.median(row[name] for row in group) for name in group[0] if name != "backend"}
            for key, group in groups.items()}


def speeds(preparing: dict) -> Iterator[str]:
    """A line per backend and number of processes: MB/s, and as shares of n x raw; medians over the turns."""
    single, tokens = 1 / statistics.median(turn["wall"] for turn in preparing["single"]), preparing["tokens"]
    yield (f"{preparing['documents']:,} documents, {preparing['mb']:.0f} MB, {tokens / 1e6:.1f}M tokens; "
           f"raw tiktoken, one process: {single:.1f} MB/s, {single * tokens / preparing['mb'] / 1e6:.2f}M tok/s")
    yield "                      MB/s                  of n x raw           net of  raw's CPU  main process    peak MiB"
    yield "backend     n  at once  gross    net  at once  gross    net  at once    of net  CPU s per GB  main  child"
    for (backend, n), row in medians(preparing["rows"]).items():
        yield (f"{backend:10} {n:2}  {1 / row['at_once']:7.1f} {1 / row['gross']:6.1f} {1 / row['net']:6.1f}  "
               f"{row['at_once_ratio']:7.3f} {row['gross_ratio']:6.3f} {row['net_ratio']:6.3f}  "
               f"{row['at_once'] / row['net']:7.3f}  {row['cpu_ratio']:8.3f}  {1000 * row['main_cpu']:12.2f}  "
               f"{row['main_mib']:4.0f}  {row['child_mib']:5.0f}")


def scaled(results: dict) -> Iterator[str]:
    """What was measured at the size of the real run, or per billion tokens."""
    for row in results["loader"]:
        yield (f"loader: {row['tok_per_s'] / 1e6:.1f}M tok/s on one core, T=1024, micro_batch={row['micro_batch']}, from warm "
               f"page cache")
    order, layout, write = results["order"], results["layout"], results["write"]
    yield (f"order of {order['windows']:,} windows: {order['open_s']:.2f} s to open, {1e3 * order['step_s']:.2f} ms a step "
           f"= {order['tok_per_s'] / 1e6:,.0f}M tok/s, {order['mib']:.0f} MiB")
    yield (f"copies among {layout['documents']:,} documents in {layout['pieces']:,} pieces: {layout['layout_s']:.1f} s, "
           f"{layout['commit_s']:.1f} s to make it final, {layout['mib']:.0f} MiB")
    yield f"shards: {write['s_per_billion']:.1f} s per billion tokens in one process, {write['mib']:.0f} MiB"


def plan(results: dict, scale: float, cores: int) -> Iterator[str]:
    """How long `scale` tokens of the mixture take on `cores` cores, what network and what disk they need.

    Assumed: each of their processes is as quick, in bytes, as one here while the most were at work."""
    text, download = (scale / 1e9 * sum(share * size[name] for name, share in MIXTURE.items())
                      for size in (TEXT_BYTES, DOWNLOAD_BYTES))
    documents, layout, write = scale / DOCUMENT_TOKENS, results["layout"], results["write"]
    found = medians(results["preparing"]["rows"])
    yield (f"plan for {scale / 1e9:.1f}B tokens on {cores} cores: {text:.0f} GB of text ({text / scale * 1e9:.1f} bytes a "
           f"token), {download:.0f} GB to download")
    for backend in dict.fromkeys(name for name, _ in found):
        most = max(n for name, n in found if name == backend)
        row = found[backend, most]
        if not row["net"] > 0:
            yield f"  {backend}: too little text to tell its speed from its start: give more mb="
            continue
        mb_per_s, feed = cores / most / row["net"], 1 / max(row["main_cpu"], 1e-9)
        workers = min(cores, -(-mb_per_s // feed)) if most > 1 else cores
        yield (f"  {backend}: {text * 1e3 / mb_per_s / 60:.0f} min to tokenise at {mb_per_s:.0f} MB/s of text "
               f"({1 / row['net'] / most:.1f} a process, measured with {most} at work), "
               f"{scale / text * mb_per_s / 1e9:.1f}M tok/s, if the network brings {download / text * mb_per_s:.0f} MB/s")
        if most > 1:
            yield (f"    a main process can feed {feed:.0f} MB/s of text to its children: {workers:.0f} workers of "
                   f"{cores // workers:.0f} processes or more")
    shards_s = write["s_per_billion"] * scale / 1e9 * (1 + VAL_SHARE)
    yield (f"  {(layout['layout_s'] + layout['commit_s']) * documents / layout['documents'] / 60:.1f} min to find the copies, "
           f"{shards_s / 60:.0f} min to make the shards in one process")
    disk = 2 * scale * (1 + VAL_SHARE) + documents * BYTES_PER_DOCUMENT + 3 * 200e6
    yield (f"  {disk / 1e9:.1f} GB of disk at most: two bytes a token, {BYTES_PER_DOCUMENT} a document, pieces and a shard at "
           f"hand")
