"""Make prose.jsonl.xz and latex.jsonl.xz, which corpus.py reads, from clones of the public
repositories they come from.

    python studies/cpu/public_text.py --repositories   what to clone: a line of shell each
    python studies/cpu/public_text.py CLONES out=text  CLONES: a clone of each; then corpus.py text

Prose: every OpenStax module (CNXML) without its metadata and pictures: a paragraph, title, caption,
list item or cell of a table on a line, MathML as its characters. LaTeX: every .tex file, one above
60,000 characters cut before each \\section. Texts of 400 characters or fewer, files of macros and
second copies are left out. The commits are in REPOSITORIES."""

import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.errors import MachineError, UserError
from lib.files import read_bytes

# kind -> owner/name -> commit
REPOSITORIES = json.loads(read_bytes(Path(__file__).resolve().parent / "repositories.json"))
SHORTEST = 400  # characters: a shorter text is a heading or a stub
LONGEST_WHOLE = 60_000  # characters: a longer LaTeX file is cut at its sections
# the last is a text that the study's file lacks
NOT_TEXT = {"preamble.tex", "macros.tex", "configuration.tex"}
LINES = {"para", "title", "caption", "item", "meaning", "entry"}  # elements whose text is one line
PARTS = {
    "section",
    "list",
    "row",
    "problem",
    "solution",
    "exercise",
    "definition",
    "example",
    "table",
    "glossary",
    "content",
}  # a blank line ends them too
LEFT_OUT = {"metadata", "media"}


@dataclass(frozen=True, kw_only=True)
class Options:
    clones: str | None = None  # folder with a clone of each repository, named as the repository
    out: str = "text"  # receives prose.jsonl.xz and latex.jsonl.xz
    repositories: bool = False  # print how to clone them


@command(__doc__, Options, "clones")
def main(options: Options) -> str:
    if options.repositories:
        return "\n".join(clone_lines())
    if options.clones is None:
        raise UserError("the folder of clones is missing: --repositories prints how to make it")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    told = []
    for kind, read in ("prose", prose), ("latex", latex):
        documents = list(without_copies(read(Path(options.clones))))
        write(out / f"{kind}.jsonl.xz", documents)
        told.append(f"{out}/{kind}.jsonl.xz: {len(documents):,} documents")
    return "\n".join(told)


def clone_lines() -> Iterator[str]:
    for repositories in REPOSITORIES.values():
        for repository, commit in repositories.items():
            name = repository.partition("/")[2]
            yield (
                f"git init -q {name} && git -C {name} fetch -q --depth 1"
                f" https://github.com/{repository} {commit}"
            )


def files(clones: Path, repository: str, commit: str, suffix: str) -> Iterator[tuple[str, bytes]]:
    """(path, content) of the files of one commit, sorted by path. Raises MachineError where git
    cannot read them."""
    clone = clones / repository.partition("/")[2]
    words = ["git", "-C", str(clone), "archive", "--format=tar", commit, f":(glob)**/*{suffix}"]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        raise MachineError(
            f"git could not read {commit[:9]} in {clone} ({reason}): fetch it as --repositories"
            " prints"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in sorted(
            filter(tarfile.TarInfo.isfile, archive), key=lambda member: member.name
        ):
            content = archive.extractfile(member)
            assert content
            yield member.name, content.read()


def without_copies(documents: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The documents that are long enough, of equal ones the first."""
    seen: set[str] = set()
    for document in documents:
        if len(document["text"]) > SHORTEST and document["text"] not in seen:
            seen.add(document["text"])
            yield document


def write(path: Path, documents: list[dict[str, str]]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=1) as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False) + "\n")


# ------------------------------------------------------------------------------------------- prose


def prose(clones: Path) -> Iterator[dict[str, str]]:
    for repository, commit in REPOSITORIES["prose"].items():
        name = repository.partition("/")[2]
        for path, content in files(clones, repository, commit, ".cnxml"):
            yield {"text": flatten(content), "source": f"{name}/{path}"}


def flatten(cnxml: bytes) -> str:
    """The text of a module."""
    return squeeze(text_of(ElementTree.fromstring(cnxml)).replace("\t", " "))


def text_of(element: ElementTree.Element) -> str:
    """The text of an element and all in it, without what follows it; within a line spaces of other
    widths and no-break spaces stay."""
    kind = str(element.tag).rpartition("}")[2]
    if kind in LEFT_OUT:
        return ""
    if kind == "math":
        return " ".join(" ".join(element.itertext()).split())
    text = (element.text or "") + "".join(text_of(child) + (child.tail or "") for child in element)
    if kind in LINES:
        return in_one_line(text).strip() + "\n\n"
    if kind == "term":
        return in_one_line(text)
    if kind == "equation":
        return text.strip() + "\n\n"
    return text + "\n\n" if kind in PARTS else text


def in_one_line(text: str) -> str:
    return re.sub(r"[ \t\r\n]+", " ", text)


# ------------------------------------------------------------------------------------------- LaTeX


def latex(clones: Path) -> Iterator[dict[str, str]]:
    for repository, commit in REPOSITORIES["latex"].items():
        name = repository.partition("/")[2]
        for path, content in files(clones, repository, commit, ".tex"):
            if Path(path).name in NOT_TEXT:
                continue
            for number, text in enumerate(sections(content)):
                yield {"text": text, "source": f"{name}/{path}#{number}"}


def sections(content: bytes) -> list[str]:
    """A file whole, or its sections where it is long."""
    text = squeeze(content.decode("utf-8", errors="replace"))
    parts = re.split(r"\n(?=\\section\{)", text) if len(text) > LONGEST_WHOLE else [text]
    return [part.strip() for part in parts]


def squeeze(text: str) -> str:
    """Lines without spaces at their ends, at most one blank line in a row."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]*\n[ \t]*", "\n", text)).strip()


if __name__ == "__main__":
    sys.exit(run_command(main))
