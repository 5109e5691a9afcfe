"""Turn text into token shards that training reads.

    python prepare_data.py demo                         this Python installation's own text -> data/demo/<four sources>
    python prepare_data.py local FILE... name=mydata    your .txt, .jsonl, .parquet (also .gz, .xz, .zst) -> data/mydata
    python prepare_data.py --verify data/demo           hash every shard again; says OK or names the bad one

Options are key=value, a leading -- is accepted:
    out=FOLDER          folder of the sources (demo: data/demo, local: data)
    tokenizer=NAME      gpt2 or byte (demo: byte, local: gpt2)
    val_share=0.005     share of the documents, by hash, that is kept for validation (demo: 0.04)
    name=NAME           local: what the mixture calls the source
    column=NAME         local: which column holds the text (text)
    license=WORDS       local: written to index.json ("not stated")

A document that came before, word for word, is dropped. What is complete stays as it is; what was cut off starts anew.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from runtime import harvest
from runtime.annotations import nearest
from runtime.config import ConfigError
from runtime.documents import LocalFiles
from runtime.shards import Index, ShardWriter, Split, damage, read_index, remove_shards, write_index
from runtime.tokenizer import Tokenizer, clean, load_tokenizer

HASH_STEPS = 10_000             # val_share is kept in steps of 1 / this

DEFAULTS = {
    "demo": {"out": "data/demo", "tokenizer": "byte", "val_share": "0.04"},     # small sources need a larger share
    "local": {"out": "data", "tokenizer": "gpt2", "val_share": "0.005", "name": "", "column": "text",
              "license": "not stated"},
    "verify": {},
}


@dataclass(frozen=True)
class Source:
    """Where documents come from; everything after `documents` is common to all sources."""
    name: str
    documents: Callable[[], Iterable[str]]      # the same documents in the same order at each call
    dataset: str
    revision: str
    license: str
    may_age: bool = False                       # whether shards of an older revision serve as well
    share_read: Callable[[], float] = lambda: 0.0   # how far the last iteration has come, 0 to 1, where that is known


def demo_sources() -> list[Source]:
    """What is installed; every machine has other versions, so an older harvest serves as well."""
    return [Source(name, lambda name=name: harvest.documents(name, note=lambda text: print(text, file=sys.stderr)),
                   "installed", harvest.revision(name), license, may_age=True)
            for name, license in harvest.LICENSES.items()]


def local_source(paths: list[str], name: str, column: str, license: str) -> Source:
    """Raises ConfigError: no name, no files, a missing file or one of another kind."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"name={name!r} must be one folder name, of letters, digits, '_', '-' and '.', such as "
                          f"name=mydata")
    if not paths:
        raise ConfigError("no file is named: python prepare_data.py local FILE... name=mydata")
    files = LocalFiles(paths, column)
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files.paths]
    return Source(name, lambda: files, f"local: {', '.join(p.name for p in files.paths)}; column {column}",
                  hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16], license,
                  share_read=lambda: files.bytes_read / max(1, files.bytes_total))


# ------------------------------------------------------------------------------------------------------------ preparing

def prepare(sources: list[Source], out: Path, tokenizer: Tokenizer, val_per_10k: int) -> None:
    """Makes out/<source>/ for each source that is not complete yet, one document in memory at a time.

    Raises ConfigError: bad input, or a folder that holds something else. Then what was begun is removed again.
    """
    common = {
        "tokenizer": tokenizer.name, "tokenizer_sha256": tokenizer.sha256,
        "split_rule": f"val where int.from_bytes(blake2b(text, digest_size=8).digest(), 'little') % {HASH_STEPS} "
                      f"< {val_per_10k}, else train",
    }
    complete = {source.name for source in sources if _is_complete(source, out / source.name, common)}
    seen: set[int] = set()      # of all sources: no document comes twice, so none lies in both splits
    for source in sources:
        if source.name not in complete:
            _write_source(source, out / source.name, tokenizer, val_per_10k, seen, common)
        elif len(complete) < len(sources):      # the sources after this one drop what it holds
            seen.update(_digest(clean(text).encode()) for text in source.documents())


def _is_complete(source: Source, folder: Path, common: dict) -> bool:
    if not (folder / "index.json").exists():
        return False
    index = _read(folder)
    for key, wanted in {"dataset": source.dataset, **common, "revision": source.revision}.items():
        found = getattr(index, key)
        if found == wanted:
            continue
        if key == "revision" and source.may_age:
            print(f"{folder} was made from {found}; delete it to harvest what is installed now", file=sys.stderr)
        elif key == "revision":
            raise ConfigError(f"{folder} was made when {source.dataset} held something else: delete it, or give "
                              f"another name=")
        else:
            raise ConfigError(f"{folder} holds shards of {key}={found!r}, not {wanted!r}: delete it, or give another "
                              f"out=")
    print(f"{folder} is complete")
    _print_row(source.name, index.splits, index.license)
    return True


def _write_source(source: Source, folder: Path, tokenizer: Tokenizer, val_per_10k: int, seen: set[int],
                  common: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_shards(folder)       # of a run that was killed
    splits = {name: ShardWriter(folder, name) for name in ("train", "val")}
    progress, duplicates, empty = Progress(source), 0, 0
    try:
        for text in source.documents():
            text = clean(text)
            data = text.encode()
            digest = _digest(data)
            if not text.strip():
                empty += 1
            elif digest in seen:
                duplicates += 1
            else:
                seen.add(digest)
                split = splits["val" if digest % HASH_STEPS < val_per_10k else "train"]
                split.add(len(data), tokenizer.encode_document(text))
            progress.show(len(data))
        _check_splits(source, splits, duplicates + empty)
        write_index(folder, {
            "source": source.name, **common, "vocab_size": tokenizer.vocab_size, "dataset": source.dataset,
            "revision": source.revision, "license": source.license, "duplicates": duplicates,
            "splits": {name: split.finish() for name, split in splits.items()}})
    except BaseException:
        for split in splits.values():
            split.abandon()
        remove_shards(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
        raise
    finally:
        progress.clear()
    print(f"{folder}: {duplicates} documents dropped that came before, {empty} empty ones")
    _print_row(source.name, _read(folder).splits, source.license)


def _read(folder: Path) -> Index:
    try:
        return read_index(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _digest(data: bytes) -> int:
    """A document's name, for the split and for finding copies: among 10 million, a false copy has odds of 3e-6."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _check_splits(source: Source, splits: dict[str, "ShardWriter"], dropped: int) -> None:
    documents = {name: split.documents for name, split in splits.items()}
    total = sum(documents.values())
    if not total:
        raise ConfigError(f"{source.name} has no documents: {source.dataset} holds no text" +
                          (f" ({dropped} were empty or copies)" if dropped else ""))
    for name, count in documents.items():
        if not count:
            raise ConfigError(f"none of the {total} documents of {source.name} fell to the {name} split: give more "
                              f"documents, or another share, such as val_share={min(0.5, max(0.01, 5 / total)):.2g}")


# ------------------------------------------------------------------------------------------------------------ verifying

def verify(folders: list[Path]) -> None:
    """Hashes every shard again and prints a line per source. Raises ConfigError naming all that differ."""
    bad = []
    for folder in folders:
        for source in sorted(path.parent for path in folder.rglob("index.json")) or [folder]:
            found = list(damage(source))
            print(f"{'BAD' if found else 'OK '} {source}")
            bad += found
    if bad:
        raise ConfigError("\n".join(bad))


# ------------------------------------------------------------------------------------------------------------- printing

class Progress:
    """One live line on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, source: Source):
        self._source, self._start, self._bytes, self._documents = source, time.monotonic(), 0, 0
        self._is_live = sys.stderr.isatty()
        self._shown = self._start

    def show(self, text_bytes: int) -> None:
        self._documents, self._bytes = self._documents + 1, self._bytes + text_bytes
        now = time.monotonic()
        if now - self._shown < (0.2 if self._is_live else 10):
            return
        self._shown, mb, done = now, self._bytes / 1e6, self._source.share_read()
        wall_s = now - self._start
        line = f"{self._source.name}: {self._documents:,} documents, {mb:,.1f} MB, {mb / wall_s:.1f} MB/s"
        if done:
            line += f", {done:.0%}, {wall_s * (1 - done) / done:,.0f} s left"
        print(f"\r{line:<79}" if self._is_live else line + "\n", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_live:
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)


def _print_row(name: str, splits: dict[str, Split], license: str) -> None:
    for split, s in splits.items():
        print(f"  {name:12} {split:5} {s.documents:>9,} documents {s.text_bytes / 1e6:>9,.2f} MB "
              f"{s.tokens:>14,} tokens  {license}")


# --------------------------------------------------------------------------------------------------------- command line

def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code: 0, or 2 for a mistake told on stderr."""
    try:
        return _run(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ninterrupted: the source at hand was removed again, finished ones stay", file=sys.stderr)
        return 130
    return 2


def _run(arguments: list[str]) -> int:
    command = arguments[0].removeprefix("--") if arguments else "help"
    if command in ("help", "-h"):
        print(__doc__)
        return 0
    if command not in DEFAULTS:
        raise ConfigError(f"there is no command {arguments[0]!r}{nearest(command, list(DEFAULTS))}")
    options, words = _parse(arguments[1:], DEFAULTS[command])
    if command == "verify":
        verify([Path(word) for word in words] or [Path("data")])
        return 0
    if command == "demo" and words:
        raise ConfigError(f"demo takes no {words[0]!r}: it reads what is installed; your files are for `local`")
    try:
        tokenizer = load_tokenizer(options["tokenizer"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    val_per_10k = _per_10k(options["val_share"])
    sources = demo_sources() if command == "demo" else [
        local_source(words, options["name"], options["column"], options["license"])]
    prepare(sources, Path(options["out"]), tokenizer, val_per_10k)
    return 0


def _parse(arguments: list[str], defaults: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Options and plain words. Raises ConfigError for a key that does not exist."""
    options, words = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.removeprefix("--").partition("=")
        if equals and key in defaults:
            options[key] = value
        elif argument.startswith("--") or (equals and not Path(argument).exists()):
            known = nearest(key, [f"{name}=..." for name in defaults]) if defaults else "; verify takes folders alone"
            raise ConfigError(f"there is no option {argument!r}{known}")
        else:
            words.append(argument)
    return options, words


def _per_10k(text: str) -> int:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 1 / HASH_STEPS <= share <= 0.5:
        raise ConfigError(f"val_share={text} must be a number from {1 / HASH_STEPS} to 0.5")
    return round(share * HASH_STEPS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
