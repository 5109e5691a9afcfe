import json

import numpy as np
import pytest
import torch

from bench import linears, turns
from runtime import speed

TOY = ("shapes=64x64", "tokens=64", "compile=false", "repeats=2")


def call(capsys, *arguments):
    code = linears.main([str(a) for a in arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def timed(monkeypatch):
    """Cells that were timed, by an impostor that needs no time; what is in `timed.acts` happens first, one each."""
    class Timed(list):
        acts = []

    done = Timed()

    def time_cell(cell, options, device):
        act = done.acts.pop(0) if done.acts else None
        if act is not None:
            raise act
        done.append(cell)
        return {**vars(cell), "ratio": 1.2, "ratio_p10": 1.1, "ratio_p90": 1.3}, 1.0

    monkeypatch.setattr(linears, "time_cell", time_cell)
    Timed.acts = []
    return done


def test_the_shapes_are_those_of_the_six_sizes():
    want = set()
    for C, F in ((512, 1536), (768, 2048), (1024, 2816), (1536, 4096), (2048, 5632)):      # the README's table
        want |= {(C, 3 * C), (C, C), (C, 2 * F), (F, C), (C, 50304)}
    shapes = linears.shapes_of_configs()
    assert set(shapes) == want and len(shapes) == len(want)
    assert np.all(np.diff([K * N for K, N in shapes]) >= 0)


def test_a_linear_drift_cancels_in_the_ratio():
    clock = 1 + 0.02 * np.arange(21)                # seconds stretch by 2 % a turn: A B A B .. A
    a, b = 3.0 * clock[::2], 2.0 * clock[1::2]
    assert np.allclose(turns.ratios(a, b), 1.5, rtol=1e-12)
    assert abs(np.median(a) / np.median(b) - 1.5) < 1e-9 < np.ptp(a[:-1] / b)     # neighbours on one side would not do


def test_turns_alternate_and_give_the_ratio_of_the_work_on_a_machine_that_slows_down(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def step():
            order.append(name)
            now[0] += seconds * (1 + now[0])        # half the speed after a second
        return step

    a_s, b_s = turns.in_turns(work("a", 0.003), work("b", 0.002), 15, torch.device("cpu"))
    assert a_s.shape == (16,) and b_s.shape == (15,) and a_s[-1] > 1.2 * a_s[0]
    assert "".join(order) == "aaabbb" + "aaaabbbb" * 15 + "aaaa"       # three calls to find the pace; a turn is 10 ms of A
    assert np.allclose(turns.ratios(a_s, b_s), 1.5, rtol=2e-3)
    assert not np.allclose(a_s[:-1] / b_s, 1.5, rtol=2e-3)


def test_a_rehearsal_without_a_gpu_is_marked_and_done_once(capsys, tmp_path):
    out = tmp_path / "cpu.json"
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise")
    assert code == 0 and "1 of 1 rows to time" in said
    (gpu, timings), = speed.load_table(out).measured.items()
    assert gpu.startswith("cpu ") and "rehearsal" in timings.origin["timer"] and timings.origin["torch"] == torch.__version__
    assert timings.origin["command"].startswith("python bench/linears.py out=")
    row, = timings.rows
    assert (row.recipe, row.K, row.N, row.M) == ("tensorwise", 64, 64, 64)
    assert 0 < row.ratio_p10 <= row.ratio <= row.ratio_p90
    assert not out.with_suffix(".jsonl").exists()
    before = out.read_bytes()
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise")
    assert code == 0 and "0 of 1 rows to time" in said and out.read_bytes() == before


def test_the_piece_is_differentiated_by_input_and_weights_and_fp8_differs_from_bf16():
    torch.manual_seed(0)
    options, cell = linears.Options(compile=False), linears.Cell("tensorwise", 64, 96, 32)
    x, g = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_(), torch.randn(32, 96, dtype=torch.bfloat16)
    grads = []
    for recipe in ("off", "tensorwise"):
        torch.manual_seed(1)
        grads.append(linears._step(cell, recipe, options, x, g)())
    shapes = [tuple(t.shape) for t in grads[0]]
    assert sorted(shapes) == [(32, 64), (64,), (96, 64)] and shapes[0] == (32, 64)
    for a, b in zip(*grads, strict=True):
        error = ((a - b).float().norm() / a.float().norm()).item()
        assert 0 < error < 0.2, error


def test_rows_of_kernels_are_timed_with_the_weight_quantised_beforehand(capsys, tmp_path, monkeypatch):
    built, convert = [], linears.fp8.convert
    monkeypatch.setattr(linears.fp8, "convert",
                        lambda module, *how, **where: built.append(module) or convert(module, *how, **where))
    out = tmp_path / "cpu.json"
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise+kernels")
    assert code == 0, said
    (timings,) = speed.load_table(out).measured.values()
    assert [row.recipe for row in timings.rows] == ["tensorwise+kernels"]
    (holder,) = built
    assert type(holder[0]).__name__ == "KernelLinear" and holder[0].q is not None
    code, _, said = call(capsys, f"out={tmp_path / 'b.json'}", *TOY, "recipes=rowwise+kernels")
    assert code == 2 and "rowwise+kernels" in said


def test_by_default_autos_candidates_are_timed(monkeypatch):
    assert linears._recipes(linears.Options(), torch.device("cpu")) == [
        "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "tensorwise+kernels", "tensorwise_gw_hp+kernels"]


def test_what_is_not_finite_is_no_row(capsys, tmp_path, monkeypatch):
    forward = linears.Piece.forward
    monkeypatch.setattr(linears.Piece, "forward", lambda self, x: forward(self, x) * float("nan"))
    out = tmp_path / "cpu.json"
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise")
    assert code == 1 and "FAILED" in said and "not finite" in said and not out.exists()


def test_a_cut_run_goes_on_where_it_was(capsys, tmp_path, timed):
    out = tmp_path / "cpu.json"
    arguments = [f"out={out}", "shapes=64x64,64x128", "tokens=64", "compile=false", "recipes=tensorwise,rowwise"]
    timed.acts[:] = [None, None, KeyboardInterrupt()]
    code, _, said = call(capsys, *arguments)
    assert code == 130 and "Traceback" not in said and len(timed) == 2 and not out.exists()
    journal = out.with_suffix(".jsonl")
    lines = journal.read_text().splitlines()
    assert len(lines) == 2
    journal.write_text("\n".join(lines) + '\n{"setup": {"gpu": "NVIDIA')        # and a power cut tore the third line
    timed.acts[:] = [None, KeyboardInterrupt()]
    assert call(capsys, *arguments)[0] == 130
    assert len(journal.read_text().splitlines()) == 3 and all(map(json.loads, journal.read_text().splitlines()))
    assert call(capsys, *arguments)[0] == 0
    assert [(c.recipe, c.N) for c in timed] == [("tensorwise", 64), ("tensorwise", 128), ("rowwise", 64), ("rowwise", 128)]
    (timings,) = speed.load_table(out).measured.values()
    assert [(r.recipe, r.N) for r in timings.rows] == [(c.recipe, c.N) for c in timed]
    assert not journal.exists()


def test_the_budget_ends_a_run_that_the_same_command_finishes(capsys, tmp_path, timed, monkeypatch):
    now = iter(range(0, 10_000, 40))        # each look at the clock is 40 s after the last
    monkeypatch.setattr(linears.time, "perf_counter", lambda: next(now))
    arguments = [f"out={tmp_path / 'cpu.json'}", "shapes=64x64,64x128,64x256", "tokens=64", "recipes=rowwise", "budget=20"]
    code, said, _ = call(capsys, *arguments)
    assert code == 0 and len(timed) == 1 and "2 are left, the same command goes on" in said
    while len(timed) < 3:
        before = len(timed)
        assert call(capsys, *arguments)[0] == 0 and len(timed) > before, "no progress"
    assert "0 of 3 rows to time" in call(capsys, *arguments)[1]


@pytest.mark.parametrize("kind", [RuntimeError, type("OutOfResources", (Exception,), {})])      # triton's is no RuntimeError
def test_one_failing_row_does_not_cost_the_others(capsys, tmp_path, timed, kind):
    out = tmp_path / "cpu.json"
    timed.acts[:] = [None, kind("no kernel image\nfor this GPU")]
    code, said, _ = call(capsys, f"out={out}", "shapes=64x64,64x128,64x256", "tokens=64", "recipes=rowwise")
    assert code == 1 and "FAILED: no kernel image\n" in said and "for this GPU" not in said
    (timings,) = speed.load_table(out).measured.values()
    assert [row.N for row in timings.rows] == [64, 256]


def test_rows_of_two_setups_do_not_mix_and_other_entries_stay(capsys, tmp_path, timed):
    out, arguments = tmp_path / "cpu.json", [*TOY, "recipes=tensorwise"]
    out.write_bytes(speed.SHIPPED.read_bytes())
    assert call(capsys, f"out={out}", *arguments)[0] == 0
    table = json.loads(out.read_text())
    assert table["published"] == json.loads(speed.SHIPPED.read_text())["published"]
    gpu = next(name for name in table["gpus"] if name.startswith("cpu"))
    table["gpus"][gpu]["commit"] = "0123"       # another commit is no other setup: both are named
    out.write_text(json.dumps(table))
    assert call(capsys, f"out={out}", *arguments, "budget=9")[0] == 0
    assert call(capsys, f"out={out}", "shapes=64x128", *TOY[1:], "recipes=tensorwise")[0] == 0
    entry = json.loads(out.read_text())["gpus"][gpu]
    assert len(entry["rows"]) == 2 and entry["commit"].startswith("0123")
    entry["torch"] = "1.0"
    out.write_text(json.dumps({**table, "gpus": {gpu: entry}}))
    before = out.read_bytes()
    code, _, said = call(capsys, f"out={out}", "shapes=64x256", *TOY[1:], "recipes=tensorwise")
    assert code == 2 and "torch 1.0" in said and out.read_bytes() == before and len(timed) == 2


def test_a_journal_of_another_setup_is_dropped_and_said(capsys, tmp_path, timed):
    out, arguments = tmp_path / "cpu.json", ["shapes=64x64,64x128", *TOY[1:], "recipes=tensorwise"]
    timed.acts[:] = [None, KeyboardInterrupt()]
    assert call(capsys, f"out={out}", *arguments)[0] == 130
    journal = out.with_suffix(".jsonl")
    journal.write_text(journal.read_text().replace(torch.__version__, "1.0"))
    code, said, _ = call(capsys, f"out={out}", *arguments)
    assert code == 0 and "1 rows of another setup" in said and len(timed) == 3


def test_a_cpu_never_writes_into_the_shipped_table(capsys, timed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = speed.SHIPPED.read_bytes()
    for arguments in ((), ("out=runtime/fp8_speed.json",), (f"out={speed.SHIPPED.parent}/../runtime/fp8_speed.json",)):
        code, _, said = call(capsys, *arguments, *TOY)
        assert code == 2 and "nothing about a GPU" in said and "out=" in said
    assert speed.SHIPPED.read_bytes() == before and not timed


@pytest.mark.parametrize("argument, word", [
    ("shapes=64", "64"), ("shapes=64x60", "multiples of 16"), ("shapes=0x64", "shape"), ("shapes=64x64x64", "shape"),
    ("shapes=-64x64", "shape"), ("recipes=tensorwize", "tensorwise"), ("recipes=auto", "auto"), ("recipes=off", "off"),
    ("tokens=100", "multiple of 16"), ("tokens=0", "tokens=0"), ("tokens=1e99", "tokens"), ("repeats=0", "repeats"),
    ("budget=0", "budget"), ("budget=nan", "budget"), ("compile=maybe", "compile"), ("tokenz=16", "tokens"),
    ("out=x.txt", ".json"), ("out=nowhere/at/all.json", "folder")])
def test_mistakes_get_a_sentence(capsys, tmp_path, timed, argument, word):
    given = {"out": f"out={tmp_path / 'cpu.json'}"} | {argument.split("=")[0]: argument}
    code, _, said = call(capsys, *given.values())
    assert code == 2 and word in said and "Traceback" not in said and not timed


def test_a_damaged_table_gets_a_sentence_and_stays(capsys, tmp_path, timed):
    out = tmp_path / "cpu.json"
    out.write_text('{"format_version": 1, "gpus": {"NVIDIA')
    assert call(capsys, f"out={out}", *TOY)[0] == 2 and out.read_text().endswith("NVIDIA")


def test_help_names_every_option(capsys):
    code, said, _ = call(capsys, "--help")
    assert code == 0 and all(f"\n  {name} " in said for name in vars(linears.Options()))


@pytest.mark.gpu
def test_a_row_of_this_gpu(capsys, tmp_path):
    out = tmp_path / "gpu.json"
    code, said, _ = call(capsys, f"out={out}", "shapes=1024x4096", "tokens=4096", "recipes=tensorwise,rowwise")
    assert code == 0, said
    timings = speed.load_table(out).measured[torch.cuda.get_device_name()]
    assert timings.origin["timer"] == "CUDA events" and len(timings.rows) == 2
    assert all(0.2 < row.ratio < 2 and row.ratio_p90 / row.ratio_p10 < 1.2 for row in timings.rows)
