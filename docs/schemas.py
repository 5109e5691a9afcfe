"""Write docs/schemas.md, which says what every file that a command leaves holds, from the comments
in the dataclasses that write those files.

    python docs/schemas.py write=true  write the page anew
    python docs/schemas.py write=false  print it"""

from dataclasses import dataclass
from pathlib import Path

from bench import schemas as bench_schemas
from eval import results
from fp8 import probe_rows
from lib.command import command, run_command
from lib.files import write_atomically
from runtime import summary
from scaling import law_file, predictions, schemas

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """All of docs/schemas.md."""
    parts = [
        summary.schema_page(),
        results.schema_section(),
        bench_schemas.schema_page(),
        probe_rows.schema_section(),
        law_file.schema_page(),
        predictions.schema_page(),
        schemas.schema_page(),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


@dataclass(frozen=True, kw_only=True)
class Options:
    write: bool  # write docs/schemas.md; false prints it


@command(__doc__, Options)
def main(options: Options) -> str | None:
    if not options.write:
        return page()
    write_atomically(PAGE, page())
    return None


if __name__ == "__main__":
    raise SystemExit(run_command(main))
