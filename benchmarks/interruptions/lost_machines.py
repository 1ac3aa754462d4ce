"""A deployed run whose machine is lost again and again, and which other machines go on with.

Hosts are network namespaces of this machine (Linux, root). One has a Prefect server on PostgreSQL,
and an object store, which has the runs; one plays the rollouts, for Dask; and each further one has
a worker of the server, with a project, a copy of the runs and a Prefect home of its own. The one
that trains is lost at random moments: it is cut off, all of its processes are killed, and its files
are removed. The first losses of a run are followed by Prefect's *Retry*, which the next machine's
worker takes, the others by `ratchet resume` there; the door's address moves along. At its end the
run is brought from the store to a host that never had it, and compared with an uninterrupted run in
threads. The exit status is 1 if anything differs or was done twice.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from benchmarks.interruptions.compare_runs import seconds_to_first_token, stage_of
from benchmarks.interruptions.killable_runs import size_of
from benchmarks.measuring import describe_machine
from benchmarks.servers.hosts import NETWORK, ROOT, SCHEDULER, WORKER, Hosts, dask
from benchmarks.servers.postgres import running_postgres
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import wait_until
from tests.support.servers.prefect_team import (
    HEARTBEAT_SECONDS,
    RUNNING_SECONDS,
    answers,
    create_flow_run,
    prefect_api,
    press_retry,
    read_log,
    wait_for_end,
)
from tests.support.stores.object_store import variables_for

SERVER, PLAYERS = "server", "players"
DOOR = f"{NETWORK}.200"
"""Address of the flow's door, which the machine that trains has beside its own."""
STORE, STORE_PORT = "s3://team/runs", 8333
RATCHET = f"{sys.executable} -m ratchet.flows.cli.main"
RETRY, RESUME = "Retry", "ratchet resume"
SPREAD = 0.8
"""Share of a run's bytes over which its kills are spread."""
AFTER_SECONDS = 1.0
"""Longest time from a write to a kill."""
LOOK_SECONDS = 0.1
"""Time between two looks at what is waited for, beside which a machine has to train."""

RECIPE: dict[str, Any] = {
    "agent": "talks:talks",
    "dataset": {"path": "datasets/talks.jsonl", "columns": []},
    "steps": 12,
    "optimizer": {"learning_rate": 0.005},
    "evaluation": {"examples": 2, "every": 3, "greedy": False},
    "checkpoints": {"every": 3},
}
ROLLOUTS = {"groups": 4, "group_size": 4, "max_tokens": 8, "batches": 4, "runner": "dask"}
ALONE = ("runner=threads", "cluster=null", "door=null", "batches=1")
"""Settings by which the uninterrupted run plays its rollouts."""

SERVED = """
import signal, sys
from pathlib import Path
from tests.support.stores.object_store import object_store

folder, url, *options = sys.argv[1:]
with object_store(Path(folder), *options, url=url):
    Path(folder, "up").touch()
    signal.pause()
"""
"""Program that is the object store."""
JUDGED = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.interruptions.compare_runs import count_repetitions, list_faults, read_contents
from ratchet.tasks.storage.run_folder import RunFolder, folder_of

run, reference = folder_of(sys.argv[1]).fetched(whole=True), RunFolder(Path(sys.argv[2]))
print(json.dumps([list_faults(run, read_contents(reference)), asdict(count_repetitions(run))]))
"""
"""Program that prints the faults of a run, and what it has repeated and lost."""


@dataclass
class Loss:
    """A machine that was lost, and how the next one went on."""

    stage: str
    """What the run was doing."""
    way: str
    noticed: float | None = None
    """Seconds until the server called the flow run *Crashed*, if that was waited for."""
    first_token: float | None = None
    """Seconds from *Retry* or the command to the first newly sampled token."""


@dataclass
class Team:
    """The hosts, what runs on them, and the machine that has the door's address."""

    hosts: Hosts
    folder: Path
    api: httpx.Client
    """The Prefect server's."""
    machine: str = ""
    started: int = 0
    """Machines that were ever started."""
    losses: list[Loss] = field(default_factory=list)
    verdicts: dict[str, tuple[list[str], dict[str, int]]] = field(default_factory=dict)
    """By run, its faults, and what it has repeated and lost."""

    @property
    def reference(self) -> RunFolder:
        """The uninterrupted run."""
        return RunFolder(self.folder / "uninterrupted" / "talks")

    def run(self, host: str, name: str, script: str, **variables: str) -> None:
        """Start a script in the project of a host."""
        mine = self.folder / "hosts" / host
        own = {
            "PREFECT_API_URL": str(self.api.base_url).rstrip("/"),
            "PREFECT_HOME": str(mine / "prefect"),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
            "XDG_CACHE_HOME": str(mine / "cache"),
            "RATCHET_RUNS": STORE,
            **variables_for(STORE_PORT),
            "AWS_ENDPOINT_URL": store_url(self.hosts),
        }
        project = make_project(mine, self.hosts.address(PLAYERS), self.folder / "players")
        self.hosts.run(host, name, script, project, **own | variables)

    def run_to_end(self, host: str, name: str, script: str, **variables: str) -> None:
        """Run a script that must succeed."""
        self.run(host, name, f"exec {script}", **variables)
        self.expect_end(name)

    def expect_end(self, name: str) -> None:
        """Wait for the end of a script; SystemExit if it failed."""
        if status := self.hosts.wait(name):
            raise SystemExit(f"{name} ended with {status}: {self.said(name)}")

    def said(self, name: str) -> str:
        """Return what a script has printed."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def copy_of(self, run: str) -> RunFolder:
        """Return the copy of a run on the machine that trains; it may not be there yet."""
        stores = self.folder / "hosts" / self.machine / "cache" / "ratchet" / "stores"
        return RunFolder(next(stores.glob(f"*/{run}"), stores / run))

    def start_machine(self) -> str:
        """Start a machine; return its name once its worker looks for flow runs."""
        self.started += 1
        self.hosts.add(name := f"machine-{self.started}")
        self.run(name, name, f"exec {RATCHET} worker")
        looking = partial(self.api.post, "/work_pools/ratchet/workers/filter", json={})
        wait_until(
            f"the worker of {name}", lambda: len(looking().json()) == self.started, RUNNING_SECONDS
        )
        return name

    def give_door(self, machine: str) -> None:
        """Give a machine the address of the door."""
        self.machine = machine
        self.hosts.give(machine, DOOR)

    def lose_machine(self) -> float:
        """Lose the machine that trains, and its files; return when."""
        lost = self.hosts.remove(self.machine)
        shutil.rmtree(self.folder / "hosts" / self.machine)
        return lost

    def judge(self, run: str) -> None:
        """Compare a run in the store, on a host that has none of it, with the uninterrupted one."""
        words = [sys.executable, "-c", JUDGED, run, str(self.reference.path)]
        self.run_to_end(SERVER, f"judge-{run}", shlex.join(words))
        self.verdicts[run] = json.loads(self.said(f"judge-{run}").splitlines()[-1])

    def hosts_that_played(self) -> set[str]:
        """Return the hosts that have played a rollout."""
        lines = (self.folder / "players").read_text(encoding="utf-8").splitlines()
        return {line.split()[1] for line in lines}


class Training:
    """A flow run of the deployment, and the machines that it is lost with."""

    def __init__(self, team: Team, run: str) -> None:
        self._team, self._run = team, run
        deployment = team.api.get("/deployments/name/train/talks").json()["id"]
        self._flow_run = create_flow_run(team.api, deployment, {"run": run})
        self._way, self._asked = "", time.time()

    def wait_for(self, size: float) -> None:
        """Wait until the machine that trains has so many bytes of the run."""

        def has_written() -> bool:
            time.sleep(LOOK_SECONDS)
            copy = self._team.copy_of(self._run)
            return copy.exists() and size_of(copy) >= size

        wait_until(f"{self._run} has {size:.0f} bytes", has_written, RUNNING_SECONDS)

    def move(self, spare: str, way: str) -> None:
        """Lose the machine that trains, and have a spare one go on."""
        self._note_first_token()
        loss = Loss(stage_of(self._team.copy_of(self._run)), way)
        lost = self._team.lose_machine()
        self._team.losses.append(loss)
        self._team.give_door(spare)
        if way == RETRY:
            wait_until("the server notices", self._has_crashed, RUNNING_SECONDS)
            loss.noticed = time.time() - lost
            press_retry(self._team.api, self._flow_run)
        else:
            words = f"exec {RATCHET} resume {STORE}/{self._run}"
            self._team.run(spare, f"{self._run}-on-{spare}", words)
        self._way, self._asked = way, time.time()

    def end(self) -> None:
        """Wait for the end of the run, and judge it."""
        if self._way == RESUME:
            self._team.expect_end(f"{self._run}-on-{self._team.machine}")
        else:
            ended = wait_for_end(self._team.api, self._flow_run)
            assert ended["state"]["type"] == "COMPLETED", read_log(self._team.api, self._flow_run)
        self._note_first_token()
        self._team.judge(self._run)

    def _has_crashed(self) -> bool:
        time.sleep(LOOK_SECONDS)
        state = self._team.api.get(f"/flow_runs/{self._flow_run}").json()["state"]
        return state["type"] == "CRASHED"

    def _note_first_token(self) -> None:
        """Note how soon a machine that went on with another one's run has sampled."""
        if self._way:
            copy = self._team.copy_of(self._run)
            self._team.losses[-1].first_token = seconds_to_first_token(copy, self._asked)


@contextmanager
def open_team(folder: Path) -> Iterator[Team]:
    """Start the hosts and all that is on them; deploy the project, and train it uninterrupted."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(folder, PLAYERS, SERVER))
        hosts.certify(hosts.address(SERVER), DOOR)
        stack.enter_context(hosts.inside(SERVER))
        files = stack.enter_context(tempfile.TemporaryDirectory())  # PostgreSQL's user reaches it
        database = stack.enter_context(running_postgres(Path(files)))
        url = f"http://{hosts.address(SERVER)}:4200/api"
        team = Team(hosts, folder, stack.enter_context(prefect_api(url)))
        start_services(team, database.url)
        team.run_to_end(SERVER, "deploy", f"{RATCHET} deploy")
        alone = " ".join(f"--set rollouts.{setting}" for setting in ALONE)
        script = f"{RATCHET} train talks --run talks {alone}"
        runs = str(team.reference.path.parent)
        team.run_to_end(SERVER, "uninterrupted", script, RATCHET_RUNS=runs)
        team.give_door(team.start_machine())
        yield team


def start_services(team: Team, database: str) -> None:
    """Start the object store, the Prefect server, and Dask's scheduler and worker."""
    (weed := team.folder / "store").mkdir()
    keys = team.folder / "certs" / "node"
    words = [sys.executable, "-c", SERVED, str(weed), store_url(team.hosts)]
    words += [f"-s3.ip.bind={team.hosts.address(SERVER)}"]
    words += [f"-s3.cert.file={keys}.pem", f"-s3.key.file={keys}.key"]
    team.run(SERVER, "store", f"exec {shlex.join(words)}")
    command = f"exec {sys.executable} -m prefect server start --host 0.0.0.0"
    team.run(SERVER, "prefect", command, PREFECT_API_DATABASE_CONNECTION_URL=database)
    team.run(PLAYERS, "scheduler", dask(SCHEDULER))
    team.run(PLAYERS, "worker", dask(WORKER))
    wait_until("the server answers", partial(answers, team.api), RUNNING_SECONDS)
    wait_until("the store answers", (weed / "up").exists, RUNNING_SECONDS)


def store_url(hosts: Hosts) -> str:
    """Return the URL of the object store."""
    return f"https://{hosts.address(SERVER)}:{STORE_PORT}"


def make_project(host: Path, scheduler: str, players: Path) -> Path:
    """Return the folder of a host's project, which each host has for itself.

    Each rollout adds a line with its host to the file `players`.
    """
    if (project := host / "project").exists():
        return project
    for name in ("agents", "datasets"):
        (project / name).mkdir(parents=True)
    shutil.copy(ROOT / "tests/support/agents/dask_agents.py", project / "agents/talks.py")
    told = {"calls": 3, "thinks": 0.3, "player": str(players)}
    rows = [
        json.dumps({"number": number, "split": split, **told})
        for split, many in (("train", 4), ("test", 2))
        for number in range(many)
    ]
    (project / "datasets/talks.jsonl").write_text("\n".join(rows), encoding="utf-8")
    recipe = RECIPE | {
        "rollouts": ROLLOUTS
        | {"cluster": f"tls://{scheduler}:8786", "door": f"https://{DOOR}:8600"}
    }
    deployment: dict[str, Any] = {"name": "talks", "work_pool": {"name": "ratchet"}}
    deployment |= {"entrypoint": "ratchet.flows.train.train", "parameters": {"recipe": recipe}}
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]
    described = {"name": "talks", "pull": pull, "deployments": [deployment]}
    (project / "prefect.yaml").write_text(json.dumps(described), encoding="utf-8")
    return project


def train(team: Team, run: str, kills: int, random: Random) -> None:
    """Train a run by the deployment, lose its machine so many times, and judge it at its end."""
    training = Training(team, run)
    for number in range(kills):
        training.wait_for(1)  # it has begun, so that the spare machine's worker does not begin it
        spare = team.start_machine()
        training.wait_for(SPREAD * size_of(team.reference) * (number + random.random()) / kills)
        time.sleep(random.uniform(0, AFTER_SECONDS))
        training.move(spare, RETRY if number < (kills + 1) // 2 else RESUME)
    training.end()


def report(team: Team) -> str:
    """Describe what was lost, how soon others went on, and what the runs are like."""
    losses = team.losses
    stages = Counter(loss.stage for loss in losses)
    lines = [f"{len(losses)} machines were lost, during: {dict(stages)}"]
    lines += [
        f"from {way} to the first new token: {_spread([one.first_token for one in of])}"
        for way in (RETRY, RESUME)
        if (of := [loss for loss in losses if loss.way == way])
    ]
    lines += [f"from a loss to *Crashed*: {_spread([loss.noticed for loss in losses])}"]
    lines += [f"{run}: {of[0] or 'no fault'}, {of[1]}" for run, of in team.verdicts.items()]
    return "\n".join(lines)


def _spread(seconds: Sequence[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    if not known:
        return "never seen"
    return f"{median(known):.0f} s ({min(known):.0f}-{max(known):.0f}, {len(known)} times)"


def main() -> None:
    """Run the story from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=10, help="machines that are lost")
    options.add_argument("--each", type=int, default=5, help="machines that one run loses")
    options.add_argument("--seed", type=int, default=0, help="seed of the moments")
    arguments = options.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as made, open_team(Path(made)) as team:
        for number, begun in enumerate(range(0, arguments.kills, arguments.each)):
            kills = min(arguments.each, arguments.kills - begun)
            train(team, f"talks-{number}", kills, Random(f"{arguments.seed}/{number}"))
            print(report(team), flush=True)
        faults = [fault for faults, _ in team.verdicts.values() for fault in faults]
        faults += [f"{one} played" for one in team.hosts_that_played() - {PLAYERS, SERVER}]
    raise SystemExit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
