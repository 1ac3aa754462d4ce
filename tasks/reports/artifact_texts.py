"""A run → the texts of its artifacts in Prefect's UI: Markdown with its curves and evaluations.

The UI shows no file of this machine, so the curves are inside the text. Links name no server: they
begin at the page of an artifact, which lies two folders below the UI's address.
"""

import re
from base64 import b64encode
from uuid import UUID

from adapters.calls import POLICY
from tasks.checkpoints import Ledger
from tasks.evaluations import read_evaluation
from tasks.recording.views import open_views
from tasks.reports.curves import read_curves
from tasks.reports.tables import markdown_table, score_rows
from tasks.reports.transcripts import transcripts
from tasks.storage.arrivals import batches_of
from tasks.storage.names import BASELINE, parse_batch
from tasks.storage.run_folder import RunFolder

UI = "../.."
TRAINING_ARTIFACTS = ("curves", "metrics", "transcripts", "evaluations")
"""Artifacts that a training flow leaves."""


def artifact_key(run: RunFolder, what: str) -> str:
    """Return an artifact's key, of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run.name}-{what}".lower()).strip("-")


def describe_curves(run: RunFolder) -> str:
    """Show the curves of a run as a picture, and say where its report is."""
    from tasks.reports.plots import (  # matplotlib loads slowly, and only for this
        draw_panels,
        draw_rewards,
        draw_role_rewards,
        join_drawings,
    )

    with open_views([run], ("spans", "evaluations")) as views:
        curves = [read_curves(run, views)]
    drawn = [draw_rewards(curves)[0], *draw_role_rewards(curves), *draw_panels(curves)]
    image = b64encode(join_drawings(drawn).encode()).decode()
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
