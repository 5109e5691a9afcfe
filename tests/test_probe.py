"""What the probe reports, against fp64 arithmetic written anew; and that training does not notice it."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from runtime import fp8, probe
from runtime.checkpoint import checkpoints, load_model, seal
from runtime.config import FP8Config, ProbeConfig
from runtime.probe import Probe, sequences, statistics
from runtime.quantize import RECIPES, Operand
from tests.conftest import ROOT, call_train, with_recipe, write_config

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}       # mantissa bits, least normal exponent, largest value
SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_ffn": 96, "n_ctx": 32, "vocab_size": 257}
SCALE = 1 / 2048        # of the loss, as in a run with steps of 2,048 tokens
# weight, activation, gradient: format, what shares a scale, whether it is a power of two
WANTED = {
    "tensorwise": ((E4M3, "tensor", False), (E4M3, "tensor", False), (E5M2, "tensor", False)),
    "tensorwise_gw_hp": ((E4M3, "tensor", False), (E4M3, "tensor", False), (E5M2, "tensor", False)),
    "rowwise": ((E4M3, "row", True), (E4M3, "row", True), (E4M3, "row", True)),
    "rowwise_with_gw_hp": ((E4M3, "row", True), (E4M3, "row", True), (E4M3, "row", True)),
    "amax": ((E4M3, "tensor", True), (E4M3, "tensor", True), (E5M2, "tensor", True)),
    "cscale": ((E4M3, "constant", True), (E4M3, "constant", True), (E5M2, "constant", True)),
    "mxfp8": ((E4M3, "block", True), (E4M3, "block", True), (E4M3, "block", True)),
}


def build(recipe="off", dtype=torch.bfloat16, seed=0, head=False, **changes):
    """A model, its recipes by layer, and a batch; weights of a size that makes attention and SwiGLU do something."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, **changes}), dtype)
    layers = fp8.convert(model, FP8Config(recipe=recipe, head=head), SCALE)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "qkv" in name or "gate_up" in name:
                p.mul_(4)
            elif name.endswith("_norm.weight"):
                p.mul_(torch.linspace(0.5, 2.0, p.numel()))
    ids = torch.randint(257, (4, SIZE["n_ctx"] + 1), generator=torch.Generator().manual_seed(seed))
    return model, fp8.recipes(layers, SCALE), ids[:, :-1], ids[:, 1:]


def probed(tmp_path, model, recipes, x, y, tokens=4096):
    path = tmp_path / "probe.jsonl"
    Probe(path, model, recipes, tokens)(7, x, y, SCALE)
    return read(path)


def read(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def rounded(v, format):
    """v in fp64 at the nearest value of the format, ties to even, saturating; by the definition of a float."""
    bits, least, largest = FORMATS[format]
    step = torch.exp2((torch.frexp(v).exponent - 1).clamp(min=least).double() - bits)
    return ((v / step).round() * step).clamp(-largest, largest)


def reference(x, format, sharing, power_of_2, exponent):
    x, largest = x.detach().double(), FORMATS[format][2]
    if sharing == "constant":
        scale = torch.tensor(2.0**exponent, dtype=torch.float64)
    elif sharing == "block":
        amax = x.reshape(*x.shape[:-1], -1, 32).abs().amax(-1).repeat_interleave(32, dim=-1)
        scale = 2.0 ** -(amax / largest).log2().ceil().clamp(min=-127)
    else:
        scale = largest / (x.abs().max() if sharing == "tensor" else x.abs().amax(-1, keepdim=True))
        scale = 2.0 ** scale.log2().floor() if power_of_2 else scale
    q = rounded(x * scale, format) / scale
    ordered = scale.flatten().sort().values
    return {"amax": x.abs().max(), "scale_min": ordered[0], "scale": ordered[(len(ordered) - 1) // 2], "scale_max": ordered[-1],
            "underflow": ((x != 0) & (q == 0)).double().mean(),
            "saturated": ((x * scale).abs() > largest * (1 + 1e-6)).double().mean(),
            "error": (q - x).norm() / x.norm()}


@pytest.mark.parametrize("recipe", list(WANTED))
def test_statistics_are_those_of_an_independent_rounding(recipe, tmp_path):
    model, recipes, x, y = build(recipe)
    modules = dict(model.named_modules())
    seen, handles = {}, []
    for name in recipes:
        def note(module, inputs, output, name=name):
            seen[name] = {"weight": module.weight, "activation": inputs[0]}
            output.register_hook(lambda g: seen[name].__setitem__("gradient", g.clone()))
        handles.append(modules[name].register_forward_hook(note))
    (model(x, y).sum() * SCALE).backward()
    for handle in handles:
        handle.remove()
    rows = probed(tmp_path, model, recipes, x, y)
    linears = {row["layer"]: row for row in rows if row["kind"] == "linear"}
    assert set(linears) == {f"layers.{i}.{n}" for i in (0, 1) for n in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")}
    for name, row in linears.items():
        assert (row["step"], row["recipe"]) == (7, recipe)
        fields = (recipes[name].weight, recipes[name].input, recipes[name].grad)
        for operand, wanted, field in zip(("weight", "activation", "gradient"), WANTED[recipe], fields, strict=True):
            tensor = seen[name][operand]
            want = reference(tensor, *wanted, field.exponent)
            assert row[operand].keys() == want.keys()
            for key, value in want.items():
                near = 2 / tensor.numel() if key in ("underflow", "saturated") else 1e-12
                assert row[operand][key] == pytest.approx(float(value), rel=1e-4, abs=near), (name, operand, key)
    underflows = any(row["gradient"]["underflow"] > 0 for row in linears.values())
    assert underflows or WANTED[recipe][2][1] in ("row", "block")


def test_constant_scale_for_gradients_follows_the_scale_of_the_loss(tmp_path):
    """Twice the loss scale, twice the gradient, half the scale: the same shares."""
    rows = {}
    for loss_scale in (2**-8, 2**-14):
        model, _, x, y = build("cscale")
        (tmp_path / str(loss_scale)).mkdir()
        recipes = fp8.recipes(fp8.select(build()[0], FP8Config(recipe="cscale")), loss_scale)
        for name, recipe in recipes.items():
            dict(model.named_modules())[name].recipe = recipe
        Probe(path := tmp_path / str(loss_scale) / "p", model, recipes, 4096)(1, x, y, loss_scale)
        rows[loss_scale] = [row["gradient"] for row in read(path) if row["kind"] == "linear"]
    for a, b in zip(*rows.values(), strict=True):
        assert b["scale"] == 64 * a["scale"]
        assert b["amax"] == pytest.approx(a["amax"] / 64, rel=1e-6)
        assert {k: a[k] for k in ("underflow", "saturated", "error")} == {k: b[k] for k in ("underflow", "saturated", "error")}


def test_shares_of_values_made_by_hand():
    """E4M3 holds 2^-9 .. 448; half of the least value rounds to even, that is to zero. Scale 2^1."""
    x = torch.tensor([[0.0, 2.0**-11, 2.0**-12, -2.0**-11, 1.01 * 2.0**-11, 224.0, 224.5, -1000.0]])
    amax, low, scale, high, underflow, saturated, error = statistics(x, Operand(E4M3, "constant", exponent=1)).tolist()
    assert (amax, low, scale, high) == (1000.0, 2.0, 2.0, 2.0)
    assert (underflow, saturated) == (3 / 8, 2 / 8)
    assert error == pytest.approx(776 / math.hypot(224, 224.5, 1000), rel=1e-3)


@pytest.mark.parametrize("name", list(RECIPES))
def test_zeros_and_bf16_operands_have_statistics(name):
    for operand in (RECIPES[name].weight, RECIPES[name].input, RECIPES[name].grad):
        amax, *scales, underflow, saturated, error = statistics(torch.zeros(32, 64, dtype=torch.bfloat16), operand).tolist()
        assert (amax, underflow, saturated, error) == (0, 0, 0, 0)
        assert all(math.isfinite(s) and s > 0 for s in scales)
    assert statistics(torch.full((2, 32), -3.0), Operand(None)).tolist() == [3.0, 0, 0, 0, 0, 0, 0]


def test_a_tensor_scaled_by_its_own_largest_value_does_not_saturate():
    """448 / amax rounds up as often as down; the largest value times it is then a hair above 448."""
    amaxes = torch.linspace(0.01, 3, 500, dtype=torch.bfloat16)
    assert all(statistics(a * torch.ones(1, 32), Operand(E4M3))[5] == 0 for a in amaxes)


def test_small_gradients_keep_their_error():
    """In fp32 the squares of the smallest would vanish, and what is lost altogether would look like no error at all."""
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    big, small = (statistics(g * s, Operand(E4M3, "row", power_of_2=True))[-1].item() for s in (1.0, 2.0**-36))
    assert small == pytest.approx(big, rel=1e-6)
    assert 0.01 < big < 0.05
    *_, underflow, saturated, error = statistics(g * 2.0**-80, Operand(E5M2, "constant")).tolist()
    assert (underflow, saturated, error) == (1, 0, 1)


# ------------------------------------------------------------------------------------------------------------- the blocks

def naive_logit_max(model, block, h):
    """Largest causal q k / sqrt(D) of a sequence's normed inputs h (T, C), token by token in fp64, RoPE as complex turns."""
    c, attn, T = model.config, block.attn, h.size(0)
    D, H, K = c.head_size, c.n_head, c.kv_heads
    qkv = h.double() @ attn.qkv.weight.detach().double().T
    turn = torch.outer(torch.arange(T).double(), c.rope_theta ** (-torch.arange(D // 2).double() * 2 / D))

    def head(at, norm):
        v = qkv[:, at * D:(at + 1) * D]
        if norm is not None:
            v = v / (v.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * norm.weight.detach().double()
        return torch.complex(v[:, :D // 2], v[:, D // 2:]) * torch.polar(torch.ones_like(turn), turn)

    seen, hidden = [], []
    for i in range(H):
        q, k = head(i, attn.q_norm), head(H + i * K // H, attn.k_norm)
        for t in range(T):
            for s in range(T):
                (seen if s <= t else hidden).append((q[t] * k[s].conj()).real.sum().item() / math.sqrt(D))
    return max(seen), max(hidden)


@pytest.mark.parametrize("at_once", [2**24, 100])
@pytest.mark.parametrize("changes", [{}, {"n_head": 4, "n_kv_head": 2}, {"n_head": 4, "n_kv_head": 1, "qk_norm": True}])
def test_block_rows_against_a_naive_computation(changes, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "LOGITS_AT_ONCE", at_once)
    model, recipes, x, y = build(dtype=torch.float32, seed=4, **changes)
    inputs, mlp_inputs = [], []
    for block in model.layers:
        block.norm1.register_forward_hook(lambda m, i, out: inputs.append(out.detach()[0]))
        block.norm2.register_forward_hook(lambda m, i, out: mlp_inputs.append(out.detach()))
    model(x, y)
    rows = probed(tmp_path, model, recipes, x, y)
    assert [(row["kind"], row["step"], row["block"]) for row in rows] == [("block", 7, 0), ("block", 7, 1)]
    masked = 0
    for row, block, h, m in zip(rows, model.layers, inputs[:2], mlp_inputs[:2], strict=True):
        seen, hidden = naive_logit_max(model, block, h)
        masked += hidden > seen
        assert row["attention_logit_max"] == pytest.approx(seen, rel=1e-4)
        gate, up = (m.double() @ block.mlp.gate_up.weight.detach().double().T).chunk(2, -1)
        swiglu = gate * torch.sigmoid(gate) * up
        assert row["swiglu_amax"] == pytest.approx(swiglu.abs().max().item(), rel=1e-4)
        assert row["swiglu_rms"] == pytest.approx(swiglu.square().mean().sqrt().item(), rel=1e-4)
    assert masked or changes, "the first case must show whether the mask is there"


def test_few_sequences_and_whole_ones(tmp_path):
    """Half of the batch is what a probe of half of the batch sees; a whole sequence is the least."""
    model, recipes, x, y = build("tensorwise")
    half = probed(tmp_path, model, recipes, x, y, tokens=95)
    (tmp_path / "probe.jsonl").unlink()
    assert half == probed(tmp_path, model, recipes, x[:2], y[:2])
    for B, T, tokens, want in ((8, 128, 4096, 8), (8, 2048, 4096, 2), (8, 4096, 100, 1), (8, 1000, 2500, 4), (8, 48, 150, 2),
                               (8, 1000, 9000, 8), (6, 8, 16, 4), (6, 8, 1000, 6), (3, 48, 1, 2), (1, 16, 4096, 1), (3, 5, 1, 3)):
        assert sequences(B, T, tokens) == want, (B, T, tokens)
        assert want == B or want * T % 32 == 0


# ------------------------------------------------------------------------------------------------------------- mischance

def test_hooks_and_gradients_are_gone_even_when_the_backward_pass_fails(tmp_path):
    model, recipes, x, y = build("tensorwise")
    probed(tmp_path, model, recipes, x, y)
    assert hooks(model) == 0
    assert all(p.grad is None for p in model.parameters())

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no memory left")

    broken = model.layers[0].mlp.register_forward_hook(lambda m, i, out: Fails.apply(out))
    with pytest.raises(RuntimeError, match="no memory left"):
        probed(tmp_path, model, recipes, x, y)
    broken.remove()
    assert hooks(model) == 0
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(IndexError):
        probed(tmp_path, model, recipes, x + 10_000, y)
    assert hooks(model) == 0
    rows = read(tmp_path / "probe.jsonl")
    assert len(rows) == 10, "a failed probe writes nothing"


@pytest.mark.parametrize("recipe", list(WANTED))
def test_nan_becomes_null(recipe, tmp_path):
    model, recipes, x, y = build(recipe)
    with torch.no_grad():
        model.layers[1].attn.qkv.weight[3, 5] = math.nan
    rows = {row.get("layer", row.get("block")): row for row in probed(tmp_path, model, recipes, x, y)}
    assert rows["layers.1.attn.qkv"]["weight"]["amax"] is None
    assert rows["layers.1.attn.qkv"]["weight"]["error"] is None
    assert rows["layers.0.attn.qkv"]["weight"]["amax"] > 0
    assert rows[1]["attention_logit_max"] is None
    assert rows[0]["attention_logit_max"] > 0


def test_a_torn_last_line_is_cut_off_before_more_is_added(tmp_path):
    model, recipes, x, y = build()
    path = tmp_path / "probe.jsonl"
    rows = probed(tmp_path, model, recipes, x, y)
    path.write_text(path.read_text() + '{"kind": "block", "st')
    assert probed(tmp_path, model, recipes, x, y) == rows * 2
    path.write_text('{"kin')
    assert probed(tmp_path, model, recipes, x, y) == rows


def test_a_head_in_chunks_is_looked_at_once(tmp_path):
    """Its first chunk, and not again when the backward pass recomputes it."""
    model, recipes, x, y = build("rowwise", head=True, loss_chunk=32)
    row = next(row for row in probed(tmp_path, model, recipes, x, y) if row.get("layer") == "head")
    with torch.no_grad():
        h = model.hidden(x)[0]
        g = (torch.softmax(model.head(h).float(), -1) - torch.nn.functional.one_hot(y[0], model.config.vocab_padded)) * SCALE
    assert row["activation"]["amax"] == h.abs().max().item()
    assert row["gradient"]["amax"] == pytest.approx(g.abs().max().item(), rel=1e-2)


def test_ranks_that_write_nothing_measure_nothing(tmp_path, monkeypatch):
    model, recipes, x, y = build("rowwise", head=True, loss_chunk=32)
    calls = []
    monkeypatch.setattr(probe, "statistics", lambda x, operand, real=statistics: calls.append(operand) or real(x, operand))
    Probe(None, model, recipes, 4096)(1, x, y, SCALE)
    assert not calls
    probed(tmp_path, model, recipes, x, y)
    assert len(calls) == 3 * len(recipes) == 27, "three operands of each Linear, each once"


# ------------------------------------------------------------------------------------------- training does not notice it

class Reads(TorchDispatchMode):
    """Counts operations after which the host waits for the device."""
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket._qualified_op_name in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", list(WANTED))
def test_the_device_is_read_once(recipe, tmp_path, monkeypatch):
    model, recipes, x, y = build(recipe)
    lists = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t, tolist=torch.Tensor.tolist: lists.append(t) or tolist(t))
    with Reads() as reads:
        probed(tmp_path, model, recipes, x, y)
    assert (reads.count, len(lists)) == (0, 1)


def test_a_compiled_model_is_not_compiled_again(tmp_path):
    torch._dynamo.reset()
    model, recipes, x, y = build("tensorwise", n_layer=1)
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")

    def step():
        loss = model(x, y).sum() * SCALE
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *grads]

    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        before = step()
        for n in (1, 2):
            assert len(probed(tmp_path, model, recipes, x, y, tokens=64)) == 5 * n      # four Linears and a block
            assert all(torch.equal(a, b) for a, b in zip(before, step(), strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def weights(config):
    return load_model(config.run_dir, compute_dtype=torch.float32)[0].state_dict()


def column(config, key):
    return [row[key] for row in map(json.loads, open(config.run_dir / "metrics.jsonl")) if row["kind"] == "train"]


@pytest.mark.parametrize("recipe", ["off", "tensorwise", "cscale"])
def test_training_is_the_same_bits_with_and_without(recipe, tiny, tmp_path, capsys, monkeypatch):
    """Four micro-batches a step; the summary tells what the probes took."""
    scales = []
    monkeypatch.setattr(Probe, "__call__", lambda self, *args, real=Probe.__call__: scales.append(args[-1]) or real(self, *args))
    plain = with_recipe(tiny, recipe, run="plain")
    looked = replace(plain, run="looked", probe=ProbeConfig(every=2, tokens=64))
    out = {c.run: call_train(capsys, c, tmp_path) for c in (plain, looked)}
    assert {done.returncode for done in out.values()} == {0}, out
    a, b = weights(plain), weights(looked)
    assert all(torch.equal(a[k], b[k]) for k in a)
    for key in ("loss", "grad_norm"):
        assert column(plain, key) == column(looked, key)
    assert not (plain.run_dir / "probe.jsonl").exists()
    assert scales == [1 / 512] * 3, "training's own"
    rows = read(looked.run_dir / "probe.jsonl")
    linears = 0 if recipe == "off" else 8
    assert [(row["step"], row["kind"]) for row in rows] == [(step, kind) for step in (2, 4, 6)
                                                            for kind in ["linear"] * linears + ["block"] * 2]
    summaries = {c.run: json.loads((c.run_dir / "summary.json").read_text()) for c in (plain, looked)}
    assert (summaries["plain"]["probe_s"], summaries["plain"]["probe_share"]) == (0.0, 0.0)
    probe_s, wall_s = summaries["looked"]["probe_s"], summaries["looked"]["wall_s"]
    assert 0 < probe_s < wall_s
    assert summaries["looked"]["probe_share"] == pytest.approx(probe_s / wall_s)
    assert "of it probes" in out["looked"].stdout
    assert "probes" not in out["plain"].stdout
    assert summaries["looked"]["pair_id"] == summaries["plain"]["pair_id"]
    layers = summaries["looked"]["precision"]["layers_recipes"]
    assert layers == {row["layer"]: recipe for row in rows if row["kind"] == "linear"}


def test_a_resume_goes_on_probing_and_refuses_another_choice_of_layers(tiny, tmp_path, capsys):
    config = with_recipe(tiny, "tensorwise", probe=ProbeConfig(every=3, tokens=64))
    assert call_train(capsys, config, tmp_path).returncode == 0
    rows = read(config.run_dir / "probe.jsonl")
    (config.run_dir / "summary.json").unlink()
    shutil.rmtree(checkpoints(config.run_dir)[-1])
    checkpoint = checkpoints(config.run_dir)[-1]
    content = json.loads((checkpoint / "manifest.json").read_text())
    assert content["state"]["probe_s"] > 0
    content["state"]["probe_s"] = 1000.0
    chosen = content["state"]["data"]["fp8"]
    content["state"]["data"]["fp8"] = "0" * 64
    seal(checkpoint, content)
    refused = call_train(capsys, config, tmp_path)
    assert refused.returncode == 2
    assert "fp8.recipe=auto chose other layers than this run was begun with, for another GPU" in refused.stderr
    content["state"]["data"]["fp8"] = chosen
    seal(checkpoint, content)
    assert call_train(capsys, config, tmp_path).returncode == 0
    again = read(config.run_dir / "probe.jsonl")
    assert again[:len(rows)] == rows
    assert again[len(rows):] == [row for row in rows if row["step"] == 6]
    assert json.loads((config.run_dir / "summary.json").read_text())["probe_s"] > 1000


def test_two_ranks_probe_together_and_one_writes(tiny, tmp_path):
    """Two runs in the same two processes, with and without: the same weights; a row a layer, from rank 0 alone."""
    plain = with_recipe(tiny, "tensorwise", run="plain", steps=2)
    looked = replace(plain, run="looked", probe=ProbeConfig(every=1, tokens=64))
    for config in (plain, looked):
        write_config(config, tmp_path / f"{config.run}.py")
    (tmp_path / "both.py").write_text(
        "import sys\nimport train\nfrom runtime import parallel\nfrom runtime.config import load_config\n"
        "configs = [load_config(path) for path in sys.argv[1:]]\nworld = parallel.start(configs[0])\n"
        "for config in configs:\n    train.train(config, world)\nparallel.finish(world, 0)\n")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(tmp_path / "both.py"), str(tmp_path / "plain.py"), str(tmp_path / "looked.py")],
                          capture_output=True, text=True, timeout=120, cwd=ROOT,
                          env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    a, b = weights(plain), weights(looked)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [column(plain, k) for k in ("loss", "grad_norm")] == [column(looked, k) for k in ("loss", "grad_norm")]
    rows = read(looked.run_dir / "probe.jsonl")
    assert [(row["step"], row.get("layer", row.get("block"))) for row in rows] == [
        (step, place) for step in (1, 2) for place in [
            *(f"layers.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")), 0, 1]]
    start = GPT(tiny.model)
    start.init_weights(tiny.seed)
    first = next(row for row in rows if row.get("layer") == "layers.0.mlp.down")
    assert first["weight"]["amax"] == pytest.approx(start.layers[0].mlp.down.weight.abs().max().item(), rel=0.2), \
        "the whole weight, not one rank's part"
    assert first["gradient"]["amax"] > 0
