"""runtime/run_start.py: the five ways in which a run begins, and what each carries over."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib.errors import UserError
from runtime import run_start
from runtime.checkpoint import BranchPoint, Restored
from runtime.config import Config, FP8Config
from runtime.run_start import (
    DataOfRank,
    Progress,
    Start,
    StartKind,
    find_start,
    refuse_other_data,
    refuse_to_replace_copies,
    refuse_unequal_data,
)
from tests.conftest import ALONE, changed

FOLDER = Path("out/other/checkpoints/step_00000004")
STATE = {
    "updates": 3,
    "data_offset": 1,
    "seconds": 60.0,
    "probe_seconds": 5.0,
    "guard": {},
    "origin": None,
    "switched_from": None,
    "data": {"train": "t", "val": "v", "fp8": "f"},
}


@pytest.fixture
def start_of(tiny: Config, monkeypatch: pytest.MonkeyPatch):
    """start_of(newest=, point=, words): where a run begins that finds these checkpoints."""

    def start(newest=None, point=None, words: str = "") -> Start:
        monkeypatch.setattr(run_start, "restore", lambda *_: newest)
        monkeypatch.setattr(run_start, "branch", lambda *_: point)
        return find_start(changed(tiny, words), ("0" * 64,), {}, ALONE, print)

    return start


def manifest_of(config: Config, state) -> dict:
    return {"step": 4, "state": state, "config": asdict(config)}


def test_a_run_without_checkpoints_begins_at_step_0(start_of):
    start = start_of()
    assert (start.kind, start.progress, start.state) == (StartKind.SCRATCH, Progress(), None)
    assert start.describe() == "starting at step 0"


def test_a_run_resumes_from_its_own_checkpoint_with_its_hours(tiny: Config, start_of):
    start = start_of(newest=Restored(FOLDER, manifest_of(tiny, STATE)))
    assert (start.kind, start.progress) == (StartKind.RESUME, Progress(4, 3, 1, 60.0, 5.0))
    assert start.describe() == f"resuming {FOLDER}"


def test_a_branch_has_the_steps_of_its_trunk_and_no_hours(tiny: Config, start_of):
    point = BranchPoint(FOLDER, manifest_of(tiny, STATE))
    start = start_of(point=point, words=f"start_from={FOLDER}")
    assert (start.kind, start.progress) == (StartKind.BRANCH, Progress(4, 3, 1, 0.0, 0.0))
    assert start.describe() == f"branching off {FOLDER}"


@pytest.mark.parametrize("earlier, label", [(None, "bf16"), ("rowwise", "rowwise>bf16")])
def test_a_branch_in_another_precision_names_those_of_its_trunk(
    tiny: Config, start_of, earlier: str | None, label: str
):
    point = BranchPoint(FOLDER, manifest_of(tiny, STATE | {"switched_from": earlier}))
    start = start_of(point=point, words=f"start_from={FOLDER} fp8.recipe=tensorwise")
    assert (start.kind, start.switched_from) == (StartKind.SWITCHED_BRANCH, label)
    assert start.describe().endswith(f"; trained in {label} before its branch point")


def test_a_resumed_branch_knows_the_settings_of_its_trunk(tiny: Config, start_of):
    """Also those that its label leaves out."""
    trunk = FP8Config(recipe="tensorwise", skip=("attn.out",), all_gather=True)
    state = STATE | {"switched_from_fp8": json.loads(json.dumps([asdict(trunk)]))}
    start = start_of(newest=Restored(FOLDER, manifest_of(tiny, state)))
    assert start.trunk_precisions == (trunk,)
    assert start.switched_from == "tensorwise+skip=attn.out"


def test_weights_alone_bring_no_state(tiny: Config, start_of):
    origin = {"folder": "llama", "step": 0, "tokenizer_sha256": "0" * 64, "run": "llama"}
    point = BranchPoint(FOLDER, manifest_of(tiny, {"imported": origin}), origin)
    start = start_of(point=point, words="start_from=out/llama")
    assert (start.kind, start.progress, start.state) == (StartKind.WEIGHTS, Progress(), None)
    assert start.origin == origin and start.describe() == f"on from {FOLDER}"


@pytest.mark.parametrize(
    "words, is_read_again",
    [("", True), ("steps=99", True), ("seed=5", False), ("data.dir=other", False)],
)
def test_weights_of_a_run_are_told_to_meet_its_tokens_again(
    tiny: Config, start_of, words: str, is_read_again: bool
):
    origin = {"folder": "other", "step": 4, "tokenizer_sha256": "0" * 64, "run": "other"}
    point = BranchPoint(FOLDER, manifest_of(tiny, STATE), origin)
    line = start_of(point=point, words=f"start_from=out/other {words}").describe()
    sources = ", ".join(sorted(tiny.data.mixture))
    assert (f"the run before has read {sources} with the same seed" in line) == is_read_again


RESUMED = Start(StartKind.RESUME, Progress(), FOLDER, STATE)


@pytest.mark.parametrize(
    "key, sentence",
    [("train", "training tokens"), ("val", "validation windows"), ("fp8", "Linears")],
)
def test_a_state_that_saw_other_data_is_refused(key: str, sentence: str):
    identity = STATE["data"] | {key: "another"}
    with pytest.raises(UserError, match=f"out/other was begun with other {sentence}"):
        refuse_other_data(RESUMED, identity)


@pytest.mark.parametrize("kind", [StartKind.SWITCHED_BRANCH, StartKind.WEIGHTS])
def test_other_linears_are_no_other_data_after_a_switch(kind: StartKind):
    state = None if kind is StartKind.WEIGHTS else STATE
    start = replace(RESUMED, kind=kind, state=state)
    refuse_other_data(start, STATE["data"] | {"fp8": "another"})


def test_equal_data_is_gone_on_with():
    refuse_other_data(RESUMED, dict(STATE["data"]))


def test_a_branch_that_gathers_otherwise_has_switched_nothing(tiny: Config, start_of):
    """What a label leaves out is no other precision."""
    trunk = changed(tiny, "fp8.recipe=tensorwise fp8.all_gather=true")
    point = BranchPoint(FOLDER, manifest_of(trunk, STATE))
    start = start_of(point=point, words=f"start_from={FOLDER} fp8.recipe=tensorwise")
    assert (start.kind, start.switched_from) == (StartKind.BRANCH, None)


def test_a_branch_in_one_precision_needs_the_same_linears():
    start = replace(RESUMED, kind=StartKind.BRANCH)
    with pytest.raises(UserError, match="begun with other Linears"):
        refuse_other_data(start, STATE["data"] | {"fp8": "another"})


def test_a_model_that_was_gone_on_with_stays_known(tiny: Config, start_of):
    origin = {"folder": "llama", "step": 0, "tokenizer_sha256": "0" * 64, "run": "llama"}
    manifest = manifest_of(tiny, STATE | {"origin": origin})
    branched = start_of(point=BranchPoint(FOLDER, manifest), words=f"start_from={FOLDER}")
    assert start_of(newest=Restored(FOLDER, manifest)).origin == branched.origin == origin


# ------------------------------------------------------------------------------------------ copies

URL = "s3://bucket/runs"
COPY = f"{URL}/tiny/checkpoints/step_00000004"


def copies_refused(config: Config, start: Start, stored: Config, step: int = 4) -> str:
    """The sentence about copies in the store, the newest of `step`, that a run of `stored` left."""
    manifest = {"step": step, "config": asdict(stored)}
    with pytest.raises(UserError) as refusal:
        refuse_to_replace_copies(config, start, manifest)
    return str(refusal.value)


@pytest.fixture
def copied(tiny: Config) -> Config:
    return changed(tiny, f"checkpoint.copy_to={URL}/")


def test_a_resumed_run_goes_on_with_its_copies(copied: Config):
    refuse_to_replace_copies(copied, RESUMED, {"step": 4, "config": asdict(copied)})


def test_a_lost_run_that_starts_from_its_copy_goes_on_with_them(copied: Config):
    """The copies from before it was lost have no start_from."""
    back = changed(copied, f"start_from={COPY}")
    branched = replace(RESUMED, kind=StartKind.BRANCH)
    refuse_to_replace_copies(back, branched, {"step": 4, "config": asdict(copied)})


def test_weights_alone_do_not_go_on_with_copies(copied: Config):
    back = changed(copied, f"start_from={COPY}")
    weights = Start(StartKind.WEIGHTS, Progress(), FOLDER)
    assert "go on from them" in copies_refused(back, weights, copied)


def test_a_branch_that_begins_anew_does_not_replace_its_copies(copied: Config):
    branch = changed(copied, "start_from=out/trunk/checkpoints/step_00000003")
    sentence = copies_refused(branch, replace(RESUMED, kind=StartKind.BRANCH), branch)
    assert f"go on from them with start_from={COPY}" in sentence


def test_a_copy_of_another_run_is_not_the_runs_own(copied: Config):
    branch = changed(copied, f"start_from={URL}/tiny2/checkpoints/step_00000004")
    sentence = copies_refused(branch, replace(RESUMED, kind=StartKind.BRANCH), copied)
    assert "holds checkpoints of another run tiny (start_from was None" in sentence


@pytest.mark.parametrize(
    "step, remedy", [(5, "go on from them with start_from="), (6, "train its end again from")]
)
def test_only_the_last_step_has_nothing_left_to_train(copied: Config, step: int, remedy: str):
    scratch = Start(StartKind.SCRATCH, Progress())
    sentence = copies_refused(copied, scratch, copied, step)
    assert remedy in sentence
    assert f"={URL}/tiny/checkpoints/step_" in sentence, "no // of the slash in copy_to"


# -------------------------------------------------------------------------------------- ranks' data


@pytest.mark.parametrize(
    "train, val, words",
    [
        ("t", "x", "has other validation tokens in"),
        ("x", "v", "has other training tokens in"),
        ("x", "x", "has other training tokens and validation tokens in"),
    ],
)
def test_data_of_a_rank_that_differs_is_named(train: str, val: str, words: str):
    of_ranks = [DataOfRank(host, "t", "v") for host in "ab"] + [DataOfRank("c", train, val)]
    with pytest.raises(UserError, match=f"rank 2 .host c. {words} data.dir than rank 0 .host a."):
        refuse_unequal_data(of_ranks)
