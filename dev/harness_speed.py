"""Time eval.harness on a run against `lm_eval --model hf` on its export, both as whole commands in fp32 on the CPU, in turns.

    python dev/harness_speed.py out/RUN piqa DIR        DIR: what `python -m eval.harness --fetch DIR tasks=piqa` saved

Every score must be equal (other metrics than accuracies to 1e-5 of their value: sums in another order). Start-up counts.
transformers and accelerate are needed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(run: str, task: str, folder: str) -> None:
    os.environ |= {"HF_DATASETS_CACHE": os.path.abspath(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                   "TRANSFORMERS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        seconds_of("-m", "eval.export", run, f"{scratch}/export", "dtype=fp32")
        ours = ("-m", "eval.harness", run, f"tasks={task}", "dtype=float32", "device=cpu", "micro_batch=16")
        theirs = ("-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={scratch}/export,dtype=float32",
                  "--tasks", task, "--device", "cpu", "--batch_size", "16", "--output_path", f"{scratch}/theirs.json")
        turns = [(seconds_of(*ours), seconds_of(*theirs)) for _ in range(2)]
        mine = json.loads(max(Path(run).glob(f"eval/{task}_float32*.json"), key=os.path.getmtime).read_text())["tasks"]
        others = json.loads(next(Path(scratch).glob("theirs_*.json")).read_text())["results"]
    for name, row in mine.items():
        for metric in (key for key in row if f"{key}_se" in row):
            a, b = row[metric], others[name][f"{metric},none"]
            assert abs(a - b) <= (0 if metric.startswith("acc") else 1e-5 * abs(b)), (name, metric, a, b)
    a, b = (sum(column) for column in zip(*turns, strict=True))
    print(f"scores equal; eval.harness {a:.1f} s, lm_eval --model hf {b:.1f} s: {a / b:.3f} of its time")


def seconds_of(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*sys.argv[1:])
