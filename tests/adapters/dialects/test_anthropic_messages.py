"""The door's messages endpoint, called by Anthropic's client."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import TextBlock

from ratchet.adapters.dialects.anthropic_messages import read
from tests.support.door.opened_door import ASK, CALL, CHAT, TOKENS, Opened

HELLO = {"role": "user", "content": "hello"}
USE = {"type": "tool_use", "id": "u", "name": "look", "input": {"at": "x"}}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}


@pytest.fixture
def client(opened: Opened) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=opened.url, api_key=opened.key, max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "m", "max_tokens": 100, "messages": ASK, **fields})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [HELLO], **fields}


def test_an_answer_has_usage_and_token_ids(opened: Opened, client: anthropic.Anthropic) -> None:
    opened.say("Hé!<|im_end|>")
    answer = ask(client, system="Be short.", extra_body=TOKENS)
    (span,) = opened.spans
    assert answer.content == [TextBlock(type="text", text="Hé!")]
    assert (answer.id, answer.model, answer.role) == (span.response_id, "m", "assistant")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len(span.prompt_token_ids) == len(answer.prompt_token_ids)
    assert answer.usage.output_tokens == len(span.response_token_ids)
    assert answer.token_ids == list(span.response_token_ids)
    messages = [{"role": "system", "content": "Be short."}, *ASK]
    assert list(span.prompt_token_ids) == CHAT.render(messages, [])


def test_stop_reasons(opened: Opened, client: anthropic.Anthropic) -> None:
    opened.say("one two three<|im_end|>")
    stopped = ask(client, stop_sequences=["three", "two"])
    assert stopped.content[0].text == "one "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    opened.say("one")
    assert ask(client, max_tokens=1).stop_reason == "max_tokens"
    assert opened.sampler.asked[-1].max_tokens == 1


def test_a_stream_holds_the_same_answer_token_by_token(
    opened: Opened, client: anthropic.Anthropic
) -> None:
    opened.say(f"<think>hm</think>Let me see.{CALL}")
    pieces = list(ask(client, tools=[TOOL], stream=True))
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"] * 3
    kinds = ["message_start", *blocks, "message_delta", "message_stop"]
    assert [kind for kind, _ in groupby(piece.type for piece in pieces)] == kinds
    deltas = [piece.delta for piece in pieces if piece.type == "content_block_delta"]
    shared = [("thinking", "hm"), ("text", "Let me see."), ("partial_json", '{"at": "x"}')]
    for field, whole in shared:
        said = [getattr(delta, field) for delta in deltas if hasattr(delta, field)]
        assert said == CHAT.pieces(whole)
    assert pieces[-2].delta.stop_reason == "tool_use"
    assert pieces[-2].usage.output_tokens == len(opened.spans[0].response_token_ids)


def test_both_key_headers_and_both_base_urls_work(opened: Opened) -> None:
    for url in (opened.url, opened.url.removesuffix("/v1")):
        with anthropic.Anthropic(base_url=url, auth_token=opened.key, max_retries=0) as client:
            assert ask(client).type == "message"
            assert [model.id for model in client.models.list()] == ["policy"]


def test_refusals_have_anthropic_s_format(opened: Opened) -> None:
    with anthropic.Anthropic(base_url=opened.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            ask(client)
        assert refused.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            client.models.list()
    with anthropic.Anthropic(base_url=opened.url, api_key=opened.key, max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as refused:
            ask(client, max_tokens=0)
        assert refused.value.type == "invalid_request_error"
    response = httpx.post(
        f"{opened.url}/messages", headers={"x-api-key": opened.key}, content=b"{", timeout=None
    )
    assert response.status_code == 400
    assert response.json()["type"] == "error"


def test_count_tokens_makes_no_call(opened: Opened, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="m", messages=ASK, tools=[TOOL])
    assert opened.spans == opened.sampler.asked == []
    ask(client, tools=[TOOL])
    assert counted.input_tokens == len(opened.spans[0].prompt_token_ids)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="m", messages=[])


def test_blocks_become_messages() -> None:
    said = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, USE]
    parts = [{"type": "text", "text": "r1"}, {"type": "text", "text": "r2"}]
    heard = [
        {"type": "tool_result", "tool_use_id": "u", "content": parts},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c"},
    ]
    messages = [HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": heard}]
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    request = read(body(messages=messages, system=[{"type": "text", "text": "s"}], speed="fast"))
    assert request.messages == [
        {"role": "system", "content": "s"},
        HELLO,
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "u", **call}],
        },
        {"role": "tool", "content": "r1r2", "tool_call_id": "u"},
        {"role": "user", "content": "bc"},
    ]
    assert request.fields == {"max_tokens": 9, "speed": "fast"}


def test_tools_become_functions() -> None:
    described = {**TOOL, "description": "d", "cache_control": {"type": "ephemeral"}}
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert read(body(tools=[described])).tools == [{"type": "function", "function": function}]


def test_tools_of_the_api_that_the_client_runs_become_functions_and_others_are_left_out() -> None:
    bash = {"type": "bash_20250124", "name": "bash"}
    editor = {"type": "text_editor_20250124", "name": "str_replace_editor"}
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = read(body(tools=[bash, search, editor]))
    assert [one["function"]["name"] for one in request.tools] == ["bash", "str_replace_editor"]
    parameters: Any = request.tools[0]["function"].get("parameters")
    assert "command" in parameters["properties"]
    assert request.left_out == ["web_search_20250305"]
