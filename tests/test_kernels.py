"""bench/kernels.py: the table that fp8.recipe=auto goes by; a linear drift cancels."""

import itertools
import json

import numpy as np
import pytest
import torch

from bench import kernels
from runtime import speed


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
    sizes = (512, 1536), (768, 2048), (1024, 2816), (1536, 4096), (2048, 5632)      # the README's table
    want = {shape for C, F in sizes for shape in ((C, 3 * C), (C, C), (C, 2 * F), (F, C), (C, 50304))}
    shapes = kernels.shapes_of(kernels.Options())
    assert sorted(shapes) == sorted(want) and np.all(np.diff([K * N for K, N in shapes]) >= 0)
    assert kernels.recipes_of(kernels.Options()) == (
        "tensorwise", "tensorwise_gw_hp", "rowwise", "rowwise_with_gw_hp", "tensorwise+kernels", "tensorwise_gw_hp+kernels")


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


def test_a_linear_is_differentiated_and_its_weight_cast_only_where_training_casts_it_in_every_micro_batch(monkeypatch):
    """BF16 that casts its fp32 weight at each use is slower than training's, and auto would choose FP8 for it."""
    pieces, Piece = [], kernels.Piece
    monkeypatch.setattr(kernels, "Piece", lambda K, N: pieces.append(Piece(K, N)) or pieces[-1])
    torch.manual_seed(0)
    x, g = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(32, 96).bfloat16()
    grads = {}
    for recipe, is_cast in (("off", False), ("tensorwise+kernels", False), ("tensorwise", True)):
        torch.manual_seed(1)
        call = kernels.linear_step(recipe, 64, 96, x, g)
        grads[recipe] = call()
        pieces[-1].linear[0].weight.data.fill_(float("nan"))        # is read again, or not
        assert call()[0].isnan().any().item() is is_cast, recipe
    bf16 = grads.pop("off")
    assert [tuple(t.shape) for t in bf16] == [(32, 64), (64,), (96, 64)]
    for quantised in grads.values():
        for a, b in zip(bf16, quantised, strict=True):
            assert 0 < ((a - b).float().norm() / a.float().norm()).item() < 0.2


def test_a_rehearsal_without_a_gpu_is_marked_and_done_once_and_what_is_not_finite_is_no_row(capsys, tmp_path, monkeypatch):
    toy = (f"out={tmp_path / 'absent' / 'cpu.json'}", "shapes=64x64", "tokens=64", "turns=2")
    code, said, _ = call(capsys, *toy, "recipes=tensorwise,tensorwise+kernels")
    assert code == 0 and "2 rows to time" in said
    text = (tmp_path / "absent/cpu.json").read_text()
    entry, = json.loads(text)["measured"]["cpu"]
    assert entry["gpu"].startswith("cpu ") and "rehearsal" in entry["timer"] and text == speed.to_text(json.loads(text))
    assert entry["torch"] == torch.__version__ and entry["command"].startswith("python -m bench.kernels out=")
    assert [(row["recipe"], row["K"], row["N"], row["M"]) for row in entry["rows"]] == [
        ("tensorwise", 64, 64, 64), ("tensorwise+kernels", 64, 64, 64)]
    assert all(0 < row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"] for row in entry["rows"])
    forward = kernels.Piece.forward
    monkeypatch.setattr(kernels.Piece, "forward", lambda self, x: forward(self, x) * float("nan"))
    code, said, _ = call(capsys, *toy, "recipes=tensorwise,rowwise")
    assert code == 1 and "1 rows to time, 1 are there" in said and "FAILED" in said and "not finite" in said
    assert (tmp_path / "absent/cpu.json").read_text() == text
    assert call(capsys, "casts")[0] == call(capsys, "matmuls", "shapes=64x64", "tokens=64")[0] == 0


def test_a_cut_or_failing_row_costs_no_other_and_the_same_command_goes_on(capsys, tmp_path, timed, monkeypatch):
    out, (done, acts) = tmp_path / "cpu.json", timed
    arguments = [f"out={out}", "shapes=64x64,64x128", "tokens=64", "recipes=tensorwise,rowwise"]
    acts[:] = [None, type("OutOfResources", (Exception,), {})("no kernel image\nfor this GPU"), None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        call(capsys, *arguments)
    assert done == [("tensorwise", 64, 64), ("tensorwise", 64, 128)]
    assert "rowwise                        64 x 64     FAILED: no kernel image for this GPU\n" in capsys.readouterr().out
    now = iter(range(0, 10_000, 15))        # each look at the clock is 15 s after the last
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(now))
    for left in (True, False):
        code, said, _ = call(capsys, *arguments, "budget=20")
        assert code == 0 and ("1 rows are left, the same command goes on" in said) is left
    (entry,) = speed.load_table(out)["measured"]["cpu"]
    assert [(row["recipe"], row["N"]) for row in entry["rows"]] == [*itertools.product(("tensorwise", "rowwise"), (64, 128))]


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


@pytest.mark.parametrize("arguments, word", [
    ("shapes=64x60", "multiples of 16"), ("shapes=0x64", "shape"), ("recipes=tensorwize", "tensorwise"), ("recipes=off", "off"),
    ("recipes=rowwise+kernels", "rowwise"), ("out=README.md", "no table of timings")])
def test_mistakes_get_a_sentence_and_the_shipped_table_holds_no_cpus_times(capsys, timed, monkeypatch, arguments, word):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, said = call(capsys, *({"out": "out=out/cpu.json"} | {arguments.split("=")[0]: arguments}).values())
    assert code == 2 and word in said and said.count("\n") == 1
    assert call(capsys)[0] == 2 and not timed[0]
