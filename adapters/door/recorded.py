"""What a role already has when it is asked: earlier answers, of this attempt or another one.

A request that an earlier attempt has answered is answered from the record, so that an agent that
is started anew comes to where it was without a token being sampled twice.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime

from adapters.calls import Begun, Completion, Place, Request, Sampling
from adapters.dialects.structured import format_instructions
from adapters.door.prefixes import Prefixes

Begin = Callable[[Begun], None]
"""Is called with every call that is about to be answered."""

Record = Callable[[Completion], Awaitable[None]]
"""Records a completion; its answer leaves only afterwards."""


class Recorded:
    """The calls of one role in earlier attempts, by their numbers.

    A request that differs from the recorded one of its number ends it: from there on the agent goes
    another way. A number that has no record (its answer was lost) does not.
    """

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self._calls = {completion.place.call: completion for completion in completions}

    def answer(self, place: Place, request: Request, sha: str, policy: str) -> Completion | None:
        """The recorded answer, as one of this attempt, if request and policy are the same."""
        recorded = self._calls.get(place.call)
        if recorded is None:
            return None
        if (recorded.request_sha, recorded.policy_version) != (sha, policy):
            self._calls.clear()
            return None
        now = datetime.now(UTC)
        return replace(
            recorded, place=place, request=request, replayed=True, started=now, ended=now
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """What an answer may draw on, and whom it tells that it begins to sample."""

    prefixes: Prefixes
    recorded: Recorded
    begin: Begin


Answer = Callable[[Request, Place, Memory], Awaitable[Completion]]
"""Answers one call of a role."""


def request_sha(request: Request, sampling: Sampling) -> str:
    """SHA-256 of all of a request that can change its answer, the recipe's sampling included."""
    shown = [*request.messages, *format_instructions(request)]
    asked = [shown, request.tools, request.max_tokens, request.stop, astuple(sampling)]
    canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
