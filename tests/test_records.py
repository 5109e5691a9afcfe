"""Summaries of runs are read strictly: what cannot be compared is refused by name, nothing is skipped in silence."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scaling_runs import write_ladder, write_run

from runtime.cli import UserError
from scaling.pairs import pairs
from scaling.records import (
    check_comparable,
    counted_as,
    from_scratch,
    read_curve,
    read_record,
    read_runs,
    usable,
    without_repeats,
)


def test_reads_run_folders_and_folders_of_runs(tmp_path):
    write_ladder(tmp_path / "out")
    one, _ = read_runs([tmp_path / "out" / "a_bf16"])
    all_of_them, notes = read_runs([tmp_path / "out", tmp_path / "out" / "a_bf16"])     # the second is there already
    assert [record.run_id for record in one] == ["a_bf16"]
    assert [record.run_id for record in all_of_them] == ["a_bf16", "a_fp8", "b_bf16", "b_fp8", "c_bf16", "c_fp8"]
    assert notes == []
    assert one[0].recipe == "bf16" and one[0].params_total == 38_912 and one[0].tokens == 778_240
    assert one[0].weights == pytest.approx({"docs": 0.1, "latex": 0.1, "python": 0.8})


def test_what_is_skipped_is_said_and_what_fit_py_leaves_is_no_news(tmp_path):
    write_run(tmp_path / "good")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "study.json").write_text("{}")
    (tmp_path / "law").mkdir()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "law.json").write_text("{}")
    write_run(tmp_path / "more" / "a")
    records, notes = read_runs([tmp_path])
    assert [record.run_id for record in records] == ["good"]
    assert [note.removeprefix(f"skipped {tmp_path}/").split(":")[0] for note in notes] == ["begun", "more", "notes"]
    assert "unfinished" in notes[0] and "but holds runs" in notes[1] and "neither summary.json" in notes[2]


def test_branches_know_their_trunk(tmp_path):
    write_run(tmp_path / "long", params=106_624)
    write_run(tmp_path / "short", params=106_624, tokens=10**6, parent_run="long", parent_step=400)
    write_run(tmp_path / "old", **dict.fromkeys(("parent_run", "parent_step", "t_start"), ...))
    branch, trunk, old = (read_record(tmp_path / name) for name in ("short", "long", "old"))
    assert (branch.parent_run, branch.parent_step, branch.trunk) == ("long", 400, "long")
    assert (trunk.parent_run, trunk.parent_step, trunk.trunk) == (None, None, "long")
    assert (old.parent_run, old.parent_step, old.t_start, old.trunk) == (None, None, None, "old")
    assert trunk.t_start == "2026-11-20T09:00:00Z"


def test_a_branch_that_was_trained_from_scratch_belongs_to_the_trunk_that_its_study_names(tmp_path):
    """So it is where the trunk was published without its checkpoint: same seed, same data, same schedule."""
    write_run(tmp_path / "long", params=106_624)
    write_run(tmp_path / "short", params=106_624, tokens=10**6)
    rows = [{"run": "long", "parent": None, "parent_step": None}, {"run": "short", "parent": "long", "parent_step": 400}]
    assert read_record(tmp_path / "short").trunk == "short"         # nothing tells of a trunk
    (tmp_path / "study.json").write_text(json.dumps({"runs": rows}))
    trunk, branch = (read_record(tmp_path / name) for name in ("long", "short"))
    assert (branch.trunk, branch.decays_from) == ("long", 400) and (trunk.trunk, trunk.decays_from) == ("long", None)
    assert (branch.parent_run, branch.parent_step) == (None, None)      # its own metrics.jsonl begins at step 1
    write_run(tmp_path / "other", params=106_624, tokens=10**6, parent_run="elsewhere", parent_step=7)
    rows.append({"run": "other", "parent": "long", "parent_step": 400})
    (tmp_path / "study.json").write_text(json.dumps({"runs": rows}))
    other = read_record(tmp_path / "other")
    assert (other.trunk, other.decays_from) == ("elsewhere", 7)     # what was done counts more than what was planned


def test_no_runs_at_all(tmp_path):
    with pytest.raises(UserError, match="does not exist: give a run's folder such as out/<run>"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no finished run in .*empty: expected folders with a summary.json"):
        read_runs([tmp_path / "empty"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file: give a run's folder"):
        read_runs([tmp_path / "file"])


@pytest.mark.parametrize(("key", "value", "sentence"), [
    ("params_total", ..., "key 'params_total' is missing; expected a whole number above zero"),
    ("params_total", 38912.0, "params_total is 38912.0; expected a whole number above zero"),
    ("params_matmul", 0, "params_matmul is 0; expected a whole number above zero"),
    ("loss_bf16", float("nan"), "loss_bf16 is NaN; expected a finite number above zero"),
    ("loss_bf16", 10**400, f"loss_bf16 is {'1' + 59 * '0'}; expected a finite number above zero"),
    ("loss_as_trained", "2.1", 'loss_as_trained is "2.1"; expected a finite number above zero'),
    ("is_annealed", 1, "is_annealed is 1; expected true or false"),
    ("precision", {"compile": True}, "key 'precision.recipe' is missing; expected a text that is not empty"),
    ("sources", {"a.b": {"loss": 1}}, "key 'sources.a.b.weight' is missing; expected a finite number above zero"),
    ("parent_run", "a", "parent_run and parent_step go together; one of them is missing or null"),
    ("parent_step", -1, "parent_step is -1; expected a whole number above zero"),
    ("t_start", "2026-11-21T15:44:05", "t_start is '2026-11-21T15:44:05'; expected a UTC time such as 2026-11-21T15:44:05Z"),
    ("schema_version", 2, "schema_version is 2; expected 1, so the run comes from another version of train.py"),
])
def test_bad_fields_get_a_sentence(tmp_path, key, value, sentence):
    write_run(tmp_path / "run", **{key: value})
    with pytest.raises(UserError) as error:
        read_record(tmp_path / "run")
    assert str(error.value) == f"{tmp_path / 'run' / 'summary.json'}: {sentence}"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{}", b'{"schema_version": 1, "run_id": "r'])
def test_damaged_summary(tmp_path, content):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_bytes(content)
    with pytest.raises(UserError, match="summary.json (is not valid JSON .*cut off or edited|holds a list)"):
        read_record(tmp_path / "run")


@pytest.mark.parametrize(("text", "sentence"), [
    ('{"params": "matmul"}', "params is 'matmul'; expected total or nonembed"), ('{"par', "is not valid JSON"),
    ("[]", "holds a list"),
    ('{"held_out": "big"}', "held_out must be a list"), ('{"runs": [3]}', "list of objects"),
    ('{"runs": [{"run": "a", "parent": "long"}]}', "a has the parent 'long' at step None; expected")])
def test_a_damaged_study_is_refused(tmp_path, text, sentence):
    write_run(tmp_path / "a")
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_record(tmp_path / "a")


@pytest.mark.parametrize(("key", "value", "what"), [
    ("tokenizer_sha256", "u" * 64, "different tokenizers"), ("val_sha256", "w" * 64, "different validation sets"),
    ("vocab_size", 50257, "different vocabularies"), ("vocab_padded", 512, "different model vocabularies"),
    ("sources", {name: {"weight": 1} for name in ("docs", "latex", "python")}, "a and b weigh the sources differently")])
def test_mixing_is_refused_naming_two_runs(tmp_path, key, value, what):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", params=106_624, **{key: value})
    with pytest.raises(UserError, match=f"a and b .*{what}|{what}"):
        check_comparable(read_runs([tmp_path])[0])


def test_one_point_twice_is_refused_but_another_seed_is_not(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=2)
    check_comparable(read_runs([tmp_path])[0])
    write_run(tmp_path / "c")
    with pytest.raises(UserError, match=r"a and .*c are one point given twice \(same recipe, params_total, tokens, seed, "
                                          r"repeat\)"):
        check_comparable(read_runs([tmp_path])[0])
    write_run(tmp_path / "more" / "a", params=106_624)
    with pytest.raises(UserError, match=r"a and .*more/a are one point given twice \(same run_id\): leave one out"):
        check_comparable(read_runs([tmp_path / "a", tmp_path / "more" / "a"])[0])


def test_what_enters_a_law(tmp_path):
    """Annealed runs that ended well, from scratch, once: a repeat is a null, what goes on with a model has more tokens."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=2, is_annealed=False)
    write_run(tmp_path / "c", seed=3, status="diverged")
    write_run(tmp_path / "d", params=106_624, continued_from="llama31_8b")
    write_run(tmp_path / "e", repeat=1)
    records = read_runs([tmp_path])[0]
    check_comparable(records)
    for sieve, gone in ((usable, "bc"), (from_scratch, "d"), (without_repeats, "e")):
        kept, notes = sieve(records)
        assert [record.run_id for record in kept] == [name for name in "abcde" if name not in gone]
        assert len(notes) == len(gone) and all(f"left out {name}: " in note for name, note in zip(gone, notes, strict=True))


def test_n_is_what_the_study_beside_the_run_counts_unless_words_override(tmp_path):
    for name, study in (("x", {"params": "nonembed"}), ("y", {"params": "total"}), ("z", {})):
        write_run(tmp_path / name / name, params=106_624 if name == "x" else 38_912)
        (tmp_path / name / "study.json").write_text(json.dumps(study))
    x, y, z = (read_record(tmp_path / name / name) for name in "xyz")
    assert (x.convention, y.convention, z.convention) == ("nonembed", "total", "total")
    assert (x.params_nonembed, y.params_total) == (x.N, y.N) and x.params_nonembed != x.params_total
    assert counted_as([y], "nonembed") == [replace(y, convention="nonembed")] and counted_as([y], None) == [y]
    with pytest.raises(UserError, match="counts nonembed parameters and .* counts total: say which for both, n=total or"):
        check_comparable([x, y])
    check_comparable(counted_as([x, y], "total"))


def test_curve_takes_the_last_try_of_a_step_and_survives_a_torn_line(tmp_path):
    write_run(tmp_path / "a", curve=False)
    record = read_record(tmp_path / "a")
    assert [len(values) for values in read_curve(record)] == [0, 0]
    rows = [{"kind": "train", "step": 1, "tokens": 10, "loss": 5.0}, {"kind": "val", "step": 1, "tokens": 10, "loss": 9},
            {"kind": "train", "step": 2, "tokens": 20, "loss": float("nan")},
            {"kind": "train", "step": 3, "tokens": 30, "loss": 4.0},
            {"kind": "train", "step": 3, "tokens": 30, "loss": 3.5}]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n[1]\n{"kind": "tr')
    tokens, loss = read_curve(record)
    assert tokens.tolist() == [10, 30] and loss.tolist() == [5.0, 3.5]


def write_pair_by_hand(folder):
    """Two sources of weight 1/4 and 3/4; two sequences of 10 tokens, then sequences of 20 and 30 tokens."""
    arrays = {"source": np.array([0, 0, 1, 1]), "n_tokens": np.array([10, 10, 20, 30])}
    sources = {"p": {"weight": 0.25}, "q": {"weight": 0.75}}
    base = {"bf16": np.array([20.0, 22, 50, 70]), "as_trained": np.array([20.0, 22, 50, 70])}
    change = {"bf16": np.array([1.0, 3, 2, 8]), "as_trained": np.array([2.0, 4, 4, 6])}
    for name, recipe, sign in (("x", "bf16", 0), ("y", "tensorwise", 1)):
        nats = {arm: base[arm] + sign * change[arm] for arm in base}
        loss = {arm: 0.25 * nats[arm][:2].sum() / 20 + 0.75 * nats[arm][2:].sum() / 50 for arm in base}
        write_run(folder / name, recipe=recipe, sources=sources, loss_bf16=loss["bf16"],
                  loss_as_trained=loss["as_trained"], tok_per_s_median=100.0 + 30 * sign)
        np.savez(folder / name / "val_losses.npz", **nats, **arrays)


def test_paired_gap_by_hand(tmp_path):
    write_pair_by_hand(tmp_path)
    (pair,), notes = pairs(read_runs([tmp_path])[0])
    assert notes == [] and pair.bf16.run_id == "x" and pair.fp8.run_id == "y"
    # In BF16: source p gains (1+3)/20 = 0.2, q (2+8)/50 = 0.2 nats per token.
    assert pair.in_bf16.nats == pytest.approx(0.25 * 0.2 + 0.75 * 0.2, rel=1e-12)
    assert pair.in_bf16.percent == pytest.approx(100 * 0.2 / (0.25 * 42 / 20 + 0.75 * 120 / 50), rel=1e-12)
    # Residuals d - g t: p -1, +1; q 2-4=-2, 8-6=+2. Variance per source: n/(n-1) * sum of squares / tokens^2.
    variance = 0.25**2 * 2 * (1 + 1) / 20**2 + 0.75**2 * 2 * (4 + 4) / 50**2
    assert pair.in_bf16.se == pytest.approx(variance**0.5, rel=1e-12)
    # As trained: p 6/20 = 0.3, q 10/50 = 0.2; residuals p -1, +1; q 4-4=0, 6-6=0.
    assert pair.as_trained.nats == pytest.approx(0.25 * 0.3 + 0.75 * 0.2, rel=1e-12)
    assert pair.as_trained.se == pytest.approx((0.25**2 * 2 * 2 / 20**2) ** 0.5, rel=1e-12)
    assert pair.tok_per_s_ratio == pytest.approx(1.3)


def test_standard_error_agrees_with_a_bootstrap(tmp_path):
    write_run(tmp_path / "x", per_source=200)
    write_run(tmp_path / "y", recipe="tensorwise", gap=0.02, per_source=200)
    (pair,), _ = pairs(read_runs([tmp_path])[0])
    x, y = (np.load(tmp_path / name / "val_losses.npz") for name in "xy")
    difference = (y["bf16"] - x["bf16"]).reshape(3, 200) / 128
    rng = np.random.default_rng(0)
    draws = [sum(w * d[rng.integers(0, 200, 200)].mean() for w, d in zip((0.1, 0.1, 0.8), difference, strict=True))
             for _ in range(3000)]
    assert pair.in_bf16.se == pytest.approx(np.std(draws), rel=0.06)


def test_pairs_that_cannot_be(tmp_path):
    write_pair_by_hand(tmp_path)
    good = dict(np.load(tmp_path / "y" / "val_losses.npz"))
    path = tmp_path / "y" / "val_losses.npz"

    def refuse(sentence, **changes):
        np.savez(path, **{**good, **changes})
        with pytest.raises(UserError, match=sentence):
            pairs(read_runs([tmp_path])[0])

    order = [1, 0, 3, 2]
    refuse("differ in 'n_tokens': a paired gap needs the same validation sequences in the same order",
           **{name: value[order] for name, value in good.items()})
    refuse("is damaged: expected as_trained, bf16, source, n_tokens", bf16=good["bf16"][:3])
    refuse("cannot be read .*; expected the arrays", bf16=np.array([1, None, 2, 3], dtype=object))
    refuse("is damaged", bf16=np.full(4, np.nan))
    refuse("for the sources 0 to 1", source=np.array([0, 0, 1, 2]))
    refuse("the two files are not from one evaluation", bf16=good["bf16"] * 1.01)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="val_losses.npz cannot be read"):
        pairs(read_runs([tmp_path])[0])
    path.unlink()
    with pytest.raises(UserError, match="val_losses.npz is missing: the paired gap needs it beside summary.json"):
        pairs(read_runs([tmp_path])[0])


def test_runs_without_partner_are_said(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", recipe="rowwise", params=106_624)
    found, notes = pairs(read_runs([tmp_path])[0])
    assert found == []
    assert notes == ["unpaired b: no BF16 run with its pair_id pair106624_2132480_1337",
                     "unpaired a: no FP8 run with its pair_id pair38912_778240_1337"]
    write_run(tmp_path / "c", recipe="rowwise", gap=0.01, device="another")
    (pair,), _ = pairs(read_runs([tmp_path])[0])
    assert pair.tok_per_s_ratio is None
    write_run(tmp_path / "d", pair_id="pair38912_778240_1337", seed=3)
    with pytest.raises(UserError, match="a and d are both the BF16 run of pair pair38912_778240_1337: leave one out"):
        pairs(read_runs([tmp_path])[0])
