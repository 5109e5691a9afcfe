"""What only a GPU can show; run with `pytest -m gpu` on an H100-class machine. It needs torch,
torchao, numpy and pytest."""

import gzip
import importlib.util
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8 import producers
from fp8.copies import refresh_weight_copies
from fp8.delayed import DelayedScales
from fp8.head_loss import cross_entropy_grad
from fp8.kernels import cast_both
from fp8.linears import PrototypeLinear
from fp8.matmul import add_weight_grad
from fp8.recipes import from_label
from runtime import plan
from runtime.checkpoint import Saver, checkpoints, load, load_model, read_manifest, step_of
from runtime.config import CheckpointConfig, Config, load_config
from runtime.guard import diagnose
from runtime.parallel import World
from tests.conftest import ROOT, changed, process, write_config, write_source
from tests.fp8.test_head_loss import head_case, head_loss
from tests.fp8.test_kernels import step
from tests.fp8.test_linears import E4M3, E5M2, reference
from tests.fp8.test_producer_kernels import moderate
from tests.fp8.test_triton_kernels import entropy_case, entropy_grad
from tests.helpers.faults import back_to, record, rows, summary
from tests.helpers.fp8_models import (
    KERNELS,
    NATIVE,
    build,
    distance,
    linear,
    operands,
    passes,
    tokens,
)
from tests.helpers.processes import made_once
from tests.helpers.triton_kernels import is_near, quantised, same
from tests.runtime.test_run import watched_steps

pytestmark = pytest.mark.gpu


KNOWN_BEFORE = ("delayed", "bounded")  # values of fp8.scaling


def model_on_gpu(recipe: str, is_compiled: bool = True):
    """A model of two blocks, converted, with a batch for it."""
    model = build(recipe, "cuda", n_embd=256, n_ffn=512, n_ctx=128, vocab_size=50257)[0].cuda()
    if is_compiled:
        model.compile(dynamic=False, fullgraph=True)
    ids = torch.randint(50257, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
    return model, ids[:, :-1], ids[:, 1:]


def passes_on_gpu(label: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor):
    holder = linear(w, label, "cuda").cuda()
    refresh_weight_copies(holder)
    return passes(holder, x.cuda(), g.cuda())


def trained(config: Config, folder: Path, *arguments: object):
    """What train.py prints, as a process of its own."""
    done = process("train.py", write_config(config, folder / f"{config.run}.py"), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


FAST = [
    f"{label}+fast_backward" for label in ("tensorwise", "rowwise", "cscale", "tensorwise+kernels")
]


@pytest.mark.parametrize("label", [*NATIVE, *KERNELS, *FAST])
def test_every_recipes_matmuls_against_fp64(label: str):
    for kind in ("random", "outlier"):
        x, w, g = operands(kind)
        w = w.bfloat16().float() if label == "mxfp8" else w  # Blackwell's takes no other
        got = passes_on_gpu(label, x, w, g)
        want = reference(from_label(label).recipe, x, w, g)
        assert all(
            distance(on_gpu.cpu(), exact) < 1e-2 for on_gpu, exact in zip(got, want, strict=True)
        ), kind


@pytest.mark.parametrize("recipe", [*NATIVE, "blockwise"])
def test_a_compiled_recipe_is_near_eager_and_near_bf16_and_not_equal(recipe: str):
    losses = []
    for label, is_compiled in (("off", True), (recipe, True), (recipe, False)):
        model, x, y = model_on_gpu(label, is_compiled)
        loss = model(x, y).sum() / (4 * 128)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.item())
    bf16, compiled, eager = losses
    assert (
        compiled == pytest.approx(eager, rel=2e-3)
        and compiled == pytest.approx(bf16, rel=2.5e-3)
        and compiled != bf16
    )


def test_on_hopper_torchaos_blockwise_is_what_other_gpus_emulate():
    x, w, g = operands("random", 512, 768, 1024)
    holder = linear(w, "blockwise", "cuda").cuda()
    converted = next(m for m in holder.modules() if isinstance(m, PrototypeLinear))
    assert converted.is_native == (torch.cuda.get_device_capability()[0] == 9)
    native = passes(holder, x.cuda(), g.cuda())
    converted.is_native = False
    for on_gpu, emulated in zip(native, passes(holder, x.cuda(), g.cuda()), strict=True):
        assert (
            distance(on_gpu.cpu(), emulated.cpu()) < 5e-3
        )  # sums in another order, results in BF16


def test_a_weight_gradient_is_added_to_the_sum_within_its_matmul():
    torch.manual_seed(0)
    g, x, total = (
        torch.randn(512, 384).bfloat16(),
        torch.randn(512, 256).bfloat16(),
        torch.randn(384, 256),
    )
    on_gpu = total.cuda()
    add_weight_grad(on_gpu, g.cuda(), x.cuda())
    torch.testing.assert_close(
        on_gpu.cpu().double(), total.double() + g.double().t() @ x.double(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hardware_rounds_every_value_as_torch_does(format: torch.dtype, dtype: torch.dtype):
    if dtype == torch.bfloat16:  # each of them
        x = (
            torch.arange(2**16, dtype=torch.int32)
            .to(torch.int16)
            .view(torch.bfloat16)
            .view(256, 256)
        )
    else:
        x = torch.randint(-(2**31), 2**31 - 1, (512, 2**11), dtype=torch.int32).view(torch.float32)
    for scale in (1.0, 0.37, 2.0**-100, 2.0**100):
        q, qt = cast_both(x.cuda(), torch.tensor(scale, device="cuda"), format)
        want = quantised(x.cuda(), scale, format)
        assert same(q.cpu(), want.cpu()) and same(qt.cpu(), want.t().contiguous().cpu())


def test_offsets_beyond_32_bits_on_hardware():
    M, V = 43008, 50304  # 2^31 values and a few
    x = torch.randn(M, V, device="cuda", dtype=torch.bfloat16)
    q, qt = cast_both(x, torch.tensor(100.0, device="cuda"), E5M2)
    for part in (slice(0, 64), slice(M - 64, M)):
        want = quantised(x[part], 100.0, E5M2).view(torch.uint8)
        assert torch.equal(q[part].view(torch.uint8), want) and torch.equal(
            qt[:, part].t().view(torch.uint8), want
        )


def test_the_cross_entropys_gradient_on_hardware():
    for M, V in ((48, 80), (144, 208), (1024, 50304)):
        case = entropy_case(M, V)
        q, qt = cross_entropy_grad(*(t.cuda() for t in case))
        assert is_near(q.cpu(), entropy_grad(*case)) and same(qt.cpu(), q.t().contiguous().cpu())
    for on_gpu, want in zip(
        head_loss(*(t.cuda() for t in head_case(True))), head_loss(*head_case(True)), strict=True
    ):
        # a sum in another order moves logits across steps of BF16
        assert distance(on_gpu.cpu(), want) < 2e-2


def producers_case():
    """Name of each operator of fp8/producers.py, and its inputs on the CPU, the amax last."""
    scale, amax = torch.tensor(0.37), torch.tensor(1e-3)
    x, gate_up = moderate(512, 768), moderate(512, 1024, seed=1)
    grad, angles = moderate(512, 512, seed=2), torch.rand(128, 64)
    heads = [moderate(512, n * 128, seed=n).view(4, 128, n, 128) for n in (4, 2, 2)]
    weight, rstd = 1 + torch.rand(768), x.float().square().mean(1).rsqrt()
    return {
        "norm": (x, x.flip(0), weight, 1e-5, scale),
        "norm_grad": (x.flip(1), x, rstd, weight, x.flip(0), scale, amax),
        "swiglu": (gate_up, scale, amax),
        "swiglu_grad": (grad, gate_up, scale, amax),
        "rope_grad": (*heads, angles.cos(), angles.sin(), scale, amax),
    }


@pytest.mark.parametrize("name", ["norm", "norm_grad", "swiglu", "swiglu_grad", "rope_grad"])
def test_producers_on_hardware_are_near_their_reference(name: str):
    """Exponentials and sums have other last bits: a value may fall to the other side of a step."""
    operator, inputs = getattr(producers, name), producers_case()[name]
    on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in inputs]
    *_, q, qt = operator(*on_gpu)
    *_, expected, _ = operator(*inputs)
    assert is_near(q.cpu(), expected)
    assert same(qt.cpu(), q.t().contiguous().cpu())
    if name != "norm":
        assert torch.allclose(on_gpu[-1].cpu(), inputs[-1], rtol=1e-2)


@pytest.mark.parametrize("label", KERNELS)
def test_on_a_gpu_too_every_bit_of_our_kernels_is_torchaos(label: str):
    x, w, g = operands("random", 512, 768, 1024)
    ours, torchaos = (
        passes_on_gpu(arm, x, w, g) for arm in (label, label.removesuffix("+kernels"))
    )
    assert torch.equal(ours[0], torchaos[0]) and torch.equal(ours[1], torchaos[1])
    assert distance(ours[2], torchaos[2]) < 2**-8


def test_a_compiled_model_on_our_kernels_learns_as_torchaos_does():
    (x, y), curves = (t.cuda() for t in tokens()), []
    labels = "tensorwise", "tensorwise+kernels", *(f"tensorwise+kernels+{s}" for s in KNOWN_BEFORE)
    for label in labels:
        torch.compiler.reset()
        model = build(label, "cuda", head=True)[0].cuda()
        scales = DelayedScales(model)
        model.compile(dynamic=False, fullgraph=True)
        optimizer, curve = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), []
        for _ in range(20):
            refresh_weight_copies(model)
            scales.begin(1 / 128)
            curve.append(step(model, x, y)[0])
            scales.end(1 / 128)
            optimizer.step()
        curves.append(torch.tensor(curve))
    assert all(
        curve[-1] < 0.9 * curve[0] and (curves[0] - curve).abs().max() < 0.05
        for curve in curves[1:]
    )
    assert len(scales.state()) > 0 and scales.saturated() == [], (
        "and none that a scale of steps before did not fit"
    )


def fill(tensors, value):
    for tensor in tensors.values():
        tensor.fill_(value)


def test_a_save_beside_training_holds_the_weights_of_its_step(tiny: Config):
    """The update of a step is queued behind work that keeps the GPU busy when save() is called, the
    next one right behind staged(): a copy that begins too early or ends too late is torn."""
    device = torch.device("cuda", 0)
    # 512 MiB: some 10 ms of copying
    live = {f"model.{i}": torch.zeros(2**24, device=device) for i in range(8)}
    work = torch.randn(4096, 4096, device=device)
    saver = Saver(tiny.run_dir, CheckpointConfig(every=1, keep=9), World(0, 0, 1, device), {})
    for number in range(1, 4):
        for _ in range(50):
            work = torch.tanh(work @ work)
        fill(live, number)
        saver.save(number, live, {}, tiny)
        saver.staged()
        fill(live, -number)
    saver.finish()
    assert saver.failures == []
    paths = checkpoints(tiny.run_dir)
    assert [step_of(path) for path in paths] == [1, 2, 3]
    for path in paths:
        loaded = {name: torch.zeros(2**24) for name in live}
        load(path, read_manifest(path), loaded)
        assert {tensor.unique().item() for tensor in loaded.values()} == {step_of(path)}, path


@pytest.mark.parametrize("recipe", ["off", "tensorwise fp8.kernels=false", "rowwise", "tensorwise"])
def test_deterministic_runs_and_a_resumed_one_have_the_same_bits(
    tiny: Config, tmp_path: Path, recipe: str
):
    first, second = (
        changed(tiny, f"run={run} fp8.recipe={recipe} deterministic=true parallel.compile=true")
        for run in ("first", "second")
    )
    assert all(
        "deterministic algorithms" in trained(config, tmp_path) for config in (first, second)
    )
    expected_record = record(first)
    assert record(second) == expected_record and expected_record["skipped_steps"] == 0
    assert summary(first)["mem_peak_gib"] > 0
    assert all(p.isfinite().all() for p in load_model(first.run_dir, device="cpu")[0].parameters())
    back_to(second, 3)
    assert (
        re.search("resuming .*step_00000003", trained(second, tmp_path))
        and record(second) == expected_record
    )


def gpt125m(folder: Path, arm, steps, words: str = "", sequences: int = 32):
    """configs/gpt125m_<arm>.py with `steps` of two micro-batches of random bytes, beside rows for
    GPT-2's whole vocabulary."""
    config = load_config(ROOT / f"configs/gpt125m_{arm}.py")
    tokens = 2 * sequences * 1024
    if not (folder / "data").exists():
        write_source(
            folder / "data" / "web", 0, train_tokens=(steps + 1) * tokens, val_tokens=2**16
        )
    return changed(
        config,
        f"run={arm} out={folder}/out steps={steps} model.n_ctx=1024 model.vocab_size=257"
        f" model.vocab_multiple=50304 data.dir={folder}/data data.mixture=web:1 data.tokenizer=byte"
        f" data.tokens_per_step={tokens} data.micro_batch={sequences} parallel.compile=block"
        f" checkpoint.every=none eval.every=none eval.tokens={2**14} log.every=1 {words}",
    )


@pytest.fixture(scope="module")
def sixty_steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Finished runs of gpt125m, by precision; trained once, however many processes test."""

    def runs_in(folder: Path) -> dict[str, Config]:
        return {
            arm: gpt125m(folder, arm, 60, f"fp8.kernels={arm == 'fp8'}") for arm in ("bf16", "fp8")
        }

    def train_all(folder: Path) -> None:
        for config in runs_in(folder).values():
            trained(config, folder)

    return runs_in(made_once(tmp_path_factory, "sixty", train_all))


def losses_of(config: Config):
    return torch.tensor([row["loss"] for row in rows(config)])


@pytest.mark.parametrize("arm", ["bf16", "fp8"])
def test_gpt125m_learns_in_sixty_steps(sixty_steps, arm: str):
    losses = losses_of(sixty_steps[arm])
    assert len(losses) == 60 and losses[-1] < losses[0] - 1
    assert {row["verdict"] for row in rows(sixty_steps[arm])} == {"OK"}


def test_losses_of_gpt125m_in_fp8_are_near_bf16s_and_not_equal(sixty_steps):
    bf16, fp8 = losses_of(sixty_steps["bf16"]), losses_of(sixty_steps["fp8"])
    assert (fp8 / bf16 - 1).abs().max() < 0.03 and not torch.equal(fp8, bf16)


@pytest.mark.parametrize("arm", ["bf16", "fp8"])
def test_gpt125m_takes_the_memory_that_plan_says(sixty_steps, arm: str):
    page = "\n".join(plan.plan(sixty_steps[arm], "h100"))
    planned = float(re.search(r"sum +([\d.]+) GiB", page)[1])
    assert summary(sixty_steps[arm])["mem_peak_gib"] == pytest.approx(planned, rel=0.05)


@pytest.mark.skipif(not importlib.util.find_spec("pynvml"), reason="NVML is not installed")
@pytest.mark.parametrize("arm", ["bf16", "fp8"])
def test_rows_hold_what_the_gpu_measures(sixty_steps, arm: str):
    for row in rows(sixty_steps[arm])[5:]:
        assert 0 < row["gpu_mem_pct"] < 100
        assert 0 <= row["gpu_util_pct"] <= 100


def test_recomputed_blocks_take_less_memory_and_give_the_same_losses(tmp_path: Path):
    peaks = []
    for recompute in (False, True):
        config = gpt125m(tmp_path, "fp8", 3, "model.n_layer=4 model.loss_chunk=2048")
        config = changed(config, f"run=recompute_{recompute} parallel.recompute={recompute}")
        trained(config, tmp_path)
        peaks.append(([row["loss"] for row in rows(config)], summary(config)["mem_peak_gib"]))
    (plain, most), (again, least) = peaks
    assert again == pytest.approx(plain, rel=1e-3) and least < 0.8 * most


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_two_gpus_learn_as_one_does(tmp_path: Path, recipe: str):
    """As replicas, as shards, and as shards gathered as float8."""
    ways = {"one": "", "replicas": "", "shards": "parallel.shard=2"}
    if recipe != "off":
        ways["gathered"] = "fp8.all_gather=true"
    losses = []
    for name, words in ways.items():
        n = 1 if name == "one" else 2
        how = f"run=on_{name} fp8.recipe={recipe} {words}"
        config = changed(
            gpt125m(tmp_path, "bf16", 5, how, sequences=4), f"data.micro_batch={4 // n}"
        )
        path = write_config(config, tmp_path / f"{config.run}.py")
        process(
            "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", "train.py", path
        ).check_returncode()
        losses.append([row["loss"] for row in rows(config)])
    for several in losses[1:]:
        assert several == pytest.approx(losses[0], rel=5e-3)


def test_too_large_a_micro_batch_ends_with_what_to_try(tiny: Config, run: Callable[..., str]):
    config = changed(tiny, f"steps=1 data.micro_batch=1024 data.tokens_per_step={32 * 1024}")
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2**27  # the logits and their gradients alone are more
    torch.cuda.set_per_process_memory_fraction(
        allowed / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        output = run(config, code=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (
        "out of memory on rank 0 (cuda:0): " in output
        and "Try a smaller data.micro_batch (now 1024), " in output
    ), output
    assert not (config.run_dir / "summary.json").exists()


def test_a_profiled_run_leaves_a_trace_with_kernels(tiny: Config, tmp_path: Path):
    trained(tiny, tmp_path, "profile=2:3")
    events = json.loads(
        gzip.decompress((tiny.run_dir / "profile/trace_rank0.pt.trace.json.gz").read_bytes())
    )["traceEvents"]
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= {event.get("name") for event in events}
    assert any(event.get("cat") == "kernel" for event in events)


def test_a_compiled_models_diagnosis_names_the_weight_and_the_output(tmp_path: Path):
    model, x, y = model_on_gpu("rowwise")
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    model(x, y).sum().backward()
    sound = diagnose(model, weights, x, y, 6, "spike", tmp_path, True)
    assert "weights are not finite," in sound, "none is named"
    weights["model.layers.1.mlp.down.weight"][0, 0] = math.nan
    text = diagnose(model, weights, x, y, 7, "loss nan", tmp_path, True)
    assert "layers.1.mlp.down.weight: 1 of 131,072 values" in text
    assert "modules are not finite (layers.1.mlp.down: " in text
    assert json.loads((tmp_path / "diagnosis.json").read_text())["problem"] == ""


def test_on_a_gpu_too_large_a_micro_batch_is_no_crash(tiny: Config):
    device, wide = (
        torch.device("cuda", 0),
        "model.n_embd=512 model.n_ffn=1536 model.n_ctx=1024 parallel.compile=true",
    )
    huge, small = (
        changed(tiny, f"{wide} data.micro_batch={n} data.tokens_per_step={n * 1024}")
        for n in (2**15, 4)
    )
    with pytest.raises(MemoryError):
        plan.try_one(huge, device)
    tok_per_s, gib = plan.try_one(small, device)
    assert tok_per_s > 10_000 and 0 < gib < 20
    auto = changed(small, "data.micro_batch=auto")
    assert plan.resolve_micro_batch(auto, World(0, 0, 1, device)).data.micro_batch in (1, 2, 4)


def test_a_step_on_a_gpu_waits_for_it_once(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """By CUDA's own account of synchronising calls, from the third step on: the first compile and
    allocate."""
    within, config, seen = (
        watched_steps(monkeypatch),
        changed(tiny, "steps=8 parallel.compile=true"),
        [],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: seen.append((within[0], str(message)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(config)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [
        step for step, message in seen if step and step > 2 and "synchroniz" in message.lower()
    ]
    assert waits == list(range(3, 9))
