"""Pages of a run in Prefect's UI: progress, curves, metrics, evaluations and transcripts.

The UI shows no file of this machine, so the curves are inside a text. Links name no server: they
begin at the page of an artifact, which lies two folders below the UI's address.
"""

import logging
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
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
from prefect.client.schemas.objects import Artifact as SavedArtifact
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from ratchet.adapters.calls import POLICY
from ratchet.adapters.redaction import public
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import spent_seconds
from ratchet.tasks.recording.views import UNREADABLE, open_views
from ratchet.tasks.reports import plots
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.reports.progress import describe_measure
from ratchet.tasks.reports.rollouts import MOST_FAILED, transcripts
from ratchet.tasks.reports.tables import list_evaluations, markdown_table, shorten
from ratchet.tasks.settings.run import Tracking
from ratchet.tasks.storage.dotted_keys import flatten
from ratchet.tasks.storage.plan_record import read_plan
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.tracking.recorded_step import RecordedStep
from ratchet.tasks.tracking.run_tracking import publish_beside
from ratchet.tasks.tracking.trackers import Tracker, TrackerFailed, WandbTracker

UI_NAME = "Prefect's UI"
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

FIRST_SECONDS, GROWTH, MOST_SHARE = 20.0, 1.25, 0.01
"""Age of a run at which all artifacts are shown first, by how much it grows until the next time,
and the largest share of the time that showing them may take."""

log = logging.getLogger(__name__)


class PrefectPages(Tracker):
    """Pages of the current flow run about the run that it trains.

    All of them are made anew whenever the run has become a quarter longer, so that a long run
    leaves some dozens of versions on the server. Pages of many steps take seconds; a run of many
    steps that was just continued makes them less often.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._begun, self._shown_at = time.monotonic(), FIRST_SECONDS
        self._progress: UUID | None = None

    def next_step(self) -> int:
        """Return the last step that is done; its page replaces the pages of earlier steps."""
        done = read_facts(self._run).done
        if done == 0 and self._progress is None:
            self._show(0.0, "starting")
        return max(0, done - 1)

    def send(self, step: RecordedStep) -> None:
        """Show the progress, unless a later step is done, and from time to time the rest."""
        made, facts = step.number + 1, read_facts(self._run)
        if made != facts.done:
            return
        said = describe_measure(step.metrics()) or "no rollout has a reward"
        self._show(100 * made / facts.steps, f"step {made} of {facts.steps}, {said}")
        if time.monotonic() - self._begun > self._shown_at:
            self._create_all()

    def close(self) -> None:
        """Show the gain and the results of a run that is done."""
        if (facts := read_facts(self._run)).done >= facts.steps:
            with _unless_unreadable(self._run, "held-out reward"):
                if measured := str(read_facts(self._run).held_out):
                    tag_flow_run(f"{HELD_OUT} {measured}")
            self._create_all()

    def _create_all(self) -> None:
        run, began = self._run, time.monotonic()
        _create_markdown(run, "curves", partial(describe_curves, run), f"Curves of {run.name}")
        with _unless_unreadable(run, "metrics"), _failing():
            create_table_artifact(
                metric_rows(run),
                key=artifact_key(run.name, "metrics"),
                description=f"Metrics of {run.name}, by the checkpoint that a step made. The "
                "others are in its report and in SQL, where step 0 is the first",
            )
        if not run.given_files():
            step = read_facts(run).done - 1
            words = (
                f"The best, the middle and the worst rollout of {run.name} in step {step} by "
                f"reward, and up to {MOST_FAILED} that failed with different errors, word for word"
            )
            spans = [run.spans(batch) for batch in run.batches_of(step)]
            _create_markdown(run, "transcripts", partial(transcripts, spans), words)
            _create_evaluations(run)
        took, age = time.monotonic() - began, time.monotonic() - self._begun
        self._shown_at = max(GROWTH * age, age + took / MOST_SHARE)

    def _show(self, progress: float, description: str) -> None:
        with _failing():
            if self._progress is not None:
                update_progress_artifact(self._progress, progress, description)
                return
            key = artifact_key(self._run.name, "progress")
            made = create_progress_artifact(progress, key, description)
        assert isinstance(made, UUID)
        self._progress = made


def publish_evaluations(run: RunFolder, tag: str) -> None:
    """Publish the scores of all evaluations of a run, and tag the flow run with its own."""

    def publish() -> None:
        tag_flow_run(tag)
        _create_evaluations(run)

    publish_beside(UI_NAME, publish)


def publish_stages(run: RunFolder) -> None:
    """Write the report of stages or of a sweep, and publish their table."""
    write_run_report(run)

    def describe() -> str:
        tables = [markdown_table(*table) for table in read_plan(run).tables()]
        return "\n\n".join([*tables, f"[report]({run.report})"])

    words = f"What the runs of {run.name} have come to"
    publish_beside(UI_NAME, partial(_create_markdown, run, "stages", describe, words))


def publish_tag(tag: str) -> None:
    """Give the flow run a tag, which the list of runs shows."""
    publish_beside(UI_NAME, partial(tag_flow_run, tag))


def write_run_report(run: RunFolder) -> None:
    from ratchet.tasks.reports.page import write_report  # Jinja loads slowly, and only for this

    with _unless_unreadable(run, "report"):
        write_report([run], run.report)


@contextmanager
def _failing() -> Iterator[None]:
    """Raise TrackerFailed for an error of a server that is away or refuses."""
    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
        raise TrackerFailed(f"{type(error).__name__}: {error}") from error


@contextmanager
def _unless_unreadable(run: RunFolder, what: str) -> Iterator[None]:
    """Warn if a damaged file keeps a page from being made."""
    try:
        yield
    except UNREADABLE as error:
        log.warning("the %s of %s cannot be shown: %s", what, run.path, error)


def _create_evaluations(run: RunFolder) -> None:
    with _failing():
        shown = Artifact.get(artifact_key(run.name, "progress"))
    trained_by = shown.flow_run_id if isinstance(shown, SavedArtifact) else None

    def describe() -> str:
        return describe_training(run, trained_by) + describe_evaluations(run)

    _create_markdown(run, "evaluations", describe, f"Every evaluation of {run.name}")


def _create_markdown(run: RunFolder, what: str, describe: Callable[[], str], words: str) -> None:
    text = None
    with _unless_unreadable(run, what):
        text = describe()
    if text is not None:
        with _failing():
            key = artifact_key(run.name, what)
            create_markdown_artifact(text, key=key, description=words)


def artifact_key(run: str, what: str) -> str:
    """Return the key of a run's artifact, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run}-{what}".lower()).strip("-")


def describe_curves(run: RunFolder) -> str:
    """Show the curves of a run as a picture, and say where its report is."""
    with open_views([run], ["spans"]) as views:
        curves = [read_facts(run).curves(views)]
    if run.given_files():
        measures, legend = plots.draw_panels(curves, plots.LEARNT), ""
    else:
        measures = [plots.draw_rewards(curves)[0], *plots.draw_named_rewards(curves)]
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
"""Metrics of a divergence; a table has the first of them that the run has."""


def metric_rows(run: RunFolder) -> list[dict[str, float | None]]:
    """Return the metrics of a run that one reads first, a row a step; a column has some value.

    The held-out reward or loss belongs to the checkpoint which the step made. Entropy and KL are
    measured on the main policy; KL is the first of DIVERGENCES that the run has.
    """
    facts = read_facts(run)
    held_out, tokens = facts.held_out.by_step, facts.tokens
    rows = [
        {
            "step": made,
            "reward": row.get("reward/mean"),
            "loss": row.get("loss"),
            "held-out": held_out.get(made),
            "entropy": row.get("entropy"),
            "KL": next((row[name] for name in DIVERGENCES if name in row), None),
            "tokens": round(tokens[made] - tokens[made - 1]),
            "failed": row.get("rollouts/failed"),
            "seconds": spent_seconds([row]),
        }
        for made, row in enumerate(facts.metrics, 1)
    ]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    return [
        {name: float(f"{of:.4g}") if isinstance(of := row[name], float) else of for name in names}
        for row in rows
    ]


def describe_evaluations(run: RunFolder) -> str:
    """List every evaluation of a run, and the checkpoints that were scored."""
    ledger, saved = Ledger(run.checkpoints(POLICY)), {}
    for path in run.evaluations():
        if (checkpoint := ledger.find(step := int(path.stem[:5]))) is not None:
            sampler = f"`{shorten(checkpoint.sampler, LONGEST_PATH)}`"
            saved[step] = [step, sampler, "no" if checkpoint.state is None else "yes"]
    names, *rows = (
        [step, reward, interval, examples, failed, how, category, *more]
        for table in [list_evaluations(run.evaluations())]
        for step, how, category, examples, failed, reward, interval, *more in (table[0], *table[1])
    )
    names[1] = f"held-out {names[1]}"
    heads = ["step", "weights to sample from", "can be trained on"]
    weights = markdown_table(heads, saved.values())
    whole = f"The paths are whole in `{run.checkpoints(POLICY)}`.\n"
    table = markdown_table([*map(str, names)], rows)
    return "\n".join([table, weights, *([whole] if saved else [])])


def tag_flow_run(tag: str) -> None:
    """Give the current flow run a tag, in place of a tag that begins with the same word."""
    if (id := flow_run.id) is None:
        return
    with _failing(), get_client(sync_client=True) as client:
        word, current = tag.split()[0], UUID(id)
        tags = client.read_flow_run(current).tags
        client.update_flow_run(
            current, tags=[*(other for other in tags if other.split()[:1] != [word]), tag]
        )


def describe_training(run: RunFolder, flow_run: UUID | None) -> str:
    """Link what trained the run, in a sentence; empty if no training flow is known."""
    if flow_run is None:
        return ""
    name = re.sub(r"([\\`*_{}\[\]<>#&~])", r"\\\1", run.name)  # what Markdown interprets
    trained = f"[{name}]({UI}/runs/flow-run/{flow_run})"
    return f"The flow run {trained} trained these checkpoints. {_links(run)}.\n\n"


def _links(run: RunFolder) -> str:
    keys = {what: artifact_key(run.name, what) for what in TRAINING_ARTIFACTS}
    links = ", ".join(f"[{what}]({UI}/artifacts/key/{key})" for what, key in keys.items())
    return f"Artifacts of the run: {links}"


def tracker_openers(
    run: RunFolder, run_id: str, recipe: Mapping[str, Any], chosen: Tracking
) -> dict[str, Callable[[], Tracker]]:
    """Map the trackers of a run, Prefect's pages and a chosen other one, to what opens them."""
    pages, config = PrefectPages(run), public(flatten(recipe))
    openers: dict[str, Callable[[], Tracker]] = {UI_NAME: lambda: pages}
    if chosen.project is not None:
        openers["W&B"] = partial(WandbTracker, chosen, run, run_id, config)
    return openers
