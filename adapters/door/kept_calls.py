"""Prompts that keep the tokens of earlier answers, found by the messages of the next call.

Encoding the text of an answer anew rarely gives the tokens that were sampled, so a prompt is built
from the tokens of the longest known history of the role.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

from adapters.calls import Completion, JsonObject, Message, Request, Tool
from adapters.dialects.fields import bad_field
from adapters.dialects.instructions import instruction_of
from adapters.dialects.structured import extend_told, render_told
from adapters.rendering.chat import Chat
from adapters.rendering.renderer_names import NoRenderer

How = Literal["messages", "text", "new", "unknown", "tools", "ended", "unbridged"]
"""How the tokens of an earlier call were found for a prompt, or why there are none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens to sample from.

    If they begin with those of an earlier call, `how` is `messages` (the history continues after a
    known answer) or `text` (its text does: the client added to the answer, or edited a later one).
    Otherwise `how` is the reason: `new` (no answer in the history), `unknown` (an answer in it
    differs from the one given here), `tools` (other tools were offered), `ended` (the client added
    to an answer that the model had ended) or `unbridged` (the renderer cannot continue it).
    """

    token_ids: list[int]
    kept_tokens: int
    kept_call: int | None
    how: How


@dataclass(frozen=True, slots=True)
class KnownCall:
    """The number of an answered call, and its tokens, four bytes each."""

    number: int
    prompt_token_ids: "array[int]"
    response_token_ids: "array[int]"

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


class KeptCalls:
    """The answered calls of one role of one rollout attempt."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._answered: dict[bytes, KnownCall] = {}
        self._asked: dict[bytes, list[KnownCall]] = {}
        self._with_any_tools: set[bytes] = set()

    def of(self, chat: Chat) -> "KeptCalls":
        """Return the same calls, for prompts in another setting of the format."""
        other = copy(self)
        other._chat = chat
        return other

    def prompt_of(self, request: Request) -> Prompt:
        """Build the prompt of a request, whose last message its answer may go on with."""
        messages, tools, said = request.messages, request.tools, instruction_of(request)
        if not request.continues:
            return self.prompt(messages, tools, said)
        known = self._answered.get(chain(messages, tools)[-1])
        if known is not None and not self._chat.has_ended(known.response_token_ids):
            token_ids = [*known.prompt_token_ids, *known.response_token_ids]
            return Prompt(token_ids, len(known), known.number, "messages")
        *before, begun = messages
        asked = self.prompt(before, tools, said)
        answer = _without_end(self._chat, self._chat.answer(before, begun, tools), begun)
        return replace(asked, token_ids=[*asked.token_ids, *answer])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool], said: str = "") -> Prompt:
        """Build the prompt for `messages`, with the sampled tokens of the longest known history.

        `said` is an instruction behind them in this prompt and those that continue it. An answer
        is not found by it, since the client does not repeat it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return Prompt(render_told(self._chat, messages, tools, said), 0, None, "new")
        history = chain(messages, tools)
        lengths = range(len(messages) - 1, 0, -1)
        length = next((length for length in lengths if history[length] in self._answered), 0)
        if length:
            known = self._answered[history[length]]
            pair = known.prompt_token_ids, known.response_token_ids
            rest = self._chat.name_calls(messages)[length:]
            token_ids = extend_told(self._chat, pair, rest, tools, said)
            if token_ids is not None:
                return Prompt(token_ids, len(known), known.number, "messages")
        plain = render_told(self._chat, messages, tools, said)
        return self._by_text(messages, tools, history, plain, "unbridged" if length else "unknown")

    def remember(self, completion: Completion) -> None:
        """Keep a call's token ids by the messages of its request, with and without its answer."""
        request, messages = completion.request, [*completion.request.messages, completion.message]
        if request.continues:
            messages[-2:] = [_join(*messages[-2:])]
        token_ids = completion.prompt_token_ids, completion.response_token_ids
        known = KnownCall(completion.id.number, *(array("i", ids) for ids in token_ids))
        asked, answered = chain(messages, request.tools)[-2:]
        self._answered[answered] = known
        if not request.continues:
            self._asked.setdefault(asked, []).append(known)
        self._with_any_tools.add(chain(messages, ())[-1])

    def _by_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        history: list[bytes],
        plain: list[int],
        why_not: How,
    ) -> Prompt:
        """Build the prompt whose text continues an answer's sampled tokens, or else the plain one.

        ReAct agents write the observation into the assistant's message. Such a message cannot
        continue a turn that the model ended, since it lacks the token that ended the turn. Nor is
        a text continued that spells control tokens, which as text are not those of the format.
        """
        if self._chat.spells_marks(messages, tools):
            return Prompt(plain, 0, None, why_not)
        for known, rest in self._continued(messages, tools, history, self._chat.text(plain)):
            said = known.response_token_ids
            end = self._chat.text(said[-1:]) if self._chat.has_ended(said) else ""
            if rest.startswith(end):
                further = self._chat.encode(rest.removeprefix(end))
                token_ids = [*known.prompt_token_ids, *said, *further]
                return Prompt(token_ids, len(known), known.number, "text")
            why_not = "ended"
        if why_not == "unknown" and not self._with_any_tools.isdisjoint(chain(messages, ())):
            why_not = "tools"
        return Prompt(plain, 0, None, why_not)

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Tool], history: list[bytes], text: str
    ) -> Iterator[tuple[KnownCall, str]]:
        """Yield the calls whose answer `text` continues, latest first, and the rest of `text`."""
        for length in range(len(messages) - 1, 0, -1):
            asked = self._asked.get(history[length])
            if asked is None or messages[length]["role"] != "assistant":
                continue
            before = self._chat.text(self._chat.render(messages[:length], tools))
            for known in reversed(asked):
                said = self._chat.decode_answer(known.response_token_ids)
                for words in (said, said.strip()):
                    if words.strip() and text.startswith(before + words):
                        yield known, text[len(before + words) :]


def _without_end(chat: Chat, answer: list[int], begun: Message) -> list[int]:
    """Return an answer's tokens up to the end of its text, without those that close it."""
    text, end = begun["content"].strip(), len(answer)
    while chat.has_ended(answer[:end]):
        end -= 1
    while text and text in chat.text(answer[: end - 1]):
        end -= 1
    return answer[:end]


def chat_of(chat: Chat, request: Request) -> Chat:
    """Return the format as a request asks for it; refused if it has no such setting."""
    if request.thinking is None:
        return chat
    try:
        return chat.with_thinking(request.thinking.on)
    except NoRenderer as error:
        if not request.thinking.where:
            return chat
        raise bad_field(request.thinking.where, f"cannot be honoured: {error}.") from error


def _join(begun: Message, answer: Message) -> Message:
    """Return one message for the beginning of an answer and what the model went on with."""
    thought = begun.get("reasoning_content", "") + answer.get("reasoning_content", "")
    joined: Message = {**answer, "content": begun["content"] + answer["content"]}
    return {**joined, "reasoning_content": thought} if thought else joined


def chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Return a digest of every history that `messages` begins with, from the empty one to all."""
    digest = hashlib.sha256(canonical_json(list(tools))).digest()
    digests = [digest]
    for message in messages:
        digest = hashlib.sha256(digest + canonical_json(_normalize(message))).digest()
        digests.append(digest)
    return digests


def _normalize(message: Message) -> list[object]:
    """Return the same value for all ways in which clients write the same message.

    Clients strip answers, write tool arguments and JSON answers anew and choose their own call ids;
    the meaning stays the same. Messages that are not the model's must be equal to the letter.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()
        content = _normalize_json(content) if content.startswith(("{", "[")) else content
    calls = [
        [call["function"]["name"], _normalize_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], content, calls]


def _normalize_json(written: str | JsonObject) -> str:
    """Return one spelling of a JSON value; a text that is not JSON is only stripped."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
        return canonical_json(value).decode()
    except (ValueError, RecursionError):  # not JSON, or too long a number or too deep for Python
        return str(written).strip()


def canonical_json(value: object) -> bytes:
    """Write a JSON value in the one form that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
