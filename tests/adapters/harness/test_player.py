"""The player of a batch, with agents that fail, wait and return whatever they like."""

import asyncio
import errno
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import IO, Any, cast

import httpx
import pytest

from ratchet.adapters.calls import POLICY, Policy
from ratchet.adapters.clients.libraries import tls
from ratchet.adapters.door.batches import DueRollout, OpenBatch, RolloutEnd, SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.player import Reach, play_batch
from ratchet.adapters.harness.players_door import BatchRefused, door_at
from ratchet.adapters.player_protocol import CUT, LONGEST_MESSAGE, Failure, PlaySettings
from ratchet.adapters.process.open_files import OutOfFiles
from ratchet.adapters.rewards import Reward
from tests.support.door.door_batches import ListRecorder, bearer, begin
from tests.support.door.opened_door import ASK, SAMPLING, Scripted

TIMEOUT = 4.0
"""Time of an agent that exceeds it; the others have AMPLE."""
AMPLE = 60.0
BODY = {"model": "policy", "messages": ASK}


class Unprintable(Exception):
    """Error whose message cannot be made."""

    def __str__(self) -> str:
        raise ValueError


ERRORS: dict[str, BaseException] = {
    "bare": ValueError(),
    "named": KeyError("name"),
    "half a pair": ValueError("\ud800"),
    "long": ValueError("x" * 20_000_000 + "end."),
    "group": ExceptionGroup("none", [ValueError(), KeyError()]),
    "group of one": ExceptionGroup("tasks", [ExceptionGroup("more", [KeyError("name")])]),
    "exit": SystemExit(3),
    "closed": GeneratorExit(),
    "cancelled": asyncio.CancelledError(),
    "stopped": StopIteration(),
    "own files": OSError(errno.EMFILE, "Too many open files"),
    "own timeout": TimeoutError(),
    "unprintable": Unprintable(),
}
REWARDS: dict[str, Any] = {
    "no number": "good",
    "too many": ["a"],
    "too large": 10**400,
    "odd role": {"\ud800": 1.0},
}


async def raises(example: dict[str, Any], **_: str) -> float:
    raise ERRORS[example["how"]].with_traceback(None)


def raises_plainly(example: dict[str, Any], **_: str) -> float:
    raise ERRORS[example["how"]].with_traceback(None)


async def returns(example: dict[str, Any], **_: str) -> Any:
    return REWARDS[example["how"]]


def options(api_key: str) -> dict[str, Any]:
    """Return the options of a client that takes little time of its agent's."""
    headers = bearer(api_key) | {"x-stainless-retry-count": "0"}
    return {"headers": headers, "timeout": None, "verify": tls()}


async def asks(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Make calls side by side, then sleep."""
    async with httpx.AsyncClient(**options(api_key)) as client:
        ask = partial(client.post, f"{base_url}/chat/completions", json=BODY)
        for answer in await asyncio.gather(*(ask() for _ in range(example["calls"]))):
            answer.raise_for_status()
    await asyncio.sleep(example["sleeps"])
    return 1.0


def asks_plainly(example: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """Make calls one after the other, then sleep."""
    with httpx.Client(**options(api_key)) as client:
        for _ in range(example["calls"]):
            client.post(f"{base_url}/chat/completions", json=BODY).raise_for_status()
    time.sleep(example["sleeps"])
    return 1.0


class HeldSampler(Scripted):
    """Sampler that takes its time for every answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.hold = partial(asyncio.sleep, seconds)


def batch_of(
    agent: Callable[..., Any] | str,
    examples: Iterable[dict[str, Any]],
    sampler: Scripted,
    seconds: float = AMPLE,
) -> tuple[OpenBatch, ListRecorder]:
    """Return a batch for the door to open, and its recorder."""
    names = (f"train-00000-{number:04d}-00" for number in count())
    rollouts = [DueRollout(*one) for one in zip(names, examples, strict=False)]
    recorder, policy = ListRecorder(rollouts), cast(Any, Policy(cast(Any, sampler), "v0"))
    name = agent if isinstance(agent, str) else f"{agent.__module__}:{agent.__name__}"
    settings = PlaySettings(name, [POLICY], concurrency=8, timeout_seconds=seconds)
    sampled_by = SampledBy({POLICY: policy}, SAMPLING)
    return OpenBatch("train-00000.0", recorder, sampled_by, settings), recorder


def play(
    door: Door,
    agent: Callable[..., Any] | str,
    examples: Iterable[dict[str, Any]],
    sampler: Scripted | None = None,
    seconds: float = AMPLE,
) -> list[RolloutEnd]:
    """Play a batch; return the ends in the order of the examples."""
    batch, recorder = batch_of(agent, examples, sampler or Scripted(), seconds)
    with door.opened(batch) as token:
        asyncio.run(play_batch(door.address, batch.name, token))
    return sorted(recorder.ends, key=lambda end: end.rollout_id)


@pytest.mark.parametrize("agent", [raises, raises_plainly])
def test_whatever_an_agent_raises_is_a_row_with_a_message(
    open_door: Door, agent: FunctionType
) -> None:
    ends = play(open_door, agent, ({"how": how} for how in ERRORS))
    failures = [cast(Failure, end.outcome) for end in ends]
    assert {how: failure.kind for how, failure in zip(ERRORS, failures, strict=True)} == {
        "bare": "ValueError",
        "named": "KeyError",
        "half a pair": "ValueError",
        "long": "ValueError",
        "group": "ExceptionGroup",
        "group of one": "KeyError",
        "exit": "AgentExit",
        "closed": "AgentExit",
        "cancelled": "AgentExit",
        "stopped": "RuntimeError",
        "own files": "OSError",
        "own timeout": "TimeoutError",
        "unprintable": "Unprintable",
    }
    line = f" at {Path(__file__).relative_to(Path.cwd())}:{agent.__code__.co_firstlineno + 1}"
    kept = LONGEST_MESSAGE // 2
    out_of_a_thread = line if agent is raises else ""  # asyncio makes a TimeoutError anew there
    assert [failure.message for failure in failures] == [
        f"ValueError without a message{line}",
        f"'name'{line}",
        f"?{line}",
        f"{'x' * kept}{CUT}{'x' * (kept - len(f'end.{line}'))}end.{line}",
        f"none (2 sub-exceptions){line}",
        "'name'",
        "the agent raised SystemExit: 3",
        "the agent raised GeneratorExit",
        "the agent raised asyncio.exceptions.CancelledError",
        f"{'coroutine' if agent is raises else 'the agent'} raised StopIteration",
        f"[Errno 24] Too many open files{line}",
        f"TimeoutError without a message{out_of_a_thread}",
        f"<exception str() failed>{line}",
    ]


async def tells_its_key(example: dict[str, Any], *, api_key: str, **_: str) -> float:
    raise ValueError(f"the key {api_key} does not fit")


def test_an_agent_s_error_is_recorded_without_its_key(open_door: Door) -> None:
    [end] = play(open_door, tells_its_key, [{}])
    line = f"{Path(__file__).relative_to(Path.cwd())}:{tells_its_key.__code__.co_firstlineno + 1}"
    assert end.outcome == Failure("ValueError", f"the key *** does not fit at {line}")


async def tells_its_key_at_the_cut(_: dict[str, Any], *, api_key: str, **__: str) -> float:
    raise ValueError("x" * (LONGEST_MESSAGE // 2 - 4) + api_key + "x" * LONGEST_MESSAGE)


def test_a_shortened_error_shows_no_part_of_the_key(open_door: Door) -> None:
    [end] = play(open_door, tells_its_key_at_the_cut, [{}])
    assert cast(Failure, end.outcome).message[: LONGEST_MESSAGE // 2].endswith("x***x")


def test_what_is_no_reward_is_a_row_with_its_error(open_door: Door) -> None:
    *failed, odd = play(open_door, returns, ({"how": how} for how in REWARDS))
    failures = [cast(Failure, end.outcome) for end in failed]
    assert [failure.kind for failure in failures] == ["RewardError"] * 3
    assert all(failure.message for failure in failures)
    assert odd.outcome == Reward(1.0, {"?": 1.0}), "the recorder knows the roles, and refuses it"


@pytest.mark.parametrize("agent", [asks, asks_plainly])
def test_a_timeout_counts_only_the_agent_s_own_time(
    open_door: Door, agent: Callable[..., Any]
) -> None:
    """Every answer takes longer than the timeout."""
    examples = [
        {"calls": calls, "sleeps": sleeps} for calls, sleeps in [(1, 0), (2, 0), (0, 20), (1, 20)]
    ]
    ends = play(open_door, agent, examples, HeldSampler(1.5 * TIMEOUT), TIMEOUT)
    assert [end.outcome for end in ends[:2]] == [Reward(1.0)] * 2
    for end, waited in zip(ends[2:], (0, 1.5 * TIMEOUT), strict=True):
        assert isinstance(end.outcome, Failure)
        assert end.outcome.kind == "TimeoutError"
        assert f"longer than {TIMEOUT:g} s of its own time" in end.outcome.message
        assert waited + TIMEOUT <= end.seconds < waited + 20


@pytest.fixture(params=["by HTTP", "by calls"])
def reach(request: pytest.FixtureRequest, open_door: Door) -> Reach:
    """How a player asks the door."""
    return door_at if request.param == "by HTTP" else open_door.near


def test_a_player_that_is_superseded_is_refused_and_records_no_end(
    open_door: Door, reach: Reach
) -> None:
    sampler = Scripted()
    batch, recorder = batch_of(asks, [{"calls": 1, "sleeps": 0}], sampler)

    async def until_superseded() -> None:
        while not batch._superseded:
            await asyncio.sleep(0.01)

    sampler.hold = until_superseded

    async def supersede(token: str) -> None:
        playing = asyncio.create_task(play_batch(open_door.address, batch.name, token, reach))
        while not sampler.asked:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(begin, open_door, batch.name, token)
        await playing

    with open_door.opened(batch) as token, pytest.raises(BatchRefused, match="attempt 0, is"):
        asyncio.run(supersede(token))
    assert recorder.ends == []


GREEDY = """
import json, os, urllib.error, urllib.request
own = os.environ["OPENAI_BASE_URL"].partition("/role/")[0]
told = json.dumps({"outcome": {"reward": 99}, "seconds": 1}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for path in (f"{own}/end", own.partition("/rollout/")[0] + "/begin"):
    try:
        urllib.request.urlopen(urllib.request.Request(path, told, headers))
    except urllib.error.HTTPError as error:
        assert error.code == 401
print(0.25)
"""


def test_a_program_that_tells_the_door_its_own_reward_gets_the_true_one(open_door: Door) -> None:
    agent = f"command:{shlex.join([sys.executable, '-I', '-c', GREEDY])}"
    ends = play(open_door, agent, [{}, {}])
    assert [end.outcome for end in ends] == [Reward(0.25)] * 2


def test_a_player_without_the_token_of_an_open_batch_is_refused(
    open_door: Door, reach: Reach
) -> None:
    batch, _ = batch_of(asks, [], Scripted())
    with open_door.opened(batch) as old:
        pass
    with pytest.raises(BatchRefused, match="is not open"):
        asyncio.run(play_batch(open_door.address, batch.name, old, reach))
    for token in ("wrong", old):
        with open_door.opened(batch), pytest.raises(BatchRefused, match="does not open this path"):
            asyncio.run(play_batch(open_door.address, batch.name, token, reach))


def spoils(example: dict[str, Any], **_: str) -> float:
    """Change the example that it was given."""
    example["list"].append(2)
    return 1.0


def test_an_agent_that_changes_its_example_changes_no_other(open_door: Door, reach: Reach) -> None:
    examples: list[dict[str, Any]] = [{"list": [1]}]
    batch, recorder = batch_of(spoils, examples, Scripted())
    with open_door.opened(batch) as token:
        asyncio.run(play_batch(open_door.address, batch.name, token, reach))
    assert [end.outcome for end in recorder.ends] == [Reward(1.0)]
    assert examples == [{"list": [1]}]


held: list[IO[bytes]] = []


def runs_out(example: dict[str, Any], **_: str) -> float:
    """Open files until there are no more, for itself or for ever, and hide why that ended."""
    opened = held if example["for ever"] else []
    try:
        while True:
            opened.append(Path(os.devnull).open("rb"))  # noqa: SIM115
    except OSError as error:
        raise RuntimeError("Connection error.") from error


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 2_000), hard))
    yield
    while held:
        held.pop().close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_a_rollout_for_which_this_process_has_no_files_is_no_row(open_door: Door) -> None:
    batch, recorder = batch_of(runs_out, [{"for ever": True}], Scripted())
    with open_door.opened(batch) as token, pytest.raises(OutOfFiles, match="ulimit -n"):
        asyncio.run(play_batch(open_door.address, batch.name, token))
    assert recorder.ends == []


@pytest.mark.usefixtures("few_files")
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_rollout_that_opens_all_files_for_itself_is_a_row(open_door: Door) -> None:
    [end] = play(open_door, runs_out, [{"for ever": False}])
    assert isinstance(end.outcome, Failure)
    assert end.outcome.message.startswith("Connection error.")


def test_a_program_of_an_agent_that_has_no_files_is_a_row(open_door: Door) -> None:
    program = "import os\nwhile True: os.dup(0)"
    agent = f"command:/bin/sh -c {shlex.quote(f'ulimit -n 20; {python(program)}')}"
    [end] = play(open_door, agent, [{}])
    assert "Too many open files" in cast(Failure, end.outcome).message


def python(program: str) -> str:
    return shlex.join([sys.executable, "-c", program])
