"""What becomes of a run that exists: asked of whom sits at the terminal, or told by a flag."""

import sys
from enum import StrEnum

import typer

from tasks.storage.run_folder import RunError, delete_run, exists, folder_of


class IfExists(StrEnum):
    """The Tinker cookbook's four behaviours."""

    ASK = "ask"
    RESUME = "resume"
    RAISE = "raise"
    DELETE = "delete"


def settle(run: str, if_exists: IfExists) -> None:
    """Return where the run may be trained on, or afresh; else RunError."""
    folder = folder_of(run)
    if not exists(folder):
        return
    if if_exists is IfExists.ASK:
        if_exists = _asked(run) if sys.stdin.isatty() else IfExists.RAISE
    if if_exists is IfExists.RAISE:
        raise RunError(
            f"the run {folder} exists; continue it with --if-exists resume, start it afresh with "
            "--if-exists delete, or give another name with --run"
        )
    if if_exists is IfExists.DELETE:
        delete_run(folder)


def _asked(run: str) -> IfExists:
    """Enter alone changes nothing."""
    question = f"The run {run} exists. Resume it, delete it and start afresh, or stop?"
    answers = {"resume": IfExists.RESUME, "delete": IfExists.DELETE, "stop": IfExists.RAISE}
    while True:
        answer = typer.prompt(f"{question} [resume/delete/stop]", default="stop", err=True)
        if answer in answers:
            return answers[answer]
