"""Rows of metrics.jsonl, in the order in which things happened.

{"kind": "train", "step", "loss", "verdict", ...}     a training step; "val": a validation after it;
                                                      "tasks": scores of eval.tasks after it
{"kind": "undone", ...}, {"kind": "undone_val", ...}, {"kind": "undone_tasks", ...}
                                                      the same, undone by a rollback
{"kind": "event", "event": name, "step", ...}         anything else: a resume, a rollback, a failed
                                                      save
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """A row of kind "train", a training step. The log adds `kind`, `since_start` (steps since this
    start of the run, the first of which compile) and, where a GPU is sampled, gpu_mem_pct,
    gpu_util_pct and gpu_power_w."""

    step: int  # steps of the run so far, this one included
    tokens: int  # of the run so far
    loss: float  # mean cross-entropy, nats per token; null where it is not finite
    lr: float  # learning rate of the update
    grad_norm: float  # global L2 norm before clipping; null where it is not finite
    tok_per_s: float  # tokens of all ranks per second
    step_s: float  # seconds of the step by the wall clock
    verdict: str  # the guard's: OK, SPIKE, SKIP, ROLLBACK, STOP or NO_TARGET
    # optim.z_loss times the mean square of the logits' log-sum-exp: trained on beside `loss`, which
    # is without it; absent without optim.z_loss
    z_loss: float | None = None
    reason: str | None = None  # of a verdict that is not OK; absent where it is

    def content(self) -> dict[str, Any]:
        """The row's keys."""
        values = asdict(self)
        for name in ("z_loss", "reason"):
            if values[name] is None:
                del values[name]
        return values


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """A row of kind "val", a validation after a step."""

    step: int  # steps of the run so far
    tokens: int  # trained on so far
    loss: float  # mean over the mixture, nats per token, as trained
    sources: dict[str, float]  # loss of each source, nats per token


@dataclass(frozen=True, kw_only=True)
class TasksRow:
    """A row of kind "tasks": scores of the weights after a step on eval.tasks, in BF16, as
    eval.harness computes them. A metric is called task/metric, such as piqa/acc_norm."""

    step: int  # steps of the run so far
    tokens: int  # trained on so far
    scores: dict[str, float]  # metric -> its value
    se: dict[str, float]  # metric -> one standard error over documents, where it is known
    limit: int | None  # documents per task at most; null = all
    missing: list[str]  # of core22, the tasks that the group's score is without
    wall_s: float  # seconds of the scoring


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """A row of kind "event": what happened beside the steps."""

    event: str  # what happened, one of the names below
    step: int  # steps of the run when it happened; of a rollback, the step that was undone last
    reason: str | None  # a sentence for people; absent from resume, branch and fp8_saturated
    tensors: list[str] | None  # fp8_saturated alone: operands beyond their scale, LINEAR.x or .g
    to: int | None  # rollback alone: the step whose checkpoint the run went back to
    data_offset: int | None  # rollback alone: full steps of data passed over so far


EVENTS = {
    "resume": "the run goes on from its newest checkpoint",
    "branch": "the run begins from a checkpoint or the weights of `start_from`",
    "rollback": "the guard went back to an earlier checkpoint; the rows between are undone",
    "stopped": "saved and left on request",
    "bad_checkpoint": "a damaged checkpoint was set aside",
    "save_failed": "a save failed; the next due step saves again",
    "copied": "a checkpoint has been copied to `checkpoint.copy_to`",
    "copy_skipped": "a checkpoint was not copied, because a newer one was waiting",
    "copy_failed": "a checkpoint has not been copied to `checkpoint.copy_to`",
    "tasks_failed": "no scores on `eval.tasks` for this step",
    "fp8_saturated": "values exceeded their delayed scale and were saturated",
}


# Of each task's metrics the first that is there is its accuracy: normalised by length where the
# task does that, of a group its own.
ACCURACIES = ("centered", "acc_norm", "acc", "exact_match", "em")


def accuracies(scores: dict[str, float]) -> dict[str, float]:
    """Task -> its accuracy, of the scores of a TasksRow; tasks without one, such as perplexities,
    are left out."""
    accuracy_of: dict[str, float] = {}
    for name in reversed(ACCURACIES):
        for key, value in scores.items():
            task, _, metric = key.rpartition("/")
            if metric == name:
                accuracy_of[task] = value
    return dict(sorted(accuracy_of.items()))


def metrics_rows(values: list) -> list[dict]:
    """Those values that are rows of a metrics.jsonl: objects with a kind and a step."""
    return [
        row
        for row in values
        if isinstance(row, dict) and type(row.get("step")) is int and "kind" in row
    ]
