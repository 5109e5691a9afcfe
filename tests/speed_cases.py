"""Rows as bench/throughput.py writes them, for the tests of its tables: none of these numbers was measured."""

H100 = "NVIDIA H100 80GB HBM3"
SIZES = {"125m": (0.85e9, 480e3, 64), "350m": (2.4e9, 180e3, 32), "760m": (4.9e9, 97e3, 24), "1p5b": (9.9e9, 53e3, 16),
         "nanogpt_124m": (0.86e9, 400e3, 64), "nanochat_d12": (0.8e9, 450e3, 32), "nanogpt_xl": (10.2e9, 40e3, 8),
         "nanochat_d26": (6.2e9, 80e3, 8)}
OURS = list(SIZES)[:4]
LABELS = {"bf16_eager": 0.6, "bf16": 1.0, "tensorwise": 1.1, "tensorwise+kernels": 1.2, "rowwise": 0.93}


def run_row(run="one", gpu=H100, **other):
    return {"kind": "run", "run": run, "t": "2026-12-01T10:00:00Z", "suite": "h100", "command": "python bench/throughput.py",
            "commit": "0123456789abcdef", "dirty": False, "gpu": gpu, "driver": "580.1", "power_limit_w": 700.0,
            "memory_gib": 79.6, "python": "3.12.3", "torch": "2.11.0+cu130", "torchao": "0.18.0", "triton": "3.6.0",
            "cuda": "13.0", "cudnn": 91900, **other}


def cell(size="125m", label="bf16", speed=1.0, run="one", **other):
    """A valid cell whose tokens/s are `speed` times those that SIZES says; so is its ratio."""
    flops, tok_per_s, micro_batch = SIZES.get(size, (1e9, 400e3, 32))
    tok_per_s *= speed
    micro_s, step_s = micro_batch * 1024 / tok_per_s, 524288 / tok_per_s
    casts = 0.15 if label.startswith(("tensor", "row")) else 0.0
    return {"kind": "cell", "run": run, "size": size, "label": label, "T": 1024, "micro_batch": micro_batch,
            "tokens_per_step": 524288, "ok": True, "compile_s": 0.0 if label == "bf16_eager" else 20.0 + 40 * casts,
            "flops_per_token": flops, "graph_breaks": 0, "graphs": 2, "cache_hits": 0,
            "cache_misses": 2, "peak_bytes": 40 * 2**30, "turns": [[micro_s] * 3] * 3,
            "micro_s": {"p10": micro_s * 0.99, "median": micro_s, "p90": micro_s * 1.01}, "optimizer_s": 0.01,
            "step_s": step_s, "tok_per_s": tok_per_s, "baseline": None if label == "bf16" else "bf16",
            "ratio": None if label == "bf16" else {"median": speed, "p10": speed - 0.01, "p90": speed + 0.01},
            "tflops": tok_per_s * flops / 1e12, "mfu_bf16": tok_per_s * flops / 989.4e12, "tcu": 0.4, "losses": [10.9] * 20,
            "largest_difference": 0.003, "valid": True, "invalid_because": None,
            "clocks": {"sm_mhz": {"p10": 1500, "median": 1650}, "power_w": {"p10": 600, "median": 680}, "temperature_c": 60,
                       "throttled": []}, "drift": 0.004, "compiled_beside": 2, "kernels": [["nvjet_x", micro_s / 2, 10]],
            "buckets": {"matmul": step_s * (0.55 - casts / 2), "cast": step_s * casts, "attention": step_s * 0.1,
                        "pointwise": step_s * (0.23 - casts / 2), "loss": step_s * 0.06, "optimizer": step_s * 0.02,
                        "other": step_s * 0.02}, **other}


def board():
    """A whole suite: four sizes, five labels, peers and ceilings, in one run."""
    rows = [run_row(), {"kind": "copy", "run": "one", "gb_per_s": 2900.0, "bytes": 2**32}]
    for dtype, speed in (("bf16", 700.0), ("fp8", 1190.0), ("fp8_rowwise", 900.0)):
        rows.append({"kind": "matmul", "run": "one", "dtype": dtype, "size": "1p5b", "linear": "gate_up", "pass": "forward",
                     "M": 16384, "K": 2048, "N": 11264, "ms": 1.0, "tflops": speed})
    rows.append({"kind": "attention", "run": "one", "size": "1p5b", "B": 16, "H": 16, "T": 1024, "D": 128,
                 "kernels": ["cudnn_sdpa_sm90"], "backend": "cudnn", "forward_ms": 0.4, "both_ms": 1.4, "tflops": 420.0})
    rows += [cell(size, label, speed) for size in OURS for label, speed in LABELS.items()]
    for size, label, speed in (("nanogpt_124m", "nanogpt", 0.9), ("nanochat_d12", "nanochat_bf16", 1.0),
                               ("nanochat_d12", "nanochat_fp8", 0.98), ("nanogpt_xl", "nanogpt", 1.2),
                               ("nanochat_d26", "nanochat_bf16", 1.1), ("nanochat_d26", "nanochat_fp8", 1.3)):
        rows.append(cell(size, label, speed, baseline=None, ratio=None))
    return [*rows, {"kind": "loop", "run": "one", "size": "125m", "label": "bf16", "tok_per_s": 470e3, "of_cell": 0.98}]
