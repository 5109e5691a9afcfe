"""Load lm-eval's tasks by their names."""

import difflib
import logging
import os
import re
from pathlib import Path

from eval.task_data import reading
from runtime.cli import UserError

TASKS = Path(__file__).parent / "tasks"
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


def expand(words: tuple[str, ...]) -> list[str]:
    """The names that `words` mean: our groups spelled out, each once."""
    names = [name.strip() for word in words for name in GROUPS.get(word.strip(), (word,))]
    return list(dict.fromkeys(name for name in names if name))


def is_local(names: list[str], include: str | None) -> bool:
    """Whether the data of all these tasks are files here or the run's own shards."""
    return (set(DEMO) | local_tasks(include)).issuperset(names)


def local_tasks(include: str | None) -> set[str]:
    """Names of the tasks in the user's folder whose data lie in local files."""
    names = set()
    for path in Path(include).rglob("*.yaml") if include else ():
        text = path.read_text(errors="replace")
        name = re.search(r"^task:\s*[\"']?([\w.-]+)[\"']?\s*(?:#.*)?$", text, re.M)
        data = re.search(r"^dataset_path:\s*[\"']?(?:json|parquet|csv|text|arrow)[\"']?\s*(?:#.*)?$", text, re.M)
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
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    local = set(DEMO) | local_tasks(include)
    mine = [TASKS] + ([include] if include else [])
    metadata = {"run_dir": run_dir} if set(DEMO) & set(names) else None
    if set(names) <= local | set(FOLDERS):      # else its whole index
        import lm_eval
        theirs = Path(lm_eval.__file__).parent / "tasks"
        folders = dict.fromkeys(theirs / FOLDERS[name] for name in names if name not in local)
        manager = TaskManager(include_path=[*folders, *mine], include_defaults=False, metadata=metadata)
    else:
        manager = TaskManager(include_path=mine, include_defaults=True, metadata=metadata)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"there is no task {name!r}{_nearest(name, [*GROUPS, *manager.all_tasks])}")
    loaded: dict = {"tasks": {}, "groups": {}, "group_map": {}}
    with reading(Path(offline) if offline else None):
        for name in names:
            part = _load(manager, name, offline, name in local)
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


def _load(manager, name: str, offline: str | None, is_local: bool) -> dict:
    try:
        return manager.load([name])
    except UserError:
        raise
    except Exception as error:      # a task is foreign code and foreign data: whatever it raises, name the task
        where = ("its data lie in files that its YAML names: check that they are there, and whole" if is_local else
                 f"what it is scored on may never have been saved in {offline}: add it with --fetch {offline}" if offline else
                 "if its data come from the Hugging Face Hub, they must be cached or the Hub in reach; "
                 "--fetch DIR saves them for good")
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"the task {name!r} could not be loaded ({type(error).__name__}: {first_line}): {where}") from error


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists them all"
