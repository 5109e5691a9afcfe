"""bench/peers.py against small stand-ins with the interfaces of nanoGPT, nanochat and torchtitan,
whose code is never here."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as our_model
from bench import peer_models, peers
from bench.cells import Cell, config_of
from bench.measuring import measure_cell
from bench.peer_models import BESIDE, OURS, PRECISIONS, build_peer
from bench.peers import peer_groups
from lib.errors import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")
MATMUL = 2 * 128 * 128 + 160 * 128 + 12  # of the stand-ins, two blocks 128 wide, a gate of 12


class Titan(nn.Module):
    asked = None

    def __init__(self, config):
        super().__init__()
        C, L = (
            (config.dim, config.n_layers)
            if hasattr(config, "dim")
            else (config.n_embd, config.n_layer)
        )
        self.embedding, self.output = (
            nn.Embedding(config.vocab_size, C),
            nn.Linear(C, config.vocab_size, bias=False),
        )
        self.layers = nn.ModuleDict({str(i): nn.Linear(C, C, bias=False) for i in range(L)})
        self.gate, self.scale = nn.Linear(12, 1, bias=False), nn.Parameter(torch.zeros(1))

    def init_weights(self, buffer_device=None):
        for name, p in self.named_parameters():
            nn.init.normal_(p, std=0.0 if "layers" in name or name == "scale" else 0.02)

    def forward(self, x):
        h = self.embedding(x)
        h = h * (1 + self.gate(h[..., :12])) * (1 + self.scale)
        for layer in self.layers.values():
            h = h + layer(h)
        return self.output(h)

    def configure_optimizers(self, *positional: object, **named: object):
        self.asked = positional or tuple(named.values())
        return torch.optim.SGD(self.parameters(), lr=positional[1] if positional else 0.1)


class Chat(Titan):
    setup_optimizer = Titan.configure_optimizers

    def forward(self, x, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(super().forward(x), targets)


class Nano(Titan):
    def __init__(self, config):
        super().__init__(config)
        assert not (config.bias or config.dropout)
        self.embedding.weight = self.output.weight

    def forward(self, x, targets):
        logits = super().forward(x)
        return logits, cross_entropy(logits, targets)


def convert_to_float8_training(module, *, config=None, module_filter_fn=None):
    assert config == "tensorwise"
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, name):
            child.__class__ = type("Float8Linear", (nn.Linear,), {})


def cross_entropy(logits, targets):
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


def make(peer, folder):
    for name, text in FILES[peer].items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch):
    """What a peer changes in its process is put back; what it would compile runs as it is, and is
    noted."""
    precision, noted = torch.get_float32_matmul_precision(), []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "compile", lambda model, **how: noted.append(how) or model)
    with mock.patch.dict(os.environ):
        yield noted
    torch.set_float32_matmul_precision(precision)
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("nanogpt_model", "nanochat", "torchtitan")
    ]:
        del sys.modules[name]


def cell(folder, peer, precision=None, vocab=160):
    """A cell of two blocks 128 wide, and its checkout."""
    small = {"n_layers": 2, "dim": 128} if peer == "torchtitan" else {"n_layer": 2, "n_embd": 128}
    return Cell(
        size=f"{peer}_toy",
        micro_batch=2,
        T=16,
        tokens_per_step=96,
        device="cpu",
        model=small | {"vocab_size": vocab},
        peer=make(peer, folder),
        peer_name=peer,
        peer_precision=precision,
    )


# What is compiled, what the optimizer is asked for, how far a parameter moves where each gradient
# is 3: nanoGPT's stand-in by the rate times a norm clipped to 1, nanochat's by 0.1 x 3, not
# clipped, AdamW by the rate.
@pytest.mark.parametrize(
    "peer, precision, how, asked, moves",
    [
        ("nanogpt", None, [{}], (0.1, 6e-4, (0.9, 0.95), "cpu"), 6e-4 / (MATMUL + 1) ** 0.5),
        # its four rates, weight decay
        ("nanochat", "bf16", [{"dynamic": False}], (0.008, 0.3, 0.5, 0.02, 0.28), 0.3),
        ("torchtitan", "bf16", [{"fullgraph": True}] * 2 + [{}], None, 8e-4),
    ],
)
def test_a_peer_trains_as_its_script_does(tmp_path, compiled, peer, precision, how, asked, moves):
    subject = build_peer(cell(tmp_path / "peer", peer, precision), CPU)
    assert compiled == how and subject.vocab == 160
    x, y = torch.randint(0, 160, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    loss, parameters = subject.micro_step(x, y), list(subject.model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=peer != "nanogpt"):
        mean = cross_entropy(Titan.forward(subject.model, x), y)
    assert loss.shape == () and not loss.requires_grad and loss == mean
    want = torch.autograd.grad(mean / 3, parameters)  # a step is three micro-batches
    subject.micro_step(x, y)  # adds up
    torch.testing.assert_close([p.grad for p in parameters], [2 * g for g in want])
    before = nn.utils.parameters_to_vector(parameters).detach()
    for p in parameters:
        p.grad.fill_(3.0)
    subject.update()
    moved = nn.utils.parameters_to_vector(parameters).detach() - before
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, moves), rtol=0.02, atol=0)
    assert all(p.grad is None for p in parameters)
    assert subject.model.asked == asked and (asked or type(subject.optimizer) is torch.optim.AdamW)
    assert peer != "nanogpt" or torch.backends.cuda.matmul.allow_tf32
    assert peer != "nanochat" or (
        torch.get_float32_matmul_precision(),
        os.environ["HF_HUB_OFFLINE"],
    ) == ("high", "1")


def test_a_peers_fp8_converts_what_its_script_does_from_equal_weights(tmp_path: Path):
    def converted(model):
        return {name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear"}

    chat, titan = tmp_path / "chat", tmp_path / "titan"
    bf16, fp8 = (build_peer(cell(chat, "nanochat", kind), CPU) for kind in ("bf16", "fp8"))
    assert all(map(torch.equal, bf16.model.parameters(), fp8.model.parameters()))
    # No matrix is zero, its matmuls would be timed on zeros; all else is as nanochat has it.
    assert fp8.model.layers["0"].weight.std().item() == pytest.approx(0.4 / 128**0.5, rel=0.05)
    assert (
        fp8.model.output.weight.std().item() == pytest.approx(0.02, rel=0.05)
        and not fp8.model.scale.any()
    )
    assert (
        "window_pattern L; 2 weights that begin at zero" in fp8.describe[1]
        and "attention by torch" in fp8.describe[1]
    )
    # the gate of 12 x 1 is too narrow
    assert converted(fp8.model) == {"layers.0", "layers.1", "output"}
    for vocab in (161, 112):  # no multiple of 16; below 128: the head stays
        narrow = build_peer(cell(chat, "nanochat", "fp8", vocab), CPU)
        assert converted(narrow.model) == {"layers.0", "layers.1"}
    titans = build_peer(cell(titan, "torchtitan", "fp8"), CPU)
    assert converted(titans.model) == {"layers.0", "layers.1"}
    # FLOPs are counted as ours are, lookups count nothing.
    assert (
        bf16.counts
        == fp8.counts
        == {
            "params_matmul": MATMUL,
            "params_total": MATMUL + 160 * 128 + 1,
            # 12 L H D T
            "flops_per_token": 6 * MATMUL + 12 * 2 * 128 * 16,
        }
    )


def test_a_peers_cell_is_measured_as_ours_are(tmp_path):
    measured = measure_cell(cell(tmp_path / "peer", "nanogpt"))
    losses = measured.losses
    assert len(losses) == 8 and losses[-1] < losses[0] and len(measured.steps_s) >= 2
    assert measured.params_matmul == measured.params_total - 1 == MATMUL  # the tied head once
    assert sys.modules["model"] is our_model


def test_what_is_no_checkout_is_refused_and_its_commit_told(tmp_path: Path):
    for peer in FILES:
        with pytest.raises(UserError, match="give a checkout of https://github.com/"):
            peer_models.check_checkout(peer, str(tmp_path))
    folder = make("nanochat", tmp_path)
    assert peer_models.check_checkout("nanochat", folder).startswith(
        "nanochat at an unknown commit"
    )
    for words in ("init -q", "-c user.name=x -c user.email=x commit --allow-empty -qm x", "tag v7"):
        subprocess.run(["git", "-C", folder, *words.split(" ")], check=True)
    assert peer_models.check_checkout("nanochat", folder).startswith("nanochat at v7;")


def test_the_groups_hold_ours_beside_theirs_where_ours_does_the_same_work():
    for ours, size, theirs in (
        ("ours_d12", "125m", "nanochat_d12"),
        ("ours_d26", "1p5b", "nanochat_d26"),
        ("ours_toy", "toy", "nanogpt_toy"),
    ):
        (_, their), config = BESIDE[size][theirs], GPTConfig(**OURS[ours], n_ctx=1024)
        assert all(getattr(config, key) == their[key] for key in ("n_layer", "n_head", "n_embd"))
        C, L, V = their["n_embd"], their["n_layer"], their.get("vocab_size", 32768)
        flops = GPT.on_meta(config).counts()["flops_per_token"]
        assert flops == pytest.approx(6 * (L * 12 * C * C + V * C) + 12 * L * C * 1024, rel=0.01)
    h100, toy = (peer_groups(suite, dict.fromkeys(FILES, "/x")) for suite in ("h100", "toy"))
    for group in (*h100, *toy):
        assert (
            group[0].label == "bf16" and len(group) > 1 and config_of(group[0]).fp8.recipe == "off"
        )
        assert all(
            one.model and one.tokens_per_step % (one.micro_batch * one.T) == 0
            for one in group
            if one.peer
        )
    timed = {(one.peer_name, one.peer_precision) for group in h100 for one in group if one.peer}
    assert timed == {(peer, kind) for peer, kinds in PRECISIONS.items() for kind in kinds}
    assert [one.label for one in toy[0]] == ["bf16", "nanogpt", "nanochat_bf16", "torchtitan_bf16"]
    assert len(peer_groups("h100", {"nanogpt": "/x"})) == 2
    assert peers.main([]) == 2  # no checkout is named
