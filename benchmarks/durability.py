"""Cost of durability: the door with its journal and without, and the journal's spans a second.

The peer of the journal is agentlightning's in-memory store, in an environment of its own (`make
peers` makes it). It gets the same tokens from as many coroutines, and loses them when it ends.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import httpx
import numpy as np
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from benchmarks.measuring import (
    Comparison,
    Took,
    describe_machine,
    format_table,
    note,
    paired_ratio,
    time_in_turns,
)
from benchmarks.peers.turns import TURNS, Turn, make_turns
from benchmarks.recording.turn_spans import make_span
from ratchet.adapters.calls import POLICY, Begun, Completion, Policy, RefusedCall, Sampler, Sampling
from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.door.batches import DueRollout, OpenBatch, RolloutEnd, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Batch
from ratchet.adapters.player_protocol import BEGIN, PlaySettings
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.service import connect
from ratchet.engine.model.base_models import find
from ratchet.tasks.recording.journal import Journal
from ratchet.tasks.recording.spans import begun_span, call_span

ROOT = Path(__file__).parent.parent
PEER = ROOT / ".venv-agentlightning" / "bin" / "python"
MODEL = "local/tiny-chat"
ANSWER = 24
"""Tokens of an answer at the door."""
CALLS = 4
"""Calls of a rollout at the door."""
TIMEOUT_SECONDS = 120.0
SHARDS = count()
JOURNAL = "the journal, to disk"
ADD_SPAN = "agentlightning, in memory: `add_span`"
SPAN_TOO = "agentlightning, in memory: `Span` and `add_span`"
COSTS = ("", "with journal", "without", "cost", "CPU with", "CPU without", "cost")
SPEEDS = ("", "median", "range", "ratio", "spans/CPU-s", "ratio")


class Slow:
    """A sampler that takes some time and does no work: a model on another machine."""

    def __init__(self, seconds: float, tokens: list[int]) -> None:
        self._seconds = seconds
        logprobs = np.full(len(tokens), -0.5, np.float32)
        self._sequence = SampledSequence("stop", "", np.array(tokens, np.int32), logprobs)

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        """Return the same tokens after the time."""
        await asyncio.sleep(self._seconds)
        return SampleResponse([self._sequence])


class CallsRecorder:
    """Recorder of a batch's calls in a journal, or nowhere."""

    def __init__(self, rollouts: Sequence[str], journal: Journal | None) -> None:
        self._rollouts = rollouts
        self._journal = journal

    def due(self) -> tuple[int, Sequence[DueRollout]]:
        """Return every rollout."""
        return 0, [DueRollout(name, {}) for name in self._rollouts]

    def begun(self, begun: Begun) -> None:
        """Record that a call is about to be sampled."""
        if self._journal is not None:
            self._journal.append(begun_span(begun))

    def refused(self, call: RefusedCall) -> None:
        """Record nothing: no call is refused here."""

    async def answered(self, completion: Completion) -> None:
        """Record a call durably."""
        if self._journal is not None:
            await asyncio.wrap_future(self._journal.append(call_span(completion)))

    async def ended(self, end: RolloutEnd) -> None:
        """Record nothing: no rollout is ended here."""


def ask_door(chat: Chat, sampler: Sampler, rollouts: int, folder: Path | None) -> None:
    """Play all rollouts at once, each call after the one before, by bare HTTP.

    The calls are recorded in a journal in `folder`, or nowhere without one.
    """
    shard = f"train-{next(SHARDS):05d}"
    names = [f"{shard}-{number:04d}-00" for number in range(rollouts)]
    sampled_by = SampledBy({POLICY: Policy(sampler, "00000")}, Sampling(ANSWER, 1.0, 1.0, -1))
    settings = PlaySettings("none", [POLICY], rollouts, TIMEOUT_SECONDS)
    with (
        Journal(folder / f"{shard}.jsonl") if folder else nullcontext() as journal,
        Door(chat, {}, run_seed=0) as door,
    ):
        batch = OpenBatch(shard, CallsRecorder(names, journal), sampled_by, settings)
        with door.opened(batch) as token:
            begun = Batch(door.address, shard, token, 0, (POLICY,))
            asyncio.run(_ask_all(begun, names))


async def _ask_all(batch: Batch, rollouts: Sequence[str]) -> None:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {batch.token}"}
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_SECONDS) as client:
        begun = await client.post(batch.door + BEGIN.format(batch=batch.name))
        begun.raise_for_status()
        await asyncio.gather(*(_ask(client, batch.endpoints(name)[POLICY]) for name in rollouts))


async def _ask(client: httpx.AsyncClient, policy: Endpoint) -> None:
    headers = {"authorization": f"Bearer {policy['api_key']}"}
    messages = [{"role": "user", "content": "You are a quiet otter. Who are you?"}]
    for _ in range(CALLS):
        body = {"model": POLICY, "messages": messages}
        answer = await client.post(
            f"{policy['base_url']}/chat/completions", headers=headers, json=body
        )
        said = answer.raise_for_status().json()["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "And who are you now?"}]


def write_journal(calls: list[Turn], folder: Path) -> None:
    """Write the spans of all turns to disk; a rollout awaits each span before its next."""
    rollouts: dict[int, list[Turn]] = {}
    for turn in calls:
        rollouts.setdefault(turn.rollout, []).append(turn)

    async def append(journal: Journal, ours: list[Turn]) -> None:
        for turn in ours:
            await asyncio.wrap_future(journal.append(make_span(turn)))

    async def all_of_them(journal: Journal) -> None:
        await asyncio.gather(*(append(journal, ours) for ours in rollouts.values()))

    with Journal(folder / f"spans-{next(SHARDS)}.jsonl") as journal:
        asyncio.run(all_of_them(journal))


@contextmanager
def start_peer(rollouts: int) -> Iterator[Callable[[], list[list[float]]]]:
    """Start the peer; yield a function that runs a round of it.

    A round returns the wall and processor seconds to make the spans, and those to add them.
    """
    command = [str(PEER), "-m", "benchmarks.peers.agentlightning_store", str(rollouts)]
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with subprocess.Popen(
        command, cwd=ROOT, env=offline, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def run_round() -> list[list[float]]:
            requests.write("\n")
            requests.flush()
            return json.loads(answers.readline())

        try:
            yield run_round
        finally:
            requests.close()


def measure_door(rollouts: int, rounds: int, folder: Path) -> list[list[str]]:
    """Measure the seconds with the journal and without, in turn; both include the clients' work."""
    chat = Chat(AutoTokenizer.from_pretrained(find(MODEL).folder), context=8192)
    answer = [*chat.encode("I am a quiet otter. ")] * 3 + chat.stop_tokens[:1]
    rows = []
    with connect(MODEL, folder / "engine") as service:
        samplers: dict[str, Sampler] = {
            "the engine": service.base_sampler(MODEL),
            "a sampler that takes 1 s": Slow(1.0, answer),
            "a sampler that takes no time": Slow(0.0, answer),
        }
        for name, sampler in samplers.items():
            ways = (("with", folder), ("without", None))
            timed = {way: partial(ask_door, chat, sampler, rollouts, to) for way, to in ways}
            took = time_in_turns(timed, rounds)
            rows.append([name, *_format_costs(took)])
            ours, theirs = ([one.wall for one in took[way]] for way in ("with", "without"))
            note(Comparison(f"calls at the door, {name}", ours, "without the journal", theirs))
    return rows


def _format_costs(took: Mapping[str, Sequence[Took]]) -> list[str]:
    """Format wall seconds with and without the journal, and their ratio; the same for the CPU's."""
    cells = []
    for clock in ("wall", "cpu"):
        times = {name: [getattr(one, clock) for one in rounds] for name, rounds in took.items()}
        cost = paired_ratio(times["with"], times["without"]) - 1
        cells += [f"{median(times['with']):.2f}", f"{median(times['without']):.2f}"]
        cells.append(f"{100 * cost:+.1f} %")
    return cells


def measure_spans(rollouts: int, rounds: int, folder: Path) -> list[list[str]]:
    """Measure spans a second; the peer's with and without the making of its span objects."""
    calls = list(make_turns(rollouts))
    took: dict[str, list[Took]] = defaultdict(list)
    with start_peer(rollouts) if PEER.exists() else nullcontext() as run_round:
        for number in range(rounds + 1):
            wall, cpu = perf_counter(), process_time()
            write_journal(calls, folder)
            one = {JOURNAL: Took(perf_counter() - wall, process_time() - cpu)}
            if run_round is not None:
                made, added = (Took(*times) for times in run_round())
                one[ADD_SPAN] = added
                one[SPAN_TOO] = Took(made.wall + added.wall, made.cpu + added.cpu)
            for name in one if number else ():  # the first is not counted
                took[name].append(one[name])
    ours, theirs = ([one.wall for one in took.get(name, [])] for name in (JOURNAL, ADD_SPAN))
    note(Comparison(JOURNAL, ours, ADD_SPAN, theirs, len(calls), "spans"))
    return [_format_speed(name, took[name], took.get(ADD_SPAN), len(calls)) for name in took]


def _format_speed(name: str, ours: list[Took], theirs: list[Took] | None, spans: int) -> list[str]:
    walls, cpus = [one.wall for one in ours], [one.cpu for one in ours]
    cells = [name, f"{spans / median(walls):,.0f}"]
    cells += [f"{spans / max(walls):,.0f}-{spans / min(walls):,.0f}"]
    cells += [f"{paired_ratio([one.wall for one in theirs], walls):.1f}" if theirs else ""]
    cells += [f"{spans / median(cpus):,.0f}"]
    cells += [f"{paired_ratio([one.cpu for one in theirs], cpus):.1f}" if theirs else ""]
    return cells


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="of each measurement")
    options.add_argument("--rollouts", type=int, default=128, help="at the same time")
    arguments = options.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_door(arguments.rollouts, arguments.rounds, Path(scratch))
        title = f"{arguments.rollouts} rollouts of {CALLS} calls at the door: seconds"
        print(format_table(title, COSTS, rows))
        rows = measure_spans(arguments.rollouts, arguments.rounds, Path(scratch))
    title = f"{arguments.rollouts * TURNS} spans of a mean prompt of 1,000 tokens: spans a second"
    print(format_table(title, SPEEDS, rows))
    if not PEER.exists():
        print(f"No peer: {PEER.relative_to(ROOT)} is missing; `make peers` installs it.")


if __name__ == "__main__":
    main()
