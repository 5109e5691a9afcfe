"""Configurations and command lines: values and refusals by hand, then hostile input by the hundred,
never a traceback."""

import contextlib
import json
import re
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Literal, get_type_hints
from unittest import mock

import pytest
import torch

import train
from lib.bounds import above_zero, any_number, within
from lib.command import command, read_options
from lib.errors import UserError
from lib.help import field_meanings
from lib.values import union_members
from runtime.config import (
    DEFAULTS,
    FIRST_KEYS,
    FREE_KEYS,
    KEYS,
    SECTIONS,
    FP8Config,
    OptimConfig,
    apply_overrides,
    config_from_dict,
    help_text,
    load_config,
    read_config,
)
from runtime.log import digest, lineage, pair_id
from tests.conftest import ROOT, write_config

ALL_CONFIGS = sorted(
    p
    for p in (ROOT / "configs").glob("*.py")
    if p.stem not in ("mixture", "sources") and not p.stem.startswith("study_")
)


def refused(call, *arguments) -> str:
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


@pytest.mark.parametrize("path", ALL_CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_what_its_name_says(path):
    config = load_config(path)
    m = config.model
    assert (pair_id(config), digest(config.identity())[:8]) == IDENTITIES.get(path.stem, mock.ANY)
    assert IDENTITIES.keys() <= {path.stem for path in ALL_CONFIGS}
    assert config.run == path.stem and (config.fp8.recipe != "off") == path.stem.endswith("_fp8")
    bf16 = asdict(load_config(path.with_name(path.name.replace("_fp8", "_bf16"))))
    assert {key for key, value in asdict(config).items() if value != bf16[key]} <= {"run", "fp8"}
    if told := re.search(r"20 x ([\d,]+) (?:parameters )?= .* = ([\d,]+) steps", path.read_text()):
        assert [int(number.replace(",", "")) for number in told.groups()] == [
            m.params_total,
            config.total_steps,
        ]
    if path.stem.startswith("gpt"):
        assert SIZES[path.stem.split("_")[0]] == (
            m.n_layer,
            m.n_embd,
            m.n_ffn,
            m.n_head,
            round(m.params_total / 1e6),
        )
        assert config.accumulation(1) == 8 * config.accumulation(8)
    if config.start_from is None:
        # there 20 tokens per parameter outside the vocabulary
        is_h100 = path.stem.startswith("h100_")
        assert config.tokens_per_param == (None if is_h100 else 20)
        counted = m.params_total - m.vocab_padded * m.n_embd * is_h100
        assert (
            (config.total_steps - 1) * config.data.tokens_per_step
            < 20 * counted
            <= config.total_tokens
        )


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
def test_overrides_are_parsed_by_annotation(tiny, text, value):
    config = apply_overrides(tiny, [text, *["fp8.recipe=tensorwise"] * text.startswith("fp8.skip")])
    found = attrgetter(text.removeprefix("--").partition("=")[0])(config)
    assert found == value and type(found) is type(value)


COMPILED = "fp8.recipe=tensorwise fp8.head=true fp8.kernels=true parallel.compile=true "


# told: words that the sentence must hold; None: it is allowed
@pytest.mark.parametrize(
    "overrides, told",
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
        ("data.mixture=web:1,code:1e-9", "positive weight"),
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
        # 96 at n_ctx 64, 4 sequences: 10 times the head's gradient, compiled by torch 2.13 on a CPU.
        # What is advised must be allowed.
        (COMPILED + "model.loss_chunk=48", "take 32, or none"),
        *[
            (COMPILED + f"model.loss_chunk=48 {other}", None)
            for other in ("fp8.kernels=false", "parallel.compile=false")
        ],
        *[(COMPILED + f"model.loss_chunk={chunk}", None) for chunk in (16, 32, 64, "none")],
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tiny, overrides, told):
    if told is None:
        apply_overrides(tiny, overrides.split())
    else:
        assert re.search(told, refused(apply_overrides, tiny, overrides.split()))


@pytest.mark.parametrize("kernels", ["auto", True, False])
@pytest.mark.parametrize("recipe", ["off", "tensorwise"])
def test_who_casts_is_no_part_of_a_run_and_stored_choices_load(tiny, recipe, kernels):
    if recipe == "off" and kernels is True:
        return  # which converts nothing
    stored = json.loads(json.dumps(asdict(apply_overrides(tiny, [f"fp8.recipe={recipe}"]))))
    stored["fp8"]["kernels"] = kernels
    loaded = config_from_dict(stored)
    assert loaded.fp8.kernels == kernels
    assert loaded.identity() == apply_overrides(tiny, [f"fp8.recipe={recipe}"]).identity()


@pytest.mark.parametrize("kernels, label", [("auto", "tensorwise"), (False, "tensorwise")])
def test_an_arm_is_called_by_its_recipe_whoever_casts(kernels, label):
    assert FP8Config(recipe="tensorwise", kernels=kernels).label == label


def test_identity_holds_what_the_weights_depend_on_and_nothing_else(tiny):
    free = [
        "data.dir=x",
        "data.micro_batch=auto",
        "data.max_epochs=3",
        "model.loss_chunk=64",
        "run=b",
        "out=c",
        "eval.every=2",
        "parallel.recompute=true",
        "probe.every=2",
    ]
    assert (
        apply_overrides(tiny, free).identity() == tiny.identity()
        and apply_overrides(tiny, free).accumulation(4) == 4
    )
    for how, held in ("current", None), ("delayed", "delayed"):  # a key that came later
        kernels = apply_overrides(
            tiny, ["fp8.recipe=tensorwise", "fp8.kernels=true", f"fp8.scaling={how}"]
        )
        assert kernels.identity().get("fp8.scaling") == held
    equal_share = apply_overrides(
        tiny, [f"model.head_size={tiny.model.n_embd // tiny.model.n_head}"]
    )
    assert equal_share.identity() == tiny.identity() and pair_id(equal_share) == pair_id(tiny)
    for change in (
        "seed=1",
        "optim.eps=1e-9",
        "model.qk_norm=true",
        "model.head_size=64",
        "fp8.recipe=rowwise",
        "data.tokens_per_step=256",
        "steps=7",
        "data.mixture=web:1",
        "start_from=o/r/checkpoints/step_00000002",
    ):
        other = apply_overrides(tiny, [change])
        assert other.identity() != tiny.identity(), change
        # a branch ends as from scratch
        assert (pair_id(other) == pair_id(tiny)) == (change[:3] in ("fp8", "sta")), change
    llama = apply_overrides(tiny, ["start_from=o/llama/checkpoints/step_00000000"])
    assert pair_id(llama) != pair_id(tiny), "weights that came from elsewhere count"
    assert apply_overrides(tiny, ["start_from=o/llama/"]).identity() == llama.identity(), (
        "a run's weights alone"
    )
    assert [tuple(lineage(config).values()) for config in (tiny, other, llama)] == [
        (None, None, None),
        ("r", 2, None),
        (None, None, "llama"),
    ]
    assert (
        pair_id(apply_overrides(tiny, ["run=b"]))
        == pair_id(tiny)
        != pair_id(apply_overrides(tiny, ["data.micro_batch=2"]))
    )


@pytest.mark.parametrize(
    "body, told",
    [
        ("config = 3", "config = Config(...)"),
        ("import nonsense_not_there", "'nonsense_not_there'"),
        ("config = [", "SyntaxError"),
        ("C.OptimConfig(learning_rate=3)", "optim.lr"),
        ("C.OptimConfig()", "'lr'"),
        ("\0", "Error"),
    ],
)
def test_mistakes_in_a_file_get_a_sentence(tmp_path, body, told):
    (tmp_path / "mine.py").write_text(f"import runtime.config as C\n{body}")
    said = refused(load_config, tmp_path / "mine.py")
    assert said.startswith(f"{tmp_path}/mine.py ") and told in said
    assert refused(load_config, tmp_path / "mint.py").endswith(f"did you mean {tmp_path}/mine.py?")


def test_config_json_is_read_back_or_refused(tiny, tmp_path):
    config = apply_overrides(tiny, ["data.micro_batch=auto", "checkpoint.at=2"])
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config
    assert "does not fit this version" in refused(
        config_from_dict, {**asdict(tiny), "optim": {"momentum": 1}}
    )
    assert "has no config.json" in refused(read_config, tmp_path / "nowhere")
    older = asdict(tiny)
    del older["model"]["head_size"]
    assert config_from_dict(older) == tiny, "a run of before the key"
    for content, told in (
        ("{ half", "is not JSON"),
        ("5", "holds int where an object"),
        ('{"architectures": ["LlamaForCausalLM"]}', f"--from-hf {tmp_path} "),
    ):
        (tmp_path / "config.json").write_text(content)
        assert told in refused(read_config, tmp_path)
    for wrong in "2", True, 2.0:  # in a file of Python
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


def test_help_of_train_exits_with_0_and_no_config_with_2(capsys):
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
            (words.split(), told)
            for words, told in (
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
def test_a_command_line_is_read_in_every_spelling_and_a_mistake_gets_a_sentence(
    tmp_path, monkeypatch, words, expected
):
    monkeypatch.chdir(tmp_path)
    for name in "a=b.txt", "n=2":  # files by these names; the second is a key first
        (tmp_path / name).write_text("")
    if isinstance(expected, str):
        assert expected in refused(read_options, Options, words, POSITIONAL)
    else:
        assert read_options(Options, words, POSITIONAL) == Options(run="out/x", **expected)


def test_a_full_memory_needs_no_traceback(capsys):
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory\n"))
    assert command("", Options, *POSITIONAL)(full)(["out/x"]) == 1
    assert (said := capsys.readouterr().err).startswith("the memory is full (C") and said.count(
        "\n"
    ) == 1


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


def test_no_command_line_and_no_value_of_any_key_is_a_traceback_and_no_number_but_the_seed_is_negative(
    tiny, tmp_path, monkeypatch, capsys
):
    write_config(tiny, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    for line in [
        [""],
        ["/"],
        ["\x00"],
        ["--plan"],
        ["optim.lr=1"],
        ["nothing.py", "--plan"],
        *(["mine.py", f"{key}=1"] for key in UNKNOWN),
        ["mine.py", "--plan", "h100", "--plan"],
    ]:
        assert train.main(line) == 2 and capsys.readouterr().err.startswith("train.py: "), line
        assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}, line
    accepted = {value: [] for value in VALUES}
    for key in KEYS:
        for value in VALUES:
            with contextlib.suppress(UserError):
                # what every run writes
                json.dumps(asdict(apply_overrides(tiny, [f"{key}={value}"])), allow_nan=False)
                accepted[value].append(key)
    assert accepted["-1"] == ["seed", "out", "data.dir", "data.tokenizer"]


def numeric_fields(cls: type) -> list:
    """Fields of a dataclass that may hold a number."""
    hints = get_type_hints(cls)
    return [f for f in fields(cls) if {int, float} & set(union_members(hints[f.name]))]


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "model"])
def test_every_number_has_bounds_beside_its_field(section):
    """any_number() where it has none by choice."""
    unbounded = [f.name for f in numeric_fields(SECTIONS[section]) if "bounds" not in f.metadata]
    assert not unbounded


@pytest.mark.parametrize("field", numeric_fields(SECTIONS["model"]), ids=lambda f: f.name)
def test_every_number_of_a_model_is_positive(tiny, field):
    """model.py imports nothing but torch: one rule there stands for all bounds."""
    model = replace(tiny.model, **{field.name: 0})
    assert f"model.{field.name}=0 must be a positive" in refused(lambda: replace(tiny, model=model))


@pytest.mark.parametrize(
    "bounds, inside, outside",
    [
        (above_zero, [1e-300, 1e300], [0, -1]),
        (lambda: within(0, 1), [0, 0.5, 1], [-1e-9, 1 + 1e-9]),
        (any_number, [-1e300, 0, 1e300], []),
    ],
)
def test_bounds_by_hand(bounds, inside, outside):
    number = bounds().metadata["bounds"]
    assert [number.problem("x", value) for value in inside] == [None] * len(inside)
    assert all(number.problem("x", value) for value in outside)


@dataclass(frozen=True, kw_only=True)
class LaterOptim(OptimConfig):
    """The section as a later version has it, with a key more."""

    key_that_came_later: float = within(0, 1, 0.0)


@pytest.mark.parametrize("value, added", [(0.0, {}), (0.1, {"optim.key_that_came_later": 0.1})])
def test_a_key_that_comes_later_leaves_the_identity_of_older_runs_alone(
    tiny, monkeypatch, value, added
):
    monkeypatch.setitem(DEFAULTS, "optim.key_that_came_later", 0.0)
    later = replace(tiny, optim=LaterOptim(**asdict(tiny.optim), key_that_came_later=value))
    assert later.identity() == tiny.identity() | added


def test_a_config_json_of_the_first_version_is_the_run_of_today(tiny):
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
    "fp8.scaling": "current",
    "fp8.fast_backward": False,
}


LATER_KEYS = [
    key
    for key in sorted(DEFAULTS.keys() - FIRST_KEYS - FREE_KEYS)
    if key.partition(".")[0] in ("model", "data", "fp8", "optim")  # on which weights depend
]


@pytest.mark.parametrize("key", LATER_KEYS)
def test_the_default_of_a_later_key_is_what_the_code_did_before(key):
    """A config.json of an older version lacks the key, and its run goes on with the default: any
    other value than what trained its first steps would change it without a word."""
    assert key in DONE_BEFORE, f"{key} is new: name in DONE_BEFORE what the code did without it"
    assert DEFAULTS[key] == DONE_BEFORE[key], f"{key}: runs of before it would go on differently"
