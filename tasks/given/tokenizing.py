"""A row of texts → sequences of tokens, as the door would have recorded who said the same.

The prompt of an answer is the door's own, and its tokens are those that the model samples to say
it: an answer is learnt behind exactly the tokens behind which it will be sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.adapters.calls import Message, Refused, Tool
from ratchet.adapters.rendering.answers import without_thought
from ratchet.adapters.rendering.chat import Chat
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.examples.teachers import read_before
from ratchet.tasks.given.conversations import (
    KNOWN_FORMS,
    Said,
    drop_padding,
    list_given,
    read_conversation,
    read_tools,
)
from ratchet.tasks.settings.given import Trained


@dataclass(frozen=True)
class WeightedTokens:
    """Tokens, and the weight of each in the loss: 0 where a token is not trained."""

    tokens: list[int]
    weights: list[float]
    thoughts_left_out: int = 0
    """Earlier answers whose reasoning the format leaves out."""
    unanswered: int = 0
    """Messages behind the last answer, which are in no sequence."""

    def trained(self) -> list[int]:
        """List the tokens that are trained."""
        pairs = zip(self.tokens, self.weights, strict=True)
        return [token for token, weight in pairs if weight > 0]

    def cut(self, most: int) -> "WeightedTokens":
        """Return the first `most` tokens."""
        return WeightedTokens(self.tokens[:most], self.weights[:most])


def tokenize(
    row: Mapping[str, Any], chat: Chat, trained: Trained, before: str | None = None
) -> list[WeightedTokens]:
    """Tokenize a row with `messages` or another form of a conversation, or with a `text`.

    A text `before` the conversation is its system message, which is not trained.

    A conversation whose tokens do not only grow, since the renderer writes earlier answers anew,
    has a sequence for each part whose tokens only grow. DatasetError says what is wrong with a row.
    """
    said = read_conversation(row)
    if said is None:
        if not isinstance(row.get("text"), str | None):
            raise DatasetError(f"its text is {row['text']!r:.80}; give a text")
        if row.get("text") is None:
            raise DatasetError(f"it has {list_given(row)}; give {KNOWN_FORMS}; or text")
        if before is not None:
            raise DatasetError("it is a text, before which no teacher reads a message; give others")
        return [_tokenize_text(row["text"], chat)]
    return tokenize_conversation(said, read_tools(row.get("tools")), chat, trained, before)


def tokenize_conversation(
    said: Sequence[Said],
    tools: Sequence[Tool],
    chat: Chat,
    trained: Trained,
    before: str | None = None,
) -> list[WeightedTokens]:
    """Tokenize the messages of a row; DatasetError says what the renderer cannot write."""
    said = drop_padding(said, tools)
    if before is not None:
        messages = read_before(before, [one.message for one in said])
        said = [*map(Said, messages[: len(messages) - len(said)]), *said]
        said = [replace(one, message=own) for one, own in zip(said, messages, strict=True)]
    try:
        return _tokenize(said, tools, chat, trained)
    except Refused as refused:
        raise DatasetError(refused.message) from refused


def _tokenize_text(text: str, chat: Chat) -> WeightedTokens:
    """Tokenize a text; control tokens that are written out in it stay text."""
    tokens = [*chat.encode_text(text), chat.stop_tokens[-1]]
    return WeightedTokens(tokens, [0.0, *[1.0] * (len(tokens) - 1)])


def _tokenize(
    said: Sequence[Said], tools: Sequence[Tool], chat: Chat, trained: Trained
) -> list[WeightedTokens]:
    weights = _weigh(said, trained)
    messages = chat.name_calls([one.message for one in said])
    found: list[WeightedTokens] = []
    prompt, answer, answered = list[int](), list[int](), 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        new = messages[answered:at]
        following = chat.extend(prompt, answer, new, tools) if found else None
        if following is None:
            following = _ask(messages[:at], tools, chat)
            left_out = chat.count_lost_thoughts(messages[:at], following)
            found.append(WeightedTokens([], [], left_out))
        prompt, answered = following, at + 1
        try:
            answer = chat.answer(messages[:at], message, tools)
        except Refused:
            if weights[at] or "reasoning_content" not in message:
                raise
            answer = chat.answer(messages[:at], without_thought(message), tools)
            found[-1] = replace(found[-1], thoughts_left_out=found[-1].thoughts_left_out + 1)
        _grow(found[-1], prompt, float(trained == "all"))
        _grow(found[-1], [*prompt, *answer], weights[at])
    if not found:
        raise DatasetError("it has no message of the role assistant; give an answer")
    if any(message["role"] == "system" for message in messages[answered:]):
        raise DatasetError("a system message stands behind its last answer; put it first")
    found[-1] = replace(found[-1], unanswered=len(messages) - answered)
    for sequence in found:
        sequence.weights[0] = 0.0  # nothing predicts a first token
    return found


def _ask(messages: Sequence[Message], tools: Sequence[Tool], chat: Chat) -> list[int]:
    """Render the prompt of an answer; DatasetError if it is empty and the format wants more."""
    try:
        return chat.render(messages, tools)
    except Refused as refused:
        if messages:
            raise
        raise DatasetError("it begins with an answer; begin with what is answered") from refused


def _grow(sequence: WeightedTokens, tokens: Sequence[int], weight: float) -> None:
    """Let a sequence grow to `tokens`, which begin with its own."""
    added = tokens[len(sequence.tokens) :]
    sequence.tokens.extend(added)
    sequence.weights.extend([weight] * len(added))


def _weigh(said: Sequence[Said], trained: Trained) -> list[float]:
    """Return the weight of each message, by what is trained and by its own `weight`."""
    roles = [one.message["role"] for one in said]
    answers = [at for at, role in enumerate(roles) if role == "assistant"]
    asked = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
    chosen = {
        "last_message": {*answers[-1:]},
        "last_turn": {at for at in answers if at > asked},
        "assistant": {*answers},
        "marked": {at for at in answers if said[at].trainable},
        "all": {*answers},
    }[trained]
    return [one.weight if at in chosen else 0.0 for at, one in enumerate(said)]
