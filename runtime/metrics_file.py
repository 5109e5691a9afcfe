"""Rows of metrics.jsonl, in the order in which things happened.

{"kind": "train", "step", "loss", "verdict", ...}     a training step; "val": a validation after it
{"kind": "undone", ...}, {"kind": "undone_val", ...}  the same, undone by a rollback
{"kind": "event", "event": name, "step", ...}         anything else: a resume, a rollback, a failed
                                                      save
"""


def metrics_rows(values: list) -> list[dict]:
    """Those values that are rows of a metrics.jsonl: objects with a kind and a step."""
    return [
        row
        for row in values
        if isinstance(row, dict) and type(row.get("step")) is int and "kind" in row
    ]
