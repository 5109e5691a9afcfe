"""scaling/ledger.py: rows are all that a study needs to go on elsewhere; a repeat is held against
its row to the bit."""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import train
from lib.files import read_rows
from model import GPTConfig
from runtime.config import Config
from scaling import cpu_kind, ledger, precision, sweep
from scaling.cpu_kind import Kind, machine_kind
from scaling.ledger import Entry, compare, read_entries
from scaling.study import Row, expand, load_study
from tests.conftest import asked, changed, figures_off, tiny_config, write_config
from tests.helpers.scaling_runs import strict

RUNS = ["a_bf16_t1_s1", "a_bf16_t0.5_s1", "a_tensorwise_t1_s1", "a_tensorwise_t0.5_s1"]


def write_study(folder: Path, config: Config, seeds: tuple[int, ...] = (1,), margin: float = 1.0):
    """A study of one tiny size: trunks of 21 steps with a branch, in BF16 and tensorwise."""
    config = replace(
        config,
        run="a_bf16",
        steps=None,
        tokens_per_param=1,
        model=GPTConfig(n_layer=1, n_head=1, n_embd=16, n_ffn=32, n_ctx=32, vocab_size=257),
    )
    config = changed(config, "checkpoint.every=none checkpoint.keep=1 data.max_epochs=10")
    path = write_config(config, folder / "a_bf16.py")
    file = folder / "study_tiny.py"
    file.write_text(
        f"""from scaling.study import Size, Study
study = Study(name="tiny", sizes=(Size(config={str(path)!r}, seeds={seeds}),),
              tokens_per_param=(0.5, 1.0), recipes=("bf16", "tensorwise"),
              margin_percent={margin})
"""
    )
    return file


def in_process(trained: list[str]):
    """A ledger.train that trains in this process and notes what."""

    def train_row(
        row: Row, rows: list[Row], folder: Path, options: ledger.Options, deadline: float
    ):
        trained.append(row.run)
        folder.mkdir(parents=True, exist_ok=True)
        return train.main(sweep.placed(row, folder).arguments(folder)), 1.5

    return train_row


@pytest.fixture(scope="module")
def finished(data_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """A folder with the study, trained: study_tiny.py, out/, rows/."""
    folder = tmp_path_factory.mktemp("finished")
    file = write_study(folder, tiny_config(data_dir, folder / "out"))
    trained = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "train", in_process(trained))
        patch.setenv("OMP_NUM_THREADS", "1")
        assert ledger.main([str(file), f"out={folder}/out", f"rows={folder}/rows", "--run"]) == 0
    assert trained == RUNS
    return folder


@pytest.fixture
def command(
    tiny: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """command(*words, study=, code=): what scaling/ledger.py prints; runs are trained in this
    process."""
    trained, file = [], write_study(tmp_path, tiny)
    train_row = in_process(trained)

    def quietly(*arguments: object):
        ended = train_row(*arguments)
        capsys.readouterr()
        return ended

    monkeypatch.setattr(ledger, "train", quietly)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*words: object, study: Path = file, code: int = 0):
        return asked(
            capsys,
            ledger.main,
            study,
            f"out={tmp_path}/out",
            f"rows={tmp_path}/rows",
            *words,
            code=code,
        )

    call.trained = trained
    return call


@pytest.fixture
def done(command: Callable[..., str], finished: Path, tmp_path: Path):
    """The command where the whole study has been trained."""
    for folder in "out", "rows":
        shutil.copytree(finished / folder, tmp_path / folder)
    return functools.partial(command, study=finished / "study_tiny.py")


def rows_of(tmp_path: Path) -> list[dict]:
    return read_rows(tmp_path / "rows/runs.jsonl")


def write_rows(tmp_path: Path, rows: list[dict]) -> None:
    (tmp_path / "rows/runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_finished_run_has_a_row(finished: Path) -> None:
    assert [row["run"] for row in rows_of(finished)] == RUNS


def test_a_run_that_has_a_row_is_not_trained_again(
    done: Callable[..., str], tmp_path: Path
) -> None:
    before = rows_of(tmp_path)
    done("--run")
    assert not done.func.trained
    assert rows_of(tmp_path) == before


def test_a_trunk_with_all_its_branches_keeps_no_checkpoint(
    done: Callable[..., str], tmp_path: Path
) -> None:
    done("--run")
    assert not list((tmp_path / "out/tiny").glob("*/checkpoints"))


def test_the_rows_alone_go_on_on_another_machine(done: Callable[..., str], tmp_path: Path) -> None:
    """A branch, whose trunk has a row, is trained from scratch and ends in the same loss."""
    rows = rows_of(tmp_path)
    write_rows(tmp_path, [row for row in rows if row["run"] != "a_bf16_t0.5_s1"])
    (tmp_path / "out").rename(tmp_path / "lost")
    done("--run")
    assert done.func.trained == ["a_bf16_t0.5_s1"]
    repeated = rows_of(tmp_path)[-1]["summary"]
    assert repeated["parent_step"] is None
    assert repeated["loss_bf16"] == rows[1]["summary"]["loss_bf16"]


def precision_of(tmp_path: Path) -> dict:
    """The law/precision.json of the study's runs."""
    with figures_off():
        assert precision.main([str(tmp_path / "out/tiny")]) == 0
    return strict(tmp_path / "out/tiny/law/precision.json")


def test_restored_runs_give_precision_the_gaps_of_the_runs_themselves(
    done: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def gaps() -> dict[str, float]:
        pairs = precision_of(tmp_path)["pairs"]
        capsys.readouterr()
        return {pair["fp8"]: pair["gap_bf16"]["percent"] for pair in pairs}

    own = gaps()
    (tmp_path / "out").rename(tmp_path / "lost")
    done("--restore")
    assert len(own) == 2
    assert gaps() == pytest.approx(own, abs=1e-4)


def test_a_restored_declaration_keeps_its_date(done: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").rename(tmp_path / "lost")
    done("--restore")
    assert "before the runs" in precision_of(tmp_path)["margin"]["source"]


PREDICTIONS = ["gap_prediction_b_tensorwise_t1_s1.json", "prediction_b_bf16_t1_s1.json"]


@pytest.fixture
def frozen(done: Callable[..., str], tmp_path: Path) -> Path:
    """The study's folder of laws, with two frozen predictions."""
    folder = tmp_path / "rows/law"
    folder.mkdir()
    for name in PREDICTIONS:
        (folder / name).write_text(name)
    (folder / "law.json").write_text("{}")
    return folder


def test_frozen_predictions_are_restored(
    frozen: Path, done: Callable[..., str], tmp_path: Path
) -> None:
    done("--restore")
    restored = {path.name: path.read_text() for path in (tmp_path / "out/tiny/law").iterdir()}
    assert restored == {name: name for name in PREDICTIONS}


def test_another_prediction_is_not_overwritten(
    frozen: Path, done: Callable[..., str], tmp_path: Path
) -> None:
    law = tmp_path / "out/tiny/law"
    law.mkdir()
    (law / PREDICTIONS[1]).write_text("made anew")
    assert "are two predictions of one run: keep the one" in done("--restore", code=2)
    assert (law / PREDICTIONS[1]).read_text() == "made anew"


def test_predictions_are_kept_with_the_rows_when_runs_start(
    done: Callable[..., str], tmp_path: Path
) -> None:
    law = tmp_path / "out/tiny/law"
    law.mkdir()
    for name in PREDICTIONS:
        (law / name).write_text(name)
    done("--run")
    kept = {path.name: path.read_text() for path in (tmp_path / "rows/law").iterdir()}
    assert kept == {name: name for name in PREDICTIONS}


def test_a_repeat_is_equal_to_the_bit(done: Callable[..., str]) -> None:
    assert "equal to the bit" in done("repeat=a_tensorwise_t0.5_s1")


def test_a_repeat_that_is_not_equal_says_how_far_it_is(
    done: Callable[..., str], tmp_path: Path
) -> None:
    rows = rows_of(tmp_path)
    rows[3]["summary"]["loss_bf16"] *= 1 + 1e-6
    write_rows(tmp_path, rows)
    assert "the largest relative difference is 1e-06" in done("repeat=a_tensorwise_t0.5_s1", code=1)


@pytest.mark.parametrize("factor, is_equal", [(1.0, True), (1 + 9e-3, True), (1 + 2e-2, False)])
def test_on_another_kind_of_machine_a_hundredth_is_allowed(
    factor: float, is_equal: bool, done: Callable[..., str], tmp_path: Path
) -> None:
    entry = read_entries(tmp_path / "rows/runs.jsonl")[RUNS[0]]
    elsewhere = replace(
        entry,
        machine=replace(machine_kind(), vendor="Another"),
        summary={**entry.summary, "loss_bf16": entry.summary["loss_bf16"] * factor},
    )
    found = compare(entry, elsewhere)
    assert found.is_equal == is_equal and "another kind of machine" in found.text


def test_other_training_tokens_are_no_repeat(done: Callable[..., str], tmp_path: Path) -> None:
    entry = read_entries(tmp_path / "rows/runs.jsonl")[RUNS[0]]
    found = compare(entry, replace(entry, summary={**entry.summary, "data_sha256": "0"}))
    assert not found.is_equal and "training tokens are others" in found.text


def test_a_study_may_grow(done: Callable[..., str], tiny: Config, tmp_path: Path) -> None:
    assert "4 of 8 runs are done" in done(study=write_study(tmp_path, tiny, seeds=(1, 2)))


@pytest.mark.parametrize(
    "words, margin, message",
    [
        ("optim.lr=0.02", 1.0, "which the study no longer has as it was trained"),
        ("", 2.0, "margin_percent is another now"),
    ],
)
def test_a_study_may_not_change(
    words: str,
    margin: float,
    message: str,
    done: Callable[..., str],
    tiny: Config,
    tmp_path: Path,
) -> None:
    other = write_study(tmp_path, changed(tiny, words), margin=margin)
    assert message in done("--run", study=other, code=2)


def test_two_commands_train_no_run_twice(
    command: Callable[..., str], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command finishes the second run while the first is trained here, and the third
    while this one trains it too."""
    of_other = {row["run"]: row for row in rows_of(finished)}
    train_here = ledger.train

    def beside_another(row: Row, *arguments: Any) -> tuple[int, float]:
        ended = train_here(row, *arguments)
        for name in {RUNS[0]: RUNS[1:2], RUNS[2]: RUNS[2:3]}.get(row.run, []):
            with open(tmp_path / "rows/runs.jsonl", "a") as file:
                file.write(json.dumps(of_other[name]) + "\n")
        return ended

    monkeypatch.setattr(ledger, "train", beside_another)
    command("--run", study=finished / "study_tiny.py")
    assert command.trained == [RUNS[0], RUNS[2], RUNS[3]]
    assert sorted(row["run"] for row in rows_of(tmp_path)) == sorted(RUNS)


def test_the_table_counts_hours_by_size_and_arm(done: Callable[..., str]) -> None:
    table = done()
    assert "| a    | bf16       | 2    | 2    | 0.00       | 0.00       |" in table
    assert "4 of 4 runs are done" in table


def test_hours_of_an_arm_that_nothing_was_measured_of_are_unknown(
    command: Callable[..., str],
) -> None:
    table = command()
    assert "| a    | bf16       | 2    | 0    | 0.00       | unknown    |" in table
    assert "at least 0.0 h remain, unknown for 4 runs." in table


def test_hours_that_are_known_are_added_up(command: Callable[..., str], tmp_path: Path) -> None:
    timing = {"microseconds_per_token": {"a": {"bf16": 1e6, "tensorwise": 1e6}}}
    (tmp_path / "rows").mkdir(exist_ok=True)
    (tmp_path / "rows/timing.json").write_text(json.dumps(timing))
    (hours,) = re.findall(r"; ([\d.]+) h remain\. Machines", command())
    assert float(hours) > 0


def test_pairs_of_two_kinds_of_machines_are_counted(
    done: Callable[..., str], tmp_path: Path
) -> None:
    assert "different kinds" not in done()
    rows = rows_of(tmp_path)
    rows[2]["machine"]["vendor"] = "Another"
    write_rows(tmp_path, rows)
    assert "so that their gap holds rounding too: 1." in done()


@pytest.mark.parametrize(
    "damage, told",
    [
        (lambda text: text[:-20], "runs.jsonl:4 is no row of a finished run"),
        (lambda text: text + text, "has a row already"),
        (
            lambda text: text.replace('"schema_version":1,"run"', '"schema_version":9,"run"', 1),
            "schema_version 9, not 1",
        ),
    ],
)
def test_damaged_rows_get_a_sentence(
    damage: Callable[[str], str], told: str, done: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "rows/runs.jsonl"
    path.write_text(damage(path.read_text()))
    assert told in done(code=2)


@pytest.mark.parametrize(
    "words, told",
    [
        (("repeat=a_bf16_t9_s1",), "is no run of"),
        (("repeat=a_bf16_t1_s1",), "has no row yet"),
        (("--run", "--restore"), "give one of them"),
        (("--run", "limit=0"), "must be a positive"),
    ],
)
def test_a_wrong_command_gets_a_sentence(
    words: tuple[str, ...], told: str, command: Callable[..., str]
) -> None:
    assert told in command(*words, code=2)


def test_a_run_that_fails_leaves_no_row_and_the_next_family_goes_on(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train_run = ledger.train

    def failing(row: Row, *more: object):
        return (1, 0.0) if row.run == RUNS[0] else train_run(row, *more)

    monkeypatch.setattr(ledger, "train", failing)
    command("--run", code=1)
    assert [row["run"] for row in rows_of(tmp_path)] == RUNS[2:]


@pytest.fixture
def entry(finished: Path) -> Entry:
    return read_entries(finished / "rows/runs.jsonl")[RUNS[2]]


def test_a_row_has_its_cpu_time_machine_and_version(entry: Entry) -> None:
    assert entry.cpu_s == 1.5
    assert entry.machine == machine_kind()
    assert asdict(entry)["schema_version"] == 1


NEW = Kind(vendor="AuthenticAMD", model="new", capability="AVX512", flags=("avx2", "avx512f"))


@pytest.fixture
def capabilities(command: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ATEN_CPU_CAPABILITY tells each run that is trained, on a CPU with AVX-512."""
    seen, train_run = [], ledger.train

    def noting(*arguments: Any) -> tuple[int, float]:
        seen.append(os.environ.get("ATEN_CPU_CAPABILITY", "its own"))
        return train_run(*arguments)

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(cpu_kind, "machine_kind", lambda: NEW)
    monkeypatch.setattr(ledger, "train", noting)
    return seen


def kinds_of(tmp_path: Path) -> list[str]:
    return [row["machine"]["capability"] for row in rows_of(tmp_path)]


def test_a_run_is_trained_as_its_pairs_bf16_run_was(
    command: Callable[..., str], capabilities: list[str], tmp_path: Path
) -> None:
    command("--run", "only=a_bf16_t1_s1", "instructions=avx2", code=0)
    command("--run")
    assert capabilities == ["avx2"] * 4 and kinds_of(tmp_path) == ["AVX2"] * 4


def test_without_a_pair_a_run_has_all_instructions_of_the_cpu(
    command: Callable[..., str], capabilities: list[str], tmp_path: Path
) -> None:
    command("--run")
    assert capabilities == ["its own"] * 4 and kinds_of(tmp_path) == ["AVX512"] * 4


def test_a_repeat_is_trained_as_its_row_was(
    command: Callable[..., str], capabilities: list[str], tmp_path: Path
) -> None:
    command("--run", "only=a_bf16_t1_s1", "instructions=avx2")
    assert "a_bf16_t1_s1 on the same kind of machine: equal to the bit" in command(
        "repeat=a_bf16_t1_s1"
    )
    assert capabilities == ["avx2"] * 2


def test_a_repeat_takes_no_instructions(command: Callable[..., str]) -> None:
    words = command("repeat=a_bf16_t1_s1", "instructions=avx2", code=2)
    assert "--repeat computes as its row was: leave instructions= out" in words


@pytest.fixture
def interrupted(
    command: Callable[..., str], capabilities: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """The command after a first one, with AVX2 alone, whose run was cut short."""
    train_run = ledger.train

    def cut_short(row: Row, rows: list[Row], folder: Path, *more: Any) -> tuple[int, float]:
        ended = train_run(row, rows, folder, *more)
        (folder / row.run / "summary.json").unlink()
        return 3, ended[1]

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "train", cut_short)
        command("--run", "only=a_bf16_t1_s1", "instructions=avx2", code=3)
    return command


def test_a_run_goes_on_as_it_was_begun(
    interrupted: Callable[..., str], capabilities: list[str]
) -> None:
    interrupted("--run", "only=a_bf16_t1_s1")
    assert capabilities == ["avx2", "avx2"]


def test_a_run_does_not_go_on_as_another_kind(
    interrupted: Callable[..., str], capabilities: list[str]
) -> None:
    words = interrupted("--run", "only=a_bf16_t1_s1", "instructions=native", code=2)
    assert (
        "a_bf16_t1_s1 was begun as on AuthenticAMD AVX2, here it would go on as on AuthenticAMD"
        " AVX512"
    ) in words
    assert capabilities == ["avx2"]


def test_a_run_whose_folder_was_removed_begins_anew(
    interrupted: Callable[..., str], capabilities: list[str], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "out/tiny/a_bf16_t1_s1")
    interrupted("--run", "only=a_bf16_t1_s1")
    assert capabilities == ["avx2", "its own"]


def test_a_branch_is_computed_as_its_trunk(
    command: Callable[..., str], capabilities: list[str], tmp_path: Path
) -> None:
    command("--run", "only=a_bf16_t1_s1")
    words = command("--run", "only=a_bf16_t0.5_s1", "instructions=avx2", code=2)
    assert "a_bf16_t0.5_s1 was begun as on AuthenticAMD AVX512" in words


@pytest.fixture
def rows_and_entries(finished: Path) -> tuple[list[Row], dict[str, Entry]]:
    rows = expand(load_study(str(finished / "study_tiny.py")))
    return rows, read_entries(finished / "rows/runs.jsonl")


def test_a_gap_between_two_kinds_is_told(
    rows_and_entries: tuple[list[Row], dict[str, Entry]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, entries = rows_and_entries
    row = next(row for row in rows if row.run == "a_tensorwise_t1_s1")
    entry = entries["a_bf16_t1_s1"]
    entries["a_bf16_t1_s1"] = replace(entry, machine=replace(NEW, vendor="Another"))
    ledger._kind_to_train(row, rows, entries, tmp_path, "pair")
    assert (
        "its BF16 run was as on Another AVX512: their gap will hold rounding too"
        in capsys.readouterr().out
    )


def partner_of(run: str, rows: list[Row], entries: dict[str, Entry]) -> str:
    """The CPU's name of the partner, where each run was trained on a CPU called like the run."""
    named = {
        name: replace(entry, machine=replace(entry.machine, model=name))
        for name, entry in entries.items()
    }
    row = next(row for row in rows if row.run == run)
    partner = ledger._kind_of_partner(row, rows, named)
    return "none" if partner is None else partner.model


@pytest.mark.parametrize(
    "run, partner",
    [("a_tensorwise_t1_s1", "a_bf16_t1_s1"), ("a_tensorwise_t0.5_s1", "a_bf16_t0.5_s1")],
)
def test_the_partner_is_the_bf16_run_of_the_pair(
    run: str, partner: str, rows_and_entries: tuple[list[Row], dict[str, Entry]]
) -> None:
    assert partner_of(run, *rows_and_entries) == partner


def test_without_its_pair_the_partner_is_of_another_budget(
    rows_and_entries: tuple[list[Row], dict[str, Entry]],
) -> None:
    rows, entries = rows_and_entries
    del entries["a_bf16_t0.5_s1"]
    assert partner_of("a_tensorwise_t0.5_s1", rows, entries) == "a_bf16_t1_s1"


@pytest.mark.parametrize("change", [{"seed": 2}, {"size": "b"}, {"repeat": 1}])
def test_another_seed_size_or_a_null_run_is_no_partner(
    change: dict[str, Any], rows_and_entries: tuple[list[Row], dict[str, Entry]]
) -> None:
    rows, entries = rows_and_entries
    rows = [replace(row, **change) if row.is_baseline else row for row in rows]
    assert partner_of("a_tensorwise_t1_s1", rows, entries) == "none"


def test_the_validation_blocks_of_a_row_give_its_loss(entry: Entry) -> None:
    sources = entry.summary["sources"]
    loss = 0.0
    for name, block in entry.val_blocks.items():
        loss += sources[name]["weight"] * sum(block["bf16"]) / sum(block["n_tokens"])
    assert loss == pytest.approx(entry.summary["loss_bf16"], rel=1e-6)
