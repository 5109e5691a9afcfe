"""Show a study under way: each run's step, loss, speed and time left, and when the whole will be done."""

import statistics
import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from runtime.progress import duration, si
from runtime.rows import metrics_rows, parse
from scaling.costs import costs_of, kind_of
from scaling.grid import placed, summary_of
from scaling.study import Row

LIVE_S, LOG_S = 0.5, 60.0       # between two looks
TAIL_BYTES, TAIL_ROWS = 16_384, 20


class StudyProgress:
    """A live table on a terminal, one line a minute elsewhere; use it with `with`.

    rows: all of the study, whose finished runs tell how long the others take. chosen: those that the command is to run.
    """

    def __init__(self, rows: list[Row], chosen: list[Row], folder: Path, options):
        self._rows, self._chosen, self._folder, self._options = rows, chosen, folder, options
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._looked = time.monotonic()
        self.run_ended()

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()

    def run_ended(self) -> None:
        """Read anew what finished runs tell: which are done, what their kind costs."""
        self._todo = [placed(row, self._folder) for row in self._chosen if not summary_of(row, self._folder)]
        self._costs = costs_of(self._rows, self._folder, self._options)
        self._flops = sum(placed(row, self._folder).own_flops for row in self._chosen)

    def show(self, running: list[Row]) -> None:
        """Called often; looks and draws when it is due."""
        if not running or time.monotonic() - self._looked < (LIVE_S if self._live else LOG_S):
            return
        self._looked = time.monotonic()
        states = {row.run: _State(row, self._folder) for row in running}
        left, share = self._left(states)
        done = f"{len(self._chosen) - len(self._todo)} of {len(self._chosen)} runs done"
        when = "" if left is None else f", {duration(left)} left, until {clock(time.time() + left)}"
        if self._live is None:
            print("; ".join([f"{time.strftime('%H:%M:%S')}  {done}{when}", *map(str, states.values())]), flush=True)
            return
        table = Table(box=None, header_style="dim", pad_edge=False)
        for name in ("run", "step", "loss", "tokens/s", "left"):
            table.add_column(name, justify="left" if name == "run" else "right")
        for state in states.values():
            table.add_row(*state.cells())
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(1.0, share, width=16), f"{done} ({share:.0%} of the FLOPs){when}")
        self._live.update(Group(table, bar), refresh=True)

    def _left(self, states: dict[str, "_State"]) -> tuple[float | None, float]:
        """Seconds until all is done, None where nothing tells yet; share of the FLOPs that is done."""
        speed = {kind: cost.tok_per_s * self._options.gpus for kind, cost in self._costs.items() if cost.device}
        speed |= {kind_of(state.row): state.tok_per_s for state in states.values() if state.tok_per_s}
        per_token = {kind_of(row): row.flops_per_token for row in self._rows}
        starts = [cost.start_s for cost in self._costs.values() if cost.is_start_measured]
        seconds, flops = [], 0.0
        for row in self._todo:
            kind, state = kind_of(row), states.get(row.run)
            tokens = row.own_tokens if state is None else (row.steps - state.step) * row.tokens_per_step
            flops += tokens * row.flops_per_token
            if speed:       # of a kind that nothing is known of, as many FLOPs a second as of the one nearest to it
                near = min(speed, key=lambda known: (known != kind, known[1] != kind[1], abs(per_token[known] - per_token[kind])))
                seconds.append(tokens * per_token[kind] / (speed[near] * per_token[near])
                               + (statistics.median(starts) if starts and state is None else 0.0))
        left = max(sum(seconds) / self._options.jobs, max(seconds)) if seconds else None
        return left, 1 - flops / self._flops


def clock(seconds: float) -> str:
    """Local time of the day, and the day where it is another one."""
    then = time.localtime(seconds)
    return time.strftime("%H:%M" if then[:3] == time.localtime()[:3] else "%a %H:%M", then)


class _State:
    """How far a run that is under way has come, by the end of its metrics.jsonl."""

    def __init__(self, row: Row, folder: Path):
        self.row, self.step, self.loss, self.tok_per_s = row, row.parent_step or 0, None, None
        last = [line for line in _tail(folder / row.run / "metrics.jsonl") if line["kind"] == "train" and "tok_per_s" in line]
        if last:
            self.step, self.loss = last[-1]["step"], last[-1].get("loss")
            self.tok_per_s = statistics.median(line["tok_per_s"] for line in last[-TAIL_ROWS:])

    @property
    def left(self) -> str:
        if self.tok_per_s is None:
            return "starting"
        tokens = (self.row.steps - self.step) * self.row.tokens_per_step
        return duration(tokens / self.tok_per_s) if tokens else "evaluating"

    def cells(self) -> list[str]:
        return [self.row.run, f"{self.step:,} / {self.row.steps:,}", "" if self.loss is None else f"{self.loss:.3f}",
                "" if self.tok_per_s is None else si(self.tok_per_s), self.left]

    def __str__(self) -> str:
        run, step, loss, speed, left = self.cells()
        return f"{run} {step}" + f", loss {loss}" * bool(loss) + f", {speed} tokens/s" * bool(speed) + f", {left}" + (
            " left" if left[0].isdigit() else "")


def _tail(path: Path) -> list[dict]:
    """The last rows of a metrics.jsonl that is being written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return metrics_rows(parse(file.read()))
    except FileNotFoundError:
        return []
