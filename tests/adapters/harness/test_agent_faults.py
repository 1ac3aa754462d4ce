"""What an agent may do wrong: its rollout is a row, others go on, and nothing of ours is held."""

import asyncio
import fcntl
import inspect
import locale
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError

from ratchet.adapters.harness.agents import contained_task
from ratchet.adapters.harness.players_door import BatchRefused
from ratchet.tasks.metrics import StepFiles, measure_step
from ratchet.tasks.recording.journal import Journal, JournalError
from ratchet.tasks.recording.recorded_rollouts import find_rollout
from ratchet.tasks.recording.transcripts import describe_end, read_transcripts
from ratchet.tasks.settings.rollouts import Rollouts
from ratchet.tasks.storage.manifest import bind_run
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, rewards_by_group, write_datums
from tests.support.door.played_batch import BATCH, SHARD, Spans, Stage, ends
from tests.support.processes import wait_until


async def ask(base_url: str, api_key: str, text: str = "hi") -> str:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}]
        )
    return answer.choices[0].message.content or ""


def first_of_its_group(base_url: str) -> bool:
    return "-00/attempt" in base_url


async def fails_unless_it_says_otherwise(
    example: Any, *, base_url: str, api_key: str, model: str
) -> float:
    """Fails in the first attempt of the group's first rollout, and always in its second."""
    said = await ask(base_url, api_key)
    told.append((base_url.split("/rollout/")[1].split("/role")[0], said))
    if "-01/" in base_url or "-00/attempt/0" in base_url:
        raise ValueError(said)
    return 1.0


told: list[tuple[str, str]] = []


class GraphRecursionError(RecursionError):
    """Limit of steps, as LangGraph raises it."""


async def loops(example: Any, *, base_url: str, api_key: str, model: str) -> float:
    """Is ended by its framework in the first rollout of its group, and fails in the second."""
    await ask(base_url, api_key)
    if first_of_its_group(base_url):
        raise GraphRecursionError("Recursion limit of 3 reached")
    if "-01/" in base_url:
        raise KeyError("city")
    return 1.0


clients: dict[str, AsyncOpenAI] = {}
few = asyncio.Semaphore(1)


async def asks_by_the_client_of_its_module(
    _: Any, *, base_url: str, api_key: str, **__: str
) -> float:
    async with few:
        client = clients.setdefault("one", AsyncOpenAI(base_url=base_url, api_key=api_key))
        ours = client.with_options(base_url=base_url, api_key=api_key)
        messages: Any = [{"role": "user", "content": "hi"}]
        await ours.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def leaves_another_process(example: Any, *, base_url: str, api_key: str, **_: str) -> float:
    """Change what all rollouts share: the last of three finds whether it is as it was."""
    found.append(process_state())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        await ask(base_url, api_key)  # while Ratchet looks for its own files
    os.umask(0o777)
    os.environ["LEFT"] = "x"
    os.environ.pop("PATH", None)
    socket.setdefaulttimeout(0.001)
    locale.setlocale(locale.LC_ALL, "C")
    raise ValueError


def process_state() -> tuple[Any, ...]:
    os.umask(umask := os.umask(0o022))
    timeout, language = socket.getdefaulttimeout(), locale.setlocale(locale.LC_ALL)
    return Path.cwd(), umask, {**os.environ}, timeout, language


found: list[tuple[Any, ...]] = []


async def exits_in_a_task(example: Any, *, base_url: str, api_key: str, model: str) -> float:
    async def leave() -> None:
        sys.exit(3)

    if first_of_its_group(base_url):
        await asyncio.create_task(leave())
    await ask(base_url, api_key)
    return 1.0


async def begins_tasks(example: Any, *, base_url: str, **_: str) -> float:
    """Goes on until it is cancelled, whenever that is with some tasks that have yet to begin."""

    async def begin(after_turns: int) -> None:
        for _ in range(after_turns):
            await asyncio.sleep(0)
        while True:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 0)

    if not first_of_its_group(base_url):
        await asyncio.gather(*map(begin, range(8)))
    return 1.0


let_go = threading.Event()


def hangs_plainly(example: Any, *, base_url: str, **_: str) -> float:
    if first_of_its_group(base_url):
        let_go.wait(60)
    return 1.0


async def calls_nothing(example: Any, *, base_url: str, api_key: str, model: str) -> float:
    if not first_of_its_group(base_url):
        await ask(base_url, api_key)
    return 2.0 if first_of_its_group(base_url) else float(base_url.count("-01/"))


async def floods(example: Any, *, base_url: str, api_key: str, model: str) -> float:
    refused = 0
    for number in range(5):
        try:
            await ask(base_url, api_key, f"call {number}")
        except openai.BadRequestError as error:
            refused += "rollouts.max_calls" in str(error)
    return float(refused)


def forks(example: Any, *, base_url: str, **_: str) -> float:
    """The child stays, as a daemon that an agent forgot would; `children` says which it is."""
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    children.append(child)
    return 1.0


def forks_and_both_return(example: Any, **_: str) -> float:
    child = os.fork()
    if child:
        children.append(child)
    return 1.0


async def forks_and_both_exit(example: Any, **_: str) -> float:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    children.append(child)
    return 1.0


children: list[int] = []


@pytest.fixture
def played(stage: Stage, tmp_path: Path) -> Any:
    def play(agent: Any, *, group_size: int = 2, tries: int = 1, **changes: Any) -> Spans:
        batch = ShardBatch(SHARD, 0, group_size, tries)
        options: Any = {"timeout_seconds": 60.0} | changes
        return stage.play(tmp_path, agent, batch=batch, **options)

    return play


@pytest.fixture
def reaped() -> Iterator[list[int]]:
    children.clear()
    yield children
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)


def outcomes(spans: Spans) -> list[tuple[str, str | None, float | None]]:
    return [(r["rollout_id"][-2:], r.get("error_type"), r.get("reward")) for r in ends(spans)]


def test_a_task_of_an_agent_that_ends_the_program_ends_only_its_rollout(played: Any) -> None:
    assert outcomes(played(exits_in_a_task)) == [("00", "AgentExit", None), ("01", None, 1.0)]


def test_what_an_agent_s_module_keeps_serves_every_batch(stage: Stage, tmp_path: Path) -> None:
    """A client's connections and a semaphore's waiters belong to one event loop."""
    for batch in ("first", "second"):
        spans = stage.play(tmp_path / batch, asks_by_the_client_of_its_module)
        assert outcomes(spans) == [("00", None, 1.0), ("01", None, 1.0)]


def test_an_agent_that_changes_what_all_rollouts_share_changes_nothing_for_the_next(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.adapters.harness.agents._told", set())
    monkeypatch.chdir(tmp_path)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    found.clear()
    before = process_state()[:2]
    for name in ("first", "second"):
        monkeypatch.setenv("RATCHET_RUNS", "runs")
        batch = ShardBatch(SHARD, 0, 1)
        spans = stage.play(folder_of(name).path, leaves_another_process, batch=batch)
        assert outcomes(spans) == [("00", "ValueError", None)]
    assert found[0] == found[1] == process_state()
    assert process_state()[:2] == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]
    told = [one.getMessage().partition(", which")[0] for one in caplog.records]
    shared = ["working folder", "umask", "environment LEFT PATH", "socket timeout", "locale"]
    assert told == [f"an agent has changed the {one} of this process" for one in shared]


def test_a_task_that_is_cancelled_before_it_begins_is_closed() -> None:
    async def begun() -> None:
        raise AssertionError("it began")

    async def cancelled(work: Coroutine[Any, Any, None]) -> None:
        asyncio.get_running_loop().set_task_factory(contained_task)
        asyncio.create_task(work).cancel()

    work = begun()
    asyncio.run(cancelled(work))
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_rollouts_that_are_cut_off_end_what_they_began(
    played: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Were all tasks ended at once, anyio would leave coroutines that never ran, and would warn."""

    def cut_off(journal: Journal, span: dict[str, Any]) -> None:
        raise JournalError("the disk is gone")

    monkeypatch.setattr(Journal, "append", cut_off)
    with pytest.raises(BatchRefused, match="the disk is gone"):
        played(begins_tasks)
    assert not [warning.message for warning in recwarn if warning.category is RuntimeWarning]


def test_a_limit_of_steps_is_the_policy_s_reward_and_is_trained(
    stage: Stage, tmp_path: Path
) -> None:
    rewarded = Rollouts.model_validate({"rewarded_errors": {"KeyError": -2}}).rewards_of_errors()
    batch = ShardBatch(SHARD, 0, 3, attempts=2, rewarded=rewarded)
    spans = stage.play(tmp_path, loops, batch=batch)
    assert outcomes(spans) == [
        ("00", "GraphRecursionError", 0.0),
        ("01", "KeyError", -2.0),
        ("02", None, 1.0),
    ]
    made = measured(tmp_path)
    assert (made["rollouts/ok"], made["rollouts/failed"], made["datums"]) == (3, 0, 3)
    assert made["rollouts/rewarded/GraphRecursionError"] == 1
    [shown, *_] = read_transcripts([RunFolder(tmp_path).spans(BATCH)])
    assert describe_end(shown) == "reward 0, for GraphRecursionError"
    assert find_rollout(RunFolder(tmp_path), shown["rollout_id"]).end == describe_end(shown)


def test_a_limit_of_steps_fails_its_rollout_if_the_recipe_says_so(
    stage: Stage, tmp_path: Path
) -> None:
    given = {"rewarded_errors": {"GraphRecursionError": None}}
    rewarded = Rollouts.model_validate(given).rewards_of_errors()
    spans = stage.play(tmp_path, loops, batch=ShardBatch(SHARD, 0, 1, rewarded=rewarded))
    assert outcomes(spans) == [("00", "GraphRecursionError", None)]
    with pytest.raises(ValidationError, match="rewarded_errors"):
        Rollouts.model_validate({"rewarded_errors": {"langgraph.errors.GraphRecursionError": 0}})
    with pytest.raises(ValidationError, match="rewarded_errors"):
        Rollouts.model_validate({"rewarded_errors": {"KeyError": 2e6}})


def test_a_rollout_that_failed_is_played_again_with_other_tokens(played: Any) -> None:
    told.clear()
    spans = played(fails_unless_it_says_otherwise, group_size=3, tries=3)
    assert outcomes(spans) == [
        ("00", "ValueError", None),
        ("00", None, 1.0),
        *[("01", "ValueError", None)] * 3,
        ("02", None, 1.0),
    ]
    calls = [span for span in spans if span["kind"] == "llm" and "-01" in span["rollout_id"][-3:]]
    assert [call["attempt"] for call in calls] == [0, 1, 2]
    assert len({call["gen_ai_request_seed"] for call in calls}) == 3
    assert not any(call["recalled"] for call in calls)


def test_nobody_waits_for_a_plain_agent_that_hangs(played: Any) -> None:
    started = time.monotonic()
    spans = played(hangs_plainly, timeout_seconds=3)
    let_go.set()
    assert outcomes(spans) == [("00", "TimeoutError", None), ("01", None, 1.0)]
    assert time.monotonic() - started < 30


def test_a_reward_without_calls_is_counted_and_not_trained(played: Any, tmp_path: Path) -> None:
    played(calls_nothing, group_size=3)
    made = measured(tmp_path)
    assert (made["rollouts/ok"], made["rollouts/without_calls"], made["groups/partial"]) == (
        3,
        1,
        1,
    )
    trajectories = read_table(tmp_path / "trajectories.parquet")
    rewards = rewards_by_group(trajectories)["train-00000-0000"]
    assert rewards == {"train-00000-0000-01": 1.0, "train-00000-0000-02": 0.0}


def test_calls_beyond_the_limit_are_refused_and_counted(played: Any, tmp_path: Path) -> None:
    spans = played(floods, max_calls=3)
    assert [reward for _, _, reward in outcomes(spans)] == [2.0, 2.0]
    assert len([span for span in spans if span["kind"] == "llm"]) == 6
    assert measured(tmp_path)["calls/refused"] == 4


def test_a_child_that_an_agent_leaves_holds_neither_run_nor_journal(
    played: Any, reaped: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    recipe = {"agent": "a", "dataset": {"path": __file__}}
    with bind_run("one", recipe, "f00d") as run:
        spans = played(forks)
        assert len(reaped) == 2
    for file in (run.path / "lock", RunFolder(tmp_path).journal(BATCH)):
        for child in reaped:
            wait_until("its end of the files", lambda c=child, f=file: f not in held_by(c))
        with file.open("r+b") as free:
            fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert outcomes(spans) == [("00", None, 1.0), ("01", None, 1.0)]


@pytest.mark.parametrize(
    "agent", [forks_and_both_return, forks_and_both_exit], ids=lambda agent: agent.__name__
)
def test_a_child_that_comes_back_from_the_agent_ends_there(played: Any, agent: Any) -> None:
    children.clear()
    spans = played(agent)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert (len(codes), set(codes)) == (2, {1})
    assert outcomes(spans) == [("00", None, 1.0), ("01", None, 1.0)]


def held_by(process: int) -> list[Path]:
    held = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.append(entry.readlink())
    return held


def measured(folder: Path) -> dict[str, float]:
    spans, trajectories = [RunFolder(folder).spans(BATCH)], folder / "trajectories.parquet"
    assemble_trajectories.make(trajectories, spans)
    datums = folder / "datums.parquet"
    write_datums(datums, trajectories, credited("centred"))
    return measure_step(StepFiles(spans, trajectories, {}, datums))
