"""A row of texts → sequences of tokens, as the door would have recorded who said the same.

The prompt of an answer is the door's own, and its tokens are those that the model samples to say
it: an answer is learnt behind exactly the tokens behind which it will be sampled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from adapters.calls import Message, Refused, Tool
from adapters.rendering.chat import Chat
from tasks.examples.reading import DatasetError
from tasks.examples.teaching import read_before
from tasks.texts.rules import Trained

FORMS = "messages, or prompt and completion, or text"


@dataclass(frozen=True)
class WeightedTokens:
    """Tokens, and the weight of each in the loss: 0 where a token is not trained."""

    tokens: list[int]
    weights: list[float]

    def trained(self) -> list[int]:
        """List the tokens that are trained."""
        pairs = zip(self.tokens, self.weights, strict=True)
        return [token for token, weight in pairs if weight > 0]


def tokenize(
    row: Mapping[str, Any], chat: Chat, trained: Trained, before: str | None = None
) -> list[WeightedTokens]:
    """Tokenize a row with `messages`, with a `prompt` and its `completion`, or with a `text`.

    A text `before` the conversation is its system message, which is not trained.

    A conversation whose tokens do not grow, as where the renderer writes earlier answers anew, has
    a sequence for each part that does. DatasetError says what is wrong with a row.
    """
    if row.get("messages") is not None:
        messages = read_messages(row["messages"])
    elif "prompt" in row and "completion" in row:
        messages = [
            *read_messages(row["prompt"], "user"),
            *read_messages(row["completion"], "assistant"),
        ]
    elif isinstance(row.get("text"), str):
        if before is not None:
            raise DatasetError("it is a text, before which no teacher reads a message; give others")
        tokens = [*chat.encode(row["text"]), chat.stop_tokens[-1]]
        return [WeightedTokens(tokens, [0.0, *[1.0] * (len(tokens) - 1)])]
    else:
        raise DatasetError(f"it has {', '.join(row) or 'nothing'}; give {FORMS}")
    tools = _read_tools(row.get("tools"))
    if before is not None:
        messages = read_before(before, messages)
    try:
        return _tokenize_conversation(messages, tools, chat, trained)
    except Refused as refused:
        raise DatasetError(refused.message) from refused


def _tokenize_conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], chat: Chat, trained: Trained
) -> list[WeightedTokens]:
    weights = _weigh_messages(messages, trained)
    said = [_without_marks(message) for message in messages]
    found: list[WeightedTokens] = []
    prompt, answer, answered = list[int](), list[int](), 0
    for at, message in enumerate(said):
        if message["role"] != "assistant":
            continue
        following = chat.extend(prompt, answer, said[answered:at], tools) if found else None
        if following is None:
            found.append(WeightedTokens([], []))
            following = chat.render(said[:at], tools)
        prompt, answer, answered = following, chat.answer(said[:at], message, tools), at + 1
        _grow(found[-1], prompt, float(trained == "all"))
        _grow(found[-1], [*prompt, *answer], weights[at])
    if not found:
        raise DatasetError("it has no message of the role assistant; give an answer")
    for sequence in found:
        sequence.weights[0] = 0.0  # nothing predicts a first token
    return found


def _grow(sequence: WeightedTokens, tokens: Sequence[int], weight: float) -> None:
    """Let a sequence grow to `tokens`, which begin with its own."""
    added = tokens[len(sequence.tokens) :]
    sequence.tokens.extend(added)
    sequence.weights.extend([weight] * len(added))


def _weigh_messages(messages: Sequence[Mapping[str, Any]], trained: Trained) -> list[float]:
    """Return the weight of each message, by what is trained and by its own `weight`."""
    answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    asked = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
    chosen = {
        "last_message": {*answers[-1:]},
        "last_turn": {at for at in answers if at > asked},
        "assistant": {*answers},
        "marked": {at for at in answers if messages[at].get("trainable") is True},
        "all": {*answers},
    }[trained]
    return [_read_weight(message) if at in chosen else 0.0 for at, message in enumerate(messages)]


def _read_weight(message: Mapping[str, Any]) -> float:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e6:
        raise DatasetError(f"a message has the weight {weight!r}; give a number from 0 on")
    return float(weight)


def read_messages(value: object, role: str | None = None) -> list[Mapping[str, Any]]:
    """Read a list of messages or, with a `role`, the text of one."""
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise DatasetError(f"its {role or 'messages'} are {value!r:.80}; give a list of messages")
    messages = cast(list[object], value)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(f"a message is {message!r:.80}; give it a role and its content")
    return [_without_nulls(cast(Mapping[str, Any], message)) for message in messages]


def _read_tools(value: object) -> list[Tool]:
    if (value := _parsed(value)) is None:
        return []
    if not isinstance(value, list):
        raise DatasetError(f"its tools are {value!r:.80}; give a list of tools")
    return cast(list[Tool], value)


def _parsed(value: object) -> object:
    """Return what a text of JSON says, as columns have it whose rows differ in their keys."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out the keys that Arrow adds to a message because other messages have them."""
    kept = {key: value for key, value in message.items() if value is not None}
    return {"content": "", **kept}


def _without_marks(message: Mapping[str, Any]) -> Message:
    return cast(Message, {k: v for k, v in message.items() if k not in ("trainable", "weight")})
