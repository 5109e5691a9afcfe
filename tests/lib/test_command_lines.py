"""What the words of every command line mean: home folders, "none", flags, closed pipes, commands
without words."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Literal, get_type_hints
from unittest.mock import Mock

import pytest

import train
from lib.command import Frame, explain_known, read_options
from lib.errors import MachineError, UserError
from lib.help import field_lines, field_meanings
from lib.values import FilePath, parse
from runtime.config import KEYS, SECTIONS, Config, apply_overrides, load_config
from tests.conftest import ROOT, changed, write_config
from tests.runtime.test_config import POSITIONAL, Options

# Every option of every command that names, or may name, a file or folder.
PATHS = {
    "bench.borrowed.Options": "out",
    "bench.trainings.Options": "configs out",
    "docs.check.Options": "demo",
    "docs.coming_from.Options": "",
    "docs.expected.Options": "demo",
    "docs.schemas.Options": "",
    "bench.peers.Options": "out check nanogpt nanochat torchtitan",
    "bench.data.Options": "folder",
    "bench.emulation.Options": "config",
    "bench.kernels.Options": "out",
    "bench.throughput.Options": "out check",
    "eval.export.Options": "run folder",
    "eval.export.ImportOptions": "from_hf run",
    "eval.harness.Options": "run offline include",
    "eval.harness.FetchOptions": "fetch include",
    "eval.precision.Options": "run",
    "eval.sample.Options": "run",
    "eval.table.Options": "paths out",
    "fp8.recipes.Options": "",
    "prepare_data.Options": "out tokenizer decontaminate words",
    "runtime.roofline.Options": "",
    "scaling.figures.Options": "run out",
    "scaling.fit.Options": "paths out points runs",
    "scaling.learning_rate.Options": "runs out",
    "scaling.ledger.Options": "study out rows",
    "scaling.plan.Options": "law runs study",
    "scaling.precision.Options": "paths out points",
    "scaling.report.Options": "runs study out",
    "scaling.sweep.Options": "study out",
}
# Options whose comments speak of files and folders, and that name none.
NO_PATHS = {
    "borrowed.commit",
    "kernels.commit",
    "ledger.restore",
    "peers.commit",
    "throughput.commit",
}


def options_class(name: str):
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls)


@pytest.mark.parametrize("name", PATHS)
def test_home_is_expanded_in_the_paths_of_a_command_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/home/me")
    cls = options_class(name)
    expanded = set()
    for field in fields(cls):
        hint = get_type_hints(cls, include_extras=True)[field.name]
        try:
            value = parse(field.name, "~/x", hint)
        except UserError:  # a number
            continue
        if value in ("/home/me/x", ("/home/me/x",)):
            expanded.add(field.name)
    assert expanded == set(PATHS[name].split())


def test_the_list_of_paths_is_complete():
    """A new option whose comment speaks of a file or folder is one, or is named above."""
    classes = {
        f"{name}.{cls}"
        for name in modules_with_commands()
        for cls in vars(importlib.import_module(name))
        if re.fullmatch(r"\w*Options", cls)
        and vars(importlib.import_module(name))[cls].__module__ == name
    }
    assert classes == set(PATHS)
    for name in PATHS:
        for option, meaning in field_meanings(options_class(name)).items():
            speaks_of_a_path = re.search(r"folder|\bfiles?\b|JSON lines", meaning)
            if speaks_of_a_path and option not in PATHS[name].split():
                assert f"{name.split('.')[-2]}.{option}" in NO_PATHS, meaning


def modules_with_commands() -> list[str]:
    files = [
        path
        for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py"))
        if path.parent.name != "tests"
    ]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if '\nif __name__ == "__main__":\n' in path.read_text()
    ]
    return sorted(set(names) - {"train", "bench.compiler_plan"})


def test_home_is_expanded_in_a_config_and_on_its_command_line(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "mine.py"
    write_config(tiny, file)
    file.write_text(file.read_text().replace(f"'out': '{tiny.out}'", "'out': '~/runs'"))
    config = load_config(
        file,
        [
            "data.dir=~/data",
            "--data.tokenizer=~/llama",
            "start_from=~/runs/r/checkpoints/step_00000002",
        ],
    )
    assert (config.out, config.data.dir, config.data.tokenizer) == (
        "/home/me/runs",
        "/home/me/data",
        "/home/me/llama",
    )
    assert config.start_from == "/home/me/runs/r/checkpoints/step_00000002"
    assert changed(tiny, "out=/a/~").out == "/a/~", "only a leading one"


def test_a_home_folder_of_nobody_is_refused(tiny: Config):
    with pytest.raises(
        UserError, match=r"out='~nobody_here/x': there is no user 'nobody_here'.* \./~nobody_here/x"
    ):
        changed(tiny, "out=~nobody_here/x")


@pytest.mark.parametrize(
    "text, path", [("hf:~/llama", "hf:/home/me/llama"), ("hf:gpt2", "hf:gpt2"), ("a/~/b", "a/~/b")]
)
def test_a_model_of_the_hub_keeps_its_prefix(monkeypatch: pytest.MonkeyPatch, text: str, path: str):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("run", text, FilePath) == path


def test_none_is_a_value_wherever_help_says_so():
    """`fp8.include=none` as --help words it, and every other key and option whose comment says
    "none =" or "(none = ..)"."""
    for cls in SECTIONS.values():
        for key, meaning in field_meanings(cls).items():
            if "none =" in meaning:
                hint = get_type_hints(cls, include_extras=True)[key]
                assert parse(key, "none", hint) in (None, ()), key
    for name in PATHS:
        cls = options_class(name)
        for key, meaning in field_meanings(cls).items():
            if "none =" in meaning:
                hint = get_type_hints(cls, include_extras=True)[key]
                assert parse(key, "none", hint) in (None, ()), f"{name}.{key}"


# Few are started here: a command takes seconds to import torch, and all share one frame.
COMMANDS = [*modules_with_commands(), "train", "bench.compiler_plan"]
WITHOUT_TORCH = ["-m", "scaling.report", "--help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_goes_through_the_frame(name: str):
    """By which its reader may go and its output may be full."""
    _, _, end = (ROOT / f"{name.replace('.', '/')}.py").read_text().partition("\nif __name__ ==")
    assert "run_command(main" in end


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def python(*words: str | Path, stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Exit code of a command that writes there, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdout=stdout, stderr=stderr, text=True, timeout=300
    )
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("words", [["train.py", "--help"], WITHOUT_TORCH], ids=lambda w: w[-2])
def test_a_command_ends_quietly_where_its_reader_has_gone(words: list[str]):
    with closed_pipe() as writing:
        assert python(*words, stdout=writing) == (1, "")


def test_a_run_goes_on_without_a_reader_of_its_log(tiny: Config, tmp_path: Path):
    file = write_config(tiny, tmp_path / "mine.py")
    with closed_pipe() as writing:
        assert python("train.py", file, stdout=writing, stderr=writing) == (0, "")
    assert (tiny.run_dir / "summary.json").exists()


@pytest.mark.parametrize(
    "words, serve", [("--serve false x", False), ("--serve x", True), ("x serve=yes", None)]
)
def test_a_flag_may_stand_alone_or_have_a_value(words: str, serve: bool | None):
    if serve is None:
        with pytest.raises(UserError, match="serve='yes' is not bool .write true or"):
            read_options(Options, words.split(), POSITIONAL)
        return
    assert read_options(Options, words.split(), POSITIONAL) == Options(run="x", serve=serve)


@pytest.mark.parametrize("words", ["x n=", "x --n"])
def test_an_option_without_its_value_is_refused(words: str):
    with pytest.raises(UserError, match="n needs a value"):
        read_options(Options, words.split(), POSITIONAL)


@pytest.mark.parametrize(
    "key",
    [key for key in KEYS if key in ("out", "data.dir", "data.tokenizer", "optim.lr", "start_from")],
)
def test_an_empty_value_is_refused(tiny: Config, key: str):
    """`out=` would be the current folder."""
    with pytest.raises(UserError, match=f"{key} needs a value: write {key}=VALUE"):
        apply_overrides(tiny, [f"{key}="])


@dataclass
class Documented:
    short: int = 1  # meaning behind the field
    # the meaning of a field whose comment has no room behind it,
    # on two lines
    long: Literal["one", "two"] = "one"
    none: float | None = None  # a long meaning: word word word word word word word word word


def test_help_takes_the_comment_behind_a_field_or_the_lines_above_it():
    meanings = field_meanings(Documented)
    assert meanings["short"] == "meaning behind the field"
    assert (
        meanings["long"]
        == "the meaning of a field whose comment has no room behind it, on two lines"
    )


def test_help_has_at_most_100_columns():
    lines = "\n".join(field_lines("section.", Documented).values()).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "words", [["train.py", "configs/demo_s_fp8.py", "--plan", "h100"], WITHOUT_TORCH]
)
def test_an_output_that_is_full_gets_a_sentence(words: list[str]):
    """It was a traceback, or blamed the run's folder."""
    with open("/dev/full", "w") as full:
        code, errors = python(*words, stdout=full.fileno())
    sentence = "the output could not be written: No space left on device"
    assert code == 1
    assert errors.strip().removeprefix("train.py: ") == sentence


def test_a_closed_output_is_no_traceback():
    command = f"{sys.executable} {' '.join(WITHOUT_TORCH)} >&-"
    done = subprocess.run(command, cwd=ROOT, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def frame_of(explain=explain_known) -> Frame:
    return Frame(page=lambda: "usage", read=list, explain=explain, prefix="me: ")


@pytest.mark.parametrize(
    "error, code, sentence",
    [
        (UserError("give less"), 2, "me: give less\n"),
        (MachineError("it broke"), 1, "me: it broke\n"),
        (OSError(28, "No space left", "x.json"), 1, "me: x.json: No space left; correct it and"),
        (OSError("words alone"), 1, "me: OSError: words alone\n"),
    ],
)
def test_a_failure_ends_a_command_with_its_code_and_sentence(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, sentence: str
):
    assert frame_of().run(["word"], Mock(side_effect=error)) == code
    assert capsys.readouterr().err.startswith(sentence)


def test_an_empty_library_of_the_compiler_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """A killed compilation leaves one, and each later start fails on it."""
    library = tmp_path / "cjx.main.so"
    library.touch()
    spec = spec_from_file_location("kernel", library)
    with pytest.raises(ImportError) as loading:
        module_from_spec(spec)
    wrapped = RuntimeError(f"ImportError: {loading.value}\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert frame_of().run(["word"], Mock(side_effect=wrapped)) == 1
    assert capsys.readouterr().err.startswith(f"me: {library} is empty, as a compilation leaves it")


@pytest.mark.parametrize("error", [KeyError("a bug"), BrokenPipeError(), KeyboardInterrupt()])
def test_what_is_no_mistake_of_the_user_passes_the_frame(error: BaseException):
    with pytest.raises(type(error)):
        frame_of().run(["word"], Mock(side_effect=error))


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["x", "-h"], 0), ([], 2)])
def test_help_is_printed_where_it_is_asked_for_or_nothing_is_said(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int
):
    assert frame_of().run(words, Mock(side_effect=AssertionError)) == code
    assert capsys.readouterr().out == "usage\n"


def test_an_interrupted_training_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny: Config,
    tmp_path: Path,
):
    monkeypatch.setattr(train, "check_device", Mock(side_effect=KeyboardInterrupt))
    assert train.main([str(write_config(tiny, tmp_path / "mine.py"))]) == 130
    assert "train.py: interrupted; what was saved stays" in capsys.readouterr().err
