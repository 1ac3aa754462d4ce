"""sealed spans → why a call's prompt has not kept the tokens that an earlier call has sampled."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from ratchet.adapters.calls import Message
from ratchet.adapters.rendering.messages import normalize
from ratchet.tasks.storage.files import verified
from ratchet.tasks.storage.tables import query_beside, select

QUERY = query_beside(__file__)
LONGEST_WORDS = 60
"""Letters of a changed message that are shown."""

KEPT = ("new", "messages", "text")
WHY: Mapping[str, str] = {
    "tools": "other tools are offered than before",
    "ended": "the client has added to an answer that the model had ended",
    "unbridged": "the format writes what comes before the new messages in another way",
}


@dataclass(frozen=True)
class BrokenPrefix:
    """A call that begins a trajectory of its own, and why."""

    rollout: str
    role: str
    call: int
    why: str

    def __str__(self) -> str:
        return f"{self.rollout}, call {self.call} of the {self.role}: {self.why}"


@dataclass(frozen=True)
class _Said:
    """The messages of a call with its answer, as they were sent, and as they are compared."""

    call: int
    messages: Sequence[Message]
    compared: Sequence[object]

    def same_as(self, later: Sequence[object]) -> int:
        """Return how many messages a later call begins with that are these ones."""
        pairs = enumerate(zip(self.compared, later, strict=False))
        end = min(len(self.compared), len(later))
        return next((at for at, (one, other) in pairs if one != other), end)


def find_broken_prefixes(spans: Sequence[Path]) -> list[BrokenPrefix]:
    """Find the calls of sealed batches whose prompt has not kept an answer's tokens."""
    rows = select(QUERY, spans=[verified(path) for path in spans]).to_pylist() if spans else []
    earlier: dict[tuple[str, int, str], list[_Said]] = defaultdict(list)
    found: list[BrokenPrefix] = []
    for row in rows:
        before = earlier[row["rollout"], row["attempt"], row["role"]]
        messages, reply = json.loads(row["messages"]), json.loads(row["reply"])
        if row["how"] not in KEPT:
            why = WHY.get(row["how"]) or _explain(before, messages)
            found.append(BrokenPrefix(row["rollout"], row["role"], row["call"], why))
        said = [*messages, reply]
        before.append(_Said(row["call"], said, [normalize(one) for one in said]))
    return found


def _explain(before: Sequence[_Said], messages: Sequence[Message]) -> str:
    """Say how the messages of a call differ from those of the earlier call that is most alike."""
    compared: list[Any] = [normalize(message) for message in messages]
    if not before:
        return "it begins with answers that were not given here"
    most = max(before, key=lambda said: (said.same_as(compared), said.call))
    at = most.same_as(compared)
    if at == len(most.messages):
        return f"the format writes call {most.call} in another way"
    was = most.messages[at]
    is_answer = at == len(most.messages) - 1
    what = "the answer" if is_answer else f"message {at + 1}, the {was['role']}'s,"
    what = f"{what} of call {most.call}"
    if at == len(messages):
        return f"it ends before {what}"
    if most.compared[at] in compared[at + 1 :]:
        return f"a message of the {messages[at]['role']} stands before {what}"
    if compared[at] in most.compared[at + 1 :] or was["role"] != messages[at]["role"]:
        return f"{what} is not in it"
    return f"{what} was {_quote(was)} and is {_quote(messages[at])}"


def _quote(message: Message) -> str:
    """Quote the beginning of a message, or of its first tool call."""
    words = message.get("content") or str((message.get("tool_calls") or [""])[0])
    return repr(shorten(words, LONGEST_WORDS, placeholder="…"))
