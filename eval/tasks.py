"""Load lm-eval's tasks by their names, and save their data once, so that they are scored without network from then on.

    DIR/manifest.json                           what was saved: data set, revision, tasks, rows and sha256 of each split
    DIR/Rowan--hellaswag/default/validation.parquet     one split: DIR/<dataset_path, / as -->/<dataset_name>/<split>.parquet

Only the splits that a task reads are saved: the one that is scored, and the one its examples come from where it shows some.
"""

import contextlib
import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.checkpoint import file_sha256
from runtime.cli import UserError, nearest
from runtime.rows import read_bytes, write_atomically, write_json

DEMO_TASKS = Path(__file__).parent / "demo_tasks"
DEMO = ("val_ppl", "val_cloze")
CORE = ("wikitext", "lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "boolq", "sciq",
        "winogrande")
# Both additions ask for the letter of an answer, which models below one or two billion parameters give no better than by
# chance, and mmlu's 14,042 questions with five examples each take longer than all of core.
FULL = (*CORE, "mmlu", "commonsense_qa")
GROUPS = {"demo": DEMO, "core": CORE, "full": FULL}

# Where lm-eval 0.4.13 keeps these: its index of 14,000 YAMLs takes ten seconds that a known name need not wait for.
FOLDERS = {"wikitext": "wikitext", "lambada_openai": "lambada", "hellaswag": "hellaswag", "piqa": "piqa", "arc_easy": "arc",
           "arc_challenge": "arc", "openbookqa": "openbookqa", "boolq": "super_glue/boolq", "sciq": "sciq",
           "winogrande": "winogrande", "mmlu": "mmlu/default", "commonsense_qa": "commonsense_qa"}

# Examples shown before a question, where the usual number is not lm-eval's own (Hendrycks et al., 2009.03300).
SHOTS = {"cais/mmlu": 5}
LOCAL = ("json", "parquet", "csv", "text", "arrow")     # builders of `datasets` that read files, not the Hub
FORMAT_VERSION = 1


def expand(words: tuple[str, ...]) -> list[str]:
    """The names that `words` mean: our groups spelled out, each once."""
    names = [name.strip() for word in words for name in GROUPS.get(word.strip(), (word,))]
    return list(dict.fromkeys(name for name in names if name))


def is_local(names: list[str], include: str | None) -> bool:
    """Whether the data of all these tasks are files here or the run's own shards."""
    return (set(DEMO) | _local_tasks(include)).issuperset(names)


def _local_tasks(include: str | None) -> set[str]:
    """Names of the tasks in the user's folder whose data lie in local files."""
    names = set()
    for path in Path(include).rglob("*.yaml") if include else ():
        text = path.read_text(errors="replace")
        name = re.search(r"^task:\s*[\"']?([\w.-]+)[\"']?\s*(?:#.*)?$", text, re.M)
        data = re.search(rf"^dataset_path:\s*[\"']?(?:{'|'.join(LOCAL)})[\"']?\s*(?:#.*)?$", text, re.M)
        if name and data and "://" not in text:
            names.add(name[1])
    return names


def quiet(offline: bool) -> None:
    """Before lm-eval is imported: silence its logs; with `offline`, keep every library away from the network."""
    os.environ["DISABLE_MULTIPROC"] = "1"       # lm-eval's bootstrap would fork a process that holds torch's threads
    if offline:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
            os.environ[name] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def load(names: list[str], include: str | None, run_dir: str | None = None, offline: str | None = None) -> dict:
    """lm-eval's TaskDict of the tasks, groups and tags called `names`; `run_dir` is whose shards the demo tasks are cut from.

    Raises UserError: no such task, data that cannot be had, answers that would be sampled.
    """
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    if include is not None and not Path(include).is_dir():
        raise UserError(f"include={include!r} is no folder: give one that holds task YAMLs")
    datasets.disable_progress_bars()
    local = set(DEMO) | _local_tasks(include)
    is_known = set(names) <= local | set(FOLDERS)      # else its whole index
    theirs = Path(lm_eval.__file__).parent / "tasks"
    folders = dict.fromkeys(theirs / FOLDERS[name] for name in names if name not in local) if is_known else ()
    manager = TaskManager(include_path=[*folders, DEMO_TASKS, *([include] if include else [])], include_defaults=not is_known,
                          metadata={"run_dir": run_dir} if set(DEMO) & set(names) else None)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*GROUPS, *manager.all_tasks], 3, cutoff=0.5)
            raise UserError(f"there is no task {name!r}; `lm-eval ls tasks` lists them all; near: {', '.join(near) or 'none'}")
    loaded: dict = {"tasks": {}, "groups": {}, "group_map": {}}
    with reading(Path(offline) if offline else None):
        for name in names:
            try:
                part = manager.load([name])
            except UserError:
                raise
            except Exception as error:      # a task is foreign code and foreign data: whatever it raises, name the task
                where = ("its data lie in files that its YAML names: check that they are there, and whole" if name in local else
                         f"what it is scored on may never have been saved in {offline}: add it with --fetch {offline}" if offline
                         else "if its data come from the Hugging Face Hub, they must be cached or the Hub in reach; "
                         "--fetch DIR saves them for good")
                said = (str(error).strip().splitlines() or [""])[0]
                raise UserError(f"the task {name!r} could not be loaded ({type(error).__name__}: {said}): {where}") from error
            for key in loaded:
                loaded[key] |= part[key]
    for name, task in loaded["tasks"].items():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=SHOTS.get(task.config.dataset_path, 0))
        task.set_fewshot_seed(seed=1234)        # lm-eval's own default, for equal few-shot examples
        if (task.get_config("generation_kwargs") or {}).get("do_sample"):
            raise UserError(f"the task {name!r} asks for sampled answers, but only greedy ones are generated here: "
                            f"leave it out")
    return loaded


# --------------------------------------------------------------------------------------------------------------- saving

def fetch(folder: Path, words: tuple[str, ...], include: str | None) -> list[str]:
    """Save the data of the tasks; a line for each. What the folder held of others stays. Raises UserError, OSError."""
    quiet(offline=False)
    names = expand(words)
    lines = [f"{name}: nothing to save, it is made from a run's own validation shards" for name in names if name in DEMO]
    wanted = [name for name in names if name not in DEMO]
    return lines + (save_tasks(folder, load(wanted, include)["tasks"]) if wanted else [])


def save_tasks(folder: Path, tasks: dict) -> list[str]:
    """Save the data of loaded lm-eval tasks {name: task}; a line for each."""
    lines, wanted = [], {}      # (data set, its name): (splits, tasks that read them)
    for name, task in tasks.items():
        config = task.config
        if config.dataset_path is None or config.dataset_path in LOCAL:
            lines.append(f"{name}: nothing to save, its data are made or lie in files already")
            continue
        if config.dataset_kwargs:       # two tasks may ask for two parts of what has one name
            raise UserError(f"the task {name!r} asks for its data with {sorted(config.dataset_kwargs)}, which cannot be saved: "
                            f"leave it out")
        splits = {split: task.dataset[split] for split in splits_read(task)}
        all_splits, readers = wanted.setdefault((config.dataset_path, config.dataset_name), ({}, []))
        all_splits |= splits
        readers.append(name)
        lines.append(f"{name}: " + ", ".join(f"{len(rows):,} rows of {split}" for split, rows in splits.items()))
    for (path, name), (splits, readers) in wanted.items():
        write_task_data(folder, path, name, splits, readers)
    return lines


def splits_read(task) -> list[str]:
    """The splits of its data that an lm-eval task reads when it is scored: its questions', its examples' where it has some."""
    config = task.config
    scored = config.test_split or config.validation_split
    shown = task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split
    has_own = task.fewshot_cfg.samples is not None      # examples spelled out in the task itself
    return list(dict.fromkeys([scored] + ([shown] if (config.num_fewshot or 0) > 0 and not has_own else [])))


def write_task_data(folder: Path, dataset_path: str, dataset_name: str | None, splits: dict, tasks: Sequence[str] = ()) -> None:
    """Save {split: rows}, lists of dicts or a datasets.Dataset, as the data set `dataset_path`. What the folder held of other
    data sets stays; of this one the other splits, where they are of the same revision of the Hub's. Raises OSError."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    key, manifest = _key(dataset_path, dataset_name), read_manifest(folder) if (folder / "manifest.json").exists() else {}
    known, listed, revision = manifest.get(key, {}), {}, None
    for split, rows in splits.items():
        rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
        revision = revision or _revision(rows)
        path = folder / key / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = rows.with_format("arrow")[:]        # without what a filter left out; with the columns' types as metadata
        content = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table.replace_schema_metadata(rows.features.arrow_schema.metadata), content)
        write_atomically(path, content.getvalue())
        listed[split] = {"rows": len(rows), "sha256": file_sha256(path)}
    kept = known.get("splits", {}) if revision and known.get("revision") == revision else {}
    manifest[key] = {"dataset_path": dataset_path, "dataset_name": dataset_name, "revision": revision,
                     "tasks": sorted({*known.get("tasks", []), *tasks}), "splits": kept | listed}
    write_json(folder / "manifest.json", {"format_version": FORMAT_VERSION, "datasets": manifest})  # last: what it names is whole


def _key(dataset_path: str, dataset_name: str | None) -> str:
    return f"{dataset_path.replace('/', '--')}/{dataset_name or 'default'}"


def _revision(rows) -> str | None:
    """The Hub's commit that the rows came from: `datasets` calls its cache's folder by it. None where there is none."""
    names = [found[1] for file in rows.cache_files if (found := re.search(r"/([0-9a-f]{40})/[^/]*$", file["filename"]))]
    return names[0] if names else None


# --------------------------------------------------------------------------------------------------------------- reading

def read_manifest(folder: Path) -> dict[str, dict]:
    """{"Rowan--hellaswag/default": {dataset_path, dataset_name, revision, tasks, splits}}. Raises UserError."""
    path = folder / "manifest.json"
    if not (text := read_bytes(path)):
        raise UserError(f"{folder} holds no manifest.json, so no saved tasks: make it with "
                        f"`python -m eval.harness --fetch {folder} tasks=core` where there is network")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): fetch the tasks again") from error
    if content["format_version"] != FORMAT_VERSION:
        raise UserError(f"{path} has format_version={content['format_version']!r}, this program reads {FORMAT_VERSION}: fetch "
                        f"the tasks again")
    return content["datasets"]


@contextlib.contextmanager
def reading(folder: Path | None) -> Iterator[None]:
    """Within it, lm-eval's tasks load their data from `folder`, a folder that save_tasks() made; with None from the Hub.

    Data in local files are read as ever, relative names looked up beside the task's YAML. A split that no task reads
    when it is scored was never saved: it appears empty. Raises UserError, also later, where data lack or are damaged.
    """
    from lm_eval.api.task import ConfigurableTask

    manifest, original = read_manifest(folder) if folder else {}, ConfigurableTask.download

    def download(task, dataset_kwargs: dict | None = None, **settings):
        if callable(task.config.custom_dataset) or (folder is None and task.DATASET_PATH not in LOCAL):
            original(task, dataset_kwargs, **settings)
        elif task.DATASET_PATH in LOCAL:
            yaml = Path((task.config.metadata or {}).get("config_source", "."))
            files = _beside(yaml.parent, (dataset_kwargs or {}).get("data_files"))
            original(task, {**(dataset_kwargs or {}), "data_files": files} if files else dataset_kwargs, **settings)
        else:
            task.dataset = _Splits(folder, manifest, _key(task.DATASET_PATH, task.DATASET_NAME))
    ConfigurableTask.download = download    # lm-eval leaves no other way in
    try:
        yield
    finally:
        ConfigurableTask.download = original


def _beside(folder: Path, files):
    """`files` as `datasets` takes them (a name, a list, {split: ..}), relative names made those of files in `folder`."""
    if isinstance(files, dict):
        return {split: _beside(folder, names) for split, names in files.items()}
    if isinstance(files, list):
        return [_beside(folder, name) for name in files]
    return str(folder.resolve() / files) if isinstance(files, str) and "://" not in files else files


class _Splits(dict):
    """The saved splits of one data set, read and checked when asked for."""

    def __init__(self, folder: Path, manifest: dict, key: str):
        super().__init__()
        if key not in manifest:
            raise UserError(f"{folder} holds no data of {key}: add the task with --fetch {folder} where there is network"
                            f"{nearest(key, list(manifest))}")
        self.folder, self.saved = folder / key, manifest[key]["splits"]

    def __missing__(self, split: str):
        import datasets
        import pyarrow.parquet

        if split not in self.saved:
            return self[next(iter(self.saved))].select([])
        path = self.folder / f"{split}.parquet"
        if not path.is_file() or file_sha256(path) != self.saved[split]["sha256"]:
            raise UserError(f"{path} is missing, or not what was saved (its sha256 differs): fetch the task again")
        self[split] = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.parquet.read_table(path)))
        return self[split]
