"""A run in Prefect's UI: flow runs named after the run, task runs after files and linked."""

import time
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, TaskRun

from flows.train import train
from tests.small_recipe import small_recipe

RECORDING_SECONDS = 60
"""Prefect records task runs a little after they have ended."""

TASK_RUNS = {
    *("shards/train-00000", "spans/train-00000.0", "spans/train-00000.1"),
    *("trajectories/00000", "datums/00000", "updates/00000"),
}


@pytest.fixture(scope="module")
def flow_run(root: Path, prefect_server: None, no_tinker: None) -> FlowRun:
    """The flow run of a training of one step, in two batches."""
    rollouts = {"groups": 2, "group_size": 2, "max_tokens": 8, "batches": 2}
    evaluation = {"examples": 1, "greedy": False}
    train(small_recipe(steps=1, rollouts=rollouts, evaluation=evaluation), run="linked")
    named = FlowRunFilter(name=FlowRunFilterName(any_=["linked"]))
    with get_client(sync_client=True) as client:
        [flow_run] = client.read_flow_runs(flow_run_filter=named)
    return flow_run


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


def test_a_flow_run_is_named_after_its_run(flow_run: FlowRun) -> None:
    assert flow_run.name == "linked"


def test_task_runs_are_named_after_their_files(task_runs: dict[str, TaskRun]) -> None:
    assert task_runs.keys() >= TASK_RUNS
    assert {"spans/test-00000.0", "evaluations/00000", "evaluations/00001"} <= task_runs.keys()


def test_each_task_run_is_linked_to_those_whose_files_it_reads(
    task_runs: dict[str, TaskRun],
) -> None:
    batches = {task_runs[f"spans/train-00000.{number}"].id for number in (0, 1)}
    for batch in ("spans/train-00000.0", "spans/train-00000.1"):
        assert inputs(task_runs[batch], "shard") == {task_runs["shards/train-00000"].id}
    assert inputs(task_runs["trajectories/00000"], "spans") == batches
    assembled = task_runs["trajectories/00000"].id
    assert inputs(task_runs["datums/00000"], "trajectories") == {assembled}
    assert inputs(task_runs["updates/00000"], "datums") == {task_runs["datums/00000"].id}
