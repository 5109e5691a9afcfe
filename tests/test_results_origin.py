"""The page of a study's results: its data and their commands, its sizes, its slices, what was given up."""

import json
import re
import shlex
import shutil
from unittest.mock import Mock

import pytest
import results_study as tiny
from results_study import cells, copied, page_of, section

import prepare_data
from scaling import results_laws


@pytest.fixture
def study(tmp_path, tmp_path_factory):
    return copied(tmp_path_factory, tmp_path)


def test_the_data_are_counted_for_the_run_of_most_tokens(study):
    text = section(page_of(study), "Data")
    tokens = 20 * tiny.nonembed("l")
    row = cells(text, "python", "0.800")
    assert row[2:5] == [f"{0.8 * tokens / 1e6:.3g}M", "500k", f"{0.8 * tokens / 5e5:.3g}"]
    assert row[6] == "4.00"
    row = cells(text, "python", "installed source code")
    assert row[2:] == ["945", "2.5", "500,000", "100,000", "8", "PSF-2.0", "CPython 3.12"]
    assert cells(text, "docs", "local: prose.jsonl.xz; column text")[6:] == ["not told"] * 3
    assert "- left out of python, large: above 1,000,000 bytes" in text
    assert text.startswith("\nMade by `python prepare_data.py installed out=data/tiny` and "
                           "`python prepare_data.py local prose.jsonl.xz name=docs out=data/tiny`.\n")
    (study / "data.json").write_text('{"c": {"dataset": "installed"}}')
    text = section(page_of(study), "Data")
    assert "Made by `python prepare_data.py demo out=data/tiny`." in text and "Missing" not in text
    assert cells(text, "c", "installed")[2:] == ["not told"] * 7


def test_the_sizes_are_counted_both_ways(study):
    text = section(page_of(study), "Sizes")
    row = cells(text, "s")
    share = 1 - tiny.nonembed("s") / tiny.SIZES["s"]
    assert row[1:5] == ["4 x 256, 704", "60,000", f"{tiny.nonembed('s'):,}", f"{share:.0%}"]
    assert row[5] == "5, 10, 20" and row[7:9] == ["1, 2", "bf16, tensorwise"] and row[-1] == "15 of 15"
    assert cells(text, "l (held out)")[-1] == "1 of 1"
    assert "tokens per non-embedding parameter" in text
    shutil.rmtree(study / "m_bf16_t5_s1")
    text = section(page_of(study), "Sizes")
    assert cells(text, "m")[-1] == "11 of 12" and "Not there yet: m_bf16_t5_s1." in text
    for path in study.glob("s_*"):
        shutil.rmtree(path)
    assert re.search(r"Not there yet: (\w+, ){11}\w+ and 4 more\.", page_of(study))


def test_the_slices_are_told_with_commit_and_machine(study):
    text = section(page_of(study), "Where the runs come from")
    assert cells(text, "1")[1:] == ["2026-11-20T00:00:00Z", "9.0", "abcdef012", "2", "0", "3"]
    assert cells(text, "2")[3:] == ["abcdef012, edited", "1", "0", "0"]
    assert "slice 1, 2: device NVIDIA H100 80GB HBM3, driver 580.1, python 3.12.3" in text
    assert f"2 slices, {(540 + 539) / 60:.0f} minutes in all" in text
    assert f"- {len(tiny.declared())} runs: 1 x NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, cuda 13.0, commit 000000000" in text


def test_the_command_of_the_data_makes_the_same_shards(study, tmp_path, capsys):
    """What the page names is run once more, and tells what it told before."""
    (tmp_path / "new").mkdir()
    texts = [f"number {n} of many " * 9 for n in range(99)]
    (tmp_path / "new" / "mine.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    words = ["local", str(tmp_path / "new" / "mine.jsonl"), "name=docs", f"out={tmp_path / 'data'}", "tokenizer=byte",
             "val_share=0.3", "tokens=9000", "column=body", "license=CC BY 4.0, it's said", "processes=1"]
    assert prepare_data.main(words) == 0
    made = json.loads((tmp_path / "data" / "docs" / "index.json").read_text())
    (study / "data.json").write_text(json.dumps({"docs": made}))
    text = section(page_of(study), "Data")
    command = re.search(r"Made by `python (.*)`\.\n", text)[1]
    assert cells(text, "docs", "local: mine.jsonl; column body")[7] == "CC BY 4.0, it's said"
    found = [word.replace("data/tiny", str(tmp_path / "again")).replace("mine.jsonl", words[1]) for word in shlex.split(command)]
    assert prepare_data.main([*found[1:], "processes=1"]) == 0
    again = json.loads((tmp_path / "again" / "docs" / "index.json").read_text())
    assert again["splits"] == made["splits"] and again["license"] == made["license"]
    about = {"dataset": "installed source code", "split_rule": "val where hash % 10000 < 200", "tokenizer": "gpt2", "budget": 10}
    (study / "data.json").write_text(json.dumps({"python": about, "c": about}))
    assert "`python prepare_data.py installed out=data/tiny tokenizer=gpt2 val_share=0.02 tokens=20`." in page_of(study)
    capsys.readouterr()


def test_a_run_that_does_not_know_its_commit_has_that_of_its_slice(study):
    for seed in (1, 2):
        summary = study / f"m_bf16_t20_s{seed}" / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"git_commit": None}))
    path = study / "slices.jsonl"
    path.write_text(path.read_text().replace('["b"]', '["m_bf16_t20_s1"]'))
    text = section(page_of(study), "Where the runs come from")
    of = [line.partition(": ")[0] for line in text.splitlines() if "commit abcdef012, edited" in line]
    assert of == ["- 1 runs"] and re.search("- 1 runs: .*commit not known", text)


def test_a_prediction_that_does_not_know_its_commit_has_that_of_its_slice():
    rows = [{"start": f"2026-11-2{n}T00:00:00Z", "end": f"2026-11-2{n}T00:09:00Z", "commit": f"{n}{n}"} for n in (1, 2)]
    for date, said, commit in (("2026-11-22T00:05:00Z", {}, "22"), ("2026-11-22T00:10:00Z", {}, "not known"),
                               ("2026-11-22T00:05:00Z", {"git_commit": "77", "git_dirty": True}, "77, edited")):
        assert results_laws._frozen_at(Mock(slices=rows), Mock(content=said, date=date)) == commit


def test_runs_that_were_given_up_are_told_with_what_is_kept_of_them(study):
    gone = [f"m_tensorwise_t{ratio}_s2" for ratio in (5, 10, 20)]
    for run in gone:
        shutil.rmtree(study / run)
    (study / "failed").mkdir()
    for name in (f"{gone[2]}.log", f"{gone[2]}.diagnosis.json", "m_bf16_t5_s1.log", "s_tensorwise_t5_s1.log"):
        (study / "failed" / name).write_text("a trace")
    shutil.rmtree(study / "s_tensorwise_t5_s1")
    path = study / "slices.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    rows = [first, second | {"skipped": gone + ["m_bf16_t5_s1"]}, second | {"skipped": gone}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(study)
    total = len(tiny.declared())
    assert f"{total - 4} finished runs of {total} declared on 2026-11-19T00:00:00Z, 3 given up." in text
    assert "Not there yet: s_tensorwise_t5_s1." in text and f"**Given up:** {', '.join(sorted(gone, key=gone.index))}" in text
    assert [cells(section(text, "Where the runs come from"), str(n))[5] for n in (1, 2, 3)] == ["0", "4", "3"]
    wrong = section(text, "Steps that went wrong")
    links = ", ".join(f"[{gone[2]}{end}](failed/{gone[2]}{end})" for end in (".log", ".diagnosis.json"))
    assert cells(wrong, gone[2])[1:] == ["given up, slice 2", links]
    assert cells(wrong, gone[0])[1:] == ["given up, slice 2", "nothing is kept of it"]
    assert cells(wrong, "s_tensorwise_t5_s1")[1] == "failed" and "m_bf16_t5_s1" not in wrong
    assert f"None: of {total - 4} finished runs" in wrong
    assert f"3 of {total} runs declared are in no law" in section(text, "What a study of this size cannot show")


def test_names_cannot_break_a_table(study):
    (study / "data.json").write_text(json.dumps({"a|b\nc": {"dataset": "x|y", "license": "line\nbreak", "splits": {}}}))
    row = next(line for line in section(page_of(study), "Data").splitlines() if line.startswith("| a\\|b c"))
    assert "x\\|y" in row and "line break" in row and "not told" in row
