"""Turn text into token shards that training reads.

    python prepare_data.py fineweb_edu python c arxiv tokens=31e9    the mixture of the 1.5B run, streamed from the Hub
    python prepare_data.py hf:OWNER/NAME column=text tokens=1e9      any parquet or JSON-lines data set there
    python prepare_data.py local FILE... name=mydata                 your .txt, .jsonl, .parquet (also .gz, .xz, .zst)
    python prepare_data.py demo                                      this Python installation's own text, a little
    python prepare_data.py installed                                 all its source code and headers: python and c
    python prepare_data.py --check-sources [NAME...]                 each source's first record: is it still there?
    python prepare_data.py --show [FOLDER...]                        what a data folder holds, finished or not
    python prepare_data.py --verify [FOLDER...]                      hash every shard again; OK, or the bad one's name
    python prepare_data.py --twins [FOLDER...]                       share of validation documents that training nearly holds

The named sources are values in configs/sources.py. Options are key=value, a leading -- is accepted:
    tokens=N                training tokens to prepare, split among several sources by configs/mixture.py (all there are)
    out=FOLDER              folder of the sources (data; demo: data/demo)
    tokenizer=NAME          gpt2, byte or a folder with tokenizer.json (gpt2; demo: byte)
    val_share=0.005         share of the documents, by hash, that is kept for validation (demo: 0.04)
    processes=N             processes that tokenise (one per core; demo: 1)
    worker=3/16             this is worker 3 of 16 on the same folder, of a job array say; torchrun sets it by itself
    decontaminate=FILE,...  drop documents that share 13 words in a row with these evaluation files
    skip_bad=true           finish without the files that could not be read, rather than stop before that
    name=NAME               what the mixture calls the source (its own name; needed for local)
    column=NAME             local, hf: which column holds the text (text)
    instruct=true           local: .jsonl lines {"prompt": ..., "response": ...}; only responses are learned
    license=WORDS           local, hf: written to index.json (not stated; hf: what the data set's card says)
    revision=, files=       hf: a commit or branch; a pattern of file names, such as files=sample/10BT/*.parquet

A document that came before, word for word, in this source or another one of the folder, is dropped. Killed at any
moment, the same command goes on, and the shards end as if nothing had happened, however many workers there were.
"""

import errno
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from configs.mixture import MIXTURE
from configs.sources import SOURCES
from prepare import harvest, hub, inventory, twins
from prepare.contamination import read_grams
from prepare.documents import PAIR, local_files
from prepare.installed import installed_sources
from prepare.job import HASH_STEPS, Job
from prepare.options import DEFAULTS, KEYS, Options
from prepare.parts import begun
from prepare.phases import Unfinished, prepare
from prepare.source import BadFile, Batch, Source, batches
from runtime.cli import UserError, nearest, read_options
from runtime.shards import read_index
from runtime.tokenizer import clean, load_tokenizer

# What a path itself is to blame for; any other error (no space, input/output, the network) is not the user's mistake.
USERS_PATHS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR,
               errno.ENAMETOOLONG}


# -------------------------------------------------------------------------------------------------------------- sources

@dataclass(frozen=True)
class Installed:
    """A source of the demo as one input file."""
    name: str
    bytes: int | None = None

    def read(self, skip_rows: int) -> Iterator[Batch]:
        texts = harvest.documents(self.name, note=lambda text: print(text, file=sys.stderr))
        return batches(map(clean, texts), skip_rows)


def demo_sources() -> list[Source]:
    """What is installed; every machine has other versions, so an older harvest serves as well."""
    return [Source(name, lambda known, name=name: [Installed(name)], "installed", harvest.revision(name), license, may_age=True)
            for name, license in harvest.LICENSES.items()]


def local_source(paths: list[str], options: Options) -> Source:
    """Raises UserError: no name, no files, a missing file or one of another kind."""
    name = _folder_name(options.name or "")
    if not paths:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    columns = PAIR if options.instruct else (options.column,)
    files = local_files(paths, *columns)
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in map(Path, paths)]
    dataset = f"local: {', '.join(p.name for p in map(Path, paths))}; column {' and '.join(columns)}"
    return Source(name, lambda known: files, dataset,
                  hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16], options.license or "not stated",
                  {"instruct": list(columns)} if options.instruct else {}, is_masked=options.instruct, has_stamps=True)


def any_source(dataset: str, options: Options) -> Source:
    """A data set of the Hub that configs/sources.py does not name; without revision= at the commit that was begun with."""
    name = _folder_name(options.name or dataset.partition("/")[2].lower())
    revision = options.revision or _revision(Path(options.out) / name, dataset)
    return hub.hub_source(name, hub.any_dataset(dataset, options.column, revision, options.files, options.license))


def _revision(folder: Path, dataset: str) -> str | None:
    """The commit of a data set that a folder holds, or part of it: one pushed meanwhile must not stop a resume."""
    try:
        found = vars(read_index(folder)) if (folder / "index.json").exists() else begun(folder / "parts") or {}
    except ValueError as error:
        raise UserError(str(error)) from error
    return found["revision"] if found.get("dataset") == dataset else None


def named_sources(names: list[str], options: Options) -> list[Source]:
    """Values of configs/sources.py; one alone may get another name. Raises UserError for a name that is not there."""
    for name in names:
        if name not in SOURCES or names.count(name) > 1:
            raise UserError(f"{name} is named twice" if name in SOURCES else
                              f"there is no source {name!r}{nearest(name, list(SOURCES))}; hf:OWNER/NAME and local FILE... are "
                              f"commands of their own")
    if options.name and len(names) > 1:
        raise UserError(f"name={options.name} can name one source, not {len(names)}")
    return [hub.hub_source(_folder_name(options.name or name), SOURCES[name]) for name in names]


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(f"name={name!r} must be one folder name, of letters, digits, '_', '-' and '.', such as name=mydata")
    return name


# --------------------------------------------------------------------------------------------------------- command line

def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a mistake told on stderr, 1 for the machine's faults."""
    before = signal.signal(signal.SIGTERM, _stop)
    for stream in (sys.stdout, sys.stderr):     # names and texts of any language, on a terminal of ASCII too
        getattr(stream, "reconfigure", dict)(errors="backslashreplace")
    try:
        return _run(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except Unfinished as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:     # --show | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno in USERS_PATHS:
            print(f"{error.filename}: {error.strerror}; name another file or out=", file=sys.stderr)
            return 2
        # An error of ours, without a number, says itself what to do.
        goes_on = "; what was prepared stays, and the same command goes on" if error.errno else ""
        print(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}{goes_on}", file=sys.stderr)
    except (KeyboardInterrupt, Stopped) as error:
        print("\ninterrupted: what was prepared stays, and the same command goes on", file=sys.stderr)
        return 143 if isinstance(error, Stopped) else 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 1


class Stopped(BaseException):
    """SIGTERM: pieces at hand are dropped, locks and processes let go."""


def _stop(*_) -> None:
    raise Stopped


def _run(arguments: list[str]) -> int:
    words = [word for word in arguments if "=" not in word]
    if arguments and not words:
        raise UserError(f"{arguments[0]} does not say what to prepare: name a source, such as fineweb_edu; --help lists all")
    command = (words[0] if words else "help").removeprefix("--")
    if command in ("help", "-h"):
        print(__doc__)
        return 0
    kind = "named" if command in SOURCES else "hf" if command.startswith("hf:") else command
    if kind not in KEYS:
        raise UserError(f"there is no command {words[0]!r}{nearest(command, [*KEYS.keys() - {'named', 'hf'}, *SOURCES])}")
    first = arguments.index(words[0])
    options = read_options(Options, arguments[:first] + arguments[first + 1:], KEYS[kind], DEFAULTS.get(kind))
    words = list(options.words)
    if kind == "show":
        print(*inventory.show([Path(word) for word in words] or [Path(options.out)]), sep="\n")
        return 0
    if kind == "verify":
        inventory.verify([Path(word) for word in words] or [Path(options.out)])
        return 0
    if kind == "twins":
        for folder in words or [options.out]:
            for line in twins.describe(Path(folder)):
                print(line, flush=True)
        return 0
    if kind == "check-sources":
        return _check_sources(words or list(MIXTURE))
    if kind in ("demo", "installed", "hf") and words:
        raise UserError(f"{command} takes no {words[0]!r}" + (": one data set at a time" if kind == "hf" else
                                                                ": it reads what is installed; your files are for `local`"))
    job = _job(options)     # what is wrong with the options is told before any server is asked
    sources = (demo_sources() if kind == "demo" else installed_sources() if kind == "installed" else
               [local_source(words, options)] if kind == "local" else
               [any_source(command.removeprefix("hf:"), options)] if kind == "hf" else named_sources([command, *words], options))
    prepare(sources, replace(job, budgets=_budgets(options.tokens, [source.name for source in sources])))
    return 0


def _check_sources(names: list[str]) -> int:
    code = 0
    for name in names:
        if name not in SOURCES:
            raise UserError(f"there is no source {name!r}{nearest(name, list(SOURCES))}")
        try:
            for line in hub.check(name, SOURCES[name]):
                print(line, flush=True)
        except (UserError, OSError, BadFile) as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = 2 if isinstance(error, UserError) else max(code, 1)
    return code


def _job(options: Options) -> Job:
    tokenizer = load_tokenizer(options.tokenizer)
    worker, workers = _worker(options.worker)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = options.processes or max(1, cores // (_from_torchrun("LOCAL_WORLD_SIZE") or 1))
    return Job(out=Path(options.out), tokenizer=tokenizer,
               val_per_10k=round(options.val_share * HASH_STEPS), processes=processes, worker=worker, workers=workers,
               grams=read_grams(list(options.decontaminate)) if options.decontaminate else None,
               skip_bad=options.skip_bad, is_quiet=options.worker is None and worker > 1)


def _worker(text: str | None) -> tuple[int, int]:
    """Which worker this is, from 1, and of how many: by worker=, or as torchrun says in the environment."""
    if text is None:
        rank, size = _from_torchrun("RANK"), _from_torchrun("WORLD_SIZE")
        return (1, 1) if rank is None or size is None else (rank + 1, size)
    worker, slash, workers = text.partition("/")
    if not (worker + workers).isascii() or not (worker.isdigit() and workers.isdigit() and 1 <= int(worker) <= int(workers)):
        raise UserError(f"worker={text!r} must be this one's number, from 1, and how many there are, such as worker=3/16")
    return int(worker), int(workers)


def _from_torchrun(name: str) -> int | None:
    """A number that torchrun sets; without torchrun, whatever is set, None."""
    value = os.environ.get(name, "")
    return int(value) if "TORCHELASTIC_RUN_ID" in os.environ and value.isdecimal() else None


def _budgets(tokens: float | None, names: list[str]) -> dict[str, int]:
    """Training tokens of each source: shares of `tokens` by the mixture's weights among those named; {} = all there are."""
    if tokens is None:
        return {}
    weights = {name: MIXTURE.get(name) for name in names} if len(names) > 1 else {names[0]: 1.0}
    for name, weight in weights.items():
        if weight is None:
            raise UserError(f"{name} has no share in configs/mixture.py: prepare it by a command of its own")
    return {name: max(1, round(tokens * weight / sum(weights.values()))) for name, weight in weights.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
