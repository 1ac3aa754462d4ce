"""Artifacts of a run in Prefect's UI: progress, curves, metrics, evaluations and transcripts.

The UI shows no file of this machine, so the curves are inside a text. Links name no server: they
begin at the page of an artifact, which lies two folders below the UI's address.
"""

import json
import logging
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from itertools import count
from threading import Event, Thread
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
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import Artifact as SavedArtifact
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from adapters.calls import POLICY
from tasks.checkpoints import Ledger, read_held_out
from tasks.recording.scores import read_evaluation
from tasks.recording.step_log import Metrics, read_metrics, spent_seconds
from tasks.recording.views import UNREADABLE, open_views
from tasks.reports.curves import (
    read_curves,
    read_step_curves,
)
from tasks.reports.progress import Facts, ProgressReader, describe_measure, read_facts
from tasks.reports.tables import markdown_table, score_rows, shorten
from tasks.reports.transcripts import MOST_FAILED, transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.names import BASELINE, parse_batch
from tasks.storage.plan_record import read_plan
from tasks.storage.run_folder import RunFolder

HELD_OUT = "held-out"
"""Beginning of the tag that says what a run has gained."""
LONGEST_PATH = 48
"""Letters of a service's path that a table shows."""

UI = "../.."
TRAINING_ARTIFACTS = ("curves", "metrics", "transcripts", "evaluations")
"""Artifacts that a training flow leaves."""

LEGEND = (
    "Points on a line are the mean rewards of the rollouts that were trained on. Circles are "
    "held-out examples with their 95 % intervals: full if sampled, empty if greedy, half if judged."
)

FIRST_SECONDS, GROWTH = 20.0, 1.25
"""Age of a run at which all artifacts are shown first, and by how much it grows until the next."""

LAST_SECONDS, FAILED_SECONDS = 20.0, 2.0
"""Seconds for which a run waits for its last artifacts, and one that fails for the last of all."""

LOOK_SECONDS = 3.0
"""Seconds between two looks at what a run does, the first of which is at FIRST_SECONDS."""

NOW = "now"
"""Artifact that says what a run does, which `ratchet watch` shows where the run's folder is not."""

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
        self._failures = count()  # of which two threads tell one
        self._begun, self._shown_at = time.monotonic(), FIRST_SECONDS
        self._now: UUID | None = None
        self._over = Event()
        looking = partial(copy_context().run, self._keep_showing_now)
        self._looking = Thread(target=looking, name="now", daemon=True)

    def __enter__(self) -> Self:
        if self._steps is not None:
            self._submit(partial(self._show, 0.0, "starting"))
            self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, trace: TracebackType | None
    ) -> None:
        self._over.set()
        left, began = LAST_SECONDS if kind is None else 0, time.monotonic()
        wait(self._submitted, left)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._looking.is_alive() and (kind is None or issubclass(kind, Exception)):
            self._looking.join(max(FAILED_SECONDS, left - (time.monotonic() - began)))
        next(self._failures)  # what comes later finds a server that ends with the run
        self._forget_done()

    def show(self, step: int, metrics: Metrics) -> None:
        """Show that step `step` (from 0) is done, with its reward, and from time to time the rest.

        The rest is shown whenever the run has become a quarter longer, so that a long run leaves
        some dozens of versions on the server.
        """
        assert self._steps is not None
        said = describe_measure(metrics) or "no rollout has a reward"
        done = 100 * (step + 1) / self._steps
        for earlier in self._submitted:
            earlier.cancel()  # it would say less
        self._submit(partial(self._show, done, f"step {step + 1} of {self._steps}, {said}"))
        if time.monotonic() - self._begun > self._shown_at:
            self._submit(self._create_all)

    def publish(self) -> None:
        """Write the run's report, and publish what a run that has ended shows."""
        self._write_report()
        self._submit(self._tag_gain)
        self._submit(self._create_all)

    def publish_evaluations(self) -> None:
        """Publish the scores of every evaluation of the run, with a link to its training."""
        self._submit(self._create_evaluations)

    def publish_stages(self) -> None:
        """Write the report of stages or of a sweep, and publish their table."""
        self._write_report()

        def describe() -> str:
            record = read_plan(self._run)
            return (
                f"{markdown_table(*record.table())}\n{record.note}\n\n[report]({self._run.report})"
            )

        words = f"What the runs of {self._run.name} have come to"
        self._submit(partial(self._create_markdown, "stages", describe, words))

    def tag(self, tag: str) -> None:
        """Give the flow run a tag, which the list of runs shows."""
        self._submit(partial(tag_flow_run, tag))

    def _write_report(self) -> None:
        from tasks.reports.page import write_report  # matplotlib loads slowly, and only for this

        with self._unless_unreadable("report"):
            write_report([self._run], self._run.report)

    def _tag_gain(self) -> None:
        with self._unless_unreadable("held-out reward"):
            if measured := str(read_held_out(self._run)):
                tag_flow_run(f"{HELD_OUT} {measured}")

    def _create_all(self) -> None:
        run = self._run
        self._create_markdown("curves", partial(describe_curves, run), f"Curves of {run.name}")
        self._create_metrics()
        if not run.given_files():
            self._create_transcripts()
            self._create_evaluations()
        self._shown_at = GROWTH * (time.monotonic() - self._begun)

    def _create_transcripts(self) -> None:
        run, step = self._run, len(read_metrics(self._run.metrics)) - 1
        words = (
            f"The best, the middle and the worst rollout of {run.name} in step {step} by reward, "
            f"and up to {MOST_FAILED} that failed with different errors, word for word"
        )
        self._create_markdown("transcripts", partial(describe_transcripts, run, step), words)

    def _create_metrics(self) -> None:
        with self._unless_unreadable("metrics"):
            create_table_artifact(
                metric_rows(self._run),
                key=artifact_key(self._run.name, "metrics"),
                description=f"Metrics of {self._run.name}, by the checkpoint that a step made. The "
                "others are in its report and in SQL, where step 0 is the first",
            )

    def _create_evaluations(self) -> None:
        shown = Artifact.get(artifact_key(self._run.name, "progress"))
        flow_run = shown.flow_run_id if isinstance(shown, SavedArtifact) else None

        def describe() -> str:
            return describe_training(self._run, flow_run) + describe_evaluations(self._run)

        self._create_markdown("evaluations", describe, f"Every evaluation of {self._run.name}")

    def _create_markdown(self, what: str, describe: Callable[[], str], words: str) -> None:
        text = None
        with self._unless_unreadable(what):
            text = describe()
        if text is not None:
            key = artifact_key(self._run.name, what)
            create_markdown_artifact(text, key=key, description=words)

    @contextmanager
    def _unless_unreadable(self, what: str) -> Iterator[None]:
        """Say by a warning that a damaged file keeps one of the artifacts from being made."""
        try:
            yield
        except UNREADABLE as error:
            log.warning("the %s of %s cannot be shown: %s", what, self._run.path, error)

    def _show(self, progress: float, description: str) -> None:
        if self._progress is not None:
            update_progress_artifact(self._progress, progress, description)
            return
        made = create_progress_artifact(
            progress, artifact_key(self._run.name, "progress"), description
        )
        assert isinstance(made, UUID)
        self._progress = made

    def _keep_showing_now(self) -> None:
        """Show again and again what the run does, the last time when it is over."""
        reader, ended, seconds = ProgressReader(self._run), False, FIRST_SECONDS
        while not ended:
            ended, seconds = self._over.wait(seconds), LOOK_SECONDS
            with suppress(*UNREADABLE):  # the run itself says what it cannot read
                facts = read_facts(self._run, reader.look())
                self._try(partial(self._show_now, facts))

    def _show_now(self, facts: Facts) -> None:
        rows = [{"what": what, NOW: said} for what, said in facts.items()]
        if self._now is not None:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._now, ArtifactUpdate(data=json.dumps(rows)))
            return
        words = f"What {self._run.name} does, as `ratchet watch {self._run.name}` shows it"
        key = artifact_key(self._run.name, NOW)
        made = create_table_artifact(rows, key=key, description=words)
        assert isinstance(made, UUID)
        self._now = made

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
            if next(self._failures) == 0:
                said = "Prefect's UI does not show all of %s: %r. The training needs none of it"
                log.warning(said, self._run.name, error)


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def artifact_key(run: str, what: str) -> str:
    """Return the key of a run's artifact, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")


def describe_curves(run: RunFolder) -> str:
    """Show the curves of a run as a picture, and say where its report is."""
    from tasks.reports import plots  # matplotlib loads slowly, and only for this

    with open_views([run], ["spans"]) as views:
        curves = [read_curves(run, views)]
    if run.given_files():
        measures, legend = plots.draw_panels(curves, plots.LEARNT), ""
    else:
        measures = [plots.draw_rewards(curves)[0], *plots.draw_role_rewards(curves)]
        legend = LEGEND
    moving, constant = plots.split_constant(curves)
    picture = plots.join_drawings([*measures, *plots.draw_panels(curves, moving)])
    image = b64encode(picture.encode()).decode()
    parts = [
        f"![curves](data:image/svg+xml;base64,{image})",
        legend,
        constant,
        f"{_links(run)}.",
        f"The report of the run is `{run.report.resolve()}`.\n",
    ]
    return "\n\n".join(filter(None, parts))


DIVERGENCES = ("kl_reference_v1", "teacher/kl", "kl_sample_train_v1")
"""Metrics of a divergence, of which a table has the first that there is."""


def metric_rows(run: RunFolder) -> list[dict[str, float | None]]:
    """Return the metrics of a run that one reads first, a row a step; a column has some value.

    The held-out reward or loss is that of the checkpoint which the step made. Entropy and KL are
    those of the main policy, the KL to the reference or, without one, to the teachers, or else to
    the weights that sampled.
    """
    curves = read_step_curves(run)
    held_out = read_held_out(run).by_step
    rows = [
        {
            "step": made,
            "reward": row.get("reward/mean"),
            "loss": row.get("loss"),
            "held-out": held_out.get(made),
            "entropy": row.get("entropy"),
            "KL": next((row[name] for name in DIVERGENCES if name in row), None),
            "tokens": round(curves.tokens[made] - curves.tokens[made - 1]),
            "failed": row.get("rollouts/failed"),
            "seconds": spent_seconds([row]),
        }
        for made, row in enumerate(curves.metrics, 1)
    ]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    return [{name: _short(row[name]) for name in names} for row in rows]


def describe_evaluations(run: RunFolder) -> str:
    """List every evaluation of a run, and the checkpoints that were scored."""
    ledger, scores, saved = Ledger(run.checkpoints(POLICY)), {}, {}
    for path in run.evaluations():
        step, settings = int(path.stem[:5]), path.stem[6:]
        for how, score in read_evaluation(path).items():
            scores[f"{step} {how}{settings and ' by settings '}{settings}"] = score
        if (checkpoint := ledger.find(step)) is not None:
            sampler = f"`{shorten(checkpoint.sampler, LONGEST_PATH)}`"
            saved[step] = [step, sampler, "no" if checkpoint.state is None else "yes"]
    (_, category, examples, failed, reward, interval, *spent), rows = score_rows(scores)
    names = ["step", f"held-out {reward}", interval, examples, failed, "played", category, *spent]
    leading = []
    for played, category, examples, failed, reward, interval, *spent in rows:
        step, _, how = str(played).partition(" ")
        leading.append([step, reward, interval, examples, failed, how, category, *spent])
    weights = markdown_table(
        ["step", "weights to sample from", "can be trained on"], saved.values()
    )
    whole = f"The paths are whole in `{run.checkpoints(POLICY)}`.\n"
    return "\n".join([markdown_table(names, leading), weights, *([whole] if saved else [])])


def tag_flow_run(tag: str) -> None:
    """Give the current flow run a tag, in place of one that begins with the same word."""
    if (id := flow_run.id) is None:
        return
    with get_client(sync_client=True) as client:
        word, current = tag.split()[0], UUID(id)
        tags = client.read_flow_run(current).tags
        client.update_flow_run(
            current, tags=[*(other for other in tags if other.split()[:1] != [word]), tag]
        )


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
    keys = {what: artifact_key(run.name, what) for what in TRAINING_ARTIFACTS}
    links = ", ".join(f"[{what}]({UI}/artifacts/key/{key})" for what, key in keys.items())
    return f"Artifacts of the run: {links}"


def _escape_markdown(name: str) -> str:
    """Escape what Markdown interprets, but for bars, which `markdown_table` escapes."""
    return re.sub(r"([\\`*_{}\[\]<>#&~])", r"\\\1", name)
