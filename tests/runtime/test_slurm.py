"""slurm.sh against stubs of srun and scontrol; once with the real train.py."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from runtime.config import Config
from tests.conftest import ROOT, changed, write_config

SRUN = """#!/bin/bash
# Starts the tasks as slurmstepd would; the step's exit code is the highest of theirs.
echo "srun $*" >> "$STUBS/calls"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!)
done
if [ -n "${WARN:-}" ]; then        # that the time is nearly over, to each task
    until ls "$WARN"/checkpoints/step_* > "$STUBS/saved" 2>&1; do sleep 0.05; done
    kill -USR1 "${pids[@]}"
fi
code=0
for pid in "${pids[@]}"; do
    wait "$pid"; c=$?; ((c > code)) && code=$c
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$STUBS/calls"
[ "$1" = show ] && printf 'localhost\\nnode2\\n'
[ -z "${NO_REQUEUE:-}" ] || [ "$1" != requeue ]
"""
# In place of train.py's interpreter: training is one line of shell, and so, unless asked, is what
# reads the settings.
PYTHON = f"""#!/bin/bash
[ "$1" = -c ] && [ -n "${{READ:-}}" ] && exec {sys.executable} "$@"
[ "$1" = -c ] && echo "$RUN" && exit 0
ranks="$RANK/$LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE"
echo "task $ranks $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $*" >> "$STUBS/calls"
eval "$TASK"
"""


@dataclass
class Job:
    """What is given to sbatch, and the commands that stand in for Slurm's."""

    stubs: Path
    config: Config
    file: Path
    environment: dict[str, str]


@dataclass
class Ended:
    """A job script that has ended."""

    code: int
    output: str  # what it printed
    calls: list[str]  # what srun and scontrol were asked for, and what each task was

    def is_requeued(self) -> bool:
        return "scontrol requeue 4711" in self.calls


@pytest.fixture
def job(tiny: Config, tmp_path: Path) -> Job:
    """A job of two tasks on two nodes."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    config = replace(tiny, run="job", out=str(tmp_path / "a folder"))
    environment = {
        **os.environ,
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "STUBS": str(stubs),
        "PYTHON": str(stubs / "python"),
        "RUN": str(config.run_dir),
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    return Job(stubs, config, write_config(config, tmp_path / "job.py"), environment)


def submit(job: Job, task: str = "exit 0", words: Sequence[str] = (), **environment: str) -> Ended:
    """Run the job script to its end, with `task`, a line of shell, in the place of training."""
    calls = job.stubs / "calls"
    calls.write_text("")
    done = subprocess.run(
        ["bash", ROOT / "slurm.sh", job.file, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**job.environment, "TASK": task, **environment},
        timeout=240,
    )
    return Ended(done.returncode, done.stdout + done.stderr, calls.read_text().splitlines())


def test_each_task_learns_its_rank_and_the_settings(job: Job):
    settings = ["optim.lr=3e-4", "run=job"]
    slurm = {"SLURM_RESTART_COUNT": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    ended = submit(job, words=settings, **slurm)
    assert ended.code == 0
    assert sorted(call for call in ended.calls if call.startswith("task")) == [
        f"task {rank}/{rank}/2/4 localhost:24714 1 train.py {job.file} optim.lr=3e-4 run=job"
        for rank in range(4)
    ]


SAVES = 'mkdir -p "$RUN/checkpoints/step_00000007"; '  # what was saved before the job: step 5


@pytest.mark.parametrize(
    "task, sentence",
    [
        pytest.param("exit 0", "code 0): requeued", id="warned, saved, left"),
        pytest.param(SAVES + "exit 1", "code 1): requeued", id="failed after a save"),
        pytest.param("kill -USR1 $$", "code 138): requeued", id="warned before it could listen"),
    ],
)
def test_a_job_that_can_go_on_is_requeued(job: Job, task: str, sentence: str):
    ended = submit_after_a_save(job, task)
    assert ended.is_requeued() and sentence in ended.output, ended.output
    assert ended.code == 0


@pytest.mark.parametrize(
    "task, code, sentence",
    [
        pytest.param('touch "$RUN/summary.json"', 0, "", id="finished"),
        pytest.param(SAVES + "exit 2", 2, "mistake in the settings", id="mistake"),
        pytest.param("exit 1", 1, "nothing new was saved", id="failed without a save"),
        pytest.param(
            "[ $RANK = 1 ] && kill -9 $$; exit 1", 137, "code 137, and nothing new", id="killed"
        ),
    ],
)
def test_a_job_that_cannot_go_on_is_not_requeued(job: Job, task: str, code: int, sentence: str):
    ended = submit_after_a_save(job, task)
    assert not ended.is_requeued() and sentence in ended.output, ended.output
    assert ended.code == code


def test_a_requeue_that_fails_is_told(job: Job):
    ended = submit_after_a_save(job, "exit 0", NO_REQUEUE="1")
    assert ended.code == 1 and "scontrol requeue failed" in ended.output


def submit_after_a_save(job: Job, task: str, **environment: str) -> Ended:
    """A job whose run has saved step 5, and has set a damaged checkpoint aside."""
    (job.config.run_dir / "checkpoints/step_00000005").mkdir(parents=True)
    (job.config.run_dir / "checkpoints/bad_step_00000009").mkdir()
    return submit(job, task, **environment)


@pytest.mark.parametrize(
    "words, environment, sentence",
    [
        (["optim.lrr=1"], {"READ": "1"}, "there is no key 'optim.lrr'"),
        (["--plan", "h100"], {"READ": "1"}, "--plan trains nothing"),
        ([], {"SLURM_SUBMIT_DIR": "/"}, "submit it from the repository's folder"),
    ],
)
def test_a_mistake_is_told_before_any_task_is_started(
    job: Job, words: list[str], environment: dict[str, str], sentence: str
):
    ended = submit(job, words=words, **environment)
    assert ended.code == 2 and sentence in ended.output
    assert not ended.calls


def test_words_are_read_as_train_py_reads_them(job: Job):
    """In any order, with or without dashes: else the job script refuses what train.py takes."""
    environment = {**job.environment, "READ": "1", "TASK": "exit 0"}
    words = ["--optim.lr", "3e-4", str(job.file), "--seed=3"]
    (job.stubs / "calls").write_text("")
    done = subprocess.run(
        ["bash", ROOT / "slurm.sh", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "requeued" in done.stderr, done.stderr
    assert (job.stubs / "calls").read_text().count(f"train.py {' '.join(words)}") == 2


def test_warned_the_real_train_py_saves_and_is_requeued(job: Job):
    """Two gloo ranks; SIGUSR1 to both, as Slurm sends it."""
    long = "steps=10_000 checkpoint.every=4 data.max_epochs=1000"
    write_config(changed(job.config, long), job.file)
    number = str(os.getpid())  # the port follows from it
    ended = submit(job, PYTHON=sys.executable, SLURM_JOB_ID=number, WARN=str(job.config.run_dir))
    assert ended.code == 0 and "requeued" in ended.output, ended.output
    assert f"scontrol requeue {number}" in ended.calls
    stopped = int(re.search(r"stopped on request at step (\d+)", ended.output)[1])
    assert (job.config.run_dir / f"checkpoints/step_{stopped:08}/DONE").exists()
