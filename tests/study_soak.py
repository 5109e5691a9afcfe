"""A tiny true study goes through slice.py from its first run to its page, cut once, each time on a bare machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

from runtime.rows import read_rows
from tests.conftest import ROOT, write_config
from tests.slice_cases import SENTENCE


def test_a_true_study_cut_and_gone_on_with_elsewhere(tiny, tmp_path):
    """Real runs: SIGTERM while one trains, then a bare out folder; a prediction frozen before the largest run, scored after."""
    sizes, more = [], {"a": "recipes=('bf16', 'tensorwise')", "d": "held_out=True"}
    for name, n_ffn in zip("abcd", (64, 128, 256, 512), strict=True):
        config = replace(tiny, run=f"{name}_bf16", model=replace(tiny.model, n_layer=1, n_ffn=n_ffn), steps=None,
                         tokens_per_param=1, data=replace(tiny.data, max_epochs=100), probe=replace(tiny.probe, every=20),
                         optim=replace(tiny.optim, warmup_share=0.05), checkpoint=replace(tiny.checkpoint, every=None, keep=1))
        sizes.append(f"Size(config={str(write_config(config, tmp_path / f'{name}_bf16.py'))!r}, {more.get(name, '')})")
    (tmp_path / "study.py").write_text(
        f"from scaling.study import Size, Study\nstudy = Study(name='s', sizes=({', '.join(sizes)}), tokens_per_param=(1,), "
        "recipes=('bf16',), margin_percent=1.0)\n")
    out, kept = tmp_path / "out/s", tmp_path / "kept"
    command = [sys.executable, str(ROOT / "scaling/slice.py"), str(tmp_path / "study.py"), f"results={kept}",
               f"out={tmp_path}/out", "limit=900", "start=1"]

    def begin(*words):
        return subprocess.Popen([*command, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})

    def again(*words):
        process = begin(*words)
        told = process.communicate(timeout=600)[0]
        return process.returncode, told

    first, end = begin(), time.monotonic() + 300
    while len(read_rows(out / "b_bf16_t1_s1337/metrics.jsonl")) < 5:
        assert first.poll() is None, first.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    told = first.communicate(timeout=300)[0]
    assert first.returncode == 3, told
    done = {path.parent.name for path in kept.glob("*/summary.json")}
    assert {"a_bf16_t1_s1337", "a_tensorwise_t1_s1337"} <= done <= {path.parent.name for path in out.glob("*/summary.json")}
    summaries = {run: (kept / run / "summary.json").read_bytes() for run in done}
    shutil.rmtree(out)

    code, told = again()
    target = "d_bf16_t1_s1337"
    assert code == 3 and SENTENCE in told, told
    assert not (out / target).exists() and not (out / "a_bf16_t1_s1337/checkpoints").exists()
    prediction = json.loads((kept / f"law/prediction_{target}.json").read_text())
    shutil.rmtree(out)
    code, told = again()
    assert code == 3 and SENTENCE in told and not (out / target).exists(), told
    code, told = again("commit=abc")
    assert code == 0, told
    score = json.loads((kept / f"law/score_{target}.json").read_text())
    assert score["prediction_sha256"] == prediction["sha256"] and score["runs"][0]["run_id"] == target
    assert prediction["date"] <= json.loads((kept / target / "summary.json").read_text())["t_start"]
    assert all((kept / run / "summary.json").read_bytes() == content for run, content in summaries.items())
    assert (kept / target / "samples.txt").read_text().startswith("$ python -m eval.sample")
    for name in ("law/law.json", "law/precision.json", "law/figure.png", "law/precision.png", "README.md", "study.json",
                 "data.json", "a_tensorwise_t1_s1337/figures/fp8_scales.png"):
        assert (kept / name).stat().st_size, name
    assert [row["exit"] for row in map(json.loads, (kept / "slices.jsonl").read_text().splitlines())] == [3, 3, 3, 0]
    assert sum((json.loads(line)["runs"] for line in (kept / "slices.jsonl").read_text().splitlines()), []).count(target) == 1
    assert not [path for path in kept.rglob("*") if path.name == "env.json" or "checkpoints" in path.parts]
