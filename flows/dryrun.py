"""Play a handful of examples through everything but the update."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import flow
from pydantic import BaseModel

from ratchet.adapters.door.backends import create_backends
from ratchet.adapters.door.roles import roles_of_policies
from ratchet.adapters.door.stand_in import StandIn, StandInDoor, read_turns
from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.bases import find_context, open_tokenizer
from ratchet.flows.opening.checks import check_start
from ratchet.flows.opening.flow_runs import name_of_run
from ratchet.flows.opening.parts import StepPart, judges, open_readers
from ratchet.flows.opening.rollouts import (
    RolloutRunner,
    open_rollouts,
    open_told_rollouts,
    training_groups,
)
from ratchet.flows.opening.run import open_run
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.train import make_datums
from ratchet.tasks.evaluations import score_spans
from ratchet.tasks.examples.shards import ShardSize, draw_shard
from ratchet.tasks.recording.transcripts import read_transcripts
from ratchet.tasks.reports.dryruns import LearnedFrom, Played, describe_dryrun, find_fault
from ratchet.tasks.settings.run import Model
from ratchet.tasks.storage.manifest import bind_run
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.tracking.prefect_pages import publish_tag


class DryRun(BaseModel, frozen=True):
    """Numbers of a dry run's rollouts, their rewards or errors by name, and its report as text.

    `untrained` says why training would train nothing, whatever the model says.
    """

    rollouts: int
    failed: int
    rewards: Mapping[str, float]
    errors: Mapping[str, str]
    untrained: str
    report: str

    def check(self) -> None:
        """Raise UserError if rollouts failed, or if training would train nothing."""
        if self.failed:
            raise UserError(f"{self.failed} of {self.rollouts} rollouts failed; see above")
        if self.untrained:
            raise UserError(f"training would train nothing: {self.untrained}")


@dataclass(frozen=True)
class _Open:
    """An open dry run: its folder, its rollouts, and what is computed of them."""

    folder: RunFolder
    chat: Chat
    runner: RolloutRunner
    parts: Sequence[StepPart]
    stand_in: StandIn | None = None


@flow(name="dryrun", flow_run_name=name_of_run)
def dryrun(recipe: Recipe, run: str, said: Path | None = None) -> DryRun:
    """Play the first step's examples, in two batches, with the untrained model, as far as datums.

    Args:
        recipe: How many examples, and how often each is played, is its `rollouts`.
        run: The name of the folder that is left, such as dryruns/hello.
        said: A file of what is said in place of the model, which then is not needed.
    """
    recipe = check_start(recipe, folder_of(run))
    with _played_by_model(recipe, run) if said is None else _told(recipe, run, said) as opened:
        at, source = opened.folder, recipe.train_split()
        size, path = ShardSize(recipe.rollouts.groups, batches=2), at.shard(shard_name("train", 0))
        shard = draw_shard(path, source, recipe.seed, 0, size)
        groups = training_groups(recipe)
        runner = replace(opened.runner, check=lambda _: None)  # what fails is shown
        spans = runner.wait_for(runner.submit_shard(shard, 0, groups))
        learned = _learn(opened, recipe, spans)
    score, ends = score_spans(spans, shard), read_transcripts(spans)
    faults = [find_fault(of, recipe.credit(), ends) for of in learned.values()]
    publish_tag("dryrun")
    return DryRun(
        rollouts=score.rollouts,
        failed=score.failed,
        rewards={one["rollout_id"]: one["reward"] for one in ends if one["reward"] is not None},
        errors={one["rollout_id"]: one["error"] for one in ends if one["error"] is not None},
        untrained="; ".join(faults) if all(faults) else "",
        report=describe_dryrun(spans, learned, recipe.credit(), _describe_model(opened, recipe)),
    )


def _learn(opened: _Open, recipe: Recipe, spans: Sequence[Path]) -> dict[str, LearnedFrom]:
    """Build what each policy would learn from, by its name."""
    at, learned = opened.folder, dict[str, LearnedFrom]()
    for name in recipe.policies():
        files = make_datums(at, recipe, opened.parts, name, 0, spans)
        learned[name] = LearnedFrom(at.trajectories(name, 0), at.rewards(name, 0), files.datums)
    return learned


def _describe_model(opened: _Open, recipe: Recipe) -> Played:
    chat, base = opened.chat, recipe.model.base
    told = None if opened.stand_in is None else opened.stand_in.report()
    tiny, noted = base == Model().base, [*chat.told.values()]
    return Played(base, chat.context, chat.read_context, told, tiny, noted)


@contextmanager
def _played_by_model(recipe: Recipe, run: str) -> Iterator[_Open]:
    with (
        open_run(recipe, run) as opened,
        open_rollouts(opened, recipe) as runners,
        open_readers(recipe, opened.folder, opened.service) as readers,
    ):
        parts = (*judges(opened.folder, recipe, runners.judging), *readers)
        yield _Open(opened.folder, runners.chat, runners.evaluation, parts)


@contextmanager
def _told(recipe: Recipe, run: str, said: Path) -> Iterator[_Open]:
    """Open a dry run that a file plays: of the model, only the tokenizer and the config are read.

    Other models read none of its tokens.
    """
    stand_in = StandIn(read_turns(said, roles_of_policies(recipe.answerers)))
    model, seed, most = recipe.model, recipe.seed, recipe.rollouts.max_calls
    tokenizer = open_tokenizer(model.base)
    chat = Chat(tokenizer, model.renderer, find_context(tokenizer), model.thinking)
    backends, sent = create_backends(recipe.answerers, seed), recipe.sent_calls()
    door = StandInDoor(chat, backends, seed, most, stand_in, sent)
    values = recipe.model_dump(mode="json")
    with (
        bind_run(run, values, recipe.fingerprint()) as folder,
        open_told_rollouts(folder, recipe, door) as runners,
    ):
        parts = judges(folder, recipe, runners.judging)
        yield _Open(folder, chat, runners.evaluation, parts, stand_in)
