"""The page of a study's results: every number by an independent count, what lacks said, damage refused, nothing invented."""

import json
import math
import re
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import results_study as tiny
from results_study import HELD, cells, copied, page_of, section, write_one
from test_learning_rate import write_sweep

from scaling import learning_rate, results


@pytest.fixture
def study(tmp_path, tmp_path_factory):
    return copied(tmp_path_factory, tmp_path)


# ------------------------------------------------------------------------------------------------------------ what it says


def test_the_page_of_a_whole_study_has_every_section_and_lacks_nothing_but_the_other_sweep(study):
    text = page_of(study)
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles == ["In short", "Data", "Sizes", "Where the runs come from", "Laws", "Prediction", "FP8 against BF16",
                      "What FP8 did inside", "Speed", "Bits per byte", "Learning rate", "Samples", "Steps that went wrong",
                      "What a study of this size cannot show"]
    assert all(section(text, title).startswith("\nMade by `python ") for title in titles)
    assert text.count("**Missing:**") == 1 and "**Missing:** ../tiny_lr/law/learning_rate.json" in text
    assert f"{len(tiny.declared())} finished runs of {len(tiny.declared())} declared on 2026-11-19" in text
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert (study / link).is_file(), link
    assert text.count("```") % 2 == 0


def test_the_laws_are_those_of_law_json_under_both_counts(study):
    law = json.loads((study / "law" / "law.json").read_text())
    text = section(page_of(study), "Laws")
    for recipe in tiny.TRUNKS:
        group = law["groups"][recipe]
        best = group["laws"][group["headline"]["form"]]
        assert group["headline"]["form"] == "power_c"
        low, high = best["ci95"]["gamma"]
        found = [line for line in text.splitlines() if line.startswith(f"| {recipe} ")]
        assert f"L = {best['K']:.3g} C^-{best['gamma']:.3g}" in found[0] and f"gamma {low:.3g} to {high:.3g}" in found[0]
        assert ["all parameters" in line for line in found] == [False, True, False]
        other = group["by_convention"]["params_total"]
        assert f"{other['A']:.3g} N^-{other['alpha']:.3g}" in found[1] and " no " in found[1]
    assert cells(text, "params_nonembed")[1] == f"{law['groups']['bf16']['slopes']['params_nonembed']:.4f}"
    assert "The study counts non-embedding parameters" in text


def test_the_prediction_stands_beside_what_came_of_it(study):
    score = json.loads((study / "law" / f"score_{HELD}.json").read_text())
    text = page_of(study)
    dates = score["predicted_on"], score["runs"][0]["t_start"]
    frozen, row = (cells(section(text, "Prediction"), HELD, date) for date in dates)
    assert frozen[6] == row[4] and frozen[7].startswith(f"{row[5]} (-") and frozen[4] == "12"
    measured = json.loads((study / HELD / "summary.json").read_text())["loss_bf16"]
    assert row[3:6] == [f"{measured:.4f}", f"{score['predicted']:.4f}", f"{score['low']:.4f} to {score['high']:.4f}"]
    assert row[6] == f"{score['predicted'] - measured:+.4f}" and row[8] == "inside"
    assert f"measured {measured:.4f} in {HELD}, inside the interval" in section(text, "In short")


def test_a_prediction_that_failed_says_so_twice(study):
    path = study / "law" / f"score_{HELD}.json"
    score = json.loads(path.read_text())
    score["runs"][0]["inside"] = False
    path.write_text(json.dumps(score))
    text = page_of(study)
    assert cells(section(text, "Prediction"), HELD, score["runs"][0]["t_start"])[8] == "**outside**"
    assert "**outside** the interval" in section(text, "In short")


def test_the_gap_is_precisions_own_tables(study):
    found = json.loads((study / "law" / "precision.json").read_text())
    gap = found["common"]["tensorwise"]["bf16"]
    text = page_of(study)
    shown = f"{gap['mean']:+.3f} ± {gap['high'] - gap['mean']:.3f}"
    assert cells(section(text, "FP8 against BF16"), "tensorwise", shown)
    assert f"Gap of tensorwise to BF16: {shown} % of the loss over {gap['n']} independent pairs" in section(text, "In short")
    assert found["ranking"]["reason"] in section(text, "In short")
    assert "same seed" in section(text, "FP8 against BF16")


def test_the_probes_are_read_packed_and_their_worst_values_found(study):
    text = section(page_of(study), "What FP8 did inside")
    rows = [row for row in tiny.probed() if row["kind"] == "linear"]
    for operand, name in (("weight", "weights"), ("gradient", "gradients")):
        row = cells(text, "tensorwise", "m", name)
        last = [one[operand] for one in rows if one["step"] == 300]
        assert row[4] == f"{min(v['scale'] for v in last):.3g} to {max(v['scale'] for v in last):.3g}"
        assert row[6] == f"{100 * max(one[operand]['underflow'] for one in rows):.3g}"
        assert row[5] == f"{100 * sorted(v['underflow'] for v in last)[5]:.3g}"
        assert row[7] == f"{100 * max(one[operand]['saturated'] for one in rows):.3g}"
    assert cells(text, "tensorwise", "m", "300")[3:] == ["45", "12"]
    assert "No probes of bf16" in text and "![fp8_scales](m_tensorwise_t20_s1/figures/fp8_scales.png)" in text


def test_speed_is_a_ratio_to_bf16_of_the_same_machine(study):
    write_one(study, "m", "tensorwise", 20, 3, device="NVIDIA H200")
    text = section(page_of(study), "Speed")
    assert cells(text, "s", "tensorwise")[3:] == ["yes", "2", "9,000", "9,000 to 9,000", "0.750", "12.3%", "30.2", "61", "11.5"]
    assert cells(text, "s", "bf16, null")[3:8] == ["no", "1", "4,000", "", "0.333"] and "BF16 again" not in text
    assert cells(text, "m", "tensorwise", "NVIDIA H200")[7] == "no BF16 run"
    write_one(study, "m", "bf16", 20, 2, repeat=1, precision={"recipe": "bf16", "compile": True}, tok_per_s_median=9_600.0)
    text = section(page_of(study), "Speed")
    assert cells(text, "m", "bf16, null")[3:8] == ["yes", "1", "9,600", "", "0.800"]
    for seed in (1, 2, 3):
        shutil.rmtree(study / f"m_tensorwise_t20_s{seed}")
    write_one(study, "m", "tensorwise", 20, 1, params_fp8=0, tok_per_s_median=6_000.0)
    assert "and ran 0.500 to 0.500 times as fast" in section(page_of(study), "Speed")
    write_one(study, "l", "tensorwise", 20, 1, device="cpu")
    assert cells(section(page_of(study), "Speed"), "l", "tensorwise")[7] == "no GPU"


def test_what_is_no_number_is_not_told(study):
    for seed in (1, 2):
        shutil.rmtree(study / f"m_bf16_t20_s{seed}")
    write_one(study, "m", "bf16", 20, 1, compile_s=math.nan, wall_s=10**400, mem_peak_gib=True, mfu_bf16="12")
    assert cells(section(page_of(study), "Speed"), "m", "bf16")[7:] == ["not told"] * 4


def test_bits_per_byte_are_means_over_seeds(study):
    losses = [json.loads((study / f"m_bf16_t20_s{seed}" / "summary.json").read_text())["loss_bf16"] for seed in (1, 2)]
    row = cells(section(page_of(study), "Bits per byte"), "m", "bf16")
    assert row[2:6] == [f"{20 * tiny.nonembed('m') / 1e6:.3g}M", "1, 2", *[f"{np.mean(losses):.4f}"] * 2]
    assert row[7] == f"{np.mean(losses) / math.log(2) / 4:.4f}"


def test_a_row_of_one_seed_stands_beside_bf16_of_that_seed_alone(study):
    write_one(study, "m", "bf16", 20, 2, repeat=1)
    loss = json.loads((study / "m_bf16_t20_s2" / "summary.json").read_text())["loss_bf16"]
    text = section(page_of(study), "Bits per byte")
    assert cells(text, "m", "bf16, null")[3] == "2" and cells(text, "m", "bf16, null")[5] == f"{loss:.4f}"
    assert cells(text, "m", "bf16")[4] != f"{loss:.4f}"
    shutil.rmtree(study / "m_bf16_t20_s1")
    assert cells(section(page_of(study), "Bits per byte"), "m", "tensorwise")[5] == "no BF16 run"


def test_the_sweep_of_learning_rates_beside_the_study_is_shown(study, monkeypatch):
    monkeypatch.setattr("scaling.figures.render", lambda figure, form: form.encode())
    write_sweep(study.parent / "tiny_lr")
    assert learning_rate.main([str(study.parent / "tiny_lr")]) == 0
    found = json.loads((study.parent / "tiny_lr" / "law" / "learning_rate.json").read_text())
    text = section(page_of(study), "Learning rate")
    assert f"Optimum {found['base']['lr']:.3g}" in text and "**Missing:**" not in text
    assert (study / re.search(r"\]\((.*)\)", text)[1]).is_file()


def test_samples_are_fenced_whatever_they_hold(study):
    text = section(page_of(study), "Samples")
    fence = re.search(r"^(`+)text\n(.*?)\n\1$", text, re.S | re.M)
    assert len(fence[1]) == 4 and "```x```\ufffd" in fence[2] and "\0" not in text
    (study / HELD / "samples.txt").write_text("é" * 5000)
    text = section(page_of(study), "Samples")
    assert "(the first 1500 of 5,000 characters)" in text and text.count("é") == 1500


def test_steps_that_went_wrong_are_told(study):
    assert f"None: of {len(tiny.declared())} runs" in page_of(study)
    for seed, changes in ((11, {"status": "diverged"}), (12, {"skipped_steps": 3}), (13, {"rollbacks": 1}),
                          (14, {"is_annealed": False})):
        write_one(study, "s", "bf16", 5, seed, **changes)
    text = section(page_of(study), "Steps that went wrong")
    assert [cells(text, f"s_bf16_t5_s{seed}")[1:5] for seed in (11, 12, 13, 14)] == [
        ["diverged", "0", "0", "yes"], ["ok", "3", "0", "yes"], ["ok", "0", "1", "yes"], ["ok", "0", "0", "no"]]


def test_what_it_cannot_show_is_counted(study):
    text = section(page_of(study), "What a study of this size cannot show")
    assert "given up" not in text
    assert f"factor of {tiny.nonembed('l') / tiny.nonembed('s'):.3g} in parameters" in text
    assert f"reads python {0.8 * 20 * tiny.nonembed('l') / 5e5:.2g} times" in text and "docs" not in text
    assert "4 independent pairs over 2 sizes" in text
    prediction = json.loads((study / "law" / f"prediction_{HELD}.json").read_text())
    assert f"1 run of 1 size, predicted at {prediction['extrapolation']:.3g} times the largest compute that was fitted" in text
    assert "one scored: it says little" in text
    path = study / "law" / "precision.json"
    path.write_text(path.read_text().replace('"converted": [', '"converted": [0, 0], "was": ['))
    assert "**Anything of tensorwise.**" in page_of(study) and "A small gap of" not in page_of(study)
    flops = tiny.row_of("m", "bf16", 20, 1, 0)["flops_per_token"]
    share = 6 * 26_214 / flops
    assert f"{share:.0%} of the largest's" in text and f"{1 / (1 - share / 2):.3g} times as fast at best" in text


def test_several_scores_are_counted_and_their_common_direction_told(study):
    path = study / "law" / f"score_{HELD}.json"
    score = json.loads(path.read_text())
    assert "scored runs" not in page_of(study)
    score["runs"].append(score["runs"][0] | {"error_percent": -0.5, "inside": False})
    score["runs"][0]["error_percent"] = -1.25
    path.write_text(json.dumps(score))
    said = "1 of 2 scored runs lie inside their intervals; errors -1.25 to -0.50 %, all one way: predicted too low."
    text = page_of(study)
    assert said in section(text, "In short") and said in section(text, "Prediction")
    score["runs"][0]["error_percent"] = 1.25
    path.write_text(json.dumps(score))
    assert "errors -0.50 to +1.25 %. Runs" in page_of(study)


# ----------------------------------------------------------------------------------------------- what lacks, what is damaged


@pytest.mark.parametrize("name, said, title", [
    ("law/law.json", "scaling/fit.py", "Laws"), ("law/precision.json", "scaling/precision.py", "FP8 against BF16"),
    ("law/figure.png", "scaling/fit.py", "Laws"), (f"law/score_{HELD}.json", "--score", "Prediction"),
    (f"law/prediction_{HELD}.json", "--predict", "Prediction"), ("data.json", "scaling/publish.py", "Data"),
    ("slices.jsonl", "scaling/slice.py", "Where the runs come from"), (f"{HELD}/samples.txt", "eval.sample", "Samples")])
def test_what_is_not_there_is_missing_in_a_line_and_nothing_takes_its_place(study, name, said, title):
    (study / name).unlink()
    text = page_of(study)
    assert text.count("**Missing:**") == 2
    lines = [line for line in section(text, title).splitlines() if "**Missing:**" in line]
    assert len(lines) == 1 and said in lines[0]


def test_a_folder_of_runs_alone_still_gives_a_page(study, tmp_path):
    shutil.copytree(study / "s_bf16_t20_s1", tmp_path / "bare" / "s_bf16_t20_s1")
    path = tmp_path / "bare" / "s_bf16_t20_s1" / "summary.json"
    old = json.loads(path.read_text())
    for key in {*tiny.H100, "tokenizer"} - {"device"}:       # as of a run that another version finished
        old.pop(key, None)
    old["sources"] = {name: {"weight": one["weight"]} for name, one in old["sources"].items()}
    path.write_text(json.dumps(old))
    text = page_of(tmp_path / "bare")
    assert "**Missing:** study.json" in text and "not told" in section(text, "Bits per byte")
    assert "nan" not in text.lower().replace("nanofp8", "")


@pytest.mark.parametrize("name, content, said", [
    ("law/law.json", "{", "law.json is not valid JSON"), ("law/law.json", "[]", "law.json holds a list"),
    ("law/law.json", "{}", None), ("law/law.json", '{"groups": {"bf16": {}}, "conventions": {"N": "params_total"}}', None),
    ("law/precision.json", "{", "precision.json"), ("law/precision.json", "{}", "precision.json"),
    (f"law/score_{HELD}.json", '{"runs": [], "prediction_sha256": "0"}', "judges another prediction"),
    (f"law/prediction_{HELD}.json", "{}", "prediction"), ("study.json", "{", "study.json"),
    ("study.json", '{"runs": 3}', "study.json"), ("slices.jsonl", '{"start": "x"}\n', "slices.jsonl, line 1"),
    ("slices.jsonl", '{"runs": ["a"]}\n{"ru', "slices.jsonl, line 2"), ("slices.jsonl", "[]", "slices.jsonl, line 1"),
    ("slices.jsonl", '{"runs": [], "skipped": [3]}', "slices.jsonl, line 1"), ("data.json", "[1]", "data.json holds a list"),
    ("data.json", '{"python": 3}', "data.json must hold an object for each source"),
    ("s_bf16_t20_s1/summary.json", "{", "summary.json"),
    ("m_tensorwise_t20_s1/probe.jsonl.gz", "no gzip", "probe.jsonl.gz"), ("README.md", "mine", "not written by this command")])
def test_damage_is_refused_with_a_sentence_and_the_page_stays(study, capsys, name, content, said):
    before = page_of(study)
    (study / name).write_text(content)
    capsys.readouterr()
    assert results.main([str(study)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("scaling/results.py: ") and error.count("\n") <= 2 and "Traceback" not in error
    assert (said or str(study)) in error
    assert (study / "README.md").read_text() == (before if name != "README.md" else content)


def test_the_same_files_give_the_same_bytes_and_nothing_is_left_behind(study):
    first, files = page_of(study), sorted(study.rglob("*"))
    assert page_of(study) == first and sorted(study.rglob("*")) == files


def test_a_page_that_cannot_be_written_leaves_the_old_one(study, monkeypatch, capsys):
    before = page_of(study)
    shutil.rmtree(study / "s_bf16_t5_s2")
    monkeypatch.setattr(results, "write", Mock(side_effect=OSError(28, "No space left on device")))
    assert results.main([str(study)]) == 1
    assert "No space left" in capsys.readouterr().err and (study / "README.md").read_text() == before


def test_what_was_made_from_other_runs_is_said(study):
    write_one(study, "m", "bf16", 20, 9)
    shutil.rmtree(study / "s_bf16_t5_s2")
    text = page_of(study)
    for title, name in (("Laws", "law.json"), ("FP8 against BF16", "precision.json")):
        assert f"**{name} is older than 1 of the runs:** m_bf16_t20_s9." in section(text, title)
        assert f"**{name} is not of these files:** s_bf16_t5_s2" in section(text, title)


def test_a_score_of_another_summary_is_refused(study, capsys):
    path = study / HELD / "summary.json"
    path.write_text(path.read_text() + "\n")
    assert results.main([str(study)]) == 2
    assert f"judges {HELD} by another summary.json" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, code", [([], 2), (["--help"], 0), (["a", "b"], 2), (["lr=3"], 2), (["nowhere"], 2)])
def test_the_command_line(arguments, code, capsys):
    assert results.main(arguments) == code
    out = capsys.readouterr()
    assert out.err or "README.md in that folder" in out.out
