"""bench/throughput.py: a cell trains what train.py trains; turns, verdicts and budget against
invented cells; rows on disk."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measuring, report, throughput, timing
from bench.cells import (
    Cell,
    build_ours,
    config_of,
    document_numbers,
    groups_of,
    our_cell,
    precision_named,
)
from bench.judging import compare_with_bf16, regressions
from bench.measuring import measure_cell
from bench.report import rows_page
from bench.rows import (
    CellFailure,
    CellRow,
    FailedRow,
    Measurement,
    Provenance,
    TimedRow,
    row_line,
    rows_of,
)
from bench.throughput import choose_cells
from bench.timing import Timer, run_cell
from lib.errors import UserError
from lib.machine import nvidia_smi
from model import GPT
from runtime import parallel
from runtime.config import Config, load_config
from runtime.optim import build_optimizer
from tests.conftest import ROOT, asked
from tests.helpers.bench_rows import TOKENS, answer, judged
from tests.helpers.faults import children, command_line, wait_for

TOY = our_cell(
    "toy",
    "bf16",
    4,
    T=32,
    tokens_per_step=TOKENS,
    device="cpu",
    model={"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 128, "vocab_size": 257},
)


def toy(label: str, **changes: Any) -> Cell:
    return replace(TOY, fp8=precision_named(label), **changes)


TENSORWISE, ROWWISE = toy("tensorwise"), toy("rowwise")
CPU = torch.device("cpu")
H100 = "NVIDIA H100 80GB HBM3"


@contextmanager
def nothing_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "compile_model", lambda *_, **__: None)
        yield


@pytest.fixture
def eager() -> Iterator[None]:
    """nothing_compiled() for a test."""
    with nothing_compiled():
        yield


# ------------------------------------------------------------------------------ cells and suites


@pytest.fixture(scope="module")
def config_of_125m() -> Config:
    return config_of(our_cell("125m", "tensorwise+kernels+head", 64))


@pytest.fixture(scope="module")
def train_pys_125m() -> Config:
    return load_config(ROOT / "configs/gpt125m_bf16.py")


def test_a_cells_model_is_train_pys(config_of_125m: Config, train_pys_125m: Config) -> None:
    assert config_of_125m.model == replace(train_pys_125m.model, n_ctx=1024)


def test_a_cells_optimizer_is_train_pys(config_of_125m: Config, train_pys_125m: Config) -> None:
    assert config_of_125m.optim == train_pys_125m.optim


def test_a_cell_is_parallel_as_train_py_and_compiled_by_block(
    config_of_125m: Config, train_pys_125m: Config
) -> None:
    assert config_of_125m.parallel == replace(train_pys_125m.parallel, compile="block")


def test_a_cell_has_the_precision_of_its_label(config_of_125m: Config) -> None:
    assert config_of_125m.fp8.recipe == "tensorwise"
    assert config_of_125m.fp8.kernels is True
    assert config_of_125m.fp8.head is True


def test_a_cell_has_its_micro_batch(config_of_125m: Config) -> None:
    assert config_of_125m.data.micro_batch == 64


def test_a_cells_step_has_half_a_million_tokens(config_of_125m: Config) -> None:
    assert config_of_125m.data.tokens_per_step == 524_288


def test_a_cells_own_sizes_take_the_place_of_the_configs() -> None:
    cell = replace(TOY, model={"tied": False, "n_embd": 128})
    assert config_of(cell).model.tied is False


EACH_SUITE = pytest.mark.parametrize("suite", ["h100", "toy"])


@EACH_SUITE
def test_a_suite_times_no_cell_twice(suite: str) -> None:
    names = []
    for _, *members in groups_of(suite):
        names += [cell.name for cell in members]
    assert len(set(names)) == len(names)


@EACH_SUITE
def test_of_a_group_the_first_cell_alone_is_in_bf16(suite: str) -> None:
    for group in groups_of(suite):
        baseline, *members = [config_of(cell).fp8.recipe for cell in group]
        assert baseline == "off"
        assert "off" not in members


def pairs_of_documents() -> list[list[Cell]]:
    """(without the mask, with it)"""
    return [*groups_of("documents"), *groups_of("documents-toy")]


def test_the_suite_of_documents_trains_with_the_mask_and_without() -> None:
    for baseline, masked in pairs_of_documents():
        assert config_of(baseline).data.document_mask is False
        assert config_of(masked).data.document_mask is True


def test_the_suite_of_documents_changes_the_mask_alone() -> None:
    for baseline, masked in pairs_of_documents():
        assert replace(masked, document_mask=False) == baseline


def test_a_cell_with_the_mask_is_labelled_so() -> None:
    for _, masked in pairs_of_documents():
        assert masked.label == "bf16+documents"


def test_the_suite_of_documents_is_in_bf16() -> None:
    for _, masked in pairs_of_documents():
        assert config_of(masked).fp8.recipe == "off"


def test_cells_of_one_size_that_are_named_share_their_bf16_cells() -> None:
    """In the suite these three are of three groups, each between two BF16 cells of its own."""
    names = ("1p5b/tensorwise+kernels+bounded", "1p5b/tensorwise", "1p5b/tensorwise+kernels+head")
    (group,) = choose_cells(groups_of("h100"), names)
    assert [cell.name for cell in group] == ["1p5b/bf16", *names]


def test_cells_of_two_sizes_that_are_named_have_each_its_bf16_cell() -> None:
    groups = choose_cells(groups_of("h100"), ("350m/tensorwise", "1p5b/tensorwise"))
    assert [[cell.size for cell in group] for group in groups] == [["350m"] * 2, ["1p5b"] * 2]


# -------------------------------------------------------------------------- what a cell computes


def plain_model(config: Config) -> GPT:
    model = GPT(config.model, torch.bfloat16)
    model.init_weights(config.seed)
    return model


@dataclass
class DocumentLosses:
    """Of one micro-batch, by a plain model, nats per token."""

    numbers: torch.Tensor  # of the tokens' documents
    without_mask: float
    with_mask: float


@pytest.fixture(scope="module")
def document_losses() -> DocumentLosses:
    x, y = measuring.tokens_like_text(4, 32, 257, CPU)
    model = plain_model(config_of(TOY))
    numbers = document_numbers(4, 32)
    is_same_document = numbers[:, None, :, None] == numbers[:, None, None, :]
    with torch.no_grad():
        without_mask = model(x, y).sum().item() / 128
        with_mask = model(x, y, mask=is_same_document.tril()).sum().item() / 128
    return DocumentLosses(numbers, without_mask, with_mask)


def test_documents_have_half_a_context_on_average(document_losses: DocumentLosses) -> None:
    """16 tokens, in four windows of 32."""
    n_documents = sum(len(row.unique()) for row in document_losses.numbers)
    assert 4 < n_documents < 24


def test_the_mask_changes_the_loss(document_losses: DocumentLosses) -> None:
    assert document_losses.with_mask != document_losses.without_mask


@pytest.mark.parametrize("is_masked, loss", [(False, "without_mask"), (True, "with_mask")])
def test_a_cell_of_documents_trains_with_the_mask(
    is_masked: bool, loss: str, document_losses: DocumentLosses, eager: None
) -> None:
    x, y = measuring.tokens_like_text(4, 32, 257, CPU)
    subject = build_ours(replace(TOY, document_mask=is_masked), CPU)
    assert subject.micro_step(x, y).item() == getattr(document_losses, loss)


@pytest.fixture(scope="module")
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return measuring.tokens_like_text(8, 32, 257, CPU)


def test_targets_are_the_next_tokens(tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = tokens
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_tokens_are_of_the_vocabulary(tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _ = tokens
    assert x.max() < 257


def test_tokens_differ_in_frequency_as_words_do(tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _ = tokens
    share_of_ninth = (x == 9).float().mean()
    assert share_of_ninth > 0
    assert (x == 0).float().mean() > share_of_ninth


KIND = "layers.*.attn.qkv.weight"  # of parameters, whose gradients are compared


@dataclass
class TwoSteps:
    """Of two optimizer steps of two micro-batches each."""

    losses: list[torch.Tensor]  # of each micro-batch, the mean per token
    norms: list[float]  # of each step's gradients of KIND
    parameters: dict[str, torch.Tensor]  # at the end


@pytest.fixture(scope="module")
def of_cell(tokens: tuple[torch.Tensor, torch.Tensor]) -> TwoSteps:
    x, y = tokens
    losses, norms = [], []
    with nothing_compiled():
        subject = build_ours(TOY, CPU)
        for _ in range(2):
            losses.append(subject.micro_step(x[:4], y[:4]))
            losses.append(subject.micro_step(x[4:], y[4:]))
            norms.append(measuring.gradient_norms(subject.model)[KIND])
            subject.update()
    return TwoSteps(losses, norms, dict(subject.model.named_parameters()))


@pytest.fixture(scope="module")
def of_plain_loop(tokens: tuple[torch.Tensor, torch.Tensor]) -> TwoSteps:
    x, y = tokens
    config = config_of(TOY)
    model = plain_model(config)
    adam = build_optimizer(model, config.optim)  # by tests/runtime/test_optim.py torch's own
    losses, norms = [], []
    for _ in range(2):
        for part in (slice(4), slice(4, 8)):
            share_of_step = model(x[part], y[part]).sum() / TOKENS
            share_of_step.backward()
            losses.append(share_of_step.detach() * 4)  # 128 of the step's 512 tokens
        gradients = [layer.attn.qkv.weight.grad for layer in model.layers]
        norms.append(torch.cat(gradients).norm().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    return TwoSteps(losses, norms, dict(model.named_parameters()))


def test_losses_of_micro_steps_are_those_of_a_plain_loop(
    of_cell: TwoSteps, of_plain_loop: TwoSteps
) -> None:
    losses = [loss.item() for loss in of_cell.losses]
    assert losses == pytest.approx([loss.item() for loss in of_plain_loop.losses])


def test_losses_of_micro_steps_are_detached(of_cell: TwoSteps) -> None:
    assert not any(loss.requires_grad for loss in of_cell.losses)


def test_gradient_norms_are_those_of_a_plain_loop(
    of_cell: TwoSteps, of_plain_loop: TwoSteps
) -> None:
    assert of_cell.norms == pytest.approx(of_plain_loop.norms)


def test_updates_are_those_of_a_plain_loop(of_cell: TwoSteps, of_plain_loop: TwoSteps) -> None:
    assert of_cell.parameters.keys() == of_plain_loop.parameters.keys()
    for name, p in of_cell.parameters.items():
        torch.testing.assert_close(
            p, of_plain_loop.parameters[name], rtol=1e-5, atol=1e-7, msg=name
        )


# ------------------------------------------------------------------------------ what is measured


def measure(cell: Cell) -> Measurement:
    with nothing_compiled(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(measuring.TIMED_S, "cpu", 0.01)
        return measure_cell(cell)


@pytest.fixture(scope="module")
def bf16_row() -> TimedRow:
    return judged(TOY, measure(TOY))


def test_a_measured_bf16_cell_is_valid(bf16_row: TimedRow) -> None:
    assert bf16_row.valid


def test_flops_are_those_that_the_model_counts(bf16_row: TimedRow) -> None:
    counts = GPT(config_of(TOY).model).counts()
    assert bf16_row.measured.flops_per_token == counts["flops_per_token"]


def test_two_steps_are_timed_at_least(bf16_row: TimedRow) -> None:
    assert len(bf16_row.measured.steps_s) >= 2


def test_speed_is_that_of_the_mean_step(bf16_row: TimedRow) -> None:
    steps_s = bf16_row.measured.steps_s
    assert bf16_row.tok_per_s == pytest.approx(512 / (sum(steps_s) / len(steps_s)))


def test_losses_of_eight_updates_are_kept(bf16_row: TimedRow) -> None:
    assert len(bf16_row.measured.losses) == 8


def test_the_first_loss_is_near_that_of_guessing(bf16_row: TimedRow) -> None:
    assert bf16_row.measured.losses[0] == pytest.approx(6.0, abs=0.5)


def test_gradients_of_every_kind_of_parameter_are_measured(bf16_row: TimedRow) -> None:
    """So that a lost one invalidates a row: test_what_makes_a_row_invalid()."""
    norms = bf16_row.measured.gradient_norms
    assert len(norms) == 8
    assert min(norms.values()) > 0


@pytest.fixture(scope="module", params=["tensorwise", "tensorwise+kernels"])
def fp8_row(request: pytest.FixtureRequest, bf16_row: TimedRow) -> TimedRow:
    cell = toy(request.param)
    return judged(cell, measure(cell), bf16_row)


def test_a_recipe_passes_the_verdict(fp8_row: TimedRow) -> None:
    assert fp8_row.valid, fp8_row.invalid_because


def test_a_recipes_losses_differ_a_little_from_bf16s(fp8_row: TimedRow, bf16_row: TimedRow) -> None:
    assert 0 < fp8_row.loss_difference < 0.05
    assert fp8_row.measured.losses != bf16_row.measured.losses


def test_a_recipe_that_converts_nothing_is_refused(eager: None) -> None:
    """It would be BF16 once more."""
    with pytest.raises(UserError, match="auto converts nothing"):
        build_ours(toy("auto"), CPU)


# --------------------------------------------------------------------------------------- verdicts


def falling_from(loss: float) -> list[float]:
    """Losses of an invented FP8 cell; BF16's begin at 5.0."""
    return [loss - i / 10 for i in range(20)]


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": falling_from(5.04)},
        {"gradient_norms": {"a": 1.14, "b": 0.0}},
        {"clocks": {"slowed_by": 4.0}},
    ],
)
def test_what_leaves_a_row_valid(changes: dict[str, Any]) -> None:
    row = judged(TENSORWISE, answer(**changes), judged(TOY, answer()))
    assert row.valid is True


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"losses": falling_from(5.06)}, "its loss is 0.060 away from BF16's, more than 0.057"),
        ({"losses": [5.0] * 20}, "does not fall"),
        ({"losses": [5.0] * 19 + [None]}, "not finite"),
        ({"gradient_norms": {"a": 0.84, "b": 0.0}}, "the gradient of a has a norm of 0.84"),
        ({"gradient_norms": {"a": 1.0}}, "the gradient of b has a norm of None"),
        ({"graph_breaks": 1}, "1 graph breaks"),
        ({"recompiles": 2}, "2 recompilations"),
        ({"clocks": {"slowed_by": 0x40}}, "slowed down"),
    ],
)
def test_what_makes_a_row_invalid(changes: dict[str, Any], reason: str) -> None:
    row = judged(TENSORWISE, answer(**changes), judged(TOY, answer()))
    assert row.valid is False
    assert reason in row.invalid_because


def test_a_row_whose_bf16_is_invalid_does_not_count() -> None:
    broken, sound = judged(TOY, answer(losses=[5.0] * 20)), judged(TOY, answer())
    row = compare_with_bf16(judged(TENSORWISE, answer(), broken), broken, sound)
    assert not row.valid
    assert "its BF16 is invalid" in row.invalid_because


CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
FLASH_2 = "flash_fwd_kernel"
FLASH_3 = "flash::FlashAttnFwdSm90"
REDUCTION = "triton_red_fused_scaled_dot_product_attention_0"


def bf16_on_gpu(kernel: str) -> TimedRow:
    """Whose longest kernel after the matmuls' is `kernel`."""
    kernels = [("nvjet", 2.0), (kernel, 1.0)]
    return judged(replace(TOY, device="cuda"), answer(kernels=kernels), gpu=H100)


@pytest.mark.parametrize(
    "kernel, is_valid", [(CUDNN, True), (FLASH_2, False), (FLASH_3, True), (REDUCTION, True)]
)
def test_a_slow_attention_on_a_gpu_is_no_evidence(kernel: str, is_valid: bool) -> None:
    assert bf16_on_gpu(kernel).valid is is_valid


@pytest.mark.parametrize(
    "kernel, attention",
    [(CUDNN, CUDNN), (FLASH_2, FLASH_2), (FLASH_3, FLASH_3), (REDUCTION, None)],
)
def test_a_row_names_its_attention_kernel(kernel: str, attention: str | None) -> None:
    assert bf16_on_gpu(kernel).attention_kernel == attention


def test_mfu_is_the_share_of_the_gpus_peak_in_bf16() -> None:
    row = judged(replace(TOY, device="cuda"), answer(), gpu=H100)
    assert row.mfu_bf16 == pytest.approx(row.tok_per_s * 10 / 989.4e12)


def test_a_cpu_has_no_mfu() -> None:
    assert judged(TOY, answer()).mfu_bf16 is None


def compared_across_a_drift(device: str) -> TimedRow:
    """An FP8 row between two of BF16 of which the second is faster by 4 %."""
    earlier, later = judged(TOY, answer(1000)), judged(TOY, answer(1040))
    row = judged(replace(TENSORWISE, device=device), answer(), earlier)
    return compare_with_bf16(row, earlier, later)


def test_a_drift_of_bf16_is_no_evidence_on_a_gpu() -> None:
    row = compared_across_a_drift("cuda")
    assert row.valid is False
    assert "drifted by +4.0%" in row.invalid_because


def test_a_drift_of_bf16_is_allowed_on_a_cpu() -> None:
    assert compared_across_a_drift("cpu").valid is True


@pytest.mark.parametrize("flops_per_token, ratio", [(10, 1.5), (5, 0.75)])
def test_speed_is_compared_per_flop(flops_per_token: int, ratio: float) -> None:
    """As of a peer's model with half the FLOPs a token."""
    earlier, later = judged(TOY, answer(1000)), judged(TOY, answer(1040))
    measured = answer(1530, flops_per_token=flops_per_token)
    row = compare_with_bf16(judged(TENSORWISE, measured, earlier), earlier, later)
    assert row.ratio == pytest.approx(ratio)


def test_a_compared_row_names_its_baseline() -> None:
    bf16 = judged(TOY, answer())
    row = compare_with_bf16(judged(TENSORWISE, answer(), bf16), bf16, bf16)
    assert row.baseline == "toy bf16"
    assert row.baseline_size == "toy"


@pytest.mark.parametrize(
    "exit_code, clocks", [(0, [1980.0, None, 61.0, 68.0]), (9, [None, None, None, None])]
)
def test_clocks_are_read_while_the_gpu_works(
    exit_code: int, clocks: list[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi takes longer than a step; where it fails, nothing is known."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/bash\nsleep 0.2; echo '1980, [N/A], 61, 0x0000000000000044'; exit {exit_code}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    steps = []

    def work() -> None:
        time.sleep(0.01)
        steps.append(1)

    texts = nvidia_smi(*measuring.CLOCKS.values(), work=work)
    assert [measuring.to_number(text) for text in texts] == clocks
    assert len(steps) > 5


# ------------------------------------------------------------------------------ turns and budget

Answer = Measurement | CellFailure | Callable[[Cell], Measurement | CellFailure]


@dataclass
class Turns:
    """What a Timer did with one group."""

    cells: list[tuple[str, int]]  # label and micro-batch of each that was run
    n_left: int
    rows: list[CellRow]

    @property
    def labels(self) -> list[str]:
        return [label for label, _ in self.cells]


def take_turns(
    out: Path,
    *,
    budget: float = 1e4,
    again: Sequence[str] = (),
    group: Sequence[Cell] = (TOY, TENSORWISE, ROWWISE),
    slow: str | None = None,
    **answers: list[Answer],
) -> Turns:
    """Time a group with invented cells, which take 20 s each; that of label `slow` takes 1,000 s.
    answers: by label, one after the other, the last one again and again."""
    seconds = 0.0
    cells = []
    left = {label: list(answers_of_label) for label, answers_of_label in answers.items()}

    def run_invented(cell: Cell, log: Path, limit_s: float) -> Measurement | CellFailure:
        nonlocal seconds
        cells.append((cell.label, cell.micro_batch))
        answers_of_cell = left.get(cell.label, [answer()])
        next_answer = answers_of_cell[0]
        if len(answers_of_cell) > 1:
            del answers_of_cell[0]
        seconds += min(1e3 if cell.label == slow else 20.0, limit_s)
        if callable(next_answer):
            return next_answer(cell)
        if limit_s < 20:
            return CellFailure(failure="not done")
        return next_answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "monotonic", lambda: seconds)
        patch.setattr(timing, "run_cell", run_invented)
        timer = Timer(out, "cpu", budget, "the command", again=again)
        timer.run([list(group)])
        return Turns(cells, len(timer.due(list(group))), rows_of(out))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def timed(rows: list[CellRow]) -> list[TimedRow]:
    return [row for row in rows if isinstance(row, TimedRow)]


def compared(rows: list[CellRow]) -> list[TimedRow]:
    return [row for row in timed(rows) if row.ratio]


@dataclass
class Interrupted:
    """A call that Ctrl-C ended in its third cell, and the next call."""

    out: Path
    rows_at_interrupt: list[CellRow]
    next_call: Turns

    @property
    def by_label(self) -> dict[str, TimedRow]:
        return {row.cell.label: row for row in report.newest(self.next_call.rows).values()}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    out = tmp_path_factory.mktemp("turns") / "rows.jsonl"
    rows_at_interrupt = []

    def interrupt(cell: Cell) -> Measurement:
        rows_at_interrupt.extend(rows_of(out))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_turns(out, rowwise=[interrupt])
    next_call = take_turns(
        out,
        group=(TOY, TENSORWISE, ROWWISE, toy("cscale"), toy("amax"), toy("mxfp8")),
        bf16=[answer(1000), answer(1020), answer(1060)],
        tensorwise=[answer(1212)],
        rowwise=[answer(505)],
        mxfp8=[answer(1144)],
    )
    return Interrupted(out, rows_at_interrupt, next_call)


def test_a_row_is_on_disk_as_soon_as_its_cell_ends(interrupted: Interrupted) -> None:
    """Before it is compared."""
    bf16, tensorwise = interrupted.rows_at_interrupt
    assert bf16.cell.label == "bf16"
    assert tensorwise.cell.label == "tensorwise"
    assert tensorwise.ratio is None


def test_up_to_four_cells_in_fp8_run_between_two_of_bf16(interrupted: Interrupted) -> None:
    """tensorwise once more, which was not compared."""
    between = ["tensorwise", "rowwise", "cscale", "amax"]
    assert interrupted.next_call.labels == ["bf16", *between, "bf16", "mxfp8", "bf16"]


@pytest.mark.parametrize("label, ratio", [("tensorwise", 1.2), ("rowwise", 0.5), ("mxfp8", 1.1)])
def test_a_ratio_is_to_the_mean_of_bf16_before_and_after(
    label: str, ratio: float, interrupted: Interrupted
) -> None:
    assert interrupted.by_label[label].ratio == pytest.approx(ratio)


def test_a_row_has_the_drift_of_bf16_around_it(interrupted: Interrupted) -> None:
    assert interrupted.by_label["rowwise"].drift == pytest.approx(0.02)


def test_a_row_has_the_baseline_that_was_run_around_it(interrupted: Interrupted) -> None:
    assert interrupted.by_label["rowwise"].baseline == "toy bf16"


def test_when_all_is_timed_none_is_left(interrupted: Interrupted) -> None:
    assert interrupted.next_call.n_left == 0


@pytest.fixture(scope="module")
def provenance(interrupted: Interrupted) -> Provenance:
    return interrupted.by_label["bf16"].provenance


def test_a_row_has_the_version_of_torch(provenance: Provenance) -> None:
    assert provenance.torch == torch.__version__


def test_a_row_has_the_command(provenance: Provenance) -> None:
    assert provenance.command == "the command"


def test_a_row_of_a_cpu_has_no_gpu(provenance: Provenance) -> None:
    assert provenance.gpu is None


def test_a_row_has_the_whole_commit(provenance: Provenance) -> None:
    assert len(provenance.commit) == 40


def test_a_row_has_the_seconds_of_its_cell(interrupted: Interrupted) -> None:
    assert interrupted.by_label["bf16"].wall_s == 20


@pytest.fixture
def all_timed(interrupted: Interrupted, out: Path) -> Path:
    """A file in which every cell has a row."""
    out.write_bytes(interrupted.out.read_bytes())
    return out


def test_what_has_a_row_is_not_timed_again(all_timed: Path) -> None:
    assert take_turns(all_timed).labels == []


def test_what_is_asked_for_is_timed_again(all_timed: Path) -> None:
    assert take_turns(all_timed, again=("toy/rowwise",)).labels == ["bf16", "rowwise", "bf16"]


def test_rows_of_another_torch_do_not_count(
    all_timed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert len(take_turns(all_timed).cells) == 4


@dataclass
class WithFailure:
    out: Path
    turns: Turns


@pytest.fixture(scope="module")
def with_failure(tmp_path_factory: pytest.TempPathFactory) -> WithFailure:
    """A call whose tensorwise cell fails, not for want of memory."""
    out = tmp_path_factory.mktemp("with_failure") / "rows.jsonl"
    failure = CellFailure(failure="exit code -11", oom=False)
    return WithFailure(out, take_turns(out, tensorwise=[failure]))


def test_after_a_failure_the_next_cells_are_timed(with_failure: WithFailure) -> None:
    assert with_failure.turns.labels == ["bf16", "tensorwise", "rowwise", "bf16"]
    assert with_failure.turns.rows[-1].ratio == pytest.approx(1.0)


def test_a_failure_is_a_row(with_failure: WithFailure) -> None:
    failed_rows = [row for row in with_failure.turns.rows if isinstance(row, FailedRow)]
    assert [row.failure.failure for row in failed_rows] == ["exit code -11"]


def test_the_page_names_a_failure(with_failure: WithFailure) -> None:
    page = rows_page(with_failure.turns.rows)
    assert "- not counted: toy/tensorwise: exit code -11" in page


def test_a_cell_that_failed_is_not_due(with_failure: WithFailure) -> None:
    assert with_failure.turns.n_left == 0


def test_a_cell_that_failed_is_not_run_by_the_next_call(with_failure: WithFailure) -> None:
    assert take_turns(with_failure.out).labels == []


def full_above_two(cell: Cell) -> Measurement | CellFailure:
    """A GPU whose memory holds two sequences."""
    if cell.micro_batch > 2:
        return CellFailure(failure="OutOfMemoryError: CUDA out of memory", oom=True)
    return answer()


def test_bf16_without_memory_is_repeated_at_half_the_batch(out: Path) -> None:
    turns = take_turns(out, bf16=[full_above_two])
    repeated = [("bf16", 2), ("tensorwise", 2), ("rowwise", 2), ("bf16", 2)]
    assert turns.cells == [("bf16", 4), *repeated]
    assert {row.cell.micro_batch for row in compared(turns.rows)} == {2}


def test_where_bf16_fails_otherwise_its_group_is_left(out: Path) -> None:
    turns = take_turns(out, bf16=[CellFailure(failure="broken")])
    assert turns.cells == [("bf16", 4)]
    assert turns.n_left == 2


def test_nothing_begins_that_may_not_fit(out: Path) -> None:
    """Three cells, thought to take 60 s and a tenth each."""
    turns = take_turns(out, budget=190)
    assert turns.cells == []
    assert turns.n_left == 2


def test_a_cell_is_thought_to_take_as_long_as_others_of_its_size_took(out: Path) -> None:
    """20 s, as is seen after the first."""
    turns = take_turns(out, budget=200)
    assert turns.labels == ["bf16", "tensorwise", "rowwise", "bf16"]
    assert turns.n_left == 0


@pytest.fixture(scope="module")
def rows_of_5_s(tmp_path_factory: pytest.TempPathFactory) -> list[CellRow]:
    """Of BF16 and of tensorwise, which is not compared yet: by these a cell takes 5 s."""
    turns = take_turns(tmp_path_factory.mktemp("turns") / "rows.jsonl", budget=200)
    return [replace(row, wall_s=5.0) for row in turns.rows[:2]]


@pytest.mark.parametrize(
    "budget, labels, n_left, n_rows",
    [
        (80, ["bf16", "tensorwise", "bf16"], 1, 6),
        # the BF16 that closes has its time before a cell begins
        (45, ["bf16"], 2, 3),
        # BF16 itself is cut, and is no row
        (18, ["bf16"], 2, 2),
    ],
)
def test_cells_that_take_longer_than_thought_end_with_the_budget(
    budget: float,
    labels: list[str],
    n_left: int,
    n_rows: int,
    rows_of_5_s: list[CellRow],
    out: Path,
) -> None:
    write_rows(out, rows_of_5_s)
    turns = take_turns(out, budget=budget)
    assert turns.labels == labels
    assert turns.n_left == n_left
    assert len(turns.rows) == n_rows


def take_turns_with_an_overrun(out: Path) -> Turns:
    """rowwise takes 1,000 s or as long as it may."""

    def overrun(cell: Cell) -> CellFailure:
        return CellFailure(failure="not done")

    return take_turns(out, budget=300, rowwise=[overrun], slow="rowwise")


@pytest.fixture
def cut_by_the_budget(out: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(timing, "CELL_LIMIT_S", 420)
    return take_turns_with_an_overrun(out)


@pytest.fixture
def cut_by_the_limit_of_a_cell(out: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    """After a call that timed tensorwise, and that the budget ended in rowwise."""
    take_turns_with_an_overrun(out)
    monkeypatch.setattr(timing, "CELL_LIMIT_S", 100)
    return take_turns_with_an_overrun(out)


def test_a_cell_that_overruns_leaves_time_for_bf16(cut_by_the_budget: Turns) -> None:
    assert cut_by_the_budget.labels == ["bf16", "tensorwise", "rowwise", "bf16"]


def test_a_cell_that_overruns_costs_its_own_row_alone(cut_by_the_budget: Turns) -> None:
    assert [row.cell.name for row in compared(cut_by_the_budget.rows)] == ["toy/tensorwise"]


def test_a_cell_that_the_budget_cut_is_no_row_and_left(cut_by_the_budget: Turns) -> None:
    assert len(timed(cut_by_the_budget.rows)) == len(cut_by_the_budget.rows)
    assert cut_by_the_budget.n_left == 1


def test_a_cell_that_the_budget_cut_is_tried_again(cut_by_the_limit_of_a_cell: Turns) -> None:
    assert cut_by_the_limit_of_a_cell.labels == ["bf16", "rowwise"]


def test_a_cell_that_overruns_costs_no_row_of_an_earlier_call(
    cut_by_the_limit_of_a_cell: Turns,
) -> None:
    names = [row.cell.name for row in compared(cut_by_the_limit_of_a_cell.rows)]
    assert names == ["toy/tensorwise"]


def test_a_cell_cut_at_the_limit_of_a_cell_is_a_failure_and_not_left(
    cut_by_the_limit_of_a_cell: Turns,
) -> None:
    rows = cut_by_the_limit_of_a_cell.rows
    assert len(timed(rows)) < len(rows)
    assert cut_by_the_limit_of_a_cell.n_left == 0


# --------------------------------------------------------------------------------- cells' processes


@dataclass
class Processes:
    """Answers of a cell as a process and of one whose model has an unknown key; their log."""

    sound: Measurement | CellFailure
    wrong: Measurement | CellFailure
    log: str


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    log = tmp_path_factory.mktemp("processes") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        sound = run_cell(TOY, log, 200)
        wrong = run_cell(toy("bf16", model={"n_layers": 2}), log, 200)
    return Processes(sound, wrong, log.read_text())


def test_a_cell_is_measured_in_a_process(processes: Processes) -> None:
    assert judged(TOY, processes.sound).valid
    assert processes.sound.graph_breaks == 0


def test_a_process_on_a_cpu_has_no_kernels(processes: Processes) -> None:
    assert processes.sound.kernels is None


def test_a_process_that_fails_says_why(processes: Processes) -> None:
    expected = "UserError: there is no key 'model.n_layers'"
    assert processes.wrong.failure.startswith(expected)


def test_a_users_mistake_is_not_taken_for_want_of_memory(processes: Processes) -> None:
    assert not processes.wrong.oom


@pytest.mark.parametrize("words", ["fp8: 0 of 9 Linears", "Traceback"])
def test_what_processes_print_is_in_the_log(words: str, processes: Processes) -> None:
    assert words in processes.log


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import time; time.sleep(60)", "not done after 1 s"),
        ("import os; os.abort()", "exit code -6 without an answer"),
    ],
)
def test_a_process_that_hangs_or_crashes_is_a_failure_and_leaves_nothing(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Other(subprocess.Popen):
        """A process of this code in place of a cell's."""

        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", code], **options)
            started.append(self)

    monkeypatch.setattr(timing.subprocess, "Popen", Other)
    assert reason in run_cell(TOY, tmp_path / "log", 1.0).failure
    assert started[0].poll() is not None


def cells_of(pid: int) -> list[int]:
    """The children of a process that time a cell."""
    return [child for child in children(pid) if b"--cell" in command_line(child)]


def test_a_cell_dies_with_who_asked_for_it(tmp_path: Path) -> None:
    """Else it would share the GPU with the next call's cells."""
    words = ["-m", "bench.throughput", "--suite", "toy", f"out={tmp_path / 'toy.jsonl'}"]
    parent = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    cell = wait_for(lambda: cells_of(parent.pid))[0]
    parent.kill()
    parent.wait()
    wait_for(lambda: not command_line(cell), 10)


# --------------------------------------------------------------------------- the page, the figure


def compared_rows(
    gpu: str | None = H100, tensorwise: float = 1.2, rowwise: float = 0.9
) -> list[TimedRow]:
    """Rows of two sizes, FP8 that many times as fast as BF16."""
    rows = []
    for size, tok_per_s in (("125m", 500e3), ("1p5b", 50e3)):
        bf16 = judged(replace(TOY, size=size), answer(tok_per_s), gpu=gpu)
        rows.append(bf16)
        for label, ratio in (("tensorwise", tensorwise), ("rowwise", rowwise)):
            row = judged(toy(label, size=size), answer(tok_per_s * ratio), bf16, gpu=gpu)
            rows.append(compare_with_bf16(row, bf16, bf16))
    return rows


def with_cell(row: TimedRow, **changes: Any) -> TimedRow:
    return replace(row, cell=replace(row.cell, **changes))


def write_rows(path: Path, rows: list[CellRow]) -> None:
    path.write_bytes(b"".join(map(row_line, rows)))


@pytest.fixture
def rows_of_two_machines() -> list[TimedRow]:
    """An H100's, timed twice, and a CPU's, whose last row is invalid."""
    rows = [*compared_rows(tensorwise=1.1), *compared_rows(), *compared_rows(gpu=None)]
    rows[-1] = replace(rows[-1], valid=False, invalid_because="too hot")
    return rows


@dataclass
class Page:
    of_gpu: str
    of_cpu: str


@pytest.fixture
def page(rows_of_two_machines: list[TimedRow]) -> Page:
    return Page(*rows_page(rows_of_two_machines).split("## No GPU"))


def test_the_table_has_each_sizes_precisions_after_its_bf16(page: Page) -> None:
    assert re.findall(r"^\| (1\w+) +\| (\w+)", page.of_gpu, re.M) == [
        ("125m", "bf16"),
        ("125m", "tensorwise"),
        ("125m", "rowwise"),
        ("1p5b", "bf16"),
        ("1p5b", "tensorwise"),
        ("1p5b", "rowwise"),
    ]


@pytest.mark.parametrize("cell", ["600,000", " 1.200 "])
def test_the_table_has_the_newest_speeds_and_ratios(cell: str, page: Page) -> None:
    assert cell in page.of_gpu


def test_the_table_has_no_older_ratio(page: Page) -> None:
    assert "1.100" not in page.of_gpu


def test_the_page_names_the_commit(page: Page) -> None:
    assert "commit 0123456789 with changes" in page.of_gpu


def test_the_page_says_why_a_row_does_not_count(page: Page) -> None:
    assert "- not counted: 1p5b/rowwise: too hot" in page.of_cpu


def test_a_figure_is_drawn_of_valid_rows(
    rows_of_two_machines: list[TimedRow], tmp_path: Path
) -> None:
    report.draw_ratios(rows_of_two_machines, tmp_path / "figure")
    assert (tmp_path / "figure").read_bytes()[:4] == b"\x89PNG"


def test_no_figure_is_drawn_of_invalid_rows_alone(
    rows_of_two_machines: list[TimedRow], tmp_path: Path
) -> None:
    report.draw_ratios(rows_of_two_machines[-1:], tmp_path / "figure")
    assert not list(tmp_path.iterdir())


def test_no_figure_is_drawn_of_no_rows(tmp_path: Path) -> None:
    report.draw_ratios([], tmp_path / "figure")
    assert not list(tmp_path.iterdir())


def test_a_page_of_no_rows_says_so() -> None:
    assert rows_page([]) == "Nothing has been measured."


@pytest.mark.parametrize(
    "label, words",
    [
        ("bf16", "BF16"),
        ("tensorwise", "tensorwise, torchao"),
        ("tensorwise+kernels+delayed+head", "tensorwise, our kernels, delayed scales, head too"),
        ("mxfp8", "mxfp8"),
        ("tensorwise+kernels+bounded", "tensorwise, our kernels, bounded scales"),
    ],
)
def test_a_figure_calls_a_precision_by_words(label: str, words: str) -> None:
    assert report.precision_in_words(toy(label)) == words


def test_a_figure_names_the_document_mask() -> None:
    assert report.precision_in_words(replace(TOY, document_mask=True)) == "BF16, document mask"


@pytest.mark.parametrize(
    "name, precision, words", [("nanogpt", None, "nanoGPT"), ("nanochat", "fp8", "nanochat, FP8")]
)
def test_a_figure_calls_a_peer_by_its_name(name: str, precision: str | None, words: str) -> None:
    cell = replace(TOY, peer="/x", peer_name=name, peer_precision=precision)
    assert report.precision_in_words(cell) == words


def test_a_figure_calls_sizes_by_their_parameters() -> None:
    sizes = ("125m", "1p5b", "nanochat_d12")
    assert [report.size_name(size) for size in sizes] == ["125M", "1.5B", "nanochat_d12"]


@dataclass
class BesidePeers:
    """A file of bench.peers, and our rows in it."""

    path: Path
    ours: list[TimedRow]


@pytest.fixture
def beside_peers(tmp_path: Path) -> BesidePeers:
    *ours, of_peer, at_dimensions_of_peer = compared_rows()
    ours = [with_cell(row, model={}) for row in ours]
    of_peer = with_cell(of_peer, model={}, peer="/nanoGPT", peer_name="nanogpt")
    at_dimensions_of_peer = with_cell(at_dimensions_of_peer, model={"n_layer": 12})
    path = tmp_path / "h100_peers.jsonl"
    write_rows(path, [*ours, of_peer, at_dimensions_of_peer])
    return BesidePeers(path, ours)


def test_a_figure_has_the_sizes_that_were_timed_beside_other_code_bases(
    beside_peers: BesidePeers,
) -> None:
    """But neither the other code bases nor our model at their dimensions."""
    rows = report.rows_beside_peers(beside_peers.path.with_name("h100.jsonl"))
    assert rows == beside_peers.ours


def test_a_figure_of_peers_has_its_own_rows_once(beside_peers: BesidePeers) -> None:
    assert report.rows_beside_peers(beside_peers.path) == []


# ------------------------------------------------------------------------- --check, the command


def test_equal_rows_have_lost_nothing() -> None:
    assert regressions(compared_rows(), compared_rows()) == []


def test_a_gain_and_a_loss_within_the_noise_are_no_regressions() -> None:
    assert regressions(compared_rows(), compared_rows(tensorwise=1.17, rowwise=1.2)) == []


def test_a_lost_ratio_is_a_regression() -> None:
    (line,) = regressions(compared_rows(), compared_rows(tensorwise=1.15)[:3])
    assert "1.200 before, 1.150 now (-4.2%)" in line


def test_without_a_ratio_in_both_files_a_check_fails() -> None:
    (line,) = regressions(compared_rows(), compared_rows(gpu="H200"))
    assert "no ratio is in both" in line


def test_a_row_that_is_no_longer_valid_is_a_regression() -> None:
    rows = compared_rows()
    hot = replace(rows[1], valid=False, invalid_because="hot")
    (line,) = regressions(rows, [hot])
    assert "valid before, now hot" in line


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """command(*words, code=): what bench.throughput prints on a machine without a GPU, in a folder
    with old.jsonl, which is `out`, and new.jsonl, which is slower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_rows(tmp_path / "old.jsonl", compared_rows())
    write_rows(tmp_path / "new.jsonl", compared_rows(tensorwise=1.0))

    def call(*words: str, out: str = "old.jsonl", code: int = 0) -> str:
        return asked(capsys, throughput.main, f"out={out}", *words, code=code)

    return call


def test_a_check_that_finds_nothing_has_exit_code_0(command: Callable[..., str]) -> None:
    assert "has lost nothing" in command("check=old.jsonl", code=0)


def test_a_check_that_finds_a_loss_has_exit_code_1(command: Callable[..., str]) -> None:
    assert "1.200 before, 1.000 now" in command("--check", "new.jsonl", code=1)


def test_a_table_is_printed_and_a_figure_drawn(command: Callable[..., str], tmp_path: Path) -> None:
    assert "## NVIDIA H100" in command("--table", code=0)
    assert (tmp_path / "old.png").exists()


def test_a_table_of_a_file_that_is_not_there_is_refused(command: Callable[..., str]) -> None:
    command("--table", out="absent.jsonl", code=2)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs a CUDA GPU"),
        (["suite=a100"], "suite"),
        (["cells=125m/tensorwize"], "did you mean '125m/tensorwise'"),
        (["budgets=3"], "budget"),
        (["cells=125m/rowwise"], "needs a CUDA GPU"),
    ],
)
def test_a_wrong_command_gets_a_sentence(
    words: list[str], message: str, command: Callable[..., str]
) -> None:
    sentence = command(*words, code=2)
    assert message in sentence
    assert sentence.count("\n") == 1


def test_a_budget_that_is_too_small_is_said(command: Callable[..., str]) -> None:
    page = command("suite=toy", "budget=0", out="none.jsonl", code=3)
    assert "2 cells are left, none fits: give budget=209 or more" in page
