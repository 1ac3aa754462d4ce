"""Command lines as agents: their input, their reward and their end."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from psutil import process_iter

from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.process.program import LONGEST_OUTPUT, CommandFailed
from ratchet.adapters.rewards import Reward
from tests.support.processes import ROOT, wait_until

NOWHERE = {
    "policy": Endpoint(base_url="http://127.0.0.1:1/v1", api_key="a-secret-key", model="policy")
}
HELPED = NOWHERE | {
    "the-judge": Endpoint(base_url="http://127.0.0.1:2/v1", api_key="another-key", model="judge")
}


def python(program: str) -> str:
    return shlex.join([sys.executable, "-I", "-c", program])


def shell(program: str) -> str:
    return shlex.join(["sh", "-c", program])


def play(
    line: str, example: dict[str, Any] | None = None, endpoints: Mapping[str, Endpoint] = NOWHERE
) -> Reward:
    roles = [role for role in endpoints if role != "policy"]
    return asyncio.run(load_agent(f"command:{line}", roles)(example or {}, endpoints))


def test_the_example_is_on_stdin_and_the_last_json_line_is_the_reward() -> None:
    program = (
        "import json, sys; example = json.load(sys.stdin); print(7); print(example['a'] / 2)\n"
        "print('that was it')"
    )
    assert play(python(program), {"a": 0.5, "b": "ä"}).value == 0.25


def test_a_command_may_return_rewards_by_role_and_by_call() -> None:
    reward = play(shell("""echo '{"policy": [0, 1, 0.5], "the-judge": 2}'"""), {}, HELPED)
    assert (reward.value, reward.roles["the-judge"]) == (1.5, 2.0)
    assert reward.calls == {"policy": (0.0, 1.0, 0.5)}


def test_a_command_gets_each_role_s_endpoint_and_no_other_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TINKER_API_KEY", "WANDB_API_KEY", "DATABASE_URL", "HTTP_PROXY"):
        monkeypatch.setenv(name, "ours")
    program = (
        "import json, os; given = {n: v for n, v in os.environ.items()"
        " if n not in ('PATH', 'HOME', 'USER', 'TZ', 'TMPDIR') and not n.startswith('LC_')}\n"
        "raise SystemExit(json.dumps(given, sort_keys=True))"
    )
    with pytest.raises(CommandFailed) as failed:
        play(python(program), {}, HELPED)
    for expected in (
        '"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"',
        '"OPENAI_MODEL": "policy"',
        '"THE_JUDGE_BASE_URL": "http://127.0.0.1:2/v1"',
        '"THE_JUDGE_MODEL": "judge"',
        '"OPENAI_API_KEY": "***"',
        '"THE_JUDGE_API_KEY": "***"',
    ):
        assert expected in str(failed.value)
    for unexpected in ("ours", "a-secret-key", "another-key"):
        assert unexpected not in str(failed.value)


def test_the_end_of_stderr_is_in_the_error() -> None:
    with pytest.raises(
        CommandFailed, match=r"(?s)ended with exit status 3.*no such file"
    ) as failed:
        play(shell("seq 100000 >&2; echo no such file >&2; echo 1; exit 3"))
    assert len(str(failed.value)) < 5000


def test_a_killed_command_fails() -> None:
    with pytest.raises(CommandFailed, match="was killed"):
        play(shell("echo 1; kill -9 $$"))


def test_a_command_without_a_json_line_fails() -> None:
    with pytest.raises(CommandFailed, match=r"(?s)printed no reward; its last line must be.*won"):
        play("echo I won")


def test_only_the_end_of_a_long_output_is_kept() -> None:
    flood = "import sys\nfor stream in (sys.stdout, sys.stderr): stream.write('1' * 2**24)\n"
    assert play(python(f"{flood}print('\\n0.5')")).value == 0.5
    with pytest.raises(CommandFailed, match="printed no reward") as failed:
        play(python(flood))  # the end of a number is another number
    assert len(str(failed.value)) < LONGEST_OUTPUT


def test_a_command_need_not_read_the_example() -> None:
    assert play("echo 1", {"long": "x" * 2**20}).value == 1.0


def test_children_of_a_command_are_killed_when_it_ends(tmp_path: Path) -> None:
    """The child keeps the command's stdout open, for longer than a test may take."""
    left = tmp_path / "left"
    assert play(shell(f"sleep 999 & echo $! > {left}; echo 1")).value == 1.0
    wait_for_the_end_of(left.read_text())


def test_a_command_need_not_wait_for_what_it_leaves_in_a_session_of_its_own(tmp_path: Path) -> None:
    left = tmp_path / "left"
    apart = f"setsid sh -c 'echo $$ > {left}.new; mv {left}.new {left}; exec sleep 999'"
    program = f"{apart} & while [ ! -e {left} ]; do sleep 0.01; done; echo 1"
    assert play(shell(program)).value == 1.0
    assert runs(left.read_text().strip())
    os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_cancelled_rollout_kills_the_command_and_its_children(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"sleep 999 & echo $$ $! > {ready}.new; mv {ready}.new {ready}; wait"

    async def cancelled() -> None:
        rollout = asyncio.create_task(load_agent(f"command:{shell(program)}")({}, NOWHERE))
        while not ready.exists():
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(cancelled())
    wait_for_the_end_of(ready.read_text())


def test_a_command_and_its_children_end_with_a_killed_process_that_plays(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"sleep 999 & echo $$ $! > {ready}.new; mv {ready}.new {ready}; wait"
    script = f"from {__name__} import play; play({shell(program)!r})"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as player:
        wait_until("the command's start", ready.exists)
        assert all(map(runs, ready.read_text().split()))
        player.kill()
    wait_for_the_end_of(ready.read_text())


def test_a_command_never_starts_if_its_player_dies_before_it_can_answer_for_it(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    die = "program.end_with_this_process = lambda _: os.kill(os.getpid(), signal.SIGKILL)"
    script = (
        f"import os, signal; from ratchet.adapters.process import program; {die}; "
        f"from {__name__} import play; play({shell(f'touch {ready}; sleep 999')!r})"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == -signal.SIGKILL
    wait_until("the end of the command's process", lambda: not is_named_by_a_process(ready))
    assert not ready.exists()


def is_named_by_a_process(path: Path) -> bool:
    return any(
        str(path) in " ".join(row.info["cmdline"] or ()) for row in process_iter(["cmdline"])
    )


def wait_for_the_end_of(processes: str) -> None:
    wait_until("the end of the processes", lambda: not any(map(runs, processes.split())))


def runs(process: str) -> bool:
    """Tell whether a process runs and is not a zombie that its parent has yet to reap."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "XZ"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("command:", "names no program"),
        ("command:no-such-program --now", "there is no program 'no-such-program'"),
        ("command:echo 'half", "cannot be read .No closing quotation."),
    ],
)
def test_a_command_that_cannot_run_is_refused_when_it_is_loaded(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_agent(name)


def test_a_hundred_concurrent_commands_each_return_their_own_reward() -> None:
    agent = load_agent(f"command:{shell('cat')}")

    async def rewards() -> list[float | None]:
        rollouts = (agent({"policy": number}, NOWHERE) for number in range(100))
        return [reward.value for reward in await asyncio.gather(*rollouts)]

    before = open_files()
    assert asyncio.run(rewards()) == [float(number) for number in range(100)]
    assert open_files() <= before


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])
