"""bench/kernels.py makes the table of timings, in which a linear drift cancels; fp8/speed.py
chooses recipes by it."""

import io
import itertools
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import kernels
from fp8 import speed
from fp8.speed import choose, load_table
from lib.errors import UserError
from tests.conftest import asked


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch):
    """Linears that were timed, by an impostor that needs no time; what stands in `acts` happens
    first, one each."""
    done, acts = [], []

    def time_linear(recipe, K, N, options, device):
        if act := acts.pop(0) if acts else None:
            raise act
        done.append((recipe, K, N))
        return {
            "recipe": recipe,
            "K": K,
            "N": N,
            "M": options.tokens,
            "ratio": 1.2,
            "ratio_p10": 1.1,
            "ratio_p90": 1.3,
        }, 1.0

    monkeypatch.setattr(kernels, "time_linear", time_linear)
    return done, acts


def test_by_default_linears_of_six_sizes_are_timed_smallest_first():
    sizes = (512, 1536), (768, 2048), (1024, 2816), (1536, 4096), (2048, 5632)  # the README's table
    expected = {
        shape for C, F in sizes for shape in ((C, 3 * C), (C, C), (C, 2 * F), (F, C), (C, 50304))
    }
    shapes = kernels.shapes_of(kernels.Options())
    assert sorted(shapes) == sorted(expected)
    assert np.all(np.diff([K * N for K, N in shapes]) >= 0)


def test_by_default_autos_candidates_are_timed():
    assert kernels.recipes_of(kernels.Options()) == (
        "tensorwise",
        "tensorwise_gw_hp",
        "rowwise",
        "rowwise_with_gw_hp",
        "tensorwise+kernels",
        "tensorwise_gw_hp+kernels",
    )


def test_turns_give_the_ratio_of_the_work_though_the_machine_slows_down(
    monkeypatch: pytest.MonkeyPatch,
):
    now, order = [0.0], []
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def step():
            order.append(name)
            now[0] += seconds * (1 + now[0])  # half the speed after a second

        return step

    a, b, ratios = kernels.in_turns(work("a", 0.003), work("b", 0.002), 15, torch.device("cpu"))
    assert a.shape == (16,) and b.shape == (15,) and a[-1] > 1.2 * a[0]
    assert "".join(order) == ("aaaaa" + "bbbbb") * 15 + "aaaaa"
    assert np.allclose(ratios, 1.5, rtol=2e-3) and not np.allclose(a[:-1] / b, 1.5, rtol=2e-3)


def test_a_timed_linear_casts_its_weight_where_training_does(
    monkeypatch: pytest.MonkeyPatch,
):
    """BF16 that casts its fp32 weight at each use is slower than training's, and auto would choose
    FP8 for it."""
    pieces, make = [], kernels.Precision
    monkeypatch.setattr(kernels, "Precision", lambda piece: pieces.append(piece) or make(piece))
    torch.manual_seed(0)
    x, g = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(32, 96).bfloat16()
    grads = {}
    for recipe, is_cast in (("off", False), ("tensorwise+kernels", False), ("tensorwise", True)):
        torch.manual_seed(1)
        call = kernels.linear_step(recipe, 64, 96, x, g)
        grads[recipe] = call()
        pieces[-1][1][0].weight.data.fill_(float("nan"))  # is read again, or not
        assert call()[0].isnan().any().item() is is_cast, recipe
    bf16 = grads.pop("off")
    assert [tuple(t.shape) for t in bf16] == [(32, 64), (64,), (96, 64)]
    for quantised in grads.values():
        for a, b in zip(bf16, quantised, strict=True):
            assert 0 < ((a - b).float().norm() / a.float().norm()).item() < 0.2


TOY = ("shapes=64x64", "tokens=64", "turns=2")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The table of two recipes on this CPU, in a folder that the command has made."""
    out = tmp_path_factory.mktemp("rehearsal") / "absent" / "cpu.json"
    words = [f"out={out}", *TOY, "recipes=tensorwise,tensorwise+kernels"]
    with redirect_stdout(io.StringIO()):
        assert kernels.main(words) == 0
    return out


@pytest.fixture
def of_this_cpu(rehearsed: Path) -> dict[str, Any]:
    """The table's entry."""
    (entry,) = load_table(rehearsed)["measured"]["cpu"]
    return entry


def test_a_rehearsal_without_a_gpu_is_marked(of_this_cpu: dict[str, Any]):
    assert of_this_cpu["gpu"].startswith("cpu ")
    assert "rehearsal" in of_this_cpu["timer"]


def test_a_table_says_what_it_was_made_with(of_this_cpu: dict[str, Any]):
    assert of_this_cpu["torch"] == torch.__version__
    assert of_this_cpu["command"].startswith("python -m bench.kernels out=")


def test_a_table_is_written_in_one_way(rehearsed: Path):
    text = rehearsed.read_text()
    assert text == speed.to_text(json.loads(text))


def test_a_row_is_of_a_recipe_and_a_shape(of_this_cpu: dict[str, Any]):
    assert [(row["recipe"], row["K"], row["N"], row["M"]) for row in of_this_cpu["rows"]] == [
        ("tensorwise", 64, 64, 64),
        ("tensorwise+kernels", 64, 64, 64),
    ]


def test_a_ratio_lies_between_its_percentiles(of_this_cpu: dict[str, Any]):
    for row in of_this_cpu["rows"]:
        assert 0 < row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]


def test_what_is_there_is_not_timed_again_and_what_is_not_finite_is_no_row(
    rehearsed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    out = Path(shutil.copy(rehearsed, tmp_path))
    forward = kernels.RMSNorm.forward
    monkeypatch.setattr(kernels.RMSNorm, "forward", lambda self, x: forward(self, x) * float("nan"))
    words = (f"out={out}", *TOY, "recipes=tensorwise,rowwise")
    page = asked(capsys, kernels.main, *words, code=1)
    assert "1 rows to time, 1 are there" in page
    assert "not finite" in page
    assert out.read_text() == rehearsed.read_text()


@pytest.mark.parametrize("words", ["casts", "matmuls shapes=64x64 tokens=64"])
def test_casts_and_matmuls_alone_are_timed(words: str, capsys: pytest.CaptureFixture[str]):
    assert asked(capsys, kernels.main, *words.split())


Timed = tuple[list[tuple[str, int, int]], list]  # what `timed` has timed, and what happens first


@dataclass
class Cut:
    """A command for four rows beside the shipped ones, which failed at the second and was cut at
    the fourth: its words, and what it printed."""

    words: list[str]
    page: str


@pytest.fixture
def cut(tmp_path: Path, timed: Timed) -> Cut:
    out = tmp_path / "cpu.json"
    out.write_bytes(speed.SHIPPED.read_bytes())
    words = [f"out={out}", "shapes=64x64,64x128", "tokens=64", "recipes=tensorwise,rowwise"]
    failure = type("OutOfResources", (Exception,), {})("no kernel image\nfor this GPU")
    timed[1][:] = [None, failure, None, KeyboardInterrupt()]
    page = io.StringIO()
    with redirect_stdout(page), pytest.raises(KeyboardInterrupt):
        kernels.main(words)
    return Cut(words, page.getvalue())


def go_on(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command prints in two calls, whose budget ends within the first: each look at the
    clock is 15 s after the last. Another commit in the table is no other setup."""
    out = Path(words[0].removeprefix("out="))
    out.write_text(re.sub('"commit": .*', '"commit": "0123",', out.read_text()))
    now = iter(range(0, 10_000, 15))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(now))
    pages = []
    for code in (3, 0):
        page = io.StringIO()
        with redirect_stdout(page):
            assert kernels.main([*words, "budget=20"]) == code
        pages.append(page.getvalue())
    return pages


def test_a_row_that_fails_costs_no_other(timed: Timed, cut: Cut):
    assert timed[0] == [("tensorwise", 64, 64), ("tensorwise", 64, 128)]
    assert "64 x 64     FAILED: no kernel image for this GPU\n" in cut.page


def test_the_same_command_goes_on_with_what_is_left(
    timed: Timed, cut: Cut, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pages = go_on(cut.words, monkeypatch)
    sentence = "1 rows are left, the same command goes on"
    assert [sentence in page for page in pages] == [True, False]
    (entry,) = load_table(tmp_path / "cpu.json")["measured"]["cpu"]
    expected = [*itertools.product(("tensorwise", "rowwise"), (64, 128))]
    assert [(row["recipe"], row["N"]) for row in entry["rows"]] == expected
    assert len(timed[0]) == 4


def test_an_entry_names_all_commits_and_the_published_rows_stay(
    cut: Cut, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    go_on(cut.words, monkeypatch)
    table = load_table(tmp_path / "cpu.json")
    (entry,) = table["measured"]["cpu"]
    assert entry["commit"].startswith("0123, ")
    assert table["published"] == load_table()["published"]


def test_rows_of_two_versions_of_torch_do_not_mix(
    timed: Timed, cut: Cut, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "cpu.json"
    out.write_text(out.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    n_timed = len(timed[0])
    assert "torch 1.0" in asked(capsys, kernels.main, cut.words[0], "shapes=64x256", code=2)
    assert len(timed[0]) == n_timed


@pytest.mark.parametrize(
    "arguments, word",
    [
        ("shapes=64x60", "multiples of 16"),
        ("shapes=0x64", "shape"),
        ("recipes=tensorwize", "tensorwise"),
        ("recipes=off", "off"),
        ("recipes=rowwise+kernels", "rowwise"),
        ("out=README.md", "no table of timings"),
    ],
)
def test_mistakes_get_a_sentence_and_the_shipped_table_holds_no_cpus_times(
    capsys: pytest.CaptureFixture[str],
    timed: tuple,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    word: str,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = asked(
        capsys,
        kernels.main,
        *({"out": "out=out/cpu.json"} | {arguments.split("=")[0]: arguments}).values(),
        code=2,
    )
    assert word in said and said.count("\n") == 1
    assert asked(capsys, kernels.main, code=2) and not timed[0]


# ------------------------------------------------------------------------------- what auto chooses

GPU, TW = "NVIDIA H100 80GB HBM3", "tensorwise"
RECIPES = (TW, "rowwise", "rowwise_with_gw_hp")


def entry(gpu, *rows: object):
    """An entry of the table from (recipe, K, N, ratio) or (recipe, K, N, ratio, M)."""
    return {
        "gpu": gpu,
        "rows": [dict(zip(("recipe", "K", "N", "ratio", "M"), row, strict=False)) for row in rows],
    }


@pytest.mark.parametrize(
    "measured, gpu, K, N, recipe, why",
    [
        ([(TW, 64, 64, 1.2)], GPU, 48, 640, None, "nothing timed at or below 48 x 640"),
        (
            [(TW, 32, 32, 1.5), (TW, 64, 64, 0.87)],
            GPU,
            64,
            64,
            None,
            "BF16 is faster: best measured 0.87x at 64 x 64",
        ),
        # the best at or below
        ([(TW, 32, 32, 1.5), (TW, 64, 64, 0.87)], GPU, 80, 64, TW, "measured 1.50x at 32 x 32"),
        ([(TW, 64, 64, 1.03)], GPU, 64, 64, None, "FP8 gains too little: best measured 1.03x"),
        # a shape at its slowest M
        ([(TW, 64, 64, 1.5, 64), (TW, 64, 64, 0.9, 128)], GPU, 64, 64, None, "best measured 0.90x"),
        # the first candidate
        (
            [("rowwise", 64, 64, 1.3), (TW, 64, 64, 1.3)],
            GPU,
            64,
            64,
            TW,
            "measured 1.30x at 64 x 64",
        ),
        # Our own rows override published ones altogether: rowwise was not even timed.
        ([], GPU, 64, 64, "rowwise", "published 1.60x at 64 x 64"),
        ([(TW, 64, 64, 0.9)], GPU, 64, 64, None, "measured 0.90x"),
        ([(TW, 64, 64, 1.2)], "H100", 64, 64, TW, f"measured on {GPU} 1.20x"),  # --plan h100
        # of the architecture
        ([], "NVIDIA H200", 64, 64, "rowwise", "published on H100 1.60x at 64 x 64"),
        ([(TW, 16, 16, 2.0)], None, 64, 64, None, "no GPU"),
        ([(TW, 16, 16, 2.0)], "NVIDIA B200", 64, 64, None, "no timings"),
        ([(TW, 16, 16, 2.0)], "NVIDIA Unheard", 64, 64, None, "no timings"),
    ],
)
def test_the_choice_and_its_reason(
    measured: list[tuple[str, int, int, float, int] | tuple[str, int, int, float]],
    gpu: str | None,
    K: int,
    N: int,
    recipe: str | None,
    why: str,
):
    table = {
        "measured": {"sm_90": [entry(GPU, *measured)]} if measured else {},
        "published": {"sm_90": [entry("H100", (TW, 64, 64, 1.5), ("rowwise", 64, 64, 1.6))]},
    }
    chosen, reason = choose(table, gpu, K, N, RECIPES)
    assert chosen == recipe and why in reason


def test_of_several_gpus_of_an_architecture_the_very_one_counts(monkeypatch: pytest.MonkeyPatch):
    two = {
        "measured": {
            "sm_90": [entry("NVIDIA H200", (TW, 64, 64, 1.2)), entry(GPU, (TW, 64, 64, 1.1))]
        }
    }
    for gpu, due in (
        (GPU, "measured 1.10x"),
        ("NVIDIA H200", "measured 1.20x"),
        ("NVIDIA H200 NVL", "measured on NVIDIA H200 1.20x"),
    ):
        assert choose(two, gpu, 64, 64, RECIPES)[1].startswith(due), gpu
    # the GPU at hand is asked: no name needs to be known
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Unheard")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choose(two, "NVIDIA Unheard", 64, 64, RECIPES) == (
        TW,
        "measured on NVIDIA H200 1.20x at 64 x 64",
    )


def test_the_shipped_table_says_what_is_published_of_our_sizes(tmp_path: Path):
    text, published = speed.SHIPPED.read_text(), load_table() | {"measured": {}}
    assert text == speed.to_text(json.loads(text)), "a row a line"
    for K, N in ((768, 4096), (1024, 50304), (2048, 2048), (5632, 2048)):
        assert choose(published, GPU, K, N, RECIPES)[0] is None, (K, N)
    assert choose(published, GPU, 2048, 11264, RECIPES) == (TW, "published 1.18x at 1664 x 6656")
    for damaged in (text[:-9], "[]", text.replace('"format_version": 2', '"format_version": 1')):
        (file := tmp_path / "table.json").write_text(damaged)
        with pytest.raises(UserError, match="table.json is no table of timings"):
            load_table(file)
