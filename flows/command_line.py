"""Flows that are run from the command line, with a progress bar and a closing line."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from adapters.errors import UserError
from adapters.project.hub import locate_dataset
from adapters.tinker.engines import engine_begun
from flows.runtime.prefect_startup import quiet_prefect, start_server

if TYPE_CHECKING:
    from flows.recipe.recipe import Recipe
    from flows.runtime.run_summary import RunSummary
    from tasks.storage.run_folder import RunFolder


def train_with_bar(run: str, recipe: "Recipe", verbose: bool) -> str:
    """Run the flow of a run, with a progress bar; return its closing lines."""
    quiet_prefect(verbose)
    locate_dataset(recipe.dataset.path)  # an engine of a local model puts this process offline
    started = time.monotonic()
    with engine_begun(recipe.model.base), start_server() as wait_for_server:
        from flows.runtime.progress_bar import show_progress
        from tasks.storage.run_folder import folder_of

        folder = folder_of(run)
        with show_progress(folder, recipe.steps):
            flow = _find_flow(folder)
            wait_for_server()
            with explain_absence(run):
                summary = flow(recipe=recipe, run=run)
    return _drift(summary) + _closing_line(summary, folder, time.monotonic() - started)


@contextmanager
def explain_absence(run: str) -> Iterator[None]:
    """Raise a UserError if a server that the flow of a run needs, such as Prefect's, is away."""
    import httpx

    try:
        yield
    except httpx.TransportError as error:
        raise UserError(
            f"{error.request.url} does not answer ({error}). What is done is on disk: start the "
            f"server, or unset PREFECT_API_URL, and `ratchet resume {run}` goes on"
        ) from error


def _find_flow(run: "RunFolder") -> "Callable[..., RunSummary]":
    from tasks.storage.manifest import REPLAY, parent_of

    parent = parent_of(run) if run.exists() else None
    if parent and parent["how"] == REPLAY:
        from flows.replay import replay

        return partial(replay, parent=parent["run"])
    from flows.train import train

    return train


def _drift(summary: "RunSummary") -> str:
    """Return a replay's drift in a line; empty for other runs."""
    by_step = " ".join(f"{drift:.2g}" for drift in summary.drift)
    return f"drift (kl_sample_train_v2) by step: {by_step}\n" if by_step else ""


def _closing_line(summary: "RunSummary", run: "RunFolder", seconds: float) -> str:
    """Return the gain in held-out reward, the seconds it took, and where to look."""
    before, after = (
        "unknown" if reward is None else f"{reward:.2f}"
        for reward in (summary.before, summary.after)
    )
    spent = "" if summary.seconds is None else f"{summary.seconds:.0f} s of sampling and training, "
    failed = f" {summary.failed} rollouts failed, and trained nothing." if summary.failed else ""
    page = f"its report is {run.report}; " if run.report.exists() else ""
    repeated = "" if summary.reproducible else " No other run repeats it."
    return (
        f"held-out reward {before} → {after} in {summary.steps} steps: {spent}{seconds:.0f} s in "
        f"all. The run is {run.path}; {page}see it in Prefect's UI with `ratchet server`, and by "
        f'SQL with `ratchet sql "from steps" --run {run.name}`.'
        f"{failed}{repeated}"
    )
