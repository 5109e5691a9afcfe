"""bench/peers.py against the stand-ins of tests/peer_checkouts.py."""

import hashlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import model as our_model
from bench import peers
from model import GPT, GPTConfig
from runtime.cli import UserError
from tests.peer_checkouts import GPT_ROOM, NANOGPT, nanochat, nanogpt

SMALL = {"n_layer": 2, "n_embd": 128, "vocab_size": 160}
T, MICRO_BATCH, ACCUMULATION = 16, 2, 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """What a subject changes in its process is put back; what it would compile runs as it is, and is noted."""
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for name in ("NANOCHAT_DTYPE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled.append(how) or model)
    yield SimpleNamespace(compiled=compiled)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32
    for name in [n for n in sys.modules if n == "nanogpt_model" or n.partition(".")[0] == "nanochat"]:
        del sys.modules[name]


def load(name, folder, size=None, device=CPU, seed=0, **overrides):
    size = size or ("nanogpt_124m" if name == "nanogpt" else "nanochat_d12")
    return peers.load(name, folder, size, MICRO_BATCH, T, device, tokens_per_step=ACCUMULATION * MICRO_BATCH * T, seed=seed,
                      overrides=SMALL | overrides)


def batch(subject, seed=1, device=CPU):
    x, y = torch.randint(0, subject.vocab, (2, MICRO_BATCH, T), generator=torch.Generator().manual_seed(seed)).to(device)
    return x, y


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


# --------------------------------------------------------------------------------------------------- what is no checkout

@pytest.mark.parametrize("name, missing", [("nanogpt", "model.py"), ("nanochat_fp8", "nanochat/__init__.py")])
def test_another_folder_is_refused(tmp_path, name, missing):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"is no checkout of .*: it has no {missing}; give the folder that git clone"):
            peers.check(name, str(folder))


@pytest.mark.parametrize("name, file, old, lacking", [
    ("nanogpt", "model.py", "block_size: int", "GPTConfig.block_size"),
    ("nanogpt", "model.py", "def configure_optimizers", "GPT.configure_optimizers"),
    ("nanochat_bf16", "nanochat/gpt.py", "window_pattern: str", "GPTConfig.window_pattern"),
    ("nanochat_bf16", "nanochat/fp8.py", "def convert_to_float8_training", "convert_to_float8_training"),
    ("nanochat_bf16", "nanochat/common.py", "COMPUTE_DTYPE, ", "COMPUTE_DTYPE"),
    ("nanochat_bf16", "nanochat/flash_attention.py", "USE_FA3", "USE_FA3"),
])
def test_another_version_is_refused_by_what_it_lacks(tmp_path, name, file, old, lacking):
    folder = (nanogpt if name == "nanogpt" else nanochat)(tmp_path / "peer")
    assert peers.check(name, folder)
    path = tmp_path / "peer" / file
    path.write_text(path.read_text().replace(old, old[:-2] + "_x, " if old.endswith(", ") else old[:4] + "x" + old[4:]))
    with pytest.raises(UserError, match=rf"{file} is of a version .* lacks {lacking}; check out \w+ at commit \w{{7}}"):
        peers.check(name, folder)


def test_a_checkout_is_judged_without_running_it(tmp_path):
    folder = nanogpt(tmp_path / "peer", NANOGPT + "\nraise RuntimeError('ran')\n")
    peers.check("nanogpt", folder)
    with pytest.raises(UserError, match="model.py could not be imported: RuntimeError: ran"):
        load("nanogpt", folder)
    with pytest.raises(UserError, match="gpt.py could not be imported: ModuleNotFoundError: No module named 'absent_library'"):
        load("nanochat_bf16", nanochat(tmp_path / "chat", gpt="import absent_library\n" + GPT_ROOM))


def test_what_is_no_python_is_refused(tmp_path):
    for text in ("def (", "\0"):
        with pytest.raises(UserError, match="is no Python"):
            peers.check("nanogpt", nanogpt(tmp_path / str(len(text)), text))


def test_the_version_is_told(tmp_path, monkeypatch):
    folder = nanogpt(tmp_path / "peer")
    digest = hashlib.sha256(NANOGPT.encode()).hexdigest()
    assert peers.check("nanogpt", folder) == f"nanogpt, another version than 3adf61e: SHA-256 {digest[:12]}"
    monkeypatch.setitem(peers.WRITTEN_FOR, "nanogpt", ("abc1234", digest))
    assert peers.check("nanogpt", folder) == "nanogpt abc1234"
    assert load("nanogpt", folder).describe[0] == f"nanogpt_124m: nanogpt abc1234, under torch {torch.__version__}"


@pytest.mark.parametrize("name, size, overrides, sentence", [
    ("nanochat", "nanochat_d12", {}, "peer 'nanochat' is none of nanogpt, nanochat_bf16, nanochat_fp8"),
    ("nanogpt", "nanogpt_124", {}, "size='nanogpt_124' is no size of nanogpt; did you mean 'nanogpt_124m'?"),
    ("nanogpt", "nanochat_d12", {}, "size='nanochat_d12' is no size of nanogpt"),
    ("nanochat_bf16", "nanogpt_xl", {}, "is no size of nanochat_bf16"),
    ("nanogpt", "nanogpt_xl", {"n_layers": 2}, "model.n_layers is no field of nanogpt's GPTConfig; did you mean 'n_layer'?"),
    ("nanochat_fp8", "nanochat_d26", {"n_ffn": 2}, "model.n_ffn is no field of nanochat's GPTConfig"),
])
def test_mistakes_get_a_sentence(tmp_path, name, size, overrides, sentence):
    folder = (nanogpt if name == "nanogpt" else nanochat)(tmp_path / "peer")
    with pytest.raises(UserError) as error:
        load(name, folder, size, **overrides)
    assert sentence in str(error.value)


def test_a_step_is_whole_micro_batches(tmp_path):
    with pytest.raises(UserError, match="tokens_per_step=100 is not a whole number of micro-batches of 2 x 16 tokens"):
        peers.load("nanogpt", nanogpt(tmp_path / "peer"), "nanogpt_124m", 2, 16, CPU, tokens_per_step=100, seed=0)


# --------------------------------------------------------------------------------------------------- what they train like

def test_nanogpt_trains_as_its_script_does(tmp_path, process):
    subject = load("nanogpt", nanogpt(tmp_path / "peer"))
    config = subject.model.config
    assert (config.block_size, config.vocab_size, config.bias, config.dropout) == (T, 160, False, 0.0)
    assert config.n_head == 12      # of the size, not overridden
    assert process.compiled == [{}]
    assert torch.backends.cuda.matmul.allow_tf32
    x, y = batch(subject)
    loss = subject.micro_step(x, y)
    assert loss.shape == () and not loss.requires_grad
    logits, _ = subject.model(x, y)
    want = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert loss == want
    want = torch.autograd.grad(want / ACCUMULATION, list(subject.model.parameters()))
    torch.testing.assert_close(gradients(subject.model), list(want))
    subject.micro_step(x, y)        # adds up
    torch.testing.assert_close(gradients(subject.model), [2 * g for g in want])


def test_nanogpt_clips_and_steps(tmp_path):
    subject = load("nanogpt", nanogpt(tmp_path / "peer"))
    (optimizer,) = subject.make_optimizers()
    assert subject.model.asked == (0.1, 6e-4, (0.9, 0.95), "cpu")
    before = [p.detach().clone() for p in subject.model.parameters()]
    for p in subject.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    subject.update([optimizer])
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, subject.model.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(6e-4, rel=1e-3)        # lr x the norm that was clipped to 1
    assert all(p.grad is None for p in subject.model.parameters())


def test_nanochat_trains_as_its_script_does(tmp_path, process):
    subject = load("nanochat_bf16", nanochat(tmp_path / "peer"))
    config = subject.model.config
    assert (config.sequence_len, config.window_pattern, config.n_head) == (T, "L", 6)
    assert process.compiled == [{"dynamic": False}]
    assert torch.get_float32_matmul_precision() == "high" and os.environ["HF_HUB_OFFLINE"] == "1"
    x, y = batch(subject)
    loss = subject.micro_step(x, y)
    assert loss == subject.model(x, y) and not loss.requires_grad
    want = torch.autograd.grad(subject.model(x, y) / ACCUMULATION, list(subject.model.parameters()))
    torch.testing.assert_close(gradients(subject.model), list(want))
    (optimizer,) = subject.make_optimizers()
    assert subject.model.asked == {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02,
                                   "weight_decay": 0.28}
    before = [p.detach().clone() for p in subject.model.parameters()]
    grads = gradients(subject.model)
    subject.update([optimizer])
    assert optimizer.stepped and all(p.grad is None for p in subject.model.parameters())
    torch.testing.assert_close(list(subject.model.parameters()), [p - 0.1 * g for p, g in zip(before, grads, strict=True)])
    assert subject.make_optimizers()[0] is not optimizer


def test_no_matrix_of_nanochat_is_zero_and_all_else_is_as_it_was(tmp_path):
    """With zeros in c_proj, c_fc's gradient is zero: its matmuls would be timed on zeros."""
    subject = load("nanochat_bf16", nanochat(tmp_path / "peer"))
    subject.micro_step(*batch(subject))
    assert all(p.grad.count_nonzero() for p in subject.model.parameters() if p.ndim == 2)
    assert not subject.model.lambdas.count_nonzero()       # a learned scalar may be zero
    assert any(line.startswith("nanochat: 2 weights that begin at zero") for line in subject.describe)
    assert subject.model.c_proj[0].weight.std().item() == pytest.approx(0.4 / 512**0.5, rel=0.05)
    assert subject.model.c_fc[0].weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_both_arms_of_nanochat_begin_alike_and_fp8_converts_what_it_converts(tmp_path):
    folder = nanochat(tmp_path / "peer")
    bf16, fp8 = load("nanochat_bf16", folder), load("nanochat_fp8", folder)
    other = load("nanochat_bf16", folder, seed=1)
    for (name, a), b in zip(bf16.model.named_parameters(), fp8.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(bf16.model.wte.weight, other.model.wte.weight)
    assert (bf16.converted, bf16.of, fp8.converted, fp8.of) == (0, 6, 5, 6)     # the gate of 12 x 1 is too narrow
    assert fp8.counts["fp8_flops_per_token"] == 6 * (2 * 8 * 128 * 128 + 160 * 128)
    assert bf16.counts["fp8_flops_per_token"] == 0
    assert {k: v for k, v in bf16.counts.items() if k != "fp8_flops_per_token"} == {
        k: v for k, v in fp8.counts.items() if k != "fp8_flops_per_token"}
    for vocab in (161, 112):        # no multiple of 16; below 128: the head stays
        assert load("nanochat_fp8", folder, vocab_size=vocab).converted == 4


def test_flops_are_ours_and_lookups_count_nothing(tmp_path):
    chat = load("nanochat_bf16", nanochat(tmp_path / "chat"))
    matmul = 2 * 8 * 128 * 128 + 160 * 128 + 12
    assert chat.counts["params_matmul"] == matmul
    assert chat.counts["params_total"] == matmul + 2 * 160 * 128 + 2
    attention = 12 * 2 * 128 * T       # 12 L H D T
    assert chat.counts["flops_per_token"] == 6 * matmul + attention
    assert chat.counts["flops_per_token_causal"] == 6 * matmul + attention // 2
    gpt = load("nanogpt", nanogpt(tmp_path / "gpt"))
    assert gpt.counts["params_matmul"] == gpt.counts["params_total"] == 2 * 128 * 128 + 160 * 128      # the tied head once
    assert gpt.of == 3 and gpt.converted == 0


def test_one_checkout_after_the_other_and_ours_stays_ours(tmp_path):
    for mark in ("first", "second"):
        load("nanogpt", nanogpt(tmp_path / mark, NANOGPT.replace("MARK\"", f"{mark}\"")))
        assert mark == sys.modules["nanogpt_model"].MARK
        load("nanochat_bf16", nanochat(tmp_path / f"chat {mark}", gpt=GPT_ROOM + f"\nMARK = {mark!r}\n"))
        assert mark == sys.modules["nanochat.gpt"].MARK
    assert sys.modules["model"] is our_model
    assert not any(str(tmp_path) in entry for entry in sys.path)       # its tests/ and scripts/ stay out


def test_attention_is_told(tmp_path):
    lines = load("nanochat_bf16", nanochat(tmp_path / "a")).describe
    assert any("attention by torch (no FlashAttention 3 here), window_pattern L" in line for line in lines)
    lines = load("nanochat_bf16", nanochat(tmp_path / "b", flash_attention="USE_FA3 = True")).describe
    assert any("attention by FlashAttention 3, window_pattern L" in line for line in lines)


# ------------------------------------------------------------------------------------------------------- our own model

@pytest.mark.parametrize("ours, theirs", [("ours_d12", "nanochat_d12"), ("ours_d26", "nanochat_d26")])
def test_our_model_at_their_dimensions_does_the_same_work(ours, theirs):
    size = peers.SIZES[theirs]
    config = GPTConfig(**peers.OURS[ours], n_ctx=1024)
    assert all(getattr(config, key) == size[key] for key in ("n_layer", "n_head", "n_embd"))
    with torch.device("meta"):
        counts = GPT(config).counts()
    C, L = size["n_embd"], size["n_layer"]
    want = 6 * (L * 12 * C * C + 32768 * C) + 12 * L * C * 1024
    assert counts["flops_per_token"] == pytest.approx(want, rel=0.01)
    assert config.head_size == 128 and config.n_ffn % 128 == 0


def test_sizes_follow_the_peers_rules():
    for depth in (12, 26):
        size = peers.SIZES[f"nanochat_d{depth}"]
        assert size["n_embd"] == -(-64 * depth // 128) * 128 and size["n_head"] == size["n_kv_head"] == size["n_embd"] // 128


# ------------------------------------------------------------------------------------------------------------- on a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.NAMES)
def test_a_micro_step_on_a_gpu_is_bf16_and_waits_for_nothing(tmp_path, name):
    folder = (nanogpt if name == "nanogpt" else nanochat)(tmp_path / "peer")
    device = torch.device("cuda", 0)
    subject = load(name, folder, device=device)
    x, y = batch(subject, device=device)
    subject.micro_step(x, y)
    optimizers = subject.make_optimizers()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = []
        for _ in range(3):
            losses.append(subject.micro_step(x, y))
            subject.update(optimizers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all() and all(p.device.type == "cuda" for p in subject.model.parameters())
    if name == "nanogpt":       # autocast: the residual stream is fp32 + BF16, the loss fp32
        assert losses[0].dtype == torch.float32
