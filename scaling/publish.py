"""Copy what a study's finished runs are worth keeping for, from one folder of runs into another:

    python scaling/publish.py out/h100 results/study_h100       what goes into the repository
    python scaling/publish.py results/study_h100 out/h100       and back, where the study goes on elsewhere

Of each run that has ended its record, losses, log and probes (the last two gzipped), samples and figures; study.json, the
laws and the sources of the data. Of a run that has failed what it printed last and its diagnosis, into TO/failed/ until it
has finished, the machine's paths cut short. No checkpoints, no env.json, which names machines. summary.json keeps its bytes,
since predictions name it by its hash. A run arrives whole or not at all. What is there already must say the same: a run, a
frozen prediction or a declaration that differs is refused and named, the rest is copied, and the exit code is 2. Only what is
computed from runs, laws and figures, is replaced.
"""

import contextlib
import gzip
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from runtime.cli import UserError
from scaling.command import run
from scaling.records import LAW_FOLDER, read_bytes, read_json, read_text, write

STUDY, SUMMARY = "study.json", "summary.json"
FILES = ("config.json", "val_losses.npz", "metrics.jsonl", "probe.jsonl", "samples.txt")     # of a run, beside its summary
FAILED, ENDED = "failed", "sweep.py: exit code "        # grid.py's last line of a log, with the code
LOG_TAIL = 2**16        # characters of a failed run's log that are kept
# Folders of an absolute path; no address of the web, no share such as tok/s.
MACHINE_PATH = re.compile(r"(?<![\w./])(?<!:/)/(?!/)(?:[^\s\"'`,;()<>]*/(?=(?:site|dist)-packages/)|(?:[^\s\"'`,;()<>/]+/)+)")
GZIPPED = ("metrics.jsonl", "probe.jsonl")
WANTED = ("config.json", "val_losses.npz", "metrics.jsonl")     # a finished run has them
DERIVED = (f"{LAW_FOLDER}/*.json", f"{LAW_FOLDER}/*.png", "*/figures/*.png", "data.json")       # from the study's folder


def main(arguments=None) -> int:
    """0 where all is copied, 2 with a sentence for each thing that is refused, 1 where a disk fails."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(__doc__.strip())
        return 0 if words else 2
    try:
        if len(words) != 2 or any(word.startswith("-") for word in words):
            raise UserError(f"{' '.join(words)!r} is not understood: give two folders, publish.py FROM TO")
        told, refused = publish(*map(Path, words))
    except UserError as error:
        told, refused = [], [str(error)]
    except OSError as error:
        print(f"scaling/publish.py: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    print("".join(line + "\n" for line in told), end="")
    for sentence in refused:
        print(f"scaling/publish.py: {sentence}", file=sys.stderr)
    return 2 if refused else 0


def publish(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Copy; returns lines of what was done and a sentence for each thing that was refused.

    Raises UserError where `source` is no folder or `target` cannot be one, OSError where a file cannot be written."""
    if not source.is_dir():
        raise UserError(f"{source} {'is a file' if source.exists() else 'does not exist'}: name a folder of runs")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: name a folder")
    if target.resolve() == source.resolve():
        raise UserError(f"{source} cannot be published into itself: name two folders")
    target.mkdir(parents=True, exist_ok=True)
    runs, new, refused, notes = _finished(source), [], [], []
    with _refusing(refused):
        _publish_study(source, target)
    for name in runs:
        with _refusing(refused):
            new += [name] if _publish_run(source / name, target / name) else []
            if lacking := [file for file in WANTED if _content(source / name, file) is None]:
                notes.append(f"{source / name} has no {', '.join(lacking)}")
    there = _finished(target)
    failed = _publish_failed(source, target, there)
    for path in sorted(path for pattern in DERIVED for path in source.glob(pattern)):
        place = path.relative_to(source)
        if place.parent.name != "figures" or place.parts[0] in there:       # those of a run that goes on wait for it
            with _refusing(refused):
                _publish_derived(path, target / place)
    return [f"published {len(new)} runs from {source} into {target}" + f": {', '.join(new)}" * bool(new)
            + f"; {len(runs) - len(new)} are there already" * (len(runs) > len(new)),
            *[f"what {name} told of its failure is in {target / FAILED}" for name in failed], *notes], refused


def _finished(folder: Path) -> list[str]:
    """Names of the finished runs in a folder; what is hidden is half of one."""
    return [path.parent.name for path in sorted(folder.glob(f"*/{SUMMARY}")) if not path.parent.name.startswith(".")]


@contextlib.contextmanager
def _refusing(refused: list[str]):
    """What is refused must not keep the rest from being copied."""
    try:
        yield
    except UserError as error:
        refused.append(str(error))


def _publish_run(source: Path, target: Path) -> bool:
    """Copy one finished run, or what of it `target` lacks; whether it is new there. Raises UserError where they differ."""
    summary = read_bytes(source / SUMMARY)
    if read_json(source / SUMMARY).get("run_id") != source.name:
        raise UserError(f"{source / SUMMARY} is not the record of {source.name}: its run_id is another; restore it")
    contents = {name: content for name in FILES if (content := _content(source, name)) is not None}
    if not target.exists():
        partial = target.with_name(f".{target.name}.partial")       # hidden: no reader takes it for a run
        shutil.rmtree(partial, ignore_errors=True)                  # of a call that was killed
        partial.mkdir()
        for name, content in contents.items():
            _put(source, partial, name, content)
        write(partial / SUMMARY, summary)
        os.rename(partial, target)
        return True
    if not (target / SUMMARY).is_file():
        raise UserError(f"{target} has begun, and {source} is the same run, finished: remove {target} to use what is finished")
    for name, content in ((SUMMARY, summary), *contents.items()):
        there = read_bytes(target / SUMMARY) if name == SUMMARY else _content(target, name)
        if there is None:
            _put(source, target, name, content)
        elif there != content:
            raise UserError(f"{_path(target, name)} differs from {_path(source, name)}: one of them was edited, or the run was "
                              "trained twice; restore the true one, or move one of the two runs away")
    return False


def _publish_failed(source: Path, target: Path, finished: list[str]) -> list[str]:
    """Names of the runs that have failed in `source`; of those that finished, in the end, nothing is kept of their failure."""
    failed = []
    for path in sorted(source.glob("*.log")):
        *others, told, code = ["", *read_text(path).split(ENDED)]
        told = told.partition("\n")[2] if others[1:] else told      # after the code of the attempt before
        if path.stem not in finished and code.strip() != "0" and code.strip().lstrip("-").isdigit():
            failed.append(path.stem)
            (target / FAILED).mkdir(exist_ok=True)
            _replace(target / FAILED / path.name, f"{told.strip()[-LOG_TAIL:]}\n{ENDED}{code.strip()}\n")
            if diagnosis := read_text(source / path.stem / "diagnosis.json"):
                _replace(target / FAILED / f"{path.stem}.diagnosis.json", diagnosis)
    for path in (target / FAILED).glob("*"):
        if path.name.removesuffix(".log").removesuffix(".diagnosis.json") in finished:
            path.unlink()
    return failed


def _nameless(text: str) -> str:
    """Without what names the machine: of an absolute path the part that is ours or a package's is left, else its last name."""
    text = text.replace(f"{Path(__file__).resolve().parents[1]}/", "")
    text = re.sub(rf"\b{re.escape(platform.node() or 'localhost')}\b", "HOST", text)
    return MACHINE_PATH.sub(".../", text)


def _replace(path: Path, text: str) -> None:
    content = _nameless(text).encode()
    if not path.is_file() or path.read_bytes() != content:
        write(path, content)


def _put(source: Path, target: Path, name: str, content: bytes) -> None:
    """A log is packed once: its packed bytes are copied, for another zlib would pack it differently."""
    if name not in GZIPPED:
        write(target / name, content)
    elif (path := _path(source, name)).suffix == ".gz":
        write(target / path.name, path.read_bytes())
    else:
        write(target / f"{name}.gz", gzip.compress(content, mtime=0))


def _content(folder: Path, name: str) -> bytes | None:
    """A file's bytes, unpacked; None where there is neither the file nor its .gz."""
    return read_bytes(folder / name) if _path(folder, name).is_file() else None


def _path(folder: Path, name: str) -> Path:
    plain, packed = folder / name, folder / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def _publish_study(source: Path, target: Path) -> None:
    """The longer of two declarations; runs may be added to one, nothing else may differ once a run is published."""
    if not (source / STUDY).is_file():
        return
    if (target / STUDY).is_file() and _finished(target):
        one, other = read_json(source / STUDY), read_json(target / STUDY)
        if not _extends(one, other):
            if _extends(other, one):
                return
            raise UserError(f"{source / STUDY} and {target / STUDY} declare one study differently, and its runs have finished: "
                              "runs may be added, but nothing that is there may change; restore the true one")
    write(target / STUDY, read_bytes(source / STUDY))


def _extends(long: dict, short: dict) -> bool:
    """Whether the first declaration is the second with or without more runs."""
    lists = ("runs", "held_out")
    return ({key: value for key, value in long.items() if key not in lists} == {
                key: value for key, value in short.items() if key not in lists}
            and all(isinstance(one.get(key), list) for one in (long, short) for key in lists)
            and all(entry in long[key] for key in lists for entry in short[key]))


def _publish_derived(source: Path, target: Path) -> None:
    """What is made anew from the runs, so that the newer one counts; but a frozen prediction never changes."""
    content = source.read_bytes()
    if target.is_file():
        if target.read_bytes() == content:
            return
        if target.name.startswith("prediction_"):
            raise UserError(f"{target} differs from {source}, and a frozen prediction is never made anew: restore the one that "
                              "is older than its run")
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target, content)


if __name__ == "__main__":
    sys.exit(run(main))
