"""Load lm-eval's tasks by their names; keep their data in a folder, from which they are scored without network."""

import difflib
import logging
import os
from pathlib import Path

from runtime.cli import UserError

DEMO_TASKS = Path(__file__).parent / "demo_tasks"
DEMO = ("val_ppl", "val_cloze")
CORE = ("wikitext", "lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "boolq", "sciq",
        "winogrande")
# Both additions ask for the letter of an answer, which models below one or two billion parameters give no better than by
# chance, and mmlu's 14,042 questions with five examples each take longer than all of core.
FULL = (*CORE, "mmlu", "commonsense_qa")
GROUPS = {"demo": DEMO, "core": CORE, "full": FULL}

# Where lm-eval 0.4.13 keeps those whose folder is not called like them. Its index of 14,000 YAMLs takes ten seconds that these
# need not wait for; others do, as a group may name tasks of other folders.
FOLDERS = {"lambada_openai": "lambada", "arc_easy": "arc", "arc_challenge": "arc", "boolq": "super_glue/boolq",
           "mmlu": "mmlu/default"}

# Examples shown before a question, where the usual number is not lm-eval's own (Hendrycks et al., 2009.03300).
SHOTS = {"cais/mmlu": 5}


def expand(words: tuple[str, ...]) -> list[str]:
    """The names that `words` mean: our groups spelled out, each once."""
    names = [name.strip() for word in words for name in GROUPS.get(word.strip(), (word,))]
    return list(dict.fromkeys(name for name in names if name))


def prepare_libraries(folder: str | None, offline: bool) -> None:
    """Before lm-eval and datasets are imported, which then read their settings: no logs; data sets are kept in `folder`, or where
    datasets has them by itself; with `offline` no library asks the network."""
    os.environ["DISABLE_MULTIPROC"] = "1"       # lm-eval's bootstrap would fork a process that holds torch's threads
    if folder is not None:
        os.environ["HF_DATASETS_CACHE"] = os.path.abspath(folder)
    if offline:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"):
            os.environ[name] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def load(names: list[str], include: str | None, run_dir: str | None = None) -> dict:
    """lm-eval's TaskDict of the tasks, groups and tags called `names`; the demo tasks are cut from the shards of `run_dir`."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()      # of each data set that it finds in the folder
    theirs = Path(lm_eval.__file__).parent / "tasks"
    folders = dict.fromkeys(theirs / FOLDERS.get(name, name) for name in names if name in FULL)
    for is_whole_index in (False, True):
        manager = TaskManager(include_path=[*folders, DEMO_TASKS, *([include] if include else [])],
                              include_defaults=is_whole_index,
                              metadata={"run_dir": run_dir} if set(DEMO) & set(names) else None)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            break
    else:
        near = difflib.get_close_matches(unknown[0], [*GROUPS, *manager.all_tasks], 3, cutoff=0.5)
        raise UserError(f"there is no task {unknown[0]!r}; `lm-eval ls tasks` lists all; near: {', '.join(near) or 'none'}")
    loaded: dict = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            part = manager.load([name])
        except UserError:
            raise
        except Exception as error:      # a task is foreign code and foreign data: whatever it raises, name the task
            said = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"the task {name!r} could not be loaded ({type(error).__name__}: {said}): its data come from where "
                            f"its YAML has them, the Hugging Face Hub, or offline=DIR after --fetch DIR") from error
        for key, task in part["tasks"].items():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=SHOTS.get(task.config.dataset_path, 0))
            if loaded["tasks"].get(key, task).get_config("num_fewshot") != (shots := task.get_config("num_fewshot")):
                raise UserError(f"{name} shows {shots} examples to {key!r}, other tasks= another number: score them one by one")
        for key in loaded:
            loaded[key] |= part[key]
    for name, task in loaded["tasks"].items():
        task.set_fewshot_seed(seed=1234)        # lm-eval's own default, for equal few-shot examples
        if (task.get_config("generation_kwargs") or {}).get("do_sample"):
            raise UserError(f"the task {name!r} asks for sampled answers, but only greedy ones are generated here: leave it out")
    return loaded


def fetch(folder: str, words: tuple[str, ...], include: str | None) -> str:
    """Save the data of the tasks in `folder`, which is then a cache of datasets; a line for each task."""
    prepare_libraries(folder, offline=False)
    names = [name for name in expand(words) if name not in DEMO]        # those are made from a run's own shards
    loaded = load(names, include)["tasks"]
    return "\n".join(f"{name}: {len(task.eval_docs):,} documents" for name, task in loaded.items())
