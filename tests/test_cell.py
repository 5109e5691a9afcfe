"""The benchmark's child: what it times is what train.py trains, its answers are what the protocol says."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import buckets, cell, compiled, orders, subject
from bench.buckets import BUCKETS, bucket_of
from bench.subject import Spec, Subject, config_of, tokens_like_text
from model import GPT
from runtime import fp8
from runtime.cli import UserError
from runtime.config import FP8Config
from tests.conftest import ROOT

CPU = torch.device("cpu")
TINY = {"n_layer": 2, "n_embd": 64, "n_ffn": 128, "n_head": 2, "vocab_size": 257}
SPEC = Spec(size="tiny", label="bf16_eager", T=32, micro_batch=4, tokens_per_step=512, device="cpu", model=TINY)


def weights(c):
    return [p.detach().clone() for p in c.subject.model.parameters()]


@pytest.fixture(scope="module")
def tiny():
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()     # of other files' tests in this process
    return orders.Cell(SPEC)


# ------------------------------------------------------------------------------------------------------------- buckets

@pytest.mark.parametrize("name, bucket", [
    # vendors, as profilers of H100s print them
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"), ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNN", "matmul"),
    ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "matmul"), ("nvjet_sm90_hss_320x128", "matmul"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
     "matmul"),
    ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<...>>>",
     "matmul"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>(...)", "matmul"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(...)", "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<true>(...)", "attention"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, cutlass::bf",
     "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)", "attention"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
     "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>", "optimizer"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
     "optimizer"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>", "pointwise"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>", "pointwise"),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>", "cast"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>", "cast"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>", "loss"),
    ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>", "loss"),
    ("Memcpy DtoD (Device -> Device)", "other"), ("Memset (Device)", "other"), ("some_kernel_of_tomorrow", "other"),
    # ours, and Inductor's for this model and sm_90 (torch 2.11)
    ("_cast_both", "cast"), ("_cross_entropy_grad", "loss"),
    ("triton_red_fused__log_softmax__to_copy_prepare_softmax_online_26", "loss"),
    ("triton_red_fused__log_softmax__log_softmax_backward_data__to_copy_arange_eq_expand_nll_loss_backward_nll_loss_forward_"
     "scalar_tensor_unsqueeze_view_where_0", "loss"),
    ("triton_per_fused__to_copy_add_div_embedding_dense_backward_expand_mul_nll_loss_forward_pow_sum_view_27", "pointwise"),
    ("triton_poi_fused__to_copy_amax_clamp_clone_cross_entropy_grad_expand_mul_reciprocal_unsqueeze_view_2", "loss"),
    ("triton_per_fused__to_copy_add_clamp_eq_gather_log_scalar_tensor_squeeze_sub_sum_unsqueeze_view_where_11", "loss"),
    ("triton_red_fused__to_copy_abs_add_amax_cast_both_clamp_mean_mul_pow_reciprocal_rsqrt_view_1", "pointwise"),
    ("triton_red_fused_amax_2", "cast"), ("triton_red_fused__unsafe_view_abs_amax_cat_clone_transpose_view_11", "pointwise"),
    ("triton_poi_fused__to_copy_t_2", "cast"), ("triton_red_fused_abs_max_t_3", "cast"),
    ("triton_per_fused__to_copy_abs_clamp_max_mul_reciprocal_t_4", "cast"),
    ("triton_poi_fused__scaled_mm__to_copy_clamp_clone_mul_reciprocal_t_view_12", "cast"),      # beside a matmul, none itself
    ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_split_t_view_18", "cast"),
    ("triton_red_fused_abs_max_mul_silu_split_view_16", "cast"),
    ("triton_red_fused__to_copy_abs_add_max_mean_mul_pow_rsqrt_view_13", "pointwise"),      # a norm that tells its amax
    ("triton_red_fused_abs_amax_mul_silu_split_view_5", "pointwise"),
    ("triton_per_fused__unsafe_view_abs_cat_clone_max_transpose_view_22", "pointwise"),
    ("triton_poi_fused__unsafe_view_mul_silu_split_8", "pointwise"),
    ("triton_poi_fused__to_copy_add_cat_mul_neg_slice_21", "pointwise"), ("triton_poi_fused__to_copy_add_28", "pointwise"),
    ("triton_poi_fused__scaled_dot_product_cudnn_attention_cat_view_3", "pointwise"),
    ("triton_tem_fused_mm_7", "matmul"), ("triton_tem_fused_flex_attention_0", "attention"),
    # a CPU's operators
    ("aten::mm", "matmul"), ("aten::_scaled_mm", "matmul"), ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ("aten::copy_", "cast"), ("aten::_log_softmax_backward_data", "loss"), ("aten::_fused_adamw_", "optimizer"),
    ("graph_0_cpp_fused__scaled_mm__to_copy_abs_clamp_clone_max_mul_reciprocal_t_view_3", "cast")])
def test_a_kernel_is_known_by_its_name(name, bucket):
    assert bucket_of(name) == bucket


def test_an_update_is_the_optimizer_but_for_its_casts():
    kernels = [("nvjet_tst_1", 1.0, 3), ("void at::native::reduce_kernel<>", 2.0, 1), ("_cast_both", 4.0, 9)]
    assert buckets.sums(kernels) == dict.fromkeys(BUCKETS, 0.0) | {"matmul": 1.0, "pointwise": 2.0, "cast": 4.0}
    assert buckets.sums(kernels, update=True) == dict.fromkeys(BUCKETS, 0.0) | {"optimizer": 3.0, "cast": 4.0}


def test_a_trace_counts_what_ran_and_leaves_out_named_ranges():
    a = torch.randn(64, 64)

    def act():
        with torch.profiler.record_function("a range of mine"):
            for _ in range(5):
                torch.nn.functional.silu(a @ a)

    rows, span = buckets.trace(act, CPU)
    calls = {name: n for name, _, n in rows}
    assert calls["aten::mm"] == 5 and calls["aten::silu"] == 5
    assert [s for _, s, _ in rows] == sorted((s for _, s, _ in rows), reverse=True)
    assert 0 < sum(s for name, s, _ in rows if name.startswith("aten::")) <= span < 60


def test_kernels_of_a_gpu_are_summed_from_raw_events(monkeypatch):
    def event(name, start, end, device=torch.autograd.DeviceType.CUDA, named=False):
        return SimpleNamespace(name=lambda: name, start_ns=lambda: start, end_ns=lambda: end, duration_ns=lambda: end - start,
                               device_type=lambda: device, is_user_annotation=lambda: named)

    events = [event("nvjet_a", 1000, 3000), event("nvjet_a", 4000, 7000), event("_cast_both", 8000, 9000),
              event("Optimizer.step#AdamW.step", 0, 99_000, named=True),
              event("cudaLaunchKernel", 0, 50_000, torch.autograd.DeviceType.CPU)]
    fake = SimpleNamespace(start=lambda: None, stop=lambda: None,
                           profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(buckets, "profile", lambda activities: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ran = []
    rows, span = buckets.trace(lambda: ran.append(1), torch.device("cuda"))
    assert [(name, round(s * 1e9), n) for name, s, n in rows] == [("nvjet_a", 5000, 2), ("_cast_both", 1000, 1)]
    assert round(span * 1e9) == 8000 and ran == [1]
    events.clear()
    with pytest.raises(buckets.ProfilerError, match="saw nothing"):
        buckets.trace(lambda: None, torch.device("cuda"))


# ------------------------------------------------------------------------------------------------------- what is timed

@pytest.mark.parametrize("size, T, micro_batch", [("125m", 1024, 64), ("350m", 1024, 32), ("760m", 2048, 12), ("1p5b", 1024, 16)])
def test_a_cell_is_the_config_of_its_size_with_its_label(size, T, micro_batch):
    spec = Spec(size=size, label="bf16", T=T, micro_batch=micro_batch, tokens_per_step=32 * T * micro_batch, seed=7)
    config = config_of(spec)
    shipped = subject.load_config(ROOT / "configs" / f"gpt{size}_bf16.py")
    assert config.model == replace(shipped.model, n_ctx=T) and config.optim == shipped.optim
    assert (config.data.micro_batch, config.data.tokens_per_step, config.seed) == (micro_batch, spec.tokens_per_step, 7)
    assert config.parallel.compile and config.fp8 == FP8Config()
    assert not config_of(replace(spec, label="bf16_eager")).parallel.compile
    assert config_of(replace(spec, label="rowwise")).fp8 == FP8Config(recipe="rowwise")
    both = config_of(replace(spec, label="tensorwise+kernels+head")).fp8
    assert both == FP8Config(recipe="tensorwise", kernels=True, head=True)


def test_another_model_is_given_by_its_keys():
    keys = {"n_layer": 3, "n_embd": 96, "n_ffn": 256, "n_head": 3, "n_kv_head": None, "vocab_size": 32768, "tied": False,
            "qk_norm": True, "n_ctx": 64}
    model = config_of(replace(SPEC, size="ours_d12", T=64, model=keys)).model
    assert {key: asdict(model)[key] for key in keys} == keys


@pytest.mark.parametrize("change, word", [
    ({"label": "tensorwize"}, "tensorwise"), ({"label": "bf16+head"}, "fp8.head"), ({"label": "tensorwise+hed"}, r"\+head"),
    ({"label": ""}, "recipe"), ({"size": "3b", "model": None}, "3b"), ({"size": "../x", "model": None}, "size"),
    ({"model": {**TINY, "n_layrs": 2}}, "n_layer"), ({"tokens_per_step": 500}, "micro-batches"),
    ({"micro_batch": 0}, "micro_batch"), ({"model": {**TINY, "n_head": 3}}, "n_head")])
def test_an_impossible_cell_is_a_sentence(change, word):
    with pytest.raises(UserError, match=word):
        orders.Cell(replace(SPEC, **change))


def test_a_gpu_that_is_not_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cpu"):
        orders.Cell(replace(SPEC, device="cuda"))


def test_what_is_timed_are_the_lines_of_train():
    lines = [" ".join(line.split()) for line in (ROOT / "train.py").read_text().splitlines()]
    ours = [" ".join(line.split()) for line in (ROOT / "bench" / "subject.py").read_text().splitlines()]
    for line in ("micro_loss = model(x, y).sum()", "(micro_loss * step_scale).backward()", "optimizer.step()",
                 "fp8.refresh_fp8_weights(model)", "optimizer.zero_grad()"):
        assert line in lines and line in ours, line
    assert any("parallel.clip_gradients(model, config.optim.clip)" in line for line in lines)


def test_a_micro_step_is_the_gradient_of_the_mean_loss_of_a_step(tiny):
    x, y = tiny.batches[0]
    model = GPT(tiny.subject.model.config, torch.float64)
    model.load_state_dict(tiny.subject.model.state_dict())
    model.double().init_buffers()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())         # logits; the mean over B * T
    (loss / 4).backward()                                               # 512 tokens a step are 4 micro-batches of 4 x 32
    for times in (1, 2):
        told = tiny.subject.micro_step(x, y)
        assert not told.requires_grad and told.shape == () and abs(told.item() - loss.item()) < 5e-3
        for (name, p), q in zip(tiny.subject.model.named_parameters(), model.parameters(), strict=True):
            error = (p.grad.double() / times - q.grad).norm() / q.grad.norm()
            assert error < 0.05, (name, error)
    tiny._release()
    assert all(p.grad is None for p in tiny.subject.model.parameters())


def test_the_flops_in_fp8_are_those_of_matmuls_with_both_operands_in_fp8():
    with torch.device("meta"):
        model = GPT(config_of(replace(SPEC, T=64)).model)
    linears = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    whole, head = sum(linears.values()), linears["head"]
    for recipe, each in (("tensorwise", 6), ("amax", 6), ("rowwise", 6), ("tensorwise_gw_hp", 4), ("rowwise_with_gw_hp", 4)):
        assert subject.fp8_flops(fp8.select(model, FP8Config(recipe=recipe))) == each * (whole - head), recipe
    assert subject.fp8_flops(fp8.select(model, FP8Config(recipe="tensorwise", head=True))) == 6 * whole
    assert subject.fp8_flops(fp8.select(model, FP8Config())) == 0


def test_tokens_are_as_frequent_as_words_and_depend_on_the_seed_alone():
    x, y = tokens_like_text(64, 128, 1000, 3, CPU)
    assert x.shape == y.shape == (64, 128) and x.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.min() >= 0 and x.max() < 1000
    again, other = tokens_like_text(64, 128, 1000, 3, CPU)[0], tokens_like_text(64, 128, 1000, 4, CPU)[0]
    assert torch.equal(x, again) and not torch.equal(x, other)
    share = (x == 0).double().mean().item()
    want = (1 / 2.7) / sum(1 / (k + 2.7) for k in range(1000))
    assert abs(share - want) < 5 * math.sqrt(want / x.numel())


# ------------------------------------------------------------------------------------------------------------- orders

def test_the_start_tells_what_was_built(tiny):
    told = tiny.started
    with torch.device("meta"):
        counts = GPT(config_of(SPEC).model).counts()
    assert all(told[key] == counts[key] for key in ("flops_per_token", "flops_per_token_causal", "params_total", "params_matmul"))
    assert (told["converted"], told["of"], told["fp8_flops_per_token"]) == (0, 9, 0)
    assert (told["graph_breaks"], told["graphs"]) == (0, 0)
    vectors = sum(1 for _ in tiny.subject.model.parameters())
    assert told["optimizer_bytes"] == 8 * counts["params_total"] + 4 * vectors      # two moments and a count of updates
    assert told["peak_bytes"] is None and told["idle_bytes"] is None and told["attention_kernel"] is None
    assert all(0 <= told[key] < 3600 for key in ("compile_s", "first_step_s", "build_s", "import_s"))
    json.dumps(told)


def test_a_turn_times_each_micro_step_after_one_that_is_not(tiny, monkeypatch):
    now, seen = [0.0], []

    def micro_step(x, y):
        seen.append((x, y))
        now[0] += len(seen)
        return torch.zeros(())

    monkeypatch.setattr(tiny.subject, "micro_step", micro_step)
    monkeypatch.setattr(orders.time, "perf_counter", lambda: now[0])
    answer = tiny.obey({"do": "turn", "micro_steps": 5})
    assert answer["seconds"] == [2, 3, 4, 5, 6] and answer["wall_s"] == 21 and answer["recompiles"] == 0
    assert len({x.data_ptr() for x, _ in seen}) == orders.BATCHES


def test_a_gpu_is_timed_by_events_in_its_queue_with_one_wait_at_the_end(tiny, monkeypatch):
    queue, waits = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = queue[0]

        def synchronize(self):
            waits.append(queue[0])

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3       # milliseconds, as CUDA's

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tiny, "on_gpu", True)

    def act():
        queue[0] += 0.25

    assert tiny._seconds(act, 4) == [0.25] * 4 and waits == [1.0]


def test_the_optimizer_order_changes_no_weight_and_leaves_no_state(tiny, monkeypatch):
    made, make = [], tiny.subject.make_optimizers
    monkeypatch.setattr(tiny.subject, "make_optimizers", lambda: made.append(make()) or made[-1])
    before = weights(tiny)
    answer = tiny.obey({"do": "optimizer"})
    assert len(answer["seconds"]) == orders.UPDATES and min(answer["seconds"]) > 0
    assert all(map(torch.equal, before, weights(tiny))) and not made[0][0].state


@pytest.mark.parametrize("label", ["bf16_eager", "tensorwise+kernels"])
def test_sanity_is_plain_training_on_one_batch_and_puts_the_weights_back(tiny, label, monkeypatch):
    """Against a loop of its own: every micro-batch of a step passed, AdamW as the config has it."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)     # FP8 uncompiled: numerics are the same
    c = tiny if label == "bf16_eager" else orders.Cell(replace(SPEC, label=label))
    before = weights(c)
    losses = c.obey({"do": "sanity", "steps": 6})["losses"]
    assert all(map(torch.equal, before, weights(c)))
    assert c.obey({"do": "sanity", "steps": 6})["losses"] == losses
    config = config_of(SPEC)
    model = GPT(config.model)
    model.init_weights(SPEC.seed)
    x, y = tokens_like_text(SPEC.micro_batch, SPEC.T, 257, SPEC.seed, CPU)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    adam, want = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95)), []
    for i in range(6):
        for group in adam.param_groups:
            group["lr"] = 0.1 * config.optim.lr * (i + 1) / 6
        for _ in range(4):
            loss = model(x, y).sum() / (SPEC.micro_batch * SPEC.T)
            (loss / 4).backward()
        want.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    assert want[0] - want[-1] > 0.004
    worst = max(abs(a - b) for a, b in zip(losses, want, strict=True))
    assert worst < 2e-3 if label == "bf16_eager" else 1e-6 < worst < 0.03, worst


@pytest.mark.parametrize("sequences", [4, 12])
def test_sanity_gives_an_update_the_gradient_of_a_whole_step(tiny, sequences, monkeypatch):
    norms = []

    def update(optimizers):
        norms.append(torch.stack([p.grad.norm() for p in tiny.subject.model.parameters()]))

    monkeypatch.setattr(tiny.subject, "update", update)
    tiny.obey({"do": "sanity", "steps": 1, "sequences": sequences})
    for x, y in tiny._batches(sequences // 4):      # each stands for its part of the step's four micro-batches
        tiny.subject.micro_step(x, y)
    once = torch.stack([p.grad.norm() for p in tiny.subject.model.parameters()])
    tiny._release()
    assert torch.allclose(norms[0], once * 4 / (sequences // 4), rtol=1e-4)


def test_sanity_can_be_compared_between_micro_batches(tiny):
    half = orders.Cell(replace(SPEC, micro_batch=2))
    one, two = (c.obey({"do": "sanity", "steps": 5, "sequences": 8})["losses"] for c in (tiny, half))
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 2e-3
    with pytest.raises(UserError, match="no multiple"):
        tiny.obey({"do": "sanity", "sequences": 6})


def test_a_profile_is_of_a_whole_step(tiny, monkeypatch):
    answer = tiny.obey({"do": "profile"})
    assert set(answer["buckets"]) == set(BUCKETS) and sum(answer["buckets"].values()) <= 1.05 * answer["step_s"]
    assert all(answer["buckets"][name] > 0 for name in ("matmul", "attention", "pointwise", "loss", "optimizer"))
    assert "flash_attention" in answer["attention_kernel"] and len(answer["kernels"]) == orders.KERNELS
    calls = {name: n for name, _, n in answer["kernels"]}
    # 9 Linears, 3 matmuls each, in each of 4 micro-batches
    assert calls["aten::mm"] == 9 * 3 * 4
    traces = iter([([("nvjet", 1.0, 2), ("_cast_both", 0.5, 2)], 2.0), ([("adam", 0.25, 1), ("_cast_both", 0.125, 7)], 0.5)])
    monkeypatch.setattr(orders, "trace", lambda act, device: next(traces))
    answer = tiny.obey({"do": "profile"})
    assert answer["buckets"] == dict.fromkeys(BUCKETS, 0.0) | {"matmul": 2.0, "cast": 1.125, "optimizer": 0.25}
    assert answer["step_s"] == 4.5 and answer["kernels"][0] == ["nvjet", 2.0, 4]


def test_a_profiler_that_does_not_work_costs_no_cell(tiny, monkeypatch):
    def broken(activities):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore")

    monkeypatch.setattr(buckets, "profile", broken)
    answer = tiny.obey({"do": "profile"})
    assert answer["buckets"] is answer["kernels"] is answer["step_s"] is None
    assert "INSUFFICIENT" in answer["profile_error"] and "\n" not in answer["profile_error"]
    monkeypatch.setattr(orders, "trace", lambda act, device: act() and ([], 0.0))
    monkeypatch.setattr(tiny.subject, "micro_step", lambda x, y: 1 / 0)
    with pytest.raises(ZeroDivisionError):      # what fails by itself is no fault of the profiler
        tiny.obey({"do": "profile"})


def test_out_of_memory_is_waited_out_and_else_told(tiny, monkeypatch):
    pauses, tries = [], []
    monkeypatch.setattr(orders.time, "sleep", pauses.append)

    def act():
        tries.append(1)
        if len(tries) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return "done"

    assert tiny._patiently(act, tries=6) == "done" and pauses == [orders.PAUSE_S] * 3
    tries.clear()
    with pytest.raises(torch.OutOfMemoryError):
        tiny._patiently(act, tries=2)
    with pytest.raises(ValueError, match="no matter of memory"):
        tiny._patiently(lambda: (_ for _ in ()).throw(ValueError("no matter of memory")), tries=3)
    assert len(pauses) == 4
    wrapped = RuntimeError("backend='inductor' raised:")
    wrapped.__cause__ = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
    assert orders.is_out_of_memory(wrapped) and not orders.is_out_of_memory(RuntimeError("out of resource: shared memory"))


def test_compiled_graphs_breaks_and_recompiles_are_counted(monkeypatch):
    compile = torch.nn.Module.compile       # dynamo's part alone: Inductor needs 20 s here
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compile(self, **how, backend="eager"))
    torch.compiler.reset()
    compiled._counters().get("stats", {}).pop("unique_graphs", None)
    c = orders.Cell(replace(SPEC, label="bf16"))
    assert (c.started["graphs"], c.started["graph_breaks"]) == (1, 0)
    assert c.obey({"do": "turn", "micro_steps": 2})["recompiles"] == 0
    assert c.obey({"do": "sanity", "steps": 2})["recompiles"] == 0
    assert c.obey({"do": "optimizer"})["recompiles"] == 0
    c.batches = [(x[:, :16], y[:, :16]) for x, y in c.batches]
    assert c.obey({"do": "turn", "micro_steps": 2})["recompiles"] == 1
    torch.compiler.reset()


def test_a_peer_comes_through_the_same_orders(monkeypatch):
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(50, 50)

    def load(name, folder, size, micro_batch, T, device, *, tokens_per_step, seed, overrides):
        asked.append((name, folder, size, micro_batch, T, device, tokens_per_step, seed, overrides))
        torch.manual_seed(seed)
        model = Theirs()

        def micro_step(x, y):
            loss = F.cross_entropy(model.table(x).flatten(0, 1), y.flatten())
            (loss / 2).backward()
            return loss.detach()

        def update(optimizers):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return Subject(model, 50, micro_step, lambda: [torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)], update,
                       {"flops_per_token": 1}, describe=["theirs"])

    from bench import peers
    asked = []
    monkeypatch.setattr(peers, "load", load)
    spec = Spec(size="nanogpt_124m", label="nanogpt", T=8, micro_batch=2, tokens_per_step=32, device="cpu", seed=5,
                peer={"name": "nanogpt", "dir": "/there"})
    c = orders.Cell(spec)
    assert asked == [("nanogpt", "/there", "nanogpt_124m", 2, 8, CPU, 32, 5, {})]
    assert c.started["describe"] == ["theirs"] and c.started["optimizer_bytes"] == 4 * 50 * 50
    before = weights(c)
    losses = c.obey({"do": "sanity", "steps": 20})["losses"]
    assert losses[-1] < losses[0] and all(map(torch.equal, before, weights(c)))
    assert c.obey({"do": "turn", "micro_steps": 3})["seconds"] and c.obey({"do": "optimizer"})["seconds"]


# ----------------------------------------------------------------------------------------------------------- the process

def start(spec: dict):
    return subprocess.Popen([sys.executable, "bench/cell.py", json.dumps(spec)], cwd=ROOT,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_process_answers_in_lines_of_json_and_leaves_with_whom_it_serves():
    spec = {key: value for key, value in asdict(SPEC).items() if value is not None}
    alone = start(spec)
    alone.stdin.close()         # who asked is gone
    served = start(spec)        # told all at once: a close before the end lets it finish
    out, said = served.communicate('{"do": "turn", "micro_steps": 2}\n{"do": "close"}\n')
    lines = [json.loads(line) for line in out.splitlines()]
    assert served.returncode == 0 and [line["ok"] for line in lines] == [True, True, True], said
    assert lines[0]["params_total"] > 0 and len(lines[1]["seconds"]) == 2 and lines[2] == {"ok": True}
    assert alone.wait() == 0 and not alone.stdout.read()
    for pipe in (alone.stdout, alone.stderr):
        pipe.close()


@pytest.mark.parametrize("error, code, told", [
    (UserError("do='dance' is no order"), 2, ("UserError: do='dance' is no order", False)),
    (torch.OutOfMemoryError("out of memory: 2 GiB\nmore"), 1, ("OutOfMemoryError: out of memory: 2 GiB", True)),
    (RuntimeError(""), 1, ("RuntimeError: without a word", False))])
def test_a_failure_is_an_answer_and_an_exit_code(monkeypatch, tmp_path, capsys, error, code, told):
    class Failing:
        started = {"graphs": 1}

        def __init__(self, spec):
            assert spec == SPEC

        def obey(self, order):
            if order["do"] == "fail":
                raise error
            return {"seconds": [order["do"]]}

    given = cell.queue.SimpleQueue()
    for do in ("a", "b", "fail", "c"):
        given.put({"do": do})
    monkeypatch.setattr(cell, "Cell", Failing)
    monkeypatch.setattr(cell, "_listen", lambda: given)
    with open(tmp_path / "out", "wb", buffering=0) as file:
        monkeypatch.setattr(cell, "_take_stdout", lambda: file)
        assert cell.main([json.dumps(asdict(SPEC))]) == code
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert lines == [{"ok": True, "graphs": 1}, {"ok": True, "seconds": ["a"]}, {"ok": True, "seconds": ["b"]},
                     {"ok": False, "error": told[0], "oom": told[1]}]
    assert "Traceback" in capsys.readouterr().err


def test_without_a_spec_it_says_what_it_is(capsys):
    assert cell.main(["--help"]) == 0 and "micro_batch" in capsys.readouterr().out
    assert cell.main([]) == 2


@pytest.mark.parametrize("text, word", [("{", "JSON"), ("[]", "cell"), ('{"size": "125m"}', "label"), ('{"sise": 1}', "sise")])
def test_a_spec_that_is_none_is_a_sentence(text, word):
    with pytest.raises(UserError, match=word):
        cell._spec(text)


def test_numbers_that_json_lacks_become_null_and_an_error_is_one_line(tmp_path):
    with open(tmp_path / "out", "wb", buffering=0) as file:
        cell._say(file, {"losses": [1.5, math.nan, math.inf]})
    assert (tmp_path / "out").read_text() == '{"ok": true, "losses": [1.5, null, null]}\n'
    assert orders.one_line(ValueError("\n first\nsecond")) == "ValueError: first"
    assert len(orders.one_line(KeyError("x" * 999))) <= 400


@pytest.mark.gpu
def test_a_cell_on_this_gpu(monkeypatch):
    asked = {"size": "125m", "T": 1024, "micro_batch": 8, "tokens_per_step": 16_384, "device": "cuda", "model": {"n_layer": 2}}
    losses = {}
    for label in ("bf16", "tensorwise", "tensorwise+kernels"):
        process = start({**asked, "label": label})
        given = [{"do": "turn", "micro_steps": 8}, {"do": "optimizer"}, {"do": "sanity", "steps": 20}, {"do": "profile"},
                 {"do": "close"}]
        out, said = process.communicate("".join(json.dumps(order) + "\n" for order in given))
        begun, turn, update, sanity, profile, closed = (json.loads(line) for line in out.splitlines())
        assert process.returncode == 0 and closed["ok"], said
        assert begun["graphs"] == 1 and begun["graph_breaks"] == 0 and turn["recompiles"] == profile["recompiles"] == 0
        assert bucket_of(begun["attention_kernel"]) == "attention"
        weights_bytes = 4 * begun["params_total"]
        assert weights_bytes <= begun["idle_bytes"] < 2.5 * weights_bytes < begun["peak_bytes"]
        assert max(turn["seconds"]) < 1.5 * min(turn["seconds"]) and min(update["seconds"]) > 0
        assert profile["buckets"]["matmul"] > 0 and sum(profile["buckets"].values()) <= 1.02 * profile["step_s"]
        assert profile["buckets"]["other"] < 0.1 * profile["step_s"], profile["kernels"]
        losses[label] = sanity["losses"]
    for label in ("tensorwise", "tensorwise+kernels"):
        assert 0 < max(abs(a - b) for a, b in zip(losses[label], losses["bf16"], strict=True)) < 0.05
