"""Run the tasks: by processes of this machine, on Ray, as a Slurm array."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path

from lib.errors import MachineError, UserError
from lib.machine import ROOT, end_with_parent
from prepare.job import Job

TICK_S = 1.0  # between two calls of `tick`


def run_here(tasks: list[Callable], processes: int, tick: Callable[[], None]) -> None:
    """By processes of our own rather than datatrove's pool, which waits for ever for a worker that
    was killed, for want of memory mostly, and leaves workers behind that write on when it is killed
    itself. `tick` is called once a second."""
    workers = min(processes, len(tasks))
    if workers <= 1:
        for task in tasks:
            task(tick)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker) as pool:
        try:
            running = {pool.submit(task) for task in tasks}
            while running:
                done, running = wait(running, TICK_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                tick()
        except BrokenExecutor as error:
            raise MachineError(
                "a process was killed, mostly for want of memory: fewer processes= need less; what"
                " was prepared stays, and the same command goes on"
            ) from error
        finally:
            for worker in multiprocessing.active_children():
                worker.kill()  # it holds nothing that is not on disk


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    end_with_parent()


def _step(tasks: list[Callable]) -> Callable:
    """A step of datatrove's, which writes the repr of a step into the log of each task: a
    function's holds no list of all."""
    return lambda data, rank, world_size: tasks[rank]()


def run_on_ray(tasks: list[Callable], workers: int, parts: Path) -> None:
    try:
        import ray
        from datatrove.executor.ray import RayPipelineExecutor
    except ImportError as error:
        raise UserError("on=ray needs the package ray: pip install ray") from error
    ray.init(ignore_reinit_error=True)
    RayPipelineExecutor(
        [_step(tasks)],
        tasks=len(tasks),
        workers=workers,
        skip_completed=False,
        logging_dir=str(parts / "ray"),
    ).run()


def submit_to_slurm(tasks: list[Callable], finish: Callable, job: Job) -> None:
    """An array of jobs for the tasks, and a job behind them for `finish`. With dry_run they are
    printed."""
    from datatrove.executor import slurm

    if job.dry_run:
        slurm.launch_slurm_job = lambda content, *_: print(content) or "DRY_RUN"
    # no job that merges datatrove's statistics
    slurm.SlurmPipelineExecutor.launch_merge_stats = int
    # A folder of its own: the tasks of an earlier command, which read their list there, may not
    # have begun.
    logs = Path(job.out, ".slurm", f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}").resolve()
    executor = partial(
        slurm.SlurmPipelineExecutor,
        time=job.time,
        partition=job.partition,
        qos="",
        mem_per_cpu_gb=4,
        skip_completed=False,
        env_command=(
            f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:$PYTHONPATH"
        ),
    )
    array = (
        executor(
            [_step(tasks)],
            len(tasks),
            job_name="prepare_pieces",
            logging_dir=str(logs / "pieces"),
            workers=job.workers,
        )
        if tasks
        else None
    )
    try:
        executor(
            [_step([finish])],
            1,
            job_name="prepare_shards",
            logging_dir=str(logs / "shards"),
            depends=array,
            run_on_dependency_fail=True,
        ).run()
    except subprocess.CalledProcessError as error:  # it has said why
        raise UserError(
            f"sbatch refused the job (partition={job.partition} time={job.time}): correct that"
        ) from error
