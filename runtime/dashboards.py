"""Mirror a run's rows on W&B or TensorBoard.

Each dashboard has open(config, resume_step), write(row), roll_back(to_step), close(); any of them may raise what its package
raises, and whoever calls them decides what that costs.
"""

from importlib import import_module


def numbers(row: dict) -> dict[str, float]:
    """What a dashboard draws of a row: its numbers under its kind, a 1 for an event and for a verdict that is not OK."""
    if row["kind"] == "event":
        return {f"event/{row['event']}": 1}
    marks = {f"event/{row['verdict']}": 1} if row.get("verdict", "OK") != "OK" else {}
    return {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"} | marks


class Wandb:
    def open(self, config, resume_step: int) -> None:
        self.run = import_module("wandb").init(project="nanofp8", name=config.run, id=config.run, resume="allow",
                                          dir=str(config.run_dir), config=config.to_dict())
        self.run.define_metric("step")
        for kind in ("train", "val", "event"):      # W&B's own step refuses to go back, ours does
            self.run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, row: dict) -> None:
        self.run.log({**numbers(row), "step": row["step"]})

    def roll_back(self, to_step: int) -> None:
        """What was sent stays: the curve goes back and begins again at to_step."""

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    def open(self, config, resume_step: int) -> None:
        import_module("tensorboard")
        self.folder = str(config.run_dir / "tensorboard")
        self._begin(resume_step)

    def _begin(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(self.folder, purge_step=step + 1)       # hides what came later before

    def write(self, row: dict) -> None:
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row["step"])

    def roll_back(self, to_step: int) -> None:
        self.writer.close()
        self._begin(to_step)

    def close(self) -> None:
        self.writer.close()


DASHBOARDS = {"wandb": Wandb, "tensorboard": TensorBoard}      # name of the package -> what writes to it
