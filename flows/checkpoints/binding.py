"""Checkpoints of runs by their names: where a run's weights start, its reference, its teachers.

Checkpoints of other runs are bound when the run is made: its manifest describes them, with their
addresses, and its engine has their weights. The run does not need the other runs afterwards.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ratchet.adapters.calls import POLICY, Policy
from ratchet.adapters.door.roles import checkpoint_of
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.bases import name_for_clients
from ratchet.adapters.tinker.engines import damaged_weights, needs_engine, saved_files
from ratchet.durable.files import link_or_copy, remove
from ratchet.flows.checkpoints.names import CheckpointName
from ratchet.flows.recipe.loading import read_lineage, read_recipe, training_command
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.settings.algorithm import BASE, names_checkpoint
from ratchet.tasks.settings.run import Model
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

if TYPE_CHECKING:  # they import the SDK or Prefect, which take seconds
    from ratchet.adapters.clients.scoring_server import ScoringServer
    from ratchet.adapters.tinker.service import PatientSampler, Service
    from ratchet.tasks.recovery.recorded_steps import Start
    from ratchet.tasks.scoring import Reads, References

START_KEY = "model.start"


class SavedPolicy(BaseModel, frozen=True):
    """Addresses of a policy's weights and, if it was saved, its training state."""

    sampler: str
    state: str | None
    optimizer_steps: int | None = None
    """Steps that the optimizer in the state has taken; None if the run starts without it."""


class BoundCheckpoint(BaseModel, frozen=True):
    """A checkpoint of another run, as it was when a run was bound to it.

    `created` tells the other run from a later run of the same name. `held_out` is the checkpoint's
    reward or loss, if it was scored.
    """

    run: str
    step: int
    created: str
    model: dict[str, Any]
    held_out: float | None
    policies: dict[str, SavedPolicy]

    def of(self, policy: str) -> SavedPolicy:
        """Return the policy of this name, else the main policy."""
        return self.policies.get(policy, self.policies[POLICY])


def bind_checkpoints(recipe: RunRecipe, bound: Mapping[str, Any]) -> dict[str, Any]:
    """Describe each checkpoint of another run that a recipe names, as a manifest has it.

    Checkpoints in `bound` keep their description. UserError if one does not exist, or does not suit
    the recipe.
    """
    model = recipe.model
    if model.names_state() and needs_engine(model.base):
        raise UserError(
            f"{START_KEY} {model.start} is a path of a Tinker service, and the model is trained on "
            "an engine of the run's own; give RUN@STEP, or set TINKER_BASE_URL or TINKER_API_KEY"
        )
    return {
        name: bound.get(name) or _find(key, name, recipe).model_dump()
        for name, key in recipe.named_checkpoints().items()
    }


def refuse_itself(recipe: RunRecipe) -> None:
    """Refuse (UserError) a teacher that the policy starts from, unless it reads more."""
    model, teachers = recipe.model, recipe.teachers()
    start = {model.start} if model.start else {BASE, model.base}
    for teacher in start.intersection(teachers.models.values()) if teachers.reads is None else ():
        raise UserError(
            f"{teachers.key} {teacher} is the policy itself, which starts from it, and teaches it "
            "nothing; give a checkpoint of another run, RUN@STEP, another model, or "
            f"{teachers.key.rpartition('.')[0]}.reads, what it reads and the policy does not; to "
            "stay near the start, give algorithm.kl.coefficient of flow train"
        )


def carry_weights(
    recipe: RunRecipe,
    folder: RunFolder,
    make_whole: Callable[[Mapping[str, BoundCheckpoint]], object],
) -> None:
    """Put the weights to which a run is bound into its engine, before the engine starts.

    Damaged weights are put there anew, after their own run has made them again.
    """
    if not needs_engine(recipe.model.base):
        return
    engine = folder.engine
    for name, key in recipe.named_checkpoints().items():
        bound = read_bound(folder, name)
        parent = folder_of(bound.run).fetched(whole=True)
        known = parent.exists() and read_manifest(parent)["created"] == bound.created
        for address in _addresses(bound):
            lost = damaged_weights(engine, address)
            if not (lost and known):
                continue
            make_whole({name: bound})
            for path in lost:
                remove(path)
            for path in saved_files(parent.engine, address):
                target = engine / path.relative_to(parent.engine)
                if not is_written(target):
                    link_or_copy(path, target)
        _refuse_gone(key, name, bound, engine)
        if left := [p for address in _addresses(bound) for p in damaged_weights(engine, address)]:
            raise UserError(
                f"{key} {name} is damaged: {left[0]} is not as it was saved, and {parent.path} "
                "cannot put it back; restore it from a copy, or train a new run"
            )


def carried_files(folder: RunFolder) -> list[Path]:
    """List the files of other runs' weights in the engine of a run."""
    return [
        path
        for name in read_manifest(folder).get("bound", {})
        for address in _addresses(read_bound(folder, name))
        for path in saved_files(folder.fetched(whole=True).engine, address)
    ]


def read_bound(folder: RunFolder, name: str) -> BoundCheckpoint:
    """Read how a run's manifest describes a checkpoint to which the run is bound."""
    return BoundCheckpoint.model_validate(read_manifest(folder)["bound"][name])


def find_start(recipe: RunRecipe, folder: RunFolder, policy: str) -> "Start | None":
    """Return the training state from which a policy of a run starts; None for untrained weights."""
    from ratchet.tasks.recovery.recorded_steps import Start

    model = recipe.model
    if model.start is None:
        return None
    if model.names_state():
        return Start(model.start, model.start_optimizer)
    saved = read_bound(folder, model.start).of(policy)
    assert saved.state is not None, "a start is bound with its state"
    return Start(saved.state, model.start_optimizer, saved.optimizer_steps)


def check_state(model: Model, service: "Service") -> None:
    """Refuse (UserError) a start at a service's path, if the weights have another shape."""
    if model.start is None or not model.names_state():
        return
    found = service.describe_weights(model.start)
    asked = {
        "base_model": name_for_clients(model.base),
        "lora_rank": model.lora_rank,
        "train_attn": model.train_attention,
        "train_mlp": model.train_mlp,
        "train_unembed": model.train_unembedding,
    }
    for key, value in asked.items():
        if (was := getattr(found, key)) not in (None, value):
            raise UserError(
                f"{START_KEY} {model.start} has {key} {was}, and the recipe asks for {value}; give "
                "the same"
            )


@contextmanager
def open_teacher(
    recipe: RunRecipe, folder: RunFolder, service: "Service"
) -> Iterator["PatientSampler | ScoringServer"]:
    teachers = recipe.teachers()
    [model] = teachers.models.values()
    with ExitStack() as opened:
        yield _open_teachers(opened, recipe, folder, service)[model]


@contextmanager
def open_references(
    recipe: Recipe, folder: RunFolder, service: "Service"
) -> Iterator[Mapping[str, "References"]]:
    """Yield the policies that score a run's tokens, by source: the reference, the teachers."""
    from ratchet.tasks.scoring import References  # imports Prefect

    algorithm = recipe.algorithm
    teacher, named = algorithm.teacher, algorithm.teacher.named()
    asked: dict[str, References] = {}
    with ExitStack() as opened:
        if algorithm.kl.coefficient:
            key, name = "algorithm.kl.reference", algorithm.kl.reference
            reference = _open(key, name, recipe.model.base, folder, service)
            asked["references"] = References({name: reference})
        if named:
            models = _open_teachers(opened, recipe, folder, service)
            teachers = {name: models[model] for name, model in named.items()}
            reads = _read_by(teacher.reads, recipe.model, service)
            asked["teachers"] = References(teachers, teacher.by, reads)
        yield asked


def open_checkpoints(recipe: Recipe, folder: RunFolder, service: "Service") -> dict[str, Policy]:
    """Open the untrained policies that answer roles, by the recipe's names for them."""
    opened: dict[str, Policy] = {}
    for key, who in recipe.answering().items():
        if (name := checkpoint_of(who)) is not None:
            sampler = _open(key, name, recipe.model.base, folder, service)
            opened[who] = Policy(sampler, who)
    return opened


def _read_by(text: str | None, model: Model, service: "Service") -> "Reads | None":
    from ratchet.adapters.rendering.chat import Chat  # imports the renderers
    from ratchet.tasks.scoring import Reads

    if text is None:
        return None
    tokenizer = service.tokenizer_of(service.base_sampler(model.base))
    return Reads(text, Chat(tokenizer, model.renderer, thinking=model.thinking))


def _open_teachers(
    opened: ExitStack, recipe: RunRecipe, folder: RunFolder, service: "Service"
) -> Mapping[str, "PatientSampler | ScoringServer"]:
    """Open the teachers of a recipe, by their models; those elsewhere are closed with `opened`."""
    teachers, base = recipe.teachers(), recipe.model.base
    models = {*teachers.models.values()}
    elsewhere = sorted(model for model in models if "://" in model)
    found = {
        model: _open(teachers.key, model, base, folder, service)
        for model in models.difference(elsewhere)
    }
    return {**found, **_open_elsewhere(opened, recipe, elsewhere, service)} if elsewhere else found


def _open_elsewhere(
    opened: ExitStack, recipe: RunRecipe, models: Sequence[str], service: "Service"
) -> dict[str, "PatientSampler | ScoringServer"]:
    """Open the models of one other service or server; UserError for other tokens."""
    from ratchet.adapters.clients.scoring_server import TEACHER_KEY, ScoringServer, speaks_openai
    from ratchet.adapters.tinker.service import open_session, server_at

    key, base, patience = recipe.teachers().key, recipe.model.base, recipe.service.timeout_seconds
    url, own = models[0].partition("#")[0], service.tokenizer_of(service.base_sampler(base))
    found: dict[str, PatientSampler | ScoringServer] = {}
    if speaks_openai(url):
        for model in models:
            found[model] = scoring = ScoringServer(model, patience)
            if not scoring.shares(own):
                raise _other_tokens(key, model, base)
        return found
    server = opened.enter_context(server_at(url, os.environ.get(TEACHER_KEY) or "none"))
    there = opened.enter_context(open_session(server, patience))
    for model in models:
        found[model] = sampler = there.base_sampler(model.partition("#")[2])
        _check_tokens(key, model, base, (own, there.tokenizer_of(sampler)))
    return found


def _open(
    key: str, name: str, base: str, folder: RunFolder, service: "Service"
) -> "PatientSampler":
    """Open a policy of the run's own service; UserError for other tokens."""
    if name == BASE:
        return service.base_sampler(base)
    if names_checkpoint(name):
        opened = service.sampler(read_bound(folder, name).of(POLICY).sampler)
    else:
        opened = service.base_sampler(name)
    own = service.tokenizer_of(service.base_sampler(base))
    _check_tokens(key, name, base, (own, service.tokenizer_of(opened)))
    return opened


def _check_tokens(key: str, name: str, base: str, tokenizers: tuple[object, object]) -> None:
    from ratchet.adapters.rendering.chat import fingerprint  # imports the renderers

    own, other = map(fingerprint, tokenizers)
    if own != other:
        raise _other_tokens(key, name, base)


def _other_tokens(key: str, name: str, base: str) -> UserError:
    return UserError(f"{key} {name} has other tokens than {base}; give a model of the same family")


def _find(key: str, name: str, recipe: RunRecipe) -> BoundCheckpoint:
    named = CheckpointName.parse(name)
    only = named.policy
    if not (parent := named.folder).exists():
        raise UserError(
            f"{key} {name} names no run ({parent.path} is not there); "
            f"`{training_command(named.run)}` makes it; or give RUN@STEP of a run that `ratchet "
            "runs` lists"
            f"{'' if key == START_KEY else ', base, or a model by its whole name'}"
        )
    trained = read_recipe(parent)
    base = recipe.model.base
    if trained.model.base != base and (key == START_KEY or needs_engine(base)):
        raise UserError(
            f"{key} {name} is a checkpoint of {trained.model.base}, and the policy is {base}; give "
            "a checkpoint of that model"
        )
    named.check_policy(trained.policies(), f"{key} {name}")
    step, is_start = named.saved_step, name == recipe.model.start
    if is_start:
        _check_start(name, step, parent, trained.model, recipe.model)
    counted, policies = is_start and recipe.model.start_optimizer, dict[str, SavedPolicy]()
    for policy in [only] if only else trained.policies():
        saved = Ledger(parent.checkpoints(policy)).at(step)
        policies[POLICY if only else policy] = SavedPolicy(
            sampler=saved.sampler,
            state=saved.state if is_start else None,
            optimizer_steps=_optimizer_steps(trained, parent, policy, step) if counted else None,
        )
    found = BoundCheckpoint(
        run=named.run,
        step=step,
        created=read_manifest(parent)["created"],
        model=trained.model.model_dump(mode="json"),
        held_out=read_facts(parent).held_out.by_step.get(step),
        policies=policies,
    )
    if needs_engine(base):
        _refuse_gone(key, name, found, parent.fetched(whole=True).engine)
    return found


def _refuse_gone(key: str, name: str, bound: BoundCheckpoint, engine: Path) -> None:
    for address in _addresses(bound):
        if not saved_files(engine, address):
            raise UserError(
                f"{key} {name} is gone: {folder_of(bound.run).path} has no weights {address} any "
                "more; put them back, or train a new run"
            )


def _check_start(name: str, step: int, parent: RunFolder, trained: Model, model: Model) -> None:
    """Refuse a start of another shape, without a training state, or with another renderer."""
    for difference in model.differences(trained):
        raise UserError(f"{START_KEY} {name} was trained with {difference}; give the same")
    ledger = Ledger(parent.checkpoints(POLICY))
    if ledger.at(step).state is None:
        having = sorted({saved.step for saved in ledger.checkpoints() if saved.state})
        raise UserError(
            f"{START_KEY} {name}: checkpoint {step} was saved without its training state; those of "
            f"{parent.name} with one are {', '.join(map(str, having))}"
        )


def _optimizer_steps(recipe: RunRecipe, parent: RunFolder, policy: str, step: int) -> int | None:
    from ratchet.tasks.recovery.recorded_steps import count_optimizer_steps  # imports the SDK

    recipes, start = read_lineage(parent, recipe), find_start(recipe, parent, policy)
    methods = recipes.make(RunRecipe, lambda made: made.update_method())
    return count_optimizer_steps(parent, policy, start, methods, step)


def _addresses(bound: BoundCheckpoint) -> Iterator[str]:
    for saved in bound.policies.values():
        yield saved.sampler
        if saved.state is not None:
            yield saved.state
