from dataclasses import replace
from typing import Any

from ratchet.adapters.dialects.openai_chat import read, to_chat_fields

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [HELLO], **fields}


def test_all_other_fields_are_recorded() -> None:
    request = read(body(temperature=0.3, seed=7, response_format={"type": "text"}, user="u"))
    assert request.messages == [HELLO]
    assert request.fields == {
        "temperature": 0.3,
        "seed": 7,
        "response_format": {"type": "text"},
        "user": "u",
    }


def test_content_parts_become_text_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "odd": 1},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]
    assert read(body(messages=messages)).messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]


NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def test_a_request_is_written_back_as_chat_fields() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"max_tokens": 5, "stop": ["x"], "parallel_tool_calls": False, "response_format": form}
    for chosen in ("none", "required", NAMED, ALLOWED):
        sent = body(tools=[TOOL], tool_choice=chosen, **asked)
        spelled = to_chat_fields(replace(read(sent), fields={}))
        assert spelled == {**asked, "tool_choice": chosen, "max_completion_tokens": None}
    assert set(to_chat_fields(read(body())).values()) == {None}


def test_max_completion_tokens_overrides_max_tokens() -> None:
    assert read(body(max_tokens=5)).max_tokens == 5
    assert read(body(max_tokens=5, max_completion_tokens=6)).max_tokens == 6
    assert read(body(max_tokens=None)).max_tokens is None


def test_a_single_stop_string_becomes_a_list() -> None:
    assert read(body(stop="x")).stop == ["x"]
    assert read(body(stop=["x", "y"])).stop == ["x", "y"]
    assert read(body(stop=None)).stop == []
