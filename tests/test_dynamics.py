"""The figures of one FP8 run show what its probe file says, and damage in that file is told, not drawn."""

import gzip
import itertools
import json
import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scaling_runs import write_run

from runtime.cli import UserError
from scaling import figures as cli
from scaling.dynamics import draw_gap, draw_outliers, draw_scales, draw_underflow, read_probe, table
from scaling.figures import RC
from tests.conftest import ROOT

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
FILES = {"fp8_scales", "fp8_underflow", "fp8_outliers"}


def operand(name, block, kind, step, last, rows=1):
    """A known function: scales are powers of two that fall with depth, underflow grows with the step."""
    base = {"weight": 12, "activation": 6, "gradient": 20}[name] + kind - 0.25 * block + 2 * step / last
    share = {"weight": 1e-5, "activation": 1e-4, "gradient": 1e-2}[name] * (1 + block) * step / last
    return {"amax": 448 / 2**base, "scale_min": 2**(base - rows + 1), "scale": 2.0**base, "scale_max": 2**(base + rows - 1),
            "underflow": share, "saturated": 1e-6 * kind * share, "error": 0.02 + 0.001 * kind}


def linear_row(step, block, kind, last, rows=1, **changes):
    operands = {name: operand(name, block, kind, step, last, rows) for name in ("weight", "activation", "gradient")}
    return {"kind": "linear", "step": step, "layer": f"layers.{block}.{LINEARS[kind]}", "recipe": "tensorwise", **operands,
            **changes}


def block_row(step, block, last, **changes):
    return {"kind": "block", "step": step, "block": block, "attention_logit_max": 5 + 20 * block * step / last,
            "swiglu_amax": 8.0 + 2.0**(block * step / last), "swiglu_rms": 0.5, **changes}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(blocks=3, steps=(100, 200, 300), linear=True, rows=1):
    return [row for step in steps for block in range(blocks) for row in [
        *(linear_row(step, block, kind, steps[-1], rows) for kind in range(4) if linear), block_row(step, block, steps[-1])]]


def write_pair(folder, *, seeds=(1337, 7), gap=0.02, steps=400, blocks=3):
    """An FP8 run, its BF16 partner and one more BF16 run per further seed; losses differ by known amounts."""
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.05, steps)
    names = [("run_fp8", "tensorwise", seeds[0], gap)] + [(f"run_bf16_{seed}", "bf16", seed, 0.0) for seed in seeds]
    for index, (name, recipe, seed, extra) in enumerate(names):
        write_run(folder / name, recipe=recipe, seed=seed, curve=False, tokens_per_step=1024, lr_peak=1e-3)
        noise = shared if seed == seeds[0] else rng.normal(0, 0.05, steps)
        noise = noise + (0.0 if seed == seeds[0] else 0.005 * index)
        loss = [2 + 3.5 * math.exp(-step / steps * 6) + noise[step - 1] + extra for step in range(1, steps + 1)]
        write_rows(folder / name / "metrics.jsonl", [
            *({"kind": "train", "step": step, "tokens": 1024 * step, "loss": loss[step - 1]} for step in range(1, steps + 1)),
            *({"kind": "val", "step": step, "tokens": 1024 * step, "loss": 2 + extra + 0.01 * (seed != seeds[0])}
              for step in range(steps // 4, steps + 1, steps // 4))])
    write_rows(folder / "run_fp8" / "probe.jsonl", rows_of(blocks))
    return folder / "run_fp8"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("out"))


def draw(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def refused(tmp_path, line, *before):
    path = tmp_path / "probe.jsonl"
    path.write_text("\n".join([*map(json.dumps, before), line if isinstance(line, str) else json.dumps(line)]) + "\n")
    with pytest.raises(UserError) as error:
        read_probe(path)
    return str(error.value)


# ---------------------------------------------------------------------------------------------------- reading


def test_rows_become_arrays_and_the_last_of_a_repeated_step_counts(tmp_path):
    rows = rows_of()
    wrong = linear_row(200, 1, 2, 300)
    wrong["weight"] = {**wrong["weight"], "scale": 1.0}
    probe, notes = read_probe(write_rows(tmp_path / "probe.jsonl", [wrong, block_row(200, 1, 300, swiglu_rms=9), *rows[::-1]]))
    assert notes == [] and probe.recipe == "tensorwise" and probe.last == 2
    assert probe.steps.tolist() == probe.block_steps.tolist() == [100, 200, 300] and probe.blocks == [0, 1, 2]
    assert probe.layers == [f"layers.{block}.{name}" for block in range(3) for name in LINEARS]
    for name in ("weight", "activation", "gradient"):
        for field in ("scale_min", "scale", "scale_max", "underflow", "saturated", "error"):
            want = [[operand(name, block, kind, step, 300)[field] for step in (100, 200, 300)]
                    for block in range(3) for kind in range(4)]
            np.testing.assert_array_equal(probe.linear[name, field], want)
    assert probe.block["swiglu_rms"].tolist() == [[0.5] * 3] * 3


def test_blocks_are_ordered_by_number_and_the_head_comes_last(tmp_path):
    rows = [linear_row(1, block, 0, 1) for block in (10, 2)] + [{**linear_row(1, 0, 0, 1), "layer": "head"}]
    probe, _ = read_probe(write_rows(tmp_path / "probe.jsonl", rows))
    assert probe.layers == ["layers.2.attn.qkv", "layers.10.attn.qkv", "head"]


def test_the_last_step_is_one_that_has_every_layer(tmp_path):
    probe, _ = read_probe(write_rows(tmp_path / "probe.jsonl", [*rows_of(), linear_row(400, 0, 0, 400)]))
    assert probe.steps.tolist() == [100, 200, 300, 400] and probe.last == 2


@pytest.mark.parametrize("torn", ['{"kind": "linear", "step": 40', '{"kind": "li{"kind": "block"}', "[" * 100_000, "\x00\ufffd"])
def test_a_torn_line_is_left_out_and_named(tmp_path, torn):
    path = write_rows(tmp_path / "probe.jsonl", rows_of())
    path.write_text(path.read_text() + torn)
    probe, notes = read_probe(path)
    assert probe.steps.tolist() == [100, 200, 300]
    assert len(notes) == 1 and notes[0].endswith(f"line {len(rows_of()) + 1}")


def test_null_and_what_is_not_finite_are_gaps(tmp_path):
    row = linear_row(100, 0, 0, 100)
    row["weight"] |= {"scale": None, "error": math.nan, "amax": math.inf}
    row["activation"] |= dict.fromkeys(("scale_min", "scale", "scale_max"))
    path = write_rows(tmp_path / "probe.jsonl", [row, block_row(100, 0, 100, attention_logit_max=None)])
    path.write_text(path.read_text().replace("0.02", "1e999", 1))
    probe, _ = read_probe(path)
    assert np.isnan(probe.linear["weight", "scale"]).all() and np.isnan(probe.linear["weight", "error"]).all()
    assert np.isnan(probe.block["attention_logit_max"]).all()
    figure = draw_scales(probe, {}, "run")
    assert "no scale: these stay in BF16" in [text.get_text() for text in figure.axes[1].texts]
    assert "| qkv | weight | 0.001 | 0 | - |" in table(probe)


@pytest.mark.parametrize(("change", "words"), [
    ([1], "line 3: kind is null; expected a row of kind linear or block"),
    ({"kind": "other"}, 'line 3: kind is "other"'),
    ({"step": True}, "line 3: step is true; expected a whole number, at least 0"),
    ({"step": -1}, "line 3: step is -1"),
    ({"layer": "$x_"}, 'line 3: layer is "$x_"; expected a Linear\'s name such as layers.0.attn.qkv'),
    ({"layer": 7}, "line 3: layer is 7"),
    ({"recipe": None}, "line 3: recipe is null"),
    ({"weight": 3}, "line 3: weight is 3; expected an object"),
    ({"gradient": "no"}, 'line 3: gradient is "no"'),
    ({"weight": {"amax": 1}}, 'line 3: weight: scale_min is "missing"; expected a number, at least 0, or null'),
    ({"weight": {**operand("weight", 0, 0, 1, 1), "underflow": "x" * 90}}, "expected a share from 0 to 1"),
    ({"weight": {**operand("weight", 0, 0, 1, 1), "saturated": 1.5}}, "line 3: weight: saturated is 1.5; expected a share"),
    ({"weight": {**operand("weight", 0, 0, 1, 1), "scale": 10**400}}, "expected a number, at least 0, or null"),
    ({"weight": {**operand("weight", 0, 0, 1, 1), "scale": -2}}, "line 3: weight: scale is -2"),
])
def test_wrong_types_are_refused_by_line(tmp_path, change, words):
    good = linear_row(100, 0, 0, 100)
    line = {**good, **change} if isinstance(change, dict) else change
    message = refused(tmp_path, line, good, good)
    assert words in message and len(message) < 400


def test_a_block_row_is_checked_too(tmp_path):
    assert 'line 1: swiglu_rms is "1"; expected a number' in refused(tmp_path, block_row(1, 0, 1, swiglu_rms="1"))
    assert "line 1: block is 1.5" in refused(tmp_path, block_row(1, 1.5, 1))
    assert "holds no row" in refused(tmp_path, "")


# ---------------------------------------------------------------------------------------------------- figures


def lines_of(panel):
    return [line.get_xydata() for line in panel.get_lines()]


def test_scales_are_drawn_where_the_rows_put_them(tmp_path):
    probe, _ = read_probe(write_rows(tmp_path / "probe.jsonl", rows_of(rows=3)))
    inference, _ = read_probe(write_rows(tmp_path / "eval" / "p.jsonl", [
        {key: value for key, value in linear_row(300, block, kind, 300).items() if key != "gradient"}
        for block in range(3) for kind in range(4)]))
    figure = draw_scales(probe, {"rowwise": inference}, "run")
    for column, name in enumerate(("weight", "activation", "gradient")):
        top, bottom = figure.axes[column], figure.axes[3 + column]
        for kind in range(4):
            want = [math.log2(operand(name, block, kind, 300, 300)["scale"]) for block in range(3)]
            found = [line for line in lines_of(top) if np.allclose(line[:, 1], want)]
            assert len(found) == (1 if name == "gradient" else 2)       # training, and inference where it has the operand
            assert np.allclose(np.round(found[0][:, 0]), [0, 1, 2])
        whiskers = np.concatenate([segment for group in top.collections for segment in group.get_segments()])
        assert np.allclose(sorted(whiskers[1::2, 1] - whiskers[::2, 1]), 4)     # two octaves either way
        medians = [np.median([math.log2(operand(name, b, k, step, 300)["scale"]) for b in range(3) for k in range(4)])
                   for step in (100, 200, 300)]
        assert any(len(line) == 3 and np.allclose(line, np.column_stack([(100, 200, 300), medians])) for line in lines_of(bottom))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "qkv", "out", "gate_up", "down", "inference, rowwise"]


def test_heat_maps_hold_the_shares_and_show_zero_apart(tmp_path):
    probe, _ = read_probe(write_rows(tmp_path / "probe.jsonl", rows_of()))
    figure = draw_underflow(probe, "run")
    for row, share in enumerate(("underflow", "saturated")):
        for column, name in enumerate(("weight", "activation", "gradient")):
            zero, positive = figure.axes[3 * row + column].collections[:2]
            want = np.array([[operand(name, block, kind, step, 300)[share] for step in (100, 200, 300)]
                             for block in range(3) for kind in range(4)])
            found = positive.get_array().reshape(want.shape)
            assert np.allclose(found.filled(0), 100 * want) and (np.ma.getmaskarray(found) == (want == 0)).all()
            assert (~np.ma.getmaskarray(zero.get_array().reshape(want.shape)) == (want == 0)).all()
    assert [axes.get_ylabel() for axes in figure.axes[6:]] == ["underflow [% of values]", "saturated [% of values]"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1", "2"]


def test_outliers_are_drawn_with_gaps(tmp_path):
    rows = [block_row(step, block, 300, **({"swiglu_amax": None} if (step, block) == (200, 1) else {}))
            for step in (100, 200, 300) for block in range(12)]
    probe, _ = read_probe(write_rows(tmp_path / "probe.jsonl", rows))
    logit, ratio = draw_outliers(probe, "run").axes
    want = [[5 + 20 * block * step / 300 for step in (100, 200, 300)] for block in range(12)]
    assert np.allclose([line[:, 1] for line in lines_of(logit)], want)
    drawn = np.array([line[:, 1] for line in lines_of(ratio)])
    assert np.isnan(drawn[1]).tolist() == [False, True, False] and math.isclose(drawn[5][2], (8 + 2.0**5) / 0.5)
    assert {text.get_text() for text in logit.texts} == {"block 0", "block 11"}


def test_the_gap_is_the_difference_within_the_band_of_seeds(run):
    figure, notes = draw_gap(run)
    assert notes == []
    panel = figure.axes[0]
    raw, smooth, val = lines_of(panel)[1:]
    assert np.allclose(raw[:, 1], 0.02) and np.allclose(smooth[:, 1], 0.02) and len(raw) == 400
    assert val[:, 0].tolist() == [100, 200, 300, 400] and np.allclose(val[:, 1], 0.02)
    one, other = ([json.loads(line)["loss"] for line in (run.parent / f"run_bf16_{seed}" / "metrics.jsonl").open()][:400]
                  for seed in (1337, 7))
    difference = np.subtract(one, other)

    def mean_around(values, i, window=10):      # the window of np.convolve's "same" for an even width
        return np.mean(values[max(0, i - window // 2):i + window // 2])
    smoothed = [abs(mean_around(difference, i)) for i in range(400)]
    band = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert math.isclose(band.max(), max(mean_around(smoothed, i, 40) for i in range(400)), rel_tol=1e-6)
    bars = panel.collections[1].get_segments()
    assert np.allclose([segment[:, 1] for segment in bars], [[-0.01, 0.01]] * 4)


def test_a_null_run_is_no_partner_and_no_twin_but_a_line_of_its_own(tmp_path):
    run = write_pair(tmp_path)
    drawn = draw_gap(run)[0]
    for seed, extra in ((1337, 0.003), (7, 0.1)):        # of the partner, then of the other seed: no pair of seeds of its own
        own = tmp_path / f"run_bf16_{seed}"
        null = tmp_path / f"run_a_null_{seed}"           # before the partner by name
        null.mkdir()
        rows = [json.loads(line) for line in (own / "metrics.jsonl").open()]
        write_rows(null / "metrics.jsonl", [row | {"loss": row["loss"] + extra} for row in rows])
        (null / "summary.json").write_text(json.dumps(json.loads((own / "summary.json").read_text()) | {"repeat": 1}))
    figure, notes = draw_gap(run)
    assert notes == [] and "minus loss of run_bf16_1337" in figure._suptitle.get_text()
    assert "n = 1 pair;" in figure.texts[-1].get_text().replace("\n", " ")
    assert "only rounded otherwise, minus the first: dashed" in figure.texts[-1].get_text().replace("\n", " ")
    panel = figure.axes[0]
    before = lines_of(drawn.axes[0])
    assert np.allclose(lines_of(panel)[2], before[2]) and len(lines_of(panel)) == len(before) + 1
    assert np.allclose(lines_of(panel)[3][:, 1], 0.003) and len(lines_of(panel)[3]) == 400
    assert np.allclose(panel.collections[0].get_paths()[0].vertices, drawn.axes[0].collections[0].get_paths()[0].vertices)
    (tmp_path / "run_a_null_1337/metrics.jsonl").write_bytes((tmp_path / "run_bf16_1337/metrics.jsonl").read_bytes())
    figure, _ = draw_gap(run)           # as on a CPU: said, not drawn
    assert len(lines_of(figure.axes[0])) == len(before)
    assert "has equal losses at each step" in figure.texts[-1].get_text().replace("\n", " ")


def test_a_published_run_is_drawn_from_its_packed_files(run, tmp_path, capsys):
    for folder in run.parent.iterdir():
        (tmp_path / folder.name).mkdir()
        for file in folder.iterdir():
            if file.suffix == ".jsonl":
                (tmp_path / folder.name / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
            elif file.is_file():
                (tmp_path / folder.name / file.name).write_bytes(file.read_bytes())
    assert draw(capsys, "--fp8", str(tmp_path / run.name), f"out={tmp_path}/packed")[0] == 0
    assert draw(capsys, "--fp8", str(run), f"out={tmp_path}/plain")[0] == 0
    names = {file.name for file in (tmp_path / "plain").iterdir()}
    assert {"fp8_gap.png", "fp8_scales.png"} <= names == {file.name for file in (tmp_path / "packed").iterdir()}
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()
    (tmp_path / run.name / "probe.jsonl.gz").write_bytes(b"\x1f\x8b")
    code, _, error = draw(capsys, "--fp8", str(tmp_path / run.name))
    assert code == 2 and "probe.jsonl.gz cannot be unpacked" in error


def test_the_gap_says_what_is_missing(tmp_path):
    run = write_pair(tmp_path, seeds=(1337,))
    figure, notes = draw_gap(run)
    assert notes == ["fp8_gap: no two BF16 runs beside it are equal but for the seed, so there is no null band"]
    assert "there is no null band" in figure.texts[-1].get_text().replace("\n", " ")
    (tmp_path / "run_bf16_1337" / "metrics.jsonl").write_text("torn")
    assert draw_gap(run)[0] is None and "no logged training step in common" in draw_gap(run)[1][0]
    (tmp_path / "run_bf16_1337" / "summary.json").write_text("[1]")
    assert draw_gap(run)[0] is None and "there is no BF16 run with its pair_id" in draw_gap(run)[1][0]
    (run / "summary.json").unlink()
    assert draw_gap(run)[0] is None and "it is unfinished" in draw_gap(run)[1][0]


@pytest.mark.parametrize("changes", [{"lr_peak": 2e-3}, {"val_sha256": "w" * 64}, {"seed": 1337}, {"pair_id": None}])
def test_only_runs_equal_but_for_the_seed_make_a_null_band(tmp_path, changes):
    run = write_pair(tmp_path)
    path = tmp_path / "run_bf16_7" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert any("no null band" in note for note in draw_gap(run)[1])


def test_runs_that_do_not_say_how_they_were_trained_make_no_null_band(tmp_path):
    run = write_pair(tmp_path)
    for path in tmp_path.glob("*/summary.json"):
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "lr_peak"}))
    assert any("no null band" in note for note in draw_gap(run)[1])


@pytest.mark.parametrize("blocks", [2, 28])
def test_words_stay_on_the_page_and_off_each_other(tmp_path, blocks):
    rows = [*rows_of(blocks, range(10_000, 60_000, 10_000)), {**linear_row(50_000, 0, 0, 50_000), "layer": "head"}]
    run = write_pair(tmp_path)
    probe, _ = read_probe(write_rows(run / "probe.jsonl", rows))
    with matplotlib.rc_context(RC):
        drawn = [draw_scales(probe, {"tensorwise": probe}, "run"), draw_underflow(probe, "run"), draw_outliers(probe, "run"),
                 draw_gap(run)[0]]
        for figure in drawn:
            FigureCanvasAgg(figure).draw()
            page, panels = figure.bbox, figure.axes
            texts = [figure._suptitle, *figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
            for panel in panels:
                texts += [panel.xaxis.label, panel.yaxis.label, panel.title, *panel.texts]
                for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, sorted(panel.get_ylim()))):
                    texts += [tick.label1 if axis is panel.xaxis or panel not in panels[6:] else tick.label2
                              for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            boxes = [(text.get_text(), text.get_window_extent()) for text in dict.fromkeys(texts)
                     if text.get_visible() and text.get_text()]
            assert len(boxes) > 10
            for text, box in boxes:
                assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
            for (one, box), (other, its) in itertools.combinations(boxes, 2):
                overlap = np.minimum(box.max, its.max) - np.maximum(box.min, its.min)
                assert overlap[0] < 1 or overlap[1] < 2, (one, other)


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_the_same_bytes_each_time(run, tmp_path):
    def command(folder):
        return subprocess.run([sys.executable, "scaling/figures.py", "--fp8", str(run), f"out={folder}"], cwd=ROOT,
                              capture_output=True, text=True)
    done = command(tmp_path / "one")
    assert done.returncode == 0 and done.stderr == ""
    assert cli.main(["--fp8", str(run), f"out={tmp_path / 'two'}"]) == 0
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two and one.keys() == {f"{name}.{form}" for name in FILES | {"fp8_gap"} for form in ("png", "svg")}
    assert "| down | gradient | 3 | 9e-06 | 2.3 |" in done.stdout        # 1e-2 * 3 blocks; 1e-6 * 3 of that; 2 % + 3 * 0.1 %


def test_a_bf16_run_has_outliers_alone(tmp_path, capsys):
    write_rows(tmp_path / "b" / "probe.jsonl", rows_of(linear=False))
    code, out, _ = draw(capsys, "--fp8", tmp_path / "b")
    assert code == 0 and "has probed no FP8 Linear" in out and "|" not in out
    assert {path.name for path in (tmp_path / "b" / "figures").iterdir()} == {"fp8_outliers.png", "fp8_outliers.svg"}


def test_a_run_of_one_probe_with_everything_zero_is_drawn(tmp_path, capsys):
    zero = {"amax": 0, "scale_min": 1, "scale": 1, "scale_max": 1, "underflow": 0, "saturated": 0, "error": 0}
    row = {"kind": "linear", "step": 1, "layer": "head", "recipe": "cscale", "weight": zero, "activation": zero}
    write_rows(tmp_path / "z" / "probe.jsonl", [row])
    write_rows(tmp_path / "z" / "eval" / "probe_cscale.jsonl", [row])
    code, out, err = draw(capsys, "--fp8", tmp_path / "z")
    assert (code, err) == (0, "") and "no block row" in out and "| head | gradient | - | - | - |" in out


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "run is missing"), (["--fp8"], "run is missing"), (["--fp8", "a", "--fp8", "b"], "given twice"),
    (["--fp8", "a", "dpi=3"], "there is no key 'dpi'"), (["--fp8", "nowhere"], "nowhere is no folder"),
])
def test_mistakes_get_a_sentence(capsys, arguments, words):
    code, out, err = draw(capsys, *arguments)
    assert code == 2 and words in err and out == "" and err.count("\n") == 1


def test_a_run_without_probes_or_a_folder_that_cannot_be_written(run, tmp_path, capsys):
    code, _, err = draw(capsys, "--fp8", tmp_path)
    assert code == 2 and "has no probe.jsonl" in err and "probe.every" in err
    (tmp_path / "file").write_text("")
    code, _, err = draw(capsys, "--fp8", run, f"out={tmp_path / 'file'}")
    assert code == 2 and "cannot be written" in err
