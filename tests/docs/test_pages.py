"""The pages for readers: links lead somewhere, messages are the source's, tables are up to date."""

import ast
import json
import re
import sys
import tomllib
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from docs import coming_from, expected
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "bench/results/README.md",
    *sorted({*ROOT.glob("[a-z]*/README.md"), *ROOT.glob("docs/*.md")}),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to the headings of a page."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        later = (f"{slug}-{number}" for number in count(1))
        while slug in slugs:
            slug = next(later)
        slugs.add(slug)
    return slugs


def links(page: Path) -> list[str]:
    """Targets of links and pictures within the repository."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"https?:|mailto:", target)]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for target in links(page):
        file, _, fragment = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists() and path.is_relative_to(ROOT), target
        if fragment:
            assert fragment in anchors(path), target


def test_every_page_is_in_the_index_and_links_to_its_neighbours() -> None:
    index = set(links(ROOT / "docs/README.md"))
    for page in ROOT.glob("docs/*.md"):
        if page.name != "README.md":
            assert page.name in index
            to_pages = [target for target in links(page) if target.partition("#")[0] != page.name]
            assert page.name == "schemas.md" or len(to_pages) >= 2, page.name


# --------------------------------------------------------------------------------------- messages


@cache
def messages() -> list[str]:
    """Every string of the code, with ... for what is filled in."""
    texts = []
    for folder in ("lib", "fp8", "runtime", "scaling", "eval", "prepare"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(map(_words, node.values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def _words(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "..."


def messages_of_the_page() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    section = page.partition("## By message")[2].partition("## By symptom")[0]
    return [line.split("|")[1].strip()[1:-1] for line in section.splitlines() if line[:3] == "| `"]


@pytest.mark.parametrize("message", messages_of_the_page())
def test_a_message_is_one_that_the_code_prints(message: str) -> None:
    assert any(message in text for text in messages())


# ----------------------------------------------------------------------------------------- tables


def test_the_table_of_foreign_keys_is_that_of_the_command_line() -> None:
    assert coming_from.PAGE.read_text() == coming_from.page()
    assert all(f"`{key}`" in coming_from.table() for key in ("max_iters", "grad_clip"))


def test_measured_ratios_are_those_of_the_page_on_speed() -> None:
    """docs/not_faster.md and docs/findings.md repeat them, as numbers of three decimals."""
    speed = (ROOT / "docs/speed.md").read_text().partition("<!-- end -->")[0]
    measured = set(re.findall(r"\*\*(\d\.\d{3})\*\*", speed))
    table = (ROOT / "docs/not_faster.md").read_text().partition("## What to check")[0]
    repeated = re.findall(r"\d\.\d{3}", table)
    assert len(repeated) > 6 and set(repeated) <= measured


def test_the_table_of_shipped_configurations_is_that_of_their_plans() -> None:
    """Else: python docs/expected.py out/demo write=true."""
    page = expected.PAGE.read_text()
    assert expected.with_block(page, "configs", expected.configs_table()) == page


@pytest.mark.parametrize("name", expected.SCREENS)
def test_every_expected_screen_is_filled(name: str) -> None:
    page = expected.PAGE.read_text()
    begin = expected.BEGIN.format(name=name)
    assert page.partition(begin)[2].partition(expected.END)[0].count("\n") > 4


def test_the_gaps_of_the_readme_are_those_of_the_expected_screen() -> None:
    screens = (ROOT / "docs/expected.md").read_text()
    rows = re.findall(
        r"^\| (?:nvfp4|tensorwise) +\| [+-].*\|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) == 2
    assert all(row in screens for row in rows)


# -------------------------------------------------------------------------------------- packaging


def test_what_pip_and_uv_install_is_what_make_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = re.findall(r"^[\w-]+==\S+$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    of_developers = re.findall(
        r"^[\w-]+==\S+$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE
    )
    assert project["project"]["dependencies"] == pinned
    assert project["dependency-groups"]["dev"] == of_developers


def test_the_lock_file_holds_these_versions_from_the_public_index_alone() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"\w+://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    locked = {package["name"]: package for package in tomllib.loads(text)["package"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name, version = requirement.replace("_", "-").split("==")
        assert locked[name]["version"] == version
    assert locked["nanofp8"]["version"] == project["version"]


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_every_folder_of_code_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = ("lib", "fp8", "runtime", "prepare", "scaling", "eval", "bench", "configs")
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
    }
    assert set(packages["packages"]) == folders - {"bench.bare"}


# ------------------------------------------------------------------------------------ token files

HEADER = np.array([20240520, 1, 0, *[0] * 253], "<i4").tobytes()  # of llm.c


@pytest.mark.parametrize("header, is_end_first", [(b"", False), (HEADER, True)])
def test_token_files_become_their_documents_again(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    header: bytes,
    is_end_first: bool,
) -> None:
    """nanoGPT's train.bin, then a shard of llm.c and modded-nanogpt, by docs/coming_from.md."""
    gpt2 = load_tokenizer("gpt2")
    texts = ["one naïve text\n", "日本", "a third <|endoftext|> one"]
    border = np.array([gpt2.eot], "<u2")
    parts = []
    for text in texts:
        ids = gpt2.encode(text)
        parts += [border, ids] if is_end_first else [ids, border]
    (tmp_path / "train.bin").write_bytes(header + np.concatenate(parts).tobytes())
    script = re.search(r"^```python\n(.*?)^```$", coming_from.PAGE.read_text(), re.S | re.M)
    assert script
    monkeypatch.setattr(sys, "argv", ["to_text.py", str(tmp_path / "train.bin")])
    exec(script[1], {})
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts
