"""See before a study's runs begin that their data and configs are there, will do, and are those of the runs that are done."""

import json
from dataclasses import asdict
from pathlib import Path

from runtime.cli import UserError
from runtime.config import Config, load_config, read_config
from runtime.data import Data, open_data
from runtime.log import pair_id
from runtime.tokenizer import load_tokenizer, tokenizer_of
from scaling.grid import summary_of
from scaling.study import ROOT, Row


def check_data(rows: list[Row], folder: Path) -> list[str]:
    """A line for each set of data that the runs which are not done see: how often the largest of them sees each source.

    `rows` are all of the study: the held-out runs are the largest and come last, and too little data for them is to be known
    before the others have taken their hours. Raises UserError, by open_data: what is missing, damaged, of another tokenizer,
    or would be seen more than data.max_epochs times; or data or a config that are not those of a run that is done."""
    largest, done = {}, {}
    for row in sorted(rows, key=lambda row: row.tokens):
        config = load_config(ROOT / row.config, [*row.overrides, f"out={folder}"])
        if summary := summary_of(row, folder):
            _compare_config(config, row, summary, folder)
            done.setdefault(_key(config), []).append((row, summary))
        else:
            largest[_key(config), config.data.max_epochs] = row, config
    lines = []
    for (key, _), (row, config) in largest.items():
        tokenizer = load_tokenizer(tokenizer_of(config.run_dir, config.data.tokenizer))
        try:
            data = open_data(config, tokenizer.sha256)
        except UserError as error:
            raise UserError(f"{row.run}: {error}") from error
        for other, summary in done.get(key, ()):
            _compare(data, other, summary, folder)
        lines.append(f"data: {config.data.dir}: epochs of the largest run to do ({row.run}, {row.tokens:,} tokens): "
                     + ", ".join(f"{source} {epochs:.2f}" for source, epochs in data.epochs.items())
                     + f"; allowed {config.data.max_epochs:g}")
    return lines


def _key(config: Config) -> str:
    """Equal for runs of the same tokens: training and validation."""
    free = ("micro_batch", "tokens_per_step", "max_epochs")
    data = {name: value for name, value in asdict(config.data).items() if name not in free}
    return json.dumps([data, config.model.n_ctx, config.model.vocab_size, config.eval.tokens], sort_keys=True)


def _compare_config(config: Config, row: Row, summary: dict, folder: Path) -> None:
    """Row's overrides are declared; what else a run depends on, its learning rate say, stands in the config file alone."""
    if (its := summary.get("pair_id")) in (None, pair_id(config)):
        return
    try:
        before, now = (_shared(one) for one in (read_config(folder / row.run), config))
        if not (changes := [f"{key} was {before[key]!r}, now {now[key]!r}" for key in now if before[key] != now[key]]):
            return      # an older version of this code counted pair_id otherwise
    except UserError:
        changes = [f"its pair_id was {its}, now {pair_id(config)}"]
    raise UserError(f"{row.config} no longer says what {row.run}, which is done, was trained with: "
                      f"{', '.join(changes)}; no law goes through both: "
                      f"undo that change, or give the changed study another name=")


def _shared(config: Config) -> dict:
    """What pair_id counts of a run that comes from no imported model."""
    shared = {key: value for key, value in config.identity().items() if not key.startswith("fp8.") and key != "start_from"}
    return shared | {"data.micro_batch": config.data.micro_batch}


def _compare(data: Data, row: Row, summary: dict, folder: Path) -> None:
    for key, here, what in (("data_sha256", data.train_sha256, "trained"), ("val_sha256", data.val_sha256, "validated")):
        if (its := summary.get(key)) and its != here:
            raise UserError(f"{data.config.data.dir} holds other tokens than {row.run} was {what} on ({key} is {here[:9]}... "
                              f"here, {its[:9]}... in {folder / row.run}/summary.json): no law goes through both; put the shards "
                              f"of that run there, or give the study another name=")
