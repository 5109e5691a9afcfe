"""Train one GPT, from a config file to summary.json.

    python train.py configs/demo_s_fp8.py                                   one process, GPU or CPU
    torchrun --nproc_per_node=8 train.py configs/gpt350m_fp8.py             eight GPUs of one machine
    python train.py configs/gpt350m_fp8.py optim.lr=3e-4 fp8.skip=attn.out  any section.key=value after the file
    python train.py configs/gpt1p5b_fp8.py --plan h100                      what it would cost; trains nothing
    python train.py FILE start_from=out/<run>/checkpoints/step_00000400     another end of a wsd run; step_00000000: on from a
                                                                            model that was imported (configs/continue_llama.py)
    python train.py --help                                                  every key, its default and meaning

A run lives in out/<run>/. The same command again resumes it from its newest sound checkpoint, or says that it is finished.
Ctrl-C, SIGTERM or SIGUSR1 finishes the step, saves and leaves; a second one of its kind leaves at once.
"""

import gc
import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from eval.loss import ValLoss, evaluate
from runtime import fp8, gather, metrics, micro_batch, optim, parallel
from runtime.begin import branch, is_weights_only, origin_of
from runtime.build import COMPUTE_DTYPE, build
from runtime.checkpoint import CheckpointError, checkpoints, on_main, restore, step_of
from runtime.config import Config, ConfigError, help_text, load_config
from runtime.data import open_data
from runtime.diagnosis import diagnose
from runtime.folder import hold, is_finished, keep_tokenizer, refuse_to_start_over, tokenizer_of
from runtime.guard import Guard, GuardError, Verdict
from runtime.machine import MachineError, check_device, out_of_memory
from runtime.meter import Meter
from runtime.parallel import World
from runtime.plan import plan
from runtime.probe import Probe
from runtime.profiler import Profiler
from runtime.saver import Saver
from runtime.stop import StopRequest
from runtime.summary import write_summary
from runtime.tokenizer import load_tokenizer
from runtime.watchdog import Watchdog

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
            print("\n".join(plan(config, plan_gpu, COMPUTE_DTYPE)))
            return 0
        metrics.check_mirrors(config)
        check_device()
        world = parallel.start(config)
        config = micro_batch.resolve(config, world)
        train(config, world)
        code = 0
    except ConfigError as error:
        code = say_error(error, world, 2)
    except (CheckpointError, GuardError, MachineError) as error:
        code = say_error(error, world, 1)
    except OSError as error:
        code = say_error(f"{error.filename or 'a file'}: {error.strerror or error}; nothing that was finished is lost: correct "
                         f"it and run the same command again", world, 1)
    except KeyboardInterrupt:
        code = say_error("interrupted; what was saved stays, and the same command goes on from there", world, 130)
    if world is not None and world.size > 1:
        parallel.finish(world, code)
    return code


def say_error(error: Exception | str, world: World | None, code: int) -> int:
    """Once where all ranks see the same mistake; an error that one rank met alone carries a note and is told by it."""
    if world is None or world.is_main:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
    elif getattr(error, "__notes__", None):
        print(f"\ntrain.py: rank {world.rank}: {error}", file=sys.stderr, flush=True)
    return code


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


def train(config: Config, world: World) -> None:
    """Build, resume, loop, evaluate, summarise. Raises ConfigError, CheckpointError, GuardError, MachineError: a sentence."""
    with ExitStack() as ending:     # closes the log however the run ends: an error begins on a line of its own
        watch = Watchdog(world, config.run_dir, config.parallel.timeout, config.parallel.start_timeout)
        ending.enter_context(watch)
        try:
            _train(config, world, watch, ending)
        except (GuardError, CheckpointError):       # RuntimeErrors too, yet no other rank's doing
            raise
        except (RuntimeError, MemoryError) as error:
            if told := out_of_memory(error, config, world) or watch.explain(error):
                fault = MachineError(told)
                fault.add_note(f"on rank {world.rank}")     # the others may have another story
                raise fault from error
            raise


def _train(config: Config, world: World, watch: Watchdog, ending: ExitStack) -> None:
    started = time.perf_counter()
    try:
        tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fp8.check_hardware(config.fp8, world.device)
    if is_finished(config):
        if world.is_main:
            print(f"{config.run}: finished, all {config.total_steps} steps; nothing to do ({config.run_dir}/summary.json)")
        return None
    on_main(world, lambda: hold(config.run_dir, ending))        # no second run writes to the folder
    data = open_data(config, tokenizer.sha256)
    data.verify(world.local_rank, world.local_size)     # each machine may have a copy of its own
    val_sets = {source: data.val(source) for source in data.sources}

    built = build(config, world)
    model, optimizer, layers, counts, loss_scale = built.model, built.optimizer, built.layers, built.counts, built.loss_scale
    identity = {"train": data.train_sha256, "val": data.val_sha256, "fp8": metrics.digest(fp8.by_layer(layers))}
    tensors = {f"model.{name}": gather.plain(p.detach()) for name, p in model.named_parameters()}
    tensors |= {f"optim.{name}": t for name, t in optim.state_tensors(optimizer, model).items()}

    # Start, branch off another run, or resume: a run's own checkpoints win over start_from.
    step, updates, moved_on, guard, train_s, probe_s = 0, 0, 0, Guard(config.guard), 0.0, 0.0
    bad: list[str] = []         # checkpoints that were passed over, and why

    def pass_over(line: str) -> None:
        print(line, flush=True)
        bad.append(line)

    restored = restore(config.run_dir, tensors, world, say=pass_over)
    is_branching = restored is None and config.start_from is not None
    if is_branching:
        restored = branch(config, tokenizer.sha256, tensors, world)
        on_main(world, lambda: refuse_to_start_over(config))
    if restored:
        checkpoint, manifest = restored
        model.init_buffers()
    if restored and not is_weights_only(manifest):
        step, state = manifest["step"], manifest["state"]
        if (changed := [key for key in identity if state["data"].get(key) != identity[key]]) == ["fp8"]:
            raise ConfigError("fp8.recipe=auto chose other layers than this run was begun with, for another GPU, other timings "
                              "or another fp8.kernels: name the recipe and fp8.include/skip, or go on as it was begun")
        if changed:
            raise ConfigError(f"{config.data.dir} holds other tokens than {checkpoint.parent.parent} was begun with: restore the "
                              f"shards, or choose another run=")
        updates, moved_on = state["updates"], state["moved_on"]
        optim.set_updates(optimizer, updates)
        guard = Guard(config.guard, state["guard"])
        if not is_branching:     # the parent's hours are its own
            train_s, probe_s = state["train_s"], state["probe_s"]
    elif not restored:
        on_main(world, lambda: refuse_to_start_over(config))
        model.init_weights(config.seed, built.assign)
    fp8.weights_changed(model)
    parallel.meet(world)    # all ranks have read the folder before one writes to it
    if world.is_main:       # config.json first: a folder without one is not ours to touch
        metrics.write_json(config.run_dir / "config.json", config.to_dict())
        keep_tokenizer(config.run_dir, config.data.tokenizer)
    saver = Saver(config.run_dir, config.checkpoint, world, metrics.validation_losses(config.run_dir / "metrics.jsonl"))
    saver.prepare(tensors)
    ending.push(lambda kind, *_: kind in (ConfigError, GuardError) and saver.wait())    # the save under way is not lost
    probe = Probe(config.run_dir / "probe.jsonl" if world.is_main else None, model, fp8.recipes(layers, loss_scale),
                  config.probe.tokens)
    log = None
    if world.is_main:
        meter = Meter(world.device)
        ending.callback(meter.close)
        metrics.write_environment(config.run_dir / "env.json", world.device, ROOT)
        log = metrics.Log(config, step, config.total_steps)
        ending.callback(log.close)
        log.say("\n".join([
            f"{config.run}: {counts['params_total']:,} parameters, {config.total_steps:,} steps of "
            f"{config.data.tokens_per_step:,} tokens = {config.total_tokens:,} tokens "
            f"({config.total_tokens / counts['params_total']:.1f} per parameter)",
            f"device: {world.size} x {metrics.device_name(world.device)}; {config.accumulation(world.size)} micro-batches of "
            f"{config.data.micro_batch} x {config.model.n_ctx} tokens per rank and step",
            *built.flags, *data.describe(), *fp8.table(layers, config.fp8.recipe, world.device.type),
            f"{'resuming' if not is_branching else 'branching off' if step else 'on from'} {restored[0]}" if restored else
            "starting at step 0",
        ]))
        if restored:
            log.event({"event": "branch" if is_branching else "resume", "step": step})
        for line in bad:
            log.event({"event": "bad_checkpoint", "step": step, "reason": line})
    profiler = Profiler(config.profile_steps, config.run_dir, world, log.say if log else print)
    ending.callback(profiler.close)

    def note(event: str, step: int, reason: str) -> None:
        if log:
            log.event({"event": event, "step": step, "reason": reason})
            log.say(reason)

    def save(done: int) -> None:
        watch.at("saving a checkpoint", done, patience=config.parallel.start_timeout)
        state = {"updates": updates, "guard": guard.state(), "data": identity, "moved_on": moved_on,
                 "train_s": train_s + time.perf_counter() - started, "probe_s": probe_s,
                 "tokenizer_sha256": tokenizer.sha256, "origin": restored and origin_of(restored[1])}
        data.verified()     # no checkpoint holds what a damaged shard has taught
        saver.save(done, tensors, state, config)
        while saver.failures:       # of an earlier save: training goes on, and this one tries again
            note("save_failed", done, saver.failures.pop(0))

    def can_roll_back(before: int) -> bool:
        saver.wait()
        return on_main(world, lambda: any(step_of(path) < before for path in checkpoints(config.run_dir)))

    def give_up(done: int) -> None:
        watch.at("looking for the cause", done, patience=config.parallel.start_timeout)
        raise GuardError(f"step {done}: " + diagnose(model, tensors, x, y, done, guard.reason, config.run_dir, world.is_main,
                                                     loss_scale))

    def measure() -> ValLoss | None:
        """None where a stop was requested meanwhile."""
        watch.at("validating", step, patience=config.parallel.start_timeout)    # its first batch may be compiled

        def is_stopping() -> bool:
            watch.at("validating", step)
            return bool(parallel.all_sum(torch.tensor(float(stop.requested), device=world.device), world))

        return evaluate(model, val_sets, data.weights, config.data.micro_batch, world.device, world.rank, world.size,
                        lambda t: parallel.all_concatenate(t, world), is_stopping)

    def validate(done: int) -> ValLoss | None:
        """None where a stop was requested meanwhile; a loss that is not finite is not recorded: the caller goes back."""
        val = measure()
        if val is None or not math.isfinite(val.loss):
            return val
        saver.validated(done, val.loss)
        if log:
            log.validation({"step": done, "tokens": done * config.data.tokens_per_step, "loss": val.loss,
                            "sources": {name: val.source_loss(name) for name in val.sequences}})
        return val

    def leave(done: int) -> None:
        save(done)
        saver.finish()
        note("stopped", done, f"stopped on request at step {done}; saved. To go on: run the same command again")

    def stream(start: int):
        """The micro-batches from step `start` on; rollbacks have moved the data on by whole steps."""
        return data.stream(start + moved_on, config.total_steps + moved_on, world.rank, world.size, world.device)

    def go_back(bad: int) -> int:
        """After step `bad`: back to the newest checkpoint from before the skipped steps, whose weights passed as sane, and on
        with data not seen yet. Returns the checkpoint's step."""
        nonlocal updates, moved_on, batches
        watch.at("going back to a checkpoint", bad, patience=config.parallel.start_timeout)
        found = restore(config.run_dir, tensors, world, lambda line: note("bad_checkpoint", bad, line), guard.suspect_since)
        if found is None:
            raise GuardError(f"step {bad}: {guard.reason}, and no checkpoint from before to go back to: lower optim.lr")
        to, state = found[1]["step"], found[1]["state"]
        saver.roll_back(to)
        gather.reshard(model)
        optim.set_updates(optimizer, state["updates"])
        fp8.weights_changed(model)
        guard.rolled_back(state["guard"])
        updates, moved_on = state["updates"], moved_on + bad - to
        batches.close()
        batches = stream(to)
        if log:
            log.roll_back(to, {"event": "rollback", "step": bad, "to": to, "reason": guard.reason, "moved_on": moved_on})
            log.say(f"step {bad}: {guard.reason}; back to step {to}, on with data not seen yet "
                    f"({guard.rollbacks} of {config.guard.rollbacks} times)")
        return to

    stop = StopRequest()
    accumulation = config.accumulation(world.size)
    batches = stream(step)
    is_save_due = is_frozen = False
    # A kill may have come between a save and its validation: it is made up for.
    is_to_validate = restored is not None and not is_branching and (
        step == config.total_steps or is_due(config.eval.every, step) and on_main(world, lambda: not log.has_validation(step)))

    while True:
        if is_to_validate:
            eval_started = time.perf_counter()
            if (as_trained := validate(step)) is None:
                return leave(step)
            if not math.isfinite(as_trained.loss):
                if guard.distrust(step, f"validation loss {as_trained.loss}", can_roll_back) is Verdict.STOP:
                    x, y = (t.to(world.device) for t in val_sets[data.sources[0]].batch(0, config.data.micro_batch))
                    give_up(step)
                step = go_back(step)
            elif step == config.total_steps:
                break
        is_to_validate = False
        t0 = time.perf_counter()
        profiler.begin(step + 1)

        # ---- one training step ---------------------------------------------------------------------------------------
        lr = optim.learning_rate(step, config.total_steps, config.optim)
        optim.set_learning_rate(optimizer, lr)
        loss_sum = torch.zeros((), device=world.device)
        targets = max(1, data.targets(step + moved_on))     # fewer than tokens_per_step where prompts are masked
        step_scale = loss_scale * (config.data.tokens_per_step / targets)
        for micro in range(accumulation):
            watch.at("reading a micro-batch", step + 1)
            x, y = next(batches)
            watch.at("forward and backward", step + 1)
            parallel.sync_gradients(model, micro == accumulation - 1, config.parallel.reshard)
            micro_loss = model(x, y).sum()
            (micro_loss * step_scale).backward()
            loss_sum += micro_loss.detach()
        watch.at("summing loss and gradient norm over the ranks", step + 1)
        grad_norm = parallel.clip_gradients(model, config.optim.clip)

        sums = parallel.all_sum(torch.stack((loss_sum, torch.full_like(loss_sum, stop.requested))), world)
        loss, stops, grad_norm = torch.cat((sums, grad_norm[None])).tolist()        # the step's one host read
        loss /= targets

        verdict = guard.judge(step, loss, grad_norm, can_roll_back)
        if verdict in (Verdict.OK, Verdict.SPIKE):
            saver.staged()      # the save under way has its copy of the weights
            optimizer.step()
            updates += 1
            fp8.weights_changed(model)
            guard.prepare()     # what the next step is measured by, while the GPU is busy with this one
        if verdict is not Verdict.STOP:
            optimizer.zero_grad()
        # --------------------------------------------------------------------------------------------------------------

        step += 1
        step_s = time.perf_counter() - t0
        watch.at("after the step", step, patience=config.parallel.start_timeout if config.profile else None)   # a trace is large
        profiler.end(step)
        if log:
            log.step({"step": step, "tokens": step * config.data.tokens_per_step, "loss": loss, "lr": lr,
                      "grad_norm": grad_norm, "tok_per_s": config.data.tokens_per_step / step_s, "step_s": step_s,
                      "verdict": verdict.value, **({} if verdict is Verdict.OK else {"reason": guard.reason}), **meter.read()})
        watch.first_step_done()
        if not is_frozen:       # compiled now: the collector need not look through what stays, in some step half a second long
            gc.collect()
            gc.freeze()
            is_frozen = True
        if verdict is Verdict.STOP:
            give_up(step)
        if verdict is Verdict.ROLLBACK:
            step, is_save_due = go_back(step), False
            continue
        if is_due(config.probe.every, step):
            t0 = time.perf_counter()
            probe(step, x, y, step_scale)
            probe_s += time.perf_counter() - t0
        is_save_due |= is_due(config.checkpoint.every, step) or is_due(config.checkpoint.rolling, step)
        # In a row of skips the weights may be what is wrong, no checkpoint to go back to: what is due waits for its end.
        if is_save_due and not guard.consecutive or step in (*config.checkpoint.at, config.total_steps):
            save(step)      # before the evaluation: a fault there must not cost the steps
            is_save_due = False
        if stops and step < config.total_steps:
            return leave(step)
        is_to_validate = is_due(config.eval.every, step) or step == config.total_steps

    batches.close()
    with fp8.in_bf16(model):
        in_bf16 = measure()
    if in_bf16 is None:
        return leave(step)
    watch.at("finishing the last checkpoint", step, patience=config.parallel.start_timeout)
    saver.finish()
    data.verified()
    if log:
        now = time.perf_counter()
        log.say(write_summary(config, world, data, counts, layers, as_trained, in_bf16, guard, moved_on=moved_on,
                              wall_s=train_s + now - started, eval_s=now - eval_started, probe_s=probe_s,
                              tokenizer_sha256=tokenizer.sha256))
    return None


def is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
