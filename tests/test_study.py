"""What a study file expands to: exact counts, branches where the decay begins, a declaration that cannot be changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import metrics
from runtime.config import ConfigError, apply_overrides, load_config
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
        assert row.tokens - config.data.tokens_per_step < row.tokens_per_param * m.params_total <= row.tokens
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
        by_pair.setdefault(metrics.pair_id(config_of(row)), []).append(row)
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


def test_a_trunk_comes_before_its_branches(study):
    rows = expand(study)
    assert [row.run for row in rows[:4]] == ["a_bf16_t0.6_s1", "a_bf16_t0.3_s1", "a_tensorwise_t0.6_s1", "a_tensorwise_t0.3_s1"]
    assert len(rows) == 16
    assert rows == expand(study)


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
    ({"margin_percent": 0}, "margin_percent=0 must be a number above 0 and below 100"),
    ({"margin_percent": "0.25"}, "margin_percent='0.25' must be"), ({"decay_share": 1.0}, "decay_share=1.0 must be"),
    ({"tokens_per_param": (0.01, 20), "sizes": (Size(config="configs/demo_s_bf16.py"),)},
     "demo_s at 0.01 tokens per parameter: its 1 steps hold no 32 steps of warm-up"),
])
def test_an_impossible_study_gets_a_sentence(study, changes, told):
    with pytest.raises(ConfigError) as error:
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
    with pytest.raises(ConfigError) as error:
        load_study(path)
    assert told in str(error.value)
    with pytest.raises(ConfigError, match="did you mean .*study_x.py"):
        load_study(tmp_path / "study_y.py")
    with pytest.raises(ConfigError, match=f"there is no study file nowhere/study_y.py in {Path.cwd()}$"):
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
        with pytest.raises(ConfigError) as error:
            declare(changed, expand(changed), folder)
        assert told in str(error.value)
        assert "give the changed study another name=" in str(error.value)
    for text in ("{", "[]", '{"runs": [1]}', '{"runs": []}'):
        (folder / "study.json").write_text(text)
        with pytest.raises(ConfigError, match="study.json is damaged"):
            declare(study, rows, folder)


def test_overrides_are_complete_by_themselves(study):
    """Each row's overrides, put by hand behind its config file, make the run that the row describes."""
    for row in expand(study):
        config = apply_overrides(load_config(row.config), list(row.overrides))
        assert config.run == row.run
        assert config.total_steps == row.steps
