"""recorded rollout → the same rollout, played again in this process for a debugger."""

import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from pdb import post_mortem
from tempfile import TemporaryDirectory
from typing import Self, cast

from ratchet.adapters.calls import POLICY, Begun, Completion, Policy, RefusedCall, Sampling
from ratchet.adapters.door.backends import Backend, RecordedBackend, create_backends
from ratchet.adapters.door.batches import DueRollout, OpenBatch, RolloutEnd, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.policy_backend import PolicyBackend
from ratchet.adapters.door.role_calls import Answer
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.harness.player import play_alone
from ratchet.adapters.player_protocol import Outcome, PlaySettings
from ratchet.adapters.process.event_loop import run_event_loop
from ratchet.adapters.process.terminal import show
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.rewards import Reward
from ratchet.adapters.tinker.bases import name_for_clients
from ratchet.adapters.tinker.engines import LOCAL, needs_engine, prepare_base, saved_files
from ratchet.adapters.tinker.service import Service, connect
from ratchet.adapters.weights.network import load_tokenizer
from ratchet.durable.files import link_or_copy
from ratchet.flows.checkpoints.binding import carried_files, open_checkpoints
from ratchet.flows.recipe.loading import read_lineage, read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.checkpoints import (
    Checkpoint,
    Ledger,
    is_version_of,
    policy_version,
    sampled_step,
)
from ratchet.tasks.recording.recorded_rollouts import RecordedRollout, describe_end, find_rollout
from ratchet.tasks.recording.spans import end_spans, scored_names
from ratchet.tasks.settings.rollouts import Judge
from ratchet.tasks.storage.names import EXAMINER, JUDGE, parse_rollout
from ratchet.tasks.storage.run_folder import TRAINED_SPLITS, RunFolder


@dataclass(frozen=True)
class Rerun:
    """End of a rollout that was played again, beside the recorded one."""

    recorded: RecordedRollout
    end: str
    answered: int
    place: Path | None
    """The place of the recorded rollout, if it is kept."""

    def lines(self) -> dict[str, str]:
        """Say by label what was played, and how it has ended."""
        one = self.recorded
        answers = counted(len(one.calls), "call")
        same = "the same" if self.end == one.end else self.end
        played = f"{one.id}, attempt {one.attempt}, {self.answered} of {answers}"
        kept = {} if self.place is None else {"place": str(self.place)}
        return {"played": f"{played} answered from the record", "was": one.end, "now": same, **kept}


def debug_rollout(run: RunFolder, name: str, *, sample: bool, stop: bool) -> Rerun:
    """Play a rollout of a run again, with the recorded answers; nothing of the run changes.

    From the first request that differs, the run's model answers if `sample` is set. Without it the
    agent gets an error, and when it has ended, the difference is shown and UserError raised.
    `stop` opens pdb at the place of an error.
    """
    recorded = find_rollout(run, name)
    recipe = read_lineage(run, read_recipe(run, Recipe)).at(parse_rollout(name).step)
    assert isinstance(recipe, Recipe), "a fork is of the flow of its parent"
    replayed = _Replay.of(recipe, recorded)
    with _onward(run, replayed, sample) as (chat, onward):
        backends = [
            RecordedBackend(
                role,
                {call.id.number: call for call in recorded.calls if call.id.role == role},
                [call for call in recorded.refused if call.role == role],
                replayed.sampling.max_tokens,
                onward.get(role),
            )
            for role in (*replayed.roles, *(calls.role for calls in recipe.sent_calls()))
        ]
        end = _play(replayed, chat, backends, stop)
    if not sample and any(backend.difference for backend in backends):
        raise UserError(
            f"{name} was played up to the request above, which differs, and then ended by {end}; "
            "give --sample to have the run's model answer from there"
        )
    answered = sum(backend.recalled for backend in backends)
    return Rerun(recorded, end, answered, run.kept_place(name))


@dataclass(frozen=True)
class _Replay:
    """A recorded rollout, and the part of its recipe that plays it: the agent's, or the judge's."""

    recipe: Recipe
    recorded: RecordedRollout
    judge: Judge | None
    agent: str
    roles: Sequence[str]
    sampling: Sampling

    @classmethod
    def of(cls, recipe: Recipe, recorded: RecordedRollout) -> Self:
        split = parse_rollout(recorded.id).split
        examines = split.partition(".")[0] == EXAMINER
        judge = recipe.evaluation.judge if examines else recipe.judge if split == JUDGE else None
        sampling = (judge or recipe.rollouts).sampling()
        sampled = [call.sampling for call in recorded.calls if call.sampling is not None]
        if sampled:  # greedily, it may be
            sampling = replace(sampled[0], max_tokens=sampling.max_tokens)
        return cls(recipe, recorded, judge, *recipe.plays(judge), sampling)

    def end(self, outcome: Outcome, calls: Mapping[str, Sequence[int]]) -> str:
        """Say how the rollout has ended, as it would be recorded."""
        one = self.recorded
        if self.judge is not None and isinstance(outcome, Reward):
            shown = cast(Sequence[Mapping[str, str]], one.example["rollouts"])
            ids = (rollout["id"] for rollout in shown)
            calls = {**calls, **scored_names(ids, outcome)}
        end = RolloutEnd(outcome, 0.0, one.id, one.attempt, calls)
        judged = self.recipe.judges() != []  # a judge itself may abstain
        return describe_end(end_spans(end, datetime.now(UTC), judged=judged))


def _play(replayed: _Replay, chat: Chat, backends: Sequence[RecordedBackend], stop: bool) -> str:
    """Play a rollout at a door of its own; return its end."""
    seed, most_calls = replayed.recipe.seed, replayed.recipe.rollouts.max_calls
    sent = replayed.recipe.sent_calls()
    answers = {one.role: _always(one.answer) for one in backends}
    with TemporaryDirectory() as places, Door(chat, answers, seed, most_calls, sent=sent) as door:
        place = None if replayed.judge else replayed.recipe.place.of(Path(places))
        settings = PlaySettings(replayed.agent, replayed.roles, 1, 0.0, place)
        recorder, sampled = _OneRollout(replayed.recorded), SampledBy({}, replayed.sampling)
        batch = OpenBatch("debugged", recorder, sampled, settings)
        with door.opened(batch) as token:
            try:
                outcome, error = run_event_loop(play_alone(door.address, batch.name, token))
            except BdbQuit:
                outcome, error = None, None
            _show(error, backends)
            if error is not None and stop:
                post_mortem(error.__traceback__)
    if outcome is None:
        return "the debugger's quit"
    return replayed.end(outcome, {one.role: one.answered for one in backends})


def _show(error: Exception | None, backends: Sequence[RecordedBackend]) -> None:
    """Print an agent's error, and below it the requests that differ.

    An error is left out if a request was refused because it differs: it is the refusal's.
    """
    differing = [one for one in backends if one.difference]
    if error is not None and all(one.onward for one in differing):
        show("".join(traceback.format_exception(error)).rstrip("\n"), sys.stderr)
    for one in differing:
        show(f"{one.difference}", sys.stderr)


def _always(answer: Answer) -> Backend:
    return lambda example: answer


@contextmanager
def _onward(
    run: RunFolder, replayed: _Replay, sample: bool
) -> Iterator[tuple[Chat, Mapping[str, Answer]]]:
    """Yield the chat of a run and, if `sample`, who answers each role after its recorded calls."""
    recipe = replayed.recipe
    model = recipe.model
    if not sample:
        local = model.base.startswith(LOCAL)
        place = str(prepare_base(model.base)) if local else name_for_clients(model.base)
        yield Chat(load_tokenizer(place), model.renderer, thinking=model.thinking), {}
        return
    saved = {policy: _checkpoint(run, policy, replayed.recorded) for policy in recipe.policies()}
    ledger, earlier = Ledger(run.checkpoints(POLICY)), recipe.earlier(saved[POLICY].step)
    saved |= {who: ledger.at(step) for who, step in earlier.items()}
    with _open_service(run, recipe, [one.sampler for one in saved.values()]) as service:
        main = service.sampler(saved[POLICY].sampler)
        policies = open_checkpoints(recipe, run, service) | {
            name: Policy(service.sampler(one.sampler), policy_version(name, one.step))
            for name, one in saved.items()
        }
        tokenizer, context = service.tokenizer_of(main), service.context(model.base)
        chat = Chat(tokenizer, model.renderer, context, model.thinking)
        seed, backends = recipe.seed, create_backends(recipe.answerers, recipe.seed)
        backends = {POLICY: POLICY, **backends}
        if parse_rollout(replayed.recorded.id).split not in TRAINED_SPLITS:
            backends |= recipe.evaluation.roles
            seed = recipe.evaluation.drawn_by(seed)
        yield (
            chat,
            {
                role: PolicyBackend(chat, policies[who], replayed.sampling, seed).answer
                if isinstance(who, str)
                else who(replayed.recorded.example)
                for role, who in backends.items()
            },
        )


def _checkpoint(run: RunFolder, policy: str, recorded: RecordedRollout) -> Checkpoint:
    """Return the weights of a policy that sampled the last of its calls."""
    named = [call.policy_version for call in recorded.calls]
    versions = [version for version in named if is_version_of(policy, version)]
    step = sampled_step(versions[-1]) if versions else parse_rollout(recorded.id).step
    return Ledger(run.checkpoints(policy)).at(step)


@contextmanager
def _open_service(run: RunFolder, recipe: Recipe, samplers: Sequence[str]) -> Iterator[Service]:
    """Yield the service of a run; an engine works on copies of the weights, not on the run's."""
    base = recipe.model.base
    with TemporaryDirectory() as state:
        if needs_engine(base):
            engine = run.fetched(whole=True).engine
            own = [path for sampler in samplers for path in saved_files(engine, sampler)]
            for path in {*own, *carried_files(run)}:
                link_or_copy(path, Path(state) / path.relative_to(run.engine))
        with connect(base, Path(state), recipe.service.timeout_seconds) as service:
            yield service


class _OneRollout:
    """Recorder of a batch with one rollout that is played again; it records nothing."""

    def __init__(self, recorded: RecordedRollout) -> None:
        self._rollout = DueRollout(recorded.id, recorded.example, recorded.failures, recorded.calls)
        self._attempt = recorded.attempt

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        return self._attempt, [self._rollout]

    def begun(self, begun: Begun) -> None:
        pass

    def refused(self, call: RefusedCall) -> None:
        pass

    async def answered(self, completion: Completion) -> None:
        pass

    async def ended(self, end: RolloutEnd) -> None:
        pass
