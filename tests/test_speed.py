"""fp8.recipe=auto's choice against the rule by definition; the shipped table and damaged ones."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from runtime import speed
from runtime.cli import UserError
from runtime.speed import Row, Table, Timings, choose, load_table

GPU = "NVIDIA H100 80GB HBM3"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def table(measured=(), published=(), gpu=GPU):
    """A Table from (recipe, K, N, ratio) or (recipe, K, N, ratio, M); no measured rows: the GPU was never measured."""
    def rows(values):
        return tuple(Row(r, K, N, *(rest or (16384,)), ratio) for r, K, N, ratio, *rest in values)
    return Table({gpu: Timings({}, rows(measured))} if measured else {}, (Timings({"gpu": "H100"}, rows(published)),))


TW = "tensorwise"
SMALL, LARGE = (TW, 1024, 1024, 1.5), (TW, 2048, 2048, 0.87)
EQUAL = [("rowwise", 64, 64, 1.3), (TW, 32, 32, 1.2), ("rowwise_with_gw_hp", 64, 64, 1.3)]
SEVERAL_M = [(TW, 64, 64, 1.4, 65536), (TW, 64, 64, 0.9, 4096), (TW, 64, 64, 1.2, 16384)]
PUBLISHED = [(TW, 64, 64, 1.5), ("rowwise", 64, 64, 1.6)]


@pytest.mark.parametrize("measured, K, N, candidates, recipe, why", [
    *(([(TW, 1024, 4096, 1.2)], K, N, RECIPES, TW, "measured 1.20x at 1024 x 4096")
      for K, N in ((1024, 4096), (1024, 4112), (1040, 4096), (8192, 8192))),
    *(([(TW, 1024, 4096, 1.2)], K, N, RECIPES, None,
       f"nothing timed at or below {K} x {N}: python bench/linears.py shapes={K}x{N} does")
      for K, N in ((1008, 65536), (65536, 4080), (512, 512))),
    # The exact shape overrides what smaller ones promise, for its own recipe alone.
    ([SMALL, LARGE], 2048, 2048, RECIPES, None, "BF16 is faster: best measured 0.87x at 2048 x 2048"),
    ([SMALL, LARGE], 2048, 4096, RECIPES, TW, "measured 1.50x at 1024 x 1024"),
    ([SMALL, LARGE, ("rowwise", 1024, 2048, 1.1)], 2048, 2048, RECIPES, "rowwise", "measured 1.10x at 1024 x 2048"),
    ([SMALL, (TW, 2048, 2048, 1.2)], 2048, 2048, RECIPES, TW, "measured 1.20x at 2048 x 2048"),
    # The best ratio wins, of equals the first candidate.
    (EQUAL, 64, 64, RECIPES, "rowwise", "measured 1.30x at 64 x 64"),
    (EQUAL, 64, 64, RECIPES[::-1], "rowwise_with_gw_hp", "measured 1.30x at 64 x 64"),
    (EQUAL, 64, 64, (TW,), TW, "measured 1.20x at 32 x 32"),
    # A gain within the noise does not pay.
    ([(TW, 64, 64, 1.03)], 64, 64, RECIPES, None, "FP8 gains too little: best measured 1.03x at 64 x 64"),
    ([(TW, 64, 64, 1.03 + 1e-9)], 64, 64, RECIPES, TW, "measured 1.03x at 64 x 64"),
    # A shape timed at several numbers of tokens counts at its slowest.
    *((rows, K, 64, RECIPES, None, "BF16 is faster: best measured 0.90x at 64 x 64")
      for rows in (SEVERAL_M, SEVERAL_M[::-1]) for K in (64, 128)),
    # Our own rows override published ones altogether: rowwise was not even timed.
    ([], 64, 64, RECIPES, "rowwise", "published 1.60x at 64 x 64"),
    ([(TW, 64, 64, 0.9)], 64, 64, RECIPES, None, "BF16 is faster: best measured 0.90x at 64 x 64")])
def test_the_choice_and_its_reason(measured, K, N, candidates, recipe, why):
    assert choose(table(measured, PUBLISHED), GPU, K, N, candidates) == (recipe, why)


def test_without_a_gpu_or_timings_of_it_nothing_pays():
    t = table([(TW, 16, 16, 2.0)], [(TW, 16, 16, 2.0)])
    assert choose(t, None, 4096, 4096, RECIPES) == (None, "no GPU: FP8 pays on FP8 units alone")
    for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", ""):
        assert choose(t, gpu, 4096, 4096, RECIPES) == (None, "no timings of this GPU: python bench/linears.py makes them")
    assert choose(table([(TW, 64, 64, 0.9)], PUBLISHED, "NVIDIA B200"), GPU, 64, 64, RECIPES)[1].startswith("published")


def by_definition(rows, K, N, candidates):
    """(recipes that may be chosen, the ratio) by the rule's words, over sets rather than by search."""
    score = {}
    for recipe in candidates:
        shapes = {(r.K, r.N) for r in rows if r.recipe == recipe}
        value = {s: min(r.ratio for r in rows if r.recipe == recipe and s == (r.K, r.N)) for s in shapes}
        evidence = {(K, N)} & shapes or {s for s in shapes if s[0] <= K and s[1] <= N}
        if any(value[s] > 1.03 for s in evidence):
            score[recipe] = max(value[s] for s in evidence)
    best = max(score.values(), default=None)
    return {recipe for recipe, ratio in score.items() if ratio == best}, best


def test_random_tables_against_the_rule_by_definition():
    sizes = [16 * i for i in range(1, 6)]
    for seed in range(60):
        rng = random.Random(seed)
        cells = {(rng.choice(RECIPES), rng.choice(sizes), rng.choice(sizes), rng.choice((64, 128)))
                 for _ in range(rng.randrange(1, 25))}
        t = table([(r, K, N, rng.choice((0.7, 0.99, 1.0, 1.03, 1.04, 1.1, 1.2, 1.5)), M) for r, K, N, M in sorted(cells)])
        for K, N in product(sizes, sizes):
            recipe, why = choose(t, GPU, K, N, RECIPES)
            allowed, best = by_definition(t.measured[GPU].rows, K, N, RECIPES)
            assert (recipe in allowed and f"{best:.2f}x" in why) if allowed else recipe is None, (seed, K, N, why)


def test_the_shipped_table_and_what_its_published_rows_say_of_our_sizes_on_an_h100():
    t = load_table()
    assert all(timings.origin["source"] and timings.rows for timings in t.published)
    assert all(not gpu.startswith("cpu") and timings.origin["timer"] == "CUDA events" for gpu, timings in t.measured.items())
    assert speed.SHIPPED.read_text() == speed.to_text(json.loads(speed.SHIPPED.read_text())), "a row a line"
    t = replace(t, measured={})
    for K, N in ((768, 768), (768, 4096), (2048, 768), (1024, 50304), (1024, 5632), (2816, 1024), (2048, 2048), (5632, 2048)):
        assert choose(t, GPU, K, N, RECIPES)[0] is None, (K, N)
    assert choose(t, GPU, 2048, 11264, RECIPES) == (TW, "published 1.18x at 1664 x 6656")
    assert choose(t, GPU, 2048, 11264, ("rowwise",)) == ("rowwise", "published 1.08x at 2048 x 8192")
    assert choose(t, GPU, 1024, 50304, RECIPES)[1] == "BF16 is faster: best published 0.94x at 1024 x 32768"


@pytest.mark.parametrize("old, new", [
    (None, None), ("}", ""), ('"format_version": 1', '"format_version": 2'), ('"gpus"', '"gpu"'), ('"N"', '"n"'),
    ("1.18", "NaN"), ("1.18", "1e999"), ("1.18", "0"), ("1.18", '"1.18"'), ('"rows": [', '"rows": 3, "x": [')])
def test_a_missing_or_damaged_table_is_one_sentence(tmp_path, old, new):
    file = tmp_path / "table.json"
    if old is not None:
        file.write_text(speed.SHIPPED.read_text().replace(old, new))
    with pytest.raises(UserError, match=r"^\S+table\.json cannot be read .*: restore it, or python bench/linears.py"):
        load_table(file)
