"""Deployments of prefect.yaml → a Prefect server, and a table of what is on the server then."""

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import TERMINAL_STATES, DeploymentSchedule, StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import terminal_width
from ratchet.flows.server.prefect_server import (
    POOL,
    POOL_TYPE,
    PREFECT,
    check_server,
    client_environment,
)
from ratchet.tasks.reports.tables import GAP, fitted

FLOW_NAMES = (
    "train",
    "finetune",
    "prefer",
    "stages",
    "sweep",
    "replay",
    "evaluate",
    "compare",
    "dryrun",
)
"""Names of the flows of Ratchet, as the server has them."""
AUTOMATION = "ratchet: crash flow runs without a heartbeat"
"""Name of the automation that `ratchet deploy` makes."""

DEPLOYMENT_COLUMNS = ("deployment", "schedule", "work pool", "what it does")
NARROWEST = 20
"""Fewest letters of a description that is cut."""
BOX = "╭─╮│╰╯ "
"""Letters of the frames that Prefect prints."""
CREATED = re.compile(r"Deployment '(?P<name>.+?)' successfully created with id '(?P<id>[^']+)'")
"""Line that Prefect prints for each deployment that it has made."""
UNWRAPPED = "1000"
"""Width for Prefect's output: no line of it may break."""


@dataclass(frozen=True)
class Deployed:
    """A deployment on the server."""

    deployment: str
    schedule: str
    work_pool: str | None
    description: str


def deploy_files(files: Iterable[Path], name: str | None = None) -> list[Deployed]:
    """Deploy all deployments of the files, or only `name`; later files override earlier ones."""
    variables = client_environment()
    address = variables["PREFECT_API_URL"]
    check_server(variables)
    _call_prefect(variables, "work-pool", "create", POOL, "--type", POOL_TYPE, "--overwrite")
    chosen = ("--all",) if name is None else ("--name", name)
    made: dict[str, str] = {}
    for file in files:
        words = ("--no-prompt", "deploy", *chosen, "--prefect-file", str(file))
        said = _call_prefect(variables, *words)
        found = {one["name"]: one["id"] for one in CREATED.finditer(said)}
        if not found:
            raise UserError(f"Prefect deploys nothing of {file}; mend what it says:\n{said}")
        made = found | {other: id for other, id in made.items() if other not in found}
    with temporary_settings({PREFECT_API_URL: address}), get_client(sync_client=True) as client:
        _crash_silent_flow_runs(client)
        on_server = {name: client.read_deployment(id) for name, id in made.items()}
    return [
        Deployed(
            name,
            ", ".join(map(_describe_schedule, one.schedules)) or "none",
            one.work_pool_name,
            one.description or "",
        )
        for name, one in on_server.items()
    ]


def describe_deployed(deployed: Sequence[Deployed]) -> str:
    """Return a table of deployments, and the commands that come next."""
    address = client_environment()["PREFECT_API_URL"]
    names = [one.deployment for one in deployed]
    return f"{_table(deployed)}\n\n{_next_commands(address, names)}"


def _crash_silent_flow_runs(client: SyncPrefectClient) -> None:
    """Have the server crash flow runs of ours whose process and worker have died.

    A flow run counts as dead when three of its heartbeats are missing. An automation that exists
    under the name AUTOMATION is not changed.
    """
    every = get_current_settings().flows.heartbeat_frequency
    if every is None or client.read_automations_by_name(AUTOMATION):
        return
    seconds, beat = 3 * every, "heartbeat"
    silent = ["Suspended", *(state.value.title() for state in TERMINAL_STATES)]
    trigger = EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": [*FLOW_NAMES]},
        after={f"prefect.flow-run.{beat}"},
        expect={f"prefect.flow-run.{name}" for name in (beat, *silent)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        within=timedelta(seconds=seconds),
    )
    said = f"no heartbeat for {seconds} s: its process, or the machine, is dead or stands still"
    crash = ChangeFlowRunState(name=None, state=StateType.CRASHED, message=said, force=False)
    client.create_automation(AutomationCore(name=AUTOMATION, trigger=trigger, actions=[crash]))


def _call_prefect(variables: Mapping[str, str], *words: str) -> str:
    """Return the output of a command of Prefect's; UserError with its end if the command fails."""
    done = subprocess.run(
        [*PREFECT, *words],
        env={**variables, "COLUMNS": UNWRAPPED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(filter(None, (line.strip(BOX) for line in done.stdout.splitlines())))
        _, begun, last = said.rpartition("\nDeploying ")
        named, _, why = last.partition("\n") if begun else ("", "", said)
        if "Traceback (most recent call last):" in why:
            why = why.removesuffix("\nAn exception occurred.").splitlines()[-1]
        at = f" at {named}" if named else ""
        raise UserError(
            f"`prefect {' '.join(words)}` stops{at}: {why}\nMend that, and deploy again"
        )
    return done.stdout


def _table(deployed: Sequence[Deployed]) -> str:
    rows: list[list[object]] = [[of.deployment, of.schedule, of.work_pool] for of in deployed]
    names = DEPLOYMENT_COLUMNS[:-1]
    width = terminal_width()
    widest = max(map(len, fitted(names, rows, width, names).splitlines()))
    room = max(NARROWEST, width - widest - len(GAP))
    for row, of in zip(rows, deployed, strict=True):
        row.append(textwrap.shorten(of.description, room, placeholder=" …") or None)
    return fitted(DEPLOYMENT_COLUMNS, rows, width, DEPLOYMENT_COLUMNS)


def _describe_schedule(of: DeploymentSchedule) -> str:
    """Describe a schedule as prefect.yaml writes it: a cron line, an interval or an rrule."""
    match of.schedule:
        case CronSchedule(cron=cron, timezone=zone):
            said = f"{cron} {zone or 'UTC'}"
        case IntervalSchedule(interval=interval):
            said = f"every {interval}"
        case RRuleSchedule(rrule=said):
            pass
        case _:
            said = "none"
    return said if of.active else f"{said} (paused)"


def _next_commands(address: str, names: list[str]) -> str:
    """Return the commands that start a worker and run a deployment, for a shell.

    Each names the server, since Prefect starts another one where no server is named.
    """
    trainings = [name for name in names if name.startswith("train/")]
    server = f"PREFECT_API_URL={address} "
    of_worker = server if PREFECT_API_URL.value() else ""  # a worker knows the usual address
    commands = [
        f"{of_worker}{_beside('ratchet')} worker      # runs what is scheduled, until Ctrl-C",
        f"{server}{_beside('prefect')} deployment run {[*trainings, *names][0]} --watch",
    ]
    return "\n".join(["next, in a terminal each:", *(f"    {command}" for command in commands)])


def _beside(command: str) -> str:
    """Return the path by which a shell in this folder finds a command of this environment."""
    path = Path(sys.executable).with_name(command)
    if shutil.which(command) == str(path):
        return command
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
