"""A Prefect server of one's own, and the deployments of prefect.yaml on it."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO
from urllib.parse import urlsplit

from prefect.cli import app as prefect_app
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import TERMINAL_STATES, DeploymentSchedule, StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    get_current_settings,
    temporary_settings,
)
from prefect.workers.process import ProcessWorker

from ratchet.adapters.errors import UserError
from ratchet.adapters.network.addresses import LOOPBACK, check_listener
from ratchet.adapters.process.terminal import show, terminal_width
from ratchet.flows.recipe.loading import ENTRYPOINTS, read_deployments
from ratchet.flows.server.embedded_server import CONSOLE
from ratchet.flows.server.prefect_startup import RETRIED, check_server
from ratchet.tasks.reports.tables import fitted

POOL = "ratchet"
"""The work pool of the deployments."""
POOL_TYPE = "process"
PREFECT = (sys.executable, "-P", "-m", "prefect")
ELSEWHERE = "name another one by PREFECT_API_URL"
"""What else than to start a server mends that none answers."""

FLOW_NAMES = (*ENTRYPOINTS.values(), "replay", "evaluate", "compare", "dryrun")
"""Names of the flows of Ratchet, as the server has them."""
AUTOMATION = "ratchet: crash flow runs without a heartbeat"
"""Name of the automation that `ratchet deploy` makes."""

DEPLOYED = ("deployment", "schedule", "work pool", "what it does")
BOX = "╭─╮│╰╯ "
"""Letters of the frames that Prefect prints."""
CREATED = re.compile(r"Deployment '(?P<name>.+?)' successfully created with id '(?P<id>[^']+)'")
"""Line that Prefect prints for each deployment that it has made."""
UNWRAPPED = "1000"
"""Width for Prefect's output: no line of it may break."""


def run_server(port: int) -> None:
    """Become a Prefect server on loopback, with its UI, which would ask port 4200 for its data."""
    _check_database(PREFECT_API_DATABASE_CONNECTION_URL.value())
    own = {
        "PREFECT_UI_API_URL": f"http://{LOOPBACK}:{port}/api",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",  # pages of deleted runs
    }
    variables = {**own, **CONSOLE, **os.environ}
    show("next: `ratchet deploy`, `ratchet worker`", sys.stderr)
    words = ("server", "start", "--host", LOOPBACK, "--port", str(port))
    os.execve(PREFECT[0], [*PREFECT, *words], variables)


def _check_database(address: str) -> None:
    """Raise UserError if nothing listens at a database's address; SQLite has none."""
    if host := urlsplit(address).hostname:
        remedy = "start it, or mend or unset PREFECT_API_DATABASE_CONNECTION_URL"
        check_listener(address, f"the database at {host}", remedy)


def client_environment() -> dict[str, str]:
    """Return the variables of a server's clients: it is `run_server`'s unless another is set."""
    api = PREFECT_API_URL.value() or f"http://{LOOPBACK}:4200/api"
    return {**RETRIED, **os.environ, "PREFECT_API_URL": api, "PWD": str(Path.cwd())}


@dataclass(frozen=True)
class Deployed:
    """A deployment on the server."""

    deployment: str
    schedule: str
    work_pool: str | None
    description: str | None


def deploy_file(file: Path, name: str | None = None) -> list[Deployed]:
    """Deploy the deployments of a file, or only `name`, and make the work pool."""
    for one, values in read_deployments(file).items():
        if name in (None, one) and "prefect.blocks.secret" in str(values | {"pull": None}):
            raise UserError(
                f"{file} gives {one} a Secret block, whose value Prefect would keep in clear among "
                "the deployment's variables; set that variable where `ratchet worker` is started"
            )
    check_server(address := client_environment()["PREFECT_API_URL"], ELSEWHERE)
    pool = WorkPoolCreate(
        name=POOL, type=POOL_TYPE, base_job_template=ProcessWorker.get_default_base_job_template()
    )
    with temporary_settings({PREFECT_API_URL: address}), get_client(sync_client=True) as client:
        client.create_work_pool(pool, overwrite=True)
        chosen = ("--all",) if name is None else ("--name", name)
        said = _call_prefect("deploy", *chosen, "--prefect-file", str(file))
        made = {one["name"]: one["id"] for one in CREATED.finditer(said)}
        if not made:
            raise UserError(f"Prefect deploys nothing of {file}; mend what it says:\n{said}")
        _crash_silent_flow_runs(client)
        on_server = {name: client.read_deployment(id) for name, id in made.items()}
    return [
        Deployed(
            name,
            ", ".join(map(_describe_schedule, one.schedules)) or "none",
            one.work_pool_name,
            one.description or None,
        )
        for name, one in on_server.items()
    ]


def describe_deployed(deployed: Sequence[Deployed]) -> str:
    """Return a table of deployments, and the commands that come next.

    They name the server, since Prefect starts another one where no server is named.
    """
    table = fitted(DEPLOYED, [*map(astuple, deployed)], terminal_width(), DEPLOYED[-1:])
    first = min((one.deployment for one in deployed), key=lambda name: name[:6] != "train/")
    server = f"PREFECT_API_URL={client_environment()['PREFECT_API_URL']}"
    ratchet, prefect = map(_beside, ("ratchet", "prefect"))
    workers = {
        f"{ratchet} worker" if pool in (None, POOL) else f"{prefect} worker start --pool {pool}"
        for pool in (one.work_pool for one in deployed)
    }
    commands = [f"{one}      # runs what is scheduled, until Ctrl-C" for one in sorted(workers)]
    commands += [f"{prefect} deployment run {first} --watch"]
    return f"\n    {server} ".join((f"{table}\n\nnext, in a terminal each:", *commands))


def _beside(command: str) -> str:
    """Return the path by which a shell in this folder finds a command of this environment."""
    path = Path(sys.executable).with_name(command)
    if shutil.which(command) == str(path):
        return command
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


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


def _call_prefect(*words: str) -> str:
    """Return the output of a command of Prefect's; UserError with it if the command fails.

    The command runs in a fork of this process, which has imported Prefect.
    """
    with TemporaryFile("w+") as output:
        process = get_context("fork").Process(target=_become_prefect, args=(words, output))
        process.start()
        process.join()
        output.seek(0)
        said = output.read()
    if process.exitcode:
        said = "\n".join(filter(None, (line.strip(BOX) for line in said.splitlines())))
        raise UserError(f"`prefect {' '.join(words)}` fails; mend that, and deploy again:\n{said}")
    return said


def _become_prefect(words: Sequence[str], output: TextIO) -> None:
    """Run a command of Prefect's, which writes to a file whatever it says."""
    sys.argv = ["prefect", "--no-prompt", *words]
    sys.stdout = sys.stderr = output
    os.environ |= {"COLUMNS": UNWRAPPED, "PWD": str(Path.cwd())}
    # A server whose database is SQLite answers 503 while runs write to it.
    with temporary_settings(
        {PREFECT_CLIENT_RETRY_EXTRA_CODES: "500", PREFECT_CLIENT_MAX_RETRIES: 8}
    ):
        prefect_app()


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
