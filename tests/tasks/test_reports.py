"""A run → what a person wants to read of it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.flows.cli.commands import app
from ratchet.tasks.ends import StepStopped, check_rewards
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.journal import SPAN_SCHEMA, spans_table
from ratchet.tasks.recording.scores import Spent
from ratchet.tasks.recording.spans import Span, count_tokens, footer_of
from ratchet.tasks.recording.transcripts import read_failures
from ratchet.tasks.reports.facts import ask_failures
from ratchet.tasks.reports.rollouts import transcripts
from ratchet.tasks.reports.tables import scores_table
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import folder_of
from ratchet.tasks.storage.tables import write_parts

LONG = "\n".join(f"line {number} of a long answer to a request" for number in range(40))


def said(question: str, answer: str, **columns: object) -> dict:
    """A call of three prompt tokens and as many sampled ones as the answer has words."""
    count = len(answer.split())
    return {
        "kind": "llm",
        "role": "policy",
        "call": 0,
        "messages": [{"role": "user", "content": question}],
        "reply": {"role": "assistant", "content": answer},
        "prompt_token_ids": [1, 2, 3],
        "response_token_ids": list(range(count)),
        "logprobs": [-1.0] * count,
        "kept_tokens": 0,
        "kept_how": "new",
    } | columns


def ended(reward: float | None, error: str = "too late") -> dict:
    if reward is None:
        return {"kind": "error", "error_type": "TimeoutError", "error_message": error}
    return {"kind": "reward", "reward_name": "reward", "reward": reward}


def rollout(index: int, *rows: dict, step: int = 0, attempt: int = 0) -> list[Span]:
    group = f"train-{step:05d}-0000"
    place = {"rollout_id": f"{group}-{index:02d}", "group_id": group, "attempt": attempt}
    return [place | {"step": step} | row for row in rows]


def sealed(path: Path, *rollouts: list[Span]) -> Path:
    spans = [span for spans in rollouts for span in spans]
    footer = footer_of(count_tokens(spans))
    return write_parts([spans_table(spans)], SPAN_SCHEMA, path, lambda: footer)


def test_transcripts_show_the_best_the_middle_and_the_worst(tmp_path: Path) -> None:
    rewards = {0: 0.5, 1: None, 2: 1.0, 3: -1.0, 4: 0.0}
    spans = sealed(
        tmp_path / "spans.parquet",
        *(rollout(k, said("Who are you?", f"I am {k}"), ended(r)) for k, r in rewards.items()),
    )
    text = transcripts([spans])
    titles = re.findall(r"^## (.*)\n\n(.*)$", text, re.M)
    assert titles == [
        ("best: train-00000-0000-02", "reward 1"),
        ("middle: train-00000-0000-04", "reward 0"),
        ("worst: train-00000-0000-03", "reward -1"),
        ("failed: train-00000-0000-01", "TimeoutError: too late"),
    ]
    assert "**user**\n\n```text\nWho are you?\n```" in text
    assert "**assistant**\n\n```text\nI am 2\n```" in text


def test_a_transcript_names_the_tools_and_fields_that_were_left_out(tmp_path: Path) -> None:
    fields = {"left_out_fields": ["text.verbosity", "reasoning.effort"]}
    left = {"attributes": {"left_out_tools": ["web_search", "mcp"], **fields}}
    calls = said("?", "yes", **left), said("?", "no", call=1), said("?", "", call=2, **left)
    text = transcripts([sealed(tmp_path / "spans.parquet", rollout(0, *calls, ended(1.0)))])
    assert "*tools that the model was not shown: mcp, web_search*" in text
    assert "*fields that changed nothing: reasoning.effort, text.verbosity*" in text


def test_a_conversation_is_told_once_by_its_last_call(tmp_path: Path) -> None:
    history = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
    ]
    calls = [
        said("one?", "first"),
        said("", "second", call=1, messages=history, kept_call=0, kept_how="messages"),
        said("elsewhere?", "third", call=2),
    ]
    spans = sealed(tmp_path / "spans.parquet", rollout(0, *calls, ended(1.0)))
    text = transcripts([spans])
    assert [text.count(word) for word in ("first", "second", "third")] == [1, 1, 1]


def test_tool_calls_are_part_of_what_was_said_and_no_text_ends_its_block(tmp_path: Path) -> None:
    call = {"function": {"name": "search", "arguments": '{"q": "x"}'}}
    reply = {"role": "assistant", "content": "```\nlook", "tool_calls": [call]}
    spans = sealed(tmp_path / "s.parquet", rollout(0, said("?", "", reply=reply), ended(1.0)))
    assert '````text\n```\nlook\nsearch({"q": "x"})\n````' in transcripts([spans])


def test_failed_rollouts_are_shown_once_for_each_error_to_its_last_line(tmp_path: Path) -> None:
    errors = [LONG, LONG, *("abcd")]
    rollouts = [rollout(k, ended(None, error)) for k, error in enumerate(errors)]
    text = transcripts([sealed(tmp_path / "s.parquet", *rollouts)])
    assert re.findall(r"^## failed: train-00000-0000-(\d+)", text, re.M) == ["00", "02", "03"]
    assert f"## failed: train-00000-0000-00\n\nTimeoutError: {LONG}" in text


def test_errors_of_a_type_at_a_line_of_code_are_one_failure_by_its_commonest_message(
    tmp_path: Path,
) -> None:
    cities = ["Rome", "Paris", "Paris", "Oslo"]
    errors = [f"{city!r} is no number at agents/x.py:7" for city in cities]
    errors += ["'Paris' is no number at agents/x.py:9", "late", "later"]
    rollouts = [rollout(k, ended(None, error)) for k, error in enumerate(errors)]
    spans = [sealed(tmp_path / "s.parquet", *rollouts)]
    failures = {one.error: (one.times, one.messages) for one in read_failures(spans)}
    assert failures == {
        f"TimeoutError: {errors[1]}": (4, 3),
        f"TimeoutError: {errors[4]}": (1, 1),
        "TimeoutError: late": (1, 1),
        "TimeoutError: later": (1, 1),
    }
    said = [str(one) for one in read_failures(spans)]
    first = [f"train-00000-0000-0{k}" for k in range(3)]
    assert f"{', '.join(first)} and 1 more, the commonest of 3 messages:\n" in "".join(said)
    shown = re.findall(r"^## failed: train-00000-0000-(\d+)", transcripts(spans), re.M)
    assert shown == ["00", "04", "05"]


def test_a_step_that_is_stopped_counts_the_errors_at_a_line_together(tmp_path: Path) -> None:
    errors = ["slow", "slow", "'a' at x.py:7", "'b' at x.py:7", "'b' at x.py:7"]
    rollouts = [rollout(k, ended(None, error)) for k, error in enumerate(errors)]
    for row in [row for spans in rollouts for row in spans]:
        row["shard"] = "train-00000"
    spans = [sealed(tmp_path / "s.parquet", *rollouts)]
    told = r"The commonest error: TimeoutError: 'b' at x\.py:7 \(3 of them\)"
    with pytest.raises(StepStopped, match=told):
        check_rewards(spans, 0.5)


def test_a_transcript_says_which_calls_were_refused_and_why(tmp_path: Path) -> None:
    why = {"error_type": "context_length_exceeded", "error_message": LONG}
    refused = {"kind": "refused", "role": "policy", "call": 0, "status": "error", **why}
    spans = sealed(tmp_path / "s.parquet", rollout(0, refused, said("?", "!"), ended(1.0)))
    told = f"context_length_exceeded: {LONG}"
    assert f"*a call of the policy was refused*\n\n```text\n{told}\n```" in transcripts([spans])
    (failure,) = read_failures([spans])
    assert str(failure) == f"train-00000-0000-00, a call that was refused:\n{told}"


@pytest.mark.usefixtures("runs")
def test_the_query_after_a_failure_lists_the_failed_rollouts_with_their_errors() -> None:
    run = folder_of("broken")
    write_manifest(run, {"agent": "hello", "steps": 4, "dataset": {"path": __file__}}, "f00d")
    at = "'city' at agents/stock.py:27"
    again = [rollout(3, ended(None)), rollout(3, ended(1.0), attempt=1)]
    for step in (0, 1):
        failed = [rollout(k, ended(None, at), step=step) for k in (0, 1)]
        sealed(run.spans(f"train-{step:05d}.0"), *failed, rollout(2, ended(1.0), step=step))
    sealed(run.spans("train-00000.1"), *again)
    _, *command = shlex.split(ask_failures("broken"))
    asked = CliRunner().invoke(app, [*command, "--format", "json"])
    rollouts = [f"train-0000{step}-0000-0{k}" for step in (1, 0) for k in (0, 1)]
    assert json.loads(asked.stdout) == [
        {"run": "broken", "rollout_id": name, "error_type": "TimeoutError", "error_message": at}
        for name in rollouts
    ]
    table = CliRunner().invoke(app, command).stdout.splitlines()
    assert table[0].split() == ["run", "rollout_id", "error_type", "error_message"]
    assert sum(at in line for line in table) == 4


def test_scores_are_a_line_for_each_category_with_their_intervals() -> None:
    outcomes = [
        ScoredRollout("a", 1.0, "bird"),
        ScoredRollout("b", 0.0, "bird"),
        ScoredRollout("c", None, "fish"),
    ]
    assert scores_table({"greedy": score_outcomes(outcomes)}).splitlines() == [
        "played  category  examples  failed  reward  95 % interval",
        "greedy  all       2         1       0.5     0.0945 to 0.905",
        "greedy  bird      2         0       0.5     0.0945 to 0.905",
        "greedy  fish      0         1       -       -",
    ]


def test_scores_say_what_roles_spent_where_anybody_knows_it() -> None:
    judged = Spent(calls=3, priced=2, prompt_tokens=90, sampled_tokens=10, cost=0.25)
    free = Spent(calls=1, priced=0, prompt_tokens=0, sampled_tokens=0, cost=None)
    outcomes = [
        ScoredRollout("a", 1.0, "bird", {"judge": judged, "scripted": free}),
        ScoredRollout("b", 1.0, "fish"),
    ]
    assert scores_table({"greedy": score_outcomes(outcomes)}).splitlines() == [
        "played  category  examples  failed  reward  95 % interval  judge tokens  judge USD",
        "greedy  all       2         0       1       0.342 to 1     100           0.25",
        "greedy  bird      1         0       1       0.207 to 1     100           0.25",
        "greedy  fish      1         0       1       0.207 to 1     -             -",
    ]
