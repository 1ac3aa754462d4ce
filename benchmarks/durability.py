"""The cost of durability: the door with and without its journal, and spans per second.

The peer is agentlightning's in-memory store, in an environment of its own (see `make peers`). The
same number of coroutines gives it the same tokens, which it keeps until its process ends.
"""

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import httpx
import numpy as np
from tinker import ModelInput, SampledSequence, SampleResponse, SamplingParams
from transformers import AutoTokenizer

from adapters.calls import Begun, Completion, Policy, Sampler, Sampling
from adapters.chat import Chat
from adapters.door.door import Door
from adapters.tinker.service import connect
from benchmarks.measuring import Took, alternated, machine, paired_ratio, table
from benchmarks.turns import TURNS, Turn, turns
from engine.model.base_models import find
from tasks.journal import Journal
from tasks.spans import Span, begun_span, call_span

ROOT = Path(__file__).parent.parent
PEER = ROOT / ".venv-agentlightning" / "bin" / "python"
MODEL = "local/tiny-chat"
TOKEN = "the benchmark's own"
ANSWER = 24
"""Tokens of one answer through the door."""
CALLS = 4
"""Calls of one rollout through the door."""
BATCHES = count()
JOURNAL = "the journal, to disk"
ADD_SPAN = "agentlightning, in memory: `add_span`"
SPAN_TOO = "agentlightning, in memory: `Span` and `add_span`"
COSTS = ("", "with journal", "without", "cost", "CPU with", "CPU without", "cost")
SPEEDS = ("", "median", "range", "ratio", "spans/CPU-s", "ratio")


class Slow:
    """A sampler that waits without work, like a model on another machine."""

    def __init__(self, seconds: float, tokens: list[int]) -> None:
        self._seconds = seconds
        logprobs = np.full(len(tokens), -0.5, np.float32)
        self._sequence = SampledSequence("stop", "", np.array(tokens, np.int32), logprobs)

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        await asyncio.sleep(self._seconds)
        return SampleResponse([self._sequence])


async def nothing(_: Completion) -> None:
    """Discard a completion."""


@contextmanager
def recording(
    journal: Journal | None,
) -> Iterator[tuple[Callable[[Completion], Awaitable[None]], Callable[[Begun], None] | None]]:
    """Yield the door's callbacks for a finished call and for a started call."""
    if journal is None:
        yield nothing, None
        return

    async def record(completion: Completion) -> None:
        await journal.append(call_span(completion))

    def begin(begun: Begun) -> None:
        journal.append_soon(begun_span(begun))

    with journal:
        yield record, begin


def at_the_door(chat: Chat, sampler: Sampler, rollouts: int, folder: Path | None) -> None:
    """Run all rollouts at once, each with its calls in sequence, over plain HTTP."""
    batch = f"train-{next(BATCHES):05d}"
    journal = Journal(folder / f"{batch}.jsonl") if folder else None
    with (
        recording(journal) as (record, begin),
        Door(chat, TOKEN, record, Sampling(ANSWER, 1.0, 1.0, -1), 0, begin=begin) as door,
    ):
        door.policy = Policy(sampler, "00000")
        asyncio.run(_ask_all(door, [f"{batch}-{n:04d}-00" for n in range(rollouts)]))


async def _ask_all(door: Door, rollouts: list[str]) -> None:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=120) as client:
        await asyncio.gather(*(_ask(client, door, rollout) for rollout in rollouts))


async def _ask(client: httpx.AsyncClient, door: Door, rollout: str) -> None:
    door.admit(rollout, 0)
    url = f"{door.url(rollout, 0)}/chat/completions"
    messages = [{"role": "user", "content": "You are a quiet otter. Who are you?"}]
    for _ in range(CALLS):
        answer = await client.post(url, json={"model": "policy", "messages": messages})
        said = answer.raise_for_status().json()["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "And who are you now?"}]
    await asyncio.wrap_future(door.dismiss(rollout, 0))


def span_of(turn: Turn) -> Span:
    """Make a span as the door does, but without message texts, which the peer lacks too."""
    rollout, now = f"train-00000-{turn.rollout:04d}-00", datetime.now(UTC)
    return {
        "run_id": "durability",
        "batch": "train-00000",
        "step": 0,
        "group_id": rollout[:-3],
        "rollout_id": rollout,
        "attempt": 0,
        "role": "policy",
        "call": turn.number,
        "span_id": f"{rollout}.0.policy.{turn.number}",
        "kind": "llm",
        "started": now,
        "ended": now,
        "gen_ai_request_model": "policy",
        "gen_ai_response_id": f"{turn.rollout}-{turn.number}",
        "policy_version": "00000",
        "prompt_token_ids": turn.prompt,
        "response_token_ids": turn.answer,
        "logprobs": turn.logprobs,
        "prefix_len": 0,
    }


def into_the_journal(calls: list[Turn], folder: Path) -> None:
    """Write every span to the journal; a rollout awaits each span before its next one."""
    rollouts: dict[int, list[Turn]] = {}
    for turn in calls:
        rollouts.setdefault(turn.rollout, []).append(turn)

    async def append(journal: Journal, ours: list[Turn]) -> None:
        for turn in ours:
            await journal.append(span_of(turn))

    async def all_of_them(journal: Journal) -> None:
        await asyncio.gather(*(append(journal, ours) for ours in rollouts.values()))

    with Journal(folder / f"spans-{next(BATCHES)}.jsonl") as journal:
        asyncio.run(all_of_them(journal))


@contextmanager
def peer(rollouts: int) -> Iterator[Callable[[], list[list[float]]]]:
    """Yield a function that runs one round of the peer and returns its seconds."""
    command = [str(PEER), "-m", "benchmarks.agentlightning_store", str(rollouts)]
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with subprocess.Popen(
        command, cwd=ROOT, env=offline, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        told, answers = process.stdin, process.stdout
        assert told is not None
        assert answers is not None

        def round_() -> list[list[float]]:
            told.write("\n")
            told.flush()
            return json.loads(answers.readline())

        try:
            yield round_
        finally:
            told.close()


def door_rows(rollouts: int, rounds: int, folder: Path) -> list[list[str]]:
    """Measure the door with and without the journal in turn; both include the clients' work."""
    chat = Chat(AutoTokenizer.from_pretrained(find(MODEL).folder), context=8192)
    answer = [*chat.encode("I am a quiet otter. ")] * 3 + chat.stop_tokens[:1]
    rows = []
    with connect(MODEL, folder / "engine") as service:
        asked = service.client.create_sampling_client(base_model=MODEL)
        samplers: dict[str, Sampler] = {
            "the engine": service.result(asked, "a sampler"),
            "a sampler that takes 1 s": Slow(1.0, answer),
            "a sampler that takes no time": Slow(0.0, answer),
        }
        for name, sampler in samplers.items():
            ways = (("with", folder), ("without", None))
            timed = {way: partial(at_the_door, chat, sampler, rollouts, to) for way, to in ways}
            rows.append([name, *_costs(alternated(timed, rounds))])
    return rows


def _costs(took: Mapping[str, Sequence[Took]]) -> list[str]:
    """Return wall seconds with and without, their ratio, and the same for processor seconds."""
    cells = []
    for clock in ("wall", "cpu"):
        times = {name: [getattr(one, clock) for one in rounds] for name, rounds in took.items()}
        cost = paired_ratio(times["with"], times["without"]) - 1
        cells += [f"{median(times['with']):.2f}", f"{median(times['without']):.2f}"]
        cells.append(f"{100 * cost:+.1f} %")
    return cells


def span_rows(rollouts: int, rounds: int, folder: Path) -> list[list[str]]:
    """Measure spans per second; the peer's are given with and without making span objects."""
    calls = list(turns(rollouts))
    took: dict[str, list[Took]] = defaultdict(list)
    with peer(rollouts) if PEER.exists() else nullcontext() as ask:
        for number in range(rounds + 1):
            wall, cpu = perf_counter(), process_time()
            into_the_journal(calls, folder)
            one = {JOURNAL: Took(perf_counter() - wall, process_time() - cpu)}
            if ask is not None:
                made, added = (Took(*times) for times in ask())
                one[ADD_SPAN] = added
                one[SPAN_TOO] = Took(made.wall + added.wall, made.cpu + added.cpu)
            for name in one if number else ():  # the first round is a warm-up
                took[name].append(one[name])
    return [_speed(name, took[name], took.get(ADD_SPAN), len(calls)) for name in took]


def _speed(name: str, ours: list[Took], theirs: list[Took] | None, spans: int) -> list[str]:
    walls, cpus = [one.wall for one in ours], [one.cpu for one in ours]
    cells = [name, f"{spans / median(walls):,.0f}"]
    cells += [f"{spans / max(walls):,.0f}-{spans / min(walls):,.0f}"]
    cells += [f"{paired_ratio([one.wall for one in theirs], walls):.1f}" if theirs else ""]
    cells += [f"{spans / median(cpus):,.0f}"]
    cells += [f"{paired_ratio([one.cpu for one in theirs], cpus):.1f}" if theirs else ""]
    return cells


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="of each measurement")
    options.add_argument("--rollouts", type=int, default=128, help="at the same time")
    asked = options.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        rows = door_rows(asked.rollouts, asked.rounds, Path(scratch))
        title = f"{asked.rollouts} rollouts of {CALLS} calls at the door: seconds"
        print(table(title, COSTS, rows))
        rows = span_rows(asked.rollouts, asked.rounds, Path(scratch))
    title = f"{asked.rollouts * TURNS} spans of a mean prompt of 1,000 tokens: spans a second"
    print(table(title, SPEEDS, rows))
    if not PEER.exists():
        print(f"No peer: {PEER.relative_to(ROOT)} is missing; `make peers` installs it.")


if __name__ == "__main__":
    main()
