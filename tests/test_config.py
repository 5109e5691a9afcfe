import dataclasses
import json
import subprocess
import sys

import pytest

from runtime.cli import UserError
from runtime.config import SECTIONS, Config, apply_overrides, config_from_dict, help_text, known_keys, load_config, read_config
from runtime.fp8 import by_name
from runtime.log import pair_id
from tests.conftest import ROOT

ALL_CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.py")
                     if p.stem not in ("demo", "h100", "mixture", "sources") and not p.stem.startswith("study_"))


@pytest.mark.parametrize("path", ALL_CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_is_named_after_its_file(path):
    config = load_config(path)
    assert config.run == path.stem
    assert (config.fp8.recipe != "off") == path.stem.endswith("_fp8")
    if config.start_from is not None:       # it goes on with a model that has seen its tokens
        return
    m = config.model
    is_h100 = path.stem.startswith("h100_")     # 20 tokens per parameter outside the vocabulary
    assert config.tokens_per_param == (None if is_h100 else 20)
    counted = m.params_total - m.vocab_padded * m.n_embd * is_h100
    assert (config.total_steps - 1) * config.data.tokens_per_step < 20 * counted <= config.total_tokens


@pytest.mark.parametrize("path", [p for p in ALL_CONFIGS if p.stem.endswith("_fp8")], ids=lambda p: p.stem)
def test_an_fp8_config_differs_from_its_baseline_by_name_and_fp8_section_alone(path):
    fp8 = load_config(path).to_dict()
    bf16 = load_config(path.with_name(path.name.replace("_fp8", "_bf16"))).to_dict()
    assert {k for k in fp8 if fp8[k] != bf16[k]} == {"run", "fp8"}


@pytest.mark.parametrize("path", [p for p in ALL_CONFIGS if p.stem.startswith("gpt")], ids=lambda p: p.stem)
def test_the_command_in_a_config_works_on_one_gpu_and_on_eight(path):
    config = load_config(path)
    assert config.accumulation(1) == 8 * config.accumulation(8)


@pytest.mark.parametrize("size, layers, width, ffn, heads, millions", [
    ("gpt50m", 8, 512, 1536, 4, 53), ("gpt125m", 12, 768, 2048, 6, 124), ("gpt250m", 16, 1024, 2816, 8, 257),
    ("gpt350m", 24, 1024, 2816, 8, 360), ("gpt760m", 24, 1536, 4096, 12, 757), ("gpt1p5b", 28, 2048, 5632, 16, 1542)])
def test_sizes_are_the_documented_ones(size, layers, width, ffn, heads, millions):
    m = load_config(ROOT / f"configs/{size}_bf16.py").model
    assert (m.n_layer, m.n_embd, m.n_ffn, m.n_head) == (layers, width, ffn, heads)
    assert round(m.params_total / 1e6) == millions


@pytest.mark.parametrize("text, key, value", [
    ("optim.lr=3e-4", "optim.lr", 3e-4), ("--optim.lr=3e-4", "optim.lr", 3e-4), ("steps=1e3", "steps", 1000),
    ("model.tied=false", "model.tied", False), ("model.n_kv_head=none", "model.n_kv_head", None),
    ("fp8.skip=head,layers.0.*", "fp8.skip", ("head", "layers.0.*")), ("fp8.recipe=rowwise", "fp8.recipe", "rowwise"),
    ("data.mixture=web:0.5,code:2", "data.mixture", {"web": 0.5, "code": 2.0}), ("run=other", "run", "other"),
    ("data.micro_batch=auto", "data.micro_batch", "auto"), ("data.micro_batch=8", "data.micro_batch", 8),
    ("checkpoint.at=2,4", "checkpoint.at", (2, 4)), ("start_from=o/r/checkpoints/step_00000002", "start_from",
                                                   "o/r/checkpoints/step_00000002"),
])
def test_overrides_are_parsed_by_annotation(tiny, text, key, value):
    extra = ["fp8.recipe=tensorwise"] if key == "fp8.skip" else []
    config = apply_overrides(tiny, [text, *extra])
    section, _, name = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, name) == value


def test_a_budget_on_the_command_line_replaces_the_files(tiny):
    config = apply_overrides(tiny, ["tokens_per_param=2"])
    assert config.steps is None
    assert config.total_steps == -(-2 * config.model.params_total // 512)


@pytest.mark.parametrize("override, sentence", [
    ("optim.lrr=1", "there is no key 'optim.lrr'; did you mean 'optim.lr'?"),
    ("n_layer=3", "there is no key 'n_layer'; did you mean 'model.n_layer'?"),
    ("optim.n_layer=3", "there is no key 'optim.n_layer'; did you mean 'model.n_layer'?"),
    ("optim.lr", "'optim.lr' is no override: write section.key=value, such as optim.lr=3e-4"),
    ("optim.lr=fast", "optim.lr='fast' is not a number"),
    ("model.n_layer=2.5", "model.n_layer='2.5' is not a whole number"),
    ("model.tied=maybe", "model.tied='maybe' is not true or false"),
    ("optim.lr=nan", "optim.lr=nan is not a number"),
    ("optim.lr=inf", "optim.lr=inf must be a positive, finite number"),
    ("optim.lr=-1", "optim.lr=-1.0 must be a positive, finite number"),
    ("steps=0", "steps=0 must be a positive, finite number"),
    ("data.mixture=web", "data.mixture='web' is not a table of source:weight, written source:weight,source:weight"),
    ("data.mixture=web:-1", "data.mixture gives 'web' the weight -1.0: leave a source out or give it a positive weight"),
    ("data.mixture=../x:1", "data.mixture names '../x': a source is one folder name, of letters, digits, '_', '-' and '.'"),
    ("fp8.recipe=rowise", "fp8.recipe='rowise' is not one of off, auto, tensorwise, tensorwise_gw_hp, rowwise, "
     "rowwise_with_gw_hp, amax, cscale, mxfp8; "
                          "did you mean 'rowwise'?"),
    ("fp8.head=true", "fp8.recipe=off converts nothing, yet fp8.head is set: name a recipe or drop it"),
    ("log.to=wandbb", "log.to=('wandbb',) is not a list of one of wandb, tensorboard; did you mean 'wandb'?"),
    ("model.n_embd=33", "model.n_embd=33 is not divisible by model.n_head=2: give a width that is a multiple of the "
                        "number of heads"),
    ("model.n_kv_head=3", "model.n_head=2 is not divisible by model.n_kv_head=3: each key/value head serves a whole "
                          "number of query heads"),
    ("model.vocab_size=50257", "model.vocab_size=50257 does not fit data.tokenizer=byte, which has 257 tokens: set "
                               "model.vocab_size=257"),
    ("data.micro_batch=5", "data.tokens_per_step=512 is not a whole number of micro-batches of 5 x 32 = 160 tokens "
                           "(data.micro_batch x model.n_ctx)"),
    ("data.micro_batch=Auto", "data.micro_batch='Auto' is not a whole number or auto"),
    ("data.micro_batch=none", "data.micro_batch=none is not a whole number or auto"),
    ("data.micro_batch=0", "data.micro_batch=0 must be a positive, finite number"),
    ("parallel.timeout=0", "parallel.timeout=0.0 must be at least 1 second and at most parallel.start_timeout=1800.0"),
    ("parallel.timeout=3600", "parallel.timeout=3600.0 must be at least 1 second and at most parallel.start_timeout=1800.0"),
    ("checkpoint.forever=7", "checkpoint.forever=7 must be a multiple of checkpoint.every=3: what is not saved cannot be kept"),
    ("checkpoint.rolling=0", "checkpoint.rolling=0 must be a positive, finite number"),
    ("guard.mode=acts", "guard.mode='acts' is not one of off, log, act; did you mean 'act'?"),
    ("guard.window=1", "guard.window=1 must be at least 8 steps: the spread of fewer is not known"),
    ("guard.threshold=1", "guard.threshold=1.0 must be at least 2, or ordinary steps would count as spikes"),
    ("guard.rollbacks=-1", "guard.rollbacks=-1 must be a number of times, 0 or more"),
    ("profile=5", "profile='5' must be the first and the last step to trace, such as profile=10:15"),
    ("profile=9:2", "profile='9:2' must be the first and the last step to trace, such as profile=10:15"),
    ("profile=7:9", "profile=7:9 begins after the last step of this run, 6"),
    ("run=a/b", "run='a/b' must be one folder name, of letters, digits, '_', '-' and '.'"),
    ("tokens_per_param=none", "steps=None and tokens_per_param=None: give exactly one of the two"),
])
def test_mistakes_get_a_sentence(tiny, override, sentence):
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, [override])
    assert str(error.value) == sentence


def test_fp8_needs_multiples_of_16(tiny):
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, ["fp8.recipe=tensorwise", "model.n_ffn=72", "model.n_embd=40"])
    assert str(error.value).splitlines() == [
        "model.n_embd=40 is not a multiple of 16, which fp8.recipe=tensorwise needs: take 32 or 48, or fp8.recipe=off",
        "model.n_ffn=72 is not a multiple of 16, which fp8.recipe=tensorwise needs: take 64 or 80, or fp8.recipe=off",
        "model.n_kv_head x head size=40 is not a multiple of 16, which fp8.recipe=tensorwise needs: take 32 or 48, "
        "or fp8.recipe=off"]


FP8_HEAD = ("fp8.recipe=tensorwise", "fp8.head=true")
NEEDS_16 = "is not a multiple of 16, which fp8.recipe={} needs for the head's weight gradient (fp8.head=true): take {}, or none"
MISCOMPILED = ("neither divides model.n_ctx={} nor is a multiple of it, which torch.compile gets wrong on a CPU with fp8.head "
               "and fp8.kernels (part of the gradients unwritten): take {}, or none, or parallel.compile=false")


@pytest.mark.parametrize("overrides, sentence", [
    ([*FP8_HEAD, "model.loss_chunk=100"], "model.loss_chunk=100 " + NEEDS_16.format("tensorwise", 112)),
    ([*FP8_HEAD, "model.loss_chunk=8"], "model.loss_chunk=8 " + NEEDS_16.format("tensorwise", 16)),
    (["fp8.recipe=auto", "fp8.head=true", "model.loss_chunk=100"], "model.loss_chunk=100 " + NEEDS_16.format("auto", 112)),
    (["fp8.recipe=auto", "model.n_ctx=8", "data.micro_batch=1"],
     "data.micro_batch=1 x model.n_ctx=8 tokens is not a multiple of 16, which fp8.recipe=auto needs for the weight gradient: "
     "change either, or fp8.recipe=off"),
    ([*FP8_HEAD, "fp8.kernels=true", "parallel.compile=true", "model.loss_chunk=48"],
     "model.loss_chunk=48 " + MISCOMPILED.format(32, 64)),
    (["fp8.recipe=auto", "fp8.head=true", "fp8.kernels=true", "parallel.compile=true", "model.n_ctx=64", "model.loss_chunk=100"],
     "model.loss_chunk=100 " + MISCOMPILED.format(64, 128)),     # what is advised must not be refused next
    ([*FP8_HEAD, "fp8.kernels=true", "parallel.compile=true", "model.n_ctx=8", "data.micro_batch=16", "model.loss_chunk=20"],
     "model.loss_chunk=20 " + MISCOMPILED.format(8, 32)),
    ([*FP8_HEAD, "parallel.compile=true", "model.loss_chunk=48"], None),
    (["fp8.recipe=auto", "model.n_ffn=72"], None),              # such Linears stay in BF16
    ([*FP8_HEAD, "fp8.kernels=true", "parallel.compile=false", "model.loss_chunk=48"], None),
    (["fp8.recipe=tensorwise", "model.loss_chunk=100"], None), (["model.loss_chunk=100"], None),
    *[([*FP8_HEAD, "fp8.kernels=true", "parallel.compile=true", f"model.loss_chunk={chunk}"], None)
      for chunk in (16, 32, 64, 1024, "none")],
])
def test_a_loss_chunk_that_an_fp8_head_cannot_use_is_refused(tiny, overrides, sentence):
    """96 at n_ctx 64, 4 sequences: 10 times the head's gradient, compiled by torch 2.13 on a CPU; 1000: no float8 matmul."""
    if sentence is None:
        apply_overrides(tiny, overrides)
        return
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, overrides)
    assert str(error.value) == sentence


@pytest.mark.parametrize("override, sentence", [
    ("data.tokens_per_step=100", "data.tokens_per_step=100 is not a whole number of sequences of 32 tokens (model.n_ctx)"),
    ("deterministic=true", "data.micro_batch=auto is decided by a clock, which deterministic=true cannot have: give a number")])
def test_what_cannot_be_with_a_micro_batch_that_is_to_be_found(tiny, override, sentence):
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, ["data.micro_batch=auto", override])
    assert str(error.value) == sentence


def test_a_micro_batch_that_is_to_be_found_counts_as_one_sequence_and_is_of_a_known_kind(tiny):
    config = apply_overrides(tiny, ["data.micro_batch=auto", "fp8.recipe=tensorwise", "model.n_ctx=8"])     # 8 tokens: no tile
    assert config.accumulation(4) == 512 // 8 // 4 and config.identity().keys() == tiny.identity().keys()
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for value in ("automatic", 2.5, None, True):
        with pytest.raises(UserError, match=rf"^data.micro_batch={'none' if value is None else repr(value)} is not a whole "
                                              r"number or auto$"):
            dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, micro_batch=value))


def test_all_problems_of_a_stage_are_told_together(tiny):
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, ["optim.lr=-1", "checkpoint.keep=0", "data.max_epochs=0"])
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize("body, sentence", [
    ("config = 3", "{path} must bind config = Config(...), but config is int"),
    ("import nonsense_that_is_not_there", "{path} could not be run: ModuleNotFoundError: No module named "
                                          "'nonsense_that_is_not_there'"),
    ("from runtime.config import OptimConfig\nOptimConfig(learning_rate=3)",
     "{path}: OptimConfig has no field 'learning_rate'; there are: lr, min_lr_ratio, warmup_share, schedule, decay_share, "
     "weight_decay, beta1, beta2, eps, clip"),
    ("from model import GPTConfig\nGPTConfig(n_layers=3, n_head=1, n_embd=1, n_ffn=1)",
     "{path}: GPTConfig has no field 'n_layers'; did you mean 'n_layer'?"),
    ("from runtime.config import OptimConfig\nOptimConfig()", "{path}: OptimConfig needs 'lr': give a value"),
])
def test_mistakes_in_a_file_get_a_sentence(tmp_path, body, sentence):
    path = tmp_path / "mine.py"
    path.write_text(body)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert str(error.value) == sentence.format(path=path)


def test_a_wrong_type_in_a_file_is_refused(tiny):
    with pytest.raises(UserError, match=r"^model.n_layer='2' is not a whole number$"):
        dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, n_layer="2"))
    with pytest.raises(UserError, match=r"^optim.clip=True is not a number$"):
        dataclasses.replace(tiny, optim=dataclasses.replace(tiny.optim, clip=True))
    with pytest.raises(UserError, match=r"^fp8=None must be a FP8Config"):
        dataclasses.replace(tiny, fp8=None)


def test_a_missing_file_names_its_neighbour():
    with pytest.raises(UserError, match=r"there is no config file .*gpt350_fp8.py; did you mean .*gpt350m_fp8.py\?"):
        load_config(ROOT / "configs/gpt350_fp8.py")


def test_a_record_names_kernels_beside_the_recipe(tiny):
    """pair_id leaves the whole fp8 section out: by `recipe` alone scaling/ tells what trained otherwise."""
    named = {config.fp8.label: config for config in (apply_overrides(tiny, one) for one in (
        [], ["fp8.recipe=tensorwise"], ["fp8.recipe=tensorwise", "fp8.kernels=true"], ["fp8.recipe=auto", "fp8.kernels=true"]))}
    assert [*named] == ["bf16", "tensorwise", "tensorwise+kernels", "auto+kernels"]
    assert len({pair_id(config) for config in named.values()}) == 1
    for label, config in named.items():
        assert label == "bf16" or by_name(label) == config.fp8


def test_json_round_trip(tiny, tmp_path):
    assert config_from_dict(tiny.to_dict()) == tiny
    (tmp_path / "config.json").write_text("{ half")
    with pytest.raises(UserError, match="is not JSON"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="is no run: it has no config.json"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match="the stored configuration does not fit this version"):
        config_from_dict({**tiny.to_dict(), "optim": {"momentum": 1}})


def test_a_hugging_face_folder_given_as_a_run_is_told_of_the_import(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 7}')
    with pytest.raises(UserError, match=rf"^{tmp_path} is a model .* --from-hf {tmp_path} out/RUN .* as hf:{tmp_path} too$"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('["architectures"]')
    with pytest.raises(UserError, match="does not fit this version"):
        read_config(tmp_path)


def test_every_public_attribute_of_a_section_is_a_field():
    """An attribute without an annotation is silently no field and can never be configured (lingua's distributed.py)."""
    for cls in (Config, *SECTIONS.values()):
        plain = {k for k, v in vars(cls).items() if not k.startswith("_") and not callable(v) and not isinstance(v, property)}
        assert plain <= {f.name for f in dataclasses.fields(cls)}, cls


def test_help_tells_every_key_with_its_meaning():
    lines = help_text().splitlines()
    assert [line.split()[0] for line in lines] == known_keys()
    assert all(len(line.split("  ")[-1]) > 3 for line in lines)


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), ([], 2), (["configs/none.py"], 2),
                                             (["configs/demo_s_fp8.py", "optim.lrr=1"], 2)])
def test_exit_codes(arguments, code):
    done = subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert (done.stderr.count("\n") == 1) == (code == 2 and bool(arguments))
