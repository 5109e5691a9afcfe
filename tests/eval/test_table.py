"""eval/table.py on made-up records, against numbers taken from the answers directly."""

import gzip
import hashlib
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import table, table_figure, table_rows
from tests.helpers.eval_runs import call, refused
from tests.helpers.scaling_runs import edit

N = 400
out = pytest.fixture(lambda tmp_path: tmp_path / "out")


def digest(*hashes: object):
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def answers(task: str, seed: int, n=N):
    """Logged samples of a multiple-choice task: a third of the questions is answered alike by
    everybody."""
    shared, own = random.Random(task), random.Random(f"{task}{seed}")
    return [
        {
            "doc_id": i,
            "doc_hash": digest(task, str(i)),
            "filter": "none",
            "acc": float((shared if i % 3 else own).random() < 0.5),
        }
        for i in range(n)
    ]


def mean_row(rows: list[dict], **more: object):
    x = np.array([row["acc"] for row in rows])
    return {
        "acc": x.mean(),
        "acc_se": x.std(ddof=1) / math.sqrt(len(x)),
        "n": len(x),
        "chance": 0.25,
        "docs_sha256": digest(*(row["doc_hash"] for row in rows)),
        **more,
    }


def write_log(path: Path, rows: list[dict]):
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write(folder, name: str = "core", summary=(), tasks=(), samples=(), **more: object):
    """A record below a run's eval/, its tasks given as rows of samples, whose log lies beside it,
    or as they stand there."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    tasks = dict(tasks)
    for task, rows in dict(samples).items():
        write_log(folder / "eval" / f"{name}_{task}.gz", rows)
        tasks.setdefault(task, mean_row(rows, samples=f"{name}_{task}.gz"))
    edit(
        folder / "eval" / f"{name}.json",
        **{
            "run": f"out/{folder.name}",
            "tasks": tasks,
            "limit": None,
            "dtype": "bfloat16",
            "fp8": "off",
        }
        | more,
    )
    edit(folder / "summary.json", **dict(summary))


def summary(recipe: str, pair: str = "p", size=10**8, **more: object):
    return {
        "pair_id": pair,
        "precision": {"recipe": recipe},
        "params_total": size,
        "tokens": 20 * size,
    } | more


@pytest.fixture
def pair(out):
    """(BF16 rows, FP8 rows) of two runs written below `out`."""
    both = {recipe: answers("arc_easy", recipe) for recipe in ("bf16", "tensorwise")}
    for recipe, rows in both.items():
        write(out / f"run_{recipe}", samples={"arc_easy": rows}, summary=summary(recipe))
    return [*both.values()]


def page(*paths: object):
    return table.build(table_rows.read_models(paths))


def cells(text: str, first):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def shown(mine, base):
    """The paired difference of two lists of samples and its error, as the page writes it."""
    d = np.array([a["acc"] - b["acc"] for a, b in zip(mine, base, strict=True)])
    return f"{100 * d.mean():+.1f} ± {100 * d.std(ddof=1) / math.sqrt(len(d)):.1f}".replace(
        "-", "−"
    )


def test_an_fp8_run_stands_below_its_partner_with_the_paired_difference(out, pair):
    text = page(out)
    assert cells(text, "*minus run_bf16*")[-1] == shown(pair[1], pair[0])
    assert re.findall(r"^\| (run\S+|\*minus \S+) ", text, re.M) == [
        "run_bf16",
        "run_tensorwise",
        "*minus run_bf16*",
    ]
    assert cells(text, "run_tensorwise")[1:4] == ["100M", "2B", "FP8 tensorwise"]
    write(
        out / "run_tensorwise",
        "fp8",
        samples={"arc_easy": (rows := answers("arc_easy", "inference"))},
        fp8="tensorwise",
    )
    assert cells(page(out), "*minus run_tensorwise*")[-1] == shown(rows, pair[1]), (
        "FP8 inference, with the same weights in BF16"
    )
    assert cells(page(out), "run_tensorwise, FP8 inference (tensorwise)")[3] == "FP8 tensorwise"


def test_what_is_no_partner_and_how_models_are_named(out, pair, monkeypatch: pytest.MonkeyPatch):
    """No repeat, branch that was switched to BF16, FP4, run of another pair, other dtype; all
    before run_bf16 by name."""
    rows = answers("arc_easy", 3)
    for name, more in {
        "a_repeat": {"repeat": 1},
        "c_fp4": {"precision": {"recipe": "nvfp4"}},
        "d_pair": {"pair_id": "another"},
        "b_switched": {"precision": {"recipe": "bf16", "switched_from": "tensorwise"}},
    }.items():
        write(out / name, samples={"arc_easy": rows}, summary=summary("bf16") | more)
    write(
        out / "run_bf16",
        "exact",
        samples={"arc_easy": rows},
        dtype="float32",
        summary=summary("bf16"),
    )
    write(out / "hf_models_gpt2", samples={"arc_easy": rows}, run="hf:/data/models/gpt2/")
    for name in ("a", "lr=[1e-3]"):  # no pattern
        write(out / name / "deep", samples={"arc_easy": rows})
    (out / "a.log").write_text("not a folder, as out/* finds them")
    text = page(*sorted(out.iterdir()))
    ours, theirs = text.split("## Published by others")
    assert (
        ours.count("*minus ") == ours.count("*minus run_bf16*") == 3
        and "| run_bf16, float32 " in ours
    )
    assert [cells(text, name)[3] for name in ("a_repeat", "b_switched", "c_fp4")] == [
        "BF16",
        "FP8 tensorwise>bf16",
        "FP4 nvfp4",
    ]
    assert all(f"| {out / name / 'deep'} " in ours for name in ("a", "lr=[1e-3]"))
    assert ours.index("| gpt2 ") > ours.index("| run_tensorwise ")
    assert "lm-eval" not in ours and "Pythia 160M" in theirs and "acc_norm" in theirs
    monkeypatch.chdir(out / "run_bf16")
    assert {row.name for row in table_rows.read_models(["."])} == {"run_bf16"}


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte", "perplexity"])
def test_differences_of_perplexities_have_the_error_of_a_paired_bootstrap(
    tmp_path: Path, metric: str
):
    rng, arms = np.random.default_rng(1), []
    hard, size = (
        rng.normal(3, 0.5, N),
        (np.ones(N) if metric == "perplexity" else rng.integers(50, 500, N)),
    )

    def value(nats, size):
        ratio = nats.sum(-1) / size.sum(-1)
        return ratio / math.log(2) if metric == "bits_per_byte" else np.exp(ratio)

    for shift in (0.0, 0.05):
        nats = size * (hard + shift + rng.normal(0, 0.1, N))
        write_log(
            path := tmp_path / f"{shift}.gz",
            [
                {"doc_hash": doc, metric: -x if metric == "perplexity" else [-x, int(n)]}
                for doc, x, n in zip(map(str, range(N)), nats.tolist(), size.tolist(), strict=True)
            ],
        )
        arms.append((nats, table_rows.Score(float(value(nats, size)), None, None, [path])))
    (base_nats, base), (nats, score) = arms
    difference, error = table_rows.paired_difference(
        table_rows.Column("t", metric, digest(*map(str, range(N))), None, 0, ""), score, base
    )
    draws = rng.integers(N, size=(4000, N))
    bootstrap = value(nats[draws], size[draws]) - value(base_nats[draws], size[draws])
    assert difference == pytest.approx(value(nats, size) - value(base_nats, size))
    assert error == pytest.approx(bootstrap.std(), rel=0.06)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, rows: path.unlink(),
        lambda path, rows: path.write_bytes(path.read_bytes()[:200]),
        lambda path, rows: write_log(path, [rows[0] | {"doc_hash": "0" * 64}, *rows[1:]]),
        lambda path, rows: write_log(path, rows[::-1]),
        lambda path, rows: write_log(path, [row | {"acc": 1.0} for row in rows]),
    ],
)
def test_logs_that_do_not_belong_to_the_score_give_no_error_bar(
    out, pair, damage: Callable[..., Any]
):
    """Missing, cut, of other documents, in another order, of other answers."""
    damage(out / "run_tensorwise/eval/core_arc_easy.gz", pair[1])
    assert cells(page(out), "*minus run_bf16*")[-1] == shown(pair[1], pair[0]).partition(" ")[0]


def test_of_a_group_the_differences_rest_on_all_its_questions(out):
    wholes = []
    for recipe in ("bf16", "rowwise"):
        parts = {f"mmlu_{i}": answers(f"mmlu_{i}", recipe, n=100 + i) for i in range(3)}
        wholes.append(whole := sum(parts.values(), []))
        group = mean_row(whole, subtasks=list(parts), num_fewshot=5) | {
            "docs_sha256": digest(*(mean_row(rows)["docs_sha256"] for rows in parts.values()))
        }
        within = mean_row(parts["mmlu_1"], subtasks=["mmlu_1"])  # a group within the group
        write(
            out / recipe,
            tasks={"mmlu": group, "mmlu_stem": within},
            samples=parts,
            summary=summary(recipe),
        )
    text = page(out)
    assert "mmlu_" not in text and "mmlu<br>acc [%]<br>5-shot" in text
    assert (
        cells(text, "*minus bf16*")[-1] == shown(wholes[1], wholes[0])
        and cells(text, "*chance*")[-1] == "25.0"
    )


def test_limited_scores_and_other_documents_never_share_a_column(out):
    full, part, other = (
        answers("piqa", 1),
        answers("piqa", 1, n=50),
        answers("piqa of another year", 1),
    )
    for name, rows, more in (
        ("full", full, {}),
        ("part", part, {"limit": 50}),
        ("other", other, {}),
        # the whole task, but marked as limited
        ("marked", full, {"limit": 400}),
    ):
        write(out / name, samples={"piqa": rows}, **more)
    write(out / "shots", tasks={"piqa": mean_row(full, num_fewshot=5)})
    rows = table_rows.read_models([out])
    assert len({column for row in rows for column in row.scores}) == 5
    whole, *limited = table.build(rows).split("## limit=")
    assert [text.split(":")[0] for text in limited] == ["50", "400"]
    assert (
        "| part " not in whole
        and "| marked " not in whole
        and "| full " not in limited[0] + limited[1].split("##")[0]
    )
    header = cells(whole, "model")
    assert len(header) == 4 and all(
        f"documents {mean_row(rows)['docs_sha256'][:6]}" in "".join(header)
        for rows in (full, other)
    )
    call(table, out / "part", f"out={out / 'page'}")
    assert [path.name for path in (out / "page").iterdir()] == ["table.md"], (
        "parts of tasks have no figure"
    )


def test_scores_of_an_earlier_step_or_an_older_scoring_do_not_count(
    out,
):
    """Scored at step 500 of 1,000, later once more; the partner at 1,000 only. Steps are compared
    with the same step's. The newest by the time in the records: a copy, or a checkout, gives files
    other times. Imported weights have no step."""
    rows = {
        (recipe, step): answers("arc_easy", f"{recipe}{step}")
        for recipe in ("bf16", "tensorwise")
        for step in (500, 1000)
    }
    for (recipe, step), found in rows.items():
        write(
            out / recipe,
            f"core{step}",
            samples={"arc_easy": found},
            step=step,
            summary=summary(recipe, steps=1000),
        )
    text = page(out)
    for name, step, tokens in (("bf16", 1000, "2B"), ("bf16, step 500", 500, "1B")):
        line = cells(text, name)
        assert line[2] == tokens and line[-1].startswith(
            f"{100 * mean_row(rows['bf16', step])['acc']:.1f} ±"
        )
        assert cells(text, f"*minus {name}*")[-1] == shown(
            rows["tensorwise", step], rows["bf16", step]
        )
    (out / "tensorwise/eval/core1000.json").unlink()
    text = page(out)
    assert (
        "| tensorwise |" not in text
        and "| *minus bf16* " not in text
        and "| *minus bf16, step 500* " in text
    )
    for name, seed in (("b_old", 1), ("a_new", 2)):
        write(
            out / "hf",
            name,
            samples={"piqa": answers("piqa", seed)},
            step=0,
            time=f"2026-11-22T01:00:0{seed}+00:00",
        )
    assert cells(page(out / "hf"), "hf")[-1].startswith(
        f"{100 * mean_row(answers('piqa', 2))['acc']:.1f} ±"
    )


def test_the_command_writes_the_page_and_figures_of_scores(
    tmp_path: Path, out, pair, capsys: pytest.CaptureFixture[str]
):
    (out / "run_bf16/eval/precision.json").write_text("{}")  # eval.precision's, no record
    call(table, out, f"out={tmp_path / 'table'}")
    assert (tmp_path / "table/table.md").read_text() in (
        said := capsys.readouterr().out
    ) and "wrote" in said
    assert sorted(p.name for p in (tmp_path / "table").iterdir()) == [
        "scores.png",
        "scores.svg",
        "table.md",
    ]
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, table, out, f"out={tmp_path / 'file/table'}")
    for name, value in {"bad": 2e7, "exploded": math.inf, "lost": math.nan}.items():
        write(
            out / name, tasks={"wikitext": {"word_perplexity": value, "n": 1, "docs_sha256": "x"}}
        )
        assert cells(page(out), name)[-2] == f"{value:.3g}"
    exploded, panel = table_figure.draw(table_rows.read_models([out])).axes
    assert not exploded.containers, "in the table, and not on the axis"
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "chance"] == [25.0]
    for container, rows in zip(panel.containers, pair, strict=True):
        (low, _), (high, _) = container.lines[2][0].get_segments()[0]
        row = mean_row(rows)
        assert (low + high) / 2 == pytest.approx(100 * row["acc"]) and high - low == pytest.approx(
            200 * row["acc_se"]
        )


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"tasks": {"piqa": 1}}', None])
def test_damaged_records_and_paths_without_scores_get_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "out" / "run" / "eval").mkdir(parents=True)
    if content:
        (folder / "core.json").write_text(content)
    said = "out/run/eval/core.json is damaged" if content else "no scores in out"
    assert said in refused(capsys, table, "out", "out=table") and not (tmp_path / "table").exists()
