"""Load of a run's door: calls a second of many rollouts at once, and their processor time.

The whole path of a call is there: an agent with its HTTP client, the player, the door, the journal
on disk, and the SDK with its two exchanges. The service is a stand-in that takes no time, in
processes of its own. With `--dask` the agents are in Dask's workers, and the time is the door's.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.door.quick_service import KEY, start_service
from benchmarks.measuring import Comparison, describe_machine, format_table, note
from ratchet.adapters.calls import POLICY, Policy, Sampling
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.dask_cluster import open_cluster
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.adapters.process.open_files import raise_limit
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.service import Service, open_session
from ratchet.engine.model.base_models import find
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.files import write_rows
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder

MODEL = "local/tiny-chat"
WORDS = "I am a quiet otter. "
MOST_TOKENS = 64
PATIENCE = 600.0
FEW = {"rollouts": 8, "calls": 2, "batches": 1}
AGENTS = {"openai": "by_openai", "socket": "by_socket"}
HEADER = ("agents", "calls/s", "range", "CPU ms a call")


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
    dask: bool


@dataclass(frozen=True)
class Measured:
    """Wall seconds of a round, and CPU seconds of this process."""

    wall: float
    cpu: float


def play_load(load: Load, chat: Chat, service: Service, base: str, folder: Path) -> Measured:
    """Play a run's rollouts at its door, and seal their journals."""
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
        f"benchmarks.door.talkers:{AGENTS[load.agent]}", [POLICY], load.rollouts, 600.0
    )
    with ExitStack() as opened:
        door = opened.enter_context(Door(chat, {}, run_seed=0))
        host, play = RolloutHost(run, door, service, settings), partial(play_batch, reach=door.near)
        if load.dask:
            play = opened.enter_context(open_cluster(None, load.batches)).play

        def collect(number: int) -> None:
            batch = ShardBatch("train-00000", number, 1)
            path = run.spans(batch.name)
            collect_rollouts.make(path, shard, batch, host, lambda: sampled_by, play)

        started, before = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(load.batches) as threads:
            list(threads.map(collect, range(load.batches)))
        return Measured(time.perf_counter() - started, time.process_time() - before)


def measure(load: Load, rounds: int) -> list[str]:
    """Measure rounds of a load, after a few calls that do not count; return its row."""
    base = str(find(MODEL).folder)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        child, url = start_service(base, _tokens(base))
        stack.callback(child.end, 5.0)
        server = TinkerServer(url, KEY, Future(), None)
        service = stack.enter_context(open_session(server, PATIENCE))
        chat = Chat(service.tokenizer("", base), "auto", service.context(base), None)
        play_load(replace(load, **FEW), chat, service, base, Path(scratch) / "first")
        folders = [Path(scratch) / str(number) for number in range(rounds)]
        took = [play_load(load, chat, service, base, folder) for folder in folders]
    calls, walls = load.rollouts * load.calls, [one.wall for one in took]
    what = f"{load.rollouts:,} rollouts of {load.calls} calls at once, by {load.agent}"
    note(Comparison(what, walls, amount=calls, unit="calls"))
    return [
        load.agent,
        f"{calls / median(walls):,.0f}",
        f"{calls / max(walls):,.0f}-{calls / min(walls):,.0f}",
        f"{1000 * median(one.cpu for one in took) / calls:.2f}",
    ]


def _tokens(folder: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [*tokenizer.encode(WORDS * 3, add_special_tokens=False), tokenizer.eos_token_id]


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=1000, help="at the same time")
    options.add_argument("--calls", type=int, default=20, help="of each rollout")
    options.add_argument("--words", type=int, default=0, help="before the first question")
    options.add_argument("--batches", type=int, default=8)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--dask", action="store_true", help="agents in Dask's workers")
    options.add_argument("--agents", nargs="+", choices=AGENTS, default=[*AGENTS])
    given = options.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    raise_limit()
    print(describe_machine())
    sizes = given.rollouts, given.calls, given.batches, given.words, given.dask
    rows = [measure(Load(agent, *sizes), given.rounds) for agent in given.agents]
    title = f"{given.rollouts} rollouts of {given.calls} calls at once"
    title += f", after {given.words:,} words" if given.words else ""
    title += ", in Dask's workers" if given.dask else ""
    print(format_table(title, HEADER, rows))


if __name__ == "__main__":
    main()
