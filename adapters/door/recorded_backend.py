"""The answers of a recorded rollout, given again until a request differs."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from adapters.calls import CallId, Completion, Refused, RefusedCall, Request, Sampling
from adapters.door.memory import Answer, Memory, request_sha

DIFFERS = "differs"
"""Code of the refusal of a request that differs from the recorded one."""

UNRECORDED = (
    "The messages and the tools are equal; what differs is the sampling, the most tokens, the stop "
    "strings or the format, which are not recorded."
)


@dataclass
class RecordedBackend:
    """Backend of a role of a recorded rollout: what its calls were answered, and refused.

    From the first request that differs, what differs is answered by `onward` or, without it,
    refused. `most_tokens` is the recipe's bound of an answer.
    """

    role: str
    recorded: Mapping[int, Completion]
    refused: Sequence[RefusedCall]
    most_tokens: int
    onward: Answer | None = None
    answered: list[int] = field(default_factory=list[int])
    """Calls that were answered."""
    recalled: int = 0
    """How many of them were answered from the record."""
    difference: str = ""
    """How the first request that differs does so; empty if none has."""
    _refused: int = 0

    async def answer(self, request: Request, call: CallId, memory: Memory) -> Completion:
        """Answer from the record as a rollout that is started anew is; then as `onward` does."""
        recorded = self.recorded.get(call.number)
        if recorded is None and not self.difference and self._refused < len(self.refused):
            self._refused += 1
            again = self.refused[self._refused - 1]
            raise Refused(again.status, again.message, code=again.code)
        if recorded is not None:
            sha = request_sha(request, self._sampling(recorded))
            if found := memory.recall(call, request, sha, recorded.policy_version):
                self.recalled += 1
                self.answered.append(call.number)
                return found
        self.difference = self.difference or self._describe(call, request, recorded)
        if self.onward is None:
            text = f"Call {call.number} of the role {self.role} differs from the recorded rollout's"
            raise Refused(400, f"{text}, which is played again without a model.", code=DIFFERS)
        completion = await self.onward(request, call, memory)
        self.answered.append(call.number)
        return completion

    def _sampling(self, recorded: Completion) -> Sampling | None:
        """Return the sampling that the recipe asked for; None of a call that no policy answered."""
        sampling = recorded.sampling
        return sampling and replace(sampling, max_tokens=self.most_tokens)

    def _describe(self, call: CallId, request: Request, recorded: Completion | None) -> str:
        """Return how a request differs from the recorded one, as a unified diff."""
        name = f"call {call.number} of the role {self.role}"
        before = [] if recorded is None else _lines(recorded.request, recorded.usage is not None)
        now = _lines(request, recorded is not None and recorded.usage is not None)
        titles = f"recorded {name}", f"{name}, as it is asked now"
        diff = "\n".join(difflib.unified_diff(before, now, *titles, lineterm=""))
        head = f"{name} differs from the recorded one:"
        if recorded is None:
            head = f"{name} is one that the recorded rollout has not:"
        return f"{head}\n\n{diff or UNRECORDED}"


def _lines(request: Request, with_fields: bool) -> list[str]:
    """Write what an answer depends on, a value a line; a policy's does not on all the fields."""
    asked = {"messages": request.messages, "tools": request.tools}
    told = asked | ({"fields": dict(request.fields)} if with_fields else {})
    return json.dumps(told, indent=2, ensure_ascii=False, sort_keys=True).splitlines()
