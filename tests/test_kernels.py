"""bench/kernels.py: the table that fp8.recipe=auto goes by; a linear drift cancels. Casts: tests/test_fp8_kernels.py."""

import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import kernels
from runtime import speed

TOY = ("shapes=64x64", "tokens=64", "turns=2")


def call(capsys, *arguments):
    code = kernels.main([str(a) for a in arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def timed(monkeypatch):
    """Linears that were timed, by an impostor that needs no time; what stands in `acts` happens first, one each."""
    done, acts = [], []

    def time_linear(recipe, K, N, options, device):
        if act := acts.pop(0) if acts else None:
            raise act
        done.append((recipe, K, N))
        return {"recipe": recipe, "K": K, "N": N, "M": options.tokens, "ratio": 1.2, "ratio_p10": 1.1, "ratio_p90": 1.3}, 1.0
    monkeypatch.setattr(kernels, "time_linear", time_linear)
    return done, acts


def test_by_default_autos_candidates_are_timed_at_the_shapes_of_the_six_sizes():
    want = set()
    for C, F in ((512, 1536), (768, 2048), (1024, 2816), (1536, 4096), (2048, 5632)):      # the README's table
        want |= {(C, 3 * C), (C, C), (C, 2 * F), (F, C), (C, 50304)}
    shapes = kernels.shapes_of(kernels.Options())
    assert set(shapes) == want and len(shapes) == len(want) and np.all(np.diff([K * N for K, N in shapes]) >= 0)
    assert kernels.recipes_of(kernels.Options(), torch.device("cpu")) == [
        "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "tensorwise+kernels", "tensorwise_gw_hp+kernels"]


def test_turns_alternate_and_give_the_ratio_of_the_work_on_a_machine_that_slows_down(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def step():
            order.append(name)
            now[0] += seconds * (1 + now[0])        # half the speed after a second
        return step

    a, b = kernels.in_turns(work("a", 0.003), work("b", 0.002), 15, torch.device("cpu"))
    assert a.shape == (16,) and b.shape == (15,) and a[-1] > 1.2 * a[0]
    assert "".join(order) == ("aaaaa" + "bbbbb") * 15 + "aaaaa"
    assert np.allclose(kernels.ratios(a, b), 1.5, rtol=2e-3) and not np.allclose(a[:-1] / b, 1.5, rtol=2e-3)


@pytest.mark.parametrize(("recipe", "is_cast"), [("off", False), ("tensorwise+kernels", False), ("tensorwise", True)])
def test_weights_are_cast_in_the_timed_passes_only_where_training_casts_them_in_every_micro_batch(recipe, is_cast):
    """BF16 that casts its fp32 weight at each use is slower than training's, and auto would choose FP8 for it."""
    x, g = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(32, 96).bfloat16()
    call, found = kernels.linear_step(recipe, 64, 96, x, g), []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            found.extend([op] * (op is torch.ops.aten._to_copy.default and (args[0].shape, args[0].dtype) == (
                (96, 64), torch.float32) and kwargs.get("dtype") != torch.float32))
            return op(*args, **(kwargs or {}))
    with Casts():
        call()
    assert bool(found) is is_cast


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise+kernels"])
def test_a_linear_is_differentiated_by_input_and_weights_and_fp8_differs_from_bf16(recipe):
    torch.manual_seed(0)
    x, g = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_(), torch.randn(32, 96, dtype=torch.bfloat16)
    grads = []
    for name in ("off", recipe):
        torch.manual_seed(1)
        grads.append(kernels.linear_step(name, 64, 96, x, g)())
    assert sorted(tuple(t.shape) for t in grads[0]) == [(32, 64), (64,), (96, 64)] and grads[0][0].shape == (32, 64)
    for a, b in zip(*grads, strict=True):
        assert 0 < ((a - b).float().norm() / a.float().norm()).item() < 0.2


def test_a_rehearsal_without_a_gpu_is_marked_and_done_once_and_what_is_not_finite_is_no_row(capsys, tmp_path, monkeypatch):
    out = tmp_path / "absent" / "cpu.json"
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise,tensorwise+kernels")
    assert code == 0 and "2 rows to time" in said
    entry, = json.loads(out.read_text())["measured"]["cpu"]
    (gpu, rows), = speed.load_table(out)["measured"]["cpu"].items()
    assert entry["gpu"] == gpu and gpu.startswith("cpu ") and "rehearsal" in entry["timer"]
    assert entry["torch"] == torch.__version__ and entry["command"].startswith("python -m bench.kernels out=")
    assert [row[:4] for row in rows] == [("tensorwise", 64, 64, 64), ("tensorwise+kernels", 64, 64, 64)]
    assert all(0 < row.ratio_p10 <= row.ratio <= row.ratio_p90 for row in rows)
    before, forward = out.read_bytes(), kernels.Piece.forward
    assert before.decode() == speed.to_text(json.loads(before))
    monkeypatch.setattr(kernels.Piece, "forward", lambda self, x: forward(self, x) * float("nan"))
    code, said, _ = call(capsys, f"out={out}", *TOY, "recipes=tensorwise,rowwise")
    assert code == 1 and "1 rows to time, 1 are there" in said and "FAILED" in said and "not finite" in said
    assert out.read_bytes() == before


def test_a_cut_or_failing_row_costs_no_other_and_the_same_command_goes_on(capsys, tmp_path, timed, monkeypatch):
    out, (done, acts) = tmp_path / "cpu.json", timed
    arguments = [f"out={out}", "shapes=64x64,64x128", "tokens=64", "recipes=tensorwise,rowwise"]
    acts[:] = [None, type("OutOfResources", (Exception,), {})("no kernel image\nfor this GPU"), None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        call(capsys, *arguments)
    assert done == [("tensorwise", 64, 64), ("tensorwise", 64, 128)]
    assert "rowwise                        64 x 64     FAILED: no kernel image\n" in capsys.readouterr().out
    now = iter(range(0, 10_000, 40))        # each look at the clock is 40 s after the last
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(now))
    assert "1 rows are left, the same command goes on" in call(capsys, *arguments, "budget=20")[1]
    assert call(capsys, *arguments, "budget=20")[0] == 0
    rows, = speed.load_table(out)["measured"]["cpu"].values()
    assert [(row.recipe, row.N) for row in rows] == [
        ("tensorwise", 64), ("tensorwise", 128), ("rowwise", 64), ("rowwise", 128)]


def test_rows_of_two_setups_do_not_mix_and_other_entries_stay(capsys, tmp_path, timed):
    out = tmp_path / "cpu.json"
    out.write_bytes(speed.SHIPPED.read_bytes())

    def again(shape, **changes):
        value = json.loads(out.read_text())
        for entry in value["measured"].get("cpu", ()):
            entry |= changes
        out.write_text(json.dumps(value))
        return call(capsys, f"out={out}", f"shapes={shape}", "tokens=64", "recipes=tensorwise")
    assert again("64x64")[0] == again("64x128", commit="0123")[0] == 0      # another commit is no other setup: both are named
    value = json.loads(out.read_text())
    (entry,), shipped = value["measured"]["cpu"], json.loads(speed.SHIPPED.read_text())
    assert value["published"] == shipped["published"] and len(entry["rows"]) == 2 and entry["commit"].startswith("0123, ")
    code, _, said = again("64x256", torch="1.0")
    assert code == 2 and "torch 1.0" in said and len(timed[0]) == 2


@pytest.mark.parametrize("argument, word", [
    ("shapes=64x60", "multiples of 16"), ("shapes=0x64", "shape"), ("recipes=tensorwize", "tensorwise"), ("recipes=off", "off"),
    ("recipes=rowwise+kernels", "rowwise"), ("tokens=100", "multiple of 16"), ("tokenz=16", "tokens"),
    ("out=torn.json", "torn.json"), ("out=runtime/fp8_speed.json", "nothing about a GPU")])
def test_mistakes_get_a_sentence(capsys, tmp_path, timed, monkeypatch, argument, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (torn := tmp_path / "torn.json").write_text('{"format_version": 2, "measured": {"sm_90')
    shipped = speed.SHIPPED.read_bytes()
    given = {"out": f"out={tmp_path / 'cpu.json'}"} | {argument.split("=")[0]: argument.replace("torn.json", str(torn))}
    code, _, said = call(capsys, *given.values())
    assert code == 2 and word in said and said.count("\n") == 1 and not timed[0]
    assert torn.read_text().endswith("sm_90") and speed.SHIPPED.read_bytes() == shipped


@pytest.mark.gpu
def test_rows_of_this_gpu(capsys, tmp_path):
    out = tmp_path / "gpu.json"
    code, said, _ = call(capsys, f"out={out}", "shapes=1024x4096", "tokens=4096", "recipes=tensorwise,rowwise")
    assert code == 0, said
    (entry,), = json.loads(out.read_text())["measured"].values()
    assert entry["gpu"] == torch.cuda.get_device_name() and entry["timer"] == "CUDA events" and len(entry["rows"]) == 2
    assert all(0.2 < row["ratio"] < 2 and row["ratio_p90"] / row["ratio_p10"] < 1.2 for row in entry["rows"])
    assert call(capsys, "casts")[0] == 0 and call(capsys, "matmuls", "shapes=1024x4096", "tokens=4096")[0] == 0
