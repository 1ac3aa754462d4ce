"""A step → one flat row of numbers."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from ratchet.tasks.metrics import StepFiles, measure_divergence, measure_step
from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.recording.step_log import read_metrics, record_metrics
from ratchet.tasks.storage.tables import read_table, write_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, read_datums, write_datums

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)
WEIGHTS = [math.exp(-difference) for difference in (0.5, -0.5, 1.0)]
"""Importance weights of the sampled tokens in the tests of divergence."""


def rollout(group: int, index: int, *rows: dict, attempt: int = 0) -> list[dict]:
    """Spans of one attempt of one second; an attempt begins ten seconds after the one before."""
    name, began = f"train-00000-{group:04d}", BEGAN + attempt * timedelta(seconds=10)
    place = {"rollout_id": f"{name}-{index:02d}", "group_id": name, "attempt": attempt}
    place |= {"started": began, "ended": began + timedelta(seconds=1)}
    call = {"kind": "llm", "role": "policy", "kept_how": "new", "policy_version": "00000"}
    return [
        place
        | (call | {"call": number, "kept_tokens": 0} if "prompt_token_ids" in row else {})
        | row
        for number, row in enumerate(rows)
    ]


def said(prompt: list[int], response: list[int], logprob: float = -1.0, **columns: object) -> dict:
    tokens = {"prompt_token_ids": prompt, "response_token_ids": response}
    return tokens | {"logprobs": [logprob] * len(response)} | columns


def ended(reward: float) -> dict:
    return {"kind": "reward", "reward_name": "reward", "reward": reward}


FAILED = {"kind": "error", "error_type": "TimeoutError"}


def files(folder: Path, *rollouts: list[dict]) -> StepFiles:
    rows = [row for spans in rollouts for row in spans]
    spans = write_table(spans_table(rows), folder / "spans.parquet")
    trajectories, datums = folder / "trajectories.parquet", folder / "datums.parquet"
    assemble_trajectories.make(trajectories, [spans])
    write_datums(datums, trajectories, credited("centred"))
    return StepFiles([spans], trajectories, {}, datums)


def test_a_step_in_numbers(tmp_path: Path) -> None:
    kept = {"kept_tokens": 3, "kept_call": 0, "kept_how": "messages"}
    made = files(
        tmp_path,
        rollout(0, 0, said([1, 2], [3]), said([1, 2, 3, 4], [5, 6], -2.0, **kept), ended(1.0)),
        rollout(0, 1, said([1, 2], [3]), said([1, 7], [8], kept_how="unknown"), ended(0.0)),
        rollout(0, 2, said([1, 2], [3, 3, 3]), FAILED),
        rollout(1, 0, FAILED),
        rollout(1, 0, said([1], [2]), said([1], [9], role="judge"), ended(0.5), attempt=1),
    )
    assert measure_step(made) == {
        "rollouts/ok": 3,
        "rollouts/failed": 1,
        "rollouts/retried": 1,
        "rollouts/without_calls": 0,
        "calls": 6,
        "calls/other_roles": 1,
        "calls/lost": 0,
        "recall/calls": 0,
        "recall/tokens": 0,
        "recall/rollouts": 0,
        "recall/diverged": 0,
        "calls/refused": 0,
        "tokens/prompt": 2 + 4 + 2 + 2 + 2 + 1,
        "tokens/sampled": 1 + 2 + 1 + 1 + 3 + 1,
        "tokens/kept_fraction": 3 / 13,
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.sqrt(0.5 / 3)),
        "groups": 2,
        "groups/partial": 1,
        "groups/dropped": 0,
        "groups/uniform_fraction": 0.5,
        "trajectories": 4,
        "turns/not_kept": 1,
        "turns/not_kept/unknown": 1,
        # Sampled where there is a reward: -1, -2, -2 · -1, -1 · -1.
        "entropy": 8 / 6,
        "datums": 3,
        "datums/dropped": 1,
        "tokens/trained": 5,
        "seconds/sampling": 11.0,
        "seconds/rollout": 1.0,
    }


def test_answers_are_counted_that_kept_to_the_form_they_were_asked_for(tmp_path: Path) -> None:
    formed = [{"format": {"valid": valid}} for valid in (True, False, None)]
    kept = [{"tool_choice": {"kept": True}}, {}]
    calls = [said([1], [2], attributes=found) for found in (*formed, *kept)]
    metrics = measure_step(files(tmp_path, rollout(0, 0, *calls, ended(1.0))))
    assert (metrics["format/valid_fraction"], metrics["tool_choice/kept_fraction"]) == (0.5, 1.0)


def test_a_call_counts_where_it_was_sampled_and_not_where_it_was_given_again(
    tmp_path: Path,
) -> None:
    first, again = {"request_sha": "a", "recalled": False}, {"request_sha": "a", "recalled": True}
    other = {"request_sha": "b", "recalled": False}
    lost = {"kind": "begun", "role": "policy", "call": 2, "request_sha": "c", "ended": None}
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    end = ended(1.0)
    whole = [said([1], [2, 3], **first), said([4], [5], **other), end]
    cut = rollout(0, 0, said([1], [2, 3], **first), lost)
    resumed = rollout(0, 0, said([1], [2, 3], **again), said([4], [5], **other), end, attempt=1)
    expected = measure_step(files(undisturbed, rollout(0, 0, *whole)))
    assert measure_step(files(disturbed, cut, resumed)) == expected | {
        "rollouts/retried": 1,
        "calls/lost": 1,
        "recall/calls": 1,
        "recall/tokens": 2,
        "recall/rollouts": 1,
        "seconds/sampling": 11.0,
        "seconds/rollout": 1.0,
    }


def test_a_step_in_which_everything_failed_has_counts_and_no_means(tmp_path: Path) -> None:
    metrics = measure_step(files(tmp_path, rollout(0, 0, FAILED)))
    assert metrics["rollouts/failed"] == 1
    assert metrics["groups"] == metrics["datums"] == metrics["tokens/sampled"] == 0
    assert metrics.keys().isdisjoint({"reward/mean", "entropy", "groups/uniform_fraction"})


def test_partial_and_dropped_groups_are_counted(tmp_path: Path) -> None:
    answered = said([1], [2])
    made = files(
        tmp_path,
        *[rollout(0, index, answered, ended(float(index))) for index in range(3)],
        *[rollout(1, index, answered, ended(float(index))) for index in range(2)],
        rollout(1, 2, FAILED),
        rollout(2, 0, answered, ended(1.0)),
        rollout(2, 1, answered, FAILED),
        rollout(2, 2, ended(1.0)),
        rollout(3, 0, FAILED),
    )
    names = ("groups", "groups/partial", "groups/dropped")
    counts = {
        size: [measure_step(made, min_group_size=size)[name] for name in names]
        for size in (1, 2, 3)
    }
    assert counts == {1: [3, 3, 1], 2: [3, 3, 2], 3: [3, 3, 3]}


def test_a_rollout_that_never_called_the_policy_has_a_reward_all_the_same(tmp_path: Path) -> None:
    metrics = measure_step(files(tmp_path, rollout(0, 0, ended(1.0)), rollout(0, 1, ended(0.0))))
    assert (metrics["reward/mean"], metrics["groups"]) == (0.5, 0)


def test_what_an_agent_measures_beside_its_reward_has_a_name_of_its_own(tmp_path: Path) -> None:
    measured = {"kind": "credit", "role": "measure/is short", "reward_name": "role", "reward": 0.5}
    row = measure_step(files(tmp_path, rollout(0, 0, said([1], [2]), measured, ended(1.0))))
    assert (row["measure/is short"], row["reward/mean"]) == (0.5, 1.0)
    assert not [name for name in row if "/measure/" in name]


def test_divergence_is_over_sampled_tokens_only(tmp_path: Path) -> None:
    made = files(
        tmp_path,
        rollout(0, 0, said([1, 2], [3, 4], -1.0), ended(1.0)),
        rollout(0, 1, said([1], [2], -1.0), ended(0.0)),
    )
    # Differences log q - log p: .5, -.5 and 1.
    returned = [np.array([-9.0, -1.5, -0.5]), np.array([-2.0])]
    assert measure_divergence(read_table(made.datums), returned, step=0) == {
        "kl_sample_train_v1": pytest.approx(1 / 3),
        "kl_sample_train_v2": pytest.approx((0.25 + 0.25 + 1) / 3 / 2),
        "ess": pytest.approx(sum(WEIGHTS) ** 2 / (3 * sum(w**2 for w in WEIGHTS))),
        "lag": 0,
    }


def test_divergence_is_given_for_each_lag_of_a_step_that_was_sampled_by_earlier_weights(
    tmp_path: Path,
) -> None:
    old = {"policy_version": "00002"}
    made = files(
        tmp_path,
        rollout(0, 0, said([1, 2], [3, 4], -1.0), ended(1.0)),
        rollout(0, 1, said([1], [2], -1.0) | old, ended(0.0)),
    )
    returned = [np.array([-9.0, -1.5, -0.5]), np.array([-2.0])]
    measured = measure_divergence(read_table(made.datums), returned, step=3)
    assert measured["lag"] == pytest.approx((3 + 3 + 1) / 3)
    by_lag = {name: value for name, value in measured.items() if "/lag_" in name}
    assert by_lag == {
        "kl_sample_train_v1/lag_3": 0,
        "kl_sample_train_v2/lag_3": pytest.approx(0.125),
        "ess/lag_3": pytest.approx(sum(WEIGHTS[:2]) ** 2 / (2 * sum(w**2 for w in WEIGHTS[:2]))),
        "kl_sample_train_v1/lag_1": 1,
        "kl_sample_train_v2/lag_1": 0.5,
        "ess/lag_1": 1,
    }


def test_log_probabilities_of_other_tokens_than_were_sampled_are_refused(tmp_path: Path) -> None:
    made = files(
        tmp_path,
        rollout(0, 0, said([1], [2, 3]), ended(1.0)),
        rollout(0, 1, said([1], [2]), ended(0.0)),
    )
    with pytest.raises(ValueError, match=r"a datum of train-00000-0000-00 has 2 targets, but 1"):
        measure_divergence(read_table(made.datums), [np.zeros(1), np.zeros(1)], step=0)
    with pytest.raises(ValueError, match="has 2 datums, but 1 came back"):
        measure_divergence(read_table(made.datums), [np.zeros(2)], step=0)


def test_an_empty_batch_diverges_from_nothing(tmp_path: Path) -> None:
    made = files(tmp_path, rollout(0, 0, said([1], [2]), ended(1.0)))
    assert measure_divergence(read_table(made.datums), [], step=0) == {}


def bigram_rollouts(logits: np.ndarray, count: int, length: int) -> list[list[dict]]:
    """Rollouts sampled from a bigram model: row `a` of `logits` is what follows token `a`."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index in range(count):
        tokens, logprobs = [0], []
        for _ in range(length):
            follows = logits[tokens[-1]]
            tokens.append(int(rng.choice(len(follows), p=np.exp(follows))))
            logprobs.append(float(follows[tokens[-1]]))
        call = said(tokens[:1], tokens[1:]) | {"logprobs": logprobs}
        rollouts.append(rollout(0, index, call, ended(float(index % 2))))
    return rollouts


def test_a_batch_without_its_final_targets_shows_in_the_divergence(tmp_path: Path) -> None:
    """The classic mistake: inputs cut at the front too, so that each target is one too late."""
    logits = np.random.default_rng(1).normal(scale=1.0, size=(16, 16))
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    made = files(tmp_path, *bigram_rollouts(logits, count=16, length=16))
    right, wrong = [], []
    for datum in read_datums(made.datums, "importance_sampling"):
        inputs = np.array(datum.model_input.to_ints())
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        right.append(logits[inputs, targets])
        # The final target is missing: the rest stands one place off, with a zero in the gap.
        wrong.append(np.append(logits[inputs[1:], targets[1:]], 0.0))
    healthy, broken = (
        measure_divergence(read_table(made.datums), logprobs, step=0) for logprobs in (right, wrong)
    )
    assert abs(healthy["kl_sample_train_v1"]) < 1e-6
    assert healthy["kl_sample_train_v2"] < 1e-6
    assert broken["kl_sample_train_v2"] > 0.3


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    record_metrics(path, 0, {"reward/mean": 0.5})
    record_metrics(path, 1, {"reward/mean": 0.75})
    record_metrics(path, 1, {"reward/mean": 9.0})
    assert read_metrics(path) == [{"step": 0, "reward/mean": 0.5}, {"step": 1, "reward/mean": 0.75}]


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record_metrics(tmp_path / "metrics.jsonl", 0, {"entropy": float("nan")})
