"""Time a group of cells: a BF16 baseline that stays, the others started in batches and timed in turns with it.

One process works while the others wait; only starting (compiling, mostly) is done by several at once. What a process does
wrong costs its own cell; what the baseline does wrong costs what is left of the group.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import suites
from bench.bookkeeping import DONE, FAILED, Book
from bench.children import Child, ChildError
from bench.clocks import Clocks
from bench.measure import SANITY_STEPS, cell_row, seconds_of
from bench.suites import Cell, Group, Suite

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 420     # a child that has not started by then never will
ORDER_LIMIT_S = 120     # the same for an answer: the longest, a sanity run of 1.5B, takes 20 s
MOST_MICRO_STEPS = 40   # of a turn
MEMORY_SHARE = 0.95     # of the GPU's memory that the model of memory may fill
SLACK = 1.15            # on what a cell like it took


class OutOfBudget(Exception):
    """The call's time is over; what was being timed is lost, no row of it is written."""


class _BaselineFailed(Exception):
    pass


@dataclass
class _Live:
    """A started child with what was measured of it so far."""
    cell: Cell
    child: Child
    start: dict
    beside: int             # children that compiled at the same time
    start_s: float          # until it answered, beside the others
    micro_steps: int = 0    # of a turn
    recompiles: int = 0


class Timer:
    """Times groups into a Book until `deadline` (time.monotonic's seconds)."""

    def __init__(self, suite: Suite, book: Book, deadline: float, log: Path, clocks: Clocks, say: Callable[[str], None],
                 command: tuple[str, ...] = (sys.executable, str(ROOT / "bench" / "cell.py"))):
        self.suite, self.book, self.deadline, self.log, self.clocks, self.say = suite, book, deadline, log, clocks, say
        self.command = command
        gib = book.run["memory_gib"]
        self.memory = gib * 2**30 * MEMORY_SHARE if gib else float("inf")
        self.slowest: dict[tuple[str, str], float] = {}     # (size, "start_s" or "time_s") -> seconds
        for row in book.rows:
            if row["kind"] == "cell":
                self._learn(row)
        self.tried: set[tuple] = set()  # keys of what failed in this call
        self.forced: set[tuple] = set()     # keys to be timed though they have rows

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    # --------------------------------------------------------------------------------------------------- what to do

    def is_due(self, cell: Cell, again: bool) -> bool:
        """Whether the cell lacks a row; `again`: those that failed in an earlier call count."""
        if cell.key in self.tried:
            return False
        if cell.key in self.forced:
            return True
        return self.book.state(cell) not in ((DONE,) if again else (DONE, FAILED))

    def time_group(self, group: Group, again: bool = False) -> int:
        """Time what is due; returns how many cells were left for want of time. Raises OutOfBudget."""
        due = [cell for cell in group.members if self.is_due(cell, again)]
        if group.baseline.key in self.tried or not (due or self.is_due(group.baseline, again)):
            return 0
        cells = [cell for cell in group.members if cell in due or cell.label in group.beside and cell.peer is None]
        if suites.memory(group.baseline)[1] > self.memory:
            self.say(f"{group.baseline.name}: left out, by the model of its memory it does not fit this GPU")
            return 0
        if self._needs_s([group.baseline, *cells[:1]]) > self.left_s():
            return max(1, len(due))
        return self._attempt(group, cells, at_once=self.suite.at_once)

    def _attempt(self, group: Group, cells: list[Cell], at_once: int) -> int:
        """The group with the baseline's own second tries: alone, then with half the micro-batch."""
        live: list[_Live] = []
        try:
            return self._time(group.baseline, deque(cells), at_once, live)
        except _BaselineFailed as failed:
            error, baseline = failed.args[0], group.baseline
        finally:
            for one in live:
                one.child.kill()
        cells = [cell for cell in cells if self.book.in_this_call("cell", size=cell.size, label=cell.label, T=cell.T,
                                                                  planned_micro_batch=cell.micro_batch) is None]
        if error.oom and at_once > 1:
            self.say(f"{baseline.name}: out of memory beside others; once more, one at a time")
            return self._attempt(group, cells, at_once=1)
        if error.oom and baseline.planned is None and baseline.micro_batch > 1:
            self._failed(baseline, error, final=False)
            return self._attempt(group.halved(), [cell.halved() for cell in cells], at_once=1)
        self._failed(baseline, error)
        return 0

    def _time(self, baseline: Cell, waiting: deque[Cell], at_once: int, live: list[_Live]) -> int:
        base, row, alone, left = None, None, set(), 0
        while base is None or waiting:
            batch = self._batch([] if base else [baseline], waiting, at_once, live, alone)
            if base and self._needs_s(batch) > self.left_s():
                left += len(batch)
                continue
            for one, error in self._start(batch, live):
                if error is None:
                    continue
                if one == baseline:
                    raise _BaselineFailed(error)
                self._again_or_failed(one, error, len(batch) > 1, waiting, alone)
            started = [one for one in live if one.cell in batch]
            if base is None:
                base, started = started[0], started[1:]
                row = self._baseline(base)
            for one in started:
                try:
                    self._beside(base, row, one)
                except ChildError as error:
                    if base.child.error is not None:
                        raise _BaselineFailed(error) from error
                    self._again_or_failed(one.cell, error, True, waiting, alone)
                one.child.close()
                live.remove(one)
        base.child.close()
        return left

    def _batch(self, first: list[Cell], waiting: deque[Cell], at_once: int, live: list[_Live], alone: set[Cell]) -> list[Cell]:
        """Cells to start at the same time: as many as the memory, the cores and the time left allow, one at least."""
        batch = list(first)
        while waiting and len(batch) < at_once:
            cell = waiting[0]
            if batch and (cell in alone or batch[-1] in alone):
                break
            held = sum(suites.memory(one.cell)[0] for one in live)
            idle, peaks = zip(*(suites.memory(one) for one in [*batch, cell]), strict=True)
            if batch and (held + sum(idle) + max(p - i for i, p in zip(idle, peaks, strict=True)) > self.memory or
                          self._needs_s([*batch, cell]) > self.left_s()):
                break
            batch.append(waiting.popleft())
        return batch

    def _needs_s(self, cells: list[Cell]) -> float:
        """Seconds to start these cells at once, then time one after the other: as the slowest of their size took, else a guess
        and what guesses for other sizes were too short by: as many seconds, for a smaller size its share of them."""
        def seconds(cell: Cell, what: str) -> float:
            own = (guess := suites.GUESSES[what])[cell.like or cell.size]
            more = [(took - guess[size]) * min(1.0, own / guess[size]) for (size, of), took in self.slowest.items()
                    if of == what and size in guess]
            return self.slowest.get((cell.size, what), own + max([0.0, *more]))

        return SLACK * (max(seconds(cell, "start_s") for cell in cells) + sum(seconds(cell, "time_s") for cell in cells))

    def _learn(self, row: dict) -> None:
        for what in suites.GUESSES:
            if isinstance(row.get(what), int | float):
                key = row["size"], what
                self.slowest[key] = max(self.slowest.get(key, 0.0), row[what])

    # ------------------------------------------------------------------------------------------------------ children

    def _start(self, batch: list[Cell], live: list[_Live]):
        """Starts the batch; (cell, error or None) for each. Those without error are in `live` then."""
        began = time.monotonic()
        cores = os.cpu_count() or 1
        env = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // len(batch)))}
        if self.suite.device == "cpu":
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        children = []
        try:
            for cell in batch:
                children.append(Child(f"{cell.size} {cell.label}", [*self.command, json.dumps(cell.spec())], self.log, ROOT, env))
            outcomes = []
            for cell, child in zip(batch, children, strict=True):
                try:
                    start = self.within(lambda timeout, child=child: child.read(timeout), START_LIMIT_S)
                    live.append(_Live(cell, child, start, len(batch) - 1, time.monotonic() - began))
                    outcomes.append((cell, None))
                except ChildError as error:
                    outcomes.append((cell, error))
        except BaseException:
            for child in children:
                child.kill()
            raise
        return outcomes

    def within(self, act: Callable[[float], dict], limit: float) -> dict:
        """What a child answers, unless the budget ends first."""
        try:
            return act(min(limit, self.left_s()))
        except ChildError:
            if self.left_s() <= 0:
                raise OutOfBudget from None
            raise

    def _ask(self, one: _Live, **order) -> dict:
        answer = self.within(lambda timeout: one.child.ask(order, timeout), ORDER_LIMIT_S)
        one.recompiles = max(one.recompiles, answer.get("recompiles") or 0)
        return answer

    def _turn(self, one: _Live, stretches: list | None = None) -> list[float]:
        if not one.micro_steps:     # of two, the pace
            pace = min(self._seconds(one, do="turn", micro_steps=2))
            one.micro_steps = max(2, min(MOST_MICRO_STEPS, round(self.suite.turn_s / pace)))
        began = time.time()
        seconds = self._seconds(one, do="turn", micro_steps=one.micro_steps)
        if stretches is not None:
            stretches.append((began, time.time()))
        return seconds

    def _seconds(self, one: _Live, **order) -> list[float]:
        answer = self._ask(one, **order)
        try:
            return seconds_of(answer)
        except ChildError as error:
            one.child.error = error
            one.child.kill()
            raise

    # ---------------------------------------------------------------------------------------------------------- rows

    def _baseline(self, base: _Live) -> dict:
        """Time the baseline by itself and write its row. Raises _BaselineFailed."""
        began, stretches = time.monotonic(), []
        try:
            return self._row(base, began, [self._turn(base, stretches) for _ in range(3)], stretches)
        except ChildError as error:
            raise _BaselineFailed(error) from error

    def _beside(self, base: _Live, baseline: dict, one: _Live) -> None:
        """Time one cell in turns with the baseline, A B A .. A, and write its row."""
        began = time.monotonic()
        self._turn(one)     # finds its pace, warms up
        stretches, around, turns = [], [self._turn(base)], []
        for _ in range(self.suite.turns):
            turns.append(self._turn(one, stretches))
            around.append(self._turn(base))
        self._row(one, began, turns, stretches, baseline, around)

    def _row(self, one: _Live, began: float, turns: list, stretches: list, baseline: dict | None = None,
             around: list = ()) -> dict:
        cell, sanity, profile = one.cell, {}, {}
        optimizer = self._seconds(one, do="optimizer")
        try:
            sanity = self._ask(one, do="sanity", steps=SANITY_STEPS, sequences=cell.planned or cell.micro_batch)
            profile = self._ask(one, do="profile")
        except ChildError as error:     # the times stand, the row says what it lacks; but a baseline is needed alive
            if baseline is None or error.oom:
                raise
            sanity = sanity or {"error": str(error)}
        twin = baseline
        if cell.peer:       # another model than ours: its losses have a counterpart only in its own BF16
            twin = cell.label == "nanochat_fp8" and self.book.in_this_call("cell", size=cell.size, label="nanochat_bf16",
                                                                           micro_batch=cell.micro_batch)
        row = cell_row(cell, one.start, turns, optimizer, sanity, profile, one.recompiles, self.book.peaks,
                       self.clocks.summary(stretches), one.beside, self.suite.most_drift, baseline, around, twin or None)
        row |= {"start_s": one.start_s, "time_s": time.monotonic() - began}
        self._learn(row)
        self.book.add(row)
        self.forced.discard(cell.key)
        ratio = "" if row["ratio"] is None else "{median:6.3f}x ({p10:.3f} to {p90:.3f})".format(**row["ratio"])
        self.say(f"{cell.name:44} {row['tok_per_s']:12,.0f} tok/s {ratio:26} compiled in {row.get('compile_s') or 0:.0f} s"
                 + ("" if row["valid"] else f"  INVALID: {row['invalid_because']}"))
        return row

    def _again_or_failed(self, cell: Cell, error: ChildError, was_beside: bool, waiting: deque[Cell], alone: set[Cell]) -> None:
        if error.oom and was_beside and cell not in alone:
            self.say(f"{cell.name}: out of memory beside others; once more, alone")
            alone.add(cell)
            waiting.append(cell)
        elif error.oom and cell.planned is None and cell.micro_batch > 1:
            self._failed(cell, error, final=False)
            alone.add(cell.halved())
            waiting.append(cell.halved())
        else:
            self._failed(cell, error)

    def _failed(self, cell: Cell, error: ChildError, final: bool = True) -> None:
        if final:
            self.tried.add(cell.key)
        self.book.add({"kind": "failed", "size": cell.size, "label": cell.label, "T": cell.T, "micro_batch": cell.micro_batch,
                       "planned_micro_batch": cell.planned or cell.micro_batch, "error": str(error), "oom": error.oom,
                       "tail": error.tail})
        self.say(f"{cell.name:44} FAILED: {error}" + ("" if final else "; once more with half the micro-batch"))

