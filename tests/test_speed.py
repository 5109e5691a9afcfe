"""fp8.recipe=auto's choice by hand; the shipped table and damaged ones."""

import json

import pytest
import torch

from runtime import speed
from runtime.cli import UserError
from runtime.speed import choose, load_table

GPU, TW = "NVIDIA H100 80GB HBM3", "tensorwise"
RECIPES = (TW, "rowwise", "rowwise_with_gw_hp")


def table(measured=(), published=()):
    """From (recipe, K, N, ratio) or (recipe, K, N, ratio, M); no measured rows: the GPU was never measured."""
    own, others = ([{"recipe": recipe, "K": K, "N": N, "M": M[0] if M else 16384, "ratio": ratio}
                    for recipe, K, N, ratio, *M in rows] for rows in (measured, published))
    return {"measured": {"sm_90": [{"gpu": GPU, "rows": own}]} if measured else {},
            "published": {"sm_90": [{"gpu": "H100", "rows": others}]}}


@pytest.mark.parametrize("measured, gpu, K, N, recipe, why", [
    ([(TW, 64, 64, 1.2)], GPU, 80, 64, TW, "measured 1.20x at 64 x 64"),
    ([(TW, 64, 64, 1.2)], GPU, 48, 640, None, "nothing timed at or below 48 x 640"),
    ([(TW, 32, 32, 1.5), (TW, 64, 64, 0.87)], GPU, 64, 64, None, "BF16 is faster: best measured 0.87x at 64 x 64"),
    ([(TW, 32, 32, 1.5), (TW, 64, 64, 0.87)], GPU, 80, 64, TW, "measured 1.50x at 32 x 32"),       # the best at or below
    ([(TW, 64, 64, 1.03)], GPU, 64, 64, None, "FP8 gains too little: best measured 1.03x"),
    ([(TW, 64, 64, 1.5, 64), (TW, 64, 64, 0.9, 128)], GPU, 64, 64, None, "best measured 0.90x"),      # a shape at its slowest M
    ([(TW, 32, 32, 1.2), ("rowwise", 64, 64, 1.1)], GPU, 64, 64, TW, "measured 1.20x at 32 x 32"),
    ([("rowwise", 64, 64, 1.3), (TW, 64, 64, 1.3)], GPU, 64, 64, TW, "measured 1.30x at 64 x 64"),    # the first candidate
    # Our own rows override published ones altogether: rowwise was not even timed.
    ([], GPU, 64, 64, "rowwise", "published 1.60x at 64 x 64"), ([(TW, 64, 64, 0.9)], GPU, 64, 64, None, "measured 0.90x"),
    # Another GPU of the architecture, named.
    ([(TW, 64, 64, 1.2)], "NVIDIA H200", 64, 64, TW, f"measured on {GPU} 1.20x"),
    ([(TW, 64, 64, 1.2)], "H100", 64, 64, TW, f"measured on {GPU} 1.20x"),       # --plan h100
    ([], "NVIDIA H200", 64, 64, "rowwise", "published on H100 1.60x at 64 x 64"),
    ([(TW, 16, 16, 2.0)], None, 64, 64, None, "no GPU"), ([(TW, 16, 16, 2.0)], "NVIDIA B200", 64, 64, None, "no timings"),
    ([(TW, 16, 16, 2.0)], "NVIDIA Unheard", 64, 64, None, "no timings")])
def test_the_choice_and_its_reason(measured, gpu, K, N, recipe, why):
    chosen, reason = choose(table(measured, [(TW, 64, 64, 1.5), ("rowwise", 64, 64, 1.6)]), gpu, K, N, RECIPES)
    assert chosen == recipe and why in reason


def test_of_several_gpus_of_an_architecture_the_very_one_counts(monkeypatch):
    two = {"measured": {"sm_90": [{"gpu": gpu, "rows": [{"recipe": TW, "K": 64, "N": 64, "ratio": ratio}]}
                                  for gpu, ratio in (("NVIDIA H200", 1.2), (GPU, 1.1))]}}
    for gpu, due in ((GPU, "measured 1.10x"), ("NVIDIA H200", "measured 1.20x"),
                     ("NVIDIA H200 NVL", "measured on NVIDIA H200 1.20x")):
        assert choose(two, gpu, 64, 64, RECIPES)[1].startswith(due), gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)       # the GPU at hand is asked: no name needs to be known
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Unheard")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choose(two, "NVIDIA Unheard", 64, 64, RECIPES) == (TW, "measured on NVIDIA H200 1.20x at 64 x 64")


def test_the_shipped_table_and_what_its_published_rows_say_of_our_sizes_on_an_h100(tmp_path):
    text, published = speed.SHIPPED.read_text(), load_table() | {"measured": {}}
    assert text == speed.to_text(json.loads(text)), "a row a line"
    for K, N in ((768, 4096), (1024, 50304), (2048, 2048), (5632, 2048)):
        assert choose(published, GPU, K, N, RECIPES)[0] is None, (K, N)
    assert choose(published, GPU, 2048, 11264, RECIPES) == (TW, "published 1.18x at 1664 x 6656")
    for damaged in (text[:-9], "[]", text.replace('"format_version": 2', '"format_version": 1')):
        (file := tmp_path / "table.json").write_text(damaged)
        with pytest.raises(UserError, match="table.json is no table of timings"):
            load_table(file)
