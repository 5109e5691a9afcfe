"""Data sets of the Hugging Face Hub as sources."""

import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import PurePath

from lib.errors import UserError
from prepare.formats import FORMATS, check_format
from prepare.readers import read_file, read_records, value_of
from prepare.records import brief
from prepare.sources import BadFile, InputFile, Reading, Row, Source

TIMEOUT_S = 8.0  # of a question to the Hub; with ASK_WAITS half a minute where there is no network
ASK_WAITS = (1, 3)  # seconds before a question is asked again
# seconds before a block is: 18 minutes of silence cost no file
READ_WAITS = (1, 5, 25, 60, 120, 300, 600)
# bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
NETWORK_BLOCK = 16 << 20
# of a file whose first record is looked at: bytes a request, lines at most
HEAD_BYTES, HEAD_LINES = 1 << 16, 1000


def list_files(source: Source) -> list[InputFile]:
    """The input files in the order in which they are taken in: those of the Hub, which is asked
    for them, by a hash of their names. A prefix, which is what a budget takes, is then a random
    sample, where the first names may be one crawl."""
    if source.local_files:
        return list(source.local_files)
    from fsspec.utils import glob_translate
    from huggingface_hub import HfApi

    is_pattern = isinstance(source.files, str)
    globs = expand_braces(source.files) if is_pattern else []
    patterns = [re.compile(glob_translate(glob)) for glob in globs]

    def is_wanted(path: str) -> bool:
        if not is_pattern:
            return path in source.files
        return any(pattern.fullmatch(path) for pattern in patterns)

    def ask() -> dict[str, int]:
        # fails soon, the listing tries long
        HfApi().dataset_info(source.dataset, revision=source.revision, timeout=TIMEOUT_S)
        entries = HfApi().list_repo_tree(
            source.dataset, recursive=True, revision=source.revision, repo_type="dataset"
        )
        return {entry.path: entry.size for entry in entries if hasattr(entry, "size")}

    there = _ask(ask, source)
    found = sorted(filter(is_wanted, there))
    for path in found:
        where = f"files= of {source.dataset}@{source.revision}: {path}"
        check_format(PurePath(path), FORMATS, where)
    if source.grouped_by:
        found = _of_group(source, found, source.grouped_by, source.keep[source.grouped_by])
    if not found:
        wanted = source.files if is_pattern else ", ".join(source.files)
        values = "; ".join(f"{column}={', '.join(kept)}" for column, kept in source.keep.items())
        raise UserError(
            f"{source.dataset}@{source.revision} has no file"
            f" {wanted}{f' with {values}' if values else ''}: correct the pattern; there are"
            f" {', '.join([*there][:5]) or 'none'}"
        )
    found.sort(key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest())
    return [
        InputFile(path, there[path], source.revision, partial(_read_hub, source, path))
        for path in found
    ]


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

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        raise UserError(f"hf:{dataset}: the name must look like hf:OWNER/NAME")
    source = Source(
        dataset=dataset,
        revision=revision or "main",
        files=files or (),
        column=column,
        license=license or "",
    )
    info = _ask(lambda: HfApi().dataset_info(dataset, revision=revision, timeout=TIMEOUT_S), source)
    licenses = [
        tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")
    ]
    source = replace(
        source, revision=info.sha, license=license or ", ".join(licenses) or "not stated"
    )
    if files:
        return source
    import datasets

    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False  # it would be loaded for nothing: 4 s, 180 MB
    try:
        builder = _ask(lambda: datasets.load_dataset_builder(dataset, revision=info.sha), source)
        paths = [
            path.partition(f"@{info.sha}/")[2]
            for path in (builder.config.data_files or {}).get("train", [])
        ]
        if not all(paths or [""]):  # files of another repository have no path here
            raise FileNotFoundError("it has no train split of its own")
    except UserError:
        raise
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise UserError(
            f"{dataset}: {brief(error)}: give files= a pattern, such as files=data/*.parquet, or"
            " take revision=refs/convert/parquet"
        ) from error
    return replace(source, files=tuple(sorted(paths)))


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


def _of_group(source: Source, paths: list[str], column: str, wanted: tuple[str, ...]) -> list[str]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group
    may begin in mid-file."""

    def first_value(path: str) -> str | None:
        """The column of the first record that has it, by a request for the file's first bytes."""
        opened, where = partial(_opened, source, path, HEAD_BYTES), f"{source.dataset}/{path}"
        rows = read_records(opened, where, (), (column,), Reading())
        values = (value_of(record.values, column) for record, _ in islice(rows, HEAD_LINES))
        return next(filter(None, values), None)

    with ThreadPoolExecutor(8) as pool:
        begins = list(pool.map(first_value, paths))
    chosen = [
        path
        for path, *starts in zip(paths, begins, [*begins[1:], None], strict=True)
        if {*starts} & {*wanted}
    ]
    print(
        f"{source.dataset}: {len(chosen)} of {len(paths)} files may hold {', '.join(wanted)}",
        file=sys.stderr,
    )
    return chosen


def _read_hub(source: Source, path: str, reading: Reading) -> Iterator[Row]:
    """A file of the data set; where it is damaged, maybe by the transfer, once more, behind the
    rows that were read."""
    opened, where = partial(_opened, source, path, NETWORK_BLOCK), f"{source.dataset}/{path}"
    read = partial(read_file, opened, where, (source.column,), source.keep, False)
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

    where = f"datasets/{source.dataset}@{source.revision}/{path}"
    # A new file system each time: the size it knows of a file may have mended.
    file = _ask(
        lambda: HfFileSystem(skip_instance_cache=True).open(where, "rb", block_size=block),
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


def _ask(question: Callable, source: Source, is_reading: bool = False):
    """question(), asked again while the network fails. Raises UserError: a refusal;
    ConnectionError: no answer.

    is_reading: the data set was there before, so only the Hub's own word counts as a refusal. A 401
    or 403 without it, or by the servers that hold the large files, may come of a link that ran out
    or a server that is unwell."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
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
                cause.response.status_code in (401, 403)
                or isinstance(cause, (RepositoryNotFoundError, RevisionNotFoundError))
            )
            if is_final and (not is_reading or "X-Error-Code" in cause.response.headers):
                raise UserError(
                    f"{source.dataset}@{source.revision} is refused by the Hub"
                    f" ({type(cause).__name__}): correct its name or revision, accept its terms at"
                    f" https://huggingface.co/datasets/{source.dataset} if it is gated, and log in"
                    " with `hf auth login` or HF_TOKEN if it is private"
                ) from error
            if isinstance(error, FileNotFoundError) and not is_reading:
                raise
            if (wait := next(waits, None)) is None:
                raise ConnectionError(
                    f"{HfApi().endpoint} gives no sound answer about"
                    f" {source.dataset} ({brief(error)}): check the network, then the data set"
                ) from error
            print(f"{source.dataset}: {brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)
