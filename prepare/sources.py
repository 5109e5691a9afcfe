"""Where documents come from: files of this machine, data sets of the Hugging Face Hub.

An input file has name, bytes (as it lies on disk or on the server; None where nobody knows), stamp (changes with its content) and
read(), which yields (texts, share of the file read): texts is (text,), or (prompt, response) of instructions. It yields the same
at each call, and raises BadFile where the file cannot be read, whatever was tried.
"""

import codecs
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePath

from runtime.cli import UserError
from runtime.tokenizer import clean

FORMATS, PACKINGS = (".txt", ".jsonl", ".parquet"), (".gz", ".xz", ".zst")
HUB_FORMATS = (".parquet", *(f"{suffix}{packing}" for suffix in (".jsonl", ".json") for packing in ("", ".gz", ".zst")))
PAIR = ("prompt", "response")   # columns of instructions
TXT_CHARS = 16_384              # a text file is cut at the first blank line after this many characters,
TXT_CHARS_MOST = 1_048_576      # or in mid-paragraph after this many: memory stays bounded
ROWS = 64                       # of parquet in memory at once: documents of a megabyte must not fill the memory
BLANK = b" \t\n\r\f\v\xef\xbb\xbf"      # a line of these alone (also a byte order mark) is no row
TIMEOUT_S = 8.0                 # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)              # seconds before a question is asked again
# Seconds before a file is opened again, while it comes no further: 18 minutes of silence cost no file. huggingface_hub's own
# six tries add 23 s, to the first failure alone: the later ones fail when the file is opened, which it tries once.
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)
BLOCK = 16 << 20                # bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000      # of a file whose first record is looked at: bytes a request, lines at most


class BadFile(Exception):
    """An input file that cannot be read; the message says why. It is skipped, counted and listed."""


@dataclass(frozen=True)
class Source:
    """Input files, and what index.json says of them."""
    name: str                       # of its folder
    files: Callable[[], list]       # the input files in the order they are taken in; may ask a server
    dataset: str
    revision: str
    license: str
    selection: dict = field(default_factory=dict)   # what is taken of each row, in JSON: column, filter
    tokens: float | None = None     # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    may_age: bool = False           # whether shards of an older revision serve as well
    is_masked: bool = False         # whether its documents are prompts and responses, the responses alone to be learned

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UserError(f"name={self.name!r} must be one folder name, of letters, digits, '_', '-' and '.', such as "
                            f"name=mydata")


# ---------------------------------------------------------------------------------------------------------- local files

@dataclass(frozen=True)
class LocalFile:
    """An input file on this machine; `columns` names the text of .jsonl and .parquet."""
    name: str
    path: Path
    bytes: int
    columns: tuple[str, ...]    # one, or PAIR
    stamp: int                  # time of its last change, in ns

    def read(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Raises BadFile: it was cut short, or is malformed; UserError: another column is meant."""
        try:
            with open(self.path, "rb") as file:
                for texts, _ in rows_of(file, self.path, str(self.path), self.columns):
                    yield texts, file.tell() / max(1, self.bytes)
        except OSError as error:
            raise BadFile(f"{self.path} cannot be read ({error})") from error


def local_source(name: str, words: list[str], columns: tuple[str, ...], license: str | None) -> Source:
    """The files as a source, its text in one column, or in PAIR. Raises UserError: one is missing or of another kind."""
    formats, paths, files = (".jsonl",) if columns == PAIR else FORMATS, [Path(word) for word in words], []
    if not words:
        raise UserError("no file is named: python prepare_data.py local FILE... name=mydata")
    alike = Counter(path.name for path in paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is no file: name the files themselves, such as FOLDER/*.jsonl")
        if _format(path) not in formats:
            raise UserError(f"{path}: its name must end in {', '.join(formats)}, where it is text optionally followed by "
                            f"{', '.join(PACKINGS)}")
        # Files of one name in several folders need their folders to be told apart.
        known_as = path.name if alike[path.name] == 1 else str(path)
        files.append(LocalFile(known_as, path.absolute(), path.stat().st_size, columns, path.stat().st_mtime_ns))
    stats = [(file.path.name, file.bytes, file.stamp) for file in files]
    dataset = f"local: {', '.join(path.name for path in paths)}; column {' and '.join(columns)}"
    return Source(name, lambda: files, dataset, hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16],
                  license or "not stated", {"instruct": list(columns)} if columns == PAIR else {}, is_masked=columns == PAIR)


def _format(path: PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in PACKINGS else path.suffix


# -------------------------------------------------------------------------------------------------------------- readers

def rows_of(file: io.BufferedIOBase, path: PurePath, where: str, columns: tuple[str, ...], keep: dict | None = None,
            skip_rows: int = 0, is_strict: bool = True) -> Iterator[tuple[tuple[str, ...], int]]:
    """(texts of the columns, rows so far) of an open file in the format that `path` says, behind the first rows; a null is empty.

    keep: column, nested by dots -> values of the rows wanted. is_strict: each row must have the columns, not the first one alone.
    Raises BadFile and UserError, which call the file `where`; OSError of the network or the disk."""
    import pyarrow
    keep = keep or {}
    needed = list(dict.fromkeys([*columns, *(name.split(".")[0] for name in keep)]))
    try:
        for row, found in _numbered_rows(file, path, where, needed, skip_rows):
            if row <= skip_rows or not all(_nested(found, name) in values for name, values in keep.items()):
                continue
            for column in columns:
                if column not in found and (is_strict or row == 1):
                    raise UserError(f"{where}:{row} has no column {column!r}, only {', '.join(found) or '(none)'}: " + (
                        f"instruct=true needs {' and '.join(PAIR)}" if column in PAIR else "set column= to one of them"))
                if not isinstance(found.get(column), str | None):
                    raise UserError(f"{where}:{row}: column {column!r} holds {type(found[column]).__name__}, not text: "
                                    f"set column=")
            yield tuple(clean(found.get(column) or "") for column in columns), row
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException) as error:
        is_of_pyarrow = type(error) is OSError and error.errno is None
        if isinstance(error, OSError) and not (is_of_pyarrow or isinstance(error, gzip.BadGzipFile)):
            raise       # of the network or the disk
        raise BadFile(f"{where} is damaged or was cut short ({_brief(error)}): fetch it again") from error


def _numbered_rows(file: io.BufferedIOBase, path: PurePath, where: str, columns: list[str],
                   skip_rows: int) -> Iterator[tuple[int, dict]]:
    if path.suffix == ".parquet":
        return _parquet_rows(file, columns, skip_rows)
    stream = _unpacked(file, path)
    if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(f"{where} is UTF-16: save it as UTF-8")
    return enumerate(_stretches(stream, columns[0]) if _format(path) == ".txt" else _json_rows(stream, where), 1)


def _unpacked(file: io.BufferedIOBase, path: PurePath) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix == ".xz":
        return lzma.open(file)
    if path.suffix == ".zst":       # by pyarrow: the reader of `zstandard` takes a file cut short for a whole one
        import pyarrow
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
    return file if hasattr(file, "peek") else io.BufferedReader(file, 1 << 16)


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


def _parquet_rows(file: io.BufferedIOBase, columns: list[str], skip_rows: int) -> Iterator[tuple[int, dict]]:
    """From the row group on that holds the first row wanted; of a file that lacks one of the columns all columns.

    Not by the builder of `datasets`, which holds a row group in memory: 2.7 GB for one of 1 GB."""
    import pyarrow.parquet
    # By itself pyarrow reads a row group, which may be the whole file, into memory at once.
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    there = set(columns) <= set(table.schema_arrow.names)
    row = 0
    for group in range(table.num_row_groups):
        if row + table.metadata.row_group(group).num_rows <= skip_rows:
            row += table.metadata.row_group(group).num_rows
            continue
        for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns if there else None):
            values = zip(*map(_values, batch.columns), strict=True)
            yield from enumerate((dict(zip(batch.schema.names, row_, strict=True)) for row_ in values), row + 1)
            row += len(batch)


def _values(column) -> list:
    """Of a column of parquet. A text that is not UTF-8 gets U+FFFD, not an error."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [(text or b"").decode(errors="replace") for text in column.cast("large_string").cast("large_binary").to_pylist()]


def _stretches(stream: io.BufferedIOBase, column: str) -> Iterator[dict]:
    """Of a text file."""
    parts, chars = [], 0
    # Line ends of any system become \n; bytes that are not UTF-8 become U+FFFD.
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")
    while line := lines.readline(TXT_CHARS_MOST):
        parts.append(line)
        chars += len(line)
        if chars >= TXT_CHARS_MOST or (chars >= TXT_CHARS and line.isspace()):
            yield {column: "".join(parts)}
            parts, chars = [], 0
    yield {column: "".join(parts)}


def _nested(record: dict, path: str):
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


# -------------------------------------------------------------------------------------------------------------- the Hub

@dataclass(frozen=True)
class HubSource:
    """A selection of one data set's files and rows, at one commit."""
    dataset: str
    revision: str                   # a commit: a branch would change under a resume
    files: str | tuple[str, ...]    # pattern of paths within the repository, or the paths themselves
    column: str                     # of the text
    license: str
    tokens: float | None            # of the whole source, about, by GPT-2's tokenizer; None where nobody knows
    keep: dict[str, tuple[str, ...]] = field(default_factory=dict)     # column, nested by dots -> values of the rows wanted
    grouped_by: str | None = None   # a column of `keep` by whose values the files are grouped, to read only those that matter


@dataclass(frozen=True)
class HubFile:
    name: str               # its path within the repository
    bytes: int | None
    source: HubSource

    @property
    def stamp(self) -> str:
        return self.source.revision

    def read(self) -> Iterator[tuple[tuple[str], float]]:
        """Raises BadFile where the file stays unreadable, UserError: no such column or data set, or no right to it."""
        rows, failures = 0, 0
        while True:
            try:
                with _opened(self.source, self.name, BLOCK) as file:
                    for texts, row in rows_of(file, PurePath(self.name), f"{self.source.dataset}/{self.name}",
                                              (self.source.column,), self.source.keep, rows, is_strict=False):
                        rows, failures = row, 0
                        yield texts, file.tell() / max(1, file.size)
                return
            except (*_faults(), BadFile) as error:
                if refusal := _refused(error, self.source, is_reading=True):
                    raise refusal from error
                waits = READ_WAITS[:1] if isinstance(error, BadFile) else READ_WAITS    # the network may mend, the file hardly
                if failures >= len(waits):
                    raise BadFile(f"{_brief(error)}, after {rows:,} rows") from error
                print(f"{self.name}: {_brief(error)} after {rows:,} rows; opened again in {waits[failures]} s", file=sys.stderr)
                time.sleep(waits[failures])
                failures += 1


def hub_source(name: str, value: HubSource) -> Source:
    """The source as the rest of the command knows it. The Hub is asked when its files() are, not before."""
    selection = {"column": value.column, "files": value.files if isinstance(value.files, str) else list(value.files),
                 "keep": {column: list(values) for column, values in value.keep.items()}}
    return Source(name, lambda: [HubFile(path, size, value) for path, size in _listing(value)], value.dataset,
                  value.revision, value.license, selection, value.tokens)


def any_dataset(dataset: str, column: str, revision: str | None, files: str | None, license: str | None) -> HubSource:
    """A data set that configs/sources.py does not name: its train split, or what the pattern `files` matches.

    The revision becomes the commit it means now. Raises UserError: no such data set, one with a script."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    value = HubSource(dataset, revision or "main", files or "", column, license or "", None)
    info = _ask(lambda api: api.dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), value)
    licenses = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    value = replace(value, revision=info.sha, license=license or ", ".join(licenses) or "not stated")
    return value if files else replace(value, files=_train_split(value))


def _train_split(value: HubSource) -> tuple[str, ...]:
    """The paths of the train split, as datasets itself finds it. Raises UserError."""
    import datasets
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False     # it would be loaded for nothing: 4 s, 180 MB
    advice = "give files= a pattern, such as files=data/*.parquet"
    try:
        builder = _ask(lambda api: datasets.load_dataset_builder(value.dataset, revision=value.revision), value)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{value.dataset}: {_brief(error)}: {advice}, or take revision=refs/convert/parquet") from error
    paths = [path.partition(f"@{value.revision}/")[2] for path in (builder.config.data_files or {}).get("train", [])]
    if not paths or not all(paths):     # files of another repository have no path here
        raise UserError(f"{value.dataset} has no train split of its own: {advice}")
    return tuple(sorted(paths))


def check(name: str, value: HubSource) -> Iterator[str]:
    """Lines about a source: data set, revision, licence, size, first record. Raises UserError where it is not as named,
    OSError where the Hub cannot be asked."""
    yield f"{name}: {value.dataset}@{value.revision}, {value.license}"
    files = hub_source(name, value).files()
    yield f"  {len(files):,} files, {sum(file.bytes or 0 for file in files) / 1e9:,.2f} GB"
    texts = (texts[0].strip() for file in files for texts, _ in islice(file.read(), HEAD_LINES))
    if (first := next(filter(None, texts), None)) is None:
        raise UserError(f"{name}: no row of {value.dataset} has {value.keep or 'any text'}: correct it in configs/sources.py")
    yield f"  {first[:100]!r}"


def _listing(value: HubSource) -> list[tuple[str, int]]:
    """Names and sizes of the files to read, in the order of a hash of their names: a prefix of the list, which is what a
    budget takes, is then a random sample, where the first names may be one crawl."""
    from fsspec.utils import glob_translate
    from huggingface_hub.errors import EntryNotFoundError
    patterns = (value.files,) if isinstance(value.files, str) else value.files
    is_wanted = re.compile(glob_translate(value.files)).fullmatch if isinstance(value.files, str) else set(patterns).__contains__
    # The folder that holds all matches: FineWeb-Edu has 2,410 files beside the 140 wanted.
    folder = os.path.commonpath([re.split(r"[*?\[]", pattern)[0].rpartition("/")[0] for pattern in patterns])

    def ask(api) -> list[tuple[str, int]]:
        api.dataset_info(value.dataset, revision=value.revision, timeout=TIMEOUT_S)     # fails soon where the listing tries long
        with suppress(EntryNotFoundError):      # no such folder
            return [(entry.path, entry.size) for entry in api.list_repo_tree(
                        value.dataset, folder or None, recursive=True, revision=value.revision, repo_type="dataset")
                    if hasattr(entry, "size")]
        return []

    there = _ask(ask, value)
    found = sorted((path, size) for path, size in there if is_wanted(path))
    if not found:
        raise UserError(f"{value.dataset}@{value.revision} has no file {', '.join(patterns[:3])}: correct the pattern; there are "
                        f"{', '.join(path for path, _ in there[:5]) or 'none'}")
    if odd := [path for path, _ in found if not path.endswith(HUB_FORMATS)]:
        raise UserError(f"{value.dataset}@{value.revision}: {odd[0]} cannot be streamed; files= must match files that end in "
                        f"{', '.join(HUB_FORMATS)}")
    if value.grouped_by:
        found = _of_group(value, found)
    return sorted(found, key=lambda file: hashlib.blake2b(file[0].encode(), digest_size=8).digest())


def _of_group(value: HubSource, found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group may begin in mid-file."""
    def first_value(path: str) -> str | None:
        """The column `grouped_by` of the first record that has it, by a request for the file's first bytes."""
        with _opened(value, path, HEAD_BYTES) as file:
            rows = islice(_json_rows(_unpacked(file, PurePath(path)), path), HEAD_LINES)
            return next(filter(None, (_nested(row, value.grouped_by) for row in rows)), None)

    with ThreadPoolExecutor(8) as pool:
        begins = list(pool.map(lambda file: _ask(lambda api: first_value(file[0]), value), found))
    wanted = value.keep[value.grouped_by]
    chosen = [file for file, *starts in zip(found, begins, [*begins[1:], None], strict=True) if {*starts} & {*wanted}]
    if not chosen:
        raise UserError(f"no file of {value.dataset}@{value.revision} begins with {', '.join(wanted)}; they begin with "
                        f"{', '.join(sorted(map(str, set(begins))))}: correct configs/sources.py")
    print(f"{value.dataset}: {len(chosen)} of {len(found)} files may hold {', '.join(wanted)}", file=sys.stderr)
    return chosen


# ------------------------------------------------------------------------------------------------- the Hub over a network

def _opened(source: HubSource, path: str, block: int):
    """A file of the data set, of which `block` bytes are asked for at a time."""
    from huggingface_hub import HfFileSystem
    where = f"datasets/{source.dataset}@{source.revision}/{path}"
    return HfFileSystem(skip_instance_cache=True).open(where, "rb", block_size=block)       # its size may have mended


def _ask(question: Callable, source: HubSource):
    """question(HfApi), asked again while the network fails. Raises UserError: a refusal; OSError: no answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()
    waits = iter(ASK_WAITS)
    while True:
        try:
            return question(HfApi())
        except _faults() as error:
            if refusal := _refused(error, source):
                raise refusal from error
            if isinstance(error, FileNotFoundError):
                raise
            if (wait := next(waits, None)) is None:
                raise ConnectionError(f"{HfApi().endpoint} gives no sound answer about {source.dataset} ({_brief(error)}): "
                                      f"check the network, then the data set") from error
            print(f"{source.dataset}: {_brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def _faults() -> tuple[type[Exception], ...]:
    """What the network, the Hub and a damaged file raise."""
    import httpx2
    return OSError, EOFError, zlib.error, httpx2.HTTPError


def _refused(error: BaseException | None, source: HubSource, is_reading: bool = False) -> UserError | None:
    """The sentence for an answer of the Hub that no second try will change; None for any other error.

    is_reading: the data set was there before, so only the Hub's own word counts. A 401 or 403 without it, or by the servers
    that hold the large files, may come of a link that ran out or a server that is unwell."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    while error:
        if isinstance(error, HfHubHTTPError) and (not is_reading or "X-Error-Code" in error.response.headers) and (
                isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)) or error.response.status_code in (401, 403)):
            return UserError(
                f"{source.dataset}@{source.revision} is refused by the Hub ({type(error).__name__}): correct its name or the "
                f"revision, accept its terms at https://huggingface.co/datasets/{source.dataset} if it is gated, and log in with "
                f"`hf auth login` or HF_TOKEN if it is private")
        error = error.__cause__
    return None


def _brief(error: Exception) -> str:
    """An error in a few words on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
