"""bench/throughput.py: a cell trains what train.py trains; turns, verdicts and budget against
invented cells; rows on disk."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

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
from bench.rows import CellFailure, CellRow, FailedRow, TimedRow, row_line, rows_of
from bench.timing import Timer, run_cell
from lib.errors import UserError
from lib.files import read_bytes
from lib.machine import nvidia_smi
from model import GPT
from runtime import parallel
from runtime.config import load_config
from runtime.optim import build_optimizer
from tests.conftest import ROOT, asked
from tests.helpers.bench_rows import TOKENS, answer, judged
from tests.helpers.faults import children, wait_for

TOY = our_cell(
    "toy",
    "bf16",
    4,
    T=32,
    tokens_per_step=TOKENS,
    device="cpu",
    model={"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 128, "vocab_size": 257},
)


def toy(label: str, **changes) -> Cell:
    return replace(TOY, fp8=precision_named(label), **changes)


TENSORWISE, ROWWISE = toy("tensorwise"), toy("rowwise")
MORE = (toy("cscale"), toy("amax"), toy("mxfp8"))
CPU = torch.device("cpu")


def test_a_cells_config_is_train_pys():
    ours, config = (
        load_config(ROOT / "configs/gpt125m_bf16.py"),
        config_of(our_cell("125m", "tensorwise+kernels+head", 64)),
    )
    assert config.model == replace(ours.model, n_ctx=1024) and config.optim == ours.optim
    assert config.parallel == replace(ours.parallel, compile="block")
    assert (config.fp8.recipe, config.fp8.kernels, config.fp8.head) == ("tensorwise", True, True)
    assert (config.data.micro_batch, config.data.tokens_per_step) == (64, 524_288)
    assert config_of(replace(TOY, model={"tied": False, "n_embd": 128})).model.tied is False
    for groups in map(groups_of, ("h100", "toy")):
        names = [cell.name for _, *members in groups for cell in members]
        assert len(set(names)) == len(names)
        assert all(
            (config_of(cell).fp8.recipe == "off") == (cell is group[0])
            for group in groups
            for cell in group
        )


eager = pytest.fixture(
    lambda monkeypatch: monkeypatch.setattr(parallel, "compile_model", lambda *_, **__: None)
)


def test_the_suite_of_documents_holds_the_mask_against_bf16_without_it():
    for baseline, masked in (*groups_of("documents"), *groups_of("documents-toy")):
        assert config_of(baseline).data.document_mask is False
        assert config_of(masked).data.document_mask is True
        assert replace(masked, document_mask=False) == baseline
        assert masked.label == "bf16+documents"
        assert config_of(masked).fp8.recipe == "off"


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_cell_of_documents_trains_with_the_mask(is_masked, eager):
    cell = replace(TOY, document_mask=is_masked)
    x, y = measuring.tokens_like_text(4, 32, 257, CPU)
    model = GPT(config_of(cell).model, torch.bfloat16)
    model.init_weights(config_of(cell).seed)
    numbers = document_numbers(4, 32)
    assert 4 < sum(len(row.unique()) for row in numbers) < 24, "16 tokens each, on average"
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    with torch.no_grad():
        plain = model(x, y).sum().item() / 128
        masked = model(x, y, mask=same.tril()).sum().item() / 128
    assert masked != plain
    assert build_ours(cell, CPU).micro_step(x, y).item() == (masked if is_masked else plain)


def test_a_step_is_that_of_a_plain_training_loop(eager):
    subject, config = build_ours(TOY, CPU), config_of(TOY)
    model = GPT(config.model, torch.bfloat16)
    model.init_weights(config.seed)
    adam = build_optimizer(model, config.optim)  # by tests/runtime/test_optim.py torch's own
    x, y = measuring.tokens_like_text(8, 32, 257, CPU)
    assert (
        torch.equal(x[:, 1:], y[:, :-1])
        and x.max() < 257
        and (x == 0).float().mean() > (x == 9).float().mean() > 0
    )
    for _ in range(2):
        for part in (slice(4), slice(4, 8)):
            loss = subject.micro_step(x[part], y[part])
            mean = model(x[part], y[part]).sum() / 512
            mean.backward()
            assert loss.item() == pytest.approx(mean.item() * 4) and not loss.requires_grad
        assert measuring.gradient_norms(subject.model)["layers.*.attn.qkv.weight"] == pytest.approx(
            torch.cat([layer.attn.qkv.weight.grad for layer in model.layers]).norm().item()
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        subject.update()
    for (name, p), q in zip(subject.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_every_recipe_passes_the_verdict(eager, monkeypatch: pytest.MonkeyPatch):
    """And one that loses a gradient does not: test_what_makes_a_row_invalid(), as every kind of
    parameter's is measured."""
    monkeypatch.setitem(measuring.TIMED_S, "cpu", 0.01)
    base = judged(TOY, measure_cell(TOY))
    assert base.valid
    measured = base.measured
    assert measured.flops_per_token == GPT(config_of(TOY).model).counts()["flops_per_token"]
    assert len(measured.steps_s) >= 2
    step_s = sum(measured.steps_s) / len(measured.steps_s)
    assert base.tok_per_s == pytest.approx(512 / step_s)
    assert measured.losses[0] == pytest.approx(6.0, abs=0.5) and len(measured.losses) == 8
    norms = measured.gradient_norms
    assert len(norms) == 8 and min(norms.values()) > 0
    for cell in (TENSORWISE, toy("tensorwise+kernels")):
        row = judged(cell, measure_cell(cell), base)
        assert row.valid, row.invalid_because
        assert 0 < row.loss_difference < 0.05 and row.measured.losses != measured.losses
    with pytest.raises(UserError, match="auto converts nothing"):  # it would be BF16 once more
        build_ours(toy("auto"), CPU)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"losses": [5.04 - i / 10 for i in range(20)]}, None),
        ({"gradient_norms": {"a": 1.14, "b": 0.0}}, None),
        (
            {"losses": [5.06 - i / 10 for i in range(20)]},
            "its loss is 0.060 away from BF16's, more than 0.057",
        ),
        ({"losses": [5.0] * 20}, "does not fall"),
        ({"losses": [5.0] * 19 + [None]}, "not finite"),
        ({"gradient_norms": {"a": 0.84, "b": 0.0}}, "the gradient of a has a norm of 0.84"),
        ({"gradient_norms": {"a": 1.0}}, "the gradient of b has a norm of None"),
        ({"graph_breaks": 1}, "1 graph breaks"),
        ({"recompiles": 2}, "2 recompilations"),
        ({"clocks": {"slowed_by": 4.0}}, None),
        ({"clocks": {"slowed_by": 0x40}}, "slowed down"),
    ],
)
def test_what_makes_a_row_invalid(changes, why):
    row = judged(TENSORWISE, answer(**changes), judged(TOY, answer()))
    assert row.valid is (why is None) and (why is None or why in row.invalid_because)


def test_a_row_whose_bf16_is_invalid_does_not_count():
    broken, sound = judged(TOY, answer(losses=[5.0] * 20)), judged(TOY, answer())
    row = compare_with_bf16(judged(TENSORWISE, answer(), broken), broken, sound)
    assert not row.valid and "its BF16 is invalid" in row.invalid_because


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "kernel, is_fit, is_attention",
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", True, True),
        ("flash_fwd_kernel", False, True),
        ("flash::FlashAttnFwdSm90", True, True),
        ("triton_red_fused_scaled_dot_product_attention_0", True, False),
    ],
)
def test_a_slow_attention_on_a_gpu_is_no_evidence(kernel, is_fit, is_attention):
    kernels = [("nvjet", 2.0), (kernel, 1.0)]
    row = judged(replace(TOY, device="cuda"), answer(kernels=kernels), gpu=H100)
    assert row.valid is is_fit
    assert row.attention_kernel == (kernel if is_attention else None)


def test_mfu_is_the_share_of_the_gpus_peak_in_bf16():
    row = judged(replace(TOY, device="cuda"), answer(), gpu=H100)
    assert row.mfu_bf16 == pytest.approx(row.tok_per_s * 10 / 989.4e12)
    assert judged(TOY, answer()).mfu_bf16 is None


@pytest.mark.parametrize("device, is_valid", [("cpu", True), ("cuda", False)])
def test_a_drift_of_bf16_is_no_evidence_on_a_gpu(device, is_valid):
    earlier, later = judged(TOY, answer(1000)), judged(TOY, answer(1040))
    row = compare_with_bf16(
        judged(replace(TENSORWISE, device=device), answer(), earlier), earlier, later
    )
    assert row.valid is is_valid
    assert is_valid or "drifted by +4.0%" in row.invalid_because


@pytest.mark.parametrize("flops_per_token, ratio", [(10, 1.5), (5, 0.75)])
def test_speed_is_compared_per_flop(flops_per_token, ratio):
    """As of a peer's model with half the FLOPs a token."""
    earlier, later = judged(TOY, answer(1000)), judged(TOY, answer(1040))
    measured = answer(1530, flops_per_token=flops_per_token)
    row = compare_with_bf16(judged(TENSORWISE, measured, earlier), earlier, later)
    assert row.ratio == pytest.approx(ratio)
    assert (row.baseline, row.baseline_size) == ("toy bf16", "toy")


def test_clocks_are_those_of_a_gpu_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for code, told in ((0, [1980.0, None, 61.0, 68.0]), (9, [None] * 4)):
        (tmp_path / "nvidia-smi").write_text(
            f"#!/bin/bash\nsleep 0.2; echo '1980, [N/A], 61, 0x0000000000000044'; exit {code}\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        steps = []
        found = nvidia_smi(
            *measuring.CLOCKS.values(), work=lambda steps=steps: steps.append(time.sleep(0.01))
        )
        assert list(map(measuring.to_number, found)) == told and len(steps) > 5


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """run(script, ..) times a group with invented cells, 20 s each but for `slow`; script: label ->
    answers in turn, the last one again and again. Returns the cells that were run, what is left,
    and the rows."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])

    def run(
        budget: float = 1e4,
        again=(),
        out=tmp_path / "rows.jsonl",
        group=(TOY, TENSORWISE, ROWWISE),
        slow=None,
        **script: object,
    ):
        asked = []

        def fake(cell, log, limit_s):
            asked.append((cell.label, cell.micro_batch))
            answers = script.get(cell.label, [answer()])
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            now[0] += min(1e3 if cell.label == slow else 20.0, limit_s)
            return (
                found(cell)
                if callable(found)
                else found
                if limit_s >= 20
                else CellFailure(failure="not done")
            )

        monkeypatch.setattr(timing, "run_cell", fake)
        timer = Timer(out, "cpu", budget, "the command", again=again)
        timer.run([group])
        return asked, len(timer.due(group)), rows_of(out)

    return run


def test_fp8_runs_between_turns_of_bf16_and_is_not_timed_twice(
    turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def looks(cell):
        rows = rows_of(tmp_path / "rows.jsonl")
        assert [row.cell.label for row in rows] == ["bf16", "tensorwise"]
        assert rows[1].ratio is None, "on disk at once"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns(rowwise=[looks])
    asked, left, rows = turns(
        group=(TOY, TENSORWISE, ROWWISE, *MORE),
        bf16=[answer(1000), answer(1020), answer(1060)],
        tensorwise=[answer(1212)],
        rowwise=[answer(505)],
        mxfp8=[answer(1144)],
    )
    assert [label for label, _ in asked] == [
        "bf16",
        "tensorwise",
        "rowwise",
        "cscale",
        "amax",
        "bf16",
        "mxfp8",
        "bf16",
    ]
    by_label = {row.cell.label: row for row in report.newest(rows).values()}
    ratios = [by_label[label].ratio for label in ("tensorwise", "rowwise", "mxfp8")]
    assert ratios == pytest.approx([1.2, 0.5, 1.1])
    assert by_label["rowwise"].drift == pytest.approx(0.02)
    assert by_label["rowwise"].baseline == "toy bf16" and left == 0
    bf16, call = by_label["bf16"], by_label["bf16"].provenance
    assert (call.torch, call.command, call.gpu) == (torch.__version__, "the command", None)
    assert len(call.commit) == 40 and bf16.wall_s == 20
    assert turns()[0] == [] and [label for label, _ in turns(again=("toy/rowwise",))[0]] == [
        "bf16",
        "rowwise",
        "bf16",
    ]
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert len(turns()[0]) == 4, "rows of another torch do not count"


def test_a_failure_costs_its_row_and_bf16_halves_a_batch_without_memory(turns, tmp_path):
    asked, left, rows = turns(tensorwise=[CellFailure(failure="exit code -11", oom=False)])
    assert [label for label, _ in asked] == ["bf16", "tensorwise", "rowwise", "bf16"] and left == 0
    failures = [row.failure.failure for row in rows if isinstance(row, FailedRow)]
    assert failures == ["exit code -11"] and rows[-1].ratio == pytest.approx(1.0)
    assert "- not counted: toy/tensorwise: exit code -11" in rows_page(rows) and turns()[0] == []
    full = CellFailure(failure="OutOfMemoryError: CUDA out of memory", oom=True)
    asked, _, rows = turns(
        bf16=[lambda cell: full if cell.micro_batch == 4 else answer()], out=tmp_path / "b.jsonl"
    )
    assert asked == [("bf16", 4), ("bf16", 2), ("tensorwise", 2), ("rowwise", 2), ("bf16", 2)]
    assert {row.cell.micro_batch for row in timed(rows) if row.ratio} == {2}
    assert turns(bf16=[CellFailure(failure="broken")], out=tmp_path / "c.jsonl")[:2] == (
        [("bf16", 4)],
        2,
    )


def test_nothing_begins_that_does_not_fit_and_a_cut_cell_is_no_row(turns, tmp_path: Path):
    assert turns(budget=190)[:2] == ([], 2), "three cells of 60 s and a tenth"
    asked, left, rows = turns(budget=200)
    assert [label for label, _ in asked] == [
        "bf16",
        "tensorwise",
        "rowwise",
        "bf16",
    ] and left == 0, "20 s each, as is seen then"
    short = b"".join(row_line(replace(row, wall_s=5.0)) for row in rows[:2])
    # thought to take 5 s each
    for budget, due in ((80, ["bf16", "tensorwise", "bf16"]), (45, ["bf16"]), (18, ["bf16"])):
        (tmp_path / "rows.jsonl").write_bytes(short)
        asked, left, rows = turns(budget=budget)
        assert [label for label, _ in asked] == due, (
            "the BF16 that closes has its time before a cell begins"
        )
        assert left == (1 if len(due) > 1 else 2) and len(rows) == {80: 6, 45: 3, 18: 2}[budget]


def test_a_cell_that_overruns_costs_its_own_row_alone(turns, monkeypatch: pytest.MonkeyPatch):
    for limit, left, due in (
        (420, 1, ["bf16", "tensorwise", "rowwise", "bf16"]),
        (100, 0, ["bf16", "rowwise"]),
    ):
        monkeypatch.setattr(timing, "CELL_LIMIT_S", limit)
        asked, still, rows = turns(
            budget=300, rowwise=[lambda cell: CellFailure(failure="not done")], slow="rowwise"
        )
        assert [label for label, _ in asked] == due
        assert [row.cell.name for row in timed(rows) if row.ratio] == ["toy/tensorwise"]
        has_failure = any(isinstance(row, FailedRow) for row in rows)
        assert still == left and has_failure == (not left), "what the budget cut is tried again"


def test_a_cell_as_a_process_and_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    sound = run_cell(TOY, tmp_path / "log", 200)
    assert judged(TOY, sound).valid and sound.graph_breaks == 0 and sound.kernels is None
    wrong = run_cell(toy("bf16", model={"n_layers": 2}), tmp_path / "log", 200)
    assert wrong.failure.startswith("UserError: there is no key 'model.n_layers'") and not wrong.oom
    assert "fp8: 0 of 9 Linears" in (log := (tmp_path / "log").read_text()) and "Traceback" in log


@pytest.mark.parametrize(
    "code, said",
    [
        ("import time; time.sleep(60)", "not done after 1 s"),
        ("import os; os.abort()", "exit code -6 without an answer"),
    ],
)
def test_a_process_that_hangs_or_crashes_is_a_failure_and_leaves_nothing(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, started = subprocess.Popen, []
    monkeypatch.setattr(
        timing.subprocess,
        "Popen",
        lambda command, **options: (
            started.append(real([sys.executable, "-c", code], **options)) or started[0]
        ),
    )
    assert said in run_cell(TOY, tmp_path / "log", 1.0).failure
    assert started[0].poll() is not None


def test_a_cell_dies_with_who_asked_for_it(tmp_path: Path):
    """Else it would share the GPU with the next call's cells."""
    command = [
        sys.executable,
        "-m",
        "bench.throughput",
        "--suite",
        "toy",
        f"out={tmp_path / 'toy.jsonl'}",
    ]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    cell = wait_for(
        lambda: [
            pid for pid in children(parent.pid) if b"--cell" in read_bytes(f"/proc/{pid}/cmdline")
        ]
    )[0]
    parent.kill()
    parent.wait()
    wait_for(lambda: not read_bytes(f"/proc/{cell}/cmdline"), 10)


def board(gpu: str | None = H100, tensorwise=1.2, rowwise=0.9) -> list[TimedRow]:
    """Rows of two sizes, FP8 that many times as fast as BF16."""
    rows = []
    for size, rate in (("125m", 500e3), ("1p5b", 50e3)):
        base = judged(replace(TOY, size=size), answer(rate), gpu=gpu)
        rows.append(base)
        for label, speed in (("tensorwise", tensorwise), ("rowwise", rowwise)):
            row = judged(toy(label, size=size), answer(rate * speed), base, gpu=gpu)
            rows.append(compare_with_bf16(row, base, base))
    return rows


def test_the_table_and_the_figure_show_the_newest_valid_rows(tmp_path: Path):
    rows = [*board(tensorwise=1.1), *board(), *board(gpu=None)]
    rows[-1] = replace(rows[-1], valid=False, invalid_because="too hot")
    first, second = rows_page(rows).split("## No GPU")
    assert re.findall(r"^\| (1\w+) +\| (\w+)", first, re.M) == [
        (size, label) for size in ("125m", "1p5b") for label in ("bf16", "tensorwise", "rowwise")
    ]
    assert "600,000" in first and " 1.200 " in first and "1.100" not in first, "the newest"
    assert "commit 0123456789 with changes" in first
    assert "- not counted: 1p5b/rowwise: too hot" in second
    for name, some in (("x", rows), ("y", [rows[-1]]), ("z", [])):
        report.draw_ratios(some, tmp_path / name)
    assert [path.read_bytes()[:4] for path in tmp_path.iterdir()] == [b"\x89PNG"]


def test_a_page_of_no_rows_says_so():
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
def test_a_figure_calls_a_peer_by_its_name(name, precision, words) -> None:
    cell = replace(TOY, peer="/x", peer_name=name, peer_precision=precision)
    assert report.precision_in_words(cell) == words


def test_a_figure_calls_sizes_by_their_parameters() -> None:
    sizes = ("125m", "1p5b", "nanochat_d12")
    assert [report.size_name(size) for size in sizes] == ["125M", "1.5B", "nanochat_d12"]


def with_cell(row: TimedRow, **changes) -> TimedRow:
    return replace(row, cell=replace(row.cell, **changes))


def write_rows(path: Path, rows: list[CellRow]) -> None:
    path.write_bytes(b"".join(map(row_line, rows)))


def timed(rows: list[CellRow]) -> list[TimedRow]:
    return [row for row in rows if isinstance(row, TimedRow)]


def test_a_figure_has_the_sizes_that_were_timed_beside_other_code_bases(tmp_path) -> None:
    """But neither the other code bases nor our model at their dimensions."""
    *ours, peer, at_dimensions_of_peer = board()
    ours = [with_cell(row, model={}) for row in ours]
    peer = with_cell(peer, model={}, peer="/nanoGPT", peer_name="nanogpt")
    at_dimensions_of_peer = with_cell(at_dimensions_of_peer, model={"n_layer": 12})
    write_rows(tmp_path / "h100_peers.jsonl", [*ours, peer, at_dimensions_of_peer])
    assert report.rows_beside_peers(tmp_path / "h100.jsonl") == ours
    assert report.rows_beside_peers(tmp_path / "h100_peers.jsonl") == []


def test_a_check_fails_on_a_loss_alone_and_the_commands_exit_codes(tmp_path, capsys, monkeypatch):
    old = board()
    assert regressions(old, old) == regressions(old, board(tensorwise=1.17, rowwise=1.2)) == []
    hot = replace(old[1], valid=False, invalid_because="hot")
    for now, told in (
        (board(tensorwise=1.15)[:3], "1.200 before, 1.150 now (-4.2%)"),
        (board(gpu="H200"), "no ratio is in both"),
        ([hot], "valid before, now hot"),
    ):
        (line,) = regressions(old, now)
        assert told in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, rows in (("old", old), ("new", board(tensorwise=1.0))):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for words, code, told in (
        ([f"check={old}"], 0, "has lost nothing"),
        (["--check", str(new)], 1, "1.200 before, 1.000 now"),
        (["--table"], 0, "## NVIDIA H100"),
        ([], 2, "needs a CUDA GPU"),
        (["suite=a100"], 2, "suite"),
        (["cells=125m/tensorwize"], 2, "did you mean '125m/tensorwise'"),
        (["budgets=3"], 2, "budget"),
        (["cells=125m/rowwise"], 2, "needs a CUDA GPU"),
    ):
        said = asked(capsys, throughput.main, f"out={old}", *words, code=code)
        assert told in said and (code < 2 or said.count("\n") == 1)
    assert (tmp_path / "old.png").exists() and asked(
        capsys, throughput.main, "--table", "out=absent.jsonl", code=2
    )
    said = asked(capsys, throughput.main, "suite=toy", "budget=0", f"out={tmp_path / 'none.jsonl'}")
    assert "2 cells are left, none fits: give budget=209 or more" in said
