"""The remedies that errors about damaged files give, followed: the run ends as if nothing was."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from benchmarks.interruptions.compare_runs import differing_parts, read_contents
from ratchet.flows.train import train
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of

STEPS = 3
RECIPE = small_recipe(steps=STEPS, checkpoints={"every": 2})
whole = fixture_of(RECIPE)


def flip(path: Path, line: int = 0) -> None:
    """Flip a bit in the middle of a line."""
    lines = path.read_bytes().split(b"\n")
    data = lines[line]
    place = len(data) // 2
    lines[line] = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    path.write_bytes(b"\n".join(lines))


def cut_from(line: int) -> Callable[[Path], None]:
    """Remove a line and all that follow it."""

    def cut(path: Path) -> None:
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:line]))

    return cut


@pytest.mark.story
@pytest.mark.parametrize(
    ("name", "line", "remedy"),
    [
        ("checkpoints.jsonl", 0, cut_from(0)),
        ("checkpoints.jsonl", -2, cut_from(9)),
        ("metrics.jsonl", 2, cut_from(2)),
        ("owners.jsonl", 0, Path.unlink),
        ("evaluations/00003.json", 0, Path.unlink),
        ("shards/train-00002.jsonl", 0, Path.unlink),
    ],
)
def test_a_damaged_file_is_refused_and_its_remedy_gives_the_same_run(
    whole: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    line: int,
    remedy: Callable[[Path], None],
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    run = RunFolder(copytree(whole.path, tmp_path / "run"))
    if name.startswith(("shards", "checkpoints")):  # what a finished run does not read
        cut_from(2)(run.metrics)
        for stale in (run.update("policy", 2), run.datums("policy", 2)):
            stale.unlink()
        run.trajectories("policy", 2).unlink()
        run.spans("train-00002.0").unlink()
    path = run.path / name
    flip(path, line)
    with pytest.raises(Damaged, match="is damaged: its checksum does not fit"):
        train(RECIPE, run="run")
    remedy(path)
    train(RECIPE, run="run")
    assert differing_parts(read_contents(run), read_contents(whole)) == []
