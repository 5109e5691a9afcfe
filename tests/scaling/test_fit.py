"""The command as a user meets it: headline first, honest downgrades, a sentence for each mistake;
tables read as they stand."""

import hashlib
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lib.errors import UserError
from scaling import fit as cli
from scaling.groups import fit_group, fit_points, seed_noise
from scaling.laws import fit_law
from scaling.records import read_runs
from scaling.table_points import LinesLeftOut, TableFile, read_points
from tests.conftest import asked, process
from tests.helpers.law_points import FOLDER, ROUND, early, made, published
from tests.helpers.scaling_runs import edit, strict, write_branches, write_ladder, write_run
from tests.law_trials import (
    TRUTH,
    bent_valleys,
    best_size,
    loss_of,
    table_of_sizes,
    table_with_outliers,
)

HEAD = "run,N,tokens,flops,loss,lr"
ROWS = (
    "a,1e8,2e9,1.2e18,3.5,0.003",
    "b,2e8,4e9,4.8e18,3.25,0.003",
    "c,4e8,8e9,1.92e19,3.0,0.01",
    "d,8e8,1.6e10,7.68e19,2.75,0.03",
)
N, D = np.array([1e8, 2e8, 4e8, 8e8]), np.array([2e9, 4e9, 8e9, 1.6e10])
LONG = [int(size) for size in np.geomspace(3e4, 3e7, 8)]


def fitted(capsys, *arguments):
    """(what the command printed, law.json) of a fit that ends well; out=FOLDER stands first."""
    return asked(capsys, cli.main, *arguments), strict(
        Path(str(arguments[0]).removeprefix("out=")) / "law.json"
    )


def test_a_ladder_on_one_ray(tmp_path, capsys):
    folder = write_ladder(tmp_path / "out").parent
    write_run(folder / "out" / "mid", params=300_000, is_annealed=False)
    # not the repository
    result = process(Path(cli.__file__).resolve(), "out", "out=report", "--all", cwd=folder)
    assert (
        result.returncode == 0
        and result.stderr == ""
        and result.stdout.startswith("bf16: 3 runs of 3 trajectories, N 38.9k")
    )
    for line in (
        "power_c: L = 55.9 C^-0.117",
        "leave 0 degrees of freedom",
        "left out mid: ",
        "Seed noise: unknown",
        "3 BF16/FP8 pairs, gaps of +0.409 to +0.466 % in BF16",
        "| starts at best |",
    ):
        assert line in result.stdout, line
    # The same runs give the same bytes, and by default few lines.
    out, content = fitted(capsys, f"out={folder / 'again'}", folder / "out")
    assert len(out.splitlines()) <= 40 < len(result.stdout.splitlines()) and "--all" in out
    for name, begin in (("figure.png", b"\x89PNG"), ("figure.svg", b"<?xml"), ("law.json", b"{")):
        data = (folder / "report" / name).read_bytes()
        assert data.startswith(begin) and (
            name.endswith("png") or (folder / "again" / name).read_bytes() == data
        )
    assert (
        set(content["groups"]) == {"bf16", "tensorwise"}
        and content["delta"] == 1e-3
        and "laws" not in content
    )
    group = content["groups"]["bf16"]
    assert (
        group["runs"] == ["a_bf16", "b_bf16", "c_bf16"] and group["headline"]["form"] == "power_c"
    )
    assert list(group["laws"]) == ["chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop"]
    ray = group["laws"]["ray"]
    assert [ray["E"], ray["K"], ray["gamma"]] == pytest.approx([0.9, 330, 0.2], rel=1e-6) and ray[
        "ci95"
    ] is None
    # Under another convention it is the power law on that convention's numbers.
    runs = [strict(folder / f"out/{letter}_bf16/summary.json") for letter in "abc"]
    x = [one["flops_per_token_6n_nonembed"] * one["tokens"] for one in runs]
    counts = {
        row["value"]: row["gamma"] for row in group["robustness"] if row["variant"] == "count C as"
    }
    assert len(counts) == 4 and counts["flops_per_token_6n_nonembed"] == pytest.approx(
        fit_law("power_c", x, [one["loss_bf16"] for one in runs]).parameters["gamma"]
    )
    first = content["inputs"][0]
    assert len(content["inputs"]) == 6 and len(first["summary_sha256"]) == 64
    assert [first[key] for key in ("N", "D", "trunk", "loss")] == [
        38_912,
        778_240,
        "a_bf16",
        runs[0]["loss_bf16"],
    ]


def test_many_recipes_still_fit_one_screen(tmp_path, capsys, no_figures):
    for recipe in ("bf16", *"abcdefghijk"):
        write_run(tmp_path / "many" / recipe, recipe=recipe, pair_id=recipe)
    lines = asked(capsys, cli.main, tmp_path / "many").splitlines()
    # said of all, so it stays
    assert len(lines) == 40 and "--all" in lines[-5] and lines[-4].startswith("Seed noise: ")


def test_as_trained_losses_seed_sd_and_the_default_folder(tmp_path, capsys, no_figures):
    write_ladder(tmp_path / "out")
    (tmp_path / "out" / "law").mkdir()  # from an earlier fit
    # laws do without the losses of single sequences
    (tmp_path / "out" / "a_fp8" / "val_losses.npz").unlink()
    out = asked(capsys, cli.main, tmp_path / "out", "loss=as_trained", "--seed-sd=0.01")
    content = strict(tmp_path / "out" / "law" / "law.json")
    assert (
        "skipped" not in out and "no paired gap: " in out and content["seed_noise"]["used"] == 0.01
    )
    runs = [strict(tmp_path / f"out/{letter}_fp8/summary.json") for letter in "abc"]
    compute, loss = np.transpose(
        [(one["flops_per_token"] * one["tokens"], one["loss_as_trained"]) for one in runs]
    )
    expected = fit_law("power_c", compute, loss, seed_sd=0.01)
    assert content["groups"]["tensorwise"]["laws"]["power_c"]["se"] == pytest.approx(expected.se)


@pytest.mark.parametrize(
    ("runs", "form", "begin", "why", "bands"),
    [
        (
            [(38_912, 20)],
            "power_c",
            "WARNING: bf16: the headlined law is not identified: 1 ",
            "needs at least 5",
            "",
        ),
        (
            [(40_000, 5), (40_000, 20), (90_000, 20), (90_000, 40)],
            "power_c",
            "bf16: 4 runs of 4",
            "mixes the effects",
            "C",
        ),
        (
            [(size, 20) for size in LONG],
            "ray",
            "bf16: 8 runs of 8",
            "need ratios at least 2x apart",
            "CND",
        ),
    ],
)
def test_the_headline_is_what_the_runs_identify(
    tmp_path, capsys, no_figures, runs, form, begin, why, bands
):
    for i, (size, ratio) in enumerate(runs):
        write_run(tmp_path / "out" / str(i), params=size, tokens=size * ratio)
    out, content = fitted(capsys, f"out={tmp_path / 'law'}", tmp_path / "out")
    group = content["groups"]["bf16"]
    assert out.startswith(begin) and "No BF16/FP8 pair among these runs." in out
    assert group["headline"]["form"] == form and why in group["headline"]["reason"]
    # one group: at the top too
    assert set(group["band"]) == set(bands) and content["laws"] == group["laws"]
    assert not group["laws"]["chinchilla"]["identified"] and group["laws"]["ray"]["identified"] == (
        form == "ray"
    )


def test_a_study_of_branches_end_to_end(tmp_path, capsys, no_figures):
    """Also where those of one seed were trained from scratch: their noise is their trunk's, they
    are no trajectories."""
    for path in (folder := write_branches(tmp_path / "out")).glob("*_1_d*/summary.json"):
        edit(path, parent_run=None, parent_step=None)
    out = asked(capsys, cli.main, folder, "--all")
    assert out.startswith(
        "bf16: 40 runs of 10 trajectories, N 30k to 480k, 5 to 40 tokens per parameter\n "
        " chinchilla: L = "
    )
    content = strict(folder / "law" / "law.json")
    for group in content["groups"].values():
        fit = group["laws"]["chinchilla"]
        assert (
            fit["identified"]
            and group["headline"]["form"] == "chinchilla"
            and fit["clusters"] == 10
        )
        for name, truth in (("E", 0.8), ("alpha", 0.35), ("beta", 0.3)):
            assert fit["ci95"][name][0] < truth + 0.01 and truth - 0.01 < fit["ci95"][name][1]
        # ten times the largest compute, at its ratio
        doubt, at = group["form_doubt"], math.sqrt(10) * 480_000
        assert (doubt["N"], doubt["D"]) == pytest.approx((at, 40 * at)) and doubt["low"] < doubt[
            "high"
        ]
        counts = {
            row["value"]: row for row in group["robustness"] if row["variant"] == "count N as"
        }
        # params_matmul equals params_total in these runs
        assert set(counts) == {"params_nonembed", "params_matmul"}
        assert counts["params_matmul"]["alpha"] == pytest.approx(fit["alpha"], rel=1e-9)
        assert counts["params_nonembed"]["alpha"] != pytest.approx(fit["alpha"], rel=1e-3)
    # five sizes, two seeds; recipes and branches add none
    assert content["seed_noise"]["degrees_of_freedom"] == 5
    logs = [
        [
            math.log(one["loss"])
            for one in sorted(content["inputs"], key=lambda one: one["run_id"])
            if one["seed"] == seed
        ]
        for seed in (1, 2)
    ]
    assert content["seed_noise"]["estimate"] == pytest.approx(
        np.sqrt(np.mean(np.subtract(*logs) ** 2) / 2)
    )
    assert all(one["trunk"] == one["run_id"].split("_d")[0] for one in content["inputs"])


def test_seed_noise_is_pooled_over_runs_equal_but_for_the_seed(tmp_path):
    for params, losses in ((40_000, (3.0, 3.03, 3.06)), (90_000, (2.5, 2.51)), (200_000, (2.0,))):
        for seed, loss in enumerate(losses):
            write_run(tmp_path / f"{params}_{seed}", params=params, seed=seed, loss=loss)
    records, _ = read_runs([tmp_path])
    expected = (
        (2 * np.log([3.0, 3.03, 3.06]).var(ddof=1) + np.log([2.5, 2.51]).var(ddof=1)) / 3
    ) ** 0.5
    assert seed_noise(records) == (pytest.approx(expected, rel=1e-12), 3) and seed_noise(
        records[:1]
    ) == (None, 0)
    assert fit_group(records, resamples=0).seed_sd == pytest.approx(expected)


def write_points(folder, points):
    """A table of the points; what the command needs to read it, but for its tokens."""
    columns = np.transpose([points.N, points.D, points.loss])
    np.savetxt(folder / "p.csv", columns, "%.12g", ",", header="Model Size,tokens,val", comments="")
    return f"out={folder / 'r'}", "--points", folder / "p.csv", "--n=Model Size", "--loss", "val"


def test_a_table_of_a_known_law(tmp_path, capsys, no_figures):
    out, content = fitted(capsys, *write_points(tmp_path, points := made()), "d=tokens")
    assert out.startswith(
        "p.csv: 16 points of 16 trajectories, N 30M to 1B, 5 to 320 tokens per parameter\n "
        " chinchilla: L"
    )
    assert {name: content["laws"]["chinchilla"][name] for name in ROUND} == pytest.approx(
        ROUND, rel=1e-5
    )
    assert (
        content["headline"]["form"] == "chinchilla"
        and content["source"]["columns"]["N"] == "Model Size"
    )
    # the power law in N
    content = fitted(capsys, *write_points(tmp_path, replace(points, loss=15 * points.N**-0.076)))[
        1
    ]
    assert content["headline"]["form"] == "power_n"
    assert [content["laws"]["power_n"][name] for name in ("A", "alpha")] == pytest.approx(
        [15, 0.076], rel=1e-8
    )
    assert [form for form, fit in content["laws"].items() if fit["objective"] is not None] == [
        "power_n"
    ]


def test_a_law_that_does_not_fit_is_no_headline_unless_the_user_insists(
    tmp_path, capsys, no_figures
):
    out, content = fitted(capsys, *write_points(tmp_path, points := early(0.3)), "d=tokens")
    assert (
        out.startswith("WARNING: p.csv: L(N, D) does not fit: residuals of ")
        and content["headline"]["form"] == "power_c"
    )
    early_lines = {str(2 + i) for i in np.flatnonzero(points.D / points.N < 0.5)}
    assert content["laws"]["chinchilla"]["identified"] and early_lines <= set(
        content["lack_of_fit"]["left_out"]
    )
    assert fit_points(points, "p", resamples=200, insist=True).headline == "chinchilla"


def test_one_wrong_loss_is_named_by_its_line_and_the_law_stays(tmp_path, capsys, no_figures):
    points, _ = table_with_outliers(0, 0)
    points.loss[18] *= 1.06
    out, content = fitted(capsys, *write_points(tmp_path, points), "d=tokens")
    assert out.startswith("WARNING: p.csv: line 20 lies 6") and "% above the law; look at" in out
    assert content["headline"]["form"] == "chinchilla" and content["lack_of_fit"] is None
    (outlier,) = content["outliers"]
    assert outlier["point"] == "line 20" and outlier["percent"] == pytest.approx(6, abs=0.8)


def test_minima_are_headlined_where_they_are_identified_and_the_surface_is_refused(
    tmp_path, capsys, no_figures
):
    """The lowest loss for a compute goes through the minima, which a power law through all sizes
    lies above."""
    out, content = fitted(capsys, *write_points(tmp_path, bent_valleys()), "d=tokens")
    assert (
        content["headline"]["form"] == "isoflop"
        and "the minima of 7 compute budgets instead" in content["headline"]["reason"]
    )
    low, high = content["laws"]["isoflop"]["ci95"]["a"]
    assert low < TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"]) < high
    for line in (
        "isoflop: N* = ",
        "95 %: a 0.5",
        "lowest loss for a compute: L* = ",
        "from t-intervals over the budgets",
    ):
        assert line in out, line
    frontier = content["frontier"]
    size = best_size(1e20, TRUTH)
    lowest = frontier["E"] + frontier["K"] * 1e20 ** -frontier["gamma"]
    assert lowest == pytest.approx(loss_of(size, 1e20 / 6 / size), rel=2e-3)
    assert {row["variant"] for row in content["robustness"]} >= {
        "declared",
        "drop highest",
        "leave out N",
    }
    insisted = fit_points(bent_valleys(), "p", resamples=200, insist=True)
    assert insisted.headline == "chinchilla" and insisted.frontier is None


@pytest.mark.parametrize(
    ("design", "by"),
    [
        ({"tuning": 3e-3}, "one size"),
        ({"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4}, "one 'run'"),
        ({}, ""),
    ],
)
def test_a_shared_fault_is_said_and_intervals_count_what_shares_it(
    tmp_path, capsys, no_figures, design, by
):
    points, run = table_of_sizes(1, **design)
    columns = zip(run, points.N, points.D, points.loss, strict=True)
    rows = [
        f"r{label},{size:.0f},{tokens:.0f},{loss:.12g}" for label, size, tokens, loss in columns
    ]
    (tmp_path / "p.csv").write_text("\n".join(["run,N,D,loss", *rows]))
    words = f"out={tmp_path / 'r'}", "--points", tmp_path / "p.csv", "--n=N", "--d=D", "--loss=loss"
    out, content = fitted(capsys, *words)
    fit = content["laws"]["chinchilla"]
    if not by:
        assert (
            "lie off the law together" not in out
            and content["shared_fault"] is None
            and fit["clusters"] == len(rows)
        )
        return
    assert (
        out.startswith(f"WARNING: p.csv: points of {by} lie off the law together")
        and "so intervals count" in out
    )
    assert (
        content["shared_fault"]["groups"] == fit["clusters"] < len(rows)
        and fit["interval"] == "cluster"
    )
    named = fitted(capsys, *words, "--cluster=run")[1] if "run" in by else None
    # as where --cluster had named it
    assert named is None or named["laws"]["chinchilla"]["ci95"] == fit["ci95"]


@published
def test_published_chinchilla_points(tmp_path, capsys, no_figures):
    """Besiroglu et al. 2024's points, read off Hoffmann et al.'s figure 4, without the five highest
    losses."""
    words = (
        f"--points={FOLDER}/chinchilla_points.csv",
        "--n=Model Size",
        "--c=Training FLOP",
        "--loss=loss",
        "--drop-highest=5",
    )
    _, content = fitted(capsys, f"out={tmp_path / 'r'}", *words)
    fit = content["laws"]["chinchilla"]
    assert (
        fit["objective"] == pytest.approx(0.0010182740178006, rel=1e-12)
        and fit["starts_at_best"] == fit["starts"] == 27
    )
    assert fit["n"] == 240 and fit["identified"] and fit["gradient_norm"] < 1e-8
    assert [fit[name] for name in ("A", "B", "E", "alpha", "beta")] == pytest.approx(
        [477.826, 2143.417, 1.817218, 0.347310, 0.367172], rel=1e-5
    )
    assert fit["a"] == pytest.approx(0.5139, abs=1e-4) and fit["residual_rms"] == pytest.approx(
        0.0076, abs=1e-4
    )
    for form in ("chinchilla", "power_n", "power_d", "power_c"):  # on their own axes
        fit = content["laws"][form]
        assert (fit["interval"], fit["resamples"]) == ("bootstrap", 1000)
        assert all(low < fit[name] < high for name, (low, high) in fit["ci95"].items())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("out=r", "give either run folders"),
        ("good points=t.csv n=N loss=L out=r", "give either run folders"),
        ("good mixed", "out=DIR is missing"),
        ("points=t.csv n=N loss=L", "out=DIR is missing"),
        ("good out=r --drop-higest=2", "there is no key 'drop-higest'; did you mean"),
        ("good out=r n=N", "n='N' must be"),
        ("good out=r loss=fp8", "loss='fp8' must be"),
        ("good out=r d=D", "d: only for a table"),
        ("good out=r --where a=b", "where: only for a table"),
        ("points=t.csv n=N loss=L seed_sd=0.1 out=r", "seed_sd: only for"),
        ("good out=good/a/summary.json", "good/a/summary.json cannot be"),
        ("t.csv out=r", "t.csv does not exist or is a file"),
        ("good/a.log out=r", "no finished run in good/a.log"),
        ("mixed out=r", "a and b differ in tokenizer_sha256"),
        ("raw out=r", "no run is left to fit"),
        ("good out=r --score", "r holds no prediction"),
        ("points=t.csv out=r", "n= is"),
        ("--points t.csv --n N --loss L --where N=3,L=2 --out r", "t.csv: no row has N=3; values"),
        ("points=one.csv n=N d=D loss=L out=r", "one.csv: no law can be fitted"),
    ],
)
def test_mistakes_end_with_code_2_and_nothing_written(
    tmp_path, monkeypatch, capsys, words, sentence
):
    write_run(tmp_path / "good" / "a")
    write_run(tmp_path / "mixed" / "a")
    write_run(tmp_path / "mixed" / "b", params=106_624, tokenizer_sha256="u")
    write_run(tmp_path / "raw" / "a", is_annealed=False)
    (tmp_path / "good" / "a.log").touch()
    (tmp_path / "t.csv").write_text("N,L\n1e8,3\n2e8,2.8\n")
    (tmp_path / "one.csv").write_text("N,D,L\n1e8,2e9,3\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert asked(capsys, cli.main, *words.split(), code=2).startswith(sentence)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_script_turns_blas_threads_off():
    """Tiny fits are ten times slower on threaded BLAS, which reads the setting when numpy is first
    imported."""
    before = Path(cli.__file__).read_text().split("OPENBLAS_NUM_THREADS")[0]
    assert set(re.findall(r"^(?:from|import) (\w+)", before, re.M)) <= {"os", "sys", "pathlib"}


def table(tmp_path, rows=ROWS, text=None):
    path = tmp_path / "points.csv"
    text = "\n".join([HEAD, *rows, ""]) if text is None else text
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path, n="N", loss="loss", **options):
    with pytest.raises(UserError) as error:
        read_points(path, n, loss, **options)
    return str(error.value).removeprefix(str(path)).lstrip(": ")


def test_compute_tokens_or_neither(tmp_path):
    path = table(tmp_path)
    for options in ({"d": "tokens"}, {"c": "flops"}):
        chosen, loss = read_points(path, "N", "loss", **options), [3.5, 3.25, 3.0, 2.75]
        points = chosen.points
        assert np.allclose(
            [points.N, points.D, points.C, points.loss], [N, D, 6 * N * D, loss], rtol=1e-12
        )
        assert len(set(points.cluster)) == 4 and chosen.axes == "NDC" and chosen.notes == []
    assert chosen.source.derived == "D = C / (6 N)" and chosen.source.columns.C == "flops"
    assert read_points(path, "N", "loss").axes == "N"


def test_tokens_and_compute_are_taken_as_they_stand_where_both_are_given(tmp_path):
    rows = ["a,1e8,2e9,1.5e18,3.5,1", "b,2e8,4e9,5.0e18,3.2,1"]  # attention, a head: C is no 6 N D
    chosen = read_points(table(tmp_path, rows), "N", "loss", d="tokens", c="flops")
    assert chosen.points.D.tolist() == [2e9, 4e9] and chosen.points.C.tolist() == [1.5e18, 5.0e18]
    assert chosen.source.derived is None and "1.04 to 1.25 times 6 N D" in chosen.notes[0]


@pytest.mark.parametrize(
    ("row", "doubts"),
    [
        ("a,124,2.5,,3,1", ["N is at most 124 ", "D is at most 2.5 ", "0.0202 tokens per"]),
        ("a,1.24e8,2.5,,3,1", ["D is at most 2.5 ", "e-08 tokens per"]),
        ("a,124,2.5e9,,3,1", ["N is at most 124 ", "e+07 tokens per"]),
        ("a,33000,165000,,3,1", []),
    ],
)
def test_counts_in_millions_or_billions_are_doubted(tmp_path, row, doubts):
    notes = read_points(table(tmp_path, [row]), "N", "loss", d="tokens").notes
    assert len(notes) == len(doubts) and all(
        note.startswith("WARNING: points.csv: ") for note in notes
    )
    assert all(doubt in note for doubt, note in zip(doubts, notes, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "N tokens loss\n1e8 2e9 3.5\n2e8 4e9 3.25\n",
        "   N   tokens  loss\n1e8      2e9   3.5\n\n2e8 4e9 3.25  \n",
        "     N tokens loss\n0  1e8    2e9  3.5\n1  2e8    4e9 3.25\n",
    ],
)  # the last: pandas' to_string
def test_a_table_separated_by_spaces_is_read(tmp_path, text):
    points = read_points(table(tmp_path, text=text), "N", "loss", d="tokens").points
    assert [points.N.tolist(), points.D.tolist(), points.loss.tolist()] == [
        [1e8, 2e8],
        [2e9, 4e9],
        [3.5, 3.25],
    ]


CHART = (
    "Step,a - val/loss,a - val/loss__MIN,a - val/loss__MAX,b - val/loss,b - val/loss__MIN,b -"
    " val/loss__MAX\n100,4.0,3.9,4.1,,,\n200,3.5,3.4,3.6,3.8,3.7,3.9\n300,,,,3.25,3.2,3.3\n"
)


def test_columns_with_a_dash_are_no_chart(tmp_path):
    points = read_points(
        table(tmp_path, text="N,loss - final\n1e8,3.5\n2e8,3.25\n"), "N", "loss - final"
    ).points
    assert points.loss.tolist() == [3.5, 3.25]


def test_a_chart_exported_from_wandb_gives_the_last_value_of_each_run(tmp_path):
    (tmp_path / "runs.csv").write_text(
        "Name,State,N,tokens\nb,finished,2e8,4e9\na,finished,1e8,2e9\nz,failed,,\n"
    )
    path = table(tmp_path, text=CHART)
    chosen = read_points(
        path, "N", "val/loss", d="tokens", runs=str(tmp_path / "runs.csv"), cluster="run"
    )
    points = chosen.points
    assert [points.N.tolist(), points.D.tolist(), points.loss.tolist()] == [
        [1e8, 2e8],
        [2e9, 4e9],
        [3.5, 3.25],
    ]
    sha256 = hashlib.sha256((tmp_path / "runs.csv").read_bytes()).hexdigest()
    assert chosen.source.runs == TableFile("runs.csv", sha256)
    assert (
        points.cluster.tolist() == ["a", "b"]
        and "each of its 2 runs counts with its last val/loss" in chosen.notes[0]
    )
    assert "the chart holds run, Step, val/loss: give the others by --runs TABLE" in refusal(
        path, "N", "val/loss"
    )
    (tmp_path / "runs.csv").write_text("Name,N\na,1e8\n")
    assert "0 rows for the run 'b'" in str(
        pytest.raises(
            UserError, read_points, path, "N", "val/loss", runs=str(tmp_path / "runs.csv")
        ).value
    )


def test_what_spreadsheets_and_pandas_write(tmp_path):
    for mark, end in itertools.product(",\t;", ("\n", "\r\n", "\r")):  # after a byte order mark
        text = "\ufeff" + end.join(line.replace(",", mark) for line in (HEAD, *ROWS)) + end
        chosen = read_points(table(tmp_path, text=text), "N", "loss", d="tokens")
        assert np.array_equal(chosen.points.N, N) and np.array_equal(chosen.points.D, D)
    text = (
        '\n,"Model Size (params)", Training FLOP ,"loss, final",note,note\n'
        '0,"100000000",1.2E+18, 3.5 ,"said ""fine""",x\n\n'
        "1,2e8,4800000000000000000,3.25,,\n"
        "2,+4e8,1.92e19,3.,,\n"
    )
    chosen = read_points(
        table(tmp_path, text=text), "Model Size (params)", "loss, final", c="Training FLOP"
    )
    assert chosen.points.N.tolist() == [1e8, 2e8, 4e8] and chosen.points.C.tolist() == [
        1.2e18,
        4.8e18,
        1.92e19,
    ]
    assert chosen.points.loss.tolist() == [3.5, 3.25, 3.0]
    assert "line 5, column 'loss, final': '-3.25'" in refusal(  # an editor's line number
        table(tmp_path, text=text.replace("3.25", "-3.25")), "Model Size (params)", "loss, final"
    )


def test_unfinished_runs_and_the_highest_losses_are_left_out_and_named(tmp_path):
    rows = [
        row.replace("3.25", loss)
        for row, loss in zip(ROWS * 3, ["", "NaN", "inf", "-Inf", "None", "N/A"] * 2, strict=True)
    ]
    chosen = read_points(table(tmp_path, rows), "N", "loss", d="tokens")
    assert chosen.source.lines_left_out == LinesLeftOut([3, 7, 11], [])
    assert "3, 7, 11" in chosen.notes[0]
    # Such a row's other cells are not looked at; the row of a finite loss is held to them.
    assert len(read_points(table(tmp_path, [*ROWS, "e,,,,,"]), "N", "loss").points.N) == 4
    assert "line 6, column 'N'" in refusal(table(tmp_path, [*ROWS, "e,,,,2.5,"]))
    assert "no row is left to fit" in refusal(table(tmp_path, ["a,1,1,1,,1", "b,1,1,1,nan,1"]))
    path = table(tmp_path, [*ROWS, "e,1e9,2e10,1.2e20,3.5,1"])
    # of equal ones the first
    assert read_points(path, "N", "loss", drop_highest=1).points.N.tolist() == [2e8, 4e8, 8e8, 1e9]
    chosen = read_points(path, "N", "loss", drop_highest=3)
    assert chosen.points.loss.tolist() == [
        3.0,
        2.75,
    ] and chosen.source.lines_left_out.highest_losses == [2, 3, 6]
    assert "drop_highest=5" in refusal(path, drop_highest=5)


def test_conditions_and_clusters(tmp_path):
    # left out: anything
    path = table(
        tmp_path, [*ROWS, "b,3e8,6e9,1e19,3.1,.0030", "b,5e8,1e10,3e19,2.9,", "x,?,?,?,?,9"]
    )
    for where, kept in (
        (["run=b"], [2e8, 3e8, 5e8]),
        (["run=a", "run=c"], [1e8, 4e8]),
        (["lr=3e-3"], [1e8, 2e8, 3e8]),
        (["run=b", "lr=0.003"], [2e8, 3e8]),
        (["lr="], [5e8]),
        ([" run = b "], [2e8, 3e8, 5e8]),
    ):
        assert read_points(path, "N", "loss", where=where).points.N.tolist() == kept
    chosen = read_points(path, "N", "loss", where=["run=b", "run=a"], cluster="run")
    assert chosen.source.filters == {"run": ["b", "a"]} and "4 of 7 rows" in chosen.notes[0]
    assert chosen.points.cluster.tolist() == ["a", "b", "b", "b"]
    for where, told in (
        (["run=z"], "no row has run=z; values there: a, b, c, d, x"),
        (["run=a", "lr=0.03"], "no row is left"),
        (["runs=a"], "did you mean 'run'?"),
    ):
        assert told in refusal(path, where=where)
    # An empty cell is a trajectory of its own, and line 3 does not join the run called 3.
    path = table(tmp_path, ["3,1e8,1,1,3.5,", *[",2e8,1,1,3,"] * 2])
    assert len(set(read_points(path, "N", "loss", cluster="run").points.cluster)) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *(
            (f'N,loss\n1e8,3\n"{cell}",2\n', f"line 3, column 'N': {cell!r}")
            for cell in (
                # no number is guessed
                "1,240",
                "124M",
                "1.2 B",
                "diverged",
                "0",
                "-3",
                "0x10",
                "1e400",
                "nan",
                "inf",
            )
        ),
        (b"", "0 columns called 'N'"),
        (b"\xff\xfeN\x00,\x00", "cannot be read"),
        (None, "cannot be read"),
        (b"N,loss\n", "no row is left to fit"),
        (b"a b c\n1 2 3\n", "0 columns called 'N'; there are: a, b, c"),
        (b"N,Loss\n1,2\n", "did you mean 'Loss'?"),
        (b"N,loss,loss\n1,2,3\n", "2 columns called 'loss'"),
        (b"N,loss\n1,2\n3\n", "line 3: 1 cells"),
        (b'N,loss,run\n1,2,a\n3,4,"b\n5,6,c\n', "is a quotation mark left open?"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, text, sentence):
    assert sentence in refusal(
        table(tmp_path, text=text) if text is not None else tmp_path / "x.csv"
    )
