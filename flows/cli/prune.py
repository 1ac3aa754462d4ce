"""The command that names the runs or checkpoints which nobody needs, and removes them if told."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import show
from ratchet.adapters.tinker.engines import files_of, needs_engine, service_url
from ratchet.flows.checkpoints.serving import connect_to
from ratchet.flows.server.prefect_startup import check_prefect, start_server
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.comparison.promotions import read_promotions
from ratchet.tasks.reports.facts import RunFacts
from ratchet.tasks.storage.files import is_written, read_json
from ratchet.tasks.storage.manifest import ancestors, recipe_of
from ratchet.tasks.storage.owners import read_openings
from ratchet.tasks.storage.plan_record import all_plans, child_runs
from ratchet.tasks.storage.run_folder import (
    RunError,
    RunFolder,
    all_runs,
    folder_of,
    remove_leftovers,
)

if TYPE_CHECKING:
    from ratchet.flows.checkpoints.policies import Retention


def prune(
    older: Annotated[
        int | None, typer.Option(min=0, help="Only runs that were begun so many days ago.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only runs that have stopped before their last step.")
    ] = False,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="No runs, but their checkpoints that nothing needs."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them; without it they are only named.")
    ] = False,
) -> None:
    if older is None and not failed and not checkpoints:
        raise UserError(
            "no rule chooses what to remove; give --older DAYS, --failed, --checkpoints, or several"
        )
    before = datetime.now(UTC) - timedelta(days=older or 0)
    units = find_units()
    chosen = [one for one in units if one.begun < before and (one.has_stopped or not failed)]
    many, size = (_spare_checkpoints if checkpoints else _remove_runs)(units, chosen, yes=yes)
    said = "removed" if yes else "to be removed; --yes removes them"
    show(f"{counted(many, 'checkpoint' if checkpoints else 'run')}, {size / 1e6:,.1f} MB: {said}")
    objects, size = remove_leftovers() if yes else (0, 0)
    if objects:
        show(f"{counted(objects, 'object')} of the store, {size / 1e6:,.1f} MB: removed")


def _remove_runs(
    units: Sequence["Bundle"], chosen: Sequence["Bundle"], *, yes: bool
) -> tuple[int, int]:
    """Name runs, and remove those that need not stay if it is `yes`; count them and their bytes."""
    kept = find_kept(units, chosen)
    removed = [one for one in chosen if one.name not in kept]
    for one in chosen:
        why = f"kept, {kept[one.name]}" if one.name in kept else f"{one.size / 1e6:,.1f} MB"
        show(f"{one.name}: {why}")
    total = sum(one.size for one in removed)
    if yes and removed:
        from ratchet.flows.server.deployed_runs import delete_flow_runs  # imports Prefect

        check_prefect()
        with start_server() as served, served():
            for one in removed:
                opened = [at for run in one.runs for at in read_openings(run.owners)]
                delete_flow_runs([run.name for run in one.runs], opened)
                for run in one.runs:
                    _delete(run)
    return len(removed), total


def _delete(run: RunFolder) -> None:
    """Delete a run, first what its service has of it, but what a fork shares with its parents."""
    if not run.engine_files() and (mine := _saved(run)):
        shared = {path for name in ancestors(run) for path in _saved(folder_of(name))}
        with _deleting(run) as delete:
            for path in sorted(mine - shared):
                delete(path)
    run.delete()


def _spare_checkpoints(
    units: Sequence["Bundle"], chosen: Sequence["Bundle"], *, yes: bool
) -> tuple[int, int]:
    """Name checkpoints that nothing needs, and delete them if it is `yes`; count them and bytes."""
    from ratchet.flows.checkpoints.policies import all_manifests, spare_rule  # imports the SDK

    manifests, many, total = all_manifests() if units else [], 0, 0
    for run in (run for one in chosen for run in one.trained):
        try:
            rule = spare_rule(run, manifests)
            spared = [one for own in _ledgers(run) for one in rule.unneeded(own)]
            _check_free(run)
        except UserError as error:
            show(f"{run.name}: kept, {error}")
            continue
        if spared:
            files, paths = run.engine_files(), {path for one in spared for path in one.paths}
            size = sum(files[name] for path in paths for name in files_of(files, path))
            named = ", ".join(map(str, sorted({one.step for one in spared})))
            show(f"{run.name}: checkpoints {named}, {size / 1e6:,.1f} MB")
            many, total = many + len(spared), total + size
        if yes and (spared or any(own.condemned() for own in _ledgers(run))):
            _delete_spared(rule)
    return many, total


def _delete_spared(rule: "Retention") -> None:
    """Delete the checkpoints of a run that a rule does not keep."""
    with rule.run.locked(), rule.run.stored(whole=False) as put:
        rule.run.refuse_elsewhere()
        owned = rule.run.take_over()
        put()
        with _deleting(owned) as delete:
            for name in owned.policies():
                rule.delete_unneeded(Ledger(owned.checkpoints(name), owned.ownership), delete)


@contextmanager
def _deleting(run: RunFolder) -> Iterator[Callable[[str], object]]:
    """Yield what deletes weights by their address: in a run's engine, or on its service."""
    if files := run.engine_files():
        yield lambda address: run.remove_files(files_of(files, address))
        return
    with connect_to(recipe_of(run)["model"]["base"], run.engine) as service:
        yield service.delete


def _saved(run: RunFolder) -> set[str]:
    """Return the addresses of all weights that a run has saved and not deleted."""
    kept = [[*own.checkpoints(), *chain(*own.condemned().values())] for own in _ledgers(run)]
    return {path for one in chain(*kept) for path in one.paths}


def _ledgers(run: RunFolder) -> list[Ledger]:
    return [Ledger(run.checkpoints(name)) for name in run.policies()]


def _check_free(run: RunFolder) -> None:
    """Refuse (UserError) to delete from a run that is open, or whose weights are out of reach."""
    if run.is_open():
        raise RunError(f"{run.name} is open")
    run.refuse_elsewhere()
    if run.engine_files() or not _saved(run):
        return
    at = read_json(run.service)["url"] if is_written(run.service) else "a service"
    if at != service_url() or needs_engine(recipe_of(run)["model"]["base"]):
        raise RunError(
            f"{run.name} has checkpoints on {at}, which the environment does not name; set "
            "TINKER_BASE_URL or TINKER_API_KEY"
        )


@dataclass(frozen=True)
class Bundle:
    """Runs that are removed together: one, or all of stages or of a sweep, and their record."""

    runs: Sequence[RunFolder]

    @property
    def name(self) -> str:
        return self.runs[-1].name

    @cached_property
    def trained(self) -> list[RunFolder]:
        """The runs that have a manifest, which a record of several runs has not."""
        return [run for run in self.runs if run.exists()]

    @cached_property
    def begun(self) -> datetime:
        created = [read_json(run.manifest)["created"] for run in self.trained]
        return max(map(datetime.fromisoformat, created), default=datetime.now(UTC))

    @property
    def has_stopped(self) -> bool:
        """True if one of its runs has not all its steps."""
        return any(facts.done < facts.steps for facts in map(RunFacts, self.trained))

    @cached_property
    def size(self) -> int:
        return sum(sum(run.sizes().values()) for run in self.runs)

    def needs(self) -> set[str]:
        """Name the runs that its own come from, or whose checkpoints they name."""
        manifests = [read_json(run.manifest) for run in self.trained]
        named = [one["parent"] for one in manifests if one.get("parent")]
        named += [bound for one in manifests for bound in one.get("bound", {}).values()]
        return {one["run"] for one in named} - {run.name for run in self.runs}


def find_units() -> list[Bundle]:
    """List what can be removed together, each record of several runs behind its runs."""
    several = [Bundle([*reversed(child_runs(one)), one]) for one in all_plans()]
    taken = {run.name for one in several for run in one.runs}
    alone = [Bundle([run]) for run in all_runs() if run.name not in taken]
    return sorted([*several, *alone], key=lambda one: one.name)


def find_kept(units: Sequence[Bundle], chosen: Sequence[Bundle]) -> dict[str, str]:
    """Say of the chosen units that must stay why each does.

    They are open, promoted, or on a service, or one that stays needs them.
    """
    promoted = {one.run: one.name for one in read_promotions().values() if one.is_kept}
    kept = {one.name: why for one in chosen if (why := _why_kept(one, promoted))}
    leaving = {one.name for one in chosen} - kept.keys()
    while True:
        needed = {run: one.name for one in units if one.name not in leaving for run in one.needs()}
        held = {
            one.name: f"{needed[run.name]} needs {run.name}"
            for one in chosen
            for run in one.runs
            if one.name in leaving and run.name in needed
        }
        if not held:
            return kept
        kept |= held
        leaving -= held.keys()


def _why_kept(one: Bundle, promoted: Mapping[str, str]) -> str:
    for run in one.trained:
        if run.name in promoted:
            return f"{run.name} has the checkpoint {promoted[run.name]}"
        try:
            _check_free(run)
        except UserError as error:
            return str(error)
    return ""
