"""Choice of what becomes of a run that exists: by a flag, or by a question at the terminal."""

import sys
from collections.abc import Sequence
from enum import StrEnum

import typer

from adapters.errors import did_you_mean
from tasks.storage.run_folder import RunError, RunFolder, folder_of
from tasks.storage.stages import has_stages, stage_runs


class IfExists(StrEnum):
    """Treatments of a run that exists, named as in the Tinker cookbook."""

    ASK = "ask"
    RESUME = "resume"
    RAISE = "raise"
    DELETE = "delete"


def settle(run: str, if_exists: IfExists) -> None:
    """Clear the way for a run that is to be trained; RunError if it may not be."""
    existing = folder_of(run)
    existing.check_writable()
    if not existing.exists() and not has_stages(existing):
        return
    if if_exists is IfExists.ASK:
        if_exists = _ask(run) if sys.stdin.isatty() else IfExists.RAISE
    if if_exists is IfExists.RAISE:
        raise RunError(
            f"the run {existing.path} exists; continue it with --if-exists resume, start it afresh "
            "with --if-exists delete, or give another name with --run"
        )
    if if_exists is IfExists.DELETE:
        delete_run(existing)


def delete_run(run: RunFolder, first: int = 1) -> None:
    """Delete a run; of one with stages the runs of those from number `first` on, the last first."""
    for stage in reversed(stage_runs(run)[first - 1 :]):
        stage.delete()
    if first == 1:
        run.delete()


def delete_from(run: str, names: Sequence[str], stage: str) -> None:
    """Delete the runs of a stage and those after it, so that they are trained anew."""
    if stage not in names:
        named = f"the stages are {', '.join(names)}" if names else "the recipe has no stages"
        raise RunError(f"--from {stage}: {named}{did_you_mean(stage, names)}")
    if not has_stages(folder_of(run)):
        raise RunError(f"--from {stage}: there is no run {run} of stages; name one by --run")
    delete_run(folder_of(run), names.index(stage) + 1)


def _ask(run: str) -> IfExists:
    """Ask what to do; Enter alone changes nothing."""
    question = f"The run {run} exists. Resume it, delete it and start afresh, or stop?"
    answers = {"resume": IfExists.RESUME, "delete": IfExists.DELETE, "stop": IfExists.RAISE}
    while True:
        answer = typer.prompt(f"{question} [resume/delete/stop]", default="stop", err=True)
        if answer in answers:
            return answers[answer]
