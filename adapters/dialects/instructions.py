"""An instruction behind messages: what it says, how a format shows it, whether an answer obeys.

An answer is never altered: one of another format is returned and recorded as it is. Several formats
take a system message only as the first one, and refuse, drop or move a later one, so the
instruction is put behind the messages in the first way that the format shows.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ratchet.adapters.calls import Choice, JsonObject, Message, Refused, Request, Tool

if TYPE_CHECKING:
    from ratchet.adapters.rendering.chat import Chat


def instruction_of(request: Request) -> str:
    """Return the instruction that the model is shown after the messages, empty if there is none.

    It comes last since it concerns one answer only: a conversation continues from its own tokens
    whatever format its next answer has.
    """
    return " ".join([*_tool_instructions(request), *_format_instruction(request)])


def _tool_instructions(request: Request) -> list[str]:
    choice = request.choice
    if not request.tools:
        return []
    if choice.mode == "none":
        return ["Call no function; answer in words."]
    said = ["Call a function."] if choice.mode == "required" else []
    if choice.names:
        said.append(f"Call no other function than {' or '.join(choice.names)}.")
    if not choice.parallel:
        said.append("Call at most one function.")
    return said


def _format_instruction(request: Request) -> list[str]:
    if request.format is None:
        return []
    schema = request.format.schema
    start = "Unless you call a function, answer" if request.may_call_tools else "Answer"
    if schema is None:
        return [f"{start} with nothing but a JSON object."]
    written = json.dumps(schema, ensure_ascii=False)
    return [f"{start} with nothing but JSON that fits this schema: {written}"]


ASKED = "What is asked?"
TOLD = "This is told."


def render_told(
    chat: "Chat", messages: Sequence[Message], tools: Sequence[Tool], said: str
) -> list[int]:
    """Render messages and the instruction behind them, which may be empty.

    The way is the first that shows the instruction, or else the first that is rendered.
    """
    rendered: list[list[int]] = []
    refused: list[Refused] = []
    for way in _ways(chat, messages, said):
        try:
            token_ids = chat.render(way, tools)
        except Refused as error:
            refused.append(error)
            continue
        if not said or said in chat.text(token_ids):
            return token_ids
        rendered.append(token_ids)
    if not rendered:
        chat.render(messages, tools)  # which is refused if the messages themselves are
        raise refused[0]
    return rendered[0]


def extend_told(
    chat: "Chat",
    known: tuple[Sequence[int], Sequence[int]],
    messages: Sequence[Message],
    tools: Sequence[Tool],
    said: str,
) -> list[int] | None:
    """Continue a known prompt and its answer by messages and the instruction behind them.

    None if the format cannot do so in any way.
    """
    length = sum(map(len, known))
    for way in _ways(chat, messages, said):
        token_ids = chat.extend(*known, way, tools)
        if token_ids is not None and (not said or said in chat.text(token_ids[length:])):
            return token_ids
    return None


def _ways(chat: "Chat", messages: Sequence[Message], said: str) -> list[list[Message]]:
    """List the ways to put an instruction behind messages: as a system message, if that stays.

    Nothing is put into an assistant's message, since the model would take it for its own words.
    """
    if not said:
        return [[*messages]]
    ways: list[list[Message]] = []
    if not _moves_system(chat):
        ways.append([*messages, {"role": "system", "content": said}])
    *before, last = messages
    if last["role"] != "assistant":
        joined = f"{last['content']}\n\n{said}" if last["content"] else said
        ways.append([*before, {**last, "content": joined}])
    return [*ways, [*messages, {"role": "user", "content": said}]]


@lru_cache(maxsize=8)
def _moves_system(chat: "Chat") -> bool:
    """Return whether the format moves or drops a system message behind a user's."""
    asked: Message = {"role": "user", "content": ASKED}
    try:
        text = chat.text(chat.render([asked, {"role": "system", "content": TOLD}], ()))
    except Refused:
        return False
    before, found, _ = text.partition(TOLD)
    return not found or ASKED not in before


def choice_outcome(choice: Choice, message: Message) -> JsonObject:
    """Return whether the client's choice allows an answer's tool calls."""
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    kept = (
        bool(called) >= (choice.mode == "required")
        and (not called or choice.mode != "none")
        and (not choice.names or set(called) <= {*choice.names})
        and (choice.parallel or len(called) <= 1)
    )
    asked = {"mode": choice.mode, "names": list(choice.names), "parallel": choice.parallel}
    return {**asked, "kept": kept}
