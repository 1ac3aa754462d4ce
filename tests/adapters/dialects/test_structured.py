"""Requested formats of answers: the model's instructions, the check and the record."""

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import anthropic
import psutil
import pytest
from pydantic import BaseModel, ValidationError

from ratchet.adapters.calls import Choice, Format, Message, Refused, Request, Sampling
from ratchet.adapters.dialects.instructions import instruction_of
from ratchet.adapters.door.format_checks import FormatChecks
from ratchet.adapters.door.role_calls import request_sha
from ratchet.tasks.recording.spans import call_span
from tests.support.door.opened_door import ASK, CALL, CHAT, TOOLS, Opened

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SAMPLING = Sampling(9, 1.0, 1.0, -1)


class Verdict(BaseModel):
    yes: bool


def request(**fields: Any) -> Request:
    return Request("m", ASK, fields.pop("tools", []), None, [], {}, **fields)


def said(content: str = "", *calls: str) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": "{}"}} for name in calls
        ]
    return message


@pytest.fixture(scope="module")
def formats() -> Iterator[FormatChecks]:
    checks = FormatChecks()
    yield checks
    checks.close()


def check(formats: FormatChecks, form: Format, message: Message) -> tuple[bool | None, str | None]:
    found: Any = asyncio.run(formats.outcomes(request(format=form), message))["format"]
    return found["valid"], found["error"]


def test_a_check_whose_process_is_stopped_does_not_keep_the_door_from_closing() -> None:
    before = {*psutil.Process().children()}
    checks = FormatChecks()
    assert check(checks, Format(SCHEMA), said('{"a": 1}')) == (True, None)
    [process] = {*psutil.Process().children()} - before
    process.suspend()
    checks.close()
    assert not process.is_running()


def test_a_request_without_a_format_has_no_instruction_and_no_outcome(
    formats: FormatChecks,
) -> None:
    assert instruction_of(request()) == instruction_of(request(tools=TOOLS)) == ""
    assert asyncio.run(formats.outcomes(request(tools=TOOLS), said("hello", "look"))) == {}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": Format()}, "Answer with nothing but a JSON object."),
        (
            {"format": Format({"type": "null"})},
            'Answer with nothing but JSON that fits this schema: {"type": "null"}',
        ),
        (
            {"format": Format(), "tools": TOOLS},
            "Unless you call a function, answer with nothing but a JSON object.",
        ),
        ({"choice": Choice("none"), "tools": TOOLS}, "Call no function; answer in words."),
        ({"choice": Choice("required"), "tools": TOOLS}, "Call a function."),
        (
            {"choice": Choice("required", ("look",), parallel=False), "tools": TOOLS},
            "Call a function. Call no other function than look. Call at most one function.",
        ),
    ],
)
def test_format_and_tool_choice_become_one_instruction(fields: dict[str, Any], text: str) -> None:
    assert instruction_of(request(**fields)) == text


def test_only_a_set_format_changes_the_request_s_digest() -> None:
    plain, formed = (request_sha(request(format=form), SAMPLING) for form in (None, Format()))
    assert plain != formed
    assert plain == request_sha(Request("other", ASK, [], None, [], {"odd": 1}), SAMPLING)


def test_an_answer_is_checked_against_its_schema(formats: FormatChecks) -> None:
    assert check(formats, Format(SCHEMA), said(' {"a": 1} ')) == (True, None)
    assert check(formats, Format(SCHEMA), said('{"a": "x"}')) == (
        False,
        '$.a: "x" is not of type "integer"',
    )
    assert check(formats, Format(SCHEMA), said("Sure!"))[1] == (
        "not JSON: Expecting value: line 1 column 1 (char 0)"
    )
    assert check(formats, Format(SCHEMA), said('{"a": NaN}'))[0] is False
    assert check(formats, Format(), said("{}")) == (True, None)
    assert check(formats, Format(), said("[]")) == (False, "not an object: []")
    assert check(formats, Format(), said("[" * 10_000))[0] is False
    assert check(formats, Format(SCHEMA), said("", "look")) == (None, None)


def test_a_circular_reference_asks_for_nothing(formats: FormatChecks) -> None:
    assert check(formats, Format({"$ref": "#"}), said("{}")) == (True, None)


@pytest.mark.parametrize("content", ["[" * 300 + "]" * 300, "1" + "0" * 400, "-1e400"])
def test_an_answer_of_any_depth_or_size_is_checked_or_said_to_be_unchecked(
    formats: FormatChecks, content: str
) -> None:
    ok, error = check(formats, Format({"items": {"type": "array"}}), said(content))
    assert (ok, error) == (True, None) or (not ok and error is not None)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(?=(a+)+$)(a|aa)+\\1$", "(x+x+)+y"])
def test_a_regular_expression_that_backtracks_is_bounded(
    formats: FormatChecks, pattern: str
) -> None:
    form = Format({"pattern": pattern})
    assert check(formats, form, said(json.dumps("a" * 40 + "!")))[0] is False
    assert check(formats, form, said(json.dumps("x" * 5_000)))[0] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "x"},
        {"pattern": "("},
        {"$ref": 3},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/$defs/none"},
    ],
)
def test_an_invalid_schema_is_refused(formats: FormatChecks, schema: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="is not a JSON Schema") as refused:
        asyncio.run(formats.check_schema(Format(schema, "here")))
    assert (refused.value.status, refused.value.param) == (400, "here")


@pytest.mark.parametrize(
    ("choice", "called", "kept"),
    [
        (Choice("required"), ["look"], True),
        (Choice("required"), [], False),
        (Choice("none"), [], True),
        (Choice("auto", ("look",)), [], True),
        (Choice("auto", ("look",)), ["look", "leap"], False),
        (Choice(parallel=False), ["look"], True),
        (Choice(parallel=False), ["look", "look"], False),
    ],
)
def test_the_outcome_says_whether_the_tool_choice_was_followed(
    formats: FormatChecks, choice: Choice, called: list[str], kept: bool
) -> None:
    asked = request(choice=choice, tools=TOOLS)
    found = asyncio.run(formats.outcomes(asked, said("", *called)))
    assert found["tool_choice"]["kept"] is kept


def by_chat(opened: Opened) -> object:
    asked = opened.client.chat.completions.parse(model="m", messages=ASK, response_format=Verdict)
    return asked.choices[0].message.parsed


def by_responses(opened: Opened) -> object:
    return opened.client.responses.parse(model="m", input=ASK, text_format=Verdict).output_parsed


def by_messages(opened: Opened) -> object:
    asked: Any = {"model": "m", "max_tokens": 100, "messages": ASK, "output_format": Verdict}
    with anthropic.Anthropic(base_url=opened.url, api_key=opened.key) as client:
        return client.messages.parse(**asked).parsed_output


@pytest.mark.parametrize("parse", [by_chat, by_responses, by_messages])
def test_parse_returns_the_client_s_type_and_the_span_records_a_valid_format(
    opened: Opened, parse: Callable[[Opened], object]
) -> None:
    opened.say('{"yes": true}<|im_end|>')
    assert parse(opened) == Verdict(yes=True)
    (span,) = opened.spans
    assert span.request.messages == ASK, "the instruction is not the client's"
    assert '"yes"' in CHAT.text(span.prompt_token_ids)
    recorded = call_span(span)["attributes"]
    assert recorded["format"] == {"kind": "json_schema", "valid": True, "error": None}


def test_an_answer_in_another_format_is_returned_unchanged(opened: Opened) -> None:
    opened.say("Yes.<|im_end|>")
    with pytest.raises(ValidationError):
        opened.client.chat.completions.parse(model="m", messages=ASK, response_format=Verdict)
    assert opened.spans[0].message["content"] == "Yes."
    assert call_span(opened.spans[0])["attributes"]["format"]["valid"] is False


def test_tokens_are_kept_when_the_format_changes(opened: Opened) -> None:
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
    ]
    messages = [*ASK]
    for form in forms:
        answer = opened.ask(messages=messages, tools=TOOLS, **form).choices[0].message
        messages += [{"role": "assistant", "content": answer.content.strip()}, *ASK]
    assert [span.kept_how for span in opened.spans] == ["new", *["messages"] * 5]
    for earlier, later in pairwise(opened.spans):
        whole = [*earlier.prompt_token_ids, *earlier.response_token_ids]
        assert later.prompt_token_ids[: len(whole)] == whole
    instruction = CHAT.encode("Unless you call a function, answer with nothing but a JSON object.")
    text = CHAT.text(opened.spans[-1].prompt_token_ids)
    assert text.count(CHAT.text(instruction)) == 1, "it stays where it was told"


def test_a_react_client_can_continue_an_answer_that_had_a_format(opened: Opened) -> None:
    opened.say("Look: x")
    opened.ask(response_format={"type": "json_object"})
    going_on = [*ASK, {"role": "assistant", "content": "Look: x\nObservation: a cat"}, *ASK]
    opened.ask(messages=going_on)
    first, second = opened.spans
    assert (second.kept_how, second.kept_call) == ("text", 0)
    whole = [*first.prompt_token_ids, *first.response_token_ids]
    assert second.prompt_token_ids[: len(whole)] == whole


def test_a_tool_call_is_text_if_tool_choice_is_none(opened: Opened) -> None:
    opened.say(CALL)
    message = opened.ask(tools=TOOLS, tool_choice="none").choices[0].message
    assert message.tool_calls is None
    assert message.content == CALL.removesuffix("<|im_end|>")
    assert '"name": "look"' in CHAT.text(opened.spans[0].prompt_token_ids)


def test_a_named_tool_that_is_not_called_is_recorded(opened: Opened) -> None:
    opened.say("No.<|im_end|>")
    chosen: Any = {"type": "function", "function": {"name": "look"}}
    opened.ask(tools=TOOLS, tool_choice=chosen)
    recorded = json.loads(json.dumps(call_span(opened.spans[0])["attributes"]["tool_choice"]))
    assert recorded == {"mode": "required", "names": ["look"], "parallel": True, "kept": False}
