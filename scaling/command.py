"""What the commands of this folder share: words read into options, and leaving as a shell expects."""

import difflib
import os
import sys
from pathlib import Path

from runtime.cli import UserError


def read_words(arguments, meanings: dict[str, str], with_paths: bool = True, flags=(), lists=()) -> tuple[list[str], dict]:
    """(paths, {option: text}) from `name=value`, `--name value` and bare words, which are paths.

    meanings: option -> what it means, for the sentences. flags take no value and become True. After the first value of one of
    `lists`, further COLUMN=VALUE words are its own too. Raises UserError: unknown, without its value, given twice."""
    paths, options, words = [], {}, list(arguments)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if with_paths and not word.startswith("--") and (not equals or Path(word).exists()):
            paths.append(word)
            continue
        key = key.replace("-", "_")
        if key not in meanings:
            near = difflib.get_close_matches(key, meanings, n=1)
            raise UserError(f"{word!r} is no option; " + (
                f"did you mean {near[0].replace('_', '-')}?" if near else f"there are {', '.join(meanings)}"))
        if key in flags:
            if equals:
                raise UserError(f"{word!r}: {key} takes no value")
            options[key] = True
            continue
        if not (value if equals else words and not words[0].startswith("--")):
            raise UserError(f"{word.partition('=')[0]} lacks its value: {meanings[key]}")
        value = value if equals else words.pop(0)
        if key in lists:
            options.setdefault(key, []).append(value)
            while words and not words[0].startswith("--") and "=" in words[0] and words[0].split("=")[0] not in meanings:
                options[key].append(words.pop(0))
        elif key in options:
            raise UserError(f"{key} is given twice: {options[key]!r} and {value!r}; give it once" + "".join(
                f" (a condition on a column of that name needs its own --{name})" for name in lists))
        else:
            options[key] = value
    return paths, options


def run(main, *arguments) -> int:
    """main's exit code; 1 without a traceback where the output is closed early, as by `| head`; 130 where interrupted."""
    try:
        code = main(*arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # Python flushes stdout once more at its end
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
