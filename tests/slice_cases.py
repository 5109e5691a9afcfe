"""A slice of a tiny study whose commands only pretend: what the tests of slice.py share."""

import contextlib
import json
import signal
import threading

from scaling import calls as process_room
from scaling import provenance
from scaling import slice as room
from scaling.study import expand, load_study
from tests.conftest import ROOT
from tests.study_cases import tiny_study

# Stands for each command of the repository: notes its words, does what the command would leave, or what the test says.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
name, words = Path(sys.argv[0]).stem, sys.argv[1:]
here = Path(os.environ["HERE"])
with open(here / "calls", "a") as file:
    print(name, *words, file=file)
folder = here / "out/tiny"
def finish(run):
    (folder / run).mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "metrics.jsonl", "probe.jsonl"):
        (folder / run / file).write_text("{}")
    (folder / run / "summary.json").write_text(json.dumps({"run_id": run}))
def freeze(run):
    (folder / "law").mkdir(exist_ok=True)
    (folder / f"law/prediction_{run}.json").write_text(f"frozen {time.time()}")
def ask(number):
    (here / f"signal_{int(number)}").touch()
def done(run):
    return (folder / run / "summary.json").exists()
runs = [run for word in words if word.startswith("only=") for run in word[5:].split(",")] or json.loads(os.environ["OPEN"])
exec((here / "body").read_text())
if name == "sweep":
    for run in runs:
        finish(run)
if name == "fit" and "--predict" in words:
    freeze(words[-1])
if name == "sample":
    print("said by", words[0])
sys.exit(0)
"""
SENTENCE = "only a commit shows that a prediction is older than its run"


@contextlib.contextmanager
def fake_slice(tiny, tmp_path, monkeypatch, capfd):
    """slice.main() on a tiny study, size b held out; its commands are FAKE, all but publish.py; gives code and what was told."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    file = tiny_study(tiny, tmp_path, held_out=True)
    names = [row.run for row in expand(load_study(file)) if not row.held_out]
    for path in (*(f"scaling/{name}.py" for name in ("sweep", "fit", "precision", "figures", "results", "learning_rate")),
                 "eval/sample.py"):
        (tmp_path / "code" / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "code" / path).write_text(FAKE)
    (tmp_path / "code/scaling/publish.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom scaling.publish import main\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(f'publish {{sys.argv[1]}} {{sys.argv[2]}}\\n')\nsys.exit(main())\n")
    monkeypatch.setattr(process_room, "ROOT", tmp_path / "code")
    monkeypatch.setattr(process_room, "POLL_S", 0.01)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "code")      # where there is no git
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("OPEN", json.dumps(names))
    monkeypatch.chdir(tmp_path)

    def call(*words, body=""):
        (tmp_path / "body").write_text(body)
        (tmp_path / "calls").write_text("")
        is_over = threading.Event()

        def pass_on():      # as the kernel would: a true signal would end pytest itself, were the handler not there
            while not is_over.wait(0.01):
                for path in tmp_path.glob("signal_*"):
                    path.unlink()
                    signal.getsignal(int(path.name.removeprefix("signal_")))(None, None)

        kernel = threading.Thread(target=pass_on)
        kernel.start()
        try:
            code = room.main([str(file), "results=kept", *words])
        finally:
            is_over.set()
            kernel.join()
        done = capfd.readouterr()
        return code, done.out + done.err

    yield call
    for number, handler in before:
        signal.signal(number, handler)


def calls(tmp_path):
    """Names of the commands in the order in which they were begun, with what matters of their words."""
    return [" ".join([line.split()[0], *(word for word in line.split()[1:] if word.startswith(("only=", "--")))])
            for line in (tmp_path / "calls").read_text().splitlines()]


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "kept/slices.jsonl").read_text().splitlines()]
