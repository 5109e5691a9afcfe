"""Sharding, weights gathered as float8, our kernels, compilation by blocks: two gloo ranks do it
all once, in look(); the tests read what they saw. NaNs: fp8/test_sharded.py; faults:
test_faults.py."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import train
from fp8 import linears
from fp8.copies import refresh_weight_copies, zero_gradients
from fp8.precision import Precision
from fp8.selection import weights_cast_from
from lib.files import read_rows
from runtime import parallel
from runtime.checkpoint import gather, latest, load_model, read_manifest, run_on_rank0
from runtime.config import Config
from runtime.data import Data
from runtime.parallel import World
from runtime.tokenizer import load_tokenizer
from runtime.validation import evaluate
from tests.conftest import ALONE, changed, tiny_config
from tests.helpers.faults import back_to, on_ranks, record, rows, summary
from tests.helpers.fp8_models import tokens
from tests.runtime.test_parallel import SHARDED, Step, build, step

WIDE_HEADS = "model.head_size=48 model.n_kv_head=1"  # 96 channels of attention in a width of 32
START_TIMEOUT = 777  # seconds, as no default is


@dataclass
class Job:
    """What each of the two ranks is told."""

    folder: Path
    whole: Config  # six steps in FP8, its weights gathered as float8
    halves: Config  # the same, resumed after step 3 and probed

    def write(self, name: str, seen: object) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(seen))


# --------------------------------------------------------------------------------- what they do

# Each is called as NAME(job, world) -> what NAME.json is to hold; on both ranks, in this order.


def trained(job: Job, world: World) -> list[list[int]]:
    """Train both runs; the positions of stochastic rounding that each rank set."""
    with mock.patch.object(Precision, "set_position", autospec=True) as placed:
        train.train(job.whole, world)
        if world.is_main:  # as a kill after step 3 would leave it
            shutil.copytree(job.whole.run_dir, job.halves.run_dir)
            back_to(job.halves, 3)
        run_on_rank0(world, lambda: None)
        train.train(job.halves, world)
    return gather([call.args[1] for call in placed.call_args_list], world)


def timeouts(job: Job, world: World) -> list[float]:
    """Seconds after which a collective of each process group fails."""
    groups = (dist.group.WORLD, *world.mesh.get_all_groups(), world.checkpoint_group)
    options = [group._get_backend(world.device).options for group in groups]
    return [option._timeout.total_seconds() for option in options]


def local_size(job: Job, world: World) -> int:
    return world.local_size


GATHERED = {  # recipe, whether weights are freed after use, other settings
    "tensorwise": ("tensorwise", True, ""),
    "kept": ("tensorwise", False, ""),
    "gw_hp": ("tensorwise_gw_hp", True, ""),
    "wide_heads": ("tensorwise", True, WIDE_HEADS),
}


def gathered(job: Job, world: World) -> dict[str, dict]:
    """Of each of GATHERED: weights gathered as float8, the head's too, and plain ones."""
    seen = {}
    for name, (recipe, reshard, words) in GATHERED.items():
        shared = f"{words} model.tied=false parallel.reshard={reshard}"
        float8 = f"fp8.recipe={recipe} fp8.all_gather=true fp8.head=true"
        seen[name] = {
            "float8": one_forward(build(job.whole, f"{shared} {float8}", world), world),
            "plain": one_forward(build(job.whole, shared, world), world),
        }
    return seen


def one_forward(built: parallel.Built, world: World) -> dict[str, object]:
    """Bytes that this rank gives to the all-gathers of a forward pass; losses as trained, in BF16
    within a block that fails, after it; all-reduces of a refresh."""
    # until torch 2.12
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)
    model, precision, (x, y) = built.model, Precision(built.model), tokens(world.rank)
    sizes: list[int] = []

    def counted(output: torch.Tensor, sent_tensor: torch.Tensor, *args: object, **kwargs: object):
        sizes.append(sent_tensor.numel() * sent_tensor.itemsize)
        return original(output, sent_tensor, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(dist, name, counted):
        as_trained = model(x, y).tolist()
        sent = sum(sizes)
        with pytest.raises(KeyError), precision.in_bf16():
            in_bf16 = model(x, y).tolist()
            raise KeyError
        after_bf16 = model(x, y).tolist()
    precision.reshard()  # as a backward pass does
    with CommDebugMode() as mode:
        refresh_weight_copies(model)
    return {
        "sent": sent,
        "as_trained": as_trained,
        "in_bf16": in_bf16,
        "after_bf16": after_bf16,
        "all_reduces": mode.get_total_counts(),
    }


def kernels(job: Job, world: World) -> dict[str, list]:
    """Descents with torchao's Linears, with ours, and with ours recomputed."""
    return {
        name: descent(job.whole, world, f"fp8.head=true {words}")
        for name, words in {
            "torchao": "",
            "ours": "fp8.kernels=true",
            "recomputed": "fp8.kernels=true parallel.recompute=true",
        }.items()
    }


UNSHARDED = ("sharded", "kept", "replicated", "wide heads")


def unsharded(job: Job, world: World) -> list[dict[str, bool]]:
    """What is equal to models of one process, in each way of UNSHARDED."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return [
        equals_unsharded(job.whole, world),
        equals_unsharded(job.whole, world, reshard=False),
        equals_unsharded(job.whole, replace(world, mesh=mesh)),
        equals_unsharded(changed(job.whole, WIDE_HEADS), world),
    ]


def equals_unsharded(config: Config, world: World, reshard: bool = True) -> dict[str, bool]:
    """Loss, gradients over two micro-batches and their norm, against models of one process,
    gradients summed in fp32."""
    built = build(config, f"parallel.reshard={reshard}", world)
    together = step(built, world, micros=2, reshard=reshard)
    # rank 0's micro-batches, rank 1's
    alone = [step(build(config), seed=seed) for seed in (0, 1, 10, 11)]
    equal = {"loss": together.loss == alone[1 + 2 * world.rank].loss}
    expected = {}
    for name, gradient in together.gradients.items():
        parts = [micro.gradients[name] for micro in alone]
        # FSDP averages over the ranks.
        expected[name] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) / 2
        equal[name] = torch.equal(gradient, expected[name])
    due = norm_of(gradient.double() for gradient in expected.values())
    norm = parallel.clip_gradients(built.model, 1.0).item()
    clipped_norm = parallel.clip_gradients(built.model, 1.0).item()
    equal["norm"] = abs(norm / due - 1) < 1e-6
    equal["norm after clipping to 1"] = abs(clipped_norm - 1) < 1e-5
    return equal


def norm_of(tensors) -> float:
    """The L2 norm of all values of some tensors."""
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors]).norm().item()


def compiled(job: Job, world: World) -> dict[str, list]:
    """Descents eager and compiled; how many graphs that took."""
    eager = descent(job.whole, world, "model.n_layer=1")
    return {
        "eager": eager,
        "compiled": descent(job.whole, world, "model.n_layer=1 parallel.compile=true"),
        "graphs": [counters["stats"]["unique_graphs"]],
    }


def descent(config: Config, world: World, words: str) -> list[tuple[float, float]]:
    """Loss of all ranks and norm of all gradients of three steps downhill, tensorwise, then the
    loss in BF16."""
    built = build(config, f"fp8.recipe=tensorwise {words}", world)
    seen = []
    for _ in range(3):
        taken = step(built, world)
        loss = parallel.all_sum(torch.tensor(taken.loss), world).item()
        seen.append((loss, norm_of(taken.gradients.values())))
        with torch.no_grad():
            for weight in built.model.parameters():
                weight -= 1e-3 * weight.grad
        zero_gradients(built.model)
        refresh_weight_copies(built.model)
    with built.precision.in_bf16(), torch.no_grad():
        loss_in_bf16 = built.model(*tokens(10 * world.rank)).sum()
    seen.append((parallel.all_sum(loss_in_bf16, world).item(), 0.0))
    return seen


WAYS = (
    "parallel.recompute=true",
    "parallel.reshard=false",
    "parallel.recompute=true parallel.reshard=false",
)


def same(job: Job, world: World) -> dict[str, dict[str, bool]]:
    """Whether a step in each of WAYS has the bits of the default's, by recipe."""
    seen: dict[str, dict[str, bool]] = {}
    for recipe in SHARDED:
        default = step(build(job.whole, f"fp8.recipe={recipe}", world), world)
        steps = {
            way: step(build(job.whole, f"fp8.recipe={recipe} {way}", world), world) for way in WAYS
        }
        seen[recipe] = {way: is_same(default, taken) for way, taken in steps.items()}
    return seen


def is_same(a: Step, b: Step) -> bool:
    if a.loss != b.loss or a.gradients.keys() != b.gradients.keys():
        return False
    return all(torch.equal(a.gradients[name], b.gradients[name]) for name in a.gradients)


CAST = {
    "whole": "parallel.shard=1",
    "gathered": "parallel.shard=2",
    "gathered as float8": "parallel.shard=2 fp8.all_gather=true",
}


def cast_from(job: Job, world: World) -> dict[str, list[str]]:
    """Of each of CAST: what the weight of a block's Linear was when it was rounded to FP8, and what
    summary.json would say."""
    seen = {}
    for name, words in CAST.items():
        config = changed(job.whole, f"fp8.recipe=tensorwise fp8.all_gather=false {words}")
        shape = parallel.mesh_shape(config, 2, fits_whole=True)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        of_words = replace(world, mesh=mesh)
        built = build(config, f"fp8.recipe=tensorwise {words}", of_words)
        linear = built.model.layers[0].mlp.down
        if name == "whole":
            fp32 = linear.weight.detach().clone()
        weights = []
        linear.register_forward_pre_hook(
            lambda module, _, fp32=fp32, weights=weights: weights.append(
                source_of(module.weight, fp32)
            )
        )
        built.trained(*tokens())
        said = weights_cast_from(
            built.layers, config.fp8.all_gather, "cpu", of_words.has_whole_weights
        )
        seen[name] = [*weights, said]
    return seen


def source_of(weight: torch.Tensor, fp32: torch.Tensor) -> str:
    """What `weight`, as a Linear is given it, is rounded to FP8 from; where it is float8 already,
    by its values against those of the weight in fp32."""
    if not hasattr(weight, "_data"):
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}[weight.dtype]
    for name, values in (("fp32", fp32), ("bf16", fp32.bfloat16().float())):
        scaled = (values * weight._scale).clamp(-448, 448).to(weight._data.dtype)
        if torch.equal(scaled.view(torch.uint8), weight._data.view(torch.uint8)):
            return name
    return "another"


LOOKS = (trained, timeouts, local_size, gathered, kernels, unsharded, compiled, same, cast_from)


def look(job: Job) -> None:
    """One rank; rank 0 writes what both saw."""
    world = parallel.start(job.whole)
    for view in LOOKS:
        seen = view(job, world)
        if world.is_main:
            job.write(view.__name__, seen)
    parallel.finish(world, 0)


# --------------------------------------------------------------------------------- what they saw


@pytest.fixture(scope="module")
def ranks(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The configs of the runs, with `alone`, trained by this process; and what LOOKS returned."""
    folder = tmp_path_factory.mktemp("ranks")
    whole = changed(
        tiny_config(data_dir, folder / "out"),
        "run=whole fp8.recipe=tensorwise fp8.all_gather=true parallel.shard=2"
        f" parallel.start_timeout={START_TIMEOUT}",
    )
    halves = changed(whole, "run=halves probe.every=2 probe.tokens=64")
    on_ranks(2, look, Job(folder, whole, halves), folder / "log")
    alone = changed(whole, "run=alone fp8.all_gather=false parallel.shard=none")
    # as torchao's emulation, which the ranks have, multiplies
    with mock.patch.object(linears, "has_bf16_units", lambda: False):
        train.train(alone, ALONE)
    seen = {}
    for view in LOOKS:
        seen[view.__name__] = json.loads((folder / f"{view.__name__}.json").read_text())
    return SimpleNamespace(whole=whole, halves=halves, alone=alone, **seen)


@pytest.mark.parametrize("number", range(len(UNSHARDED)), ids=UNSHARDED)
def test_loss_gradients_and_norm_are_those_of_one_process(ranks: SimpleNamespace, number: int):
    equal = ranks.unsharded[number]
    assert len(equal) > 10
    assert [name for name, is_equal in equal.items() if not is_equal] == []


@pytest.mark.parametrize(
    "way, source", [("whole", "fp32"), ("gathered", "bf16"), ("gathered as float8", "fp32")]
)
def test_a_summary_says_what_weights_are_cast_from(ranks: SimpleNamespace, way: str, source: str):
    assert ranks.cast_from[way] == [source, source]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", SHARDED)
def test_recomputed_or_kept_gathered_a_step_has_the_same_bits(
    ranks: SimpleNamespace, recipe: str, way: str
):
    assert ranks.same[recipe][way]


def test_our_kernels_follow_torchao(ranks: SimpleNamespace):
    torchao, ours = torch.tensor(ranks.kernels["torchao"]), torch.tensor(ranks.kernels["ours"])
    assert ours[2, 0] < 0.99 * ours[0, 0], "it descends"
    torch.testing.assert_close(ours[0, 0], torchao[0, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[:, 0], torchao[:, 0], rtol=3e-3, atol=0)


def test_our_kernels_recomputed_have_the_same_bits(ranks: SimpleNamespace):
    assert ranks.kernels["recomputed"] == ranks.kernels["ours"]


def test_compiled_by_blocks_ranks_follow_eager_ones(ranks: SimpleNamespace):
    """The default of every GPU config: blocks, head and loss compiled apart, under FSDP2."""
    eager, compiled = (torch.tensor(ranks.compiled[how]) for how in ("eager", "compiled"))
    assert not torch.equal(compiled[:3], eager[:3]) and eager[2, 0] < eager[0, 0]
    torch.testing.assert_close(compiled[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(compiled[:, 1], eager[:, 1], rtol=2e-2, atol=0)


def test_a_block_and_the_head_are_compiled_once_each(ranks: SimpleNamespace):
    assert ranks.compiled["graphs"] == [2]


def test_no_collective_times_out_before_the_watchdog(ranks: SimpleNamespace):
    """One that did would end the run before the cause is printed."""
    assert set(ranks.timeouts) == {2.0 * START_TIMEOUT}


def test_ranks_know_how_many_of_them_share_the_machine(ranks: SimpleNamespace):
    assert ranks.local_size == 2


def test_a_resumed_run_ends_in_the_same_bits_though_it_is_probed(ranks: SimpleNamespace):
    """Scales not renewed after the load or an update would show here, and any trace of the
    probes."""
    assert record(ranks.whole) == record(ranks.halves)


def test_each_micro_batch_has_its_own_positions_of_stochastic_rounding(ranks: SimpleNamespace):
    """Six steps of 512 tokens in micro-batches of 128, then steps 4 to 6 again."""
    for rank, positions in enumerate(ranks.trained):
        whole = list(range(128 * rank, 6 * 512, 2 * 128))
        assert positions == whole + whole[6:]


def test_one_rank_writes_the_probes_of_all_linears(ranks: SimpleNamespace):
    probes = read_rows(ranks.halves.run_dir / "probe.jsonl")
    linears = [row for row in probes if row["kind"] == "linear"]
    assert [row["step"] for row in linears] == 8 * [4] + 8 * [6]
    assert len({row["layer"] for row in linears}) == 8
    weights = load_model(ranks.halves.run_dir)[0].state_dict()
    for row in linears[8:]:  # of step 6, before the last save
        assert row["weight"]["amax"] == weights[f"{row['layer']}.weight"].abs().max().item()
        assert row["gradient"]["amax"] > 0


def test_ranks_train_what_one_process_trains(ranks: SimpleNamespace):
    """One process rounds its weights from fp32 to float8 as well, so that the first loss agrees to
    the last bit; without the float8 all-gather, the ranks would round to BF16 in between."""
    alone, together = rows(ranks.alone), rows(ranks.whole)
    assert alone[0]["loss"] == together[0]["loss"]
    assert alone[0]["grad_norm"] == pytest.approx(together[0]["grad_norm"], rel=1e-5)
    losses = [row["loss"] for row in alone]
    assert losses == pytest.approx([row["loss"] for row in together], rel=1e-3)
    assert losses[-1] < losses[0] - 0.5, "there was something to learn"


def test_the_checkpoint_of_ranks_is_that_of_one_process(ranks: SimpleNamespace):
    """Names, shapes and dtypes of its tensors."""
    alone, together = (read_manifest(latest(c.run_dir)) for c in (ranks.alone, ranks.whole))
    assert alone["tensors"] == together["tensors"]


def test_no_class_of_torchao_is_in_a_checkpoint(ranks: SimpleNamespace):
    for file in latest(ranks.whole.run_dir).iterdir():
        assert b"torchao" not in file.read_bytes(), file


def test_one_process_and_bf16_weights_give_the_summarys_loss(ranks: SimpleNamespace):
    model, config = load_model(ranks.whole.run_dir)
    data = Data(config, load_tokenizer("byte").sha256)
    loss = evaluate(model, data.val, data.weights, config.data.micro_batch, torch.device("cpu"))
    summary_of_ranks = summary(ranks.whole)
    assert loss.loss == summary_of_ranks["loss_bf16"] != summary_of_ranks["loss_as_trained"]


@pytest.mark.parametrize("way", ["kept", "gw_hp", "wide_heads"])
def test_an_evaluation_in_bf16_ends_even_after_an_error(ranks: SimpleNamespace, way: str):
    """Weights that are gathered as float8 evaluate in BF16 as plain ones, and train on as
    before."""
    float8, plain = ranks.gathered[way]["float8"], ranks.gathered[way]["plain"]
    assert float8["in_bf16"] == plain["in_bf16"] == plain["as_trained"] == plain["after_bf16"]
    assert float8["as_trained"] == float8["after_bf16"] != float8["in_bf16"]


@pytest.mark.parametrize("way", ["kept", "gw_hp", "wide_heads"])
def test_weights_gathered_as_float8_send_half(ranks: SimpleNamespace, way: str):
    """Each of the 2 ranks sends half: a byte less for each of the Linears' values, BF16 else, three
    less for the head's, fp32."""
    model = changed(ranks.whole, GATHERED[way][2]).model
    attention = 4 * model.n_embd
    if way == "wide_heads":  # q; k and v; the output
        attention = (2 + 2 * 1 + 2) * 48
    linears = model.n_layer * model.n_embd * (attention + 3 * model.n_ffn)
    float8, plain = ranks.gathered[way]["float8"], ranks.gathered[way]["plain"]
    saved = 2 * (plain["sent"] - float8["sent"])
    assert saved == linears + 3 * model.vocab_padded * model.n_embd


@pytest.mark.parametrize("way", GATHERED)
def test_scales_of_all_gathered_weights_take_one_all_reduce(ranks: SimpleNamespace, way: str):
    assert ranks.gathered[way]["float8"]["all_reduces"] == 1


def test_weights_freed_after_use_have_the_bits_of_kept_ones(ranks: SimpleNamespace):
    assert ranks.gathered["tensorwise"] == ranks.gathered["kept"]
