"""What a stopped run's diagnosis finds, against faults planted by hand, and that it never hides one behind its own."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import GPT, GPTConfig
from runtime import fp8
from runtime import guard as diagnosis
from runtime.config import FP8Config
from runtime.guard import diagnose
from tests.conftest import ROOT

SIZE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_ffn": 64, "n_ctx": 32, "vocab_size": 257}
SCALE = 1 / 128


def build(recipe="off", seed=0, device="cpu", **changes):
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SIZE, **changes}))
    fp8.convert(model, FP8Config(recipe=recipe), SCALE)
    model.to_empty(device=device)
    model.init_weights(seed)
    ids = torch.randint(257, (4, SIZE["n_ctx"] + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    return model, ids[:, :-1], ids[:, 1:]


def tensors_of(model):
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return weights | {f"optim.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()}


def strict(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")
    return json.loads(path.read_text(), parse_constant=refuse)


def examine(folder, model, x, y, tensors=None, scale=SCALE, is_main=True):
    text = diagnose(model, tensors or tensors_of(model), x, y, 41, "loss nan", folder, is_main, scale)
    return text.split("\n"), strict(folder / "diagnosis.json") if is_main else None


def backward(model, x, y):
    (model(x, y).sum() * SCALE).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------- findings

@pytest.mark.parametrize("recipe", ["off", "tensorwise", "rowwise"])
def test_a_sound_model_is_called_sound_and_left_alone(tmp_path, recipe):
    model, x, y = build(recipe)
    wanted = backward(model, x, y)
    loss = model(x, y).sum().item() / y.numel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lines, found = examine(tmp_path, model, x, y)
    assert lines[0] == "loss nan: lower optim.lr, or go on from an older checkpoint" and len(lines) == 3
    assert lines[1].startswith("weights, moments and gradients are finite; the last micro-batch alone, computed anew, is finite")
    assert lines[2] == f"more in {tmp_path / 'diagnosis.json'}"
    assert found["step"] == 41 and found["reason"] == "loss nan" and found["problems"] == []
    assert found["loss_anew"] == pytest.approx(loss, rel=1e-6)
    assert {f"{name}.exp_avg" for name in found["weights"]} == set(found["moments"])
    for census in (found["gradients"], found["gradients_anew"]):
        assert set(census) == set(wanted)
        for name, gradient in wanted.items():
            assert census[name]["norm"] == pytest.approx(gradient.double().norm().item(), rel=1e-6)
            assert census[name]["largest"] == gradient.abs().max().item()
            assert census[name]["values"] == gradient.numel() and census[name]["not_finite"] == 0
    name = max(wanted, key=lambda n: wanted[n].norm())
    assert f"of the squared gradient norm is {name}'s" in lines[1]
    assert list(found["modules"])[:2] == ["wte", "layers.0.norm1"] and list(found["modules"])[-1] == "head"
    for name, p in model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name])
    assert not any(len(m._forward_hooks) for m in model.modules())


def test_outputs_of_blocks_are_those_of_the_forward_pass(tmp_path):
    model, x, y = build()
    seen = {}
    handles = [block.register_forward_hook(lambda m, i, out, n=n: seen.update({n: out})) for n, block in enumerate(model.layers)]
    model(x, y)
    [h.remove() for h in handles]
    lines, found = examine(tmp_path, model, x, y)
    for n, out in seen.items():
        assert found["modules"][f"layers.{n}"]["largest"] == out.abs().max().item()
        assert found["modules"][f"layers.{n}"]["values"] == out.numel()
    largest = max(seen, key=lambda n: seen[n].abs().max())
    assert f"the largest finite output of a block is {seen[largest].abs().max().item():.3g} (layers.{largest})" in lines[1]


@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_a_weight_that_is_nan_is_named(tmp_path, recipe):
    model, x, y = build(recipe)
    with torch.no_grad():
        model.layers[1].mlp.gate_up.weight[3, 5] = math.nan
    lines, found = examine(tmp_path, model, x, y)
    assert "what the run holds in memory is damaged" in lines[0] and "lower optim.lr" in lines[0]
    assert "not finite: 1 of 14 weights (layers.1.mlp.gate_up.weight: 1 of 4,096 values)" in lines[1]
    assert "the first output that is not finite is that of layers.1.mlp.gate_up (" in lines[1]
    assert f"({found['modules']['layers.1.mlp.gate_up']['not_finite']:,} of 16,384 values)" in lines[1]
    assert found["modules"]["layers.0"]["not_finite"] == 0 and found["loss_anew"] is None
    counts = found["modules"]["layers.1.mlp.gate_up"]
    assert counts["not_finite"] == (4 * 32 if recipe == "off" else counts["values"]), "tensorwise, one NaN spoils all"


def test_an_overflow_is_found_where_it_happens(tmp_path):
    model, x, y = build()
    with torch.no_grad():
        model.layers[0].attn.out.weight.fill_(3e38)
    lines, found = examine(tmp_path, model, x, y)
    assert "weights, moments and gradients are finite; in the last micro-batch the first output that is not finite is that of " \
           "layers.0.attn.out (" in lines[1]
    assert list(found["modules"]).index("layers.0.attn.out") < list(found["modules"]).index("layers.0.attn")


def test_moments_and_gradients_that_are_not_finite_are_counted(tmp_path):
    model, x, y = build()
    backward(model, x, y)
    tensors = tensors_of(model)
    for name in ("wte.weight", "norm.weight", "layers.0.norm1.weight", "layers.0.norm2.weight"):
        tensors[f"optim.{name}.exp_avg"].view(-1)[:2] = torch.tensor([math.nan, -math.inf])
    model.layers[0].attn.qkv.weight.grad[0, :7] = math.inf
    lines, found = examine(tmp_path, model, x, y, tensors)
    assert "4 of 14 moments (wte.weight.exp_avg: 2 of 12,288 values; " in lines[1] and "; 1 more)" in lines[1]
    assert "1 of 14 gradients (layers.0.attn.qkv.weight: 7 of 3,072 values)" in lines[1]
    assert "squared gradient norm" not in lines[1]
    backward(model, x, y)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    lines, found = examine(tmp_path, model, x, y)
    assert "not finite: all gradients (clipping by a norm of NaN spreads it); the last micro-batch alone, computed anew, is " \
           "finite" in lines[1]


def test_a_backward_pass_that_overflows_alone_is_found(tmp_path):
    model, x, y = build(tied=False)
    lines, found = examine(tmp_path, model, x, y, scale=math.inf)
    assert "gradients that are not finite: 15 of 15, of these head.weight is nearest to the loss" in lines[1]
    assert found["loss_anew"] is not None and not any(c["not_finite"] for c in found["modules"].values())


def test_chunks_of_the_head_are_added_up(tmp_path):
    model, x, y = build(loss_chunk=16)
    _, found = examine(tmp_path, model, x, y)
    assert found["modules"]["head"]["values"] == 4 * 32 * 384


def test_the_last_probe_is_told(tmp_path):
    rows = [{"kind": "block", "step": step, "block": b, "attention_logit_max": step * (b + 1) / 10, "swiglu_amax": 3.0 - b,
             "swiglu_rms": 1.0} for step in (10, 20) for b in (0, 1)]
    rows.append({"kind": "linear", "step": 20, "layer": "layers.1.mlp.down", "recipe": "tensorwise",
                 "weight": {"amax": 1, "underflow": 0.0}, "gradient": {"amax": 1, "underflow": 0.125}})
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "block", "step": 20, "attention_logit_max": NaN}\n{"kin'
    (tmp_path / "probe.jsonl").write_text("x" * 100 + "\n[1]\n" + text)
    lines, found = examine(tmp_path, *build())
    assert len(found["probe"]) == 4 and {row["step"] for row in found["probe"]} == {20}
    assert lines[1].endswith("last probe, of step 20: attention logits up to 4 (block 1), SwiGLU outputs up to 3 (block 0), "
                             "12.5% of layers.1.mlp.down's gradient lost to underflow")


# ------------------------------------------------------------------------------------------------------- never raises

def test_a_pass_that_fails_is_a_problem_among_the_findings(tmp_path):
    model, x, y = build()
    lines, found = examine(tmp_path, model, x + 10**6, y)
    assert found["problems"] == ["the forward pass failed: IndexError: index out of range in self"]
    assert "the forward pass failed" in lines[1] and len(found["weights"]) == 14
    assert not any(len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("break_it", ["no folder", "file for folder", "tensors", "model", "probe"])
def test_it_never_raises(tmp_path, break_it):
    model, x, y = build()
    folder, tensors = tmp_path, tensors_of(model)
    if break_it == "no folder":
        folder = tmp_path / "gone"
    elif break_it == "file for folder":
        folder = tmp_path / "file"
        folder.write_text("")
    elif break_it == "tensors":
        tensors = {"model.x": "no tensor", "optim.y": None}
    elif break_it == "model":
        model = None
    else:
        (tmp_path / "probe.jsonl").mkdir()
    text = diagnose(model, tensors, x, y, 3, "loss inf", folder, True, SCALE)
    assert text.startswith("loss inf: ") and "lower optim.lr" in text
    if break_it in ("no folder", "file for folder"):
        assert f"{folder / 'diagnosis.json'} could not be written" in text
    if break_it not in ("tensors", "model"):
        assert "computed anew, is finite" in text, "the rest is found out all the same"


def test_only_the_main_rank_writes(tmp_path):
    examine(tmp_path, *build(), is_main=False)
    assert not list(tmp_path.iterdir())


def test_an_infinite_loss_in_the_reason_is_no_trouble(tmp_path):
    model, x, y = build()
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    lines, found = examine(tmp_path, model, x, y)
    assert found["weights"]["norm.weight"] == {"values": 32, "not_finite": 32, "norm": 0.0, "largest": 0.0}
    assert "layers.1" in found["modules"] and "that of norm (" in lines[1]


# ---------------------------------------------------------------------------------------------------- several ranks

def work(folder: Path, device: str) -> None:
    """On each of two ranks."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cpu":
        examine_faults(folder, dist.get_rank())
    examine_failures(folder, dist.get_rank(), device)
    os._exit(0)


def examine_faults(folder: Path, rank: int) -> None:
    """Sharded, and replicated; one weight and one batch of the second rank alone are bad."""
    for name, shape in (("sharded", (1, 2)), ("replicated", (2, 1))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model, x, y = build(n_embd=48, n_ffn=72)
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        (folder / name).mkdir(exist_ok=True)
        (model(x, y).sum() * SCALE).backward()
        text = diagnose(model, tensors_of(model), x, y, 5, "spike", folder / name, rank == 0, SCALE)
        (folder / name / f"sound_{rank}").write_text(text)
        if rank == 0:
            os.rename(folder / name / "diagnosis.json", folder / name / "sound.json")
        with torch.no_grad():
            local = model.layers[1].mlp.down.weight.to_local()
            if rank == 1 or name == "replicated":
                local[-1, -1] = math.nan
        text = diagnose(model, tensors_of(model), x, y, 6, "loss nan", folder / name, rank == 0, SCALE)
        (folder / name / f"bad_{rank}").write_text(text)


def examine_failures(folder: Path, rank: int, device: str) -> None:
    """The second rank's pass breaks off."""
    mesh = init_device_mesh(device, (2,))
    for fault in ("forward", "backward"):
        (folder / fault).mkdir(exist_ok=True)
        model, x, y = build(n_embd=48, n_ffn=72, device=device)
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if rank == 1:
            fall_short(model, fault)
        diagnosis.PATIENCE = 5 if (fault, device) == ("backward", "cpu") else 120
        text = diagnose(model, tensors_of(model), x, y, 7, "loss nan", folder / fault, rank == 0, SCALE)
        (folder / fault / f"text_{rank}").write_text(text)


def fall_short(model, where: str) -> None:
    """Run out of memory after the last block's forward pass, or at the first operation of the backward pass."""
    def refuse(*_):
        raise torch.OutOfMemoryError(f"no memory for the {where} pass")

    real = model.token_losses

    def token_losses(*arguments):
        if where == "forward":
            refuse()
        losses = real(*arguments)
        if losses.requires_grad:
            losses.register_hook(refuse)
        return losses

    model.token_losses = token_losses


def run_work(folder, device="cpu"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tests.test_diagnosis",
               str(folder), device]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_under_fsdp2_all_ranks_tell_the_same_and_count_each_value_once(tmp_path):
    run_work(tmp_path)
    model, x, y = build(n_embd=48, n_ffn=72)
    wanted = backward(model, x, y)
    for name in ("sharded", "replicated"):
        folder = tmp_path / name
        for kind in ("sound", "bad"):
            assert (folder / f"{kind}_0").read_text() == (folder / f"{kind}_1").read_text()
        sound, bad = strict(folder / "sound.json"), strict(folder / "diagnosis.json")
        assert sound["problems"] == bad["problems"] == []
        for weight, gradient in wanted.items():
            for census in (sound["gradients"], sound["gradients_anew"]):
                assert census[weight]["values"] == gradient.numel()
                assert census[weight]["norm"] == pytest.approx(gradient.double().norm().item(), rel=1e-3)
            assert sound["weights"][weight]["largest"] == model.get_parameter(weight).abs().max().item()
            assert sound["weights"][weight]["norm"] == pytest.approx(model.get_parameter(weight).double().norm().item(), rel=1e-6)
        assert {n: c["not_finite"] for n, c in bad["weights"].items() if c["not_finite"]} == {"layers.1.mlp.down.weight": 1}
        assert "that of layers.1.mlp.down (" in (folder / "bad_1").read_text()

    # One rank's pass fails where the others are in no collective, as with NCCL, which does not hold up the host, they
    # never are: all hear of it and leave it at that. With gloo they hang in one until this rank has given up and left.
    problem = "rank 1: the forward pass failed: OutOfMemoryError: no memory for the forward pass"
    assert problem in (tmp_path / "forward/text_0").read_text()
    assert (tmp_path / "forward/text_0").read_text() == (tmp_path / "forward/text_1").read_text()
    found = strict(tmp_path / "forward/diagnosis.json")
    assert found["problems"] == [problem] and found["modules"] == {} and len(found["weights"]) == 14
    assert "the backward pass failed: OutOfMemoryError: no memory for the backward pass" in \
        (tmp_path / "backward/text_1").read_text()
    found = strict(tmp_path / "backward/diagnosis.json")
    assert found["loss_anew"] is not None and found["modules"] and found["gradients_anew"] == {}
    assert any("the backward pass failed: " in said for said in found["problems"])


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2])
