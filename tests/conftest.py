"""Tiny real runs for the tests: shards of random tokens and configurations that train in seconds on
a CPU."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from fp8.matmul import scaled_mm
from model import GPTConfig
from runtime.config import Config, DataConfig, OptimConfig, apply_overrides
from runtime.parallel import World
from runtime.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
ALONE = World(0, 0, 1, torch.device("cpu"))
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=64, n_ctx=32, vocab_size=257)


@pytest.fixture(scope="module", autouse=True)
def surroundings_stay() -> Iterator[None]:
    """Environment variables that a command sets for its own process, such as those that keep
    Hugging Face offline, end with the file of tests that has called it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def write_shards(
    folder: Path,
    splits: dict[str, list[np.ndarray]],
    bytes_per_token: float = 1,
    **changes: object,
) -> None:
    """A source in the on-disk format, written by hand rather than by prepare_data.py, to hold the
    readers to the format.

    splits: ids of each shard, of "<u2" or "<u4", 256 before each document. changes: other values
    for index.json."""
    folder.mkdir(parents=True)
    described = {
        split: write_split(folder, split, shards, bytes_per_token)
        for split, shards in splits.items()
    }
    np.save(folder / "hashes.npy", np.arange(6, dtype="<u8"))
    first_shard = next(ids for shards in splits.values() for ids in shards)
    index: dict[str, object] = {
        "format_version": 2,
        "dtype": first_shard.dtype.name,
        "source": folder.name,
        "tokenizer": "byte",
        "tokenizer_sha256": load_tokenizer("byte").sha256,
        "vocab_size": 257,
        "dataset": "random",
        "revision": "1",
        "license": "CC0-1.0",
        "split_rule": "random",
        "duplicates": {},
        "empty": 0,
        "contaminated": 0,
        "decontaminated_against": [],
        "skipped": [],
        "files": [],
        "selection": {},
        "is_whole": True,
        "budget": None,
        "hashes_sha256": hashlib.sha256((folder / "hashes.npy").read_bytes()).hexdigest(),
        "splits": described,
    }
    write_index(folder, **index | changes)


def write_split(
    folder: Path, split: str, shards: list[np.ndarray], bytes_per_token: float
) -> dict[str, object]:
    """What index.json says of a split, after writing its shards."""
    described = []
    for number, ids in enumerate(shards):
        name = f"{split}_{number:05d}.bin"
        ids.tofile(folder / name)
        sha256 = hashlib.sha256(ids.tobytes()).hexdigest()
        described.append({"file": name, "tokens": len(ids), "sha256": sha256})
    tokens = sum(len(ids) for ids in shards)
    documents = sum(int((ids == 256).sum()) for ids in shards)
    return {
        "documents": documents,
        "text_bytes": round(bytes_per_token * (tokens - documents)),
        "tokens": tokens,
        "shards": described,
    }


def write_index(folder: Path, **changes: object) -> None:
    """Change keys of a folder's index.json, or write the first one, with the hash of itself that
    readers ask for."""
    path = folder / "index.json"
    index = json.loads(path.read_text()) if path.exists() else {}
    index |= changes
    index.pop("sha256", None)
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index | {"sha256": sha256}))


def write_source(
    folder: Path, seed: int, train_tokens: int = 40_000, val_tokens: int = 4_000
) -> None:
    """One source, its bytes drawn from a skewed distribution, so that there is something to
    learn."""
    rng = np.random.default_rng(seed)
    splits = {}
    for split, tokens in ("train", train_tokens), ("val", val_tokens):
        ids = np.minimum(rng.geometric(0.05, tokens), 255).astype("<u2")
        ids[::500] = 256  # end-of-text before each document
        splits[split] = [ids]
    write_shards(folder, splits)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two sources, "web" and "code"; shared, so no test may change it."""
    folder = tmp_path_factory.mktemp("data")
    write_source(folder / "web", seed=0)
    write_source(folder / "code", seed=1)
    return folder


def tiny_config(data_dir: Path, out: Path) -> Config:
    """Six steps of a model with 2 blocks on two sources, eager."""
    config = Config(
        run="tiny",
        steps=6,
        out=str(out),
        model=TINY,
        optim=OptimConfig(lr=1e-2, warmup_share=0.2),
        data=DataConfig(
            dir=str(data_dir),
            mixture={"web": 0.75, "code": 0.25},
            tokenizer="byte",
            tokens_per_step=512,
            micro_batch=4,
        ),
    )
    return changed(
        config,
        "parallel.compile=off checkpoint.every=3 eval.every=none eval.tokens=320 log.every=1",
    )


@pytest.fixture
def tiny(data_dir: Path, tmp_path: Path) -> Config:
    """tiny_config() with an `out` of the test's own."""
    return tiny_config(data_dir, tmp_path / "out")


@pytest.fixture
def emulated_scaled_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's Linears as on a GPU, all but the multiplication: torch's own float8 matmul is slow
    on some CPUs."""

    def multiply(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        **_: object,
    ) -> torch.Tensor:
        return scaled_mm(a, scale_a, b, scale_b, out_dtype or torch.bfloat16, use_fast_accum)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)


@contextmanager
def figures_off() -> Iterator[None]:
    """The commands of scaling/ draw and render nothing: it takes most of their time."""
    commands = ("fit.draw", "precision.draw_precision", "report.draw_losses", "learning_rate.draw")
    with pytest.MonkeyPatch.context() as patch:
        for name in commands:
            patch.setattr(f"scaling.{name}", lambda *_: "figure")
        patch.setattr("lib.plots.render", lambda *_: b"")
        yield


@pytest.fixture
def no_figures() -> Iterator[None]:
    """figures_off() for a test."""
    with figures_off():
        yield


def changed(config: Config, words: str) -> Config:
    """The config with settings as they stand on a command line."""
    return apply_overrides(config, words.split())


def write_config(config: Config, path: Path) -> Path:
    """`path`, after writing a config file that binds exactly `config`, for runs started as
    processes."""
    path.write_text(
        "from runtime.config import config_from_dict\nconfig ="
        f" config_from_dict({asdict(config)})\n"
    )
    return path


def process(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python COMMAND`, finished, its output as text."""
    folders = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    python_path = os.pathsep.join(folders)
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, **environment},
    )


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """run(config, *overrides, code=0): what train.main() prints; on stderr where it returns another
    exit code than 0."""

    def start(config: Config, *overrides: str, code: int = 0) -> str:
        capsys.readouterr()
        file = write_config(config, tmp_path / f"{config.run}.py")
        exit_code = train.main([str(file), *overrides])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        assert exit_code == code, err
        assert bool(err) == (code > 0), err
        return err if code else out

    return start


def asked(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int],
    *words: object,
    code: int = 0,
) -> str:
    """What a command prints; where it refuses (code 2), its sentence, and nothing else."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    if code == 2:
        assert not out, out
    else:
        assert not err, err
    return out + err
