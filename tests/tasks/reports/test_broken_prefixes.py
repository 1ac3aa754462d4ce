"""Why a prompt keeps no tokens of an earlier answer: the first message that differs is named."""

from pathlib import Path
from typing import Any

import pytest

from tasks.reports.broken_prefixes import explain_breaks
from tests.tasks.test_reports import rollout, said, sealed

ASKED = {"role": "user", "content": "What is in the box?"}
LOOKS = {"role": "assistant", "content": "I look into the box, as I was told to do, and see."}
SEEN = {"role": "user", "content": "a cat"}
LOOK = {"type": "function", "function": {"name": "look"}}
FEEL = {"type": "function", "function": {"name": "feel"}}


def explain(folder: Path, messages: list[Any], how: str = "unknown", **columns: object) -> str:
    first = said("", "", messages=[ASKED], reply=LOOKS, tools=[LOOK])
    second = said("", "a cat", call=1, messages=messages, kept_how=how, tools=[LOOK]) | columns
    (why,) = explain_breaks([sealed(folder / "spans.parquet", rollout(0, first, second))])
    return why


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [
                ASKED,
                LOOKS | {"content": "I look into the box, as I was told to do, and saw."},
                SEEN,
            ],
            "told to do, and see.', and is assistant '…",
        ),
        (
            [ASKED, SEEN, LOOKS, SEEN],
            "message 2 was in call 0 assistant 'I look into the box, as I was told to do, and see.'"
            ", and is user 'a cat'",
        ),
        ([SEEN, LOOKS, SEEN], "message 1 was in call 0 user 'What is in the box?', and is user"),
    ],
)
def test_the_first_message_that_differs_is_named(
    tmp_path: Path, messages: list[Any], why: str
) -> None:
    assert why in explain(tmp_path, messages)


def test_other_tools_are_named(tmp_path: Path) -> None:
    why = explain(tmp_path, [ASKED, LOOKS, SEEN], "tools", tools=[FEEL])
    assert why == "policy call 1, tools: other tools are offered (new: feel; gone: look)"


def test_what_the_renderer_cannot_continue_is_shown(tmp_path: Path) -> None:
    why = explain(tmp_path, [ASKED, LOOKS, SEEN], "unbridged")
    assert why.endswith("the renderer cannot go on behind the answer of call 0 with 'a cat'")


def test_the_same_break_of_several_rollouts_is_told_once(tmp_path: Path) -> None:
    calls = [
        said("", "", messages=[ASKED], reply=LOOKS),
        said("", "", call=1, messages=[ASKED, SEEN, LOOKS], kept_how="unknown"),
    ]
    spans = sealed(tmp_path / "spans.parquet", *(rollout(k, *calls) for k in range(3)))
    (why,) = explain_breaks([spans])
    assert why.endswith("(3 rollouts)")
