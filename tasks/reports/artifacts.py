"""Artifacts of a run in Prefect's UI: progress, metrics and transcripts."""

import logging
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

import duckdb
import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from adapters.errors import UserError
from tasks.metrics import Metrics, read_metrics
from tasks.reports.reports import METRICS, transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.run_folder import RunFolder

LAST_SECONDS = 20.0
"""Seconds for which a finished run waits for its last artifacts."""

UNREADABLE = (UserError, OSError, ValueError, duckdb.Error)
"""Errors of a run whose files cannot be shown; pyarrow's are ValueErrors too."""

FAILURES = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""Errors of a server that is away or refuses."""

log = logging.getLogger(__name__)


class Artifacts:
    """Artifacts of a run, which a thread makes beside the training.

    The training needs none of them: where Prefect's server is away or refuses, one warning says so.
    """

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._run = run
        self._steps = steps
        self._thread = ThreadPoolExecutor(1, "artifacts")
        self._submitted: list[Future[None]] = []
        self._progress: UUID | None = None
        self._told = False

    def __enter__(self) -> Self:
        self._submit(partial(self._show, 0.0, "starting"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        wait(self._submitted, LAST_SECONDS if kind is None else 0)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._forget_done()

    def show(self, step: int, metrics: Metrics) -> None:
        """Show that step `step` (from 0) is done, with its reward."""
        reward = metrics.get("reward/mean")
        said = "no rollout has a reward" if reward is None else f"reward {reward:+.3f}"
        done = 100 * (step + 1) / self._steps
        for earlier in self._submitted:
            earlier.cancel()  # it would say less
        self._submit(partial(self._show, done, f"step {step + 1} of {self._steps}, {said}"))

    def publish(self) -> None:
        """Publish the metrics by step, three rollouts of the last step, and the report's path."""
        metrics = read_metrics(self._run.metrics)
        rows = [{name: _short(row.get(name)) for name in ("step", *METRICS)} for row in metrics]
        last = [self._run.spans(batch) for batch in batches_of(self._run, len(metrics) - 1)]
        key, words = partial(_key, self._run), f"{self._run.name}, by step"
        self._submit(partial(create_table_artifact, rows, key=key("metrics"), description=words))
        self._submit(partial(create_markdown_artifact, transcripts(last), key=key("transcripts")))
        if (report := self._report()) is not None:
            link, text = report.resolve().as_uri(), str(report)
            self._submit(partial(create_link_artifact, link, text, key=key("report")))

    def _report(self) -> Path | None:
        """Write the run's page; a warning says why if that is impossible."""
        from tasks.reports.page import write_report  # matplotlib loads slowly, and only for this

        try:
            return write_report([self._run], self._run.report)
        except UNREADABLE as error:
            log.warning("%s was not written: %s", self._run.report, error)
            return None

    def _show(self, progress: float, description: str) -> None:
        if self._progress is not None:
            update_progress_artifact(self._progress, progress, description)
            return
        made = create_progress_artifact(progress, _key(self._run, "progress"), description)
        assert isinstance(made, UUID)
        self._progress = made

    def _submit(self, make: Callable[[], object]) -> None:
        self._forget_done()
        context = copy_context()  # names the flow run
        self._submitted.append(self._thread.submit(context.run, self._try, make))

    def _forget_done(self) -> None:
        """Forget what has been made; an error that is not the server's is raised."""
        done = [one for one in self._submitted if one.done()]
        self._submitted = [one for one in self._submitted if one not in done]
        for one in done:
            if not one.cancelled():
                one.result()

    def _try(self, make: Callable[[], object]) -> None:
        try:
            make()
        except FAILURES as error:
            if not self._told:
                log.warning(
                    "Prefect's UI does not show all of %s: %r. The training needs none of it",
                    self._run.name,
                    error,
                )
            self._told = True


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _key(run: RunFolder, what: str) -> str:
    """Return an artifact key, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.name}-{what}".lower()).strip("-")
