"""Write what docs/expected.md shows: what the commands of `make demo` print, and what the shipped
configs cost.

    python docs/expected.py out/demo write=true   from a finished demo; trains nothing
    python docs/expected.py write=true            the table of shipped configurations alone
    python docs/expected.py out/demo write=false  print the page

The screens are those of the demo's own commands, of which scaling/fit.py and scaling/precision.py
run again. A configuration's row is --plan's for an H100, beside what bench/results holds."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.borrowed import CELLS, rows_on_gpu
from bench.borrowed_report import valid_rows_by_cell
from eval.harness import scores_page
from eval.results import read_scores
from lib.command import command, run_command
from lib.errors import UserError
from lib.files import write_atomically
from lib.machine import ROOT
from lib.values import FilePath
from runtime.config import load_config
from runtime.plan import plan
from scaling import fit, precision, sweep

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- made by python docs/expected.py, {name} -->", "<!-- end -->"
SIZES = ("50m", "125m", "250m", "350m", "760m", "1p5b")
RUN = "demo_l_tensorwise_t20_s1337"  # whose log and scores are shown
WIDEST = 130  # characters of a line that is shown


# ------------------------------------------------------------------------------ what configs cost


def configs_table() -> str:
    """A row for each pair of shipped configurations: modelled by --plan, measured by the bench."""
    files = (ROOT / "bench/results/h100_peers.jsonl", ROOT / CELLS)
    rows = valid_rows_by_cell([row for file in files for row in rows_on_gpu(file)], "NVIDIA H200")
    lines = [
        "| config | tokens | memory, FP8, estimated | hours on one H100, BF16 / FP8, modelled"
        " | tokens/s on one H200, BF16 / FP8, measured | memory there, BF16 / FP8, measured"
        " | final loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        config = load_config(ROOT / f"configs/gpt{size}_fp8.py")
        screen = "\n".join(plan(config, "h100"))
        memory = _number(r"^  sum +([\d.]+) GiB", screen)
        hours = [_number(rf"^  {kind} +([\d.]+) h", screen) for kind in ("BF16", "FP8")]
        cells = [rows.get((size, label)) for label in ("bf16", "tensorwise+kernels")]
        speeds = memories = "not measured"
        if all(cells):
            speeds = " / ".join(f"{cell.tok_per_s / 1e3:,.1f}k" for cell in cells if cell)
            memories = " / ".join(f"{cell.measured.peak_gib:.1f} GiB" for cell in cells if cell)
        tokens = f"{config.total_tokens / 1e9:.2f}B"
        lines.append(
            f"| gpt{size} | {tokens} | {memory} GiB | {hours[0]} / {hours[1]}"
            f" | {speeds} | {memories} | not measured |"
        )
    return "\n".join(lines)


def _number(pattern: str, screen: str) -> str:
    match = re.search(pattern, screen, re.MULTILINE)
    assert match is not None
    return match[1]


# ------------------------------------------------------------------------------- the demo's screens


def training_log(demo: Path) -> str:
    """The console output of a run, with the first and every sixth of its lines on steps."""
    lines = (demo / f"{RUN}.log").read_text().splitlines()
    on_steps = [line for line in lines if "tok/s  " in line]
    left_out = set(on_steps) - {on_steps[0], *on_steps[6::6]}
    kept_lines = [line for line in lines if line not in left_out]
    return screen("\n".join(kept_lines))


def sweep_table(demo: Path) -> str:
    """The first rows of the table, and the notes below it."""
    printed = _printed(sweep.main, "configs/study_demo.py", f"out={demo.parent}")
    table, _, below = printed.partition("\n\n")
    first_rows = table.splitlines()[:12]
    return screen("\n".join([*first_rows, "...", "", below]))


def losses(demo: Path) -> str:
    """The results of each size of the demo at its largest budget, from summary.json."""
    lines = [
        "| config | parameters | tokens | recipe |"
        " validation loss in BF16, as trained | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for size in ("s", "m", "l"):
        for recipe in ("bf16", "tensorwise"):
            path = demo / f"demo_{size}_{recipe}_t20_s1337/summary.json"
            values = json.loads(path.read_text())
            lines.append(
                f"| demo_{size} | {values['params_total']:,} | {values['tokens']:,} | {recipe}"
                f" | {values['loss_bf16']:.4f}, {values['loss_as_trained']:.4f}"
                f" | {values['tok_per_s_median']:,.0f} |"
            )
    return "\n".join(lines)


def fit_screen(demo: Path) -> str:
    return screen(_printed(fit.main, demo))


def precision_screen(demo: Path) -> str:
    return screen(_printed(precision.main, demo))


def scores(demo: Path) -> str:
    return screen(scores_page(read_scores(demo / RUN / "eval/demo.json")))


def summary(demo: Path) -> str:
    """Some keys of a run's summary.json."""
    keys = ("run_id", "loss_as_trained", "loss_bf16", "tokens", "params_total", "tok_per_s_median")
    values = json.loads((demo / RUN / "summary.json").read_text())
    selected = {key: values[key] for key in keys if key in values}
    return screen(json.dumps(selected, indent=1), "json")


def _printed(main: Callable[[list[str]], int], *words: object) -> str:
    """What a command prints. Raises UserError where it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main([str(word) for word in words])
    if code:
        raise UserError(f"{' '.join(map(str, words))}: exit code {code}; run `make demo` first")
    return output.getvalue()


def screen(text: str, language: str = "") -> str:
    """A text as a fenced block, long lines cut."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    short_lines = [line if len(line) <= WIDEST else line[: WIDEST - 3] + "..." for line in lines]
    return "\n".join([f"```{language}", *short_lines, "```"])


SCREENS: dict[str, Callable[[Path], str]] = {
    "losses": losses,
    "training log": training_log,
    "summary": summary,
    "sweep": sweep_table,
    "fit": fit_screen,
    "precision": precision_screen,
    "harness": scores,
}


# --------------------------------------------------------------------------------------- the page


def with_block(page: str, name: str, block: str) -> str:
    """The page with `block` between the markers of this name. Raises UserError without them."""
    begin = BEGIN.format(name=name)
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"{PAGE} lacks the lines {begin} and {END}: put the text between them")
    return pattern.sub(lambda _: f"{begin}\n{block}\n{END}", page)


def page_of(demo: Path | None) -> str:
    """The page with its table of configurations and, where a demo is given, its screens made
    anew."""
    page = with_block(PAGE.read_text(), "configs", configs_table())
    if demo is None:
        return page
    for name, block in SCREENS.items():
        page = with_block(page, name, block(demo))
    return page


@dataclass(frozen=True, kw_only=True)
class Options:
    demo: FilePath | None = None  # the folder of a finished demo; none = its screens stay
    write: bool  # put all into docs/expected.md; false prints the page


@command(__doc__, Options, "demo")
def main(options: Options) -> str | None:
    demo = None if options.demo is None else Path(options.demo)
    if demo is not None and not (demo / RUN / "summary.json").exists():
        raise UserError(f"{demo} holds no finished {RUN}: run `make demo` first")
    page = page_of(demo)
    if not options.write:
        return page
    write_atomically(PAGE, page)
    return None


if __name__ == "__main__":
    raise SystemExit(run_command(main))
