"""eval/sample.py: what is generated, printed and refused, with which tokenizer. Greedy texts, by
transformers: eval/test_export.py."""

import io
import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders
from transformers import AutoTokenizer

from eval import export, inference, sample
from lib.errors import UserError
from runtime.config import read_config
from runtime.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.eval_runs import (
    BYTES,
    build,
    build_run,
    call,
    generate,
    greedy_text,
    refused,
    rigged,
)
from tests.helpers.text_files import BEGINS, write_tokenizer

run = pytest.fixture(build_run)


def test_no_id_comes_out_that_the_tokenizer_does_not_have():
    model = rigged(lambda h: torch.arange(384.0).expand(*h.shape[:-1], 384))
    ids = torch.zeros(8, 1, dtype=torch.int64)
    for n_ids, most in ((None, 256), (200, 199), (9999, 256)):
        assert (generate(model, ids, 1, n_ids=n_ids) == most).all()
        assert (
            generate(
                model, ids, 20, 50.0, None, torch.Generator().manual_seed(0), n_ids=n_ids
            ).max()
            <= most
        )


def test_sampling_follows_the_models_distribution_and_top_k():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    model = rigged(
        lambda h: torch.cat(
            (p.log().expand(*h.shape[:-1], 4), torch.full((*h.shape[:-1], 380), -99.0)), -1
        )
    )
    ids = torch.zeros(4000, 1, dtype=torch.int64)
    for temperature, top_k, k in [
        (1.0, None, 4),
        (0.5, None, 4),
        (2.0, 3, 3),
        (1.0, 1, 1),
        (1.0, 9999, 4),
    ]:
        drawn = generate(model, ids, 1, temperature, top_k, torch.Generator().manual_seed(0))
        weights = p ** (1 / temperature)
        weights[k:] = 0
        shares = torch.bincount(drawn.flatten(), minlength=4)[:4] / 4000
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.03, rtol=0)


def test_rows_that_ended_stay_ended_and_generation_stops():
    said = iter([[256, 66], [65, 66], [65, 256]])  # the third call is the last
    model = rigged(lambda h: F.one_hot(torch.tensor(next(said)), 384).float())
    got = generate(model, torch.zeros(2, 1, dtype=torch.int64), 20, ends=(256,))
    assert got.tolist() == [[256, 256, 256], [66, 66, 256]]


def test_any_of_several_ends_ends_a_row_which_goes_on_with_the_first():
    said = iter([[70, 66], [65, 66], [65, 256]])
    model = rigged(lambda h: F.one_hot(torch.tensor(next(said)), 384).float())
    got = generate(model, torch.zeros(2, 1, dtype=torch.int64), 20, ends=(256, 70))
    assert got.tolist() == [[70, 256, 256], [66, 66, 256]]


class TwoEnds(Tokenizer):
    ends = (256, *b"E")


def shown(steps, tokenizer, prompt: str = "", n: int = 1):
    """What stands on the screen after each step, and at the end."""
    out, seen = io.StringIO(), []

    def watched():
        for step in steps:
            yield step
            seen.append(out.getvalue())

    sample.show(watched(), tokenizer, prompt, n, out)
    return [*seen, out.getvalue()]


def test_continuations_stand_below_each_other_the_first_as_it_grows():
    # row 2 ends first, then row 0
    steps = [[*b"axk"], [*b"by", 256], [256, *b"z", 256], [256, *b"w", 256]]
    first, second, third = (
        f"{'-' * 32} {i} of 3\nP {text}" for i, text in enumerate(("ab", "xyzw", "k"), 1)
    )
    assert shown(steps, BYTES, "P ", 3) == [
        first[:-1],
        first,
        first,
        first,
        f"{first}\n{second}\n{third}\n",
    ]


def test_streamed_pieces_are_whole_characters_that_add_up_to_the_text():
    """GPT-2's tokens cut characters; SentencePiece's decoder eats the very first blank and spells
    unknown bytes one by one."""
    # ends within a character
    ids = list("naïve €5 𝄞 end".encode()) + [0xFF, 0xE2, 0x82] + list(b"x") + [0xE2]
    *pieces, text = shown([[i] for i in ids], BYTES)
    assert text == "naïve €5 𝄞 end\ufffd\ufffdx\ufffd\n" and pieces[2:4] == ["na", "naï"]
    assert all(text.startswith(piece) and not piece.endswith("\ufffd") for piece in pieces)
    words = ["▁the", "▁cat", "s", "▁", "▁sat", *(f"<0x{b:02X}>" for b in range(256))]
    pieces = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    pieces.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    llama = SimpleNamespace(
        decode=lambda ids: pieces.decode(ids, skip_special_tokens=False),
        adds_start=False,
        start=2,
        ends=(-1,),
        encode_special=lambda text: np.array([0] if text else []),
    )
    known = [
        0,
        1,
        2,
        *(5 + b for b in "é日🤖".encode()),
        4,
        0,
        3,
        4,
        *(5 + b for b in "日".encode()),
        1,
    ]
    assert llama.decode(known) == "the catsé日🤖 sat the  sat日 cat"
    assert shown([[i] for i in known], llama, "the")[-1] == "the the catsé日🤖 sat the  sat日 cat\n"
    text, rng, gpt2 = (
        "Ça va? 日本語, 🤖🤖 emoji   and\n\nlines — naïve ﬁ",
        random.Random(0),
        load_tokenizer("gpt2"),
    )
    for ids in (
        gpt2.encode(text * 3).tolist(),
        *([rng.randrange(50256) for _ in range(60)] for _ in range(50)),
    ):
        assert (
            shown([[i] for i in ids], gpt2)[-1]
            == gpt2.decode([gpt2.eot, *ids]).removeprefix("<|endoftext|>") + "\n"
        )


def test_sample_prints_prompt_and_continuation(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    text, texts = "hello" + greedy_text(build(), b"hello", 20), []
    for n in (1, 3):
        call(
            sample,
            run,
            "hello",
            "tokens=20",
            "temperature=0",
            "dtype=float32",
            "device=cpu",
            f"n={n}",
        )
        out = capsys.readouterr().out
        assert out.count(text) == n and (out == text + "\n" if n == 1 else "2 of 3" in out)
    for seed in (1, 2, 1):
        call(sample, run, "hello", "tokens=200", "temperature=1", f"seed={seed}")
        texts.append(capsys.readouterr())
    assert (
        texts[0] == texts[2] != texts[1]
        and "the context of 32 tokens allows 28 new ones, not tokens=200" in texts[0].err
    )


def test_a_prompt_is_read_after_the_begin_of_text_where_there_is_one():
    with_bos = replace(BYTES, prefix=(256, 3))  # its own rules add none
    for tokenizer, want in (
        (BYTES, [[97, 98], [256]]),
        (with_bos, [[97, 98], [3]]),
        (replace(with_bos, adds_start=True), [[3, 97, 98], [3]]),
    ):
        assert [inference.prompt_ids(tokenizer, prompt) for prompt in ("ab", "")] == want


def test_a_prompt_may_spell_a_special_token_and_plain_text_may_not():
    """As transformers and nanoGPT's sample.py read it; data that spells it stays text."""
    gpt2 = load_tokenizer("gpt2")
    assert inference.prompt_ids(gpt2, "<|endoftext|>Once<|endoftext|>") == [
        50256,
        *gpt2.encode("Once"),
        50256,
    ]
    assert (
        inference.prompt_ids(BYTES, "a<|endoftext|>") == [97, 256]
        and len(BYTES.encode("<|endoftext|>")) == 13
    )


def test_special_tokens_of_a_prompt_are_read_as_transformers_reads_them(tmp_path: Path):
    theirs = AutoTokenizer.from_pretrained(
        write_tokenizer(tmp_path / "tok", spare=3, post_processor=BEGINS)
    )
    ours = load_tokenizer(str(tmp_path / "tok"))
    for text in ("hi<|spare_1|> there", "<|spare_0|><|end|>", "no <|spare_9|>", ""):
        assert inference.prompt_ids(ours, text) == theirs(text).input_ids
    assert inference.prompt_ids(ours, "<|begin|>hi") == [0, *ours.encode("hi")], (
        "once, as in lm-eval"
    )
    assert len(ours.encode("<|spare_1|>")) > 3, "data stays text"
    ids = [0, *ours.encode("hi"), 1, ours.vocab_size - 1, *ours.encode(" ho")]
    assert (
        ours.decode(ids, skip_special=True)
        == theirs.decode(ids, skip_special_tokens=True)
        == "hi ho"
    )


def test_a_continuation_ends_at_any_of_the_tokenizers_ends():
    two_ends = TwoEnds(**{field.name: getattr(BYTES, field.name) for field in fields(BYTES)})
    assert shown([[*b"a"], [*b"E"], [256]], two_ends) == ["a", "a", "a", "a\n"]


@pytest.mark.parametrize("temperature, value", [(0, torch.nan), (0, torch.inf), (1, torch.nan)])
def test_a_model_that_has_diverged_gets_a_sentence(temperature: int, value: float):
    model = rigged(lambda h: torch.zeros(len(h), 384).index_fill(1, torch.tensor([5]), value))
    with pytest.raises(UserError, match="the model's logits are not finite numbers"):
        generate(model, torch.zeros(1, 1, dtype=torch.int64), 1, temperature)


MANIFEST = "checkpoints/step_00000001/manifest.json"


@pytest.mark.parametrize(
    "name, content",
    [
        (MANIFEST, {"state": {"tokenizer_sha256": "f" * 64}}),
        (MANIFEST, {"state": {"imported": {"tokenizer_sha256": "f" * 64}}}),
        ("summary.json", {"tokenizer_sha256": "f" * 64}),
    ],
)
def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str], name: str, content: dict[str, Any]
):
    """As many ids, other text: nothing else would tell. The newest checkpoint decides, before a
    summary of another time."""
    (run / name).write_text(json.dumps(content))
    for command in (sample, export):
        assert f"{run} was trained with another tokenizer than byte" in refused(
            capsys, command, run, run / "new"
        )
        assert not (run / "new").exists()
    (run / MANIFEST).write_text(json.dumps({"state": {"tokenizer_sha256": BYTES.sha256}}))
    assert inference.read_tokenizer(read_config(run), run).sha256 == BYTES.sha256
