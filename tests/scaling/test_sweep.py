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
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
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
from tests.conftest import ROOT, asked, write_config
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


def finish(row: Row, folder: Path, **changes):
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


@pytest.fixture
def fake(
    tiny: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """sweep.main() on a tiny study whose train.py is the given text; the call returns what it
    printed as it ended in `code`."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(scheduler, "ROOT", tmp_path)
    monkeypatch.setattr(scheduler, "POLL_S", 0.02)
    monkeypatch.setattr(scheduler, "LEAVE_S", 0.3)
    # handlers of sweep.main() would outlive the test
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def call(body: str, *arguments, code: int = 0, began: float | None = None, **study):
        (tmp_path / "train.py").write_text(TRAIN + body)
        ended = sweep.main(
            [str(tiny_study(tiny, tmp_path, **study)), "--run", f"out={tmp_path}/out", *arguments],
            began,
        )
        told = "".join(capsys.readouterr())
        assert ended == code, told
        return told

    return call


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


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_row_of_a_shipped_study_is_a_config_that_train_accepts(
    path: Path, tmp_path: Path
) -> None:
    study = load_study(path)
    rows = {row.run: row for row in expand(study)}
    assert f"study_{study.name}" == path.stem
    for row in rows.values():
        config = config_of(row, tmp_path)
        m = config.model
        assert (config.run, config.seed, config.total_steps, config.total_tokens) == (
            row.run,
            row.seed,
            row.steps,
            row.tokens,
        )
        assert row.params_total == m.params_total and row.pair_id == pair_id(config)
        counted = (
            row.params_total
            if study.params == "total"
            else m.params_total - m.vocab_padded * m.n_embd * (2 - m.tied)
        )
        assert (
            row.tokens - config.data.tokens_per_step < row.tokens_per_param * counted <= row.tokens
        )
        assert (
            row.flops_per_token
            == 6 * row.params_matmul + 12 * m.n_layer * m.n_head * m.head_dim * m.n_ctx
        )
        base = file_config(ROOT / row.config)
        assert config.optim.warmup_steps(row.steps) == base.optim.warmup_steps(base.total_steps)
        if row.parent:
            trunk = config_of(rows[row.parent], tmp_path)
            assert (
                config.parent == (row.parent, row.parent_step)
                and row.parent_step in trunk.checkpoint.at
            )
            assert trunk.seed == row.seed and (trunk.fp8 == config.fp8) == (">" not in row.recipe)
            check_branch(config, trunk, row.parent_step)
            # not a step too early
            assert learning_rate(row.parent_step, row.steps, config.optim) < config.optim.lr
            assert row.own_tokens == pytest.approx(0.2 * row.tokens, rel=0.02)
    # neither more nor fewer
    pairs = {(row.pair_id, row.size, row.seed, row.tokens, row.lr) for row in rows.values()}
    assert len(pairs) == len({pair[0] for pair in pairs}) == len({pair[1:] for pair in pairs})


def test_sizes_may_have_arms_null_runs_and_rates_of_their_own(
    study: Study,
) -> None:
    first, second = study.sizes
    arm, label = (
        "rowwise-first_bf16-1-skip-attn.out-layers.-.mlp.down",
        "rowwise+first_bf16=1+skip=attn.out,layers.*.mlp.down",
    )
    rows = expand(
        replace(
            study,
            null=("parallel.compile=true",),
            sizes=(
                replace(
                    first,
                    recipes=("bf16", label),
                    seeds=(2,),
                    null_seeds=(2,),
                    switch=(label + ">tensorwise+head",),
                ),
                replace(
                    second, seeds=(1,), lr=(1e-3, 0.002), recipes=("bf16",), tokens_per_param=(20,)
                ),
            ),
        )
    )
    assert [(row.run, row.parent) for row in rows] == [
        ("a_bf16_t20_s2", None),
        ("a_bf16_t10_s2", "a_bf16_t20_s2"),
        ("a_bf16_null_t20_s2", None),
        ("a_bf16_null_t10_s2", "a_bf16_null_t20_s2"),
        (f"a_{arm}_t20_s2", None),
        (f"a_{arm}_t10_s2", f"a_{arm}_t20_s2"),
        (f"a_{arm}-tensorwise-head_t10_s2", f"a_{arm}_t20_s2"),
        (f"a_{arm}-tensorwise-head_t20_s2", f"a_{arm}_t20_s2"),
        ("b_bf16_lr0.001_t20_s1", None),
        ("b_bf16_lr0.002_t20_s1", None),
    ]
    configs = [config_of(row) for row in rows]
    assert [config.optim.lr for config in configs[-2:]] == [1e-3, 0.002]
    assert configs[4].fp8 == FP8Config(
        recipe="rowwise", first_bf16=1, skip=("attn.out", "layers.*.mlp.down")
    )
    assert (
        configs[7].fp8 == FP8Config(recipe="tensorwise", head=True)
        and rows[7].recipe == label + ">tensorwise+head"
    )
    for one, again in zip(configs[:2], configs[2:4], strict=True):
        assert pair_id(one) == pair_id(again)
        assert [(own.repeat, own.parallel.compile) for own in (one, again)] == [
            (0, False),
            (1, "model"),
        ]


def demo(**more):
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


def test_a_branch_whose_trunk_has_lost_its_checkpoints_begins_from_scratch(
    study: Study, tiny: Config, tmp_path: Path
) -> None:
    trunk, branch = expand(study)[:2]
    alone = replace(branch, parent=None, parent_step=None)
    switched = replace(branch, recipe="tensorwise>bf16", switched_from="tensorwise")
    assert [placed(trunk, tmp_path), placed(branch, tmp_path)] == [trunk, branch] and not is_ready(
        branch, tmp_path
    )
    finish(trunk, tmp_path)
    assert (
        placed(branch, tmp_path) == alone
        and placed(switched, tmp_path) == switched
        and is_ready(switched, tmp_path)
    )
    checkpoint(trunk, tmp_path, branch.parent_step)
    assert placed(branch, tmp_path) == branch
    shutil.rmtree(tmp_path / trunk.run / "checkpoints")
    checkpoint(branch, tmp_path, 3)
    for start_from, expected in (
        (f"{tmp_path}/{trunk.run}/checkpoints/step_00000003", branch),
        (None, alone),
    ):
        edit(tmp_path / branch.run / "config.json", **asdict(replace(tiny, start_from=start_from)))
        assert placed(branch, tmp_path) == expected  # it goes on as it was begun
    assert (state_of(branch, tmp_path), tokens_left(branch, tmp_path)) == (
        "at step 3",
        (branch.steps - 3) * 512,
    )
    for parent_step, expected in ((branch.parent_step, branch), (None, alone)):
        finish(branch, tmp_path, parent_step=parent_step)
        assert (placed(branch, tmp_path), state_of(branch, tmp_path)) == (expected, "done")


def test_the_table_by_hand(rows: list[Row], tmp_path: Path) -> None:
    text, (trunk, branch, *_) = format_grid(rows, tmp_path / "none", OPTIONS), rows
    assert (trunk.steps, branch.steps, branch.parent_step) == (884, 442, 354) and not (
        tmp_path / "none"
    ).exists()
    flops = f"{88 * 512 * trunk.flops_per_token:.2e}"
    assert (
        " | ".join(cells(text)[2])
        == f"a_bf16_t10_s1 | 22.6k | 10 | 226k | 354 | {flops} | ~2 s | missing"
    )
    assert "~ assumed: 45% of the 989 BF16 TFLOP/s of one h100" in text
    left, options = (
        sum(row.flops_per_token * row.own_tokens for row in rows),
        replace(OPTIONS, mfu=1e-7, start=6.0, gpus=2),
    )
    for saved in (0, 800):  # of a run in progress only the rest is left, with a start
        checkpoint(trunk, tmp_path, saved)
        left -= saved * 512 * trunk.flops_per_token
        told = (
            f"left: 4 runs: {left:.3g} FLOPs, {duration(4 * 6 * 2 + left / (989.4e12 * 1e-7))} of a"
            " GPU\n"
        )
        assert told in format_grid(rows, tmp_path, options)


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


def test_held_out_runs_wait_to_be_named(fake: Callable[..., str], tmp_path: Path) -> None:
    fake("finish()", held_out=True)
    rows, folder = expand(load_study(tmp_path / "study_tiny.py")), tmp_path / "out/tiny"
    assert [state_of(row, folder) for row in rows] == ["done", "done", "held out", "held out"]
    # a broad pattern starts no largest runs
    assert "0 of 1 runs to do" in fake("finish()", "only=*_t20_*", held_out=True)
    for only in ("b_*", "*,b_bf16_t20_s1"):
        told = fake("finish()", f"only={only}", code=2, held_out=True)
        assert (
            len(summaries(tmp_path)) == 2
            and f"(python scaling/fit.py {folder} --predict b_bf16_t20_s1" in told
        )
    predict(rows[2], folder / "law", tokens=1)  # of another run by that name
    predict(rows[3], folder / "law")
    fake("finish()", "only=b_bf16_t10_s1", code=2, held_out=True)
    predict(rows[2], folder / "law")
    fake("finish()", "only=b_bf16_t10_s1", held_out=True)  # with the trunk it needs
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


def test_the_slurm_script_has_a_task_for_each_trunk_and_requeues_what_is_not_done(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = asked(
        capsys, sweep.main, tiny_study(tiny, tmp_path, seeds=(1, 2)), "--slurm", "gpus=8"
    )
    assert all(
        words in script
        for words in (
            "#SBATCH --array=0-3\n",
            "--gpus-per-node=8",
            "\n#SBATCH --cpus-per-task=64\n",
        )
    )
    # sbatch reads none behind the first command
    assert not re.search("^[^#\n]+\n(.*\n)*#SBATCH", script, re.M)
    (tmp_path / "stub.py").write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(sys.argv[1:], os.getcwd(), flush=True)\ntime.sleep(30)\n"
    )
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho scontrol $*\n")
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "job.sh").write_text(
        script.replace(str(ROOT / "scaling/sweep.py"), str(tmp_path / "stub.py"))
    )
    process = subprocess.Popen(
        ["bash", "job.sh"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_JOB_ID": "71",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        },
    )
    assert (
        f"'--run', 'gpus=8', 'out=out', 'only=b_bf16_t20_s1,b_bf16_t10_s1'] {os.getcwd()}\n"
        in process.stdout.readline()
    )
    process.terminate()  # as --signal=B:TERM does before the time limit
    assert process.communicate(timeout=20)[0] == "scontrol requeue 71\n" and process.returncode == 3


def test_trunks_come_before_branches_and_one_at_a_time(
    fake: Callable[..., str], tmp_path: Path
) -> None:
    fake("time.sleep(0.05); finish()", recipes=("bf16", "tensorwise"))
    done = summaries(tmp_path)
    ran = sorted(done, key=lambda run: done[run]["began"])
    assert ran == [
        f"{size}_{arm}_{budget}_s1"
        for size in "ab"
        for arm in ("bf16", "tensorwise")
        for budget in ("t20", "t10")
    ]
    assert all(done[a]["ended"] <= done[b]["began"] for a, b in itertools.pairwise(ran))
    branch, trunk = done["a_tensorwise_t10_s1"]["given"], done["a_tensorwise_t20_s1"]["given"]
    checkpoints = tmp_path / "out/tiny/a_tensorwise_t20_s1/checkpoints"
    left = str(checkpoints / f"step_{int(trunk['checkpoint.at']):08d}")
    assert (
        branch["start_from"] == left
        and "start_from" not in trunk
        and {run["threads"] for run in done.values()} == {None}
    )
    assert "0 of 8 runs to do" in fake("sys.exit('not again')", recipes=("bf16", "tensorwise"))


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


def test_a_failed_run_is_named_and_does_not_stop_the_others(
    fake: Callable[..., str], tmp_path: Path
) -> None:
    body = (
        "if run == 'a_bf16_t20_s1': print('train.py: the disk is full', file=sys.stderr);"
        " sys.exit(1)\nfinish()"
    )
    told = fake(body, code=1)
    # its branch could not start
    assert summaries(tmp_path).keys() == {"b_bf16_t20_s1", "b_bf16_t10_s1"}
    assert "failed: a_bf16_t20_s1\n" in told and "goes on: a_bf16_t20_s1, a_bf16_t10_s1\n" in told
    row, folder = expand(load_study(tmp_path / "study_tiny.py"))[0], tmp_path / "out/tiny"
    assert state_of(row, folder).startswith("failed, exit code 1: train.py: the disk is full")
    for left in ("b_bf16_t10_s1", "b_bf16_t20_s1/checkpoints"):
        shutil.rmtree(folder / left)
    # what failed is tried again, after what may succeed
    assert "b_bf16_t10_s1 starts from scratch" in fake("finish()")
    done = summaries(tmp_path)
    assert "start_from" not in done["b_bf16_t10_s1"]["given"] and state_of(row, folder) == "done"
    assert done["b_bf16_t10_s1"]["began"] < done["a_bf16_t20_s1"]["began"]


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
    # from the command's start
    told = fake("finish()", "limit=100", "only=a_bf16_t20_s1", code=3, began=time.monotonic() - 45)
    assert (
        summaries(tmp_path) == {}
        and "no time is left to begin: a_bf16_t20_s1, which takes 60 s" in told
    )
    # 452,608 tokens at 1,000 a second; 13 s beside them, and 5 that no summary tells of
    fake("finish(wall_s=465.608)", "limit=1e4", "only=a_bf16_t20_s1")
    # and no branch of what was not begun
    told = fake("finish()", "limit=17", "only=a_*", code=3, seeds=(1, 2))
    assert (
        len(summaries(tmp_path)) == 1 and "a_bf16_t10_s1, which takes 18 s to start and end" in told
    )
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
