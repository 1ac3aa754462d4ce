"""`ratchet prune`: which runs it names and removes, and which must stay."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.comparison.promotions import Promotion, record_promotion
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.storage.files import read_json, write_json
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.finished import write_finished, write_finished_stages
from tests.support.runs.small_recipe import small_recipe

pytestmark = pytest.mark.usefixtures("prefect_server")

OLD = "2020-01-01T00:00:00+00:00"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return tmp_path


def change(run: RunFolder, **keys: object) -> None:
    write_json(run.manifest, read_json(run.manifest) | keys)


def old(name: str, **keys: object) -> RunFolder:
    run = write_finished(name, small_recipe(steps=1))
    change(run, created=OLD, **keys)
    return run


def stopped(name: str) -> RunFolder:
    run = old(name)
    run.metrics.unlink()
    return run


def prune(*words: str) -> list[str]:
    said = CliRunner().invoke(app, ["prune", *words], catch_exceptions=False)
    return said.stdout.splitlines()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_runs_are_removed_only_if_it_is_told_so(root: Path) -> None:
    old("a")
    write_finished("new", small_recipe(steps=1))
    named, total = prune("--older", "30")
    assert named.startswith("a: ")
    assert total.endswith("MB: to be removed; --yes removes them")
    assert names(root) == ["a", "new"]
    assert prune("--older", "30", "--yes")[-1].endswith("MB: removed")
    assert names(root) == ["new"]


def test_a_rule_must_be_given() -> None:
    with pytest.raises(UserError, match=r"give --older DAYS, --failed"):
        prune("--yes")


def test_failed_runs_are_those_that_stopped_before_their_last_step(root: Path) -> None:
    stopped("a")
    old("whole")
    prune("--failed", "--yes")
    assert names(root) == ["whole"]


def test_what_is_open_promoted_needed_or_on_a_service_stays(root: Path) -> None:
    promoted, served = old("promoted"), old("served")
    needed, teacher = old("needed"), old("teacher")
    shutil.rmtree(served.engine)
    old("kept", parent={"run": "needed", "step": 1, "how": "fork"}, bound={"x": {"run": "teacher"}})
    change(folder_of("kept"), created=read_manifest(promoted)["created"].replace("2020", "2999"))
    old("chain", parent={"run": "gone", "step": 1, "how": "fork"})
    old("gone")
    record_promotion(Promotion(name="best", run="promoted", step=1, created=OLD))
    with (opened := old("opened")).locked():
        said = prune("--older", "30", "--yes")
    assert [line for line in said if "kept" in line] == [
        "needed: kept, kept needs needed",
        "opened: kept, opened is open",
        "promoted: kept, promoted has the checkpoint best",
        "served: kept, served has checkpoints on a service, which the environment does not name; "
        "set TINKER_BASE_URL or TINKER_API_KEY",
        "teacher: kept, kept needs teacher",
    ]
    assert [run.exists() for run in (needed, opened, promoted, served, teacher)] == [True] * 5
    assert "chain" not in names(root)
    assert "gone" not in names(root)


def test_of_checkpoints_the_best_the_newest_and_those_that_something_needs_stay() -> None:
    run = write_finished("a", small_recipe(steps=6, evaluation={"every": 1}))
    best = score_outcomes([ScoredRollout("one", 1.0)]).model_dump(mode="json")
    write_json(run.evaluation("00002"), {"sampled": best})
    old("fork", parent={"run": "a", "step": 4, "how": "fork", "fingerprint": "", "recipe": {}})
    created = read_manifest(run)["created"]
    record_promotion(Promotion(name="named", run="a", step=1, created=created))
    named, total = prune("--checkpoints")
    assert named == "a: checkpoints 3, 5, 0.0 MB"
    assert total == "2 checkpoints, 0.0 MB: to be removed; --yes removes them"
    with run.locked():
        assert prune("--checkpoints", "--yes")[0] == "a: kept, a is open"
    assert steps_of(run) == {0, 1, 2, 3, 4, 5, 6}
    prune("--checkpoints", "--yes")
    assert steps_of(run) == {0, 1, 2, 4, 6}
    assert {int(one.stem) for one in run.engine.glob("checkpoints/*/*/*.json")} == steps_of(run)
    assert {int(one.stem) for one in run.engine.glob("tensors/*/*/*")} == steps_of(run)
    assert prune("--checkpoints", "--yes") == ["0 checkpoints, 0.0 MB: removed"]


def test_a_run_that_has_stopped_keeps_what_it_goes_on_from() -> None:
    run = write_finished("a", small_recipe(steps=6, rollouts={"lag": 1}))
    metrics = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(metrics[:-1]))
    prune("--checkpoints", "--yes")
    assert steps_of(run) >= {4, 5, 6}


def steps_of(run: RunFolder) -> set[int]:
    return {one.step for one in Ledger(run.checkpoints(POLICY)).checkpoints()}


def test_stages_are_removed_as_one_and_a_killed_removal_is_finished(root: Path) -> None:
    recipe = StagesRecipe.model_validate(
        {
            "stages": [
                {"name": name, "recipe": small_recipe(steps=1).model_dump(mode="json")}
                for name in ("one", "two")
            ]
        }
    )
    first, last = write_finished_stages("plan", recipe)
    change(first, created=OLD)
    assert prune("--older", "30", "--yes")[-1].startswith("0 runs")
    change(last, created=OLD)
    (root / ".x.deleted").mkdir()
    prune("--older", "30", "--yes")
    assert names(root) == []
