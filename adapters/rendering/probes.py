"""Which added tokens a format writes: by conversations that have every part of one."""

from collections.abc import Callable, Sequence

from adapters.calls import Message, Tool, ToolCall

LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Where?"}
PLAIN: Message = {"role": "assistant", "content": "Here."}
CALL: ToolCall = {
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "left"}'},
    "id": "1",
}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [CALL],
}
RESULT: Message = {"role": "tool", "content": "a cat", "tool_call_id": "1", "name": "look"}

Write = Callable[[Sequence[Message], Sequence[Tool], bool], Sequence[int]]
"""Renders messages and tools, perhaps with the next answer's header; empty if it cannot."""


def named_by_id(call_id: str) -> list[Message]:
    """Return a question and a call that has this id."""
    return [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call_id}]}]


def probe_marks(write: Write) -> tuple[set[int], set[int]]:
    """Return the tokens that a format writes, and those of an answer's reasoning and calls."""
    plain = {*write([USER, PLAIN], [], False), *write([USER], [], True)}
    own = {*write([USER, CALLING], [], False)} - plain
    whole = [SYSTEM, USER, CALLING, RESULT, PLAIN]
    return plain | own | {*write(whole, [LOOK], False), *write(whole[1:], [], True)}, own
