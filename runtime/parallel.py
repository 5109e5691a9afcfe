"""Build the model and optimizer of a run on one process or many: process group, mesh, sharding or
replicas, recomputation, compilation."""

import contextlib
import inspect
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8 import bf16_in_fp32, producers
from fp8.convert import convert, keep_bf16_copies
from fp8.inductor_repair import repair_clamps
from fp8.matmul import has_bf16_units
from fp8.precision import Precision
from fp8.recipes import RECIPES, needs_precision_casts
from fp8.selection import Casting, Layer, casting
from fp8.sharded import is_wrapped
from lib.errors import MachineError, UserError
from lib.machine import keep_freed_memory
from lib.sharding import is_dtensor, is_fsdp_module
from model import GPT, Block
from runtime import documents, optim
from runtime.config import Config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# of activations in both arms; weights, gradients and moments are fp32
COMPUTE_DTYPE = torch.bfloat16

SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's default, after which it kills workers that it told to stop
LAUNCHER_CHECK_S = 0.5
FIRST_RANK_S = 60.0  # by which ranks of a machine may differ in when they have read their command


# --------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class World:
    """This process's place among all. With size 1 there is no process group, and every collective
    is a no-op."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    mesh: "DeviceMesh | None" = None  # ("replicate", "shard"), or None with one process
    # processes on this machine, which share its disks; 1 where the launcher does not tell
    local_size: int = 1
    # gloo; a save in the background must not meet the step's own
    checkpoint_group: dist.ProcessGroup | None = None
    launcher: "Launcher | None" = None  # the torchrun that started this process, None without one

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def has_whole_weights(self) -> bool:
        """Whether each rank holds all of every weight: one process, or replicas."""
        return self.mesh is None or self.mesh["shard"].size() == 1

    def describe(self) -> list[str]:
        """Who holds the weights, as a line of the log; none with one process."""
        if self.mesh is None:
            return []
        if self.has_whole_weights:
            return [
                f"ranks: {self.size} replicas, each with whole weights; one fp32 gradient a step is"
                " averaged between them (parallel.shard=N shares weights instead)"
            ]
        replicas, shards = self.mesh.shape
        copies = f"{replicas} copies of the weights, each" if replicas > 1 else "weights"
        return [f"ranks: {copies} sharded over {shards} ranks (FSDP2)"]

    @property
    def share_of_machine(self) -> tuple[int, int]:
        """(which, of how many) part of the work that this machine's processes divide among
        themselves: (0, 1) is all of it."""
        return (self.local_rank, self.local_size) if self.local_size > 1 else (0, 1)


# Whether a model fits a device when each of so many ranks holds it whole; by default it does.
Fits = Callable[[int, torch.device], bool]


def start(config: Config, fits_whole: Fits = lambda size, device: True) -> World:
    """Join the processes that torchrun started, or be the only one. `fits_whole` decides where the
    config leaves parallel.shard to it. Raises UserError where the ranks do not fit, MachineError
    where torchrun has ended."""
    size, rank, local_rank = read_launch(os.environ)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    check_world(config, size, device)
    check_machine(config, device, _local_size(size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    launcher = Launcher() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if size == 1:
        return World(0, 0, 1, device, launcher=launcher)
    return _join(config, device, size, rank, local_rank, launcher, fits_whole)


def check_world(config: Config, size: int, device: torch.device) -> None:
    """Raises UserError where `size` processes, on devices such as this one, cannot train
    `config`."""
    p = config.parallel
    replicas, shard = mesh_shape(config, size, fits_whole=True)
    if replicas * shard != size:
        raise UserError(
            f"parallel.replicate={p.replicate} x parallel.shard={p.shard or 'none'} does not make"
            f" {size} processes: parallel.shard must divide the number that torchrun starts, and"
            " their product be that number; none leaves it to the start"
        )
    config.accumulation(size)
    if config.fp8.all_gather and shard == 1:
        raise UserError(
            "fp8.all_gather=true needs several ranks that share the weights, but each of"
            f" {size} has them whole: set fp8.all_gather=false, or start more processes with"
            " torchrun"
        )
    if config.fp8.all_gather and config.fp8.head and config.model.tied:
        raise UserError(
            "fp8.all_gather=true cannot gather the head as float8 while the embedding shares its"
            " weight: set fp8.head=false, model.tied=false or fp8.all_gather=false"
        )
    if p.cpu_fp32 is True and device.type != "cpu":
        raise UserError(f"parallel.cpu_fp32=true is for CPUs, not for {device.type}: drop it")


def mesh_shape(config: Config, size: int, fits_whole: bool) -> tuple[int, int]:
    """(replicas, ranks that share one of them) of `size` processes. Where the config names neither,
    each rank is a replica if the model fits one device whole; weights that are gathered as float8
    are sharded. The product is not `size` where the config does not fit it."""
    p = config.parallel
    if p.shard is not None:
        replicas = size // p.shard if p.replicate == 1 else p.replicate
        return replicas, p.shard
    if p.replicate > 1:
        return p.replicate, size // p.replicate
    if fits_whole and not config.fp8.all_gather:
        return size, 1
    return 1, size


def check_machine(config: Config, device: torch.device, local_size: int = 1) -> None:
    """Raises UserError where this machine, or the way in which torchrun was started, cannot do what
    is asked for; local_size: World's."""
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    if config.parallel.compile and not torch.cuda.is_available() and not has_compiler:
        raise UserError(
            "parallel.compile needs a C++ compiler on a CPU: install g++, or set"
            " parallel.compile=off"
        )
    # Nodes can disagree on the count of restarts, which is part of the keys in a lasting store
    # (pytorch#135712): a hang.
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 0))
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    is_store_lasting = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if nodes > 1 and restarts > 0 and is_store_lasting:
        raise UserError(
            "torchrun --max-restarts over several nodes comes up again only with a fresh store for"
            " each attempt: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node before"
            " torchrun, or drop --max-restarts"
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        # The same on all ranks of the machine: the first one speaks for them. A launcher that shows
        # each process a GPU of its own leaves LOCAL_WORLD_SIZE as it was.
        has_own_gpu = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
        processes = device.index + 1 if has_own_gpu else max(device.index + 1, local_size)
        if processes > count:
            raise UserError(
                f"torchrun started {processes} processes on this machine, which has {count} GPUs:"
                f" give --nproc_per_node={count}"
            )


def wait_for_first_rank() -> None:
    """On a rank that torchrun started beside others of its machine: wait until the first of them
    has told the user's mistake, which they share, and torchrun ends this process for it. The first
    rank does not wait, nor does a process without torchrun.

    Ending at once would have torchrun end the first rank before it speaks. Returns after
    FIRST_RANK_S where that one goes on without the mistake, which is then to be told here."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(FIRST_RANK_S)


def _join(
    config: Config,
    device: torch.device,
    size: int,
    rank: int,
    local_rank: int,
    launcher: "Launcher | None",
    fits_whole: Fits,
) -> World:
    """Meet the other processes: groups for the step and for checkpoints, the mesh of devices."""
    p = config.parallel
    # Twice the watchdog's longest time-out: it acts first, by heartbeats of its own, and can name
    # the cause.
    patience = timedelta(seconds=2 * p.start_timeout)
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=own_store(),
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device if device.type == "cuda" else None,
    )
    checkpoint_group = dist.new_group(backend="gloo", timeout=patience)
    _refuse_other_settings(config, size, checkpoint_group)
    does_fit = torch.tensor(float(fits_whole(size, device)))
    dist.all_reduce(does_fit, dist.ReduceOp.MIN)  # ranks may have unequal GPUs
    shape = mesh_shape(config, size, fits_whole=bool(does_fit))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # made with torch's default: 10 minutes for NCCL
        transport = group._get_backend(device)
        if hasattr(transport, "_set_default_timeout"):  # torch has no public call for it
            transport._set_default_timeout(patience)
    return World(
        rank=rank,
        local_rank=local_rank,
        size=size,
        device=device,
        mesh=mesh,
        local_size=_local_size(size),
        checkpoint_group=checkpoint_group,
        launcher=launcher,
    )


def _refuse_other_settings(config: Config, size: int, group: dist.ProcessGroup) -> None:
    """Raises UserError, on all ranks, where one was started with other settings than rank 0, as by
    another command or config file on its machine. Replicas would differ after the first update;
    shards would train on without a word."""
    own_settings = (socket.gethostname(), config.settings_of_job())
    of_ranks = [own_settings for _ in range(size)]
    dist.all_gather_object(of_ranks, own_settings, group=group)
    first_host, first_settings = of_ranks[0]
    for rank, (host, settings) in enumerate(of_ranks):
        changes = [
            f"{key}={settings.get(key)} on rank {rank}, {first_settings.get(key)} on rank 0"
            for key in first_settings | settings
            if settings.get(key) != first_settings.get(key)
        ]
        if changes:
            raise UserError(
                f"rank {rank} (host {host}) was started with other settings than rank 0 (host"
                f" {first_host}): {'; '.join(changes)}; give every machine the same command and"
                " config files"
            )


def _local_size(size: int) -> int:
    """Processes on this machine, of the job's `size`; 1 unless LOCAL_RANK and LOCAL_WORLD_SIZE are
    both set and fit each other.

    Ranks that are started with RANK and WORLD_SIZE alone may have a machine each. A rank that
    wrongly counts on others leaves shards unhashed; one that does all of the work itself only takes
    longer."""
    local_rank, local_size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if size == 1 or local_rank is None or local_size is None:
        return 1
    if not 0 <= int(local_rank) < int(local_size) <= size:
        return 1
    return int(local_size)


def read_launch(variables: Mapping[str, str]) -> tuple[int, int, int]:
    """WORLD_SIZE, RANK and LOCAL_RANK as a launcher has set them; 1, 0, 0 without one. Raises
    UserError where they are no numbers, contradict each other, or lack what ranks need to find each
    other."""
    numbers = {}
    for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        text = variables.get(name, default)
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or (name, int(text)) == ("WORLD_SIZE", 0):
            raise UserError(
                f"the environment variable {name}={text!r} is no number of a rank or of ranks:"
                " torchrun sets it; unset it to start one process"
            )
        numbers[name] = int(text)
    size, rank, local_rank = numbers.values()
    if size == 1:
        return size, rank, local_rank
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise UserError(
            f"the environment variable WORLD_SIZE={size} asks for {size} processes, but"
            f" {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: start them with"
            f" torchrun --nproc_per_node={size} train.py FILE, which sets all, or unset WORLD_SIZE"
            " to start one process"
        )
    if rank >= size:
        raise UserError(
            f"the environment variables RANK={rank} and WORLD_SIZE={size} contradict each other:"
            f" ranks go from 0 to {size - 1}, as torchrun sets them"
        )
    if not re.fullmatch(r"\d{1,5}", variables["MASTER_PORT"], re.ASCII):
        raise UserError(
            f"the environment variable MASTER_PORT={variables['MASTER_PORT']!r} is no port, such as"
            " 29500"
        )
    return size, rank, local_rank


class Launcher:
    """The torchrun that started this process. Its end is told to on_end(what), by a thread; until
    that is set, while there is nothing to save, this process ends at once. Raises MachineError
    where it has ended already.

    It is looked at rather than asked for by PR_SET_PDEATHSIG, which also tells of the end of the
    mere thread that started a worker, and misses a launcher that has ended before it is called."""

    def __init__(self) -> None:
        self.pid = launcher_pid()
        self.on_end: Callable[[str], None] = _leave_at_once
        if _adopts_orphans(self.pid):
            raise MachineError("torchrun, which started this process, has ended: start it again")
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def _watch(self) -> None:
        while launcher_pid() == self.pid:
            time.sleep(LAUNCHER_CHECK_S)
        self.on_end(f"the end of torchrun (process {self.pid}), which had started this rank")


def _leave_at_once(reason: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(
            2,
            f"\ntrain.py: {reason}: left at once, before the first step; start it again\n".encode(),
        )
    os._exit(1)


def _adopts_orphans(pid: int) -> bool:
    """Whether a process is the system's first one, or a systemd, and no torchrun, which may be the
    first of a container."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return (pid == 1 or name == "systemd") and "libtorch" not in Path(
            f"/proc/{pid}/maps"
        ).read_text(errors="replace")
    except PermissionError:  # of another user, as a user's torchrun is not
        return True
    except OSError:  # no /proc
        return False


def launcher_pid() -> int:
    """The parent of this session's first process, which torchrun starts: this process, or a shell
    around it. Another number than before: that parent has ended, and its workers with no one to
    supervise them belong to another process now."""
    # no /proc, or that process has ended
    with contextlib.suppress(OSError, ValueError, IndexError):
        of_first = Path(f"/proc/{os.getsid(0)}/stat").read_text()
        # "123 (python) S 45 ...": the parent is 45
        return int(of_first.rpartition(")")[2].split()[1])
    return os.getppid()


def shutdown_timeout(world: World) -> float | None:
    """Seconds after which torchrun, told to stop, kills its workers; None where no torchrun started
    this process. By its command line, else its variables, else its default."""
    if world.launcher is None:
        return None
    settings = _launcher_options(world.launcher.pid, "--shutdown-timeout", "--shutdown_timeout")
    for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        settings.append(os.environ.get(name, ""))
    for setting in settings:
        if setting:
            return float(setting) if setting.isdigit() else SHUTDOWN_TIMEOUT_S
    return SHUTDOWN_TIMEOUT_S


def _launcher_options(pid: int, *names: str) -> list[str]:
    """The values of the options of these names on the command line of process `pid`."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    words = text.replace("=", "\0").split("\0")
    return [value for word, value in pairwise(words) if word in names]


def own_store() -> dist.Store:
    """Torchrun's store, with keys of this attempt's own. The agent's store outlives the workers,
    and gloo would otherwise read the addresses of dead ones; a store that rank 0 hosts itself is
    new at each attempt, and nodes may count otherwise."""
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt{attempt}", store)


def finish(world: World, code: int) -> None:
    """Exit with `code`. With several processes the interpreter's own exit is skipped: about one
    finished gloo job in fifty aborts there ("terminate called without an active exception"), and
    torchrun would take it for a failure."""
    if world.size == 1:
        sys.exit(code)
    if code == 0 and dist.is_initialized():
        # a rank that died here, after all work, has an exit code of its own
        with contextlib.suppress(RuntimeError):
            dist.barrier()
            dist.destroy_process_group()
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(code)


def all_sum(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Sum `tensor` over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_concatenate(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Stack equally shaped tensors of all ranks: (...) -> (size, ...)."""
    if world.size == 1:
        return tensor[None]
    parts = tensor.new_empty(world.size, *tensor.shape)
    dist.all_gather(list(parts), tensor)
    return parts


# ------------------------------------------------------------------------------------------- build


@dataclass
class Built:
    """A model in memory whose weights and buffers are uninitialised: fill them by
    model.init_weights(seed, assign) or from a checkpoint, then call precision.after_update()."""

    model: GPT
    # the model, or what reduces its gradients over replicas: a training step calls it
    trained: nn.Module
    optimizer: optim.Optimizer
    # gives a parameter, sharded or not, its full value
    assign: Callable[[torch.Tensor, torch.Tensor], None]
    layers: list[Layer]  # the choice of recipe for every Linear
    cast_by: Casting  # what fp8.kernels has come to
    loss_scale: float  # what a micro-batch's summed loss is multiplied by before its backward pass
    flags: list[str]  # lines for people: global switches of torch, blocks that write FP8
    precision: Precision  # what the training loop asks of FP8


def multiplies_in_fp32(config: Config, device: torch.device) -> bool:
    """Whether BF16 values are multiplied in fp32: parallel.cpu_fp32."""
    choice = config.parallel.cpu_fp32
    if choice == "auto":
        return device.type == "cpu" and not has_bf16_units()
    return choice


def build(config: Config, world: World) -> Built:
    """Build on the meta device, so that no rank ever holds the whole model: swap the Linears,
    shard, compile, then allocate. Raises UserError where the config's fp8 or parallel does not fit
    this model or machine."""
    model = GPT.on_meta(config.model, COMPUTE_DTYPE)
    # mean over the step's tokens; ranks' gradients are averaged, so x size
    loss_scale = world.size / config.data.tokens_per_step
    cast_by = casting(config.fp8, world.device.type, world.has_whole_weights)
    layers = convert(model, config.fp8, loss_scale, world.device.type, cast_by.is_ours)
    is_in_fp32 = multiplies_in_fp32(config, world.device)
    if is_in_fp32:
        bf16_in_fp32.convert(model)
    elif world.has_whole_weights:
        keep_bf16_copies(model)
    if documents.uses_flex(config, world.device):
        documents.use_flex(model)
    model.counts()  # its check of the parameters: here rather than after the run
    flags = set_torch_flags(config, world, [layer.recipe for layer in layers if layer.recipe])
    if config.parallel.recompute:
        for number, block in enumerate(model.blocks()):
            model.layers[number] = RecomputedBlock(block)
    if is_in_fp32 and config.parallel.cpu_fp32 == "auto":
        flags.append("matmuls: BF16 values in fp32, as this CPU has no BF16 units (cpu_fp32=auto)")
    if config.fp8.scaling == "bounded":
        flags.append(producers.describe(model))
    shard(model, world, config.parallel.reshard)
    if config.parallel.compile:
        compile_model(model, is_whole=config.parallel.compile == "model" and world.size == 1)
    model.to_empty(device=world.device)
    model.tie()

    precision = Precision(model, config.seed, world.size)
    if world.size == 1 and config.accumulation(1) > 1:
        precision.keep_gradients()
    n_replicas = world.size if world.has_whole_weights else 1
    optimizer = optim.build_optimizer(model, config.optim, n_replicas)
    return Built(
        model=model,
        trained=replicated(model, world),
        optimizer=optimizer,
        assign=partial(_assign, device=world.device),
        layers=layers,
        cast_by=cast_by,
        loss_scale=loss_scale,
        flags=flags,
        precision=precision,
    )


def _assign(p: torch.Tensor, full: torch.Tensor, device: torch.device) -> None:
    """Give a parameter, sharded or not, its full value."""
    if is_dtensor(p):
        from torch.distributed.tensor import distribute_tensor

        # each rank has the same full value and keeps its part: nothing is sent
        full = distribute_tensor(full.to(device), p.device_mesh, p.placements, src_data_rank=None)
    p.copy_(full)


def set_torch_flags(config: Config, world: World, recipes: Collection[str]) -> list[str]:
    """Set every process-wide switch of torch that a run depends on, also back to off; returns those
    set as lines for people.

    recipes: those that Linears were converted by, which fp8.recipe=auto does not tell."""
    flags = []
    # Makes a GPU repeat its bits, Inductor choose no kernel by a measurement; an operation that
    # cannot raises where it is called.
    torch.use_deterministic_algorithms(config.deterministic)
    # torch would also fill every new tensor, to show reads of uninitialised memory: a write of all
    # that is ever allocated.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = config.deterministic
    if config.deterministic:
        # cuBLAS may split a sum by the memory that is free, but not with a workspace of fixed size.
        # Read at its first call.
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        flag = (
            f"deterministic algorithms, CUBLAS_WORKSPACE_CONFIG={workspace}, cudnn.deterministic,"
            " inductor.deterministic"
        )
        if world.device.type == "cuda":
            flag += ", attention by FlashAttention 2 instead of cuDNN"
        flags.append(flag)
    if world.device.type == "cuda":
        # Where dequantised values are multiplied in fp32, TF32 would round them.
        needs_fp32 = any(
            RECIPES[recipe].is_emulated_on_gpus and RECIPES[recipe].needs_fp32_emulation
            for recipe in recipes
        )
        torch.set_float32_matmul_precision("highest" if needs_fp32 else "high")
        if config.parallel.compile and recipes and repair_clamps():
            flags.append(
                "inductor writes clamps as tl.where (else float8 stores may be wrong: triton#11111)"
            )
        if config.parallel.compile and needs_precision_casts(recipes):
            import torch._inductor.config as inductor

            inductor.emulate_precision_casts = True
            flags.append(
                "inductor.emulate_precision_casts (without it rowwise turns NaN behind a fused"
                " RMSNorm: pytorch#150859)"
            )
    return [f"torch: {flag}" for flag in flags]


# Of recomputed blocks its output is kept, as many bytes as a block's input, to spare its second
# run.
ATTENTION = [
    op.default
    for op in (
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    )
] + [torch.ops.higher_order.flex_attention]


class RecomputedBlock(Block):
    """A Block that keeps only its input and attention's output for the backward pass, and runs the
    rest of its forward pass again there, to the same values. It stands in the place of another one,
    whose modules and attributes it takes over, a variant's own too: every name in the state dict
    stays."""

    def __init__(self, block: Block):
        nn.Module.__init__(self)  # Block's would make new ones
        vars(self).update(vars(block))

    def forward(self, x, cos, sin, cache=None, mask=None):
        if cache is not None or not torch.is_grad_enabled():
            return super().forward(x, cos, sin, cache, mask)
        # Nothing in a block draws random numbers, so no generator's state needs to be saved and
        # restored.
        return checkpoint(
            super().forward,
            x,
            cos,
            sin,
            None,
            mask,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, ATTENTION),
        )


def shard(model: GPT, world: World, reshard: bool = True) -> None:
    """FSDP2 over the mesh, block by block; whole weights need no wrapper.

    Blocks are gathered in the compute dtype, gradients reduced in fp32: BF16 sums over many ranks
    lose the small ones. Embedding and head are gathered in fp32 and cast by the model, or the
    gradients of a tied matrix would be added up, token by token, in BF16. Inputs are left alone,
    since the RoPE tables must stay fp32. Without `reshard` a block's gathered weights stay until
    its backward pass, also after a forward pass alone: reshard() before weights are changed.

    Raises UserError where a weight to be gathered as float8 does not divide evenly: torchao gathers
    no padded shards."""
    if world.mesh is None or world.has_whole_weights:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = world.mesh["shard"].size()
    for name, p in model.named_parameters():
        if is_wrapped(p) and p.shape[0] % ranks:
            raise UserError(
                f"fp8.all_gather=true needs equal shards, but the {p.shape[0]} rows of {name} do"
                f" not divide among {ranks} ranks: choose parallel.shard such that they do, or"
                " fp8.all_gather=false"
            )
    mesh = world.mesh if world.mesh["replicate"].size() > 1 else world.mesh["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, param_dtype=None))


def replicated(model: GPT, world: World) -> nn.Module:
    """What averages the gradients of `model` over replicas, once a step and in fp32, beside the
    backward pass of the last micro-batch: DistributedDataParallel. The model itself where no other
    rank holds it whole.

    Gradients are not added up within their matmul, as one process does: the reduction waits for
    autograd to hand each over."""
    if world.size == 1 or not world.has_whole_weights:
        return model
    # Blocks are compiled one by one: their gradients come early enough without its splits, which
    # break on FP8 (pytorch#158936).
    torch._dynamo.config.optimize_ddp = False
    device_ids = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model,
        device_ids=device_ids,
        init_sync=False,  # init_weights() and checkpoints give all ranks the same
        gradient_as_bucket_view=True,
        **_without_sending_buffers(),
    )


def _without_sending_buffers() -> dict[str, Any]:
    """The option by which DistributedDataParallel does not send buffers before each forward pass:
    RoPE's tables are the same on all ranks. torch 2.13 gave it another name and warns of the old
    one."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    if "forward_sync_buffers" in options:
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def compile_model(model: GPT, is_whole: bool) -> None:
    """In place, so that the names in the state dict stay: the whole model, or block by block, as
    FSDP2 needs it."""
    import torch._functorch.config as functorch

    # Without, cscale and our kernels are traced anew at each start. A changed backward() changes
    # the cache's key.
    functorch.autograd_cache_allow_custom_autograd_functions = True
    for module in [model] if is_whole else model.blocks():
        module.compile(dynamic=False, fullgraph=True)
    # head and cross-entropy are one more piece: eager, they would hold three copies of the logits
    if not is_whole:
        compiled: Any = torch.compile(model.token_losses, dynamic=False, fullgraph=True)
        model.token_losses = compiled  # type: ignore[method-assign]


def sync_gradients(model: nn.Module, is_last: bool, reshard: bool = True) -> None:
    """Reduce the gradients of Built.trained over the ranks in the next backward pass, which is that
    of a step's last micro-batch (is_last), or only add them up. reshard: as given to shard(); if
    False, gathered weights stay until the last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last
    if is_fsdp_module(model):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last or reshard)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients of Built.trained to a global L2 norm of at most `max_norm`; returns the
    norm before, on the device, (), the same on all ranks."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if is_dtensor(norm):
        norm = norm.full_tensor()
    replicas = _group_of_replicas(model)
    if replicas is not None:
        norm = _largest(norm, replicas)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _group_of_replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the same gradients as this one; None where there are no others."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    p: Any = next(model.parameters())
    if is_dtensor(p) and p.device_mesh.ndim == 2:  # ("replicate", "shard")
        return p.device_mesh.get_group("replicate")
    return None


def _largest(norm: torch.Tensor, replicas: dist.ProcessGroup) -> torch.Tensor:
    """Of the norms that replicas have of equal gradients, which all must clip and judge by alike.
    They are equal too, unless a replica is at fault, or sums in another order: a GPU of another
    kind, or a ring of ranks on another machine. NaN where one of them is."""
    norms = [torch.empty_like(norm) for _ in range(replicas.size())]
    dist.all_gather(norms, norm, replicas)
    return torch.stack(norms).max()
