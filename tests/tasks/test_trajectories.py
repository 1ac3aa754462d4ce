"""spans → trajectories."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.tasks.recording.journal import spans_table
from ratchet.tasks.storage.tables import read_table, write_table
from ratchet.tasks.trajectories import assemble_trajectories, trajectories_of
from tests.support.credited import rewards_by_group

ROLLOUT = "train-00000-0000-00"


def call(number: int, prompt: list[int], response: list[int], **columns: object) -> dict:
    """One model call; the log-probability of a token is its negative, so that a test sees it."""
    return {
        "rollout_id": ROLLOUT,
        "group_id": ROLLOUT[:-3],
        "attempt": 0,
        "role": "policy",
        "kind": "llm",
        "call": number,
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "logprobs": [-float(token) for token in response],
        "kept_tokens": 0,
        "kept_how": "new",
        "policy_version": "00000",
    } | columns


def reward(value: float, **columns: object) -> dict:
    outcome = {"rollout_id": ROLLOUT, "group_id": ROLLOUT[:-3], "attempt": 0}
    return outcome | {"kind": "reward", "reward_name": "reward", "reward": value} | columns


def assembled(folder: Path, *spans: dict) -> list[dict]:
    path = folder / "spans.parquet"
    write_table(spans_table(spans), path)
    return trajectories_of([path]).to_pylist()


def test_calls_that_only_grew_are_one_trajectory(tmp_path: Path) -> None:
    (row,) = assembled(
        tmp_path,
        call(0, [1, 2], [3]),
        call(1, [1, 2, 3, 4], [5, 6], kept_call=0, kept_how="messages"),
        reward(0.5),
    )
    assert row["tokens"] == [1, 2, 3, 4, 5, 6]
    assert row["mask"] == [0, 0, 1, 0, 1, 1]
    assert row["logprobs"] == [0, 0, -3, 0, -5, -6]
    assert (row["calls"], row["reward"], row["begins"]) == (2, 0.5, "new")


def test_a_changed_token_begins_a_trajectory_whatever_the_door_says(tmp_path: Path) -> None:
    first, second = assembled(
        tmp_path,
        call(0, [1, 2], [3]),
        call(1, [1, 2, 9, 4], [5], kept_call=0, kept_how="messages"),
        reward(1.0),
    )
    assert (first["tokens"], first["mask"]) == ([1, 2, 3], [0, 0, 1])
    assert (second["tokens"], second["mask"]) == ([1, 2, 9, 4, 5], [0, 0, 0, 0, 1])
    assert [first["begins"], second["begins"]] == ["new", "mismatch"]


def test_the_door_s_reason_for_tokens_that_were_not_kept_is_recorded(tmp_path: Path) -> None:
    rows = assembled(
        tmp_path, call(0, [1], [2]), call(1, [1, 7], [3], kept_how="unknown"), reward(1.0)
    )
    assert [row["begins"] for row in rows] == ["new", "unknown"]


def test_tokens_that_grew_are_merged_even_if_the_door_did_not_see_it(tmp_path: Path) -> None:
    (row,) = assembled(
        tmp_path, call(0, [1], [2]), call(1, [1, 2, 3], [4], kept_how="unknown"), reward(1.0)
    )
    assert row["tokens"] == [1, 2, 3, 4]


def test_two_conversations_of_one_role_may_take_turns(tmp_path: Path) -> None:
    kept = {"kept_how": "messages"}
    rows = assembled(
        tmp_path,
        call(0, [1], [2]),
        call(1, [11], [12]),
        call(2, [1, 2, 3], [4], kept_call=0, **kept),
        call(3, [11, 12, 13], [14], kept_call=1, **kept),
        reward(1.0),
    )
    assert [row["tokens"] for row in rows] == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert [row["first_call"] for row in rows] == [0, 1]


def test_of_two_calls_that_grew_from_one_the_later_is_a_branch(tmp_path: Path) -> None:
    kept = {"kept_call": 0, "kept_how": "messages"}
    trunk, branch = assembled(
        tmp_path,
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4], **kept),
        call(2, [1, 2, 5], [6], **kept),
        reward(1.0),
    )
    assert trunk["tokens"] == [1, 2, 3, 4]
    # The branch sees the first answer and does not train on it again.
    assert (branch["tokens"], branch["mask"]) == ([1, 2, 5, 6], [0, 0, 0, 1])
    assert branch["begins"] == "branch"


def test_roles_are_merged_apart_and_only_the_policy_trains(tmp_path: Path) -> None:
    judge, policy = assembled(
        tmp_path,
        call(0, [1], [2]),
        call(0, [1], [8], role="judge"),
        call(1, [1, 2, 3], [4]),
        reward(1.0),
    )
    assert (judge["role"], judge["tokens"], judge["mask"]) == ("judge", [1, 8], [0, 0])
    assert (policy["role"], policy["tokens"], policy["mask"]) == (
        "policy",
        [1, 2, 3, 4],
        [0, 1, 0, 1],
    )


def test_only_the_latest_attempt_that_earned_a_reward_appears(tmp_path: Path) -> None:
    (row,) = assembled(
        tmp_path,
        call(0, [1], [2]),
        {"rollout_id": ROLLOUT, "attempt": 0, "kind": "error", "error_type": "TimeoutError"},
        call(0, [1], [3], attempt=1),
        reward(0.25, attempt=1),
    )
    assert (row["attempt"], row["tokens"], row["reward"]) == (1, [1, 3], 0.25)


def test_parts_of_a_reward_that_have_their_own_name_are_not_the_reward(tmp_path: Path) -> None:
    (row,) = assembled(
        tmp_path, call(0, [1], [2]), reward(9.0, reward_name="politeness"), reward(0.25)
    )
    assert row["reward"] == 0.25


def test_a_rollout_without_a_reward_does_not_appear(tmp_path: Path) -> None:
    assert assembled(tmp_path, call(0, [1], [2])) == []


def test_a_call_that_failed_leaves_no_gap(tmp_path: Path) -> None:
    (row,) = assembled(
        tmp_path,
        call(0, [1], [2]),
        call(1, [1, 2, 9], [], error_type="ContextOverflow"),
        call(2, [1, 2, 3], [4]),
        reward(1.0),
    )
    assert row["tokens"] == [1, 2, 3, 4]


def test_a_damaged_span_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train-00000-0000-00 has a call.*\[3, 2, 3\]"):
        assembled(tmp_path, call(0, [1], [2, 3], logprobs=[-1.0]), reward(1.0))


def test_rewards_are_grouped_by_example_where_something_trains(tmp_path: Path) -> None:
    path = tmp_path / "spans.parquet"
    spans = [call(0, [1], [2]), reward(1.0)]
    spans += [span | {"rollout_id": "train-00000-0000-01"} for span in spans]
    spans[-1] = spans[-1] | {"reward": 0.0}
    other = {"rollout_id": "train-00000-0001-00", "group_id": "train-00000-0001"}
    spans += [call(0, [1], [2], role="judge", **other), reward(1.0, **other)]
    write_table(spans_table(spans), path)
    assemble_trajectories.make(tmp_path / "trajectories.parquet", [path])
    trajectories = read_table(tmp_path / "trajectories.parquet")
    assert trajectories.num_rows == 3
    assert rewards_by_group(trajectories) == {
        "train-00000-0000": {"train-00000-0000-00": 1.0, "train-00000-0000-01": 0.0}
    }


tokens = st.lists(st.integers(0, 5), min_size=1, max_size=4)
turn = st.tuples(tokens, tokens, st.booleans(), st.sampled_from(["policy", "judge"]))


@given(turns=st.lists(turn, min_size=1, max_size=8))
def test_merging_keeps_every_sampled_token_once_and_aligned(tmp_path_factory, turns) -> None:
    """A small vocabulary, so that tokens are kept, or not, by chance."""
    spans, said, calls = [], {}, {"policy": 0, "judge": 0}
    for observed, response, grows, role in turns:
        prompt = [*said.get(role, []), *observed] if grows else observed
        spans.append(call(calls[role], prompt, response, role=role))
        said[role] = [*prompt, *response]
        calls[role] += 1
    rows = assembled(tmp_path_factory.mktemp("spans"), *spans, reward(1.0))
    assert sum(row["calls"] for row in rows) == len(turns)
    for row in rows:
        members = [span for span in spans if span["role"] == row["role"]]
        first = row["first_call"]
        run = members[first : first + row["calls"]]
        assert row["tokens"] == run[-1]["prompt_token_ids"] + run[-1]["response_token_ids"]
        sampled = [token for span in run for token in span["response_token_ids"]]
        places = sampled_places(run)
        assert [row["tokens"][place] for place in places] == sampled
        assert [row["logprobs"][place] for place in places] == [-float(token) for token in sampled]
        trained = places if row["role"] == "policy" else []
        assert [place for place, bit in enumerate(row["mask"]) if bit] == trained


def sampled_places(run: list[dict]) -> list[int]:
    return [
        place
        for span in run
        for place in range(
            len(span["prompt_token_ids"]),
            len(span["prompt_token_ids"]) + len(span["response_token_ids"]),
        )
    ]


def test_a_rollout_whose_calls_lie_in_two_row_groups_is_whole(tmp_path: Path) -> None:
    """A row group has 4096 rows."""
    prompts = [list(range(number + 1)) for number in range(5)]
    spans = [
        {**call(number, prompt, [number + 1]), **named}
        for rollout in range(1000)
        for named in [{"rollout_id": f"train-00000-{rollout:04d}-00"}]
        for number, prompt in enumerate(prompts)
    ]
    ends = [reward(1.0, rollout_id=f"train-00000-{rollout:04d}-00") for rollout in range(1000)]
    rows = assembled(tmp_path, *spans, *ends)
    assert [row["tokens"] for row in rows] == [[0, 1, 2, 3, 4, 5]] * 1000
    assert [row["mask"] for row in rows] == [[0, 1, 1, 1, 1, 1]] * 1000
