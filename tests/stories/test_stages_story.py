"""Stages on a Prefect server of their own: a subflow each, and a Retry that does what is left."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.interruptions.workloads import WORKLOADS
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.plan import StagesRecipe
from tests.support.processes import wait_until
from tests.support.runs.small_recipe import with_faults
from tests.support.runs.staged import VALUES
from tests.support.servers.prefect_team import (
    RUNNING_SECONDS,
    open_team,
    read_log,
    retry,
    run_deployment,
    wait_for_end,
)

pytestmark = pytest.mark.story

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    folder = tmp_path_factory.mktemp("team")
    variables = {**os.environ, "RATCHET_RUNS": str(folder / "runs")}
    ratchet = [sys.executable, "-m", "ratchet.flows.cli.main"]
    with open_team(ratchet, ROOT, folder, variables, "hello-stages") as api:
        yield api, folder / "runs"


def test_retry_of_a_failed_second_stage_does_not_touch_the_first(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    """The second step of the stage of rewards kills its engine in each of three starts."""
    api, runs = team
    faulty = with_faults(tmp_path, "engine engine engine")
    texts, rewards, pairs = VALUES["stages"]
    stages = [texts, {**rewards, "recipe": rewards["recipe"] | faulty}, pairs]
    recipe = json.loads(json.dumps({**VALUES, "stages": stages}))
    deployment = api.get("/deployments/name/stages/hello-stages").json()["id"]
    failed = run_deployment(api, deployment, {"recipe": recipe, "run": "story"})
    assert failed["state"]["type"] == "FAILED", read_log(api, failed["id"])
    first = _files(runs / "story-1-texts")

    done = retry(api, failed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), read_log(api, done["id"])
    assert done["state"]["message"].startswith("held-out reward ")
    assert _files(runs / "story-1-texts") == first
    assert len((runs / "story-2-rewards" / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((runs / "story-3-pairs" / "metrics.jsonl").read_text().splitlines()) == 2

    names = [one["name"] for one in _subflows(api, done)]
    assert names.count("story-1-texts") == 1
    assert names.count("story-3-pairs") == 1
    assert [name for name in names if name.startswith("evaluate story-1-texts")] != []
    states = {one["name"]: one["state"]["type"] for one in _subflows(api, done)}
    assert {states[f"story-{stage}"] for stage in ("1-texts", "2-rewards", "3-pairs")} == {
        "COMPLETED"
    }
    keys = {one["key"] for one in api.post("/artifacts/filter", json={}).json()}
    assert "story-stages" in keys


def test_retry_of_a_failed_preference_model_does_not_train_the_texts_again(
    team: tuple[httpx.Client, Path], tmp_path: Path
) -> None:
    """The pairs of the second stage are away when it begins."""
    api, runs = team
    pairs, away = tmp_path / "pairs.jsonl", tmp_path / "away.jsonl"
    shutil.copy(ROOT / "datasets" / "hello_comparisons.jsonl", pairs)
    given = [*WORKLOADS["rlhf"], f"stages.preferences.recipe.dataset.path={pairs}"]
    recipe = named_recipe("hello-rlhf", given, StagesRecipe).model_dump(mode="json")
    deployment = api.get("/deployments/name/stages/hello-stages").json()["id"]
    asked = {"parameters": {"recipe": recipe, "run": "rlhf"}, "state": {"type": "SCHEDULED"}}
    created = api.post(f"/deployments/{deployment}/create_flow_run", json=asked).json()
    first = runs / "rlhf-1-texts"
    wait_until("the texts are learnt", (first / "metrics.jsonl").exists, RUNNING_SECONDS)
    pairs.rename(away)
    failed = wait_for_end(api, created["id"])
    assert failed["state"]["type"] == "FAILED", read_log(api, failed["id"])
    assert f"{pairs} does not exist" in failed["state"]["message"]
    before, scored = _files(first), len(_subflows(api, failed))

    away.rename(pairs)
    done = retry(api, failed)
    assert (done["state"]["type"], done["run_count"]) == ("COMPLETED", 2), read_log(api, done["id"])
    assert _files(first) == before
    begun = [one["name"] for one in _subflows(api, done)]
    assert begun.count("rlhf-1-texts") == 1
    assert len(begun) > scored
    assert len((runs / "rlhf-3-rewards" / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_misspelt_key_of_a_stage_is_refused_when_the_run_is_created(
    team: tuple[httpx.Client, Path],
) -> None:
    api, _ = team
    deployment = api.get("/deployments/name/stages/hello-stages").json()["id"]
    recipe = json.loads(json.dumps(VALUES))
    recipe["stages"][0]["stat"] = "best"
    asked = {"parameters": {"recipe": recipe}}
    refused = api.post(f"/deployments/{deployment}/create_flow_run", json=asked)
    assert (refused.status_code, "stat" in refused.text) == (409, True)


def _subflows(api: httpx.Client, flow_run: dict[str, Any]) -> list[dict[str, Any]]:
    """List the flow runs below one, the last one to begin under a name at the end."""
    asked = {
        "flow_runs": {"parent_flow_run_id": {"any_": [flow_run["id"]]}},
        "sort": "START_TIME_ASC",
    }
    return api.post("/flow_runs/filter", json=asked).json()


def _files(run: Path) -> dict[str, bytes]:
    """Read the run's own files, by their paths; a lock names who had the run open."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }
