"""Spans → why prompts have not kept the tokens of earlier answers: what the program has changed."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from adapters.calls import Message
from adapters.door.role_calls import chain
from tasks.recording.spans import LLM
from tasks.storage.tables import read_table

JSON_COLUMNS = ("messages", "reply", "tools")
CALL_COLUMNS = ("rollout_id", "attempt", "role", "call", *JSON_COLUMNS, "kept_how")
TOOLS, UNBRIDGED = "tools", "unbridged"
BREAKS = ("unknown", TOOLS, "ended", UNBRIDGED)
"""Reasons for which a prompt keeps no tokens although an answer stands in its history."""
MOST_QUOTED_LETTERS = 60
BEFORE_DIFFERENCE = 20
"""Letters that are shown before the first one that differs."""


def explain_breaks(spans: Sequence[Path]) -> list[str]:
    """Explain each broken prefix of sealed batches, with the number of rollouts that have it."""
    rollouts: dict[str, set[str]] = defaultdict(set)
    for calls in _calls_of_roles(spans):
        for later, call in enumerate(calls):
            if call["kept_how"] in BREAKS and later:
                what = f"{call['role']} call {call['call']}, {call['kept_how']}"
                rollouts[f"{what}: {_explain(calls[:later], call)}"].add(call["rollout_id"])
    return [
        f"{why} ({len(own)} rollouts)" if len(own) > 1 else why for why, own in rollouts.items()
    ]


def _calls_of_roles(spans: Sequence[Path]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the answered calls of each role of an attempt, in order."""
    calls: dict[tuple[object, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for path in spans:
        table = read_table(path, ["kind", *CALL_COLUMNS])
        for row in table.to_pylist():
            if row["kind"] == LLM:
                written = {name: json.loads(row[name] or "[]") for name in JSON_COLUMNS}
                calls[row["rollout_id"], row["attempt"], row["role"]].append({**row, **written})
    for own in calls.values():
        yield sorted(own, key=lambda call: call["call"])


def _explain(earlier: Sequence[Mapping[str, Any]], call: Mapping[str, Any]) -> str:
    """Compare a call with the earlier one of which it repeats most, or the last of several."""
    now: list[Message] = call["messages"]
    histories = [[*one["messages"], one["reply"]] for one in earlier]
    lengths = [_common(history, now) for history in histories]
    at = max(range(len(lengths)), key=lambda number: (lengths[number], number))
    before, first, number = histories[at], lengths[at], earlier[at]["call"]
    if call["kept_how"] == TOOLS:
        return _explain_tools(earlier[at]["tools"], call["tools"])
    if first == len(before):
        new = "; ".join(_spoken(one) for one in now[first:])
        return f"the renderer cannot go on behind the answer of call {number} with {_quote(new)}"
    if first == len(now):
        return f"message {first + 1} of call {number} is left out: {_shown(before[first])}"
    was, is_now = before[first], now[first]
    begin = _first_difference(_spoken(was), _spoken(is_now))
    old, new = (_shown(one, begin) for one in (was, is_now))
    return f"message {first + 1} was in call {number} {old}, and is {new}"


def _common(before: Sequence[Message], now: Sequence[Message]) -> int:
    """Count the messages by which two histories begin alike, whatever the spelling."""
    pairs = zip(chain(before, ())[1:], chain(now, ())[1:], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _explain_tools(before: Sequence[Any], now: Sequence[Any]) -> str:
    was, is_now = ({tool["function"]["name"]: tool for tool in tools} for tools in (before, now))
    said = {
        "new": sorted(is_now.keys() - was.keys()),
        "gone": sorted(was.keys() - is_now.keys()),
        "changed": sorted(name for name in was.keys() & is_now if was[name] != is_now[name]),
    }
    told = [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
    return f"other tools are offered ({'; '.join(told) or 'in another order'})"


def _spoken(message: Message) -> str:
    """Return what a message says, with its tool calls as name(arguments)."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = [f"{one['name']}({one['arguments']})" for one in calls]
    return " ".join(" ".join([message["content"], *called]).split())


def _first_difference(one: str, other: str) -> int:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def _shown(message: Message, begin: int = 0) -> str:
    start = max(0, begin - BEFORE_DIFFERENCE)
    said = _spoken(message)
    return f"{message['role']} {_quote(said[start:], cut=start > 0)}"


def _quote(text: str, *, cut: bool = False) -> str:
    more = len(text) > MOST_QUOTED_LETTERS
    return f"'{'…' if cut else ''}{text[:MOST_QUOTED_LETTERS]}{'…' if more else ''}'"
