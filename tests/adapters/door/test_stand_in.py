"""A stand-in at the real door: what a file says reaches programs of every dialect as tokens."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ratchet.adapters.calls import Completion
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.roles import roles_of_policies
from ratchet.adapters.door.stand_in import THE_END, StandIn, StandInDoor, read_turns
from ratchet.adapters.errors import UserError
from tests.support.door.opened_door import ASK, CHAT, TOOLS, Opened, bearer, opened_batch

LOOK = {"name": "look", "arguments": {"at": "the box"}}
LOOKS = {"text": "I look.", "tools": [LOOK]}
DONE = {"text": "A cat."}
SEEN = "There is a cat in it."


@contextmanager
def told(
    folder: Path, *turns: dict[str, Any], max_calls: int = 9, **roles: str
) -> Iterator[tuple[Opened, StandIn]]:
    """Open a door at which a stand-in says these turns to one rollout."""
    file = folder / "turns.jsonl"
    file.write_text("".join(f"{json.dumps(turn)}\n" for turn in turns))
    stand_in = StandIn(read_turns(file, roles_of_policies(roles)))
    door: Door = StandInDoor(CHAT, roles, 7, max_calls, stand_in)
    with door, opened_batch(door) as opened:
        yield opened, stand_in


def chat(opened: Opened) -> str:
    """Look by chat completions, and return the last answer."""
    messages = [*ASK]
    while True:
        answer = opened.ask(messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return answer.content
        (call,) = answer.tool_calls
        assert json.loads(call.function.arguments) == LOOK["arguments"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": SEEN})


def responses(opened: Opened) -> str:
    """Look by responses, streamed."""
    items: Any = [*ASK]
    tools: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    while True:
        with opened.client.responses.stream(model="any", input=items, tools=tools) as stream:
            answer = stream.until_done().get_final_response()
        items += [item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in answer.output]
        called = [item for item in answer.output if item.type == "function_call"]
        if not called:
            return answer.output_text
        assert json.loads(called[0].arguments) == LOOK["arguments"]
        output = {"call_id": called[0].call_id, "output": SEEN}
        items.append({"type": "function_call_output", **output})


def messages(opened: Opened) -> str:
    """Look by messages."""
    said: list[dict[str, Any]] = [*ASK]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    while True:
        body = {"model": "any", "max_tokens": 100, "messages": said, "tools": tools}
        asked = httpx.post(f"{opened.url}/messages", json=body, headers=bearer(opened.key))
        content = asked.raise_for_status().json()["content"]
        said.append({"role": "assistant", "content": content})
        called = [part for part in content if part["type"] == "tool_use"]
        if not called:
            return content[0]["text"]
        assert called[0]["input"] == LOOK["arguments"]
        result = {"type": "tool_result", "tool_use_id": called[0]["id"], "content": SEEN}
        said.append({"role": "user", "content": [result]})


@pytest.mark.parametrize(
    ("look", "dialect"),
    [(chat, "chat completions"), (responses, "responses"), (messages, "messages")],
)
def test_a_file_plays_a_program_of_each_dialect_with_a_tool_call(
    tmp_path: Path, look: Callable[[Opened], str], dialect: str
) -> None:
    with told(tmp_path, LOOKS, DONE) as (opened, stand_in):
        assert look(opened) == DONE["text"]
    first, second = opened.spans
    assert [call.request.dialect for call in opened.spans] == [dialect, dialect]
    assert CHAT.has_ended(first.response_token_ids)
    assert not any(first.logprobs)
    assert len(first.logprobs) == len(first.response_token_ids)
    assert '"name": "look"' in CHAT.text(first.response_token_ids)
    assert (second.kept_how, second.kept_call) == ("messages", 0)
    kept = [*first.prompt_token_ids, *first.response_token_ids]
    assert second.prompt_token_ids[: len(kept)] == kept
    assert stand_in.report() == []


def answered(spans: Sequence[Completion]) -> list[str]:
    return [call.message["content"] for call in spans]


@pytest.mark.parametrize("stream", [False, True])
def test_white_space_that_a_file_says_reaches_a_program(tmp_path: Path, stream: bool) -> None:
    body = "    s = a + b\n    return s\n"
    with told(tmp_path, {"text": body}) as (opened, _):
        answer = opened.ask(stream=stream)
        pieces = [one.choices[0].delta.content or "" for one in answer] if stream else []
        assert "".join(pieces) or answer.choices[0].message.content == body
        assert not stream or "".join(pieces) == body


def test_a_program_that_asks_on_is_told_the_end_until_its_calls_are_used_up(tmp_path: Path) -> None:
    with told(tmp_path, DONE, max_calls=3) as (opened, stand_in):
        for _ in range(3):
            opened.ask()
        with pytest.raises(openai.BadRequestError, match="has made 3 calls, which is all"):
            opened.ask()
    assert answered(opened.spans) == [DONE["text"], THE_END, THE_END]
    assert stand_in.report() == [
        "2 calls of the role policy, for which no line was left, were answered 'That is all.'"
    ]


def test_a_turn_that_calls_tools_waits_for_a_call_that_offers_some(tmp_path: Path) -> None:
    with told(tmp_path, LOOKS, DONE, DONE | {"role": "titles"}, titles="policy") as (opened, _):
        opened.ask()  # which asks for a title, say
        opened.at(opened.url.replace("/role/policy", "/role/titles")).chat.completions.create(
            model="any", messages=ASK
        )
        opened.ask(tools=TOOLS)
    assert answered(opened.spans) == [THE_END, DONE["text"], LOOKS["text"]]


def test_a_tool_that_the_program_does_not_have_is_called_and_said(tmp_path: Path) -> None:
    wrong = {"tools": [{"name": "bash", "arguments": {}}]}
    with told(tmp_path, wrong, LOOKS, DONE) as (opened, stand_in):
        called = opened.ask(tools=TOOLS).choices[0].message.tool_calls
    assert called[0].function.name == "bash"
    assert stand_in.report() == [
        "line 1 calls bash, and the program offers look",
        "line 2 was said to nobody: the role policy made no further call that offers tools",
        "line 3 was said to nobody: the role policy made no further call",
    ]


def test_a_turn_that_is_cut_is_said_to_be(tmp_path: Path) -> None:
    with told(tmp_path, LOOKS) as (opened, stand_in):
        message = opened.ask(tools=TOOLS, max_tokens=5).choices[0].message
    assert message.tool_calls is None
    assert len(opened.spans[0].response_token_ids) == 5
    (said,) = stand_in.report()
    assert said.startswith("line 1 was cut after 5 tokens, by rollouts.max_tokens")


def test_a_stand_in_takes_no_field_that_a_policy_refuses(tmp_path: Path) -> None:
    with told(tmp_path, DONE) as (opened, _), pytest.raises(openai.BadRequestError, match="bias"):
        opened.ask(logit_bias={"5": 1})


WRONG = {
    "": "has no turn; write a line each",
    "hello": "line 1: it: Invalid JSON",
    '\n\n["a"]': "line 3: it: Input should be an object",
    '{"txt": "a"}': "line 1: txt: Extra inputs are not permitted; write {",
    '{"text": 3}': "line 1: text: Input should be a valid string",
    '{"tools": [{"name": 3}]}': "line 1: tools[0] has no function with a name",
    '{"text": "a", "role": "judge"}': "no policy answers the role 'judge'; give one of policy",
}


def test_a_file_of_no_turns_is_refused_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    for text, why in WRONG.items():
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(why)):
            read_turns(file, ["policy"])
