"""eval/public.py: a tiny model of transformers' own, made on the spot, scored by the same command as our runs."""

import json
import sys

import pytest
import torch

from eval import harness, task_list
from eval.public import public_dir, public_lm
from runtime.cli import UserError

CPU = torch.device("cpu")
TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "what is it that the cat saw"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random GPT-2 of two blocks over a word-level vocabulary, saved as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("hub") / "tiny-gpt2"
    words = sorted({word for text in TEXTS for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", "<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words) + 2, n_positions=64, n_embd=16, n_layer=2, n_head=2,
                                       bos_token_id=0, eos_token_id=0, initializer_range=0.5))
    model.save_pretrained(folder)
    return folder


def directly(folder, context, continuation, dtype=torch.float32):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    first, ids = (tokenizer(text).input_ids for text in (context, context + continuation))
    logp = model(torch.tensor([ids])).logits.float().log_softmax(-1)[0]
    return sum(logp[t - 1, ids[t]].item() for t in range(len(first), len(ids)))


@pytest.mark.parametrize("dtype, micro_batch", [("float32", 4), ("bfloat16", 1)])
def test_log_likelihoods_are_the_models_own(model_dir, dtype, micro_batch):
    from types import SimpleNamespace
    lm = public_lm(str(model_dir), CPU, dtype, micro_batch)     # of BF16 logits the softmax is taken in fp32, as of ours
    pairs = [("the cat", " sat on the mat"), ("a", " dog"), ("what is it", " that the cat saw")]
    got = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)
    for (total, _), pair in zip(got, pairs, strict=True):
        assert total == pytest.approx(directly(model_dir, *pair, getattr(torch, dtype)), abs=1e-4)
    assert lm.version and lm.n_truncated is None


def test_the_command_scores_it_beside_our_runs(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"context": "the cat", "answers": ["sat on the mat", "ran over the hill"], "gold": i % 2} for i in range(6)]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "cats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "cats.yaml").write_text(
        f"task: cats\ndataset_path: json\ndataset_kwargs: {{data_files: {{validation: {tmp_path / 'tasks' / 'cats.jsonl'}}},"
        f" cache_dir: {tmp_path / 'cache'}}}\noutput_type: multiple_choice\nvalidation_split: validation\ndoc_to_text: context\n"
        "doc_to_choice: answers\ndoc_to_target: gold\nmetric_list:\n"
        "  - {metric: acc, aggregation: mean, higher_is_better: true}\nmetadata: {version: 1.0}\n")
    assert harness.main([f"hf:{model_dir}", "tasks=cats", "include=tasks", "dtype=float32", "device=cpu"]) == 0
    record, = (json.loads(path.read_text()) for path in (tmp_path / public_dir(str(model_dir)) / "eval").glob("*.json"))
    assert record["run"] == f"hf:{model_dir}" and record["tasks"]["cats"]["acc"] == 0.5     # each answer is right three times
    capsys.readouterr()
    from eval import table
    assert table.main(["out"], str(tmp_path / "table")) == 0
    assert "| tiny-gpt2, float32" in capsys.readouterr().out


@pytest.mark.parametrize("name, folder", [
    ("gpt2", "hf_gpt2"), ("EleutherAI/pythia-160m", "hf_EleutherAI_pythia-160m"), ("/data/models/x/", "hf_data_models_x"),
    ("../..", "hf_.._.."), ("/", "hf_model"), ("a" * 400, "hf_" + "a" * 150)])
def test_scores_lie_in_a_folder_of_their_own_below_out(name, folder):
    assert public_dir(name).parts == ("out", folder)


@pytest.mark.parametrize("name", ["no such name", "a/b/c", "a/..", "", "x;y"])
def test_a_name_that_is_none_gets_a_sentence(name):
    with pytest.raises(UserError, match="is neither a folder nor a name such as hf:gpt2"):
        public_lm(name, CPU, "float32", 1)


def test_folders_that_hold_no_safe_model_get_a_sentence(model_dir, tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        public_lm(str(tmp_path / "nowhere"), CPU, "float32", 1)
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(UserError, match=r"has no \*\.safetensors$"):
        public_lm(str(folder), CPU, "float32", 1)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match=r"only pytorch_model.bin, which can run code when read"):
        public_lm(str(folder), CPU, "float32", 1)
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="could not be loaded"):
        public_lm(str(folder), CPU, "float32", 1)


def test_code_that_a_model_brings_along_is_not_run(model_dir, tmp_path):
    folder = tmp_path / "own_code"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nEvil = Model = None\n")
    with pytest.raises(UserError, match="brings code of its own, which is not run here"):
        public_lm(str(folder), CPU, "float32", 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["transformers", "accelerate"])
def test_without_transformers_a_sentence_says_what_to_install(model_dir, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="pip install transformers accelerate"):
        public_lm(str(model_dir), CPU, "float32", 1)


def test_without_network_a_sentence_says_so(monkeypatch):
    import lm_eval.models.huggingface as theirs

    def fail(**settings):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files\nmore")
    monkeypatch.setattr(theirs, "HFLM", fail)
    with pytest.raises(UserError, match=r"hf:gpt2 could not be loaded \(OSError: We couldn't.*\): check the name, .*Hub"):
        public_lm("gpt2", CPU, "float32", 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")       # what offline= does
    with pytest.raises(UserError, match=r"hf:gpt2 could not be loaded without network .*: it must lie in the Hub's cache"):
        public_lm("gpt2", CPU, "float32", 1)


def test_local_tasks_do_not_cut_a_public_model_off_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def quiet(offline):
        asked.append(offline)
        raise UserError("enough")
    monkeypatch.setattr(task_list, "quiet", quiet)
    monkeypatch.setattr(task_list, "is_local", lambda names, include: True)
    for extra in ([], ["offline=saved"]):
        assert harness.main(["hf:gpt2", "tasks=cats", *extra]) == 2
    assert asked == [False, True]
