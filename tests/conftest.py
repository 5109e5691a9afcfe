"""Tiny real runs for the tests: shards of random tokens and configurations that train in seconds on
a CPU."""

import hashlib
import json
import os
import subprocess
import sys
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


def write_shards(
    folder: Path, splits: dict[str, list[np.ndarray]], bytes_per_token: float = 1, **changes
) -> None:
    """A source in the on-disk format, written by hand rather than by prepare_data.py, to hold the
    readers to the format.

    splits: ids of each shard, of "<u2" or "<u4", 256 before each document. changes: other values
    for index.json."""
    folder.mkdir(parents=True)
    described = {}
    for split, arrays in splits.items():
        tokens, documents, shards = (
            sum(map(len, arrays)),
            sum(int((ids == 256).sum()) for ids in arrays),
            [],
        )
        for i, ids in enumerate(arrays):
            ids.tofile(folder / (name := f"{split}_{i:05d}.bin"))
            shards.append(
                {
                    "file": name,
                    "tokens": len(ids),
                    "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
                }
            )
        described[split] = {
            "documents": documents,
            "text_bytes": round(bytes_per_token * (tokens - documents)),
            "tokens": tokens,
            "shards": shards,
        }
    np.save(folder / "hashes.npy", np.arange(6, dtype="<u8"))
    write_index(
        folder,
        **{
            "format_version": 2,
            "dtype": next(iter(sum(splits.values(), []))).dtype.name,
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
            **changes,
        },
    )


def write_index(folder: Path, **changes) -> None:
    """Change keys of a folder's index.json, or write the first one, with the hash of itself that
    readers ask for."""
    path = folder / "index.json"
    index = (json.loads(path.read_text()) if path.exists() else {}) | changes
    index.pop("sha256", None)
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index | {"sha256": sha256}))


def write_source(
    folder: Path, seed: int, train_tokens: int = 40_000, val_tokens: int = 4_000
) -> None:
    """One source, its bytes drawn from a skewed distribution, so that there is something to
    learn."""
    rng = np.random.default_rng(seed)
    train, val = (
        np.minimum(rng.geometric(0.05, tokens), 255).astype("<u2")
        for tokens in (train_tokens, val_tokens)
    )
    train[::500] = val[::500] = 256  # end-of-text before each document
    write_shards(folder, {"train": [train], "val": [val]})


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, source in enumerate(("web", "code")):
        write_source(folder / source, seed)
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


tiny = pytest.fixture(lambda data_dir, tmp_path: tiny_config(data_dir, tmp_path / "out"))


@pytest.fixture
def emulated_scaled_mm(monkeypatch):
    """torchao's Linears as on a GPU, all but the multiplication: torch's own float8 matmul is slow
    on some CPUs."""
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda a, b, scale_a, scale_b, out_dtype=None, use_fast_accum=False, **_: scaled_mm(
            a, scale_a, b, scale_b, out_dtype or torch.bfloat16, use_fast_accum
        ),
    )


@pytest.fixture
def no_figures(monkeypatch):
    """The commands of scaling/ draw and render nothing: it takes most of their time."""
    for name in (
        "fit.draw",
        "precision.draw_precision",
        "report.draw_losses",
        "learning_rate.draw",
    ):
        monkeypatch.setattr(f"scaling.{name}", lambda *_: "figure")
    monkeypatch.setattr("lib.plots.render", lambda *_: b"")


def changed(config: Config, words: str) -> Config:
    """The config with settings as they stand on a command line."""
    return apply_overrides(config, words.split())


def write_config(config: Config, path: Path) -> Path:
    """A config file that binds exactly `config`, for runs started as processes."""
    path.write_text(
        "from runtime.config import config_from_dict\nconfig ="
        f" config_from_dict({asdict(config)})\n"
    )
    return path


def process(*command, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    """`python COMMAND`, finished, its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture
def run(tmp_path, capsys):
    """run(config, *overrides): what train.main() prints; on stderr where it returns another exit
    code than 0."""

    def start(config, *overrides, code=0):
        capsys.readouterr()
        returned = train.main(
            [str(write_config(config, tmp_path / f"{config.run}.py")), *overrides]
        )
        out, err = capsys.readouterr()
        assert (returned, bool(err)) == (code, code > 0) and "Traceback" not in err, err
        return err if code else out

    return start


def asked(capsys, main, *words, code=0) -> str:
    """What a command prints; where it refuses (code 2), its sentence, and nothing else."""
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    out, err = capsys.readouterr()
    assert not (out if code == 2 else err) and "Traceback" not in err, out + err
    return out + err
