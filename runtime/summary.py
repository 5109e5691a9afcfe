"""Put a finished run's record together: summary.json and val_losses.npz, which scaling/ reads.

Every N and every FLOP count is named by its convention, so that nobody has to guess which one a number follows.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch

from eval.loss import ValLoss, bits_per_byte
from runtime import metrics, optim
from runtime.config import Config
from runtime.tokenizer import tokenizer_kind


def write_summary(config: Config, world, *parts, **times) -> str:
    """Both files into the run's folder, from summarise()'s arguments; returns the line that tells people of them."""
    summary = summarise(config, world, *parts, **times)
    as_trained, in_bf16 = parts[3:5]
    save_sequence_losses(config.run_dir / "val_losses.npz", as_trained, in_bf16)
    metrics.write_json(config.run_dir / "summary.json", summary)
    probes = f", {summary['probe_share']:.1%} of it probes" if summary["probe_s"] else ""
    return (f"{config.run}: done. validation loss {summary['loss_as_trained']:.4f} as trained, {summary['loss_bf16']:.4f} in "
            f"BF16; {summary['tok_per_s_median']:,.0f} tok/s; {summary['wall_s']:.0f} s{probes} -> {config.run_dir}/summary.json")


def summarise(config: Config, world, data, counts: dict, layers: list, as_trained: ValLoss, in_bf16: ValLoss, guard, *,
              moved_on: int, wall_s: float, eval_s: float, probe_s: float, tokenizer_sha256: str) -> dict:
    """The run's record: counts and FLOPs by convention, losses, precision, speed, identities.

    `layers` as fp8.convert() gives them; moved_on: steps' worth of data that rollbacks left out."""
    m, steps, tokens = config.model, config.total_steps, config.total_tokens
    env = json.loads((config.run_dir / "env.json").read_text())
    rows = metrics.read_rows(config.run_dir / "metrics.jsonl")
    name = metrics.device_name(world.device)
    peak = metrics.peak_flops(name) if world.device.type == "cuda" else None
    converted = [layer for layer in layers if layer.reason is None]
    lr_last = optim.learning_rate(steps - 1, steps, config.optim)
    return {
        "schema_version": 1, "run_id": config.run, "pair_id": metrics.pair_id(config),
        **lineage(config),
        "status": "ok" if guard.consecutive == 0 else "diverged",
        "git_commit": env["git_commit"], "git_dirty": env["git_dirty"], "cmd": env["command"],
        "config_sha256": metrics.digest(config.to_dict()), "device": name, "n_gpu": world.size,
        "torch": env["torch"], "torchao": env["torchao"], "cuda": env["cuda"],
        "t_start": env["t_start"], "t_end": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seed": config.seed,
        "repeat": config.repeat,
        "data_sha256": data.train_sha256, "val_sha256": data.val_sha256,
        "tokenizer": tokenizer_kind(config.data.tokenizer), "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": m.vocab_size, "vocab_padded": m.vocab_padded, "n_layer": m.n_layer, "n_head": m.n_head,
        "n_kv_head": m.kv_heads, "n_embd": m.n_embd, "n_ffn": m.n_ffn, "n_ctx": m.n_ctx, "tied": m.tied,
        **counts, "params_fp8": sum(layer.params for layer in converted),
        "steps": steps, "tokens": tokens, "tok_per_param_total": tokens / counts["params_total"],
        "tok_per_param_nonembed": tokens / counts["params_nonembed"],
        "tokens_per_step": config.data.tokens_per_step, "micro_batch": config.data.micro_batch,
        "grad_accum": config.accumulation(world.size), "optimizer": "AdamW", "beta1": config.optim.beta1,
        "beta2": config.optim.beta2, "eps": config.optim.eps, "weight_decay": config.optim.weight_decay,
        "clip": config.optim.clip, "schedule": config.optim.schedule, "lr_peak": config.optim.lr,
        "lr_last": lr_last, "lr_min": config.optim.lr * config.optim.min_lr_ratio,
        "warmup_steps": config.optim.warmup_steps(steps),
        "is_annealed": lr_last < config.optim.lr,   # the schedule has ended, or this would not be written
        "precision": {
            "recipe": config.fp8.label,
            "layers_converted": [layer.name for layer in converted],
            "layers_recipes": {layer.name: layer.recipe for layer in converted},
            "layers_kernels": [layer.name for layer in converted if layer.kernels],
            "layers_skipped": {layer.name: layer.reason for layer in layers if layer.reason is not None},
            "compute_dtype": "bfloat16", "master_dtype": "float32", "reduce_dtype": "float32",
            "compile": config.parallel.compile,
        },
        "loss_as_trained": as_trained.loss, "loss_as_trained_se_seq": as_trained.standard_error,
        "loss_bf16": in_bf16.loss, "loss_bf16_se_seq": in_bf16.standard_error,
        "sources": {source: {
            "weight": data.weights[source], "epochs": data.epochs[source], "loss_as_trained": as_trained.source_loss(source),
            "loss_bf16": in_bf16.source_loss(source),
            "bpb_as_trained": bits_per_byte(as_trained.source_loss(source), data.val(source)),
            "bpb_bf16": bits_per_byte(in_bf16.source_loss(source), data.val(source)),
            "sequences": len(data.val(source)), "tokens": data.val(source).tokens,
            "text_bytes": data.val(source).text_bytes,
        } for source in data.sources},
        "train_loss_last": next(row["loss"] for row in reversed(rows) if row["kind"] == "train"),
        "skipped_steps": guard.skipped, "rollbacks": guard.rollbacks, "moved_on_steps": moved_on,
        **metrics.throughput(rows, config.data.tokens_per_step, counts["flops_per_token"],
                             peak[0] * world.size if peak else None),
        "wall_s": wall_s, "eval_s": eval_s, "probe_s": probe_s, "probe_share": probe_s / wall_s,
        "mem_peak_gib": torch.cuda.max_memory_allocated(world.device) / 2**30 if world.device.type == "cuda" else None,
        "mem_reserved_gib": torch.cuda.max_memory_reserved(world.device) / 2**30 if world.device.type == "cuda" else None,
    }


def lineage(config: Config) -> dict:
    """Where the weights began: another run's checkpoint, or (step 0) a model that was imported; all None from scratch."""
    run, step = config.parent or (None, None)
    return {"parent_run": run if step else None, "parent_step": step or None, "continued_from": None if step else run}


def save_sequence_losses(path: Path, as_trained: ValLoss, in_bf16: ValLoss) -> None:
    """Summed nats and number of targets of every validation sequence, sources in sorted order: what a paired comparison needs."""
    sources = sorted(as_trained.sequences)
    sizes = [len(as_trained.sequences[s]) for s in sources]
    np.savez(path, as_trained=np.concatenate([as_trained.sequences[s] for s in sources]),
             bf16=np.concatenate([in_bf16.sequences[s] for s in sources]),
             source=np.repeat(np.arange(len(sources)), sizes), n_tokens=np.concatenate([as_trained.targets[s] for s in sources]))
