"""A run from the command line: its flow, with a bar, and what came of it."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.tinker.engines import engine_begun
from flows.runtime.prefect_startup import quiet_prefect, server_begun

if TYPE_CHECKING:
    from flows.recipe import Recipe
    from flows.runtime.run_summary import Outcome


def trained(run: str, recipe: "Recipe", verbose: bool) -> str:
    """Run the flow that a run is of, with a bar, and say what came of it."""
    quiet_prefect(verbose)
    started = time.monotonic()
    with engine_begun(recipe.model.base), server_begun() as answers:
        from flows.runtime.progress_bar import showing_progress
        from tasks.storage.run_folder import folder_of

        folder = folder_of(run)
        with showing_progress(folder, recipe.steps):
            flow = _flow_of(folder)
            answers()
            outcome = flow(recipe=recipe, run=run)
    return _drift(outcome) + _closing_line(outcome, folder, time.monotonic() - started)


def _flow_of(folder: Path) -> "Callable[..., Outcome]":
    from flows.runtime.forks import REPLAY, parent_of
    from tasks.storage.run_folder import exists

    parent = parent_of(folder) if exists(folder) else None
    if parent and parent["how"] == REPLAY:
        from flows.replay import replay

        return partial(replay, parent=parent["run"])
    from flows.train import train

    return train


def _drift(outcome: "Outcome") -> str:
    """Of a replay, a line."""
    by_step = " ".join(f"{drift:.2g}" for drift in outcome.drift)
    return f"drift (kl_sample_train_v2) by step: {by_step}\n" if by_step else ""


def _closing_line(outcome: "Outcome", folder: Path, seconds: float) -> str:
    """What was won, in how long, and where to look."""
    before, after = (
        "unknown" if reward is None else f"{reward:.2f}"
        for reward in (outcome.before, outcome.after)
    )
    statement = f"from '{folder}/metrics.jsonl'"
    return (
        f"held-out reward {before} → {after} in {outcome.steps} steps: {outcome.seconds:.0f} s of "
        f"sampling and training, {seconds:.0f} s in all. The run is {folder}; see it in Prefect's "
        f'UI with `make server`, and by SQL with `ratchet sql "{statement}"`'
    )
