"""Hold what lies in a study's folder, with tables of its data, its sizes, its origin.

Each table takes a Results and gives Markdown. What a file does not tell is said to be missing, never filled in.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from runtime.cli import UserError, grid
from scaling.captions import human
from scaling.records import LARGEST, Record, read_json, read_text
from scaling.report_tables import NOT_TOLD, one_line

LISTED = 12                 # names in a sentence
NULL = "bf16, null"         # a BF16 run once more, only rounded otherwise


@dataclass(frozen=True)
class Results:
    """What lies in a study's folder; {} or [] where a file is not there."""
    folder: Path
    study: dict                     # study.json
    records: list[Record]           # every finished run, smallest first
    summaries: dict[str, dict]      # run -> its summary.json
    law: dict                       # law/law.json
    precision: dict                 # law/precision.json, its estimates as equivalence.Estimate
    predictions: list               # of frozen.Prediction
    scores: dict[str, dict]         # target -> law/score_<target>.json
    notes: list[str]                # of read_runs
    slices: list[dict]              # of slices.jsonl

    def size(self, record: Record) -> str:
        """The size's name in the study, else its parameters."""
        names = {row.get("params_total"): row["size"] for row in self.study.get("runs", []) if row.get("size")}
        return str(names.get(record.params_total, f"N {human(record.N)}"))

    @property
    def given_up(self) -> dict[str, int]:
        """Run -> the slice, from 1, that first went on without it; of the runs that are not there."""
        there, found = {record.run_id for record in self.records}, {}
        for n, row in enumerate(self.slices, 1):
            for name in row.get("skipped") or ():
                if name not in there:
                    found.setdefault(str(name), n)
        return found

    def commit(self, run_id: str) -> str:
        """The code of a run: by its own summary, else by the slice in which it finished."""
        summary = self.summaries[run_id]
        row = next((row for row in self.slices if run_id in row["runs"]), {})
        return commit(summary if summary.get("git_commit") else row)

    @property
    def largest(self) -> Record:
        """The finished run of most tokens, BF16 before others."""
        return max(self.records, key=lambda record: (record.tokens, record.recipe == "bf16"))

    def groups(self, chosen) -> dict[tuple[str, str], list[Record]]:
        """(size, recipe) -> the records among `chosen`; smallest first, BF16 first; null runs are apart."""
        found = {}
        for record in sorted(chosen, key=lambda r: (r.N, r.recipe != "bf16", r.recipe, r.repeat, r.run_id)):
            name = NULL if record.repeat else record.recipe
            found.setdefault((self.size(record), name), []).append(record)
        return found


def told(holder, *keys) -> float | None:
    """The number under these keys; None where the file tells none."""
    for key in keys:
        holder = holder.get(key) if isinstance(holder, dict) else None
    is_number = isinstance(holder, int | float) and not isinstance(holder, bool)
    return holder if is_number and abs(holder) < LARGEST else None


def shown(value: float | None, form: str) -> str:
    return NOT_TOLD if value is None else format(value, form)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; names come from files, so that none may end a row or a cell. "" without rows."""
    return grid([head, *([one_line(str(cell)) for cell in row] for row in rows)]) if rows else ""


# ------------------------------------------------------------------------------------------------- data, sizes, origin


def data(results: Results) -> str:
    """What the runs read: the share, tokens and epochs of each source in the run of most tokens, then how it was made."""
    run, rows = results.largest, []
    summary = results.summaries[run.run_id]
    for name, weight in run.weights.items():
        source = summary["sources"][name]
        epochs, tokens, text = (told(source, key) for key in ("epochs", "tokens", "text_bytes"))
        there = human(weight * run.tokens / epochs) if epochs else NOT_TOLD
        rows.append([name, f"{weight:.3f}", human(weight * run.tokens), there,
                     shown(epochs, ".3g"), shown(tokens, ",.0f"), f"{text / tokens:.2f}" if text and tokens else NOT_TOLD])
    lines = [f"Tokenizer {summary.get('tokenizer', NOT_TOLD)}, {run.vocab_size:,} ids. The run of most tokens is `{run.run_id}` "
             f"with {run.tokens:,}:", "", table(["source", "share", "tokens read", "tokens there", "epochs", "validated on",
                                                 "bytes per token"], rows)]
    return "\n".join(lines + _made_of(results))


def corpus(results: Results) -> dict[str, dict]:
    """Source -> its index.json, from the data.json that is published beside the runs; {} where that is not there."""
    path = results.folder / "data.json"
    found = read_json(path) if path.exists() else {}
    if not all(isinstance(index, dict) for index in found.values()):
        raise UserError(f"{path} must hold an object for each source: publish it again, scaling/publish.py")
    return found


def preparation(results: Results) -> str:
    """The commands that made the corpus, as far as its own description tells them."""
    config = results.largest.folder / "config.json"
    said = read_json(config).get("data") if config.exists() else None
    out = f" out={said['dir']}" if isinstance(said, dict) and said.get("dir") else ""
    commands = []
    for name, index in corpus(results).items():
        dataset, license = str(index.get("dataset")), index.get("license")
        local = re.match(r"local: (.*?)(?:; column (.*))?$", dataset)
        kind = "demo" if dataset == "installed" else "installed" if dataset.startswith("installed ") else None
        share, same = re.search(r"% (\d+) < (\d+)", str(index.get("split_rule"))), out
        if index.get("tokenizer"):
            same += " tokenizer=" + str(index["tokenizer"]).replace("folder", "FOLDER")
        same += f" val_share={int(share[2]) / int(share[1]):g}" if share and int(share[1]) else ""
        # What two sources of one command are asked for, the mixture divides.
        budget = _sum([told(one, "budget") for one in corpus(results).values() if one.get("dataset") == dataset]
                      if kind else [told(index, "budget")])
        same += "" if budget is None else f" tokens={budget:.0f}"
        commands += [f"prepare_data.py {kind}{same}"] if kind else []
        if local:
            same += {None: "", "text": ""}.get(local[2], " instruct=true" if " and " in str(local[2]) else f" column={local[2]}")
            same += " " + shlex.quote(f"license={license}") if license and license != "not stated" else ""
            commands.append(f"prepare_data.py local {local[1].replace(', ', ' ')} name={name}{same}")
    return "` and `python ".join(one_line(one).replace("`", "'") for one in dict.fromkeys(commands)) or f"prepare_data.py{out}"


def _made_of(results: Results) -> list[str]:
    rows, rules = [], {}
    for name, index in corpus(results).items():
        counts = {(split, key): told(index, "splits", split, key) for split in ("train", "val")
                  for key in ("documents", "text_bytes", "tokens")}
        both = [_sum([counts[split, key] for split in ("train", "val")]) for key in ("documents", "text_bytes")]
        duplicates = index.get("duplicates")
        dropped = _sum([told(duplicates, key) for key in duplicates]) if isinstance(duplicates, dict) else None
        rows.append([name, index.get("dataset") or NOT_TOLD, shown(both[0], ",.0f"),
                     NOT_TOLD if both[1] is None else f"{both[1] / 1e6:,.1f}", shown(counts["train", "tokens"], ",.0f"),
                     shown(counts["val", "tokens"], ",.0f"), shown(dropped, ",.0f"), index.get("license") or NOT_TOLD,
                     _short(index.get("revision"))])
        selection = index.get("selection")
        left_out = selection.get("left_out") if isinstance(selection, dict) else None
        for rule, words in left_out.items() if isinstance(left_out, dict) else ():
            rules.setdefault(f"{rule}: {words}", []).append(name)
    lacking = missing("data.json, the corpus' own description", "python scaling/publish.py out/STUDY RESULTS")
    text = table(["source", "from", "documents", "text [MB]", "training tokens", "validation tokens", "duplicates dropped",
                  "licence", "revision"], rows)
    said = [f"- left out of {', '.join(names)}, {one_line(rule)}" for rule, names in rules.items()]
    return ["", text or lacking, *([""] if said else []), *said]


def _sum(values) -> float | None:
    return None if None in values else sum(values)


def _short(text, longest: int = 80) -> str:
    text = str(text) if text else NOT_TOLD
    return text if len(text) <= longest else text[:longest] + " ..."


def sizes(results: Results) -> str:
    """The grid: each size with both counts of parameters, what the study declares of it, and how much of that is done."""
    declared = {}
    for row in results.study.get("runs", []):
        declared.setdefault(row.get("size"), []).append(row)
    done, rows = {record.run_id: record for record in results.records}, []
    for name, own in declared.items():
        total, nonembed = (told(own[0], key) for key in ("params_total", "params_nonembed"))
        one = next((results.summaries[row["run"]] for row in own if row["run"] in done), {})
        layers, width, ffn = (told(one, key) for key in ("n_layer", "n_embd", "n_ffn"))
        held = {row["run"] for row in own} & set(results.study.get("held_out", []))
        rows.append([
            str(name) + " (held out)" * bool(held), f"{layers} x {width}, {ffn}" if layers else NOT_TOLD, shown(total, ",.0f"),
            shown(nonembed, ",.0f"), f"{1 - nonembed / total:.0%}" if total and nonembed else NOT_TOLD,
            _values(own, "tokens_per_param"), human(max(told(row, "tokens") or 0 for row in own)), _values(own, "seed"),
            ", ".join(dict.fromkeys(str(row.get("recipe")) for row in own)),
            ", ".join(sorted({f"{lr:g}" for row in own if row["run"] in done
                              and (lr := told(results.summaries[row["run"]], "lr_peak")) is not None})),
            f"{sum(row['run'] in done for row in own)} of {len(own)}"])
    counted = "non-embedding parameter" if results.study.get("params") == "nonembed" else "parameter, all counted"
    text = table(["size", "layers x width, ffn", "parameters", "non-embedding", "vocabulary", f"tokens per {counted}",
                  "most tokens", "seeds", "recipes", "peak learning rate", "runs done"], rows)
    lacking = [row["run"] for row in results.study.get("runs", []) if row["run"] not in {**done, **results.given_up}]
    more = [f"Not there yet: {_listed(lacking)}."] if lacking else []
    more += [f"**Given up:** {_listed(list(results.given_up))}; see Steps that went wrong."] if results.given_up else []
    return "\n\n".join([text, *more, *(note + "." for note in results.notes if "unfinished" in note)])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _values(rows, key: str) -> str:
    return ", ".join(f"{value:g}" for value in sorted({told(row, key) for row in rows} - {None}))


def read_slices(folder: Path) -> list[dict]:
    """The rows of slices.jsonl, [] without one. Raises UserError for a line that is none."""
    path, rows = folder / "slices.jsonl", []
    for n, line in enumerate(read_text(path).splitlines(), 1):
        try:
            row = json.loads(line)
            named = (row["runs"], row.get("skipped") or [])
            assert all(isinstance(some, list) and set(map(type, some)) <= {str} for some in named)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise UserError(f"{path}, line {n} is no slice: expected an object with start, seconds, commit, runs; restore "
                              "the file") from None
        rows.append(row)
    return rows


def origin(results: Results) -> str:
    """The slices in which the study was run, and what the runs say of the code and the machine that made them."""
    rows, kinds, spent = [], {}, 0.0
    for n, row in enumerate(results.slices, 1):
        spent += told(row, "seconds") or 0
        rows.append([str(n), row.get("start") or NOT_TOLD, shown((told(row, "seconds") or 0) / 60, ".1f"),
                     commit(row), str(len(row["runs"])), str(len(row.get("skipped") or [])), shown(told(row, "exit"), ".0f")])
        machine = ", ".join(f"{key} {row[key]}" for key in ("device", "driver", "python", "torch", "torchao", "triton", "cuda")
                            if row.get(key))
        kinds.setdefault(machine, []).append(rows[-1][0])
    head = ["slice", "began (UTC)", "minutes", "commit", "runs finished", "runs given up", "exit"]
    lines = [table(head, rows), ""] if rows else [
        missing("slices.jsonl, which tells when, where and from which commit the runs came", "scaling/slice.py"), ""]
    lines += [f"- slice {', '.join(which)}: {one_line(machine)}" for machine, which in kinds.items()]
    lines += ["", f"{len(rows)} slice{'s' * (len(rows) != 1)}, {spent / 60:.0f} minutes in all. Exit 0: nothing was left to do; "
              "3: something was; 1: something failed.", ""] if rows else []
    seen = {}
    for record in results.records:
        summary = results.summaries[record.run_id]
        where = ", ".join(str(part) for part in (
            f"{record.n_gpu} x {record.device}", *(f"{key} {summary[key]}" for key in ("torch", "torchao", "cuda")
                                                   if summary.get(key)),
            "commit " + results.commit(record.run_id)))
        seen.setdefault(where, []).append(record)
    return "\n".join(lines + [f"- {len(some)} runs: {one_line(where)}" for where, some in seen.items()])


def commit(row: dict) -> str:
    """Of a slice or of a run's summary; whether its files were edited since."""
    named, dirty = (row.get("git_commit") or row.get("commit")), row.get("git_dirty") or row.get("dirty")
    return (str(named)[:9] if named else "not known") + (", edited" if dirty else "")


def missing(what: str, command: str) -> str:
    return f"**Missing:** {what} (`{command}`)."
