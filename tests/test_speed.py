import json
import random
from dataclasses import replace
from itertools import product

import pytest

from runtime import speed
from runtime.cli import UserError
from runtime.speed import Row, Table, Timings, choose, load_table

GPU = "NVIDIA H100 80GB HBM3"
ORIGIN = dict.fromkeys(speed.PROVENANCE, "x")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def table(measured=(), published=(), gpu=GPU):
    """A Table from (recipe, K, N, ratio) or (recipe, K, N, ratio, M); no measured rows: the GPU was never measured."""
    def rows(values):
        return tuple(Row(r, K, N, *(rest or (16384,)), ratio) for r, K, N, ratio, *rest in values)
    return Table({gpu: Timings(ORIGIN, rows(measured))} if measured else {},
                 (Timings({"gpu": "H100", "source": "s"}, rows(published)),))


def test_a_timed_shape_speaks_for_all_that_are_as_large_in_both_directions_and_for_no_other():
    t = table([("tensorwise", 1024, 4096, 1.2)])
    for (K, N), pays in {(1024, 4096): True, (1024, 4112): True, (1040, 4096): True, (8192, 8192): True,
                         (1008, 65536): False, (65536, 4080): False, (512, 512): False}.items():
        recipe, why = choose(t, GPU, K, N, RECIPES)
        assert recipe == ("tensorwise" if pays else None), (K, N, why)
        assert (why == "measured 1.20x at 1024 x 4096") if pays else f"nothing timed at or below {K} x {N}" in why


def test_the_exact_shape_overrides_what_smaller_ones_promise():
    rows = [("tensorwise", 1024, 1024, 1.5), ("tensorwise", 2048, 2048, 0.87)]
    assert choose(table(rows), GPU, 2048, 2048, RECIPES) == (None, "BF16 is faster: best measured 0.87x at 2048 x 2048")
    assert choose(table(rows), GPU, 2048, 4096, RECIPES) == ("tensorwise", "measured 1.50x at 1024 x 1024")
    # It overrides for its own recipe alone.
    recipe, why = choose(table([*rows, ("rowwise", 1024, 2048, 1.1)]), GPU, 2048, 2048, RECIPES)
    assert (recipe, why) == ("rowwise", "measured 1.10x at 1024 x 2048")
    # A better exact row is quoted as itself, and a lower one that pays is not beautified by a smaller shape's.
    assert choose(table([rows[0], ("tensorwise", 2048, 2048, 1.2)]), GPU, 2048, 2048, RECIPES)[1].startswith("measured 1.20x")


def test_best_ratio_wins_and_of_equals_the_first_candidate():
    rows = [("rowwise", 64, 64, 1.3), ("tensorwise", 32, 32, 1.2), ("rowwise_with_gw_hp", 64, 64, 1.3)]
    assert choose(table(rows), GPU, 64, 64, RECIPES)[0] == "rowwise"
    assert choose(table(rows), GPU, 64, 64, RECIPES[::-1])[0] == "rowwise_with_gw_hp"
    assert choose(table(rows), GPU, 64, 64, ("tensorwise",))[0] == "tensorwise"
    assert choose(table(rows), GPU, 64, 64, ())[0] is None


def test_a_gain_within_the_noise_does_not_pay():
    for ratio, pays in ((speed.PAYS, False), (speed.PAYS + 1e-9, True), (1.01, False)):
        recipe, why = choose(table([("tensorwise", 64, 64, ratio)]), GPU, 64, 64, RECIPES)
        assert (recipe == "tensorwise") == pays
        assert pays or "gains too little" in why and "faster" not in why
    assert 1.0 < speed.PAYS < 1.1


def test_a_shape_timed_at_several_numbers_of_tokens_counts_as_at_its_worst():
    rows = [("tensorwise", 64, 64, 1.4, 65536), ("tensorwise", 64, 64, 0.9, 4096), ("tensorwise", 64, 64, 1.2, 16384)]
    for order in (rows, rows[::-1]):
        assert choose(table(order), GPU, 64, 64, RECIPES) == (None, "BF16 is faster: best measured 0.90x at 64 x 64")
        assert choose(table(order), GPU, 128, 64, RECIPES)[0] is None


def test_our_own_rows_override_published_ones_altogether():
    published = [("tensorwise", 64, 64, 1.5), ("rowwise", 64, 64, 1.6)]
    assert choose(table((), published), GPU, 64, 64, RECIPES) == ("rowwise", "published 1.60x at 64 x 64")
    ours = [("tensorwise", 64, 64, 0.9)]        # rowwise was not even timed: its published row is dead all the same
    assert choose(table(ours, published), GPU, 64, 64, RECIPES) == (None, "BF16 is faster: best measured 0.90x at 64 x 64")
    assert choose(table(ours, published, gpu="NVIDIA B200"), GPU, 64, 64, RECIPES)[1].startswith("published")


def test_without_a_gpu_or_timings_of_it_nothing_pays():
    t = table([("tensorwise", 16, 16, 2.0)], [("tensorwise", 16, 16, 2.0)])
    assert choose(t, None, 4096, 4096, RECIPES) == (None, "no GPU: FP8 pays on FP8 units alone")
    for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", ""):
        recipe, why = choose(t, gpu, 4096, 4096, RECIPES)
        assert recipe is None and why == "no timings of this GPU: python bench/linears.py makes them"


def by_definition(rows, K, N, candidates):
    """(recipes that may be chosen, the ratio) by the rule's words, over sets rather than by search."""
    score = {}
    for recipe in candidates:
        shapes = {(r.K, r.N) for r in rows if r.recipe == recipe}
        value = {s: min(r.ratio for r in rows if r.recipe == recipe and s == (r.K, r.N)) for s in shapes}
        speaking = {(K, N)} & shapes or {s for s in shapes if s[0] <= K and s[1] <= N}
        if any(value[s] > speed.PAYS for s in speaking):
            score[recipe] = max(value[s] for s in speaking)
    best = max(score.values(), default=None)
    return {recipe for recipe, ratio in score.items() if ratio == best}, best


@pytest.mark.parametrize("seed", range(60))
def test_random_tables_against_the_rule_by_definition(seed):
    rng = random.Random(seed)
    sizes = [16 * i for i in range(1, 6)]
    n = rng.randrange(1, 25)
    cells = {(rng.choice(RECIPES), rng.choice(sizes), rng.choice(sizes), rng.choice((64, 128))) for _ in range(n)}
    values = [(r, K, N, rng.choice((0.7, 0.99, 1.0, speed.PAYS, 1.04, 1.1, 1.2, 1.5)), M) for r, K, N, M in sorted(cells)]
    rng.shuffle(values)
    t = table(values)
    rows, timed, paying = t.measured[GPU].rows, {v[:3] for v in values}, {}
    for K, N in product(sizes, sizes):
        recipe, why = choose(t, GPU, K, N, RECIPES)
        allowed, best = by_definition(rows, K, N, RECIPES)
        assert (recipe in allowed) if allowed else recipe is None, why
        assert best is None or f"{best:.2f}x" in why
        for r in RECIPES:
            paying[r, K, N] = choose(t, GPU, K, N, (r,))[0] == r
    for (r, K, N), pays in paying.items():      # monotone, but where a larger shape was itself timed
        for K2, N2 in product(sizes, sizes):
            if pays and K2 >= K and N2 >= N and (r, K2, N2) not in timed:
                assert paying[r, K2, N2], f"{r} pays at {K} x {N}, not at {K2} x {N2}"


# ------------------------------------------------------------------------------------------------------ the shipped table

def test_the_shipped_table_is_sound_and_says_where_each_number_is_from():
    t = load_table()
    assert all(timings.origin["source"] and timings.rows for timings in t.published)
    assert all(not gpu.startswith("cpu") and timings.origin["timer"] == "CUDA events" for gpu, timings in t.measured.items())
    assert speed.SHIPPED.read_text() == speed.to_text(json.loads(speed.SHIPPED.read_text()))


def test_what_the_published_rows_alone_say_of_our_sizes_on_an_h100():
    t = replace(load_table(), measured={})
    for K, N in ((768, 768), (768, 4096), (2048, 768), (1024, 50304), (1024, 5632), (2816, 1024), (2048, 2048), (5632, 2048)):
        assert choose(t, GPU, K, N, RECIPES)[0] is None, (K, N)
    assert choose(t, GPU, 2048, 11264, RECIPES) == ("tensorwise", "published 1.18x at 1664 x 6656")
    assert choose(t, GPU, 2048, 11264, ("rowwise",)) == ("rowwise", "published 1.08x at 2048 x 8192")
    assert choose(t, GPU, 1024, 50304, RECIPES)[1] == "BF16 is faster: best published 0.94x at 1024 x 32768"
    assert choose(t, "NVIDIA A100-SXM4-80GB", 4096, 32768, RECIPES)[0] is None


# ---------------------------------------------------------------------------------------------------------- hostile files

def sound():
    row = {"recipe": "tensorwise", "K": 64, "N": 64, "M": 128, "ratio": 1.2, "ratio_p10": 1.1, "ratio_p90": 1.3}
    bare = {key: row[key] for key in ("recipe", "K", "N", "M", "ratio")}
    entry = {"measured": "2026-12-01", "torch": "2.11.0", "torchao": None, "driver": None, "commit": None, "command": "c",
             "timer": "CUDA events", "rows": [row, {**row, "M": 64, "ratio": 1, "ratio_p10": 1, "ratio_p90": 1}]}
    return {"format_version": 1, "gpus": {GPU: entry}, "published": [{"gpu": "H100", "source": "s", "rows": [bare]}]}


def at(value, path, new):
    """`value` with the item at `path` replaced; `...` takes it out."""
    *way, last = path
    inner = value
    for key in way:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return value


ROW = ("gpus", GPU, "rows", 0)
DAMAGE = [
    *((("format_version",), v) for v in (2, 0, "1", True, None, 1.5, ...)),
    *((("gpus",), v) for v in ([], None, "x", {GPU: []}, {GPU: None}, ...)), *((("published",), v) for v in ({}, None, [3])),
    (("surprise",), 1), (("gpus", GPU, "surprise"), 1), ((*ROW, "surprise"), 1),
    *((("gpus", GPU, key), v) for key in ("measured", "torch", "command", "timer") for v in (None, 3, "", ...)),
    *((("gpus", GPU, key), v) for key in ("driver", "commit", "torchao") for v in (3, "", ...)),
    *((("gpus", GPU, "rows"), v) for v in (None, {}, "rows", [None], [[]], ...)),
    *(((*ROW, "recipe"), v) for v in (None, "", 3, ["tensorwise"], ...)),
    *(((*ROW, key), v) for key in "KNM" for v in (0, -64, 64.0, "64", None, True, ...)),
    *(((*ROW, key), v) for key in ("ratio", "ratio_p10", "ratio_p90")
      for v in (0, -1.2, float("nan"), float("inf"), -float("inf"), 10**400, "1.2", None, True, [1.2], ...)),
    ((*ROW, "ratio"), 1.31), ((*ROW, "ratio_p10"), 1.21), ((*ROW, "M"), 64),
    (("published", 0, "rows", 0, "ratio"), 0), (("published", 0, "rows", 0, "ratio_p10"), 1.1), (("published", 0, "source"), ""),
    (("published", 0, "gpu"), None),
]


@pytest.mark.parametrize("path, new", DAMAGE, ids=lambda v: str(v)[:40])
def test_a_damaged_table_gets_a_sentence(tmp_path, path, new):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(sound()))
    assert load_table(file).measured[GPU].rows[1].ratio == 1
    file.write_text(json.dumps(at(sound(), path, new)))
    with pytest.raises(UserError) as caught:
        load_table(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"format_version": 1e999}', b"9" * 5000,
                                     b"[" * 100_000, json.dumps(sound()).encode()[:-20],
                                     json.dumps(sound()).replace("1.2,", "1e999,").encode()], ids=lambda c: repr(c[:20]))
def test_a_file_that_is_no_table_gets_a_sentence(tmp_path, content):
    file = tmp_path / "table.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"table\.json"):
        load_table(file)


def test_a_missing_file_and_a_folder_get_a_sentence(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            load_table(path)


def test_a_table_is_written_a_row_a_line_and_never_damaged():
    text = speed.to_text(sound())
    assert json.loads(text) == sound()
    assert sum('"recipe"' in line for line in text.splitlines()) == 3
    with pytest.raises(UserError):
        speed.to_text(at(sound(), (*ROW, "ratio"), float("nan")))
