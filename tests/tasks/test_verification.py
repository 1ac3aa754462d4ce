"""Verification of a run: whatever happens to any of its files, or of its engine's, is found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from shutil import copytree

import pytest
from typer.testing import CliRunner

from ratchet.durable.files import remove
from ratchet.engine.state.registry import find_damaged_state
from ratchet.flows.cli.commands import app
from ratchet.flows.finetune import finetune
from ratchet.flows.prefer import prefer
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import UNSEALED, RunFolder
from tests.support.damages import DAMAGES
from tests.support.runs import finetuned, preferred
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of

FLIPS = 50
LOGS = (".log", ".partial")
whole = fixture_of(small_recipe())

UNNOTICED = ("sessions", "samplers", "runs", "evaluations")
"""Folders of an engine's records of its clients, and of evaluations, which are scored anew: a
deleted file is not missed."""
COUNTS_ONLY = "work.jsonl"
"""Log of what was spent, which a killed run may cut short: lines that are gone are not missed."""


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


@pytest.fixture(scope="module")
def flows(
    whole: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunFolder]]:
    """A finished run of each flow; the other two learn texts and pairs."""
    root = tmp_path_factory.mktemp("flows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        finetune(finetuned.RECIPE.model_copy(update={"steps": 2}), run="texts")
        prefer(preferred.RECIPE.model_copy(update={"steps": 2}), run="pairs")
        yield {
            "train": RunFolder(copytree(whole.path, root / "whole")),
            "finetune": RunFolder(root / "texts"),
            "prefer": RunFolder(root / "pairs"),
        }


def told(run: RunFolder, path: Path) -> list[str]:
    """Return what verification says after a damage to a file, of the run or of its engine."""
    if run.engine in path.parents:
        return [*map(str, find_damaged_state(run.engine)), *_records_missed(run)]
    return [*find_damage(run)]


def _records_missed(run: RunFolder) -> list[str]:
    return [said for said in find_damage(run) if str(run.engine) in said]


@pytest.mark.parametrize("of", ["run", "engine"])
def test_every_flipped_bit_is_found(run: RunFolder, of: str) -> None:
    random, silent = Random(0), []
    files = run.files() if of == "run" else engine_files(run)
    for _ in range(FLIPS):
        path = random.choice(files)
        data = path.read_bytes()
        place, bit = random.randrange(len(data)), random.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        if not any(path.name in said for said in told(run, path)):
            silent.append((path, place, bit))
        path.write_bytes(data)
    assert silent == []


@pytest.mark.parametrize("flow", ["train", "finetune", "prefer"])
def test_no_damage_to_any_file_of_a_run_is_passed_over(
    flows: dict[str, RunFolder], flow: str
) -> None:
    run, silent = flows[flow], list[tuple[str, Path]]()
    assert [*find_damage(run)] == []
    files = [*run.files(), *engine_files(run)]
    kinds = {path.relative_to(run.path).parts[0] for path in files}
    assert kinds >= {"datums", "updates", "manifest.json", "metrics.jsonl", "engine"}
    for path in files:
        data = path.read_bytes()
        for damage, do in DAMAGES.items():
            do(path)
            if not any(path.name in said for said in told(run, path)):
                silent.append((damage, path.relative_to(run.path)))
            remove(path)
            path.write_bytes(data)
    missed = [one for one in silent if one[1].name != COUNTS_ONLY]
    unnoticed = {("it is deleted", path) for _, path in missed if {*path.parts} & {*UNNOTICED}}
    assert {*missed} == unnoticed
    assert {damage for damage, _ in {*silent} - {*missed}} <= {
        "it is deleted",
        "it is empty",
        "its end is cut off",
        "a dangling link is in its place",
    }
    assert [*find_damage(run)] == []


@pytest.mark.parametrize("flow", ["train", "finetune", "prefer"])
@pytest.mark.parametrize("done", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_folder_that_is_gone_empty_or_no_folder_is_missed(
    flows: dict[str, RunFolder], flow: str, done: Callable[[Path], None], tmp_path: Path
) -> None:
    run, silent = flows[flow], list[str]()
    folders = [path for path in run.path.iterdir() if path.is_dir() and path.name not in UNSEALED]
    for folder in [*folders, run.engine]:
        folder.rename(tmp_path / "aside")
        gone = [*find_damage(run)]
        done(folder)
        if not (gone and [*find_damage(run)]):
            silent.append(folder.name)
        remove(folder)
        (tmp_path / "aside").rename(folder)
    assert silent == []


def test_an_interrupted_run_lacks_nothing_of_the_step_that_is_under_way(run: RunFolder) -> None:
    """After each kind of file that a last step writes, from the last to the first."""
    run.evaluation("00002").unlink()
    for shard in ("test-00002", "greedy-00002"):
        run.spans(f"{shard}.0").unlink()
    assert [*find_damage(run)] == []
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0])
    assert [*find_damage(run)] == []
    stages = (run.update, run.datums, run.rewards, run.trajectories)
    for path in [of_step("policy", 1) for of_step in stages] + [run.spans("train-00001.0")]:
        path.unlink()
        assert [*find_damage(run)] == []
    for path in (run.journal("train-00001.0"), run.shard("train-00001")):
        path.unlink()
    assert [*find_damage(run)] == []


def test_a_run_without_its_ledgers_says_what_they_lack(run: RunFolder) -> None:
    run.metrics.write_bytes(b"")
    run.checkpoints("policy").unlink()
    said = [*find_damage(run)]
    assert f"{run.metrics} has 0 steps, and 2 were updated" in said[0]
    assert any(f"{run.checkpoints('policy')} is missing" in one for one in said)


def test_what_is_no_file_of_a_run_is_named(run: RunFolder) -> None:
    for name in ("notes.txt", "datums.bak", "weights/00001.parquet"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    said = " ".join(find_damage(run))
    for name in ("notes.txt", "datums.bak", "weights"):
        assert f"{run.path / name} is not a file of a run" in said


def test_a_folder_without_its_manifest_is_refused_by_that_file(run: RunFolder) -> None:
    run.manifest.unlink()
    [said] = find_damage(run)
    assert said.startswith(f"{run.manifest} is missing. Restore it from a copy")


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
