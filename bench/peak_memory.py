"""Run train.py as it is, and write down the most GPU memory that its tensors have taken so far: a
training that is killed leaves no summary that would tell.

bench/trainings.py starts a process in which main() reads FILE and then train.py's own words. A JSON
line goes to FILE whenever the most has grown; of a CPU there are none."""

import json
import runpy
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
INTERVAL_S = 1.0
KEY = "mem_gib"
GIB = 2**30


def main() -> None:
    file, *words = sys.argv[1:]
    threading.Thread(target=_watch, args=(Path(file),), daemon=True).start()
    train = str(ROOT / "train.py")
    sys.argv = [train, *words]
    sys.path[0] = str(ROOT)  # where Python looks for the imports of train.py
    runpy.run_path(train, run_name="__main__")


def _watch(file: Path) -> None:
    most = 0
    while True:
        time.sleep(INTERVAL_S)
        allocated = _most_allocated()
        if allocated > most:
            most = allocated
            with open(file, "a") as lines:
                lines.write(json.dumps({KEY: most / GIB}) + "\n")


def _most_allocated() -> int:
    """Bytes; 0 before train.py has imported torch and used a GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None while torch is being imported
    if cuda is None or not cuda.is_initialized():
        return 0
    return cuda.max_memory_allocated()
