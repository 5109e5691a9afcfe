"""scaling/study.py and sweep.py: the runs of a study are those of its file, declared before the
first; the table says what is true; runs are started as asked, by one writer each, to their end or
to the limit."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

import train
from lib.errors import UserError
from lib.files import read_rows
from lib.text import duration
from runtime.config import Config, FP8Config, apply_overrides, load_config
from runtime.log import pair_id
from runtime.optim import check_branch, learning_rate
from runtime.roofline import modelled_ratio
from scaling import scheduler, sweep
from scaling.declaration import content_of
from scaling.run_states import (
    ENDED,
    RunTime,
    format_grid,
    placed,
    run_time_of,
    state_of,
    tokens_left,
)
from scaling.scheduler import is_ready
from scaling.study import Row, Size, Study, expand, load_study
from scaling.sweep import Options, declare
from tests.conftest import ROOT, asked, tiny_config, write_config
from tests.helpers.faults import wait_for
from tests.helpers.scaling_runs import cells, edit, strict, write_prediction

STUDIES = sorted((ROOT / "configs").glob("study_*.py"))
OPTIONS = Options(study="x", start=2.0)
# The fake's checkpoints hold nothing but DONE; what a test appends says what the run does.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
given = dict(argument.split("=", 1) for argument in sys.argv[2:])
run, folder = given["run"], Path(given["out"]) / given["run"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
began = time.time()
def checkpoint(step):
    (folder / f"checkpoints/step_{int(step):08d}").mkdir(exist_ok=True)
    (folder / f"checkpoints/step_{int(step):08d}/DONE").touch()
def finish(**more):
    for step in given.get("checkpoint.at", "").split(","):
        checkpoint(step or 9)
    parent = int(given["start_from"][-8:]) if "start_from" in given else None
    summary = {"status": "ok", "loss_bf16": 2.0, "tok_per_s_median": 1000.0, "n_gpu": 2}
    summary |= {"wall_s": 0, "device": "fake", "began": began, "ended": time.time()}
    summary |= {"given": given, "parent_step": parent}
    summary["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    summary["threads"] = os.environ.get("OMP_NUM_THREADS")
    (folder / "summary.json").write_text(json.dumps({**summary, **more}))
"""


def tiny_study(
    tiny: Config,
    folder: Path,
    budgets: Sequence[float] = (10, 20),
    seeds: Sequence[int] = (1,),
    recipes: Sequence[str] = ("bf16",),
    held_out: bool = False,
    sizes: Sequence[int] = (64, 128),
    null: bool = False,
    max_epochs: int = 100,
    micro_batch: int = 4,
):
    """A study file of tiny sizes, each given by its n_ffn: 64 and 128 have 22.6k and 28.8k
    parameters."""
    made = []
    for name, n_ffn in zip("ab", sizes, strict=False):
        config = replace(
            tiny,
            run=f"{name}_bf16",
            steps=None,
            tokens_per_param=20,
            log=replace(tiny.log, every=100),
            model=replace(tiny.model, n_layer=1, n_ffn=n_ffn),
            data=replace(tiny.data, max_epochs=max_epochs, micro_batch=micro_batch),
            checkpoint=replace(tiny.checkpoint, every=None, keep=1),
            optim=replace(tiny.optim, warmup_share=0.05),
        )
        path = write_config(config, folder / f"{name}_bf16.py")
        made.append(
            Size(
                config=str(path),
                seeds=seeds,
                held_out=held_out and name == "b",
                null_seeds=seeds if null else (),
            )
        )
    study = Study(
        name="tiny",
        sizes=tuple(made),
        tokens_per_param=budgets,
        recipes=recipes,
        margin_percent=1.0,
        null=("deterministic=true",),
    )
    file = folder / "study_tiny.py"
    file.write_text(f"from scaling.study import Size, Study\nstudy = {study!r}\n")
    return file


def finish(row: Row, folder: Path, **changes: object):
    edit(
        folder / row.run / "summary.json",
        **{
            "status": "ok",
            "tok_per_s_median": 1000.0,
            "n_gpu": 1,
            "device": "X",
            "loss_bf16": 2.0,
            "wall_s": 0,
            "parent_step": row.parent_step,
            **changes,
        },
    )


def checkpoint(row: Row, folder: Path, step: int):
    edit(folder / row.run / f"checkpoints/step_{step:08d}/DONE")


@pytest.fixture
def rows(tiny: Config, tmp_path: Path):
    """a_bf16_t20_s1, its branch t10, the same of b."""
    return expand(load_study(tiny_study(tiny, tmp_path)))


@contextmanager
def train_py_in(folder: Path) -> Iterator[None]:
    """sweep.main() starts the train.py of this folder, and looks at its runs often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "ROOT", folder)
        patch.setattr(scheduler, "ROOT", folder)
        patch.setattr(scheduler, "POLL_S", 0.02)
        patch.setattr(scheduler, "LEAVE_S", 0.3)
        # handlers of sweep.main() would outlive the test
        patch.setattr(signal, "signal", lambda *_: None)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        yield


@pytest.fixture
def fake(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """sweep.main() on a tiny study whose train.py is the given text; the call returns what it
    printed as it ended in `code`."""

    def call(
        body: str, *arguments: object, code: int = 0, began: float | None = None, **study: object
    ) -> str:
        (tmp_path / "train.py").write_text(TRAIN + body)
        file = tiny_study(tiny, tmp_path, **study)
        ended = sweep.main([str(file), "--run", f"out={tmp_path}/out", *arguments], began)
        told = "".join(capsys.readouterr())
        assert ended == code, told
        return told

    with train_py_in(tmp_path):
        yield call


def summaries(tmp_path: Path):
    return {
        path.parent.name: strict(path) for path in (tmp_path / "out/tiny").glob("*/summary.json")
    }


@pytest.fixture
def study(tiny: Config, tmp_path: Path):
    return load_study(tiny_study(tiny, tmp_path, seeds=(1, 2), recipes=("bf16", "tensorwise")))


@cache
def file_config(path: Path):
    return load_config(path)


def config_of(row: Row, out: Path = Path("out")):
    path, *overrides = row.arguments(out)
    return apply_overrides(file_config(path), overrides)


@dataclass
class Shipped:
    """A study of configs/, its rows, and the config that train.py makes of each, by run."""

    path: Path
    study: Study
    rows: dict[str, Row]
    configs: dict[str, Config]

    def branches(self) -> list[tuple[Row, Config, Config]]:
        """Each branch, its config and its trunk's."""
        rows = [row for row in self.rows.values() if row.parent]
        return [(row, self.configs[row.run], self.configs[row.parent]) for row in rows]


@pytest.fixture(scope="module", params=STUDIES, ids=lambda path: path.stem)
def shipped(request: pytest.FixtureRequest) -> Shipped:
    study = load_study(request.param)
    rows = {row.run: row for row in expand(study)}
    configs = {run: config_of(row) for run, row in rows.items()}
    return Shipped(request.param, study, rows, configs)


def test_a_shipped_study_has_the_name_of_its_file(shipped: Shipped) -> None:
    assert f"study_{shipped.study.name}" == shipped.path.stem


def test_train_accepts_every_row_and_trains_what_it_says(shipped: Shipped) -> None:
    for row in shipped.rows.values():
        config = shipped.configs[row.run]
        trained = (config.run, config.seed, config.total_steps, config.total_tokens)
        assert trained == (row.run, row.seed, row.steps, row.tokens)
        assert row.params_total == config.model.params_total


def test_the_pair_of_a_row_is_its_configs(shipped: Shipped) -> None:
    for row in shipped.rows.values():
        assert row.pair_id == pair_id(shipped.configs[row.run])


def test_a_row_has_the_tokens_a_parameter_that_the_study_asks_for(shipped: Shipped) -> None:
    """To the step; of all parameters, or of those that are no embedding."""
    for row in shipped.rows.values():
        config = shipped.configs[row.run]
        m = config.model
        counted = row.params_total
        if shipped.study.params != "total":
            counted = m.params_total - m.vocab_padded * m.n_embd * (2 - m.tied)
        asked_for = row.tokens_per_param * counted
        assert row.tokens - config.data.tokens_per_step < asked_for <= row.tokens


def test_a_rows_flops_are_six_a_parameter_and_those_of_attention(shipped: Shipped) -> None:
    for row in shipped.rows.values():
        m = shipped.configs[row.run].model
        attention = 12 * m.n_layer * m.n_head * m.head_dim * m.n_ctx
        assert row.flops_per_token == 6 * row.params_matmul + attention


def test_a_row_warms_up_for_as_many_steps_as_its_config_file(shipped: Shipped) -> None:
    for row in shipped.rows.values():
        base = file_config(ROOT / row.config)
        steps = shipped.configs[row.run].optim.warmup_steps(row.steps)
        assert steps == base.optim.warmup_steps(base.total_steps)


def test_a_branch_starts_from_a_checkpoint_that_its_trunk_keeps(shipped: Shipped) -> None:
    for row, config, trunk in shipped.branches():
        assert config.parent == (row.parent, row.parent_step)
        assert row.parent_step in trunk.checkpoint.at


def test_a_branch_trains_as_its_trunk_does_but_for_a_switched_recipe(shipped: Shipped) -> None:
    for row, config, trunk in shipped.branches():
        check_branch(config, trunk, row.parent_step)
        assert trunk.seed == row.seed
        assert (trunk.fp8 == config.fp8) == (">" not in row.recipe)


def test_a_branch_starts_as_the_rate_decays_and_not_a_step_too_early(shipped: Shipped) -> None:
    for row, config, _ in shipped.branches():
        assert learning_rate(row.parent_step, row.steps, config.optim) < config.optim.lr
        assert row.own_tokens == pytest.approx(0.2 * row.tokens, rel=0.02)


def test_runs_are_of_a_pair_where_size_seed_tokens_and_rate_are_equal(shipped: Shipped) -> None:
    """Neither more nor fewer."""
    rows = shipped.rows.values()
    pairs = {(row.pair_id, row.size, row.seed, row.tokens, row.lr) for row in rows}
    ids = {pair[0] for pair in pairs}
    assert len(pairs) == len(ids) == len({pair[1:] for pair in pairs})


LABEL = "rowwise+first_bf16=1+skip=attn.out,layers.*.mlp.down"
ARM = "rowwise-first_bf16-1-skip-attn.out-layers.-.mlp.down"  # the same in the name of a run


@pytest.fixture
def unlike_sizes(study: Study) -> list[Row]:
    """The rows of two sizes with recipes, budgets, null runs and learning rates of their own."""
    first, second = study.sizes
    first = replace(
        first,
        recipes=("bf16", LABEL),
        seeds=(2,),
        null_seeds=(2,),
        switch=(LABEL + ">tensorwise+head",),
    )
    second = replace(
        second, seeds=(1,), lr=(1e-3, 0.002), recipes=("bf16",), tokens_per_param=(20,)
    )
    return expand(replace(study, null=("parallel.compile=true",), sizes=(first, second)))


def test_sizes_may_have_arms_null_runs_and_rates_of_their_own(unlike_sizes: list[Row]) -> None:
    assert [(row.run, row.parent) for row in unlike_sizes] == [
        ("a_bf16_t20_s2", None),
        ("a_bf16_t10_s2", "a_bf16_t20_s2"),
        ("a_bf16_null_t20_s2", None),
        ("a_bf16_null_t10_s2", "a_bf16_null_t20_s2"),
        (f"a_{ARM}_t20_s2", None),
        (f"a_{ARM}_t10_s2", f"a_{ARM}_t20_s2"),
        (f"a_{ARM}-tensorwise-head_t10_s2", f"a_{ARM}_t20_s2"),
        (f"a_{ARM}-tensorwise-head_t20_s2", f"a_{ARM}_t20_s2"),
        ("b_bf16_lr0.001_t20_s1", None),
        ("b_bf16_lr0.002_t20_s1", None),
    ]


def test_a_size_with_several_rates_is_trained_at_each(unlike_sizes: list[Row]) -> None:
    assert [config_of(row).optim.lr for row in unlike_sizes[-2:]] == [1e-3, 0.002]


def test_a_label_of_a_study_becomes_the_runs_fp8_config(unlike_sizes: list[Row]) -> None:
    skip = ("attn.out", "layers.*.mlp.down")
    assert config_of(unlike_sizes[4]).fp8 == FP8Config(recipe="rowwise", first_bf16=1, skip=skip)


def test_a_switched_branch_has_the_recipe_behind_the_arrow(unlike_sizes: list[Row]) -> None:
    assert config_of(unlike_sizes[7]).fp8 == FP8Config(recipe="tensorwise", head=True)
    assert unlike_sizes[7].recipe == LABEL + ">tensorwise+head"


def test_a_null_run_is_of_its_twins_pair_and_repeats_it_otherwise(
    unlike_sizes: list[Row],
) -> None:
    for row, null in zip(unlike_sizes[:2], unlike_sizes[2:4], strict=True):
        twins = config_of(row), config_of(null)
        assert pair_id(twins[0]) == pair_id(twins[1])
        settings = [(config.repeat, config.parallel.compile) for config in twins]
        assert settings == [(0, False), (1, "model")]


def demo(**more: object):
    return {
        "sizes": (Size(**{"config": "configs/demo_s_bf16.py", "tokens_per_param": (20,), **more}),)
    }


@pytest.mark.parametrize(
    "changes, told",
    [
        (demo(config="configs/none_bf16.py"), "there is no config file"),
        ({"tokens_per_param": 5}, "is not tuple[float, ...]"),
        (demo(config="configs/gpt50m_fp8.py"), "must be in BF16"),
        ({"recipes": ("fp4",)}, "recipe='fp4' is not"),
        ({"recipes": ("tensorwise+head+kernels",)}, "'tensorwise+kernels+head'"),
        ({"recipes": ("rowwise+heads",)}, "'fp8.head'?"),
        ({"switch": ("mxfp8>bf16",)}, "switch="),
        ({"switch": ("tensorwise",)}, "switch="),
        (demo(null_seeds=(7,)), "its seeds"),
        (demo(recipes=("bf16",), switch=("tensorwise>bf16",)), "switch="),
        (demo(tokens_per_param=(1.1, 20)), "in its warm-up"),
    ],
)
def test_an_impossible_study_gets_a_sentence(study: Study, changes: dict, told: str) -> None:
    with pytest.raises(UserError) as error:
        expand(replace(study, **changes))
    assert told in str(error.value)


def test_a_size_in_fp8_is_in_bf16_where_the_study_says_so(study: Study) -> None:
    changes = demo(config="configs/demo_s_fp8.py") | {"overrides": ("fp8.recipe=off",)}
    rows = expand(replace(study, recipes=("bf16", "rowwise"), switch=(), null=(), **changes))
    assert {config_of(row).fp8.recipe for row in rows} == {"off", "rowwise"}


DAY = "2026-01-01T00:00:00Z"


@pytest.fixture
def declared(study: Study, tmp_path: Path) -> list[Row]:
    """The rows of a study that was declared on a day, as older code did: without a key."""
    rows = expand(study)
    content = content_of(declare(study, rows, tmp_path))
    del content["runs"][-1]["pair_id"]
    edit(tmp_path / "study.json", **{**content, "declared": DAY})
    return rows


def test_a_study_that_is_the_same_keeps_the_day_of_its_declaration(
    study: Study, declared: list[Row], tmp_path: Path
) -> None:
    assert declare(study, declared, tmp_path).declared == DAY


def test_before_a_run_has_finished_a_study_may_change(
    study: Study, declared: list[Row], tmp_path: Path
) -> None:
    changed_study = replace(study, margin_percent=0.5)
    assert declare(changed_study, declared, tmp_path).declared > DAY


def test_afterwards_it_may_grow(study: Study, declared: list[Row], tmp_path: Path) -> None:
    finish(declared[0], tmp_path)
    first, second = study.sizes
    grown = replace(study, sizes=(replace(first, seeds=(1, 2, 3)), second))
    declaration = declare(grown, expand(grown), tmp_path)
    assert declaration.declared == DAY and len(declaration.runs) == 20


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda study: {"margin_percent": 0.5}, "margin_percent"),
        (lambda study: {"params": "nonembed", "tokens_per_param": (20, 40)}, "params"),
        (
            lambda study: {"sizes": (study.sizes[0], replace(study.sizes[1], held_out=True))},
            "held_out of b_bf16_t20_s1",
        ),
        (lambda study: {"decay_share": 0.3}, "over"),
        (lambda study: {"sizes": study.sizes[:1]}, "run of b_bf16_t20_s1"),
        (lambda study: {"tokens_per_param": (10, 20, 40)}, "parent of a_bf16_t20_s1"),
    ],
)
def test_afterwards_nothing_may_change(
    study: Study,
    declared: list[Row],
    tmp_path: Path,
    change: Callable[[Study], dict],
    told: str,
) -> None:
    finish(declared[0], tmp_path)
    changed_study = replace(study, **change(study))
    with pytest.raises(UserError, match=f"but {told}.* is another now"):
        declare(changed_study, expand(changed_study), tmp_path)


def test_nor_may_a_config_file(study: Study, declared: list[Row], tmp_path: Path) -> None:
    """Such as another learning rate in it."""
    finish(declared[0], tmp_path)
    first, *others = declared
    with pytest.raises(UserError, match="but pair_id of a_bf16_t20_s1"):
        declare(study, [replace(first, pair_id="other"), *others], tmp_path)


@dataclass
class Lineage:
    """A trunk, the branch from it, and the branch as a run that starts from scratch."""

    trunk: Row
    branch: Row
    alone: Row


@pytest.fixture
def lineage(study: Study) -> Lineage:
    trunk, branch = expand(study)[:2]
    return Lineage(trunk, branch, replace(branch, parent=None, parent_step=None))


def begin(row: Row, folder: Path, tiny: Config, start_from: str | None) -> None:
    """Leave what a run has that is at step 3: its config and a checkpoint."""
    checkpoint(row, folder, 3)
    edit(folder / row.run / "config.json", **asdict(replace(tiny, start_from=start_from)))


def test_before_its_trunk_has_run_a_branch_waits_for_it(lineage: Lineage, tmp_path: Path) -> None:
    assert placed(lineage.trunk, tmp_path) == lineage.trunk
    assert placed(lineage.branch, tmp_path) == lineage.branch
    assert not is_ready(lineage.branch, tmp_path)


def test_a_branch_whose_trunk_has_lost_its_checkpoints_starts_afresh(
    lineage: Lineage, tmp_path: Path
) -> None:
    finish(lineage.trunk, tmp_path)
    assert placed(lineage.branch, tmp_path) == lineage.alone


def test_a_switched_branch_never_starts_afresh(lineage: Lineage, tmp_path: Path) -> None:
    """It would train all of its tokens in the second recipe."""
    switched = replace(lineage.branch, recipe="tensorwise>bf16", switched_from="tensorwise")
    finish(lineage.trunk, tmp_path)
    assert placed(switched, tmp_path) == switched
    assert is_ready(switched, tmp_path)


def test_a_branch_stays_one_where_the_trunk_has_its_checkpoint(
    lineage: Lineage, tmp_path: Path
) -> None:
    finish(lineage.trunk, tmp_path)
    checkpoint(lineage.trunk, tmp_path, lineage.branch.parent_step)
    assert placed(lineage.branch, tmp_path) == lineage.branch


def test_a_branch_goes_on_as_it_was_begun(lineage: Lineage, tiny: Config, tmp_path: Path) -> None:
    """Though its trunk has no checkpoint any more."""
    finish(lineage.trunk, tmp_path)
    trunk_folder = f"{tmp_path}/{lineage.trunk.run}"
    begin(lineage.branch, tmp_path, tiny, f"{trunk_folder}/checkpoints/step_00000003")
    assert placed(lineage.branch, tmp_path) == lineage.branch
    begin(lineage.branch, tmp_path, tiny, None)
    assert placed(lineage.branch, tmp_path) == lineage.alone


def test_a_branch_under_way_counts_from_its_own_checkpoint(
    lineage: Lineage, tiny: Config, tmp_path: Path
) -> None:
    finish(lineage.trunk, tmp_path)
    begin(lineage.branch, tmp_path, tiny, None)
    assert state_of(lineage.branch, tmp_path) == "at step 3"
    assert tokens_left(lineage.branch, tmp_path) == (lineage.branch.steps - 3) * 512


def test_a_finished_branch_is_placed_as_it_was_trained(
    lineage: Lineage, tiny: Config, tmp_path: Path
) -> None:
    finish(lineage.trunk, tmp_path)
    begin(lineage.branch, tmp_path, tiny, None)
    for trained in lineage.branch, lineage.alone:
        finish(lineage.branch, tmp_path, parent_step=trained.parent_step)
        assert placed(lineage.branch, tmp_path) == trained
        assert state_of(lineage.branch, tmp_path) == "done"


def test_steps_of_trunk_and_branch_by_hand(rows: list[Row]) -> None:
    trunk, branch, *_ = rows
    assert (trunk.steps, branch.steps, branch.parent_step) == (884, 442, 354)


def test_a_line_of_the_table_by_hand(rows: list[Row], tmp_path: Path) -> None:
    text = format_grid(rows, tmp_path / "none", OPTIONS)
    flops = f"{88 * 512 * rows[0].flops_per_token:.2e}"
    line = f"a_bf16_t10_s1 | 22.6k | 10 | 226k | 354 | {flops} | ~2 s | missing"
    assert " | ".join(cells(text)[2]) == line
    assert "~ assumed: 45% of the 989 BF16 TFLOP/s of one h100" in text


@pytest.mark.parametrize(
    ("devices", "processor"),
    [
        (["cpu A, 1 threads"] * 2, "CPU"),
        (["NVIDIA H100"] * 2, "GPU"),
        (["cpu A, 1 threads", None], "CPU or GPU"),  # assumed: of a GPU
    ],
)
def test_the_table_says_what_its_times_are_of(
    devices: list[str | None], processor: str, rows: list[Row], tmp_path: Path
) -> None:
    of_each_size = rows[0], rows[2]
    for row, device in zip(of_each_size, devices, strict=True):
        if device is not None:
            finish(row, tmp_path, device=device)
    text = format_grid(rows, tmp_path, OPTIONS)
    heads, total = cells(text)[0], text.split("\n\n")[1].splitlines()[0]
    assert f"{processor} time" in heads
    assert total.endswith(f" of a {processor}")


def test_the_table_makes_no_folder(rows: list[Row], tmp_path: Path) -> None:
    format_grid(rows, tmp_path / "none", OPTIONS)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("saved", [0, 800])
def test_of_a_run_in_progress_only_the_rest_is_left_with_a_start(
    saved: int, rows: list[Row], tmp_path: Path
) -> None:
    trunk = rows[0]
    checkpoint(trunk, tmp_path, saved)
    flops = sum(row.flops_per_token * row.own_tokens for row in rows)
    flops -= saved * 512 * trunk.flops_per_token
    starts_s = 4 * 6 * 2  # of four runs on two GPUs
    left = duration(starts_s + flops / (989.4e12 * 1e-7))
    options = replace(OPTIONS, mfu=1e-7, start=6.0, gpus=2)
    line = f"left: 4 runs: {flops:.3g} FLOPs, {left} of a GPU\n"
    assert line in format_grid(rows, tmp_path, options)


def test_speed_and_start_are_those_of_the_runs_that_are_done(
    rows: list[Row], tmp_path: Path
) -> None:
    # of the size: 1,500 and 1,000 tokens/s on each GPU; 8.5 and 1.5 seconds beside the steps, and 5
    # no summary tells of
    finish(
        rows[0],
        tmp_path,
        status="diverged",
        tok_per_s_median=3000.0,
        n_gpu=2,
        wall_s=884 * 512 / 3000 + 8.5,
    )
    finish(rows[1], tmp_path, tok_per_s_median=1000.0, wall_s=88 * 512 / 1000 + 1.5)
    for gpus in (1, 8):  # a start occupies all of them
        text = format_grid(rows, tmp_path, replace(OPTIONS, gpus=gpus))
        for line, steps, state in zip(
            cells(text)[1:], (884, 88), ("diverged", "done"), strict=False
        ):
            assert line[-2:] == [duration(gpus * (5 + (8.5 + 1.5) / 2) + steps * 512 / 1250), state]
    assert (
        "measured: a bf16 1.25k tokens/s on each X, 10 s to start and end" in text
        and "left: 2 runs" in text
    )


def test_a_cost_is_of_a_size_and_a_recipe_and_fp8_is_modelled(tiny: Config, tmp_path: Path) -> None:
    tiny = replace(tiny, parallel=replace(tiny.parallel, compile=True))
    rows = expand(
        load_study(
            tiny_study(
                tiny,
                tmp_path,
                (20,),
                null=True,
                recipes=("bf16", "tensorwise", "cscale"),
                sizes=(64,),
            )
        )
    )
    bf16, _, *fp8 = (run_time_of(row, rows, tmp_path, OPTIONS).tok_per_s for row in rows)
    assert (
        fp8 == pytest.approx([modelled_ratio(config_of(rows[2]), "h100") * bf16, bf16])
        and fp8[0] != bf16
    )
    finish(rows[0], tmp_path)
    finish(rows[1], tmp_path, tok_per_s_median=100.0, wall_s=1e4)
    bf16, null, tensorwise, _ = (run_time_of(row, rows, tmp_path, OPTIONS) for row in rows)
    assert (bf16, null) == (
        RunTime(1000.0, 5.0, "X"),
        RunTime(100.0, 5 + 1e4 - 884 * 512 / 100, "X"),
    ) and tensorwise.device is None


def test_data_that_will_not_do_are_refused_before_anything_starts(
    fake: Callable[..., str], tmp_path: Path
) -> None:
    # 10: too little for b alone, which is held out and waits for a prediction of it
    for limit in (2, 10):
        assert "b_bf16_t20_s1: this run plans " in fake(
            "finish()", "only=a_*", code=2, max_epochs=limit, held_out=True
        )
    assert not (tmp_path / "out").exists()
    fake("finish(data_sha256='other')", "only=a_bf16_t20_s1", max_epochs=20)
    assert "holds other tokens than a_bf16_t20_s1, which is done, has seen" in fake(
        "finish()", code=2
    )
    assert len(summaries(tmp_path)) == 1


@pytest.fixture
def held_out(fake: Callable[..., str], tmp_path: Path) -> tuple[list[Row], Path]:
    """The rows of a study whose size b is held out, the rest of it done, and its folder."""
    fake("finish()", held_out=True)
    return expand(load_study(tmp_path / "study_tiny.py")), tmp_path / "out/tiny"


def test_held_out_runs_are_not_started_with_the_rest(held_out: tuple[list[Row], Path]) -> None:
    rows, folder = held_out
    assert [state_of(row, folder) for row in rows] == ["done", "done", "held out", "held out"]


def test_a_pattern_starts_no_held_out_run(
    fake: Callable[..., str], held_out: tuple[list[Row], Path]
) -> None:
    assert "0 of 1 runs to do" in fake("finish()", "only=*_t20_*", held_out=True)


@pytest.mark.parametrize("only", ["b_*", "*,b_bf16_t20_s1"])
def test_a_held_out_run_that_is_named_asks_for_its_prediction(
    only: str, fake: Callable[..., str], held_out: tuple[list[Row], Path], tmp_path: Path
) -> None:
    _, folder = held_out
    printed = fake("finish()", f"only={only}", code=2, held_out=True)
    assert f"(python scaling/fit.py {folder} --predict b_bf16_t20_s1" in printed
    assert len(summaries(tmp_path)) == 2


def test_a_prediction_of_another_run_by_that_name_does_not_count(
    fake: Callable[..., str], held_out: tuple[list[Row], Path]
) -> None:
    rows, folder = held_out
    predict(rows[2], folder / "law", tokens=1)
    predict(rows[3], folder / "law")
    fake("finish()", "only=b_bf16_t10_s1", code=2, held_out=True)


def test_a_held_out_run_with_a_prediction_starts_with_its_trunk(
    fake: Callable[..., str], held_out: tuple[list[Row], Path], tmp_path: Path
) -> None:
    rows, folder = held_out
    for row in rows[2:]:
        predict(row, folder / "law")
    fake("finish()", "only=b_bf16_t10_s1", held_out=True)
    assert len(summaries(tmp_path)) == 4


def predict(row: Row, folder: Path, **changes: object) -> None:
    """A frozen prediction of a run."""
    write_prediction(folder, {**asdict(row), "name": row.run, **changes})


@pytest.mark.parametrize(
    "words, told",
    [
        ("study_tiny.py jobs=0", "jobs=0 must be a positive"),
        ("study_tiny.py gpu=tpu", "gpu=tpu"),
        ("study_tiny.py only=a_bf16_t10_s2", "did you mean 'a_bf16_t10_s1'?"),
        ("study_tiny.py --slurm limit=9", "limit= go without"),
        ("a_bf16.py", "must bind study = Study"),
        ("study_tyni.py", "did you mean 'study_tiny'?"),
    ],
)
def test_mistakes_get_a_sentence(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    tiny_study(tiny, tmp_path)
    assert told in asked(
        capsys, sweep.main, *f"{tmp_path}/{words} out={tmp_path}/out".split(), code=2
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def slurm_script(tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tiny_study(tiny, tmp_path, seeds=(1, 2))
    return asked(capsys, sweep.main, file, "--slurm", "gpus=8")


def test_the_slurm_script_has_a_task_for_each_trunk(slurm_script: str) -> None:
    assert "#SBATCH --array=0-3\n" in slurm_script
    assert "--gpus-per-node=8" in slurm_script
    assert "\n#SBATCH --cpus-per-task=64\n" in slurm_script


def test_the_slurm_scripts_directives_stand_before_its_first_command(slurm_script: str) -> None:
    """sbatch reads none behind it."""
    assert not re.search("^[^#\n]+\n(.*\n)*#SBATCH", slurm_script, re.M)


SLURM_STUB = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(sys.argv[1:], os.getcwd(), flush=True)
time.sleep(30)
"""


def test_a_slurm_task_runs_its_trunk_and_requeues_what_is_not_done(
    slurm_script: str, tmp_path: Path
) -> None:
    (tmp_path / "stub.py").write_text(SLURM_STUB)
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho scontrol $*\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = slurm_script.replace(str(ROOT / "scaling/sweep.py"), str(tmp_path / "stub.py"))
    (tmp_path / "job.sh").write_text(script)
    variables = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "71"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "job.sh"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **variables, "PATH": path},
    )
    words = "'--run', 'gpus=8', 'out=out', 'only=b_bf16_t20_s1,b_bf16_t10_s1']"
    assert f"{words} {os.getcwd()}\n" in process.stdout.readline()
    process.terminate()  # as --signal=B:TERM does before the time limit
    assert process.communicate(timeout=20)[0] == "scontrol requeue 71\n"
    assert process.returncode == 3


TWO_ARMS = ("bf16", "tensorwise")


@pytest.fixture(scope="module")
def swept(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a sweep of two sizes, two arms and two budgets, which has ended."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "train.py").write_text(TRAIN + "time.sleep(0.05); finish()")
    file = tiny_study(tiny_config(data_dir, folder / "out"), folder, recipes=TWO_ARMS)
    words = [str(file), "--run", f"out={folder}/out"]
    with train_py_in(folder):
        assert sweep.main(words) == 0
    return words


@pytest.fixture
def two_arms(swept: list[str]) -> dict[str, dict]:
    """The summaries of its runs."""
    return summaries(Path(swept[0]).parent)


def test_trunks_come_before_branches_and_sizes_in_order(two_arms: dict[str, dict]) -> None:
    assert sorted(two_arms, key=lambda run: two_arms[run]["began"]) == [
        f"{size}_{arm}_{budget}_s1"
        for size in "ab"
        for arm in TWO_ARMS
        for budget in ("t20", "t10")
    ]


def test_runs_are_trained_one_at_a_time(two_arms: dict[str, dict]) -> None:
    runs = sorted(two_arms.values(), key=lambda summary: summary["began"])
    assert all(run["ended"] <= later["began"] for run, later in itertools.pairwise(runs))


def test_a_branch_is_started_from_its_trunks_checkpoint(two_arms: dict[str, dict]) -> None:
    branch, trunk = (two_arms[f"a_tensorwise_{budget}_s1"]["given"] for budget in ("t10", "t20"))
    checkpoints = Path(trunk["out"]) / "a_tensorwise_t20_s1/checkpoints"
    step = int(trunk["checkpoint.at"])
    assert branch["start_from"] == str(checkpoints / f"step_{step:08d}")
    assert "start_from" not in trunk


def test_a_run_that_is_alone_keeps_its_threads(two_arms: dict[str, dict]) -> None:
    assert {run["threads"] for run in two_arms.values()} == {None}


def test_a_finished_study_starts_nothing(
    swept: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(swept[0]).parent
    (folder / "train.py").write_text("raise SystemExit('not again')")
    with train_py_in(folder):
        assert "0 of 8 runs to do" in asked(capsys, sweep.main, *swept)


def test_two_jobs_run_side_by_side_each_with_gpus_of_its_own(
    fake: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    seen, popen = [], subprocess.Popen
    monkeypatch.setattr(
        scheduler.subprocess,
        "Popen",
        lambda command, **more: (
            seen.append(command),
            popen([command[0], *command[command.index(str(tmp_path / "train.py")) :]], **more),
        )[1],
    )
    fake("time.sleep(1); finish()", "jobs=2", "gpus=2", budgets=(20,), seeds=(1, 2))
    ran = list(summaries(tmp_path).values())
    overlaps = [sum(other["began"] < run["began"] < other["ended"] for other in ran) for run in ran]
    # never three at once
    assert {run["gpus"] for run in ran} == {"3,5", "6,7"} and max(overlaps) == 1
    assert seen[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert "for each of jobs=3 is more than the 4 GPUs" in fake(
        "", "jobs=3", "gpus=2", code=2, budgets=(20,), seeds=(1, 2)
    )


@dataclass
class Failed:
    """A study whose first trunk has failed: what the sweep has printed, that trunk, the folder."""

    printed: str
    row: Row
    folder: Path


@pytest.fixture
def failed(fake: Callable[..., str], tmp_path: Path) -> Failed:
    body = (
        "if run == 'a_bf16_t20_s1': print('train.py: the disk is full', file=sys.stderr);"
        " sys.exit(1)\nfinish()"
    )
    printed = fake(body, code=1)
    row = expand(load_study(tmp_path / "study_tiny.py"))[0]
    return Failed(printed, row, tmp_path / "out/tiny")


def test_a_failed_run_stops_its_branch_and_no_other(failed: Failed, tmp_path: Path) -> None:
    assert summaries(tmp_path).keys() == {"b_bf16_t20_s1", "b_bf16_t10_s1"}


def test_a_failed_run_is_named_with_what_goes_on(failed: Failed) -> None:
    assert "failed: a_bf16_t20_s1\n" in failed.printed
    assert "goes on: a_bf16_t20_s1, a_bf16_t10_s1\n" in failed.printed


def test_a_failed_runs_state_has_its_last_line(failed: Failed) -> None:
    state = state_of(failed.row, failed.folder)
    assert state.startswith("failed, exit code 1: train.py: the disk is full")


def test_what_failed_is_tried_again_after_what_may_succeed(
    fake: Callable[..., str], failed: Failed, tmp_path: Path
) -> None:
    shutil.rmtree(failed.folder / "b_bf16_t10_s1")
    fake("finish()")
    done = summaries(tmp_path)
    assert state_of(failed.row, failed.folder) == "done"
    assert done["b_bf16_t10_s1"]["began"] < done["a_bf16_t20_s1"]["began"]


def test_a_sweep_starts_a_branch_without_its_trunks_checkpoint_afresh(
    fake: Callable[..., str], failed: Failed, tmp_path: Path
) -> None:
    for missing in ("b_bf16_t10_s1", "b_bf16_t20_s1/checkpoints"):
        shutil.rmtree(failed.folder / missing)
    assert "b_bf16_t10_s1 starts from scratch" in fake("finish()")
    assert "start_from" not in summaries(tmp_path)["b_bf16_t10_s1"]["given"]


def test_a_branch_starts_as_soon_as_its_trunk_has_passed_its_step(
    fake: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    fake(
        "if 't20' in run: checkpoint(given['checkpoint.at']); time.sleep(1)\nfinish()",
        "jobs=2",
        "only=a_*",
    )
    ran = summaries(tmp_path)
    assert ran["a_bf16_t10_s1"]["began"] < ran["a_bf16_t20_s1"]["ended"] and {
        run["threads"] for run in ran.values()
    } == {"4"}


def test_what_is_left_is_told_at_the_speed_of_the_runs_under_way(
    rows: list[Row], tmp_path: Path
) -> None:
    finish(rows[0], tmp_path)
    checkpoint(rows[2], tmp_path, 8)
    lines = [
        json.dumps({"kind": "train", "step": i, "loss": 2.0, "tok_per_s": 500.0})
        for i in range(1, 11)
    ]
    (tmp_path / rows[2].run / "metrics.jsonl").write_text("\n".join([*lines, '{"cut']))
    flops = (
        sum(row.flops_per_token * row.own_tokens for row in rows[1:])
        - 8 * 512 * rows[2].flops_per_token
    )
    left = duration(flops / (500 * rows[2].flops_per_token))
    assert (
        scheduler.progress(rows, [rows[2]], tmp_path)
        == f"1 of 4 runs done, about {left} left; b_bf16_t20_s1 10 / 1,124, loss 2.000, 500"
        " tokens/s"
    )


def test_a_limit_has_the_runs_save_and_leave(fake: Callable[..., str], tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: (checkpoint(7), sys.exit(0)))
if not list((folder / "checkpoints").glob("step_00000007")): time.sleep(30)
finish()"""
    began = time.monotonic()
    assert "a_bf16_t20_s1 at step 7" in fake(
        body, "limit=2", "start=0.1", "only=a_bf16_t20_s1", code=3
    )
    assert time.monotonic() - began < 15
    assert "a_bf16_t20_s1 goes on from step 7" in fake(
        body, "limit=20", "start=0.1", "only=a_bf16_t20_s1"
    )


def test_what_has_no_time_for_more_than_its_start_is_not_begun(
    fake: Callable[..., str], tmp_path: Path
) -> None:
    """Time counts from the command's start, 45 s ago."""
    began = time.monotonic() - 45
    printed = fake("finish()", "limit=100", "only=a_bf16_t20_s1", code=3, began=began)
    assert summaries(tmp_path) == {}
    assert "no time is left to begin: a_bf16_t20_s1, which takes 60 s" in printed


def test_a_branch_that_takes_longer_than_what_is_left_is_not_begun(
    fake: Callable[..., str], tmp_path: Path
) -> None:
    # 452,608 tokens at 1,000 a second; 13 s beside them, and 5 that no summary tells of
    fake("finish(wall_s=465.608)", "limit=1e4", "only=a_bf16_t20_s1")
    # nor is a branch of what was not begun
    printed = fake("finish()", "limit=17", "only=a_*", code=3, seeds=(1, 2))
    assert len(summaries(tmp_path)) == 1
    assert "a_bf16_t10_s1, which takes 18 s to start and end" in printed
    fake("finish()", "limit=40", "only=a_*", seeds=(1, 2))
    assert len(summaries(tmp_path)) == 4


LEFT_ALONE = "a_bf16_t4_s1 is being run by another sweep: left to it"
EQUAL_KEYS = (
    "pair_id",
    "loss_bf16",
    "loss_as_trained",
    "sources",
    "train_loss_last",
    "steps",
    "tokens",
    "is_annealed",
)


class RealSweep:
    """Sweeps of a tiny study as processes; their runs are real."""

    def __init__(self, file: Path, out: Path) -> None:
        self.rows = expand(load_study(file))
        self.folder = out / "tiny"
        self.words = [str(file), "--run", f"out={out}"]

    @property
    def trunk_rows(self) -> int:
        return len(read_rows(self.folder / self.rows[0].run / "metrics.jsonl"))

    def begin(self, steps: int) -> subprocess.Popen:
        """A sweep whose trunk has done so many steps."""
        process = subprocess.Popen(
            [sys.executable, "scaling/sweep.py", *self.words, "limit=1000"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_for(lambda: self.trunk_rows >= steps or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        return process

    def state(self) -> str:
        return state_of(self.rows[0], self.folder)


def child_of(process: subprocess.Popen) -> int:
    """The process id of the one run that a sweep has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def test_a_study_interrupted_killed_and_run_again_ends_as_an_unbroken_one(
    tiny: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First Ctrl-C, then the sweep alone is killed, while its run lives on and nobody else may
    write there."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tiny_study(tiny, tmp_path, budgets=(2, 4), sizes=(64,), micro_batch=16)
    real = RealSweep(file, tmp_path / "out")
    trunk, branch = real.rows

    first = real.begin(20)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does, to all it started
    told = first.communicate(timeout=60)[0]
    assert first.returncode == 3 and "asking the runs to save and leave" in told, told
    # torch's import counts
    assert 900 < float(re.search(r"; (\S+) s are left of limit=1000\n", told)[1]) < 999.7
    saved_at = int(re.fullmatch(r"at step (\d+)", real.state())[1])
    assert 20 <= saved_at < trunk.steps

    second = real.begin(saved_at + 20)
    run = child_of(second)
    os.kill(run, signal.SIGSTOP)  # it shall not end before it has been looked at
    second.kill()
    second.communicate()
    assert real.state() == "running"
    assert sweep.main([*real.words, f"only={trunk.run}"]) == 3
    assert LEFT_ALONE in capsys.readouterr().out
    os.kill(run, signal.SIGCONT)
    wait_for(lambda: real.state() != "running")

    assert sweep.main(real.words) == 0, capsys.readouterr()
    assert (real.folder / f"{branch.run}.log").read_text().endswith(f"{ENDED}0\n")
    torch.set_num_threads(1)  # as the runs of the sweep, or sums would be rounded otherwise
    for row in real.rows:
        whole = replace(row, parent=None).arguments(tmp_path / "whole")
        assert train.main(whole) == 0, capsys.readouterr().err
        check_equal(row, real.folder, tmp_path / "whole")


def check_equal(row: Row, folder: Path, whole: Path) -> None:
    """A run of a broken study has done each step once and says what the unbroken one says."""
    summary, expected = (strict(base / row.run / "summary.json") for base in (folder, whole))
    assert (summary["parent_run"], summary["parent_step"]) == (row.parent, row.parent_step)
    assert {key: summary[key] for key in EQUAL_KEYS} == {key: expected[key] for key in EQUAL_KEYS}
    rows = read_rows(folder / row.run / "metrics.jsonl")
    steps = [line["step"] for line in rows if line["kind"] == "train"]
    assert steps == list(range((row.parent_step or 0) + 1, row.steps + 1))
