"""A page that is served within the test's own process, by models whose every token the test decides."""

import threading
import time
from contextlib import contextmanager

import torch
from eval_runs import build

from eval import serve
from eval.server import Server


@contextmanager
def serving(run, model=None, **options):
    """A server on a free port for the folder `run`; with `model` in place of what the folder holds."""
    with Server("127.0.0.1", 0) as server:
        serve.load(server, serve.Options(run=str(run), device="cpu", dtype="float32", **options))
        if model is not None:
            server.ready = server.ready._replace(model=model)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.is_stopping.set()
            assert server.line.is_empty(30)
            server.shutdown()
            thread.join()


class Speller:
    """Decides what a model says at any temperature: the bytes of `text`, the same in every row, then end-of-text for ever.

    `steps` counts the tokens asked for; `delay_s` passes before each, and those after the first wait until `gate` is set."""

    def __init__(self, text="", delay_s=0.0, n_ctx=None):
        self.text, self.delay_s, self.steps = text.encode(), delay_s, 0
        self.gate = threading.Event()
        self.gate.set()
        self.model = build()
        if n_ctx:
            self.model = build(type(self.model.config)(**{**vars(self.model.config), "n_ctx": n_ctx}))
        self.model.head.forward = self.say

    def say(self, h):
        time.sleep(self.delay_s)
        assert self.steps == 0 or self.gate.wait(60)
        token = self.text[self.steps] if self.steps < len(self.text) else 256
        self.steps += 1
        return torch.nn.functional.one_hot(torch.full((len(h),), token), 384).float() * 1e4
