"""A tiny study, and a train.py that only pretends: what the tests of a study and of the sweep share."""

import json
from dataclasses import replace

from tests.conftest import write_config

# The fake's checkpoints hold nothing but DONE; what a test appends says what the run does.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
given = dict(argument.split("=", 1) for argument in sys.argv[2:])
run, folder = given["run"], Path(given["out"]) / given["run"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
began = time.time()
def checkpoint(step):
    (folder / f"checkpoints/step_{int(step):08d}").mkdir(exist_ok=True)
    (folder / f"checkpoints/step_{int(step):08d}/DONE").touch()
def finish(**more):
    for step in given.get("checkpoint.at", "").split(","):
        checkpoint(step or 9)
    parent = int(given["start_from"][-8:]) if "start_from" in given else None
    (folder / "summary.json").write_text(json.dumps({"status": "ok", "loss_bf16": 2.0, "tok_per_s_median": 1000.0, "n_gpu": 2,
        "wall_s": 0, "device": "fake", "began": began, "ended": time.time(), "given": given, "parent_step": parent,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS"), **more}))
"""


def tiny_study(tiny, folder, budgets=(10, 20), seeds=(1,), recipes=("bf16",), held_out=False, sizes=(64, 128), null=False,
               max_epochs=100):
    """A study file of tiny sizes, each given by its n_ffn: 64 and 128 have 22.6k and 28.8k parameters."""
    lines = []
    for name, n_ffn in zip("ab", sizes, strict=False):
        config = replace(tiny, run=f"{name}_bf16", steps=None, tokens_per_param=20, log=replace(tiny.log, every=100),
                         model=replace(tiny.model, n_layer=1, n_ffn=n_ffn), data=replace(tiny.data, max_epochs=max_epochs),
                         checkpoint=replace(tiny.checkpoint, every=None, keep=1), optim=replace(tiny.optim, warmup_share=0.05))
        path = write_config(config, folder / f"{name}_bf16.py")
        lines.append(f"Size(config={str(path)!r}, seeds={seeds}, held_out={held_out and name == 'b'}, "
                     f"null_seeds={seeds if null else ()})")
    file = folder / "study_tiny.py"
    file.write_text("from scaling.study import Size, Study\n"
                    f"study = Study(name='tiny', sizes=({', '.join(lines)},), tokens_per_param={budgets}, recipes={recipes}, "
                    f"margin_percent=1.0, null=('deterministic=true',))\n")
    return file


def finish(row, folder, **changes):
    """The summary.json of a finished run."""
    (folder / row.run).mkdir(parents=True, exist_ok=True)
    (folder / row.run / "summary.json").write_text(json.dumps({
        "status": "ok", "tok_per_s_median": 1000.0, "n_gpu": 1, "device": "X", "loss_bf16": 2.0, "wall_s": 0,
        "parent_step": row.parent_step, **changes}))


def checkpoint(row, folder, step):
    (folder / row.run / f"checkpoints/step_{step:08d}").mkdir(parents=True)
    (folder / row.run / f"checkpoints/step_{step:08d}/DONE").touch()
