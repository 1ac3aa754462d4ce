"""What a backend knows of the earlier calls of a role, those of earlier attempts included.

A request that an earlier attempt has answered is answered from the record: an agent that is started
anew reaches the point where it was, and no token is sampled twice.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import astuple, replace
from datetime import UTC, datetime

from adapters.calls import Begun, CallId, Completion, Request, Sampling
from adapters.dialects.instructions import instruction_of
from adapters.door.kept_calls import KeptCalls, canonical_json


class Memory:
    """The earlier calls of one role, and `begin`, which reports a call that is to be answered.

    Once a request differs from the recorded one of its number, no more are answered from the
    record, since the agent has taken another path. A number without a record (its answer was lost)
    does not end it.
    """

    def __init__(
        self,
        kept: KeptCalls,
        begin: Callable[[Begun], None],
        recorded: Iterable[Completion] = (),
    ) -> None:
        self.kept = kept
        self.begin = begin
        self._recorded = {completion.id.number: completion for completion in recorded}

    def recall(self, call: CallId, request: Request, sha: str, policy: str) -> Completion | None:
        """Return the recorded answer, as one of this attempt, if request and policy are equal."""
        recorded = self._recorded.get(call.number)
        if recorded is None:
            return None
        if (recorded.request_sha, recorded.policy_version) != (sha, policy):
            self._recorded.clear()
            return None
        now = datetime.now(UTC)
        return replace(recorded, id=call, request=request, recalled=True, started=now, ended=now)


Answer = Callable[[Request, CallId, Memory], Awaitable[Completion]]
"""Answers a call of a role."""


def request_sha(request: Request, sampling: Sampling | None = None) -> str:
    """Hash by SHA-256 all that can change an answer.

    A policy's answer depends on the recipe's sampling, another's on all of the client's fields.
    """
    messages, rest = [*request.messages], request.fields
    if sampling is not None:
        rest = astuple(sampling)
        if said := instruction_of(request):
            messages.append({"role": "system", "content": said})
    asked = [messages, request.tools, request.max_tokens, request.stop, rest]
    if request.thinking is not None:
        asked.append({"thinking": request.thinking.on})
    if request.continues:
        asked.append({"continues": True})
    return hashlib.sha256(canonical_json(asked)).hexdigest()
