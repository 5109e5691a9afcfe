"""See before a study's runs begin that their data are there, are enough, and are those of the runs that are done."""

import json
from dataclasses import asdict
from pathlib import Path

from runtime.config import Config, ConfigError, load_config
from runtime.data import Data, open_data
from runtime.folder import tokenizer_of
from runtime.tokenizer import load_tokenizer
from scaling.grid import summary_of
from scaling.study import ROOT, Row


def check_data(rows: list[Row], waiting: list[Row], folder: Path) -> list[str]:
    """A line for each set of data that the runs in `waiting` see: how often the largest of them sees each source.

    `rows` are all of the study. Raises ConfigError, by open_data: what is missing, damaged, of another tokenizer, or would be
    seen more than data.max_epochs times; or data that are not those of a run that is done."""
    largest, done = {}, {}
    for row in sorted(waiting, key=lambda row: row.tokens):
        config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
        largest[_key(config)] = row, config
    for row in rows if largest else ():
        if summary := summary_of(row, folder):
            done.setdefault(_key(load_config(ROOT / row.config, row.overrides)), []).append((row, summary))
    lines = []
    for key, (row, config) in largest.items():
        try:
            tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        data = open_data(config, tokenizer.sha256)
        for other, summary in done.get(key, ()):
            _compare(data, other, summary, folder)
        lines.append(f"data: {config.data.dir}: epochs of the largest run to do ({row.run}, {row.tokens:,} tokens): "
                     + ", ".join(f"{source} {epochs:.2f}" for source, epochs in data.epochs.items())
                     + f"; allowed {config.data.max_epochs:g}")
    return lines


def _key(config: Config) -> str:
    """Equal for runs of the same tokens: training and validation."""
    data = {name: value for name, value in asdict(config.data).items() if name not in ("micro_batch", "tokens_per_step")}
    return json.dumps([data, config.model.n_ctx, config.model.vocab_size, config.eval.tokens], sort_keys=True)


def _compare(data: Data, row: Row, summary: dict, folder: Path) -> None:
    for key, here, what in (("data_sha256", data.train_sha256, "trained"), ("val_sha256", data.val_sha256, "validated")):
        if (its := summary.get(key)) and its != here:
            raise ConfigError(f"{data.config.data.dir} holds other tokens than {row.run} was {what} on ({key} is {here[:9]}... "
                              f"here, {its[:9]}... in {folder / row.run}/summary.json): no law goes through both; put the shards "
                              f"of that run there, or give the study another name=")
