"""Find the files and the facts of data sets on the Hugging Face Hub."""

import json
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from prepare.hub_faults import brief, faults, is_local, quiet_datasets, refused
from prepare.hub_files import FORMATS, HubFile
from prepare.source import Source
from runtime.cli import UserError

TIMEOUT_S = 8.0         # of a question to the Hub; with WAITS half a minute where there is no network
WAITS = (1, 3)          # seconds before a question is asked again
PROBES_AT_ONCE = 8
HEAD_BYTES = (1 << 16, 1 << 20, 1 << 24)    # how much of a file is asked for until its first line is whole


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


def hub_source(name: str, value: HubSource) -> Source:
    """The source as the rest of the command knows it. The Hub is asked when its files() are, not before."""
    def files(known: list[tuple[str, int | None]] | None) -> list[HubFile]:
        return [HubFile(path, size, value.dataset, value.revision, value.column, value.keep)
                for path, size in known or _listing(value)]

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
    yield f"  {len(files):,} files, {sum(file.bytes or 0 for file in files) / 1e9:,.2f} GB"
    first = _ask(lambda api: _first_document(files), value.dataset, value.revision)
    if first is None:
        raise UserError(f"{name}: no row of {value.dataset} has {_wanted(value)}: correct it in configs/sources.py")
    line = next((line for line in first.splitlines() if line.strip()), "")
    # A line separator, a terminal's escape or one that turns the writing around would spoil the lines about it.
    yield "  " + "".join(c if c.isprintable() else " " for c in line.strip()[:100]).rstrip()


def _first_document(files: list[HubFile]) -> str | None:
    """Of the first file that has one near its beginning; a few MB are read, not a block."""
    for file in files:
        for texts, *_ in islice(file.tables(block=1 << 20), 20):
            for text in texts.to_pylist():
                if text.strip():
                    return text
    return None


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
    folder = _common_folder(patterns)

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


def _common_folder(patterns: tuple[str, ...]) -> str:
    """The folder that holds all matches: FineWeb-Edu has 2,410 files beside the 140 wanted."""
    folders = [re.split(r"[^/]*[*?\[]", pattern)[0] if re.search(r"[*?\[]", pattern) else pattern.rpartition("/")[0]
               for pattern in patterns]
    return folders[0].rstrip("/") if len(set(folders)) == 1 else ""


def _of_group(value: HubSource, found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The files that may hold a wanted value: it begins them, or it begins the next one, as a group may begin in mid-file."""
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        begins = list(pool.map(lambda file: _first_value(value, file[0]), found))
    wanted = value.keep[value.grouped_by]
    chosen = [n for n in range(len(found)) if begins[n] in wanted or (n + 1 < len(found) and begins[n + 1] in wanted)]
    if not chosen:
        raise UserError(f"no file of {value.dataset}@{value.revision} begins with {_wanted(value)}; they begin with "
                          f"{', '.join(sorted(set(begins)))}")
    others = Counter(begin for n, begin in enumerate(begins) if n not in chosen)
    told = ", ".join(f"{begin} ({count})" for begin, count in others.most_common())
    print(f"{value.dataset}: {len(chosen)} of {len(found)} files may hold {_wanted(value)}" +
          (f"; the others begin with {told}" if told else ""), file=sys.stderr)
    return [found[n] for n in chosen]


def _first_value(value: HubSource, path: str) -> str:
    """The column `grouped_by` of the first record of a json.gz file that has it, by a request for the file's first bytes."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff
    url = hf_hub_url(value.dataset, path, repo_type="dataset", revision=value.revision)

    def ask(size: int) -> bytes:
        headers, head = {**build_hf_headers(), "Range": f"bytes=0-{size - 1}"}, b""
        # Waits as long as a 429 asks for.
        with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            for data in answer.iter_bytes():
                head += data
                if len(head) >= size:       # a server that knows no ranges would send all of the file
                    break
        return head[:size]

    for size in HEAD_BYTES:
        packed, lines = _ask(lambda api, size=size: ask(size), value.dataset, value.revision), []
        with suppress(zlib.error):
            lines = zlib.decompressobj(31).decompress(packed).split(b"\n")
        is_whole = len(packed) < size
        for line in lines if is_whole else lines[:-1]:
            if (found := _at(line, value.grouped_by)) is not None:
                return found
        if is_whole:
            break
    raise UserError(f"{value.dataset}/{path}: its first rows have no {value.grouped_by}: the data set is laid out otherwise; "
                      f"correct configs/sources.py")


def _at(line: bytes, column: str) -> str | None:
    """A text field, nested by dots, of a line of JSON; None where there is none."""
    try:
        found = json.loads(line)
        for name in column.split("."):
            found = found[name]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _train_split(dataset: str, revision: str) -> tuple[str, ...]:
    """The paths of the train split, as datasets itself finds it. Raises UserError."""
    datasets = quiet_datasets()
    advice = "give files= a pattern, such as files=data/*.parquet"
    try:
        builder = _ask(lambda api: datasets.load_dataset_builder(dataset, revision=revision), dataset, revision)
    except RuntimeError as error:
        raise UserError(f"{dataset} needs a loading script, which nobody runs any more: {advice}, or take "
                          f"revision=refs/convert/parquet ({brief(error)})") from error
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{dataset}: {brief(error)}: {advice}") from error
    paths = [path.partition(f"@{revision}/")[2] for path in (builder.config.data_files or {}).get("train", [])]
    if not paths or not all(paths):     # files of another repository have no path here
        raise UserError(f"{dataset} has no train split of its own: {advice}")
    return tuple(sorted(paths))


def _ask(question: Callable, dataset: str, revision: str | None):
    """question(HfApi), asked again while the network fails. Raises UserError: a refusal; OSError: no answer."""
    from huggingface_hub import HfApi
    quiet_datasets()
    for wait in (*WAITS, None):
        try:
            return question(HfApi())
        except faults() as error:
            if refusal := refused(error, dataset, revision):
                raise refusal from error
            if isinstance(error, FileNotFoundError) or is_local(error):
                raise
            if wait is None:
                raise ConnectionError(f"{HfApi().endpoint} gives no sound answer about {dataset} ({brief(error)}): "
                                      f"check the network, then the data set") from error
            print(f"{dataset}: {brief(error)}; asked again in {wait} s", file=sys.stderr)
            time.sleep(wait)
    raise AssertionError("the last wait is None")
