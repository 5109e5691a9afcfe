"""Read how a task of lm-eval wants its answers generated, and refuse by name what is not greedy.

lm-eval's own normalisation decides what the keys mean, as in `lm_eval --model hf`: the length has
four names, and a temperature above 0 without do_sample draws answers. transformers ignores some
keys where nothing is drawn and there is one beam; they are accepted here for that reason. No other
key is ignored."""

from dataclasses import dataclass
from typing import Any

from lib.errors import UserError

DEFAULT_LENGTH = 256  # tokens, where a task names none; lm-eval's own default
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# transformers reads the first only where answers are drawn, the others only where there are beams.
OF_SAMPLING = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
)
OF_BEAMS = frozenset({"early_stopping", "length_penalty"})
# The values at which these keys change nothing. The cache changes the speed alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "use_cache": (True, False),
}


@dataclass(frozen=True)
class Generation:
    """What a greedy answer needs to know."""

    n_new: int  # tokens at most
    until: tuple[str, ...]  # the answer ends before the first of these texts


def read_generation(keys: dict[str, Any] | None, task: str) -> Generation:
    """The generation_kwargs of a task. A key that is None counts as absent.

    Raises UserError, which names task, key and value, where an answer would not be greedy, where a
    length or a stop text cannot be used, and for a key that is not known here.
    """
    # after eval.tasks.load(), which sets what lm-eval reads
    from lm_eval.models.utils import normalize_gen_kwargs

    keys = {key: value for key, value in (keys or {}).items() if value is not None}
    if isinstance(keys.get("until"), tuple):
        keys["until"] = list(keys["until"])  # lm-eval knows lists alone
    if "max_length" in keys:
        raise _refusal(
            task,
            "max_length",
            keys["max_length"],
            "sets a length that counts the tokens of the prompt too",
            "give the number of new tokens as max_gen_toks",
        )
    _check_lengths(keys, task)
    _check_until(keys, task)
    _check_sampling(keys, task)
    settings: dict[str, Any] = dict(normalize_gen_kwargs(keys, DEFAULT_LENGTH))
    if settings.pop("do_sample"):  # by do_sample, or by a temperature without it
        key = "do_sample" if "do_sample" in keys else "temperature"
        raise _refusal(task, key, keys[key], "asks for sampled answers", "set do_sample to false")
    n_new, until = settings.pop("max_gen_toks"), settings.pop("until")
    for key, value in settings.items():
        if key not in OF_SAMPLING and key not in OF_BEAMS:
            _check_neutral(task, key, value)
    return Generation(n_new, tuple(until))


def _check_neutral(task: str, key: str, value: Any) -> None:
    """Raises UserError where the key is unknown or changes greedy answers."""
    if key not in NEUTRAL:
        wish = "sets a key that has no meaning for greedy answers here"
        raise _refusal(task, key, value, wish, "remove it")
    if value not in NEUTRAL[key]:
        wish = "asks for answers that are not greedy"
        raise _refusal(task, key, value, wish, f"set it to {NEUTRAL[key][0]}")


def _check_lengths(keys: dict[str, Any], task: str) -> None:
    lengths = {key: keys[key] for key in LENGTHS if key in keys}
    for key, value in lengths.items():
        is_whole = str(value).isdecimal() or isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not is_whole or int(value) < 1:
            raise _refusal(
                task, key, value, "needs a number of new tokens", "give a whole number above 0"
            )
    if len({int(value) for value in lengths.values()}) > 1:
        listed = " and ".join(f"{key}={value}" for key, value in lengths.items())
        raise UserError(
            f"the task {task!r} gives several lengths of an answer in its generation_kwargs,"
            f" {listed}: keep one of them in a YAML of your own (include=)"
        )


def _check_until(keys: dict[str, Any], task: str) -> None:
    until = keys.get("until", [])
    texts = until if isinstance(until, list) else [until]
    # At an empty text every answer would end after its first token.
    if not all(isinstance(text, str) and text for text in texts):
        raise _refusal(
            task,
            "until",
            until,
            "needs texts that end an answer",
            "give a text, or a list of texts, none empty",
        )


def _check_sampling(keys: dict[str, Any], task: str) -> None:
    """Only true and false are a decision to lm-eval: with the text "false" it would leave it to
    transformers."""
    if not isinstance(keys.get("do_sample", False), bool):
        raise _refusal(task, "do_sample", keys["do_sample"], "needs a yes or no", "set it to false")
    try:
        float(keys.get("temperature", 0.0))
    except (TypeError, ValueError):
        raise _refusal(
            task, "temperature", keys["temperature"], "needs a number", "remove it"
        ) from None


def _refusal(task: str, key: str, value: Any, wish: str, remedy: str) -> UserError:
    return UserError(
        f"the task {task!r} {wish}: {key}={value!r} in its generation_kwargs, but only greedy"
        f" answers are generated here: leave the task out, or {remedy} in a YAML of your own"
        " (include=)"
    )
