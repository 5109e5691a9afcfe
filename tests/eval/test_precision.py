"""eval/precision.py, FP8 in eval/sample.py and eval/harness.py, on two real runs, one trained in
each precision."""

import contextlib
import io
import math
import os
import shutil
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import train
from eval import harness, inference, precision, sample
from eval.inference import Inference
from fp8.probe import statistics
from fp8.recipes import RECIPES
from lib.errors import UserError
from lib.files import read_rows
from model import GPT, KVCache
from runtime.checkpoint import load_model
from runtime.config import FP8Config, LogConfig, OptimConfig, read_config
from runtime.data import Data
from runtime.tokenizer import load_tokenizer
from tests.conftest import tiny_config, write_config
from tests.fp8.test_linears import NATIVE, OPERANDS, quantised
from tests.helpers.eval_runs import call, greedy_text, refused
from tests.helpers.scaling_runs import edit
from tests.helpers.scaling_runs import strict as read_json

LINEARS_OF_A_BLOCK = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
EIGHT = [f"layers.{i}.{name}" for i in range(2) for name in LINEARS_OF_A_BLOCK]
OWN_CHOICE = {name for name in EIGHT if not name.endswith("attn.out")} | {"head"}


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 run and an FP8 run with a choice of Linears of its own, as train.py leaves them. They
    are only read; what is written goes into a copy."""
    folder = tmp_path_factory.mktemp("inference")
    config = replace(
        tiny_config(data_dir, folder / "out"),
        run="bf16",
        steps=8,
        optim=OptimConfig(lr=3e-2),
        log=LogConfig(every=100),
    )
    own_choice = FP8Config(recipe="tensorwise", skip=("attn.out",), head=True)
    for run_config in (config, replace(config, run="fp8", fp8=own_choice)):
        file = write_config(run_config, folder / f"{run_config.run}.py")
        assert train.main([str(file)]) == 0
    return folder / "out"


def copy_of(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the runs that all tests of a fixture share."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "out")


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may change."""
    return shutil.copytree(trained, tmp_path / "out")


@dataclass
class Printed:
    out: str
    err: str


def printed_by(command: ModuleType, *arguments: object) -> Printed:
    """What a command prints, which must succeed. For fixtures that several tests share, where
    capsys cannot be had."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ),  # which the harness changes
    ):
        call(command, *arguments)
    return Printed(out.getvalue(), err.getvalue())


def load(run: Path, recipe: str = "off") -> Inference:
    return inference.load_for_inference(str(run), "cpu", "bfloat16", recipe)


# ------------------------------------------------------------------------------------ the logits


def by_hand(run: Path, recipe: str, names: Iterable[str]) -> GPT:
    """The run's plain model, the named Linears replaced by a matmul in fp64, both operands
    quantised without any code of ours."""
    model, _ = load_model(run)
    for name in names:
        module = model.get_submodule(name)
        module.forward = types.MethodType(forward_by_hand(recipe), module)
    return model


def forward_by_hand(recipe: str) -> Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor]:
    of_x, of_weight, *_ = OPERANDS[recipe]

    def forward(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        rows, _ = quantised(x.reshape(-1, x.size(-1)), of_x, 1)
        weight, _ = quantised(linear.weight, of_weight, 1)
        y = rows @ weight.T
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    return forward


def logits_of_the_whole(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).double()


def logits_with_cache(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """(B, T, V): two tokens at once, then one at a time from the cache."""
    cache = KVCache()
    parts = (ids[:, :2], *ids[:, 2:].split(1, 1))
    return torch.cat([model(part, cache=cache) for part in parts], 1).double()


def logits_of_one_row_with_cache(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    return logits_with_cache(model, ids[:1])


@dataclass
class Converted:
    """The BF16 run's model in a recipe: as eval loads it, converted by hand, and not converted."""

    loaded: Inference
    by_hand: GPT
    plain: GPT


@pytest.fixture(scope="module", params=NATIVE)
def converted(trained: Path, request: pytest.FixtureRequest) -> Converted:
    run = trained / "bf16"
    plain, _ = load_model(run)
    return Converted(load(run, request.param), by_hand(run, request.param, EIGHT), plain)


def test_a_recipe_converts_the_linears_of_all_blocks(converted: Converted) -> None:
    layers = converted.loaded.layers
    assert [layer.name for layer in layers if layer.recipe] == EIGHT


@pytest.mark.parametrize(
    "logits_of", [logits_of_the_whole, logits_with_cache, logits_of_one_row_with_cache]
)
@torch.no_grad()
def test_logits_are_those_of_explicit_quantisation(
    logits_of: Callable[[GPT, torch.Tensor], torch.Tensor], converted: Converted
) -> None:
    """Their distance is small beside the whole effect of the quantisation."""
    ids = torch.randint(80, (3, 12), generator=torch.Generator().manual_seed(0))
    reference = logits_of(converted.by_hand, ids)
    distance = (logits_of(converted.loaded.model, ids) - reference).norm()
    effect = (logits_of(converted.plain, ids) - reference).norm()
    assert distance < 0.25 * effect


def test_an_fp8_linear_quantises_its_fp32_weight_as_in_training(converted: Converted) -> None:
    """No BF16 copy of it. What a Linear quantises: tests/fp8/test_linears.py."""
    weight = converted.plain.layers[1].mlp.down.weight
    assert weight.dtype == torch.float32
    assert torch.equal(converted.loaded.model.layers[1].mlp.down.weight, weight)


# ---------------------------------------------------------------------------- dtypes of weights


@pytest.fixture(scope="module")
def own_choice(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Inference:
    """The FP8 run in its own recipe; as if trained with fp8.all_gather, which one process need not
    do."""
    run = copy_of(trained, tmp_path_factory) / "fp8"
    config = read_json(run / "config.json")
    edit(run / "config.json", fp8=config["fp8"] | {"all_gather": True})
    return load(run, "tensorwise")


def test_the_runs_own_recipe_converts_its_own_choice_of_linears(own_choice: Inference) -> None:
    assert {layer.name for layer in own_choice.layers if layer.recipe} == OWN_CHOICE


def test_a_converted_head_stays_tied_to_the_embedding(own_choice: Inference) -> None:
    assert own_choice.model.head.weight is own_choice.model.wte.weight


def test_only_weights_of_converted_linears_are_stored_in_fp32(own_choice: Inference) -> None:
    """The head's is the embedding's."""
    in_fp32 = set()
    for name, p in own_choice.model.named_parameters():
        if p.dtype == torch.float32:
            in_fp32.add(name.removesuffix(".weight"))
    assert in_fp32 == OWN_CHOICE - {"head"} | {"wte"}


def test_weights_outside_the_converted_linears_are_stored_in_bf16(own_choice: Inference) -> None:
    dtypes = {p.dtype for p in own_choice.model.parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}


@pytest.fixture(scope="module")
def in_bf16(trained: Path) -> GPT:
    return load(trained / "bf16").model


def test_without_fp8_all_weights_are_stored_in_bf16(in_bf16: GPT) -> None:
    assert {p.dtype for p in in_bf16.parameters()} == {torch.bfloat16}


def test_rope_tables_stay_in_fp32(in_bf16: GPT) -> None:
    assert in_bf16.cos.dtype == torch.float32


def test_stored_bf16_gives_the_numbers_of_weights_cast_at_use(trained: Path, in_bf16: GPT) -> None:
    cast_at_use, _ = load_model(trained / "bf16", compute_dtype=torch.bfloat16)
    ids = torch.arange(20)[None]
    assert torch.equal(in_bf16(ids), cast_at_use(ids))


# -------------------------------------------------------------- eval.precision on the FP8 run


@dataclass
class Measured:
    """What eval.precision wrote and printed of a run."""

    run: Path
    record: dict[str, Any]
    out: str

    @property
    def summary(self) -> dict[str, Any]:
        return read_json(self.run / "summary.json")


def measure(run: Path, *arguments: str) -> Measured:
    printed = printed_by(precision, run, *arguments)
    return Measured(run, read_json(run / "eval/precision.json"), printed.out)


@pytest.fixture(scope="module")
def of_fp8_run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure(copy_of(trained, tmp_path_factory) / "fp8", "recipes=tensorwise,rowwise")


def test_the_loss_in_bf16_is_that_which_training_reported(of_fp8_run: Measured) -> None:
    assert of_fp8_run.record["bf16"]["loss"] == of_fp8_run.summary["loss_bf16"]


def test_the_error_in_bf16_is_that_which_training_reported(of_fp8_run: Measured) -> None:
    assert of_fp8_run.record["bf16"]["loss_se"] == of_fp8_run.summary["loss_bf16_se_seq"]


def test_the_loss_in_the_runs_recipe_is_that_which_training_reported(
    of_fp8_run: Measured,
) -> None:
    assert of_fp8_run.record["fp8"]["tensorwise"]["loss"] == of_fp8_run.summary["loss_as_trained"]


def test_the_losses_in_fp8_and_bf16_differ(of_fp8_run: Measured) -> None:
    assert of_fp8_run.summary["loss_as_trained"] != of_fp8_run.summary["loss_bf16"]


def test_the_runs_own_recipe_is_measured_on_its_own_choice_of_linears(
    of_fp8_run: Measured,
) -> None:
    layers = of_fp8_run.record["fp8"]["tensorwise"]["layers"]
    assert set(layers) == set(of_fp8_run.summary["precision"]["layers_converted"])


def test_another_recipe_is_measured_on_its_defaults(of_fp8_run: Measured) -> None:
    """Without the head."""
    assert len(of_fp8_run.record["fp8"]["rowwise"]["layers"]) == 8


@dataclass
class Gap:
    mean: float
    error: float


@pytest.fixture(scope="module")
def paired_gap(of_fp8_run: Measured) -> Gap:
    """FP8 minus BF16, from the sequences' losses that training wrote."""
    mean, variance = 0.0, 0.0
    with np.load(of_fp8_run.run / "val_losses.npz") as losses:
        gaps = (losses["as_trained"] - losses["bf16"]) / 32  # per token
        for source, weight in (0, 0.25), (1, 0.75):  # in sorted order: code, web
            gaps_of_source = gaps[losses["source"] == source]
            mean += weight * gaps_of_source.mean()
            variance += weight**2 * gaps_of_source.var(ddof=1) / len(gaps_of_source)
    return Gap(mean, math.sqrt(variance))


def test_the_difference_is_the_mean_over_the_sequences(
    of_fp8_run: Measured, paired_gap: Gap
) -> None:
    tensorwise = of_fp8_run.record["fp8"]["tensorwise"]
    assert tensorwise["difference"] == pytest.approx(paired_gap.mean, rel=1e-6)


def test_the_error_of_the_difference_is_paired(of_fp8_run: Measured, paired_gap: Gap) -> None:
    tensorwise = of_fp8_run.record["fp8"]["tensorwise"]
    assert tensorwise["difference_se"] == pytest.approx(paired_gap.error, rel=1e-6)


def test_the_difference_in_percent_is_of_the_loss_in_bf16(
    of_fp8_run: Measured, paired_gap: Gap
) -> None:
    tensorwise = of_fp8_run.record["fp8"]["tensorwise"]
    percent = 100 * paired_gap.mean / of_fp8_run.summary["loss_bf16"]
    assert tensorwise["difference_percent"] == pytest.approx(percent, rel=1e-6)


def test_a_paired_error_is_far_below_that_of_the_loss(
    of_fp8_run: Measured, paired_gap: Gap
) -> None:
    assert paired_gap.error < of_fp8_run.record["bf16"]["loss_se"] / 5


def test_the_table_has_the_difference_with_its_error(of_fp8_run: Measured, paired_gap: Gap) -> None:
    assert f"{paired_gap.mean:+.5f} ± {paired_gap.error:.5f} |" in of_fp8_run.out


def test_emulation_is_said(of_fp8_run: Measured) -> None:
    assert "fp8: emulated on this CPU" in of_fp8_run.out


# -------------------------------------------------- eval.precision on the BF16 run, its probes


PROBED = ["tensorwise", "cscale", "mxfp8"]


@pytest.fixture(scope="module")
def of_bf16_run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    recipes = ",".join([*PROBED, "auto"])
    run = copy_of(trained, tmp_path_factory) / "bf16"
    return measure(run, f"recipes={recipes}", "micro_batch=5")


def probe_rows(measured: Measured, recipe: str) -> list[dict[str, Any]]:
    return read_rows(measured.run / "eval" / f"probe_{recipe}.jsonl")


@pytest.mark.parametrize(
    "key, value", [("step", 8), ("micro_batch", 5), ("sequences", {"code": 10, "web": 10})]
)
def test_the_record_says_what_was_evaluated(key: str, value: Any, of_bf16_run: Measured) -> None:
    assert of_bf16_run.record[key] == value


def test_auto_converts_nothing_on_a_cpu(of_bf16_run: Measured) -> None:
    """No timings of a CPU are known, by which it would choose."""
    assert of_bf16_run.record["fp8"]["auto"]["difference"] == 0


def test_a_recipe_that_converts_nothing_is_said_to_be_bf16(of_bf16_run: Measured) -> None:
    assert "THIS RUN IS BF16" in of_bf16_run.out


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probe_has_a_row_each_linear_and_each_block(recipe: str, of_bf16_run: Measured) -> None:
    rows = probe_rows(of_bf16_run, recipe)
    assert [row.get("layer", row.get("block")) for row in rows] == [*EIGHT, 0, 1]


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probes_rows_are_of_the_checkpoints_step(recipe: str, of_bf16_run: Measured) -> None:
    assert {row["step"] for row in probe_rows(of_bf16_run, recipe)} == {8}


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probes_row_holds_nothing_of_gradients(recipe: str, of_bf16_run: Measured) -> None:
    """What a row's numbers are: tests/fp8/test_probe.py."""
    origin = {"schema_version", "kind", "step", "layer", "recipe", "evaluated_in"}
    for row in probe_rows(of_bf16_run, recipe)[:8]:
        assert row.keys() == origin | {"weight", "activation", "output_sqnr"}


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probes_row_names_the_recipe(recipe: str, of_bf16_run: Measured) -> None:
    for row in probe_rows(of_bf16_run, recipe)[:8]:
        assert row["recipe"] == recipe
        assert row["evaluated_in"] == recipe


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probe_is_of_the_runs_own_weights(recipe: str, of_bf16_run: Measured) -> None:
    model, _ = load_model(of_bf16_run.run)
    for row in probe_rows(of_bf16_run, recipe)[:8]:
        assert row["weight"]["amax"] == model.get_submodule(row["layer"]).weight.abs().max()


@pytest.mark.parametrize("recipe", PROBED)
def test_a_probe_has_seen_activations(recipe: str, of_bf16_run: Measured) -> None:
    for row in probe_rows(of_bf16_run, recipe)[:8]:
        assert row["activation"]["amax"]


def test_sources_take_turns_in_the_batch_that_is_probed(of_bf16_run: Measured) -> None:
    """Five sequences: code, web, code, web, code."""
    val = Data(read_config(of_bf16_run.run), load_tokenizer("byte").sha256).val
    turns = [("code", 0), ("web", 0), ("code", 1), ("web", 1), ("code", 2)]
    inputs = []
    for source, i in turns:
        x, _ = val[source].batch(i, i + 1)
        inputs.append(x)
    statistics_of_inputs = []

    def watch(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        activation = statistics(arguments[0], RECIPES["mxfp8"].input)
        statistics_of_inputs.append(activation.tolist())

    model = load(of_bf16_run.run, "mxfp8").model
    model.layers[0].attn.qkv.register_forward_pre_hook(watch)
    model(torch.cat(inputs))
    first_row = probe_rows(of_bf16_run, "mxfp8")[0]
    assert [*first_row["activation"].values()] == statistics_of_inputs[0]


# ----------------------------------------------------------------------- tasks and samples in FP8


@dataclass
class Scored:
    """The BF16 run's scores on val_ppl through BF16 matmuls and through rowwise ones."""

    plain: dict[str, Any]
    rowwise: dict[str, Any]
    out: str  # of these two and of a third, which is limited


@pytest.fixture(scope="module")
def scored(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    run = copy_of(trained, tmp_path_factory) / "bf16"
    out = ""
    for arguments in ([], ["fp8=rowwise"], ["fp8=rowwise", "limit=3"]):
        out += printed_by(harness, run, "tasks=val_ppl", *arguments).out
    plain = read_json(run / "eval/val_ppl.json")
    return Scored(plain, read_json(run / "eval/val_ppl_fp8_rowwise.json"), out)


def test_a_scoring_in_fp8_says_how_many_linears_it_converts(scored: Scored) -> None:
    assert scored.out.count("8 of 9 Linears") == 2


def test_a_scoring_in_fp8_names_the_linears_that_it_converts(scored: Scored) -> None:
    assert "layers.*.mlp.down" in scored.out
    assert "-> rowwise" in scored.out


def test_a_scoring_records_its_recipe(scored: Scored) -> None:
    assert scored.plain["fp8"] == "off"
    assert scored.rowwise["fp8"] == "rowwise"


def test_a_scoring_records_the_linears_that_it_converted(scored: Scored) -> None:
    assert scored.plain["layers_fp8"] == []
    assert len(scored.rowwise["layers_fp8"]) == 8


def test_tasks_are_scored_through_fp8_matmuls(scored: Scored) -> None:
    """Which move the score, but not far."""
    plain = scored.plain["tasks"]["val_ppl"]["bits_per_byte"]
    rowwise = scored.rowwise["tasks"]["val_ppl"]["bits_per_byte"]
    assert rowwise != plain
    assert rowwise == pytest.approx(plain, rel=0.02)


def test_a_scoring_records_the_step(scored: Scored) -> None:
    assert scored.plain["step"] == 8


@pytest.fixture(scope="module")
def sampled(trained: Path) -> Printed:
    """The BF16 run's continuation of "ab" through rowwise matmuls."""
    arguments = ("tokens=12", "temperature=0", "fp8=rowwise")
    return printed_by(sample, trained / "bf16", "ab", *arguments)


def test_a_sample_in_fp8_is_the_converted_models(trained: Path, sampled: Printed) -> None:
    reference = by_hand(trained / "bf16", "rowwise", EIGHT)
    assert sampled.out == "ab" + greedy_text(reference.eval(), b"ab", 12) + "\n"


@pytest.mark.parametrize("words", ["8 of 9 Linears", "slower than BF16"])
def test_a_sample_in_fp8_says_so_on_stderr(words: str, sampled: Printed) -> None:
    assert words in sampled.err


def test_a_sample_in_fp8_says_no_more_than_two_lines(sampled: Printed) -> None:
    assert len(sampled.err.splitlines()) == 2


# --------------------------------------------- a model that diverged, a run that goes on


@pytest.fixture(scope="module")
def diverged(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """eval.precision of a run that is not finished, which writes checkpoint 9 while its checkpoint
    8 is evaluated, and whose FP8 model has NaN weights."""
    run = copy_of(trained, tmp_path_factory) / "bf16"
    (run / "summary.json").unlink()
    load_for_inference = inference.load_for_inference

    def load_broken(*arguments: Any) -> Inference:
        loaded = load_for_inference(*arguments)
        _, _, _, recipe, *_ = arguments
        if recipe != "off":
            loaded.model.layers[0].mlp.down.weight.data.fill_(math.nan)
        checkpoints = run / "checkpoints"
        shutil.copytree(
            checkpoints / "step_00000008", checkpoints / "step_00000009", dirs_exist_ok=True
        )
        return loaded

    with mock.patch.object(precision, "load_for_inference", load_broken):
        return measure(run, "recipes=rowwise")


@pytest.mark.parametrize("key", ["loss", "difference_se"])
def test_nan_is_null_in_the_record(key: str, diverged: Measured) -> None:
    assert diverged.record["fp8"]["rowwise"][key] is None


def test_nan_is_nan_in_the_table(diverged: Measured) -> None:
    assert "| nan " in diverged.out


def test_all_precisions_are_of_one_checkpoint_though_the_run_writes_another(
    diverged: Measured,
) -> None:
    assert diverged.record["step"] == 8
    assert diverged.record["fp8"]["rowwise"]["step"] == 8
    assert load(diverged.run).step == 9


# --------------------------------------------------------------------------------------- refusals


@pytest.fixture
def no_checkpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the checkpoint was read")

    monkeypatch.setattr(inference, "load_model", fail)


EACH_COMMAND = pytest.mark.parametrize(
    "command, arguments",
    [
        (harness, ["fp8=rowwise", "tasks=demo"]),
        (sample, ["fp8=rowwise"]),
        (precision, ["recipes=rowwise"]),
    ],
)


@EACH_COMMAND
def test_a_recipe_that_the_device_lacks_is_refused_before_the_checkpoint_is_read(
    command: ModuleType,
    arguments: list[str],
    runs: Path,
    no_checkpoint_is_read: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = mock.Mock(side_effect=UserError("rowwise not on this device"))
    monkeypatch.setattr("fp8.selection.check_hardware", check)
    message = refused(capsys, command, runs / "bf16", *arguments)
    assert "rowwise not on this device" in message


@EACH_COMMAND
def test_a_model_that_a_recipe_cannot_convert_is_refused_before_the_checkpoint_is_read(
    command: ModuleType,
    arguments: list[str],
    runs: Path,
    no_checkpoint_is_read: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = runs / "bf16/config.json"
    edit(path, model=read_json(path)["model"] | {"n_ffn": 72})
    message = refused(capsys, command, runs / "bf16", *arguments)
    assert "fp8.recipe=rowwise cannot convert layers.*.mlp.down of 72 x 32" in message


def test_other_validation_tokens_are_refused_before_the_checkpoint_is_read(
    runs: Path, no_checkpoint_is_read: None, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(runs / "bf16/summary.json", val_sha256="0")
    message = refused(capsys, precision, runs / "bf16", "recipes=rowwise")
    assert "holds other validation tokens" in message
