"""Configurations and command lines: values and refusals by hand, then hostile input by the hundred,
never a traceback."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_type_hints
from unittest import mock

import pytest
import torch

import train
from lib.bounds import above_zero, any_number, within
from lib.command import command, read_options
from lib.errors import UserError
from lib.help import field_meanings
from lib.values import FilePath, union_members
from runtime.config import (
    DEFAULTS,
    FIRST_KEYS,
    FREE_KEYS,
    KEYS,
    PATHS_OF_MACHINE,
    SECTIONS,
    Config,
    FP8Config,
    OptimConfig,
    annotation,
    apply_overrides,
    changed_keys,
    config_from_dict,
    help_text,
    load_config,
    read_config,
)
from runtime.log import digest, lineage, pair_id
from tests.conftest import ROOT, changed, write_config

ALL_CONFIGS = sorted(
    p
    for p in (ROOT / "configs").glob("*.py")
    if p.stem not in ("mixture", "sources") and not p.stem.startswith("study_")
)


def refused(call, *arguments: object) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments)
    return str(error.value)


SIZES = {  # layers, width, width of the MLP, heads, million parameters
    "gpt50m": (8, 512, 1536, 4, 53),
    "gpt125m": (12, 768, 2048, 6, 124),
    "gpt250m": (16, 1024, 2816, 8, 257),
    "gpt350m": (24, 1024, 2816, 8, 360),
    "gpt760m": (24, 1536, 4096, 12, 757),
    "gpt1p5b": (28, 2048, 5632, 16, 1542),
}


IDENTITIES = {  # summary.json of runs that exist holds these: no version may change them
    "demo_s_bf16": ("4f9bf045b63c03a6", "b8098584"),
    "gpt350m_fp8": ("cc4f4e7448834472", "0f1828fa"),
    "continue_llama": ("ce3c1df4022040d0", "20906e2f"),
}


each_config = pytest.mark.parametrize("path", ALL_CONFIGS, ids=lambda p: p.stem)


@each_config
def test_a_shipped_config_is_named_after_its_file_and_precision(path: Path):
    config = load_config(path)
    assert config.run == path.stem
    assert (config.fp8.recipe != "off") == path.stem.endswith("_fp8")


@pytest.mark.parametrize("name", IDENTITIES)
def test_no_version_changes_the_identity_of_a_shipped_config(name: str):
    config = load_config(ROOT / f"configs/{name}.py")
    assert (pair_id(config), digest(config.identity())[:8]) == IDENTITIES[name]


@pytest.mark.parametrize(
    "path", [p for p in ALL_CONFIGS if p.stem.endswith("_fp8")], ids=lambda p: p.stem
)
def test_an_fp8_config_differs_from_its_bf16_one_in_run_and_fp8_alone(path: Path):
    fp8 = asdict(load_config(path))
    bf16 = asdict(load_config(path.with_name(path.name.replace("_fp8", "_bf16"))))
    assert {key for key in fp8 if fp8[key] != bf16[key]} == {"run", "fp8"}


ARITHMETIC = r"20 x ([\d,]+) (?:parameters )?= .* = ([\d,]+) steps"  # in a comment


@pytest.mark.parametrize(
    "path",
    [p for p in ALL_CONFIGS if re.search(ARITHMETIC, p.read_text())],
    ids=lambda p: p.stem,
)
def test_the_arithmetic_in_a_config_is_right(path: Path):
    config = load_config(path)
    written = [int(n.replace(",", "")) for n in re.search(ARITHMETIC, path.read_text()).groups()]
    assert written == [config.model.params_total, config.total_steps]


@pytest.mark.parametrize(
    "path", [p for p in ALL_CONFIGS if p.stem.startswith("gpt")], ids=lambda p: p.stem
)
def test_a_gpt_has_its_size_and_is_shared_by_eight_gpus(path: Path):
    config = load_config(path)
    m = config.model
    size = m.n_layer, m.n_embd, m.n_ffn, m.n_head, round(m.params_total / 1e6)
    assert size == SIZES[path.stem.split("_")[0]]
    assert config.accumulation(1) == 8 * config.accumulation(8)


@each_config
def test_a_shipped_config_trains_on_20_tokens_per_parameter(path: Path):
    """Those of h100_ outside the vocabulary; to the next step."""
    config = load_config(path)
    if config.start_from is not None:
        return
    m, is_h100 = config.model, path.stem.startswith("h100_")
    counted = m.params_total - (m.vocab_padded * m.n_embd if is_h100 else 0)
    assert config.tokens_per_param == (None if is_h100 else 20)
    assert 0 <= config.total_tokens - 20 * counted < config.data.tokens_per_step


@pytest.mark.parametrize(
    "text, value",
    [
        ("optim.lr=3e-4", 3e-4),
        ("--optim.lr=3", 3.0),
        ("steps=1e3", 1000),
        ("seed=98765432109876543210", 98765432109876543210),
        ("model.tied=False", False),
        ("model.n_kv_head=none", None),
        ("start_from=none", None),
        ("checkpoint.at=2,4", (2, 4)),
        ("fp8.skip=layers.*.attn.out,mlp.down", ("layers.*.attn.out", "mlp.down")),
        ("fp8.skip=[layers.[01].*]", ("layers.[01].*",)),
        ("fp8.skip=(a, b,)", ("a", "b")),
        ("log.to=", ()),
        ("log.to=[]", ()),
        ("data.mixture=web:0.8,code:0.2", {"web": 0.8, "code": 0.2}),
        ("data.micro_batch=auto", "auto"),
        ("data.micro_batch=8", 8),
        ("start_from=o/r/checkpoints/step_00000002", "o/r/checkpoints/step_00000002"),
    ],
)
def test_overrides_are_parsed_by_annotation(tiny: Config, text: str, value):
    config = apply_overrides(tiny, [text, *["fp8.recipe=tensorwise"] * text.startswith("fp8.skip")])
    value_found = attrgetter(text.removeprefix("--").partition("=")[0])(config)
    assert value_found == value and type(value_found) is type(value)


COMPILED = "fp8.recipe=tensorwise fp8.head=true fp8.kernels=true parallel.compile=true "


# told: words that the sentence must hold; None: it is allowed
@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ("optim.lrr=3", "'optim.lrr'.*'optim.lr'"),
        ("xyzzy=3", "'xyzzy'.*--help"),
        ("n_layer=3", "'n_layer'.*'model.n_layer'"),
        ("optim.n_layer=3", "'optim.n_layer'.*'model.n_layer'"),
        ("optim.learning_rate=3", "'optim.learning_rate'.*optim.lr"),
        ("--max-seq-len=3", "'max-seq-len'.*model.n_ctx"),
        ("global_batch_size=3", "size'.*data.tokens_per_step, which"),
        ("head_dim=64", "'head_dim'.*model.head_size"),
        ("tokens_per_param=2", None),
        ("optim.lr", "optim.lr"),
        ("optim.lr=fast", "optim.lr='fast'"),
        ("optim.lr=nan", "optim.lr='nan' is not float"),
        ("steps=0", "steps=0"),
        ("model.n_layer=2.5", "is not int"),
        ("model.tied=maybe", "is not bool"),
        ("optim.beta2=1", "optim.beta2=1.0"),
        ("optim.schedule=wsd optim.warmup_share=0.9", "optim.warmup_share"),
        ("data.mixture=../x:1", "'../x'"),
        *[(f"data.mixture={text}", "source:") for text in ("web", "web:1,web:2", "web:x")],
        ("data.mixture=web:-1", "positive"),
        ("data.mixture=web:1,code:1e-9", "positive weight that is more than a millionth of"),
        ("fp8.recipe=rowise", "did you mean 'rowwise'"),
        ("checkpoint.at=[1,2", "checkpoint.at"),
        ("fp8.head=true", "fp8.head"),
        *[
            (f"fp8.fast_backward=true fp8.recipe={recipe}", "fp8.fast_backward")
            for recipe in ("off", "mxfp8", "nvfp4")
        ],
        *[
            (f"fp8.scaling=delayed fp8.recipe={how}", "fp8.scaling")
            for how in ("off", "tensorwise fp8.kernels=false", "auto fp8.kernels=true")
        ],
        *[
            (f"fp8.scaling=bounded fp8.recipe={how}", "fp8.scaling=bounded")
            for how in (
                "tensorwise fp8.kernels=false",
                "tensorwise fp8.all_gather=true",
                "tensorwise_gw_hp",
                "auto",
            )
        ],
        ("fp8.recipe=rowwise fp8.all_gather=true", "fp8.all_gather"),
        ("fp8.recipe=mxfp8 fp8.kernels=true", "fp8.kernels"),
        ("fp8.recipe=tensorwise fp8.kernels=true fp8.all_gather=true", "one of the two"),
        (
            "fp8.recipe=tensorwise fp8.all_gather=true optim.kind=muon",
            "not tried with optim.kind=muon",
        ),
        ("log.to=tensorboard,wanb", "'wandb'"),
        ("model.n_embd=33", "model.n_head=2"),
        ("run=a/b", "run='a/b'"),
        ("data.micro_batch=5", "multiple of 160"),
        ("data.micro_batch=auto data.tokens_per_step=100", "multiple of 32"),
        ("data.micro_batch=auto deterministic=true", "number"),
        ("parallel.timeout=0", "parallel.timeout"),
        ("checkpoint.forever=7", "multiple"),
        ("guard.window=1", "window=1"),
        *[(f"checkpoint.at={step}", "steps 1 to 6") for step in (0, 7)],
        ("profile=9:2", "profile="),
        ("profile=7:9", "1 to 6"),
        ("start_from=o/r/checkpoints/step_00000006", "ends at step 6"),
        ("start_from=o/r/checkpoints/step_2", "is no checkpoint"),
        # both
        ("tokens_per_param=none", "exactly one"),
        ("optim.lr=-1 checkpoint.keep=0", "(?s)optim.lr=-1.*checkpoint.keep=0"),
        (
            "fp8.recipe=blockwise data.micro_batch=2",
            "micro_batch x model.n_ctx=64 is no multiple of 128, which",
        ),
        (COMPILED + "model.loss_chunk=100", "model.loss_chunk=100 .* 16"),
        ("model.loss_chunk=100", None),
        # 96 at n_ctx 64, 4 sequences: 10 times the head's gradient, by torch 2.13 on a CPU.
        # What is advised must be allowed.
        (COMPILED + "model.loss_chunk=48", "take 32, or none"),
        *[
            (COMPILED + f"model.loss_chunk=48 {setting}", None)
            for setting in ("fp8.kernels=false", "parallel.compile=false")
        ],
        *[(COMPILED + f"model.loss_chunk={chunk}", None) for chunk in (16, 32, 64, "none")],
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    tiny: Config, overrides: str, sentence: str | None
):
    if sentence is None:
        apply_overrides(tiny, overrides.split())
    else:
        assert re.search(sentence, refused(apply_overrides, tiny, overrides.split()))


@pytest.mark.parametrize("kernels", ["auto", True, False])
@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_who_casts_is_no_part_of_a_run_and_stored_choices_load(
    tiny: Config, recipe: str, kernels: bool | str
):
    if recipe == "off" and kernels is True:
        return  # which converts nothing
    stored = json.loads(json.dumps(asdict(apply_overrides(tiny, [f"fp8.recipe={recipe}"]))))
    stored["fp8"]["kernels"] = kernels
    loaded = config_from_dict(stored)
    assert loaded.fp8.kernels == kernels
    assert loaded.identity() == apply_overrides(tiny, [f"fp8.recipe={recipe}"]).identity()


@pytest.mark.parametrize("kernels, label", [("auto", "tensorwise"), (False, "tensorwise")])
def test_an_arm_is_called_by_its_recipe_whoever_casts(kernels: bool | str, label: str):
    assert FP8Config(recipe="tensorwise", kernels=kernels).label == label


@pytest.mark.parametrize(
    "change",
    [
        "data.dir=x",
        "data.micro_batch=auto",
        "data.max_epochs=3",
        "model.loss_chunk=64",
        "run=b",
        "out=c",
        "eval.every=2",
        "parallel.recompute=true",
        "probe.every=2",
        "model.head_size=16",  # the equal share, as by default
        "fp8.scaling=current",  # the default of a key that came later
    ],
)
def test_what_no_weight_depends_on_is_not_in_the_identity(tiny: Config, change: str):
    assert apply_overrides(tiny, [change]).identity() == tiny.identity()


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "optim.lr=1e-3",
        "optim.eps=1e-9",
        "model.qk_norm=true",
        "model.head_size=64",
        "data.tokens_per_step=256",
        "steps=7",
        "data.mixture=web:1",
        "start_from=o/llama/checkpoints/step_00000000",  # weights that came from elsewhere
    ],
)
def test_what_weights_depend_on_is_in_the_identity_and_that_of_the_pair(tiny: Config, change: str):
    other_config = apply_overrides(tiny, [change])
    assert other_config.identity() != tiny.identity()
    assert pair_id(other_config) != pair_id(tiny)


@pytest.mark.parametrize(
    "change",
    [
        "fp8.recipe=rowwise",
        "start_from=o/r/checkpoints/step_00000002",  # a branch ends as from scratch
    ],
)
def test_precision_and_branch_are_in_the_identity_but_not_the_pairs(tiny: Config, change: str):
    other_config = apply_overrides(tiny, [change])
    assert other_config.identity() != tiny.identity()
    assert pair_id(other_config) == pair_id(tiny)


@pytest.mark.parametrize("scaling", ["delayed", "bounded"])
def test_scales_known_before_are_in_the_identity(tiny: Config, scaling: str):
    words = ["fp8.recipe=tensorwise", "fp8.kernels=true", f"fp8.scaling={scaling}"]
    assert apply_overrides(tiny, words).identity()["fp8.scaling"] == scaling


@pytest.mark.parametrize(
    "change, is_same_pair",
    [("run=b", True), ("model.head_size=16", True), ("data.micro_batch=2", False)],
)
def test_runs_of_a_pair_have_the_micro_batch_in_common(
    tiny: Config, change: str, is_same_pair: bool
):
    assert (pair_id(apply_overrides(tiny, [change])) == pair_id(tiny)) is is_same_pair


@pytest.mark.parametrize(
    "start_from, expected",  # parent, its step, whose weights alone it has
    [
        ("none", (None, None, None)),
        ("o/r/checkpoints/step_00000002", ("r", 2, None)),
        ("o/llama/checkpoints/step_00000000", (None, None, "llama")),
        ("o/llama/", (None, None, "llama")),
    ],
)
def test_the_lineage_tells_a_branch_from_a_run_on_anothers_weights(
    tiny: Config, start_from: str, expected: tuple[int | str | None, ...]
):
    config = apply_overrides(tiny, [f"start_from={start_from}"])
    assert tuple(lineage(config).values()) == expected


def test_a_micro_batch_of_auto_counts_as_one_sequence(tiny: Config):
    assert apply_overrides(tiny, ["data.micro_batch=auto"]).accumulation(4) == 4


@pytest.mark.parametrize(
    "body, sentence",
    [
        ("config = 3", "config = Config(...)"),
        ("import nonsense_not_there", "'nonsense_not_there'"),
        ("config = [", "SyntaxError"),
        ("C.OptimConfig(learning_rate=3)", "optim.lr"),
        ("C.OptimConfig()", "'lr'"),
        ("\0", "Error"),
    ],
)
def test_mistakes_in_a_file_get_a_sentence(tmp_path: Path, body: str, sentence: str):
    (tmp_path / "mine.py").write_text(f"import runtime.config as C\n{body}")
    sentence = refused(load_config, tmp_path / "mine.py")
    assert sentence.startswith(f"{tmp_path}/mine.py ") and sentence in sentence
    assert refused(load_config, tmp_path / "mint.py").endswith(f"did you mean {tmp_path}/mine.py?")


def test_a_config_json_is_read_back(tiny: Config):
    config = apply_overrides(tiny, ["data.micro_batch=auto", "checkpoint.at=2"])
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_a_stored_configuration_with_other_keys_is_refused(tiny: Config):
    other_version = {**asdict(tiny), "optim": {"momentum": 1}}
    assert "does not fit this version" in refused(config_from_dict, other_version)


def test_a_folder_without_config_json_is_no_run(tmp_path: Path):
    assert "has no config.json" in refused(read_config, tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("{ half", "is not JSON"),
        ("5", "holds int where an object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "--from-hf FOLDER "),
    ],
)
def test_a_config_json_that_is_none_of_a_run_gets_a_sentence(
    tmp_path: Path, content: str, sentence: str
):
    (tmp_path / "config.json").write_text(content)
    assert sentence.replace("FOLDER", str(tmp_path)) in refused(read_config, tmp_path)


@pytest.mark.parametrize("wrong", ["2", True, 2.0])
def test_a_value_of_another_type_in_a_file_is_refused(tiny: Config, wrong: bool | float | str):
    with pytest.raises(UserError, match=f"model.n_layer={wrong!r} is not int"):
        replace(tiny, model=replace(tiny.model, n_layer=wrong))


def test_help_lists_every_key_in_the_order_of_the_config():
    first_lines = [line for line in help_text().splitlines() if re.match(r"  \w", line)]
    assert [line.split(":")[0].strip() for line in first_lines] == KEYS


def test_help_gives_every_key_a_meaning():
    for cls in SECTIONS.values():
        meanings = field_meanings(cls)
        assert all(meanings[f.name] for f in fields(cls) if not is_dataclass(f.type)), cls


def test_help_spells_out_the_choices():
    page = " ".join(help_text().split())
    assert "fp8.recipe: off | auto | tensorwise | " in page
    assert "optim.schedule: cosine | wsd = 'cosine'" in page


def test_help_of_train_exits_with_0_and_no_config_with_2(capsys: pytest.CaptureFixture[str]):
    lines = (["--help"], ["configs/demo_s_bf16.py", "steps=1", "-h"], [])
    assert [train.main(line) for line in lines] == [0, 0, 2]


@dataclass(frozen=True, kw_only=True)
class Options:
    n: int = 1  # how many
    run: str  # folder of a run
    text: str = ""
    top_k: int | None = 5
    kind: Literal["a", "bb"] = "a"
    serve: bool = False
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "words, expected",
    [
        (["out/x"], {}),
        (["run=out/x"], {}),
        (["n=2", "out/x"], {"n": 2}),
        (["--n", "2", "out/x", "--top-k=none", "--serve"], {"n": 2, "top_k": None, "serve": True}),
        (["out/x", "a,b", "c d = 3", "serve=0"], {"names": ("a,b", "c d = 3")}),
        (["out/x", "names=a,b"], {"names": ("a", "b")}),
        (["out/x", "a=b.txt"], {"names": ("a=b.txt",)}),
        (["out/x", "text=n=3\nk=v", "kind=bb"], {"text": "n=3\nk=v", "kind": "bb"}),
        *[
            (words.split(), sentence)
            for words, sentence in (
                ("n=2", "run is missing"),
                ("x n=two", "n='two'"),
                ("x topk=3", "did you mean 'top_k'?"),
                ("x --qq", "there are: n, run"),
                ("x kind=b", "did you mean 'bb'?"),
                ("x n=1 n=2", "n is given twice"),
                ("x --n --serve", "--n needs a value"),
                ("x text=", "--text needs a value"),
                ("x names=y z", "'z' is one word too many"),
                ("x a=b", "there is no key 'a'"),
            )
        ],
    ],
)
def test_a_command_line_is_read_in_every_spelling_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected
):
    monkeypatch.chdir(tmp_path)
    for name in "a=b.txt", "n=2":  # files by these names; the second is a key first
        (tmp_path / name).write_text("")
    if isinstance(expected, str):
        assert expected in refused(read_options, Options, words, POSITIONAL)
    else:
        assert read_options(Options, words, POSITIONAL) == Options(run="out/x", **expected)


def test_a_full_memory_needs_no_traceback(capsys: pytest.CaptureFixture[str]):
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory\n"))
    assert command("", Options, *POSITIONAL)(full)(["out/x"]) == 1
    assert (sentence := capsys.readouterr().err).startswith(
        "the memory is full (C"
    ) and sentence.count("\n") == 1


VALUES = [
    "",
    "0",
    "1",
    "-1",
    "2",
    "3.5",
    "1e3",
    "1e400",
    "nan",
    "-inf",
    "1_0",
    "٣",
    "9" * 5000,
    "1e18",
    "true",
    "none",
    "[",
    "[]",
    "(1,",
    "{}",
    "[[1]]",
    "1,,2",
    "a:b",
    "web:1",
    "web:0",
    "web:1e999",
    "../../etc/passwd",
    "\x00",
    "a\nb",
    "\ud800",
    "x" * 10_000,
    "layers.[0",
    "tensorwise",
    "auto",
    "byte",
    "10:15",
    "out/run/checkpoints/step_00000001",
]
UNKNOWN = [
    "",
    ".",
    "model",
    "model.",
    ".lr",
    "optim.lr.x",
    "optim.__class__",
    "model.params_total",
    "OPTIM.LR",
    "\x00",
    "é",
]
POSITIONAL = "run", "names"  # of Options


HOSTILE_LINES = [
    [""],
    ["/"],
    ["\x00"],
    ["--plan"],
    ["optim.lr=1"],
    ["nothing.py", "--plan"],
    *(["mine.py", f"{key}=1"] for key in UNKNOWN),
    ["mine.py", "--plan", "h100", "--plan"],
]


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=ascii)
def test_no_command_line_is_a_traceback(
    tiny: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
):
    write_config(tiny, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    assert train.main(line) == 2
    assert capsys.readouterr().err.startswith("train.py: ")
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


def accepts(config: Config, key: str, value) -> bool:
    """Whether a key may have this value, which every run then writes as JSON."""
    try:
        changed = apply_overrides(config, [f"{key}={value}"])
    except UserError:
        return False
    json.dumps(asdict(changed), allow_nan=False)
    return True


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_a_key_is_a_traceback(tiny: Config, key: str):
    for value in VALUES:
        accepts(tiny, key, value)


def test_no_number_but_the_seed_may_be_negative(tiny: Config):
    texts = ["out", "data.dir", "data.tokenizer", "eval.tasks"]
    assert [key for key in KEYS if accepts(tiny, key, "-1")] == ["seed", *texts]


def numeric_fields(cls: type) -> list:
    """Fields of a dataclass that may hold a number."""
    hints = get_type_hints(cls)
    return [f for f in fields(cls) if {int, float} & set(union_members(hints[f.name]))]


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "model"])
def test_every_number_has_bounds_beside_its_field(section: str):
    """any_number() where it has none by choice."""
    unbounded = [f.name for f in numeric_fields(SECTIONS[section]) if "bounds" not in f.metadata]
    assert not unbounded


@pytest.mark.parametrize("field", numeric_fields(SECTIONS["model"]), ids=lambda f: f.name)
def test_every_number_of_a_model_is_positive(tiny: Config, field):
    """model.py imports nothing but torch: one rule there stands for all bounds."""
    model = replace(tiny.model, **{field.name: 0})
    assert f"model.{field.name}=0 must be a positive" in refused(lambda: replace(tiny, model=model))


@pytest.mark.parametrize(
    "words, ranks, remedy",
    [
        ("data.micro_batch=8", 4, "set data.micro_batch=4, or"),
        ("data.micro_batch=8 data.tokens_per_step=768", 4, "set data.micro_batch=6, or"),
        ("data.micro_batch=4 data.ramp=0.4:0.25", 4, "set data.micro_batch=1, or"),
        ("data.micro_batch=1", 3, "change it, or"),
    ],
)
def test_steps_that_ranks_cannot_share_are_refused_with_what_they_can(tiny, words, ranks, remedy):
    config = apply_overrides(tiny, ["model.n_ctx=32", *words.split()])
    with pytest.raises(UserError, match=f"cannot be shared by {ranks} ranks .*; {remedy} change"):
        config.accumulation(ranks)


def test_a_mistyped_micro_batch_is_answered_without_counting_down_from_it(tiny: Config) -> None:
    with pytest.raises(UserError, match="; set data.micro_batch=16, or change"):
        apply_overrides(tiny, ["model.n_ctx=32", "data.micro_batch=1000000000000"])


@pytest.mark.parametrize(
    "bounds, inside, outside",
    [
        (above_zero, [1e-300, 1e300], [0, -1]),
        (lambda: within(0, 1), [0, 0.5, 1], [-1e-9, 1 + 1e-9]),
        (any_number, [-1e300, 0, 1e300], []),
    ],
)
def test_bounds_by_hand(bounds: Callable[..., Any], inside: list[float], outside: list[float]):
    number = bounds().metadata["bounds"]
    assert [number.problem("x", value) for value in inside] == [None] * len(inside)
    assert all(number.problem("x", value) for value in outside)


@dataclass(frozen=True, kw_only=True)
class LaterOptim(OptimConfig):
    """The section as a later version has it, with a key more."""

    key_that_came_later: float = within(0, 1, 0.0)


@pytest.mark.parametrize("value, added", [(0.0, {}), (0.1, {"optim.key_that_came_later": 0.1})])
def test_a_key_that_comes_later_leaves_the_identity_of_older_runs_alone(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, value: float, added: dict[str, float]
):
    monkeypatch.setitem(DEFAULTS, "optim.key_that_came_later", 0.0)
    later = replace(tiny, optim=LaterOptim(**asdict(tiny.optim), key_that_came_later=value))
    assert later.identity() == tiny.identity() | added


def test_a_config_json_of_the_first_version_is_the_run_of_today(tiny: Config):
    """It lacks each key that came later; its run is resumed by the same command."""
    older = asdict(tiny)
    for key in DEFAULTS.keys() - FIRST_KEYS:
        section, _, name = key.rpartition(".")
        if section in ("model", "data", "fp8", "optim") and key not in FREE_KEYS:
            del older[section][name]
    del older["optim"]["momentum"]
    assert config_from_dict(older).identity() == tiny.identity()
    assert not {"kind", "momentum"} & older["optim"].keys(), "as it was"


def test_the_keys_of_the_first_version_are_history():
    """A key more here, and no older run would match."""
    assert digest(sorted(FIRST_KEYS))[:8] == "1a7c73ff"


# Keys of the identity that came after the first version -> what the code did before each of them.
DONE_BEFORE = {
    "model.head_size": None,  # n_embd / n_head
    "optim.kind": "adamw",
    "optim.z_loss": 0.0,
    "data.ramp": None,
    "fp8.scaling": "current",
    "fp8.fast_backward": False,
    "data.document_mask": False,
}


LATER_KEYS = [
    key
    for key in sorted(DEFAULTS.keys() - FIRST_KEYS - FREE_KEYS)
    if key.partition(".")[0] in ("model", "data", "fp8", "optim")  # on which weights depend
]


@pytest.mark.parametrize("key", LATER_KEYS)
def test_the_default_of_a_later_key_is_what_the_code_did_before(key: str):
    """A config.json of an older version lacks the key, and its run goes on with the default: any
    other value than what trained its first steps would change it without a word."""
    assert key in DONE_BEFORE, f"{key} is new: name in DONE_BEFORE what the code did without it"
    assert DEFAULTS[key] == DONE_BEFORE[key], f"{key}: runs of before it would go on differently"


def test_a_change_from_a_default_names_the_default(tiny: Config):
    """Not None, which is no value of these keys."""
    asked = changed(tiny, "optim.kind=muon optim.momentum=0.9 data.document_mask=true")
    assert sorted(changed_keys(tiny.identity(), asked.identity())) == [
        "data.document_mask was False, now True",
        "optim.kind was adamw, now muon",
        "optim.momentum was 0.95, now 0.9",
    ]
    assert "optim.kind was muon, now adamw" in changed_keys(asked.identity(), tiny.identity())


def test_what_only_muon_has_is_no_change_of_its_own(tiny: Config):
    asked = changed(tiny, "optim.kind=muon")
    assert changed_keys(tiny.identity(), asked.identity()) == ["optim.kind was adamw, now muon"]


def test_ranks_agree_on_every_key_but_paths(tiny: Config):
    assert set(KEYS) - set(tiny.settings_of_job()) == PATHS_OF_MACHINE - {"start_from"}


def test_each_machine_may_have_paths_of_its_own():
    paths = {key for key in KEYS if annotation(key) in (FilePath, FilePath | None)}
    assert paths - {"checkpoint.copy_to"} == PATHS_OF_MACHINE, "a URL, the same everywhere"


def test_ranks_agree_on_the_step_to_start_from_wherever_it_lies(tiny: Config):
    here, there, later = (
        replace(tiny, start_from=f"{folder}/trunk/checkpoints/step_{step:08d}").settings_of_job()
        for folder, step in (("out", 4), ("/mnt/out", 4), ("out", 5))
    )
    assert here == there != later
