"""Time eval.harness on a run against `lm_eval --model hf` on the same run's export, both as whole commands.

    python bench/harness.py tasks=piqa offline=DIR
    python bench/harness.py out/RUN tasks=piqa offline=DIR rounds=3 out=harness.json

    run           the run to score; none = a random model of 13.6M parameters with gpt2's vocabulary, made for the bench
    tasks         tasks whose data `python -m eval.harness --fetch DIR` saved in the folder `offline`
    limit         documents per task at most; none = all
    rounds        how often each command runs, in turns
    micro_batch   of both: sequences per forward pass
    threads       of both, OMP_NUM_THREADS
    out           file for the numbers as JSON

Both compute in float32 on the CPU from the same saved data, and every score must be equal to the last bit that lm-eval
reports of counts (accuracies); log-likelihoods sum in another order, so other metrics may differ by 1e-5 of their value.
Start-up counts: reading tasks, loading the model, importing. transformers and accelerate are needed, here only.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from eval import tasks
from eval.harness import as_json
from runtime.cli import UserError, read_options
from runtime.rows import write_atomically

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str | None = None
    tasks: tuple[str, ...]
    offline: str
    limit: int | None = None
    rounds: int = 1
    micro_batch: int = 16
    threads: int = 2
    out: str | None = None

    POSITIONAL: ClassVar = ("run",)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        options = read_options(Options, arguments)
        with tempfile.TemporaryDirectory() as scratch:
            record = bench(options, Path(scratch))
        if options.out:
            write_atomically(Path(options.out), as_json(record))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}" if error.filename else str(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def bench(options: Options, scratch: Path) -> dict:
    """Run both commands in turns; {"wall_s", "cpu_s", "ratio", "scores", ..}. Raises UserError where scores differ."""
    run = Path(options.run) if options.run else random_run(scratch / "random")
    names = tasks.expand(options.tasks)
    _call(["-m", "eval.export", str(run), str(scratch / "export"), "dtype=fp32"], options)
    limit = [f"limit={options.limit}"] if options.limit else []
    ours = ["-m", "eval.harness", str(run), f"tasks={','.join(names)}", f"offline={options.offline}", "dtype=float32",
            "device=cpu", f"micro_batch={options.micro_batch}", *limit]
    theirs = [str(Path(__file__).resolve()), "--lm-eval", options.offline, "--model", "hf", "--model_args",
              f"pretrained={scratch / 'export'},dtype=float32", "--tasks", ",".join(names), "--device", "cpu",
              "--batch_size", str(options.micro_batch), "--output_path", str(scratch / "theirs.json"),
              *(["--limit", str(options.limit)] if options.limit else [])]
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for _ in range(options.rounds):
        for name, command in (("ours", ours), ("theirs", theirs)):
            times[name].append(_call(command, options))
            print(f"{name:6} {times[name][-1][0]:7.1f} s, {times[name][-1][1]:7.1f} s of processors", flush=True)
    limited = f"_limit{options.limit}" if options.limit else ""
    ours_scores = json.loads((run / "eval" / f"{'+'.join(names)}_float32{limited}.json").read_text())["tasks"]
    theirs_scores = json.loads(max(scratch.glob("theirs_*.json")).read_text())["results"]
    scores = _compare(ours_scores, theirs_scores)
    totals = {name: [sum(part) for part in zip(*pairs, strict=True)] for name, pairs in times.items()}
    ratio, cpu_ratio = (a / b for a, b in zip(totals["ours"], totals["theirs"], strict=True))
    print(f"{len(scores)} scores equal; eval.harness takes {ratio:.3f} of the time of lm_eval --model hf, {cpu_ratio:.3f} of the "
          f"processors' time; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return {"tasks": names, "limit": options.limit, "wall_s": {name: [w for w, _ in pairs] for name, pairs in times.items()},
            "cpu_s": {name: [c for _, c in pairs] for name, pairs in times.items()}, "ratio": ratio, "cpu_ratio": cpu_ratio,
            "scores": scores, "threads": options.threads, "micro_batch": options.micro_batch, "load": os.getloadavg(),
            "cores": os.cpu_count()}


def random_run(folder: Path) -> Path:
    """A run's folder with fresh weights: 9 layers x 192 channels and gpt2's vocabulary, 13.6M parameters."""
    from eval.from_hf import write_checkpoint
    from model import GPT, GPTConfig
    from runtime.config import Config, DataConfig, OptimConfig

    config = Config(run="random", steps=1, optim=OptimConfig(lr=1e-3),
                    model=GPTConfig(n_layer=9, n_head=3, n_embd=192, n_ffn=512, n_ctx=1024),
                    data=DataConfig(dir="data", mixture={"none": 1.0}, tokenizer="gpt2", tokens_per_step=1024, micro_batch=1))
    model = GPT(config.model)
    model.init_weights(1)
    checkpoint = folder / "checkpoints" / "step_00000000"
    checkpoint.mkdir(parents=True)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_checkpoint(checkpoint, config, weights, {})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def _call(command: list[str], options: Options) -> tuple[float, float]:
    """Seconds of `python command`: on the clock, and of all processors. Raises UserError where it fails."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    settings = {**os.environ, **offline, "OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    started, before = time.perf_counter(), _cpu_s()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise UserError(f"`python {' '.join(command)}` failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - started, _cpu_s() - before


def _cpu_s() -> float:
    """Of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _compare(ours: dict, theirs: dict) -> dict[str, float]:
    """{"piqa acc": ..}, of every metric that both report. Raises UserError where one differs."""
    scores = {}
    for task, row in ours.items():
        for metric in (key for key in row if f"{key}_se" in row):
            other = theirs[task][f"{metric},none"]
            if abs(row[metric] - other) > (0 if metric.startswith("acc") else 1e-5 * abs(other)):
                raise UserError(f"{task} {metric}: eval.harness has {row[metric]}, lm_eval --model hf has {other}")
            scores[f"{task} {metric}"] = row[metric]
    return scores


def lm_eval_command(folder: str, arguments: list[str]) -> None:
    """lm-eval's own command line, the tasks' data from `folder`: what `lm_eval` does, and nothing else of ours."""
    from lm_eval.__main__ import cli_evaluate
    sys.argv = ["lm_eval", *arguments]
    with tasks.reading(Path(folder)), contextlib.suppress(SystemExit):
        cli_evaluate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lm-eval"]:
        lm_eval_command(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
