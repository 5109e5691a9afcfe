"""Load lm-eval's tasks by their names; keep their data in a folder, from which they are scored
without network."""

import difflib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from eval import core22
from eval.generation import read_generation
from lib.errors import UserError

DEMO_TASKS = Path(__file__).parent / "demo_tasks"
DEMO = ("val_ppl", "val_cloze")
CORE = (
    "wikitext",
    "lambada_openai",
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "openbookqa",
    "boolq",
    "sciq",
    "winogrande",
)
# Both additions ask for the letter of an answer, which models below one or two billion parameters
# give no better than by chance, and mmlu's 14,042 questions with five examples each take longer
# than all of core.
FULL = (*CORE, "mmlu", "commonsense_qa")
GROUPS = {"demo": DEMO, "core": CORE, "full": FULL, core22.GROUP: (*core22.TASKS,)}
# Environment variables by which no library asks the network.
OFFLINE_SWITCHES = (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_EVALUATE_OFFLINE",
)
# Where lm-eval 0.4.13 keeps those whose folder is not called like them. Its index of 14,000 YAMLs
# takes ten seconds that these need not wait for; others do, as a group may name tasks of other
# folders.
FOLDERS = {
    "lambada_openai": "lambada",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "boolq": "super_glue/boolq",
    "mmlu": "mmlu/default",
}


def expand(words: tuple[str, ...]) -> list[str]:
    """The names that `words` mean: our groups spelled out, each once."""
    names = [name.strip() for word in words for name in GROUPS.get(word.strip(), (word,))]
    return list(dict.fromkeys(name for name in names if name))


def load(
    names: list[str], include: str | None, run_dir: str | None = None, offline: str | None = None
) -> dict:
    """lm-eval's TaskDict of the tasks, groups and tags called `names`, with a list `missing` of
    core22's that cannot be had; the demo tasks are cut from the shards of `run_dir`.

    To come before any import of lm-eval and datasets, which then read their settings. With
    `offline`, the folder that fetch() filled, and for the demo tasks no library asks the
    network."""
    _set_environment(names, offline)
    say_warnings(include)
    check_include(include)
    manager = _task_manager(names, include, run_dir)
    loaded: dict = {"tasks": {}, "groups": {}, "group_map": {}}
    missing = {}  # of core22: name -> why it cannot be had
    for name in names:
        try:
            part = _load_name(manager, name)
        except core22.Missing as error:
            missing[name] = str(error)
            continue
        for key, task in part["tasks"].items():
            _set_examples(task)
            _check_examples(name, key, task, loaded["tasks"])
        for kind in loaded:
            loaded[kind] |= part[kind]
    if not loaded["tasks"]:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise UserError(f"{reasons}: give a YAML that defines it in include=DIR")
    _say_missing(missing)
    loaded["missing"] = [*missing]
    for name, task in loaded["tasks"].items():
        task.set_fewshot_seed(seed=1234)  # lm-eval's own default, for equal few-shot examples
        _check_kind(name, task)
    return loaded


def _set_environment(names: list[str], offline: str | None) -> None:
    """What lm-eval and datasets read when they are imported."""
    # lm-eval's bootstrap would fork a process that holds torch's threads
    os.environ["DISABLE_MULTIPROC"] = "1"
    if offline is not None:
        os.environ["HF_DATASETS_CACHE"] = os.path.abspath(offline)
    needs_network = offline is None and not set(names) <= set(DEMO)
    if not needs_network:
        for name in OFFLINE_SWITCHES:
            os.environ[name] = "1"


def _task_manager(names: list[str], include: str | None, run_dir: str | None) -> Any:
    """lm-eval's TaskManager that knows all `names`. Raises UserError for one that is no task."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()  # of each data set that it finds in the folder
    their_folder = Path(lm_eval.__file__).parent / "tasks"
    folders = dict.fromkeys(their_folder / folder for folder in _folders(names))
    names = core22.names_in_lm_eval(names)
    for is_whole_index in (False, True):
        manager = TaskManager(
            include_path=[*folders, DEMO_TASKS, *([include] if include else [])],
            include_defaults=is_whole_index,
            metadata={"run_dir": run_dir} if set(DEMO) & set(names) else None,
        )
        absent = [name for name in names if name not in manager.all_tasks]
        if not absent:
            return manager
    choices = [*GROUPS, *manager.all_tasks]
    close_names = difflib.get_close_matches(absent[0], choices, 3, cutoff=0.5)
    raise UserError(
        f"there is no task {absent[0]!r}; `lm-eval ls tasks` lists all; near:"
        f" {', '.join(close_names) or 'none'}"
    )


def _say_missing(missing: dict[str, str]) -> None:
    if missing and os.environ.get("RANK", "0") == "0":
        for name, reason in missing.items():
            print(f"{name} is left out: {reason}", file=sys.stderr)


def _folders(names: list[str]) -> list[str]:
    """Where lm-eval keeps those of `names` whose folder is known, below its own of tasks."""
    folders = [FOLDERS.get(name, name) for name in names if name in FULL]
    for name in names:
        core_task = core22.TASKS.get(name)
        if core_task is not None and core_task.lm_eval is not None:
            folders.append(core_task.folder or core_task.lm_eval)
    return folders


def _load_name(manager: Any, name: str) -> dict:
    """lm-eval's TaskDict of one task, group or tag. Raises UserError."""
    try:
        if name in core22.TASKS:
            return core22.load(manager, name)
        return manager.load([name])
    except (UserError, core22.Missing):
        raise
    except Exception as error:
        # a task is foreign code and foreign data: whatever it raises, name the task
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"the task {name!r} could not be loaded ({type(error).__name__}: {reason}): its data"
            " come from where its YAML has them, the Hugging Face Hub, or offline=DIR after"
            " --fetch DIR"
        ) from error


def _set_examples(task: Any) -> None:
    """Give a task whose YAML does not name it a number of examples in the prompt.

    Of mmlu five examples are shown, though lm-eval itself shows none (Hendrycks et al.,
    2009.03300)."""
    if task.get_config("num_fewshot") is None:
        is_mmlu = task.config.dataset_path == "cais/mmlu"
        task.set_config(key="num_fewshot", value=5 if is_mmlu else 0)


def _check_examples(name: str, key: str, task: Any, loaded: dict) -> None:
    """Raises UserError where the task `key` of `name` was loaded with another number of examples
    before."""
    shots = task.get_config("num_fewshot")
    if key in loaded and loaded[key].get_config("num_fewshot") != shots:
        raise UserError(
            f"{name} shows {shots} examples to {key!r}, other tasks= another number: score"
            " them one by one"
        )


def _check_kind(name: str, task: Any) -> None:
    """Raises UserError where a task needs more than text, runs code, or wants answers that are not
    greedy."""
    if getattr(task, "MULTIMODAL", False):
        raise UserError(
            f"the task {name!r} shows images or plays sound, but the models here read text:"
            " leave it out"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"the task {name!r} runs code that the model has written, which is not done here:"
            " leave it out"
        )
    if task.OUTPUT_TYPE == "generate_until":
        read_generation(task.get_config("generation_kwargs"), name)


# What lm-eval says of nearly every task, and what its documentation promises: a default that it
# takes.
ORDINARY = (
    "No `until` specified",
    "No `generation_kwargs` specified",
    "passed `generation_kwargs`, but",
    "is defined, but aggregation is not",
    "is defined, but higher_is_better is not",
    "Custom kwargs can be passed",
)


class _Once(logging.Handler):
    """Prints each of lm-eval's warnings once, in a line: what it replaces or leaves out is not to
    be found in a score."""

    def __init__(self, include: str | None):
        super().__init__(logging.WARNING)
        self.said: set[str] = set()
        self.own_folders = (
            {include, os.path.abspath(include), os.path.realpath(include)} if include else set()
        )

    def is_ordinary(self, text: str) -> bool:
        # lm-eval's own folders hold such twins
        if "overrides existing task" in text or "Duplicate task name" in text:
            return not any(folder in text for folder in self.own_folders)
        return any(words in text for words in ORDINARY)

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        # A warning with a document in it comes for each document.
        kind = text[:60]
        if kind in self.said or self.is_ordinary(text):
            return
        self.said.add(kind)
        if os.environ.get("RANK", "0") == "0":
            print(f"lm-eval: {text[:300]}", file=sys.stderr)


def say_warnings(include: str | None) -> None:
    """Let lm-eval's logger say its warnings on stderr, once each, and nothing below them."""
    logger = logging.getLogger("lm_eval")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.handlers = [_Once(include)]


def check_include(include: str | None) -> None:
    """lm-eval passes over YAML that it cannot read, and over a folder that is not there. Raises
    UserError instead."""
    if include is None:
        return
    folder = Path(include)
    if not folder.is_dir():
        raise UserError(f"include={include} is no folder: give the one that holds your task YAMLs")
    from lm_eval.tasks._yaml_loader import load_yaml

    paths = sorted(folder.glob("**/*.yaml"))
    if not paths:
        raise UserError(
            f"include={include} holds no file called *.yaml: give the folder of your task YAMLs"
        )
    for path in paths:
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # whatever the package raises for a file of the user's
            reason = " ".join(str(error).split())
            raise UserError(
                f"{path} cannot be read as a task of lm-eval ({type(error).__name__}:"
                f" {reason:.200}): mend it, or take it out of include={include}"
            ) from error


def watch_requests(task: Any) -> None:
    """Let lm-eval's building of a task's requests, which comes before any scoring, raise UserError
    where it fails, and where an answer is empty: without a token its log-likelihood is 0, above
    that of every other, and acc_norm divides by its length."""
    if getattr(task, "is_watched", False):  # scored before
        return
    task.is_watched = True
    build = task.build_all_requests

    def build_and_check(*args: Any, **settings: Any) -> None:
        try:
            build(*args, **settings)
        except MemoryError:
            raise
        except Exception as error:
            # foreign code and foreign data: whatever it raises, name the task
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"the questions of the task {task.task_name!r} could not be made"
                f" ({type(error).__name__}: {reason:.200}): its YAML and its data must fit each"
                " other, and num_fewshot the documents there are"
            ) from error
        delimiter = task.config.target_delimiter if task.OUTPUT_TYPE == "multiple_choice" else ""
        for request in task.instances:
            if (
                request.request_type == "loglikelihood"
                and request.args[1].removeprefix(delimiter) == ""
            ):
                raise empty_answer(request)

    task.build_all_requests = build_and_check


def empty_answer(request: Any) -> UserError:
    """What is said of a request of lm-eval whose answer has nothing that could be scored."""
    return UserError(
        f"the task {request.task_name!r} has an empty answer in its document"
        f" {request.doc_id} (counted from 0, answer {request.idx + 1} of its requests), which would"
        " score best with a log-likelihood of 0: mend that row, or leave it out by the task's"
        " process_docs"
    )


def fetch(folder: str, words: tuple[str, ...], include: str | None) -> str:
    """Save the data of the tasks in `folder`, which is then a cache of datasets; a line for each
    task."""
    # those are made from a run's own shards
    names = [name for name in expand(words) if name not in DEMO]
    os.environ["HF_DATASETS_CACHE"] = os.path.abspath(folder)
    return "\n".join(
        f"{name}: {len(task.eval_docs):,} documents"
        for name, task in load(names, include)["tasks"].items()
    )
