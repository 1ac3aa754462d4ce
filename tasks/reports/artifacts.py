"""Artifacts of a run in Prefect's UI: progress, curves, metrics, evaluations and transcripts.

The UI shows no file of this machine, so the curves are inside a text. Links name no server: they
begin at the page of an artifact, which lies two folders below the UI's address.
"""

import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID

import duckdb
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

from adapters.calls import POLICY
from adapters.errors import UserError
from tasks.checkpoints import Ledger
from tasks.evaluations import read_evaluation
from tasks.metrics import Metrics, read_metrics
from tasks.recording.views import open_views
from tasks.reports.curves import read_curves
from tasks.reports.tables import markdown_table, score_rows
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

UI = "../.."
TRAINING_ARTIFACTS = ("curves", "metrics", "transcripts", "evaluations")
"""Artifacts that a training flow leaves."""

LAST_SECONDS = 20.0
"""Seconds for which a finished run waits for its last artifacts."""

UNREADABLE = (UserError, OSError, ValueError, duckdb.Error)
"""Errors of a run whose files cannot be shown; pyarrow's are ValueErrors too."""

FAILURES = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
"""Errors of a server that is away or refuses."""

log = logging.getLogger(__name__)


class Artifacts:
    """Artifacts of a run, which a thread creates beside the training.

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
        run, metrics = self._run, read_metrics(self._run.metrics)
        self._write_report()
        self._publish_markdown("curves", partial(describe_curves, run), f"Curves of {run.name}")
        self._publish_metrics(metrics)
        step = len(metrics) - 1
        words = (
            f"The best, the middle and the worst rollout of {run.name} in step {step} by reward, "
            f"and up to {MOST_FAILED} that failed with different errors, word for word"
        )
        self._publish_markdown("transcripts", partial(describe_transcripts, run, step), words)
        self.publish_evaluations()

    def publish_evaluations(self) -> None:
        """Publish the scores of every evaluation of the run, with a link to its training."""
        with self._unless_unreadable("evaluations"):
            self._submit(partial(self._create_evaluations, describe_evaluations(self._run)))

    def _write_report(self) -> None:
        from tasks.reports.page import write_report  # matplotlib loads slowly, and only for this

        with self._unless_unreadable("report"):
            write_report([self._run], self._run.report)

    def _publish_metrics(self, metrics: Sequence[Metrics]) -> None:
        names = ["step", *(name for name in METRICS if any(name in row for row in metrics))]
        rows = [{name: _short(row.get(name)) for name in names} for row in metrics]
        key, words = artifact_key(self._run, "metrics"), f"Metrics of {self._run.name}, by step"
        self._submit(partial(create_table_artifact, rows, key=key, description=words))

    def _publish_markdown(self, what: str, describe: Callable[[], str], words: str) -> None:
        with self._unless_unreadable(what):
            key, text = artifact_key(self._run, what), describe()
            self._submit(partial(create_markdown_artifact, text, key=key, description=words))

    @contextmanager
    def _unless_unreadable(self, what: str) -> Iterator[None]:
        """Say by a warning that a damaged file keeps one of the artifacts from being made."""
        try:
            yield
        except UNREADABLE as error:
            log.warning("the %s of %s cannot be shown: %s", what, self._run.path, error)

    def _create_evaluations(self, text: str) -> None:
        shown = Artifact.get(artifact_key(self._run, "progress"))
        flow_run = shown.flow_run_id if isinstance(shown, SavedArtifact) else None
        key, words = artifact_key(self._run, "evaluations"), f"Every evaluation of {self._run.name}"
        trained = describe_training(self._run, flow_run)
        create_markdown_artifact(trained + text, key=key, description=words)

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
        done, left = wait(self._submitted, 0)
        self._submitted = [*left]
        for one in done:
            if not one.cancelled():
                one.result()

    def _try(self, make: Callable[[], object]) -> None:
        try:
            make()
        except FAILURES as error:
            if not self._told:
                said = "Prefect's UI does not show all of %s: %r. The training needs none of it"
                log.warning(said, self._run.name, error)
            self._told = True


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def artifact_key(run: RunFolder, what: str) -> str:
    """Return an artifact's key, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.name}-{what}".lower()).strip("-")


def describe_curves(run: RunFolder) -> str:
    """Show the curves of a run as a picture, and say where its report is."""
    from tasks.reports import plots  # matplotlib loads slowly, and only for this

    with open_views([run], ("spans", "evaluations")) as views:
        curves = [read_curves(run, views)]
    rewards = [plots.draw_rewards(curves)[0], *plots.draw_role_rewards(curves)]
    picture = plots.join_drawings([*rewards, *plots.draw_panels(curves)])
    image = b64encode(picture.encode()).decode()
    return (
        f"![curves](data:image/svg+xml;base64,{image})\n\n"
        "Points on a line are the mean rewards of the rollouts that were trained on. Circles are "
        "held-out examples with their 95 % intervals: full if sampled, empty if greedy.\n\n"
        f"{_links(run)}.\n\nThe report of the run is `{run.report.resolve()}`.\n"
    )


def describe_evaluations(run: RunFolder) -> str:
    """List every evaluation of a run, and the checkpoints that were scored."""
    name, ledger = _escape_markdown(run.name), Ledger(run.checkpoints(POLICY))
    scores, saved = {}, {}
    for path in run.evaluations():
        step, settings = int(path.stem[:5]), path.stem[5:]
        for how, score in read_evaluation(path).items():
            scores[f"{name}@{step}{settings} {how}"] = score
        if (checkpoint := ledger.find(step)) is not None:
            saved[f"{name}@{step}"] = checkpoint
    names = ["checkpoint", "weights to sample from", "can be trained on"]
    rows = [[at, f"`{c.sampler}`", "no" if c.state is None else "yes"] for at, c in saved.items()]
    return "\n".join([markdown_table(*score_rows(scores)), markdown_table(names, rows)])


def describe_transcripts(run: RunFolder, step: int) -> str:
    """Tell rollouts of a step word for word, without the greedy ones of a baseline."""
    played = [batch for batch in batches_of(run, step) if parse_batch(batch).split != BASELINE]
    return transcripts([run.spans(batch) for batch in played])


def describe_training(run: RunFolder, flow_run: UUID | None) -> str:
    """Link what trained the run, in a sentence; empty if no training flow is known."""
    if flow_run is None:
        return ""
    trained = f"[{_escape_markdown(run.name)}]({UI}/runs/flow-run/{flow_run})"
    return f"The flow run {trained} trained these checkpoints. {_links(run)}.\n\n"


def _links(run: RunFolder) -> str:
    keys = {what: artifact_key(run, what) for what in TRAINING_ARTIFACTS}
    links = ", ".join(f"[{what}]({UI}/artifacts/key/{key})" for what, key in keys.items())
    return f"Artifacts of the run: {links}"


def _escape_markdown(name: str) -> str:
    """Escape what Markdown interprets, but for bars, which `markdown_table` escapes."""
    return re.sub(r"([\\`*_{}\[\]<>#&~])", r"\\\1", name)
