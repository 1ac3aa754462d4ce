"""recorded rollout → the same rollout again, in this process, for its user's debugger."""

import asyncio
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pdb import post_mortem
from tempfile import TemporaryDirectory

from adapters.calls import POLICY, Begun, Completion, Policy, RefusedCall
from adapters.door.backends import Backend, create_backends
from adapters.door.batches import OpenBatch, PlannedRollout, RolloutEnd, SampledBy
from adapters.door.door import Door
from adapters.door.memory import Answer
from adapters.door.policy_backend import PolicyBackend
from adapters.door.recorded_backend import RecordedBackend
from adapters.errors import UserError
from adapters.harness.debugger.alone import play_alone
from adapters.player_protocol import Failure, PlaySettings
from adapters.rendering.chat import Chat
from adapters.tinker.bases import name_for_clients
from adapters.tinker.engines import LOCAL, needs_engine, saved_files
from adapters.tinker.preparing import prepare_base
from adapters.tinker.service import Service, connect
from adapters.weights.network import load_tokenizer
from flows.recipe.loading import read_recipe
from flows.recipe.recipe import Recipe
from tasks.checkpoints import Ledger, sampled_step
from tasks.recording.recorded_rollouts import RecordedRollout, find_rollout
from tasks.storage.files import link_or_copy
from tasks.storage.names import parse_rollout
from tasks.storage.run_folder import RunFolder

IN_PROCESSES = ("command:", "resident:", "verifiers:")
"""Beginnings of the names of agents whose code runs in a process of its own."""


class RequestDiffers(UserError):
    """The end of a rollout whose agent asks something else than was recorded."""


@dataclass(frozen=True)
class Rerun:
    """End of a rollout that was played again, beside the recorded one."""

    recorded: RecordedRollout
    end: str
    answered: int

    def lines(self) -> dict[str, str]:
        """Say by label what was played, and how it has ended."""
        one = self.recorded
        same = "the same" if self.end == one.end else self.end
        played = f"{one.id}, attempt {one.attempt}, {self.answered} of {len(one.calls)} calls"
        return {"played": f"{played} answered from the record", "was": one.end, "now": same}


def debug_rollout(run: RunFolder, name: str, *, sample: bool, stop: bool) -> Rerun:
    """Play a rollout of a run again, with the recorded answers; nothing of the run changes.

    From the first request that differs, the run's model answers if `sample` is set; without it
    the agent gets an error, and RequestDiffers is raised when it has ended. `stop` opens pdb where
    an error came.
    """
    recipe, recorded = read_recipe(run, Recipe), find_rollout(run, name)
    if stop and recipe.agent.startswith(IN_PROCESSES):
        raise UserError(
            f"the agent {recipe.agent} runs in a process of its own, which has ended when its "
            "error is known; leave out --pdb, and put breakpoint() into the agent"
        )
    with _onward(run, recipe, recorded, sample) as (chat, onward):
        backends = [
            RecordedBackend(
                role,
                {call.id.number: call for call in recorded.calls if call.id.role == role},
                [call for call in recorded.refused if call.role == role],
                recipe.rollouts.max_tokens,
                partial(print, file=sys.stderr),
                onward.get(role),
            )
            for role in (POLICY, *recipe.roles)
        ]
        end = _play(recipe, recorded, chat, backends, stop)
    answered = sum(len(backend.given) for backend in backends)
    if not sample and any(backend.differed for backend in backends):
        raise RequestDiffers(
            f"{name} was played up to the request above, which differs, and then ended by {end}; "
            "give --sample to have the run's model answer from there"
        )
    return Rerun(recorded, end, answered)


def _play(
    recipe: Recipe,
    recorded: RecordedRollout,
    chat: Chat,
    backends: Sequence[RecordedBackend],
    stop: bool,
) -> str:
    """Play a rollout at a door of its own; return its end."""
    rollouts = recipe.rollouts
    settings = PlaySettings(recipe.agent, [one.role for one in backends], 1, 0.0)
    sampled_by = SampledBy({}, rollouts.sampling())
    batch = OpenBatch("debugged", _OneRollout(recorded), sampled_by, settings)
    answers = {one.role: _always(one.answer) for one in backends}
    with Door(chat, answers, recipe.seed, rollouts.max_calls) as door, door.opened(batch) as token:
        try:
            outcome, error = asyncio.run(play_alone(door.address, batch.name, token))
        except BdbQuit:
            return "the debugger's quit"
        if error is not None:
            traceback.print_exception(error)
            if stop:
                post_mortem(error.__traceback__)
    if isinstance(outcome, Failure):
        return f"{outcome.kind}: {outcome.message}"
    return f"reward {outcome.value:g}"


def _always(answer: Answer) -> Backend:
    return lambda example: answer


@contextmanager
def _onward(
    run: RunFolder, recipe: Recipe, recorded: RecordedRollout, sample: bool
) -> Iterator[tuple[Chat, Mapping[str, Answer]]]:
    """Yield the chat of a run and, to `sample` on, who answers each role after the record."""
    model = recipe.model
    if not sample:
        local = model.base.startswith(LOCAL)
        place = str(prepare_base(model.base)) if local else name_for_clients(model.base)
        yield Chat(load_tokenizer(place), model.renderer), {}
        return
    backends = {POLICY: POLICY, **create_backends(recipe.roles, recipe.seed)}
    saved = {
        role: _weights_of(run, who, role, recorded)
        for role, who in backends.items()
        if isinstance(who, str)
    }
    with _open_service(run, recipe, [sampler for sampler, _ in saved.values()]) as service:
        samplers = {role: service.sampler(sampler) for role, (sampler, _) in saved.items()}
        context = service.context(model.base)
        chat = Chat(service.tokenizer_of(samplers[POLICY]), model.renderer, context)
        sampling = recipe.rollouts.sampling()
        yield (
            chat,
            {
                role: PolicyBackend(
                    chat, Policy(samplers[role], saved[role][1]), sampling, recipe.seed
                ).answer
                if isinstance(who, str)
                else who(recorded.example)
                for role, who in backends.items()
            },
        )


def _weights_of(
    run: RunFolder, policy: str, role: str, recorded: RecordedRollout
) -> tuple[str, str]:
    """Return the address of the weights that sampled a role's last call, and their version."""
    versions = [call.policy_version for call in recorded.calls if call.id.role == role]
    step = sampled_step(versions[-1]) if versions else parse_rollout(recorded.id).step
    return Ledger(run.checkpoints(policy)).at(step).sampler, (versions or [str(step)])[-1]


@contextmanager
def _open_service(run: RunFolder, recipe: Recipe, samplers: Sequence[str]) -> Iterator[Service]:
    """Yield the service of a run; an engine has copies of the weights, so that the run's stay."""
    base = recipe.model.base
    with TemporaryDirectory() as state:
        for sampler in samplers if needs_engine(base) else ():
            for path in saved_files(run.engine, sampler):
                link_or_copy(path, Path(state) / path.relative_to(run.engine))
        with connect(base, Path(state), recipe.service.timeout_seconds) as service:
            yield service


class _OneRollout:
    """Recorder of a batch of one rollout that is played again, of which nothing is recorded."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self._planned = PlannedRollout(
            recorded.id, recorded.example, recorded.failures, recorded.calls
        )
        self._attempt = recorded.attempt

    def plan(self) -> tuple[int, Sequence[PlannedRollout]]:
        return self._attempt, [self._planned]

    def begun(self, begun: Begun) -> None:
        pass

    def refused(self, call: RefusedCall) -> None:
        pass

    async def answered(self, completion: Completion) -> None:
        pass

    async def ended(self, end: RolloutEnd) -> bool:
        return False
