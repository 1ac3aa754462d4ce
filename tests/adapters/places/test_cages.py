"""Cages: what a program that has learned to use a shell can reach from inside, and what not."""

import platform
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import psutil
import pytest

from ratchet.adapters.door.door import Door
from ratchet.adapters.places import cage
from ratchet.adapters.places.cage import NoCage, check_cage
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.rewards import Reward
from tests.support.agents.placed_batch import CURL, play_in_places, rollout_id, shell
from tests.support.processes import ROOT, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="the system's package bubblewrap is not installed"
)

ATTACK = (ROOT / "tests/support/agents/outliving_program.py").read_text()


def play(door: Door, program: str, folder: Path, examples: Any = ({},), **place: Any) -> list[Any]:
    """Play programs of a shell in cages; return what each rollout ended with."""
    ends = play_in_places(door, shell(program), examples, folder, cage="bwrap", **place)
    return [end.outcome for end in ends]


def test_a_caged_program_finds_the_door_and_nothing_else(open_door: Door, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        program = f"""{CURL}
        ask > answer || exit 7
        curl --silent --max-time 2 http://127.0.0.1:{port}/ && exit 8
        curl --silent --max-time 2 http://192.0.2.1/ && exit 9
        grep -q choices answer && echo 1
        """
        assert play(open_door, program, tmp_path, [{}] * 4) == [Reward(1.0)] * 4


def test_places_in_cages_have_the_same_paths(open_door: Door, tmp_path: Path) -> None:
    paths = "/place/work /place/home /place/tmp rollout"
    program = f'test "$(pwd) $HOME $TMPDIR $(id -un)" = "{paths}" && echo 1'
    assert play(open_door, program, tmp_path, [{}] * 2) == [Reward(1.0)] * 2


ATTEMPTS = (
    "cat {other}",
    "cat {places}/{own}/../{beside}",
    "cat {outside}",
    "ls {places}",
    "cat $HOME/../../{beside}",
    "ls /proc/{pid}",
    "cat /etc/shadow",
    "echo x > /usr/file",
    "echo x > /file",
    "echo x > /dev/file",
    "echo x > /etc/passwd",
    "cat /proc/sys/kernel/panic_on_oops > /proc/sys/kernel/panic_on_oops",
    "echo 1 > /proc/sys/vm/drop_caches",
    ": > /proc/mtrr",
    "head -c 1 /proc/kcore",
    "head -c 1 /proc/kmsg",
    "echo x > /proc/sysrq-trigger",
    "cat /sys/kernel/uevent_helper",
    "unshare -Urmpf --mount-proc sh -c 'echo 1 > /proc/sys/vm/drop_caches'",
    "unshare -Urmn sh -c 'mount -t sysfs none /place/tmp && ls /place/tmp/kernel'",
    "unshare -Urm sh -c 'mount -o remount,rw /proc && echo 1 > /proc/sys/vm/drop_caches'",
    "unshare -Urm sh -c 'mount -o remount,rw /usr && touch /usr/file'",
    "mount -t tmpfs none /place/work",
    "kill -9 {pid}",
    "grep -r {key} /proc/*/environ",
    "cat /root/.bashrc",
    "ls /etc/ssl/private",
    "ls /etc/pki/tls/private",
    "dmesg",
)
"""What a program in a cage may try; each is a success if it ends with 0."""


def test_a_caged_program_reaches_nothing_outside_its_place(open_door: Door, tmp_path: Path) -> None:
    places, outside = tmp_path / "places", tmp_path / "outside"
    other = places / "other" / "work" / "file"
    other.parent.mkdir(parents=True)
    other.write_text("another rollout's")
    outside.write_text("the reward's")
    with subprocess.Popen(["sleep", "60"], env={"KEY": "another-key"}) as process:
        named = {
            "places": places,
            "own": rollout_id(0),
            "other": other,
            "beside": other.relative_to(places),
            "outside": outside,
            "pid": process.pid,
            "key": "another-key",
        }
        tried = [f"({attempt}) && echo {n} >> reached" for n, attempt in enumerate(ATTEMPTS)]
        program = "\n".join([*tried, "cat reached >&2 && exit 9", "echo 1"])
        reached = play(open_door, program.format(**named), places)
        assert process.poll() is None
        process.kill()
    assert reached == [Reward(1.0)]


def test_an_attempt_that_reaches_something_would_be_seen(open_door: Door, tmp_path: Path) -> None:
    program = "(cat /etc/passwd) && echo 1 >> reached\ncat reached >&2 && exit 9\necho 1"
    [outcome] = play(open_door, program, tmp_path)
    assert "ended with exit status 9" in cast(Failure, outcome).message


def test_ten_thousand_processes_are_refused(open_door: Door, tmp_path: Path) -> None:
    before = len(psutil.pids())
    bomb = "import os, time\nfor _ in range(10000):\n    if os.fork() == 0: time.sleep(60)"
    [outcome] = play(open_door, f'python3 -c "{bomb}"; sleep 5', tmp_path, most_processes=50)
    said = cast(Failure, outcome).message
    assert (
        "processes and threads, and may have 50" in said
        or "Resource temporarily unavailable" in said
    )
    wait_until("the end of the processes", lambda: len(psutil.pids()) < before + 40)


def test_memory_beyond_the_bound_is_refused(open_door: Door, tmp_path: Path) -> None:
    eats = "held = bytearray(4000 * 2**20)"
    program = f'python3 -c "{eats}" || echo 1'
    assert play(open_door, program, tmp_path, most_memory_mib=256) == [Reward(1.0)]
    holds = "import time; held = bytearray(100 * 2**20); time.sleep(30)"
    many = f'for n in 1 2 3 4; do python3 -c "{holds}" & done; wait'
    [outcome] = play(open_door, many, tmp_path, most_memory_mib=256)
    assert "MiB of memory, and may use 256" in cast(Failure, outcome).message


@pytest.mark.parametrize("where", [".", "$HOME", "$TMPDIR", "/tmp", "/dev/shm"])
def test_a_disk_that_a_caged_program_fills_is_its_place(
    open_door: Door, tmp_path: Path, where: str
) -> None:
    fills = (
        f"cd {where} && i=0; while :; do head -c 900000 /dev/zero > $i || exit; i=$((i+1)); done"
    )
    [outcome] = play(open_door, fills, tmp_path, most_mib=16)
    assert "MiB, and may hold 16" in cast(Failure, outcome).message


def test_no_process_outlives_its_cage(open_door: Door, tmp_path: Path) -> None:
    program = "setsid sh -c 'while :; do date >> alive; sleep 0.1; done' & sleep 0.3; echo 1"
    assert play(open_door, program, tmp_path, kept="always") == [Reward(1.0)]
    alive = tmp_path / rollout_id(0) / "work" / "alive"
    lines = alive.read_text()
    subprocess.run(["sleep", "0.4"], check=True)
    assert alive.read_text() == lines


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is written for it")
@pytest.mark.parametrize("refused", [True, False])
def test_a_program_that_takes_over_its_cage_ends_before_the_hidden_tests_are_laid(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """Without the filter of calls, the attack succeeds where Yama allows it, and gains nothing."""
    if not refused:
        monkeypatch.setattr(cage, "REFUSED_CALLS", {})
    given: dict[str, Any] = {"reward": "sh tests/check.sh", "kept": "always", "cage": "bwrap"}
    example = {"files": {"attack.py": ATTACK}, "tests": {"tests/check.sh": "test -e answer"}}
    [end] = play_in_places(open_door, shell("python3 attack.py"), [example], tmp_path, **given)
    assert end.outcome == Reward(0.0)
    place = tmp_path / rollout_id(0)
    said = (place / "program.log").read_text()
    assert (place / "work" / "begun").exists()
    assert ("ptrace: Operation not permitted" in said) == refused
    if not refused:
        alive = (place / "work" / "alive").read_text()
        assert alive.count("False") > 10
        assert "True" not in alive


def test_nothing_of_a_cage_lives_once_its_host_s_process_has_ended(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a program had undone what ends a cage with its parent."""
    monkeypatch.setattr(cage, "APART", [one for one in cage.APART if one != "--die-with-parent"])
    program = "setsid sh -c 'while :; do date >> alive; sleep 0.05; done' & sleep 600"
    given: dict[str, Any] = {"seconds": 1.0, "kept": "always", "cage": "bwrap"}
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, **given)
    assert "took longer than 1 s" in cast(Failure, end.outcome).message
    alive = tmp_path / rollout_id(0) / "work" / "alive"
    lines = alive.read_text()
    assert lines
    subprocess.run(["sleep", "0.4"], check=True)
    assert alive.read_text() == lines


def test_calls_into_other_processes_and_to_keys_are_refused(
    open_door: Door, tmp_path: Path
) -> None:
    """Those of x32 too. ptrace's first request asks for nothing that is refused elsewhere."""
    _, calls = cage.REFUSED_CALLS[platform.machine()]
    called = f"""
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in {[*calls, calls[0] + cage.OTHER_CALLS]}:
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        sys.exit(f"{{number}} is not refused")
print(1)
"""
    program = f"python3 -c {shlex.quote(called)}"
    assert play(open_door, program, tmp_path) == [Reward(1.0)]


def test_no_file_of_a_place_has_its_owner_s_rights(open_door: Door, tmp_path: Path) -> None:
    program = """
    cp /bin/sh shell && chmod u+s shell && grep -q ' /place/work .*nosuid' /proc/mounts && echo 1
    """
    assert play(open_door, program, tmp_path, kept="always") == [Reward(1.0)]
    assert (tmp_path / rollout_id(0)).stat().st_mode & 0o777 == 0o700


def test_connections_of_a_cage_are_passed_on_a_few_at_a_time(
    open_door: Door, tmp_path: Path
) -> None:
    flood = """
import socket, time
held = []
for _ in range(150):
    held.append(socket.create_connection(("127.0.0.1", 8600)))
    held[-1].sendall(b"POST /")
time.sleep(1)
"""
    program = f"{CURL}\npython3 -c {shlex.quote(flood)}; ask | grep -q choices && echo 1"
    seen, over = list[int](), Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.append(psutil.Process().num_fds())

    looking = Thread(target=look)
    looking.start()
    before = psutil.Process().num_fds()
    assert play(open_door, program, tmp_path) == [Reward(1.0)]
    over.set()
    looking.join()
    assert 3 * cage.MOST_CONNECTIONS <= max(seen) - before < 4 * cage.MOST_CONNECTIONS


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "import threading\nfor _ in range(60): threading.Thread(target=sleep).start()",
            "processes and threads, and may have 50",
        ),
        (
            "import os\nfor held in os.memfd_create('x'), os.memfd_create('y'):\n"
            "    for _ in range(24): os.write(held, bytes(2**20))",
            "MiB, and may hold 32",
        ),
        (
            "import os\nfor held in open('x', 'wb', 0), open('y', 'wb', 0):\n"
            "    os.unlink(held.name)\n    for _ in range(24): held.write(bytes(2**20))\n"
            "    globals()[held.name] = held",
            "MiB, and may hold 32",
        ),
        (
            "import os\nfor _ in range(40): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
            "for n in range(64): open(str(n), 'wb').write(bytes(2**20))",
            "MiB, and may hold 32",
        ),
        (
            "import os\nfor _ in range(300): os.mkdir('d' * 250); os.chdir('d' * 250)",
            "deeper than it is counted",
        ),
    ],
    ids=["threads", "a memfd", "files without a name", "files in deep folders", "deep folders"],
)  # fmt: skip
def test_bounds_hold_for_what_no_folder_shows(
    open_door: Door, tmp_path: Path, body: str, said: str
) -> None:
    text = f"import time\nsleep = lambda: time.sleep(30)\n{body}\nsleep()"
    program = f"python3 -c {shlex.quote(text)}"
    [outcome] = play(open_door, program, tmp_path, most_mib=32, most_processes=50)
    assert said in cast(Failure, outcome).message


def test_the_reward_command_is_caged_too_and_reaches_no_door(
    open_door: Door, tmp_path: Path
) -> None:
    checks = 'test -z "$OPENAI_BASE_URL" && test "$(cat file)" = 1 && ! cat /root/.bashrc'
    example = {"tests": {"check.sh": f'{checks}; echo $? > result; test "$(cat result)" = 0'}}
    options: dict[str, Any] = {"reward": "sh check.sh", "kept": "always"}
    assert play(open_door, "echo 1 > file", tmp_path, [example], **options) == [Reward(1.0)]


def test_a_program_that_the_cage_does_not_show_is_refused_by_its_path(
    open_door: Door, tmp_path: Path
) -> None:
    hidden = tmp_path / "bin" / "program"
    hidden.parent.mkdir()
    hidden.write_text("#!/bin/sh\necho 1\n")
    hidden.chmod(0o755)
    given: dict[str, Any] = {"cage": "bwrap", "kept": "never"}
    [end] = play_in_places(open_door, f"command:{hidden}", [{}], tmp_path / "places", **given)
    said = cast(Failure, end.outcome).message
    assert f"the cage does not show {hidden}; add a folder that holds it to place.reads" in said
    [scored] = play(open_door, "true", tmp_path / "places", reward=str(hidden), kept="never")
    assert f"the cage does not show {hidden}" in cast(Failure, scored).message
    given["reads"] = [str(hidden.parent)]
    [end] = play_in_places(open_door, f"command:{hidden}", [{}], tmp_path / "places", **given)
    assert end.outcome == Reward(1.0)


def test_a_machine_without_bubblewrap_refuses_a_cage_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_cage.cache_clear()
    monkeypatch.setattr(cage, "BUBBLEWRAP", "no-such-bwrap")
    with pytest.raises(NoCage, match="install the system's package bubblewrap, or give"):
        check_cage()
    check_cage.cache_clear()


def test_a_caged_program_that_cannot_be_started_has_no_reward(
    open_door: Door, tmp_path: Path
) -> None:
    program = tmp_path / "installed" / "program"
    program.parent.mkdir()
    program.write_text("#!/there/is/no/shell\n")
    program.chmod(0o755)
    place = {"cage": "bwrap", "reads": [str(program.parent)], "reward": "true"}
    [end] = play_in_places(open_door, f"command:{program}", [{}], tmp_path / "places", **place)
    assert "cannot be started" in cast(Failure, end.outcome).message


@pytest.mark.parametrize("status", [126, 127])
def test_a_caged_program_that_ends_like_a_missing_one_earns_what_its_place_is_worth(
    open_door: Door, tmp_path: Path, status: int
) -> None:
    program = f"echo made > file; exit {status}"
    assert play(open_door, program, tmp_path, reward="test -f file") == [Reward(1.0)]
