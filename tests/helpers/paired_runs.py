"""Pairs of runs as far as the statistics of scaling/paired look at them."""

from dataclasses import dataclass

import numpy as np

from scaling.paired.gaps import Gap, Pair


@dataclass(frozen=True)
class FakeRun:
    """A run with the counts, trunk and losses of a test."""

    run_id: str = "run"
    pair_id: str = "pair"
    recipe: str = "bf16"
    is_baseline: bool = True
    repeat: int = 0
    N: int = 1
    tokens: int = 1
    seed: int | str = 0
    trunk: str = ""
    convention: str = "total"
    loss_bf16: float = 2.0
    loss_as_trained: float = 2.0
    device: str = "GPU"
    summary_sha256: str = ""
    tokenizer_sha256: str = ""
    val_sha256: str = ""

    @property
    def params_total(self) -> int:
        return self.N

    @property
    def params_nonembed(self) -> int:
        return self.N


def fake_pair(
    percent: float,
    N: int = 1,
    D: int = 1,
    trunk: object = "",
    seed: int = 0,
    recipe: str = "tensorwise",
    speed: float | None = None,
    device: str = "GPU",
    linears: int = 8,
) -> Pair:
    """A pair whose gap in nats is as large as in per cent; as trained it is 1.5 times as large."""
    bf16, fp8 = (
        FakeRun(
            run_id=f"{recipe}_{N}_{seed}",
            pair_id=f"{N}_{D}_{seed}",
            recipe=recipe,
            is_baseline=arm == "b",
            N=N,
            tokens=D,
            seed=seed,
            trunk=f"{arm}{trunk}",
            device=device,
        )
        for arm in "bf"
    )
    gaps = {
        "bf16": Gap(percent, percent, None),
        "as_trained": Gap(1.5 * percent, 1.5 * percent, None),
    }
    return Pair(bf16, fp8, gaps, speed, linears)


def exact_sample(n: int, mean: float = 0.0, sd: float = 1.0, seed: int = 0) -> np.ndarray:
    """n values with exactly this mean and standard deviation."""
    z = np.random.default_rng(seed).normal(size=n)
    return mean + sd * (z - z.mean()) / z.std(ddof=1)
