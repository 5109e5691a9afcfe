"""scaling/study.py: the runs of a study are those of its file, declared before the first; their states are what is on disk."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cli import UserError
from runtime.config import FP8Config, load_config
from runtime.log import pair_id
from runtime.optim import check_branch, learning_rate
from scaling.study import Size, expand, load_study
from scaling.sweep import declare, is_ready, placed, state_of, tokens_left
from tests.conftest import ROOT
from tests.scaling_runs import edit
from tests.test_sweep import checkpoint, finish, tiny_study

STUDIES = sorted((ROOT / "configs").glob("study_*.py"))


@pytest.fixture
def study(tiny, tmp_path):
    return load_study(tiny_study(tiny, tmp_path, seeds=(1, 2), recipes=("bf16", "tensorwise")))


def config_of(row, out=Path("out")):
    path, *overrides = row.arguments(out)
    return load_config(path, overrides)


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_row_of_a_shipped_study_is_a_config_that_train_accepts(path, tmp_path):
    study = load_study(path)
    rows, pairs = {row.run: row for row in expand(study)}, {}
    assert f"study_{study.name}" == path.stem
    for row in rows.values():
        config = config_of(row, tmp_path)
        m = config.model
        assert (config.run, config.seed, config.total_steps, config.total_tokens) == (row.run, row.seed, row.steps, row.tokens)
        assert row.params_total == m.params_total and row.pair_id == pair_id(config)
        counted = row.params_total if study.params == "total" else m.params_total - m.vocab_padded * m.n_embd * (2 - m.tied)
        assert row.tokens - config.data.tokens_per_step < row.tokens_per_param * counted <= row.tokens
        assert row.flops_per_token == 6 * row.params_matmul + 12 * m.n_layer * m.n_head * m.head_size * m.n_ctx
        last = row.recipe.rpartition(">")[2]        # of a switch, the decay's
        assert config.fp8.recipe == {"bf16": "off"}.get(last, last)
        base = load_config(ROOT / row.config)
        assert config.optim.warmup_steps(row.steps) == base.optim.warmup_steps(base.total_steps)
        pairs.setdefault(row.pair_id, []).append(row)
        if row.parent:
            trunk = config_of(rows[row.parent], tmp_path)
            assert config.parent == (row.parent, row.parent_step) and row.parent_step in trunk.checkpoint.at
            assert trunk.seed == row.seed and (trunk.fp8 == config.fp8) == (">" not in row.recipe)
            check_branch(config, trunk, row.parent_step)
            assert learning_rate(row.parent_step, row.steps, config.optim) < config.optim.lr    # not a step too early
            assert row.own_tokens == pytest.approx(0.2 * row.tokens, rel=0.02)
    for pair in pairs.values():     # those of one size, seed and budget have one pair_id, others have another
        assert len({(row.size, row.seed, row.tokens, row.lr) for row in pair}) == 1
        assert len({(row.recipe, row.repeat) for row in pair}) == len(pair)
    assert len(pairs) == len({(row.size, row.seed, row.tokens, row.lr) for row in rows.values()})


def test_the_chinchilla_study_by_hand():
    rows = expand(load_study(ROOT / "configs/study_chinchilla.py"))
    # Budgets x seeds x (BF16, tensorwise, its decay in BF16; at 125M two recipes more), nvfp4, and the size held out.
    assert len(rows) == 4 * (3 * 3 + 3 * 5 + 2 * 3 + 2 * 3) + 3 + 2
    by_name = {row.run: row for row in rows}
    row = by_name["gpt50m_tensorwise_t10_s1338"]
    assert config_of(row).model.qk_norm
    # 10 x 53,029,376 / 262,144 = 2,022.9 steps; the last fifth, 405, is its decay; warm-up 2 % of the 4,046 steps at 20
    assert (row.steps, row.parent, row.parent_step) == (2023, "gpt50m_tensorwise_t40_s1338", 2023 - 405)
    assert (row.tokens, row.own_tokens, row.flops_per_token) == (2023 * 262_144, 405 * 262_144, 418_775_040)
    assert config_of(row).optim.warmup_steps(2023) == 81
    assert config_of(by_name[row.parent]).checkpoint.at == (810, 1618, 3237, 6474)
    assert [(r.run, r.parent, r.tokens) for r in rows if r.held_out] == [
        (f"gpt1p5b_{recipe}_t20_s1337", None, 29_408 * 1_048_576) for recipe in ("bf16", "tensorwise")]


def test_sizes_may_have_arms_null_runs_and_rates_of_their_own_and_a_trunk_comes_first(study):
    first, second = study.sizes
    arm, label = "rowwise-first_bf16-1-skip-attn.out-layers.-.mlp.down", "rowwise+first_bf16=1+skip=attn.out,layers.*.mlp.down"
    rows = expand(replace(study, null=("parallel.compile=true",), sizes=(
        replace(first, recipes=("bf16", label), seeds=(2,), null_seeds=(2,), switch=(label + ">tensorwise+head",)),
        replace(second, seeds=(1,), lr=(1e-3, 0.002), recipes=("bf16",), tokens_per_param=(20,)))))
    assert [(row.run, row.parent) for row in rows] == [
        ("a_bf16_t20_s2", None), ("a_bf16_t10_s2", "a_bf16_t20_s2"),
        ("a_bf16_null_t20_s2", None), ("a_bf16_null_t10_s2", "a_bf16_null_t20_s2"),
        (f"a_{arm}_t20_s2", None), (f"a_{arm}_t10_s2", f"a_{arm}_t20_s2"),
        (f"a_{arm}-tensorwise-head_t10_s2", f"a_{arm}_t20_s2"), (f"a_{arm}-tensorwise-head_t20_s2", f"a_{arm}_t20_s2"),
        ("b_bf16_lr0.001_t20_s1", None), ("b_bf16_lr0.002_t20_s1", None)]
    configs = [config_of(row) for row in rows]
    assert [config.optim.lr for config in configs[-2:]] == [1e-3, 0.002]
    assert configs[4].fp8 == FP8Config(recipe="rowwise", first_bf16=1, skip=("attn.out", "layers.*.mlp.down"))
    assert configs[7].fp8 == FP8Config(recipe="tensorwise", head=True) and rows[7].recipe == label + ">tensorwise+head"
    for one, again in zip(configs[:2], configs[2:4], strict=True):
        assert pair_id(one) == pair_id(again)
        assert [(own.repeat, own.parallel.compile) for own in (one, again)] == [(0, False), (1, "model")]


def demo(**more):
    return {"sizes": (Size(**{"config": "configs/demo_s_bf16.py", "tokens_per_param": (20,), **more}),)}


@pytest.mark.parametrize("changes, told", [
    (demo(config="configs/none_bf16.py"), "there is no config file"), ({"tokens_per_param": 5}, "is not tuple[float, ...]"),
    (demo(config="configs/gpt50m_fp8.py"), "must be in BF16"), ({"recipes": ("fp4",)}, "recipe='fp4' is not"),
    ({"recipes": ("tensorwise+head+kernels",)}, "'tensorwise+kernels+head'"), ({"recipes": ("rowwise+heads",)}, "'fp8.head'?"),
    ({"switch": ("mxfp8>bf16",)}, "switch="), ({"switch": ("tensorwise",)}, "switch="), (demo(null_seeds=(7,)), "its seeds"),
    (demo(recipes=("bf16",), switch=("tensorwise>bf16",)), "switch="), (demo(tokens_per_param=(1.1, 20)), "in its warm-up")])
def test_an_impossible_study_gets_a_sentence(study, tmp_path, changes, told):
    with pytest.raises(UserError) as error:
        expand(replace(study, **changes))
    assert told in str(error.value)
    (tmp_path / "study_x.py").write_text("study = 3")
    for name, sentence in (("x", "must bind study = Study"), ("y", "there is no study file .*did you mean 'study_x'")):
        with pytest.raises(UserError, match=sentence):
            load_study(tmp_path / f"study_{name}.py")


def test_what_was_declared_may_only_grow_once_a_run_has_finished(study, tmp_path):
    rows, day = expand(study), "2026-01-01T00:00:00Z"
    first = declare(study, rows, tmp_path)
    assert (first["runs"][1]["parent"], first["margin_percent"], first["held_out"]) == ("a_bf16_t20_s1", 1.0, [])
    del first["runs"][-1]["pair_id"]      # as older ones
    edit(tmp_path / "study.json", **{**first, "declared": day})
    assert declare(study, rows, tmp_path)["declared"] == day
    assert declare(replace(study, margin_percent=0.5), rows, tmp_path)["declared"] > day     # nothing ran
    finish(rows[0], tmp_path)
    grown = replace(study, sizes=(replace(study.sizes[0], seeds=(1, 2, 3)), study.sizes[1]))
    content = declare(grown, expand(grown), tmp_path)
    assert content["declared"] == day and len(content["runs"]) == 20
    for change, told in (
            ({"margin_percent": 0.5}, "margin_percent"), ({"params": "nonembed", "tokens_per_param": (20, 40)}, "params"),
            ({"sizes": (study.sizes[0], replace(study.sizes[1], held_out=True))}, "held_out of b_bf16_t20_s1"),
            ({"decay_share": 0.3}, "over"), ({"sizes": study.sizes[:1]}, "run of b_bf16_t20_s1"),
            ({"tokens_per_param": (10, 20, 40)}, "parent of a_bf16_t20_s1")):
        with pytest.raises(UserError, match=f"but {told}.* is another now"):
            declare(replace(study, **change), expand(replace(study, **change)), tmp_path)
    with pytest.raises(UserError, match="but pair_id of a_bf16_t20_s1 is another now"):        # another lr in the config file
        declare(study, [replace(rows[0], pair_id="other"), *rows[1:]], tmp_path)


def test_a_branch_whose_trunk_has_lost_its_checkpoints_begins_from_scratch(study, tiny, tmp_path):
    trunk, branch = expand(study)[:2]
    alone = replace(branch, parent=None, parent_step=None)
    switched = replace(branch, recipe="tensorwise>bf16")
    assert [placed(trunk, tmp_path), placed(branch, tmp_path)] == [trunk, branch] and not is_ready(branch, tmp_path)
    finish(trunk, tmp_path)
    assert placed(branch, tmp_path) == alone and placed(switched, tmp_path) == switched and is_ready(switched, tmp_path)
    checkpoint(trunk, tmp_path, branch.parent_step)
    assert placed(branch, tmp_path) == branch
    shutil.rmtree(tmp_path / trunk.run / "checkpoints")
    checkpoint(branch, tmp_path, 3)
    for start_from, expected in ((f"{tmp_path}/{trunk.run}/checkpoints/step_00000003", branch), (None, alone)):
        edit(tmp_path / branch.run / "config.json", **replace(tiny, start_from=start_from).to_dict())
        assert placed(branch, tmp_path) == expected     # it goes on as it was begun
    assert (state_of(branch, tmp_path), tokens_left(branch, tmp_path)) == ("at step 3", (branch.steps - 3) * 512)
    for parent_step, expected in ((branch.parent_step, branch), (None, alone)):
        finish(branch, tmp_path, parent_step=parent_step)
        assert placed(branch, tmp_path) == expected
    assert state_of(branch, tmp_path) == "done"
