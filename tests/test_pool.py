"""Tests of prepare/pool.py against tiktoken's own way with GPT-2's published pattern, and against hostile text and deaths."""

import hashlib
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from prepare.contamination import read_grams
from prepare.pool import Pool
from prepare.source import Batch
from runtime.cli import UserError
from runtime.tokenizer import clean, token_bytes
from tests.conftest import ROOT

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"      # as GPT-2's encoder.py has it
PLANES = [range(128), range(0xD800), range(0xE000, 0x10000), *(range(n << 16, n + 1 << 16) for n in range(1, 17))]
HOSTILE = ["", " \n\t\u2003\x1f", "\u200b", "<|endoftext|>", "a<|endoftext|>b", "x" * 1_000_000, " " * 900_000 + "é",
           "é" * 50_000, "'ll'S 's\r\n\r\n  \t x", "\ufeff\x00", "\ud800", "a\udfffb", "\ud83d\ude00 \ude00\ud83d", "ﷺ" * 999]


@pytest.fixture(scope="module")
def two():
    with Pool("gpt2", 2) as pool:
        yield pool


@pytest.fixture(scope="module")
def reference():
    """(hash, tokens, bytes) and the ids of a document, by tiktoken as a stranger would set it up."""
    ranks = {token: rank for rank, token in enumerate(token_bytes())}
    gpt2 = tiktoken.Encoding("reference", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})

    def encode(text: bytes):
        if not text.decode("utf-8", "replace").strip():
            return (0, 0, 0), []
        text = text.decode("utf-8", "replace")
        ids = [50256, *gpt2.encode_ordinary(text)]
        data = text.encode()
        return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"), len(ids), len(data)), ids
    return encode


def batch(texts, rows=1):
    data = [text if isinstance(text, bytes) else clean(text).encode() for text in texts]
    return Batch(b"".join(data), np.cumsum([len(text) for text in data], dtype=np.int64), rows, 0.25)


def noise(seed: int, count: int) -> list[str]:
    """Strings of all planes, lone surrogates too."""
    rng = random.Random(seed)
    alphabets = [*PLANES, range(0xD800, 0xE000), range(32, 127), [10, 32, 9, 0xA0, 0x2003]]
    texts = []
    for _ in range(count):
        some = rng.sample(alphabets, 2)
        texts.append("".join(chr(rng.choice(rng.choice(some))) * rng.choice([1, 1, 1, 7]) for _ in range(rng.randrange(60))))
    return texts


def check(encoded, texts, reference):
    expected = [reference(text if isinstance(text, bytes) else clean(text).encode()) for text in texts]
    assert [tuple(row) for row in encoded.documents.tolist()] == [row for row, _ in expected]
    assert encoded.ids.dtype == np.uint16 and encoded.ids.tolist() == [i for _, ids in expected for i in ids]


# -------------------------------------------------------------------------------------------------------------- encoding

@pytest.mark.parametrize("processes", [1, 2])
def test_any_text_is_encoded_as_tiktoken_would(processes, two, reference):
    groups = [HOSTILE, *(noise(seed, 150) for seed in range(8)), ["one"], [" "], []]
    with Pool("gpt2", 1) as alone:
        pool = alone if processes == 1 else two
        done = list(pool.encode(batch(texts, 10 + n) for n, texts in enumerate(groups)))
    assert [encoded.rows for encoded in done] == [10 + n for n in range(len(groups))] and done[0].read == 0.25
    for encoded, texts in zip(done, groups, strict=True):
        check(encoded, texts, reference)


def test_bytes_that_are_no_utf8_count_as_what_is_encoded(two, reference):
    rng = random.Random(0)
    texts = [b"\xff", b"a\xed\xa0\x80b", "é".encode()[:1], b"\xf4\x90\x80\x80", b"\xc0\xaf", *map(rng.randbytes, range(200))]
    for encoded in two.encode(iter([batch(texts)])):
        check(encoded, texts, reference)


def test_the_byte_tokenizer_serves_as_well():
    with Pool("byte", 1) as pool:
        (encoded,) = pool.encode(iter([batch(["Aé", "", "b"])]))
    assert encoded.ids.tolist() == [256, 0x41, 0xC3, 0xA9, 256, 0x62]
    assert encoded.documents["tokens"].tolist() == [4, 0, 2] and encoded.documents["bytes"].tolist() == [3, 0, 1]


def test_how_a_file_is_cut_into_batches_changes_nothing(two, reference):
    texts = noise(50, 300)
    for cut in (1, 7, 300):
        done = list(two.encode(batch(texts[at:at + cut]) for at in range(0, 300, cut)))
        whole = type(done[0])(np.concatenate([d.ids for d in done]), np.concatenate([d.documents for d in done]), 0, 0)
        check(whole, texts, reference)


@pytest.mark.parametrize("processes", [1, 2])
def test_contaminated_documents_keep_a_row_and_no_tokens(tmp_path, processes):
    question = "which of these thirteen words in a row may no document of the training set ever hold"
    (tmp_path / "eval.txt").write_text(question)
    texts = ["fine", "x " + question.upper() + "!", question[:40], ""]
    with Pool("gpt2", processes, grams=read_grams([str(tmp_path / "eval.txt")])) as pool:
        (encoded,) = pool.encode(iter([batch(texts)]))
    assert (encoded.documents["tokens"] > 0).tolist() == [True, False, True, False]
    assert encoded.documents["bytes"].tolist() == [4, len(texts[1]), 40, 0] and encoded.documents["hash"][1] > 0
    assert len(encoded.ids) == encoded.documents["tokens"].sum()


def test_an_unknown_tokenizer_is_refused_before_anything_starts():
    with pytest.raises(UserError, match="there is no tokenizer 'gpt3'"):
        Pool("gpt3", 2)


# --------------------------------------------------------------------------------------------------------- order, failures

def slowly(log, count=100, error_at=None):
    try:
        for n in range(count):
            if n == error_at:
                raise OSError("the line is dead")
            log.append(n)
            yield batch([f"document {n}"], n)
    finally:
        log.append("closed")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_reader_runs_ahead_and_not_further(processes):
    with Pool("gpt2", processes) as pool:
        log, ahead = [], 2 * processes + 2
        encoded = pool.encode(slowly(log))
        assert not log, "nothing is read before it is asked for"
        for n in range(5):
            assert next(encoded).rows == n
            wait_for(lambda n=n: len(log) >= n + ahead)
            time.sleep(0.05)
            assert len(log) == n + ahead
        assert [e.rows for e in encoded] == list(range(5, 100)) and log[-1] == "closed"


def test_closing_early_stops_the_reader_and_leaves_the_pool(two, reference):
    for _ in range(3):
        log, before = [], threading.active_count()
        encoded = two.encode(slowly(log))
        next(encoded)
        encoded.close()
        wait_for(lambda before=before: threading.active_count() <= before)
        assert log[-1] == "closed" and len(log) < 20
    check(next(two.encode(iter([batch(["again"])]))), ["again"], reference)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_readers_error_comes_at_its_place(processes, two):
    with Pool("gpt2", 1) as alone:
        pool, rows = alone if processes == 1 else two, []
        with pytest.raises(OSError, match="the line is dead"):
            for encoded in pool.encode(slowly([], error_at=9)):
                rows.append(encoded.rows)
        assert rows == list(range(9))
        assert len(list(pool.encode(slowly([], 3)))) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_an_encoders_error_comes_at_its_place(processes, two):
    broken = Batch(b"abc", np.array([[1]]), 1)      # no list of ends
    with Pool("gpt2", 1) as alone:
        pool, rows = alone if processes == 1 else two, []
        with pytest.raises((RuntimeError, TypeError), match="slice"):
            for encoded in pool.encode(iter([batch(["a"], 1), batch(["b"], 2), broken, batch(["c"], 4)])):
                rows.append(encoded.rows)
        assert rows == [1, 2]


def test_a_result_comes_before_the_next_is_there():
    """In children: test_leaving_ends_the_children_in_mid_work."""
    later = threading.Event()
    with Pool("byte", 1) as pool:
        results = pool.map(lambda act: act(), [int, later.wait])
        assert next(results) == 0
        later.set()
        assert next(results)


@pytest.mark.parametrize("processes", [1, 2])
def test_map_yields_results_in_order(processes, two):
    with Pool("byte", 1) as alone:
        pool = alone if processes == 1 else two
        assert list(pool.map(operator.neg, range(50))) == [-n for n in range(50)]
        assert list(pool.map(operator.neg, [])) == []
        if processes == 2:
            assert len({int(pid) for pid in pool.map(eval, ["__import__('os').getpid()"] * 20)}) == 2
        with pytest.raises(FileNotFoundError) as caught:
            list(pool.map(os.listdir, ["/", "/no such folder", "/"]))
        assert caught.value.filename == "/no such folder"
        with pytest.raises((RuntimeError, ZeroDivisionError), match="division"):
            list(pool.map(eval, ["1/0"]))


# -------------------------------------------------------------------------------------------------------------- processes

def wait_for(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "waited a minute in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(pool: Pool) -> list[int]:
    return sorted(set(pool.map(eval, ["(__import__('time').sleep(0.2), __import__('os').getpid())[1]"] * 4)))


def test_children_are_small_and_load_nothing_else(two):
    modules, status = two.map(eval, ["sorted(__import__('sys').modules)", "open('/proc/self/status').read()"])
    strangers = {"torch", "datasets", "pyarrow", "huggingface_hub", "model", "runtime.config", "pytest"}
    assert strangers.isdisjoint(modules) and "tiktoken" in modules
    assert int(status.split("VmRSS:")[1].split()[0]) < 200_000, "kB"


def test_one_process_has_no_child():
    before = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    with Pool("gpt2", 1) as pool:
        next(pool.encode(iter([batch(["a"])])))
        assert Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text() == before


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_killed_child_is_a_sentence_and_no_hang(moment):
    with Pool("gpt2", 2) as pool:
        first, second = pids(pool)
        log = []
        if moment == "idle":
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: not is_alive(first))
        with pytest.raises(OSError, match=rf"process {first} .* killed by signal 9, .*memory: fewer processes="):
            for encoded in pool.encode(batch(["word " * 100_000 + str(n)], n) for n in range(60)):
                log.append(encoded.rows)
                if moment == "busy" and len(log) == 3:
                    os.kill(first, signal.SIGKILL)
        assert log == list(range(len(log))) and len(log) < 12
    assert not is_alive(first) and not is_alive(second)


def test_leaving_ends_the_children_in_mid_work():
    with Pool("gpt2", 2) as pool:
        children = pids(pool)
        results = pool.map(time.sleep, [0, 600])    # the second one goes to the other child
        next(results)
    assert not any(map(is_alive, children))


PARENT = """
import sys, time
from prepare.pool import Pool
from prepare.source import Batch
import numpy as np
with Pool("gpt2", 2) as pool:
    pids = set(pool.map(eval, ["(__import__('time').sleep(0.2), __import__('os').getpid())[1]"] * 4))
    print(*pids, flush=True)
    if sys.argv[1] == "encoding":
        text = b"!" * 400_000
        for _ in pool.encode(Batch(text, np.array([len(text)]), 1) for _ in range(10**6)):
            print("on", flush=True)
    if sys.argv[1] == "mapping":    # both pipes of both children; a line in one write, as two print at once
        list(pool.map(eval, ["__import__('os').write(1, bytes([111, 110, 10])) and __import__('time').sleep(600)"] * 4))
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["idle", "encoding", "mapping"])
def test_children_end_with_a_parent_that_is_killed(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children = list(map(int, parent.stdout.readline().split()))
    assert len(children) == 2 and all(map(is_alive, children))
    if how != "idle":
        assert parent.stdout.readline() == parent.stdout.readline() == "on\n"
        time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(is_alive, children)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_is_the_parents_alone(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "encoding"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.PIPE, start_new_session=True)
    children = list(map(int, parent.stdout.readline().split()))
    parent.stdout.readline()
    for child in children:
        os.kill(child, number)
    parent.stdout.readline()
    parent.stdout.readline()        # they work on
    assert all(map(is_alive, children))
    os.killpg(parent.pid, number)
    _, errors = parent.communicate()
    assert parent.returncode == -number
    assert errors.count("Traceback") == (number == signal.SIGINT), errors
    wait_for(lambda: not any(map(is_alive, children)))
