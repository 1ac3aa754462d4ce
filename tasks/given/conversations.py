"""A row's columns → the messages of a conversation → tokens, as the door would have recorded them.

The form of a row is told by its columns, as data sets are published. A message is read by
`adapters.rendering.messages`, so that a row says what the same messages would say to the door. The
prompt of an answer is the door's own, and its tokens are those that the model samples to say it: an
answer is learnt behind exactly the tokens behind which it will be sampled.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ratchet.adapters.calls import Message, Refused, Tool
from ratchet.adapters.errors import listed
from ratchet.adapters.rendering.answers import without_thought
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import (
    MEDIA_KEYS,
    json_type,
    parse_text,
    read_message,
    read_tool,
)
from ratchet.tasks.examples.reading import (
    MOST_NAMED,
    DatasetError,
    Example,
    Source,
    is_padded,
    read_before,
)
from ratchet.tasks.settings.given import Trained

ASKING_ROLES = ("system", "user")
"""Roles of messages that ask."""

SHAREGPT = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""Role in ShareGPT's conversations → the role of chat completions."""

COLUMNS = ("messages", "conversations")
"""Columns that hold a whole conversation."""

SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns that hold the system message of a conversation."""

NOT_READ = (*MEDIA_KEYS, "history", "functions")
"""Columns with a part of a conversation that are not read."""

PRINTED = re.compile(
    r"\s*\[\s*\{\s*'(?:(?:role|content)'.*?'(?:role|content)|(?:from|value)'.*?'(?:from|value))'\s*:",
    re.DOTALL,
)
"""Beginning of a list of messages as Python and NumPy print it, which is no JSON."""

MARKS = ("train", "train_detail", "loss_mask", "mask")
"""Keys of a message that say in some data sets whether it is trained; they are not read."""

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""Beginning of a turn in a transcript, as in Anthropic's hh-rlhf."""
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Form:
    """Columns of a question, of its answer, and of the context that the question comes with."""

    question: str
    answer: str
    context: str | None = None


TEXT_FORMS = (
    Form("prompt", "completion"),
    Form("prompt", "response"),
    Form("instruction", "output", "input"),
    Form("instruction", "response", "context"),
    Form("question", "answer"),
    Form("question", "response"),
)
"""Forms without messages, such as alpaca, dolly, GSM8K and OpenOrca have."""

KNOWN_FORMS = "messages; conversations; " + "; ".join(
    f"{form.question} and {form.answer}" for form in TEXT_FORMS
)


@dataclass(frozen=True)
class Said:
    """A message of a row, and how it is trained: by its `weight` if it is `trainable`."""

    message: Message
    trainable: bool | None = None
    weight: float = 1.0


def read_unpadded(source: Source) -> Iterator[Example]:
    """Yield the rows of a source as they were before their file padded them.

    Parquet has no absent keys, so that a null in an object is taken for one. In JSON, of JSON lines
    or of a text in a column, a null is a value.
    """
    padded = is_padded(source.dataset)
    for row in source.examples():
        example = row["example"]
        if padded:
            example = {name: drop_nulls(value) for name, value in example.items()}
        yield {**row, "example": example}


def read_conversation(row: Mapping[str, Any]) -> list[Said] | None:
    """Read the messages of a row; None if it has no KNOWN_FORMS. DatasetError tells the fault."""
    for column in COLUMNS:
        if row.get(column) is not None:
            return put_before(row, read_messages(row[column], column))
    for form in TEXT_FORMS:
        if row.get(form.question) is not None and row.get(form.answer) is not None:
            return put_before(row, _read_form(row, form))
    return None


def put_before(row: Mapping[str, Any], said: Sequence[Said]) -> list[Said]:
    """Put the system message that a column of a row has before a conversation, where it lacks one.

    DatasetError if the conversation begins with another one, or if a column is not read.
    """
    if lost := [name for name in NOT_READ if parse_text(row.get(name))]:
        raise DatasetError(f"it has {lost[0]}, which is not read; leave the column out, or the row")
    said = [*said]
    for name in SYSTEM_COLUMNS:
        if not row.get(name):
            continue
        given = Said({"role": "system", "content": _text(row[name], name)})
        if not said or said[0].message["role"] != "system":
            said = [given, *said]
        elif said[0].message["content"] != given.message["content"]:
            raise DatasetError(
                f"its {name} is not the system message that it has; give one of them"
            )
    return said


def list_given(row: Mapping[str, Any]) -> str:
    given = [name for name, value in row.items() if value is not None]
    return listed(given, MOST_NAMED) or "nothing"


def read_messages(value: object, name: str, role: str | None = None) -> list[Said]:
    """Read the messages that a column has or, with a `role`, the text of one.

    A text may be a transcript; the prompt's may end with the name of who answers.
    """
    parsed = parse_text(value)
    given = cast(list[object], parsed) if isinstance(parsed, list) else []
    keys = [{*one} if isinstance(one, Mapping) else set[object]() for one in given]
    if role is not None and isinstance(value, str):
        if not keys or not all("role" in of or {"from", "value"} <= of for of in keys):
            return _read_text(value, name, role)
    elif not given:
        raise DatasetError(f"its {name} is {value!r:.80}; give a list of messages")
    messages = _as_chat(given, name)
    return [_read_said(one, f"{name}[{at}]") for at, one in enumerate(messages)]


def read_tools(value: object) -> list[Tool]:
    """Read the tools of a row, as a list or as JSON."""
    if (value := parse_text(value)) in (None, ""):
        return []
    if not isinstance(value, list):
        raise DatasetError(f"its tools are {value!r:.80}; give a list of tools")
    try:
        return [read_tool(parse_text(one), f"tools[{at}]") for at, one in enumerate(value)]
    except Refused as refused:
        raise DatasetError(refused.message) from refused


def drop_padding(said: Sequence[Said], tools: Sequence[Tool]) -> list[Said]:
    """Leave out the null arguments of calls that the called tool does not declare.

    Arrow gives every object of a column the keys of all others. An argument that a tool declares
    may be null, as JSON lines have it.
    """
    declared = {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {}
        for tool in tools
    }
    return [replace(one, message=_drop_undeclared(one.message, declared)) for one in said]


def drop_nulls(value: Any) -> Any:
    """Leave out the keys of objects whose value is null, as columns of Parquet have them."""
    if isinstance(value, list):
        return [drop_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None}
    return value


def join_repeated(prompt: Sequence[Said], side: Sequence[Said]) -> tuple[list[Said], list[Said]]:
    """Return a prompt and what follows it, where the prompt's end may be repeated.

    The repeated messages stand once. If a side begins with more than the prompt, such as a system
    message, its beginning is the prompt. DatasetError if it begins with another question.
    """
    asked, said = [one.message for one in prompt], [one.message for one in side]
    lead = next((at for at, one in enumerate(said) if one["role"] == "assistant"), len(said))
    if len(asked) < lead and said[lead - len(asked) : lead] == asked:
        return [*side[:lead]], [*side[lead:]]
    longest = range(min(len(asked), len(said)), 0, -1)
    alike = next((count for count in longest if asked[-count:] == said[:count]), 0)
    following = said[alike : alike + 1]
    if asked and asked[-1]["role"] == "user" and following and following[0]["role"] in ASKING_ROLES:
        raise DatasetError(
            f"its prompt is followed by another message of the role {following[0]['role']}; let "
            "what follows begin with the whole prompt, or with the answer"
        )
    return [*prompt], [*side[alike:]]


def _read_form(row: Mapping[str, Any], form: Form) -> list[Said]:
    asked = read_messages(row[form.question], form.question, "user")
    if form.context is not None and row.get(form.context):
        *earlier, question = asked
        if question.message["role"] != "user":
            raise DatasetError(
                f"its {form.question} ends with no question before {form.context}; end with a "
                "user's"
            )
        content = f"{question.message['content']}\n\n{_text(row[form.context], form.context)}"
        asked = [*earlier, Said({**question.message, "content": content})]
    prompt, answer = join_repeated(asked, read_messages(row[form.answer], form.answer, "assistant"))
    return [*prompt, *answer]


def _read_text(text: str, name: str, role: str) -> list[Said]:
    """Read a text as a message of a role, or a transcript as its messages."""
    if PRINTED.match(text):
        raise DatasetError(
            f"its {name} is a list as Python prints it, {text!r:.40}; write it as JSON"
        )
    if not SPEAKER.match(text):
        return [Said({"role": role, "content": text})]
    _, *said = SPEAKER.split(text)
    turns = [
        Said({"role": SPEAKERS[who], "content": words.strip()})
        for who, words in zip(said[::2], said[1::2], strict=True)
    ]
    asks = role == "user" and turns[-1].message == {"role": "assistant", "content": ""}
    return turns[:-1] if asks and len(turns) > 1 else turns


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"its {name} is {json_type(value)}; give a text")
    return value


def _read_said(value: object, path: str) -> Said:
    try:
        read = read_message(value, path)
    except Refused as refused:
        raise DatasetError(refused.message) from refused
    sent = cast(Mapping[str, Any], value)
    weight = 1 if sent.get("weight") is None else sent["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e6:
        raise DatasetError(f"{path} has the weight {weight!r:.60}; give a number from 0 on")
    trainable = sent.get("trainable")
    if not isinstance(trainable, bool | None):
        raise DatasetError(f"{path} has the trainable {trainable!r:.60}; give true or false")
    if marks := [key for key in MARKS if sent.get(key) is not None]:
        raise DatasetError(
            f"{path} has {marks[0]}, which is not read; give its weight, or trainable"
        )
    missing = sent.get("content") is None and not read["content"]
    if (
        missing
        and read["role"] == "assistant"
        and not {"reasoning_content", "tool_calls"} & {*read}
    ):
        raise DatasetError(f"{path} has no content, and no calls; give what is answered, or ''")
    return Said(read, trainable, float(weight))


def _as_chat(messages: Sequence[object], name: str) -> list[object]:
    """Return messages with the roles of chat completions, if all of them speak as ShareGPT does."""
    roles = {_role(one) for one in messages}
    sent = [cast(Mapping[str, Any], one) for one in messages if isinstance(one, Mapping)]
    if roles & {"human", "gpt"} and roles <= {*SHAREGPT}:
        contents = (
            one.get("value") if one.get("content") is None else one["content"] for one in sent
        )
        return [
            {**one, "role": SHAREGPT[_role(one)], "content": content}
            for one, content in zip(sent, contents, strict=True)
        ]
    return [*messages]


def _role(message: object) -> str:
    sent = cast(Mapping[str, Any], message) if isinstance(message, Mapping) else {}
    return str(sent.get("role") or sent.get("from"))


def _drop_undeclared(message: Message, declared: Mapping[str, Any]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    kept = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, dict) and name in declared:
            arguments = {
                key: value
                for key, value in arguments.items()
                if value is not None or key in declared[name]
            }
        kept.append({**call, "function": {"name": name, "arguments": arguments}})
    return cast(Message, {**message, "tool_calls": kept})


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
        # Control tokens that are written out in the text stay text.
        tokens = [*chat.around_text[0], *chat.encode_text(row["text"]), chat.around_text[1]]
        return [WeightedTokens(tokens, [0.0, *[1.0] * (len(tokens) - 1)])]
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
