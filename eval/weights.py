"""Copy a run's weights, without its optimizer, to one safetensors file.

    python -m eval.weights out/RUN                          the newest sound checkpoint -> out/RUN/weights_00013500.safetensors
    python -m eval.weights out/RUN my.safetensors dtype=bf16

dtype   fp32 (as trained) or bf16 (as the matmuls see them; half the bytes)

The names are the model's own (model.py); a tied head is the embedding and is not repeated. The file's metadata holds the
run's name, the step and config.json's content. It is written beside its place, synced and renamed: whole or not there.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from runtime.checkpoint import checkpoints, load, read_manifest, sync_folder
from runtime.cli import UserError, read_options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}      # the format's
ALIGNMENT = 64      # bytes, a cache line; torch allocates so


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str
    file: str | None = None
    dtype: Literal["fp32", "bf16"] = "fp32"

    POSITIONAL: ClassVar = ("run", "file")

    def __post_init__(self):
        if self.file is not None and not self.file.endswith(".safetensors"):
            raise UserError(f"file={self.file!r} must end in .safetensors")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 written, 1 the machine failed us, 2 the user's mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    return written("eval.weights", lambda: "step {1}: {2:.1f} MiB -> {0}".format(*export(read_options(Options, argv))))


def written(command: str, work: Callable[[], str]) -> int:
    """Prints what `work` returns; the exit code: 0, or 1 or 2 with a sentence of `command`'s, or 130 after Ctrl-C."""
    try:
        print(work())
        return 0
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        print(f"{command}: {told}; nothing was written", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"{command}: out of memory ({error}); nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def export(options: Options) -> tuple[Path, int, float]:
    """Writes the file; returns its path, the step of the weights, its size in MiB. Raises UserError or OSError."""
    run_dir = Path(options.run)
    if options.file is not None and (not Path(options.file).parent.is_dir() or Path(options.file).is_dir()):
        raise UserError(f"file={options.file} cannot be written: give a file's name in a folder that exists")
    manifest, weights = newest_weights(run_dir, "eval.weights")
    step = manifest["step"]
    path = Path(options.file) if options.file is not None else run_dir / f"weights_{step:08d}.safetensors"
    metadata = {"format": "pt", "run": str(manifest["config"].get("run")), "step": str(step),
                "config": json.dumps(manifest["config"])}
    for name in weights:        # one after the other: what is cast is freed
        weights[name] = weights[name].to(DTYPES[options.dtype])
    write_safetensors(path, weights, metadata)
    return path, step, path.stat().st_size / 2**20


def newest_weights(run_dir: Path, command: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Manifest and fp32 weights of the newest checkpoint that is what was written; older ones where it is not.

    Read alone, nothing is renamed: the run may be going on. What is skipped is told on stderr, in the name of `command`.
    Raises UserError where no checkpoint is sound.
    """
    there = checkpoints(run_dir)
    if not there:
        raise UserError(f"{run_dir} has no sound checkpoint: give the folder of a run that has saved, such as out/<run>")
    for path in reversed(there):
        try:
            manifest = read_manifest(path)
            weights = {name: torch.empty(shape, dtype=torch.float32) for name, (shape, dtype) in manifest["tensors"].items()
                       if name.startswith("model.")}
            load(path, manifest, weights)       # compares names, shapes and dtypes with the manifest
            return manifest, {name.removeprefix("model."): t for name, t in weights.items()}
        except UserError as error:
            print(f"{command}: {error}", file=sys.stderr)
    raise UserError(f"{run_dir}: none of its {len(there)} checkpoints is sound")


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """One file: 8 bytes of header length, little-endian, a JSON header, the tensors' bytes, one after the other.

    Source: the format's description at github.com/huggingface/safetensors. Written here because the package's own writer
    aligns to 8 bytes: of one token's matmul the last bit depends on where in memory the weights begin, and readers map the
    file. Raises OSError; then nothing is left.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes % ALIGNMENT != 0))  # odd ones push nobody out of line
    header, end = {"__metadata__": metadata}, 0
    for name, t in tensors.items():
        begin, end = end, end + t.nbytes
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    tmp = path.with_name(f".tmp_{path.name}")
    try:
        with open(tmp, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for t in tensors.values():
                # The bytes as they lie: numpy knows no bfloat16.
                file.write(t.contiguous().flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)        # or a power cut may take the new name back


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
