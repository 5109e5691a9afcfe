"""What the compiler would run on an H100, read without one: counts against arithmetic, fusions that the speed rests on."""

import json
import re
import subprocess
import sys

import pytest
import torch

from bench import inductor
from configs.gpt125m_bf16 import config as base
from tests.conftest import ROOT

TOKENS, C, F, V = 4 * 1024, base.model.n_embd, base.model.n_ffn, base.model.vocab_padded
LINEARS = {"qkv": (C, 3 * C), "out": (C, C), "gate_up": (C, 2 * F), "down": (F, C), "head": (C, V)}


ARMS = {"bf16": [], "torchao": ["fp8.recipe=tensorwise"], "kernels": ["fp8.recipe=tensorwise", "fp8.kernels=true"],
        "head": ["fp8.recipe=tensorwise", "fp8.kernels=true", "fp8.head=true"]}
READ = """
import json, sys
from dataclasses import asdict
from bench import inductor
from runtime.config import load_config
inductor.pretend_h100()
for arm, overrides in json.loads(sys.argv[1]).items():
    config = load_config("configs/gpt125m_bf16.py", ["model.n_ctx=1024", *overrides])
    kernels, saved = inductor.read_step(config, 1, 4)
    print(json.dumps([arm, [asdict(k) for k in kernels], saved, inductor.summary(config, {1: (kernels, saved)}, 1, 4096)]))
"""


@pytest.fixture(scope="module")
def plans():
    """Arm -> (the kernels of one block, head and loss, bytes kept, lines), read by a process that believes to have an H100."""
    done = subprocess.run([sys.executable, "-c", READ, json.dumps(ARMS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {arm: (kernels, saved, lines) for arm, kernels, saved, lines in map(json.loads, done.stdout.splitlines())}


def matmuls(kernels):
    return [k for k in kernels if k["kind"] == "matmul"]


def shapes(kernel):
    return [(dtype, *map(int, sizes.split(" x "))) for dtype, sizes in
            (re.fullmatch(r"(\w+) (.*)", text).groups() for text in kernel["outputs"] if not text.endswith(" "))]


def casts(kernels):
    return sum(k["bytes"] for k in kernels if k["kind"] in ("written", "called"))


@pytest.mark.parametrize("arm", ARMS)
def test_every_matmul_of_a_step_is_there_and_none_twice(plans, arm):
    kernels, _, text = plans[arm]
    expected = sorted(flops for k, n in LINEARS.values() for flops in 3 * [2 * TOKENS * k * n])
    assert sorted(k["flops"] for k in matmuls(kernels)) == expected
    assert f"{sum(expected) / TOKENS:,.0f} matmul FLOPs per token" in text[0]


def test_a_matmul_moves_its_operands_and_its_result(plans):
    qkv = next(k for k in matmuls(plans["bf16"][0]) if k["flops"] == 2 * TOKENS * C * 3 * C)
    assert qkv["bytes"] == 2 * (TOKENS * C + C * 3 * C + TOKENS * 3 * C)


def test_fp8_takes_the_blocks_and_with_its_switch_the_head(plans):
    counts = {arm: sum(k["is_fp8"] for k in matmuls(kernels)) for arm, (kernels, _, _) in plans.items()}
    assert counts == {"bf16": 0, "torchao": 12, "kernels": 12, "head": 15}


@pytest.mark.parametrize("arm", ARMS)
def test_the_logits_never_exist_in_fp32(plans, arm):
    """Neither between the passes nor inside one: the loss reads BF16 logits once, its gradient is BF16 or FP8."""
    outputs = [shape for kernel in plans[arm][0] for shape in shapes(kernel)]
    logits = [shape for shape in outputs if shape[1:] in ((TOKENS, V), (V, TOKENS))]
    assert [shape[0] for shape in logits] == {"head": ["bfloat16"]}.get(arm, ["bfloat16", "bfloat16"])
    readers = [k for k in plans[arm][0] if k["kind"] != "matmul" and k["bytes"] >= 2 * TOKENS * V]
    assert [k["direction"] for k in readers] == ["forward", "backward"]
    assert readers[0]["bytes"] < 2.01 * TOKENS * V      # read once
    assert readers[1]["bytes"] < 4.01 * TOKENS * V      # read once, the gradient written: 2 bytes a logit in all arms


def test_the_largest_magnitude_is_found_where_the_value_is_made(plans):
    """Norms, SwiGLU and their gradients give a maximum per row on the way; attention's result alone is read once more."""
    large = [k for k in plans["kernels"][0] if k["kind"] == "written" and k["bytes"] >= TOKENS * C]
    with_maximum = [k for k in large if "amax" in k["name"].split(",")]
    alone = [k for k in with_maximum if not {"mul", "add", "cat"} & set(k["name"].split(","))]
    assert len(with_maximum) >= 6
    assert len(alone) <= 2, [k["name"] for k in alone]


def test_our_kernels_move_less_than_torchao_over_bf16(plans):
    """What casts add to the bytes of BF16, which LOG.md gives for the real sizes: one pass for both layouts saves over half."""
    bf16, torchao, ours = (casts(plans[arm][0]) for arm in ("bf16", "torchao", "kernels"))
    assert bf16 < ours < torchao
    assert ours - bf16 < 0.6 * (torchao - bf16)


def test_our_kernels_keep_less_for_the_backward_pass_than_bf16(plans):
    assert plans["kernels"][1] < plans["bf16"][1]


def test_a_user_mistake_is_one_sentence(capsys):
    before = torch.cuda.is_available
    assert inductor.main(["micro_batch=0"]) == 2
    assert capsys.readouterr().err == "bench/inductor.py: micro_batch=0 must be between 1 and 1048576\n"
    assert torch.cuda.is_available is before, "nothing pretends to be an H100 in this process"
