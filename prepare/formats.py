"""Which formats and packings a file's name promises."""

from pathlib import PurePath

from lib.errors import UserError

FORMATS, PACKINGS = (".txt", ".jsonl", ".parquet", ".json"), (".gz", ".xz", ".zst")
TOKEN_FILES = (".bin", ".npy")  # of nanoGPT, llm.c and modded-nanogpt
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
            f" followed by {', '.join(PACKINGS)}: {_remedy(path)}"
        )


def _remedy(path: PurePath) -> str:
    """What to do with a file whose name promises no format that is read."""
    suffix = format_of(path).lower()
    if suffix in (".csv", ".tsv"):
        # dtype and keep_default_na: a text such as NA or null stays one
        options = "dtype=str, keep_default_na=False" + (", sep='\\t'" if suffix == ".tsv" else "")
        return (
            f"convert it, such as by pandas.read_csv({path.name!r}, {options})"
            f".to_parquet({path.with_suffix('.parquet').name!r})"
        )
    if suffix in TOKEN_FILES:
        return "tokens are turned into text first, docs/coming_from.md#token-files says how"
    if suffix in (".bz2", ".zip", ".tar"):
        return "unpack it first"
    return "give plain text a name in .txt, and a file of one JSON object a line a name in .jsonl"
