"""Tests of runtime/documents.py: which document a token belongs to, and that it attends to no
other; runs with data.document_mask, killed, resumed and on two ranks."""

from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import train
from lib.errors import UserError
from model import GPT, NO_TARGET, GPTConfig
from runtime import documents, parallel
from runtime.checkpoint import load_model
from runtime.config import Config
from runtime.data import Data
from runtime.shards import LOSS_MASK_BIT, read_index
from runtime.tokenizer import load_tokenizer
from runtime.training_step import forward_backward
from tests.conftest import ALONE, changed, tiny_config, write_index, write_shards
from tests.helpers.faults import Run, back_to, record, rows, summary, train_on_ranks

EOT = 256  # of the tokenizer `byte`
SIZES = GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ffn=64, n_ctx=24, vocab_size=257)
# rows of numbers: what begins a document, and which document each token is in
ROWS = [
    ("first document begun before the window", [5, 6, EOT, 7, EOT, 8, 9], [0, 0, 1, 1, 2, 2, 2]),
    ("begins with a document", [EOT, 5, 6, EOT, 7], [1, 1, 1, 2, 2]),
    ("documents without text", [5, EOT, EOT, EOT, 6], [0, 1, 2, 3, 3]),
    ("one document", [5, 6, 7], [0, 0, 0]),
]


# ------------------------------------------------------------------------------------ the documents


@pytest.mark.parametrize(
    "tokens, expected", [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_an_end_of_text_token_begins_a_document(tokens: list[int], expected: list[int]) -> None:
    numbers = documents.number_documents(np.array(tokens, "<u2"), np.uint32(EOT))
    assert numbers.tolist() == expected


@pytest.mark.parametrize(
    "instruct, expected",
    [(["messages"], [0, 0, 1, 1, 1]), (["prompt", "response"], [0, 0, 0, 0, 1])],
)
def test_a_conversation_begins_with_an_end_of_text_that_is_not_learned(
    instruct: list[str], expected: list[int], tmp_path: Path
) -> None:
    """The answer of a conversation may end with the same token, and so may a prompt hold it."""
    masked = LOSS_MASK_BIT | np.uint32(EOT)
    tokens = np.array([5, 6, masked, 7, EOT], "<u4")
    write_shards(tmp_path / "chat", {"train": [tokens], "val": [tokens]}, is_masked=True)
    write_index(tmp_path / "chat", selection={"instruct": instruct})
    border = read_index(tmp_path / "chat").border(EOT)
    assert documents.number_documents(tokens, border).tolist() == expected


# ----------------------------------------------------------------------------------------- the mask


def model_of(sizes: GPTConfig = SIZES) -> GPT:
    """In fp32, so that only the order of sums differs."""
    model = GPT(sizes, torch.float32)
    model.init_weights(1)
    return model


def windows_of_documents() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y and document numbers, (2, 24) each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (2, 25), generator=generator)
    tokens[0, [0, 5, 6, 17]] = EOT
    tokens[1, [3, 23]] = EOT
    numbers = np.stack(
        [documents.number_documents(row[:-1].numpy(), np.uint32(EOT)) for row in tokens]
    )
    return tokens[:, :-1], tokens[:, 1:], torch.from_numpy(numbers)


def loss_one_by_one(model: GPT) -> torch.Tensor:
    """The summed loss of the windows' documents, each run by itself, from position 0."""
    x, y, numbers = windows_of_documents()
    total = torch.zeros(())
    for row in range(2):
        for number in numbers[row].unique():
            here = numbers[row] == number
            total = total + model(x[row][here][None], y[row][here][None]).sum()
    return total


def test_masked_losses_and_gradients_are_those_of_documents_run_one_by_one() -> None:
    """Also with grouped-query attention, which SIZES have."""
    alone = model_of()
    expected = loss_one_by_one(alone)
    expected.backward()
    masked = model_of()
    x, y, numbers = windows_of_documents()
    loss = forward_backward(
        masked, x, y, 1.0, mask=documents.attention_mask(numbers, is_flex=False)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (name, p), reference in zip(masked.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, reference.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_without_the_mask_a_token_sees_the_document_before_its_own() -> None:
    model = model_of()
    x, y, _ = windows_of_documents()
    assert model(x, y).sum().item() != pytest.approx(loss_one_by_one(model).item(), rel=1e-4)


def test_flex_attention_computes_what_the_dense_mask_does() -> None:
    """Forward alone: it has no backward pass on a CPU."""
    x, y, numbers = windows_of_documents()
    dense, flex = model_of(), model_of()
    documents.use_flex(flex)
    with torch.no_grad():
        expected = dense(x, y, mask=documents.attention_mask(numbers, is_flex=False))
        actual = flex(x, y, mask=documents.attention_mask(numbers, is_flex=True))
        plain = flex(x, y)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(plain, dense(x, y), rtol=0, atol=0)


def test_another_batch_of_documents_compiles_nothing_anew() -> None:
    """By the compiler's front end alone: Inductor's FlexAttention for CPUs fails on this model."""
    model = model_of()
    documents.use_flex(model)
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    x, y, numbers = windows_of_documents()
    losses = []
    with torch.no_grad():
        for shift in range(3):
            mask = documents.attention_mask(numbers.roll(shift, 0) + shift, is_flex=True)
            losses.append(model(x.roll(shift, 0), y.roll(shift, 0), mask=mask).sum().item())
            if shift == 0:
                graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert losses == pytest.approx([loss_one_by_one(model_of()).item()] * 3, rel=1e-5)


@pytest.mark.parametrize(
    "device, words, expected",
    [
        ("cuda", "data.document_mask=true parallel.compile=block", True),
        ("cuda", "data.document_mask=true parallel.compile=off", False),
        ("cuda", "parallel.compile=block", False),
        ("cpu", "data.document_mask=true parallel.compile=block", False),
    ],
)
def test_flex_attention_is_for_compiled_runs_on_gpus(
    device: str, words: str, expected: bool, tiny: Config
) -> None:
    assert documents.uses_flex(changed(tiny, words), torch.device(device)) is expected


def test_recomputed_blocks_see_the_mask() -> None:
    x, y, numbers = windows_of_documents()
    mask = documents.attention_mask(numbers, is_flex=False)
    plain, recomputed = model_of(), model_of()
    for number, block in enumerate(recomputed.blocks()):
        recomputed.layers[number] = parallel.RecomputedBlock(block)
    for model in plain, recomputed:
        forward_backward(model, x, y, 1.0, mask=mask)
    for p, reference in zip(recomputed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, reference.grad)


# ------------------------------------------------------------------------------------------ the run


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of six steps on documents of 1 to 40 tokens, finished."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        splits = {}
        for split, tokens in ("train", 20_000), ("val", 2_000):
            ids = np.minimum(rng.geometric(0.05, tokens), 255).astype("<u2")
            ids[np.cumsum(rng.integers(1, 40, tokens // 20))[: tokens // 40]] = EOT
            splits[split] = [ids]
        write_shards(folder / "data" / name, splits)
    config = tiny_config(folder / "data", folder / "out")
    config = changed(config, "run=masked data.document_mask=true data.micro_batch=2 eval.every=3")
    train.train(config, ALONE)
    return config


def data_of(config: Config) -> Data:
    tokenizer = load_tokenizer("byte")
    return Data(config, *tokenizer.hashes, eot=tokenizer.eot)


def test_a_runs_first_loss_is_that_of_its_documents_one_by_one(masked: Config) -> None:
    """Of the initial weights, in BF16, cut where the shards have an end-of-text token."""
    model = GPT(masked.model)
    model.init_weights(masked.seed)
    data, total = data_of(masked), 0.0
    with torch.no_grad():
        for micro in range(masked.accumulation(1)):
            for x, y in zip(*data.batch(0, micro, 0, 1), strict=True):
                begins = (x == EOT).nonzero().flatten().tolist()
                cuts = sorted({0, *begins, len(x)})
                for first, end in zip(cuts[:-1], cuts[1:], strict=True):
                    total += model(x[None, first:end], y[None, first:end]).item()
    mean = total / masked.data.tokens_per_step
    assert rows(masked)[0]["loss"] == pytest.approx(mean, rel=2e-4)


@pytest.mark.parametrize("rank, size", [(0, 1), (1, 2)])
def test_a_micro_batch_comes_with_the_documents_of_its_own_tokens(
    rank: int, size: int, masked: Config
) -> None:
    data = data_of(masked)
    seen = 0
    for x, _, numbers in data.stream(0, 2, rank, size, torch.device("cpu")):
        assert torch.equal(numbers, (x == EOT).cumsum(1))
        seen += int(numbers.max())
    assert seen > 0


def test_an_answer_that_ends_with_an_end_of_text_ends_no_document(tmp_path: Path) -> None:
    """Of conversations: the token that is not learned begins one, the answer's own is a target."""
    masked_eot, masked_text = LOSS_MASK_BIT | np.uint32(EOT), LOSS_MASK_BIT | np.uint32(7)
    turn = [masked_text, masked_text, 8, EOT]
    conversations = np.array([masked_eot, *turn, *turn] * 400, "<u4")
    for name in ("web", "code"):
        splits = {split: [conversations] for split in ("train", "val")}
        write_shards(tmp_path / "data" / name, splits, is_masked=True)
        write_index(tmp_path / "data" / name, selection={"instruct": ["messages"]})
    config = changed(tiny_config(tmp_path / "data", tmp_path), "data.document_mask=true")
    data = data_of(config)
    x, y = data.batch(0, 0, 0, 1)
    begins = (x[:, 1:] == EOT) & (y[:, :-1] == NO_TARGET)
    numbers = data.documents(0, 0, 0, 1)
    assert torch.equal(numbers[:, 1:] - numbers[:, :1], begins.cumsum(1))
    assert ((x[:, 1:] == EOT) & ~begins).any(), "answers end with the same token"


def test_validation_reads_whole_windows(masked: Config) -> None:
    model, _ = load_model(masked.run_dir, step=3)
    data, expected = data_of(masked), 0.0
    for source, weight in data.weights.items():
        x, y = data.val[source].batch(0, len(data.val[source]))
        with torch.no_grad():
            expected += weight * model(x, y).sum().item() / y.numel()
    validations = {row["step"]: row["loss"] for row in rows(masked, "val")}
    assert validations[3] == pytest.approx(expected, rel=1e-3)


FP8 = "fp8.recipe=tensorwise eval.every=none steps=3"


def losses_of_steps(config: Config) -> list[float]:
    """Of a run without its validation, whose graphs Inductor would need as long for again."""
    with mock.patch.object(train.Run, "_validate", lambda run: True):
        train.train(config, ALONE)
    return [row["loss"] for row in rows(config)]


def test_compiled_fp8_blocks_train_with_the_mask(masked: Config) -> None:
    eager = losses_of_steps(changed(masked, f"run=fp8_eager {FP8}"))
    compiled = losses_of_steps(changed(masked, f"run=fp8_block {FP8} parallel.compile=block"))
    assert compiled == pytest.approx(eager, rel=1e-3)
    assert eager[0] == pytest.approx(rows(masked)[0]["loss"], rel=1e-3), "in BF16"


def test_compiled_blocks_validate_without_the_mask(
    masked: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler's front end alone."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    eager = changed(masked, f"run=whole_eager {FP8}")
    compiled = changed(masked, f"run=whole_block {FP8} parallel.compile=block")
    for config in (eager, compiled):
        train.train(config, ALONE)
    for key in ("loss_as_trained", "loss_bf16"):
        assert summary(compiled)[key] == pytest.approx(summary(eager)[key], rel=1e-3)


def test_the_mask_changes_what_is_trained(masked: Config) -> None:
    plain = changed(masked, "run=plain data.document_mask=false")
    train.train(plain, ALONE)
    assert rows(plain)[0]["loss"] != pytest.approx(rows(masked)[0]["loss"], rel=1e-4)


def test_a_killed_run_goes_on_to_the_same_bits(masked: Config) -> None:
    killed = changed(masked, "run=killed")
    run = Run(killed)
    run.wait_until(3)
    run.kill()
    if (killed.run_dir / "summary.json").exists():
        back_to(killed, 3)
    train.train(killed, ALONE)
    assert record(killed) == record(masked)


@pytest.mark.parametrize("words", ["parallel.shard=1", "parallel.shard=2 parallel.recompute=true"])
def test_two_ranks_train_what_one_does(words: str, masked: Config) -> None:
    two = changed(masked, f"run=two_{words[15]} {words}")
    train_on_ranks(2, two)
    expected = [row["loss"] for row in rows(masked)]
    assert [row["loss"] for row in rows(two)] == pytest.approx(expected, rel=2e-3)
    assert rows(two)[0]["loss"] == pytest.approx(expected[0], rel=1e-5)


def test_a_run_cannot_drop_the_mask_half_way(masked: Config) -> None:
    """Refused in a sentence that names the key, whether the run has ended or not."""
    with pytest.raises(UserError, match=r"data\.document_mask was True, now"):
        train.train(changed(masked, "data.document_mask=false"), ALONE)
