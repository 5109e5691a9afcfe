"""bench/throughput.py: children that misbehave, rows that survive, arithmetic by hand, an order that goes on."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import ceilings, clocks, group, loop, suites, throughput
from bench.bookkeeping import DONE, FAILED, NEW, Book
from bench.children import Child, ChildError
from bench.clocks import Clocks, parse_sample
from bench.group import OutOfBudget, Timer
from bench.journal import Journal, rows_of
from bench.measure import ATTENTION, SANITY_STEPS, cell_row, seconds_of
from bench.subject import Spec, config_of
from bench.suites import Cell, Group, Suite
from runtime.cli import UserError
from runtime.shards import damage, read_index
from runtime.tokenizer import load_tokenizer
from tests.conftest import ROOT
from tests.speed_cases import board

FAKE = str(ROOT / "tests" / "fake_cell.py")
MODEL = suites.TOY["toy_s"]
LOSSES = [10 - 0.1 * i for i in range(SANITY_STEPS)]
NORMS = {"wte.weight": 2.0, "layers.*.attn.qkv.weight": 3.0, "norm.weight": 0.0}      # of the first gradients, by kind


def a_cell(label: str, **changes) -> Cell:
    return Cell("toy_s", label, 4, T=64, tokens_per_step=1024, device="cpu", model=MODEL, **changes)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, patience: float = 10.0) -> bool:
    end = time.monotonic() + patience
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


# ------------------------------------------------------------------------------------------------------------ children

@pytest.fixture
def start(tmp_path):
    """Starts a fake child; its manners by keyword: what it does wrong at its start or at an order."""
    there = []

    def begin(label: str = "fp8", **manners) -> Child:
        manners = {label: manners, "diary": str(tmp_path / "diary")}
        there.append(Child(label, [sys.executable, FAKE, json.dumps(manners), json.dumps(a_cell(label).spec())],
                           tmp_path / "log", tmp_path, {}))
        return there[-1]

    yield begin
    for child in there:
        child.kill()
        assert gone([child._process.pid])


def test_an_answer_to_each_order(start, tmp_path):
    child = start()
    assert child.read(20)["params_total"] == 7
    assert child.ask({"do": "turn", "micro_steps": 3}, 20)["seconds"] == [0.008] * 3
    child.close()
    assert child._process.returncode in (0, -signal.SIGKILL)
    assert "[fp8] ====" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("manner,said", [
    ("hang", "no answer within 0 seconds"), ("die", "killed by SIGSEGV"), ("exit", "exit code 1"),
    ("fail", "misaligned address")])
@pytest.mark.parametrize("when", ["start", "turn"])
def test_what_goes_wrong_is_one_sentence_and_the_child_is_dead(start, manner, said, when):
    child = start(**{when: manner})
    patience = 0.4 if manner == "hang" else 20
    with pytest.raises(ChildError, match=said) as caught:
        if when == "turn":
            child.read(20)
            child.ask({"do": "turn", "micro_steps": 1}, patience)
        else:
            child.read(patience)
    assert "\n" not in str(caught.value) and not caught.value.oom
    assert gone([child._process.pid])
    if manner in ("die", "exit"):       # what it said last is in the row
        assert {"die": "Segmentation fault (simulated)", "exit": "no such kernel"}[manner] in caught.value.tail


def test_out_of_memory_is_told_apart(start):
    with pytest.raises(ChildError) as caught:
        start(start="oom").read(20)
    assert caught.value.oom


def test_garbage_is_no_answer_but_a_line_of_the_log(start, tmp_path):
    child = start(start="garbage", turn="garbage")
    assert child.read(20)["ok"]
    assert child.ask({"do": "turn", "micro_steps": 1}, 20)["seconds"] == [0.008]
    child.kill()
    log = (tmp_path / "log").read_text()
    assert "not json" in log and '{"progress": 3}' in log


def test_a_killed_child_takes_what_it_started_with_it(start, tmp_path):
    child = start(start="hang_with_offspring")
    end = time.monotonic() + 20
    while "offspring" not in (text := (tmp_path / "diary").read_text() if (tmp_path / "diary").exists() else ""):
        assert time.monotonic() < end
        time.sleep(0.02)
    pids = [int(line.split()[-1]) for line in text.splitlines()]
    assert all(map(is_alive, pids))
    child.kill()
    child.kill()
    assert gone(pids)


def test_children_end_when_their_parent_is_killed(tmp_path):
    code = ("import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from bench.children import Child\n"
            "child = Child('x', sys.argv[2:], Path('log'), Path('.'), {}); child.read(60)\n"
            "print(child._process.pid, flush=True); time.sleep(600)")
    arguments = [json.dumps({"diary": "diary"}), json.dumps(a_cell("fp8").spec())]
    parent = subprocess.Popen([sys.executable, "-c", code, str(ROOT), sys.executable, FAKE, *arguments], cwd=tmp_path,
                              stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone([pid])


# ------------------------------------------------------------------------------------------------------------- journal

def test_a_journal_cut_at_any_byte_keeps_the_rows_before(tmp_path):
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    for i in range(3):
        journal.add({"kind": "cell", "i": i, "x": math.nan})
    journal.close()
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal(path)
        assert [row["i"] for row in journal.rows] == [0, 1]
        journal.add({"kind": "cell", "i": 9})
        journal.close()
        assert [row["i"] for row in rows_of(path.read_bytes())] == [0, 1, 9]
    assert rows_of(whole)[0]["x"] is None
    assert rows_of(b'7\n{"kind": 3}\n\xff\n{"kind": "copy"}\n') == [{"kind": "copy"}]


def test_a_journal_has_one_writer_and_a_name(tmp_path):
    journal = Journal(tmp_path / "deep" / "rows.jsonl")
    with pytest.raises(UserError, match="another call"):
        Journal(tmp_path / "deep" / "rows.jsonl")
    journal.close()
    Journal(tmp_path / "deep" / "rows.jsonl").close()
    with pytest.raises(UserError, match="must end in .jsonl"):
        Journal(tmp_path / "rows.txt")
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "deep" / "rows.jsonl" / "x.jsonl")


# -------------------------------------------------------------------------------------------------------------- clocks

SMI = """#!{python}
import sys, time
query = next(a for a in sys.argv if a.startswith("--query-gpu="))[12:].split(",")
if "clocks_event_reasons.active" in query:
    sys.exit("Field is not a valid field to query.")
now = lambda: time.strftime("%Y/%m/%d %H:%M:%S.") + "%03d" % (time.time() % 1 * 1000)
values = {{"timestamp": now(), "clocks.sm": "1755", "power.draw": "[N/A]", "temperature.gpu": "61",
          "name": "NVIDIA H100 80GB HBM3", "driver_version": "580.65.06", "power.limit": "700.00", "memory.total": "81559",
          "clocks_throttle_reasons.active": "0x0000000000000005"}}
while True:
    values["timestamp"] = now()
    print(", ".join(values[name] for name in query), flush=True)
    if "-lms" not in sys.argv:
        break
    print("nonsense", flush=True)
    time.sleep(0.02)
"""


def test_clocks_of_a_stretch(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI.format(python=sys.executable))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert clocks.describe_gpu() == {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.65.06", "power_limit_w": 700.0,
                                     "memory_gib": 79.65}
    sampler, began = Clocks(), time.time()
    end = time.monotonic() + 20
    while (summary := sampler.summary([(began - 1, time.time() + 1)])) is None and time.monotonic() < end:
        time.sleep(0.02)
    sampler.close()
    assert summary == {"sm_mhz": {"p10": 1755.0, "median": 1755.0}, "power_w": None, "temperature_c": 61.0,
                       "throttled": ["power cap"]}
    assert sampler.summary([(0, began - 100)]) is None


def test_no_nvidia_smi_is_null_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(clocks.describe_gpu().values()) == {None}
    sampler = Clocks()
    assert sampler.summary([(0, 1e12)]) is None
    sampler.close()


def test_samples_are_read_by_their_own_clock():
    when, *rest = parse_sample("2026/12/01 10:00:00.250, 1980, 698.31, 66, 0x0000000000000044\n")
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) == "2026-12-01 10:00:00" and when % 1 == pytest.approx(0.25)
    assert rest == [1980.0, 698.31, 66.0, 0x44]
    assert parse_sample("Unable to determine the device handle") is None and parse_sample("a, b, c, d") is None


# ---------------------------------------------------------------------------------------------------------- arithmetic

CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x128"
FLASH3 = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<..>>>>"
FLASH2 = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>"


def measured(cell: Cell, turns, baseline=None, around=(), **changes) -> dict:
    start = {"ok": True, "flops_per_token": 9.0e9, "fp8_flops_per_token": 7.0e9, "graph_breaks": 0, "compile_s": 40.0}
    given = {"start": start, "turns": turns, "optimizer": [0.3, 0.1, 0.2], "sanity": {"losses": LOSSES, "gradient_norms": NORMS},
             "profile": {"buckets": {"matmul": 1.0}, "attention_kernel": CUDNN}, "recompiles": 0,
             "peaks": (989.4e12, 1978.9e12), "clocks": None, "compiled_beside": 1,
             "most_drift": 0.03, "baseline": baseline, "around": around, "twin": baseline}
    if "losses" in changes.get("sanity", {}):
        changes["sanity"] = {"gradient_norms": NORMS} | changes["sanity"]
    return cell_row(cell, **given | changes)


def test_a_row_by_hand():
    """8 micro-batches of 2 x 1,024 tokens: 8 x 0.5 s + 0.2 s = 4.2 s a step of 16,384 tokens."""
    cell = Cell("1p5b", "bf16", 2, tokens_per_step=16_384)
    row = measured(cell, [[0.4, 0.6], [0.5, 0.5], [0.5, 0.5]])
    assert row["step_s"] == pytest.approx(4.2) and row["tok_per_s"] == pytest.approx(16_384 / 4.2)
    assert row["tflops"] == pytest.approx(9e9 * 16_384 / 4.2 / 1e12)
    assert row["mfu_bf16"] == pytest.approx(9e9 * 16_384 / 4.2 / 989.4e12)
    assert row["tcu"] == pytest.approx((7e9 / 1978.9e12 + 2e9 / 989.4e12) * 16_384 / 4.2)
    assert row["micro_s"]["median"] == 0.5 and row["baseline"] is None and row["ratio"] is None and row["valid"]
    unknown = measured(cell, [[0.5]], peaks=None)
    assert unknown["mfu_bf16"] is None and unknown["tcu"] is None and unknown["tflops"] > 0


def test_a_linear_drift_cancels_in_the_ratio():
    cell = Cell("1p5b", "bf16", 2, tokens_per_step=16_384)
    base = measured(cell, [[1.0]], optimizer=[0.4], most_drift=9)
    around = [[1.00], [1.20], [1.40]]
    turns = [[(8 * slow + 0.4 - 0.3) / 8 / 1] for slow in (1.10, 1.30)]     # equal steps, though the optimizer's share differs
    row = measured(replace(cell, label="tensorwise"), turns, base, around, optimizer=[0.3], most_drift=9)
    assert [row["ratio"][q] for q in ("p10", "median", "p90")] == pytest.approx([1.0] * 3)
    assert row["drift"] == pytest.approx(0.4) and row["baseline_turns"] == around
    half = measured(replace(cell, label="tensorwise", micro_batch=1, planned=2), [[t[0] / 2] for t in turns], base, around,
                    optimizer=[0.3], most_drift=9)
    assert half["ratio"]["median"] == pytest.approx(1.0) and half["planned_micro_batch"] == 2   # per step, not per micro-batch


@pytest.mark.parametrize("changes,because", [
    ({"sanity": {"losses": [*LOSSES[:-1], None]}}, "not known"), ({"sanity": {"losses": LOSSES[:5]}}, "not known"),
    ({"sanity": {"error": "CUDA out of memory"}}, "not known: CUDA out of memory"),
    ({"sanity": {"losses": LOSSES[::-1]}}, "does not fall"), ({"sanity": {"losses": [v + 0.06 for v in LOSSES]}}, "0.060 away"),
    ({"recompiles": 2}, "2 recompiles"), ({"start": {"graph_breaks": 1}}, "1 graph breaks"),
    ({"around": [[1.0], [1.0], [1.05]]}, "drifted by +5.0%"),
    ({"clocks": {"throttled": ["power cap", "hardware thermal"]}}, "slowed down by hardware thermal"),
    ({"baseline": {"valid": False, "invalid_because": "x", "optimizer_s": 0.1, "label": "bf16", "size": "125m", "micro_batch": 64,
                   "T": 1024, "tokens_per_step": 524_288}}, "baseline is invalid: x"),
])
def test_what_makes_a_row_no_evidence(changes, because):
    cell = Cell("125m", "tensorwise", 64)
    base = measured(replace(cell, label="bf16"), [[1.0], [1.0]])
    fine = measured(cell, [[0.9], [0.9]], base, [[1.0]] * 3, sanity={"losses": [v + 0.04 for v in LOSSES]})
    assert fine["valid"] and fine["invalid_because"] is None and fine["largest_difference"] == pytest.approx(0.04)
    row = measured(cell, [[0.9], [0.9]], **{"baseline": base, "twin": base, "around": [[1.0]] * 3} | changes)
    assert not row["valid"] and because in row["invalid_because"]


def test_attention_is_cudnns_or_flash_3s_or_the_row_is_no_evidence():
    def row(name, label="bf16", **changes):
        return measured(Cell("125m", label, 64, **changes), [[1.0]], profile={"attention_kernel": name})

    assert row(CUDNN)["valid"] and row(FLASH3)["valid"]
    for name in (FLASH2, "fmha_cutlassB_bf16_aligned_64x64_k128_sm80", "sm90_xmma_gemm"):
        assert not row(name)["valid"] and f"FlashAttention 3's but {name[:80]}" in row(name)["invalid_because"]
        assert row(name, "bf16_eager")["valid"] and row(name, "nanogpt", peer="/gpt", like="125m")["valid"]
    assert "attention kernel is not known" in row(None)["invalid_because"] and row(None, device="cpu")["valid"]
    for where in ("start", "profile"):      # no profiler, no name: nobody can tell
        unknown = measured(Cell("125m", "bf16", 64), [[1.0]], **{"profile": {}, where: {"profile_error": "no CUPTI"}})
        assert unknown["valid"] and unknown["profile_error"] == "no CUPTI"
    assert [ceilings.backend_of([name, "copy"]) for name in (CUDNN, FLASH3, FLASH2, "fmha_cutlassF", "softmax")] == [
        "cudnn", "flash3", "flash2", "efficient", "math"]
    assert ceilings.backend_of(["flash_fwd_kernel", "sm90_gemm"]) == "flash2"


@pytest.mark.parametrize("norms,because", [
    ({"wte.weight": 2.0, "layers.*.attn.qkv.weight": 3.09, "norm.weight": 0.0}, None),
    ({"wte.weight": 2.0, "layers.*.attn.qkv.weight": 0.0, "norm.weight": 0.0}, "gradient of layers.*.attn.qkv.weight has a norm"),
    ({"wte.weight": 2.0, "layers.*.attn.qkv.weight": 6.0, "norm.weight": 0.0}, "has a norm of 6.0, BF16's has 3.0"),
    ({"wte.weight": 2.4, "layers.*.attn.qkv.weight": 3.0, "norm.weight": 0.0}, "gradient of wte.weight"),
    ({"wte.weight": 2.0, "layers.*.attn.qkv.weight": 3.0, "norm.weight": 0.1}, "gradient of norm.weight"),
    ({"wte.weight": 2.0, "layers.*.attn.qkv.weight": None, "norm.weight": 0.0}, "gradient of layers.*.attn.qkv.weight"),
    ({"wte.weight": math.nan, "layers.*.attn.qkv.weight": 3.0, "norm.weight": 0.0}, "gradient of wte.weight has a norm of nan"),
    ({"wte.weight": 2.0}, "not known, or not BF16's"), (None, "not known, or not BF16's"),
])
def test_a_lost_or_doubled_gradient_shows_in_the_first_norms(norms, because):
    """Losses do not show it: BF16 without qkv's weight gradient trained as closely to BF16 as FP8 did."""
    cell = Cell("125m", "tensorwise", 64)
    base = measured(replace(cell, label="bf16"), [[1.0]])
    row = measured(cell, [[0.9]], base, [[1.0]] * 2, sanity={"losses": LOSSES, "gradient_norms": norms})
    assert row["valid"] == (because is None) and (because or "") in (row["invalid_because"] or "")


def test_a_loss_that_falls_fast_may_lag_by_a_share_of_its_fall():
    cell, fast = Cell("125m", "tensorwise", 64), [10 - 0.25 * i for i in range(SANITY_STEPS)]     # 4.75 nats: 3 % are 0.1425
    base = measured(replace(cell, label="bf16"), [[1.0]], sanity={"losses": fast})
    for lag, is_valid in ((0.14, True), (0.145, False)):
        row = measured(cell, [[0.9]], base, [[1.0]] * 2, sanity={"losses": [v + lag for v in fast]})
        assert row["valid"] == is_valid


def test_eager_and_peers_have_no_graph_to_break_and_peers_other_losses():
    base = measured(Cell("125m", "bf16", 64), [[1.0]])
    far = [v + 3 for v in LOSSES]
    peer = Cell("nanogpt_124m", "nanogpt", 64, peer="x", like="125m")
    row = measured(peer, [[1.25]], base, [[1.0]] * 2, twin=None, sanity={"losses": far}, start={"graph_breaks": 3})
    assert row["valid"] and row["ratio"]["median"] == pytest.approx((1.0 * 8 + 0.2) / (1.25 * 8 + 0.2))
    assert measured(Cell("125m", "bf16_eager", 64), [[1.25]], base, [[1.0]] * 2, start={"graph_breaks": 3})["valid"]


@pytest.mark.parametrize("answer", [{}, {"seconds": []}, {"seconds": [0.0]}, {"seconds": [math.inf]}, {"seconds": ["1"]},
                                    {"seconds": [True]}, {"seconds": 3.0}, {"seconds": [None]}])
def test_times_that_are_none(answer):
    with pytest.raises(ChildError, match="no times"):
        seconds_of(answer)


# -------------------------------------------------------------------------------------------------------------- groups

BF16, A, B, C = (a_cell(label) for label in ("bf16", "fp8_a", "fp8_b", "fp8_c"))
GROUP = Group(BF16, (A, B, C))
RUN = {"kind": "run", "run": "r1", "suite": "toy", "gpu": None, "torch": "2", "memory_gib": None}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A Timer over fake children: bench(label={"turn": "hang"}, ..) -> (timer, book, what was said, diary)."""
    opened = []

    def make(budget: float = 60.0, run: dict = RUN, at_once: int = 4, **manners) -> SimpleNamespace:
        journal = Journal(tmp_path / "rows.jsonl")
        opened.append(journal)
        book, said = Book(journal, run), []
        suite = Suite("cpu", (GROUP,), (), at_once=at_once, turns=2, turn_s=0.03, most_drift=0.5)
        command = (sys.executable, FAKE, json.dumps(manners | {"diary": str(tmp_path / "diary")}))
        timer = Timer(suite, book, time.monotonic() + budget, tmp_path / "log", Clocks(is_on=False), said.append, command)
        return SimpleNamespace(timer=timer, book=book, said=said, close=journal.close, rows=lambda: [
            row for row in rows_of((tmp_path / "rows.jsonl").read_bytes()) if row["kind"] != "run"])

    (tmp_path / "diary").touch()
    yield make
    for journal in opened:
        journal.close()
    pids = [int(line.split()[2]) for line in (tmp_path / "diary").read_text().splitlines()]
    assert gone(pids), "a child outlived the group"


def kinds(rows) -> list[str]:
    return [f"{row['label']} {row['kind']}" for row in rows]


def started(tmp_path) -> list[str]:
    return [line.rpartition(" ")[0] for line in (tmp_path / "diary").read_text().splitlines()]


def test_a_group_is_timed_in_turns_and_not_timed_again(bench, tmp_path):
    here = bench(fp8_b={"off": 0.2})
    assert here.timer.time_group(GROUP) == 0
    base, a, b, c = here.rows()
    assert kinds([base, a, b, c]) == ["bf16 cell", "fp8_a cell", "fp8_b cell", "fp8_c cell"]
    assert base["turns"] == [[0.010] * 3] * 3 and a["turns"] == [[0.008] * 4] * 2 and a["baseline_turns"] == [[0.010] * 3] * 3
    assert a["ratio"]["median"] == pytest.approx((4 * 0.010 + 0.002) / (4 * 0.008 + 0.002))
    assert (a["baseline"], a["baseline_size"]) == ("bf16", "toy_s")
    assert a["valid"] and not b["valid"] and "0.200 away" in b["invalid_because"]
    assert a["compiled_beside"] == 3 and a["run"] == "r1" and a["buckets"] == {"matmul": 0.004}
    assert here.timer.time_group(GROUP) == 0 and len(here.rows()) == 4      # nothing is due
    here.close()
    again = bench()
    assert [again.book.state(cell) for cell in (BF16, A, B, C)] == [DONE] * 4 and again.timer.time_group(GROUP) == 0
    again.timer.forced = {A.key}
    assert again.timer.time_group(replace(GROUP, members=(A,))) == 0
    assert kinds(again.rows())[4:] == ["bf16 cell", "fp8_a cell"]
    again.close()
    other = bench(run=RUN | {"gpu": "NVIDIA H200", "run": "r3"})        # rows of another GPU do not count
    assert other.book.state(A) == NEW


@pytest.mark.parametrize("when", ["start", "turn", "optimizer"])
@pytest.mark.parametrize("manner", ["hang", "die", "fail", "nonsense"])
def test_a_cell_that_misbehaves_costs_itself_alone(bench, manner, when, monkeypatch):
    if manner == "hang":
        for limit in ("START_LIMIT_S", "ORDER_LIMIT_S"):
            monkeypatch.setattr(group, limit, 3)
    if (manner, when) == ("nonsense", "start"):
        manner = "exit"     # no order, no answer to garble
    here = bench(fp8_b={when: manner})
    assert here.timer.time_group(GROUP) == 0
    assert sorted(kinds(here.rows())) == ["bf16 cell", "fp8_a cell", "fp8_b failed", "fp8_c cell"]
    row = next(row for row in here.rows() if row["kind"] == "failed")
    assert row["error"] and row["oom"] is False and row["micro_batch"] == 4
    assert here.timer.time_group(GROUP, again=True) == 0 and len(here.rows()) == 4      # once a call
    here.close()
    later = bench()
    assert later.book.state(B) == FAILED
    assert later.timer.time_group(GROUP) == 0 and len(later.rows()) == 4    # what failed waits until all else is done
    assert later.timer.time_group(GROUP, again=True) == 0 and kinds(later.rows())[4:] == ["bf16 cell", "fp8_b cell"]


@pytest.mark.parametrize("when", ["sanity", "profile"])
def test_times_outlive_what_fails_after_them(bench, when):
    here = bench(fp8_a={when: "die"})
    here.timer.time_group(GROUP)
    row = next(row for row in here.rows() if row["label"] == "fp8_a")
    assert row["kind"] == "cell" and row["ratio"]["median"] > 1 and row["buckets"] is None
    assert row["valid"] == (when == "profile")


def test_out_of_memory_means_alone_then_half_then_failed(bench, tmp_path):
    here = bench(fp8_a={"start": "oom_unless_small"}, fp8_b={"turn": "oom_once"}, fp8_c={"start": "oom"})
    assert here.timer.time_group(GROUP) == 0
    assert kinds(here.rows()) == ["bf16 cell", "fp8_a failed", "fp8_c failed", "fp8_b cell", "fp8_a cell", "fp8_c failed"]
    a, b = (next(row for row in here.rows() if kinds([row]) == [f"{label} cell"]) for label in ("fp8_a", "fp8_b"))
    assert (a["micro_batch"], a["planned_micro_batch"], b["micro_batch"]) == (2, 4, 4)
    assert a["ratio"]["median"] == pytest.approx((4 * 0.010 + 0.002) / (8 * 0.004 + 0.002))     # per step
    assert started(tmp_path).count("fp8_a 4") == 2 and started(tmp_path).count("fp8_a 2") == 1 and a["compiled_beside"] == 0
    assert here.book.state(A) == DONE and here.book.state(C) == FAILED
    assert any("once more, alone" in line for line in here.said) and any("half the micro-batch" in line for line in here.said)


@pytest.mark.parametrize("when", ["start", "sanity"])
def test_a_baseline_out_of_memory_halves_the_group(bench, when):
    here = bench(bf16={when: "oom_unless_small"})
    assert here.timer.time_group(GROUP) == 0
    assert kinds(here.rows()) == ["bf16 failed", "bf16 cell", "fp8_a cell", "fp8_b cell", "fp8_c cell"]
    assert {row["micro_batch"] for row in here.rows() if row["kind"] == "cell"} == {2}
    assert [here.book.state(cell) for cell in (BF16, A)] == [DONE] * 2


def test_a_baseline_out_of_memory_late_costs_no_cell_its_row(bench):
    here, beside = bench(), Timer._beside

    def late(timer, base, row, one):
        if one.cell == B and not timer.said_oom:
            timer.said_oom = True
            raise base.child._failed("CUDA out of memory", True)
        beside(timer, base, row, one)

    here.timer.said_oom, Timer._beside = False, late
    try:
        here.timer.time_group(GROUP)
    finally:
        Timer._beside = beside
    assert kinds(here.rows()) == ["bf16 cell", "fp8_a cell", "bf16 cell", "fp8_b cell", "fp8_c cell"]
    assert here.rows()[2]["compiled_beside"] == 0


@pytest.mark.parametrize("when", ["start", "turn", "sanity", "profile"])
def test_a_baseline_that_dies_ends_its_group_and_no_other(bench, when):
    here = bench(bf16={when: "die"})
    assert here.timer.time_group(GROUP) == 0 and kinds(here.rows()) == ["bf16 failed"]
    assert here.timer.time_group(GROUP, again=True) == 0 and len(here.rows()) == 1
    assert here.book.state(A) == NEW


def test_the_budget_ends_what_runs_and_keeps_what_is_measured(bench, monkeypatch):
    here, beside = bench(fp8_b={"turn": "hang"}), Timer._beside

    def soon_over(timer, base, row, one):
        if one.cell == B:
            timer.deadline = time.monotonic() + 0.5
        beside(timer, base, row, one)

    monkeypatch.setattr(Timer, "_beside", soon_over)
    with pytest.raises(OutOfBudget):
        here.timer.time_group(GROUP)
    assert here.timer.left_s() > -5 and kinds(here.rows()) == ["bf16 cell", "fp8_a cell"]      # no "failed": it was our clock


def test_nothing_is_begun_that_will_not_end_in_time(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "GUESSES", {"start_s": {"toy_s": 5, "125m": 50}, "time_s": {"toy_s": 10, "125m": 10}})
    short = bench(budget=20)
    assert short.timer.time_group(GROUP) == 3 and not started(tmp_path)
    short.close()
    here = bench(budget=32)      # 1.15 x (5 + 2 x 10): the baseline with one
    here.timer.time_group(GROUP)
    assert set(started(tmp_path)[:2]) == {"bf16 4", "fp8_a 4"} and here.rows()[1]["compiled_beside"] == 1
    assert here.timer._needs_s([BF16]) < 5      # from now on what such a cell took counts, not the guess
    here.timer.slowest[("125m", "start_s")] = 100.0
    other = Cell("350m", "bf16", 4, like="toy_s")
    # 125m took 50 s more than its guess of 50: a size of a guess of 5 a tenth of that, a larger one no more seconds.
    assert here.timer._needs_s([other]) == pytest.approx(1.15 * (5 + 5 + 10))
    suites.GUESSES["start_s"]["1p5b"], suites.GUESSES["time_s"]["1p5b"] = 150, 10
    assert here.timer._needs_s([Cell("1p5b", "bf16", 4)]) == pytest.approx(1.15 * (150 + 50 + 10))


def test_children_start_together_as_memory_allows(bench, tmp_path):
    idle, peak = suites.memory(BF16)
    roomy = bench(run=RUN | {"memory_gib": (4 * idle + peak) / 0.95 / 2**30})
    roomy.timer.time_group(GROUP)
    assert [row["compiled_beside"] for row in roomy.rows()] == [3] * 4
    roomy.close()
    tight = bench(run=RUN | {"run": "r2", "gpu": "small", "memory_gib": (idle + peak) * 1.01 / 0.95 / 2**30})
    tight.timer.time_group(GROUP)
    assert [row["compiled_beside"] for row in tight.rows()[4:]] == [1, 1, 0, 0]
    tight.close()
    tiny = bench(run=RUN | {"run": "r3", "gpu": "tiny", "memory_gib": peak / 2**31})
    assert tiny.timer.time_group(GROUP) == 0 and len(tiny.rows()) == 8 and "does not fit" in tiny.said[0]


# -------------------------------------------------------------------------------------------------------------- suites

def test_the_first_groups_are_the_most_valuable():
    jobs = suites.h100(None, None).jobs
    assert [(job.baseline.size, [cell.label for cell in job.members]) for job in jobs[:2]] == [
        ("1p5b", ["tensorwise+kernels", "tensorwise+kernels+head"]),
        ("125m", ["tensorwise+kernels", "auto+kernels", "tensorwise"])]
    cells = [cell for job in jobs if isinstance(job, Group) for cell in (job.baseline, *job.members)]
    labels = {"bf16", "bf16_eager", "tensorwise", "tensorwise+kernels", "rowwise", "rowwise_with_gw_hp", "tensorwise_gw_hp",
              "auto"}
    for size in ("125m", "350m", "760m", "1p5b"):
        assert labels <= {cell.label for cell in cells if cell.size == size and cell.micro_batch == suites.MICRO_BATCH[size]}
    assert all(cell.tokens_per_step % (cell.micro_batch * cell.T) == 0 for cell in cells)
    assert not any(cell.peer for cell in cells)
    assert {(cell.size, cell.T) for cell in cells if cell.T != 1024} == {("1p5b", 2048), ("125m", 2048)}
    for job in jobs:        # nothing that the model of memory leaves out; ours for comparison where FIRST has its like
        if isinstance(job, Group):
            assert max(suites.memory(cell)[1] for cell in (job.baseline, *job.members)) < 79.6 * 2**30 * group.MEMORY_SHARE
            assert job.beside in ((), ("tensorwise+kernels",)) and set(job.beside) <= {cell.label for cell in job.members}
    assert [bool(job.beside) for job in jobs[:5]] == [False] * 4 + [True]
    keys = [cell.key for job in jobs if isinstance(job, Group) for cell in job.members if cell.label not in job.beside]
    assert len(keys) == len(set(keys)), "no cell stands twice, but to be compared"


def test_each_cell_of_ours_is_one_that_a_child_can_build():
    cells = [cell for job in suites.h100(None, "/chat").jobs if isinstance(job, Group) for cell in (job.baseline, *job.members)]
    for cell in [*cells, *suites.toy().jobs[0].members]:
        if not cell.peer:
            config = config_of(Spec(**cell.spec()))
            assert config.model == suites.config_of(cell) and config.data.micro_batch == cell.micro_batch
            assert config.fp8.kernels == ("+kernels" in cell.label) and config.accumulation(1) * cell.micro_batch * cell.T == (
                cell.tokens_per_step)


def test_the_model_of_memory_by_hand():
    """125M at 64 x 1,024 tokens: 123,587,328 parameters, 12 layers of 768 and 2,048, 50,304 logits."""
    idle, peak = suites.memory(Cell("125m", "bf16", 64))
    assert idle == 4 * 123_587_328 + 0.8e9
    assert suites.memory(Cell("125m", "amax+kernels", 64)) == (idle + 2 * 123_587_328, peak + 2 * 123_587_328)
    kept = 12 * (16 * 768 + 6 * 2048) + 4 * 50_304
    assert peak == idle + 14 * 123_587_328 + 65_536 * kept
    assert suites.memory(Cell("125m", "bf16_eager", 64))[1] == peak + 65_536 * 4 * 50_304
    assert suites.memory(Cell("nanogpt_124m", "nanogpt", 64, peer="/gpt", like="125m"))[1] == pytest.approx(
        peak + (suites.PEERS_KEEP - 1) * 65_536 * kept)
    for job in suites.h100(None, None).jobs[:4]:        # who works has the others waiting: on 80 GB; of 1.5B one of two
        together = (job.baseline, *job.members)[:2 if job.baseline.size == "1p5b" else None]
        idle, peak = zip(*map(suites.memory, together), strict=True)
        assert sum(idle) + max(p - i for i, p in zip(idle, peak, strict=True)) < 79.6 * 2**30 * group.MEMORY_SHARE


def test_peers_are_timed_beside_ours():
    suite = suites.h100("/gpt", "/chat")
    groups = [job for job in suite.jobs if isinstance(job, Group) and any(cell.peer for cell in job.members)]
    assert [(job.baseline.size, [(cell.size, cell.label, cell.peer) for cell in job.members if cell.peer]) for job in groups] == [
        (size, [(f"nanogpt_{gpt}", "nanogpt", "/gpt"), (f"nanochat_{chat}", "nanochat_bf16", "/chat"),
                (f"nanochat_{chat}", "nanochat_fp8", "/chat")])
        for size, gpt, chat in (("125m", "124m", "d12"), ("1p5b", "xl", "d26"))]
    for job in groups:
        assert job.beside == ("tensorwise+kernels",) == (job.members[0].label,)
        twin = suite.jobs[suite.jobs.index(job) + 1]       # our model at nanochat's dimensions, next in the same call
        assert twin.baseline.size.startswith("ours_") and twin.baseline.micro_batch == job.members[-1].micro_batch
        assert all(suites.memory(cell)[1] > 1e9 for cell in (job.baseline, *job.members, twin.baseline))
    peer = groups[0].members[-1].spec()
    assert peer["peer"] == {"name": "nanochat_fp8", "dir": "/chat"} and peer["model"] is None


def test_a_group_with_peers_times_ours_again_in_the_same_call(bench):
    here = bench()
    here.timer.time_group(replace(GROUP, members=(A,)))
    peers = Group(BF16, (A, a_cell("nanogpt", peer="/gpt")), beside=("fp8_a",))
    here.timer.time_group(peers)
    assert kinds(here.rows()) == ["bf16 cell", "fp8_a cell"] + ["bf16 cell", "fp8_a cell", "nanogpt cell"]
    here.timer.time_group(peers)
    assert len(here.rows()) == 5


# ------------------------------------------------------------------------------------------------- ceilings, loop, main

def test_ceilings_on_a_cpu_and_what_is_missing(tmp_path):
    shape = {"size": "toy", "B": 1, "T": 32, "C": 32, "H": 1, "D": 32, "F": 32, "V": 48}
    spec = {"device": "cpu", "have": [], "shapes": [shape]}
    keys = ceilings.missing(spec)
    assert len(keys) == 1 + 5 * (3 + 2 + 3) + 1
    # torchao multiplies by rows forward alone; the weight gradient of our kernels' path leaves as fp32
    assert {key[1:2] + key[4:] == ["fp8_rowwise", "forward"] for key in keys if "fp8_rowwise" in key} == {True}
    assert {key[4] for key in keys if "fp8_fp32" in key} == {"weight_grad"}
    some = [["copy"], ["attention", "toy"], ["matmul", "bf16", "toy", "head", "input_grad"],
            *(["matmul", dtype, "toy", "head", which] for which in ("forward", "weight_grad")
              for dtype in ceilings.PASSES[which])]
    rows = list(ceilings.rows(spec | {"have": [key for key in keys if key not in some]}))
    assert [ceilings.key_of(row) for row in rows] == [key for key in keys if key in some]
    assert ceilings.missing(spec | {"have": [key for row in rows if (key := ceilings.key_of(row))]}) == [
        key for key in keys if key not in some]
    for row in rows:
        if row["kind"] == "matmul":
            assert (row["M"], row["K"], row["N"]) == {
                "weight_grad": (48, 32, 32), "input_grad": (32, 48, 32), "forward": (32, 32, 48)}[row["pass"]]
            assert row["tflops"] == pytest.approx(2 * row["M"] * row["K"] * row["N"] / row["ms"] / 1e9)
    assert ceilings.key_of({"kind": "cell"}) is None


def test_ceilings_as_a_process(bench):
    """Phase 0 through its process: all rows in the journal, none asked for twice; one that dies is a line."""
    here, cell = bench(), a_cell("bf16")
    suite = replace(here.timer.suite, ceilings=(replace(cell, T=16, model=tuple(dict(MODEL, n_ctx=16).items())),))
    throughput.time_ceilings(suite, here.timer)
    keys = [ceilings.key_of(row) for row in here.rows()]
    assert [key[0] for key in keys] == ["copy"] + ["matmul"] * 40 + ["attention"]
    failed = {key[1] for key, row in zip(keys, here.rows(), strict=True) if row["kind"] == "failed"}
    assert not failed
    assert here.said[-1].startswith("ceilings: copy")
    throughput.time_ceilings(suite, here.timer)
    assert len(here.rows()) == 42 and len(here.said) == 1


def test_a_ceiling_that_cannot_be_had_is_a_row_and_not_tried_again(monkeypatch):
    def no(*_, **__):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(ceilings, "scaled_mm", no)
    shape = {"size": "toy", "B": 1, "T": 16, "C": 16, "H": 1, "D": 16, "F": 16, "V": 16}
    key = ["matmul", "fp8", "toy", "out", "forward"]
    keys = ceilings.missing({"have": [], "shapes": [shape]})
    (row,) = ceilings.rows({"device": "cpu", "have": [k for k in keys if k != key], "shapes": [shape]})
    assert row["kind"] == "failed" and row["error"] == "no kernel image" and ceilings.key_of(row) == key


@pytest.mark.parametrize("dtype,which,switches", [
    ("fp8", "forward", (torch.bfloat16, True)), ("fp8", "input_grad", (torch.bfloat16, False)),
    ("fp8", "weight_grad", (torch.bfloat16, False)), ("fp8_fp32", "weight_grad", (torch.float32, False)),
    ("fp8_rowwise", "forward", (torch.bfloat16, True))])
def test_fp8_matmuls_are_timed_as_training_calls_them(monkeypatch, dtype, which, switches):
    seen = []

    def mm(a, scale_a, b, scale_b, out_dtype, fast):
        seen.append((out_dtype, fast))
        assert a.dtype == (torch.float8_e4m3fn if which == "forward" else torch.float8_e5m2) and b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous() and b.t().is_contiguous() and scale_a.numel() == (a.size(0) if dtype == "fp8_rowwise" else 1)

    monkeypatch.setattr(ceilings, "scaled_mm", mm)
    monkeypatch.setattr(ceilings, "_time", lambda step, device: step() or 1.0)
    ceilings._matmul({"size": "toy", "B": 1, "T": 16, "C": 16, "F": 16, "V": 32}, dtype, "head", which, torch.device("cpu"))
    assert seen == [switches]


@pytest.mark.parametrize("tokenizer", ["gpt2", "byte"])
def test_random_tokens_are_a_source_like_any(tmp_path, tokenizer):
    loop.write_random_source(tmp_path / "random", tokenizer, {"train": 5000, "val": 700})
    index = read_index(tmp_path / "random")
    assert index.splits["train"].tokens == 5000 and index.tokenizer_sha256 == load_tokenizer(tokenizer).sha256
    assert not list(damage(tmp_path / "random"))


@pytest.mark.parametrize("ends", [False, True])
def test_a_loop_is_timed_between_rows(tmp_path, monkeypatch, ends):
    """A train.py that writes a row every 20 ms after slow first ones; or ends too soon."""
    (tmp_path / "train.py").write_text(
        "import json, pathlib, sys, time\n"
        "given = dict(word.split('=', 1) for word in sys.argv[2:])\n"
        "folder = pathlib.Path(given['out']) / given['run']; folder.mkdir(parents=True)\n"
        "assert given['fp8.kernels'] == 'true' and given['fp8.recipe'] == 'tensorwise' and given['model.n_layer'] == '2'\n"
        f"for step in range(1, {6 if ends else 10_000}):\n"
        "    time.sleep(0.3 if step < 3 else 0.02)\n"
        "    with open(folder / 'metrics.jsonl', 'a') as f: print(json.dumps({'kind': 'train', 'step': step}), file=f)\n")
    monkeypatch.setattr(loop, "ROOT", tmp_path)
    began = time.monotonic()
    if ends:
        with pytest.raises(ChildError, match="exit code 0 after 5 steps"):
            loop.tokens_per_second(a_cell("tensorwise+kernels"), tmp_path / "log", lambda: 60 + began - time.monotonic())
        return
    rate = loop.tokens_per_second(a_cell("tensorwise+kernels"), tmp_path / "log", lambda: 60 + began - time.monotonic())
    assert 1024 / 0.3 < rate < 1024 / 0.01      # on a loaded machine a row may be seen late, the next one in time
    with pytest.raises(ChildError, match="time was over"):
        loop.tokens_per_second(a_cell("tensorwise+kernels"), tmp_path / "log", lambda: 0.0)


@pytest.mark.parametrize("arguments,said", [
    (["--suite", "h200"], "suite"), (["--budget", "0"], "budget=0"), (["--table", "--check", "x"], "two commands"),
    (["--suite", "toy", "--nanogpt", "x"], "no peers"), (["--suite", "toy", "--cells", "toy_s/tensorwize"], "did you mean"),
    (["--suite", "toy", "--out", "x.txt"], "must end in .jsonl"), (["--check", "nowhere.jsonl"], "there is no"),
    (["--table", "--out", "nowhere.jsonl"], "there is no nowhere.jsonl"),
    *([] if torch.cuda.is_available() else [(["--suite", "h100"], "needs a CUDA GPU")]),
])
def test_a_users_mistake_is_a_sentence(arguments, said, capsys):
    assert throughput.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("bench/throughput.py: ") and said in err and err.count("\n") == 1


def test_files_are_looked_for_from_the_working_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in board()))
    (tmp_path / "new.jsonl").write_bytes((tmp_path / "mine.jsonl").read_bytes())
    assert throughput.main(["--check", "new.jsonl", "--out", "mine.jsonl"]) == 0
    monkeypatch.setattr("bench.speed_figure.figures", lambda rows, folder: [folder / "x.png"])
    assert throughput.main(["--table", "--out", "mine.jsonl"]) == 0 and "1p5b" in capsys.readouterr().out


def test_a_loop_that_the_budget_ends_has_not_failed(bench, monkeypatch):
    here = bench()

    def ended(cell, log, left_s):
        here.timer.deadline = 0.0
        raise ChildError("the time was over")

    monkeypatch.setattr(loop, "tokens_per_second", ended)
    with pytest.raises(OutOfBudget):
        throughput.time_loop(Group(BF16, ()), here.timer)
    assert not any("FAILED" in line for line in here.said)


def test_named_cells_alone():
    (job,) = throughput._jobs(suites.toy(), ("toy_m/tensorwise",))
    assert (job.baseline.size, [cell.label for cell in job.members], job.beside) == ("toy_m", ["tensorwise"], ())
    first, second = throughput._jobs(suites.toy(), ("toy_m/bf16", "toy_s/tensorwise", "toy_s/tensorwise+kernels"))
    assert first.members == () and len(second.members) == 2


def test_the_command_from_an_empty_file_to_nothing_left(tmp_path, monkeypatch, capsys):
    """measure() whole, with fake cells, no ceilings and a loop that is known; then the same command again."""
    (tmp_path / "diary").touch()
    command = (sys.executable, FAKE, json.dumps({"diary": str(tmp_path / "diary")}))
    monkeypatch.setattr(Timer.__init__, "__defaults__", (command,))
    monkeypatch.setattr(suites, "toy", lambda: Suite("cpu", (GROUP, suites.Loop(Group(BF16, (A,)))), (), 2, 2, 0.03, 0.5))
    monkeypatch.setattr(throughput, "time_ceilings", lambda suite, timer: None)
    monkeypatch.setattr(loop, "tokens_per_second", lambda cell, log, left_s: 12_000.0)
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert throughput.main(["--suite", "toy", "--out", str(out), "--commit", "abc"]) == 0
    rows = rows_of(out.read_bytes())
    assert [row["kind"] for row in rows] == ["run", *["cell"] * 4, "loop", "loop", "run"]
    assert rows[5]["of_cell"] == pytest.approx(12_000 / rows[1]["tok_per_s"])
    assert {"commit", "code", "gpu", "driver", "power_limit_w", "torch", "cudnn", "command"} <= rows[0].keys()
    assert "nothing is left to time" in capsys.readouterr().out
    assert throughput.main(["--suite", "toy", "--out", str(out), "--cells", "toy_s/fp8_b"]) == 0
    assert kinds(rows_of(out.read_bytes())[9:]) == ["bf16 cell", "fp8_b cell"]       # once, though it has a row
    out.write_text("".join(json.dumps(row) + "\n" for row in rows if row["kind"] != "loop"))     # a cut between cell and loop
    assert throughput.main(["--suite", "toy", "--out", str(out)]) == 0
    new = [row for row in rows_of(out.read_bytes())[6:] if row["kind"] != "run"]
    assert kinds(new) == ["bf16 cell", "bf16 loop", "bf16 cell", "fp8_a cell", "fp8_a loop"]


def test_sigterm_kills_the_children_and_keeps_the_rows(tmp_path, monkeypatch, capsys):
    (tmp_path / "diary").touch()
    command = (sys.executable, FAKE, json.dumps({"diary": str(tmp_path / "diary"), "fp8_a": {"turn": "hang"}}))
    monkeypatch.setattr(Timer.__init__, "__defaults__", (command,))
    monkeypatch.setattr(suites, "toy", lambda: Suite("cpu", (GROUP,), (), 2, 2, 0.03, 0.5))
    monkeypatch.setattr(throughput, "time_ceilings", lambda suite, timer: None)
    out, over = tmp_path / "rows.jsonl", threading.Event()

    def terminate():
        while not over.wait(0.05):
            if out.exists() and any(row["kind"] == "cell" for row in rows_of(out.read_bytes())):
                time.sleep(0.3)     # until the next cell hangs
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        assert throughput.main(["--suite", "toy", "--out", str(out)]) == 130
    finally:
        over.set()
        thread.join()
    assert "the rows so far stay" in capsys.readouterr().err
    assert gone([int(line.split()[2]) for line in (tmp_path / "diary").read_text().splitlines()])
    assert kinds(rows_of(out.read_bytes())[1:]) == ["bf16 cell"]
    Journal(out).close()        # the lock is free again


# ---------------------------------------------------------------------------------------------------------------- GPU

@pytest.mark.gpu
def test_ceilings_on_a_gpu():
    shape = {"size": "1p5b", "B": 2, "T": 1024, "C": 2048, "H": 16, "D": 128, "F": 5632, "V": 50_304}
    rows = list(ceilings.rows({"device": "cuda", "have": [], "shapes": [shape]}))
    assert not [row for row in rows if row["kind"] == "failed" and "rowwise" not in row["label"]]
    assert next(row for row in rows if row["kind"] == "attention")["backend"] in ATTENTION
    assert clocks.describe_gpu()["gpu"]
