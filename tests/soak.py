"""The long tier of fault injection: hundreds of kills, restarts under torchrun, every recipe, compiled runs, hangs.

    make soak       or: python -m pytest tests/soak.py -k kills

Everything is compared, bit for bit, with a run that was left alone. The table at the end is what LOG.md quotes.
"""

import os
import random
import shutil
import signal
import statistics
import time
from dataclasses import replace

import pytest

from runtime.config import Config, FP8Config
from tests import faults
from tests.faults import leftovers, record, saved_steps, torchrun
from tests.test_faults import EVERY, base, finish, folder, nursery, whole2  # noqa: F401
from tests.test_prepare import big, changes, content  # noqa: F401
from tests.test_prepare import finish as finish_command
from tests.test_prepare import storm as storm_of_shards

LONG = 90       # steps: room for ten kills


@pytest.fixture(scope="module")
def table(request):
    """Lines of (fault, tried, survived, seconds lost by each), printed at the end."""
    lines: list[tuple[str, int, int, list[float]]] = []
    yield lines
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n| fault | tried | survived | seconds lost, median | most |\n|---|---|---|---|---|")
        for name, tried, survived, seconds in lines:
            lost = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else " | "
            print(f"| {name} | {tried} | {survived} | {lost} |")


@pytest.fixture(scope="module")
def calm(nursery, base):        # noqa: F811
    """calm(config, ranks): the same run, left alone."""
    done = {}

    def of(config: Config, ranks: int) -> Config:
        key = repr((replace(config, run="calm", checkpoint=base.checkpoint), ranks))
        if key not in done:
            done[key] = finish(nursery, replace(config, run=f"calm{len(done)}"), ranks=ranks)
        return done[key]
    return of


def storm(nursery, config: Config, kills: int, seed: int, ranks: int) -> None:      # noqa: F811
    """Run to the end through `kills` times kill -9: every second one in the middle of a save, the others at any moment."""
    rng, killed = random.Random(seed), 0
    while not faults.is_finished(config):
        before, saves, seen = saved_steps(config), rng.randrange(1, 4), set()
        run = nursery.start(config, ranks=ranks)
        end = time.monotonic() + rng.uniform(0, 1.0 * ranks)

        def is_now(run=run, end=end, saves=saves, seen=seen, killed=killed) -> bool:
            seen.update(leftovers(config))
            return not run.is_running() or killed < kills and (len(seen) >= saves if killed % 2 else time.monotonic() > end)
        run.wait_until(is_now)
        if killed < kills:
            run.kill()
            killed += 1
            assert not before or saved_steps(config)[-1] >= before[-1], "a checkpoint was lost"
            assert faults.last_step(config) - (saved_steps(config) or [0])[-1] <= 2 * EVERY, "the save under way and since"
    assert killed, "on a machine so fast that a run is done before its first kill, make the runs longer"
    assert not leftovers(config)


RECIPES = [("off", 1), ("tensorwise", 1), ("tensorwise_gw_hp", 1), ("rowwise", 1), ("rowwise_with_gw_hp", 1), ("amax", 1),
           ("cscale", 1), ("off", 2), ("tensorwise_gw_hp", 2), ("rowwise", 2), ("rowwise_with_gw_hp", 2), ("gathered", 2)]


@pytest.mark.parametrize("name, runs, kills, ranks, changes", [
    ("one process", 10, 10, 1, {"steps": LONG}), ("both ranks", 4, 10, 2, {"steps": LONG}),
    ("four ranks", 2, 4, 4, {}), ("four ranks that share the weights", 2, 4, 4, {"replicate": 2, "shard": 2}),
    *((f"{recipe}, {ranks} ranks{', recompute' * recompute}", 1, 3, ranks, {"recipe": recipe, "recompute": recompute})
      for recipe, ranks in RECIPES for recompute in (False, True))])
def test_kills_at_any_moment(nursery, base, calm, table, name, runs, kills, ranks, changes):     # noqa: F811
    recipe, steps = changes.pop("recipe", "tensorwise"), changes.pop("steps", base.steps)
    fp8 = FP8Config(recipe="tensorwise", all_gather=True) if recipe == "gathered" else FP8Config(recipe=recipe)
    config = replace(base, steps=steps, fp8=fp8, parallel=replace(base.parallel, **changes),
                     data=replace(base.data, tokens_per_step=128 * max(2, ranks)))
    for seed in range(runs):
        shaken = replace(config, run=f"{name} {seed}".replace(" ", "_").replace(",", ""))
        storm(nursery, shaken, kills, seed, ranks)
        assert record(shaken) == record(calm(config, ranks))
    table.append((f"kill -9, {name}, half of them in saves", runs * kills, runs * kills, []))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_before_every_change_that_a_save_makes(nursery, base, calm, table, ranks):     # noqa: F811
    """Opened, renamed, removed: found by watching a save, so that a new stage of it is not forgotten here."""
    config = replace(base, run=f"every_change{ranks}", steps=120)
    file = config.run_dir.parent / f"{config.run}.trace"
    finish(nursery, replace(config, run=f"{config.run}_traced"), faults=[f"trace_save:{file}"], ranks=ranks)
    changes = file.read_text().splitlines()
    first, after = (next(i for i, change in enumerate(changes) if f"step_{step:08d}" in change) for step in (10, 10 + EVERY))
    changes = changes[first:after]
    assert any("DONE" in change for change in changes)
    assert any(change.startswith("rmdir") for change in changes), "pruning is part of it"
    for n, change in enumerate(changes, 1):
        at = max((saved_steps(config) or [0])[-1], 2 * EVERY) + EVERY
        run = nursery.start(config, faults=[f"kill_in_save:{at}:{n}"], ranks=ranks)
        assert -signal.SIGKILL in run.wait(), f"{change}: {run.output}"
        now = saved_steps(config)
        assert now[-1] in (at - EVERY, at) and len(now) >= 2, (n, change, now)
    finish(nursery, config, ranks=ranks)
    assert record(config) == record(calm(config, ranks))
    table.append((f"kill -9 before each change that a save makes on disk, {ranks} ranks", len(changes), len(changes), []))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_run_resumes_bit_for_bit(nursery, base, calm, table, ranks):     # noqa: F811
    config = replace(base, run=f"compiled{ranks}", steps=8, model=replace(base.model, n_layer=1),
                     parallel=replace(base.parallel, compile=True, timeout=120.0))
    alone = finish(nursery, replace(config, run=f"compiled{ranks}_calm"), ranks=ranks)
    run = nursery.start(config, ranks=ranks)
    run.wait_until(lambda: bool(saved_steps(config)), 600)
    run.kill()
    finish(nursery, config, ranks=ranks)
    assert record(config) == record(alone)
    table.append((f"kill -9, compiled, {ranks} ranks", 1, 1, []))


def test_twenty_kills_under_one_torchrun(nursery, base, calm, table):     # noqa: F811
    """Each restart must come up: stock torchrun reads the addresses of dead ranks in two of five."""
    config = replace(base, run="restarts", steps=400, data=replace(base.data, max_epochs=20),
                     checkpoint=replace(base.checkpoint, every=5))
    rng, seconds = random.Random(0), []
    run = torchrun(nursery, config, restarts=20)
    for kill in range(20):
        run.wait_until(lambda kill=kill: run.output.count("resuming ") + run.output.count("starting at ") > kill)
        run.wait_for_step(faults.last_step(config) + rng.randrange(1, 12))
        hit, started = faults.last_step(config), time.monotonic()
        os.kill(rng.choice(run.children()), signal.SIGKILL)
        run.wait_until(lambda kill=kill: run.output.count("resuming ") > kill)
        run.wait_for_step(hit)
        seconds.append(time.monotonic() - started)
    assert run.wait(600) == [0], run.output
    assert record(config) == record(calm(config, 2))
    table.append(("kill -9 of one rank under torchrun --max-restarts", 20, 20, seconds))


def test_a_rank_that_stands_still_ends_the_job_which_resumes(nursery, base, whole2, table):     # noqa: F811
    config = replace(base, run="still", parallel=replace(base.parallel, timeout=10.0))
    started = time.monotonic()
    run = torchrun(nursery, config, faults=["stop_in_step:5:1"], restarts=1)
    assert run.wait(300) == [0], run.output
    assert "rank 1" in run.output
    assert list((config.run_dir / "stacks").glob("rank_*.txt"))
    assert record(config) == record(whole2)
    table.append(("SIGSTOP of one rank, timeout 10 s, under torchrun", 1, 1, [time.monotonic() - started]))


def test_finished_jobs_exit_cleanly(nursery, base, table):     # noqa: F811
    config = replace(base, steps=2, eval=replace(base.eval, every=None))
    for i in range(60):
        finish(nursery, replace(config, run=f"clean{i}"), ranks=2)
    for i in range(10):
        run = torchrun(nursery, replace(config, run=f"elastic{i}"))
        assert run.wait() == [0], run.output
    table.append(("the exit of a finished job of two ranks, ten of them under torchrun", 70, 70, []))


# ------------------------------------------------------------------------------------------------------------- prepare_data.py

def test_forty_kills_of_prepare_data(big, tmp_path, table):     # noqa: F811
    told = storm_of_shards(big, tmp_path, 40, 100)
    for phase in "pieces", "shards":
        table.append((f"prepare_data.py: kill -9 while it writes {phase}", told.count(phase), told.count(phase), []))


@pytest.mark.parametrize("kind", ["kill", "full"])
def test_every_change_that_prepare_data_makes_on_disk(big, tmp_path, table, kind):     # noqa: F811
    """One command for each change; the disk stays full from that change on."""
    code, at = 1, 0
    while code:
        at, out = at + 1, tmp_path / str(at)
        code = changes(big, out, tmp_path, at, kind).returncode
        assert changes(big, out, tmp_path, at, "none").returncode == 0 and content(out) == big.calm
        shutil.rmtree(out)
    table.append((f"prepare_data.py: {kind} at each change on disk", at - 1, at - 1, []))


def test_ray_makes_the_same_shards(big, tmp_path):     # noqa: F811
    pytest.importorskip("ray")
    finish_command(big.command(tmp_path, 2, "on=ray"))
    assert content(tmp_path) == big.calm

