"""Read an entry point's `key=value` arguments into a frozen dataclass."""

import re
from dataclasses import MISSING, fields
from typing import get_type_hints

from runtime.cli import UserError, nearest, parse, type_problems


def read_options(cls, arguments: list[str]):
    """An instance of the dataclass `cls` from `key=value`, `--key=value`, `--key value`, `--flag` and bare words.

    A flag is a field of type bool: `--serve` stands for serve=true and takes no word after it. Bare words fill the fields
    named in cls.POSITIONAL, in order; a last one of type tuple[str, ...] takes all that are left, as they are written
    (`out/a out/b`, commas and all). Raises UserError: an unknown key, a value of the wrong type, a key twice, a word too
    many, a field without default that is missing.
    """
    hints = get_type_hints(cls)
    names, given, words = [f.name for f in fields(cls)], {}, list(cls.POSITIONAL)
    rest, listed = iter(arguments), []
    for argument in rest:
        pair = re.fullmatch(r"(?:--)?([A-Za-z_][\w-]*)=(.*)", argument, re.DOTALL)
        flag = re.fullmatch(r"--([A-Za-z_][\w-]*)", argument)
        if pair:
            key, value = pair[1].replace("-", "_"), pair[2]
        elif flag:
            key = flag[1].replace("-", "_")
            value = "true" if hints.get(key) is bool else next(rest, None)
        else:
            words = [name for name in words if name not in given]
            if words and hints[words[0]] == tuple[str, ...]:
                listed.append(argument)
                continue
            if not words:
                raise UserError(f"{argument!r} is one word too many: write key=value with one of {', '.join(names)}")
            key, value = words.pop(0), argument
        if key not in names:
            raise UserError(f"there is no key {key!r}{nearest(key, names)}")
        if key in given:
            raise UserError(f"{key} is given twice: {given[key]!r} and {value!r}")
        if value is None:
            raise UserError(f"--{key} needs a value: write {key}=VALUE")
        try:
            given[key] = parse(key, value, hints[key])
        except ValueError as error:
            raise UserError(str(error)) from error
    if listed:
        last = cls.POSITIONAL[-1]
        if last in given:
            raise UserError(f"{last} is given twice: {given[last]!r} and {tuple(listed)!r}")
        given[last] = tuple(listed)
    missing = [f.name for f in fields(cls) if f.name not in given and f.default is MISSING]
    if missing:
        raise UserError(f"{missing[0]} is missing: give {missing[0]}=VALUE")
    options = cls(**given)
    if problems := type_problems("", options):
        raise UserError("\n".join(problems))
    return options
