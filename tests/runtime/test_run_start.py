"""runtime/run_start.py: the five ways in which a run begins, and what each carries over."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib.errors import UserError
from runtime import run_start
from runtime.checkpoint import BranchPoint, Restored
from runtime.config import Config, FP8Config
from runtime.run_start import Progress, Start, StartKind, find_start, refuse_other_data
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
