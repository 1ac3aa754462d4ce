"""Stages on a Prefect server of their own: a subflow each, and a Retry that does what is left."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.runs.small_recipe import with_faults
from tests.support.runs.staged import VALUES
from tests.support.servers.prefect_team import open_team, read_log, retry, run_deployment

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
