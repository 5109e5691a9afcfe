"""Lay finished runs beside each other: one training in several precisions, or a whole study on one
page.

    python scaling/report.py out/A out/B [out=DIR]  # report.md and .json, report_loss.png and .svg
    python scaling/report.py --study out/STUDY      # README.md and report.json in that folder

One training (out=law beside the runs): losses, time with the first steps apart, GPU memory and
utilisation, speed against BF16; the runs must differ in the precision alone. A study: its finished
runs, and what fit.py, precision.py, learning_rate.py found in them; what is missing is named with
the command that makes it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.command import command, run_command
from lib.errors import UserError
from lib.plots import write_files, write_with
from lib.values import FilePath
from scaling.pairing import pair_runs
from scaling.records import LAW_FOLDER
from scaling.study_report import MARK, page_content, report_study_folder
from scaling.training_figure import draw_losses
from scaling.training_report import format_training, read_training_runs, report_training_runs


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: tuple[FilePath, ...] = ()  # of one training in several precisions
    study: FilePath | None = None  # a folder of runs in their place
    out: FilePath | None = None  # folder that receives the report; none = law beside the first run

    def __post_init__(self) -> None:
        has_one = bool(self.runs) != bool(self.study)
        if not has_one or (self.study and self.out):
            raise UserError(
                "name the runs of one training, as out/a_bf16 out/a_fp8 [out=DIR], or --study"
                " out/STUDY alone"
            )


@command(__doc__, Options, "runs")
def main(options: Options) -> str:
    if options.study:
        return report_study(Path(options.study))
    return report_training(options.runs, options.out)


def report_training(paths: Sequence[str], out: str | None) -> str:
    """Write the report of one training; what it says."""
    runs, notes = read_training_runs(paths)
    pairs, _ = pair_runs([run.record for run in runs])
    report = report_training_runs(runs, pairs, notes)
    parts = [
        f"# {len(runs)} runs of one training: {', '.join(run.label for run in runs)}",
        format_training(report.runs),
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    text = "\n\n".join(parts)
    wrote = write_with(
        Path(out or runs[0].record.folder.parent / LAW_FOLDER),
        "report_loss",
        draw_losses(runs),
        {
            "report.md": f"{text}\n\n![loss](report_loss.png)\n",
            "report.json": asdict(report),
        },
    )
    return f"{text}\n\n{wrote}"


def report_study(folder: Path) -> str:
    """Write the page of a study; what it says. Raises UserError where a page lies there that
    somebody else wrote."""
    path = folder / "README.md"
    if path.exists() and not path.read_text(errors="replace").startswith(MARK):
        raise UserError(
            f"{path} was not written by this command, and it is not written over: move it away"
        )
    page = report_study_folder(folder)
    write_files(folder, page_content(page))
    return f"{page.text}\n\nwrote {path}, report.json"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
