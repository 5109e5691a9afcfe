"""Turn text into token shards that training reads.

    python prepare_data.py fineweb_edu python c arxiv tokens=31e9  the 1.5B run's mixture
    python prepare_data.py hf:OWNER/NAME column=text tokens=1e9    a parquet or JSON-lines data set
    python prepare_data.py local FILE... name=mydata               .txt, .jsonl, .json, .parquet
    python prepare_data.py demo                                    text of this installation
    python prepare_data.py --check-sources [NAME...]               is each source still there?
    python prepare_data.py --show [FOLDER...]                      what a data folder holds
    python prepare_data.py --verify [FOLDER...]                    hash every shard again

Named sources, values in configs/sources.py, and hf:OWNER/NAME are streamed from the Hub; files may
be .gz, .xz or .zst. Options are key=value, a leading -- is accepted:
    tokens=N                training tokens to prepare, split among several sources by
                            configs/mixture.py (all there are)
    out=FOLDER              folder of the sources (data; demo: data/demo)
    tokenizer=NAME          gpt2, byte or a folder with tokenizer.json (gpt2; demo: byte)
    val_share=0.005         share of the documents, by hash, that is kept for validation (demo:
                            0.04); where a folder is unfinished, another share goes on with what
                            was read
    processes=N             tasks at the same time, an input file each (local: one per core; demo:
                            1; slurm, ray: 100)
    on=slurm partition=P    submit an array of jobs, time=20:00:00 each, and one behind them that
                            makes the shards; --dry-run prints them. on=ray: a running Ray cluster.
                            all see out= and this folder
    decontaminate=FILE,...  drop documents that share 13 words in a row with these evaluation files
    skip_bad=true           leave out files that cannot be read and rows that cannot be used, and
                            count them, rather than stop before that
    name=NAME               what the mixture calls the source (its own name; needed for local)
    column=NAME             local, hf: which column holds the text, nested by dots as in meta.text
                            (text)
    instruct=true           local: .jsonl or .parquet rows {"prompt": ..., "response": ...}, only
                            responses are learned, or {"messages": [...]}, rendered by the
                            tokenizer's chat template, of which only what the assistant wrote is
                            learned; spelled special tokens are tokens in both
    control_tokens=text     keep text where plain text spells a control token that tokenizer.json
                            does not call special, such as <tool_call> (ids: it becomes that token)
    license=WORDS           local, hf: written to index.json (not stated; hf: what the data set's
                            card says)
    revision=, files=       hf: a commit or branch; a pattern of file names, such as
                            files=sample/10BT/*.parquet or 'files={en,de}/*.json.gz', quoted as the
                            shell expands braces itself

A document that came before, word for word, in this source or another one of the folder, is dropped.
Killed at any moment, the same command goes on, and the shards end as if nothing had happened,
however many processes there were."""

import io
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from configs.mixture import MIXTURE
from configs.sources import SOURCES
from lib.command import read_options, run_command
from lib.errors import MachineError, UserError
from lib.help import help_page
from lib.text import nearest
from lib.values import FilePath
from prepare import harvest
from prepare.hub import HUB_NAME, any_dataset, check
from prepare.job import HASH_STEPS, Job
from prepare.local import local_source
from prepare.pieces import begun
from prepare.pipeline import prepare
from prepare.show import show, verify
from prepare.sources import MESSAGES, PAIR, Source
from runtime.shards import read_index

COMMON = {"out", "tokenizer", "val_share", "processes", "control_tokens"}
STREAMED = COMMON | {"tokens", "decontaminate", "skip_bad", "on", "partition", "time", "dry_run"}
KEYS = {
    "demo": COMMON,
    "local": STREAMED | {"name", "column", "license", "instruct"},
    "named": STREAMED | {"name"},
    "hf": STREAMED | {"name", "column", "license", "revision", "files"},
    "check-sources": set(),
    "show": set(),
    "verify": set(),
}
# key, least and largest value
BOUNDS = (("val_share", 1 / HASH_STEPS, 0.5), ("tokens", 1, 2**53), ("processes", 1, 1024))
# small: a larger share
DEFAULTS = {"demo": {"out": "data/demo", "tokenizer": "byte", "val_share": 0.04, "processes": 1}}


@dataclass(frozen=True, kw_only=True)
class Options(Job):
    words: tuple[FilePath, ...] = ()  # files, folders or sources, as the command takes them
    tokens: float | None = None
    name: str | None = None
    column: str = "text"
    instruct: bool = False
    license: str | None = None
    revision: str | None = None
    files: str | None = None

    def __post_init__(self) -> None:
        for key, low, high in BOUNDS:
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                raise UserError(f"{key}={value} must be a number from {low} to {high}")
        if self.instruct and self.column != "text":
            raise UserError(
                f"column={self.column} is for plain text, and instruct=true reads prompt and"
                " response, or messages: leave out one of the two"
            )
        if (self.column,) == MESSAGES:
            raise UserError(
                "column=messages holds conversations: prepare them by `local FILE..."
                " instruct=true`, data sets of the Hub once their files are here; give a column"
                " of plain text another name"
            )
        is_slurm = self.on == "slurm"
        if is_slurm != (self.partition is not None) or (self.dry_run and not is_slurm):
            raise UserError(
                "on=slurm needs partition=NAME, a queue of your cluster; that and --dry-run are for"
                " on=slurm alone"
            )


def _sources(kind: str, command: str, words: list[str], options: Options) -> Iterator[Source]:
    """With shares of `tokens` by the mixture's weights among those named. Raises UserError for what
    cannot be a source."""
    sources = _all_of_source(kind, command, words, options)
    if len(sources) == 1:
        budget = max(1, round(options.tokens)) if options.tokens else None
        yield replace(sources[0], budget=budget)
        return
    weights = [MIXTURE.get(source.name or "", 0) for source in sources]
    for source, weight in zip(sources, weights, strict=True):
        if not options.tokens:
            yield source
            continue
        if not weight:
            raise UserError(
                f"{source.name} has no share in configs/mixture.py: prepare it by a command of"
                " its own"
            )
        yield replace(source, budget=max(1, round(options.tokens * weight / sum(weights))))


def _all_of_source(kind: str, command: str, words: list[str], options: Options) -> list[Source]:
    """What the command names, without a budget."""
    if kind == "demo":
        return harvest.demo_sources()
    if kind == "local":
        columns = PAIR if options.instruct else (options.column,)
        return [local_source(options.name or "", words, columns, options.license)]
    if kind == "hf":
        return [_hub_source(command.removeprefix("hf:"), options)]
    if options.name and words:
        raise UserError(f"name={options.name} can name one source, not {1 + len(words)}")
    return [_named(name, options.name) for name in dict.fromkeys([command, *words])]


def _hub_source(dataset: str, options: Options) -> Source:
    """The commit that its folder holds, or part of it: one pushed meanwhile must not stop a
    resume."""
    name = options.name or dataset.partition("/")[2].lower()
    folder = Path(options.out) / name
    held = vars(read_index(folder)) if (folder / "index.json").exists() else begun(folder)
    revision = options.revision
    if revision is None and held.get("dataset") == dataset:
        revision = held["revision"]
    source = any_dataset(dataset, options.column, revision, options.files, options.license)
    return replace(source, name=name)


def _named(name: str, known_as: str | None = None) -> Source:
    if name not in SOURCES:
        raise UserError(f"there is no source {name!r}{nearest(name, list(SOURCES))}")
    return replace(SOURCES[name], name=known_as or name)


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a mistake told on stderr, 1 for the
    machine's faults."""
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # names and texts of any language, on a terminal of ASCII too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except (UserError, MachineError) as error:
        print(error, file=sys.stderr)
        return _exit_code(error)
    except BrokenPipeError:  # --show | head
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        code = _exit_code(error)
        remedy = "; what was prepared stays, and the same command goes on"
        if code == 2:
            remedy = ": give an out= whose folders can be made and written"
        print(f"{place}{error.strerror or error}{remedy}", file=sys.stderr)
        return code
    except (KeyboardInterrupt, SystemExit) as error:
        print(
            "\ninterrupted: what was prepared stays, and the same command goes on", file=sys.stderr
        )
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _exit_code(error: Exception) -> int:
    """2 for what the user can mend. What a path itself is to blame for is the user's mistake; no
    space, input/output, the network are not."""
    of_paths = (PermissionError, NotADirectoryError, FileNotFoundError, FileExistsError)
    return 2 if isinstance(error, (UserError, *of_paths)) else 1


def _run(arguments: list[str]) -> int:
    words = [word for word in arguments if _is_command(word)]
    if arguments and not words:
        raise UserError(
            f"{arguments[0]} does not say what to prepare: name a source, such as fineweb_edu;"
            " --help lists all"
        )
    command = words[0].removeprefix("--") if words else "help"
    if command in ("help", "-h"):
        print(help_page(__doc__))
        return 0
    kind = _kind(command)
    if kind not in KEYS:
        raise UserError(f"there is no command {words[0]!r}{_command_meant(words[0])}")
    first = arguments.index(words[0])
    options = read_options(
        Options,
        arguments[:first] + arguments[first + 1 :],
        ("words",),
        KEYS[kind],
        DEFAULTS.get(kind),
    )
    return _work(kind, command, options)


def _command_meant(word: str) -> str:
    """The end of the sentence about a first word that is no command."""
    if Path(word).is_file():
        return f"; a file is prepared by `python prepare_data.py local {word} name=mydata`"
    if re.fullmatch(HUB_NAME, word):
        return f"; a data set of the Hub is written hf:{word}"
    commands = [key for key in KEYS if key not in ("named", "hf")]
    return nearest(word.removeprefix("--"), [*commands, *SOURCES])


def _is_command(word: str) -> bool:
    return "=" not in word and word.replace("_", "-") != "--dry-run"


def _kind(command: str) -> str:
    """The key of KEYS that a command has, or what it is called."""
    if command in SOURCES:
        return "named"
    return "hf" if command.startswith("hf:") else command


def _work(kind: str, command: str, options: Options) -> int:
    """Do what the command says; returns the exit code."""
    words = list(options.words)
    folders = [Path(word) for word in options.words] or [Path(options.out)]
    if kind == "verify":
        verify(folders)
        return 0
    if kind == "show":
        for folder in folders:
            show(folder)
        return 0
    if kind == "check-sources":
        return _check_sources(words or list(MIXTURE))
    if kind in ("demo", "hf") and words:
        raise UserError(
            f"{command} takes no {words[0]!r}: your files are for `local`, a data set is prepared"
            " at a time"
        )
    prepare(_sources(kind, command, words, options), options)
    return 0


def _check_sources(names: list[str]) -> int:
    """Look for each source's first record; returns the exit code."""
    code = 0
    for name in names:
        try:
            check(_named(name))
        except (UserError, MachineError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = 2 if isinstance(error, UserError) else max(code, 1)
    return code


if __name__ == "__main__":
    raise SystemExit(run_command(main))
