"""Artifacts of a run in Prefect's UI: progress, curves, metrics, evaluations and transcripts."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx
from prefect.artifacts import (
    Artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.objects import Artifact as SavedArtifact
from prefect.exceptions import PrefectException

from tasks.metrics import Metrics, read_metrics
from tasks.recording.views import UNREADABLE
from tasks.reports.artifact_texts import (
    artifact_key,
    describe_curves,
    describe_evaluations,
    describe_training,
)
from tasks.reports.transcripts import MOST_FAILED, transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.names import BASELINE, parse_batch
from tasks.storage.run_folder import RunFolder

METRICS = (
    "reward/mean",
    "reward/std",
    "groups/uniform_fraction",
    "entropy",
    "kl_sample_train_v1",
    "tokens/sampled",
    "tokens/trained",
    "rollouts/failed",
    "stragglers/count",
    "stragglers/tokens",
    "stragglers/kept_tokens",
    "prefix/broken",
    "seconds/sampling",
    "seconds/training",
)
"""Metrics that are shown, if some step has them."""

LAST_SECONDS = 20.0
"""Seconds for which a finished run waits for its last artifacts."""

FAILURES = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""Errors of a server that is away or refuses."""

log = logging.getLogger(__name__)


class Artifacts:
    """Artifacts of a run, which a thread makes beside the training.

    The training needs none of them: where Prefect's server is away or refuses, one warning says so.
    The progress of `steps` is shown; none of it if they are None, in an evaluation.
    """

    def __init__(self, run: RunFolder, steps: int | None = None) -> None:
        self._run = run
        self._steps = steps
        self._thread = ThreadPoolExecutor(1, "artifacts")
        self._submitted: list[Future[None]] = []
        self._progress: UUID | None = None
        self._told = False

    def __enter__(self) -> Self:
        if self._steps is not None:
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
        assert self._steps is not None
        reward = metrics.get("reward/mean")
        said = "no rollout has a reward" if reward is None else f"reward {reward:+.3f}"
        done = 100 * (step + 1) / self._steps
        for earlier in self._submitted:
            earlier.cancel()  # it would say less
        self._submit(partial(self._show, done, f"step {step + 1} of {self._steps}, {said}"))

    def publish(self) -> None:
        """Write the run's report, and publish what a run that has ended shows."""
        self._write_report()
        self._publish_curves()
        self._publish_metrics()
        self._publish_transcripts()
        self.publish_evaluations()

    def publish_evaluations(self) -> None:
        """Publish the scores of every evaluation of the run, with a link to its training."""
        with self._unless_unreadable("evaluations"):
            self._submit(partial(self._create_evaluations, describe_evaluations(self._run)))

    def _write_report(self) -> None:
        from tasks.reports.page import write_report  # matplotlib loads slowly, and only for this

        with self._unless_unreadable("report"):
            write_report([self._run], self._run.report)

    def _publish_curves(self) -> None:
        with self._unless_unreadable("curves"):
            self._create_markdown(
                "curves", describe_curves(self._run), f"Curves of {self._run.name}"
            )

    def _publish_metrics(self) -> None:
        metrics = read_metrics(self._run.metrics)
        names = ["step", *(name for name in METRICS if any(name in row for row in metrics))]
        rows = [{name: _short(row.get(name)) for name in names} for row in metrics]
        key, words = artifact_key(self._run, "metrics"), f"Metrics of {self._run.name}, by step"
        self._submit(partial(create_table_artifact, rows, key=key, description=words))

    def _publish_transcripts(self) -> None:
        step = len(read_metrics(self._run.metrics)) - 1
        words = (
            f"The best, the middle and the worst rollout of {self._run.name} in step {step} by "
            f"reward, and up to {MOST_FAILED} that failed with different errors, word for word"
        )
        with self._unless_unreadable("transcripts"):
            batches = batches_of(self._run, step)
            played = [batch for batch in batches if parse_batch(batch).split != BASELINE]
            spans = [self._run.spans(batch) for batch in played]
            self._create_markdown("transcripts", transcripts(spans), words)

    @contextmanager
    def _unless_unreadable(self, what: str) -> Iterator[None]:
        """Say by a warning that a damaged file keeps one of the artifacts from being made."""
        try:
            yield
        except UNREADABLE as error:
            log.warning("the %s of %s cannot be shown: %s", what, self._run.path, error)

    def _create_markdown(self, what: str, text: str, description: str) -> None:
        key = artifact_key(self._run, what)
        self._submit(partial(create_markdown_artifact, text, key=key, description=description))

    def _create_evaluations(self, text: str) -> None:
        shown = Artifact.get(artifact_key(self._run, "progress"))
        flow_run = shown.flow_run_id if isinstance(shown, SavedArtifact) else None
        trained = describe_training(self._run, flow_run)
        create_markdown_artifact(
            trained + text,
            key=artifact_key(self._run, "evaluations"),
            description=f"Every evaluation of {self._run.name}",
        )

    def _show(self, progress: float, description: str) -> None:
        if self._progress is not None:
            update_progress_artifact(self._progress, progress, description)
            return
        made = create_progress_artifact(progress, artifact_key(self._run, "progress"), description)
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
