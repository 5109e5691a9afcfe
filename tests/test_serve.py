"""eval/serve.py, eval/server.py and eval/curve.py over real connections: what is answered, refused, stopped and drawn."""

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from eval_runs import build_run
from serve_runs import Speller, serving

from eval import curve, sample, serve, server
from eval.streaming import Piece, pieces
from tests.conftest import ROOT, call_train


@pytest.fixture
def run(tmp_path, monkeypatch):
    return build_run(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """One server for all that is refused."""
    with pytest.MonkeyPatch.context() as patch, serving(build_run(tmp_path_factory.mktemp("held"), patch)) as server:
        yield server


def ask(server, body=None, method="POST", path="/generate", **headers):
    """The answer to one request, with its connection open; `body` as JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.connection = connection
    return answer


def events(answer):
    return [json.loads(block.removeprefix("data: ")) for block in answer.read().decode().split("\n\n")[:-1]]


def texts(events, n=1):
    rows = [""] * n
    for event in events:
        for row, text, _ in event.get("pieces", []):
            rows[row] += text
    return rows


def begun(server, body):
    """A request that is being answered: its first event has come."""
    answer = ask(server, body)
    assert answer.status == 200 and answer.readline().startswith(b"data: ") and answer.readline() == b"\n"
    return answer


def drop(answer):
    """Go away without a word, as a browser does."""
    answer.close()
    answer.connection.close()


# ------------------------------------------------------------------------------------------------------------- answering

def test_the_page_streams_what_the_command_prints(run):
    asked = {"prompt": "hé", "n": 3, "tokens": 20, "temperature": 1.0, "top_k": None, "seed": 5}
    out = io.StringIO()
    sample.sample(sample.Options(run=str(run), device="cpu", dtype="float32", **asked), out)
    printed = [part.split("\n", 1)[1].removesuffix("\n") for part in out.getvalue().split("-" * 32)[1:]]
    with serving(run) as server:
        got = events(ask(server, asked))
        assert ["hé" + text for text in texts(got, 3)] == printed and len(set(printed)) == 3
        assert got[-1]["seed"] == 5 and re.fullmatch(r"60 tokens in [\d.]+ s", got[-1]["done"])
        assert {end for event in got[:-1] for _, _, end in event["pieces"]} == {None, "limit"}
        free = [events(ask(server, {"prompt": "h", "tokens": 20})) for _ in range(2)]
        assert free[0][-1]["seed"] != free[1][-1]["seed"] and texts(free[0]) != texts(free[1])
        again = events(ask(server, {"prompt": "h", "tokens": 20, "seed": free[0][-1]["seed"]}))
        assert texts(again) == texts(free[0])
        assert texts(events(ask(server, {"prompt": "\ud83e a \ud83e\udd16", "tokens": 2})))      # half a character, a whole one


def test_tokens_are_sent_as_they_come(run):
    speller = Speller("abcdefgh")
    speller.gate.clear()
    with serving(run, speller.model) as server:
        answer = begun(server, {"prompt": "x"})
        assert speller.steps == 1       # the second has not been drawn
        speller.gate.set()
        assert texts(events(answer)) == ["bcdefgh"]     # the first has been read
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"


def test_the_page_names_the_run_and_loads_nothing_from_elsewhere(run):
    evil = run.with_name("<b>$name & co")
    run.rename(evil)
    (evil / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 3.5}\n{"kind": "train", "st')
    with serving(evil) as server:
        answers = [ask(server, method="GET", path="/?x=1") for _ in range(2)]
        pages = [answer.read().decode() for answer in answers]
        with (evil / "metrics.jsonl").open("a") as file:
            file.write('\n{"kind": "val", "step": 1, "loss": 3.25}\n')
        assert "validation loss 3.250" in ask(server, method="GET", path="/").read().decode()     # the curve of now
    assert answers[0].status == 200 and "<b>" not in pages[0] and "&lt;b&gt;$name &amp; co" in pages[0]
    assert "training loss 3.500 at step 1" in pages[0] and "validation loss" not in pages[0]
    assert "32,928 in 2 blocks of width 32" in pages[0] and "32 tokens of a vocabulary of 257" in pages[0]
    elsewhere = r"""(src|href)=["']?(?!["']?data:,)|https?:|@import|\son\w+=|\$"""
    assert not re.search(elsewhere, pages[0].replace("&lt;b&gt;$name", ""))
    nonces = [re.search("script-src 'nonce-([^']+)'", answer.headers["Content-Security-Policy"])[1] for answer in answers]
    assert nonces[0] != nonces[1] and all(page.count(f'nonce="{nonce}"') == 2 for page, nonce in zip(pages, nonces, strict=True))
    assert "default-src 'none'" in answers[0].headers["Content-Security-Policy"]
    assert not [name for name in answers[0].headers if name.lower().startswith("access-control")]


def test_what_the_page_says_of_a_model(run, monkeypatch):
    options = serve.Options(run=str(run), device="cpu", fp8="tensorwise")
    ready = sample.load_for_inference(str(run), "cpu", "bfloat16", "tensorwise")
    facts = dict(serve.model_facts(options, ready, 12))
    assert facts["trained in"] == "BF16" and facts["trained on"] == "384 tokens in 12 steps"
    assert facts["answers in"].startswith("bfloat16 on cpu; fp8:")
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(stored | {"fp8": {"recipe": "rowwise"}}))
    assert dict(serve.model_facts(options, ready, 12))["trained in"] == "FP8, rowwise"
    assert dict(serve.model_facts(options, ready, 0))["trained"] == "not here: imported weights"


# -------------------------------------------------------------------------------------------------------------- stopping

def test_who_leaves_stops_the_model(run):
    speller = Speller("x" * 400, delay_s=0.05, n_ctx=512)
    with serving(run, speller.model) as server:
        drop(begun(server, {"prompt": "x", "tokens": 400}))
        assert server.line.is_empty(30)
        steps = speller.steps
        time.sleep(0.3)
        assert speller.steps == steps < 200
        speller.text = speller.text[:steps + 3]
        assert texts(events(ask(server, {"prompt": "x"}))) == ["xxx"]      # and the next one is served


def test_one_at_a_time_in_the_order_in_which_they_came(run, monkeypatch):
    monkeypatch.setattr(server, "WAITING", 2)
    speller = Speller("x" * 1000)
    speller.gate.clear()
    order, active = [], []

    def watched(*args):
        steps = sample.continuations(*args)

        def told():
            order.append(args[1].seed)
            active.append(1)
            assert len(active) == 1
            yield from steps
            active.pop()
        return told()
    monkeypatch.setattr(server, "continuations", watched)
    with serving(run, speller.model) as held:
        first = begun(held, {"prompt": "x", "tokens": 9, "seed": 1})
        answers = [first]
        for seed in (2, 3):
            answers.append(ask(held, {"prompt": "x", "tokens": 3, "seed": seed}))      # the head comes at once
            until(lambda: len(held.line._tickets) == len(answers))
        refused = ask(held, {"prompt": "x", "seed": 4})
        assert refused.status == 503 and refused.headers["Retry-After"] == "5"
        assert json.load(refused) == {"error": "2 requests are waiting already: try again in a moment"}
        drop(answers.pop(1))        # who leaves the line makes room, and nothing is generated for him
        until(lambda: len(held.line._tickets) == 2)
        answers.append(ask(held, {"prompt": "x", "tokens": 3, "seed": 5}))
        until(lambda: len(held.line._tickets) == 3)
        speller.gate.set()
        assert [events(answer)[-1]["seed"] for answer in answers] == [1, 3, 5]
    assert order == [1, 3, 5]


def until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_does_not_read_or_does_not_ask_holds_nobody_up(run, monkeypatch, capsys):
    assert 0 < server.Handler.timeout <= 60
    monkeypatch.setattr(server.Handler, "timeout", 1.0)

    def endless(*args):
        while True:
            yield [Piece(0, "x" * 2**20, None)]
    with serving(run) as held:
        idle = socket.create_connection(held.server_address[:2])
        idle.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        with monkeypatch.context() as patched:
            patched.setattr(server, "continuations", endless)
            deaf = ask(held, {})
            until(lambda: held.line._tickets)
            assert held.line.is_empty(30)
        assert idle.recv(1) == b""      # cut off too
        assert len(texts(events(ask(held, {"tokens": 2})))) == 1
        drop(deaf)
        idle.close()
    assert capsys.readouterr().err == ""        # it is no error of the server's


def test_connections_are_counted_and_given_back(run, monkeypatch):
    """Threads are memory: a client that opens connections and asks nothing gets so many and no more."""
    assert server.Server.request_queue_size >= 2 * server.WAITING
    monkeypatch.setattr(server, "CONNECTIONS", 3)
    with serving(run) as held:
        idle = [socket.create_connection(held.server_address[:2]) for _ in range(3)]
        until(lambda: held._free._value == 0)
        with socket.create_connection(held.server_address[:2], timeout=server.PATIENCE_S / 2) as more:
            assert more.recv(1) == b""      # at once, not when patience ends
        for client in idle:
            client.close()
        until(lambda: held._free._value == 3)
        assert ask(held, method="GET", path="/").status == 200

        def fail(thread):
            raise RuntimeError("can't start new thread")
        until(lambda: held._free._value == 3)
        with monkeypatch.context() as patch:
            patch.setattr(server.threading.Thread, "start", fail)
            patch.setattr(held, "handle_error", lambda *args: None)
            with socket.create_connection(held.server_address[:2]) as more:
                assert more.recv(1) == b""
        until(lambda: held._free._value == 3)
        assert texts(events(ask(held, {"tokens": 2})))


def test_a_continuation_keeps_the_blank_that_its_first_token_begins_with(run):
    """SentencePiece's decoder, Llama 2's, eats the blank before the very first token: that of the prompt, not the next one."""
    words = ["▁the", "▁a", "▁b", *(f"<0x{b:02X}>" for b in "é日".encode())]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    raw.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])
    llama = SimpleNamespace(decode=lambda ids: raw.decode(ids, skip_special_tokens=False), eot=9)
    for prompt, ids, said in [([0, 1], [2, 0], " b the"), ([], [2, 0], "b the"), ([0, 3, 4], [5, 6, 7, 1], "日 a"),
                              ([5, 6, 7], [3, 4, 2], "é b"), ([0], [3], "\ufffd")]:
        steps = pieces(iter(torch.tensor(ids)[:, None].expand(-1, 2)), llama, 2, prompt)
        told = [piece for step in steps for piece in step]
        assert ["".join(piece.text for piece in told if piece.row == row) for row in (0, 1)] == [said] * 2
        assert llama.decode(prompt + ids) == llama.decode(prompt) + said


def test_a_model_that_fails_gets_a_sentence_and_the_server_goes_on(run, capsys):
    speller = Speller("abc")
    with serving(run, speller.model) as held:
        def fail(h):
            raise RuntimeError("CUDA out of memory\nmore")
        speller.model.head.forward = fail
        answer = ask(held, {"prompt": "x"})
        assert events(answer) == [{"error": "the model stopped (RuntimeError: CUDA out of memory)"}]
        speller.model.head.forward = speller.say
        assert texts(events(ask(held, {"prompt": "x"}))) == ["abc"]
    assert "Traceback" not in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- refusing

@pytest.mark.parametrize("body, sentence", [
    ({"prompt": "x" * 33}, "the prompt has 33 tokens, but the context of this model holds 32: shorten the prompt"),
    ({"promt": "x"}, "there is no 'promt' to ask for; did you mean 'prompt'?"),
    ({"run": "out/other"}, "there is no 'run' to ask for; "),
    ({"prompt": 7}, "prompt=7 is not a word"),
    ({"n": True}, "n=True is not a whole number"),
    ({"n": 17}, "n=17 must be between 1 and 16 here"),
    ({"n": 0}, "n=0 must be between 1 and 1024"),
    ({"tokens": "9"}, "tokens='9' is not a whole number"),
    ({"temperature": 0.001}, "temperature=0.001 must be 0 (the likeliest token) or between 0.01 and 100"),
    (b'{"temperature": NaN}', "temperature=nan is not a number"),
    (b'{"temperature": 1e999}', "temperature=inf must be 0"),
    ({"top_k": -1}, "top_k=-1 must be between 1 and"),
    ({"seed": 2**63}, "seed=9223372036854775808 must be between 0 and"),
    ([1], "the request must be a JSON object with any of prompt, n, "),
    (b"prompt=x", "the request is no JSON (Expecting value"),
    (b"\xff\xfe{", "the request is no JSON ("),
    (b"[" * 100_000, "the request is no JSON ("),
    (b"", "the request is no JSON ("),
])
def test_mistakes_get_status_400_and_a_sentence(held, body, sentence):
    answer = ask(held, body)
    assert answer.status == 400 and answer.headers["Content-Type"] == "application/json"
    told = json.load(answer)
    assert list(told) == ["error"] and sentence in told["error"]


@pytest.mark.parametrize("length", ["-1", "1e3", "٣", "1048577", "9" * 400, "0000000000099999999", ""])
def test_a_body_of_no_sane_length_is_not_read(held, length):
    with socket.create_connection(held.server_address[:2]) as client:
        client.sendall(f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        head, body = client.makefile("rb").read().split(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0] and "must be the bytes of the request's body" in json.loads(body)["error"]


@pytest.mark.parametrize("host, status", [
    ("localhost", 200), ("localhost:9999", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("192.168.1.5", 200),
    (socket.gethostname(), 200), ("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403),
    ("localhost.evil.example", 403), ("", 403), ("[::1", 403), ("127.0.0.1@evil.example", 403),
])
def test_a_name_that_is_not_ours_is_refused(held, host, status):
    """A stranger's page whose own name points at this machine (DNS rebinding) sends that name."""
    assert ask(held, method="GET", path="/", Host=host).status == status
    assert ask(held, {"tokens": 1}, Host=host).status == status


@pytest.mark.parametrize("origin, status", [
    (None, 200), ("http://localhost:8000", 200), ("https://localhost:8000", 200), ("http://localhost:9000", 403),
    ("http://evil.example", 403), ("null", 403), ("http://[", 403), ("http://[::1", 403), ("localhost:8000", 403),
])
def test_another_sites_page_may_not_ask(held, origin, status):
    answer = ask(held, {"tokens": 1}, Host="localhost:8000", **({"Origin": origin} if origin else {}))
    assert answer.status == status
    assert status == 200 or json.load(answer) == {"error": "another site's page may not ask this server"}


def test_there_is_nothing_else(held):
    for path in ("/config.json", "/../config.json", "//evil.example/", "//[", "HTTP://[/", "*"):
        assert ask(held, method="GET", path=path).status == 404
    assert ask(held, {}, path="/other").status == 404
    assert ask(held, {}, method="PUT").status == 501
    assert b"Traceback" not in ask(held, {}, method="DELETE").read()


# --------------------------------------------------------------------------------------------------------------- command

def test_the_command_refuses_what_cannot_be_served(run, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, sentence in [
            ([f"port={port}"], f"port {port} of host '127.0.0.1' cannot be had (Address already in use): give another port= or"),
            (["port=65536"], "port=65536 must be between 0 (any that is free) and 65535"),
            (["port=0", "host=203.0.113.1"], "port 0 of host '203.0.113.1' cannot be had ("),
            (["port=0", "n=3"], "there is no key 'n'"),
            (["port=0", "fp8=tensorwise", "dtype=float32"], "fp8=tensorwise multiplies FP8 into BF16"),
        ]:
            assert sample.main([str(run), "--serve", *arguments]) == 2
            assert sentence in (err := capsys.readouterr().err) and err.count("\n") == 1
    (run / "config.json").unlink()
    assert sample.main(["--serve", str(run), "port=0"]) == 2
    assert str(run) in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize("host, is_open", [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_others_are_let_in_only_with_a_warning(run, capsys, monkeypatch, host, is_open):
    def interrupt(self, poll_interval):
        raise KeyboardInterrupt
    monkeypatch.setattr(server.Server, "serve_forever", interrupt)
    assert serve.main([str(run), "port=0", f"host={host}"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(run))}: http://{host}:\d+/   \(Ctrl-C ends it\)\n\n", out)
    assert err == (f"warning: host={host} lets everybody who can reach this machine use the page, which asks for no password\n"
                   if is_open else "")


def test_a_served_run_from_the_command_to_control_c(tiny, tmp_path, capsys):
    """As a user does it: the page, then Ctrl-C in the midst of an answer."""
    config = replace(tiny, steps=3, model=replace(tiny.model, n_ctx=2048), eval=replace(tiny.eval, tokens=4096),
                     data=replace(tiny.data, tokens_per_step=4096, micro_batch=1))
    assert call_train(capsys, config, tmp_path).returncode == 0
    code = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from eval import sample; "
            "sys.exit(sample.main(sys.argv[1:]))")      # whoever starts the tests may ignore the signal
    command = [sys.executable, "-c", code, str(config.run_dir), "--serve", "port=0", "device=cpu"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://127.0.0.1:(\d+)/", process.stdout.readline())
        assert url, process.stderr.read()
        connection = http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=60)
        connection.request("GET", "/")
        page = connection.getresponse().read().decode()
        assert "12,288 tokens in 3 steps" in page and "validation loss" in page
        connection = http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=60)
        connection.request("POST", "/generate", json.dumps({"prompt": "x", "tokens": 2000, "n": 16}))
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert b"done" not in answer.read()
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


# ----------------------------------------------------------------------------------------------------------------- curve

def drawn(name="run", train=(), val=()):
    return ET.fromstring(curve.loss_svg(name, list(train), list(val)))


def test_the_curve_shows_both_losses_on_labelled_axes():
    train = [(i, 2 + 5 / i) for i in range(1, 1001)]
    val = [(500, 2.1), (1000, 2.0)]
    svg = drawn("<run>", train, val)
    labels = [node.text for node in svg.iter() if node.tag == "text"]
    assert {"optimizer step", "loss [nats/token]", "training, mean of 5 steps", "validation", "0", "1k"} <= set(labels)
    assert svg.get("aria-label") == ("<run>: training loss 7.000 at step 1, 2.005 at step 1000; "
                                     "validation loss 2.100 at step 500, 2.000 at step 1000")
    lines = [[tuple(map(float, place.split(","))) for place in node.get("points").split()]
             for node in svg.iter() if node.tag == "polyline"]
    assert len(lines[0]) == 200 and len(lines[1]) == 2
    for line in lines:
        assert all(curve.LEFT <= x <= curve.RIGHT for x, _ in line) and line == sorted(line)
    assert all(curve.TOP <= y <= curve.BOTTOM for x, y in lines[0] + lines[1] if x > curve.LEFT + 20)
    assert lines[0][-1][1] < lines[1][1][1] + 1 and lines[1][0][1] < lines[1][1][1]     # y points down: the loss falls
    places = {float(node.get("y1")): None for node in svg.iter() if node.tag == "line"}
    ticks = [float(text) for text in labels if re.fullmatch(r"2(\.\d+)?", text)]
    assert len(places) == len(ticks) >= 3


@pytest.mark.parametrize("train, val", [
    ([(1, 3.0)], []), ([], [(7, 3.0)]), ([(1, 3.0), (2, 3.0)], []), ([(0, 1e-300), (2**52, 999_999.0)], [(0, -5.0)]),
    ([(i, 5.0 + 1e-15 * i) for i in range(9)], []), ([(0, 2.0)], [(0, 3.0)]),
])
def test_any_losses_can_be_drawn(train, val):
    svg = drawn("run", train, val)
    for node in svg.iter():
        for value in node.attrib.values():
            assert "nan" not in value and "inf" not in value
    assert len([node for node in svg.iter() if node.tag == "text"]) >= 6


def test_what_counts_as_a_loss(tmp_path):
    rows = [{"kind": kind, "step": step, "loss": loss} for kind, step, loss in (
        ("train", 2, 3.0), ("train", 1, 4.0), ("val", 2, 3.5), ("undone", 3, 9.0), ("undone_val", 3, 9.0), ("train", 4, None),
        ("train", 8, 0.0), ("train", 5, "2"), ("train", -1, 1.0), ("train", 10**400, 1.0), ("train", 6, 1e300),
        ("train", 2, 2.5))]
    rows += [[1], "x", {"kind": "event", "event": "resume", "step": 2}, {"kind": "train", "step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) +
                                            '{"kind": "train", "step": 7, "loss": NaN}\n{"kind": "tr')
    assert curve.read_losses(tmp_path) == ([(1, 4.0), (2, 2.5)], [(2, 3.5)])
    assert curve.read_losses(tmp_path / "none") == ([], [])
    assert curve.loss_svg("run", [], []) == "<p>No step of this run is recorded.</p>"
