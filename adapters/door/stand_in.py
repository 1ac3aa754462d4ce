"""A stand-in for the policies of a run: a file says what they say, turn by turn, without a model.

What is said passes as tokens: the chat format renders it, and then it is cut, parsed, recorded and
learnt as what a model samples.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams

from ratchet.adapters.calls import (
    POLICY,
    CallId,
    Completion,
    Message,
    Policy,
    Refused,
    Request,
    ToolCall,
)
from ratchet.adapters.door.backends import Backend
from ratchet.adapters.door.batches import Attempt, OpenBatch
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.policy_backend import PolicyBackend
from ratchet.adapters.door.role_calls import Answer, Memory, chat_of
from ratchet.adapters.door.roles import CallsOf
from ratchet.adapters.errors import UserError, counted, listed
from ratchet.adapters.process.event_loop import run_aside
from ratchet.adapters.rendering.answers import FOLLOWING
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rendering.messages import read_call

SAID = "said"
"""Version of a policy for which a stand-in speaks."""
THE_END = "That is all."
"""Answer to a call for which the file has no turn left; it calls no tool, and so ends programs."""
TURN_FORM = '{"text": "I look.", "tools": [{"name": "bash", "arguments": {"command": "ls"}}]}'


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a stand-in: an answer to a call of a role, by the line of the file that has it."""

    line: int
    role: str
    text: str
    calls: Sequence[ToolCall] = ()

    def message(self) -> Message:
        said: Message = {"role": "assistant", "content": self.text}
        return {**said, "tool_calls": [*self.calls]} if self.calls else said


class _Line(BaseModel):
    """A line of a file of turns."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = ""
    tools: list[Any] = []
    role: str = POLICY


def read_turns(path: Path, roles: Collection[str]) -> list[Turn]:
    """Read a file of JSON Lines, a turn each; UserError names a line that is no turn of a role."""
    turns: list[Turn] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            turns.append(_read_turn(line, number, f"{path}, line {number}", roles))
    if not turns:
        raise UserError(f"{path} has no turn; write a line each, such as {TURN_FORM}")
    return turns


def _read_turn(line: str, number: int, where: str, roles: Collection[str]) -> Turn:
    try:
        said = _Line.model_validate_json(line)
        calls = [read_call(call, f"tools[{at}]") for at, call in enumerate(said.tools)]
    except ValidationError as error:
        first = error.errors()[0]
        told = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{where}: {told}: {first['msg']}; write {TURN_FORM}") from error
    except Refused as refused:
        raise UserError(f"{where}: {refused.message.rstrip('.')}; write {TURN_FORM}") from refused
    if said.role not in roles:
        known = listed(roles)
        raise UserError(f"{where}: no policy answers the role {said.role!r}; give one of {known}")
    return Turn(number, said.role, said.text, calls)


class StandIn:
    """A stand-in, which tells each rollout the turns of a file, and notes what became of them.

    A turn that calls tools waits for a call that may call tools: programs ask for a title, or a
    summary, beside their work. A call for which no turn is left is answered THE_END.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: dict[str, list[Turn]] = defaultdict(list)
        for turn in turns:
            self._turns[turn.role].append(turn)
        self._told: dict[CallId, Turn] = {}
        self._next: Counter[tuple[str, int, str]] = Counter()
        self._beyond: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def turn(self, request: Request, call: CallId) -> Turn:
        """Return what is said to a call; one that is tried again is told the same."""
        if call not in self._told:
            self._told[call] = self._choose(request, call)
        return self._told[call]

    def _choose(self, request: Request, call: CallId) -> Turn:
        turns, rollout = self._turns[call.role], (call.rollout_id, call.attempt, call.role)
        at = self._next[rollout]
        if at == len(turns) or (turns[at].calls and not request.may_call_tools):
            self._beyond[call.role] += 1
            return Turn(0, call.role, THE_END)
        self._next[rollout] += 1
        return turns[at]

    def note(self, turn: Turn, completion: Completion) -> None:
        """Note how what a call was answered differs from its turn, or from what it offers."""
        offered = [tool["function"]["name"] for tool in completion.request.tools]
        for name in (call["function"]["name"] for call in turn.calls):
            if name not in offered:
                self._note(turn, f"calls {name}, and the program offers {listed(offered)}")
        if completion.finish_reason == "length":
            most = counted(len(completion.response_token_ids), "token")
            self._note(
                turn,
                f"was cut after {most}, by rollouts.max_tokens, the program's own limit or the "
                "model's context",
            )
        elif len(completion.message.get("tool_calls", ())) != len(turn.calls):
            self._note(
                turn,
                f"calls tools, and reached the program as text, since the renderer "
                f"{completion.renderer} reads no such call; give another model.renderer",
            )

    def _note(self, turn: Turn, what: str) -> None:
        self._notes[f"line {turn.line} {what}"] = None

    def report(self) -> list[str]:
        """List what is to be known of the turns: what was noted, and what nobody was told."""
        told = {turn.line for turn in self._told.values()}
        unsaid = [turn for turns in self._turns.values() for turn in turns if turn.line not in told]
        return [
            *self._notes,
            *(
                f"line {turn.line} was said to nobody: the role {turn.role} made no further call"
                f"{' that offers tools' if turn.calls else ''}"
                for turn in unsaid
            ),
            *(
                f"{counted(number, 'call')} of the role {role}, for which no line was left, "
                f"{'was' if number == 1 else 'were'} answered {THE_END!r}"
                for role, number in self._beyond.items()
            ),
        ]


@dataclass(frozen=True, slots=True)
class _Saying:
    """Sampler of tokens that are given; each is taken as certain."""

    tokens: Sequence[int]

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        del prompt, num_samples
        said = np.array(self.tokens[: sampling_params.max_tokens], np.int32)
        ended = "stop" if len(said) == len(self.tokens) else "length"
        return SampleResponse([SampledSequence(ended, "", said, np.zeros(len(said), np.float32))])


class StandInDoor(Door):
    """Door at which a stand-in answers for every policy, trained or not."""

    def __init__(
        self,
        chat: Chat,
        backends: Mapping[str, Backend | str],
        run_seed: int,
        max_calls: int | None,
        stand_in: StandIn,
        sent: Sequence[CallsOf] = (),
    ) -> None:
        super().__init__(chat, backends, run_seed, max_calls, sent=sent)
        self._stand_in = stand_in

    def find_answer(self, role: str, batch: OpenBatch, attempt: Attempt) -> Answer:
        if not isinstance(self.roles[role], str):
            return super().find_answer(role, batch, attempt)

        async def answer(request: Request, call: CallId, memory: Memory) -> Completion:
            turn, chat = self._stand_in.turn(request, call), chat_of(self.chat, request)
            said = turn.message()
            # An answer has the same tokens behind every conversation, and is rendered behind one
            # that every format can write.
            tokens = await run_aside(
                request.characters, chat.answer, [FOLLOWING], said, request.tools
            )
            policy = Policy(_Saying(tokens), SAID)
            backend = PolicyBackend(self.chat, policy, batch.sampled_by.sampling, self.run_seed)
            completion = await backend.answer(request, call, memory)
            self._stand_in.note(turn, completion)
            return completion

        return answer
