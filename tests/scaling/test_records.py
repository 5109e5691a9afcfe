"""Summaries of runs are read strictly: what cannot be compared is refused by name, nothing is
skipped in silence."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.errors import UserError
from scaling import records as room
from scaling.paired.gaps import Pair
from scaling.pairing import pair_runs
from scaling.records import Record, check_comparable, read_curve, read_record, read_runs
from tests.helpers.scaling_runs import edit, write_ladder, write_run

# ------------------------------------------------------------------------------ folders of runs


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """Six runs beside a run that has begun, a folder of notes, and law/, which fit.py writes."""
    folder = write_ladder(tmp_path / "out")
    for name in ("begun/config.json", "notes/x.json", "law/law.json"):
        edit(folder / name)
    return folder


def test_run_folders_and_folders_of_runs_are_read_once(ladder: Path):
    records, _ = read_runs([ladder, ladder / "a_bf16"])
    names = [f"{letter}_{arm}" for letter in "abc" for arm in ("bf16", "fp8")]
    assert [record.run_id for record in records] == names


def test_what_is_skipped_is_said(ladder: Path):
    _, notes = read_runs([ladder])
    assert [note.partition(":")[0][-5:] for note in notes] == ["begun", "notes"]


def test_a_log_beside_a_run_is_no_run(ladder: Path):
    """out/study/*_bf16* names it too."""
    (ladder / "a_bf16.log").touch()
    (record,), _ = read_runs(sorted(ladder.glob("a_bf16*")))
    assert record.run_id == "a_bf16"


def test_a_record_is_what_the_summary_says(ladder: Path):
    record = read_record(ladder / "a_bf16")
    values = (record.run_id, record.recipe, record.params_total, record.tokens)
    assert values == ("a_bf16", "bf16", 38_912, 778_240)
    assert record.weights == pytest.approx({"docs": 0.1, "latex": 0.1, "python": 0.8})


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere", "does not exist"),
        ("a_fp8/summary.json", "is a file"),
        ("notes", "no finished run in "),
    ],
)
def test_a_path_without_a_run_is_refused(ladder: Path, path: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        read_runs([ladder / path])


# ----------------------------------------------------------------------------------- branches


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A trunk, runs that pass for its branches, and branches of another folder's runs."""
    absent = dict.fromkeys(("parent_run", "parent_step", "t_start"), ...)
    write_run(tmp_path / "long", params=106_624, **absent)
    runs = (
        ("short", 10**6, {}),
        ("other", 10**6, {"parent_run": "elsewhere", "parent_step": 7}),
        ("further", 2 * 10**6, {"parent_run": "other", "parent_step": 9}),
        # of another folder's run of its name
        ("same", 10**6, {"parent_run": "same", "parent_step": 7}),
    )
    for name, tokens, parent in runs:
        write_run(tmp_path / name, params=106_624, tokens=tokens, **parent)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "trunk", "step"),
    [
        ("long", "long", None),
        ("short", "short", None),
        ("other", "elsewhere", 7),
        ("further", "elsewhere", 9),
        ("same", "same", 7),
    ],
)
def test_branches_know_their_trunk(family: Path, name: str, trunk: str, step: int | None):
    record = read_record(family / name)
    assert (record.trunk, record.decays_from) == (trunk, step)


@pytest.mark.parametrize(
    ("name", "trunk", "step"),
    [
        ("long", "long", None),
        ("short", "long", 400),
        # what was done counts, not the plan
        ("other", "elsewhere", 7),
    ],
)
def test_a_branch_that_was_trained_from_scratch_is_told_by_its_study(
    family: Path, name: str, trunk: str, step: int | None
):
    """Same seed, same data, same schedule."""
    plan = [("long", None, None), ("short", "long", 400), ("other", "long", 400)]
    runs = [
        {"run": run, "parent": parent, "parent_step": step_of_plan}
        for run, parent, step_of_plan in plan
    ]
    edit(family / "study.json", runs=runs)
    record = read_record(family / name)
    assert (record.trunk, record.decays_from) == (trunk, step)
    assert name == "other" or record.parent_step is None


# -------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("params_total", ..., "'params_total'"),
        ("params_total", 38912.0, "params_total=38912.0 is not int"),
        ("params_matmul", 0, "params_matmul=0 is not above zero"),
        ("loss_bf16", float("nan"), "loss_bf16=nan is not float"),
        ("is_annealed", 1, "is_annealed=1 is not bool"),
        ("precision", {"compile": True}, "'recipe'"),
        ("sources", {"a.b": {"loss": 1}}, "'weight'"),
        ("schema_version", 2, "schema_version 2"),
        ("sources", {"a": {"weight": 0}, "b": {"weight": 1}}, "a=0.0 is not above zero"),
    ],
)
def test_bad_fields_get_a_sentence(tmp_path: Path, key: str, value: Any, sentence: str):
    write_run(tmp_path / "run", **{key: value})
    with pytest.raises(UserError, match=f"{tmp_path}/run/summary.json.*{sentence}"):
        read_record(tmp_path / "run")


@pytest.mark.parametrize("file", ["run/summary.json", "study.json"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe{}", b'{"schema_version": 1, "run_id": "r']
)
def test_damaged_files_are_refused(tmp_path: Path, file: str, content: bytes):
    write_run(tmp_path / "run")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} (is not valid JSON|holds a list)"):
        read_record(tmp_path / "run")


# ----------------------------------------------------------------------------- what enters a fit


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer_sha256": "u" * 64}, "tokenizer_sha256"),
        ({"val_sha256": "w" * 64}, "val_sha256"),
        ({"vocab_size": 50257}, "vocab_size"),
        ({"vocab_padded": 512}, "vocab_padded"),
        ({"sources": {name: {"weight": 1} for name in ("docs", "latex", "python")}}, "weights"),
        ({"run_id": "a"}, "same run_id"),
        ({"params": 38_912}, "same recipe, params_total, tokens, seed"),
    ],
)
def test_what_cannot_be_compared_is_refused_naming_two_runs(
    tmp_path: Path, changes: dict[str, Any], sentence: str
):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **{"params": 106_624, **changes})
    with pytest.raises(UserError, match=f"a and .*{sentence}"):
        check_comparable(read_runs([tmp_path])[0])


@pytest.fixture
def mixed(tmp_path: Path) -> list[Record]:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=2, is_annealed=False)
    write_run(tmp_path / "c", seed=3, status="diverged")
    write_run(tmp_path / "d", params=106_624, continued_from="llama31_8b")
    write_run(tmp_path / "e", repeat=1)
    return read_runs([tmp_path])[0]


Sieve = Callable[[list[Record]], tuple[list[Record], list[str]]]


@pytest.mark.parametrize(
    ("sieve", "gone"),
    [(room.usable, "bc"), (room.from_scratch, "d"), (room.without_repeats, "e")],
)
def test_what_enters_a_law(mixed: list[Record], sieve: Sieve, gone: str):
    """Annealed runs that ended well, from scratch, once: a repeat is a null, what goes on with a
    model has more tokens."""
    records, notes = sieve(mixed)
    assert [record.run_id for record in records] == sorted(set("abcde") - set(gone))
    assert [note.split(":")[0] for note in notes] == [f"left out {name}" for name in gone]


def test_another_seed_is_another_point(mixed: list[Record]):
    check_comparable(mixed)


def test_weights_that_differ_by_rounding_are_equal(mixed: list[Record]):
    first, second, *_ = mixed
    weights = {name: weight + 1e-12 for name, weight in second.weights.items()}
    check_comparable([first, replace(second, weights=weights)])


# --------------------------------------------------------------------------- what N counts


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """x by a study of non-embedding parameters, y by one of all, z by one that does not say."""
    studies = (("x", {"params": "nonembed"}), ("y", {"params": "total"}), ("z", {}))
    for params, (name, study) in zip((106_624, 38_912, 38_912), studies, strict=True):
        write_run(tmp_path / name / name, params=params)
        edit(tmp_path / name / "study.json", **study)
    return tmp_path


def test_n_is_what_the_study_beside_the_run_counts(counted: Path):
    x, y, z = (read_record(counted / name / name) for name in "xyz")
    assert x.N == x.params_nonembed != x.params_total
    assert y.N == z.N == 38_912


def test_a_word_overrides_what_the_study_counts(counted: Path):
    record = read_record(counted / "y" / "y", "nonembed")
    assert record.params_nonembed == record.N
    assert read_runs([counted / "y"], "nonembed")[0][0].N == record.N


def test_runs_that_count_differently_are_refused_with_the_remedy(counted: Path):
    x, y = (read_record(counted / name / name) for name in "xy")
    with pytest.raises(UserError, match="x and y differ in convention .*n=total"):
        check_comparable([x, y])
    check_comparable(read_runs([counted / "x", counted / "y"], "total")[0])


# ------------------------------------------------------------ what weights were rounded to FP8 from


def cast_from(source: str | None, recipe: str = "tensorwise") -> dict[str, Any]:
    """`precision` of a summary; `...`: one from before the key."""
    precision = {"recipe": recipe, "compile": False, "layers_converted": ["head"]}
    return precision if source is ... else precision | {"weights_cast_from": source}


@pytest.mark.parametrize(
    "precision, n_gpu, source",
    [
        (cast_from("bf16"), 8, "bf16"),
        (cast_from("fp32"), 8, "fp32"),
        (cast_from(None, "bf16"), 1, None),
        (cast_from(...), 1, "fp32"),
        (cast_from(...), 8, None),
        (cast_from(..., "bf16"), 1, None),
    ],
)
def test_a_record_says_what_weights_were_cast_from(
    tmp_path: Path, precision: dict, n_gpu: int, source: str | None
):
    write_run(tmp_path / "run", precision=precision, n_gpu=n_gpu)
    assert read_record(tmp_path / "run").weights_cast_from == source


@pytest.mark.parametrize(
    "device, source", [("NVIDIA B200", None), ("NVIDIA H100", None), ("cpu test", "fp32")]
)
def test_an_older_summary_does_not_tell_what_a_prototype_cast_from(
    tmp_path: Path, device: str, source: str | None
):
    """torchao's mxfp8 on Blackwell rounds weights to BF16 first, an emulation does not."""
    write_run(tmp_path / "run", precision=cast_from(..., "mxfp8"), device=device)
    assert read_record(tmp_path / "run").weights_cast_from == source


def test_a_recipe_whose_runs_mix_operands_is_named(tmp_path: Path):
    for name, source in (("a", "fp32"), ("b", "fp32"), ("c", "bf16")):
        write_run(tmp_path / name, precision=cast_from(source))
    (sentence,) = room.mixed_weight_casts(read_runs([tmp_path])[0])
    assert sentence.startswith("tensorwise mixes operands")
    assert "from fp32 in a, b, but from BF16" in sentence and "in c;" in sentence


@pytest.mark.parametrize("recipe, source", [("tensorwise", ...), ("rowwise", "bf16")])
def test_unknown_operands_and_those_of_another_recipe_are_no_mix(
    tmp_path: Path, recipe: str, source: str
):
    write_run(tmp_path / "whole", precision=cast_from("fp32"), n_gpu=8)
    write_run(tmp_path / "other", precision=cast_from(source, recipe), n_gpu=8)
    assert room.mixed_weight_casts(read_runs([tmp_path])[0]) == []


# ---------------------------------------------------------------------------- training curves


def test_a_run_without_metrics_has_an_empty_curve(tmp_path: Path):
    write_run(tmp_path / "a")
    assert [len(values) for values in read_curve(read_record(tmp_path / "a"))] == [0, 0]


def test_curve_takes_the_last_try_of_a_step_and_survives_a_torn_line(tmp_path: Path):
    write_run(tmp_path / "a")
    rows = []
    for tokens, loss in ((10, 5.0), (10, 9.0), (20, math.nan), (30, 4.0), (30, 3.5)):
        kind = "val" if loss == 9 else "train"
        row = {"kind": kind, "step": tokens // 10, "tokens": tokens, "loss": loss}
        rows.append(json.dumps(row))
    torn = '\n[1]\n{"kind": "tr'
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(rows) + torn)
    tokens, losses = read_curve(read_record(tmp_path / "a"))
    assert tokens.tolist() == [10, 30] and losses.tolist() == [5.0, 3.5]


# ------------------------------------------------------------------------ a paired gap by hand

# Nats of two sequences of 10 tokens, then of 20, 30 and, context alone, of none; what FP8 adds.
BASE = np.array([20.0, 22, 50, 70, 0])
ADDED = {"bf16": np.array([1.0, 3, 2, 8, 0]), "as_trained": np.array([2.0, 4, 4, 6, 0])}
WEIGHTS = {"p": 0.25, "q": 0.75}


def write_by_hand(folder: Path, recipe: str, device: str) -> None:
    """A run of two sources with these losses."""
    is_fp8 = recipe != "bf16"
    nats = {arm: BASE + added if is_fp8 else BASE for arm, added in ADDED.items()}
    losses = {}
    for arm, values in nats.items():
        of_p, of_q = values[:2].sum() / 20, values[2:].sum() / 50
        losses[f"loss_{arm}"] = WEIGHTS["p"] * of_p + WEIGHTS["q"] * of_q
    write_run(
        folder,
        recipe=recipe,
        sources={name: {"weight": weight} for name, weight in WEIGHTS.items()},
        tok_per_s_median=130.0 if is_fp8 else 100.0,
        device=device,
        **losses,
    )
    tokens = [10, 10, 20, 30, 0]
    np.savez(folder / "val_losses.npz", source=[0, 0, 1, 1, 1], n_tokens=tokens, **nats)


@pytest.fixture
def by_hand(tmp_path: Path) -> tuple[Pair, Pair]:
    """(a pair of two devices, a pair of one)."""
    for name, recipe, device in (
        ("x", "bf16", "one"),
        ("y", "tensorwise", "one"),
        ("z", "rowwise", "another"),
    ):
        write_by_hand(tmp_path / name, recipe, device)
    (elsewhere, pair), notes = pair_runs(read_runs([tmp_path])[0])
    assert notes == []
    return elsewhere, pair


def test_runs_pair_by_all_but_their_precision(by_hand: tuple[Pair, Pair]):
    elsewhere, pair = by_hand
    assert (pair.bf16.run_id, pair.fp8.run_id, elsewhere.fp8.run_id) == ("x", "y", "z")


def test_speeds_of_two_devices_are_not_compared(by_hand: tuple[Pair, Pair]):
    elsewhere, pair = by_hand
    assert elsewhere.tok_per_s_ratio is None
    assert pair.tok_per_s_ratio == pytest.approx(1.3)


def test_a_gap_is_the_weighted_mean_over_sources(by_hand: tuple[Pair, Pair]):
    """In BF16 p gains (1+3)/20 = 0.2, q (2+8)/50 = 0.2 nats per token; as trained p 6/20 = 0.3, q
    10/50 = 0.2."""
    gap = by_hand[1].gap
    assert gap["bf16"].nats == pytest.approx(0.25 * 0.2 + 0.75 * 0.2, rel=1e-12)
    assert gap["as_trained"].nats == pytest.approx(0.25 * 0.3 + 0.75 * 0.2, rel=1e-12)


def test_a_gap_in_per_cent_is_of_the_bf16_loss(by_hand: tuple[Pair, Pair]):
    loss = 0.25 * 42 / 20 + 0.75 * 120 / 50
    assert by_hand[1].gap["bf16"].percent == pytest.approx(100 * 0.2 / loss, rel=1e-12)


def test_the_error_of_a_gap_is_that_of_the_choice_of_sequences(by_hand: tuple[Pair, Pair]):
    """Residuals d - g t. In BF16 p -1, +1; q 2-4=-2, 8-6=+2, 0; as trained p -1, +1; q 4-4=0,
    6-6=0. Variance per source: n/(n-1) * sum of squares / tokens^2."""
    gap = by_hand[1].gap
    of_p = 0.25**2 * 2 * (1 + 1) / 20**2
    of_q = 0.75**2 * 3 / 2 * (4 + 4) / 50**2
    assert gap["bf16"].se == pytest.approx(math.sqrt(of_p + of_q), rel=1e-12)
    assert gap["as_trained"].se == pytest.approx(math.sqrt(of_p), rel=1e-12)
