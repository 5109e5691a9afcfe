"""Data sets of the Hugging Face Hub as sources."""

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import PurePath
from typing import Any, TypeVar

from lib.errors import UserError
from prepare.formats import FORMATS, check_format
from prepare.readers import read_file, read_records, value_of
from prepare.records import brief
from prepare.sources import BadFile, InputFile, Reading, Source, SourceRow

T = TypeVar("T")

HUB_NAME = r"[\w.-]+/[\w.-]+"  # of a data set
TIMEOUT_S = 8.0  # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)  # seconds before a question is asked again
# seconds before a block is: 18 minutes of silence cost no file
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)
# bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
NETWORK_BLOCK = 16 << 20
# of a file whose first record is looked at: bytes a request, lines at most
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000


def list_files(source: Source) -> list[InputFile]:
    """The input files in the order in which they are taken in: those of the Hub, which is asked for
    them, by a hash of their names. A prefix, which is what a budget takes, is then a random sample,
    where the first names may be one crawl."""
    if source.local_files:
        return list(source.local_files)
    sizes = _list_repository(source)
    paths = [path for path in sorted(sizes) if _is_wanted(source, path)]
    for path in paths:
        check_format(
            PurePath(path), FORMATS, f"files= of {source.dataset}@{source.revision}: {path}"
        )
    if source.grouped_by:
        paths = _of_group(source, paths, source.grouped_by, source.keep[source.grouped_by])
    if not paths:
        raise _no_files(source, list(sizes))
    paths.sort(key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest())
    return [
        InputFile(path, sizes[path], source.revision, partial(_read_hub, source, path))
        for path in paths
    ]


def _list_repository(source: Source) -> dict[str, int]:
    """Path -> bytes of each file of the data set."""
    from huggingface_hub import HfApi

    def question() -> dict[str, int]:
        # fails soon, the listing tries long
        HfApi().dataset_info(source.dataset, revision=source.revision, timeout=TIMEOUT_S)
        entries = HfApi().list_repo_tree(
            source.dataset, recursive=True, revision=source.revision, repo_type="dataset"
        )
        return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}

    return _ask(question, source)


def _is_wanted(source: Source, path: str) -> bool:
    if not isinstance(source.files, str):
        return path in source.files
    return any(pattern.fullmatch(path) for pattern in _patterns(source.files))


@cache
def _patterns(files: str) -> list[re.Pattern]:
    """What a pattern of files means, braces and all."""
    from fsspec.utils import glob_translate

    return [re.compile(glob_translate(glob)) for glob in expand_braces(files)]


def _no_files(source: Source, there_are: list[str]) -> UserError:
    pattern = source.files if isinstance(source.files, str) else ", ".join(source.files)
    values = "; ".join(f"{column}={', '.join(names)}" for column, names in source.keep.items())
    if values:
        pattern = f"{pattern} with {values}"
    return UserError(
        f"{source.dataset}@{source.revision} has no file {pattern}: correct the pattern; there are"
        f" {', '.join(there_are[:5]) or 'none'}"
    )


def expand_braces(pattern: str) -> list[str]:
    """The patterns that one with {a,b} means, as a shell expands it; braces without a comma are
    themselves."""
    for begin, end in _brace_pairs(pattern):
        choices = _split_at_commas(pattern[begin + 1 : end])
        if len(choices) > 1:
            return [
                expanded
                for choice in choices
                for expanded in expand_braces(pattern[:begin] + choice + pattern[end + 1 :])
            ]
    return [pattern]


def _brace_pairs(pattern: str) -> Iterator[tuple[int, int]]:
    """Where outer braces begin and end."""
    depth, begin = 0, 0
    for place, letter in enumerate(pattern):
        if letter == "{":
            begin = place if depth == 0 else begin
            depth += 1
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0:
                yield begin, place


def _split_at_commas(text: str) -> list[str]:
    """The parts of a text between commas that are not within braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def any_dataset(
    dataset: str, column: str, revision: str | None, files: str | None, license: str | None
) -> Source:
    """A data set that configs/sources.py does not name: its train split, as datasets finds it, or
    what the pattern `files` means. The revision becomes the commit it means now. Raises UserError:
    no such data set, one with a script."""
    from huggingface_hub import HfApi

    if not re.fullmatch(HUB_NAME, dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    source = Source(
        dataset=dataset,
        revision=revision or "main",
        files=files or (),
        column=column,
        license=license or "",
    )
    info = _ask(lambda: HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), source)
    assert info.sha is not None
    source = replace(source, revision=info.sha, license=license or _stated_license(info.tags or []))
    if files:
        return source
    return replace(source, files=_train_files(source))


def _stated_license(tags: list[str]) -> str:
    """What the data set's card says."""
    names = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    return ", ".join(names) or "not stated"


def _train_files(source: Source) -> tuple[str, ...]:
    """Paths of the data set's train split, as datasets finds it. Raises UserError."""
    import datasets

    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # it would be loaded for nothing: 4 s, 180 MB
    try:
        builder = _ask(
            lambda: datasets.load_dataset_builder(source.dataset, revision=source.revision), source
        )
        urls = (builder.config.data_files or {}).get("train", [])
        paths = [url.partition(f"@{source.revision}/")[2] for url in urls]
        if not all(paths or [""]):  # files of another repository have no path here
            raise FileNotFoundError("it has no train split of its own")
    except UserError:
        raise
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UserError(
            f"{source.dataset}: {brief(error)}: give files= a pattern, such as"
            " files=data/*.parquet, or take revision=refs/convert/parquet"
        ) from error
    return tuple(sorted(paths))


def check(source: Source) -> None:
    """Prints a source's data set, revision, licence, size, first record. Raises UserError where it
    is not as named, OSError where the Hub cannot be asked."""
    print(f"{source.name}: {source.dataset}@{source.revision}, {source.license}", flush=True)
    files = list_files(source)
    print(
        f"  {len(files):,} files, {sum(file.bytes or 0 for file in files) / 1e9:,.2f} GB",
        flush=True,
    )
    rows = (row for file in files for row in islice(file.read(Reading()), HEAD_LINES))
    texts = (row.texts[0].strip() for row in rows)
    if (first := next(filter(None, texts), None)) is None:
        raise UserError(
            f"{source.name}: no row of {source.dataset} has {source.keep or 'any text'}: correct"
            " configs/sources.py"
        )
    print(f"  {first[:100]!r}", flush=True)


def _of_group(source: Source, paths: list[str], column: str, values: tuple[str, ...]) -> list[str]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group
    may begin in mid-file."""

    def first_value(path: str) -> str | None:
        """The column of the first record that has it, by a request for the file's first bytes."""
        opened = partial(_opened, source, path, HEAD_BYTES)
        rows = read_records(opened, f"{source.dataset}/{path}", (), (column,), Reading())
        for record, _ in islice(rows, HEAD_LINES):
            value = value_of(record.values, column)
            if value:
                return value
        return None

    with ThreadPoolExecutor(8) as pool:
        begins = list(pool.map(first_value, paths))
    ends = [*begins[1:], None]  # what the next file begins with
    members = [
        path
        for path, first, last in zip(paths, begins, ends, strict=True)
        if first in values or last in values
    ]
    print(
        f"{source.dataset}: {len(members)} of {len(paths)} files may hold {', '.join(values)}",
        file=sys.stderr,
    )
    return members


def _read_hub(source: Source, path: str, reading: Reading) -> Iterator[SourceRow]:
    """A file of the data set; where it is damaged, maybe by the transfer, once more, behind the
    rows that were read."""
    opened = partial(_opened, source, path, NETWORK_BLOCK)
    full_name = f"{source.dataset}/{path}"
    read = partial(read_file, opened, full_name, (source.column,), source.keep, False)
    reading.skips_broken_lines = False  # one may be the transfer's fault: a second reading skips it
    try:
        yield from read(reading)
    except BadFile as error:
        is_sound = error.__cause__ is None  # but of no use
        is_unanswered = isinstance(error.__cause__, ConnectionError)  # after many tries
        if is_sound or is_unanswered:
            raise
        rows = reading.rows
        print(f"{error}; after {rows:,} rows it is opened again", file=sys.stderr)
        reading.restart()
        reading.skips_broken_lines = True
        yield from islice(read(reading), rows, None)


def _opened(source: Source, path: str, block: int):
    """A file of the data set, of which `block` bytes are asked for at a time, and again where the
    network fails."""
    from huggingface_hub import HfFileSystem

    url = f"datasets/{source.dataset}@{source.revision}/{path}"
    # A new file system each time: the size it knows of a file may have mended.
    file = _ask(
        lambda: HfFileSystem(skip_instance_cache=True).open(url, "rb", block_size=block),
        source,
        is_reading=True,
    )
    fetch = file.cache.fetcher  # huggingface_hub's own tries add 23 s to each of ours

    def fetch_whole(start: int, end: int) -> bytes:
        if len(data := fetch(start, end)) < end - start:
            raise ConnectionError(f"{path} was cut short")
        return data

    file.cache.fetcher = lambda start, end: _ask(
        partial(fetch_whole, start, end), source, is_reading=True
    )
    return file


def _ask(question: Callable[[], T], source: Source, is_reading: bool = False) -> T:
    """question(), asked again while the network fails. Raises UserError: a refusal;
    ConnectionError: no answer.

    is_reading: the data set was there before, so only the Hub's own word counts as a refusal. A 401
    or 403 without it, or by the servers that hold the large files, may come of a link that ran out
    or a server that is unwell."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    waits = iter(READ_WAITS if is_reading else ASK_WAITS)
    while True:
        try:
            return question()
        except (OSError, httpx2.HTTPError) as error:
            _refuse_if_final(error, source, is_reading)
            if isinstance(error, FileNotFoundError) and not is_reading:
                raise
            wait_s = next(waits, None)
            if wait_s is None:
                raise ConnectionError(
                    f"{HfApi().endpoint} gives no sound answer about"
                    f" {source.dataset} ({brief(error)}): check the network, then the data set"
                ) from error
            print(f"{source.dataset}: {brief(error)}; asked again in {wait_s} s", file=sys.stderr)
            time.sleep(wait_s)


def _refuse_if_final(error: BaseException, source: Source, is_reading: bool) -> None:
    """Raises UserError where the error is the Hub's word that it will not answer."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause: Any = error
    while cause and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        return
    is_missing = isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError))
    if not is_missing and cause.response.status_code not in (401, 403):
        return
    if is_reading and "X-Error-Code" not in cause.response.headers:
        return
    raise UserError(
        f"{source.dataset}@{source.revision} is refused by the Hub"
        f" ({type(cause).__name__}): correct its name or revision, accept its terms at"
        f" https://huggingface.co/datasets/{source.dataset} if it is gated, and log in"
        " with `hf auth login` or HF_TOKEN if it is private"
    ) from error
