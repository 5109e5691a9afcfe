"""What a study file expands to: exact counts, branches where the decay begins, a declaration that cannot be changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cli import UserError
from runtime.config import apply_overrides, load_config
from runtime.log import pair_id
from runtime.optim import check_branch, learning_rate
from scaling.study import Size, Study, declare, expand, load_study, write_declaration
from tests.conftest import ROOT, write_config

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
    rows = {row.run: row for row in expand(study)}
    assert f"study_{study.name}" == path.stem
    for row in rows.values():
        config = config_of(row, tmp_path)
        m = config.model
        assert (config.run, config.seed, config.total_steps, config.total_tokens) == (row.run, row.seed, row.steps, row.tokens)
        assert row.params_total == m.params_total
        counted = row.params_total if study.params == "total" else m.params_total - m.vocab_padded * m.n_embd * (2 - m.tied)
        assert row.tokens - config.data.tokens_per_step < row.tokens_per_param * counted <= row.tokens
        assert row.flops_per_token == 6 * row.params_matmul + 12 * m.n_layer * m.n_head * m.head_size * m.n_ctx
        assert config.fp8.recipe == {"bf16": "off"}.get(row.recipe, row.recipe)
        assert config.optim.warmup_steps(row.steps) == load_config(ROOT / row.config).optim.warmup_steps(
            load_config(ROOT / row.config).total_steps)
        if row.parent is None:
            assert (config.start_from, row.own_tokens) == (None, row.tokens)
        else:
            trunk = config_of(rows[row.parent], tmp_path)
            assert config.parent == (row.parent, row.parent_step)
            assert row.parent_step in trunk.checkpoint.at
            assert (trunk.seed, trunk.fp8) == (row.seed, config.fp8)
            check_branch(config, trunk, row.parent_step)
            assert learning_rate(row.parent_step, row.steps, config.optim) < config.optim.lr    # not a step too early
            assert row.own_tokens == (row.steps - row.parent_step) * config.data.tokens_per_step
            assert row.own_tokens == pytest.approx(0.2 * row.tokens, rel=0.02)


def test_pairs_of_rows_have_one_pair_id_and_others_another():
    rows = expand(load_study(ROOT / "configs/study_chinchilla.py"))
    by_pair = {}
    for row in rows:
        by_pair.setdefault(pair_id(config_of(row)), []).append(row)
    assert len(by_pair) == len(rows) / 2
    for pair in by_pair.values():
        assert sorted(row.recipe for row in pair) == ["bf16", "tensorwise"]
        assert len({(row.size, row.seed, row.tokens) for row in pair}) == 1


def test_the_chinchilla_study_by_hand():
    study = load_study(ROOT / "configs/study_chinchilla.py")
    rows = expand(study)
    assert len(rows) == 2 * (4 * (3 + 3 + 2 + 2) + 1)
    assert study.margin_percent == 0.25
    row = next(r for r in rows if r.run == "gpt50m_tensorwise_t10_s1338")
    # 10 x 53,027,328 / 262,144 = 2,022.8 steps; the last fifth, 405, is its decay; warm-up 2 % of the 4,046 steps at 20
    assert (row.steps, row.parent, row.parent_step) == (2023, "gpt50m_tensorwise_t40_s1338", 2023 - 405)
    assert (row.tokens, row.own_tokens) == (2023 * 262_144, 405 * 262_144)
    assert config_of(row).optim.warmup_steps(2023) == 81
    assert row.flops_per_token == 418_775_040
    assert config_of(next(r for r in rows if r.run == row.parent)).checkpoint.at == (810, 1618, 3237)
    held = [r for r in rows if r.held_out]
    assert [r.run for r in held] == ["gpt1p5b_bf16_t20_s1337", "gpt1p5b_tensorwise_t20_s1337"]
    assert all(r.parent is None and r.tokens == 29_408 * 1_048_576 for r in held)
    assert config_of(held[0]).optim.warmup_steps(29_408) == round(0.02 * 29_408)


def test_the_h100_study_by_hand():
    study = load_study(ROOT / "configs/study_h100.py")
    rows = expand(study)
    by_name = {row.run: row for row in rows}
    row = by_name["h100_3m_rowwise_t5_s1338"]
    assert row.params_nonembed == 4 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256) + 256
    assert row.params_total == row.params_nonembed + 50_304 * 256
    # 5 x 3,213,568 / 65,536 = 245.2 steps; the last fifth is its decay; warm-up is 5 % of the 981 steps at 20
    assert (row.steps, row.parent, row.parent_step) == (246, "h100_3m_rowwise_t20_s1338", 197)
    assert config_of(row).optim.warmup_steps(246) == 49
    recipes = {(one.size, one.recipe) for one in rows}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "auto"):
        assert {("h100_3m", recipe), ("h100_6m", recipe)} <= recipes
    assert {one.size for one in rows if one.held_out} == {"h100_24m"}
    assert [one.tokens_per_param for one in rows if one.held_out and one.recipe == "bf16"] == [20, 5, 10]
    lrs = [config_of(by_name[f"h100_{size}_bf16_t20_s1337"]).optim.lr for size in ("3m", "6m", "12m", "24m")]
    assert lrs[3] / lrs[0] == pytest.approx((25_402_240 / 3_213_568) ** -0.5, rel=1e-3)    # six digits of a rate
    assert lrs == sorted(lrs, reverse=True)


def test_a_null_run_is_its_bf16_run_again_and_pairs_with_it(study):
    sizes = tuple(replace(size, null_seeds=(2,)) for size in study.sizes)
    rows = expand(replace(study, sizes=sizes, null=("parallel.compile=true",)))
    assert [row.run for row in rows if row.repeat] == [f"{size}_bf16_null_t{budget}_s2" for size in "ab" for budget in (0.6, 0.3)]
    for null in (row for row in rows if row.repeat):
        first = next(row for row in rows if row.run == null.run.replace("_null", ""))
        one, other = config_of(null), config_of(first)
        assert (one.repeat, other.repeat) == (1, 0)
        assert (one.parallel.compile, other.parallel.compile) == (True, False)
        assert pair_id(one) == pair_id(other)
        assert null.recipe == "bf16" and (null.parent is None) == (first.parent is None)
        assert null.parent is None or null.parent == first.parent.replace("_null", "").replace("_bf16", "_bf16_null")


def test_a_sweep_of_learning_rates_has_a_trunk_for_each(study):
    rows = expand(replace(study, sizes=(replace(study.sizes[0], lr=(1e-3, 0.002), seeds=(1,)),), recipes=("bf16",)))
    assert [row.run for row in rows] == ["a_bf16_lr0.001_t0.6_s1", "a_bf16_lr0.001_t0.3_s1",
                                         "a_bf16_lr0.002_t0.6_s1", "a_bf16_lr0.002_t0.3_s1"]
    assert [config_of(row).optim.lr for row in rows] == [1e-3, 1e-3, 0.002, 0.002]
    assert [row.parent for row in rows] == [None, rows[0].run, None, rows[2].run]


def test_budgets_may_count_the_parameters_without_the_vocabulary(study):
    for row in expand(replace(study, params="nonembed", tokens_per_param=(2, 5))):
        assert row.params_nonembed == row.params_total - 384 * 32
        assert row.tokens - 512 < row.tokens_per_param * row.params_nonembed <= row.tokens
        assert config_of(row).tokens_per_param is None


def test_sizes_may_have_recipes_of_their_own(study):
    first, second = study.sizes
    rows = expand(replace(study, sizes=(replace(first, recipes=("bf16", "rowwise")), second)))
    assert {row.recipe for row in rows if row.size == "a"} == {"bf16", "rowwise"}
    assert {row.recipe for row in rows if row.size == "b"} == {"bf16", "tensorwise"}


def test_a_study_may_grow_but_not_count_otherwise_once_a_run_is_done(study, tmp_path):
    write_declaration(tmp_path, declare(study, expand(study), tmp_path))
    (tmp_path / "a_bf16_t0.6_s1").mkdir()
    (tmp_path / "a_bf16_t0.6_s1/summary.json").touch()
    grown = replace(study, recipes=("bf16", "tensorwise", "rowwise"))
    assert len(declare(grown, expand(grown), tmp_path)["runs"]) == 24
    other = replace(study, params="nonembed", tokens_per_param=(2, 5))
    with pytest.raises(UserError, match="params was total, now nonembed"):
        declare(other, expand(other), tmp_path)
    old = json.loads((tmp_path / "study.json").read_text())
    del old["params"]       # as studies were declared before
    for row in old["runs"]:
        del row["lr"], row["repeat"]
    (tmp_path / "study.json").write_text(json.dumps(old))
    assert declare(study, expand(study), tmp_path)["params"] == "total"


def test_a_trunk_comes_before_its_branches(study):
    rows = expand(study)
    assert [row.run for row in rows[:4]] == ["a_bf16_t0.6_s1", "a_bf16_t0.3_s1", "a_tensorwise_t0.6_s1", "a_tensorwise_t0.3_s1"]
    assert len(rows) == 16
    assert rows == expand(study)


def demo(**more):
    return {"sizes": (Size(config="configs/demo_s_bf16.py", tokens_per_param=(20,), **more),)}


@pytest.mark.parametrize("changes, told", [
    ({"name": "a/b"}, "name='a/b' must be one folder name"), ({"sizes": ()}, "sizes=() must be a tuple of at least one Size"),
    ({"sizes": (Size(config="configs/none_bf16.py"),)}, "there is no config file"),
    ({"sizes": (Size(config="configs/gpt50m_fp8.py"),)}, "configs/gpt50m_fp8.py has fp8.recipe=tensorwise: give its BF16 config"),
    ({"sizes": (Size(config="configs/demo_s_bf16.py", tokens_per_param=(5,)),) * 2}, "twice: give each size once"),
    ({"sizes": (Size(config="configs/demo_s_bf16.py", seeds=()),)}, "seeds of configs/demo_s_bf16.py=() must be a"),
    ({"sizes": (Size(config="configs/demo_s_bf16.py", seeds=(1, 1)),)}, "each once"),
    ({"tokens_per_param": (5, 0)}, "tokens_per_param=(5, 0): every budget must be a number of tokens per parameter above 0"),
    ({"tokens_per_param": 5}, "must be a tuple"), ({"tokens_per_param": (float("nan"),)}, "above 0"),
    ({"recipes": ("bf16", "fp4")}, "recipes=('bf16', 'fp4'): 'fp4' is none of bf16, auto, tensorwise, "),
    ({"recipes": ("off",)}, "'off' is none of bf16"), ({"recipes": "bf16"}, "must be a tuple"),
    ({"params": "all"}, "params='all' must be 'total' or 'nonembed'"),
    ({"null": "parallel.compile=true"}, "must be a tuple of overrides"),
    (demo(lr=(0.0,)), "every peak learning rate must be a number above 0"),
    (demo(recipes=("fp4",)), "recipes of configs/demo_s_bf16.py=('fp4',): 'fp4' is none of"),
    (demo(null_seeds=(1337,)), "null= must say what differs in them"),
    (demo(null_seeds=(1,)) | {"null": ("deterministic=true",)}, "must be seeds of its own BF16 runs"),
    (demo(null_seeds=(1337,)) | {"null": ("optim.lr=1e-4",)}, "changes what demo_s is trained on or by"),
    (demo(null_seeds=(1337,)) | {"null": ("data.micro_batch=4",)}, "changes what demo_s is trained on or by"),
    ({"margin_percent": 0}, "margin_percent=0 must be a number above 0 and below 100"),
    ({"margin_percent": "0.25"}, "margin_percent='0.25' must be"), ({"decay_share": 1.0}, "decay_share=1.0 must be"),
    ({"tokens_per_param": (0.01, 20), "sizes": (Size(config="configs/demo_s_bf16.py"),)},
     "demo_s at 0.01 tokens per parameter: its 1 steps hold no 32 steps of warm-up"),
])
def test_an_impossible_study_gets_a_sentence(study, changes, told):
    with pytest.raises(UserError) as error:
        expand(replace(study, **changes))
    assert told in str(error.value)


@pytest.mark.parametrize("body, told", [
    ("study = 3", "must bind study = Study(...), but study is int"), ("x = 1", "but it binds no study"),
    ("config = 1", "but it binds no study: it is a config, which train.py trains"), ("study = None", "but study is NoneType"),
    ("1 / 0", "could not be run: ZeroDivisionError"),
    ("from scaling.study import Study\nstudy = Study(name='x', sizes=())", "could not be run: TypeError"),
])
def test_a_file_that_binds_no_study_gets_a_sentence(tmp_path, body, told):
    path = tmp_path / "study_x.py"
    path.write_text(body)
    with pytest.raises(UserError) as error:
        load_study(path)
    assert told in str(error.value)
    with pytest.raises(UserError, match="did you mean .*study_x.py"):
        load_study(tmp_path / "study_y.py")
    with pytest.raises(UserError, match=f"there is no study file nowhere/study_y.py in {Path.cwd()}$"):
        load_study("nowhere/study_y.py")


def test_what_was_declared_may_only_grow_once_a_run_has_finished(study, tmp_path):
    folder = tmp_path / "out/tiny"
    rows = expand(study)
    first = declare(study, rows, folder)
    write_declaration(folder, {**first, "declared": "2026-01-01T00:00:00Z"})
    assert [p.name for p in folder.iterdir()] == ["study.json"]
    stored = json.loads((folder / "study.json").read_text())
    assert stored["runs"][1]["parent"] == "a_bf16_t0.6_s1"
    assert (stored["margin_percent"], stored["held_out"], stored["format_version"]) == (0.5, [], 1)
    assert declare(study, rows, folder)["declared"] == "2026-01-01T00:00:00Z"
    assert declare(replace(study, margin_percent=1.0), rows, folder)["declared"] > "2026-01-01T00:00:00Z"     # nothing ran
    (folder / rows[0].run).mkdir()
    (folder / rows[0].run / "summary.json").write_text("{}")
    grown = replace(study, sizes=(replace(study.sizes[0], seeds=(1, 2, 3)), study.sizes[1]))
    assert declare(grown, expand(grown), folder)["declared"] == "2026-01-01T00:00:00Z"
    assert len(declare(grown, expand(grown), folder)["runs"]) == 20
    fewer = replace(study, sizes=study.sizes[:1])
    hidden = replace(study, sizes=(study.sizes[0], replace(study.sizes[1], held_out=True)))
    for changed, told in (
            (replace(study, margin_percent=1.0), "margin_percent was 0.5, now 1.0"), (fewer, "b_bf16_t0.6_s1 is gone"),
            (hidden, "held_out was False, now True"), (replace(study, decay_share=0.3), "overrides was ["),
            (replace(study, tokens_per_param=(0.3, 0.6, 1.2)), "a_bf16_t0.6_s1: parent was None, now a_bf16_t1.2_s1")):
        with pytest.raises(UserError) as error:
            declare(changed, expand(changed), folder)
        assert told in str(error.value)
        assert "give the changed study another name=" in str(error.value)
    for text in ("{", "[]", '{"runs": [1]}', '{"runs": []}'):
        (folder / "study.json").write_text(text)
        with pytest.raises(UserError, match="study.json is damaged"):
            declare(study, rows, folder)


def test_overrides_are_complete_by_themselves(study):
    """Each row's overrides, put by hand behind its config file, make the run that the row describes."""
    for row in expand(study):
        config = apply_overrides(load_config(row.config), list(row.overrides))
        assert config.run == row.run
        assert config.total_steps == row.steps
