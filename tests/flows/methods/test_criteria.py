"""A judge by criteria: each is a metric of a step, and a number of each rollout, by its name."""

from typing import Any

import pytest

from ratchet.flows.train import train
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.storage.run_folder import folder_of
from tests.support.runs.small_recipe import small_recipe

SHORT, KIND = "It is short.", "Is it, by and large, kind?"


def grade(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Answer a judge by criteria, of one of them more than of the other."""
    return "10" if SHORT in messages[-1]["content"] else "4"


def test_each_criterion_is_read_by_its_name(
    root: Any, prefect_server: None, no_tinker: None
) -> None:
    recipe = small_recipe(
        steps=1,
        rollouts={"groups": 1, "group_size": 2, "max_tokens": 8},
        evaluation={"examples": 1, "greedy": False},
        judge={"agent": "judge:criteria", "criteria": {SHORT: 3, KIND: 1}},
        roles={"judge": f"function:{__name__}:grade"},
    )
    train(recipe, run="criteria")
    run = folder_of("criteria")
    (row,) = read_metrics(run.metrics)
    assert (row[f"judge/{SHORT}"], row[f"judge/{KIND}"]) == (1, pytest.approx(0.4))
    with open_views([run]) as views:
        found = views.sql(
            "select criteria['It is short.'], criteria, parts from verdicts"
        ).fetchall()
        assert found == [(1, {SHORT: 1, KIND: 0.4}, [0.75, 0.1])] * 2
        of_step = views.sql('select "judge/It is short." from steps').fetchall()
    assert of_step == [(1,)]
