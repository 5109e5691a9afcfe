"""eval/batches.py, the KV cache behind it and eval/ranks.py: what is computed once or by another gives the same answer."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eval_runs import BYTES, TINY, build, build_lm, expected_pair, request, words

from eval import batches
from eval.lm import CheckpointLM
from eval.ranks import Ranks
from model import KVCache
from runtime.cli import UserError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", [{}, {"n_kv_head": 1}, {"qk_norm": True}])
@torch.no_grad()
def test_a_filled_cache_takes_several_tokens_of_several_rows(kind):
    model = build(replace(TINY, **kind))
    x = torch.randint(257, (3, 30), generator=torch.Generator().manual_seed(0))
    want, cache = model(x), KVCache()
    parts = [model(x[:, a:b], cache=cache) for a, b in ((0, 9), (9, 20), (20, 21), (21, 30))]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=2e-4, rtol=1e-5)
    cache = KVCache()
    model(x[:2, :9], cache=cache)
    own, rows = cache.rows(torch.tensor([1, 0, 1])), torch.tensor([1, 0, 1])
    got = model(x[:, 9:], cache=own)        # other rows after those of the cache
    torch.testing.assert_close(got, model(torch.cat((x[rows, :9], x[:, 9:]), 1))[:, 9:], atol=2e-4, rtol=1e-5)
    assert (cache.length, own.length) == (9, 30)
    torch.testing.assert_close(model(x[:2, 9:], cache=cache), want[:2, 9:], atol=2e-4, rtol=1e-5)      # its own is untouched


def random_rows(rng):
    """Rows of the kinds that tasks make: a few-shot beginning for all, questions, choices; loners, prefixes of others."""
    few_shot = [rng.randrange(9) for _ in range(rng.choice([0, 40]))]
    rows = []
    for _ in range(rng.randint(1, 12)):
        question = few_shot + [rng.randrange(9) for _ in range(rng.randint(1, 30))]
        rows += [tuple(question + [rng.randrange(9) for _ in range(rng.randint(0, 9))]) for _ in range(rng.randint(1, 4))]
    return list(dict.fromkeys(rows))


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_in_one_batch_with_those_it_begins_like(seed):
    rng = random.Random(seed)
    rows, budget = random_rows(rng), rng.choice([1, 64, 400])
    plan = batches.plan(rows, budget)
    assert sorted(row for batch in plan for group in batch.groups for row in group) == list(range(len(rows)))
    for batch in plan:
        n, longest = len(batch.groups), max(len(rows[row]) for group in batch.groups for row in group)
        assert n == 1 or n * (batch.past or longest) <= max(budget, longest)
        for group in batch.groups:
            assert len({rows[row][:batch.past] for row in group}) == 1 and (len(group) == 1 or batch.past >= 6)
        lengths = [len(rows[row]) - batch.past for group in batch.groups for row in group if len(rows[row]) > batch.past]
        chunks = batches.chunks(lengths, batch.past, budget)
        assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
        assert all(lengths[chunk[0]] == max(lengths[i] for i in chunk) for chunk in chunks)


def test_few_shot_examples_are_computed_once_and_choices_share_their_question():
    shots = tuple(range(100))
    questions = [shots + (200 + i,) * 10 for i in range(5)]
    assert batches.plan(questions, 10_000) == [batches.Batch(100, [[0, 1, 2, 3, 4]])]
    a, b = (1,) * 30, (2,) * 30
    rows = [(*a, 5), (*b, 5), (*a, 6), (*b, 6, 6), (3,) * 31]
    assert batches.plan(rows, 10_000) == [batches.Batch(0, [[4]]), batches.Batch(30, [[0, 2], [1, 3]])]
    opening = (7,) * 12         # "Question: how do I": less than a question has in common with itself
    longer = [opening + row for row in rows]
    assert batches.plan(longer, 10_000) == [batches.Batch(0, [[4]]), batches.Batch(42, [[0, 2], [1, 3]])]


@pytest.mark.parametrize("micro_batch, n_shots", [(1, 12), (50, 12), (1, 0), (50, 0)])
def test_shared_contexts_score_as_each_alone(micro_batch, n_shots):
    """Against log-likelihoods taken one token at a time; little more than half of all tokens go through the model."""
    rng, seen, model = random.Random(5), [], build(replace(TINY, n_ctx=128))
    shots = words(rng, n_shots)
    pairs = [(f"{shots} {question}", f" {choice}") for question in (words(rng, 4) for _ in range(6))
             for choice in ("yes", "yes indeed", "no", "n", "n")]       # one continuation within another, one twice
    pairs += [(shots or "nothing", " alone"), ("", "starts"), ("q", " " + words(rng, 15)), (words(rng, 40), " beyond")]
    model.wte.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    got = build_lm(model, micro_batch).loglikelihood([request(*pair) for pair in pairs])
    assert sum(seen) < sum(min(len(a + b), 128) for a, b in pairs) * 0.6
    for (total, greedy), pair in zip(got, pairs, strict=True):
        expected, expected_greedy = expected_pair(model, *pair)
        assert total == pytest.approx(expected, abs=3e-4, rel=1e-5) and greedy == expected_greedy, pair


def test_a_tokenizer_that_begins_texts_does_so_as_in_hflm():
    """HFLM 0.4.13: the beginning before a context, in place of an empty one, and rolling twice, where it is scored too."""
    model, begins = build(), replace(BYTES, prefix=(256, 255), adds_start=True)
    lm = CheckpointLM(model, begins, 4, torch.device("cpu"))
    seen = []
    model.wte.register_forward_hook(lambda module, args, out: seen.extend(args[0].tolist()))
    for ask, want in [(lambda: lm.loglikelihood([request("ab", "c")]), [255, *b"ab"]),
                      (lambda: lm.loglikelihood([request("", "cd")]), [255, *b"c"]),
                      (lambda: lm.loglikelihood_rolling([request("xyz")]), [255, 255, *b"xy"])]:
        seen.clear()
        ask()
        assert seen == [want]
    assert build_lm(model).tok_encode("ab") == list(b"ab") and build_lm(model).prefix_token_id == 256
    names = CheckpointLM(model, replace(BYTES, prefix=(256, 255)), 4, torch.device("cpu"))     # has such a token, adds none
    assert names.tok_encode("ab") == list(b"ab") and names.prefix_token_id == 255


class Pretended(Ranks):
    """One of several ranks whose partners' values are given."""

    def __init__(self, others):
        super().__init__(0, len(others) + 1)
        self.others = others

    def gather(self, value):
        return [value, *self.others]


def test_a_mistake_of_one_rank_is_told_by_all():
    def mistake():
        raise UserError("no such file")
    assert Pretended([None, None]).together(lambda: 3) == 3
    for ranks, work, kind, sentence in [
            (Pretended([None]), mistake, UserError, "rank 0: no such file"),
            (Pretended([(True, "no such file")]), mistake, UserError, "no such file"),
            (Pretended([None, (False, "out of memory")]), lambda: 3, OSError, "rank 2: out of memory"),
            (Pretended([None]), lambda: 1 / 0, OSError, "rank 0: division by zero")]:
        with pytest.raises(kind) as caught:
            ranks.together(work)
        assert str(caught.value) == sentence


WORKER = """
import pickle, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from eval.ranks import joined, leave
from eval.lm import CheckpointLM
from eval_runs import BYTES, build, request
pairs, out = pickle.load(open(sys.argv[1], "rb"))
with joined() as ranks:
    lm = CheckpointLM(build(), BYTES, 1, torch.device("cpu"), ranks)
    answers = lm.loglikelihood([request(*pair) for pair in pairs])
    generated = lm.generate_until([request(a, {{"until": ["e"], "max_gen_toks": 4}}) for a, b in pairs])
    pickle.dump((ranks.size, answers, generated), open(f"{{out}}{{ranks.rank}}", "wb"))
leave(0)
"""


def test_two_processes_answer_as_one_bit_for_bit(tmp_path):
    import pickle
    rng = random.Random(3)
    pairs = [(words(rng, 3), " " + words(rng, 1)) for _ in range(20)] + [("the same context", f" {i}") for i in range(5)]
    (tmp_path / "pairs").write_bytes(pickle.dumps((pairs, str(tmp_path / "rank"))))
    (tmp_path / "worker.py").write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(tmp_path / "worker.py"), str(tmp_path / "pairs")], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lm = build_lm(build(), 1)
    alone = (lm.loglikelihood([request(*pair) for pair in pairs]),
             lm.generate_until([request(a, {"until": ["e"], "max_gen_toks": 4}) for a, _ in pairs]))
    torch.set_num_threads(threads)
    for rank in (0, 1):
        assert pickle.loads((tmp_path / f"rank{rank}").read_bytes()) == (2, *alone)
