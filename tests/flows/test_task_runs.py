"""A run in Prefect's UI: flow runs named after the run, task runs after files and linked."""

import re
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterName,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.flow_engine import run_flow
from pydantic import BaseModel

from ratchet.flows.evaluate import evaluate
from ratchet.flows.opening.flow_runs import RunSummary, name_of_run
from ratchet.flows.train import train
from ratchet.tasks.tracking.prefect_pages import tag_flow_run
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address

RECORDING_SECONDS = 60
"""Prefect records task runs a little after they have ended."""

TASK_RUNS = {
    *("spans/train-00000.0", "spans/train-00000.1", "updates/00000"),
    *("spans/test-00000.0", "evaluations/00000", "evaluations/00001"),
}


RECIPE = small_recipe(
    steps=1,
    rollouts={"groups": 2, "group_size": 2, "max_tokens": 8, "batches": 2},
    evaluation={"examples": 1, "greedy": False},
)


def flow_run_called(name: str) -> FlowRun:
    named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    with get_client(sync_client=True) as client:
        [flow_run] = client.read_flow_runs(flow_run_filter=named)
    return flow_run


@pytest.fixture(scope="module")
def summary(root: Path, run_shown: None, tiny_chat: Address) -> RunSummary:
    """The summary of a training of one step, in two batches."""
    return train(RECIPE, run="linked")


@pytest.fixture(scope="module")
def evaluation(summary: RunSummary) -> tuple[FlowRun, float | None]:
    """The flow run of an evaluation of that training's run, and its score."""
    evaluated = evaluate(RECIPE, run=summary.run)
    return flow_run_called("evaluate linked@1"), evaluated.scores["sampled"].finished.mean


def artifacts_of(flow_run: FlowRun) -> dict[str, Artifact]:
    own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=own)
    return {str(artifact.key): artifact for artifact in found}


class Subject(BaseModel):
    """Recipe of which only the subject is known."""

    subject: str


@flow(name="named", flow_run_name=name_of_run)
def named(recipe: Subject, run: str | None = None) -> str:
    """Return the name of the run, as the body of a flow finds it."""
    return name_of_run()


@flow(name="tagged")
def tagged() -> None:
    """Give the flow run a tag."""
    tag_flow_run("held-out 0.20 → 0.40")


@pytest.mark.parametrize(
    ("given", "parameters", "expected"),
    [
        ("wise otter 2", {}, "wise-otter-2"),
        ("second-try", {}, "second-try"),
        ("second-try", {"run": "third"}, "third"),
        ("wise-otter", {}, "fish-{id}"),
        (None, {}, "fish-{id}"),
    ],
)
def test_a_run_is_called_as_its_flow_run_unless_prefect_invented_that_name(
    prefect_server: None, given: str | None, parameters: dict[str, str], expected: str
) -> None:
    values: dict[str, Any] = {"recipe": {"subject": "fish"}, **parameters}
    with get_client(sync_client=True) as client:
        created = client.create_flow_run(named, parameters=values, name=given)
        name = run_flow(named, flow_run=created, parameters=values)
        assert name == expected.format(id=str(created.id)[:8])
        assert client.read_flow_run(created.id).name == name


@pytest.fixture(scope="module")
def flow_run(summary: RunSummary) -> FlowRun:
    """The flow run of that training."""
    return flow_run_called(summary.run)


@pytest.fixture(scope="module")
def task_runs(flow_run: FlowRun) -> dict[str, TaskRun]:
    """The task runs of that flow run, by name."""
    own = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run.id]))
    deadline = time.monotonic() + RECORDING_SECONDS
    while True:
        with get_client(sync_client=True) as client:
            runs = {run.name: run for run in client.read_task_runs(task_run_filter=own, limit=200)}
        if runs.keys() >= TASK_RUNS or time.monotonic() > deadline:
            return runs
        time.sleep(0.5)


def inputs(run: TaskRun, parameter: str) -> set[UUID]:
    return {given.id for given in run.task_inputs[parameter] if given.input_type == "task_run"}


def test_the_last_state_of_a_training_says_its_gain(flow_run: FlowRun, summary: RunSummary) -> None:
    assert flow_run.state is not None
    assert flow_run.state.message == summary.outcome
    held_out = r"held-out reward \d\.\d\d → \d\.\d\d in 1 step(, which trained nothing: .*)?"
    assert re.fullmatch(held_out, summary.outcome)


def test_the_tags_that_the_list_of_runs_shows_say_what_was_gained_and_scored(
    flow_run: FlowRun, summary: RunSummary, evaluation: tuple[FlowRun, float | None]
) -> None:
    assert flow_run.tags == [f"held-out {summary.before:.2f} → {summary.after:.2f}"]
    scored, reward = evaluation
    assert scored.tags == [f"held-out {reward:.2f}"]


def test_a_tag_takes_the_place_of_one_that_begins_with_the_same_word(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        given = ["team", "held-out 0.20 → 0.30"]
        created = client.create_flow_run(tagged, tags=given)
        run_flow(tagged, flow_run=created)
        assert client.read_flow_run(created.id).tags == ["team", "held-out 0.20 → 0.40"]


def test_an_evaluation_is_named_after_its_checkpoint_and_ends_with_its_score(
    evaluation: tuple[FlowRun, float],
) -> None:
    flow_run, score = evaluation
    assert flow_run.state is not None
    assert flow_run.state.message == f"held-out reward {score:.2f} sampled"


def test_a_training_leaves_curves_metrics_transcripts_and_evaluations(flow_run: FlowRun) -> None:
    artifacts = artifacts_of(flow_run)
    shown = ("progress", "curves", "metrics", "transcripts", "evaluations")
    assert artifacts.keys() == {f"linked-{what}" for what in shown}
    assert "![curves](data:image/svg+xml;base64," in str(artifacts["linked-curves"].data)
    assert "## best: train-00000-" in str(artifacts["linked-transcripts"].data)
    said = "The best, the middle and the worst rollout of linked in step 0 by reward, and up to 3"
    assert (artifacts["linked-transcripts"].description or "").startswith(said)


def test_evaluations_link_to_the_flow_run_that_trained_the_checkpoint(
    flow_run: FlowRun, evaluation: tuple[FlowRun, float]
) -> None:
    """The training's own artifact has another version, of the same key."""
    for scored_by in (flow_run, evaluation[0]):
        text = str(artifacts_of(scored_by)["linked-evaluations"].data)
        assert f"[linked](../../runs/flow-run/{flow_run.id}) trained these" in text
        assert "[curves](../../artifacts/key/linked-curves)" in text
        scored = r"^\| (\d) \| [\d.]+ \| [^|]+ \| 1 \| 0 \| sampled \| all"
        assert re.findall(scored, text, re.M) == ["0", "1"]
        assert re.findall(r"^\| (\d) \| `tinker://", text, re.M) == ["0", "1"]


def test_task_runs_are_named_after_their_files(task_runs: dict[str, TaskRun]) -> None:
    assert task_runs.keys() >= TASK_RUNS


def test_a_step_has_task_runs_of_its_batches_and_of_its_update_alone(
    task_runs: dict[str, TaskRun],
) -> None:
    of_step = {name for name in task_runs if re.search("train-00000|/00000$", name)}
    assert of_step - {"evaluations/00000"} == {
        *("spans/train-00000.0", "spans/train-00000.1", "updates/00000"),
    }


def test_an_update_is_linked_to_the_batches_on_which_it_trains(
    task_runs: dict[str, TaskRun],
) -> None:
    batches = {task_runs[f"spans/train-00000.{number}"].id for number in (0, 1)}
    assert inputs(task_runs["updates/00000"], "due") == batches
