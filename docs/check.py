"""Run every command of README.md and docs/ that a CPU can run, on the runs of `make demo`.

    python docs/check.py out/demo run=false  list the commands: as they are run, or why they are not
    python docs/check.py out/demo run=true   run them in a scratch folder, each once

Names that stand for the reader's own (out/RUN, DIR, FILE) become the demo's. What needs a GPU,
several processes, the network or hours is not run; tests/docs/test_commands.py checks that it
parses."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from lib.command import command, run_command
from lib.errors import MachineError, UserError
from lib.machine import ROOT
from lib.values import FilePath

PROGRAMS = ("python", "torchrun", "sbatch", "make", "nice", "lm_eval")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"\s+#")  # what is said of a command stands behind it

RUN, RUN2 = "out/demo/demo_l_tensorwise_t20_s1337", "out/demo/demo_l_bf16_t20_s1337"
# A word of the pages -> the demo's, in this order.
STAND_INS = {
    r"out/RUN2\b|out/first_bf16\b": RUN2,
    r"out/RUN\b|out/first\b": RUN,
    r"out/(chinchilla|cpu)\b": "out/demo",
    r"configs/study_chinchilla\.py": "configs/study_demo.py",
    r"tasks=core\b": "tasks=demo",
    r"FILE\.\.\. name=mydata": "mytext.jsonl name=mytext",
    r"(MYTEXT/\S+) name=mydata": r"\1 name=mytexts",
    r"data/bytes data\.mixture=mydata:1": "data/bytes data.mixture=mytexts:1",
    r"out/\*$": "out/demo/demo_l_*",
}
# A part of a command -> why it is not run.
REASONS = {
    r"^(torchrun|sbatch)\b": "several processes",
    r"^make\b": "takes minutes",
    r"fineweb_edu (tokens|python)|hf:|--check-sources|--fetch|public_text|piqa|core22": "network",
    r"bench\.(throughput --suite|kernels|peers)|get_device_name": "needs a GPU",
    r"bench\.(data|compiler_plan)": "takes minutes",
    r"train\.py configs/gpt(?!.*--plan)": "needs a GPU",
    r"--run\b|repeat=|limit=": "takes hours",
    r"--predict|at=|h100_lr|llama_bf16|llama31_8b/tokenizer": "needs runs that the demo has not",
    r"corpus\.py": "needs the study's text",
    r"prepare_data\.py demo|docs/(check|expected)\.py": "is what this check starts from",
    r"bench\.throughput --table|--verify data": "reads or changes all that is there",
}


@dataclass(frozen=True)
class Command:
    page: str  # that it stands in
    text: str  # without its comment

    @property
    def why_not(self) -> str | None:
        """Why it is not run here; None where it is."""
        reasons = [reason for part, reason in REASONS.items() if re.search(part, self.text)]
        return reasons[0] if reasons else None

    @property
    def as_run(self) -> str:
        """With the demo's names in the place of the reader's."""
        text = self.text
        for pattern, name in STAND_INS.items():
            text = re.sub(pattern, name, text)
        return text


def commands() -> Iterator[Command]:
    """The commands of README.md and docs/, in the order of the pages."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        for language, block in FENCE.findall(page.read_text()):
            if language not in ("", "sh", "bash"):
                continue
            for line in block.splitlines():
                if line.split(" ")[0] in PROGRAMS:
                    text = COMMENT.split(line)[0].strip()
                    yield Command(str(page.relative_to(ROOT)), text)


# ----------------------------------------------------------------------------------------- running


def prepare(scratch: Path, demo: Path) -> None:
    """A folder that looks like the repository after `make demo`, with files of the reader's."""
    left_out = shutil.ignore_patterns("out", "data", ".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, scratch, ignore=left_out, dirs_exist_ok=True)
    shutil.copytree(demo, scratch / "out/demo")
    for folder in ("data", "MYTEXT", "web"):
        (scratch / folder).mkdir()
    (scratch / "data/demo").symlink_to(ROOT / "data/demo")
    (scratch / "mytext.jsonl").write_bytes(documents("one"))
    (scratch / "MYTEXT/a.jsonl").write_bytes(documents("two"))
    (scratch / "web/a.jsonl.zst").write_bytes(zstandard.compress(documents("three")))
    pairs = [f'{{"prompt": "Say {n}", "response": "It is {n}"}}\n' for n in range(400)]
    (scratch / "chat.jsonl").write_text("".join(pairs))
    rows = [
        f"{n:.0f},{d:.0f},{1.8 + 400 / n**0.34 + 1500 / d**0.36:.6f}\n"
        for n in (3e7, 1e8, 3e8, 1e9)
        for d in (1e9, 4e9, 16e9, 64e9)
    ]
    (scratch / "table.csv").write_text("N,tokens,val\n" + "".join(rows))


def documents(title: str) -> bytes:
    """4,000 documents as JSON lines; others for another title, since copies are dropped. Their
    words differ, or val_cloze would find no wrong answers."""
    lines = []
    for n in range(4000):
        words = " ".join(f"word{n * k % 997}" for k in range(50))
        lines.append(f'{{"text": "Document {n} of {title}: {words}"}}\n')
    return "".join(lines).encode()


def run(text: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    """The command, finished, as a shell runs it; `python` is this one, the code that of the
    folder."""
    folder = str(Path(sys.executable).parent)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", text],
        cwd=scratch,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(scratch), "MPLBACKEND": "agg"},
    )


def run_all(texts: list[str], demo: Path) -> list[str]:
    """Run the commands in their order in one scratch folder; those that failed."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(scratch, demo)
        for text in texts:
            begin = time.monotonic()
            done = run(text, scratch)
            seconds = time.monotonic() - begin
            print(f"{seconds:5.1f} s, exit code {done.returncode}: {text}", flush=True)
            if done.returncode:
                failed.append(text)
                print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
    return failed


# ----------------------------------------------------------------------------------------- command


@dataclass(frozen=True, kw_only=True)
class Options:
    demo: FilePath  # the folder of a finished demo, out/demo
    run: bool  # run them; false lists them


@command(__doc__, Options, "demo")
def main(options: Options) -> str:
    all_commands = list(dict.fromkeys(commands()))
    if not options.run:
        lines = [f"{c.page}: {c.why_not or 'run'}: {c.as_run}" for c in all_commands]
        return "\n".join(lines)
    demo = Path(options.demo)
    if not (demo / "law/precision.json").exists():
        raise UserError(f"{demo} holds no finished demo: run `make demo` first")
    texts = list(dict.fromkeys(c.as_run for c in all_commands if c.why_not is None))
    failed = run_all(texts, demo)
    if failed:
        raise MachineError(f"{len(failed)} commands failed: {'; '.join(failed)}")
    n_left_out = len({c.as_run for c in all_commands if c.why_not is not None})
    return f"{len(texts)} commands ran; {n_left_out} were left out: run=false says why"


if __name__ == "__main__":
    raise SystemExit(run_command(main))
