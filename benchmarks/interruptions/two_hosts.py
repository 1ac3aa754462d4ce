"""A training run whose rollouts are played on other hosts, while these die, vanish and come.

The hosts are network namespaces of this machine (Linux, root), which run the commands of
docs/scaling.md. In one run a host joins, one is killed, one loses its network, and the flow is
killed and resumed; its datums must then be those of a run in threads, byte for byte.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.servers.hosts import (
    SCHEDULER,
    TRAIN,
    WAITING_SECONDS,
    WORKER,
    Hosts,
    dask,
)
from ratchet.tasks.recording.journal import read_journal
from ratchet.tasks.recording.spans import BEGUN, ERROR, LLM, Span
from ratchet.tasks.storage.run_folder import RunFolder

FLOW, NEAR, FAR = "flow", "near", "far"
JUST_NOW = 0.5
STEPS, GROUPS, GROUP_SIZE = 5, 8, 4


class Scene:
    """A run of `ratchet train` on these hosts, and what its files say of it."""

    def __init__(self, hosts: Hosts, folder: Path, name: str) -> None:
        self.hosts = hosts
        self.name = name
        self.run = RunFolder(folder / "runs" / name)
        self._examples = folder / f"{name}.jsonl"
        self._players = folder / f"{name}.players"

    def write_examples(self, poison: int | None = None) -> None:
        """Write the examples, of which one may be poisonous."""
        rows = [
            {
                "number": number,
                "calls": 4,
                "thinks": 1.0,
                "player": str(self._players),
                "poison": number == poison,
                "split": split,
            }
            for split, count in (("train", GROUPS), ("test", 1))
            for number in range(count)
        ]
        self._examples.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(self, steps: int = STEPS, on_cluster: bool = True) -> None:
        """Start or resume the training, as the document does."""
        settings = [
            "agent=tests.support.agents.dask_agents:talks",
            f"dataset.path={self._examples}",
            "dataset.columns=[]",
            f"rollouts.groups={GROUPS}",
            f"rollouts.group_size={GROUP_SIZE}",
            "rollouts.max_tokens=8",
            f"steps={steps}",
            "evaluation.examples=1",
            "evaluation.greedy=false",
        ]
        command = TRAIN if on_cluster else ".venv/bin/ratchet train hello"
        words = [
            command.strip().replace(
                ".venv/bin/ratchet", f"{sys.executable} -m ratchet.flows.cli.main"
            )
        ]
        words += [f"--run {self.name} --if-exists resume"]
        words += [f"--set '{setting}'" for setting in settings]
        self.hosts.run(FLOW, self.name, "exec " + " ".join(words))

    def players(self, since: float = 0.0) -> list[tuple[str, float]]:
        """Return (host, time) of every rollout that began since then."""
        lines = self._players.read_text().splitlines() if self._players.exists() else []
        began = [(line.split()[1], float(line.split()[2])) for line in lines]
        return [(host, at) for host, at in began if at >= since]

    def spans(self, shard: str) -> list[Span]:
        """Return the spans of a shard that are recorded up to now."""
        journals = sorted(self.run.path.rglob(f"{shard}.*.jsonl"))
        return [span for path in journals for span in read_journal(path)]

    def wait_for(self, what: str, happened: Callable[[], bool]) -> None:
        """Wait until something happens; fail if the flow ends before."""
        started = time.monotonic()
        while not happened():
            late = time.monotonic() - started > WAITING_SECONDS
            if late or self.hosts.ended(self.name):
                raise SystemExit(f"{self.name}: {what} did not happen")
            time.sleep(0.05)

    def wait_for_step(self, step: int, host: str) -> None:
        """Wait until a rollout of a step has just begun on a host, so that most of it is left."""
        self.wait_for(
            f"step {step} on {host}",
            lambda: (
                len(self.spans(f"train-{step:05d}")) >= 8
                and host in dict(self.players(time.time() - JUST_NOW))
            ),
        )

    def again(self, step: int, since: float) -> float:
        """Wait until what was lost is being played again; return the seconds since `since`."""
        found: list[float] = []

        def begun() -> bool:
            calls = (span for span in self.spans(f"train-{step:05d}") if span["attempt"] > 0)
            found.extend(span["started"].timestamp() for span in calls if span["kind"] in PLAYED)
            return any(at > since for at in found)

        self.wait_for("a second attempt", begun)
        return min(at for at in found if at > since) - since

    def check(self) -> None:
        """Fail unless every rollout ended once and no token was sampled twice."""
        spans = [span for step in range(STEPS) for span in self.spans(f"train-{step:05d}")]
        ends = Counter(span["rollout_id"] for span in spans if span["kind"] in ENDS)
        assert {*ends.values()} == {1}, ends
        sampled = Counter(
            (span["rollout_id"], span["call"])
            for span in spans
            if span["kind"] == LLM and not span["recalled"]
        )
        assert {*sampled.values()} == {1}, sampled.most_common(3)

    def failed(self) -> list[Span]:
        """Return the failed rollouts of the first step."""
        return [span for span in self.spans("train-00000") if span["kind"] == ERROR]

    def datums(self) -> list[bytes]:
        """Return the bytes of every datum file."""
        return [path.read_bytes() for path in sorted(self.run.path.glob("datums/*.parquet"))]


PLAYED = (BEGUN, LLM)
ENDS = ("reward", ERROR)


@contextmanager
def cluster(folder: Path) -> Iterator[Hosts]:
    """Make the hosts and the certificates, and start the scheduler and a worker on one host."""
    with Hosts(folder, FLOW, NEAR, FAR) as hosts:
        hosts.certify(hosts.address(FLOW))
        hosts.run(FLOW, "scheduler", dask(SCHEDULER))
        start_worker(hosts, NEAR)
        yield hosts


def start_worker(hosts: Hosts, host: str) -> float:
    """Start the document's worker on a host; return when."""
    hosts.run(host, f"worker-{host}", dask(WORKER))
    return time.time()


def play_scenes(hosts: Hosts, folder: Path) -> dict[str, float]:
    """Train while hosts come and go; return the seconds that each event cost."""
    seconds: dict[str, float] = {}
    scene = Scene(hosts, folder, "scenes")
    scene.write_examples()
    scene.train()

    scene.wait_for_step(0, NEAR)
    joined = start_worker(hosts, FAR)
    scene.wait_for("a rollout on the new host", lambda: FAR in dict(scene.players()))
    seconds["host joined → plays"] = min(at for h, at in scene.players() if h == FAR) - joined

    scene.wait_for_step(1, FAR)
    killed = hosts.kill(f"worker-{FAR}")
    seconds["host killed → its batches begin again"] = scene.again(1, killed)
    start_worker(hosts, FAR)

    scene.wait_for_step(2, FAR)
    cut = hosts.connect(FAR, up=False)
    seconds["wire cut → its batches begin again"] = scene.again(2, cut)
    mended = hosts.connect(FAR, up=True)

    scene.wait_for_step(3, FAR)
    plays = min(at for host, at in scene.players(mended) if host == FAR)
    seconds["wire mended → plays"] = plays - mended
    killed = hosts.kill_program("scheduler")
    seconds["scheduler killed → its batches begin again"] = scene.again(3, killed)

    scene.wait_for_step(4, NEAR)
    hosts.kill(scene.name)
    restarted = time.time()
    scene.train()
    seconds["flow killed, started again → first call"] = scene.again(4, restarted)
    status = hosts.wait(scene.name)
    assert status == 0, f"the flow ended with {status}"
    scene.check()

    threads = Scene(hosts, folder, "threads")
    threads.write_examples()
    threads.train(on_cluster=False)
    assert hosts.wait(threads.name) == 0
    assert len(scene.datums()) == STEPS
    assert scene.datums() == threads.datums(), "the datums differ from those of threads"
    return seconds


def play_poison(hosts: Hosts, folder: Path) -> list[Span]:
    """Train a step of which an example's agent ends its process; return the failed rollouts."""
    scene = Scene(hosts, folder, "poison")
    scene.write_examples(poison=3)
    scene.train(steps=1)
    assert hosts.wait(scene.name) == 0
    return scene.failed()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as hosts:
        for event, seconds in play_scenes(hosts, Path(name)).items():
            print(f"{event:45} {seconds:6.1f} s")
        failed = play_poison(hosts, Path(name))
        print(f"poisonous rollouts that failed, of {GROUPS * GROUP_SIZE}: {len(failed)}")


if __name__ == "__main__":
    main()
