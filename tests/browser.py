"""The page of eval/serve.py in a real Chromium, driven over WebDriver's plain HTTP; for people and CI, not for make test.

    python -m pytest -q tests/browser.py

It fails where there is no chromium and chromedriver: nothing here can be known without them.
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from eval_runs import build_run
from serve_runs import Speller, serving

from eval.streaming import Piece

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,900")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"     # WebDriver's key of an element's id
WAIT_S = 60.0


class Browser:
    """One session of chromedriver."""

    def __init__(self, profile):
        programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
        missing = [name for name, path in programs.items() if path is None]
        assert not missing, f"this test needs {' and '.join(missing)}: install chromium and chromium-driver"
        self.driver = subprocess.Popen([programs["chromedriver"], "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                       text=True, start_new_session=True)
        while "started successfully on port" not in (said := self.driver.stdout.readline()):
            assert said, "chromedriver ended at once"
        self.base = f"http://127.0.0.1:{int(said.split()[-1].rstrip('.'))}"
        options = {"binary": programs["chromium"], "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.base += "/session/" + self.ask("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None

    def open(self, url):
        self.ask("/url", {"url": url})

    def find(self, selector):
        return self.ask("/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector):
        self.ask(f"/element/{self.find(selector)}/click", {})

    def type(self, selector, text):
        element = self.find(selector)
        self.ask(f"/element/{element}/clear", {})
        self.ask(f"/element/{element}/value", {"text": text})

    def run(self, script):
        return self.ask("/execute/sync", {"script": script, "args": []})

    def texts(self):
        return self.run("return [...document.querySelectorAll('article pre')].map(pre => pre.textContent)")

    def status(self):
        return self.run("return document.getElementById('status').textContent")

    def wait(self, is_so, what):
        end = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < end, f"{what}: not within {WAIT_S:.0f} s; the page says {self.status()!r}, {self.texts()}"
            time.sleep(0.05)

    def complaints(self):
        """What the page's console has said since the last call."""
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"})]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.ask("/screenshot")))

    def close(self):
        try:
            self.ask("", method="DELETE")
        finally:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a curve: 1,000 steps and four validations, and a checkpoint of the last."""
    folder = build_run(tmp_path, monkeypatch)
    (folder / "checkpoints/step_00001000").mkdir(parents=True)
    (folder / "checkpoints/step_00001000/DONE").touch()
    rows = [{"kind": "train", "step": i, "loss": 5.5 / i**0.25} for i in range(1, 1001)]
    rows += [{"kind": "val", "step": i, "loss": 5.6 / i**0.25} for i in range(250, 1001, 250)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_prompt_is_continued_token_by_token_beside_the_curve(browser, run, tmp_path):
    speller = Speller("upon a time", delay_s=0.3)
    with serving(run, speller.model) as server:
        browser.open(server.url)
        browser.type("#prompt", "Once ")
        browser.type("[name=n]", "2")
        browser.click("#go")
        seen = set()
        browser.wait(lambda: seen.update(browser.texts()) or "tokens in" in browser.status(), "the end")
        assert browser.texts() == ["Once upon a time"] * 2
        parts = sorted(seen, key=len)
        assert len(parts) >= 3 and all(parts[-1].startswith(part) for part in parts)     # it grew before one's eyes
        assert "the model ended the text" in browser.run("return document.querySelector('article footer').textContent")
        facts = browser.run("return document.querySelector('dl').textContent")
        assert "parameters" in facts and f"{speller.model.config.params_total:,}" in facts
        assert "BF16" in facts and "32,000 tokens in 1,000 steps" in facts
        labels = browser.run("return [...document.querySelectorAll('aside svg text')].map(t => t.textContent)")
        assert {"optimizer step", "loss [nats/token]", "validation"} <= set(labels)
        box = browser.run("const b = document.querySelector('svg').getBoundingClientRect(); return [b.width, b.height]")
        assert min(box) > 100
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        assert browser.complaints() == []


def test_stop_stops_the_model(browser, run):
    speller = Speller("x" * 400, delay_s=0.05, n_ctx=512)
    with serving(run, speller.model) as server:
        browser.open(server.url)
        browser.type("[name=tokens]", "400")
        browser.click("#go")
        browser.wait(lambda: browser.texts() and len(browser.texts()[0]) > 3, "a first text")
        browser.click("#stop")
        browser.wait(lambda: browser.status() == "stopped", "the page's word for it")
        assert server.line.is_empty(10)
        steps = speller.steps
        time.sleep(0.5)
        assert speller.steps == steps < 400
        browser.click("#go")        # and the next one is served
        browser.wait(lambda: browser.texts() and len(browser.texts()[0]) > 3, "a second text")
        browser.click("#stop")


def test_what_the_model_writes_is_text(browser, run, monkeypatch):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
    monkeypatch.setattr("eval.server.continuations", lambda *args: (step for step in [[Piece(0, evil, "document")]]))
    with serving(run) as server:
        browser.open(server.url)
        browser.type("#prompt", "<b>")
        browser.click("#go")
        browser.wait(lambda: "tokens in" in browser.status(), "the end")
        assert browser.texts() == ["<b>" + evil]
        assert browser.run("return document.querySelectorAll('article img, article script, article b').length") == 0
        assert browser.run("return document.title") == run.name


def test_the_servers_sentences_reach_the_page(browser, run):
    with serving(run) as server:
        browser.open(server.url)
        browser.type("#prompt", "x" * 40)
        browser.click("#go")
        browser.wait(lambda: "the prompt has 40 tokens, but the context of this" in browser.status(), "the sentence")
        assert browser.run("return document.getElementById('status').className") == "wrong"
        browser.type("#prompt", "x")
        browser.type("[name=temperature]", "0.001")
        browser.click("#go")
        browser.wait(lambda: "temperature=0.001 must be 0" in browser.status(), "the sentence")
        browser.complaints()        # Chromium notes the status 400
    browser.run("document.getElementById('go').click()")
    browser.wait(lambda: "the server cannot be reached" in browser.status(), "the sentence")
