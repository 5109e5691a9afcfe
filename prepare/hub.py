"""Data sets of the Hugging Face Hub: which files to read, at which commit, and their documents whatever the network does."""

import gzip
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import PurePosixPath

from datatrove.data import Document

from prepare.sources import BadFile, Source, document, json_rows, nested, parquet_documents, parts_of, unpacked
from runtime.cli import UserError

FORMATS = (".parquet", *(f"{suffix}{packing}" for suffix in (".jsonl", ".json") for packing in ("", ".gz", ".zst")))
TIMEOUT_S = 8.0         # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)      # seconds before a question is asked again
# Seconds before a file is opened again, while it comes no further: 18 minutes of silence cost no file. huggingface_hub's own
# six tries add 23 s, to the first failure alone: the later ones fail when the file is opened, which it tries once.
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)
BLOCK = 16 << 20        # bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
PROBES_AT_ONCE = 8
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000      # of a file whose first record is looked at: bytes a request, lines at most


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
    """An input file (prepare.sources.Source) on the Hub, or one part of it."""
    name: str               # its path within the repository
    bytes: int | None
    source: HubSource
    part: int = 0
    parts: int = 1
    stamp: None = None      # a commit does not change

    def read(self, skip_rows: int) -> Iterator[Document]:
        """Raises BadFile where the file stays unreadable, UserError: no such column or data set, or no right to it."""
        rows, failures = skip_rows, 0
        while True:
            try:
                for found in self.documents(rows):
                    rows, failures = found.metadata["row"], 0
                    yield found
                return
            except (*_faults(), BadFile) as error:
                if isinstance(error, OSError) and error.filename is not None:
                    raise           # this machine's disk, such as a full one
                if refusal := _refused(error, self.source.dataset, self.source.revision, is_sure=True):
                    raise refusal from error
                waits = READ_WAITS[:1] if _is_content(error) else READ_WAITS    # the network may mend, the file hardly
                if failures >= len(waits):
                    raise BadFile(f"{_brief(error)}, after {rows:,} rows") from error
                print(f"{self.name}: {_brief(error)} after {rows:,} rows; opened again in {waits[failures]} s", file=sys.stderr)
                time.sleep(waits[failures])
                failures += 1

    def documents(self, skip_rows: int = 0, block: int = BLOCK) -> Iterator[Document]:
        """Not by the builders of `datasets`: its parquet one holds a row group in memory, 2.7 GB for one of 1 GB; its json one
        takes the types of the first 10 MB for those of the whole file."""
        source, where = self.source, f"{self.source.dataset}/{self.name}"
        with opened(source, self.name, block) as file:
            if self.name.endswith(".parquet"):
                yield from parquet_documents(file, where, source.column, source.keep, skip_rows, self.part, self.parts)
                return
            lines = unpacked(PurePosixPath(self.name), file)
            for texts, row in json_rows(lines, where, (source.column,), source.keep, skip_rows, is_strict=False):
                yield document(texts, where, row, file.tell() / max(1, file.size))


def opened(source: HubSource, path: str, block: int):
    """A file of the data set, of which `block` bytes are asked for at a time."""
    from huggingface_hub import HfFileSystem
    where = f"datasets/{source.dataset}@{source.revision}/{path}"
    return HfFileSystem(skip_instance_cache=True).open(where, "rb", block_size=block)       # its size may have mended


def hub_source(name: str, value: HubSource) -> Source:
    """The source as the rest of the command knows it. The Hub is asked when its files() are, not before."""
    def files(known: list[tuple[str, int | None]] | None) -> list[HubFile]:
        return [HubFile(path, size, value, part, parts) for path, size in dict.fromkeys(known or _listing(value))
                for parts in [parts_of(path, size) if path.endswith(".parquet") else 1] for part in range(parts)]

    selection = {"column": value.column, "files": value.files if isinstance(value.files, str) else list(value.files),
                 "keep": {column: list(values) for column, values in value.keep.items()}}
    return Source(name, files, value.dataset, value.revision, value.license, selection, value.tokens)


def any_dataset(dataset: str, column: str, revision: str | None, files: str | None, license: str | None) -> HubSource:
    """A data set that configs/sources.py does not name: its train split, or what the pattern `files` matches.

    The revision becomes the commit it means now. Raises UserError: no such data set, one with a script."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    info = _ask(lambda api: api.dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), dataset, revision)
    if not license:
        licenses = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
        license = ", ".join(licenses) or "not stated"
    return HubSource(dataset, info.sha, files or _train_split(dataset, info.sha), column, license, None)


def check(name: str, value: HubSource) -> Iterator[str]:
    """Lines about a source: data set, revision, licence, size, first record. Raises UserError where it is not as named,
    OSError where the Hub cannot be asked."""
    yield f"{name}: {value.dataset}@{value.revision}, {value.license}"
    files = hub_source(name, value).files(None)
    sizes = {file.name: file.bytes or 0 for file in files}
    yield f"  {len(sizes):,} files, {sum(sizes.values()) / 1e9:,.2f} GB"
    # Of the first file that has a text near its beginning; a few MB are read, not a block.
    texts = (found.text for file in files for found in islice(file.documents(block=1 << 20), 1000))
    first = _ask(lambda api: next(filter(str.strip, texts), None), value.dataset, value.revision)
    if first is None:
        raise UserError(f"{name}: no row of {value.dataset} has {_wanted(value)}: correct it in configs/sources.py")
    line = next(line for line in first.splitlines() if line.strip())
    # A line separator, a terminal's escape or one that turns the writing around would spoil the lines about it.
    yield "  " + "".join(c if c.isprintable() else " " for c in line.strip()[:100]).rstrip()


def _wanted(value: HubSource) -> str:
    return " and ".join(f"{column} in {', '.join(values)}" for column, values in value.keep.items()) or "any text"


# -------------------------------------------------------------------------------------------------------------- listing

def _listing(value: HubSource) -> list[tuple[str, int]]:
    """Names and sizes of the files to read, in the order of a hash of their names: a prefix of the list, which is what a
    budget takes, is then a random sample, where the first names may be one crawl."""
    from fsspec.utils import glob_translate
    from huggingface_hub.errors import EntryNotFoundError
    at, patterns = f"{value.dataset}@{value.revision}", (value.files,) if isinstance(value.files, str) else value.files
    try:
        wanted = [re.compile(glob_translate(pattern)) for pattern in patterns] if isinstance(value.files, str) else []
    except (ValueError, re.error) as error:
        raise UserError(f"files={value.files} is no pattern ({error}): give one such as files=data/**/*.parquet") from error
    # The folder that holds all matches: FineWeb-Edu has 2,410 files beside the 140 wanted.
    folders = {re.split(r"[^/]*[*?\[]", pattern)[0] if re.search(r"[*?\[]", pattern) else pattern.rpartition("/")[0]
               for pattern in patterns}
    folder = folders.pop().rstrip("/") if len(folders) == 1 else ""

    def ask(api) -> list[tuple[str, int]]:
        api.dataset_info(value.dataset, revision=value.revision, timeout=TIMEOUT_S)     # fails soon where the listing tries long
        with suppress(EntryNotFoundError):      # no such folder
            return [(entry.path, entry.size) for entry in api.list_repo_tree(
                        value.dataset, folder or None, recursive=True, revision=value.revision, repo_type="dataset")
                    if hasattr(entry, "size")]
        return []

    there = _ask(ask, value.dataset, value.revision)
    found = sorted((path, size) for path, size in there if path in patterns or any(w.fullmatch(path) for w in wanted))
    if not found:
        raise UserError(f"{at} has no file {', '.join(patterns[:3])}: correct the pattern; there are "
                          f"{', '.join(path for path, _ in there[:5]) or 'none'}")
    if odd := [path for path, _ in found if not path.endswith(FORMATS)]:
        raise UserError(f"{at}: {odd[0]} cannot be streamed; files= must match files that end in {', '.join(FORMATS)}")
    if value.grouped_by:
        found = _of_group(value, found)
    return sorted(found, key=lambda file: blake2b(file[0].encode(), digest_size=8).digest())


def _of_group(value: HubSource, found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group may begin in mid-file."""
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        begins = list(pool.map(lambda file: _first_value(value, file[0]), found))
    wanted = value.keep[value.grouped_by]
    chosen = [n for n in range(len(found)) if begins[n] in wanted or (n + 1 < len(found) and begins[n + 1] in wanted)]
    if not chosen:
        raise UserError(f"no file of {value.dataset}@{value.revision} begins with {_wanted(value)}; they begin with "
                          f"{', '.join(sorted(set(begins)))}")
    print(f"{value.dataset}: {len(chosen)} of {len(found)} files may hold {_wanted(value)}", file=sys.stderr)
    return [found[n] for n in chosen]


def _first_value(value: HubSource, path: str) -> str:
    """The column `grouped_by` of the first record that has it, by a request for the file's first bytes."""
    def ask(api) -> str | None:
        with opened(value, path, HEAD_BYTES) as file:
            for line in islice(unpacked(PurePosixPath(path), file), HEAD_LINES):
                with suppress(ValueError):
                    if isinstance(found := nested(json.loads(line), value.grouped_by), str):
                        return found
        return None

    found = _ask(ask, value.dataset, value.revision)
    if found is None:
        raise UserError(f"{value.dataset}/{path}: its first rows have no {value.grouped_by}: the data set is laid out otherwise; "
                        f"correct configs/sources.py")
    return found


def _train_split(dataset: str, revision: str) -> tuple[str, ...]:
    """The paths of the train split, as datasets itself finds it. Raises UserError."""
    import datasets
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False     # it would be loaded for nothing: 4 s, 180 MB
    advice = "give files= a pattern, such as files=data/*.parquet"
    try:
        builder = _ask(lambda api: datasets.load_dataset_builder(dataset, revision=revision), dataset, revision)
    except RuntimeError as error:
        raise UserError(f"{dataset} needs a loading script, which nobody runs any more: {advice}, or take "
                          f"revision=refs/convert/parquet ({_brief(error)})") from error
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{dataset}: {_brief(error)}: {advice}") from error
    paths = [path.partition(f"@{revision}/")[2] for path in (builder.config.data_files or {}).get("train", [])]
    if not paths or not all(paths):     # files of another repository have no path here
        raise UserError(f"{dataset} has no train split of its own: {advice}")
    return tuple(sorted(paths))


def _ask(question: Callable, dataset: str, revision: str | None):
    """question(HfApi), asked again while the network fails. Raises UserError: a refusal; OSError: no answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()
    for wait in (*ASK_WAITS, None):
        try:
            return question(HfApi())
        except _faults() as error:
            if refusal := _refused(error, dataset, revision):
                raise refusal from error
            if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.filename is not None):
                raise
            if wait is None:
                raise ConnectionError(f"{HfApi().endpoint} gives no sound answer about {dataset} ({_brief(error)}): "
                                      f"check the network, then the data set") from error
            print(f"{dataset}: {_brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last wait is None")


# --------------------------------------------------------------------------------------------------------------- faults

def _faults() -> tuple[type[Exception], ...]:
    """What the network, the Hub and a damaged file raise."""
    import httpx2
    from huggingface_hub.errors import HFValidationError
    return OSError, EOFError, zlib.error, httpx2.HTTPError, HFValidationError


def _is_content(error: Exception) -> bool:
    """Whether the file is to blame rather than the network."""
    from huggingface_hub.errors import EntryNotFoundError
    return isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, BadFile, FileNotFoundError, EntryNotFoundError))


def _refused(error: BaseException | None, dataset: str, revision: str | None, is_sure: bool = False) -> UserError | None:
    """The sentence for an answer of the Hub that no second try will change; None for any other error.

    is_sure: the data set was there before, so only the Hub's own word counts. A 401 or 403 without it, or by the servers that
    hold the large files, may come of a link that ran out or a server that is unwell."""
    from huggingface_hub import HfApi, errors
    if is_sure and isinstance(error, errors.HfHubHTTPError):
        is_hub = str(error.response.url).startswith(HfApi().endpoint + "/")
        if not is_hub or "X-Error-Code" not in error.response.headers:
            return None
    at = f"{dataset}@{revision}" if revision else dataset
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{dataset} is gated: accept its terms at https://huggingface.co/datasets/{dataset}, then log in with "
                           f"`hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(f"there is no data set {dataset} on the Hub, or it is private: it may have moved; look for it at "
                           f"https://huggingface.co/datasets, or log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{at}: the data set has no such revision; they are listed at "
                           f"https://huggingface.co/datasets/{dataset}/commits/main")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{dataset!r} is no data set's name: it must look like OWNER/NAME")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return UserError(f"{at}: the Hub refuses it ({error.response.status_code}): log in with `hf auth login` or set a "
                           f"HF_TOKEN that may read it")
    return _refused(error.__cause__, dataset, revision, is_sure) if error and error.__cause__ else None


def _brief(error: Exception) -> str:
    """An error in a few words on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
