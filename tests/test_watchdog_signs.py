"""What the watchdog makes of the ranks' signs: how they are read, who is lost, who is to blame; what it dumps."""

import json
import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from runtime import watchdog
from runtime.watchdog import FAILED, MET, STOOD, Watchdog

# Many machines' first namespace has the same number, and many are called localhost: alone it must not tell one's own.
NAMESPACE = os.path.basename(os.path.realpath("/proc/self/ns/pid"))


class TestSigns:
    def watch(self, store, size):
        watch = object.__new__(Watchdog)
        watch.world, watch._store = SimpleNamespace(rank=0, size=size), store
        return watch

    @pytest.mark.parametrize("sign, is_lost", [
        ({"beat": 1}, False), ({"why": "left"}, False), ({"why": f"{MET}: RuntimeError: closed"}, False), ({"calls": 0}, False),
        ({"why": f"{FAILED}: ValueError"}, True), ({"why": f"{STOOD}: no progress"}, True), ({"pid": 2**30}, True),
        ({"pid": 2**30, "host": "elsewhere"}, False), ({"pid": 2**30, "pids": NAMESPACE}, False),
        ({"pid": 2**30, "why": "left"}, False)])
    def test_who_is_lost(self, sign, is_lost):
        store = dist.HashStore()
        here = {**watchdog.NEVER, "host": socket.gethostname(), "pid": os.getpid(), "pids": watchdog._pids(), "calls": 9}
        for rank, own in enumerate(({}, {}, sign)):
            store.set(f"rank{rank}", json.dumps({**here, **own}))
        assert self.watch(store, 3)._has_lost() is is_lost
        assert not self.watch(store, 2)._has_lost()

    def test_hundreds_of_ranks_are_read_by_few_calls(self):
        """As many readers at once would else keep the store busy for longer than they wait."""
        calls, store = [], dist.HashStore()
        counted = SimpleNamespace(**{name: lambda *of, name=name: calls.append(name) or getattr(store, name)(*of)
                                     for name in ("check", "get", "multi_get")})
        for rank in range(400):
            store.set(f"rank{rank}", json.dumps({**watchdog.NEVER, "pid": rank}))
        assert [sign["pid"] for sign in self.watch(counted, 400)._read()] == list(range(400))
        assert calls == ["check", "multi_get"]
        store.delete_key("rank17")
        signs = self.watch(counted, 400)._read()
        assert signs[17] == watchdog.NEVER and [sign["pid"] for sign in signs[18:]] == list(range(18, 400))
        assert len(calls) < 40, "halves, not one by one"

    def test_a_store_that_does_not_answer_is_asked_by_a_new_connection_next(self, monkeypatch):
        def fail(keys):
            raise RuntimeError("timed out")
        monkeypatch.setattr(watchdog, "_client", lambda: "new")
        watch = self.watch(SimpleNamespace(check=fail), 2)
        assert not watch._has_lost() and watch._store == "new"


@pytest.mark.parametrize("explained, why", [
    (None, f"{FAILED}: RuntimeError: out of memory"), (f"{MET}: closed", f"{MET}: closed")])
def test_an_error_is_a_ranks_own_unless_it_was_explained(tmp_path, explained, why):
    """One rank's exhausted memory is a RuntimeError too; the others must learn that it is lost."""
    watch, store = Watchdog(SimpleNamespace(rank=0, size=1, device=torch.device("cpu")), tmp_path, 60, 60), dist.HashStore()
    watch._store = store
    with pytest.raises(RuntimeError), watch:
        watch._why = explained
        raise RuntimeError("out of memory")
    assert json.loads(store.get("rank0"))["why"] == why


def test_every_flight_recorder_is_dumped(monkeypatch, tmp_path):
    """NCCL has one of its own, apart from that of gloo; where one fails, the other's is not lost."""
    core = torch._C._distributed_c10d
    monkeypatch.setattr(core, "_dump_fr_trace_json", lambda: b'{"of": "gloo"}', raising=False)
    monkeypatch.setattr(core, "_dump_nccl_trace_json", lambda: b'{"of": "nccl"}', raising=False)
    (tmp_path / "config.json").touch()
    watch = object.__new__(Watchdog)
    watch.world, watch.run_dir = SimpleNamespace(rank=3, size=4), tmp_path
    watch._write("", {})
    dumped = {path.name: json.loads(path.read_text())["of"] for path in (tmp_path / "flight_recorder").iterdir()}
    assert dumped == {"rank_3.json": "nccl", "rank_3_gloo.json": "gloo"}
    monkeypatch.setattr(core, "_dump_nccl_trace_json", lambda: 1 / 0)
    assert watchdog._flight_recorders() == {"_gloo": '{"of": "gloo"}'}


class TestWhoIsToBlame:
    """Every rank's last sign -> the one named."""

    def blame(self, signs, rank=0, **how):
        watch = object.__new__(Watchdog)
        watch.world = SimpleNamespace(rank=rank, size=len(signs))
        base = {"host": "h", "pid": 7, "calls": 10, "phase": "reduce", "step": 3, "why": None, "dead": False, "silent": False}
        told = watch._culprit({i: {**base, **sign} for i, sign in enumerate(signs)}, **how)
        return told and int(re.match(r"rank (\d+) of", told)[1])

    def test_in_order_of_certainty(self):
        behind, silent, failed = {"calls": 4}, {"silent": True}, {"why": f"{FAILED}: KeyError: x", "dead": True}
        assert self.blame([{}, behind, failed, silent]) == 3
        assert self.blame([{}, behind, failed, {}]) == 2
        assert self.blame([{}, behind, {}, {}]) == 1
        assert self.blame([behind, {}, {}, {}]) == 0, "it may be this very rank"
        assert self.blame([{}, {}]) is None

    def test_victims_are_not_blamed_for_having_ended(self):
        stood, met = {"why": f"{STOOD}: no progress", "dead": True}, {"why": f"{MET}: RuntimeError: closed", "dead": True}
        assert self.blame([{}, stood, met, {"calls": 9}]) == 3
        assert self.blame([{}, met, {}], missing_only=True) is None
        assert self.blame([{}, met, stood], missing_only=True) == 2, "where nobody else is missing, its watchdog's words count"
        assert self.blame([{}, {"calls": 2}], missing_only=True) is None, "who is behind did not break a collective"
