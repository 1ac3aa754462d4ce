"""Load of a run's doors: calls a second of many rollouts at once, by processes of doors.

The whole path of a call is there: an agent with its HTTP client, the player, the door, the journal
on disk, and the SDK with its two exchanges. The service is a stand-in that takes no time, in
processes of its own. Without a process for it, the door is in the process of the agents.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from adapters.calls import POLICY, Policy, Sampling
from adapters.door.batches import SampledBy
from adapters.door.door import Door
from adapters.door.near_door import near
from adapters.harness.player import play_batch
from adapters.network.addresses import Listener
from adapters.player_protocol import PlaySettings
from adapters.process.open_files import raise_limit
from adapters.tinker.engines import TinkerServer
from adapters.tinker.service import Service, open_session
from benchmarks.doors.quick_service import KEY, start_service
from benchmarks.measuring import Comparison, describe_machine, format_table, note
from engine.model.base_models import find
from tasks.doors.begun import PROGRAM
from tasks.doors.here import BatchDoor, DoorHere
from tasks.doors.orders import ChatOrder, DoorOrder, ServiceOrder, open_chat
from tasks.doors.processes import DoorProcesses
from tasks.rollouts import Play, RolloutHost, collect_rollouts
from tasks.storage.batch_plans import BatchPlan
from tasks.storage.files import write_rows
from tasks.storage.run_folder import RunFolder

MODEL = "local/tiny-chat"
WORDS = "I am a quiet otter. "
MOST_TOKENS = 64
PATIENCE = 600.0
FEW = {"rollouts": 8, "calls": 2, "batches": 1}
AGENTS = {"openai": "by_openai", "socket": "by_socket"}
HEADER = ("", "calls/s", "range", "ratio", "CPU ms a call", "of the doors", "ratio")


@dataclass(frozen=True)
class Load:
    """So many rollouts at once, of so many calls each, in so many batches.

    The first message has so many words more than a question.
    """

    agent: str
    rollouts: int
    calls: int
    batches: int
    words: int


@dataclass(frozen=True)
class Measured:
    """Wall seconds of a round, CPU seconds of players and doors, and of the doors' processes."""

    wall: float
    cpu: float
    doors: float


def play_load(load: Load, doors: int, service: Service, base: str, folder: Path) -> Measured:
    """Play a run's rollouts at so many doors, and seal their journals."""
    run = RunFolder(folder)
    shard = run.shard("train-00000")
    shard.parent.mkdir(parents=True)
    part, example = load.rollouts // load.batches, {"calls": load.calls, "words": load.words}
    rows = [
        {"example_id": number, "example": example, "batch": number // part}
        for number in range(load.batches * part)
    ]
    write_rows(shard, rows)
    sampler = service.base_sampler(base)
    sampled_by = SampledBy({POLICY: Policy(sampler, "00000")}, Sampling(MOST_TOKENS, 1.0, 1.0, -1))
    settings = PlaySettings(
        f"benchmarks.doors.talkers:{AGENTS[load.agent]}", [POLICY], load.rollouts, 600.0
    )
    with _opened(run, service, base, doors) as (door, play):
        host = RolloutHost(run, door, service, settings)

        def collect(number: int) -> None:
            plan = BatchPlan("train-00000", number, 1)
            path = run.spans(plan.name)
            collect_rollouts.make(path, shard, plan, host, lambda: sampled_by, play)

        started, own, others = time.perf_counter(), time.process_time(), _door_seconds()
        with ThreadPoolExecutor(load.batches) as threads:
            list(threads.map(collect, range(load.batches)))
        wall, of_doors = time.perf_counter() - started, _door_seconds() - others
        return Measured(wall, time.process_time() - own + of_doors, of_doors)


@contextmanager
def _opened(
    run: RunFolder, service: Service, base: str, doors: int
) -> Iterator[tuple[BatchDoor, Play]]:
    chat = ChatOrder("", base, "auto", None)
    if not doors:
        with Door(open_chat(service, chat), {}, run_seed=0) as door:
            yield DoorHere(door, run, service), partial(play_batch, reach=partial(near, door))
        return
    address = ServiceOrder(service.server.url, service.server.key, PATIENCE)
    order = DoorOrder(run.path, None, address, chat, {}, 0, None, Listener())
    with DoorProcesses(order, service, doors) as processes:
        yield processes, play_batch


def _door_seconds() -> float:
    """Return the CPU seconds of the processes of doors."""
    children = psutil.Process().children()
    times = [child.cpu_times() for child in children if PROGRAM in child.cmdline()]
    return sum(one.user + one.system for one in times)


def measure(load: Load, numbers: Sequence[int], rounds: int) -> list[list[str]]:
    """Measure each number of doors, in turns, after a few calls that do not count."""
    base = find(MODEL)
    took: dict[int, list[Measured]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tokens = _tokens(str(base.folder))
        child, url = start_service(str(base.folder), tokens)
        stack.callback(child.end, 5.0)
        server = TinkerServer(url, KEY, Future(), None)
        service = stack.enter_context(open_session(server, PATIENCE))
        play_load(replace(load, **FEW), 0, service, str(base.folder), Path(scratch) / "first")
        for number in range(rounds):
            for doors in numbers:
                folder = Path(scratch) / f"{number}-{doors}"
                took[doors].append(play_load(load, doors, service, str(base.folder), folder))
    first = took[numbers[0]]
    _note(load, took, numbers[0])
    return [_row(doors, took[doors], first, load.rollouts * load.calls) for doors in numbers]


def _note(load: Load, took: Mapping[int, Sequence[Measured]], first: int) -> None:
    walls = {number: [one.wall for one in rounds] for number, rounds in took.items()}
    for number in [*walls][1:]:
        what = f"{_name(number)}, {load.rollouts:,} rollouts at once by {load.agent}"
        calls = load.rollouts * load.calls
        note(Comparison(what, walls[number], _name(first), walls[first], calls, "calls"))


def _name(doors: int) -> str:
    if not doors:
        return "a door beside the agents"
    return "a door apart" if doors == 1 else f"{doors} doors apart"


def _tokens(folder: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [*tokenizer.encode(WORDS * 3, add_special_tokens=False), tokenizer.eos_token_id]


def _row(doors: int, took: Sequence[Measured], first: Sequence[Measured], calls: int) -> list[str]:
    walls = [one.wall for one in took]
    ratio = median(a.wall / b.wall for a, b in zip(first, took, strict=True))
    cpu = median(a.cpu / b.cpu for a, b in zip(first, took, strict=True))
    return [
        _name(doors),
        f"{calls / median(walls):,.0f}",
        f"{calls / max(walls):,.0f}-{calls / min(walls):,.0f}",
        f"{ratio:.2f}",
        f"{1000 * median(one.cpu for one in took) / calls:.2f}",
        f"{1000 * median(one.doors for one in took) / calls:.2f}" if doors else "",
        f"{cpu:.2f}",
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=1000, help="at the same time")
    options.add_argument("--calls", type=int, default=20, help="of each rollout")
    options.add_argument("--words", type=int, default=0, help="before the first question")
    options.add_argument("--batches", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--doors", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--agents", nargs="+", choices=AGENTS, default=[*AGENTS])
    given = options.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise_limit()
    print(describe_machine())
    for agent in given.agents:
        load = Load(agent, given.rollouts, given.calls, given.batches, given.words)
        title = f"{given.rollouts} rollouts of {given.calls} calls at once, by {agent}"
        title += f", after {given.words:,} words" if given.words else ""
        print(format_table(title, HEADER, measure(load, given.doors, given.rounds)))


if __name__ == "__main__":
    main()
