"""Choice of what becomes of a run that exists: by a flag, or by a question at the terminal."""

import sys
from enum import StrEnum

import typer

from tasks.storage.run_folder import RunError, folder_of


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
    if not existing.exists():
        return
    if if_exists is IfExists.ASK:
        if_exists = _ask(run) if sys.stdin.isatty() else IfExists.RAISE
    if if_exists is IfExists.RAISE:
        raise RunError(
            f"the run {existing.path} exists; continue it with --if-exists resume, start it afresh "
            "with --if-exists delete, or give another name with --run"
        )
    if if_exists is IfExists.DELETE:
        existing.delete()


def _ask(run: str) -> IfExists:
    """Ask what to do; Enter alone changes nothing."""
    question = f"The run {run} exists. Resume it, delete it and start afresh, or stop?"
    answers = {"resume": IfExists.RESUME, "delete": IfExists.DELETE, "stop": IfExists.RAISE}
    while True:
        answer = typer.prompt(f"{question} [resume/delete/stop]", default="stop", err=True)
        if answer in answers:
            return answers[answer]
