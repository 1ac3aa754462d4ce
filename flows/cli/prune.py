"""The command that names the runs which nobody needs, and removes them if it is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Annotated

import typer

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError, counted
from ratchet.adapters.process.terminal import show
from ratchet.tasks.comparison.promotions import read_promotions
from ratchet.tasks.reports.facts import RunFacts
from ratchet.tasks.storage.files import read_json
from ratchet.tasks.storage.plan_record import all_plans, child_runs
from ratchet.tasks.storage.run_folder import RunFolder, all_runs, remove_leftovers


def prune(
    older: Annotated[
        int | None, typer.Option(min=0, help="Only runs that were begun so many days ago.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only runs that have stopped before their last step.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them; without it they are only named.")
    ] = False,
) -> None:
    if older is None and not failed:
        raise UserError("no rule chooses runs to remove; give --older DAYS, --failed, or both")
    before = datetime.now(UTC) - timedelta(days=older or 0)
    units = find_units()
    chosen = [one for one in units if one.begun < before and (one.has_stopped or not failed)]
    kept = find_kept(units, chosen)
    removed = [one for one in chosen if one.name not in kept]
    for one in chosen:
        why = f"kept, {kept[one.name]}" if one.name in kept else f"{one.size / 1e6:,.1f} MB"
        show(f"{one.name}: {why}")
    if yes:
        remove_leftovers()
        for run in (run for one in removed for run in one.runs):
            run.delete()
    size = sum(one.size for one in removed) / 1e6
    said = "removed" if yes else "to be removed; --yes removes them"
    show(f"{counted(len(removed), 'run')}, {size:,.1f} MB: {said}")


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
        return sum(run.size() for run in self.runs)

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
        if run.is_open():
            return f"{run.name} is open"
        if run.name in promoted:
            return f"{run.name} has the checkpoint {promoted[run.name]}"
        saved = run.checkpoints(POLICY).exists()
        if saved and not run.fetched(whole=True).engine.exists():
            return f"{run.name} has checkpoints on a service, which would stay there"
    return ""
