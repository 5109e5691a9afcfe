"""What the import graph promises: no cycles, a model that needs torch alone, light readers, nothing
unpickled."""

import ast
import dataclasses
import importlib
import importlib.util
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT, asked, process

# Folders and files of the top level; each imports its own and those of lower layers alone.
LAYERS = {
    "lib": 0,
    "model": 1,
    "fp8": 2,
    "runtime": 3,
    "scaling": 4,
    "eval": 4,
    "prepare": 4,
    "bench": 5,
    "configs": 5,
    "train": 6,
    "prepare_data": 6,
    "studies": 7,
    "docs": 7,
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
    for path in (
        *ROOT.glob("*.py"),
        *(path for room in LAYERS for path in (ROOT / room).rglob("*.py")),
    )
}


def imports(body):
    """Names that these statements import."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_no_module_imports_itself_by_way_of_others():
    trees = {name: ast.parse(text) for name, text in MODULES.items()}
    TopologicalSorter(
        {name: set(imports(tree.body)) & set(trees) for name, tree in trees.items()}
    ).prepare()
    assert {name.split(".")[0] for name in imports(ast.walk(trees["model"]))} - set(
        sys.stdlib_module_names
    ) == {"torch"}


def test_every_folder_of_code_has_a_layer():
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")}
    assert folders - {"tests", "out", "data", "build"} <= set(LAYERS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down_only(name: str):
    """Those inside functions too."""
    room = name.partition(".")[0]
    imported = {module.partition(".")[0] for module in imports(ast.walk(ast.parse(MODULES[name])))}
    wrong = {
        imported_room
        for imported_room in imported & set(LAYERS)
        if LAYERS[imported_room] >= LAYERS[room]
    }
    assert not wrong - {room}


@pytest.mark.parametrize("command", [["-m", "scaling.fit"], [str(ROOT / "scaling/sweep.py")]])
def test_commands_run_as_files_and_as_modules_from_anywhere(command: list[str], tmp_path: Path):
    """By the editable install of requirements.txt alone."""
    done = process(*command, "--help", cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0 and "python" in done.stdout, done.stderr


COMMANDS = sorted(name for name, text in MODULES.items() if "\nif __name__ == " in text)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_usage_and_ends_with_examples(
    name: str, capsys: pytest.CaptureFixture[str]
):
    lines = asked(capsys, importlib.import_module(name).main, "--help").splitlines()
    assert lines[0].startswith("usage: python ")
    assert max(map(len, lines)) <= 130
    assert all(line.startswith("    ") for line in lines[lines.index("examples:") + 1 :])


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if hasattr(importlib.import_module(name), "Options")]
)
def test_help_names_every_option(name: str, capsys: pytest.CaptureFixture[str]):
    module = importlib.import_module(name)
    page = asked(capsys, module.main, "--help").replace("-", "_")
    options = {field.name for field in dataclasses.fields(module.Options)}
    # of prepare_data, its arguments
    assert not [option for option in options - {"words"} if option not in page]


@pytest.mark.parametrize(
    "code, unneeded",
    [
        ("import scaling.fit", {"torch"}),
        ("import prepare_data", {"torch", "datasets", "pyarrow", "tiktoken"}),
        (
            (
                "import model, train; from configs.demo_s_bf16 import config; from fp8.convert"
                " import convert\nconvert(model.GPT(config.model), config.fp8)"
            ),
            {"torchao", "triton"},
        ),
        ("import train", {"torch.distributed.tensor", "torch.distributed.fsdp", "sympy"}),
        ("import eval.export", {"torch.distributed.tensor", "sympy", "transformers"}),
    ],
)
def test_what_is_not_needed_is_not_imported(code: str, unneeded: set):
    """Readers of records start without torch, BF16 runs without torchao, a process that trains
    alone without what shards."""
    code += f"\nimport sys; print({unneeded} & set(sys.modules))"
    assert process("-c", code).stdout == "set()\n"


def test_nothing_untrusted_is_unpickled_or_executed():
    pattern = (
        r"\bexec\(|(?<![.\w])eval\(|pickle\.loads?\(|torch\.load\(|allow_pickle=True"
        r"|trust_remote_code"
    )
    assert not [name for name, text in MODULES.items() if re.search(pattern, text)]


def test_no_class_is_swapped_and_no_method_is_planted_on_one_instance():
    """A module of another kind is put in the place of the first: a reader finds its class where it
    is made."""
    pattern = r"__class__\b[^=\n]*=[^=]|\bMethodType\b"
    assert not [name for name, text in MODULES.items() if re.search(pattern, text)]


def test_the_page_of_schemas_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("docs_schemas", ROOT / "docs/schemas.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page()
