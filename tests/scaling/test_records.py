"""Summaries of runs are read strictly: what cannot be compared is refused by name, nothing is
skipped in silence."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lib.errors import UserError
from scaling import records as room
from scaling.pairing import pair_runs
from scaling.records import check_comparable, read_curve, read_record, read_runs
from tests.helpers.scaling_runs import edit, write_ladder, write_run


def test_run_folders_and_folders_of_runs_are_read_and_what_is_skipped_is_said(tmp_path):
    folder = write_ladder(tmp_path / "out")
    for name in ("begun/config.json", "notes/x.json", "law/law.json"):  # law: by fit.py
        edit(folder / name)
    found, notes = read_runs([folder, folder / "a_bf16"])  # the second is there already
    assert [one.run_id for one in found] == [
        "a_bf16",
        "a_fp8",
        "b_bf16",
        "b_fp8",
        "c_bf16",
        "c_fp8",
    ]
    assert [note.partition(":")[0][-5:] for note in notes] == ["begun", "notes"]
    (folder / "a_bf16.log").touch()  # by sweep.py: out/study/*_bf16* names it too
    (one,), _ = read_runs(sorted(folder.glob("a_bf16*")))
    assert (one.run_id, one.recipe, one.params_total, one.tokens) == (
        "a_bf16",
        "bf16",
        38_912,
        778_240,
    )
    assert one.weights == pytest.approx({"docs": 0.1, "latex": 0.1, "python": 0.8})
    for path, sentence in (
        ("nowhere", "does not exist"),
        ("a_fp8/summary.json", "is a file"),
        ("notes", "no finished run in "),
    ):
        with pytest.raises(UserError, match=sentence):
            read_runs([folder / path])


def test_branches_know_their_trunk(tmp_path):
    """By themselves, or by their study where a branch was trained from scratch: same seed, same
    data, same schedule."""

    def lineage(*names):
        return [
            (one.trunk, one.decays_from) for one in (read_record(tmp_path / name) for name in names)
        ]

    write_run(
        tmp_path / "long",
        params=106_624,
        **dict.fromkeys(("parent_run", "parent_step", "t_start"), ...),
    )
    write_run(tmp_path / "short", params=106_624, tokens=10**6)
    write_run(
        tmp_path / "other", params=106_624, tokens=10**6, parent_run="elsewhere", parent_step=7
    )
    write_run(
        tmp_path / "further", params=106_624, tokens=2 * 10**6, parent_run="other", parent_step=9
    )
    # of another folder's run of its name
    write_run(tmp_path / "same", params=50_000, parent_run="same", parent_step=7)
    assert lineage("long", "short", "other", "further", "same") == [
        ("long", None),
        ("short", None),
        ("elsewhere", 7),
        ("elsewhere", 9),
        ("same", 7),
    ]
    edit(
        tmp_path / "study.json",
        runs=[
            {"run": "long", "parent": None, "parent_step": None},
            {"run": "short", "parent": "long", "parent_step": 400},
            # what was done counts, not the plan
            {"run": "other", "parent": "long", "parent_step": 400},
        ],
    )
    assert lineage("long", "short", "other") == [("long", None), ("long", 400), ("elsewhere", 7)]
    assert read_record(tmp_path / "short").parent_step is None


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
def test_bad_fields_get_a_sentence(tmp_path, key, value, sentence):
    write_run(tmp_path / "run", **{key: value})
    with pytest.raises(UserError, match=f"{tmp_path}/run/summary.json.*{sentence}"):
        read_record(tmp_path / "run")


@pytest.mark.parametrize("file", ["run/summary.json", "study.json"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe{}", b'{"schema_version": 1, "run_id": "r']
)
def test_damaged_files_are_refused(tmp_path, file, content):
    write_run(tmp_path / "run")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} (is not valid JSON|holds a list)"):
        read_record(tmp_path / "run")


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
def test_what_cannot_be_compared_is_refused_naming_two_runs(tmp_path, changes, sentence):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **{"params": 106_624, **changes})
    with pytest.raises(UserError, match=f"a and .*{sentence}"):
        check_comparable(read_runs([tmp_path])[0])


def test_what_enters_a_law(tmp_path):
    """Annealed runs that ended well, from scratch, once: a repeat is a null, what goes on with a
    model has more tokens."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=2, is_annealed=False)
    write_run(tmp_path / "c", seed=3, status="diverged")
    write_run(tmp_path / "d", params=106_624, continued_from="llama31_8b")
    write_run(tmp_path / "e", repeat=1)
    records = read_runs([tmp_path])[0]
    check_comparable(records)  # another seed is another point
    check_comparable(
        [
            records[0],
            replace(
                records[1], weights={name: w + 1e-12 for name, w in records[1].weights.items()}
            ),
        ]
    )
    for sieve, gone in ((room.usable, "bc"), (room.from_scratch, "d"), (room.without_repeats, "e")):
        kept, notes = sieve(records)
        assert [record.run_id for record in kept] == [name for name in "abcde" if name not in gone]
        assert [note.split(":")[0] for note in notes] == [f"left out {name}" for name in gone]


def test_n_is_what_the_study_beside_the_run_counts_unless_words_override(tmp_path):
    for name, params, study in (
        ("x", 106_624, {"params": "nonembed"}),
        ("y", 38_912, {"params": "total"}),
        ("z", 38_912, {}),
    ):
        write_run(tmp_path / name / name, params=params)
        edit(tmp_path / name / "study.json", **study)
    x, y, z = (read_record(tmp_path / name / name) for name in "xyz")
    assert x.N == x.params_nonembed != x.params_total and y.N == z.N == 38_912
    assert (
        y.params_nonembed
        == read_record(tmp_path / "y" / "y", "nonembed").N
        == read_runs([tmp_path / "y"], "nonembed")[0][0].N
    )
    with pytest.raises(UserError, match="x and y differ in convention .*n=total"):
        check_comparable([x, y])
    check_comparable(read_runs([tmp_path / "x", tmp_path / "y"], "total")[0])


def test_curve_takes_the_last_try_of_a_step_and_survives_a_torn_line(tmp_path):
    write_run(tmp_path / "a")
    record = read_record(tmp_path / "a")
    assert [len(values) for values in read_curve(record)] == [0, 0]
    rows = [
        {
            "kind": "val" if loss == 9 else "train",
            "step": tokens // 10,
            "tokens": tokens,
            "loss": loss,
        }
        for tokens, loss in ((10, 5.0), (10, 9.0), (20, math.nan), (30, 4.0), (30, 3.5))
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, rows)) + '\n[1]\n{"kind": "tr'
    )
    tokens, loss = read_curve(record)
    assert tokens.tolist() == [10, 30] and loss.tolist() == [5.0, 3.5]


def test_paired_gap_by_hand(tmp_path):
    """Two sources of weight 1/4 and 3/4; two sequences of 10 tokens, then of 20, 30 and, context
    alone, of none."""
    base = np.array([20.0, 22, 50, 70, 0])
    change = {"bf16": np.array([1.0, 3, 2, 8, 0]), "as_trained": np.array([2.0, 4, 4, 6, 0])}
    for name, recipe, sign, device in (
        ("x", "bf16", 0, "one"),
        ("y", "tensorwise", 1, "one"),
        ("z", "rowwise", 1, "another"),
    ):
        nats = {arm: base + sign * change[arm] for arm in change}
        loss = {
            f"loss_{arm}": 0.25 * nats[arm][:2].sum() / 20 + 0.75 * nats[arm][2:].sum() / 50
            for arm in nats
        }
        write_run(
            tmp_path / name,
            recipe=recipe,
            sources={"p": {"weight": 0.25}, "q": {"weight": 0.75}},
            tok_per_s_median=100.0 + 30 * sign,
            device=device,
            **loss,
        )
        np.savez(
            tmp_path / name / "val_losses.npz",
            source=[0, 0, 1, 1, 1],
            n_tokens=[10, 10, 20, 30, 0],
            **nats,
        )
    (elsewhere, pair), notes = pair_runs(read_runs([tmp_path])[0])
    assert notes == [] and pair.bf16.run_id == "x" and pair.fp8.run_id == "y"
    assert elsewhere.fp8.run_id == "z" and elsewhere.tok_per_s_ratio is None
    # In BF16: source p gains (1+3)/20 = 0.2, q (2+8)/50 = 0.2 nats per token.
    assert pair.gap["bf16"].nats == pytest.approx(0.25 * 0.2 + 0.75 * 0.2, rel=1e-12)
    assert pair.gap["bf16"].percent == pytest.approx(
        100 * 0.2 / (0.25 * 42 / 20 + 0.75 * 120 / 50), rel=1e-12
    )
    # Residuals d - g t: p -1, +1; q 2-4=-2, 8-6=+2, 0. Variance per source: n/(n-1) * sum of
    # squares / tokens^2.
    variance = 0.25**2 * 2 * (1 + 1) / 20**2 + 0.75**2 * 3 / 2 * (4 + 4) / 50**2
    assert pair.gap["bf16"].se == pytest.approx(variance**0.5, rel=1e-12)
    # As trained: p 6/20 = 0.3, q 10/50 = 0.2; residuals p -1, +1; q 4-4=0, 6-6=0.
    assert pair.gap["as_trained"].nats == pytest.approx(0.25 * 0.3 + 0.75 * 0.2, rel=1e-12)
    assert pair.gap["as_trained"].se == pytest.approx((0.25**2 * 2 * 2 / 20**2) ** 0.5, rel=1e-12)
    assert pair.tok_per_s_ratio == pytest.approx(1.3)
