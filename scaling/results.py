"""Write the page of a study's results from the files that were published of it:

    python scaling/results.py results/study_h100        # README.md in that folder

The folder is what scaling/publish.py leaves, or any folder of runs with a study.json and a law/. Every section names the
command that makes its numbers; what is not there is said to be missing, in one line. The same files give the same bytes.
"""

import sys
from pathlib import Path

from runtime.cli import UserError
from scaling import gap_tables, results_laws, results_runs, results_tables
from scaling.command import read_words, run
from scaling.figures import write
from scaling.predict import load, read_study
from scaling.records import LAW_FOLDER, read_json, read_runs
from scaling.results_limits import limits
from scaling.results_tables import Results, missing

PAGE = "README.md"
MARK = "<!-- Written by scaling/results.py from the files beside it: edit those, not this page. -->"


def main(arguments=None) -> int:
    """Run the command line; 0 on success, 2 with a sentence on stderr for a mistake in the files, 1 where none can be written."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if arguments else 2
    try:
        paths, _ = read_words(arguments, {})
        if len(paths) != 1:
            raise UserError(f"give one folder of a study's results such as results/study_h100, not {len(paths)}")
        folder = Path(paths[0])
        results = read_results(folder)
        path = folder / PAGE
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise UserError(f"{path} was not written by this command, and it is not written over: move it away")
        text = page(results)
    except UserError as error:
        print(f"scaling/results.py: {error}", file=sys.stderr)
        return 2
    try:
        write(path, text.encode())
    except OSError as error:
        print(f"scaling/results.py: {path} cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    lacking = text.count("**Missing:**")
    print(f"wrote {path}: {len(results.records)} runs" + (f"; {lacking} things are missing, each said there" if lacking else ""))
    return 0


def read_results(folder: Path) -> Results:
    """All that lies in a study's folder. Raises UserError where a file is damaged, or where there is no finished run."""
    records, notes = read_runs([folder])
    records.sort(key=lambda record: (record.N, record.recipe != "bf16", record.recipe, record.tokens, record.seed, record.repeat))
    study, law = read_study(folder), folder / LAW_FOLDER
    said = {name: law / f"{name}.json" for name in ("law", "precision")}
    fitted = read_json(said["law"]) if said["law"].exists() else {}
    if said["law"].exists() and "groups" not in fitted:
        raise UserError(f"{said['law']} holds no groups of runs: make it again, python scaling/fit.py {folder}")
    return Results(
        folder, study, records, {record.run_id: read_json(record.folder / "summary.json") for record in records},
        fitted, gap_tables.read_result(said["precision"]) if said["precision"].exists() else {}, load(law),
        {path.stem.removeprefix("score_"): read_json(path) for path in sorted(law.glob("score_*.json"))}, notes,
        results_tables.read_slices(folder))


def page(results: Results) -> str:
    """The whole page as Markdown. Raises UserError where a file that other commands made is not what they make."""
    folder, study = results.folder.as_posix(), results.study.get("study")
    config = f"configs/study_{study}.py" if study else "STUDY.py"
    declared = len(results.study.get("runs", []))
    of = f" of {declared} declared on {results.study.get('declared')}" if declared else ""
    of += f", {len(results.given_up)} given up" if results.given_up else ""
    parts = [f"{MARK}\n# {f'The study {study}' if study else folder}: results",
             f"{len(results.records)} finished runs{of}. This page: `python scaling/results.py {folder}`."]
    if not declared:
        parts.append(missing("study.json, which says what was declared first", f"python scaling/sweep.py {config}"))
    for title, section, command in (
            ("In short", results_laws.short, f"scaling/results.py {folder}"),
            ("Data", results_tables.data, results_tables.preparation(results)),
            ("Sizes", results_tables.sizes, f"scaling/sweep.py {config}"),
            ("Where the runs come from", results_tables.origin, f"scaling/slice.py {config} limit=540 results={folder}"),
            ("Laws", results_laws.laws, f"scaling/fit.py {folder}"),
            ("Prediction", results_laws.prediction, f"scaling/fit.py {folder} --predict RUN"),
            ("FP8 against BF16", results_laws.precision, f"scaling/precision.py {folder}"),
            ("What FP8 did inside", results_runs.dynamics, f"scaling/figures.py --fp8 {folder}/RUN"),
            ("Speed", results_runs.speed, f"scaling/results.py {folder}"),
            ("Bits per byte", results_runs.bits, f"scaling/results.py {folder}"),
            ("Learning rate", results_laws.learning_rate, f"scaling/learning_rate.py {folder}_lr"),
            ("Samples", results_runs.samples, f"-m eval.sample out/{study or 'STUDY'}/RUN"),
            ("Steps that went wrong", results_runs.notable, f"scaling/figures.py {folder}/RUN"),
            ("What a study of this size cannot show", limits, f"scaling/results.py {folder}")):
        try:
            text = section(results)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:     # law.json and its like, edited or older
            raise UserError(f"{folder}: a file behind {title!r} is damaged or of another version ({type(error).__name__}: "
                              f"{error}); make it again: python {command.partition('`')[0]}") from error
        parts.append(text and f"## {title}\n\nMade by `python {command}`.\n\n{text}")
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    sys.exit(run(main))
