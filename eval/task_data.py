"""Save the data of evaluation tasks in a folder once, so that they are scored without network from then on.

    DIR/manifest.json                           what was saved: data set, revision, tasks, rows and sha256 of each split
    DIR/Rowan--hellaswag/default/validation.parquet     one split: DIR/<dataset_path, / as -->/<dataset_name>/<split>.parquet

Only the splits that a task reads are saved: the one that is scored, and the one its examples come from where it shows some.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.cli import UserError, nearest

LOCAL = ("json", "parquet", "csv", "text", "arrow")     # builders of `datasets` that read files, not the Hub
FORMAT_VERSION = 1


def splits_read(task) -> list[str]:
    """The splits of its data that an lm-eval task reads when it is scored: its questions', its examples' where it has some."""
    config = task.config
    scored = config.test_split or config.validation_split
    shown = task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split
    has_own = task.fewshot_cfg.samples is not None      # examples spelled out in the task itself
    return list(dict.fromkeys([scored] + ([shown] if (config.num_fewshot or 0) > 0 and not has_own else [])))


def save_tasks(folder: Path, tasks: dict) -> list[str]:
    """Save the data of loaded lm-eval tasks {name: task}; a line for each. What the folder held of others stays.

    Raises UserError for a task whose data cannot be saved this way, then nothing is saved; OSError where the disk fails.
    """
    lines, wanted = [], {}      # (data set, its name): (splits, tasks that read them)
    for name, task in tasks.items():
        config = task.config
        if config.dataset_path is None or config.dataset_path in LOCAL:
            lines.append(f"{name}: nothing to save, its data are made or lie in files already")
            continue
        if config.dataset_kwargs:
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


def write_task_data(folder: Path, dataset_path: str, dataset_name: str | None, splits: dict, tasks: Sequence[str] = ()) -> None:
    """Save {split: rows}, lists of dicts or a datasets.Dataset, as the data set `dataset_path`. What the folder held of other
    data sets stays; of this one the other splits, where they are of the same revision of the Hub's. Raises OSError."""
    import datasets
    import pyarrow.parquet

    splits = {split: datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows for split, rows in splits.items()}
    key, manifest = _key(dataset_path, dataset_name), read_manifest(folder) if (folder / "manifest.json").exists() else {}
    known = manifest.get(key, {})
    revision = next((r for rows in splits.values() if (r := _revision(rows))), None)
    kept = known.get("splits", {}) if revision and known.get("revision") == revision else {}
    listed = {}
    for split, rows in splits.items():
        path = folder / key / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = rows.with_format("arrow")[:]        # without what a filter left out; with the columns' types as metadata
        with replacing(path) as part:
            pyarrow.parquet.write_table(table.replace_schema_metadata(rows.features.arrow_schema.metadata), part)
        listed[split] = {"rows": len(rows), "sha256": _sha256(path)}
    manifest[key] = {"dataset_path": dataset_path, "dataset_name": dataset_name, "revision": revision,
                     "tasks": sorted({*known.get("tasks", []), *tasks}), "splits": kept | listed}
    with replacing(folder / "manifest.json") as part:      # last: what it names is whole
        part.write_text(json.dumps({"format_version": FORMAT_VERSION, "datasets": manifest}, indent=1) + "\n")


def _key(dataset_path: str, dataset_name: str | None) -> str:
    return f"{dataset_path.replace('/', '--')}/{dataset_name or 'default'}"


def _revision(rows) -> str | None:
    """The Hub's commit that the rows came from: `datasets` calls its cache's folder by it. None where there is none."""
    names = [found[1] for file in rows.cache_files if (found := re.search(r"/([0-9a-f]{40})/[^/]*$", file["filename"]))]
    return names[0] if names else None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name that takes the place of `path` when all is written and on the disk."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        error.filename = error.filename or str(path)        # a write knows of a full disk, not of the file's name
        raise
    finally:
        part.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------------------- reading

def read_manifest(folder: Path) -> dict[str, dict]:
    """{"Rowan--hellaswag/default": {dataset_path, dataset_name, revision, tasks, splits}}. Raises UserError."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no manifest.json, so no saved tasks: make it with "
                          f"`python -m eval.harness --fetch {folder} tasks=core` where there is network")
    try:
        content = json.loads(path.read_text())
        version, entries = content["format_version"], content["datasets"]
        for entry in entries.values():
            if not all({"rows", "sha256"} <= set(split) for split in entry["splits"].values()) or not entry["splits"]:
                raise ValueError("a split without rows or sha256")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): fetch the tasks again") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format_version={version!r}, this program reads {FORMAT_VERSION}: fetch the tasks again")
    return entries


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
            task.dataset = _Splits(folder, manifest, task.DATASET_PATH, task.DATASET_NAME)
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

    def __init__(self, folder: Path, manifest: dict, dataset_path: str, dataset_name: str | None):
        super().__init__()
        self.key = _key(dataset_path, dataset_name)
        if self.key not in manifest:
            raise UserError(f"{folder} holds no data of {self.key}: add the task with --fetch {folder} where there is network"
                              f"{nearest(self.key, list(manifest))}")
        self.folder, self.saved = folder / self.key, manifest[self.key]["splits"]

    def __missing__(self, split: str):
        import datasets
        import pyarrow.parquet

        if split not in self.saved:
            return self[next(iter(self.saved))].select([])
        path = self.folder / f"{split}.parquet"
        if not path.is_file():
            raise UserError(f"{path} is missing, though the manifest beside it names it: fetch the task again")
        if _sha256(path) != self.saved[split]["sha256"]:
            raise UserError(f"{path} is not what was saved (its sha256 differs): fetch the task again")
        self[split] = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.parquet.read_table(path)))
        return self[split]
