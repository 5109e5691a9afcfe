"""What makes the BF16 baseline the best one: it keeps no fp32 logits, reads the host once a step, waits for no collector."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import GPT
from runtime import fp8, parallel
from runtime.parallel import World
from runtime.watchdog import Watchdog
from tests.conftest import call_train, write_config

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__contains__",
         "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


def test_the_compiled_step_keeps_logits_in_bf16_and_no_fp32_copy_larger_than_a_blocks_input(tiny):
    """By the partitioner that the compiler uses too: it decides what is kept and what is computed again."""
    kept = {}
    for backend in ("eager", "aot_eager_decomp_partition"):
        model = GPT(replace(tiny.model, n_layer=1, vocab_size=1000, vocab_multiple=1))     # a size that nothing else has
        model.init_weights(1)
        if backend != "eager":
            model.compile(backend=backend, dynamic=False, fullgraph=True)
        x, seen = torch.randint(1000, (2, model.config.n_ctx)), kept.setdefault(backend, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append((t.shape, t.dtype)) or t, lambda t: t):
            loss = model(x, x).sum()
        loss.backward()
        assert loss.isfinite()
    eager, compiled = ([dtype for shape, dtype in seen if shape[-1:] == (1000,)] for seen in kept.values())
    assert torch.float32 in eager, "eager keeps fp32 ones: the test can see them"
    assert compiled == [torch.bfloat16]
    weights, whole = {p.shape for p in model.parameters()}, x.numel() * model.config.n_embd
    assert not [shape for shape, dtype in kept["aot_eager_decomp_partition"]
                if dtype == torch.float32 and shape.numel() >= whole and shape not in weights]


def test_weights_are_cast_once_a_step_and_every_bit_stays(tiny):
    """Against the plain model, which casts in every micro-batch; an update without a refresh is told of."""
    ours, plain = parallel.build(tiny, World(0, 0, 1, torch.device("cpu"))).model, GPT(tiny.model)
    x = torch.randint(tiny.model.vocab_size, (2, tiny.model.n_ctx))
    for model in (ours, plain):
        model.init_weights(1)
    for _ in range(2):
        fp8.refresh_weight_copies(ours)
        assert torch.equal(ours(x, x), plain(x, x))
        for model in (ours, plain):
            model(x, x).sum().backward()
        for (name, p), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, other.grad), name
        for model in (ours, plain):
            for p in model.parameters():
                p.data -= 0.01 * p.grad
                torch.autograd.graph.increment_version(p)
        with pytest.raises(AssertionError, match="refresh"):
            ours(x, x)
    assert ours.state_dict().keys() == plain.state_dict().keys(), "no checkpoint holds a copy"


def test_attention_needs_no_copy_on_its_way_to_the_last_matmul(tiny, monkeypatch):
    """cuDNN and FlashAttention lay their output out as q: in (B, T, H, D) behind a transpose the reshape is a view."""
    seen, out = [], []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: seen.append(torch.empty_like(q)) or seen[0])
    model = GPT(tiny.model)
    model.init_weights(1)
    attention = model.layers[0].attn
    attention.out.register_forward_pre_hook(lambda module, inputs: out.append(inputs[0]))
    attention(torch.randn(2, tiny.model.n_ctx, tiny.model.n_embd), model.cos, model.sin)
    assert out[0].data_ptr() == seen[0].data_ptr()


@pytest.mark.parametrize("unit", ["model", "block", "off"])
def test_the_unit_of_compilation_changes_nothing_but_rounding(tiny, unit):
    config = replace(tiny, parallel=replace(tiny.parallel, compile=unit))
    model, eager = (parallel.build(c, World(0, 0, 1, torch.device("cpu"))).model for c in (config, tiny))
    x = torch.randint(tiny.model.vocab_size, (2, tiny.model.n_ctx))
    for m in (model, eager):
        m.init_weights(1)
        fp8.refresh_weight_copies(m)
        m(x, x).sum().backward()
    is_compiled = [module._compiled_call_impl is not None for module in (model, *model.layers)]
    assert is_compiled == {"model": [True, False, False], "block": [False, True, True], "off": [False] * 3}[unit]
    for p, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (p.grad - other.grad).norm() <= 0.02 * other.grad.norm()


@pytest.fixture
def within(monkeypatch):
    """{"step": number of the step that train.py is in, from its first micro-batch to its log line, else None}."""
    at, beat = {"step": None}, Watchdog.at

    def spy(self, what, step, *args, **kwargs):
        at["step"] = step if what.startswith("reading") else None if what == "after the step" else at["step"]
        return beat(self, what, step, *args, **kwargs)
    monkeypatch.setattr(Watchdog, "at", spy)
    return at


def test_a_step_reads_the_host_once_and_the_collector_is_frozen_once(tiny, tmp_path, within, monkeypatch, capsys):
    """Reads by Python's calls, and by what torch calls beneath its functions."""
    seen, frozen = [], []

    def note(name):
        if name in READS and within["step"] is not None:
            seen.append((within["step"], name))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            note(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            note(func._schema.name)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(seen)))
    with Functions(), Operators():
        done = call_train(capsys, tiny, tmp_path)
    assert done.returncode == 0, done.stderr
    assert seen == [(step, "tolist") for step in range(1, 7)]
    assert frozen == [1], "after the first step, when all is compiled"


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_it_once(tiny, tmp_path, within):
    """By CUDA's own account of synchronising calls, from the third step on: the first compile and allocate."""
    config, seen = replace(tiny, steps=8, parallel=replace(tiny.parallel, compile=True)), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: seen.append((within["step"], str(message)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert train.main([str(write_config(config, tmp_path / "tiny.py"))]) == 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [step for step, message in seen if step and step > 2 and "synchroniz" in message.lower()]
    assert waits == list(range(3, 9))
