"""Programs that stay: one process plays many rollouts, each by a line in and a line out."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.process.program import CommandFailed
from ratchet.adapters.programs.residents import LONGEST_LINE
from tests.support.processes import ROOT, wait_until

NOWHERE = {
    "policy": Endpoint(base_url="http://127.0.0.1:1/v1", api_key="a-secret-key", model="policy")
}
READ = """
import json, os, sys, time
def read():
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit()
def write(request, **said):
    print(json.dumps({"id": request["id"], **said}), flush=True)
"""
"""The beginning of the tests' programs: how they read a request, and answer it."""

SHUFFLED = """
while True:
    requests = [read()]
    while len(requests) < requests[0]["example"]["rollouts"]:
        requests.append(read())
    for place in requests[0]["example"]["order"]:
        request = next(r for r in requests if r["example"]["place"] == place)
        print("now", place, "[" * 5000, "x" * 70_000, '{"id": 0.5}', '[1]', sep="\\n")
        print('{"id": true, "reward": 7}', '{"id": 1.0, "reward": 7}', sep="\\n")
        print('{"id": 999, "reward": 7}', "{" + '"id": %d, "reward": 7' % request["id"])
        write(request, reward=place)
"""


def program(then: str) -> str:
    return f"resident:{shlex.join([sys.executable, '-I', '-c', READ + textwrap.dedent(then)])}"


def groups() -> set[int]:
    """Return the process groups of all processes that have not ended."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(os.getpgid(process.pid))
    return found


async def rewards(name: str, *examples: Mapping[str, Any]) -> list[float]:
    agent = load_agent(name)
    played = await asyncio.gather(*(agent(example, NOWHERE) for example in examples))
    return [reward.value for reward in played if reward.value is not None]


@settings(max_examples=15)
@given(order=st.integers(1, 12).flatmap(lambda size: st.permutations(range(size))))
def test_rollouts_that_are_answered_in_any_order_get_their_own_rewards(order: list[int]) -> None:
    """Between the answers the program prints what is no answer."""
    places = range(len(order))
    examples = [{"place": place, "rollouts": len(order), "order": order} for place in places]
    assert asyncio.run(rewards(program(SHUFFLED), *examples)) == [*places]


def plays(name: str) -> bool:
    """Play a rollout; False if its process was dead, which is noticed a moment after it is."""
    try:
        asyncio.run(rewards(name, {}))
    except CommandFailed:
        return False
    return True


def test_one_process_plays_the_rollouts_of_all_batches_and_a_dead_one_is_started_again() -> None:
    """A batch has an event loop of its own."""
    name = program("while True: write(read(), reward=os.getpid())")
    first = asyncio.run(rewards(name, {}, {}))
    assert asyncio.run(rewards(name, {})) == first[:1] == first[1:]
    os.kill(int(first[0]), signal.SIGKILL)
    wait_until("its end", lambda: not psutil.pid_exists(int(first[0])))
    wait_until("another process", lambda: plays(name))
    again = asyncio.run(rewards(name, {}))
    assert again != first[:1]
    assert psutil.pid_exists(int(again[0]))


AT_ONCE = """
import asyncio, sys
from threading import Barrier, Thread
from tests.adapters.programs.test_resident_programs import NOWHERE, load_agent, program
agent, rewards = load_agent(program("while True: write(read(), reward=os.getpid())")), []
sys.setswitchinterval(1e-6)
begin = Barrier(8)
async def play():
    begin.wait()
    rewards.extend(await asyncio.gather(*(agent({}, NOWHERE) for _ in range(4))))
threads = [Thread(target=asyncio.run, args=[play()]) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join(20) for thread in threads]
print(len(rewards), len({reward.value for reward in rewards}), flush=True)
"""


def test_batches_that_begin_at_once_share_one_process() -> None:
    """Batches begin in threads of a process in which nothing has been played."""
    command = [sys.executable, "-c", AT_ONCE]
    played = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (played.returncode, played.stdout) == (0, "32 1\n"), played.stderr


def test_a_program_gets_the_example_the_roles_and_no_secret_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "ours")
    name = program("while True: r = read(); write(r, error=json.dumps([r, dict(os.environ)]))")
    with pytest.raises(CommandFailed, match="failed to play the example") as failed:
        asyncio.run(rewards(name, {"riddle": "ä"}))
    expected = '{"base_url": "http://127.0.0.1:1/v1", "api_key": "***", "model": "policy"}'
    assert f'"roles": {{"policy": {expected}}}' in str(failed.value)
    assert '"example": {"riddle": "' in str(failed.value)
    assert "a-secret-key" not in str(failed.value)
    assert "ours" not in str(failed.value)


def test_an_answer_without_a_reward_fails_its_rollout() -> None:
    with pytest.raises(CommandFailed, match="neither 'reward' nor 'error'"):
        asyncio.run(rewards(program("write(read(), score=1)"), {}))


def test_a_program_that_ends_fails_the_rollouts_in_flight_and_tells_why() -> None:
    name = program("""
        answered, other, _ = read(), read(), read()
        write(answered, reward=1)
        sys.stderr.write("no memory for " + other["roles"]["policy"]["api_key"])
        sys.exit(3)
    """)

    async def outcomes() -> list[object]:
        playing = (load_agent(name)({}, NOWHERE) for _ in range(3))
        return await asyncio.gather(*playing, return_exceptions=True)

    answered, *failed = asyncio.run(outcomes())
    assert getattr(answered, "value", None) == 1.0
    assert [type(error) for error in failed] == [CommandFailed, CommandFailed]
    for error in failed:
        assert "ended with exit status 3" in str(error)
        assert str(error).endswith("The end of its stderr:\nno memory for ***")


async def appears(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.02)


def test_a_cancelled_rollout_is_announced_and_the_others_go_on(tmp_path: Path) -> None:
    both = tmp_path / "both"
    name = program(f"""
        first, second = read(), read()
        open({str(both)!r}, "w").close()
        cancelled = read()
        assert cancelled == {{"id": first["id"], "cancelled": True}}
        write(first, error="cancelled")
        write(second, reward=os.getpid())
        while True:
            write(read(), reward=os.getpid())
    """)

    async def cancel_one() -> float:
        first, second = (asyncio.create_task(rewards(name, {})) for _ in range(2))
        await appears(both)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return (await second)[0]

    process = asyncio.run(cancel_one())
    assert asyncio.run(rewards(name, {})) == [process]


def test_a_program_that_does_not_answer_a_cancelled_rollout_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ratchet.adapters.programs.residents.CANCEL_SECONDS", 0.3)
    begun = tmp_path / "begun"
    name = program(f"read(); open({str(begun)!r}, 'w').close(); time.sleep(600)")

    async def cancel_one() -> None:
        first, second = (asyncio.create_task(rewards(name, {})) for _ in range(2))
        await appears(begun)
        first.cancel()
        with pytest.raises(CommandFailed, match=r"signal 9\).* answered a cancelled one in 0.3"):
            await second

    asyncio.run(cancel_one())


def test_a_line_may_be_as_long_as_documented() -> None:
    size = LONGEST_LINE - 100
    name = program(f"write(read(), reward=2, said='x' * {size}); read()")
    assert asyncio.run(rewards(name, {"long": "x" * 2**20})) == [2.0]


@pytest.mark.parametrize("end", ["", "\\n"])
def test_a_program_that_writes_a_longer_line_is_ended(end: str) -> None:
    name = program(f"read(); print('x' * {LONGEST_LINE + 1}, end='{end}', flush=True); read()")
    with pytest.raises(CommandFailed, match=f"since it wrote a line of more than {LONGEST_LINE}"):
        asyncio.run(rewards(name, {}))


def test_a_program_ends_with_the_process_that_plays() -> None:
    """The program, and the child that it has forked, do not look at their stdin any more."""
    name = program("""
        request = read()
        if os.fork(): write(request, reward=os.getpid())
        time.sleep(600)
    """)
    script = (
        "import asyncio, os\n"
        "from tests.adapters.programs.test_resident_programs import rewards\n"
        f"print(int(asyncio.run(rewards({name!r}, {{}}))[0]), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", script]
    played = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert played.returncode == -signal.SIGKILL
    group = int(played.stdout)
    wait_until("the end of all its processes", lambda: group not in groups())
