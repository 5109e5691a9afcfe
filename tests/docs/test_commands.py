"""Every command of README.md and docs/ parses: its program, its keys and its values exist."""

import importlib
import re
import shlex
from collections.abc import Iterator

import pytest
from torch.distributed.run import get_args_parser

import prepare_data
from docs import check
from lib.command import Frame
from runtime.command_line import read_command_line
from runtime.config import load_config
from tests.conftest import ROOT

STAND_INS = {"FILE": "configs/demo_s_bf16.py", "HOST:29500": "localhost:29500"}
COMMANDS = sorted({command.text for command in check.commands()})


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that read their words and do nothing more."""

    def read_alone(frame: Frame, words: list[str], work: object) -> int:
        frame.read(words)
        return 0

    monkeypatch.setattr(Frame, "run", read_alone)
    monkeypatch.setattr(prepare_data, "_work", lambda *_: 0)
    yield


def parse(words: list[str]) -> None:
    """Raises an error, or exits, where a command is none."""
    program, *rest = words
    if program == "nice":
        parse(rest[2:])  # -n 19
    elif program == "make":
        assert rest[0] in targets()
    elif program == "sbatch":
        script = rest.index("slurm.sh")
        parse(["python", "train.py", *rest[script + 1 :]])
    elif program == "torchrun":
        launch = get_args_parser().parse_args(rest)
        is_module = ["-m"] if launch.module else []
        parse(["python", *is_module, launch.training_script, *launch.training_script_args])
    elif program == "python":
        parse_python(rest)
    else:
        raise AssertionError(program)


def parse_python(words: list[str]) -> None:
    if words[0] == "-c":
        compile(words[1], "command", "exec")
        return
    if words[0] == "train.py":
        parse_training(words[1:])
        return
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    rest = words[2:] if words[0] == "-m" else words[1:]
    if name == "bench.compiler_plan":
        load_config(ROOT / rest[0], rest[1:])
        return
    assert importlib.import_module(name).main(rest) == 0


def parse_training(words: list[str]) -> None:
    if words == ["--help"]:
        return
    line = read_command_line(words)
    load_config(ROOT / line.file, line.overrides)


def targets() -> list[str]:
    lines = (ROOT / "Makefile").read_text().splitlines()
    return [line.partition(":")[0] for line in lines if line[:1].isalpha()]


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_pages_parses(text: str, parsing: None) -> None:
    words = [STAND_INS.get(word, word) for word in shlex.split(text)]
    parse([word.replace("HOST:29500", "localhost:29500") for word in words])


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert "python train.py --help" in COMMANDS


@pytest.mark.parametrize(
    "text",
    [
        "python train.py configs/demo_s_bf16.py optim.rate=1",
        "python -m eval.sample out/RUN words=1",
        "python prepare_data.py local a.jsonl nam=x",
        "make nothing",
        "torchrun --nproc=8 --no-such-option train.py configs/demo_s_bf16.py",
    ],
)
def test_a_command_with_a_mistake_is_noticed(text: str, parsing: None) -> None:
    try:
        parse(shlex.split(text))
    except (Exception, SystemExit):
        return
    raise AssertionError(f"{text!r} parses")


# ------------------------------------------------------------------------------------ docs/check.py


def test_a_command_is_run_with_the_names_of_the_demo() -> None:
    asked = check.Command("README.md", "python scaling/report.py out/RUN out/RUN2")
    assert asked.why_not is None
    assert asked.as_run == f"python scaling/report.py {check.RUN} {check.RUN2}"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("torchrun --nproc_per_node=8 train.py FILE", "several processes"),
        ("python train.py configs/gpt125m_fp8.py steps=300", "needs a GPU"),
        ("python train.py configs/gpt125m_fp8.py --plan h100 steps=300", None),
        ("python train.py configs/demo_s_fp8.py", None),
        ("python -m eval.harness hf:gpt2 tasks=core", "network"),
        ("python -m eval.harness out/RUN tasks=core", None),
    ],
)
def test_what_a_cpu_cannot_run_is_left_out(text: str, reason: str | None) -> None:
    assert check.Command("README.md", text).why_not == reason


@pytest.mark.parametrize("rule", [*check.STAND_INS, *check.REASONS])
def test_every_rule_is_of_use(rule: str) -> None:
    assert any(re.search(rule, text) for text in COMMANDS)


def test_comments_are_no_part_of_a_command() -> None:
    assert check.COMMENT.split("make demo       # two cores")[0] == "make demo"


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_can_be_copied_with_what_is_said_of_it(text: str) -> None:
    """A shell takes the rest of the line as a comment, not as words."""
    assert "  " not in text
