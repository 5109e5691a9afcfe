"""A NaN on one rank, in all that a MAX over the ranks decides: maxima, delayed scales, scales of
sharded weights. The rest of FP8 on several ranks: runtime/test_two_ranks.py."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fp8.copies import refresh_weight_copies
from fp8.sharded import max_over_ranks, reshard, unwrap
from model import GPT
from runtime import parallel
from runtime.config import Config
from runtime.optim import local
from tests.conftest import changed, tiny_config
from tests.helpers.faults import on_ranks
from tests.helpers.fp8_models import tokens
from tests.runtime.test_parallel import build

LINEAR, OTHER = "layers.0.attn.qkv", "layers.1.attn.qkv"


@dataclass
class Job:
    """What each rank is told."""

    folder: Path
    config: Config


def look_at_nan(job: Job) -> None:
    """One rank: a NaN on each rank in turn; writes what this rank saw, a dict for each turn."""
    world = parallel.start(job.config)
    delayed = build(job.config, "fp8.recipe=tensorwise fp8.kernels=true fp8.scaling=delayed", world)
    gathered = build(job.config, "fp8.recipe=tensorwise fp8.all_gather=true", world)
    seen = []
    for bad_rank in range(world.size):
        value = math.nan if world.rank == bad_rank else float(world.rank)
        first = math.inf if world.rank == 0 else 0.0
        maxima = max_over_ranks(torch.tensor([value, float(world.rank), -math.inf, first]))
        history, other_history = amax_histories(delayed, value, 1.0 + world.rank)
        with spoilt_weight(delayed.model, value):
            scale = delayed.model.get_submodule(LINEAR).scale.item()
            loss_by_kernels = loss(delayed.model, world.rank)
        with spoilt_weight(gathered.model, value):
            loss_by_all_gather = loss(gathered.model, world.rank)
        seen.append(
            {
                "maxima": maxima.tolist(),
                "history": history,
                "other_history": other_history,
                "scale": scale,
                "loss_by_kernels": loss_by_kernels,
                "loss_by_all_gather": loss_by_all_gather,
            }
        )
        delayed.precision.before_step(1.0)
    (job.folder / f"{world.rank}.json").write_text(json.dumps(seen))
    parallel.finish(world, 0)


def amax_histories(built: parallel.Built, value: float, other_value: float) -> tuple[float, float]:
    """The newest amax that two Linears keep after a step in which this rank has seen these."""
    built.model.get_submodule(LINEAR).x_amax.fill_(value)
    built.model.get_submodule(OTHER).x_amax.fill_(other_value)
    built.precision.after_passes()
    state = built.precision.state()
    return state[f"{LINEAR}.x"][0], state[f"{OTHER}.x"][0]


@contextmanager
def spoilt_weight(model: GPT, value: float) -> Iterator[None]:
    """A NaN in this rank's shard of a weight, where it is the one that has it."""
    shard = local(unwrap(model.get_submodule(LINEAR).weight.detach()))
    intact = shard.clone()
    if math.isnan(value):
        shard[0, 0] = value
    refresh_weight_copies(model)
    yield
    reshard(model)
    shard.copy_(intact)
    refresh_weight_copies(model)


def loss(model: GPT, rank: int) -> float:
    with torch.no_grad():
        return model(*tokens(rank)).sum().item()


@pytest.fixture(scope="module", params=[2, 3])
def seen(
    request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict]:
    """What each of two ranks, or three, saw in each turn."""
    size = request.param
    folder = tmp_path_factory.mktemp("nan")
    # of a size that two ranks and three can share
    shared = f"data.tokens_per_step={size * 128} model.n_embd=48 model.n_ffn=96"
    sharded = f"{shared} parallel.shard={size}"
    config = changed(tiny_config(data_dir, folder / "out"), sharded)
    on_ranks(size, look_at_nan, Job(folder, config), folder / "log")
    views = []
    for rank in range(size):
        views += json.loads((folder / f"{rank}.json").read_text())
    assert len(views) == size * size
    return [view | {"ranks": size} for view in views]


def test_a_nan_on_any_rank_is_the_maximum_on_all_and_hides_no_other(seen: list[dict]):
    """gloo's own MAX drops it or keeps it by its rank: [0, NaN, 2] becomes 0 on all three."""
    for view in seen:
        expected = [math.nan, view["ranks"] - 1.0, -math.inf, math.inf]
        assert str(view["maxima"]) == str(expected)


def test_a_nan_on_any_rank_leaves_delayed_scales_alone(seen: list[dict]):
    for view in seen:
        assert view["history"] == 0.0
        assert view["other_history"] == float(view["ranks"]), "beside it"


def test_the_scale_of_a_sharded_weight_is_nan_on_all_ranks(seen: list[dict]):
    assert all(math.isnan(view["scale"]) for view in seen)


@pytest.mark.parametrize("how", ["kernels", "all_gather"])
def test_a_nan_in_one_shard_is_in_the_loss_of_all_ranks(seen: list[dict], how: str):
    """Which the verdict on the step sums."""
    assert all(math.isnan(view[f"loss_by_{how}"]) for view in seen)
