"""Keep a source's tokens in pieces while any number of workers make them.

A folder parts/ holds plan.json (what the tokens depend on, the input files), the pieces of prepare.source.Piece, a lock
per input file, a trace of each process. Everything appears by rename, so a process may die at any moment: what it had
finished stays, the piece at hand is made again.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prepare.locks import Locks
from prepare.pieces import PIECE, PieceWriter, read_piece, write_json
from prepare.source import InputFile, Piece
from runtime.cli import UserError

MUTEX = "plan.lock"
# A guess where nobody says how many tokens a file has: plain text has fewer a byte, packed text more.
TOKENS_A_BYTE = 0.4
# What may lie in the folder and is ours; the layout and what is known of shards are the assembly's.
OURS = re.compile(r"plan\.(json|lock)|worker_.*\.lock|[0-9]{5,}\.(lock|failed)|" + PIECE +
                  r"|layout\.(json|npy)|(train|val)_[0-9]{5,}\.json")


class Parts:
    """The pieces of one source in `folder`; `identity` is JSON, all that the tokens (of `token_bytes`) depend on besides files.

    Any method may raise OSError: what the disk is to blame for.
    """

    def __init__(self, folder: Path, identity: dict, token_bytes: int = 2):
        self.folder, self._token_bytes = folder, token_bytes
        self._identity = identity
        self.files: list[InputFile] = []
        self._known: dict[str, Piece] = {}  # a finished piece never changes
        self._held: dict[int, int] = {}     # input file -> descriptor of its lock
        self._presence = None               # tells the others that this process works here
        self._locks = Locks(folder, MUTEX)
        self._aim: tuple = (None, None, 1, 1)       # of the last next_file

    @property
    def has_locks(self) -> bool:    # known after open()
        return self._locks.exist

    def known(self) -> list[tuple[str, int | None]] | None:
        """Names and sizes of the input files of what was begun here under this identity."""
        plan = _read_plan(self.folder) or {}
        is_ours = plan.get("identity") == json.loads(json.dumps(self._identity))
        return [(file["name"], file["bytes"]) for file in plan["files"]] if is_ours else None

    def open(self, files: list[InputFile]) -> None:
        """Go on in the folder, or begin. Of an input file that changed (its size, or its `stamp` where it has one) the
        pieces are removed, and a line says so.

        Raises UserError: there are pieces of another identity or of other names; a file changed and another process
        works here, or shards are being written."""
        assert len({file.name for file in files}) == len(files), "a name stands for one input file"
        self.files = files
        plan = {"identity": self._identity, "files": [
            {"name": file.name, "bytes": file.bytes, "stamp": getattr(file, "stamp", None)} for file in files]}
        plan = json.loads(json.dumps(plan))         # as it comes back: lists for tuples
        with self._locks.alone(create=True):
            workers = list(self._other_workers())
            if (found := _read_plan(self.folder)) != plan:
                self._make_way(found, plan, workers)
                write_json(self.folder / "plan.json", plan)
            self._presence = self._presence or os.fdopen(self._locks.take(_trace()), "rb")  # closes itself with its last user

    def _make_way(self, found: dict | None, plan: dict, workers: list[str]) -> None:
        """Removes what cannot stay under the new plan; raises UserError where that is for the user to decide."""
        change, changed = _difference(found, plan) if found else ("nothing says how", set())
        if workers:
            raise UserError(f"{self.folder}: {workers[0]} works there on other input: {change}; wait until it ends, stop it, "
                              f"or give another out= (if it is no more, delete {self.folder})")
        has_pieces = any(path.name[0].isdigit() and path.suffix == ".json" for path in self._ours())
        if has_pieces and found and (not changed or (self.folder / "layout.json").exists()):
            raise UserError(f"{self.folder} was begun otherwise ({change}): give the same "
                              f"{'files' if changed else 'options'} again, or delete {self.folder}")
        if has_pieces:
            print(f"{self.folder}: what was made of it is removed: {change}", file=sys.stderr)
        if not (has_pieces and found):      # nothing to lose, or nobody can say what it is
            self._unlink(keep=(MUTEX,))
        for path in sorted(self._ours(), key=lambda path: path.suffix != ".json"):      # a piece is there while its .json is
            if path.name[0].isdigit() and int(re.match(r"\d+", path.name)[0]) in changed:
                path.unlink(missing_ok=True)

    def next_file(self, target: float | None, expected: float | None, worker: int, workers: int) -> int | None:
        """The number of the input file to work on next, locked until release(); None where there is none to take.

        Files are wanted in order until their tokens reach `target` (None: all), of the finished ones as counted, of the
        others as many as finished ones have on average, or `expected` where none is finished, or by their size where that
        is None. Of those wanted this worker (from 1) takes its share first, then what nobody holds; without locks no more."""
        self._aim = target, expected, worker, workers
        with suppress(FileNotFoundError), self._locks.alone():     # the folder is gone where another worker has assembled
            while True:
                wanted = [file for file in self._wanted() if file not in self._held]
                shares = [file for file in wanted if file % workers == worker - 1], wanted if self._locks.exist else []
                for file in [*shares[0], *shares[1]]:
                    descriptor = self._locks.take(f"{file:05d}.lock")
                    if descriptor is not None:
                        break
                else:
                    return None
                self._held[file] = descriptor
                if file in self._wanted():
                    return file
                self.release(file)          # its holder finished it while we looked
        return None

    def release(self, file: int) -> None:
        os.close(self._held.pop(file))

    def writer(self, file: int) -> PieceWriter:
        """Appends to an input file that next_file gave."""
        assert file in self._held, "an input file is written to by the process that holds it"
        return PieceWriter(self.folder, file, self._pieces()[file])

    def before(self, file: int) -> float:
        """Tokens of the input files before this one, as next_file counts them."""
        return next(before for number, before, _, _ in self._walk() if number == file)

    def done(self) -> list[bool]:
        """Whether each input file is complete, or failed."""
        return [not is_open for *_, is_open in self._walk()]

    def others(self) -> list[str]:
        """The names of the unfinished input files that other processes hold now.

        Without locks: of those that are wanted and not this worker's share."""
        _, _, worker, workers = self._aim
        with suppress(FileNotFoundError), self._locks.alone():
            if not self._locks.exist:
                return [self.files[file].name for file in self._wanted() if file % workers != worker - 1]
            return [self.files[file].name for file, _, _, is_open in self._walk()
                    if is_open and file not in self._held and self._locks.is_taken(f"{file:05d}.lock")]
        return []

    def fail(self, file: int, reason: str) -> None:
        """Record that an input file cannot be read."""
        write_json(self.folder / f"{file:05d}.failed", {"reason": reason})

    def failures(self) -> dict[str, str]:
        """Name -> reason, in the order of the input files."""
        found = {}
        for file in sorted(self._failed()):
            with suppress(FileNotFoundError):       # forgiven by a worker that has just begun
                found[self.files[file].name] = json.loads((self.folder / f"{file:05d}.failed").read_text())["reason"]
        return found

    def forgive(self) -> None:
        """Failed files are tried again."""
        for file in self._failed():
            (self.folder / f"{file:05d}.failed").unlink(missing_ok=True)

    def tokens(self) -> int:
        """Tokens on disk, those of pieces that are being written included; quick."""
        sizes = 0
        with suppress(FileNotFoundError):
            for name in self._listing():
                if name.endswith((".bin", ".bin.tmp")):
                    with suppress(FileNotFoundError):
                        sizes += (self.folder / name).stat().st_size
        return sizes // self._token_bytes

    def prefix(self, skip_failed: bool) -> list[Piece]:
        """The finished pieces from the first input file on without a gap: of every file that is complete, then of the
        first that is not. Failed files are left out where `skip_failed`; else the first of them is where it ends."""
        failed, out = self._failed() if skip_failed else set(), []
        for file, pieces in enumerate(self._pieces()):
            if file not in failed:
                out += pieces
                if not _is_complete(pieces):
                    break
        return out

    def is_exhausted(self, skip_failed: bool) -> bool:
        """Whether every input file is complete, or failed and `skip_failed`."""
        failed = self._failed() if skip_failed else set()
        return all(_is_complete(pieces) or file in failed for file, pieces in enumerate(self._pieces()))

    def remove(self) -> None:
        """Remove all of it, locks included; other people's files stay, and then the folder stays too."""
        for file in list(self._held):
            self.release(file)
        self._presence = None
        if self.folder.is_dir():
            with self._locks.alone(create=True):
                self._unlink(keep=())
                with suppress(OSError):
                    self.folder.rmdir()

    # -------------------------------------------------------------------------------------------------- what is there

    def _walk(self) -> Iterator[tuple[int, float, int, bool]]:
        """(number, tokens of the files before it, its tokens so far, whether it is still to be done) of each file."""
        pieces, failed = self._pieces(), self._failed()
        done = [sum(piece.tokens for piece in own) for own in pieces if _is_complete(own)]
        expected = sum(done) / len(done) if done else self._aim[1] or 0.0
        a_byte = TOKENS_A_BYTE if self._aim[1] is None else 0.0
        before = 0.0
        for file, own in enumerate(pieces):
            tokens = sum(piece.tokens for piece in own)
            is_open = not _is_complete(own) and file not in failed
            yield file, before, tokens, is_open
            if file not in failed:
                before += max(expected, tokens, a_byte * (self.files[file].bytes or 0)) if is_open else tokens

    def _wanted(self) -> list[int]:
        target = self._aim[0]
        return [file for file, before, tokens, is_open in self._walk()
                if is_open and (target is None or before + tokens < target)]

    def _pieces(self) -> list[list[Piece]]:
        """Of each input file the finished pieces in order, as far as they lie there without a gap."""
        names, out = self._listing(), []
        for file in range(len(self.files)):
            out.append([])
            while (name := f"{file:05d}_{len(out[-1]):04d}.json") in names:
                if name not in self._known:
                    try:
                        self._known[name] = read_piece(self.folder / name)
                    except FileNotFoundError:   # assembled and removed by another worker just now
                        break
                out[-1].append(self._known[name])
        return out

    def _failed(self) -> set[int]:
        return {int(name.removesuffix(".failed")) for name in self._listing() if re.fullmatch(r"\d+\.failed", name)}

    def _listing(self) -> set[str]:
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()

    def _ours(self) -> list[Path]:
        return [self.folder / name for name in self._listing() if OURS.fullmatch(name.removesuffix(".tmp"))]

    def _unlink(self, keep: tuple[str, ...]) -> None:
        """The plan goes first: a folder without one holds nothing. The mutex goes last."""
        for path in sorted(self._ours(), key=lambda path: (path.name != "plan.json", path.name == MUTEX)):
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _other_workers(self) -> Iterator[str]:
        """Who works here, in words; the traces of dead ones are removed. Without locks a trace counts as a worker."""
        for path in self._ours():
            match = re.fullmatch(r"worker_(.*)_(\d+)\.lock", path.name)
            if match and path.name != _trace():
                if self._locks.is_taken(path.name) or not self._locks.exist:
                    yield f"process {match[2]} on host {match[1]!r}"
                else:
                    path.unlink(missing_ok=True)


def begun(folder: Path) -> dict | None:
    """The identity of what was begun in `folder`; None without any."""
    return (_read_plan(folder) or {}).get("identity")


def _read_plan(folder: Path) -> dict | None:
    """plan.json; None where there is none, {} where it is not what was written: nobody can say what the pieces are."""
    try:
        plan = json.loads((folder / "plan.json").read_text(errors="replace"))
        is_ours = isinstance(plan["identity"], dict) and all({"name", "bytes"} <= file.keys() for file in plan["files"])
        return plan if is_ours else {}
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def _is_complete(pieces: list[Piece]) -> bool:
    return bool(pieces) and pieces[-1].is_last


def _trace() -> str:
    return f"worker_{re.sub(r'[^a-zA-Z0-9.-]', '_', socket.gethostname())}_{os.getpid()}.lock"


def _difference(found: dict, plan: dict) -> tuple[str, set[int]]:
    """What a plan changes, in words, and the numbers of the input files that changed where that is all."""
    was, now = found["identity"], plan["identity"]
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    changes = [f"{key} was {was.get(key)!r:.80}, now {now.get(key)!r:.80}" for key in keys]
    before, after = [file["name"] for file in found["files"]], [file["name"] for file in plan["files"]]
    if before != after:
        odd = [f"{name} was{'' if name in before else ' not'} among them" for name in [*before, *after]
               if (name in before) != (name in after)]
        changes.append(f"other input files, {odd[0] if odd else 'or in another order'}")
    if changes:
        return "; ".join(changes), set()
    changed = {i for i, (file, new) in enumerate(zip(found["files"], plan["files"], strict=True)) if file != new}
    more = f" and {len(changed) - 1} other files have" if len(changed) > 1 else " has"
    return f"{after[min(changed)]}{more} changed", changed
