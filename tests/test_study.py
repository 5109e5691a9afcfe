"""scaling/study.py: the runs of a study are those of its file, declared before the first; their states are what is on disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cli import UserError
from runtime.config import FP8Config, load_config
from runtime.log import pair_id
from runtime.optim import check_branch, learning_rate
from scaling.study import Size, Study, declare, expand, load_study, placed, state_of, summary_of, tokens_left, write_declaration
from tests.conftest import ROOT, write_config
from tests.study_cases import checkpoint, finish

STUDIES = sorted((ROOT / "configs").glob("study_*.py"))


@pytest.fixture
def study(tiny, tmp_path):
    """Two tiny sizes; 7,072 and 13,216 parameters in steps of 512 tokens."""
    sizes = []
    for name, n_layer in (("a", 1), ("b", 2)):
        config = replace(tiny, run=f"{name}_bf16", steps=None, tokens_per_param=0.5, model=replace(tiny.model, n_layer=n_layer))
        sizes.append(Size(config=str(write_config(config, tmp_path / f"{name}_bf16.py")), seeds=(1, 2)))
    return Study(name="tiny", sizes=tuple(sizes), tokens_per_param=(0.3, 0.6), margin_percent=0.5)


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
        assert row.params_total == m.params_total
        counted = row.params_total if study.params == "total" else m.params_total - m.vocab_padded * m.n_embd * (2 - m.tied)
        assert row.tokens - config.data.tokens_per_step < row.tokens_per_param * counted <= row.tokens
        assert row.flops_per_token == 6 * row.params_matmul + 12 * m.n_layer * m.n_head * m.head_size * m.n_ctx
        last = row.recipe.rpartition(">")[2]        # of a switch, the decay's
        assert config.fp8.recipe == {"bf16": "off"}.get(last, last)
        base = load_config(ROOT / row.config)
        assert config.optim.warmup_steps(row.steps) == base.optim.warmup_steps(base.total_steps)
        pairs.setdefault(pair_id(config), []).append(row)
        if row.parent is None:
            assert (config.start_from, row.own_tokens) == (None, row.tokens)
        else:
            trunk = config_of(rows[row.parent], tmp_path)
            assert config.parent == (row.parent, row.parent_step) and row.parent_step in trunk.checkpoint.at
            assert trunk.seed == row.seed and (trunk.fp8 == config.fp8) == (">" not in row.recipe)
            check_branch(config, trunk, row.parent_step)
            assert learning_rate(row.parent_step, row.steps, config.optim) < config.optim.lr    # not a step too early
            assert row.own_tokens == (row.steps - row.parent_step) * config.data.tokens_per_step
            assert row.own_tokens == pytest.approx(0.2 * row.tokens, rel=0.02)
    for pair in pairs.values():     # those of one size, seed and budget have one pair_id, others have another
        assert len({(row.size, row.seed, row.tokens, row.lr) for row in pair}) == 1
        assert len({(row.recipe, row.repeat) for row in pair}) == len(pair)


def test_the_chinchilla_study_by_hand():
    rows = expand(load_study(ROOT / "configs/study_chinchilla.py"))
    # Budgets x seeds x (BF16, tensorwise, its decay in BF16; at 125M two recipes more), nvfp4, and the size held out.
    assert len(rows) == 4 * (3 * 3 + 3 * 5 + 2 * 3 + 2 * 3) + 3 + 2
    row = next(r for r in rows if r.run == "gpt50m_tensorwise_t10_s1338")
    assert all(config_of(r).model.qk_norm for r in rows)
    # 10 x 53,029,376 / 262,144 = 2,022.9 steps; the last fifth, 405, is its decay; warm-up 2 % of the 4,046 steps at 20
    assert (row.steps, row.parent, row.parent_step) == (2023, "gpt50m_tensorwise_t40_s1338", 2023 - 405)
    assert (row.tokens, row.own_tokens, row.flops_per_token) == (2023 * 262_144, 405 * 262_144, 418_775_040)
    assert config_of(row).optim.warmup_steps(2023) == 81
    assert config_of(next(r for r in rows if r.run == row.parent)).checkpoint.at == (810, 1618, 3237, 6474)
    assert [(r.run, r.parent, r.tokens) for r in rows if r.held_out] == [
        (f"gpt1p5b_{recipe}_t20_s1337", None, 29_408 * 1_048_576) for recipe in ("bf16", "tensorwise")]


@pytest.mark.parametrize("switch, recipe", [("tensorwise>bf16", "off"), ("bf16>rowwise", "rowwise")])
def test_a_decay_may_switch_its_precision_and_is_a_pair_of_its_bf16_run(study, switch, recipe):
    before, after = switch.split(">")
    plain, rows = ({row.run: row for row in expand(replace(study, switch=s))} for s in ((), (switch,)))
    switched = [row for row in rows.values() if row.recipe == switch]
    assert len(rows) == len(plain) + len(switched) and len(switched) == 2 * 2 * 2       # sizes, seeds, budgets
    for row in switched:
        config, trunk = config_of(row), config_of(rows[row.parent])
        twin = config_of(plain[row.run.replace(f"{before}-{after}", "bf16")])
        assert config.fp8.recipe == recipe and rows[row.parent].recipe == before and pair_id(config) == pair_id(twin)
        assert row.parent_step in trunk.checkpoint.at and placed(row, Path("out")) == row
        assert row.parent_step == row.steps - config.optim.decay_steps(row.steps)
        check_branch(config, trunk, row.parent_step)
    size, none = study.sizes[0], [{"switch": ("mxfp8>bf16",)}, demo(recipes=("bf16",), switch=("tensorwise>bf16",))]
    for changes in none:        # no trunk of that recipe there
        with pytest.raises(UserError, match="such as tensorwise>bf16"):
            replace(study, **changes)
    own = expand(replace(study, sizes=(replace(size, recipes=("rowwise",), switch=("rowwise>bf16",)),)))
    assert len([row for row in own if row.recipe == "rowwise>bf16"]) == 2 * 2


def test_an_arm_is_any_choice_of_fp8_by_its_label(study):
    arms = {"bf16": FP8Config(), "rowwise+first_bf16=1+skip=attn.out,layers.*.mlp.down": FP8Config(
                recipe="rowwise", first_bf16=1, skip=("attn.out", "layers.*.mlp.down")),
            "tensorwise+kernels+delayed+head": FP8Config(recipe="tensorwise", kernels=True, scaling="delayed", head=True)}
    rows = expand(replace(study, recipes=tuple(arms), switch=(">".join(list(arms)[1:]),)))
    assert len({row.run for row in rows}) == len(rows) == 2 * 2 * 2 * 4       # sizes, seeds, budgets, arms with the switch
    for row in rows:
        label = row.recipe.rpartition(">")[2]
        assert config_of(row).fp8 == arms[label] and config_of(row).fp8.label == label


def test_sizes_may_have_recipes_null_runs_and_rates_of_their_own_and_a_trunk_comes_first(study):
    first, second = study.sizes
    rows = expand(replace(study, null=("parallel.compile=true",), sizes=(
        replace(first, recipes=("bf16", "rowwise"), seeds=(2,), null_seeds=(2,)),
        replace(second, seeds=(1,), lr=(1e-3, 0.002), recipes=("bf16",), tokens_per_param=(0.6,)))))
    assert [(row.run, row.parent) for row in rows] == [
        ("a_bf16_t0.6_s2", None), ("a_bf16_t0.3_s2", "a_bf16_t0.6_s2"),
        ("a_bf16_null_t0.6_s2", None), ("a_bf16_null_t0.3_s2", "a_bf16_null_t0.6_s2"),
        ("a_rowwise_t0.6_s2", None), ("a_rowwise_t0.3_s2", "a_rowwise_t0.6_s2"),
        ("b_bf16_lr0.001_t0.6_s1", None), ("b_bf16_lr0.002_t0.6_s1", None)]
    assert [config_of(row).optim.lr for row in rows[-2:]] == [1e-3, 0.002]
    for one, null in zip(rows[:2], rows[2:4], strict=True):
        first, again = config_of(one), config_of(null)
        assert pair_id(first) == pair_id(again) and (first.repeat, again.repeat, null.repeat) == (0, 1, 1)
        assert (first.parallel.compile, again.parallel.compile) == (False, "model")
    for row in expand(replace(study, params="nonembed", tokens_per_param=(2, 5))):
        assert row.params_nonembed == row.params_total - 384 * 32 and config_of(row).tokens_per_param is None
        assert row.tokens - 512 < row.tokens_per_param * row.params_nonembed <= row.tokens


def demo(**more):
    return {"sizes": (Size(**{"config": "configs/demo_s_bf16.py", "tokens_per_param": (20,), **more}),)}


@pytest.mark.parametrize("changes, told", [
    (demo(config="configs/none_bf16.py"), "there is no config file"), ({"tokens_per_param": 5}, "is not tuple[float, ...]"),
    (demo(config="configs/gpt50m_fp8.py"), "configs/gpt50m_fp8.py must be in BF16"), ({"sizes": demo()["sizes"][0]}, "sizes"),
    (demo(seeds=(1.5,)), "seeds=(1.5,) is not tuple[int, ...]"), ({"recipes": ("bf16", "fp4")}, "recipe='fp4' is not"),
    (demo(null_seeds=(1337,)), "null= must not be empty"), ({"params": "all"}, "params='all' is not Literal"),
    (demo(null_seeds=(1,)) | {"null": ("deterministic=true",)}, "must be among its seeds"),
    ({"recipes": ("tensorwise+head+kernels",)}, "write it 'tensorwise+kernels+head'"),
    ({"recipes": ("rowwise+heads",)}, "did you mean 'fp8.head'?"),
    (demo(tokens_per_param=(0.01, 20)), "demo_s at 0.01 tokens per parameter has 1 steps, and its decay begins at step 0"),
])
def test_an_impossible_study_gets_a_sentence(study, tmp_path, changes, told):
    with pytest.raises(UserError) as error:
        expand(replace(study, **changes))
    assert told in str(error.value)
    (tmp_path / "study_x.py").write_text("study = 3")
    for name, sentence in (("x", "study_x.py must bind study = Study"), ("y", "there is no study file .*did you mean 'study_x'")):
        with pytest.raises(UserError, match=sentence):
            load_study(tmp_path / f"study_{name}.py")


def test_what_was_declared_may_only_grow_once_a_run_has_finished(study, tmp_path):
    folder, rows = tmp_path / "out/tiny", expand(study)
    write_declaration(folder, {**declare(study, rows, folder), "declared": "2026-01-01T00:00:00Z"})
    assert [p.name for p in folder.iterdir()] == ["study.json"]
    stored = json.loads((folder / "study.json").read_text())
    assert (stored["runs"][1]["parent"], stored["margin_percent"], stored["held_out"]) == ("a_bf16_t0.6_s1", 0.5, [])
    assert declare(study, rows, folder)["declared"] == "2026-01-01T00:00:00Z"
    assert declare(replace(study, margin_percent=1.0), rows, folder)["declared"] > "2026-01-01T00:00:00Z"     # nothing ran
    (folder / rows[0].run).mkdir()
    (folder / rows[0].run / "summary.json").write_text("{}")
    grown = replace(study, sizes=(replace(study.sizes[0], seeds=(1, 2, 3)), study.sizes[1]))
    assert declare(grown, expand(grown), folder)["declared"] == "2026-01-01T00:00:00Z"
    assert len(declare(grown, expand(grown), folder)["runs"]) == 20
    hidden = replace(study, sizes=(study.sizes[0], replace(study.sizes[1], held_out=True)))
    for changed, told in (
            (replace(study, margin_percent=1.0), "margin_percent was 0.5, now 1.0"),
            (replace(study, params="nonembed", tokens_per_param=(2, 5)), "params was total, now nonembed"),
            (replace(study, sizes=study.sizes[:1]), "run of b_bf16_t0.6_s1 was b_bf16_t0.6_s1, now None"),
            (hidden, "held_out of b_bf16_t0.6_s1 was False, now True"), (replace(study, decay_share=0.3), "overrides of a_bf16"),
            (replace(study, tokens_per_param=(0.3, 0.6, 1.2)), "parent of a_bf16_t0.6_s1 was None, now a_bf16_t1.2_s1")):
        with pytest.raises(UserError) as error:
            declare(changed, expand(changed), folder)
        assert told in str(error.value) and "give the changed study another name=" in str(error.value)
    (folder / "study.json").write_text('{"runs": [')
    with pytest.raises(UserError, match="study.json is not valid JSON"):
        declare(study, rows, folder)


# ---------------------------------------------------------------------------------------------------- how far each run is

def test_a_branch_whose_trunk_has_lost_its_checkpoints_begins_from_scratch(study, tiny, tmp_path):
    trunk, branch = expand(study)[:2]
    alone = replace(branch, parent=None, parent_step=None)
    assert [placed(trunk, tmp_path), placed(branch, tmp_path)] == [trunk, branch]
    finish(trunk, tmp_path)
    assert placed(branch, tmp_path) == alone and tokens_left(alone, tmp_path) == branch.steps * 512
    checkpoint(trunk, tmp_path, branch.parent_step)
    assert placed(branch, tmp_path) == branch
    shutil.rmtree(tmp_path / trunk.run / "checkpoints")
    checkpoint(branch, tmp_path, 3)
    for start_from, expected in ((f"{tmp_path}/{trunk.run}/checkpoints/step_00000003", branch), (None, alone)):
        (tmp_path / branch.run / "config.json").write_text(json.dumps(replace(tiny, start_from=start_from).to_dict()))
        assert placed(branch, tmp_path) == expected     # it goes on as it was begun
    assert (state_of(branch, tmp_path), tokens_left(branch, tmp_path)) == ("at step 3", (branch.steps - 3) * 512)
    for parent_step, expected in ((branch.parent_step, branch), (None, alone)):
        finish(branch, tmp_path, parent_step=parent_step)
        assert placed(branch, tmp_path) == expected and tokens_left(branch, tmp_path) == 0
    assert summary_of(branch, tmp_path)["status"] == "ok" and state_of(branch, tmp_path) == "done"
    for content, told in (("[1]", "holds a list"), ("{", "is not valid JSON"), ('{"status": "ok"}', "lacks device")):
        (tmp_path / branch.run / "summary.json").write_text(content)
        with pytest.raises(UserError, match=f"{branch.run}/summary.json {told}"):
            state_of(branch, tmp_path)
