"""Prompts and responses: what lies in the shards, which tokens are targets, kills, and what cannot be read."""

import json
import re
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pytest

import prepare_data
from eval import held_out
from model import GPTConfig
from runtime.config import Config, DataConfig, EvalConfig, OptimConfig
from runtime.data import open_data
from runtime.run import save_sequence_losses
from runtime.shards import read_index
from runtime.tokenizer import load_tokenizer
from tests.prepare_runs import Forge, content, is_a_sentence
from tests.text_files import refused, some_documents, write_tokenizer

LOSS_MASK_BIT, VAL_PER_10K = 2**31, 3000


def some_pairs(n=60, seed=3):
    texts = some_documents(2 * n, seed)
    pairs = list(zip(texts[:n], texts[n:], strict=True))
    # The same two texts parted elsewhere are another pair; an empty prompt is one too; rows without a response are none.
    pairs += [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("abc", " \n"), ("", ""), pairs[0], (pairs[1][0], "other")]
    return pairs


PAIRS = some_pairs()


def lines(pairs):
    return "".join(json.dumps({"id": i, "prompt": p, "response": r}) + "\n" for i, (p, r) in enumerate(pairs)).encode()


def due(pairs, tok):
    """What must lie in the shards, told a second time: ids of each split, whether each is a target, bytes of the responses."""
    seen, found = set(), {"train": ([], [], 0, 0), "val": ([], [], 0, 0)}
    for prompt, response in pairs:
        digest = int.from_bytes(blake2b(f"{prompt}\0{response}".encode(), digest_size=8).digest(), "little")
        if not response.strip() or digest in seen:
            continue
        seen.add(digest)
        first, *rest = tok.prefix
        head, tail = tok.encode(prompt).tolist(), tok.encode(response).tolist()
        split = "val" if digest % 10_000 < VAL_PER_10K else "train"
        ids, targets, text_bytes, documents = found[split]
        found[split] = ([*ids, first, *rest, *head, *tail],
                        [*targets, True, *[False] * len(rest + head), *[True] * len(tail)],
                        text_bytes + len(response.encode()), documents + 1)
    return found


def command(path, out, tokenizer, *more, processes=1):
    return ["local", str(path), "instruct=true", "name=chat", f"tokenizer={tokenizer}", f"val_share={VAL_PER_10K / 10_000}",
            f"out={out}", f"processes={processes}", *more]


@pytest.fixture(scope="module", params=["byte", "gpt2", "folder"])
def chat(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("chat")
    name = str(write_tokenizer(base / "tokenizer")) if request.param == "folder" else request.param
    (base / "chat.jsonl").write_bytes(lines(PAIRS))
    assert prepare_data.main(command(base / "chat.jsonl", base / "data", name, processes=1 + (name == "byte"))) == 0
    return SimpleNamespace(data=base / "data", tok=load_tokenizer(name), name=name, file=base / "chat.jsonl")


def config(chat, eval_tokens=160):
    return Config(run="t", out=str(chat.data.parent / "out"), steps=6, optim=OptimConfig(lr=1e-3),
                  eval=EvalConfig(tokens=eval_tokens),
                  model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=16, n_ctx=16, vocab_size=chat.tok.vocab_size),
                  data=DataConfig(dir=str(chat.data), mixture={"chat": 1}, tokenizer=chat.name, tokens_per_step=128,
                                  micro_batch=2, max_epochs=99))


# ----------------------------------------------------------------------------------------------------------- the shards

def test_shards_hold_prompts_as_context_and_responses_as_targets(chat, capsys):
    index, expected = read_index(chat.data / "chat"), due(PAIRS, chat.tok)
    assert index.selection == {"instruct": ["prompt", "response"]}
    assert index.is_masked and index.dtype == "<u4" and index.duplicates == {"chat": 1} and index.empty == 3
    for name, (ids, targets, text_bytes, documents) in expected.items():
        split = index.splits[name]
        raw = np.fromfile(split.shards[0].path, "<u4")
        assert (raw & ~np.uint32(LOSS_MASK_BIT)).tolist() == ids and (raw < LOSS_MASK_BIT).tolist() == targets
        assert (split.tokens, split.text_bytes, split.documents) == (len(ids), text_bytes, documents)
    assert prepare_data.main(command(chat.file, chat.data, chat.name)) == 0, "the same command finds it complete"
    assert prepare_data.main(["--show", str(chat.data)]) == 0
    assert re.search(r"^chat +targets +the responses and the ends of documents", capsys.readouterr().out, re.M)


def test_validation_counts_targets_and_bytes_of_responses_and_held_out_tasks_read_both(chat, tmp_path):
    ids, is_target, text_bytes, _ = due(PAIRS, chat.tok)["val"]
    val = open_data(config(chat), chat.tok.sha256).val("chat")
    _, y = val.batch(0, len(val))
    assert val.targets.tolist() == (y != -100).sum(1).tolist() and val.tokens == val.targets.sum() < len(val) * 16
    assert val.text_bytes == round(val.tokens * text_bytes / sum(is_target))
    losses = SimpleNamespace(sequences={"chat": np.arange(len(val), dtype=float)}, targets={"chat": val.targets})
    save_sequence_losses(tmp_path / "val_losses.npz", losses, losses)
    assert np.load(tmp_path / "val_losses.npz")["n_tokens"].tolist() == val.targets.tolist()
    config(chat).run_dir.mkdir(parents=True, exist_ok=True)
    (config(chat).run_dir / "config.json").write_text(json.dumps(config(chat).to_dict()))
    ((_, texts),) = held_out._sources(str(config(chat).run_dir))
    found = [texts[i] for i in range(len(texts))]
    whole = [p + r for p, r in dict.fromkeys(PAIRS) if r.strip()]
    assert len(found) == read_index(chat.data / "chat").splits["val"].documents and set(found) <= set(whole)


# ----------------------------------------------------------------------------------------------- kills, what is refused

def test_a_killed_prepare_ends_as_if_nothing_had_happened(tmp_path):
    """SIGKILL at the layout and among the shards; then the same command again."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_bytes(lines(some_pairs(150, 7)))
    forge = Forge(tmp_path, packages=["tokenizers"])
    try:
        code, said = forge.run(*command(tmp_path / "a.jsonl", tmp_path / "calm/out", folder), folder=str(tmp_path / "calm"),
                               trace=str(tmp_path / "trace"))
        assert code == 0, said
        calm, trace = content(tmp_path / "calm/out/chat"), (tmp_path / "trace").read_text().splitlines()
        assert {"train_00002.bin", "val_00000.bin"} <= calm.keys(), "several shards"
        for words in ("layout.json", "train_00001.bin"):
            out = tmp_path / words / "out"
            at = max(number for number, line in enumerate(trace, 1) if words in line)
            code, _ = forge.run(*command(tmp_path / "a.jsonl", out, folder), folder=str(out.parent), at=at, fault="kill")
            assert code != 0
            code, said = forge.run(*command(tmp_path / "a.jsonl", out, folder))
            assert code == 0 and content(out / "chat") == calm, said
    finally:
        forge.close()


def test_what_was_made_as_pairs_does_not_go_on_as_text(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(PAIRS).replace(b'"response"', b'"text": "x", "response"'))
    pairs = command(tmp_path / "a.jsonl", tmp_path / "out", "byte")
    assert prepare_data.main(pairs) == 0
    capsys.readouterr()
    assert prepare_data.main([word for word in pairs if word != "instruct=true"]) == 2
    assert "delete it, or give another" in (said := capsys.readouterr().err) and is_a_sentence(said)


@pytest.mark.parametrize("line, sentence", [
    ('{"instruction": "a", "output": "b"}', "a.jsonl:41 has no 'prompt', only instruction, output: with instruct=true each line"),
    ('{"prompt": ["a"], "response": "b"}', "a.jsonl:41: column 'prompt' holds list, not text"),
    ('["a", "b"]', 'a.jsonl:41 is not an object: each line must look like {"prompt": "...", "response": "..."}')])
def test_lines_that_are_no_pairs_are_sentences(tmp_path, capsys, line, sentence):
    (tmp_path / "a.jsonl").write_bytes(lines(PAIRS[:40]) + line.encode() + b"\n")
    assert prepare_data.main(command(tmp_path / "a.jsonl", tmp_path / "out", "byte")) in (1, 2)
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said and not list(tmp_path.rglob("index.json"))


@pytest.mark.parametrize("name, more, sentence", [
    ("a.txt", (), "a.txt: its name must end in .jsonl"), ("a.jsonl", ("column=body",), "column=body names one text a row")])
def test_options_that_do_not_fit_are_sentences(tmp_path, capsys, name, more, sentence):
    (tmp_path / name).write_bytes(lines(PAIRS))
    assert sentence in refused(capsys, *command(tmp_path / name, tmp_path / "out", "byte", *more), out=tmp_path)


def test_halves_of_characters_and_nulls_are_text_and_contaminated_pairs_are_left_out_whichever_part_it_is(tmp_path):
    gram = "which of these thirteen words in a row may no document of the set ever hold"
    (tmp_path / "eval.txt").write_text(gram)
    words = gram.split()
    rows = [("x " + gram, "fine"), ("fine", gram), (" ".join(words[:7]), " ".join(words[7:]))]
    odd = [rf'{{"prompt": "\ud83d {i}", "response": "a\udfff"}}' for i in range(30)] + ['{"prompt": null, "response": "r"}']
    (tmp_path / "a.jsonl").write_bytes(lines(rows) + "\n".join(odd).encode())
    against = f"decontaminate={tmp_path / 'eval.txt'}"
    assert prepare_data.main(command(tmp_path / "a.jsonl", tmp_path / "out", "byte", against)) == 0
    assert read_index(tmp_path / "out/chat").contaminated == 3
    raw = [np.fromfile(path, "<u4") for path in (tmp_path / "out/chat").glob("*.bin")]
    targets = bytes(int(i) for ids in raw for i in ids if i < 256)
    assert targets.count("a\ufffd".encode()) == 30 and targets.count(b"r") == 1
