"""eval/table.py on made-up records, against numbers taken from the answers directly."""

import gzip
import hashlib
import json
import math
import random

import numpy as np
import pytest

from eval import table

N = 400


def docs(task, n=N):
    return [hashlib.sha256(f"{task}{i}".encode()).hexdigest() for i in range(n)]


def digest(hashes):
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def answers(task, seed, n=N):
    """Logged samples of a multiple-choice task: a third of the questions is answered alike by everybody."""
    shared, own, rows = random.Random(task), random.Random(f"{task}{seed}"), []
    for i, doc in enumerate(docs(task, n)):
        right = float(shared.random() < 0.5 if i % 3 else own.random() < 0.5)
        rows.append({"doc_id": i, "doc_hash": doc, "filter": "none", "acc": right})
    return rows


def mean_row(rows, metric="acc", **more):
    x = np.array([row[metric] for row in rows])
    return {metric: x.mean(), f"{metric}_se": x.std(ddof=1) / math.sqrt(len(x)), "n": len(x), "chance": 0.25,
            "docs_sha256": digest([row["doc_hash"] for row in rows]), **more}


def write(folder, tasks, samples=(), name="core", summary=None, **more):
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    for file, rows in dict(samples).items():
        with gzip.open(folder / "eval" / file, "wt") as log:
            log.writelines(json.dumps(row) + "\n" for row in rows)
    record = {"run": f"out/{folder.name}", "tasks": tasks, "limit": None, "dtype": "bfloat16", "fp8": "off"} | more
    (folder / "eval" / f"{name}.json").write_text(json.dumps(record))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))


def summary(recipe, pair="p", size=10**8):
    return {"pair_id": pair, "precision": {"recipe": recipe}, "params_total": size, "tokens": 20 * size}


@pytest.fixture
def pair(tmp_path):
    """(BF16 rows, FP8 rows) of two runs written below tmp_path/out."""
    both = []
    for recipe in ("bf16", "tensorwise"):
        rows = answers("arc_easy", recipe)
        write(tmp_path / "out" / f"run_{recipe}", {"arc_easy": mean_row(rows, samples="s.jsonl.gz")}, {"s.jsonl.gz": rows},
              summary=summary(recipe))
        both.append(rows)
    return both


def page(tmp_path, *paths):
    return table.build(table.read_rows(paths or [tmp_path / "out"]))


def cells(text, first):
    line, = (line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def shown(mine, base):
    """The paired difference of two lists of samples and its error, as the page writes it."""
    d = np.array([a["acc"] - b["acc"] for a, b in zip(mine, base, strict=True)])
    return f"{100 * d.mean():+.1f} ± {100 * d.std(ddof=1) / math.sqrt(len(d)):.1f}".replace("-", "−")


def test_an_fp8_run_stands_below_its_partner_with_the_paired_difference(tmp_path, pair):
    text = page(tmp_path)
    assert cells(text, "*minus run_bf16*")[-1] == shown(pair[1], pair[0])
    lines = text.splitlines()
    at = [next(i for i, line in enumerate(lines) if line.startswith(f"| {name} ")) for name in ("run_bf16", "run_tensorwise")]
    assert at[1] == at[0] + 1 and lines[at[1] + 1].startswith("| *minus run_bf16*")
    assert cells(text, "run_tensorwise")[1:4] == ["100M", "2B", "FP8 tensorwise"]


def test_neither_a_repeat_nor_a_branch_that_was_switched_to_bf16_is_a_partner(tmp_path, pair):
    others = {"a_repeat": {"repeat": 1}, "b_switched": {"precision": {"recipe": "bf16", "switched_from": "tensorwise"}},
              "c_fp4": {"precision": {"recipe": "nvfp4"}}}      # all before run_bf16 by name
    for name, more in others.items():
        write(tmp_path / "out" / name, {"arc_easy": mean_row(answers("arc_easy", name))}, summary=summary("bf16") | more)
    text = page(tmp_path)
    assert "*minus a_repeat" not in text and "*minus b_switched" not in text and text.count("*minus run_bf16*") == 3
    assert cells(text, "b_switched")[3] == "FP8 tensorwise>bf16" and cells(text, "a_repeat")[3] == "BF16"
    assert cells(text, "c_fp4")[3] == "FP4 nvfp4"


@pytest.mark.parametrize("metric", ["word_perplexity", "bits_per_byte", "perplexity"])
def test_differences_of_perplexities_have_the_error_of_a_paired_bootstrap(tmp_path, metric):
    rng, arms = np.random.default_rng(1), []
    size, hard = rng.integers(50, 500, N), rng.normal(3, 0.5, N)
    size = np.ones(N) if metric == "perplexity" else size

    def value(nats, size):
        ratio = nats.sum(-1) / size.sum(-1)
        return ratio / math.log(2) if metric == "bits_per_byte" else np.exp(ratio)
    for shift in (0.0, 0.05):
        nats = size * (hard + shift + rng.normal(0, 0.1, N))
        path = tmp_path / f"{shift}.gz"
        with gzip.open(path, "wt") as log:
            log.writelines(json.dumps({"doc_hash": doc, metric: -x if metric == "perplexity" else [-x, int(n)]}) + "\n"
                           for doc, x, n in zip(docs("t"), nats.tolist(), size.tolist(), strict=True))
        arms.append((nats, table.Score(float(value(nats, size)), None, None, [path])))
    (base_nats, base), (nats, score) = arms
    difference, error = table.paired_difference(table.Column("t", metric, digest(docs("t")), None, 0, ""), score, base)
    draws = rng.integers(N, size=(4000, N))
    bootstrap = value(nats[draws], size[draws]) - value(base_nats[draws], size[draws])
    assert difference == pytest.approx(value(nats, size) - value(base_nats, size))
    assert error == pytest.approx(bootstrap.std(), rel=0.06)


@pytest.mark.parametrize("damage", ["missing", "other documents", "other order", "cut", "other answers"])
def test_logs_that_do_not_belong_to_the_score_give_no_error_bar(tmp_path, pair, damage):
    rows = [dict(row) for row in pair[1]]
    path = tmp_path / "out" / "run_tensorwise" / "eval" / "s.jsonl.gz"
    if damage == "other documents":
        rows[0]["doc_hash"] = "0" * 64
    elif damage == "other order":
        rows.reverse()
    elif damage == "other answers":
        rows = [row | {"acc": 1.0} for row in rows]
    content = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:200] if damage == "cut" else content)
    assert cells(page(tmp_path), "*minus run_bf16*")[-1] == shown(pair[1], pair[0]).partition(" ")[0]


def test_fp8_inference_is_compared_with_the_same_weights_in_bf16(tmp_path, pair):
    rows = answers("arc_easy", "inference")
    write(tmp_path / "out" / "run_tensorwise", {"arc_easy": mean_row(rows, samples="f.jsonl.gz")}, {"f.jsonl.gz": rows},
          name="core_fp8", fp8="tensorwise")
    text = page(tmp_path)
    assert cells(text, "*minus run_tensorwise*")[-1] == shown(rows, pair[1])
    assert cells(text, "run_tensorwise, FP8 inference (tensorwise)")[3] == "FP8 tensorwise"


def test_of_a_group_the_differences_rest_on_all_its_questions(tmp_path):
    for recipe in ("bf16", "rowwise"):
        parts = {f"mmlu_{i}": answers(f"mmlu_{i}", recipe, n=100 + i) for i in range(3)}
        whole = [row for rows in parts.values() for row in rows]
        leaves = {name: mean_row(rows, samples=f"{name}.gz") for name, rows in parts.items()}
        group = mean_row(whole, subtasks=list(parts), num_fewshot=5) | {
            "docs_sha256": digest([leaf["docs_sha256"] for leaf in leaves.values()])}
        within = mean_row(parts["mmlu_1"], subtasks=["mmlu_1"])     # a group within the group
        write(tmp_path / "out" / recipe, {"mmlu": group, **leaves, "mmlu_stem": within},
              {f"{name}.gz": rows for name, rows in parts.items()}, summary=summary(recipe))
    text = page(tmp_path)
    assert "mmlu_" not in text and "mmlu<br>acc [%]<br>5-shot" in text
    assert "±" in cells(text, "*minus bf16*")[-1]
    assert cells(text, "*chance*")[-1] == "25.0"


def test_limited_scores_and_other_documents_never_share_a_column(tmp_path):
    full, part, other = answers("piqa", 1), answers("piqa", 1, n=50), answers("piqa of another year", 1)
    write(tmp_path / "out" / "full", {"piqa": mean_row(full)})
    write(tmp_path / "out" / "part", {"piqa": mean_row(part)}, limit=50)
    write(tmp_path / "out" / "marked", {"piqa": mean_row(full)}, limit=400)         # the whole task, but marked as limited
    write(tmp_path / "out" / "other", {"piqa": mean_row(other)})
    write(tmp_path / "out" / "shots", {"piqa": mean_row(full, num_fewshot=5)})
    rows = table.read_rows([tmp_path / "out"])
    assert len({column for row in rows for column in row.scores}) == 5
    whole, *limited = table.build(rows).split("## limit=")
    assert [text.split(":")[0] for text in limited] == ["50", "400"]
    assert "| part " not in whole and "| marked " not in whole and "| full " not in limited[0] + limited[1].split("##")[0]
    header = cells(whole, "model")
    marks = [f"documents {digest(docs(task))[:6]}" for task in ("piqa", "piqa of another year")]
    assert len(header) == 4 and all(mark in "".join(header) for mark in marks)


def test_of_two_scorings_the_newest_counts_and_imported_weights_have_no_step(tmp_path):
    """By the time in the records: a copy, or a checkout, gives files other times."""
    old, new = answers("piqa", 1), answers("piqa", 2)
    for name, rows, time in (("b_old", old, "2026-11-22T01:00:00+00:00"), ("a_new", new, "2026-11-22T01:00:01+00:00")):
        write(tmp_path / "out" / "run", {"piqa": mean_row(rows)}, name=name, time=time, step=0)
    assert cells(page(tmp_path), "run")[-1].startswith(f"{100 * mean_row(new)['acc']:.1f} ±")


def test_scores_of_a_step_before_the_end_are_not_the_runs(tmp_path):
    """Scored at step 500 of 1,000, later once more; the partner at 1,000 only. Steps are compared with the same step's."""
    rows = {(recipe, step): answers("arc_easy", f"{recipe}{step}") for recipe in ("bf16", "tensorwise") for step in (500, 1000)}
    for (recipe, step), found in rows.items():
        write(tmp_path / "out" / recipe, {"arc_easy": mean_row(found, samples=f"{step}.gz")}, {f"{step}.gz": found},
              name=f"core{step}", step=step, summary=summary(recipe) | {"steps": 1000})
    text = page(tmp_path)
    for name, step, tokens in (("bf16", 1000, "2B"), ("bf16, step 500", 500, "1B")):
        line = cells(text, name)
        assert line[2] == tokens and line[-1].startswith(f"{100 * mean_row(rows['bf16', step])['acc']:.1f} ±")
        assert cells(text, f"*minus {name}*")[-1] == shown(rows["tensorwise", step], rows["bf16", step])
    (tmp_path / "out" / "tensorwise" / "eval" / "core1000.json").unlink()
    text = page(tmp_path)
    assert "| tensorwise |" not in text and "| *minus bf16* " not in text and "| *minus bf16, step 500* " in text


def test_pairs_names_and_public_models(tmp_path, pair):
    rows = answers("arc_easy", 3)
    write(tmp_path / "out" / "stranger", {"arc_easy": mean_row(rows)}, summary=summary("rowwise", pair="another"))
    write(tmp_path / "out" / "run_bf16", {"arc_easy": mean_row(rows)}, name="exact", dtype="float32")
    write(tmp_path / "out" / "hf_models_gpt2", {"arc_easy": mean_row(rows)}, run="hf:/data/models/gpt2/")
    for name in ("a", "lr=[1e-3]"):     # no pattern
        write(tmp_path / "out" / name / "deep", {"arc_easy": mean_row(rows)})
    (tmp_path / "out" / "begun").mkdir()
    (tmp_path / "out" / "a.log").write_text("not a folder, as out/* finds them")
    text = page(tmp_path, *sorted((tmp_path / "out").iterdir()))
    ours, theirs = text.split("## Published by others")
    assert ours.count("*minus ") == 1 and "| run_bf16, float32 " in ours, "a pair is one dtype and one pair_id"
    assert all(f"| {tmp_path / 'out' / name / 'deep'} " in ours for name in ("a", "lr=[1e-3]")) and "begun" not in ours
    assert ours.index("| gpt2 ") > ours.index("| run_tensorwise ")
    assert "lm-eval" not in ours and "Pythia 160M" in theirs and "acc_norm" in theirs


def test_the_command_writes_the_page_and_figures(tmp_path, pair, capsys):
    (tmp_path / "out" / "run_bf16" / "eval" / "precision.json").write_text("{}")       # eval.precision's, no record
    assert table.main([str(tmp_path / "out"), f"out={tmp_path / 'table'}"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "table" / "table.md").read_text() in out and "wrote" in out
    assert (tmp_path / "table" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "table").iterdir()) == ["scores.png", "scores.svg", "table.md"]
    (tmp_path / "file").write_text("")
    assert table.main([str(tmp_path / "out"), f"out={tmp_path / 'file' / 'table'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_model_that_exploded_is_in_the_table_and_not_on_the_axis(tmp_path):
    values = {"good": 20.0, "bad": 2e7, "exploded": math.inf, "lost": math.nan}
    for name, value in values.items():
        write(tmp_path / "out" / name, {"wikitext": {"word_perplexity": value, "n": 1, "docs_sha256": "x"}})
    assert [cells(page(tmp_path), name)[-1] for name in values] == ["20.00", "2e+07", "inf", "nan"]
    panel, = table.draw(table.read_rows([tmp_path / "out"])).axes
    assert len(panel.containers) == 1


@pytest.mark.parametrize("content, said", [
    ("{", "core.json is damaged"), ("[1]", "core.json is damaged"), ("{}", "core.json is damaged"),
    ('{"tasks": {"piqa": 1}}', "core.json is damaged"), (None, "no scores in out")])
def test_damaged_records_and_paths_without_scores_get_a_sentence(tmp_path, monkeypatch, capsys, content, said):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "out" / "run" / "eval").mkdir(parents=True)
    if content:
        (folder / "core.json").write_text(content)
    for paths, words in ((["out"], said), (["nowhere"], "no scores in nowhere")):
        assert table.main([*paths, "out=table"]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1 and not (tmp_path / "table").exists()


def test_published_numbers_name_source_harness_and_shots():
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")]
                         for line in table.PUBLISHED.read_text().splitlines() if line.startswith("|")]
    assert len(lines) > 20 and {name.split()[0] for name in header[1:-4]} <= set(table.ORDER)
    for model, *values, metric, shots, harness, source in lines:
        assert "." in source and harness and metric and int(shots) in (0, 5, 10)
        assert all(not value or 1 < float(value) < 100 for value in values), model


def test_the_figure_shows_scores_errors_and_chance(tmp_path):
    row = mean_row(answers("boolq", 1)) | {"chance": 0.5}
    write(tmp_path / "out" / "run", {"boolq": row})
    panel, = table.draw(table.read_rows([tmp_path / "out"])).axes
    verticals = {round(line.get_xdata()[0], 6) for line in panel.lines if len(set(line.get_xdata())) == 1 and
                 line.get_linestyle() != "None"}
    assert verticals == {50.0}
    (bar,), = (container.lines[2] for container in panel.containers)
    low, high = sorted(x for x, _ in bar.get_segments()[0])
    assert (low + high) / 2 == pytest.approx(100 * row["acc"]) and high - low == pytest.approx(200 * row["acc_se"])


def test_a_run_given_as_the_current_folder_has_its_name(tmp_path, monkeypatch):
    write(tmp_path / "run", {"boolq": mean_row(answers("boolq", 1))})
    monkeypatch.chdir(tmp_path / "run")
    assert [row.name for row in table.read_rows(["."])] == ["run"]
