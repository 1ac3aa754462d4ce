"""Where workers find the doors of runs: in their folders, and on the Prefect server.

A run that wants workers writes its door's address and its token into its folder, for this user of
this machine alone. Whoever is elsewhere finds the address as a label of the flow run on the Prefect
server. The token is nowhere but in that file and, if it was set there, in RATCHET_TOKEN.
"""

import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from adapters.loopback import EVERYWHERE, LOOPBACK
from tasks.files import appearing
from tasks.runs import runs_root

FILE = "door.json"
LABEL = "ratchet.door"
TOKEN = "RATCHET_TOKEN"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announced:
    """A door that workers may come to, with the token that lets them in."""

    url: str
    token: str


def run_token() -> str:
    """RATCHET_TOKEN, which workers elsewhere need as well; or any, for workers of this machine."""
    return os.environ.get(TOKEN) or secrets.token_urlsafe(32)


@contextmanager
def announced(folder: Path, door: Announced) -> Iterator[None]:
    """Let workers find the door of the run in `folder` while the block runs."""
    door = replace(door, url=door.url.replace(f"//{EVERYWHERE}:", f"//{own_address()}:"))
    path = folder / FILE
    with appearing(path) as aside:
        aside.touch(mode=0o600)
        aside.write_text(json.dumps({"url": door.url, "token": door.token}))
    if flow_run.id:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(flow_run.id, {LABEL: door.url})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def own_address() -> str:
    """By which others reach this machine: where the Prefect server sees it, otherwise its name."""
    server = urlsplit(PREFECT_API_URL.value() or "").hostname or LOOPBACK
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((server, 1))  # which only looks up the way; nothing is sent
        address: str = route.getsockname()[0]
        if not ip_address(address).is_loopback:
            return address
    return socket.getfqdn()


def found_doors() -> list[Announced]:
    """Those of this machine's runs, and those that the Prefect server knows; some may be closed.

    Of the latter the token must be set.
    """
    doors = list(_in_folders())
    token = os.environ.get(TOKEN)
    if PREFECT_API_URL.value() and token:
        doors += [Announced(url, token) for url in _on_the_server()]
    return list(dict.fromkeys(doors))


def _in_folders() -> Iterator[Announced]:
    for pattern in (f"*/{FILE}", f"*/*/{FILE}"):
        for path in runs_root().glob(pattern):
            with suppress(FileNotFoundError):  # the run has just ended
                yield Announced(**json.loads(path.read_text()))


def _on_the_server() -> list[str]:
    """The addresses of the runs that run, or were killed and are thought to."""
    running = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    )
    try:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=running)
    except httpx.HTTPError as error:
        log.warning("the Prefect server at %s does not answer: %r", PREFECT_API_URL.value(), error)
        return []
    return [cast(str, run.labels[LABEL]) for run in runs if LABEL in run.labels]
