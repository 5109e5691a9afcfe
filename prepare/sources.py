"""Where documents come from: files of this machine, data sets of the Hugging Face Hub."""

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePath

from runtime.cli import MachineError, UserError

LOCAL_FORMATS, HUB_FORMATS, PACKINGS = (".txt", ".jsonl", ".parquet"), (".jsonl", ".json", ".parquet"), (".gz", ".xz", ".zst")
PAIR = ("prompt", "response")   # columns of instructions
MESSAGES = ("messages",)        # column of conversations, rendered by the tokenizer's chat template
MESSAGES_MORE = ("tools", "chat_template_kwargs")       # columns that a template may be given beside
TXT_CHARS = 16_384              # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576      # or in mid-paragraph after this many: memory stays bounded
ROWS = 64                       # of parquet in memory at once: documents of a megabyte must not fill the memory
BLANK = b" \t\n\r\f\v\xef\xbb\xbf"      # a line of these alone (also a byte order mark) is no row
TIMEOUT_S = 8.0                 # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)              # seconds before a question is asked again
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)      # seconds before a block is: 18 minutes of silence cost no file
BLOCK = 16 << 20                # bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000      # of a file whose first record is looked at: bytes a request, lines at most


class BadFile(MachineError):
    """An input file that cannot be read; the message says why. It is skipped, counted and listed."""


@dataclass(frozen=True)
class InputFile:
    """One task's input."""
    name: str
    bytes: int | None       # as it lies on disk or on the server; None where nobody knows
    stamp: str | int | None     # changes with its content
    # Yields (texts, share of the file read), the same at each call: (text,), or (prompt, response). Raises BadFile: it cannot be
    # read; UserError: another column is meant, or the Hub refuses.
    read: Callable[[], Iterator[tuple[tuple[str, ...], float]]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A selection of one data set's files and rows."""
    name: str | None = None         # of its folder
    dataset: str
    revision: str                   # a commit: a branch would change under a resume
    license: str
    files: str | tuple[str, ...] = ()   # of the Hub: pattern of paths within the repository, or the paths themselves
    local_files: tuple[InputFile, ...] = ()     # of this machine
    column: str = "text"
    keep: dict[str, tuple[str, ...]] = field(default_factory=dict)     # column, nested by dots -> values of the rows wanted
    grouped_by: str | None = None   # a column of `keep` by whose values the files are grouped, to read only those that matter
    tokens: float | None = None     # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    budget: int | None = None       # training tokens to prepare; None: all there are
    may_age: bool = False           # whether shards of an older revision serve as well
    is_masked: bool = False         # whether its documents are prompts and responses, the responses alone to be learned
    is_chat: bool = False           # whether they are conversations, lists of messages, and masked

    def __post_init__(self):
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UserError(f"name={self.name!r} must be one folder name, of letters, digits, '_', '-' and '.', such as mydata")

    @property
    def selection(self) -> dict:
        """What is taken of each row, as index.json says it."""
        if self.local_files:
            return {"instruct": MESSAGES if self.is_chat else PAIR} if self.is_masked else {}
        return {"column": self.column, "files": self.files, "keep": self.keep}

    def list_files(self) -> list[InputFile]:
        """The input files in the order in which they are taken in: those of the Hub, which is asked for them, by a hash of their
        names. A prefix, which is what a budget takes, is then a random sample, where the first names may be one crawl."""
        if self.local_files:
            return list(self.local_files)
        from fsspec.utils import glob_translate
        from huggingface_hub import HfApi
        is_pattern = isinstance(self.files, str)
        is_wanted = re.compile(glob_translate(self.files)).fullmatch if is_pattern else set(self.files).__contains__

        def ask() -> dict[str, int]:
            HfApi().dataset_info(self.dataset, revision=self.revision, timeout=TIMEOUT_S)   # fails soon, the listing tries long
            entries = HfApi().list_repo_tree(self.dataset, recursive=True, revision=self.revision, repo_type="dataset")
            return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}

        there = _ask(ask, self)
        found = sorted(filter(is_wanted, there))
        for path in found:
            _check_format(PurePath(path), HUB_FORMATS, f"files= of {self.dataset}@{self.revision}: {path}")
        if self.grouped_by:
            found = _of_group(self, found, self.grouped_by, self.keep[self.grouped_by])
        if not found:
            raise UserError(f"{self.dataset}@{self.revision} has no file {self.files}{f' with {self.keep}' if self.keep else ''}:"
                            f" correct the pattern; there are {', '.join([*there][:5]) or 'none'}")
        found.sort(key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest())
        return [InputFile(path, there[path], self.revision, partial(_read_hub, self, path)) for path in found]


# ---------------------------------------------------------------------------------------------------------- local files

def local_source(name: str, words: list[str], columns: tuple[str, ...], license: str | None) -> Source:
    """The files as a source, its text in one column, or in PAIR. Raises UserError: one is missing or of another kind."""
    paths, files = [Path(word) for word in words], []
    if not words:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    if columns == PAIR and _holds_messages(paths[0]):
        columns = MESSAGES
    is_masked = columns in (PAIR, MESSAGES)
    alike = Counter(path.name for path in paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is no file: name the files themselves, such as FOLDER/*.jsonl")
        _check_format(path, (".jsonl",) if is_masked else LOCAL_FORMATS, str(path))
        # Files of one name in several folders need their folders to be told apart.
        known_as, stat, where = path.name if alike[path.name] == 1 else str(path), path.stat(), str(path.absolute())
        read = partial(read_file, partial(open, where, "rb"), where, columns, {}, True)
        files.append(InputFile(known_as, stat.st_size, stat.st_mtime_ns, read))
    stats = [(path.name, file.bytes, file.stamp) for path, file in zip(paths, files, strict=True)]
    return Source(name=name, dataset=f"local: {', '.join(path.name for path in paths)}; column {' and '.join(columns)}",
                  revision=hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16], license=license or "not stated",
                  local_files=tuple(files), is_masked=is_masked, is_chat=columns == MESSAGES)


def _holds_messages(path: Path) -> bool:
    """Whether the first row of a file of instructions is a conversation. False where it cannot be read:
    who reads the file says so."""
    try:
        first = next(_records(partial(open, path, "rb"), str(path), []), ({}, 0.0))[0]
    except (BadFile, UserError):
        return False
    return MESSAGES[0] in first and not set(PAIR) <= first.keys()


def _format(path: PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def _check_format(path: PurePath, formats: tuple[str, ...], where: str) -> None:
    if _format(path) not in formats:
        raise UserError(f"{where} cannot be read: its name must end in {', '.join(formats)}, text optionally followed by "
                        f"{', '.join(PACKINGS)}")


# -------------------------------------------------------------------------------------------------------------- readers

def read_file(opened: Callable, where: str, columns: tuple[str, ...], keep: dict,
              is_strict: bool) -> Iterator[tuple[tuple[str, ...], float]]:
    """InputFile.read of the file `where`, whose name says its format: the texts of the columns of each row, a null as an empty
    one. keep: column, nested by dots -> values of the rows wanted. is_strict: each row must have the columns, not the first one
    alone."""
    needed = list(dict.fromkeys([*columns, *(name.split(".")[0] for name in keep)]))
    for row, (found, share) in enumerate(_records(opened, where, needed), 1):
        if not all(_nested(found, name) in values for name, values in keep.items()):
            continue
        for column in columns:
            if column not in found and (is_strict or row == 1):
                raise UserError(f"{where}:{row} has no column {column!r}, only {', '.join(found) or '(none)'}: " + (
                    f"instruct=true needs {' and '.join(PAIR)}, or messages, in each row alike"
                    if column in (*PAIR, *MESSAGES) else "set column= to one of them"))
            if column in MESSAGES and columns == MESSAGES:
                continue
            if not isinstance(found.get(column), str | None):
                raise UserError(f"{where}:{row}: column {column!r} holds {type(found[column]).__name__}, not text: set column=")
        if columns == MESSAGES:
            yield ({column: found.get(column) for column in (*MESSAGES, *MESSAGES_MORE)},), share
            continue
        yield tuple(found.get(column) or "" for column in columns), share


def _records(opened: Callable, where: str, columns: list[str]) -> Iterator[tuple[dict, float]]:
    """The rows of a file, each with the share of the file that was read. Raises BadFile and UserError."""
    import pyarrow
    packing, is_txt = PurePath(where).suffix, _format(PurePath(where)) == ".txt"
    try:
        with opened() as file:
            size, stream = max(1, file.seek(0, os.SEEK_END)), file
            file.seek(0)
            if packing in (".gz", ".xz"):
                stream = (gzip if packing == ".gz" else lzma).open(file)
            elif packing == ".zst":     # by pyarrow: the reader of `zstandard` takes a file cut short for a whole one
                stream = pyarrow.CompressedInputStream(file, "zstd")
            if packing == ".parquet":
                rows = _parquet_rows(file, columns)
            else:
                stream = stream if hasattr(stream, "peek") else io.BufferedReader(stream, 1 << 18)
                if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):     # its byte order marks
                    raise UserError(f"{where} is UTF-16: save it as UTF-8")
                rows = _stretches(stream, columns[0]) if is_txt else _json_rows(stream, where)
            for row in rows:
                yield row, file.tell() / size
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        # Of the disk or the network; pyarrow and gzip have OSErrors for content.
        is_unread = isinstance(error, OSError) and (type(error) not in (OSError, gzip.BadGzipFile) or error.errno is not None)
        raise BadFile(f"{where} {'cannot be read' if is_unread else 'is damaged or was cut short'} ({_brief(error)}): fetch it "
                      f"again") from error


def _json_rows(lines: Iterable[bytes], where: str) -> Iterator[dict]:
    decode, rows = json.JSONDecoder(strict=False).decode, filter(lambda line: line.strip(BLANK), lines)
    for row, line in enumerate(rows, 1):
        try:
            found = decode(line.decode("utf-8-sig", errors="replace"))
            if not isinstance(found, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise BadFile(f"{where}:{row} is no line of JSON ({error})") from error
        yield found


def _parquet_rows(file: io.BufferedIOBase, columns: list[str]) -> Iterator[dict]:
    """Of a file that lacks one of the columns all columns."""
    import pyarrow.parquet
    # By themselves pyarrow and `datasets` read a row group, which may be the whole file, into memory at once.
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    for batch in table.iter_batches(ROWS, columns=columns if set(columns) <= set(table.schema_arrow.names) else None):
        for values in zip(*map(_values, batch.columns), strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))


def _values(column) -> list:
    """Of a column of parquet. A text that is not UTF-8 gets U+FFFD, not an error."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [(text or b"").decode(errors="replace") for text in column.cast("large_string").cast("large_binary").to_pylist()]


def _stretches(stream: io.BufferedIOBase, column: str) -> Iterator[dict]:
    """Of a text file."""
    # Line ends of any system become \n; bytes that are not UTF-8 become U+FFFD.
    lines, text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace"), io.StringIO()
    while line := lines.readline(TXT_CHARS_MOST):
        text.write(line)
        if text.tell() >= TXT_CHARS_MOST or (text.tell() >= TXT_CHARS and line.isspace()):
            yield {column: text.getvalue()}
            text = io.StringIO()
    yield {column: text.getvalue()}


def _nested(record: dict, path: str):
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


# -------------------------------------------------------------------------------------------------------------- the Hub

def any_dataset(dataset: str, column: str, revision: str | None, files: str | None, license: str | None) -> Source:
    """A data set that configs/sources.py does not name: its train split, as datasets finds it, or what the pattern `files` means.
    The revision becomes the commit it means now. Raises UserError: no such data set, one with a script."""
    from huggingface_hub import HfApi
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    source = Source(dataset=dataset, revision=revision or "main", files=files or (), column=column, license=license or "")
    info = _ask(lambda: HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), source)
    licenses = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    source = replace(source, revision=info.sha, license=license or ", ".join(licenses) or "not stated")
    if files:
        return source
    import datasets
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False     # it would be loaded for nothing: 4 s, 180 MB
    try:
        builder = _ask(lambda: datasets.load_dataset_builder(dataset, revision=info.sha), source)
        paths = [path.partition(f"@{info.sha}/")[2] for path in (builder.config.data_files or {}).get("train", [])]
        if not all(paths or [""]):      # files of another repository have no path here
            raise FileNotFoundError("it has no train split of its own")
    except UserError:
        raise
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UserError(f"{dataset}: {_brief(error)}: give files= a pattern, such as files=data/*.parquet, or take "
                        f"revision=refs/convert/parquet") from error
    return replace(source, files=tuple(sorted(paths)))


def check(source: Source) -> None:
    """Prints a source's data set, revision, licence, size, first record. Raises UserError where it is not as named, OSError
    where the Hub cannot be asked."""
    print(f"{source.name}: {source.dataset}@{source.revision}, {source.license}", flush=True)
    files = source.list_files()
    print(f"  {len(files):,} files, {sum(file.bytes or 0 for file in files) / 1e9:,.2f} GB", flush=True)
    texts = (texts[0].strip() for file in files for texts, _ in islice(file.read(), HEAD_LINES))
    if (first := next(filter(None, texts), None)) is None:
        raise UserError(f"{source.name}: no row of {source.dataset} has {source.keep or 'any text'}: correct configs/sources.py")
    print(f"  {first[:100]!r}", flush=True)


def _of_group(source: Source, paths: list[str], column: str, wanted: tuple[str, ...]) -> list[str]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group may begin in mid-file."""
    def first_value(path: str) -> str | None:
        """The column of the first record that has it, by a request for the file's first bytes."""
        rows = _records(partial(_opened, source, path, HEAD_BYTES), f"{source.dataset}/{path}", [column.split(".")[0]])
        return next(filter(None, (_nested(row, column) for row, _ in islice(rows, HEAD_LINES))), None)

    with ThreadPoolExecutor(8) as pool:
        begins = list(pool.map(first_value, paths))
    chosen = [path for path, *starts in zip(paths, begins, [*begins[1:], None], strict=True) if {*starts} & {*wanted}]
    print(f"{source.dataset}: {len(chosen)} of {len(paths)} files may hold {', '.join(wanted)}", file=sys.stderr)
    return chosen


# ------------------------------------------------------------------------------------------------- the Hub over a network

def _read_hub(source: Source, path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """A file of the data set; where it is damaged, maybe by the transfer, once more, behind the rows that were read."""
    read = partial(read_file, partial(_opened, source, path, BLOCK), f"{source.dataset}/{path}", (source.column,), source.keep,
                   False)
    rows = 0
    try:
        for found in read():
            rows += 1
            yield found
    except BadFile as error:
        if isinstance(error.__cause__, ConnectionError):        # asked for again long enough
            raise
        print(f"{error}; after {rows:,} rows it is opened again", file=sys.stderr)
        yield from islice(read(), rows, None)


def _opened(source: Source, path: str, block: int):
    """A file of the data set, of which `block` bytes are asked for at a time, and again where the network fails."""
    from huggingface_hub import HfFileSystem
    where = f"datasets/{source.dataset}@{source.revision}/{path}"
    # A new file system each time: the size it knows of a file may have mended.
    file = _ask(lambda: HfFileSystem(skip_instance_cache=True).open(where, "rb", block_size=block), source, is_reading=True)
    fetch = file.cache.fetcher      # huggingface_hub's own tries add 23 s to each of ours

    def fetch_whole(start: int, end: int) -> bytes:
        if len(data := fetch(start, end)) < end - start:
            raise ConnectionError(f"{path} was cut short")
        return data

    file.cache.fetcher = lambda start, end: _ask(partial(fetch_whole, start, end), source, is_reading=True)
    return file


def _ask(question: Callable, source: Source, is_reading: bool = False):
    """question(), asked again while the network fails. Raises UserError: a refusal; ConnectionError: no answer.

    is_reading: the data set was there before, so only the Hub's own word counts as a refusal. A 401 or 403 without it, or by the
    servers that hold the large files, may come of a link that ran out or a server that is unwell."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()
    waits = iter(READ_WAITS if is_reading else ASK_WAITS)
    while True:
        try:
            return question()
        except (OSError, httpx2.HTTPError) as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, HfHubHTTPError):
                cause = cause.__cause__
            is_final = isinstance(cause, HfHubHTTPError) and (
                cause.response.status_code in (401, 403) or isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError)))
            if is_final and (not is_reading or "X-Error-Code" in cause.response.headers):
                raise UserError(f"{source.dataset}@{source.revision} is refused by the Hub ({type(cause).__name__}): correct its "
                                f"name or revision, accept its terms at https://huggingface.co/datasets/{source.dataset} if it "
                                f"is gated, and log in with `hf auth login` or HF_TOKEN if it is private") from error
            if isinstance(error, FileNotFoundError) and not is_reading:
                raise
            if (wait := next(waits, None)) is None:
                raise ConnectionError(f"{HfApi().endpoint} gives no sound answer about {source.dataset} ({_brief(error)}): "
                                      f"check the network, then the data set") from error
            print(f"{source.dataset}: {_brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def _brief(error: Exception) -> str:
    """An error in a few words on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
