"""bench/peers.py against small stand-ins with the interfaces of nanoGPT, nanochat and torchtitan,
whose code is never here."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as our_model
from bench import peer_models, peers
from bench.cells import Cell, Subject, config_of
from bench.measuring import measure_cell
from bench.peer_models import BESIDE, OURS, build_peer
from bench.peers import peer_groups
from bench.rows import Measurement
from lib.errors import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")
VOCAB = 160
MATMUL = 2 * 128 * 128 + VOCAB * 128 + 12  # of the stand-ins, two blocks 128 wide, a gate of 12


# --------------------------------------------------------------------------------- the stand-ins


class Titan(nn.Module):
    optimizer_arguments: tuple | None = None  # that a peer's code has asked for its optimizer with

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        if hasattr(config, "dim"):
            C, L = config.dim, config.n_layers
        else:
            C, L = config.n_embd, config.n_layer
        self.embedding = nn.Embedding(config.vocab_size, C)
        self.output = nn.Linear(C, config.vocab_size, bias=False)
        self.layers = nn.ModuleDict({str(i): nn.Linear(C, C, bias=False) for i in range(L)})
        self.gate = nn.Linear(12, 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for name, p in self.named_parameters():
            is_zero = "layers" in name or name == "scale"
            nn.init.normal_(p, std=0.0 if is_zero else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        h = h * (1 + self.gate(h[..., :12])) * (1 + self.scale)
        for layer in self.layers.values():
            h = h + layer(h)
        return self.output(h)

    def configure_optimizers(self, *positional: Any, **named: Any) -> torch.optim.Optimizer:
        self.optimizer_arguments = positional or tuple(named.values())
        return torch.optim.SGD(self.parameters(), lr=positional[1] if positional else 0.1)


class Chat(Titan):
    setup_optimizer = Titan.configure_optimizers

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(super().forward(x), targets)


class Nano(Titan):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        assert not config.bias
        assert not config.dropout
        self.embedding.weight = self.output.weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = super().forward(x)
        return logits, cross_entropy(logits, targets)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: str,
    module_filter_fn: Callable[[nn.Module, str], bool],
) -> None:
    assert config == "tensorwise"
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, name):
            child.__class__ = type("Float8Linear", (nn.Linear,), {})


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# The files of a made-up checkout import what they hold from here; a config is a SimpleNamespace of
# what the benchmark gives.
CONFIG, HERE = "from types import SimpleNamespace as ", "from tests.bench.test_peers import "
LLAMA = "torchtitan/models/llama3/model/"
FILES = {
    "nanogpt": {"model.py": f"{CONFIG}GPTConfig\n{HERE}Nano as GPT\n"},
    "nanochat": {
        "nanochat/__init__.py": "",
        "nanochat/flash_attention.py": "USE_FA3 = False\n",
        "nanochat/fp8.py": (
            f"{HERE}convert_to_float8_training\nclass Float8LinearConfig:\n    from_recipe_name ="
            " str\n"
        ),
        "nanochat/gpt.py": (
            "import os\nassert os.environ['NANOCHAT_DTYPE'] =="
            f" 'bfloat16'\n{CONFIG}GPTConfig\n{HERE}Chat as GPT\n"
        ),
    },
    "torchtitan": {
        f"{LLAMA}args.py": f"{CONFIG}TransformerModelArgs\n",
        f"{LLAMA}model.py": f"{HERE}Titan as Transformer\n",
    },
}


def write_checkout(peer: str, folder: Path) -> str:
    for name, text in FILES[peer].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def peer_cell(folder: Path, peer: str, precision: str | None = None, vocab: int = VOCAB) -> Cell:
    """A cell of two blocks 128 wide, and its checkout; three micro-batches a step."""
    sizes = {"n_layers": 2, "dim": 128} if peer == "torchtitan" else {"n_layer": 2, "n_embd": 128}
    return Cell(
        size=f"{peer}_toy",
        micro_batch=2,
        T=16,
        tokens_per_step=96,
        device="cpu",
        model=sizes | {"vocab_size": vocab},
        peer=write_checkout(peer, folder),
        peer_name=peer,
        peer_precision=precision,
    )


@contextmanager
def process_stays() -> Iterator[list[dict[str, Any]]]:
    """What a peer changes in its process is put back; what it would compile runs as it is: yields
    the list of torch.compile's options."""
    compile_options = []

    def note(model: Any, **options: Any) -> Any:
        compile_options.append(options)
        return model

    precision = torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(torch, "compile", note)
        yield compile_options
    torch.set_float32_matmul_precision(precision)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("nanogpt_model", "nanochat", "torchtitan"):
            del sys.modules[name]


# ------------------------------------------------------------------------- a peer's training step


@dataclass
class Script:
    """What a peer's own training script does."""

    peer: str
    precision: str | None
    compile_options: list[dict[str, Any]]
    optimizer_arguments: tuple | None  # None: AdamW of torch's own
    moves: float  # how far a parameter moves where each gradient is 3


SCRIPTS = [
    # the stand-in's SGD: the rate times a norm clipped to 1
    Script("nanogpt", None, [{}], (0.1, 6e-4, (0.9, 0.95), "cpu"), 6e-4 / (MATMUL + 1) ** 0.5),
    # its four rates, weight decay; the stand-in's SGD: 0.1 x 3, not clipped
    Script("nanochat", "bf16", [{"dynamic": False}], (0.008, 0.3, 0.5, 0.02, 0.28), 0.3),
    # AdamW: the rate
    Script("torchtitan", "bf16", [{"fullgraph": True}] * 2 + [{}], None, 8e-4),
]


@dataclass
class Trained:
    """A peer after two micro-steps of the same tokens and an update whose gradients were all set to
    3; and what its process had then."""

    script: Script
    subject: Subject
    compile_options: list[dict[str, Any]]
    loss: torch.Tensor
    gradients: list[torch.Tensor]
    expected_loss: torch.Tensor
    expected_gradients: list[torch.Tensor]
    moved: torch.Tensor
    allow_tf32: bool
    matmul_precision: str
    hf_hub_offline: str | None


@pytest.fixture(scope="module", params=SCRIPTS, ids=[script.peer for script in SCRIPTS])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    script = request.param
    folder = tmp_path_factory.mktemp("peer")
    with process_stays() as compile_options:
        subject = build_peer(peer_cell(folder, script.peer, script.precision), CPU)
        return train(script, subject, compile_options)


def train(script: Script, subject: Subject, compile_options: list[dict[str, Any]]) -> Trained:
    x, y = torch.randint(0, VOCAB, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    loss = subject.micro_step(x, y)
    parameters = list(subject.model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=script.peer != "nanogpt"):
        mean = cross_entropy(Titan.forward(subject.model, x), y)
    of_a_micro_step = torch.autograd.grad(mean / 3, parameters)  # a step is three micro-batches
    subject.micro_step(x, y)
    gradients = [p.grad.clone() for p in parameters]
    before = nn.utils.parameters_to_vector(parameters).detach()
    for p in parameters:
        p.grad.fill_(3.0)
    subject.update()
    return Trained(
        script,
        subject,
        compile_options,
        loss,
        gradients,
        expected_loss=mean,
        expected_gradients=[2 * gradient for gradient in of_a_micro_step],
        moved=nn.utils.parameters_to_vector(parameters).detach() - before,
        allow_tf32=torch.backends.cuda.matmul.allow_tf32,
        matmul_precision=torch.get_float32_matmul_precision(),
        hf_hub_offline=os.environ.get("HF_HUB_OFFLINE"),
    )


def test_a_peer_is_compiled_as_by_its_script(trained: Trained) -> None:
    assert trained.compile_options == trained.script.compile_options


def test_a_peer_has_the_vocabulary_of_its_cell(trained: Trained) -> None:
    assert trained.subject.vocab == VOCAB


def test_a_micro_step_returns_the_mean_loss(trained: Trained) -> None:
    assert trained.loss.shape == ()
    assert trained.loss == trained.expected_loss


def test_the_loss_of_a_micro_step_is_detached(trained: Trained) -> None:
    assert not trained.loss.requires_grad


def test_gradients_of_micro_steps_add_up_to_their_share_of_a_step(trained: Trained) -> None:
    torch.testing.assert_close(trained.gradients, trained.expected_gradients)


def test_an_update_clips_and_moves_as_by_the_peers_script(trained: Trained) -> None:
    expected = torch.full_like(trained.moved, trained.script.moves)
    torch.testing.assert_close(trained.moved.abs(), expected, rtol=0.02, atol=0)


def test_an_update_drops_the_gradients(trained: Trained) -> None:
    for p in trained.subject.model.parameters():
        assert p.grad is None


def test_the_optimizer_is_that_of_the_peers_script(trained: Trained) -> None:
    expected = trained.script.optimizer_arguments
    assert trained.subject.model.optimizer_arguments == expected
    if expected is None:
        assert type(trained.subject.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("trained", SCRIPTS[:1], indirect=True, ids=["nanogpt"])
def test_nanogpt_allows_tf32(trained: Trained) -> None:
    assert trained.allow_tf32


@pytest.mark.parametrize("trained", SCRIPTS[1:2], indirect=True, ids=["nanochat"])
def test_nanochat_has_a_high_matmul_precision(trained: Trained) -> None:
    assert trained.matmul_precision == "high"


@pytest.mark.parametrize("trained", SCRIPTS[1:2], indirect=True, ids=["nanochat"])
def test_nanochat_downloads_nothing(trained: Trained) -> None:
    assert trained.hf_hub_offline == "1"


# ------------------------------------------------------------------------------------ peers' FP8


@pytest.fixture
def building() -> Iterator[None]:
    """For tests that build a peer."""
    with process_stays():
        yield


def converted(model: nn.Module) -> set[str]:
    """The names of the Linears in FP8."""
    modules = model.named_modules()
    return {name for name, module in modules if type(module).__name__ == "Float8Linear"}


@dataclass
class Chats:
    bf16: Subject
    fp8: Subject


@pytest.fixture(scope="module")
def nanochat(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """nanochat's stand-in in both precisions."""
    folder = tmp_path_factory.mktemp("nanochat")
    with process_stays():
        bf16 = build_peer(peer_cell(folder, "nanochat", "bf16"), CPU)
        return Chats(bf16, build_peer(peer_cell(folder, "nanochat", "fp8"), CPU))


def test_a_peers_fp8_begins_with_the_weights_of_its_bf16(nanochat: Chats) -> None:
    of_fp8 = nanochat.fp8.model.parameters()
    for p, q in zip(nanochat.bf16.model.parameters(), of_fp8, strict=True):
        assert torch.equal(p, q)


def test_matrices_that_nanochat_begins_at_zero_get_random_values(nanochat: Chats) -> None:
    """Else their matmuls would be timed on zeros."""
    weight = nanochat.fp8.model.layers["0"].weight
    assert weight.std().item() == pytest.approx(0.4 / 128**0.5, rel=0.05)


def test_all_else_begins_as_nanochat_has_it(nanochat: Chats) -> None:
    model = nanochat.fp8.model
    assert model.output.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.scale.any()


@pytest.mark.parametrize(
    "words", ["window_pattern L; 2 weights that begin at zero", "attention by torch"]
)
def test_what_is_not_nanochats_is_said(words: str, nanochat: Chats) -> None:
    assert words in nanochat.fp8.describe[1]


def test_nanochats_fp8_converts_all_but_narrow_linears(nanochat: Chats) -> None:
    """The gate of 12 x 1 is too narrow."""
    assert converted(nanochat.fp8.model) == {"layers.0", "layers.1", "output"}


# no multiple of 16; below 128
@pytest.mark.parametrize("vocab", [161, 112])
def test_nanochats_fp8_leaves_a_head_of_unfit_size(
    vocab: int, building: None, tmp_path: Path
) -> None:
    subject = build_peer(peer_cell(tmp_path, "nanochat", "fp8", vocab), CPU)
    assert converted(subject.model) == {"layers.0", "layers.1"}


def test_torchtitans_fp8_leaves_the_head(building: None, tmp_path: Path) -> None:
    subject = build_peer(peer_cell(tmp_path, "torchtitan", "fp8"), CPU)
    assert converted(subject.model) == {"layers.0", "layers.1"}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_peers_flops_are_counted_as_ours_are(precision: str, nanochat: Chats) -> None:
    """Lookups count nothing."""
    assert getattr(nanochat, precision).counts == {
        "params_matmul": MATMUL,
        "params_total": MATMUL + VOCAB * 128 + 1,
        # 12 L H D T
        "flops_per_token": 6 * MATMUL + 12 * 2 * 128 * 16,
    }


# ------------------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    with process_stays():
        return measure_cell(peer_cell(tmp_path_factory.mktemp("measured"), "nanogpt"))


def test_a_peer_trains_as_many_steps_as_ours(measured: Measurement) -> None:
    assert len(measured.losses) == 8


def test_a_peers_loss_falls(measured: Measurement) -> None:
    assert measured.losses[-1] < measured.losses[0]


def test_a_peers_steps_are_timed(measured: Measurement) -> None:
    assert len(measured.steps_s) >= 2


def test_a_peers_tied_head_is_counted_once(measured: Measurement) -> None:
    assert measured.params_matmul == MATMUL
    assert measured.params_total == MATMUL + 1  # its scale


def test_nanogpts_model_py_does_not_take_the_place_of_ours(measured: Measurement) -> None:
    assert sys.modules["model"] is our_model


# ------------------------------------------------------------------------------------- checkouts


@pytest.mark.parametrize("peer", FILES)
def test_what_is_no_checkout_is_refused(peer: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a checkout of https://github.com/"):
        peer_models.check_checkout(peer, str(tmp_path))


def test_a_checkout_without_git_is_at_an_unknown_commit(tmp_path: Path) -> None:
    folder = write_checkout("nanochat", tmp_path)
    description = peer_models.check_checkout("nanochat", folder)
    assert description.startswith("nanochat at an unknown commit")


def test_a_checkout_is_named_by_its_tag(tmp_path: Path) -> None:
    folder = write_checkout("nanochat", tmp_path)
    for words in ("init -q", "-c user.name=x -c user.email=x commit --allow-empty -qm x", "tag v7"):
        subprocess.run(["git", "-C", folder, *words.split(" ")], check=True)
    assert peer_models.check_checkout("nanochat", folder).startswith("nanochat at v7;")


# ---------------------------------------------------------------------------------------- groups

TWINS = pytest.mark.parametrize(
    "ours, size, theirs",
    [
        ("ours_d12", "125m", "nanochat_d12"),
        ("ours_d26", "1p5b", "nanochat_d26"),
        ("ours_toy", "toy", "nanogpt_toy"),
    ],
)


@TWINS
def test_our_model_beside_a_peers_has_its_dimensions(ours: str, size: str, theirs: str) -> None:
    _, dimensions = BESIDE[size][theirs]
    config = GPTConfig(**OURS[ours], n_ctx=1024)
    for key in "n_layer", "n_head", "n_embd":
        assert getattr(config, key) == dimensions[key]


@TWINS
def test_our_model_beside_a_peers_does_the_same_work(ours: str, size: str, theirs: str) -> None:
    _, dimensions = BESIDE[size][theirs]
    C, L = dimensions["n_embd"], dimensions["n_layer"]
    V = dimensions.get("vocab_size", 32768)
    counts = GPT.on_meta(GPTConfig(**OURS[ours], n_ctx=1024)).counts()
    flops = 6 * (L * 12 * C * C + V * C) + 12 * L * C * 1024
    assert counts["flops_per_token"] == pytest.approx(flops, rel=0.01)


def groups(suite: str) -> list[list[Cell]]:
    """With a checkout of every peer."""
    return peer_groups(suite, dict.fromkeys(FILES, "/x"))


EACH_SUITE = pytest.mark.parametrize("suite", ["h100", "toy"])


@EACH_SUITE
def test_every_group_begins_with_our_bf16(suite: str) -> None:
    for baseline, *_ in groups(suite):
        assert baseline.label == "bf16"
        assert config_of(baseline).fp8.recipe == "off"


@EACH_SUITE
def test_every_group_compares_something_with_it(suite: str) -> None:
    for group in groups(suite):
        assert len(group) > 1


@EACH_SUITE
def test_a_peers_step_is_a_whole_number_of_micro_batches_of_a_model(suite: str) -> None:
    for cell in itertools.chain(*groups(suite)):
        if cell.peer:
            assert cell.model
            assert cell.tokens_per_step % (cell.micro_batch * cell.T) == 0


def test_every_peer_is_timed_in_all_its_precisions() -> None:
    cells = itertools.chain(*groups("h100"))
    timed = {(cell.peer_name, cell.peer_precision) for cell in cells if cell.peer}
    assert timed == {
        ("nanogpt", None),
        ("nanochat", "bf16"),
        ("nanochat", "fp8"),
        ("torchtitan", "bf16"),
        ("torchtitan", "fp8"),
    }


def test_the_toy_group_has_no_fp8_of_peers() -> None:
    (group,) = groups("toy")
    labels = [cell.label for cell in group]
    assert labels == ["bf16", "nanogpt", "nanochat_bf16", "torchtitan_bf16"]


def test_our_model_at_nanochats_dimensions_is_timed_beside_nanochat_alone() -> None:
    assert len(peer_groups("h100", {"nanogpt": "/x"})) == 2


def test_a_call_that_names_no_checkout_is_refused() -> None:
    assert peers.main([]) == 2
