"""A row of comparisons → the tokens of its two sides, the chosen and the rejected one.

A labelled answer is a row of one side. A judge learns and is tried on pairs: its text or its
example asks which of the two answers is better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.adapters.calls import Message
from ratchet.adapters.harness.judges import comparison
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rewards import BETTER
from ratchet.tasks.algorithm.preferences import CHOSEN, REJECTED
from ratchet.tasks.examples.reading import DatasetError, Example, Source
from ratchet.tasks.given.conversations import (
    Said,
    join_repeated,
    list_given,
    put_before,
    read_messages,
    read_tools,
)
from ratchet.tasks.given.given import Unit, WrittenUnits
from ratchet.tasks.given.tokenizing import WeightedTokens, tokenize, tokenize_conversation

PAIR_FORMS = (
    "prompt, chosen and rejected; or chosen and rejected; or comparison and label; or prompt, "
    "completion and label"
)
TIE = "Tie"

LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels of an answer as CSV has them, in small letters."""

Messages = Sequence[Said]
Sides = tuple[Messages, tuple[Messages, ...]]
"""A prompt, and what follows it on the chosen side and on the rejected one."""


def read_pair(row: Mapping[str, Any], chat: Chat) -> Unit | None:
    """Tokenize a row; None if it is a tie. DatasetError says what is wrong with a row.

    A row has `prompt`, `chosen` and `rejected`, each a text or a list of messages; or `chosen` and
    `rejected` alone, two conversations that begin alike, as messages or as transcripts; or, as the
    Tinker cookbook writes them, a `comparison` of `completion_A` with `completion_B` after a
    `prompt_conversation`, and a `label`. A labelled answer has a `prompt`, its `completion`, and a
    `label` that is true if it is good. The answers of a side, after the prompt, are trained.
    """
    if row.get("comparison") is None and row.get("completion") is not None and "label" in row:
        return _read_labelled(row, chat)
    read = read_sides(row)
    if read is None:
        return None
    prompt, sides = read
    own = (_tokenize(prompt, side, row.get("tools"), chat) for side in sides)
    return pair_of(*own)


def pair_of(
    chosen: list[WeightedTokens], rejected: list[WeightedTokens], *, labelled: bool = False
) -> Unit:
    """Make a pair of the sides that have a sequence."""
    sides = {CHOSEN: chosen, REJECTED: rejected}
    return Unit({side: own for side, own in sides.items() if own}, labelled)


def read_sides(row: Mapping[str, Any]) -> Sides | None:
    """Read the prompt of a comparison, its chosen side and its rejected one; None for a tie.

    A prompt that the sides repeat stands once.
    """
    if row.get("comparison") is not None:
        read = _read_comparison(row["comparison"], row.get("label"))
    elif row.get("chosen") is None or row.get("rejected") is None:
        raise DatasetError(f"it has {list_given(row)}; give {PAIR_FORMS}")
    else:
        read = _read_sides(row)
    if read is None:
        return None
    prompt, sides = read
    (asked, chosen), (other, rejected) = (join_repeated(prompt, side) for side in sides)
    if asked != other:
        raise DatasetError("one side begins otherwise than the prompt; let both begin with it")
    return put_before(row, asked), (chosen, rejected)


def _read_labelled(row: Mapping[str, Any], chat: Chat) -> Unit:
    good = LABELS.get(str(row["label"]).strip().lower())
    if good is None:
        raise DatasetError(f"its label is {row['label']!r:.80}; give true or false")
    prompt, answer = join_repeated(
        read_messages(row.get("prompt"), "prompt", "user"),
        read_messages(row["completion"], "completion", "assistant"),
    )
    own = _tokenize(put_before(row, prompt), answer, row.get("tools"), chat)
    return Unit({CHOSEN if good else REJECTED: own}, labelled=True)


def _read_comparison(comparison: Any, label: Any) -> Sides | None:
    if not isinstance(comparison, Mapping):
        raise DatasetError(f"its comparison is {comparison!r:.80}; give an object")
    if label not in ("A", "B", TIE):
        raise DatasetError(f"its label is {label!r:.80}; give A, B or {TIE}")
    prompt = read_messages(comparison.get("prompt_conversation"), "prompt_conversation", "user")
    names = ("completion_A", "completion_B") if label == "A" else ("completion_B", "completion_A")
    sides = tuple(read_messages(comparison.get(name), name, "assistant") for name in names)
    return None if label == TIE else (prompt, sides)


def _read_sides(row: Mapping[str, Any]) -> Sides:
    sides = tuple(read_messages(row[name], name, "assistant") for name in (CHOSEN, REJECTED))
    if row.get("prompt") is not None:
        return read_messages(row["prompt"], "prompt", "user"), sides
    chosen, rejected = sides
    alike = [one == other for one, other in zip(chosen[:-1], rejected[:-1], strict=False)]
    common = [*alike, False].index(False)
    if not common:
        raise DatasetError("its two sides begin with no common message; give a prompt")
    return chosen[:common], (chosen[common:], rejected[common:])


def _tokenize(prompt: Messages, side: Messages, tools: Any, chat: Chat) -> list[WeightedTokens]:
    """Tokenize a side behind its prompt; its own answers are trained, and nothing else."""
    if not side:
        raise DatasetError("a side repeats its prompt and has no answer; give one")
    said = [
        *(replace(one, trainable=False) for one in prompt),
        *(replace(one, trainable=one.message["role"] == "assistant") for one in side),
    ]
    found = tokenize_conversation(said, read_tools(tools), chat, "marked")
    return [sequence for sequence in found if any(sequence.weights)]


@dataclass(frozen=True)
class ComparedPairs(WrittenUnits):
    """Texts of the pairs of a split: each pair is compared in both orders; a tie makes no text."""

    question: str

    def read(self, row: Mapping[str, Any], chat: Chat) -> Unit:
        if (read := read_sides(row)) is None:
            return Unit({})
        chosen, rejected = ({"messages": messages} for messages in _conversations(read))
        found: list[WeightedTokens] = []
        for verdict, shown in (("A", (chosen, rejected)), ("B", (rejected, chosen))):
            asked = {"role": "user", "content": comparison(self.question, *shown)}
            answer = {"role": "assistant", "content": verdict}
            found += tokenize({"messages": [asked, answer]}, chat, "assistant")
        return Unit({"": found})


@dataclass(frozen=True)
class ComparedExamples(Source):
    """Examples of a judge: the two sides of each pair, with BETTER; a tie makes no example."""

    question: str = ""

    def examples(self) -> list[Example]:
        return [
            {**row, "example": self._example(sides, row["example_id"])}
            for row in super().examples()
            if (sides := self._sides(row)) is not None
        ]

    def _sides(self, row: Example) -> list[dict[str, Any]] | None:
        try:
            read = read_sides(row["example"])
        except DatasetError as error:
            raise DatasetError(f"row {row['example_id']} of {self.dataset}: {error}") from error
        if read is None:
            return None
        named = zip((CHOSEN, REJECTED), _conversations(read), strict=True)
        return [{"id": name, "messages": messages} for name, messages in named]

    def _example(self, sides: list[dict[str, Any]], number: int) -> dict[str, Any]:
        """Return a pair as a judge is shown it; in every other pair the better side is second."""
        shown = sides if number % 2 else sides[::-1]
        return {"rollouts": shown, "question": self.question, BETTER: CHOSEN}


def _conversations(read: Sides) -> list[list[Message]]:
    """Return the conversation of each side."""
    prompt, sides = read
    return [[one.message for one in (*prompt, *side)] for side in sides]
