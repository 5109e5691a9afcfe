#!/usr/bin/env bash
# A compilation for a CPU that Ctrl-C interrupts while the linker writes leaves an empty library in torch.compile's cache, and every later start fails on it.
#
# Versions: torch 2.13.0 (CPU), g++ 12.2, Linux.
# Behaviour: Inductor lets g++ write kernels to their last place in its cache and takes a file that exists for a finished
#     one. The linker creates the file first, fills it at its end, and removes it neither at SIGINT, which Ctrl-C sends it
#     too, nor at SIGTERM or SIGKILL. The same program, started again, loads the empty file and fails, until somebody
#     removes it.
# Output seen:
#     interrupted: 1 empty library in the cache
#     the same program again: ImportError, file too short
#     without that file: 832.0
# What follows: commands name that file and say to remove it (lib/command.py); trainings that bench stops when their time
#     is up compile into caches of their own (bench/trainings.py). Give jobs that may be killed a TORCHINDUCTOR_CACHE_DIR
#     each, or those beside them fail too.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/program.py" <<'PY'
import torch


@torch.compile
def total(x):
    return (x * 2).sum()


print(total(torch.full((416,), 1.0)).item())
PY
cat > "$folder/interrupt.py" <<'PY'
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
cache = folder / "cache"
command = [sys.executable, str(folder / "program.py")]
environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}


def empty_libraries():
    return [file for file in cache.rglob("*.so") if file.stat().st_size == 0]


def interrupt():
    """Run the program and interrupt it, as Ctrl-C does, once a library is there that is empty."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, env=environment, stderr=pipe, start_new_session=True)
    while program.poll() is None:
        if any(file.name.endswith(".main.so") for file in empty_libraries()):
            os.killpg(program.pid, signal.SIGINT)
            break
    program.communicate()  # ends when nobody holds the pipe, the linker neither


def run_again():
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr


for _ in range(10):  # the linker may be done by the time the signal arrives
    interrupt()
    if empty_libraries():
        break
left = empty_libraries()
print(f"interrupted: {len(left)} empty library in the cache")
_, error = run_again()
has_failed = "ImportError" in error and "file too short" in error
print(f"the same program again: {'ImportError, file too short' if has_failed else 'no error'}")
for file in left:
    file.unlink()
printed, _ = run_again()
print(f"without that file: {printed}")
raise SystemExit(not (len(left) == 1 and has_failed and printed == "832.0"))
PY
"$folder/venv/bin/python" "$folder/interrupt.py" "$folder"
