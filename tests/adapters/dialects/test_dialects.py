"""Bodies in every dialect: any is read or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from yaml import safe_load

from ratchet.adapters.calls import Choice, Completion, Format, Message, Refused, Request, Sampling
from ratchet.adapters.dialects import anthropic_messages, openai_chat, openai_responses
from ratchet.adapters.dialects.fields import Api, rules_of
from ratchet.adapters.dialects.google_generate import GenerateContent
from ratchet.adapters.dialects.instructions import choice_outcome, instruction_of
from ratchet.adapters.door.chat_api import DIALECTS, Dialect
from ratchet.adapters.door.door import choose_sampling
from ratchet.adapters.door.format_checks import find_error
from ratchet.adapters.door.role_calls import KeptCalls, request_sha
from tests.support.door.answered_call import answered_call
from tests.support.door.opened_door import CHAT, TOOLS

WORDS = [
    *("user", "assistant", "system", "tool", "message", "reasoning", "function", "custom", "look"),
    *("text", "input_text", "tool_use", "tool_result", "function_call", "function_call_output"),
    *("auto", "any", "none", "required", "allowed_tools", "json_object", "json_schema", "{}", "["),
]
NAMES = [
    *("type", "role", "content", "text", "name", "id", "call_id", "tool_use_id", "tool_calls"),
    *("function", "arguments", "input", "output", "format", "schema", "json_schema", "mode"),
    *("tools", "parameters", "input_schema", "properties", "$ref", "pattern"),
]
FIELDS = [
    *("messages", "input", "system", "instructions", "tools", "tool_choice", "response_format"),
    *("text", "output_config", "stop", "stop_sequences", "n", "seed", "stream", "max_tokens"),
    *("include", "temperature", "parallel_tool_calls", "stream_options"),
]
SCALARS: st.SearchStrategy[Any] = st.sampled_from(
    [*WORDS, None, True, False, 0, 1, -1, 0.5, 10**30]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
APIS: dict[str, Api] = dict(zip(DIALECTS, Api, strict=False))
SAID: Any = [{"role": "user", "content": "hello"}]
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4).map(
    lambda fields: {"model": "m", **fields}
)


def understood(dialect: Dialect, body: Any) -> Request | Refused:
    try:
        return dialect.read(body)
    except Refused as refused:
        return refused


@pytest.mark.parametrize("path", DIALECTS)
@given(body=BODIES, said=st.sampled_from(WORDS))
def test_any_body_becomes_a_prompt_or_is_refused(path: str, body: Any, said: str) -> None:
    dialect, known = DIALECTS[path], rules_of(APIS[path])
    asked = {"messages": SAID, "input": SAID} | body
    request = understood(dialect, {name: asked[name] for name in asked if name in known})
    if isinstance(request, Refused):
        assert request.status == 400
        assert "message" in json.dumps(dialect.write_error(request))
        return
    prompt = KeptCalls(CHAT).prompt(request.messages, request.tools, instruction_of(request))
    assert prompt.token_ids
    assert request_sha(request, Sampling(9, 1.0, 1.0, -1))
    answered: Message = {"role": "assistant", "content": said}
    assert set(choice_outcome(request.choice, answered)) == {"mode", "names", "parallel", "kept"}
    if request.format is not None:
        schema = json.dumps(request.format.schema or True)
        if find_error(schema, None) == (True, None):
            valid, error = find_error(schema, said)
            assert valid == (error is None)


WHOLE: dict[str, Any] = {
    "/chat/completions": {"model": "m", "messages": SAID},
    "/responses": {"model": "m", "input": "hello"},
    "/messages": {"model": "m", "max_tokens": 9, "messages": SAID},
    "google": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
}


BAD = safe_load(Path(__file__).with_name("bad_requests.yaml").read_text())


@pytest.mark.parametrize(
    ("api", "field", "bad"),
    [
        *(
            (api, field, WHOLE[api] | fields)
            for api in WHOLE
            for field in BAD[api]
            for fields in BAD[api][field]
        ),
        *((api, None, bad) for api in DIALECTS for bad in ([], "text")),
        ("/chat/completions", "model", {"messages": SAID}),
    ],
)
def test_a_bad_request_names_its_wrong_field(api: str, field: str | None, bad: Any) -> None:
    dialect = DIALECTS[api] if api in DIALECTS else GenerateContent("m")
    with pytest.raises(Refused) as refused:
        dialect.read(bad)
    assert (refused.value.status, refused.value.param) == (400, field)
    shown: Any = dialect.write_error(refused.value)["error"]
    assert shown["message"].endswith(".")
    if api == "/chat/completions":
        assert (shown["param"], shown["type"]) == (field, "invalid_request_error")


RAW = [
    *("29", "null", "true", "[]", '["look"]', '""', '" "', '"look "', '"lo ok"', '"look"', "{}"),
    *('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', f'{{"a": {"9" * 5000}}}', '"{\\"a\\": 1}"'),
    *(f'{{"a": {"[" * depth}{"]" * depth}}}' for depth in (90, 300, 2_000)),
    *('"\\ud800"', f'"{"x" * 200}"', '{"a": {"b": [null, 1.5]}}', '{"": "", "a": "\\u0000"}'),
]
"""Values as a policy may write them in the place of a call's name, arguments and id."""
CLIENTS = {
    "/chat/completions": (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    "/responses": (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
    "/messages": (
        TypeAdapter(anthropic.types.Message),
        TypeAdapter(anthropic.types.RawMessageStreamEvent),
    ),
}
"""What an API's client reads: a whole answer, and a piece of a stream."""


def sent(dialect: Dialect, completion: Completion) -> tuple[Any, list[Any]]:
    """Return an answer as it is sent, whole and streamed, both in JSON without extensions."""
    whole = json.dumps(dialect.answer(completion, CHAT), allow_nan=False, ensure_ascii=False)
    lines = "".join(dialect.stream(completion, CHAT)).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return json.loads(whole.encode()), [*map(json.loads, data)]


def calls_in(value: Any) -> list[tuple[Any, Any, Any]]:
    """List the ids, names and arguments of the whole calls in what is sent, in any dialect."""
    if isinstance(value, list):
        return [call for one in value for call in calls_in(one)]
    match value:
        case {"function": {"name": name, "arguments": arguments}, "id": call_id}:
            return [(call_id, name, arguments and json.loads(arguments))]
        case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
            return [(call_id, name, arguments and json.loads(arguments))]
        case {"type": "tool_use", "id": call_id, "name": name, "input": arguments}:
            return [(call_id, name, arguments)]
        case {"functionCall": {"id": call_id, "name": name, "args": arguments}}:
            return [(call_id, name, arguments)]
    return calls_in([*value.values()]) if isinstance(value, dict) else []


@given(
    name=st.sampled_from(RAW) | JSON.map(json.dumps),
    arguments=st.sampled_from(RAW) | JSON.map(json.dumps),
    call_id=st.sampled_from(RAW),
    broken=st.sampled_from(["", "}", ",", "<"]),
)
def test_a_call_of_any_shape_reaches_clients_as_their_api_has_it_or_as_text(
    name: str, arguments: str, call_id: str, broken: str
) -> None:
    call = f'{{"name": {name}, "arguments": {arguments}, "id": {call_id}{broken}}}'
    text = f"I look.\n<tool_call>\n{call}\n</tool_call>"
    tokens = [*CHAT.encode(text), CHAT.stop_tokens[0]]
    message = CHAT.parse(tokens, with_tools=True, tools=TOOLS)
    completion = answered_call(SAID, TOOLS, message, [1], tokens)
    named = completion.id.name_tool_calls(message)
    if not named.get("tool_calls"):
        assert message == {"role": "assistant", "content": text}
    for path in WHOLE:
        dialect = DIALECTS.get(path) or GenerateContent("m")
        whole, pieces = sent(dialect, replace(completion, message=named))
        for client, values in zip(CLIENTS.get(path, ()), ([whole], pieces), strict=False):
            for value in values:
                client.validate_json(json.dumps(value), strict=True)
        for own_id, called, said in [*calls_in(whole), *calls_in(pieces)]:
            assert isinstance(own_id, str)
            assert called == json.loads(name)
            assert said in ("", {}, json.loads(arguments))
            assert isinstance(json.loads(arguments), dict)


def test_a_client_outside_a_run_may_choose_its_sampling_by_numbers_alone() -> None:
    defaults = Sampling(9, 1.0, 0.5, -1)
    for field, value in (("temperature", True), ("top_p", "1"), ("top_k", True), ("top_k", 2.5)):
        with pytest.raises(Refused, match=f"{field} is .*; it must be"):
            choose_sampling(None, {field: value}, defaults)


def test_a_conversation_has_the_same_prompt_in_every_dialect() -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    system, use = "Be short.", {"name": "look", "arguments": '{"at": "x"}'}
    call = {"id": "c", "type": "function", "function": use}
    chat = openai_chat.read(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": system},
                *SAID,
                {"role": "assistant", "content": "a", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "tools": [{"type": "function", "function": function}],
        }
    )
    responses = openai_responses.read(
        {
            "model": "m",
            "instructions": system,
            "input": [
                *SAID,
                {"role": "assistant", "content": "a"},
                {"type": "function_call", "call_id": "c", **use},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "tools": [{"type": "function", **function}],
        }
    )
    made = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    messages = anthropic_messages.read(
        {
            "model": "m",
            "system": system,
            "messages": [
                *SAID,
                {"role": "assistant", "content": [{"type": "text", "text": "a"}, made]},
                {"role": "user", "content": [result]},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        }
    )
    contents = [{"role": "user", "parts": [{"text": one["content"]}]} for one in SAID]
    called = {"functionCall": {"id": "c", "name": "look", "args": {"at": "x"}}}
    declared = {"name": "look", "parameters": {"type": "OBJECT"}}
    response = {"functionResponse": {"id": "c", "response": {"output": "r"}}}
    google = GenerateContent("m").read(
        {
            "systemInstruction": {"parts": [{"text": system}]},
            "contents": [
                *contents,
                {"role": "model", "parts": [{"text": "a"}, called]},
                {"role": "user", "parts": [response]},
            ],
            "tools": [{"functionDeclarations": [declared]}],
        }
    )
    read = (chat, responses, messages, google)
    prompts = {tuple(CHAT.render(one.messages, one.tools)) for one in read}
    assert len(prompts) == 1


PADDED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "default": None, "enum": None},
        "default": {"type": "integer", "enum": [1, None], "items": None},
        "gone": None,
    },
    "required": None,
}
PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "default": None},
        "default": {"type": "integer", "enum": [1, None]},
    },
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_tool_s_schema_has_no_nulls_but_those_that_are_values(path: str) -> None:
    function = {"name": "look", "parameters": PADDED}
    tool: Any = {
        "/chat/completions": {"type": "function", "function": function},
        "/responses": {"type": "function", **function},
        "/messages": {"name": "look", "input_schema": PADDED},
    }[path]
    said = "input" if path == "/responses" else "messages"
    [read] = DIALECTS[path].read({"model": "m", said: SAID, "tools": [tool]}).tools
    assert read == {"type": "function", "function": {"name": "look", "parameters": PLAIN}}


NAMED = {"type": "function", "function": {"name": "look"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
EYES = {"type": "function", "name": "look", "namespace": "eyes"}
LOOKS = Choice("required", ("look",))
CHOICES: dict[str, list[tuple[Any, Choice]]] = {
    "/chat/completions": [
        ("auto", Choice()),
        ("none", Choice("none")),
        ("required", Choice("required")),
        (NAMED, LOOKS),
        (ALLOWED, Choice("auto", ("look",))),
    ],
    "/responses": [
        ("required", Choice("required")),
        ({"type": "function", "name": "look"}, LOOKS),
        ({"type": "custom", "name": "edit"}, Choice("required", ("edit",))),
        ({"type": "shell"}, Choice("required", ("shell",))),
        (EYES, Choice("required", ("eyes__look",))),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "look"}]}, LOOKS),
    ],
    "/messages": [
        ({"type": "auto"}, Choice()),
        ({"type": "none"}, Choice("none")),
        ({"type": "any", "disable_parallel_tool_use": True}, Choice("required", parallel=False)),
        ({"type": "tool", "name": "look"}, LOOKS),
    ],
}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
OFFERED: dict[str, list[Any]] = {
    "/chat/completions": [{"type": "function", "function": LOOK}],
    "/responses": [
        LOOK,
        {"type": "custom", "name": "edit"},
        {"type": "namespace", "name": "eyes", "tools": [LOOK]},
        {"type": "shell"},
    ],
    "/messages": [{"name": "look", "input_schema": {"type": "object"}}],
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_tool_choice_is_read_and_the_model_is_shown_all_tools(path: str) -> None:
    for sent, choice in CHOICES[path]:
        body = {**WHOLE[path], "tools": OFFERED[path], "tool_choice": sent}
        request = DIALECTS[path].read(body)
        assert request.choice == choice, sent
        assert len(request.tools) == len(OFFERED[path])
        assert request.may_call_tools is (choice.mode != "none")


def test_parallel_calls_are_turned_off_without_a_choice() -> None:
    body = {**WHOLE["/chat/completions"], "parallel_tool_calls": False}
    assert openai_chat.read(body).choice == Choice(parallel=False)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FITS = {"type": "json_schema", "schema": SCHEMA}
ANY = {"type": "json_object"}
FORMATS: list[tuple[str, dict[str, Any], Format | None]] = [
    (
        "/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        Format(SCHEMA),
    ),
    ("/chat/completions", {"response_format": ANY}, Format()),
    ("/chat/completions", {"response_format": {"type": "text"}}, None),
    ("/responses", {"text": {"format": FITS}}, Format(SCHEMA)),
    ("/responses", {"text": {"format": ANY}}, Format()),
    ("/responses", {"text": {"verbosity": "low"}}, None),
    ("/messages", {"output_format": FITS}, Format(SCHEMA)),
    ("/messages", {"output_config": {"format": FITS}}, Format(SCHEMA)),
]


def test_the_format_of_an_answer_is_read_from_every_field() -> None:
    for path, fields, form in FORMATS:
        assert DIALECTS[path].read({**WHOLE[path], **fields}).format == form, fields
