"""eval/from_hf.py, runtime/checkpoint.py: a Llama that transformers made comes in bit for bit, learns, goes out again."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_llama import make_llama, read_llama, write_tokenizer

import prepare_data
from configs.continue_llama import config as LLAMA_8B
from eval import export, run_tokenizer
from eval.from_hf import import_checkpoint
from runtime.checkpoint import branch, checkpoints, is_weights_only, load_model, read_manifest
from runtime.cli import UserError
from runtime.config import CheckpointConfig, EvalConfig, FP8Config, ParallelConfig, read_config
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.conftest import call_train

VARIANTS = {
    "llama3": {},                                                               # GQA, llama3 RoPE, untied, an odd vocabulary
    "qwen3": {"architecture": "Qwen3", "tie_word_embeddings": True, "vocab_size": 512, "shard_size": "100KB"},
    "plain": {"rope": {"rope_type": "default", "rope_theta": 10000.0}, "num_key_value_heads": 4, "dtype": torch.float16},
}


@pytest.fixture(scope="module", params=VARIANTS)
def imported(request, tmp_path_factory):
    source = make_llama(tmp_path_factory.mktemp("hub") / request.param, **VARIANTS[request.param])
    run_dir = tmp_path_factory.mktemp("out") / request.param
    assert import_checkpoint(str(source), str(run_dir)) == run_dir / "checkpoints/step_00000000"
    return source, run_dir


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("hub") / "llama", shard_size="100KB")


@pytest.fixture
def source(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "source")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_logits_are_transformers_bit_for_bit(imported):
    source, run_dir = imported
    (ours, _), theirs = load_model(run_dir, compute_dtype=torch.float32), read_llama(source)
    generator = torch.Generator().manual_seed(0)
    for B, T in ((1, 1), (1, 2), (4, 1), (3, 64), (1, 63)):
        x = torch.randint(400, (B, T), generator=generator)
        with torch.no_grad():
            expected = theirs(x).logits
            assert torch.equal(ours(x), expected) and expected.std() > 0.5, (B, T)


def test_the_run_is_whole_and_keeps_its_tokenizer(imported):
    source, run_dir = imported
    config = read_config(run_dir)
    assert config.run == run_dir.name and config.run_dir == run_dir and len(checkpoints(run_dir)) == 1
    raw = json.loads((source / "config.json").read_text())
    assert config.model.vocab_padded == raw["vocab_size"] and config.model.n_ctx == raw["max_position_embeddings"]
    assert config.data.tokenizer == str(run_dir / "tokenizer")
    for file in (run_dir / "tokenizer").iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes()
    assert load_tokenizer(config.data.tokenizer).sha256 == load_tokenizer(str(source)).sha256
    manifest = read_manifest(checkpoints(run_dir)[0])
    assert is_weights_only(manifest) and all(name.startswith("model.") for name in manifest["tensors"])
    facts = manifest["state"]["imported"]
    assert facts["folder"] == source.name and facts["model"] is None and facts["architecture"] == raw["architectures"][0]
    assert {"config.json", "tokenizer.json"} < facts["files"].keys() and any(n.endswith(".safetensors") for n in facts["files"])
    assert sorted(path.name for path in run_dir.parent.iterdir()) == [run_dir.name]


def test_a_licence_is_taken_from_the_card(source, tmp_path):
    (source / "README.md").write_text("---\nlanguage: en\nlicense: llama3.1\ntags:\n- x\n---\nlicense: mit\n")
    manifest = read_manifest(import_checkpoint(str(source), str(tmp_path / "out/run")))
    assert manifest["state"]["imported"]["license"] == "llama3.1"
    (source / "README.md").write_bytes(b"license: mit\n\xff")
    assert read_manifest(import_checkpoint(str(source), str(tmp_path / "out/two")))["state"]["imported"]["license"] is None


def test_a_cache_of_links_is_read(llama, tmp_path):
    """As the Hub's own client keeps its downloads."""
    cache = tmp_path / "models--some-org--a--b" / "snapshots" / "0a1b"
    cache.mkdir(parents=True)
    for path in llama.iterdir():
        (cache / path.name).symlink_to(path)
    linked = read_manifest(import_checkpoint(str(cache), str(tmp_path / "out/run")))["state"]["imported"]
    assert linked["folder"] == "0a1b" and linked["model"] == "some-org/a--b"
    assert all(not path.is_symlink() for path in (tmp_path / "out").rglob("*"))


# ------------------------------------------------------------------------------------------------------------- beginning

def test_a_run_begins_with_the_same_model_and_tokenizer_alone(source, tmp_path):
    checkpoint = import_checkpoint(str(source), str(tmp_path / "out/run"))
    config = read_config(tmp_path / "out/run")
    sha256 = load_tokenizer(config.data.tokenizer).sha256
    new = replace(config, run="new", start_from=str(checkpoint), model=replace(config.model, n_ctx=32, loss_chunk=16),
                  data=replace(config.data, tokens_per_step=64))
    with pytest.raises(UserError, match="norm_eps is 1e-06 there, 1e-05 here; model.rope_theta is 5000.0 there") as caught:
        branch(replace(new, model=replace(new.model, rope_theta=1000.0, norm_eps=1e-5)), sha256, {}, None)
    assert "n_ctx is" not in str(caught.value)
    write_tokenizer(source, bos=None)
    with pytest.raises(UserError, match="its ids mean other text: give data.tokenizer=.*out/run/tokenizer"):
        branch(new, load_tokenizer(str(source)).sha256, {}, None)
    tensors = {"model.norm.weight": torch.zeros(64), "optim.norm.weight.exp_avg": torch.full((64,), 7.0)}
    assert branch(new, sha256, tensors, None)[0] == checkpoint
    assert tensors["model.norm.weight"].std() > 0.1 and (tensors["optim.norm.weight.exp_avg"] == 7).all()
    with pytest.raises(UserError, match="import the model first, python -m eval.export --from-hf DIR .*/out/gone"):
        branch(replace(new, start_from=f"{tmp_path}/out/gone/checkpoints/step_00000000"), sha256, tensors, None)
    with pytest.raises(UserError, match="no finished checkpoint"):
        branch(replace(new, start_from=f"{checkpoint.parent}/step_00000001", steps=9), sha256, tensors, None)


# ---------------------------------------------------------------------------------------------------------- end to end

def write_chat(path, n=300):
    rng, words = random.Random(0), ["cat", "sat", "mat", "dog", "one", "two", "three", "four", "five", "six", "seven"]
    with open(path, "w") as file:
        for i in range(n):
            said = rng.choices(words, k=rng.randint(2, 6))
            prompt, response = f"{i}: say backwards {' '.join(said)}\n", " ".join(reversed(said)) + "."
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")


def response_loss(model, batches):
    """By transformers: mean cross-entropy of the responses' tokens in nats, the norm of its gradient, their number."""
    n = sum(int((y >= 0).sum()) for _, y in batches)
    loss = 0
    for x, y in batches:
        logits, is_target = model(x).logits, y >= 0
        loss = loss - logits.log_softmax(-1)[is_target].gather(1, y[is_target][:, None]).sum() / n
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(), n


def test_an_imported_llama_learns_its_responses_and_goes_back(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert export.main(["--from-hf", str(llama), "out/llama"]) == 0
    write_chat(tmp_path / "chat.jsonl")
    assert prepare_data.main(["local", "chat.jsonl", "name=chat", "instruct=true", "tokenizer=out/llama/tokenizer", "out=data",
                              "val_share=0.1", "processes=1"]) == 0
    capsys.readouterr()
    model = replace(read_config("out/llama").model, n_ctx=32, loss_chunk=48)
    config = replace(
        LLAMA_8B, run="bf16", steps=8, model=model, parallel=ParallelConfig(compile=False, recompute=True),
        start_from="out/llama/checkpoints/step_00000000", optim=replace(LLAMA_8B.optim, lr=5e-3),
        data=replace(LLAMA_8B.data, tokenizer="out/llama/tokenizer", tokens_per_step=512, micro_batch=8, max_epochs=9),
        eval=EvalConfig(every=None, tokens=640), checkpoint=CheckpointConfig(every=None))
    data = open_data(config, load_tokenizer("out/llama/tokenizer").sha256)
    batches = [data.batch(0, micro, 0, 1) for micro in range(2)]
    expected, expected_norm, n = response_loss(read_llama(llama), batches)
    assert n == data.targets(0) and 0.2 < n / 512 < 0.8
    capsys.readouterr()
    finals = {}
    for recipe in ("off", "tensorwise"):
        arm = replace(config, run=f"arm_{recipe}", fp8=FP8Config(recipe=recipe))
        done = call_train(capsys, arm, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        rows = [row for row in map(json.loads, (arm.run_dir / "metrics.jsonl").read_text().splitlines())
                if row.get("kind") == "train"]
        losses = [row["loss"] for row in rows]
        # BF16 against fp32 on weights that are large; with the prompts the mean would be another by far more.
        assert losses[0] == pytest.approx(expected, rel=0.02 if recipe == "off" else 0.05)
        assert rows[0]["grad_norm"] == pytest.approx(expected_norm, rel=0.1 if recipe == "off" else 0.2)
        assert losses[-1] < losses[0] - 1.5
        finals[recipe] = losses[-1]
        assert (arm.run_dir / "tokenizer/tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    assert finals["off"] == pytest.approx(finals["tensorwise"], rel=0.1)
    assert export.main([str(config.run_dir.parent / "arm_tensorwise"), "back", "dtype=fp32"]) == 0
    card = (tmp_path / "back/README.md").read_text()
    assert f"trained on from the weights of {llama.name}, an imported model," in card and "LlamaForCausalLM" in card
    ours, theirs = load_model("out/arm_tensorwise", compute_dtype=torch.float32)[0], read_llama(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(ours(batches[0][0]), theirs(batches[0][0]).logits)
    capsys.readouterr()
    # Without the run's own copy the config's path serves only while the same tokenizer lies there.
    shutil.rmtree("out/arm_off/tokenizer")
    assert run_tokenizer.read_tokenizer(read_config("out/arm_off"), "out/arm_off").prefix == (1, 0)
    write_tokenizer(tmp_path / "out/llama/tokenizer", bos=None)
    with pytest.raises(UserError, match="is not the one that the model of out/arm_off was trained with .*: put that one back"):
        run_tokenizer.read_tokenizer(read_config("out/arm_off"), "out/arm_off")
    shutil.rmtree("out/llama/tokenizer")
    shutil.copytree("out/arm_tensorwise/tokenizer", "out/llama/tokenizer")
    # The same command once more finds the run finished; another model is refused before it begins.
    assert "finished" in call_train(capsys, arm, tmp_path).stdout
    other = call_train(capsys, replace(arm, run="other", model=replace(model, norm_eps=1e-5)), tmp_path)
    assert other.returncode == 2 and "model.norm_eps is 1e-06 there, 1e-05 here" in other.stderr
