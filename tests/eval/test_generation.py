"""eval/generation.py: what lm-eval's generation keys mean, and which are refused by name."""

from typing import Any

import pytest
from lm_eval.models.utils import normalize_gen_kwargs

from eval.generation import read_generation
from lib.errors import UserError


@pytest.mark.parametrize(
    "keys, n_new, until",
    [
        (None, 256, ()),
        ({"max_gen_toks": 6, "until": ["\n", "."]}, 6, ("\n", ".")),
        ({"max_new_tokens": 6, "until": "\n"}, 6, ("\n",)),
        ({"max_tokens": "6"}, 6, ()),
        ({"max_completion_tokens": 6.0, "until": ("a", "b")}, 6, ("a", "b")),
        ({"max_new_tokens": 6, "max_gen_toks": 6, "max_tokens": None, "until": None}, 6, ()),
    ],
)
def test_every_name_of_the_length_and_of_stop_texts_is_read(
    keys: dict[str, Any] | dict[str, str] | None, n_new: int, until: tuple[str, ...]
):
    found = read_generation(keys, "t")
    assert (found.n_new, found.until) == (n_new, until)


@pytest.mark.parametrize(
    "keys",
    [
        {"do_sample": False, "temperature": 0.0},
        {"do_sample": False, "temperature": 1},
        {"temperature": 0},
        {"do_sample": None},
        {"top_p": 0.95},
        {"do_sample": False, "top_k": 40, "min_p": 0.1},
        {"num_beams": 1, "do_sample": False},
        {"num_beams": 1, "length_penalty": 0.6, "early_stopping": True},
        {"repetition_penalty": 1, "no_repeat_ngram_size": 0},
        {"use_cache": False, "num_return_sequences": 1, "min_new_tokens": 0},
    ],
)
def test_keys_that_leave_an_answer_greedy_are_accepted(keys: dict[str, Any]):
    assert not normalize_gen_kwargs(keys)["do_sample"], "lm-eval draws nothing here"
    assert read_generation(keys, "t").n_new == 256


@pytest.mark.parametrize(
    "keys, named, words",
    [
        ({"do_sample": True}, "do_sample=True", "asks for sampled answers"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample=True", "asks for sampled answers"),
        ({"temperature": 0.7}, "temperature=0.7", "asks for sampled answers"),
        ({"do_sample": "false"}, "do_sample='false'", "needs a yes or no"),
        ({"temperature": "hot"}, "temperature='hot'", "needs a number"),
        ({"num_beams": 4}, "num_beams=4", "not greedy"),
        ({"repetition_penalty": 1.2, "do_sample": False}, "repetition_penalty=1.2", "not greedy"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3", "not greedy"),
        ({"num_return_sequences": 2}, "num_return_sequences=2", "not greedy"),
        ({"min_new_tokens": 4}, "min_new_tokens=4", "not greedy"),
        ({"max_length": 99}, "max_length=99", "counts the tokens of the prompt too"),
        ({"max_new_token": 6}, "max_new_token=6", "no meaning"),
        ({"stop_strings": ["\n"]}, "stop_strings=", "no meaning"),
        ({"max_gen_toks": 0}, "max_gen_toks=0", "number of new tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5", "number of new tokens"),
        ({"max_new_tokens": True}, "max_new_tokens=True", "number of new tokens"),
        ({"max_gen_toks": 6, "max_new_tokens": 9}, "max_new_tokens=9", "gives several lengths"),
        ({"until": [""]}, "until=['']", "needs texts"),
        ({"until": 5}, "until=5", "needs texts"),
    ],
)
def test_whatever_else_is_refused_with_task_key_and_value(
    keys: dict[str, Any], named: str, words: str
):
    with pytest.raises(UserError, match="the task 'my_task' ") as refusal:
        read_generation(keys, "my_task")
    assert named in str(refusal.value) and words in str(refusal.value)
