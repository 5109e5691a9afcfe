"""Train one GPT, from a config file to summary.json.

    python train.py configs/demo_s_fp8.py                                   one process, GPU or CPU
    torchrun --nproc_per_node=8 train.py configs/gpt350m_fp8.py             eight GPUs of one machine
    python train.py configs/gpt350m_fp8.py optim.lr=3e-4 fp8.skip=attn.out  any section.key=value after the file
    python train.py configs/gpt1p5b_fp8.py --plan h100                      what it would cost; trains nothing
    python train.py FILE start_from=out/<run>/checkpoints/step_00000400     another end of a wsd run, from its checkpoint
    python train.py --help                                                  every key, its default and meaning

A run lives in out/<run>/. The same command again resumes it from its last checkpoint, or says that it is finished.
Ctrl-C, or SIGTERM, finishes the step, saves and leaves; a second one leaves at once.
"""

import json
import math
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from eval.loss import ValLoss, bits_per_byte, evaluate
from model import GPT
from runtime import fp8, gather, metrics, optim, parallel
from runtime.checkpoint import Checkpointer, CheckpointError, branch_point, latest, load, read_manifest
from runtime.config import Config, ConfigError, config_from_dict, help_text, load_config, read_config
from runtime.data import Data, open_data
from runtime.guard import Guard, GuardError, Verdict
from runtime.parallel import World
from runtime.plan import plan_lines
from runtime.probe import Probe
from runtime.tokenizer import load_tokenizer

COMPUTE_DTYPE = torch.bfloat16      # of activations in both arms; weights, gradients and moments are fp32
ROOT = Path(__file__).resolve().parent


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done (or saved on request), 1 the machine failed us, 2 the user's mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{help_text()}")
        return 0 if argv else 2
    world = None
    try:
        config, plan_gpu = read_arguments(argv)
        if plan_gpu is not None:
            print("\n".join(plan(config, plan_gpu)))
            return 0
        metrics.check_mirrors(config)
        world = parallel.start(config)
        train(config, world)
        code = 0
    except ConfigError as error:
        say_error(error, world)
        code = 2
    except (CheckpointError, GuardError) as error:
        say_error(error, world)
        code = 1
    except OSError as error:
        say_error(f"{error.filename or 'a file'}: {error.strerror or error}; nothing that was finished is lost: correct it and "
                  f"run the same command again", world)
        code = 1
    except KeyboardInterrupt:
        say_error("interrupted; what was saved stays, and the same command goes on from there", world)
        code = 130
    if world is not None and world.size > 1:
        parallel.finish(world, code)
    return code


def say_error(error: Exception | str, world: World | None) -> None:
    """Once where all ranks see the same mistake; an error that one rank met alone carries a note and is told by it."""
    if world is None or world.is_main:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
    elif getattr(error, "__notes__", None):
        print(f"\ntrain.py: rank {world.rank}: {error}", file=sys.stderr, flush=True)


def read_arguments(argv: list[str]) -> tuple[Config, str | None]:
    """The Config, plus the GPU named after --plan ("" where none is named, None without --plan)."""
    path, *rest = argv
    gpu = None
    if "--plan" in rest:
        at = rest.index("--plan")
        named = rest[at + 1:at + 2] if "=" not in "".join(rest[at + 1:at + 2]) else []
        gpu = named[0] if named else ""
        rest = rest[:at] + rest[at + 1 + len(named):]
    return load_config(path, rest), gpu


def plan(config: Config, gpu: str) -> list[str]:
    with torch.device("meta"):
        model = GPT(config.model, COMPUTE_DTYPE)
    layers = fp8.select(model, config.fp8, gpu.upper() if gpu else None)
    peak = metrics.peak_flops(gpu) if gpu else None
    if gpu and peak is None:
        raise ConfigError(f"--plan {gpu}: the peak of that GPU is not in runtime/metrics.py; try h100, h200, b200 or a100")
    return plan_lines(config, model.counts(), layers, fp8.table(layers, config.fp8.recipe, "cuda"), gpu, peak)


# ---------------------------------------------------------------------------------------------------------------- train

def train(config: Config, world: World) -> None:
    """Build, resume, loop, evaluate, summarise. Raises ConfigError, CheckpointError or GuardError with a sentence."""
    with ExitStack() as ending:     # closes the log however the run ends: an error begins on a line of its own
        _train(config, world, ending)


def _train(config: Config, world: World, ending: ExitStack) -> None:
    started = time.perf_counter()
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fp8.check_hardware(config.fp8, world.device)
    if is_finished(config):
        if world.is_main:
            print(f"{config.run}: finished, all {config.total_steps} steps; nothing to do ({config.run_dir}/summary.json)")
        return
    data = open_data(config, tokenizer.sha256)
    val_sets = {source: data.val(source) for source in data.sources}

    # Build: on the meta device first, so that no rank ever holds the whole model unsharded.
    with torch.device("meta"):
        model = GPT(config.model, COMPUTE_DTYPE)
    loss_scale = world.size / config.data.tokens_per_step   # mean over the step's tokens; FSDP averages over ranks, so x size
    layers = fp8.convert(model, config.fp8, loss_scale)
    identity = {"train": data.train_sha256, "val": data.val_sha256, "fp8": metrics.digest(recipes_by_layer(layers))}
    counts = model.counts()
    flag_lines = parallel.set_torch_flags(config, world, recipes_by_layer(layers).values())
    parallel.shard(model, world, COMPUTE_DTYPE)
    if config.parallel.compile:
        parallel.compile_model(model, world)
    assign = parallel.materialise(model, world)
    optimizer = optim.build_optimizer(model, config.optim)
    optim.fill_state(optimizer)
    tensors = {f"model.{name}": gather.plain(p.detach()) for name, p in model.named_parameters()}
    tensors |= {f"optim.{name}": t for name, t in optim.state_tensors(optimizer, model).items()}

    # Start, branch off another run, or resume: a run's own checkpoints win over start_from.
    step, guard, train_s, probe_s, checkpoint = 0, Guard(), 0.0, 0.0, latest(config.run_dir)
    is_branching = checkpoint is None and config.start_from is not None
    if is_branching:
        checkpoint = branch_point(config)
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        if is_branching:
            optim.check_branch(config, config_from_dict(manifest["config"]), manifest["step"])
        load(checkpoint, manifest, tensors, world)
        model.init_buffers()
        step, state = manifest["step"], manifest["state"]
        changed = [key for key in identity if state["data"].get(key) != identity[key]]
        if changed == ["fp8"]:
            raise ConfigError("fp8.recipe=auto chose other layers than this run was begun with: name the recipe and "
                              "fp8.include/skip explicitly, or resume on the GPU it was begun on")
        if changed:
            raise ConfigError(f"{config.data.dir} holds other tokens than {checkpoint.parent.parent} was begun with: restore the "
                              f"shards, or choose another run=")
        optim.set_updates(optimizer, state["updates"])
        guard = Guard(**state["guard"])
        if not is_branching:     # the parent's hours are its own
            train_s, probe_s = state["train_s"], state["probe_s"]
    else:
        model.init_weights(config.seed, assign)
    gather.precompute_scales(model)
    parallel.meet(world)    # all ranks have read the folder before one writes to it
    if world.is_main:       # config.json first: a folder without one is not ours to touch
        config.run_dir.mkdir(parents=True, exist_ok=True)
        metrics.write_json(config.run_dir / "config.json", config.to_dict())
    saver = Checkpointer(config.run_dir, config.checkpoint.keep, world, config.checkpoint.at)
    probe = Probe(config.run_dir / "probe.jsonl" if world.is_main else None, model, fp8.recipes(layers, loss_scale),
                  config.probe.tokens)
    log = None
    if world.is_main:
        metrics.write_environment(config.run_dir / "env.json", world.device, ROOT)
        log = metrics.Log(config, step, config.total_steps)
        ending.callback(log.close)
        log.say("\n".join([
            f"{config.run}: {counts['params_total']:,} parameters, {config.total_steps:,} steps of "
            f"{config.data.tokens_per_step:,} tokens = {config.total_tokens:,} tokens "
            f"({config.total_tokens / counts['params_total']:.1f} per parameter)",
            f"device: {world.size} x {metrics.device_name(world.device)}; {config.accumulation(world.size)} micro-batches of "
            f"{config.data.micro_batch} x {config.model.n_ctx} tokens per rank and step",
            *flag_lines, *data.describe(), *fp8.table(layers, config.fp8.recipe, world.device.type),
            f"{'branching off' if is_branching else 'resuming'} {checkpoint}" if checkpoint else "starting at step 0",
        ]))

    def save(done: int) -> None:
        state = {"updates": done - guard.skipped, "guard": guard.state(), "data": identity,
                 "train_s": train_s + time.perf_counter() - started, "probe_s": probe_s}
        saver.save(done, tensors, state, config)

    def measure() -> ValLoss:
        return evaluate(model, val_sets, data.weights, config.data.micro_batch, world.device, world.rank, world.size,
                        lambda t: parallel.all_concatenate(t, world))

    def validate(done: int) -> ValLoss:
        val = measure()
        if not math.isfinite(val.loss):
            raise GuardError(f"validation loss {val.loss} after step {done}: lower optim.lr, or resume from an older checkpoint")
        if log:
            log.validation({"step": done, "tokens": done * config.data.tokens_per_step, "loss": val.loss,
                            "sources": {name: val.source_loss(name) for name in val.sequences}})
        return val

    stop = StopRequest()
    accumulation = config.accumulation(world.size)
    batches = data.stream(step, config.total_steps, world.rank, world.size, world.device)

    while step < config.total_steps:
        t0 = time.perf_counter()

        # ---- one training step ---------------------------------------------------------------------------------------
        lr = optim.learning_rate(step, config.total_steps, config.optim)
        optim.set_learning_rate(optimizer, lr)
        loss_sum = torch.zeros((), device=world.device)
        for micro in range(accumulation):
            x, y = next_batch(batches, world)
            parallel.sync_gradients(model, now=micro == accumulation - 1)
            micro_loss = model(x, y).sum()
            (micro_loss * loss_scale).backward()
            loss_sum += micro_loss.detach()
        grad_norm = parallel.clip_gradients(model, config.optim.clip)

        sums = parallel.all_sum(torch.stack((loss_sum, torch.full_like(loss_sum, stop.requested))), world)
        loss, stops, grad_norm = torch.cat((sums, grad_norm[None])).tolist()        # the step's one host read
        loss /= config.data.tokens_per_step

        verdict = guard.judge(step, loss, grad_norm)
        if verdict is Verdict.OK:
            optimizer.step()
            gather.precompute_scales(model)
        optimizer.zero_grad()
        # --------------------------------------------------------------------------------------------------------------

        step += 1
        step_s = time.perf_counter() - t0
        if log:
            log.step({"step": step, "tokens": step * config.data.tokens_per_step, "loss": loss, "lr": lr,
                      "grad_norm": grad_norm, "tok_per_s": config.data.tokens_per_step / step_s, "step_s": step_s,
                      "verdict": verdict.value})
        if is_due(config.probe.every, step):
            t0 = time.perf_counter()
            probe(step, x, y, loss_scale)
            probe_s += time.perf_counter() - t0
        if stops or is_due(config.checkpoint.every, step) or step in (*config.checkpoint.at, config.total_steps):
            save(step)      # before the evaluation: a fault there must not cost the steps
        if stops and step < config.total_steps:
            saver.finish()
            if log:
                log.say(f"stopped on request at step {step}; saved. To go on: run the same command again")
            return
        if is_due(config.eval.every, step) and step < config.total_steps:
            validate(step)

    batches.close()
    memory = torch.cuda.max_memory_allocated(world.device) / 2**30 if world.device.type == "cuda" else None
    eval_started = time.perf_counter()
    as_trained = validate(step)
    with fp8.in_bf16(model):
        in_bf16 = measure()
    saver.finish()
    if log:
        eval_s = time.perf_counter() - eval_started
        wall_s = train_s + time.perf_counter() - started
        summary = summarise(config, world, data, counts, layers, as_trained, in_bf16, guard,
                            wall_s=wall_s, eval_s=eval_s, probe_s=probe_s, mem_peak_gib=memory,
                            tokenizer_sha256=tokenizer.sha256)
        save_sequence_losses(config.run_dir / "val_losses.npz", as_trained, in_bf16)
        metrics.write_json(config.run_dir / "summary.json", summary)
        probes = f", {summary['probe_share']:.1%} of it probes" if probe_s else ""
        log.say(f"{config.run}: done. validation loss {summary['loss_as_trained']:.4f} as trained, {summary['loss_bf16']:.4f} "
                f"in BF16; {summary['tok_per_s_median']:,.0f} tok/s; {wall_s:.0f} s{probes} -> {config.run_dir}/summary.json")


def next_batch(batches, world: World):
    try:
        return next(batches)
    except ConfigError as error:        # a damaged shard, which perhaps no other rank has read
        error.add_note(f"on rank {world.rank}")
        raise


def is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def recipes_by_layer(layers: list[fp8.Layer]) -> dict[str, str]:
    return {layer.name: layer.recipe for layer in layers if layer.reason is None}


class StopRequest:
    """Set by SIGINT or SIGTERM; the loop reads it once a step. A second signal has its usual effect, at once."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number, frame):
        self.requested = True
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


def is_finished(config: Config) -> bool:
    """Whether this very run is already done. Raises ConfigError where its folder belongs to another run."""
    run_dir = config.run_dir
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return False
    if not (run_dir / "config.json").exists():
        raise ConfigError(f"{run_dir} is not empty and holds no run (no config.json): choose another run= or out=")
    finished = (run_dir / "summary.json").exists()
    before, now = read_config(run_dir).identity(), config.identity()
    if changes := [f"{key} was {before[key]}, now {now[key]}" for key in now if before[key] != now[key]]:
        raise ConfigError(f"{run_dir} holds another run: {'; '.join(changes)}; choose another run=, or give the same settings")
    return finished


# -------------------------------------------------------------------------------------------------------------- summary

def summarise(config: Config, world: World, data: Data, counts: dict, layers: list[fp8.Layer], as_trained: ValLoss,
              in_bf16: ValLoss, guard: Guard, *, wall_s: float, eval_s: float, probe_s: float, mem_peak_gib: float | None,
              tokenizer_sha256: str) -> dict:
    """The run's record, which scaling/ reads: counts and FLOPs by convention, losses, precision, speed, identities."""
    m, steps, tokens = config.model, config.total_steps, config.total_tokens
    env = json.loads((config.run_dir / "env.json").read_text())
    rows = metrics.read_rows(config.run_dir / "metrics.jsonl")
    name = metrics.device_name(world.device)
    peak = metrics.peak_flops(name) if world.device.type == "cuda" else None
    converted = [layer for layer in layers if layer.reason is None]
    lr_last = optim.learning_rate(steps - 1, steps, config.optim)
    return {
        "schema_version": 1, "run_id": config.run, "pair_id": metrics.pair_id(config),
        "parent_run": config.parent and config.parent[0], "parent_step": config.parent and config.parent[1],
        "status": "ok" if guard.consecutive == 0 else "diverged",
        "git_commit": env["git_commit"], "git_dirty": env["git_dirty"], "cmd": env["command"],
        "config_sha256": metrics.digest(config.to_dict()), "device": name, "n_gpu": world.size,
        "torch": env["torch"], "torchao": env["torchao"], "cuda": env["cuda"],
        "t_start": env["t_start"], "t_end": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "seed": config.seed,
        "data_sha256": data.train_sha256, "val_sha256": data.val_sha256,
        "tokenizer": config.data.tokenizer, "tokenizer_sha256": tokenizer_sha256,
        "vocab_size": m.vocab_size, "vocab_padded": m.vocab_padded, "n_layer": m.n_layer, "n_head": m.n_head,
        "n_kv_head": m.kv_heads, "n_embd": m.n_embd, "n_ffn": m.n_ffn, "n_ctx": m.n_ctx, "tied": m.tied,
        **counts, "params_fp8": sum(layer.params for layer in converted),
        "steps": steps, "tokens": tokens, "tok_per_param_total": tokens / counts["params_total"],
        "tok_per_param_nonembed": tokens / counts["params_nonembed"],
        "tokens_per_step": config.data.tokens_per_step, "micro_batch": config.data.micro_batch,
        "grad_accum": config.accumulation(world.size), "optimizer": "AdamW", "beta1": config.optim.beta1,
        "beta2": config.optim.beta2, "eps": config.optim.eps, "weight_decay": config.optim.weight_decay,
        "clip": config.optim.clip, "schedule": config.optim.schedule, "lr_peak": config.optim.lr, "lr_last": lr_last,
        "warmup_steps": config.optim.warmup_steps(steps),
        "is_annealed": lr_last < config.optim.lr,   # the schedule has ended, or this would not be written
        "precision": {
            "recipe": "bf16" if config.fp8.recipe == "off" else config.fp8.recipe,
            "layers_converted": [layer.name for layer in converted], "layers_recipes": recipes_by_layer(layers),
            "layers_skipped": {layer.name: layer.reason for layer in layers if layer.reason is not None},
            "compute_dtype": "bfloat16", "master_dtype": "float32", "reduce_dtype": "float32",
            "compile": config.parallel.compile,
        },
        "loss_as_trained": as_trained.loss, "loss_bf16": in_bf16.loss, "loss_bf16_se_seq": in_bf16.standard_error,
        "sources": {source: {
            "weight": data.weights[source], "epochs": data.epochs[source], "loss_as_trained": as_trained.source_loss(source),
            "loss_bf16": in_bf16.source_loss(source),
            "bpb_as_trained": bits_per_byte(as_trained.source_loss(source), data.val(source)),
            "bpb_bf16": bits_per_byte(in_bf16.source_loss(source), data.val(source)),
            "sequences": len(data.val(source)), "tokens": data.val(source).tokens,
            "text_bytes": data.val(source).text_bytes,
        } for source in data.sources},
        "train_loss_last": next(row["loss"] for row in reversed(rows) if row["kind"] == "train"),
        "skipped_steps": guard.skipped,
        **metrics.throughput(rows, config.data.tokens_per_step, counts["flops_per_token"],
                             peak[0] * world.size if peak else None),
        "wall_s": wall_s, "eval_s": eval_s, "probe_s": probe_s, "probe_share": probe_s / wall_s, "mem_peak_gib": mem_peak_gib,
    }


def save_sequence_losses(path: Path, as_trained: ValLoss, in_bf16: ValLoss) -> None:
    """Summed nats of every validation sequence, sources in sorted order: what a paired comparison needs."""
    sources = sorted(as_trained.sequences)
    sizes = [len(as_trained.sequences[s]) for s in sources]
    np.savez(path, as_trained=np.concatenate([as_trained.sequences[s] for s in sources]),
             bf16=np.concatenate([in_bf16.sequences[s] for s in sources]),
             source=np.repeat(np.arange(len(sources)), sizes), n_tokens=np.full(sum(sizes), as_trained.n_ctx))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
