"""Choice of what becomes of a run that exists: by a flag, or by a question at the terminal."""

import sys
from collections.abc import Sequence
from enum import StrEnum

import typer

from ratchet.adapters.errors import did_you_mean
from ratchet.tasks.storage.plan_record import child_runs, has_plan, read_plan
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of


class IfExists(StrEnum):
    """Treatments of a run that exists, named as in the Tinker cookbook."""

    ASK = "ask"
    RESUME = "resume"
    RAISE = "raise"
    DELETE = "delete"


def find_replaced(run: str, if_exists: IfExists) -> list[RunFolder]:
    """Return what is to be deleted before a run is trained; RunError if that may not be."""
    existing = folder_of(run)
    existing.check_writable()
    if not existing.exists() and not has_plan(existing):
        return []
    if if_exists is IfExists.ASK:
        if_exists = _ask(run) if sys.stdin.isatty() else IfExists.RAISE
    if if_exists is IfExists.RAISE:
        raise RunError(
            f"the run {existing.path} exists; continue it with --if-exists resume, start it afresh "
            "with --if-exists delete, or give another name with --run"
        )
    return _from(existing, 0) if if_exists is IfExists.DELETE else []


def find_replaced_from(run: str, names: Sequence[str], stage: str) -> list[RunFolder]:
    """Return what is to be deleted before a stage and those after it are trained anew.

    RunError if the stage before it is not there, which would be trained anew as well.
    """
    if stage not in names:
        named = f"the stages are {', '.join(names)}" if names else "the recipe has no stages"
        raise RunError(f"--from {stage}: {named}{did_you_mean(stage, names)}")
    if not has_plan(folder := folder_of(run)):
        raise RunError(f"--from {stage}: there is no run {run} of stages; name one by --run")
    first = names.index(stage)
    before = [folder_of(name) for name in read_plan(folder).runs[:first]]
    if before and not before[-1].exists():
        there = max((at + 1 for at, one in enumerate(before) if one.exists()), default=0)
        raise RunError(
            f"--from {stage}: the run {before[there].path} of an earlier stage is not there; put "
            f"it back, or give --from {names[there]}, which trains it anew"
        )
    return _from(folder, first)


def delete_runs(runs: Sequence[RunFolder]) -> None:
    """Delete runs in their order, or none (UserError) if one is open, or promoted."""
    from ratchet.tasks.comparison.promotions import refuse_promoted

    refuse_promoted([run.name for run in runs])
    for run in runs:
        with run.locked():
            pass
    for run in runs:
        run.delete()


def _from(run: RunFolder, first: int) -> list[RunFolder]:
    """List the runs of the stages from number `first`, the last first, and then that of all."""
    return [*reversed(child_runs(run, first)), *([] if first else [run])]


def _ask(run: str) -> IfExists:
    """Ask what to do; Enter alone changes nothing."""
    question = f"The run {run} exists. Resume it, delete it and start afresh, or stop?"
    answers = {"resume": IfExists.RESUME, "delete": IfExists.DELETE, "stop": IfExists.RAISE}
    while True:
        answer = typer.prompt(f"{question} [resume/delete/stop]", default="stop", err=True)
        if answer in answers:
            return answers[answer]
