"""The door's responses endpoint, called by OpenAI's client."""

import json
from itertools import chain, groupby
from typing import Any

import pytest

from ratchet.adapters.dialects.openai_responses import Offered, read, write_call
from ratchet.adapters.rendering.messages import create_tool_call
from ratchet.tasks.recording.spans import call_span
from tests.support.door.opened_door import ASK, CALL, CHAT, TOKENS, Opened

HELLO = {"role": "user", "content": "hello"}
CALLED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
GROUP: Any = {"type": "namespace", "name": "eyes", "description": "Eyes.", "tools": [TOOL]}
EDIT: Any = {
    "type": "custom",
    "name": "edit",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: patch"},
}
NAMES = ("reasoning_text", "output_text")


def ask(opened: Opened, **fields: Any) -> Any:
    return opened.client.responses.create(**{"model": "m", "input": ASK, **fields})


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hello", **fields}


def test_an_answer_has_usage_logprobs_and_token_ids(opened: Opened) -> None:
    opened.say("Hé!<|im_end|>")
    include: Any = ["message.output_text.logprobs"]
    answer = ask(
        opened, input="hello", instructions="Be short.", include=include, extra_body=TOKENS
    )
    (span,) = opened.spans
    assert (answer.output_text, answer.status, answer.id) == ("Hé!", "completed", span.response_id)
    assert answer.usage.input_tokens == len(span.prompt_token_ids) == len(answer.prompt_token_ids)
    assert answer.usage.output_tokens == len(span.response_token_ids)
    assert answer.token_ids == list(span.response_token_ids)
    logprobs = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in logprobs] == list(span.logprobs)
    messages = [{"role": "system", "content": "Be short."}, *ASK]
    assert list(span.prompt_token_ids) == CHAT.render(messages, [])
    assert answer.instructions == "Be short."


def test_an_answer_cut_at_max_output_tokens_is_incomplete(opened: Opened) -> None:
    opened.say("one")
    answer = ask(opened, max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert list(ask(opened, stream=True))[-1].type == "response.incomplete"


def test_two_tool_calls_of_one_answer_are_one_message(opened: Opened) -> None:
    opened.say(CALL.removesuffix("<|im_end|>") + "\n" + CALL)
    answer = ask(opened, tools=[TOOL])
    assert [item.type for item in answer.output] == ["function_call"] * 2
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "a cat"}
        for call in answer.output
    ]
    ask(opened, input=[*ASK, *answer.output, *results], tools=[TOOL])
    assert opened.spans[1].kept_how == "messages"


def test_a_stream_holds_the_same_answer_token_by_token(opened: Opened) -> None:
    opened.say(f"<think>hm</think>Let me see.{CALL}")
    pieces = list(ask(opened, tools=[TOOL], stream=True))
    assert [piece.sequence_number for piece in pieces] == list(range(len(pieces)))
    kinds = [piece.type.removeprefix("response.") for piece in pieces]
    parts = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    thought, said = ([kind.format(name) for kind in parts] for name in NAMES)
    called = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = (["output_item.added", *item, "output_item.done"] for item in (thought, said, called))
    expected = ["created", "in_progress", *chain.from_iterable(items), "completed"]
    assert [kind for kind, _ in groupby(kinds)] == expected
    said = [piece.delta for piece in pieces if piece.type == "response.output_text.delta"]
    assert said == CHAT.pieces("Let me see.")
    written = "response.function_call_arguments.delta"
    assert [p.delta for p in pieces if p.type == written] == CHAT.pieces('{"at": "x"}')
    whole = pieces[-1].response
    assert whole.output_text == "Let me see."
    assert whole.usage.output_tokens == len(opened.spans[0].response_token_ids)


def call_of(name: str, **arguments: Any) -> str:
    """Return what a policy says that calls a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


SHOWN = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
OF_TOOLS: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    (
        EDIT,
        "edit",
        {"input": "*** patch\n"},
        {"type": "custom_tool_call", "name": "edit", "input": "*** patch\n"},
    ),
    (
        {**GROUP, "tools": [EDIT]},
        "eyes__edit",
        {"input": "{}"},
        {"type": "custom_tool_call", "name": "edit", "namespace": "eyes", "input": "{}"},
    ),
    (
        GROUP,
        "eyes__look",
        {"at": "x"},
        {"type": "function_call", "name": "look", "namespace": "eyes", "arguments": '{"at": "x"}'},
    ),
    (
        {"type": "shell"},
        "shell",
        {"commands": ["ls"]},
        {"type": "shell_call", "action": {"commands": ["ls"]}},
    ),
    (
        {"type": "local_shell"},
        "local_shell",
        {"command": ["ls"]},
        {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls"]}},
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tool", "name", "arguments", "expected"), OF_TOOLS)
def test_a_call_has_the_form_of_its_tool_and_keeps_its_tokens(
    opened: Opened,
    tool: Any,
    name: str,
    arguments: dict[str, Any],
    expected: dict[str, Any],
    stream: bool,
) -> None:
    opened.say(call_of(name, **arguments))
    tools = [tool, {"type": "web_search"}]
    if stream:
        *_, last = ask(opened, tools=tools, stream=True)
        (item,) = last.response.output
    else:
        (item,) = ask(opened, tools=tools).output
    assert expected.items() <= item.to_dict().items()
    result = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "a cat"}
    result |= {"output": [SHOWN]} if item.type == "shell_call" else {}
    ask(opened, input=[*ASK, item, result], tools=tools)
    assert [span.kept_how for span in opened.spans] == ["new", "messages"]
    first = opened.spans[0]
    assert [one["function"]["name"] for one in first.request.tools] == [name]
    assert call_span(first)["attributes"]["left_out_tools"] == ["web_search"]


def test_a_patch_is_the_operation_of_its_item_and_its_status_the_output() -> None:
    patch = {"type": "delete_file", "path": "a"}
    named = {"apply_patch": Offered("apply_patch", "apply_patch")}
    call = create_tool_call("apply_patch", json.dumps(patch), "c")
    item = write_call(call, named)
    assert item == {"type": "apply_patch_call", "call_id": "c", "operation": patch}
    done = {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}
    said, heard = read(body(input=[item, done])).messages
    assert said.get("tool_calls") == [call]
    assert heard == {"role": "tool", "content": "completed", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("local_shell", '{"command": "ls"}'),
        ("local_shell", '{"command": ["ls"], "type": 3}'),
        ("local_shell", '{"command": ["ls"], "env": {"A": 1}}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": -1}'),
        ("shell", "[]"),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
    ],
)
def test_a_tool_of_the_api_called_with_other_arguments_is_a_function(
    tool: str, arguments: str
) -> None:
    item = write_call(create_tool_call(tool, arguments, "c"), {tool: Offered(tool, tool)})
    assert item == {"type": "function_call", "call_id": "c", "name": tool, "arguments": arguments}


def test_a_custom_tool_that_is_called_with_other_arguments_gets_them_as_its_text(
    opened: Opened,
) -> None:
    opened.say(call_of("edit", patch=3))
    (item,) = ask(opened, tools=[EDIT]).output
    assert (item.type, item.input) == ("custom_tool_call", '{"patch": 3}')
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "no patch"}
    ask(opened, input=[*ASK, item, result], tools=[EDIT])
    assert opened.spans[1].kept_how == "unknown", "they come back as an input"


def test_the_input_of_a_custom_tool_is_streamed_by_its_own_pieces(opened: Opened) -> None:
    opened.say(call_of("edit", input="*** a patch"))
    pieces = list(ask(opened, tools=[EDIT], stream=True))
    kind = "response.custom_tool_call_input"
    assert [p.delta for p in pieces if p.type == f"{kind}.delta"] == CHAT.pieces("*** a patch")
    assert [p.input for p in pieces if p.type == f"{kind}.done"] == ["*** a patch"]
    (added,) = [p.item for p in pieces if p.type == "response.output_item.added"]
    assert (added.type, added.name, added.input) == ("custom_tool_call", "edit", "")


def test_the_model_reads_of_a_namespace_once_and_of_a_custom_tool_s_grammar() -> None:
    group = {**GROUP, "tools": [{**TOOL, "description": "Looks."}, {**TOOL, "name": "see"}, EDIT]}
    look, see, edit = (tool["function"] for tool in read(body(tools=[group])).tools)
    assert (look.get("description"), "description" in see) == ("Eyes.\n\nLooks.", False)
    parameters: Any = edit.get("parameters")
    assert (
        parameters["properties"]["input"]["description"]
        == "A text of this lark grammar:\nstart: patch"
    )


def test_store_is_answered_with_false_and_recorded_as_sent(opened: Opened) -> None:
    answer = ask(opened, store=True, metadata={"a": "b"})
    assert (answer.store, answer.metadata) == (False, {"a": "b"})
    assert opened.spans[0].request.fields["store"] is True


def test_items_become_messages() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a"}],
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "r"}
    items = [
        {"role": "developer", "content": "d"},
        HELLO,
        thought,
        said,
        CALLED,
        result,
        said,
        said,
    ]
    request = read(body(input=items, user="u"))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "a"}
    assert request.messages == [
        {"role": "system", "content": "d"},
        HELLO,
        {**turn, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
        turn,
        turn,
    ]
    assert request.fields == {"user": "u"}
