"""Train one GPT, from a config file to summary.json.

    python train.py configs/demo_s_fp8.py                                one process, GPU or CPU
    torchrun --nproc_per_node=8 train.py configs/gpt350m_fp8.py          eight GPUs of one machine
    python train.py configs/gpt350m_fp8.py optim.lr=3e-4 fp8.skip=out    any section.key=value, once
    python train.py configs/gpt1p5b_fp8.py --plan h100                   its cost; trains nothing
    python train.py FILE start_from=out/<run>/checkpoints/step_00000400  another end of a wsd run
    python train.py FILE start_from=out/<run>                            anew on that run's weights
    python train.py configs/continue_llama.py                            on from an imported model
    python train.py --help                                               keys, defaults, meanings

What a config file imports is looked for beside it first: a copied pair of configs has its own _bf16
file as its parent. A run lives in out/<run>/. The same command again resumes it from its newest
sound checkpoint, or says that it is finished. Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP (not under nohup)
finishes the step, saves and leaves; so does the end of torchrun. A second signal of its kind leaves
at once. torchrun kills its workers 30 s after SIGTERM: where a step and a save take longer, give it
--shutdown-timeout=600."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from eval.in_training import task_scorer
from lib.command import Failure, Frame, explain_known, run_command
from lib.errors import MachineError, UserError
from lib.help import help_page
from lib.machine import check_device
from runtime import optim, parallel
from runtime.command_line import CommandLine, read_command_line
from runtime.config import Config, help_text, load_config_and_files
from runtime.guard import Verdict
from runtime.log import check_mirrors
from runtime.parallel import World
from runtime.plan import cpu_estimate, fits_whole, plan, resolve_micro_batch
from runtime.run import Run, StepResult
from runtime.training_step import forward_backward, read_numbers, update_weights


def train(config: Config, world: World, config_files: Sequence[Path] = ()) -> None:
    """Train `config`, made from `config_files`, on the ranks of `world`, from its newest
    checkpoint, if there is one, to summary.json. Raises UserError, MachineError."""
    with Run.open(config, world, config_files, task_scorer(config)) as run:
        if run is None:  # finished already
            return
        model, optimizer, precision = run.trained, run.optimizer, run.precision
        # next_step() validates and rolls back where that is due, then returns the steps done
        while (step := run.next_step()) is not None:
            # ---- forward and backward ------------------------------------------------------------
            place = config.ramp.place(step)  # its part of a full step; all of it without data.ramp
            lr = optim.set_learning_rate(
                optimizer, place.full_step, config.full_steps, config.optim
            )
            accumulation = config.accumulation(world.size, place.parts)
            # summed over all ranks; prompts are no targets, so a step may have few or none
            targets = run.data.targets(step, run.progress.data_offset)
            loss_scale = run.loss_scale * (config.data.tokens_per_step / max(1, targets))
            precision.before_step(loss_scale)  # sets the scales that come from past steps
            # summed cross-entropy, and with optim.z_loss the summed z-loss
            loss_sums = torch.zeros(2 if config.optim.z_loss else 1, device=world.device)
            for micro in range(accumulation):
                # x and y are (B, T); mask is None, for causal attention, or that of documents
                x, y, mask = run.next_batch()
                parallel.sync_gradients(model, micro == accumulation - 1, config.parallel.reshard)
                loss_sums += forward_backward(model, x, y, loss_scale, config.optim.z_loss, mask)

            # ---- clip, one host read -------------------------------------------------------------
            run.at("summing loss and gradient norm over the ranks")
            squares = run.layer_gradients.squares()  # taken before clipping, for guard.layers
            grad_norm = parallel.clip_gradients(model, config.optim.clip)
            n_saturated = precision.after_passes()  # tensors that exceeded their delayed scale
            numbers = read_numbers(
                loss_sums, targets, run.stop.is_set(), squares, grad_norm, n_saturated, world
            )

            # ---- judge, update -------------------------------------------------------------------
            layer_norms = run.layer_gradients.named(numbers.layer_norms)
            verdict = run.guard.judge(step, numbers.loss, numbers.grad_norm, targets, layer_norms)
            if verdict in (Verdict.OK, Verdict.SPIKE):
                run.saver.staged()  # waits until the save under way has copied the weights
                update_weights(optimizer, precision)
                run.progress.updates += 1
            # kept before a rollback or a stop: a diagnosis reads the gradients
            if verdict not in (Verdict.ROLLBACK, Verdict.STOP):
                precision.zero_gradients()

            # log, probe, save, roll back
            run.end_step(StepResult(verdict, numbers, lr, loss_scale))


# ------------------------------------------------------------------------------------- the command


def main(words: list[str]) -> int:
    """Returns the exit code: 0 done (or saved on request), 1 the machine failed us, 2 the user's
    mistake."""
    return FRAME.run(words, train_or_plan)


def train_or_plan(line: CommandLine) -> str | None:
    """Train what the command line asks for, or return its plan. Raises UserError, MachineError."""
    config, config_files = load_config_and_files(line.file, line.overrides)
    if line.plan_for is not None:
        return "\n".join(plan(config, line.plan_for))
    check_mirrors(config)
    check_device()
    with joined_ranks(config) as world:
        estimate = cpu_estimate(config, world)
        if estimate is not None:
            print(estimate, flush=True)
        train(resolve_micro_batch(config, world), world, config_files)
    return None


@contextmanager
def joined_ranks(config: Config) -> Iterator[World]:
    """This process among the ranks of its job. Where there are several, the process ends with the
    block, by its exit code. Rank 0 prints a failure that all share; a rank that alone met one
    prints its own."""
    world = parallel.start(config, partial(fits_whole, config))
    if world.size == 1:
        with files_named(config.run_dir):
            yield world
        return
    code = 0
    try:
        with files_named(config.run_dir):
            yield world
    except BaseException as error:
        failure = explain(error)
        if failure is None:
            raise
        if world.is_main:
            FRAME.tell(failure)
        elif hasattr(error, "__notes__"):  # this rank failed, perhaps alone
            sentence = f"\ntrain.py: rank {world.rank}: {failure.sentence}"
            print(sentence, file=sys.stderr, flush=True)
        code = failure.exit_code
    parallel.finish(world, code)


@contextmanager
def files_named(run_dir: Path) -> Iterator[None]:
    """Turn an OSError into a MachineError that names the file, the problem and what to do. The
    error of a full disk names no file: then it is `run_dir`, which is on that disk."""
    try:
        yield
    except BrokenPipeError:
        # the reader of a pipe such as `| head` has left: no fault, and a run's log goes on
        raise
    except OSError as error:
        file = error.filename or run_dir
        problem = error.strerror or error
        raise MachineError(
            f"{file}: {problem}; correct it and run the same command again"
        ) from error


def explain(error: BaseException) -> Failure | None:
    """The message and exit code for an error; None where it keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(
            "interrupted; what was saved stays, and the same command goes on from there", 130
        )
    return explain_known(error)


def explain_before_joining(error: BaseException) -> Failure | None:
    """Like explain(), for a rank that has not joined the others yet. They share a user's mistake,
    so only the first rank of each machine prints it."""
    if isinstance(error, UserError):
        parallel.wait_for_first_rank()
    return explain(error)


FRAME = Frame(
    page=lambda: help_page(__doc__, help_text()),
    read=read_command_line,
    explain=explain_before_joining,
    prefix="train.py: ",
)


if __name__ == "__main__":
    sys.exit(run_command(main))
