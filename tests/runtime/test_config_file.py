"""A config or study file and what it imports: the files beside it come first, the repository's own
after them."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train
from lib.errors import UserError
from runtime.config import Config, load_config, load_config_and_files
from runtime.config_file import OWN_NAMES
from scaling.study import expand, load_study
from tests.conftest import ROOT, changed, write_config

FP8_OF = (
    "from dataclasses import replace\nfrom {} import config as parent\nconfig = replace(parent,"
    " run='child')\n"
)


def copy_pair(folder: Path, lr: str) -> Path:
    """demo_s_{bf16,fp8}.py in a folder of their own, the first with another learning rate."""
    folder.mkdir(parents=True)
    for arm in ("bf16", "fp8"):
        shutil.copy(ROOT / "configs" / f"demo_s_{arm}.py", folder)
    parent = folder / "demo_s_bf16.py"
    parent.write_text(parent.read_text().replace("lr=6e-3", f"lr={lr}"))
    return folder


def test_a_copied_pair_has_one_parent_whichever_was_loaded_before(tmp_path: Path):
    rates = []
    for folder in (
        copy_pair(tmp_path / "a", "1e-3"),
        ROOT / "configs",
        copy_pair(tmp_path / "b", "2e-3"),
        tmp_path / "a",
    ):
        rates.append([load_config(folder / f"demo_s_{arm}.py").optim.lr for arm in ("bf16", "fp8")])
    assert rates == [[0.001] * 2, [0.006] * 2, [0.002] * 2, [0.001] * 2]


def test_an_edit_within_a_second_is_seen(tmp_path: Path):
    """Python's own cache would not: the size and the second are the same."""
    folder = copy_pair(tmp_path / "a", "1e-3")
    assert load_config(folder / "demo_s_fp8.py").optim.lr == 0.001
    parent = folder / "demo_s_bf16.py"
    parent.write_text(parent.read_text().replace("lr=1e-3", "lr=3e-3"))
    assert load_config(folder / "demo_s_fp8.py").optim.lr == 0.003


@pytest.mark.parametrize(
    "name", ["demo_s_bf16", "configs.demo_s_bf16", "parts.base", "package.base"]
)
def test_a_config_imports_what_lies_beside_it(tmp_path: Path, name: str):
    folder = copy_pair(tmp_path / "a", "1e-3")
    for package in ("parts", "package"):  # without and with an __init__.py
        (folder / package).mkdir()
        shutil.copy(folder / "demo_s_bf16.py", folder / package / "base.py")
    (folder / "package/__init__.py").touch()
    (folder / "child.py").write_text(FP8_OF.format(name))
    modules_before = set(sys.modules)
    config, files = load_config_and_files(folder / "child.py")
    assert config.optim.lr == 0.001
    assert files == [
        folder / "child.py",
        *[folder / "package/__init__.py"] * (name == "package.base"),
        files[-1],
    ]
    assert files[-1] == folder / f"{name.removeprefix('configs.').replace('.', '/')}.py"
    assert set(sys.modules) == modules_before, (
        "the next config may have another module of this name"
    )


def test_a_file_may_derive_from_the_repositorys_file_of_its_own_name(tmp_path: Path):
    folder = copy_pair(tmp_path / "a", "1e-3")
    (folder / "demo_s_bf16.py").write_text(FP8_OF.format("configs.demo_s_bf16"))
    config, files = load_config_and_files(folder / "demo_s_fp8.py")
    assert (config.run, config.optim.lr) == ("demo_s_fp8", 0.006)
    assert files == [
        folder / "demo_s_fp8.py",
        folder / "demo_s_bf16.py",
        ROOT / "configs/demo_s_bf16.py",
    ]
    assert load_config(folder / "demo_s_bf16.py").run == "child"


def test_pythons_and_the_repositorys_own_modules_are_not_replaced(tmp_path: Path):
    """Else a copied model.py would give a GPTConfig that Config refuses, and a random.py break
    torch."""
    folder = copy_pair(tmp_path / "a", "1e-3")
    for name in ("random", "json", "model", "runtime"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')")
    assert load_config(folder / "demo_s_fp8.py").optim.lr == 0.001
    folders = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert folders - {"configs"} | {path.stem for path in ROOT.glob("*.py")} <= OWN_NAMES


def test_an_exit_in_a_config_is_no_finished_run(tmp_path: Path):
    (tmp_path / "mine.py").write_text("raise SystemExit(0)")
    with pytest.raises(UserError, match="mine.py could not be run: SystemExit: 0"):
        load_config(tmp_path / "mine.py")


def test_the_start_and_env_json_say_which_files_a_config_was_made_from(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_config(tiny, tmp_path / "parent.py")
    (tmp_path / "child.py").write_text(FP8_OF.format("parent"))
    assert train.main([str(tmp_path / "child.py"), "steps=1", "checkpoint.every=none"]) == 0
    files = [str(tmp_path / "child.py"), str(tmp_path / "parent.py")]
    assert f"config: {files[0]}, which imports {files[1]}\n" in capsys.readouterr().out
    env = changed(tiny, "run=child").run_dir / "env.json"
    assert [f'"{file}"' in env.read_text() for file in files] == [True, True]


def test_a_relative_import_is_answered_with_the_import_that_works(tmp_path: Path):
    folder = copy_pair(tmp_path / "a", "1e-3")
    (folder / "child.py").write_text("from .demo_s_bf16 import config\n")
    with pytest.raises(UserError, match="import the file beside it by its name, without a dot"):
        load_config_and_files(folder / "child.py")


def test_a_copied_study_takes_the_sizes_beside_it(tmp_path: Path):
    folder = copy_pair(tmp_path / "a", "1e-3")
    study = folder / "study_mine.py"
    study.write_text(
        "from scaling.study import Size, Study\n"
        "study = Study(name='mine', margin_percent=1.0, tokens_per_param=(20,), sizes=(\n"
        "    Size(config='configs/demo_s_bf16.py'), Size(config='configs/demo_m_bf16.py')))\n"
    )
    paths = [
        row.arguments(tmp_path)[0] for row in expand(load_study(study)) if row.recipe == "bf16"
    ]
    assert paths == [str(folder / "demo_s_bf16.py"), str(ROOT / "configs/demo_m_bf16.py")]


def test_a_study_that_overrides_its_seeds_is_refused():
    """Its rows would name seeds that its runs do not have."""
    study = load_study(ROOT / "configs/study_demo.py")
    with pytest.raises(UserError, match="overrides= sets run or seed"):
        expand(replace(study, overrides=("seed=7",)))


def test_a_mistake_in_a_study_file_gets_a_sentence(tmp_path: Path):
    (tmp_path / "study_mine.py").write_text("import nonsense_not_there")
    with pytest.raises(UserError, match="study_mine.py could not be run: .*nonsense_not_there"):
        load_study(tmp_path / "study_mine.py")
