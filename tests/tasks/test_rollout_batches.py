"""The number of a step's rollout batches changes no result."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.adapters.calls import POLICY, JsonObject
from ratchet.tasks.evaluations import score_spans
from ratchet.tasks.metrics import StepFiles, measure_step
from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.recording.scores import Score
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.step_log import Metrics
from ratchet.tasks.reports.rollouts import read_games, transcripts
from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.tables import write_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
GROUPS, GROUP_SIZE = 6, 3
ROLES = (POLICY, "helper")


def record_rollout(group: int, index: int) -> list[Span]:
    """Make the spans of a rollout at random: failed attempts, several roles, tokens not kept."""
    chosen = random.Random(f"{group}/{index}")
    name = f"train-00000-{group:04d}"
    rollout = {"rollout_id": f"{name}-{index:02d}", "group_id": name, "shard": "train-00000"}
    failures, fails = chosen.choice([0, 0, 1]), chosen.random() < 0.2
    spans: list[Span] = []
    for attempt in range(failures + 1):
        said: list[int] = []
        began = BEGAN + timedelta(seconds=chosen.uniform(0, 9))
        place = rollout | {"attempt": attempt, "started": began}
        place["ended"] = began + timedelta(seconds=chosen.uniform(0, 3))
        for call in range(chosen.randint(1, 4)):
            role = chosen.choice([*ROLES, "judge"])
            prompt = said + chosen.choices(range(9), k=chosen.randint(1, 3))
            said = prompt + chosen.choices(range(9), k=chosen.randint(1, 3))
            answer = said[len(prompt) :]
            spans.append(
                place
                | {"kind": "llm", "role": role, "call": call, "span_id": f"{name}-{index}.{call}"}
                | {"prompt_token_ids": prompt, "response_token_ids": answer}
                | {"logprobs": [-chosen.random() for _ in answer], "kept_tokens": 0}
                | {"kept_how": chosen.choice(["new", "unknown"]), "policy_version": "00000"}
                | {"messages": [{"role": "user", "content": f"{prompt}"}]}
                | {"reply": {"role": "assistant", "content": f"{answer}"}}
                | judged(role, chosen.random())
            )
            said = said if chosen.random() < 0.7 else said[1:]
        example = {"example_id": group, "example": {"question": group}}
        end: Span = place | {"kind": "error", "error_type": "KeyError", "error_message": "x"}
        if attempt == failures and not fails:
            reward = chosen.uniform(-1, 1)
            end = place | {"kind": "reward", "reward_name": "reward", "reward": reward}
        spans.append(end | {"span_id": f"{name}-{index}.end", "attributes": example})
    return spans


def judged(role: str, cost: float) -> dict[str, Any]:
    if role != "judge":
        return {"gen_ai_provider_name": "ratchet"}
    usage = {"gen_ai_usage_input_tokens": 7, "gen_ai_usage_output_tokens": 3}
    return usage | {"gen_ai_provider_name": "other", "attributes": {"cost": cost}}


ROLLOUTS = [record_rollout(group, index) for group in range(GROUPS) for index in range(GROUP_SIZE)]


class Step:
    """What a step makes of its rollouts, recorded in batches that begin at these examples."""

    def __init__(self, folder: Path, beginnings: Sequence[int]) -> None:
        ends = [*beginnings[1:], GROUPS]
        spans = [
            write_table(
                spans_table(
                    span
                    for rollout in ROLLOUTS[begin * GROUP_SIZE : end * GROUP_SIZE]
                    for span in rollout
                ),
                folder / f"train-00000.{number}.parquet",
            )
            for number, (begin, end) in enumerate(zip(beginnings, ends, strict=True))
        ]
        credit = credited(
            "standardized", aggregation="rollout_mean", min_group_size=2, discount=0.9
        )
        trajectories, datums = folder / "trajectories.parquet", folder / "datums.parquet"
        assemble_trajectories.make(trajectories, spans, ROLES)
        write_datums(datums, trajectories, credit)
        self.trajectories, self.datums = trajectories.read_bytes(), datums.read_bytes()
        files = StepFiles(spans, trajectories, {}, datums)
        self.metrics: Metrics = measure_step(files, trained_roles=ROLES, min_group_size=2)
        self.games: list[JsonObject] = read_games(spans)
        self.transcripts = transcripts(spans)
        rows = [
            {"example_id": g, "example": {"category": str(g % 2)}, "batch": 0}
            for g in range(GROUPS)
        ]
        shard = write_rows(folder / "shard.jsonl", rows)
        self.score: Score = score_spans(spans, shard, threshold=0.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Step:
    return Step(tmp_path_factory.mktemp("whole"), [0])


def test_the_rollouts_have_something_to_train_to_fail_and_to_score(whole: Step) -> None:
    metrics = whole.metrics
    assert metrics["datums"] > 10
    assert metrics["rollouts/failed"] > 0
    assert metrics["rollouts/retried"] > 0
    assert metrics["turns/not_kept"] > 0
    assert metrics["cost/judge"] > 0
    assert len(whole.games) == GROUPS * GROUP_SIZE
    assert whole.score.spent["judge"].calls > 5


@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, GROUPS - 1), max_size=2))
def test_the_number_of_batches_changes_no_result(
    tmp_path_factory: pytest.TempPathFactory, whole: Step, cuts: set[int]
) -> None:
    split = Step(tmp_path_factory.mktemp("split"), [0, *sorted(cuts)])
    assert split.trajectories == whole.trajectories
    assert split.datums == whole.datums
    assert split.metrics == whole.metrics
    assert split.games == whole.games
    assert split.transcripts == whole.transcripts
    assert split.score == whole.score
