"""Which formats and packings a file's name promises."""

from pathlib import PurePath

from lib.errors import UserError

FORMATS, PACKINGS = (".txt", ".jsonl", ".parquet", ".json"), (".gz", ".xz", ".zst")
PAIR_FORMATS = (".jsonl", ".parquet", ".json")  # of instructions


def is_text_file(name: str) -> bool:
    """Whether the name is that of plain text, packed or not."""
    return format_of(PurePath(name)) == ".txt"


def format_of(path: PurePath) -> str:
    return PurePath(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def check_format(path: PurePath, formats: tuple[str, ...], subject: str) -> None:
    if format_of(path) == ".parquet" and path.suffix != ".parquet":
        raise UserError(
            f"{subject} is parquet packed as a whole: unpack it, parquet packs its columns itself"
        )
    if format_of(path) not in formats:
        raise UserError(
            f"{subject} cannot be read: its name must end in {', '.join(formats)}, text optionally"
            f" followed by {', '.join(PACKINGS)}"
        )
