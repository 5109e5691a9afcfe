"""The first minutes: the words of a beginner, and what train.py answers; a table of words and
sentences."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train
from lib.errors import UserError
from runtime import parallel, run_folder
from runtime.command_line import read_command_line
from runtime.config import Config, load_config, read_config
from runtime.data import Data
from runtime.parallel import World, read_launch
from runtime.plan import cpu_estimate
from runtime.tokenizer import load_tokenizer
from scaling import fit, report
from tests.conftest import ALONE, ROOT, changed, process, write_shards
from tests.helpers import faults

DEMO = "configs/demo_s_bf16.py"


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            "configs/demo_s_bf16",
            "there is no config file configs/demo_s_bf16; did you mean configs/demo_s_bf16.py?",
        ),
        (
            "gpt350m_fp8",
            "there is no config file gpt350m_fp8; did you mean configs/gpt350m_fp8.py?",
        ),
        (
            "configs/gtp350m_fp8.py",
            "there is no config file configs/gtp350m_fp8.py; did you mean configs/gpt350m_fp8.py?",
        ),
        (
            "xyzzy.py",
            (
                "there is no config file xyzzy.py; the repository's own are configs/..py, such as"
                " configs/gpt350m_fp8.py"
            ),
        ),
        ("configs", "configs is a folder: name a config file, such as configs/gpt350m_fp8.py"),
        (f"--config {DEMO}", f"'--config': .* python train.py {DEMO} .section.key=value ...."),
        (f"--config_file={DEMO}", f"python train.py {DEMO} "),
        (f"config={DEMO}", f"python train.py {DEMO} "),
        (
            "--plan h100",
            "no config file is named: python train.py FILE .*, such as configs/demo_s_bf16.py",
        ),
        (
            f"{DEMO} optim.lr=1e-3 optim.lr=2e-3",
            "optim.lr is given twice, as '1e-3' and as '2e-3': give it once",
        ),
        (f"{DEMO} optim.lr=1e-3 --optim.lr 1e-3", "optim.lr is given twice"),
        (f"{DEMO} --plan --plan", "--plan is given twice"),
        (
            f"{DEMO} configs/demo_s_fp8.py",
            "'configs/demo_s_fp8.py' is no override: .* one config file",
        ),
        (f"{DEMO} optim.lr = 3e-4", "'optim.lr' is no override: write section.key=value"),
        (f"{DEMO} --optim.lr", "--optim.lr needs a value: write optim.lr=VALUE"),
        (f"{DEMO} out=", "out needs a value: write out=VALUE"),
        (
            f"{DEMO} --resume",
            "there is no key 'resume'; did you mean run, whose command resumes it",
        ),
        (f"{DEMO} deterministic=yes", "deterministic='yes' is not bool .write true or false."),
        (f"{DEMO} steps=1.5", "steps='1.5' is not int"),
        (f"{DEMO} run=out/mine", "run='out/mine' must be one folder name"),
        (
            f"{DEMO} data.dir=nowhere",
            (
                "there is no nowhere/c/index.json or nowhere/prose/index.json or"
                " nowhere/python/index.json or nowhere/science/index.json .* `python"
                " prepare_data.py local FILE... name=NAME out=nowhere`, .* give `demo`"
            ),
        ),
        (
            "configs/gpt350m_fp8.py --plan model.n_ffn=2800 fp8.recipe=mxfp8",
            (
                r"cannot convert layers\.\*\.mlp\.down of 2800 x 1024 .24 Linears.: .* multiples of"
                r" 32; .* fp8.skip=mlp.down$"
            ),
        ),
    ],
)
def test_a_beginners_words_get_the_words_that_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, sentence: str
):
    monkeypatch.chdir(ROOT)
    assert train.main(words.split()) == 2
    assert re.match(
        f"train.py: .*{sentence}" if not sentence[0].isalpha() else f"train.py: (.*)?{sentence}",
        capsys.readouterr().err.strip(),
    )


@pytest.mark.parametrize(
    "words, plan_for, overrides",
    [
        (f"--plan h100 {DEMO}", "h100", []),
        (f"{DEMO} --plan", "", []),
        (f"--plan {DEMO} steps=3", "", ["steps=3"]),
        (f"{DEMO} --plan=h200 steps=3", "h200", ["steps=3"]),
        (f"steps=3 {DEMO}", None, ["steps=3"]),
        (
            f"{DEMO} --optim.lr 3e-4 --deterministic --model.tied false",
            None,
            ["optim.lr=3e-4", "deterministic=true", "model.tied=false"],
        ),
    ],
)
def test_words_of_a_command_line_may_come_in_any_order(
    monkeypatch: pytest.MonkeyPatch, words: str, plan_for: str | None, overrides: list[str]
):
    monkeypatch.chdir(ROOT)
    line = read_command_line(words.split())
    assert (line.file, line.plan_for, line.overrides) == (DEMO, plan_for, overrides)


def test_what_is_advised_for_a_size_that_fp8_refuses_is_allowed():
    """One layer of 24 was named, and the next start named the next one."""
    words = ["model.n_ffn=2800", "fp8.recipe=mxfp8"]
    config = load_config(ROOT / "configs/gpt350m_fp8.py", [*words, "fp8.skip=mlp.down"])
    assert any("mlp.down" in line for line in train.plan(config, "h100"))
    with pytest.raises(UserError, match="or set fp8.recipe=off$"):  # nothing would be left
        train.plan(
            load_config(
                ROOT / "configs/gpt350m_fp8.py",
                ["model.n_embd=1032", "model.n_head=129", "model.n_ffn=1032"],
            ),
            "",
        )


def test_two_ranks_of_torchrun_tell_a_mistake_once():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = process(*torchrun, "train.py", "configs/demo_s_bf16.py", "optim.lrr=1")
    assert done.returncode == 1, "torchrun's own"
    assert (done.stdout + done.stderr).count("optim.lrr") == 1, done.stderr
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(
    "variables, waits",
    [
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({}, False),
    ],
)
def test_a_rank_tells_a_mistake_itself_where_the_first_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    waits: bool,
):
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seconds = []
    monkeypatch.setattr(parallel.time, "sleep", seconds.append)
    assert train.main(["configs/demo_s_bf16.py", "optim.lrr=1"]) == 2
    assert "optim.lrr" in capsys.readouterr().err
    assert seconds == [parallel.FIRST_RANK_S] * waits


@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_ranks_than_gpus_are_the_mistake_of_every_rank(
    monkeypatch: pytest.MonkeyPatch, tiny: Config, local_rank: int
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launched = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    launched |= {"MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": str(local_rank)}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="4 processes on this machine, which has 2 GPUs"):
        parallel.start(tiny)


def test_a_launcher_may_show_each_process_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tiny: Config
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    parallel.check_machine(tiny, torch.device("cuda", 0), local_size=8)


@pytest.mark.parametrize(
    "variables, sentence",
    [
        (
            {"WORLD_SIZE": "2"},
            (
                "RANK, MASTER_ADDR, MASTER_PORT are not set: start them with torchrun"
                " --nproc_per_node=2"
            ),
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "from 0 to 1"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"},
            "'x' is no port",
        ),
        ({"RANK": ""}, "RANK=''"),
        ({}, (1, 0, 0)),
        ({"RANK": "5"}, (1, 5, 0)),
        (
            {
                "WORLD_SIZE": "2",
                "RANK": "1",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "29500",
            },
            (2, 1, 1),
        ),
    ],
)
def test_a_launch_that_is_none_is_told(
    variables: dict[str, str], sentence: str | tuple[int, int, int]
):
    if isinstance(sentence, tuple):
        assert read_launch(variables) == sentence
    else:
        with pytest.raises(UserError, match=sentence):
            read_launch(variables)


def test_a_large_model_without_a_gpu_is_announced_with_an_estimate(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
):
    """130 s of silence before. The speed is set here: 100 GFLOP/s."""
    monkeypatch.setattr("runtime.plan.cpu_matmul_speed", lambda dtype: 1e11)
    large = load_config(ROOT / "configs/gpt350m_fp8.py")
    sentence = cpu_estimate(large, ALONE)
    m = large.model
    flops = large.total_tokens * (
        6 * m.params_total + 12 * m.n_layer * m.n_embd * m.n_ctx
    )  # PaLM, appendix B
    days = int(
        re.search(r"13,727 steps will take about ([\d,]+) days", sentence)[1].replace(",", "")
    )
    assert days * 86400 * 1e11 == pytest.approx(flops, rel=0.01)
    assert cpu_estimate(tiny, ALONE) is None and cpu_estimate(large, replace(ALONE, rank=1)) is None
    assert cpu_estimate(large, World(0, 0, 1, torch.device("cuda"))) is None


@pytest.mark.parametrize(
    "words, has_units, dtypes",
    [
        ("fp8.recipe=off", False, {torch.bfloat16}),
        ("fp8.recipe=tensorwise", False, {torch.bfloat16, torch.float32}),
        ("fp8.recipe=tensorwise", True, {torch.bfloat16}),
        ("fp8.recipe=off parallel.cpu_fp32=true", True, {torch.float32}),
        ("fp8.recipe=tensorwise parallel.cpu_fp32=true", True, {torch.float32}),
    ],
)
def test_an_estimate_is_by_the_speed_of_the_matmuls_that_a_run_has(
    words: str, has_units: bool, dtypes: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
):
    """A type whose matmuls are slower makes the estimate longer where the run has such matmuls."""
    config = changed(load_config(ROOT / "configs/gpt350m_bf16.py"), words)
    monkeypatch.setattr("runtime.plan.has_bf16_units", lambda: has_units)

    def estimate(slow: torch.dtype | None) -> str | None:
        speeds = {torch.bfloat16: 1e12, torch.float32: 1e12}
        if slow is not None:
            speeds[slow] = 1e11
        monkeypatch.setattr("runtime.plan.cpu_matmul_speed", speeds.__getitem__)
        return cpu_estimate(config, ALONE)

    usual = estimate(None)
    longer = {dtype for dtype in (torch.bfloat16, torch.float32) if estimate(dtype) != usual}
    assert longer == dtypes


def test_a_log_that_was_opened_before_the_start_keeps_no_run_out(
    tiny: Config, run: Callable[..., str]
):
    """`python train.py FILE | tee out/RUN/log.txt`, and a refused start leaves the folder as it
    was."""
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / "log.txt").write_text("begin")
    assert "data.max_epochs" in run(tiny, "steps=200", code=2)
    assert os.listdir(tiny.run_dir) == ["log.txt"]
    run(tiny)
    assert (tiny.run_dir / "summary.json").exists() and (
        tiny.run_dir / "log.txt"
    ).read_text() == "begin"


@pytest.mark.parametrize(
    "content", [b"", b"{ half", b"[]", b'{"t_start": 3}', b'{"torch": "2"}', b"\xff"]
)
def test_a_damaged_env_json_gets_a_sentence(tiny: Config, content: bytes):
    """Any other time of the first start would change what predictions are scored."""
    tiny.run_dir.mkdir(parents=True)
    (tiny.run_dir / "env.json").write_bytes(content)
    with pytest.raises(UserError, match="env.json is damaged .*; restore it, or delete it"):
        run_folder.read_first_start(tiny.run_dir)


def test_an_env_json_that_is_gone_is_told_on_a_resume(tiny: Config, run: Callable[..., str]):
    run(tiny)
    faults.back_to(tiny, 3)
    (tiny.run_dir / "env.json").unlink()
    assert "env.json was gone: this start counts as the run's first" in run(tiny)


def test_a_mixture_of_the_same_ratio_resumes_as_it_was_begun(tiny: Config, run: Callable[..., str]):
    run(tiny)
    whole = faults.summary(tiny)
    faults.back_to(tiny, 3)
    run(tiny, "data.mixture=web:6,code:2")
    assert (
        faults.summary(tiny)["pair_id"] == whole["pair_id"]
        and faults.summary(tiny)["loss_bf16"] == whole["loss_bf16"]
    )
    assert read_config(tiny.run_dir).data.mixture == {"web": 0.75, "code": 0.25}
    assert "data.mixture was" in run(tiny, "data.mixture=web:6,code:3", code=2)


def test_a_full_disk_at_the_start_names_the_runs_folder(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder.os, "getpid", full)  # called as the lock is written
    assert f"train.py: {tiny.run_dir}: No space left on device; correct it" in run(tiny, code=1)
    assert not tiny.run_dir.exists()


def test_wandb_says_which_steps_it_will_show_twice(
    tiny: Config, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    fake = SimpleNamespace(
        log=lambda row: None, define_metric=lambda *_, **__: None, finish=lambda: None
    )
    monkeypatch.setattr(
        "runtime.log.import_module", lambda name: SimpleNamespace(init=lambda **_: fake)
    )
    monkeypatch.setattr("runtime.log.find_spec", lambda name: name)
    config = changed(tiny, "log.to=wandb")
    assert "W&B keeps" not in run(config)
    faults.back_to(config, 3)
    assert (
        "log.to=wandb: W&B keeps the rows that it was sent for steps after 3 and shows these steps"
        " twice" in run(config)
    )


@pytest.mark.parametrize("main", [fit.main, report.main])
def test_a_command_without_words_prints_its_usage(
    capsys: pytest.CaptureFixture[str], main: Callable[..., Any]
):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: python ")


def test_a_runs_name_in_the_place_of_its_folder_is_told(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/mine").mkdir(parents=True)
    (tmp_path / "out/mine/config.json").touch()
    with pytest.raises(
        UserError, match="mine is no run: it has no config.json; did you mean out/mine?"
    ):
        read_config("mine")


def write_masked(folder: Path, targets_from: int) -> None:
    """A masked source whose validation windows hold targets from the `targets_from`-th on, of 16
    windows of 32 tokens."""
    train_ids, val_ids = (np.full(n, 7, np.uint32) for n in (8_000, 513))
    mask = np.uint32(1 << 31)
    val_ids[: 32 * targets_from + 1] |= mask
    train_ids[:4_000] |= mask
    write_shards(
        folder, {"train": [train_ids.astype("<u4")], "val": [val_ids.astype("<u4")]}, is_masked=True
    )


@pytest.mark.parametrize(
    "targets_from, tokens, sentence",
    [
        (
            13,
            64,
            (
                r"eval.tokens=64 selects 2 of the 16 validation windows of .*chat, all of prompts"
                r" .*: give eval.tokens=256 or more$"
            ),
        ),
        (
            16,
            64,
            "none of the 16 validation windows of .* holds a response to learn: raise val_share=",
        ),
        (13, 256, None),
    ],
)
def test_masked_validation_with_few_eval_tokens_is_told_how_many_it_needs(
    tiny: Config, tmp_path: Path, targets_from: int, tokens: int, sentence: str | None
):
    """Not to prepare more text, of which there is enough."""
    write_masked(tmp_path / "data/chat", targets_from)
    config = changed(tiny, f"data.dir={tmp_path}/data data.mixture=chat:1 eval.tokens={tokens}")
    sha256 = load_tokenizer("byte").sha256
    if sentence is None:
        assert Data(config, sha256).val["chat"].tokens > 0
        return
    with pytest.raises(UserError, match=sentence) as error:
        Data(config, sha256)
    if "or more" in sentence:  # what is advised must do
        advised = re.search(r"give (eval.tokens=\d+)", str(error.value))[1]
        assert Data(changed(config, advised), sha256).val["chat"].tokens > 0
