"""eval/table.py on made-up records, against numbers taken from the answers directly."""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from eval import table, table_figure, table_rows
from tests.helpers.eval_runs import call, refused
from tests.helpers.scaling_runs import edit

N = 400  # documents of a task

Samples = list[dict[str, Any]]


def sha256_of(*parts: str) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def answers(task: str, seed: object, n: int = N) -> Samples:
    """Logged samples of a multiple-choice task: a third of the questions is answered alike by
    everybody."""
    own, shared = random.Random(f"{task}{seed}"), random.Random(task)
    samples = []
    for document in range(n):
        source = shared if document % 3 else own
        sample = {
            "doc_id": document,
            "doc_hash": sha256_of(task, str(document)),
            "filter": "none",
            "acc": float(source.random() < 0.5),
        }
        samples.append(sample)
    return samples


def accuracies(samples: Samples) -> np.ndarray:
    return np.array([sample["acc"] for sample in samples])


def docs_sha256(samples: Samples) -> str:
    return sha256_of(*(sample["doc_hash"] for sample in samples))


def mean_row(samples: Samples, /, **more: object) -> dict[str, Any]:
    """A task's scores as eval.harness records them."""
    values = accuracies(samples)
    row = {
        "acc": values.mean(),
        "acc_se": values.std(ddof=1) / math.sqrt(len(values)),
        "n": len(values),
        "chance": 0.25,
        "docs_sha256": docs_sha256(samples),
    }
    return row | more


def write_log(path: Path, samples: Samples) -> None:
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    path.write_bytes(gzip.compress(lines.encode()))


def write_scores(
    folder: Path,
    name: str = "core",
    *,
    summary: dict[str, Any] | None = None,
    tasks: dict[str, Any] | None = None,
    samples: dict[str, Samples] | None = None,
    **more: object,
) -> None:
    """A record below a run's eval/. tasks: rows of the record as they are; samples: by task,
    written as its log, and as its row where `tasks` has none."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    rows = dict(tasks or {})
    for task, samples_of_task in (samples or {}).items():
        log = f"{name}_{task}.gz"
        write_log(folder / "eval" / log, samples_of_task)
        rows.setdefault(task, mean_row(samples_of_task, samples=log))
    record = {
        "run": f"out/{folder.name}",
        "tasks": rows,
        "limit": None,
        "dtype": "bfloat16",
        "fp8": "off",
    }
    edit(folder / "eval" / f"{name}.json", **record | more)
    edit(folder / "summary.json", **summary or {})


def summary_of(recipe: str, **more: object) -> dict[str, Any]:
    summary = {
        "pair_id": "p",
        "precision": {"recipe": recipe},
        "params_total": 10**8,
        "tokens": 20 * 10**8,
    }
    return summary | more


@dataclass
class Pair:
    """Two runs below `out`, run_bf16 and run_tensorwise, and what they answered."""

    out: Path
    bf16: Samples
    fp8: Samples


def write_pair(out: Path) -> Pair:
    pair = Pair(out, bf16=answers("arc_easy", "bf16"), fp8=answers("arc_easy", "tensorwise"))
    for recipe, samples in ("bf16", pair.bf16), ("tensorwise", pair.fp8):
        folder = out / f"run_{recipe}"
        write_scores(folder, samples={"arc_easy": samples}, summary=summary_of(recipe))
    return pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "out")


def page_of(*paths: str | Path) -> str:
    return table.build(table_rows.read_models(paths))


def cells(text: str, first: str) -> list[str]:
    """The cells of the only line of a page that begins with `first`."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def paired_cell(samples: Samples, of_base: Samples) -> str:
    """The paired difference of two models and its error, as the page writes it."""
    assert len(samples) == len(of_base)
    differences = accuracies(samples) - accuracies(of_base)
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return f"{100 * differences.mean():+.1f} ± {100 * error:.1f}".replace("-", "−")


def percent(samples: Samples) -> str:
    """The beginning of a score's cell."""
    return f"{100 * accuracies(samples).mean():.1f} ±"


# ----------------------------------------------------------------------- pairs of BF16 and FP8


def test_an_fp8_run_has_the_paired_difference_from_its_bf16_partner(pair: Pair) -> None:
    assert cells(page_of(pair.out), "*minus run_bf16*")[-1] == paired_cell(pair.fp8, pair.bf16)


def test_an_fp8_run_stands_below_its_partner(pair: Pair) -> None:
    first_cells = re.findall(r"^\| (run\S+|\*minus \S+) ", page_of(pair.out), re.M)
    assert first_cells == ["run_bf16", "run_tensorwise", "*minus run_bf16*"]


def test_a_run_has_its_size_tokens_and_precision(pair: Pair) -> None:
    assert cells(page_of(pair.out), "run_tensorwise")[1:4] == ["100M", "2B", "FP8 tensorwise"]


@pytest.fixture
def fp8_inference(pair: Pair) -> Samples:
    """What run_tensorwise answered through FP8 matmuls, recorded beside its BF16 scores."""
    samples = answers("arc_easy", "inference")
    folder = pair.out / "run_tensorwise"
    write_scores(folder, "fp8", samples={"arc_easy": samples}, fp8="tensorwise")
    return samples


def test_fp8_inference_is_compared_with_the_same_weights_in_bf16(
    pair: Pair, fp8_inference: Samples
) -> None:
    difference = cells(page_of(pair.out), "*minus run_tensorwise*")[-1]
    assert difference == paired_cell(fp8_inference, pair.fp8)


def test_a_row_of_fp8_inference_is_named_so_and_has_the_precision_of_the_training(
    pair: Pair, fp8_inference: Samples
) -> None:
    line = cells(page_of(pair.out), "run_tensorwise, FP8 inference (tensorwise)")
    assert line[3] == "FP8 tensorwise"


# ------------------------------------------------------------------- partners, names and sections


@dataclass
class Sections:
    """A page and its two sections, of models in `out`."""

    out: Path
    ours: str
    published: str


NAMES_OF_FOLDERS = ("a", "lr=[1e-3]")  # the second is no pattern


@pytest.fixture(scope="module")
def among_others(tmp_path_factory: pytest.TempPathFactory) -> Sections:
    """The pair among runs that come before run_bf16 by name and are no partner of run_tensorwise: a
    repeat, a run that was switched to BF16, an FP4 run, a run of another pair, and run_bf16 itself
    in another dtype; a public model; runs of the same name in two folders; and a file."""
    out = tmp_path_factory.mktemp("among_others") / "out"
    write_pair(out)
    samples = {"arc_easy": answers("arc_easy", 3)}
    changes_of_run = {
        "a_repeat": {"repeat": 1},
        "c_fp4": {"precision": {"recipe": "nvfp4"}},
        "d_pair": {"pair_id": "another"},
        "b_switched": {"precision": {"recipe": "bf16", "switched_from": "tensorwise"}},
    }
    for name, changes in changes_of_run.items():
        write_scores(out / name, samples=samples, summary=summary_of("bf16", **changes))
    bf16 = summary_of("bf16")
    write_scores(out / "run_bf16", "exact", samples=samples, dtype="float32", summary=bf16)
    write_scores(out / "hf_models_gpt2", samples=samples, run="hf:/data/models/gpt2/")
    for name in NAMES_OF_FOLDERS:
        write_scores(out / name / "deep", samples=samples)
    (out / "a.log").write_text("not a folder, as out/* finds them")
    ours, published = page_of(*sorted(out.iterdir())).split("## Published by others")
    return Sections(out, ours, published)


def test_every_run_in_low_precision_is_compared(among_others: Sections) -> None:
    assert among_others.ours.count("*minus ") == 3


def test_only_the_plain_bf16_run_of_a_pair_is_a_partner(among_others: Sections) -> None:
    assert among_others.ours.count("*minus run_bf16*") == 3


def test_a_run_in_another_dtype_is_named_with_it(among_others: Sections) -> None:
    assert "| run_bf16, float32 " in among_others.ours


@pytest.mark.parametrize(
    "run, precision",
    [("a_repeat", "BF16"), ("b_switched", "FP8 tensorwise>bf16"), ("c_fp4", "FP4 nvfp4")],
)
def test_a_row_names_the_precision_of_the_training(
    run: str, precision: str, among_others: Sections
) -> None:
    assert cells(among_others.ours, run)[3] == precision


@pytest.mark.parametrize("folder", NAMES_OF_FOLDERS)
def test_runs_of_the_same_name_are_called_by_their_paths(
    folder: str, among_others: Sections
) -> None:
    assert f"| {among_others.out / folder / 'deep'} " in among_others.ours


def test_public_models_follow_our_runs(among_others: Sections) -> None:
    place_of_gpt2 = among_others.ours.index("| gpt2 ")
    assert place_of_gpt2 > among_others.ours.index("| run_tensorwise ")


def test_our_section_does_not_name_other_tools(among_others: Sections) -> None:
    assert "lm-eval" not in among_others.ours


@pytest.mark.parametrize("words", ["Pythia 160M", "acc_norm"])
def test_published_numbers_follow_in_a_section_of_their_own(
    words: str, among_others: Sections
) -> None:
    assert words in among_others.published


def test_a_run_given_as_the_working_directory_has_its_name(
    among_others: Sections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(among_others.out / "run_bf16")
    assert {model.name for model in table_rows.read_models(["."])} == {"run_bf16"}


# -------------------------------------------------------------------------- paired differences


def likelihood(metric: str, nats: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The metric over the documents along the last axis."""
    nats_per_unit = nats.sum(-1) / size.sum(-1)
    if metric == "bits_per_byte":
        return nats_per_unit / math.log(2)
    return np.exp(nats_per_unit)


def likelihood_samples(metric: str, nats: np.ndarray, size: np.ndarray) -> Samples:
    samples = []
    for document in range(N):
        value: Any = -float(nats[document])
        if metric != "perplexity":
            value = [value, int(size[document])]
        samples.append({"doc_hash": str(document), metric: value})
    return samples


@dataclass
class TwoModels:
    """Two models that find the same documents hard; eval.table's difference of their scores."""

    base_nats: np.ndarray
    nats: np.ndarray
    size: np.ndarray  # words, bytes or tokens of each document
    difference: float
    error: float | None


def compare_likelihoods(folder: Path, metric: str) -> TwoModels:
    rng = np.random.default_rng(1)
    hardness = rng.normal(3, 0.5, N)
    size = np.ones(N) if metric == "perplexity" else rng.integers(50, 500, N)
    nats_of_models, scores = [], []
    for shift in 0.0, 0.05:
        nats = size * (hardness + shift + rng.normal(0, 0.1, N))
        log = folder / f"{shift}.gz"
        write_log(log, likelihood_samples(metric, nats, size))
        nats_of_models.append(nats)
        value = float(likelihood(metric, nats, size))
        scores.append(table_rows.Score(value, None, None, [log]))
    documents = sha256_of(*map(str, range(N)))
    column = table_rows.Column("t", metric, documents, None, 0, "")
    difference, error = table_rows.paired_difference(column, scores[1], scores[0])
    return TwoModels(*nats_of_models, size, difference, error)


METRICS = ["word_perplexity", "bits_per_byte", "perplexity"]


@pytest.mark.parametrize("metric", METRICS)
def test_the_difference_of_perplexities_is_that_of_the_scores(metric: str, tmp_path: Path) -> None:
    models = compare_likelihoods(tmp_path, metric)
    score = likelihood(metric, models.nats, models.size)
    assert models.difference == pytest.approx(
        score - likelihood(metric, models.base_nats, models.size)
    )


@pytest.mark.parametrize("metric", METRICS)
def test_differences_of_perplexities_have_the_error_of_a_paired_bootstrap(
    metric: str, tmp_path: Path
) -> None:
    models = compare_likelihoods(tmp_path, metric)
    draws = np.random.default_rng(2).integers(N, size=(4000, N))
    sizes = models.size[draws]
    scores = likelihood(metric, models.nats[draws], sizes)
    differences = scores - likelihood(metric, models.base_nats[draws], sizes)
    assert models.error == pytest.approx(differences.std(), rel=0.06)


def remove(log: Path, samples: Samples) -> None:
    log.unlink()


def cut(log: Path, samples: Samples) -> None:
    log.write_bytes(log.read_bytes()[:200])


def replace_a_document(log: Path, samples: Samples) -> None:
    write_log(log, [samples[0] | {"doc_hash": "0" * 64}, *samples[1:]])


def reorder(log: Path, samples: Samples) -> None:
    write_log(log, samples[::-1])


def replace_the_answers(log: Path, samples: Samples) -> None:
    write_log(log, [sample | {"acc": 1.0} for sample in samples])


@pytest.mark.parametrize("damage", [remove, cut, replace_a_document, reorder, replace_the_answers])
def test_a_log_that_does_not_belong_to_the_score_gives_no_error_bar(
    damage: Callable[[Path, Samples], None], pair: Pair
) -> None:
    damage(pair.out / "run_tensorwise/eval/core_arc_easy.gz", pair.fp8)
    difference, _, _ = paired_cell(pair.fp8, pair.bf16).partition(" ")
    assert cells(page_of(pair.out), "*minus run_bf16*")[-1] == difference


# -------------------------------------------------------------------------------- groups of tasks


@dataclass
class Grouped:
    """The page of two runs scored on a group of tasks, and their answers to the whole group."""

    page: str
    bf16: Samples
    rowwise: Samples


def write_group(folder: Path, recipe: str) -> Samples:
    """A run's record of a group, of its three tasks, and of a group within it, 5-shot; returns the
    samples of all three."""
    whole, hashes, samples_of_task = [], [], {}
    for number in range(3):
        samples = answers(f"mmlu_{number}", recipe, n=100 + number)
        samples_of_task[f"mmlu_{number}"] = samples
        hashes.append(docs_sha256(samples))
        whole += samples
    group = mean_row(whole, subtasks=list(samples_of_task), num_fewshot=5)
    group["docs_sha256"] = sha256_of(*hashes)
    inner_group = mean_row(samples_of_task["mmlu_1"], subtasks=["mmlu_1"])
    write_scores(
        folder,
        tasks={"mmlu": group, "mmlu_stem": inner_group},
        samples=samples_of_task,
        summary=summary_of(recipe),
    )
    return whole


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Grouped:
    out = tmp_path_factory.mktemp("grouped")
    bf16 = write_group(out / "bf16", "bf16")
    rowwise = write_group(out / "rowwise", "rowwise")
    return Grouped(page_of(out), bf16, rowwise)


def test_a_group_stands_for_its_tasks_and_the_groups_within_it(grouped: Grouped) -> None:
    assert "mmlu_" not in grouped.page


def test_a_heading_has_task_metric_unit_and_examples(grouped: Grouped) -> None:
    assert "mmlu<br>acc [%]<br>5-shot" in grouped.page


def test_the_difference_of_a_group_rests_on_all_its_documents(grouped: Grouped) -> None:
    difference = cells(grouped.page, "*minus bf16*")[-1]
    assert difference == paired_cell(grouped.rowwise, grouped.bf16)


def test_chance_has_a_row(grouped: Grouped) -> None:
    assert cells(grouped.page, "*chance*")[-1] == "25.0"


# --------------------------------------------------------------------- what is never compared


@dataclass
class Apart:
    """Scores of one task that may not be compared, and their page, split at its limits."""

    out: Path
    full: Samples
    of_another_year: Samples
    whole: str  # the table of whole tasks
    limited: list[str]  # a section each limit


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Apart:
    out = tmp_path_factory.mktemp("apart")
    full = answers("piqa", 1)
    of_another_year = answers("piqa of another year", 1)
    write_scores(out / "full", samples={"piqa": full})
    write_scores(out / "part", samples={"piqa": answers("piqa", 1, n=50)}, limit=50)
    write_scores(out / "other", samples={"piqa": of_another_year})
    # the whole task, but marked as limited
    write_scores(out / "marked", samples={"piqa": full}, limit=400)
    write_scores(out / "shots", tasks={"piqa": mean_row(full, num_fewshot=5)})
    whole, *limited = page_of(out).split("## limit=")
    return Apart(out, full, of_another_year, whole, limited)


def test_limit_documents_and_examples_make_columns_of_their_own(apart: Apart) -> None:
    columns = set()
    for model in table_rows.read_models([apart.out]):
        columns |= model.scores.keys()
    assert len(columns) == 5


def test_each_limit_has_a_table(apart: Apart) -> None:
    assert [section.split(":")[0] for section in apart.limited] == ["50", "400"]


@pytest.mark.parametrize("run", ["part", "marked"])
def test_limited_scores_are_not_among_those_of_whole_tasks(run: str, apart: Apart) -> None:
    assert f"| {run} " not in apart.whole


def test_scores_of_whole_tasks_are_in_no_table_of_a_limit(apart: Apart) -> None:
    limit_50, limit_400 = apart.limited
    assert "| full " not in limit_50
    assert "| full " not in limit_400.split("##")[0]


def test_columns_of_the_same_task_with_other_documents_name_them(apart: Apart) -> None:
    """full's, other's and that of the examples in the prompt, beside the models."""
    header = cells(apart.whole, "model")
    assert len(header) == 4
    assert f"documents {docs_sha256(apart.full)[:6]}" in "".join(header)
    assert f"documents {docs_sha256(apart.of_another_year)[:6]}" in "".join(header)


def test_parts_of_tasks_have_no_figure(apart: Apart, tmp_path: Path) -> None:
    call(table, apart.out / "part", f"out={tmp_path / 'page'}")
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["table.md"]


# ----------------------------------------------------------------------------- steps and times


@dataclass
class TwoSteps:
    """A pair of runs below `out`, each scored at step 500 of 1,000 and at the end; their page."""

    out: Path
    samples: dict[tuple[str, int], Samples]  # by recipe and step
    page: str


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> TwoSteps:
    out = tmp_path_factory.mktemp("two_steps")
    samples_of_step = {}
    for recipe, step in itertools.product(("bf16", "tensorwise"), (500, 1000)):
        samples = answers("arc_easy", f"{recipe}{step}")
        samples_of_step[recipe, step] = samples
        write_scores(
            out / recipe,
            f"core{step}",
            samples={"arc_easy": samples},
            step=step,
            summary=summary_of(recipe, steps=1000),
        )
    return TwoSteps(out, samples_of_step, page_of(out))


EACH_STEP = pytest.mark.parametrize("name, step", [("bf16", 1000), ("bf16, step 500", 500)])


@EACH_STEP
def test_each_step_has_its_own_score(name: str, step: int, two_steps: TwoSteps) -> None:
    score = cells(two_steps.page, name)[-1]
    assert score.startswith(percent(two_steps.samples["bf16", step]))


@pytest.mark.parametrize("name, tokens", [("bf16", "2B"), ("bf16, step 500", "1B")])
def test_each_step_has_the_tokens_up_to_it(name: str, tokens: str, two_steps: TwoSteps) -> None:
    assert cells(two_steps.page, name)[2] == tokens


@EACH_STEP
def test_a_step_is_compared_with_the_partners_same_step(
    name: str, step: int, two_steps: TwoSteps
) -> None:
    samples = two_steps.samples
    difference = cells(two_steps.page, f"*minus {name}*")[-1]
    assert difference == paired_cell(samples["tensorwise", step], samples["bf16", step])


@pytest.fixture(scope="module")
def page_without_the_end(two_steps: TwoSteps, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page where the FP8 run is scored at step 500 alone, its partner at the end too."""
    out = tmp_path_factory.mktemp("without_the_end") / "out"
    shutil.copytree(two_steps.out, out)
    (out / "tensorwise/eval/core1000.json").unlink()
    return page_of(out)


def test_an_earlier_step_is_not_taken_for_the_end(page_without_the_end: str) -> None:
    assert "| tensorwise |" not in page_without_the_end


def test_an_earlier_step_is_not_compared_with_the_partners_end(page_without_the_end: str) -> None:
    assert "| *minus bf16* " not in page_without_the_end


def test_an_earlier_step_is_still_compared_with_its_own(page_without_the_end: str) -> None:
    assert "| *minus bf16, step 500* " in page_without_the_end


def test_of_two_scorings_the_newest_by_the_time_in_its_record_counts(tmp_path: Path) -> None:
    """A copy, or a checkout, gives files other times. Imported weights, of step 0, are named
    without a step."""
    for name, seed in ("b_old", 1), ("a_new", 2):
        write_scores(
            tmp_path / "hf",
            name,
            samples={"piqa": answers("piqa", seed)},
            step=0,
            time=f"2026-11-22T01:00:0{seed}+00:00",
        )
    assert cells(page_of(tmp_path), "hf")[-1].startswith(percent(answers("piqa", 2)))


# ----------------------------------------------------------------------- the command, the figure


def test_the_record_of_eval_precision_is_not_read_as_scores(pair: Pair) -> None:
    page = page_of(pair.out)
    (pair.out / "run_bf16/eval/precision.json").write_text("{}")
    assert page_of(pair.out) == page


@dataclass
class Written:
    """What the command wrote and printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    write_pair(folder / "out")
    (folder / "out/run_bf16/eval/precision.json").write_text("{}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        call(table, folder / "out", f"out={folder / 'table'}")
    return Written(folder / "table", printed.getvalue())


def test_the_command_prints_the_page_that_it_writes(written: Written) -> None:
    assert (written.folder / "table.md").read_text() in written.printed


def test_the_command_says_what_it_wrote(written: Written) -> None:
    assert "wrote" in written.printed


def test_the_command_writes_a_page_and_figures(written: Written) -> None:
    names = sorted(path.name for path in written.folder.iterdir())
    assert names == ["scores.png", "scores.svg", "table.md"]


def test_a_folder_that_cannot_be_written_gets_a_sentence(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    message = refused(capsys, table, pair.out, f"out={tmp_path / 'file/table'}")
    assert "cannot be written" in message


@dataclass
class WithExploded:
    """The pair beside models whose perplexity exploded: the page, and the figure's panels."""

    pair: Pair
    page: str
    panel_of_perplexity: Axes
    panel_of_accuracy: Axes


@pytest.fixture(scope="module")
def with_exploded(tmp_path_factory: pytest.TempPathFactory) -> WithExploded:
    pair = write_pair(tmp_path_factory.mktemp("with_exploded"))
    for name, value in {"bad": 2e7, "exploded": math.inf, "lost": math.nan}.items():
        scores = {"word_perplexity": value, "n": 1, "docs_sha256": "x"}
        write_scores(pair.out / name, tasks={"wikitext": scores})
    models = table_rows.read_models([pair.out])
    return WithExploded(pair, table.build(models), *table_figure.draw(models).axes)


@pytest.mark.parametrize("run, cell", [("bad", "2e+07"), ("exploded", "inf"), ("lost", "nan")])
def test_exploded_scores_are_in_the_table(run: str, cell: str, with_exploded: WithExploded) -> None:
    assert cells(with_exploded.page, run)[-2] == cell


def test_exploded_scores_are_not_on_an_axis(with_exploded: WithExploded) -> None:
    assert not with_exploded.panel_of_perplexity.containers


def test_the_figure_has_a_line_at_chance(with_exploded: WithExploded) -> None:
    lines = with_exploded.panel_of_accuracy.lines
    places = [line.get_xdata()[0] for line in lines if line.get_label() == "chance"]
    assert places == [25.0]


def test_the_figure_has_an_error_bar_of_one_standard_error_each_run(
    with_exploded: WithExploded,
) -> None:
    pair = with_exploded.pair
    points = with_exploded.panel_of_accuracy.containers
    for point, samples in zip(points, (pair.bf16, pair.fp8), strict=True):
        (low, _), (high, _) = point.lines[2][0].get_segments()[0]
        row = mean_row(samples)
        assert (low + high) / 2 == pytest.approx(100 * row["acc"])
        assert high - low == pytest.approx(200 * row["acc_se"])


# ------------------------------------------------------------------------------- users' mistakes


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run without scores, below the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out/run"
    (folder / "eval").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"tasks": {"piqa": 1}}'])
def test_a_damaged_record_gets_a_sentence_and_nothing_is_written(
    content: str, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_folder / "eval/core.json").write_text(content)
    message = refused(capsys, table, "out", "out=table")
    assert "out/run/eval/core.json is damaged" in message
    assert not (tmp_path / "table").exists()


def test_a_path_without_scores_gets_a_sentence_and_nothing_is_written(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no scores in out" in refused(capsys, table, "out", "out=table")
    assert not (tmp_path / "table").exists()
