"""An answer that a row gives, as the tokens that a model samples to give it.

Formats write an answer of the past otherwise than the model has sampled it: without its reasoning,
or behind another beginning than that of the prompt. The ways to its tokens are tried in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from adapters.calls import Message

FOLLOWING: Message = {"role": "user", "content": "What else?"}
"""Message after an answer in the middle of a conversation."""

THOUGHT = "q0thought0q"
"""Reasoning by which a format shows how it writes one."""

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class AskedAnswer:
    """An answer to messages, the prompt that asks for it, and how a format writes."""

    messages: Sequence[Message]
    answer: Message
    prompt: list[int]
    write: Callable[[Sequence[Message], bool], list[int]]
    """Renders messages, with the header of the next answer if that is asked for."""
    text: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    """Encodes what the format writes."""
    encode_text: Callable[[str], list[int]]
    """Encodes what the answer says, in which nothing is a mark of the format."""


def split_thought(answer: Message) -> tuple[str, str]:
    """Return the reasoning of an answer and the rest of its text."""
    before, closed, said = answer["content"].rpartition(CLOSE)
    thought = answer.get("reasoning_content")
    if thought is None and closed:
        return before.replace(OPEN, "").strip(), said.lstrip()
    return thought or "", answer["content"]


def opens_thought(ending: str) -> bool:
    """Tell whether a prompt that ends so begins the answer's reasoning."""
    return ending.rstrip().endswith(OPEN)


def write_answer(asked: AskedAnswer) -> Iterator[list[int]]:
    """Yield the tokens of an answer in the ways that a format can write it behind its prompt.

    An answer without reasoning is first written as in the middle of a conversation, since templates
    write an empty thought into the last one.
    """
    said = [*asked.messages, asked.answer]
    thinks = asked.answer.get("reasoning_content") or CLOSE in asked.answer["content"]
    for conversation in [said] if thinks else [[*said, FOLLOWING], said]:
        written = asked.write(conversation, False)
        if _begins(written, asked.prompt) and _thinks_first(asked, written):
            yield written[len(asked.prompt) :]
    yield from _behind_thought(asked)


def _behind_thought(asked: AskedAnswer) -> Iterator[list[int]]:
    """Yield the tokens of an answer behind its reasoning, which may be empty.

    What comes before the answer is rendered without reasoning, which formats drop from there.
    """
    thought, said = split_thought(asked.answer)
    earlier = [without_thought(message) for message in asked.messages]
    plain = without_thought({**asked.answer, "content": said})
    prompt = asked.write(earlier, True)
    written = asked.write([*earlier, {**plain, "reasoning_content": THOUGHT}], False)
    if _begins(written, prompt) and THOUGHT in asked.text(written[len(prompt) :]):
        yield _exchange_thought(asked, written[len(prompt) :], thought)
    elif opens_thought(asked.text(prompt[-8:])):
        written = asked.write([*earlier, plain], False)
        alike = [one == other for one, other in zip(prompt, written, strict=False)]
        rest = written[[*alike, False].index(False) :]
        closes = asked.text(rest).lstrip().startswith(CLOSE)
        if closes:
            yield [*asked.encode_text(thought), *rest]
        else:
            closed = asked.encode(f"{CLOSE}\n\n")
            yield [*asked.encode_text(f"{thought}\n"), *closed, *rest]


def _thinks_first(asked: AskedAnswer, written: Sequence[int]) -> bool:
    """Tell whether an answer whose prompt begins its reasoning has it there."""
    thought, _ = split_thought(asked.answer)
    if not opens_thought(asked.text(asked.prompt[-8:])):
        return True
    before = asked.text(written[len(asked.prompt) :]).partition(CLOSE)[0]
    return "".join(before.split()) == "".join(thought.split())


def _exchange_thought(asked: AskedAnswer, written: list[int], thought: str) -> list[int]:
    """Put an answer's own reasoning in the place of THOUGHT."""
    lengths = range(len(written) + 1)
    end = next(length for length in lengths if THOUGHT in asked.text(written[:length]))
    before, _, after = asked.text(written[:end]).partition(THOUGHT)
    return [*asked.encode(before), *asked.encode_text(thought + after), *written[end:]]


def without_thought(message: Message) -> Message:
    """Return a message without its reasoning."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return cast(Message, kept)


def _begins(tokens: Sequence[int], beginning: Sequence[int]) -> bool:
    return tokens[: len(beginning)] == beginning
