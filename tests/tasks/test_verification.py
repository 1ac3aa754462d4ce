"""Verification of a run: a flipped bit in any of its files, or of its engine's, is found."""

from pathlib import Path
from random import Random
from shutil import copytree

import pytest
from typer.testing import CliRunner

from engine.state.registry import find_damaged_state
from flows.cli.commands import app
from tasks.reports.verification import find_damage
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of

FLIPS = 500
LOGS = (".log", ".partial")
whole = fixture_of(small_recipe())


@pytest.fixture
def run(whole: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(copytree(whole.path, tmp_path / "run"))


def engine_files(run: RunFolder) -> list[Path]:
    files = (path for path in run.engine.rglob("*") if path.is_file() and path.name != "lock")
    return sorted(path for path in files if path.suffix not in LOGS)


def test_a_run_that_nobody_changed_is_as_it_was_written(whole: RunFolder) -> None:
    assert [*find_damage(whole)] == []
    assert find_damaged_state(whole.engine) == []
    result = CliRunner().invoke(app, ["verify", "whole"])
    assert (result.exit_code, result.stdout.split(" is as it")[0]) == (0, str(whole.path))


def test_every_flipped_bit_of_a_run_is_found(run: RunFolder) -> None:
    random, files, silent = Random(0), run.files(), []
    assert {path.parent.name for path in files} >= {"shards", "journal", "spans", "updates"}
    for _ in range(FLIPS):
        path = random.choice(files)
        data = path.read_bytes()
        place, bit = random.randrange(len(data)), random.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        if not any(path.name in sentence for sentence in find_damage(run)):
            silent.append((path, place, bit))
        path.write_bytes(data)
    assert silent == []


def test_every_flipped_bit_of_an_engine_s_state_is_found(run: RunFolder) -> None:
    random, files, silent = Random(0), engine_files(run), []
    assert {path.suffix for path in files} >= {".json", ".safetensors"}
    for _ in range(FLIPS):
        path = random.choice(files)
        data = path.read_bytes()
        place, bit = random.randrange(len(data)), random.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        if find_damaged_state(run.engine) != [path]:
            silent.append((path, place, bit))
        path.write_bytes(data)
    assert silent == []


def test_a_file_that_is_missing_is_named(run: RunFolder) -> None:
    for path in (run.datums("policy", 1), run.update("policy", 0)):
        data = path.read_bytes()
        path.unlink()
        assert [*find_damage(run)] == [f"{path} is missing, and step {int(path.stem)} was done"]
        path.write_bytes(data)


def test_damage_is_printed_and_ends_with_an_error(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(run.path.parent))
    metrics, [tensors, *_] = run.metrics, [*run.engine.rglob("optimizer.safetensors")]
    for path in (metrics, tensors):
        data = path.read_bytes()
        path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    result = CliRunner().invoke(app, ["verify", "run"])
    assert result.exit_code == 1
    assert f"line 1 of {metrics} is damaged" in result.stdout
    assert f"{tensors} is not as the engine wrote it" in result.stdout
