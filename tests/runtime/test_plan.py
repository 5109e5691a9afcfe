"""--plan against hand counts; the model of a step against Inductor's plans and published runs;
data.micro_batch=auto with invented trials and real ones."""

import json
import multiprocessing
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch.nn as nn

from bench.cells import config_of
from bench.rows import timed_rows_of
from fp8.casts import Casts, Moved
from lib.errors import MachineError, UserError
from lib.files import read_bytes, write_json
from model import GPT, GPTConfig
from runtime import plan, roofline
from runtime.config import Config, load_config
from runtime.plan import candidates, resolve_micro_batch, search, try_one
from runtime.roofline import (
    CASTS,
    GPUS,
    MICRO_BATCH,
    linears,
    matmul_seconds,
    modelled_ratio,
    step,
)
from tests.conftest import ALONE, ROOT, asked, changed
from tests.helpers.faults import FORKS, children, command_line, wait_for

FULL, BROKEN = MemoryError(), MachineError("a kernel's offset")
FP8_RUN = load_config(ROOT / "configs/gpt1p5b_fp8.py")  # T=2048


def planned(config: Config, words: str = "", gpu: str = "h100"):
    return "\n".join(plan.plan(changed(config, words), gpu))


def hours_of(page: str):
    return {
        name: float(h)
        for name, h in re.findall(r"^  (BF16|FP8)(?:, at the very best)? +([\d.]+) h", page, re.M)
    }


def gib_of(page: str):
    return {
        name: float(number)
        for name, number in re.findall(r"^  (\w+[ \w]*?) +([\d.]+) GiB", page, re.M)
    }


def test_llama_by_hand():
    config = load_config(ROOT / "configs/continue_llama.py", ["fp8.recipe=tensorwise"])
    page = planned(config)
    assert f"{8_030_261_248:,}" in page and "parallel.shard=4" in page  # the published count
    assert "layers.*.mlp.down     14336 x 4096   x32  -> tensorwise" in page
    weights, embedding, tokens = 4 * 8_030_261_248 / 2**30, 2 * 128256 * 4096, 2 * 4096
    blocks = 8_030_261_248 - embedding
    parts = {
        # which accumulate unsharded
        "weights": weights / 4,
        "optimizer": weights / 2,
        "gradients": weights,
        "gathered": (2 * blocks * 2 / 32 + 4 * embedding) / 2**30,
        "activations": (
            tokens
            * (32 * 4 * 4096 + 2 * (5 * 4096 + 6144 + 5120 + 3 * 14336) - 4 * 4096 - 2 * 14336)
            / 2**30
        ),
        "logits": min(tokens, config.model.loss_chunk or tokens) * 128256 * 2 / 2**30,
    }
    assert gib_of(page) == pytest.approx(
        {
            **parts,
            "sum": sum(parts.values()),
            "checkpoint": 3 * weights,
            # ids beyond 16 bits
            "training tokens": 4 * 131.072e6 / 2**30,
        },
        abs=0.03,
    )
    not_recomputed = planned(config, "parallel.recompute=false")
    # the forward pass is a third
    assert hours_of(page)["BF16"] / hours_of(not_recomputed)["BF16"] == pytest.approx(
        4 / 3, abs=0.1
    )
    flops = float(re.search(r"\+ attention +(\S+)", not_recomputed)[1])
    assert hours_of(not_recomputed)["BF16"] == pytest.approx(
        flops / (989.4e12 * 0.45 * 4) / 3600, abs=0.051
    )
    assert "name a GPU" in planned(config, gpu="") and "no FP8 matmuls" in planned(
        config, gpu="a100"
    )
    with pytest.raises(UserError, match="h10"):
        planned(config, gpu="h10")


def test_the_memory_is_what_a_gpu_took():
    rows = [
        row
        for file in ("h100", "h100_peers")
        for row in timed_rows_of(ROOT / f"bench/results/{file}.jsonl")
        if row.valid and row.cell.peer is None
    ]
    assert len({row.cell.name for row in rows}) >= 13
    for row in rows:
        lines = plan.plan(config_of(row.cell), "h200")
        planned_gib, gib = gib_of("\n".join(lines))["sum"], row.measured.peak_gib
        assert planned_gib == pytest.approx(gib, rel=0.04), (row.cell.name, planned_gib, gib)


def test_heads_wider_than_their_share_take_what_attention_keeps_of_them():
    """A block keeps q, k, v, the rotated q and k and attention's output in BF16; recomputed, its
    input and that output."""
    config = load_config(ROOT / "configs/gpt1p5b_bf16.py")
    tokens = config.micro_batch * config.model.n_ctx
    H, L, wider = config.model.n_head, config.model.n_layer, 256 - config.model.head_dim
    for words, bytes_a_token in (
        ("", L * 2 * 6 * H * wider),
        (
            "parallel.recompute=true",
            (2 * L + 2 * 6) * H * wider,
        ),
    ):
        narrow = gib_of(planned(config, words))["activations"]
        wide = gib_of(planned(config, f"{words} model.head_size=256"))["activations"]
        assert (wide - narrow) * 2**30 / tokens == pytest.approx(bytes_a_token, rel=0.01)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--plan"], "name a GPU"),
        (["--plan", "steps=7"], "name a GPU"),
        (["--plan", "b200", "steps=7"], "on 1 x b200"),
        (["steps=7", "--plan", "h100"], "on 1 x h100"),
    ],
)
def test_a_gpu_may_follow_plan_and_settings_stand_anywhere(
    tiny: Config, run: Callable[..., str], words: list[str], sentence: str
):
    page = run(tiny, *words)
    assert sentence in page and re.search(
        rf"^  steps +{7 if 'steps=7' in words else 6} ", page, re.M
    )
    assert not tiny.run_dir.exists(), "nothing is trained"


def test_muon_by_hand():
    config = changed(FP8_RUN, "optim.kind=muon parallel.shard=8")
    page, (C, F), n = planned(config), (2048, 5632), config.model.params_total
    # Q, K, V, out; gate, up, down
    update = 28 * 5 * (4 * 6 * C**3 + 3 * (4 * C * C * F + 2 * C**3))
    assert (
        f"Muon                   {update * config.total_steps:.4e}   {update:.4e} an update,"
        " 0.7% of" in page
    )
    matrices = 28 * (4 * C * C + 3 * C * F)  # of one moment
    assert (
        f"exchange takes {10 * matrices / 8 / 2**30:.2f} GiB" in page
        and "shared by 8 GPU(s)" in page
    )
    moments = 8 * n - 4 * matrices
    assert (gib_of(page)["optimizer"], gib_of(page)["checkpoint"]) == pytest.approx(
        (moments / 8 / 2**30, (4 * n + moments) / 2**30), abs=0.006
    )
    assert "Muon" not in planned(FP8_RUN)


def test_hours_of_fp8_are_modelled_where_its_casts_are_known():
    page = planned(FP8_RUN, "fp8.kernels=false")
    assert "an assumed mfu_bf16 of 45%" in page and "MODELLED" in page
    assert "1.13x of BF16's speed" in page
    assert hours_of(page)["FP8"] == pytest.approx(hours_of(page)["BF16"] / 1.1316, rel=0.002)


def test_hours_of_fp8_by_our_kernels_are_modelled():
    assert planned(FP8_RUN).count("1.24x of BF16's speed") == 1


@pytest.mark.parametrize(
    "words, gpu", [("", "b200"), ("fp8.recipe=cscale", "h100"), ("fp8.skip=mlp.down", "h100")]
)
def test_hours_of_fp8_are_the_very_best_where_no_model_tells(words: str, gpu: str):
    page = planned(FP8_RUN, words, gpu)
    assert "at the very best" in page and "MODELLED" not in page


def count_of(page: str, line: str) -> int:
    """The number that the pattern `line` finds."""
    return int(re.search(line, page)[1].replace(",", ""))


@pytest.mark.parametrize("recompute", [False, True])
def test_fp8_at_its_very_best_halves_the_time_of_its_matmuls(recompute: bool):
    """Of both precisions' forward pass where blocks are recomputed."""
    page = planned(FP8_RUN)
    in_fp8 = count_of(page, r"in FP8 +(\S+)")
    per_token = count_of(page, r"\+ attention +\S+ +(\S+) per token")
    ratio = 1 / (1 - 6 * in_fp8 / per_token / 2)
    best = planned(FP8_RUN, f"parallel.recompute={recompute}", "b200")
    assert f"{ratio:.2f}x of BF16's speed" in best


def test_eight_gpus_take_an_eighth_of_the_hours():
    alone, eight = hours_of(planned(FP8_RUN)), hours_of(planned(FP8_RUN, "parallel.shard=8"))
    assert eight["BF16"] == pytest.approx(alone["BF16"] / 8, abs=0.06)


def test_a_micro_batch_of_auto_is_planned_as_one():
    page = planned(FP8_RUN, "data.micro_batch=auto")
    assert "micro-batch 1 (auto: the start tries larger ones)" in page


def test_a_branch_costs_the_steps_after_its_branch_point():
    def work(page: str):
        return [
            float(number)
            for number in re.findall(r"^  (?:\+ attention|Muon|BF16|FP8) +([\d.e+]+)", page, re.M)
        ]

    whole = changed(FP8_RUN, "steps=10_000 optim.kind=muon")
    branch = planned(whole, "start_from=out/trunk/checkpoints/step_00008000")
    assert work(branch) == pytest.approx([number / 5 for number in work(planned(whole))], rel=0.01)
    assert re.search("of this branch +2,000   after step 8000", branch)
    assert "of this branch" not in planned(whole) + planned(whole, "start_from=out/weights")


H100 = GPUS["h100"]
BIG = replace(load_config(ROOT / "configs/gpt1p5b_bf16.py").model, n_ctx=1024)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", MICRO_BATCH)
def test_parameters_are_the_models_own(size: str, tied: bool):
    config = replace(load_config(ROOT / f"configs/gpt{size}_bf16.py").model, tied=tied)
    for model in (
        config,
        replace(config, head_size=64),
        replace(config, head_size=192, n_kv_head=1),
    ):
        built = GPT.on_meta(model)
        shapes = [
            (m.in_features, m.out_features) for m in built.modules() if isinstance(m, nn.Linear)
        ]
        assert sorted(shapes) == sorted(
            (K, N) for _, K, N, count in linears(model) for _ in range(count)
        )
    assert (
        sum(K * N * count for _, K, N, count in linears(config))
        == GPT.on_meta(config).counts()["params_matmul"]
    )


# GB over BF16 that Inductor plans for 28 blocks of 1.5B and 16 x 1024 tokens: `python -m
# bench.compiler_plan` (torch 2.13.0, "written" and "called"); gw_hp and rows from plans of 4 and 2
# blocks (torch 2.11.0).
@pytest.mark.parametrize(
    "recipe, planned",
    [
        ("tensorwise", 107.2),
        ("tensorwise+kernels", 49.4),
        ("tensorwise_gw_hp", 28 * 3.0386),
        ("rowwise_with_gw_hp", 28 * 2.3620),
        ("rowwise", 28 * 5.4053),
    ],
)
def test_bytes_of_the_casts_are_those_of_inductors_plan(recipe: str, planned: float):
    def total(moved):
        return moved.amax + moved.cast + moved.transposed + moved.ours - moved.spared

    M, casts, nbytes = 16_384, CASTS[recipe], 0.0
    for name, K, N, count in linears(BIG):
        if name == "head":
            continue
        # 12: BF16 cast its weights and gradients then, too
        weights = (total(casts.w) - 12) * K * N
        nbytes += count * (M * total(casts.x.of(name)) * K + M * total(casts.g.of(name)) * N)
        nbytes += count * weights
    assert nbytes / 1e9 == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(
    "scaling, planned, within", [("delayed", 7_613, 12), ("bounded", 6_415, 5)]
)
def test_with_scales_known_before_too(scaling: str, planned: int, within: int):
    """kB a token of the plan at 1.5B, all kernels but matmuls and attention; BF16's are 5,961. The
    first and the last block are not as the others."""
    casts = CASTS[f"tensorwise+kernels+{scaling}"]
    nbytes = 0.0
    for name, K, N, count in linears(BIG):
        if name == "head":
            continue
        for moved, width in ((casts.x.of(name), K), (casts.g.of(name), N)):
            added = moved.amax + moved.cast + moved.transposed + moved.ours - moved.spared
            nbytes += count * width * added
    assert nbytes / 1e3 == pytest.approx(planned - 5_961, abs=within)


# Published runs on H100s. nanochat: T = 2,048, yet three layers of four look back 1,024 tokens
# only: 832 in the mean over a row, as T = 1,664 has. Others' BF16 casts weights and gradients in
# every micro-batch; a kernel of its own concatenates behind RoPE.
AUTOCAST = Casts(("bf16", "bf16", "bf16"), w=Moved(cast=12))
D12, D24, D26 = (
    GPTConfig(
        n_layer=d,
        n_embd=64 * d,
        n_ffn=256 * d,
        n_head=d // 2,
        n_ctx=1664,
        vocab_size=32768,
        tied=False,
    )
    for d in (12, 24, 26)
)
LLAMA_8B = GPTConfig(
    n_layer=32,
    n_embd=4096,
    n_ffn=14336,
    n_head=32,
    n_kv_head=8,
    n_ctx=8192,
    vocab_size=128256,
    tied=False,
)
# fms-fsdp, llama3_1.8b
LLAMA_1B8 = replace(LLAMA_8B, n_layer=24, n_embd=2048, n_ffn=7168, n_head=16)
XL, SMALL = (
    GPTConfig(n_layer=L, n_embd=C, n_ffn=4 * C, n_head=C // 64) for L, C in ((48, 1600), (12, 768))
)


# tokens: of a GPU and optimizer step. published: tokens/s of a GPU in BF16, or FP8's speed over
# BF16's, least and most where the sources differ. modelled: what docs/speed.md says.
@pytest.mark.parametrize(
    "model, micro_batch, tokens, shard, label, has_fp8_head, published, modelled",
    [
        (D24, 20, 66_560, 8, "bf16", False, (99_980,), 104_142),  # nanochat, Run 1
        (D26, 20, 66_560, 8, "bf16", False, (78_750,), 85_124),  # nanochat, LOG 2026-02-02
        (XL, 12, 2**17, 8, "bf16", False, (46_500, 47_800), 46_192),  # PyTorch (ao#1297) and llm.c
        (SMALL, 64, 65_536, 1, "bf16", False, (468_100,), 505_404),  # llm.c, 8 GPUs
        # nanochat, "still slower": a bound on one side
        (D12, 40, 66_560, 8, "tensorwise", True, (0.90, 1.00), 0.972),
        (D24, 20, 66_560, 8, "tensorwise", True, (1.07, 1.19), 1.113),
        (D26, 20, 66_560, 8, "tensorwise", True, (1.17,), 1.140),
        (D26, 20, 66_560, 8, "rowwise", True, (0.90,), 0.938),
        (LLAMA_1B8, 2, 2 * 8192, 128, "tensorwise", False, (1.18,), 1.119),  # 128 GPUs, fms-fsdp
        # torchao
        (LLAMA_8B, 1, 8192, 8, "rowwise", False, (1.10,), 1.061),
        (LLAMA_8B, 1, 8192, 8, "tensorwise", False, (1.25,), 1.226),
    ],
)
def test_published_runs_come_out_as_the_documents_say(
    model: GPTConfig,
    micro_batch: int,
    tokens: int,
    shard: int,
    label: str,
    has_fp8_head: bool,
    published: tuple[float, ...],
    modelled: float,
):
    gated = model in (LLAMA_1B8, LLAMA_8B)

    def seconds(arm, head=None):
        options = {"gated": gated, "rope": 30, "head": head}
        buckets = step(H100, model, arm, micro_batch, tokens, shard, AUTOCAST, **options)
        return sum(buckets.values())

    bf16 = seconds("bf16")
    this = seconds(label, CASTS[label] if has_fp8_head else None)
    got, slack = (
        (micro_batch * model.n_ctx / this, (0.97, 1.082))
        if label == "bf16"
        else (bf16 / this, (0.945, 1.055))
    )
    assert (
        got == pytest.approx(modelled, rel=0.002)
        and published[0] * slack[0] < got < published[-1] * slack[1]
    )


def test_the_forward_pass_of_a_linear_that_nanochat_timed():
    M, K, N = 65_536, 1664, 6656
    # published: 2.00 ms
    assert 1e3 * matmul_seconds(H100, "bf16", M, K, N) == pytest.approx(2.102, rel=0.002)
    casts = (5 * M * K + 9 * K * N) / H100  # of input and weight
    # published: 1.45 ms
    assert 1e3 * (matmul_seconds(H100, "fp8", M, K, N) + casts) == pytest.approx(1.487, rel=0.002)
    # a narrow one takes the time of its bytes
    for form, read, written in (("bf16", 2, 2), ("fp8", 1, 2), ("fp8_fp32", 1, 4)):
        assert (
            matmul_seconds(H100, form, M, 16, N) == (read * 16 * (M + N) + written * M * N) / H100
        )


def test_the_ratio_of_a_run_and_where_no_model_tells():
    run = changed(FP8_RUN, f"model.n_ctx=1024 data.micro_batch=16 data.tokens_per_step={2**19}")
    # under FSDP2 gradients are added up behind the matmul, on one GPU within it
    apart = replace(CASTS["bf16"], adds=False)

    def modelled(label: str, gpus: int = 1, bf16=CASTS["bf16"], head=None):
        return step(H100, BIG, label, 16, 2**19 // gpus, gpus, bf16, head=head)

    def expected_ratio(label: str, gpus: int = 1, bf16=CASTS["bf16"], head=None):
        return sum(modelled("bf16", gpus, bf16).values()) / sum(
            modelled(label, gpus, bf16, head).values()
        )

    assert (
        modelled_ratio(run, "h100")
        == modelled_ratio(run, "NVIDIA H100 80GB HBM3")
        == expected_ratio("tensorwise+kernels")
    )
    assert modelled_ratio(changed(run, "fp8.kernels=false"), "h100") == expected_ratio("tensorwise")
    assert modelled_ratio(changed(run, "parallel.shard=8"), "h100", 8) == expected_ratio(
        "tensorwise", 8, apart
    )
    assert modelled_ratio(changed(run, "fp8.head=true fp8.kernels=true"), "h100") == expected_ratio(
        "tensorwise+kernels", head=CASTS["tensorwise+kernels"]
    )
    # read by 32 matmuls and zeroed once; otherwise added to 31 times
    blocks = 28 * (4 * 2048**2 + 3 * 2048 * 5632)
    within, behind = (modelled("bf16", bf16=casts)["pointwise"] for casts in (CASTS["bf16"], apart))
    assert behind - within == pytest.approx((12 * 31 / 32 - 4 * 33 / 32) * blocks / H100)
    for gpu in ("b200", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "a100"):
        assert modelled_ratio(run, gpu) is None
    for setting in (
        "fp8.recipe=auto",
        "fp8.recipe=cscale",
        "fp8.skip=mlp.down",
        "fp8.first_bf16=1",
        "parallel.compile=off",
        "parallel.recompute=true",
    ):
        assert modelled_ratio(changed(run, setting), "h100") is None, setting


@pytest.mark.parametrize(
    "size, words, remark",
    [
        ("350m", "fp8.kernels=false", "fp8.kernels=true, 1.0"),
        ("350m", "fp8.recipe=rowwise", "fp8.recipe=tensorwise fp8.kernels=true, 1.0"),
        ("350m", "", None),
        ("125m", "parallel.shard=8", "faster: parallel.shard=1, where"),
        (
            "125m",
            "parallel.shard=8 fp8.all_gather=true",
            "faster: parallel.shard=1 fp8.all_gather=false, where",
        ),
    ],
)
def test_a_plan_that_gains_nothing_says_what_would_be_faster(
    size: str, words: str, remark: str | None
):
    """350M by torchao's casts takes as long as BF16."""
    page = planned(load_config(ROOT / f"configs/gpt{size}_fp8.py"), words)
    remarks = [line.strip() for line in page.splitlines() if line.strip().startswith("faster:")]
    assert bool(remarks) == (remark is not None)
    assert remark is None or remark in remarks[0]


def test_the_command_says_that_nothing_is_measured(capsys: pytest.CaptureFixture[str]):
    out = asked(capsys, roofline.main, "gpu=h200", "sizes=1p5b", "context=2048")
    assert out.startswith("MODELLED step times on H200") and "nothing here is measured" in out
    assert (
        "1p5b, T=2048, micro-batch 8" in out
        and "zero casts+head" in out
        and "nan" not in out.split()
    )


@pytest.mark.parametrize(
    "trials, first, best, order",
    [
        # one slower is none in a row
        ({1: 10, 2: 20, 4: 19, 8: 25, 16: 24, 32: 23}, 0, 8, [1, 2, 4, 8, 16, 32]),
        # nothing gained: the smaller one
        ({1: 10, 2: 20, 4: 20.1, 8: 20.15, 16: 99}, 0, 2, [1, 2, 4, 8]),
        (
            {1: 10, 2: 10.05, 4: 10.15},
            0,
            2,
            [1, 2, 4],
        ),  # less than GAIN below the best, not the first
        # nothing beyond one that fails; downwards to the first that fits
        ({1: 5, 2: 10, 4: FULL, 8: FULL}, 2, 2, [4, 2]),
        ({1: FULL, 2: FULL, 4: FULL}, 1, None, [2, 1]),
        # what broke is not chosen, what ran may be
        ({1: 10, 2: 20, 4: BROKEN, 8: 50}, 0, 2, [1, 2, 4]),
        ({1: BROKEN, 2: FULL}, 1, MachineError, [2, 1]),
    ],
)
def test_the_fastest_that_fits(trials: dict, first: int, best: int | type | None, order: list[int]):
    attempt = mock.Mock(
        side_effect=[
            trials[n] if isinstance(trials[n], Exception) else (trials[n], 1.0) for n in order
        ]
    )
    with (
        pytest.raises(MachineError, match="a kernel's offset")
        if best is MachineError
        else nullcontext()
    ):
        assert search(list(trials), first, attempt) == best
    assert attempt.call_args_list == [mock.call(n) for n in order]


@pytest.mark.parametrize(
    "sequences, size, recipe, T, numbers",
    [
        (512, 8, "off", 32, [1, 2, 4, 8, 16, 32, 64]),
        (24, 2, "off", 32, [1, 2, 3, 4, 6, 12]),
        (24, 2, "tensorwise", 8, [2, 4, 6, 12]),
        (7, 1, "off", 32, [1]),
        (12, 1, "mxfp8", 8, [4, 12]),
    ],
)
def test_candidates_are_what_a_run_accepts(
    tiny: Config, sequences: int, size: int, recipe: str, T: int, numbers: list[int]
):
    config = changed(
        tiny,
        f"model.n_ctx={T} data.micro_batch=auto"
        f" data.tokens_per_step={sequences * T} fp8.recipe={recipe}",
    )
    assert candidates(config, size) == numbers
    for n in numbers:
        assert changed(config, f"data.micro_batch={n}").accumulation(size) * n * size == sequences


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch):
    """Trials that all run out of memory, and that none is told of."""
    trials = mock.Mock(side_effect=MemoryError)
    monkeypatch.setattr(plan, "try_one", trials)
    monkeypatch.setattr(plan, "run_on_rank0", lambda world, work: work())
    return trials


def test_a_number_is_not_tried(tiny: Config, trials):
    assert resolve_micro_batch(tiny, ALONE) is tiny
    assert not trials.called


def test_a_resume_keeps_its_number(tiny: Config, trials):
    tiny.run_dir.mkdir(parents=True)
    write_json(tiny.run_dir / "config.json", asdict(changed(tiny, "data.micro_batch=16")))
    resumed = resolve_micro_batch(changed(tiny, "data.micro_batch=auto"), ALONE)
    assert resumed.data.micro_batch == 16
    assert not trials.called


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("", "seed was 5, now 1337"),
        ("run=b data.dir=/nowhere", "nowhere"),
        ("run=b steps=100_000", "data.max_epochs"),
        (
            "run=b fp8.recipe=mxfp8 model.n_ctx=8 data.tokens_per_step=24",
            "no micro-batch .* has a multiple of 32 tokens.* data.tokens_per_step=24",
        ),
    ],
)
def test_mistakes_are_told_before_any_trial(tiny: Config, trials, words: str, sentence: str):
    tiny.run_dir.mkdir(parents=True)
    write_json(tiny.run_dir / "config.json", asdict(changed(tiny, "seed=5")))
    with pytest.raises(UserError, match=sentence):
        resolve_micro_batch(changed(tiny, f"data.micro_batch=auto {words}"), ALONE)
    assert not trials.called


def test_a_plan_is_refused_where_auto_has_nothing_to_try(tiny: Config):
    words = "data.micro_batch=auto fp8.recipe=mxfp8 model.n_ctx=8 data.tokens_per_step=24"
    with pytest.raises(UserError, match="no micro-batch of whole sequences"):
        plan.plan(changed(tiny, words), "h100")


def test_trials_are_of_the_whole_run_on_one_device(
    tiny: Config, trials, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "FIRST_TOKENS", 100)  # of 32 each: the search begins at 4
    config = changed(
        tiny,
        "data.micro_batch=auto fp8.recipe=tensorwise fp8.all_gather=true parallel.replicate=2"
        " parallel.shard=2 parallel.recompute=true",
    )
    with pytest.raises(UserError, match=r"none of \[1, 2, 4\] that fits"):
        resolve_micro_batch(config, replace(ALONE, size=4))
    alone = changed(config, "fp8.all_gather=false parallel.replicate=1 parallel.shard=none")
    tried = [changed(alone, f"data.micro_batch={n}") for n in (4, 2, 1)]
    assert trials.call_args_list == [mock.call(config, ALONE.device) for config in tried]


class Killer:
    def __reduce__(self):  # a config that ends the process which it is sent to
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch):
    """Trials fork off a process that has imported train.py, which takes a second less; one that is
    spawned, as users have it: test_a_run_finds_its_micro_batch_and_keeps_it."""
    monkeypatch.setattr(plan.multiprocessing, "get_context", lambda method: FORKS)
    forkserver.ensure_running()


@pytest.mark.parametrize(
    "kind, error, sentence",
    [
        ("killed", MemoryError, None),
        ("vast", MemoryError, None),
        ("refused", UserError, "fp8.skip"),
        ("broken", MachineError, "AttributeError.*give data"),
    ],
)
def test_a_trial_answers_however_it_ends_and_leaves_no_process(
    tiny: Config, forks, kind: str, error: type, sentence: str | None
):
    configs = {
        "killed": Killer(),
        # 15 TB of weights
        "vast": changed(tiny, f"model.n_embd={2**16} model.n_ffn={2**18} model.n_layer=64"),
        "refused": changed(tiny, "fp8.recipe=tensorwise fp8.skip=nothing"),
        "broken": tiny.data,
    }
    with pytest.raises(error, match=sentence):
        try_one(configs[kind], ALONE.device)
    assert not multiprocessing.active_children()


def test_a_trial_ends_with_its_parent(tiny: Config):
    """One that would take minutes."""
    slow = changed(
        tiny,
        f"data.micro_batch=512 data.tokens_per_step={2**14} model.n_embd=512 model.n_ffn=2048"
        " model.n_layer=8",
    )
    parent = multiprocessing.get_context("spawn").Process(target=try_one, args=(slow, ALONE.device))
    parent.start()
    trial = wait_for(
        lambda: [
            p
            for p in children(parent.pid)
            if b"spawn_main" in command_line(p)
            # pages: it trains, in a GiB
            and int(read_bytes(f"/proc/{p}/statm").split()[1]) > 2**18
        ]
    )
    parent.kill()
    parent.join()
    wait_for(lambda: not command_line(trial[0]), 30)  # it does not go on alone


def test_a_run_finds_its_micro_batch_and_keeps_it(tiny: Config, run: Callable[..., str]):
    # One trial, which takes a process of its own.
    config = changed(
        tiny,
        "fp8.recipe=tensorwise data.micro_batch=auto data.tokens_per_step=32 steps=2"
        " checkpoint.every=none",
    )
    output = run(config)
    assert (
        output.count("data.micro_batch=auto: ") == 2 and "data.micro_batch=auto: 1 it is" in output
    )
    assert json.loads((tiny.run_dir / "config.json").read_text())["data"]["micro_batch"] == 1
    output = run(config)
    assert "nothing to do" in output and "tokens/s" not in output
