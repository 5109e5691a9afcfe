"""Hostile input by the hundred: command lines, index.json files, config.json files; a sentence or a plan, no traceback ever."""

import contextlib
import hashlib
import io
import json
import os
import random
import signal

import pytest

import train
from runtime.cli import UserError, parse
from runtime.config import Config, apply_overrides, known_keys, load_config, read_config
from runtime.data import open_data
from runtime.tokenizer import load_tokenizer
from tests.conftest import write_config, write_source

CODE = ["__import__('os').system('touch canary')", "$(touch canary)", "`touch canary`", "; touch canary", "{{7*7}}", "%(lr)s",
        "lambda: open('canary', 'w')", "[open('canary', 'w') for _ in 'x']", "!!python/object/apply:os.system ['touch canary']"]
VALUES = [
    "", " ", "0", "-0", "1", "-1", "2", "3.5", "1e3", "1e400", "-1e400", "nan", "inf", "-inf", "NaN", "1_0", "0x10", "٣",
    "1e-400", "9" * 400, "9" * 5000, "1e18", str(2**31), str(2**63), str(2**64), "true", "false", "True", "None", "none", "null",
    "[", "]", "[]", "()", "(1,", "{", "}", "{}", "[[1]]", "1,2,3", "1,,2", ",", "a:b",
    "web:1", "web:1,web:2", "web:0", "web:-1", "web:1e999", "web:nan", "../../etc/passwd", "/dev/null", "/proc/self/mem",
    "\x00", "a\x00b", "\n", "a\nb", "\r\x1b[31m", "é", "🙂", "\ud800", "%s%s%n", "x" * 10_000, "*", "layers.[0", "(?P<", "-",
    "--", "tensorwise", "rowwise", "mxfp8", "auto", "off", "gpt2", "byte", "wsd", "cosine", "act", "10:15", "15:10", "0:0",
    "1:1:1", "out/run/checkpoints/step_00000001", "=", "a=b", *CODE]
KEYS = ["", ".", "..", "model", "model.", ".lr", "optim.lr.x", "optim.__class__", "__class__.__init__", "model.params_total",
        "OPTIM.LR", "optim lr", "optim.lrr", "n_layer", "data.Dir", "\x00", "é", "-", "---optim.lr", *CODE]
PER_TEST = 20       # seconds that a single command line may take on a loaded machine; most need a hundredth of one


class TooLong(BaseException):
    pass


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """In an empty folder, in which nothing may appear."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert os.listdir(tmp_path / "cwd") == [], "a file was created"


@contextlib.contextmanager
def bounded(what):
    def ring(number, frame):
        raise TooLong(what)
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PER_TEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(*arguments):
    """Exit code, stdout, stderr of train.py's main() in this process. What it raises is a traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded(arguments):
        code = train.main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def check(arguments):
    code, out, err = command(*arguments)
    if code == 0:
        assert out.startswith("plan of ") and not err, arguments
    else:
        assert code == 2 and not out, arguments
        assert err.startswith("train.py: ") and "Traceback" not in err and len(err) < 30_000, (arguments, err)
    return code


def test_six_hundred_command_lines_end_in_a_plan_or_a_sentence(tiny, tmp_path):
    rng = random.Random(4)
    path = str(write_config(tiny, tmp_path / "tiny.py"))
    known, codes = known_keys(), []
    for i in range(600):
        count = rng.choice((1, 1, 2, 3))
        overrides = [f"{rng.choice(known if rng.random() < 0.9 else KEYS)}={rng.choice(VALUES)}" for _ in range(count)]
        if rng.random() < 0.1:
            overrides.append(rng.choice(VALUES))
        if rng.random() < 0.3:
            overrides[0] = "--" + overrides[0]
        plan = ["--plan"] + (["h100"] if rng.random() < 0.8 else [])
        codes.append(check([path, *overrides, *plan] if i % 5 else [path, *plan, *overrides]))
    assert codes.count(0) > 20 and codes.count(2) > 250, "both ends are reached"


@pytest.mark.parametrize("key", known_keys())
def test_no_value_of_any_key_is_a_traceback(tiny, key):
    """Through the configuration alone, which is quicker: every key meets every value."""
    for value in VALUES:
        with bounded((key, value)):
            try:
                config = apply_overrides(tiny, [f"{key}={value}"])
            except UserError as error:
                assert str(error), (key, value)
            else:
                assert isinstance(config, Config)
                assert json.loads(json.dumps(config.to_dict(), allow_nan=False))      # what every run writes


@pytest.mark.parametrize("override", [
    "optim.lr=1_0", "steps=1_0", "steps=٣", "steps= 3", "optim.lr=infinity", "optim.lr=0x1p-3", "fp8.skip=[", "fp8.skip=head]",
    "fp8.skip=(head", "fp8.skip=a)(b", "checkpoint.at=[1,2", "data.mixture={web:1", "data.mixture=web:1,web:2",
    "data.mixture=web:1_0"])
def test_a_slip_of_the_finger_is_no_value(tiny, tmp_path, override):
    path = str(write_config(tiny, tmp_path / "tiny.py"))
    code, _, err = command(path, override, "--plan")
    key, _, value = override.partition("=")
    assert code == 2 and err.startswith(f"train.py: {key}={value!r} is not ") and err.count("\n") == 1


@pytest.mark.parametrize("text, value", [
    ("[ab],[cd]", ("[ab]", "[cd]")), ("[layers.[01].*]", ("layers.[01].*",)), ("(a, b,)", ("a", "b")), ("", ()), ("[]", ())])
def test_brackets_of_a_pattern_stay(text, value):
    assert parse("fp8.skip", text, tuple[str, ...]) == value


@pytest.mark.parametrize("content", [
    b"", b"\x00", b"\xff\xfe", b"config = 1", b"config", b"def", b"raise SystemExit(0)", b"import sys; sys.exit()", b"1/0",
    b"raise KeyboardInterrupt", b"config = [" * 300, b"from runtime.config import Config\nconfig = Config", b"x = '\xe9'",
    b"def f(): f()\nf()"])
def test_a_file_that_is_no_config_is_a_sentence(tmp_path, content):
    path = tmp_path / "mine.py"
    path.write_bytes(content)
    if b"KeyboardInterrupt" in content:     # the user's own Ctrl-C looks the same
        assert command(str(path))[0] == 130
        return
    check([str(path)])


@pytest.mark.parametrize("arguments", [
    [""], ["."], ["/"], ["/dev/null"], ["\x00"], ["--plan"], ["--plan", "h100"], ["x" * 5000], ["optim.lr=1"],
    ["nothing.py", "--plan"], ["{config}", "--plan", "h100", "--plan"], ["{config}", "--plan", "../x"],
    ["{config}", "--plan", ""], ["{config}", "--help"], ["{config}", "{config}"], ["{config}", "-"]])
def test_odd_words_are_sentences(tiny, tmp_path, arguments):
    path = str(write_config(tiny, tmp_path / "tiny.py"))
    code, out, err = command(*[path if a == "{config}" else a for a in arguments])
    assert code in (0, 2) and "Traceback" not in err
    assert (code == 2) == err.startswith("train.py: ")


# ------------------------------------------------------------------------------------------------------ files of ours

def mutated(rng, text):
    """`text` (JSON) with a few bytes changed, a value or key replaced, a part cut out, doubled, or wrapped."""
    way = rng.randrange(6)
    if way == 0:
        data = bytearray(text.encode())
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if way == 1:
        i, j = sorted(rng.randrange(len(text)) for _ in range(2))
        return (text[:i] + rng.choice(("", text[i:j] * 2, "[" * 100_000, "\x00" * 10)) + text[j:]).encode()
    raw = json.loads(text)
    for _ in range(rng.randrange(1, 4)):
        node, keys = raw, None
        while isinstance(node, dict | list) and node:
            parent, keys = node, list(node) if isinstance(node, dict) else range(len(node))
            key = rng.choice(list(keys))
            node = node[key]
            if rng.random() < 0.3:
                break
        new = rng.choice([None, True, -1, 0, 1.5, 10**30, 2**53 - 1, float("nan"), float("inf"), "", "../../etc/passwd",
                          "/dev/zero", "é\x00", "\ud800", [], [None], {}, {"a": 1}, "train_00000.bin", "x" * 10_000, CODE[0]])
        if way == 2 and isinstance(parent, dict):
            parent[str(new)] = parent.pop(key)
        else:
            parent[key] = new
    return json.dumps(raw).encode()


def test_two_hundred_broken_indexes_are_a_sentence_or_data(tiny, tmp_path):
    write_source(tmp_path / "web", 0)
    write_source(tmp_path / "code", 1)
    path = tmp_path / "web/index.json"
    plain = json.loads(path.read_text())
    own = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    config = load_config(write_config(tiny, tmp_path / "tiny.py"), [f"data.dir={tmp_path}"])
    rng, sha, served = random.Random(5), load_tokenizer("byte").sha256, [0, 0]
    for i in range(200):
        sealed = i % 2      # as prepare_data.py writes it now, or as it once did
        path.write_bytes(mutated(rng, json.dumps(plain | ({"sha256": own} if sealed else {}))))
        with bounded(path.read_bytes()[:2000]):
            try:
                data = open_data(config, sha)
            except UserError as error:
                assert str(error).startswith(str(tmp_path / "web")) and len(str(error)) < 2000, str(error)
                assert "\n" not in str(error)
                continue
            served[sealed] += 1
            assert len(data.describe()) == 2
            data.batch(0, 0, 0, 1)
            if sealed:      # no edit passes for what was written
                assert data.train_sha256 and read_index_of(path) == plain
    assert sum(served) < 60


def read_index_of(path):
    raw = json.loads(path.read_bytes())
    raw.pop("sha256", None)
    return raw


def test_broken_indexes_end_the_command_with_a_sentence(tiny, tmp_path):
    write_source(tmp_path / "web", 0)
    write_source(tmp_path / "code", 1)
    index, rng = tmp_path / "web/index.json", random.Random(6)
    text = index.read_text()
    path = str(write_config(tiny, tmp_path / "tiny.py"))
    for _ in range(10):
        index.write_bytes(mutated(rng, text)[:-2])      # none of them is JSON any more: it would train
        code, _, err = command(path, f"data.dir={tmp_path}", f"out={tmp_path}/out")
        assert code == 2 and err.startswith(f"train.py: {index}") and err.count("\n") == 1, err
        assert not (tmp_path / "out/tiny").exists()


def test_broken_config_json_of_a_run_is_a_sentence(tiny, tmp_path):
    text, rng = json.dumps(tiny.to_dict()), random.Random(7)
    path = tmp_path / "config.json"
    for _ in range(100):
        path.write_bytes(mutated(rng, text))
        with bounded(path.read_bytes()[:2000]):
            try:
                assert isinstance(read_config(tmp_path), Config)
            except UserError as error:
                assert str(error)
