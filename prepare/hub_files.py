"""Read the documents of one file of a data set on the Hugging Face Hub, whatever the network does."""

import codecs
import gzip
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from prepare.packing import unpacked
from prepare.source import BATCH_BYTES, BadFile, Batch
from runtime.annotations import ConfigError
from runtime.tokenizer import clean

# Seconds before a file is opened again, while no new row comes: an outage of two minutes costs no file. huggingface_hub
# itself asks six times within 23 s before that counts as one failure.
WAITS = (1, 5, 25, 60)
BLOCK = 32 << 20        # bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
LINES = 1 << 20         # bytes that are parsed at once
TABLE_ROWS = 64         # rows of parquet at once: documents of a megabyte must not fill the memory
TEXT_TYPES = ("string", "large_string", "null")
FORMATS = (".parquet", *(f"{suffix}{packing}" for suffix in (".jsonl", ".json") for packing in ("", ".gz", ".zst")))


@dataclass(frozen=True)
class HubFile:
    """One file at one commit; a prepare.source.InputFile."""
    name: str               # its path within the repository
    bytes: int | None
    dataset: str
    revision: str
    column: str             # of the text
    keep: dict[str, tuple[str, ...]] = field(default_factory=dict)     # column, nested by dots -> values of the rows wanted

    def read(self, skip_rows: int) -> Iterator[Batch]:
        """Batches of the rows wanted, after the first `skip_rows` rows of all.

        Raises BadFile where the file stays unreadable, ConfigError: no such column or data set, or no right to it."""
        rows, failures = skip_rows, 0
        while True:
            try:
                # Smaller requests at each new try: a connection may not live as long as a large one takes.
                for batch in _batched(self.tables(rows, BLOCK >> 2 * failures), rows):
                    rows, failures = batch.rows, 0
                    yield batch
                return
            except faults() as error:
                if is_local(error):
                    raise
                if refusal := refused(error, self.dataset, self.revision):
                    raise refusal from error
                waits = WAITS[:1] if is_content(error) else WAITS       # the network may mend, the file hardly
                if failures >= len(waits):
                    raise BadFile(f"{brief(error)}, after {rows:,} rows") from error
                print(f"{self.name}: {brief(error)} after {rows:,} rows; opened again in {waits[failures]} s", file=sys.stderr)
                time.sleep(waits[failures])
                failures += 1

    def tables(self, skip_rows: int = 0, block: int = BLOCK) -> Iterator[tuple]:
        """(texts as a pyarrow large_string array, rows of the file up to their end, share of it read) for some rows at a time."""
        return (self._of_lines if ".json" in self.name else self._of_parquet)(skip_rows, block)

    def _of_parquet(self, skip_rows: int, block: int) -> Iterator[tuple]:
        import pyarrow.dataset
        datasets, rows = quiet_datasets(), 0
        # pre_buffer would keep all that was read of a file until its end: 2 GB. Without a buffer a row group's column is read at
        # once, and some files are one row group.
        options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=LINES)
        with tempfile.TemporaryDirectory() as cache:    # stays empty; datasets would make one in the home, which may be read-only
            where = {"data_files": self._url, "split": "train", "streaming": True, "cache_dir": cache,
                     "storage_options": {"hf": {"block_size": block}}}
            stream = datasets.load_dataset("parquet", columns=self._columns, batch_size=1_000,
                                           fragment_scan_options=options, **where)
            if missing := [name for name in self._columns if name not in stream.features]:
                self._no_column(missing[0], list(datasets.load_dataset("parquet", **where).features))
        for table in stream.with_format("arrow").iter(TABLE_ROWS):
            kind = table.schema.field(self.column).type
            if str(kind) not in TEXT_TYPES:
                self._not_text(kind)
            rows += len(table)
            if rows > skip_rows:
                yield self._texts(table.slice(max(0, skip_rows - rows + len(table)))), rows, 0.0

    def _of_lines(self, skip_rows: int, block: int) -> Iterator[tuple]:
        """By the streaming layer of datasets, not its "json" builder: that takes the types of the first 10 MB for those of the
        whole file, so that a field which is null there ends the reading later, and for one odd line it reads all into memory."""
        from datasets.utils.file_utils import xopen
        datasets, rows = quiet_datasets(), 0
        options = datasets.DownloadConfig(storage_options={"hf": {"block_size": block}})
        with xopen(self._url, "rb", download_config=options) as packed:
            for data in _whole_lines(unpacked(PurePosixPath(self.name), packed)):
                if rows == 0:
                    data = data.removeprefix(codecs.BOM_UTF8)
                    if data[:1] == b"[":
                        raise ConfigError(f"{self.dataset}/{self.name} is one list; only files with an object a line can be read")
                first, rows = rows, rows + data.count(b"\n") + (data[-1:] != b"\n")
                if rows > skip_rows:
                    texts = self._texts(self._parse(data, first, rows).slice(max(0, skip_rows - first)))
                    yield texts, rows, packed.tell() / max(1, packed.size)

    @property
    def _url(self) -> str:
        return f"hf://datasets/{self.dataset}@{self.revision}/{self.name}"

    @property
    def _columns(self) -> list[str]:
        return list(dict.fromkeys([self.column, *(path.split(".")[0] for path in self.keep)]))

    def _parse(self, data: bytes, first: int, rows: int):
        """The columns needed of lines of JSON, by pyarrow; where it refuses a line, by Python's parser."""
        import pyarrow
        import pyarrow.json
        schema = pyarrow.schema([(self.column, pyarrow.large_string()), *_schema(self.keep)])
        try:
            table = pyarrow.json.read_json(
                pyarrow.BufferReader(data), pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"))
            if len(table) == rows - first and table.column(self.column).null_count < len(table):
                return table
        except pyarrow.ArrowException:
            pass
        lines = data.decode(errors="replace").split("\n")[:rows - first]
        records = [self._record(line, first + n) for n, line in enumerate(lines)]
        return pyarrow.table({name: pyarrow.array([record.get(name) for record in records], schema.field(name).type)
                              for name in schema.names})

    def _record(self, line: str, row: int) -> dict:
        """A line of JSON; half a character (an escape such as \\ud83d alone) becomes U+FFFD, an empty line an empty document."""
        where = f"{self.dataset}/{self.name} row {row:,}"
        try:
            record = json.loads(line, strict=False) if line.strip() else {self.column: None}
        except (ValueError, RecursionError) as error:
            raise BadLine(f"row {row:,} is no line of JSON ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is no object: only files with an object a line can be read")
        if row == 0 and self.column not in record:
            self._no_column(self.column, list(record))
        text = record.get(self.column)
        if text is not None and not isinstance(text, str):
            self._not_text(type(text).__name__)
        return {**_strings(record, self.keep), self.column: text and clean(text)}

    def _no_column(self, column: str, columns: list[str]):
        raise ConfigError(f"{self.dataset}/{self.name} has no column {column!r}: set column= to one of "
                          f"{', '.join(columns) or '(none)'}")

    def _not_text(self, kind):
        raise ConfigError(f"{self.dataset}/{self.name}: column {self.column!r} holds {kind}, not text: set column=")

    def _texts(self, table):
        """The text of the rows wanted; null becomes empty."""
        import pyarrow
        import pyarrow.compute as pc
        for path, values in self.keep.items():
            column, *fields = path.split(".")
            found = table.column(column)
            found = pc.struct_field(found, fields) if fields else found
            table = table.filter(pc.is_in(found, value_set=pyarrow.array(values, found.type)))
        texts = pc.fill_null(table.column(self.column).cast(pyarrow.large_string()), "")
        return pyarrow.concat_arrays(texts.chunks) if texts.num_chunks else pyarrow.array([], pyarrow.large_string())


class BadLine(ValueError):
    """A line that is not what its file should hold."""


def _schema(keep: dict) -> list[tuple]:
    """pyarrow fields for dotted columns: "a.b" -> a: struct<b: string>."""
    import pyarrow
    fields = []
    for path in keep:
        column, *inner = path.split(".")
        kind = pyarrow.string()
        for name in reversed(inner):
            kind = pyarrow.struct([(name, kind)])
        fields.append((column, kind))
    return fields


def _strings(record: dict, keep: dict) -> dict:
    """Of a record what `keep` asks about, nested as there; what is no string is null."""
    out = {}
    for path in keep:
        names, value = path.split("."), record
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        value = value if isinstance(value, str) else None
        for name in reversed(names[1:]):
            value = {name: value}
        out[names[0]] = value
    return out


def _joined(texts) -> tuple[memoryview, np.ndarray]:
    """The bytes of a large_string array without nulls, and where each string ends in them."""
    _, offsets, data = texts.buffers()
    offsets = np.frombuffer(offsets, np.int64)[texts.offset:texts.offset + len(texts) + 1]
    return memoryview(data or b"")[offsets[0]:offsets[-1]], offsets[1:] - offsets[0]


def _batched(tables, rows: int) -> Iterator[Batch]:
    """Batches of about BATCH_BYTES; rows that are not wanted count with the next batch."""
    held, ends, size = [], [], 0
    for texts, rows, read in tables:
        if not len(texts):
            continue
        data, at = _joined(texts)
        held.append(data)
        ends.append(at + size)
        size += len(data)
        if size >= BATCH_BYTES:
            yield Batch(b"".join(held), np.concatenate(ends), rows, read)
            held, ends, size = [], [], 0
    if held:
        yield Batch(b"".join(held), np.concatenate(ends), rows, 1.0)


def _whole_lines(stream) -> Iterator[bytes]:
    """The content of a binary stream, about LINES bytes at a time, cut behind line ends."""
    rest = []
    while data := stream.read(LINES):
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            yield b"".join([*rest, head, newline])
            rest = []
        rest += [tail] if tail else []
    if rest:
        yield b"".join(rest)


# --------------------------------------------------------------------------------------------------------------- faults

def quiet_datasets():
    """The package, silent, and without patience of its own: 20 failures of 23 s with 5 s between them are nine minutes."""
    import datasets
    import huggingface_hub
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    datasets.config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.config.TORCH_AVAILABLE = False     # it would be loaded for nothing: 4 s, 180 MB
    return datasets


def faults() -> tuple[type[Exception], ...]:
    """What the network, the Hub and a damaged file make datasets raise."""
    import httpx2
    import pyarrow
    from huggingface_hub.errors import HFValidationError
    return OSError, EOFError, zlib.error, httpx2.HTTPError, pyarrow.ArrowException, BadLine, HFValidationError


def is_local(error: Exception) -> bool:
    """Whether this machine's disk is to blame, such as a full one."""
    return isinstance(error, OSError) and error.filename is not None


def is_content(error: Exception) -> bool:
    """Whether the file is to blame rather than the network."""
    import pyarrow
    return isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, pyarrow.ArrowException, BadLine, FileNotFoundError))


def refused(error: Exception | None, dataset: str, revision: str | None) -> ConfigError | None:
    """The sentence for an answer of the Hub that no second try will change; None for any other error."""
    from huggingface_hub import errors
    at = f"{dataset}@{revision}" if revision else dataset
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{dataset} is gated: accept its terms at https://huggingface.co/datasets/{dataset}, then log in with "
                           f"`hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(f"there is no data set {dataset} on the Hub, or it is private: it may have moved; look for it at "
                           f"https://huggingface.co/datasets, or log in with `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{at}: the data set has no such revision; they are listed at "
                           f"https://huggingface.co/datasets/{dataset}/commits/main")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{dataset!r} is no data set's name: it must look like OWNER/NAME")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return ConfigError(f"{at}: the Hub refuses it ({error.response.status_code}): log in with `hf auth login` or set a "
                           f"HF_TOKEN that may read it")
    return refused(error.__cause__, dataset, revision) if error and error.__cause__ else None


def brief(error: Exception) -> str:
    """An error in a few words on one line."""
    if isinstance(error, ConnectionError) and error.__cause__:
        error = error.__cause__     # datasets says "Server Disconnected", whatever it was
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
