"""One cell of the benchmark as a process: build a model, then time it on request.

    python bench/cell.py '{"size": "125m", "label": "tensorwise", "T": 1024, "micro_batch": 64, "tokens_per_step": 524288}'

It prints one JSON line when it is compiled and warm, then one for each order, a JSON line on stdin (the end of stdin is the
order to leave). All other output goes to stderr. bench/throughput.py starts several such processes, so that BF16 and FP8
are timed in turns; between two orders one holds its weights alone: gradients, moments and the allocator's cache are freed.

    {"do": "turn", "micro_steps": 8}        seconds of each micro-step: forward, backward, gradients added up, as train.py does
    {"do": "optimizer"}                     seconds of 5 updates: clip, AdamW, what FP8 derives from the weights, zero_grad
    {"do": "sanity", "steps": 20}           losses of so many updates on one fixed batch; the weights are put back
    {"do": "profile"}                       where the time of a whole step goes, by kernel
    {"do": "close"}

label: bf16, bf16_eager, or a recipe of fp8.recipe with +kernels (fp8.kernels=true) or +head (fp8.head=true). The model is that
of configs/gpt<size>_bf16.py with the keys of "model" changed, built by runtime/parallel.py as train.py builds it; with "peer"
it is bench/peers.py's. What is not timed here: reading data, the step's one host read, logs (bench/throughput.py's loop row).
"""

import json
import os
import queue
import sys
import threading
import traceback

from bench.orders import Cell, is_out_of_memory, one_line
from bench.subject import Spec
from runtime.cli import UserError
from runtime.rows import to_line


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 closed, 1 something failed, 2 an impossible spec. Failures are an answer, too."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if len(argv) == 1 else 2
    answers, orders = _take_stdout(), _listen()
    try:
        cell = Cell(_spec(argv[0]))
        _say(answers, cell.started)
        while (order := orders.get()).get("do") != "close":
            _say(answers, cell.obey(order))
        _say(answers, {})
        return 0
    except BrokenPipeError:         # nobody listens any more
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        traceback.print_exc()       # to stderr: the caller's log
        _say(answers, {"ok": False, "error": one_line(error), "oom": is_out_of_memory(error)})
        return 2 if isinstance(error, UserError) else 1


def _take_stdout():
    """The real stdout, for answers alone; whatever else prints, from C++ too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def _listen() -> queue.SimpleQueue:
    """The orders, as they come. The end of stdin before a close ends this process, whatever it is at: who asked is gone, and
    the GPU is wanted by others."""
    orders = queue.SimpleQueue()

    def listen():
        with open(0, "rb", buffering=0, closefd=False) as lines:    # unbuffered: its lock would outlive the interpreter
            for line in lines:
                orders.put(json.loads(line))
                if b'"close"' in line:
                    return
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return orders


def _say(answers, answer: dict) -> None:
    answers.write(to_line({"ok": True, **answer}))


def _spec(text: str) -> Spec:
    try:
        return Spec(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{text!r} is no cell: one JSON object with size, label, T, micro_batch, tokens_per_step ({error})"
                          ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
