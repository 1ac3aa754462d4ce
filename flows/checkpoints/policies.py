"""The policies of a run: each with its roles, its weights, and the checkpoints that are kept."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from threading import Lock

from ratchet.adapters.calls import POLICY, Policy
from ratchet.adapters.errors import listed
from ratchet.adapters.tinker.live_policy import LoraSpec
from ratchet.adapters.tinker.service import Service, ServiceBroken, ServiceFailed, ServiceRefused
from ratchet.flows.checkpoints.binding import check_state, find_start
from ratchet.flows.recipe.loading import read_recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.flows.recipe.service_needs import may_offer, tolerance_of
from ratchet.tasks.checkpoints import Checkpoint, Ledger, policy_version
from ratchet.tasks.comparison.promotions import read_promotions
from ratchet.tasks.recovery.recorded_steps import RecordedSteps, TrainedPolicy
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.storage.files import Damaged
from ratchet.tasks.storage.manifest import FORK, ByStep, Manifest, generations, read_manifest
from ratchet.tasks.storage.run_folder import RunError, RunFolder, all_runs
from ratchet.tasks.updates import PolicyUpdater

log = logging.getLogger(__name__)

SPARE_CHECKPOINTS = 2
"""Checkpoints to keep beyond the lag: the newest, and the one before, from which a step resumes."""
KEPT_SAMPLERS = 16
"""Checkpoints whose samplers are kept for batches to come."""


@dataclass(frozen=True)
class RunPolicy:
    """A policy of a run. Every policy has checkpoint k when step k - 1 is done."""

    trained: TrainedPolicy
    updater: PolicyUpdater

    @property
    def name(self) -> str:
        return self.trained.name

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose calls train the policy."""
        return self.trained.roles

    @property
    def ledger(self) -> Ledger:
        return self.updater.ledger

    def at(self, step: int) -> Policy:
        """Return the policy after `step` updates."""
        sampler = self.updater.sampler(step)
        return Policy(sampler, policy_version(self.name, step))


@dataclass(frozen=True)
class Retention:
    """Rule by which a run deletes checkpoints: it keeps the newest, and what something needs."""

    run: RunFolder
    recipe: RunRecipe
    newest: int
    others: Sequence[Manifest] = ()
    """Manifests of all runs, if they are read already."""

    def unneeded(self, ledger: Ledger) -> list[Checkpoint]:
        """List a policy's checkpoints that nothing needs.

        There are none before there is a new training state to rebuild from.
        """
        newest = ledger.find(ledger.last_step())
        if newest is None or newest.state is None:
            return []
        needed = self._needed(ledger)
        return [one for one in ledger.checkpoints() if one.step not in needed]

    def delete_unneeded(self, ledger: Ledger, delete: Callable[[str], object]) -> None:
        """Delete a policy's checkpoints that nothing needs, here and by a service's `delete`.

        What the service fails to delete, or a killed process has not deleted, is deleted by the
        next call.
        """
        try:
            for step in sorted({one.step for one in self.unneeded(ledger)}):
                ledger.delete(step)
        except Damaged as error:
            log.warning("%s. Checkpoints that nothing needs are kept", error)
            return
        for step, saved in ledger.condemned().items():
            try:
                for path in {path for one in saved for path in one.paths}:
                    delete(path)
            except (ServiceFailed, ServiceRefused) as error:
                log.warning("%s. Checkpoint %d is deleted with the next ones", error, step)
                return
            ledger.forget(step)

    def _needed(self, ledger: Ledger) -> set[int]:
        last = ledger.last_step()
        oldest = max(last - self.newest + 1, 0)
        others = self.others or all_manifests()
        parents = (parent for other in others for parent in _forked(other))
        rebuilt = {oldest, *(one["step"] for one in parents if one["run"] == self.run.name)}
        needed = {0, *range(oldest, last + 1), *rebuilt, *_named(self.run, others)}
        if (held_out := read_facts(self.run).held_out).by_step:
            needed.add(held_out.best)
        for step in range(oldest, self.recipe.steps + 1):
            needed.update(self.recipe.earlier(step).values())  # opponents of steps to come
        return needed | {saved.step for step in rebuilt for saved in ledger.states(step)[:1]}


def all_manifests() -> list[Manifest]:
    """Read the manifests of all runs, but those of another format."""
    found: list[Manifest] = []
    for run in all_runs():
        with suppress(RunError):
            found.append(read_manifest(run))
    return found


def spare_rule(run: RunFolder, others: Sequence[Manifest]) -> Retention:
    """Return the rule by which all but the best and the newest checkpoints of a run may go.

    A run that has stopped goes on from as many as it has lag.
    """
    recipe = read_recipe(run, RunRecipe)
    stopped = read_facts(run).done < run.steps_of(recipe.steps)
    return Retention(run, recipe, recipe.lag + SPARE_CHECKPOINTS if stopped else 1, others)


def _named(run: RunFolder, others: Sequence[Manifest]) -> Iterator[int]:
    """Yield the steps of a run that have a name, are another run's start, or are its parent's."""
    manifest = read_manifest(run)
    for promotion in read_promotions().values():
        if (promotion.run, promotion.created) == (run.name, manifest["created"]):
            yield promotion.step
    for other in others:
        for bound in other.get("bound", {}).values():
            if (bound["run"], bound["created"]) == (run.name, manifest["created"]):
                yield bound["step"]
    for parent in _forked(manifest):
        yield from range(parent["step"] + 1)


def _forked(manifest: Manifest) -> list[Manifest]:
    """List what is told of the run that a run is forked from, of the run before that, and on."""
    return [parent for parent in generations(manifest)[1:] if parent["how"] == FORK]


class RunPolicies:
    """All policies of a run, the main one first."""

    def __init__(self, policies: Sequence[RunPolicy], retention: Retention | None) -> None:
        self._policies, self._retention = policies, retention
        self._opening, self._opener = Lock(), ThreadPoolExecutor(1)
        self._sampled: dict[int, Mapping[str, Policy]] = {}

    def __iter__(self) -> Iterator[RunPolicy]:
        return iter(self._policies)

    @property
    def main(self) -> RunPolicy:
        return self._policies[0]

    def last_step(self) -> int:
        """Return the step of the newest checkpoint that every policy has."""
        return min(policy.ledger.last_step() for policy in self)

    def at(self, step: int) -> Mapping[str, Policy]:
        """Return every policy after `step` updates, by name; batches share samplers."""
        with self._opening:
            if step not in self._sampled:
                self._sampled[step] = {policy.name: policy.at(step) for policy in self}
            for old in sorted(self._sampled.keys() - {step})[: -KEPT_SAMPLERS + 1]:
                del self._sampled[old]
            return self._sampled[step]

    def open_soon(self, step: int) -> None:
        """Open the samplers after `step` updates meanwhile; `at` raises what refuses them."""
        self._opener.submit(copy_context().run, self.at, step)

    def delete_unneeded(self, service: Service) -> None:
        """Delete the checkpoints that nothing needs any more, if the run does not keep all."""
        if self._retention is not None:
            for policy in self:
                self._retention.delete_unneeded(policy.ledger, service.delete)

    def earlier(self, steps: Mapping[str, int]) -> Mapping[str, Policy]:
        """Map each other name to the main policy after its number of updates."""
        return {
            who: Policy(self.at(step)[POLICY].sampler, policy_version(who, step))
            for who, step in steps.items()
        }


def open_policies(
    recipe: RunRecipe,
    recipes: ByStep[RunRecipe],
    folder: RunFolder,
    service: Service,
    *,
    on_policy: bool,
) -> RunPolicies:
    """Return the policies of a run, each with its checkpoint 0.

    `recipes` are the recipes that have made the run's steps.
    """
    delete_unnoted(folder, service)
    policies = []
    for name in recipe.policies():
        updater = policy_updater(recipe, recipes, folder, service, name, on_policy=on_policy)
        if not updater.ledger.checkpoints():
            check_state(recipe.model, service)
        updater.make_initial()
        policies.append(RunPolicy(updater.recorded.policy, updater))
    return RunPolicies(policies, _retention(recipe, folder))


def delete_unnoted(run: RunFolder, service: Service) -> None:
    """Delete what an earlier owner of a run saved, but was killed before it noted that."""
    ledgers = [Ledger(run.checkpoints(name), run.ownership) for name in run.policies()]
    names = set[str]().union(*(ledger.unnoted() for ledger in ledgers))
    if not names:
        return
    noted = {path for own in ledgers for one in own.checkpoints() for path in one.paths}
    try:
        for path in service.saved() - noted:
            if path.rpartition("/")[2] in names:
                service.delete(path)
    except (ServiceBroken, ServiceFailed, ServiceRefused) as error:
        log.warning("%s. If a killed process saved %s, they stay there", error, listed(names))


def policy_updater(
    recipe: RunRecipe,
    recipes: ByStep[RunRecipe],
    folder: RunFolder,
    service: Service,
    name: str,
    *,
    on_policy: bool,
) -> PolicyUpdater:
    """Return the owner of a policy's weights, which makes lost weights again."""
    checkpoints, keeps = recipe.checkpoints, may_offer(folder, "optimizer")
    return PolicyUpdater(
        service,
        Ledger(folder.checkpoints(name), folder.ownership),
        recorded_steps(recipe, recipes, folder, name),
        lambda step: keeps and checkpoints.due(step, folder.steps_of(recipe.steps)),
        checkpoints.ttl_seconds,
        tolerance_of(recipe, folder) if on_policy else None,
    )


def recorded_steps(
    recipe: RunRecipe, recipes: ByStep[RunRecipe], folder: RunFolder, name: str
) -> RecordedSteps:
    """Return the recorded steps of a policy; `recipes` have made the run's steps."""
    methods = recipes.make(RunRecipe, lambda made: made.update_method())
    start = find_start(recipe, folder, name)
    trained = TrainedPolicy(name, recipe.policies()[name], _lora(recipe, name), start)
    return RecordedSteps(folder, trained, methods, recipe.source(folder, trained, recipes))


def lora_seed(run_seed: int, name: str) -> int:
    """Seed a policy's LoRA: by the run's seed and, but for the main policy, its name."""
    if name == POLICY:
        return run_seed
    return int(hashlib.sha256(f"{run_seed}/{name}".encode()).hexdigest()[:8], 16) >> 1


def _lora(recipe: RunRecipe, name: str) -> LoraSpec:
    model = recipe.model
    return LoraSpec(
        model.base,
        model.lora_rank,
        lora_seed(recipe.seed, name),
        train_attn=model.train_attention,
        train_mlp=model.train_mlp,
        train_unembed=model.train_unembedding,
    )


def _retention(recipe: RunRecipe, folder: RunFolder) -> Retention | None:
    """Return the rule of the checkpoints that a run keeps; None if it keeps all."""
    keep = recipe.checkpoints.keep
    if keep is None:
        return None
    return Retention(folder, recipe, max(keep, recipe.lag + SPARE_CHECKPOINTS))
