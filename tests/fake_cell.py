"""A stand-in for bench/cell.py that speaks its protocol, well or badly, as its first argument says by label."""

import json
import os
import signal
import subprocess
import sys
import time

SECONDS = {"bf16": 0.010}       # per micro-step; others 0.008
START = {"compile_s": 1.0, "flops_per_token": 1000, "fp8_flops_per_token": 400, "graph_breaks": 0, "params_total": 7}


def main() -> None:
    manners, spec = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    label, mine = spec["label"], manners.get(spec["label"], {})
    with open(manners["diary"], "a") as file:
        file.write(f"{label} {spec['micro_batch']} {os.getpid()}\n")
    act(mine.get("start"), spec, manners)
    say({"ok": True, **START})
    for line in sys.stdin:
        order = json.loads(line)
        act(mine.get(order["do"]), spec, manners)
        if order["do"] == "turn":
            seconds = mine.get("seconds", SECONDS.get(label, 0.008)) * spec["micro_batch"] / 4
            say({"ok": True, "seconds": [seconds] * order["micro_steps"], "wall_s": 0.0, "recompiles": mine.get("recompiles", 0)})
        elif order["do"] == "optimizer":
            say({"ok": True, "seconds": [0.002] * 5})
        elif order["do"] == "sanity":
            assert order["sequences"] % spec["micro_batch"] == 0
            off = mine.get("off", 0.0)
            say({"ok": True, "losses": [10 - 0.1 * i + off for i in range(order["steps"])],
                 "gradient_norms": {"wte.weight": 1.0}})
        elif order["do"] == "profile":
            say({"ok": True, "buckets": {"matmul": 0.004}, "kernels": [["nvjet", 0.004, 1]], "step_s": 0.01})
        else:
            say({"ok": True})
            return


def act(manner: str | None, spec: dict, manners: dict) -> None:
    """What it does wrong at this point, if anything."""
    if manner == "hang":
        time.sleep(600)
    elif manner == "hang_with_offspring":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(manners["diary"], "a") as file:
            file.write(f"offspring 0 {child.pid}\n")
        time.sleep(600)
    elif manner == "die":
        print("Segmentation fault (simulated)", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif manner == "exit":
        sys.exit("no such kernel")
    elif manner == "garbage":
        os.write(1, b"\xff\xfe not json\n[1, 2\n7\nnull\n{\"progress\": 3}\n\n")
    elif manner == "nonsense":
        say({"ok": True, "seconds": [0.0, "fast"], "losses": None})
    elif manner == "fail":
        fail("RuntimeError: misaligned address\nsecond line")
    elif manner == "oom" or (manner == "oom_unless_small" and spec["micro_batch"] > 2) or (
            manner == "oom_once" and is_first(manners, spec)):
        fail("CUDA out of memory", True)


def is_first(manners: dict, spec: dict) -> bool:
    with open(manners["diary"]) as file:
        return sum(line.startswith(f"{spec['label']} ") for line in file) == 1


def fail(error: str, oom: bool = False) -> None:
    say({"ok": False, "error": error, "oom": oom})
    sys.exit(1)


def say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
