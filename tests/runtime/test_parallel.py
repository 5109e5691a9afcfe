"""One process: what it learns from its launcher, what is refused, recomputation. Two ranks:
runtime/test_two_ranks.py; compiled: runtime/test_compiled.py; slurm.sh: runtime/test_slurm.py."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_args as torchrun_options
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8 import selection
from fp8.copies import refresh_weight_copies, zero_gradients
from fp8.probe import Probe
from fp8.recipes import RECIPES
from lib.errors import MachineError, UserError
from model import GPT, NO_TARGET, Block, GPTConfig, RMSNorm
from runtime import parallel
from runtime.config import Config
from runtime.parallel import World
from tests.conftest import ALONE, changed
from tests.helpers.faults import record
from tests.helpers.fp8_models import tokens

# what tiny models can have
SHARDED = ("off", *(name for name, recipe in RECIPES.items() if recipe.multiple <= 32))


def build(config: Config, words: str = "", world: World = ALONE) -> parallel.Built:
    """An initialised model, built as for training, in BF16 unless the settings say otherwise."""
    built = parallel.build(changed(config, f"fp8.recipe=off fp8.all_gather=false {words}"), world)
    built.model.init_weights(0, built.assign)
    refresh_weight_copies(built.model)
    return built


@dataclass
class Step:
    """A training step before its update."""

    loss: float  # of its last micro-batch
    gradients: dict[str, torch.Tensor]  # whole, of all its micro-batches


def step(
    built: parallel.Built,
    world: World = ALONE,
    micros: int = 1,
    reshard: bool = True,
    seed: int = 0,
) -> Step:
    """A step on this rank's own tokens."""
    for micro in range(micros):
        parallel.sync_gradients(built.trained, micro == micros - 1, reshard)
        loss = built.trained(*tokens(seed + 10 * world.rank + micro)).sum()
        loss.backward()
    gradients = {}
    for name, weight in built.model.named_parameters():
        is_sharded = isinstance(weight.grad, DTensor)
        gradients[name] = weight.grad.full_tensor() if is_sharded else weight.grad
    return Step(loss.item(), gradients)


# ------------------------------------------------------------------------------------ the launcher


def set_environment(monkeypatch: pytest.MonkeyPatch, names: str, values: dict[str, str]) -> None:
    """Let these variables have these values, or be unset."""
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_command_of_ranks_that_never_joined_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
):
    """torchrun .. -m eval.harness --help, or --fetch."""
    ended = mock.Mock()
    monkeypatch.setattr(os, "_exit", ended)
    parallel.finish(replace(ALONE, size=2), 0)
    ended.assert_called_once_with(0)


@pytest.mark.parametrize(
    "environment, share",
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "1"}, (0, 1)),
        ({"LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        # of another job, which has left its environment behind
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_a_rank_shares_its_machine_only_where_the_launcher_says_so(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], share: tuple[int, int]
):
    """Else ranks of a pod each, started with RANK and WORLD_SIZE alone, all hash the same half of
    the shards."""
    set_environment(monkeypatch, "LOCAL_RANK LOCAL_WORLD_SIZE", environment)
    local_rank = int(environment.get("LOCAL_RANK", 0))
    local_size = parallel._local_size(4)
    world = replace(ALONE, rank=1, local_rank=local_rank, size=4, local_size=local_size)
    assert world.share_of_machine == share


@pytest.mark.parametrize(
    "words, environment, seconds",
    [
        ([], {}, 30),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", "PET_SHUTDOWN_TIMEOUT": "90"}, 90),
        (["--shutdown-timeout=300"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 300),
        (["--shutdown_timeout", "45"], {}, 45),
    ],
)
def test_a_rank_knows_after_which_time_torchrun_kills_it(
    monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str], seconds: int
):
    """As torchrun itself reads its options and variables."""
    set_environment(monkeypatch, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT PET_SHUTDOWN_TIMEOUT", environment)
    options = torchrun_options([*words, "train.py"])
    genuine = LaunchConfig(1, 1, 1, shutdown_timeout=options.shutdown_timeout)
    waiting = [sys.executable, "-c", "input(print(flush=True))", *words]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()  # it runs
        world = replace(ALONE, launcher=SimpleNamespace(pid=launcher.pid))
        assert parallel.shutdown_timeout(world) == genuine.shutdown_timeout == seconds
        launcher.communicate(b"\n")


def test_without_torchrun_nothing_kills_a_rank():
    assert parallel.shutdown_timeout(ALONE) is None


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A rank of torchrun whose parent is process 1, of which it reads these files."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(parallel, "launcher_pid", lambda: 1)
    # would end this process after the test
    monkeypatch.setattr(parallel.Launcher, "_watch", lambda launcher: None)
    files = {"/proc/1/comm": "python\n"}
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    return files


def test_a_rank_whose_torchrun_is_process_1_trains(tiny: Config, adopted: dict[str, str]):
    """As in a container."""
    adopted["/proc/1/maps"] = "7f00 r-xp /lib/libtorch_cpu.so"
    assert parallel.start(tiny).launcher.pid == 1


def test_a_rank_whose_torchrun_ended_while_it_started_does_not_train(
    tiny: Config, adopted: dict[str, str]
):
    """It would count the process that has adopted it as its torchrun."""
    adopted["/proc/1/maps"] = "7f00 r-xp /lib/libc.so.6"
    with pytest.raises(MachineError, match="torchrun, which started this process, has ended"):
        parallel.start(tiny)


LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
RESTARTS_ON_TWO_NODES = {
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    "environment, changes, sentence",
    [
        (LAUNCH, "parallel.shard=3", "parallel.shard=3 does not make 2 processes"),
        ({}, "fp8.all_gather=true", "fp8.all_gather=true needs several ranks"),
        (LAUNCH, "fp8.all_gather=true parallel.replicate=2", "each of 2 has them whole"),
        (LAUNCH, "fp8.all_gather=true fp8.head=true", "while the embedding shares its weight"),
        (LAUNCH | RESTARTS_ON_TWO_NODES, "", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ({"PATH": ""}, "parallel.compile=true", "install g\\+\\+"),
    ],
)
def test_what_does_not_fit_the_ranks_or_the_machine_is_refused(
    tiny: Config,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    changes: str,
    sentence: str,
):
    set_environment(monkeypatch, "", environment)
    with pytest.raises(UserError, match=sentence):
        parallel.start(changed(tiny, f"fp8.recipe=tensorwise {changes}"))


def test_rows_that_ranks_cannot_share_are_refused_with_float8_all_gather(tiny: Config):
    """torchao would not pad them."""
    mesh = {"shard": SimpleNamespace(size=lambda: 3)}
    three = SimpleNamespace(size=3, device=torch.device("cpu"), mesh=mesh, has_whole_weights=False)
    sentence = r"32 rows of layers.0.attn.out.weight do not divide among 3 ranks"
    with pytest.raises(UserError, match=sentence):
        build(tiny, "fp8.recipe=tensorwise fp8.all_gather=true model.n_ffn=96", three)


# ----------------------------------------------------------------------------------- recomputation


class CountOperators(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = "attention" if operator in parallel.ATTENTION else str(operator)
        self.names.append(name)
        return operator(*args, **(kwargs or {}))


@dataclass
class Watched:
    """A step with recomputation or without, and a pass without gradients."""

    activations: int  # calls of SiLU
    attentions: int
    kept_values: int  # for the backward pass, those of checkpointed regions aside
    names: list[str]  # of modules
    probe: str  # the lines that a probe writes


def watch(config: Config, recompute: bool, probe_file: Path) -> Watched:
    built = build(config, f"fp8.recipe=tensorwise parallel.recompute={recompute}")
    model, saved = built.model, []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    )
    with CountOperators() as count, keep:
        step(built)
        with torch.no_grad():
            model(torch.zeros(1, 32, dtype=torch.long))
    zero_gradients(model)
    probe = Probe(probe_file, model, selection.recipes(built.layers, 1.0), 64)
    probe(1, *tokens(0), 1.0)
    return Watched(
        count.names.count("aten.silu.default"),
        count.names.count("attention"),
        sum(saved),
        [name for name, _ in model.named_modules()],
        probe_file.read_text(),
    )


@pytest.fixture
def watched(tiny: Config, tmp_path: Path) -> tuple[Watched, Watched]:
    """Without recomputation, and with it."""
    off, on = (watch(tiny, recompute, tmp_path / f"{recompute}.jsonl") for recompute in (0, 1))
    return off, on


def test_recomputation_runs_a_block_twice_but_for_attention(watched: tuple[Watched, Watched]):
    """Two blocks, in a step and in a pass without gradients, which is not recomputed."""
    off, on = watched
    assert (off.activations, off.attentions) == (4, 4)
    assert (on.activations, on.attentions) == (6, 4)


def test_recomputation_keeps_less_than_half(watched: tuple[Watched, Watched]):
    """Of a block its input and attention's output alone."""
    off, on = watched
    assert on.kept_values < off.kept_values / 2


def test_recomputation_changes_no_name_and_nothing_that_a_probe_sees(
    watched: tuple[Watched, Watched],
):
    """The bits of every recipe: runtime/test_two_ranks.py."""
    off, on = watched
    assert on.names == off.names
    assert on.probe == off.probe and '"gradient"' in on.probe


def test_recomputation_takes_over_what_a_variant_adds_to_a_block(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    """As docs/extending.md's: an attribute and a module that the forward pass reads."""

    def initialise(self: Block, config: GPTConfig) -> None:
        init(self, config)
        self.is_parallel = True
        self.norm3 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self: Block, x, cos, sin, cache=None, mask=None) -> torch.Tensor:
        after_attention = x + self.attn(self.norm1(x), cos, sin, cache, mask)
        mlp_input = x if self.is_parallel else after_attention
        return after_attention + self.norm3(self.mlp(self.norm2(mlp_input)))

    init = Block.__init__
    monkeypatch.setattr(Block, "__init__", initialise)
    monkeypatch.setattr(Block, "forward", forward)
    monkeypatch.setattr(GPT, "counts", lambda _: {})
    gradients = []
    for recompute in (0, 1):
        built = build(tiny, f"parallel.recompute={recompute}")
        step(built)
        gradients.append({name: p.grad for name, p in built.model.named_parameters()})
    assert "layers.1.norm3.weight" in gradients[0]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def switches() -> tuple[bool, bool, bool]:
    """What deterministic=true switches on."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        inductor.deterministic,
    )


def test_a_recomputed_deterministic_run_is_the_same_run(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """From config key to weights; on a CPU neither changes a bit. What was switched on is switched
    off again."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    default = changed(tiny, "fp8.recipe=tensorwise")
    run(default)
    config = changed(default, "run=changed deterministic=true parallel.recompute=true")
    try:
        assert "torch: deterministic algorithms" in run(config)
        assert switches() == (True, True, True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        assert parallel.set_torch_flags(default, ALONE, []) == []
    assert switches() == (False, False, False)
    assert record(config) == record(default)


# --------------------------------------------------------------------------------------- no targets


@pytest.mark.parametrize("recipe", SHARDED)
def test_a_micro_batch_without_targets_has_a_loss_and_gradients_of_zero(tiny: Config, recipe: str):
    """As one rank of several may have it: no 0 / 0, and no scale of a gradient that is zero."""
    model = build(tiny, f"fp8.recipe={recipe}").model
    x, y = tokens()
    losses = model(x, torch.full_like(y, NO_TARGET))
    losses.sum().backward()
    assert losses.tolist() == [0.0] * len(x)
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
