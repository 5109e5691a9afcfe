"""eval/held_out.py: the questions are what they claim, chance is chance, damaged shards get a sentence."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eval_runs import TINY, build, build_lm, build_run, refused, request, write_shards

from eval import harness, held_out
from tests.conftest import write_index


run = pytest.fixture(build_run)


def test_questions_and_documents_are_what_they_claim_and_the_same_each_time(run):
    rows, documents = (list(f(str(run))["validation"]) for f in (held_out.questions, held_out.documents))
    assert [rows, documents] == [list(f(str(run))["validation"]) for f in (held_out.questions, held_out.documents)]
    assert len(rows) == 200 and {row["source"] for row in rows} == {"prose", "code"}
    texts = {source: [tok.decode(ids.tolist()) for ids in found] for source, found, tok in held_out._sources(str(run))}
    assert sum(map(len, texts.values())) == 500 and len(documents) == 64
    assert all(row["text"] in texts[row["source"]] for row in documents)
    assert np.bincount([row["label"] for row in rows], minlength=4).min() > 30
    for row in rows:
        right, *wrong = sorted(row["choices"], key=lambda choice: choice != row["choices"][row["label"]])
        home, = (text for text in texts[row["source"]] if row["context"] + right in text)
        assert len(row["context"]) == 96 and len(set(row["choices"])) == 4
        assert all(len(choice) == 32 and choice[0].isspace() for choice in row["choices"])
        assert all(choice not in home and any(choice in text for text in texts[row["source"]]) for choice in wrong)


def frequencies(requests):
    """Log-likelihoods that ignore the context, but know how frequent each letter is."""
    return [(-sum(3.0 if letter == " " else 1.0 + "abcdefghij".find(letter) / 9 for letter in r.args[1]), False) for r in requests]


@pytest.mark.parametrize("judges", [
    [build_lm(build(replace(TINY, n_ctx=192), seed), 32).loglikelihood for seed in range(4)], [frequencies]])
def test_a_model_that_knows_nothing_scores_chance(run, judges):
    """Within two standard errors of one model's score; over twelve made-up corpora it was 25.5 +- 0.9 % and 25.5 +- 0.5 %."""
    rows = list(held_out.questions(str(run))["validation"])
    pairs = [request(row["context"], choice) for row in rows for choice in row["choices"]]
    right = [np.array([t for t, _ in judge(pairs)]).reshape(-1, 4).argmax(1) == [row["label"] for row in rows] for judge in judges]
    assert abs(np.mean(right) - 0.25) < 2 * math.sqrt(0.25 * 0.75 / len(rows))


def shorten(folder):
    for source in ("prose", "code"):
        shutil.rmtree(f"data/{source}")
        write_shards(Path("data", source), ["short"] * 6)


@pytest.mark.parametrize("damage, sentence", [
    (lambda f: write_index(f, tokenizer="gpt2"), "was made with another tokenizer"),
    (lambda f: (f / "val_00000.bin").unlink(), "data/code/val_00000.bin is missing"), (shorten, "no source of")])
def test_damaged_shards_get_a_sentence(run, capsys, damage, sentence):
    damage(Path("data/code"))
    assert sentence in refused(capsys, harness, run, "--tasks", "demo") and not (run / "eval").exists()
