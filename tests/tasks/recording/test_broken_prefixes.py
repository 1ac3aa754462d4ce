"""Why the prompt of a call has not kept the tokens of an earlier answer."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.tasks.recording.broken_prefixes import find_broken_prefixes
from tests.tasks.test_reports import rollout, said, sealed

ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Look."}]
ANSWER = {"role": "assistant", "content": "I look."}
SEEN = {"role": "user", "content": "A cat."}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at":  "x"}'}}


def asked(call: int, *messages: dict[str, Any], how: str = "unknown", **columns: Any) -> dict:
    more = {"call": call, "messages": [*messages], "kept_how": how, **columns}
    return said("", "I look.", **more)


def why(folder: Path, *calls: dict) -> list[str]:
    return [one.why for one in find_broken_prefixes([sealed(folder / "s", rollout(0, *calls))])]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([*ASKED, SEEN], "the answer of call 0 is not in it"),
        ([*ASKED, SEEN, ANSWER], "a message of the user stands before the answer of call 0"),
        (
            [*ASKED, ANSWER | {"content": "I listen."}, SEEN],
            "the answer of call 0 was 'I look.' and is 'I listen.'",
        ),
        (ASKED[:1], "it ends before message 2, the user's, of call 0"),
        (
            [ASKED[0] | {"content": "Be long."}, *ASKED[1:], ANSWER, SEEN],
            "message 1, the system's, of call 0 was 'Be short.' and is 'Be long.'",
        ),
        (
            [ASKED[0], SEEN, ASKED[1], ANSWER, SEEN],
            "a message of the user stands before message 2, the user's, of call 0",
        ),
        ([*ASKED, ANSWER, SEEN], "the format writes call 0 in another way"),
    ],
)
def test_a_changed_history_is_told_by_its_first_difference(
    tmp_path: Path, messages: list[dict[str, Any]], reason: str
) -> None:
    assert why(tmp_path, asked(0, *ASKED, how="new"), asked(1, *messages)) == [reason]


def test_a_call_is_compared_with_the_earlier_call_that_is_most_like_it(tmp_path: Path) -> None:
    title = asked(1, {"role": "user", "content": "A title?"}, how="new")
    calls = (asked(0, *ASKED, how="new"), title, asked(2, *ASKED, SEEN))
    assert why(tmp_path, *calls) == ["the answer of call 0 is not in it"]


def test_arguments_that_are_written_anew_are_no_difference(tmp_path: Path) -> None:
    reply = {**ANSWER, "tool_calls": [CALL]}
    spaced = {**CALL, "function": {"name": "look", "arguments": '{"at": "x"}'}}
    first = asked(0, *ASKED, how="new", reply=reply)
    later = asked(1, *ASKED, {**ANSWER, "tool_calls": [spaced]}, how="ended")
    assert why(tmp_path, first, later) == [
        "the client has added to an answer that the model had ended"
    ]
    later = asked(1, *ASKED, {**ANSWER, "tool_calls": [spaced]}, {**SEEN, "role": "tool"})
    assert why(tmp_path, first, later) == ["the format writes call 0 in another way"]


def test_answers_of_others_are_told_and_kept_prefixes_are_not(tmp_path: Path) -> None:
    assert why(tmp_path, asked(0, *ASKED, ANSWER, SEEN)) == [
        "it begins with answers that were not given here"
    ]
    kept = asked(1, *ASKED, ANSWER, SEEN, how="messages", kept_call=0)
    assert why(tmp_path, asked(0, *ASKED, how="new"), kept) == []
    judged = said("?", "", role="judge", kept_how="", prompt_token_ids=[], call=0)
    assert why(tmp_path, judged) == []
