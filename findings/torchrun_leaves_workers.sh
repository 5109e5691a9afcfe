#!/bin/bash
# torchrun that is ended by a signal which it does not handle leaves its workers running, and `nohup torchrun` is not immune
# to SIGHUP.
#
# Versions: torch 2.13.0, CPU build; Linux.
# Behaviour: torchrun handles SIGTERM, SIGINT, SIGHUP and SIGQUIT, passes them on and kills its workers 30 s later
#     (--shutdown-timeout). Any other signal that ends a process, such as SIGUSR1 (the usual warning of a batch system),
#     ends torchrun alone: its worker, in a session of its own, belongs to another process and goes on. Its handler for
#     SIGHUP takes the place of the one that nohup had set to ignore, and the worker no longer ignores it either.
#     --signals-to-handle changes both.
# Output seen:
#     SIGUSR1: torchrun ended, worker running
#     SIGUSR1 with --signals-to-handle=SIGTERM,SIGUSR1: torchrun ended, worker ended by SIGUSR1
#     nohup, SIGHUP: torchrun ended, worker ended by SIGHUP
#     nohup, SIGHUP with --signals-to-handle=SIGTERM,SIGINT: torchrun running, worker running
# What follows: a worker has to look for the end of its torchrun by itself.
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/worker.py" <<'PY'
"""Writes its process id, then the name of the signal that ends it; a signal that is ignored stays so. Ends after 60 s."""
import os
import signal
import sys
import time

folder = sys.argv[1]


def note(number, frame):
    with open(f"{folder}/signal", "w") as file:
        file.write(signal.Signals(number).name)
    os._exit(0)


for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, note)
with open(f"{folder}/pid.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/pid.new", f"{folder}/pid")
time.sleep(60)
PY

state() { kill -0 "$1" 2>/dev/null && echo running || echo ended; }

# try NAME SIGNAL COMMAND...: a line on what SIGNAL to torchrun, started by COMMAND, leaves
try() {
    local name=$1 signal=$2
    shift 2
    rm -f "$folder/pid" "$folder/signal"
    "$@" "$folder/worker.py" "$folder" > "$folder/log" 2>&1 &
    local torchrun=$!
    for _ in $(seq 600); do [ -f "$folder/pid" ] && break; sleep 0.2; done
    local worker
    worker=$(cat "$folder/pid")
    sleep 1
    kill -"$signal" "$torchrun"
    sleep 8
    local by=""
    [ -f "$folder/signal" ] && by=" by $(cat "$folder/signal")"
    echo "$name: torchrun $(state "$torchrun"), worker $(state "$worker")$by"
    kill -KILL "$worker" "$torchrun" 2>/dev/null || true
    wait "$torchrun" 2>/dev/null || true
}

run=("$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc_per_node=1)
{
    try "SIGUSR1" USR1 "${run[@]}"
    try "SIGUSR1 with --signals-to-handle=SIGTERM,SIGUSR1" USR1 "${run[@]}" --signals-to-handle=SIGTERM,SIGUSR1
    try "nohup, SIGHUP" HUP nohup "${run[@]}"
    try "nohup, SIGHUP with --signals-to-handle=SIGTERM,SIGINT" HUP nohup "${run[@]}" --signals-to-handle=SIGTERM,SIGINT
} | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN' || { echo "the behaviour has changed"; exit 1; }
SIGUSR1: torchrun ended, worker running
SIGUSR1 with --signals-to-handle=SIGTERM,SIGUSR1: torchrun ended, worker ended by SIGUSR1
nohup, SIGHUP: torchrun ended, worker ended by SIGHUP
nohup, SIGHUP with --signals-to-handle=SIGTERM,SIGINT: torchrun running, worker running
SEEN
rm -rf "$folder"
