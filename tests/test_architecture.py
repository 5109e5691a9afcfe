"""What the import graph promises: no cycles, a model that needs torch alone, readers without torch, nothing unpickled."""

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT

FILES = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in
         ("model.py", "train.py", "prepare_data.py", "runtime", "prepare", "eval", "scaling", "configs", "bench")]


def imports(path, at_once=False):
    """Names that a file imports; at_once: when it is imported itself, not where a function first needs them."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_no_module_imports_itself_by_way_of_others():
    ours = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph = {name: set(imports(path, at_once=True)) & set(ours) for name, path in ours.items()}
    TopologicalSorter(graph).prepare()      # raises CycleError


@pytest.mark.parametrize("command", [["-m", "eval.sample"], ["scaling/sweep.py"]])
def test_commands_run_as_files_and_as_modules_from_anywhere(command, tmp_path):
    """By the editable install of requirements.txt alone."""
    command[-1] = command[-1] if command[0] == "-m" else str(ROOT / command[-1])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "python" in done.stdout, done.stderr


def test_the_model_imports_torch_alone():
    assert {name.split(".")[0] for name in imports(ROOT / "model.py")} - set(sys.stdlib_module_names) == {"torch"}


def test_reading_records_and_preparing_data_load_no_torch():
    for command, heavy in (("scaling.fit", {"torch"}), ("prepare_data", {"torch", "datasets", "pyarrow", "tiktoken"})):
        code = f"import sys, {command}; sys.exit(bool({heavy} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nothing_untrusted_is_unpickled_or_executed():
    for path in FILES:
        for pattern in (r"\bexec\(", r"(?<![.\w])eval\(", r"pickle\.loads?\(", r"torch\.load\(", r"allow_pickle=True",
                        r"trust_remote_code"):
            assert not re.search(pattern, path.read_text()), (path, pattern)
