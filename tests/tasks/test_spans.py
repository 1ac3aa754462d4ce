from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from ratchet.adapters.calls import CallId, Completion, Request, Sampling, Usage
from ratchet.adapters.player_protocol import Failure, Outcome, RolloutEnd
from ratchet.adapters.rewards import Reward, read_reward
from ratchet.tasks.recording.journal import SPAN_SCHEMA, check_span, spans_table
from ratchet.tasks.recording.spans import Span, call_span, end_spans, span_identity, without_secrets

ROLLOUT = "train-00003-0012-01"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def completion(call: int = 0, rollout_id: str = ROLLOUT, **changed: Any) -> Completion:
    request = Request(
        "any", [{"role": "user", "content": "hi"}], [], None, [], {"seed": 5, "api_key": "tml-x"}
    )
    values: dict[str, Any] = {
        "id": CallId(rollout_id, 1, "policy", call),
        "response_id": "chatcmpl-1",
        "request": request,
        "sampling": Sampling(8, 1.0, 1.0, -1),
        "seed": 2**63 - 1,
        "prompt_token_ids": [1, 2, 3],
        "kept_tokens": 0,
        "kept_call": None,
        "kept_how": "new",
        "response_token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ho"},
        "policy_version": "00002",
        "renderer": "qwen3",
        "tokenizer_sha": "abc",
        "started": NOON,
        "ended": NOON,
    }
    return Completion(**values | changed)


def ends(outcome: Outcome, attempt: int = 0, **calls: Sequence[int]) -> list[Span]:
    return end_spans(RolloutEnd(outcome, 0.0, ROLLOUT, attempt, calls), NOON)


def test_a_span_says_where_it_belongs() -> None:
    span = call_span(completion(call=2, kept_tokens=3, kept_call=1))
    where = ("shard", "step", "group_id", "rollout_id", "attempt", "role", "call")
    assert [span[name] for name in where] == [
        "train-00003",
        3,
        "train-00003-0012",
        ROLLOUT,
        1,
        "policy",
        2,
    ]
    assert span["kept_span_id"] == call_span(completion(call=1))["span_id"]
    check_span(span)


def test_a_span_shows_no_secrets() -> None:
    assert call_span(completion())["attributes"] == {"request": {"seed": 5, "api_key": "***"}}
    nested = {"extra": [{"X-Api-Key": "k"}, {"max_tokens": 3}]}
    assert without_secrets(nested) == {"extra": [{"X-Api-Key": "***"}, {"max_tokens": 3}]}


def test_spans_fill_the_schema_whatever_their_kind() -> None:
    error, reward = ends(Failure("TimeoutError", "too long")), ends(Reward(0.1), attempt=1)
    spans = spans_table([*reward, call_span(completion()), *error])
    assert spans.schema == SPAN_SCHEMA
    assert spans["kind"].to_pylist() == ["error", "llm", "reward"]
    assert spans["reward"].to_pylist() == [None, None, 0.1]
    assert spans["error_type"].to_pylist() == ["TimeoutError", None, None]
    assert spans["reply"].to_pylist()[1] == '{"role": "assistant", "content": "ho"}'


def test_a_role_and_each_of_its_calls_have_a_credit_of_their_own() -> None:
    *spans, _ = ends(read_reward({"judge": [0.5, 0.5]}), judge=[0, 1])
    assert (
        len({span_identity(span) for span in spans})
        == len({span["span_id"] for span in spans})
        == 3
    )
    assert [span["reward_name"] for span in spans] == ["role", "call", "call"]
    assert spans_table(spans)["kind"].to_pylist() == ["credit"] * 3
    with pytest.raises(ValueError, match=r"judge\.credit has the reward nan"):
        check_span(ends(Reward(0.0, {"judge": float("nan")}), judge=[])[0])


def test_the_end_of_a_rollout_is_its_credits_and_last_its_reward() -> None:
    reward = read_reward({"judge": 0.25, "policy": [0.5, 0.75]})
    spans = ends(reward, policy=[3, 1], judge=[])
    assert [(span["kind"], span.get("role"), span.get("call")) for span in spans] == [
        ("credit", "judge", None),
        ("credit", "policy", None),
        ("credit", "policy", 1),
        ("credit", "policy", 3),
        ("reward", None, None),
    ]


def test_an_end_whose_reward_does_not_fit_its_calls_is_an_error_alone() -> None:
    reward = read_reward({"policy": [0.5, 0.75]})
    (span,) = ends(reward, policy=[0])
    assert (span["kind"], span["error_type"]) == ("error", "RewardError")
    (span,) = ends(Failure("TimeoutError", "too long"), policy=[0])
    assert (span["error_type"], span["error_message"]) == ("TimeoutError", "too long")


def test_a_call_that_no_policy_answered_has_its_usage_and_its_cost() -> None:
    nobody: dict[str, Any] = {"sampling": None, "response_token_ids": [], "logprobs": []}
    span = call_span(completion(usage=Usage(7, 3, 0.25), prompt_token_ids=[], **nobody))
    assert (span["gen_ai_usage_input_tokens"], span["gen_ai_usage_output_tokens"]) == (7, 3)
    assert (span["attributes"]["cost"], "gen_ai_request_top_p" in span) == (0.25, False)
    check_span(span)


def test_spans_are_sorted_by_rollout_attempt_role_and_call() -> None:
    late = "train-00003-0012-02"
    spans = [completion(10), completion(2), completion(0, rollout_id=late)]
    rows = (
        spans_table([call_span(span) for span in spans]).select(["rollout_id", "call"]).to_pylist()
    )
    assert [(row["rollout_id"], row["call"]) for row in rows] == [
        (ROLLOUT, 2),
        (ROLLOUT, 10),
        (late, 0),
    ]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"logprobs": [-0.5]}, "2 tokens and 1 log-prob"),
        ({"logprobs": [-0.5, float("nan")]}, "not a finite number"),
        ({"kept_tokens": 4}, "keeps 4 tokens of a prompt of 3"),
        ({"kept_tokens": -1}, "keeps -1 tokens"),
    ],
)
def test_a_span_that_assembly_would_misread_is_refused(changed: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_span(call_span(completion(**changed)))


def test_an_unknown_column_or_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no column colour"):
        check_span({**call_span(completion()), "colour": "red"})
    with pytest.raises(ValueError, match="not 'turn'"):
        check_span({**call_span(completion()), "kind": "turn"})
    with pytest.raises(ValueError, match="must be finite"):
        check_span(ends(Reward(float("inf")))[0])


def test_a_name_that_says_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="train-00003-0012-01"):
        end_spans(RolloutEnd(Reward(1.0), 0.0, "my rollout"), NOON)


def test_tokens_may_not_be_missing_in_parquet() -> None:
    assert SPAN_SCHEMA.field("prompt_token_ids").type.value_type == pa.int32()
    assert not SPAN_SCHEMA.field("prompt_token_ids").type.value_field.nullable
