"""The tokens of earlier answers, found again in the messages of the next call.

Encoding the text of an answer anew rarely gives the tokens that were sampled, so a prompt is built
from the tokens of the longest history that this role is known to have.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.calls import Message
from adapters.chat import Chat, Tools

MESSAGES = "messages"
TEXT = "text"
NEW = "new"
UNKNOWN = "unknown"
TOOLS = "tools"
ENDED = "ended"
UNBRIDGED = "unbridged"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens to sample from.

    `how` a prefix was kept: `messages` (the history goes on after a known answer) or `text` (its
    text does: the client wrote on into the answer, or edited a later one). Why none was: `new` (no
    answer in the history), `unknown` (an answer in it is not as it was given here), `tools` (other
    tools were offered), `ended` (the client wrote on into an answer that the model had ended),
    `unbridged` (the renderer cannot go on).
    """

    tokens: list[int]
    prefix_len: int
    prefix_call: int | None
    how: str


@dataclass(frozen=True, slots=True)
class Known:
    """A call's tokens, four bytes each."""

    call: int
    prompt: "array[int]"
    sampled: "array[int]"

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)


class Prefixes:
    """What one role of one rollout attempt has been asked and has answered."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._answered: dict[bytes, Known] = {}
        self._asked: dict[bytes, list[Known]] = {}
        self._with_any_tools: set[bytes] = set()

    def prompt(
        self, messages: Sequence[Message], tools: Tools, told: Sequence[Message] = ()
    ) -> Prompt:
        """The prompt for `messages`, with the sampled tokens of as much history as is known.

        `told` follows them. It is of this prompt and of those that go on from it, but not of the
        messages by which an answer is found again, since the client does not repeat it.
        """
        if not any(message["role"] == "assistant" for message in messages):
            return Prompt(self._chat.render([*messages, *told], tools), 0, None, NEW)
        history = chain(messages, tools)
        length = self._longest(history)
        if length:
            known = self._answered[history[length]]
            rest = [*messages[length:], *told]
            tokens = self._chat.extend(known.prompt, known.sampled, rest, tools)
            if tokens is not None:
                return Prompt(tokens, len(known), known.call, MESSAGES)
        plain = self._chat.render([*messages, *told], tools)
        return self._by_text(messages, tools, history, plain, UNBRIDGED if length else UNKNOWN)

    def remember(
        self,
        messages: Sequence[Message],
        tools: Tools,
        reply: Message,
        call: int,
        tokens: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Know an answer by the messages it answers and its text; `tokens`: prompt and sampled."""
        asked, answered = chain([*messages, reply], tools)[-2:]
        known = Known(call, array("i", tokens[0]), array("i", tokens[1]))
        self._answered[answered] = known
        self._asked.setdefault(asked, []).append(known)
        self._with_any_tools.add(chain([*messages, reply], ())[-1])

    def _longest(self, history: list[bytes]) -> int:
        lengths = range(len(history) - 2, 0, -1)
        return next((length for length in lengths if history[length] in self._answered), 0)

    def _by_text(
        self,
        messages: Sequence[Message],
        tools: Tools,
        history: list[bytes],
        plain: list[int],
        why_not: str,
    ) -> Prompt:
        """The prompt whose text goes on from an answer's sampled tokens, or else the plain one.

        ReAct agents write the observation into the assistant's message. That cannot go on from a
        turn that the model ended: what the client asks for lacks the token that ended it.
        """
        for known, rest in self._continued(messages, tools, history, self._chat.text(plain)):
            end = self._chat.text(known.sampled[-1:]) if self._chat.ended(known.sampled) else ""
            if not rest.startswith(end):
                why_not = ENDED
                continue
            tokens = [*known.prompt, *known.sampled, *self._chat.encode(rest.removeprefix(end))]
            return Prompt(tokens, len(known), known.call, TEXT)
        if why_not == UNKNOWN and not self._with_any_tools.isdisjoint(chain(messages, ())):
            why_not = TOOLS
        return Prompt(plain, 0, None, why_not)

    def _continued(
        self, messages: Sequence[Message], tools: Tools, history: list[bytes], text: str
    ) -> Iterator[tuple[Known, str]]:
        """Calls whose answer `text` continues, the latest first, with the text that follows it."""
        for length in range(len(messages) - 1, 0, -1):
            asked = self._asked.get(history[length])
            if asked is None or messages[length]["role"] != "assistant":
                continue
            before = self._chat.text(self._chat.render(messages[:length], tools))
            for known in reversed(asked):
                said = self._chat.said_text(known.sampled)
                for words in (said, said.strip()):
                    if words.strip() and text.startswith(before + words):
                        yield known, text[len(before + words) :]


def chain(messages: Sequence[Message], tools: Tools) -> list[bytes]:
    """A digest of every history that `messages` begins with, from none of them to all."""
    digest = hashlib.sha256(_canonical(list(tools))).digest()
    digests = [digest]
    for message in messages:
        digest = hashlib.sha256(digest + _canonical(_normal(message))).digest()
        digests.append(digest)
    return digests


def _normal(message: Message) -> list[Any]:
    """What two spellings of the same message have in common.

    Clients strip answers, write tool arguments and JSON answers anew and choose their own call ids;
    none of it changes what was said. What others than the model say counts to the letter.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.strip()
        content = _value(content) if content.startswith(("{", "[")) else content
    calls = [
        [call["function"]["name"], _value(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], content, calls]


def _value(written: Any) -> str:
    """One spelling of a JSON value for all that it has; of a text that is no JSON, the text."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
        return _canonical(value).decode()
    except (ValueError, RecursionError):  # no JSON, a number too long for Python, or too deep
        return str(written).strip()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
