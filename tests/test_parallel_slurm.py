"""slurm.sh against stubs of srun and scontrol: what is requeued, what is not; the real train.py warned by SIGUSR1."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, write_config

SRUN = """#!/bin/bash
# Starts the tasks as slurmstepd would; the step's exit code is the highest of theirs.
echo "srun $*" >> "$STUBS/calls"
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!)
done
printf '%s\\n' "${pids[@]}" > "$STUBS/pids"
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
# In place of train.py's interpreter: training is one line of shell, and so, unless asked, is what reads the settings.
PYTHON = f"""#!/bin/bash
[ "$1" = -c ] && [ -n "${{READ:-}}" ] && exec {sys.executable} "$@"
[ "$1" = -c ] && echo "$RUN" && exit 0
echo "task $RANK/$LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $*" >> "$STUBS/calls"
eval "$TASK"
"""


@pytest.fixture
def slurm(tiny, tmp_path):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    config = replace(tiny, run="job", out=str(tmp_path / "a folder"))
    env = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "STUBS": str(stubs), "PYTHON": str(stubs / "python"),
           "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}
    return SimpleNamespace(stubs=stubs, config=config, file=write_config(config, tmp_path / "job.py"), env=env)


def submit(slurm, task="exit 0", *arguments, **env):
    """Runs the job script to its end; returns its exit code, its errors, what srun and scontrol were asked for."""
    calls = slurm.stubs / "calls"
    calls.write_text("")
    done = subprocess.run(["bash", ROOT / "slurm.sh", *(arguments or (slurm.file,))], cwd=ROOT, capture_output=True, text=True,
                          env={**slurm.env, "RUN": str(slurm.config.run_dir), "TASK": task, **env}, timeout=120)
    return done.returncode, done.stderr, calls.read_text().splitlines()


def test_each_task_learns_its_rank_and_the_settings_arrive_whole(slurm):
    code, _, calls = submit(slurm, "exit 0", slurm.file, "optim.lr=3e-4", "run=job", SLURM_RESTART_COUNT="3", READ="1",
                            SLURM_NTASKS="4", SLURM_NNODES="2")
    tasks = sorted(call for call in calls if call.startswith("task"))
    assert code == 0
    assert tasks == [f"task {i}/{i}/2/4 localhost:24714 1 train.py {slurm.file} optim.lr=3e-4 run=job" for i in range(4)]


@pytest.mark.parametrize("task, code, requeued, told", [
    ("exit 0", 0, True, "not finished (code 0): requeued"),                                 # warned, saved, left
    ('touch "$RUN/summary.json"', 0, False, ""),
    ("exit 2", 2, False, "a mistake in the settings: not requeued"),
    ("exit 1", 1, False, "nothing new was saved since this job began"),
    ('mkdir -p "$RUN/checkpoints/step_00000007"; exit 1', 0, True, "not finished (code 1): requeued"),
    ('[ $RANK = 1 ] && kill -9 $$; exit 1', 137, False, "ended with code 137, and nothing new"),
    ("kill -USR1 $$", 0, True, "not finished (code 138): requeued"),                        # warned before it could listen
])
def test_what_is_requeued(slurm, task, code, requeued, told):
    (slurm.config.run_dir / "checkpoints/step_00000005").mkdir(parents=True)
    (slurm.config.run_dir / "checkpoints/bad_step_00000009").mkdir()
    have, errors, calls = submit(slurm, task)
    assert (have, "scontrol requeue 4711" in calls) == (code, requeued), errors
    assert told in errors


def test_mistakes_are_told_before_any_task_is_started(slurm):
    code, errors, calls = submit(slurm, "exit 0", slurm.file, "optim.lrr=1", READ="1")
    assert code == 2 and "there is no key 'optim.lrr'" in errors and not calls
    code, errors, calls = submit(slurm, "exit 0", slurm.file, SLURM_SUBMIT_DIR=str(slurm.stubs))
    assert code == 2 and "submit it from the repository's folder" in errors and not calls
    code, errors, calls = submit(slurm, "exit 0", NO_REQUEUE="1")
    assert code == 1 and "scontrol requeue failed: submit the same command again" in errors


def test_warned_the_real_train_py_saves_and_is_requeued(slurm, tiny):
    """Two gloo ranks; SIGUSR1 to both, as Slurm sends it."""
    write_config(replace(slurm.config, steps=10_000, checkpoint=replace(tiny.checkpoint, every=10),
                         data=replace(tiny.data, max_epochs=1000)), slurm.file)
    slurm.env |= {"PYTHON": sys.executable, "SLURM_JOB_ID": str(os.getpid())}      # the port follows from it
    run_dir = slurm.config.run_dir
    job = subprocess.Popen(["bash", ROOT / "slurm.sh", slurm.file], cwd=ROOT, env=slurm.env, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        while not (run_dir / "checkpoints/step_00000010").exists():
            assert job.poll() is None, job.stdout.read()
            time.sleep(0.05)
        for pid in (slurm.stubs / "pids").read_text().split():
            os.kill(int(pid), signal.SIGUSR1)
        out = job.communicate(timeout=240)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 0 and "requeued" in out, out
    stopped = int(re.search(r"stopped on request at step (\d+)", out)[1])
    assert (run_dir / f"checkpoints/step_{stopped:08}/DONE").exists()
    assert f"scontrol requeue {os.getpid()}" in (slurm.stubs / "calls").read_text()
