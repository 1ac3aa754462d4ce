"""Answers recorded by earlier attempts, and the types of those who answer and record calls.

A request that an earlier attempt has answered is answered from the record: an agent that is started
anew reaches the point where it was, and no token is sampled twice.
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
"""Reports a call that is about to be answered."""

Record = Callable[[Completion], Awaitable[None]]
"""Records a completion, before its answer leaves."""


class Recorded:
    """The calls of one role in earlier attempts, by their numbers.

    Once a request differs from the recorded one of its number, no more are answered from the
    record, since the agent has taken another path. A number without a record (its answer was lost)
    does not end it.
    """

    def __init__(self, completions: Iterable[Completion] = ()) -> None:
        self._calls = {completion.place.call: completion for completion in completions}

    def answer(self, place: Place, request: Request, sha: str, policy: str) -> Completion | None:
        """Return the recorded answer, as one of this attempt, if request and policy are equal."""
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
    """The earlier calls of a role, and the report of a new one, as a backend needs them."""

    prefixes: Prefixes
    recorded: Recorded
    begin: Begin


Answer = Callable[[Request, Place, Memory], Awaitable[Completion]]
"""Answers a call of a role."""


def request_sha(request: Request, sampling: Sampling) -> str:
    """Hash by SHA-256 all that can change an answer, the recipe's sampling included."""
    shown = [*request.messages, *format_instructions(request)]
    asked = [shown, request.tools, request.max_tokens, request.stop, astuple(sampling)]
    canonical = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
