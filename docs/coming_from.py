"""Write the table of keys in docs/coming_from.md, from the names of other code bases that the
command line knows (runtime/aliases.py).

    python docs/coming_from.py write=true   put the table into the page
    python docs/coming_from.py write=false  print it"""

import re
from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.files import write_atomically
from runtime.aliases import FOREIGN

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- made by python docs/coming_from.py write=true -->", "<!-- end -->"


def table() -> str:
    """A row for each key of ours: how it differs, and what foreign_names call it."""
    lines = ["| here | how it differs | elsewhere |", "|---|---|---|"]
    for ours, names in FOREIGN.items():
        key, _, difference = ours.partition(", ")
        foreign_names = ", ".join(f"`{name}`" for name in names.split())
        lines.append(f"| `{key}` | {difference} | {foreign_names} |")
    return "\n".join(lines)


def page() -> str:
    """All of docs/coming_from.md, its table made anew."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", PAGE.read_text())


@dataclass(frozen=True, kw_only=True)
class Options:
    write: bool  # put the table into the page; false prints it


@command(__doc__, Options)
def main(options: Options) -> str | None:
    if not options.write:
        return table()
    write_atomically(PAGE, page())
    return None


if __name__ == "__main__":
    raise SystemExit(run_command(main))
