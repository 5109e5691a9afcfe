"""Which parameters N counts: laws, ratios, predictions and words follow the study, and repeats of a run enter no law."""

import gzip
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scaling_runs import write_run

from runtime.cli import UserError
from scaling import fit
from scaling import predict as frozen
from scaling.budget import read_law
from scaling.figures import draw, drawn, styles
from scaling.fit import fit_group
from scaling.pairs import KIND, pairs
from scaling.records import (
    check_comparable,
    counted_as,
    read_bytes,
    read_curve,
    read_record,
    read_runs,
    read_text,
    without_repeats,
)

# Layers, width, width of the feed-forward, of models whose vocabulary holds half of their parameters or more.
SHAPES = ((4, 256, 704), (4, 384, 1024), (4, 512, 1408), (5, 640, 1792))
VOCABULARY, N_CTX, RATIOS = 50_304, 1024, (5, 10, 20)
LAW = {"E": 2.0, "A": 90.0, "B": 700.0, "alpha": 0.3, "beta": 0.32}        # in non-embedding parameters


def loss_of(N, D):
    return LAW["E"] + LAW["A"] * N ** -LAW["alpha"] + LAW["B"] * D ** -LAW["beta"]


def counts(shape, ratio):
    """What train.py counts for a tied model of this shape trained on so many tokens per non-embedding parameter."""
    layers, width, inner = shape
    nonembed = layers * (4 * width**2 + 3 * width * inner + 2 * width) + width
    total, attention = nonembed + VOCABULARY * width, 12 * layers * width * N_CTX
    return {"params_nonembed": nonembed, "params_total": total, "params_matmul": total, "tokens": ratio * nonembed,
            "flops_per_token": 6 * total + attention, "flops_per_token_causal": 6 * total + attention // 2,
            "flops_per_token_6n_total": 6 * total, "flops_per_token_6n_nonembed": 6 * nonembed,
            "flops_per_token_6n_matmul": 6 * total, "vocab_size": 50_257, "vocab_padded": VOCABULARY}


def write_study(folder, shapes=SHAPES[:3], seeds=(1, 2), noise=0.0, params="nonembed"):
    """A study of warm-up-stable-decay families under LAW; the largest shape is declared and held out."""
    rng = np.random.default_rng(0)
    for shape in shapes:
        for seed in seeds:
            trunk = f"w{shape[1]}_t{max(RATIOS)}_s{seed}"
            for ratio in RATIOS:
                lineage = {} if ratio == max(RATIOS) else {"parent_run": trunk, "parent_step": 8 * ratio}
                write(folder, shape, ratio, seed, loss_factor=math.exp(noise * rng.normal()), **lineage)
    held = counts(SHAPES[3], 20) | {"run": "w640_t20_s1", "recipe": "bf16"}
    study = {"held_out": ["w640_t20_s1"], "runs": [held], "params": params}
    if params is ...:
        del study["params"]
    (folder / "study.json").write_text(json.dumps(study))
    return folder


def write(folder, shape, ratio, seed=1, loss_factor=1.0, name=None, **changes):
    counted = counts(shape, ratio)
    return write_run(folder / (name or f"w{shape[1]}_t{ratio}_s{seed}"), params=counted["params_total"], curve=False, seed=seed,
                     loss=loss_of(counted["params_nonembed"], counted["tokens"]) * loss_factor, **counted | changes)


# ---------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("params, convention", [("nonembed", "nonembed"), ("total", "total"), (..., "total")])
def test_n_is_what_the_study_beside_the_run_counts(tmp_path, params, convention):
    write_study(tmp_path / "study", SHAPES[:1], (1,), params=params)
    for record in read_runs([tmp_path / "study"])[0]:
        assert record.convention == convention and getattr(record, f"params_{convention}") == record.N


def test_without_a_study_n_is_all_parameters_and_words_may_override(tmp_path):
    write(tmp_path, SHAPES[0], 5, name="a")
    record = read_record(tmp_path / "a")
    assert record.convention == "total" and record.params_total == record.N
    (other,) = counted_as([record], "nonembed")
    assert other == replace(record, convention="nonembed") and record.params_nonembed == other.N
    assert counted_as([record], None) == [record]


@pytest.mark.parametrize("text, sentence", [
    ('{"params": "matmul"}', r"study\.json: params is 'matmul'; expected total or nonembed"),
    ('{"params": null}', "params is None"), ('{"params": []}', r"params is \[\]"), ('{"par', "is not valid JSON"),
    ("", "is not valid JSON"), ("[]", "holds a list; expected an object"), ("\udcff", "is not valid JSON")])
def test_a_study_that_does_not_say_what_it_counts_is_refused(tmp_path, text, sentence):
    write(tmp_path, SHAPES[0], 5, name="a")
    (tmp_path / "study.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=sentence):
        read_record(tmp_path / "a")


def test_runs_of_two_conventions_are_refused_unless_one_is_named(tmp_path):
    first, second = write_study(tmp_path / "a", SHAPES[:1], (1,)), write_study(tmp_path / "b", SHAPES[1:2], (1,), params="total")
    records, _ = read_runs([first, second])
    with pytest.raises(UserError, match=r"a/w256\S* belongs to a study that counts nonembed parameters and .*b/w384\S* to one "
                                          r"that counts total: say which for both, n=total or n=nonembed"):
        check_comparable(records)
    for convention in ("total", "nonembed"):
        check_comparable(counted_as(records, convention))


def test_a_repeat_is_no_twin_and_no_point(tmp_path):
    write(tmp_path, SHAPES[0], 5, name="a")
    write(tmp_path, SHAPES[0], 5, name="again", repeat=1, loss_factor=1.001)
    write(tmp_path, SHAPES[0], 5, name="plain", seed=3, repeat=0)
    records, _ = read_runs([tmp_path])
    assert {record.run_id: record.repeat for record in records} == {"a": 0, "again": 1, "plain": 0}
    check_comparable(records)
    kept, notes = without_repeats(records)
    assert [record.run_id for record in kept] == ["a", "plain"] and len(notes) == 1 and "left out again: a repeat" in notes[0]
    assert without_repeats(kept) == (kept, [])
    write(tmp_path, SHAPES[0], 5, name="thrice", repeat=1)
    with pytest.raises(UserError, match=r"again and .*thrice are one point given twice .*seed, repeat"):
        check_comparable(read_runs([tmp_path])[0])


@pytest.mark.parametrize("repeat", [-1, 1.0, True, "1", [], 2**63])
def test_a_repeat_is_a_whole_number(tmp_path, repeat):
    write(tmp_path, SHAPES[0], 5, name="a", repeat=repeat)
    with pytest.raises(UserError, match="repeat is .*expected a whole number, at least 0"):
        read_record(tmp_path / "a")


# ------------------------------------------------------------------------------------------------------------------ files


def test_a_packed_file_reads_as_the_file_itself(tmp_path):
    text, path = '{"loss": 1}\nrésumé\n', tmp_path / "metrics.jsonl"
    assert read_text(path) == "" and read_bytes(path) == b""
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    assert read_text(path) == text and read_text(str(path)) == text
    path.write_text("fresh")                    # a run that goes on: its own file is the newer one
    assert read_text(path) == "fresh"
    path.write_bytes(b"ok \xff\n")
    assert read_text(path) == "ok \N{REPLACEMENT CHARACTER}\n"


def test_a_damaged_packed_file_gets_a_sentence(tmp_path):
    packed, whole = tmp_path / "probe.jsonl.gz", gzip.compress(b"x" * 5000 + bytes(range(256)) * 20, mtime=0)
    for damaged in (whole[:-1], whole[:40], whole[:5], b"", b"not packed", whole[:-8] + b"\0" * 8,
                    whole[:10] + b"\xff" * 20 + whole[30:]):
        packed.write_bytes(damaged)
        with pytest.raises(UserError, match=r"probe\.jsonl\.gz cannot be unpacked"):
            read_text(tmp_path / "probe.jsonl")


def test_a_published_run_has_its_curve(tmp_path):
    write_run(tmp_path / "a")
    before = read_curve(read_record(tmp_path / "a"))
    path = tmp_path / "a" / "metrics.jsonl"
    (tmp_path / "a" / "metrics.jsonl.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    after = read_curve(read_record(tmp_path / "a"))
    assert len(before[0]) == 200 and all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


# ------------------------------------------------------------------------------------------------------------------- laws


def test_a_law_in_nonembedding_parameters_is_recovered_by_that_count_alone(tmp_path):
    """Four sizes, whose tables of words hold 51 to 80 % of them: noise-free losses give the law back, or another one."""
    records, _ = read_runs([write_study(tmp_path / "study", SHAPES)])
    by_n = {name: fit_group(counted_as(records, name), seed_sd=0.0, resamples=0) for name in ("nonembed", "total")}
    found = by_n["nonembed"].laws["chinchilla"]
    assert found.identified
    for name, truth in LAW.items():
        assert found.parameters[name] == pytest.approx(truth, rel=1e-3), name
    other = by_n["total"].laws["chinchilla"]
    assert not other.identified or abs(other.parameters["alpha"] / LAW["alpha"] - 1) > 0.2
    assert list(by_n["nonembed"].by_convention) == ["params_nonembed", "params_total", "params_matmul"]
    assert list(by_n["total"].by_convention) == ["params_total", "params_nonembed", "params_matmul"]
    for name, convention in (("params_nonembed", "nonembed"), ("params_total", "total")):
        assert by_n["nonembed"].by_convention[name].parameters == by_n["total"].by_convention[name].parameters
        assert by_n[convention].by_convention[name] is by_n[convention].laws["chinchilla"]


@pytest.fixture
def no_figure(monkeypatch):
    monkeypatch.setattr(fit, "draw", lambda *_: None)
    monkeypatch.setattr("scaling.figures.render", lambda *_: b"")


def test_the_command_counts_as_the_study_does_and_freezes_that(tmp_path, capsys, no_figure):
    folder = write_study(tmp_path / "study", noise=3e-4)
    write(folder, SHAPES[0], 5, name="null", repeat=1, loss_factor=1.5)         # would wreck the law
    assert fit.main([str(folder), "--predict", "w640_t20_s1"]) == 0
    out = capsys.readouterr().out
    assert "left out null: a repeat" in out
    assert "bf16: 18 runs of 6 trajectories, non-embedding N 3.21M to 12.8M, 5 to 20 tokens per non-embedding parameter" in out
    table = [line.split("|")[1].strip() for line in out[out.index("| counted as"):].splitlines() if line.startswith("|")]
    assert table[2:5] == ["params_nonembed", "params_total", "params_matmul"]
    law = json.loads((folder / "law" / "law.json").read_text())
    assert law["conventions"]["N"] == "params_nonembed" and law["tokens_per_param"] == [5, 20]
    for one in law["inputs"]:
        assert one["N"] == one["params_nonembed"] == read_record(folder / one["run_id"]).params_nonembed
        assert one["params_total"] == read_record(folder / one["run_id"]).params_total and one["run_id"] != "null"
    fitted = law["groups"]["bf16"]["by_convention"]
    assert fitted["params_nonembed"] == law["laws"]["chinchilla"] != fitted["params_total"]
    assert [row["value"] for row in law["groups"]["bf16"]["robustness"] if row["variant"].startswith("count")][0] in (
        "params_total", "flops_per_token_causal")

    goal = counts(SHAPES[3], 20)
    (made,) = frozen.load(folder / "law")
    assert made.convention == made.content["convention"] == "nonembed" and goal["params_nonembed"] == made.N
    assert f"{made.N:,} non-embedding parameters" in out and made.content["points"] == {"all": 18, "at_this_ratio": 6}
    assert made.headline == "chinchilla" and made.loss == pytest.approx(loss_of(made.N, made.D), rel=0.01)
    assert {one["N"] for one in made.content["inputs"]} == {counts(shape, 5)["params_nonembed"] for shape in SHAPES[:3]}
    write(folder, SHAPES[3], 20, t_start="2999-01-01T00:00:00Z")
    write(folder, SHAPES[3], 20, name="again", repeat=1, t_start="2999-01-01T00:00:00Z")
    for words, convention in (([], "nonembed"), (["n=total", f"out={tmp_path / 'total'}"], "total")):
        if words:
            (tmp_path / "total").mkdir()
            (tmp_path / "total" / made.path.name).write_bytes(made.path.read_bytes())
        assert fit.main([str(folder), "--score", *words]) == 0
        law = tmp_path / "total" if words else folder / "law"
        score = json.loads((law / "score_w640_t20_s1.json").read_text())
        assert score["convention"] == "nonembed" and [one["run_id"] for one in score["runs"]] == ["w640_t20_s1"]
        assert score["runs"][0]["error_nats"] == made.loss - loss_of(goal["params_nonembed"], goal["tokens"])
        law = json.loads((law / "law.json").read_text())
        assert law["conventions"]["N"] == f"params_{convention}" and len(law["inputs"]) == 18
        assert law["inputs"][0]["N"] == law["inputs"][0][f"params_{convention}"]


def test_a_held_out_run_stands_where_the_figure_counts(tmp_path):
    folder = write_study(tmp_path / "study")
    groups = [fit_group(read_runs([folder])[0], resamples=0)]
    from scaling.predict import freeze
    made = freeze("w640_t20_s1", groups, tmp_path / "law")
    goal = counts(SHAPES[3], 20)
    for convention in ("nonembed", "total"):
        records = counted_as(read_runs([folder])[0], convention)
        (held,) = frozen.held_of("bf16", records, [made])
        assert goal[f"params_{convention}"] == held.N and held.loss is None
    write(folder, SHAPES[3], 20)
    for convention in ("nonembed", "total"):
        (held,) = frozen.held_of("bf16", counted_as(read_runs([folder])[0], convention), [made])
        assert goal[f"params_{convention}"] == held.N and held.prediction is made


def test_an_older_prediction_counts_all_parameters(tmp_path):
    folder = write_study(tmp_path / "study", params="total")
    from scaling.predict import freeze
    made = freeze("w640_t20_s1", [fit_group(read_runs([folder])[0], resamples=0)], tmp_path / "law")
    content = {key: value for key, value in made.content.items() if key != "convention"}
    made.path.write_text(json.dumps(content | {"sha256": frozen.digest(content)}))
    (old,) = frozen.load(tmp_path / "law")
    assert old.convention == made.convention == "total" and old.N == made.N == counts(SHAPES[3], 20)["params_total"]


@pytest.mark.parametrize("convention, words", [("nonembed", "non-embedding parameters N"), ("total", "parameters N")])
def test_the_figure_says_what_n_counts(tmp_path, convention, words):
    records = counted_as(read_runs([write_study(tmp_path / "study", seeds=(1,))])[0], convention)
    figure = draw([fit_group(records, resamples=0)], [], "loss_bf16", None)
    labels = [panel.get_xlabel() for panel in figure.axes]
    assert re.sub(r"\s+", " ", labels[-1]) == words
    text = " ".join(text.get_text() for text in figure.texts).replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")
    assert f"N = params_{convention}" in text and KIND[convention] in text


def test_a_plan_refuses_a_law_in_nonembedding_parameters(tmp_path):
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"conventions": {"N": "params_nonembed"}, "groups": {}}))
    with pytest.raises(UserError, match=r"law\.json counts non-embedding parameters.*fit\.py RUNS n=total out=DIR"):
        read_law(str(path))


# ----------------------------------------------------------------------------------------------------- a study's figure


def test_recipes_without_a_law_are_named_and_not_drawn(tmp_path):
    """Recipes tried at the two smallest sizes alone: a power law over them beside the others' frontier would say nothing."""
    folder = write_study(tmp_path / "study", seeds=(1,))
    for shape in SHAPES[:2]:
        for ratio in RATIOS:
            write(folder, shape, ratio, name=f"row{shape[1]}_{ratio}", recipe="rowwise", loss_factor=1.002)
    records = read_runs([folder])[0]
    groups = [fit_group([one for one in records if one.recipe == recipe], resamples=0) for recipe in ("bf16", "rowwise")]
    assert drawn(groups) == ([groups[0]], [groups[1]]) and drawn(groups[1:]) == ([groups[1]], [])
    found, _ = pairs(records)
    assert len(found) == 6
    figure = draw(groups, found, "loss_bf16", None)
    assert len(figure.axes) == 6            # losses and what the law leaves of them: no gaps of a recipe that is not drawn
    text = " ".join(text.get_text() for text in figure.texts).replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")
    assert "Not drawn, because their points are of fewer sizes or identify no such law: FP8 rowwise (n = 6)." in text
    assert text.startswith("Loss after training in BF16, evaluated in BF16 (n = 9)")


def test_five_precisions_look_different():
    looks = styles([None] * 5)
    for key in ("color", "marker", "linestyle"):
        assert len({str(look[key]) for look in looks}) == 5
