"""Encode batches of documents in processes of their own.

A child is a plain interpreter that loads this room alone, so it stays small whatever the parent has loaded. Each has two
pipes: while it encodes the batch of one, the other carries the last result back or the next batch in, so that it never
waits for the parent. A child ends with the parent, however the parent ends, and leaves Ctrl-C to it.
"""

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from prepare.encoder import Encoder, Grams
from prepare.source import Batch, Encoded
from runtime.cli import UserError

LANES = 2           # pipes per child
CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from prepare.pool import _serve; _serve(sys.argv[2:])"


class Pool:
    """`processes` encoders, as a context manager; one encodes in a thread of this process, more in children.

    Raises UserError: no such tokenizer."""

    def __init__(self, tokenizer: str, processes: int, grams: Grams | None = None):
        self._settings, self._processes = (tokenizer, grams), processes
        self._encoder = Encoder(*self._settings)       # here too: what no child could do is refused at once
        self._children: list[subprocess.Popen] = []
        self._lanes: queue.PriorityQueue = queue.PriorityQueue()    # idle ones; a first job goes where there is none yet
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        lanes = [self._encoder.do] if self._processes == 1 else self._start()
        for number, lane in enumerate(lanes):
            self._lanes.put((number, lane))
        self._threads = ThreadPoolExecutor(len(lanes), "pool")
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kill()
        self._threads.shutdown(wait=True)

    def encode(self, batches: Iterator[Batch]) -> Iterator[Encoded]:
        """What `batches` becomes, in order. A thread reads ahead; at most 2 * processes + 2 batches are in flight.

        Raises what the reader or an encoder raised, after what came before it: ChildProcessError for a child that was killed.
        The pool serves on when the iterator is closed early."""
        results, room, is_closed = queue.SimpleQueue(), threading.Semaphore(LANES * self._processes + 1), threading.Event()
        reader = threading.Thread(target=self._read, args=(batches, results, room, is_closed), name="read", daemon=True)
        reader.start()
        try:
            while (future := results.get()) is not None:
                yield future.result()
                room.release()
        finally:
            is_closed.set()
            room.release()
            reader.join(1)      # longer only where a read hangs; the thread then ends with that read, or with the process
            with suppress(queue.Empty):
                while (future := results.get_nowait()) is not None:
                    future.cancel()

    def map(self, function: Callable, arguments: Iterable) -> Iterator:
        """function(argument) of each, in order, in the pool; `function` is one that a child can import, of a room."""
        futures = deque(self._submit(function, argument) for argument in arguments)
        try:
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()

    def _read(self, batches: Iterator[Batch], results: queue.SimpleQueue, room: threading.Semaphore,
              is_closed: threading.Event) -> None:
        try:
            for batch in batches:
                results.put(self._submit(None, batch))
                room.acquire()
                if is_closed.is_set():
                    getattr(batches, "close", int)()
                    break
        except BaseException as error:
            failed = Future()
            failed.set_exception(error)
            results.put(failed)
        finally:
            results.put(None)

    def _submit(self, function: Callable | None, argument) -> Future:
        return self._threads.submit(self._call, function, argument)

    def _call(self, function: Callable | None, argument):
        number, lane = self._lanes.get()    # there are as many as threads
        try:
            return lane(function, argument)
        finally:
            self._lanes.put((number, lane))

    def _start(self) -> list[Callable]:
        """Starts the children; their pipes as functions to call: the first of each, then the second of each."""
        lanes = []
        try:
            for _ in range(self._processes):
                ours, theirs = zip(*(Pipe() for _ in range(LANES)), strict=True)
                self._children.append(_child([pipe.fileno() for pipe in theirs]))
                for pipe in theirs:
                    pipe.close()        # the child alone holds it: its death is seen here
                lanes.append([_Lane(self._children[-1], pipe) for pipe in ours])
            for first, *_ in lanes:
                first.send(self._settings)
        except BaseException:
            self._kill()
            raise
        return [lane for nth in zip(*lanes, strict=True) for lane in nth]

    def _kill(self) -> None:
        for child in self._children:
            child.kill()        # it holds nothing that the parent lacks
        for child in self._children:
            child.wait()
            child.stdin.close()


def _child(pipes: list[int]) -> subprocess.Popen:
    # A child inherits the mask: a signal to the whole group is the parent's to answer.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(sys.path), *map(str, pipes)], stdin=subprocess.PIPE,
                                pass_fds=pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Lane:
    """The parent's end of one pipe to a child."""

    def __init__(self, child: subprocess.Popen, pipe: Connection):
        self._child, self._pipe = child, pipe

    def __call__(self, function: Callable | None, argument):
        self.send((function, argument))
        try:
            is_sound, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if not is_sound:
            raise value
        return value

    def send(self, message) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._death() from error

    def _death(self) -> ChildProcessError:
        code = self._child.wait()       # a child lets go of its pipes by ending
        reason = (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}, its own words stand above")
        hint = ", mostly for want of memory: fewer processes= need less" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"process {self._child.pid} of the pool {reason}{hint}")


# ------------------------------------------------------------------------------------------------------- in the children

def _serve(numbers: list[str]) -> None:
    """What a child does: one job at a time, from any of its pipes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipes, lock = [Connection(int(number)) for number in numbers], threading.Lock()
    encoder = Encoder(*pipes[0].recv())
    for pipe in pipes[1:]:
        threading.Thread(target=_answer, args=(pipe, encoder, lock), daemon=True).start()
    _answer(pipes[0], encoder, lock)


def _answer(pipe: Connection, encoder: Encoder, lock: threading.Lock) -> None:
    try:
        while True:
            pipe.send(_outcome(*pipe.recv(), encoder, lock))
    except (EOFError, OSError):
        pass                        # the parent has ended, perhaps in the middle of a message
    except BaseException:
        traceback.print_exc()
    os._exit(1)                     # all of the process: a pipe that nobody serves would keep the parent waiting


def _outcome(function: Callable | None, argument, encoder: Encoder, lock: threading.Lock) -> tuple[bool, object]:
    """(True, result) or (False, exception), one that survives the pipe."""
    try:
        with lock:
            return True, encoder.do(function, argument)
    except (UserError, OSError) as error:
        return False, error
    except MemoryError:
        return False, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    except BaseException as error:
        return False, RuntimeError("".join(traceback.format_exception(error)))


def _end_with_parent() -> None:
    os.read(0, 1)       # the parent writes nothing and closes it by ending, however it ends
    os._exit(1)
