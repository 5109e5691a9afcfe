"""The command as a user meets it: headline first, honest downgrades, a sentence a mistake."""

import io
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from lib.text import si
from scaling import fit as cli
from scaling.groups import fit_group, fit_points, seed_noise
from scaling.law_page import headline_lines
from scaling.laws import Points, fit_law
from scaling.records import read_runs
from tests.conftest import asked, process
from tests.helpers.law_points import (
    FOLDER,
    ROUND,
    early,
    law,
    made,
    noisy,
    points_at,
    published,
)
from tests.helpers.scaling_runs import edit, strict, write_branches, write_ladder, write_run
from tests.law_trials import (
    TRUTH,
    bent_valleys,
    best_size,
    loss_of,
    table_of_sizes,
    table_with_outliers,
)

Law = dict[str, Any]  # law.json
FitTable = Callable[..., tuple[str, Law]]


def fitted(capsys: pytest.CaptureFixture, *words: object) -> tuple[str, Law]:
    """(what the command printed, law.json) of a fit that ends well; out=FOLDER stands first."""
    folder = Path(str(words[0]).removeprefix("out="))
    return asked(capsys, cli.main, *words), strict(folder / "law.json")


def undrawn(*words: object) -> str:
    """What the command prints, for fixtures of a module; it draws nothing."""
    page = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(page):
        patch.setattr(cli, "draw", lambda *_: "figure")
        patch.setattr("lib.plots.render", lambda *_: b"")
        assert cli.main([*map(str, words)]) == 0
    return page.getvalue()


def write_table(path: Path, points: Points) -> tuple[object, ...]:
    """Write a table of the points; the words that the command needs to read it, but its tokens."""
    columns = np.transpose([points.N, points.D, points.loss])
    np.savetxt(path, columns, "%.12g", ",", header="Model Size,tokens,val", comments="")
    return "--points", path, "--n=Model Size", "--loss", "val"


# ------------------------------------------------------------------------------ a ladder on one ray


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """out/ with three pairs of runs and one that was stopped, report/ with what the command left
    when it was started elsewhere than in the repository."""
    folder = write_ladder(tmp_path_factory.mktemp("ladder") / "out").parent
    write_run(folder / "out" / "mid", params=300_000, is_annealed=False)
    return folder


@pytest.fixture(scope="module")
def ended(ladder: Path) -> CompletedProcess:
    return process(Path(cli.__file__).resolve(), "out", "out=report", "--all", cwd=ladder)


@pytest.fixture(scope="module")
def law_of_ladder(ladder: Path, ended: CompletedProcess) -> Law:
    assert ended.returncode == 0
    return strict(ladder / "report" / "law.json")


def test_the_command_ends_well_and_says_the_headline_first(ended: CompletedProcess):
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.startswith("bf16: 3 runs of 3 trajectories, N 38.9k")


@pytest.mark.parametrize(
    "line",
    [
        "power_c: L = 55.9 C^-0.117",
        "leave 0 degrees of freedom",
        "left out mid: ",
        "Seed noise: unknown",
        "3 BF16/FP8 pairs, gaps of +0.409 to +0.466 % in BF16",
        "| starts at best |",
    ],
)
def test_the_whole_page_has_every_line(ended: CompletedProcess, line: str):
    assert line in ended.stdout


def test_the_same_runs_give_the_same_bytes_and_by_default_few_lines(
    ladder: Path, ended: CompletedProcess, capsys: pytest.CaptureFixture
):
    page, _ = fitted(capsys, f"out={ladder / 'again'}", ladder / "out")
    assert len(page.splitlines()) <= 40 < len(ended.stdout.splitlines()) and "--all" in page
    for name, begin in (("figure.png", b"\x89PNG"), ("figure.svg", b"<?xml"), ("law.json", b"{")):
        content = (ladder / "report" / name).read_bytes()
        assert content.startswith(begin)
        if not name.endswith("png"):
            assert (ladder / "again" / name).read_bytes() == content


def test_law_json_has_a_group_for_each_recipe(law_of_ladder: Law):
    assert set(law_of_ladder["groups"]) == {"bf16", "tensorwise"}
    assert law_of_ladder["delta"] == 1e-3 and "laws" not in law_of_ladder


def test_a_group_has_each_law(law_of_ladder: Law):
    group = law_of_ladder["groups"]["bf16"]
    assert group["runs"] == ["a_bf16", "b_bf16", "c_bf16"]
    assert group["headline"]["form"] == "power_c"
    forms = ["chinchilla", "ray", "power_n", "power_d", "power_c", "isoflop"]
    assert list(group["laws"]) == forms


def test_three_points_give_the_ray_law_without_an_interval(law_of_ladder: Law):
    ray = law_of_ladder["groups"]["bf16"]["laws"]["ray"]
    assert [ray["E"], ray["K"], ray["gamma"]] == pytest.approx([0.9, 330, 0.2], rel=1e-6)
    assert ray["ci95"] is None


def summaries(folder: Path, recipe: str) -> list[dict[str, Any]]:
    return [strict(folder / f"out/{letter}_{recipe}/summary.json") for letter in "abc"]


def test_under_another_convention_it_is_the_law_of_its_numbers(ladder: Path, law_of_ladder: Law):
    runs = summaries(ladder, "bf16")
    key = "flops_per_token_6n_nonembed"
    compute = np.array([run[key] * run["tokens"] for run in runs])
    loss = np.array([run["loss_bf16"] for run in runs])
    rows = law_of_ladder["groups"]["bf16"]["robustness"]
    counts = {row["value"]: row["gamma"] for row in rows if row["variant"] == "count C as"}
    assert len(counts) == 4
    assert counts[key] == pytest.approx(fit_law("power_c", compute, loss).values["gamma"])


def test_law_json_names_its_inputs(ladder: Path, law_of_ladder: Law):
    inputs = law_of_ladder["inputs"]
    assert len(inputs) == 6 and len(inputs[0]["summary_sha256"]) == 64
    values = [inputs[0][key] for key in ("N", "D", "trunk", "loss")]
    assert values == [38_912, 778_240, "a_bf16", summaries(ladder, "bf16")[0]["loss_bf16"]]


@pytest.mark.usefixtures("no_figures")
def test_many_recipes_still_fit_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture):
    for recipe in ("bf16", *"abcdefghijk"):
        write_run(tmp_path / "many" / recipe, recipe=recipe, pair_id=recipe)
    lines = asked(capsys, cli.main, tmp_path / "many").splitlines()
    # the closing lines stay
    assert len(lines) == 40 and "--all" in lines[-5] and lines[-4].startswith("Seed noise: ")


@pytest.mark.usefixtures("no_figures")
def test_as_trained_losses_seed_sd_and_the_default_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    write_ladder(tmp_path / "out")
    (tmp_path / "out" / "law").mkdir()  # from an earlier fit
    page = asked(capsys, cli.main, tmp_path / "out", "loss=as_trained", "--seed-sd=0.01")
    content = strict(tmp_path / "out" / "law" / "law.json")
    assert "skipped" not in page and content["seed_noise"]["used"] == 0.01
    runs = summaries(tmp_path, "fp8")
    compute = np.array([run["flops_per_token"] * run["tokens"] for run in runs])
    loss = np.array([run["loss_as_trained"] for run in runs])
    expected = fit_law("power_c", compute, loss, seed_sd=0.01)
    errors = content["groups"]["tensorwise"]["laws"]["power_c"]["se"]
    assert errors == pytest.approx(expected.se)


@pytest.mark.usefixtures("no_figures")
def test_laws_do_without_the_losses_of_single_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    write_ladder(tmp_path / "out")
    (tmp_path / "out" / "a_fp8" / "val_losses.npz").unlink()
    assert "no paired gap: " in asked(capsys, cli.main, tmp_path / "out")


LONG = [int(size) for size in np.geomspace(3e4, 3e7, 8)]
DESIGNS = (
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
)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("runs", "form", "begin", "reason", "bands"), DESIGNS, ids=["one run", "four runs", "one ray"]
)
def test_the_headline_is_what_the_runs_identify(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    runs: list[tuple[int, int]],
    form: str,
    begin: str,
    reason: str,
    bands: str,
):
    for i, (size, ratio) in enumerate(runs):
        write_run(tmp_path / "out" / str(i), params=size, tokens=size * ratio)
    page, content = fitted(capsys, f"out={tmp_path / 'law'}", tmp_path / "out")
    group = content["groups"]["bf16"]
    assert page.startswith(begin) and "No BF16/FP8 pair among these runs." in page
    assert group["headline"]["form"] == form and reason in group["headline"]["reason"]
    assert set(group["band"]) == set(bands)
    assert content["laws"] == group["laws"]  # of one group: at the top too
    assert not group["laws"]["chinchilla"]["identified"]
    assert group["laws"]["ray"]["identified"] == (form == "ray")


def along_one_axis(axis: str) -> tuple[np.ndarray, np.ndarray]:
    """N and D of seven points of which the one is alike."""
    alike = {"N": 20e9, "D": 300e6}[axis]  # tokens, parameters
    varied = {"N": np.geomspace(3e7, 3e9, 7), "D": np.geomspace(1e9, 64e9, 7)}[axis]
    constant = np.full(7, alike)
    return (varied, constant) if axis == "N" else (constant, varied)


@pytest.mark.parametrize(("axis", "words"), [("D", "the tokens alone"), ("N", "the size alone")])
def test_points_of_one_size_or_one_number_of_tokens_mix_nothing(axis: str, words: str):
    N, D = along_one_axis(axis)
    group = fit_points(points_at(N, D, noisy(N, D, 1e-3)), "table.csv")
    assert group.headline == "power_c" and words in group.headline_reason
    assert "mixes" not in group.headline_reason


@pytest.mark.parametrize("axis", ["D", "N"])
def test_the_doubt_along_one_axis_holds_the_law(axis: str):
    """C grows with the tokens, or the size, alone: the law falls with its exponent, .35, not with
    the .18 of a ray."""
    N, D = along_one_axis(axis)
    group = fit_points(points_at(N, D, noisy(N, D, 1e-3)), "table.csv")
    far = {"N": (10 * N[-1], D[-1]), "D": (N[-1], 10 * D[-1])}[axis]
    losses = [float(form.predict(60 * N[-1] * D[-1])) for form in group.bands["C"]]
    assert min(losses) < law(*far) < max(losses)


def test_the_doubt_says_of_which_run_it_is():
    group = fit_points(made(noise=1e-3), "table.csv", resamples=0)
    doubt = group.form_doubt
    assert doubt is not None
    place = f"(N {si(doubt.N)}, D {si(doubt.D)})"
    assert f"at ten times the largest compute {place} " in "\n".join(headline_lines(group))


# ------------------------------------------------------------------------------ a study of branches


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Also such whose branches of one seed were trained from scratch: their noise is their trunk's,
    they are no trajectories."""
    folder = write_branches(tmp_path_factory.mktemp("branches") / "out")
    for path in folder.glob("*_1_d*/summary.json"):
        edit(path, parent_run=None, parent_step=None)
    undrawn(folder, "--all")
    return folder


@pytest.fixture(scope="module")
def law_of_branches(branches: Path) -> Law:
    return strict(branches / "law" / "law.json")


def test_branches_identify_the_law_over_their_trunks(law_of_branches: Law):
    for group in law_of_branches["groups"].values():
        fit = group["laws"]["chinchilla"]
        assert fit["identified"] and fit["clusters"] == 10
        assert group["headline"]["form"] == "chinchilla"
        for name, truth in (("E", 0.8), ("alpha", 0.35), ("beta", 0.3)):
            low, high = fit["ci95"][name]
            assert low < truth + 0.01 and truth - 0.01 < high


def test_the_doubt_is_told_at_ten_times_the_largest_compute(law_of_branches: Law):
    for group in law_of_branches["groups"].values():
        doubt, N = group["form_doubt"], math.sqrt(10) * 480_000
        assert (doubt["N"], doubt["D"]) == pytest.approx((N, 40 * N))
        assert doubt["low"] < doubt["high"]


def test_the_law_is_refitted_to_each_count_of_parameters(law_of_branches: Law):
    for group in law_of_branches["groups"].values():
        alpha = group["laws"]["chinchilla"]["alpha"]
        rows = [row for row in group["robustness"] if row["variant"] == "count N as"]
        counts = {row["value"]: row["alpha"] for row in rows}
        assert set(counts) == {"params_nonembed", "params_matmul"}
        # params_matmul equals params_total in these runs
        assert counts["params_matmul"] == pytest.approx(alpha, rel=1e-9)
        assert counts["params_nonembed"] != pytest.approx(alpha, rel=1e-3)


def test_recipes_and_branches_add_nothing_to_the_noise_of_seeds(law_of_branches: Law):
    """Five sizes, two seeds."""
    noise = law_of_branches["seed_noise"]
    inputs = sorted(law_of_branches["inputs"], key=lambda run: run["run_id"])
    first, second = (
        np.log([run["loss"] for run in inputs if run["seed"] == seed]) for seed in (1, 2)
    )
    assert noise["degrees_of_freedom"] == 5
    assert noise["estimate"] == pytest.approx(np.sqrt(np.mean((first - second) ** 2) / 2))


def test_a_branch_trained_from_scratch_is_its_trunks(law_of_branches: Law):
    for run in law_of_branches["inputs"]:
        assert run["trunk"] == run["run_id"].split("_d")[0]


def test_seed_noise_is_pooled_over_runs_equal_but_for_the_seed(tmp_path: Path):
    for params, losses in ((40_000, (3.0, 3.03, 3.06)), (90_000, (2.5, 2.51)), (200_000, (2.0,))):
        for seed, loss in enumerate(losses):
            write_run(tmp_path / f"{params}_{seed}", params=params, seed=seed, loss=loss)
    records, _ = read_runs([tmp_path])
    of_three = np.log([3.0, 3.03, 3.06]).var(ddof=1)
    expected = math.sqrt((2 * of_three + np.log([2.5, 2.51]).var(ddof=1)) / 3)
    assert seed_noise(records) == (pytest.approx(expected, rel=1e-12), 3)
    assert seed_noise(records[:1]) == (None, 0)
    assert fit_group(records, resamples=0).seed_sd == pytest.approx(expected)


# --------------------------------------------------------------------------------------- of a table


@pytest.fixture
def fit_table(tmp_path: Path, capsys: pytest.CaptureFixture, no_figures: None) -> FitTable:
    """fit_table(points, *words): what the command makes of a table of the points."""

    def fit(points: Points, *words: str) -> tuple[str, Law]:
        named = write_table(tmp_path / "p.csv", points)
        return fitted(capsys, f"out={tmp_path / 'r'}", *named, *words)

    return fit


def test_a_table_of_a_known_law(fit_table: FitTable):
    page, content = fit_table(made(), "d=tokens")
    assert page.startswith(
        "p.csv: 16 points of 16 trajectories, N 30M to 1B, 5 to 320 tokens per parameter\n "
        " chinchilla: L"
    )
    law = content["laws"]["chinchilla"]
    assert {name: law[name] for name in ROUND} == pytest.approx(ROUND, rel=1e-5)
    assert content["headline"]["form"] == "chinchilla"
    assert content["source"]["columns"]["N"] == "Model Size"


def test_of_a_table_without_tokens_the_power_law_in_N_alone_is_fitted(fit_table: FitTable):
    points = made()
    _, content = fit_table(replace(points, loss=15 * points.N**-0.076))
    assert content["headline"]["form"] == "power_n"
    law = content["laws"]["power_n"]
    assert [law["A"], law["alpha"]] == pytest.approx([15, 0.076], rel=1e-8)
    fits = [form for form, fit in content["laws"].items() if fit["objective"] is not None]
    assert fits == ["power_n"]


def test_a_law_that_does_not_fit_is_no_headline(fit_table: FitTable):
    points = early(0.3)
    page, content = fit_table(points, "d=tokens")
    assert page.startswith("WARNING: p.csv: L(N, D) does not fit: residuals of ")
    assert content["headline"]["form"] == "power_c"
    early_lines = {str(2 + i) for i in np.flatnonzero(points.D / points.N < 0.5)}
    assert content["laws"]["chinchilla"]["identified"]
    assert early_lines <= set(content["lack_of_fit"]["left_out"])


@pytest.mark.parametrize("points", [early(0.3), bent_valleys()], ids=["early", "valleys"])
def test_a_law_that_does_not_fit_is_headlined_where_the_user_insists(points: Points):
    insisted = fit_points(points, "p", resamples=200, insist=True)
    assert insisted.headline == "chinchilla" and insisted.frontier is None


def test_one_wrong_loss_is_named_by_its_line_and_the_law_stays(fit_table: FitTable):
    points, _ = table_with_outliers(0, 0)
    points.loss[18] *= 1.06
    page, content = fit_table(points, "d=tokens")
    assert page.startswith("WARNING: p.csv: line 20 lies 6") and "% above the law; look at" in page
    assert content["headline"]["form"] == "chinchilla" and content["lack_of_fit"] is None
    (outlier,) = content["outliers"]
    assert outlier["point"] == "line 20" and outlier["percent"] == pytest.approx(6, abs=0.8)


@pytest.fixture(scope="module")
def valleys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Law]:
    """Of IsoFLOP budgets that no L(N, D) fits."""
    folder = tmp_path_factory.mktemp("valleys")
    words = write_table(folder / "p.csv", bent_valleys())
    page = undrawn(*words, "d=tokens", f"out={folder}")
    return page, strict(folder / "law.json")


def test_minima_are_headlined_where_the_surface_is_refused(valleys: tuple[str, Law]):
    page, content = valleys
    assert content["headline"]["form"] == "isoflop"
    assert "the minima of 7 compute budgets instead" in content["headline"]["reason"]
    low, high = content["laws"]["isoflop"]["ci95"]["a"]
    assert low < TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"]) < high
    for line in ("isoflop: N* = ", "95 %: a 0.5", "from t-intervals over the budgets"):
        assert line in page, line
    variants = {row["variant"] for row in content["robustness"]}
    assert variants >= {"declared", "drop highest", "leave out N"}


def test_the_lowest_loss_for_a_compute_goes_through_the_minima(valleys: tuple[str, Law]):
    """Which a power law through all sizes lies above."""
    page, content = valleys
    assert "lowest loss for a compute: L* = " in page
    frontier, size = content["frontier"], best_size(1e20, TRUTH)
    lowest = frontier["E"] + frontier["K"] * 1e20 ** -frontier["gamma"]
    assert lowest == pytest.approx(loss_of(size, 1e20 / 6 / size), rel=2e-3)


# ---------------------------------------------------------------- faults that points of a run share


@pytest.fixture
def fit_runs(tmp_path: Path, capsys: pytest.CaptureFixture, no_figures: None) -> FitTable:
    """fit_runs(design, *words): what the command makes of a table whose rows name their run."""

    def fit(design: dict[str, float], *words: str) -> tuple[str, Law]:
        points, run = table_of_sizes(1, **design)
        rows = ["run,N,D,loss"]
        for label, size, tokens, loss in zip(run, points.N, points.D, points.loss, strict=True):
            rows.append(f"r{label},{size:.0f},{tokens:.0f},{loss:.12g}")
        (tmp_path / "p.csv").write_text("\n".join(rows))
        named = ("--points", tmp_path / "p.csv", "--n=N", "--d=D", "--loss=loss")
        return fitted(capsys, f"out={tmp_path / 'r'}", *named, *words)

    return fit


OF_RUNS = {"trunk": 2e-3, "noise": 5e-4, "seeds": 3, "sizes": 5, "ratios": 4}


@pytest.mark.parametrize(
    ("design", "groups", "rows"), [({"tuning": 3e-3}, "one size", 36), (OF_RUNS, "one 'run'", 60)]
)
def test_a_shared_fault_is_said_and_intervals_count_what_shares_it(
    fit_runs: FitTable, design: dict[str, float], groups: str, rows: int
):
    page, content = fit_runs(design)
    fit = content["laws"]["chinchilla"]
    warning = f"WARNING: p.csv: points of {groups} lie off the law together"
    assert page.startswith(warning) and "so intervals count" in page
    assert content["shared_fault"]["groups"] == fit["clusters"] < rows
    assert fit["interval"] == "cluster"


def test_a_fault_of_runs_counts_as_where_the_user_had_named_them(fit_runs: FitTable):
    (_, alone), (_, named) = fit_runs(OF_RUNS), fit_runs(OF_RUNS, "--cluster=run")
    assert named["laws"]["chinchilla"]["ci95"] == alone["laws"]["chinchilla"]["ci95"]


def test_independent_points_are_not_accused(fit_runs: FitTable):
    page, content = fit_runs({})
    assert "lie off the law together" not in page and content["shared_fault"] is None
    assert content["laws"]["chinchilla"]["clusters"] == 36


# ------------------------------------------------------------------------------- published points


@pytest.fixture(scope="module")
def laws_of_240_points(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """Besiroglu et al. 2024's points, read off Hoffmann et al.'s figure 4, without the five highest
    losses."""
    folder = tmp_path_factory.mktemp("published")
    words = (
        f"--points={FOLDER}/chinchilla_points.csv",
        "--n=Model Size",
        "--c=Training FLOP",
        "--loss=loss",
        "--drop-highest=5",
        f"--out={folder}",
    )
    undrawn(*words)
    return strict(folder / "law.json")["laws"]


@published
def test_published_chinchilla_points(laws_of_240_points: Law):
    fit = laws_of_240_points["chinchilla"]
    assert fit["n"] == 240 and fit["identified"]
    names = ("A", "B", "E", "alpha", "beta")
    expected = [477.826, 2143.417, 1.817218, 0.347310, 0.367172]
    assert [fit[name] for name in names] == pytest.approx(expected, rel=1e-5)
    assert fit["a"] == pytest.approx(0.5139, abs=1e-4)
    assert fit["residual_rms"] == pytest.approx(0.0076, abs=1e-4)


@published
def test_the_published_optimum_is_certified(laws_of_240_points: Law):
    fit = laws_of_240_points["chinchilla"]
    assert fit["objective"] == pytest.approx(0.0010182740178006, rel=1e-12)
    assert fit["starts_at_best"] == fit["starts"] == 27 and fit["gradient_norm"] < 1e-8


@published
@pytest.mark.parametrize("form", ["chinchilla", "power_n", "power_d", "power_c"])
def test_published_points_have_intervals_of_a_thousand_resamples(
    laws_of_240_points: Law, form: str
):
    """On their own axes."""
    fit = laws_of_240_points[form]
    assert (fit["interval"], fit["resamples"]) == ("bootstrap", 1000)
    for name, (low, high) in fit["ci95"].items():
        assert low < fit[name] < high


# ---------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the mistakes below."""
    write_run(tmp_path / "good" / "a")
    write_run(tmp_path / "mixed" / "a")
    write_run(tmp_path / "mixed" / "b", params=106_624, tokenizer_sha256="u")
    write_run(tmp_path / "raw" / "a", is_annealed=False)
    (tmp_path / "good" / "a.log").touch()
    (tmp_path / "t.csv").write_text("N,L\n1e8,3\n2e8,2.8\n")
    (tmp_path / "one.csv").write_text("N,D,L\n1e8,2e9,3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    mistakes: Path, capsys: pytest.CaptureFixture, words: str, sentence: str
):
    files = sorted(mistakes.rglob("*"))
    assert asked(capsys, cli.main, *words.split(), code=2).startswith(sentence)
    assert sorted(mistakes.rglob("*")) == files


def test_the_script_turns_blas_threads_off():
    """Tiny fits are ten times slower on threaded BLAS, which reads the setting when numpy is first
    imported."""
    head = Path(cli.__file__).read_text().split("OPENBLAS_NUM_THREADS")[0]
    assert set(re.findall(r"^(?:from|import) (\w+)", head, re.M)) <= {"os", "sys", "pathlib"}
