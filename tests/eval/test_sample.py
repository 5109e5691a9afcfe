"""eval/sample.py: what is generated, printed and refused, with which tokenizer. Greedy texts, by
transformers: eval/test_export.py."""

import contextlib
import io
import json
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from model import GPT
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

# ---------------------------------------------------------------------------- what is generated


def rising_logits(h: torch.Tensor) -> torch.Tensor:
    """The largest id is the likeliest."""
    return torch.arange(384.0).expand(*h.shape[:-1], 384)


# the model's own 257; fewer, of the tokenizer; more than the model has
NUMBERS_OF_IDS = pytest.mark.parametrize("n_ids, largest", [(None, 256), (200, 199), (9999, 256)])


@NUMBERS_OF_IDS
def test_the_likeliest_id_is_one_that_the_tokenizer_has(n_ids: int | None, largest: int) -> None:
    ids = torch.zeros(8, 1, dtype=torch.int64)
    drawn = generate(rigged(rising_logits), ids, 1, n_ids=n_ids)
    assert (drawn == largest).all()


@NUMBERS_OF_IDS
def test_no_id_is_drawn_that_the_tokenizer_does_not_have(n_ids: int | None, largest: int) -> None:
    ids = torch.zeros(8, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    drawn = generate(rigged(rising_logits), ids, 20, 50.0, None, generator, n_ids=n_ids)
    assert drawn.max() <= largest


PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])  # of the first four ids; others have none


def logits_of_four(h: torch.Tensor) -> torch.Tensor:
    of_others = torch.full((*h.shape[:-1], 380), -99.0)
    return torch.cat((PROBABILITIES.log().expand(*h.shape[:-1], 4), of_others), -1)


@pytest.mark.parametrize(
    "temperature, top_k, n_possible",
    [(1.0, None, 4), (0.5, None, 4), (2.0, 3, 3), (1.0, 1, 1), (1.0, 9999, 4)],
)
def test_sampling_follows_the_models_distribution_and_top_k(
    temperature: float, top_k: int | None, n_possible: int
) -> None:
    ids = torch.zeros(4000, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    drawn = generate(rigged(logits_of_four), ids, 1, temperature, top_k, generator)
    shares = torch.bincount(drawn.flatten(), minlength=4)[:4] / 4000
    weights = PROBABILITIES ** (1 / temperature)
    weights[n_possible:] = 0
    torch.testing.assert_close(shares, weights / weights.sum(), atol=0.03, rtol=0)


def scripted(steps: list[list[int]]) -> GPT:
    """A model that says these ids, one a row, step after step, and can be asked no further."""
    remaining = iter(steps)

    def logits_of_step(h: torch.Tensor) -> torch.Tensor:
        return F.one_hot(torch.tensor(next(remaining)), 384).float()

    return rigged(logits_of_step)


def test_rows_that_ended_stay_ended_and_generation_stops() -> None:
    model = scripted([[256, 66], [65, 66], [65, 256]])
    drawn = generate(model, torch.zeros(2, 1, dtype=torch.int64), 20, ends=(256,))
    assert drawn.tolist() == [[256, 256, 256], [66, 66, 256]]


def test_any_of_several_ends_ends_a_row_which_goes_on_with_the_first() -> None:
    model = scripted([[70, 66], [65, 66], [65, 256]])
    drawn = generate(model, torch.zeros(2, 1, dtype=torch.int64), 20, ends=(256, 70))
    assert drawn.tolist() == [[70, 256, 256], [66, 66, 256]]


@pytest.mark.parametrize("temperature, value", [(0, torch.nan), (0, torch.inf), (1, torch.nan)])
def test_a_model_that_has_diverged_gets_a_sentence(temperature: int, value: float) -> None:
    def diverged_logits(h: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(h), 384).index_fill(1, torch.tensor([5]), value)

    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UserError, match="the model's logits are not finite numbers"):
        generate(rigged(diverged_logits), ids, 1, temperature)


# ------------------------------------------------------------------------------- what is printed


def screens(steps: list[list[int]], tokenizer: Any, prompt: str = "", n: int = 1) -> list[str]:
    """What stands on the screen after each step, and at the end."""
    screen = io.StringIO()
    after_steps = []

    def watched_steps() -> Iterator[list[int]]:
        for step in steps:
            yield step
            after_steps.append(screen.getvalue())

    sample.show(watched_steps(), tokenizer, prompt, n, screen)
    return [*after_steps, screen.getvalue()]


def one_row(ids: Iterable[int]) -> list[list[int]]:
    """The steps of a single continuation."""
    return [[i] for i in ids]


def test_continuations_stand_below_each_other_the_first_as_it_grows() -> None:
    """Row 2 ends first, then row 0."""
    steps = [[*b"axk"], [*b"by", 256], [256, *b"z", 256], [256, *b"w", 256]]
    line = "-" * 32
    first = f"{line} 1 of 3\nP ab"
    assert screens(steps, BYTES, "P ", 3) == [
        f"{line} 1 of 3\nP a",
        first,
        first,
        first,
        f"{first}\n{line} 2 of 3\nP xyzw\n{line} 3 of 3\nP k\n",
    ]


class TwoEnds(Tokenizer):
    ends = (256, *b"E")


def test_a_continuation_ends_at_any_of_the_tokenizers_ends() -> None:
    two_ends = TwoEnds(**{field.name: getattr(BYTES, field.name) for field in fields(BYTES)})
    assert screens([[*b"a"], [*b"E"], [256]], two_ends) == ["a", "a", "a", "a\n"]


@pytest.fixture(scope="module")
def streamed() -> list[str]:
    """Screens of a text whose characters have up to four bytes, then bytes that are none, at last
    a character that is cut."""
    no_characters = [0xFF, 0xE2, 0x82, *b"x", 0xE2]
    return screens(one_row([*"naïve €5 𝄞 end".encode(), *no_characters]), BYTES)


def test_streamed_pieces_add_up_to_the_text(streamed: list[str]) -> None:
    assert streamed[-1] == "naïve €5 𝄞 end\ufffd\ufffdx\ufffd\n"


def test_a_character_is_streamed_when_it_is_whole(streamed: list[str]) -> None:
    assert streamed[2:4] == ["na", "naï"]


def test_what_was_streamed_stays(streamed: list[str]) -> None:
    *pieces, text = streamed
    for piece in pieces:
        assert text.startswith(piece)


def test_no_streamed_piece_ends_within_a_character(streamed: list[str]) -> None:
    *pieces, _ = streamed
    for piece in pieces:
        assert not piece.endswith("\ufffd")


WORDS = ["▁the", "▁cat", "s", "▁", "▁sat"]  # of llama(), before the 256 bytes


@pytest.fixture(scope="module")
def llama() -> SimpleNamespace:
    """A tokenizer as SentencePiece's, whose decoder eats the very first blank and spells unknown
    bytes one by one."""
    vocabulary = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {word: i for i, word in enumerate(vocabulary)}
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True))
    pieces.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )

    def decode(ids: Sequence[int]) -> str:
        return pieces.decode(ids, skip_special_tokens=False)

    def encode_special(text: str) -> np.ndarray:
        """Of "the", the only prompt here."""
        return np.array([0] if text else [])

    return SimpleNamespace(
        decode=decode, adds_start=False, start=2, ends=(-1,), encode_special=encode_special
    )


def llama_bytes(text: str) -> list[int]:
    return [len(WORDS) + byte for byte in text.encode()]


# the cat s é日🤖 sat the _ sat 日 cat, by places in WORDS and by bytes
LLAMA_IDS = [0, 1, 2, *llama_bytes("é日🤖"), 4, 0, 3, 4, *llama_bytes("日"), 1]


def test_the_llama_tokenizer_here_decodes_as_sentencepiece(llama: SimpleNamespace) -> None:
    assert llama.decode(LLAMA_IDS) == "the catsé日🤖 sat the  sat日 cat"


def test_a_streamed_continuation_keeps_the_blank_after_the_prompt(llama: SimpleNamespace) -> None:
    text = screens(one_row(LLAMA_IDS), llama, "the")[-1]
    assert text == "the the catsé日🤖 sat the  sat日 cat\n"


def test_tokens_of_gpt2_that_cut_characters_are_streamed_as_the_text() -> None:
    gpt2 = load_tokenizer("gpt2")
    rng = random.Random(0)
    text = "Ça va? 日本語, 🤖🤖 emoji   and\n\nlines — naïve ﬁ"
    samples = [gpt2.encode(text * 3).tolist()]
    for _ in range(50):
        samples.append([rng.randrange(50256) for _ in range(60)])
    for ids in samples:
        decoded = gpt2.decode([gpt2.eot, *ids]).removeprefix("<|endoftext|>")
        assert screens(one_row(ids), gpt2)[-1] == f"{decoded}\n"


# ----------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that is only read."""
    folder = tmp_path_factory.mktemp("shared_run")
    run_folder = contextlib.contextmanager(build_run)
    with pytest.MonkeyPatch.context() as patch, run_folder(folder, patch) as run:
        yield run


@pytest.fixture
def run(shared_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return shutil.copytree(shared_run, tmp_path / "out" / shared_run.name)


@dataclass
class Printed:
    out: str
    err: str


def sample_from(run: Path, *arguments: str) -> Printed:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        call(sample, run, "hello", *arguments)
    return Printed(out.getvalue(), err.getvalue())


GREEDY = ("tokens=20", "temperature=0", "dtype=float32", "device=cpu")


@pytest.fixture(scope="module")
def greedy() -> str:
    """The prompt and what the run's model says after it."""
    return "hello" + greedy_text(build(), b"hello", 20)


def test_sample_prints_prompt_and_continuation(shared_run: Path, greedy: str) -> None:
    assert sample_from(shared_run, *GREEDY, "n=1").out == f"{greedy}\n"


def test_sample_prints_several_continuations_with_their_numbers(
    shared_run: Path, greedy: str
) -> None:
    printed = sample_from(shared_run, *GREEDY, "n=3").out
    assert printed.count(greedy) == 3
    assert "2 of 3" in printed


@pytest.fixture(scope="module")
def of_seeds(shared_run: Path) -> list[Printed]:
    """Of seed 1, seed 2, and seed 1 once more; longer than the context."""
    arguments = ("tokens=200", "temperature=1")
    return [sample_from(shared_run, *arguments, f"seed={seed}") for seed in (1, 2, 1)]


def test_a_seed_gives_the_same_sample_again(of_seeds: list[Printed]) -> None:
    first, _, repeated = of_seeds
    assert repeated == first


def test_another_seed_gives_another_sample(of_seeds: list[Printed]) -> None:
    first, second, _ = of_seeds
    assert second != first


def test_fewer_tokens_than_asked_for_are_said(of_seeds: list[Printed]) -> None:
    message = "the context of 32 tokens allows 28 new ones, not tokens=200"
    assert message in of_seeds[0].err


# ----------------------------------------------------------------------------------- the prompt

WITH_BOS = replace(BYTES, prefix=(256, 3))  # its own rules add none
ADDS_BOS = replace(WITH_BOS, adds_start=True)


@pytest.mark.parametrize(
    "tokenizer, prompt, ids",
    [
        (BYTES, "ab", [97, 98]),
        (BYTES, "", [256]),
        (WITH_BOS, "ab", [97, 98]),
        (WITH_BOS, "", [3]),
        (ADDS_BOS, "ab", [3, 97, 98]),
        (ADDS_BOS, "", [3]),
    ],
)
def test_a_prompt_is_read_after_the_begin_of_text_where_there_is_one(
    tokenizer: Tokenizer, prompt: str, ids: list[int]
) -> None:
    assert inference.prompt_ids(tokenizer, prompt) == ids


def test_a_prompt_may_spell_a_special_token() -> None:
    """As transformers and nanoGPT's sample.py read it."""
    gpt2 = load_tokenizer("gpt2")
    ids = inference.prompt_ids(gpt2, "<|endoftext|>Once<|endoftext|>")
    assert ids == [50256, *gpt2.encode("Once"), 50256]


def test_a_prompt_of_bytes_may_spell_a_special_token() -> None:
    assert inference.prompt_ids(BYTES, "a<|endoftext|>") == [97, 256]


def test_data_that_spells_a_special_token_stays_text() -> None:
    assert len(BYTES.encode("<|endoftext|>")) == 13


@dataclass
class TwoReaders:
    """The same folder of a tokenizer with special tokens, read by us and by transformers."""

    ours: Tokenizer
    theirs: Any


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> TwoReaders:
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    theirs = AutoTokenizer.from_pretrained(write_tokenizer(folder, spare=3, post_processor=BEGINS))
    return TwoReaders(load_tokenizer(str(folder)), theirs)


@pytest.mark.parametrize(
    "text", ["hi<|spare_1|> there", "<|spare_0|><|end|>", "no <|spare_9|>", ""]
)
def test_special_tokens_of_a_prompt_are_read_as_transformers_reads_them(
    text: str, readers: TwoReaders
) -> None:
    assert inference.prompt_ids(readers.ours, text) == readers.theirs(text).input_ids


def test_a_begin_of_text_that_a_prompt_spells_is_not_added_again(readers: TwoReaders) -> None:
    """As in lm-eval."""
    ids = inference.prompt_ids(readers.ours, "<|begin|>hi")
    assert ids == [0, *readers.ours.encode("hi")]


def test_data_that_spells_a_special_token_of_a_folder_stays_text(readers: TwoReaders) -> None:
    assert len(readers.ours.encode("<|spare_1|>")) > 3


def test_special_tokens_are_left_out_of_a_text_as_by_transformers(readers: TwoReaders) -> None:
    ours = readers.ours
    ids = [0, *ours.encode("hi"), 1, ours.vocab_size - 1, *ours.encode(" ho")]
    assert ours.decode(ids, skip_special=True) == "hi ho"
    assert readers.theirs.decode(ids, skip_special_tokens=True) == "hi ho"


# --------------------------------------------------------------------------- another tokenizer

MANIFEST = "checkpoints/step_00000001/manifest.json"
OTHER = {"tokenizer_sha256": "f" * 64}
EACH_HOLDER = pytest.mark.parametrize(
    "name, content",
    [
        (MANIFEST, {"state": OTHER}),
        (MANIFEST, {"state": {"imported": OTHER}}),
        ("summary.json", OTHER),
    ],
    ids=["trained", "imported", "finished"],
)


@EACH_HOLDER
@pytest.mark.parametrize("command", [sample, export], ids=["sample", "export"])
def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(
    command: ModuleType,
    name: str,
    content: dict[str, Any],
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As many ids, other text: nothing else would tell."""
    (run / name).write_text(json.dumps(content))
    message = refused(capsys, command, run, run / "new")
    assert f"{run} was trained with another tokenizer than byte" in message
    assert not (run / "new").exists()


@EACH_HOLDER
def test_the_newest_checkpoint_decides_before_a_summary_of_another_time(
    name: str, content: dict[str, Any], run: Path
) -> None:
    (run / name).write_text(json.dumps(content))
    (run / MANIFEST).write_text(json.dumps({"state": {"tokenizer_sha256": BYTES.sha256}}))
    assert inference.read_tokenizer(read_config(run), run).sha256 == BYTES.sha256
