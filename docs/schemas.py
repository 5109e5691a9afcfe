"""Write docs/schemas.md, which says what every file that a command leaves holds, from the comments in
the dataclasses that write those files.

    python docs/schemas.py"""

from pathlib import Path

from eval import results
from runtime import summary
from scaling import law_file, predictions, schemas

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """All of docs/schemas.md."""
    parts = [
        summary.schema_page(),
        results.schema_section(),
        law_file.schema_page(),
        predictions.schema_page(),
        schemas.schema_page(),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page())
