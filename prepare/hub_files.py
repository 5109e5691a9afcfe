"""Read the documents of one file of a data set on the Hugging Face Hub, whatever the network does."""

import codecs
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from prepare.hub_faults import BadLine, brief, faults, is_broken_off, is_content, is_local, quiet_datasets, refused
from prepare.packing import unpacked
from prepare.source import BATCH_BYTES, BadFile, Batch
from runtime.cli import UserError
from runtime.tokenizer import clean

# Seconds before a file is opened again, while it comes no further: 18 minutes of silence cost no file. huggingface_hub's own
# six tries add 23 s, to the first failure alone: the later ones fail when the file is opened, which it tries once.
WAITS = (1, 5, 25, 60, 120, 300, 600)
BLOCK = 32 << 20        # bytes a request: the default of 5 MiB makes 15,000 requests of 70 GB, and the Hub counts them
BLOCK_LEAST = 2 << 20   # of a file whose connections break off
LINES = 1 << 20         # bytes that are parsed at once
TABLE_ROWS = 64         # rows of parquet at once: documents of a megabyte must not fill the memory
TEXT_TYPES = ("string", "large_string", "string_view", "null")
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

        Raises BadFile where the file stays unreadable, UserError: no such column or data set, or no right to it."""
        rows, met, failures, broken = skip_rows, -1, 0, 0
        while True:
            before, place = met, [-1]
            try:
                # Smaller requests each time one breaks off: a connection may not live as long as a large one takes.
                for batch in _batched(self.tables(rows, max(BLOCK >> 2 * broken, min(BLOCK, BLOCK_LEAST)), place), rows):
                    rows, before, failures, broken = batch.rows, -1, 0, 0
                    yield batch
                return
            except faults() as error:
                if is_local(error):
                    raise
                if refusal := refused(error, self.dataset, self.revision, is_sure=True):
                    raise refusal from error
                met = place[0]
                if met > before and not is_content(error):      # on the way to `rows` too: lines packed can only be read again
                    failures = 0
                waits = WAITS[:1] if is_content(error) else WAITS       # the network may mend, the file hardly
                if failures >= len(waits):
                    raise BadFile(f"{brief(error)}, after {rows:,} rows") from error
                print(f"{self.name}: {brief(error)} after {rows:,} rows; opened again in {waits[failures]} s", file=sys.stderr)
                time.sleep(waits[failures])
                failures, broken = failures + 1, broken + is_broken_off(error)

    def tables(self, skip_rows: int = 0, block: int = BLOCK, place: list[int] | None = None) -> Iterator[tuple]:
        """(texts as a pyarrow large_string array, rows of the file up to their end, share of it read) for some rows at a time.

        place[0] becomes the number of rows that were read or passed over."""
        place = [0] if place is None else place
        return (self._of_lines if ".json" in self.name else self._of_parquet)(skip_rows, block, place)

    def _of_parquet(self, skip_rows: int, block: int, place: list[int]) -> Iterator[tuple]:
        """By the streaming layer of datasets, not its "parquet" builder: that holds a row group in memory, 2.7 GB for one of
        1 GB, and reads again all that is to be skipped."""
        import pyarrow
        import pyarrow.parquet
        with self._opened(block) as file:
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=LINES)
            names, of_all, rows = table.schema_arrow.names, table.metadata.num_rows, 0
            if missing := [name for name in self._columns if name not in names]:
                self._no_column(missing[0], names)
            kind = table.schema_arrow.field(self.column).type
            if str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
                self._not_text(kind)
            for group in range(table.num_row_groups):
                if rows + table.metadata.row_group(group).num_rows <= skip_rows:
                    rows += table.metadata.row_group(group).num_rows
                    continue
                for batch in table.iter_batches(TABLE_ROWS, row_groups=[group], columns=self._columns):
                    first, rows = rows, rows + len(batch)
                    place[0] = rows
                    if rows > skip_rows:
                        wanted = pyarrow.Table.from_batches([batch.slice(max(0, skip_rows - first))])
                        yield self._texts(wanted), rows, rows / of_all

    def _of_lines(self, skip_rows: int, block: int, place: list[int]) -> Iterator[tuple]:
        """By the streaming layer of datasets, not its "json" builder: that takes the types of the first 10 MB for those of the
        whole file, so that a field which is null there ends the reading later, and for one odd line it reads all into memory."""
        rows = 0
        with self._opened(block) as packed:
            for data in _whole_lines(unpacked(PurePosixPath(self.name), packed)):
                if rows == 0:
                    data = data.removeprefix(codecs.BOM_UTF8)
                    if data[:1] == b"[":
                        raise UserError(f"{self.dataset}/{self.name} is one list; only files with an object a line can be read")
                first, rows = rows, rows + data.count(b"\n") + (data[-1:] != b"\n")
                place[0] = rows
                if rows > skip_rows:
                    texts = self._texts(self._parse(data, first, rows).slice(max(0, skip_rows - first)))
                    yield texts, rows, packed.tell() / max(1, packed.size)

    def _opened(self, block: int):
        datasets = quiet_datasets()
        from datasets.utils.file_utils import xopen
        return xopen(f"hf://datasets/{self.dataset}@{self.revision}/{self.name}", "rb",
                     download_config=datasets.DownloadConfig(storage_options={"hf": {"block_size": block}}))

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
            raise UserError(f"{where} is no object: only files with an object a line can be read")
        if row == 0 and self.column not in record:
            self._no_column(self.column, list(record))
        text = record.get(self.column)
        if text is not None and not isinstance(text, str):
            self._not_text(type(text).__name__)
        return {**_strings(record, self.keep), self.column: text and clean(text)}

    def _no_column(self, column: str, columns: list[str]):
        raise UserError(f"{self.dataset}/{self.name} has no column {column!r}: set column= to one of "
                          f"{', '.join(columns) or '(none)'}")

    def _not_text(self, kind):
        raise UserError(f"{self.dataset}/{self.name}: column {self.column!r} holds {kind}, not text: set column=")

    def _texts(self, table):
        """The text of the rows wanted; null becomes empty."""
        import pyarrow
        import pyarrow.compute as pc
        for path, values in self.keep.items():
            column, *fields = path.split(".")
            found = table.column(column)
            found = (pc.struct_field(found, fields) if fields else found).cast(pyarrow.large_string())
            table = table.filter(pc.is_in(found, value_set=pyarrow.array(values, found.type)))
        texts = pc.fill_null(table.column(self.column).cast(pyarrow.large_string()), "")
        return pyarrow.concat_arrays(texts.chunks) if texts.num_chunks else pyarrow.array([], pyarrow.large_string())


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
