"""The words of train.py's command line: a config file, section.key=value, --plan."""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lib.errors import UserError
from runtime.config import KEYS, annotation, describe_unknown


@dataclass(frozen=True)
class CommandLine:
    """What the words of train.py's command line say."""

    file: str  # the config file
    overrides: list[str]  # section.key=value, each key once
    plan_for: str | None  # --plan: the name of a GPU, "" where none is named; none = train


def read_command_line(words: Sequence[str]) -> CommandLine:
    """What the words say: the config file, in any place, `section.key=value`,
    `--section.key=value`, `--section.key value`, `--section.key` of a bool, and --plan. Raises
    UserError for any other word, and for a key that is given twice."""
    bare: list[str] = []
    values: dict[str, str] = {}
    plan_for: str | None = None
    queue = deque(words)
    while queue:
        word = queue.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        if name == "plan" and word.startswith("--"):
            if plan_for is not None:
                raise UserError("--plan is given twice")
            if not equals and queue and _may_name_a_gpu(queue[0]):
                value = queue.popleft()
            plan_for = value
            continue
        if _is_bare(word, name, bool(equals)):
            bare.append(word)
            continue
        _refuse_unknown_key(word, name, value, queue)
        if not equals:
            value = _value_of_a_flag(name, queue)
        if name in values:
            raise UserError(
                f"{name} is given twice, as {values[name]!r} and as {value!r}: give it once"
            )
        values[name] = value
    overrides = [f"{name}={value}" for name, value in values.items()]
    return CommandLine(_config_file_among(bare), overrides, plan_for)


def _may_name_a_gpu(word: str) -> bool:
    return not word.startswith("--") and not word.endswith(".py") and not {"=", "/"} & set(word)


def _is_bare(word: str, name: str, has_value: bool) -> bool:
    """Whether a word is a file's, or no key's: neither --name nor name=value."""
    if name not in KEYS and os.path.isfile(word):
        return True
    return not word.startswith("--") and not (name and has_value)


def _refuse_unknown_key(word: str, name: str, value: str, queue: deque[str]) -> None:
    if name.rpartition(".")[2].replace("-", "_") in ("config", "config_file", "cfg"):
        file = value or (queue[0] if queue else "FILE")
        raise UserError(
            f"{word!r}: train.py takes the config file as a word of its own: python train.py "
            f"{file} [section.key=value ...]"
        )
    if name not in KEYS:
        raise UserError(f"there is no key {name!r}{describe_unknown(name)}")


def _value_of_a_flag(key: str, queue: deque[str]) -> str:
    """The value of `--key`, which is taken from the words that follow; that of a bool may be left
    out."""
    if annotation(key) is bool and (not queue or queue[0] not in ("true", "false")):
        return "true"
    if not queue or queue[0].startswith("--"):
        raise UserError(f"--{key} needs a value: write {key}=VALUE")
    return queue.popleft()


def _config_file_among(bare: list[str]) -> str:
    """The config file among the bare words. Raises UserError where there is none, or a word that is
    neither it nor an override."""
    files = [word for word in bare if word.endswith(".py") or os.path.isfile(word)]
    if not files:
        files = [word for word in bare if word not in KEYS][:1]
    stray = [word for word in bare if word not in files[:1]] or files[1:]
    if stray:
        raise UserError(
            f"{stray[0]!r} is no override: write section.key=value, such as optim.lr=3e-4, after"
            " one config file"
        )
    if not files:
        raise UserError(
            "no config file is named: python train.py FILE [section.key=value ...], such as"
            " configs/demo_s_bf16.py"
        )
    return files[0]
