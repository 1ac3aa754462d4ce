"""Programs in Python that start once: a server has their imports, and forks for each rollout."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.adapters.clients.current_rollout import Endpoint
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.places.filling import fill
from ratchet.adapters.places.place import PROGRAM_LOG, Place
from ratchet.adapters.player_protocol import PlaceSettings
from ratchet.adapters.process.program import CommandFailed
from ratchet.adapters.programs.residents import kill_programs
from ratchet.adapters.rewards import Reward
from ratchet.tasks.settings.rollouts import PlaceOfRollouts
from tests.support.processes import ROOT, wait_until

LIBRARY = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
said = []
"""
"""An installed module that counts its imports."""

LATE = """
import json, os, sys
def play():
    import library
    return len(library.said)
"""
"""The beginning of a program that imports the library late."""


def endpoints(key: str = "a-secret-key") -> dict[str, Endpoint]:
    return {"policy": Endpoint(base_url="http://127.0.0.1:1/v1", api_key=key, model="policy")}


INTERPRETERS = sorted(
    path
    for path in Path(sys.base_prefix).parent.glob("*/bin/python3.*")
    if re.fullmatch(r"python3\.(9|1\d)", path.name)
)
"""The interpreters that are installed beside ours, from Python 3.9."""


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    kill_programs()


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the library's imports, of which each is a line."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text(
        LIBRARY.replace('os.environ["IMPORTS"]', repr(str(tmp_path / "imports")))
    )
    monkeypatch.setenv("PYTHONPATH", str(installed))
    return tmp_path / "imports"


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """A function that writes a program, and returns the agent's name."""

    def write(text: str, *words: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(text)
        return " ".join([f"forks:{sys.executable} {file}", *words])

    return write


def play(name: str, example: Mapping[str, Any] | None = None) -> Reward:
    return asyncio.run(load_agent(name)(example or {}, endpoints()))


async def rewards(name: str, *examples: Mapping[str, Any]) -> list[float | None]:
    agent = load_agent(name)
    played = await asyncio.gather(*(agent(example, endpoints()) for example in examples))
    return [reward.value for reward in played]


def servers() -> list[psutil.Process]:
    """Return the fork servers of this process, which have no parent but it."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any("fork_server.py" in word for word in words) and words[0] != "/bin/sh":
                found.append(process)
    return found


def runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def appears(file: Path) -> str:
    while not file.exists() or not file.read_text().endswith("\n"):
        await asyncio.sleep(0.02)
    return file.read_text()


def waiting(folder: Path) -> str:
    """Return a program that imports the library, and waits for a file if it is told to."""
    return (
        f"{LATE}\nimport time\nplay(); example = json.load(sys.stdin)\n"
        f"if example: open({str(folder / 'begun')!r}, 'w').write('begun\\n')\n"
        f"while example and not os.path.exists({str(folder / 'go')!r}): time.sleep(0.02)\n"
        "print(1)"
    )


def test_a_script_plays_as_its_interpreter_plays_it(written: Any) -> None:
    name = written(
        "import json, sys; example = json.load(sys.stdin)\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
        "assert sys.path[0] == __file__.rpartition('/')[0], sys.path\n"
        "assert sys.argv == [__file__, '-n', '7'], sys.argv\n"
        "print(5); print(example['half'] / 2)",
        *("-n", "7"),
    )
    assert play(name, {"half": 0.5}).value == 0.25


def test_a_module_plays_as_its_interpreter_plays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("half = 0.5")
    (tmp_path / "package" / "told.py").write_text(
        "import sys\nfrom package import half\nassert sys.argv == [__file__, 'x'], sys.argv\n"
        "if __name__ == '__main__': print(half)"
    )
    assert play(f"forks:{sys.executable} -X utf8 -B -m package.told x").value == 0.5


def test_a_console_script_imports_its_libraries_once_and_its_own_package_each_time(
    imports: Path, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "tool"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'own')!r}, 'a').write('own\\n')")
    (package / "cli.py").write_text("import library\ndef app(): print(1)")
    script = tmp_path / "tool"
    script.write_text(
        f"#!/usr/bin/env -S {sys.executable} -B\nimport sys\nfrom tool.cli import app\n"
        "if __name__ == '__main__':\n    sys.exit(app())\n"
    )
    script.chmod(0o755)
    for _ in range(4):
        assert play(f"forks:{script}").value == 1.0
    assert len(imports.read_text().split()) == 2
    assert len((tmp_path / "own").read_text().split()) == 4


def test_what_the_first_rollout_imports_late_is_imported_once_more_for_sixteen_at_once(
    imports: Path, written: Any
) -> None:
    name = written(f"{LATE}\nprint(json.load(sys.stdin)['number'] + play())")
    examples = [{"number": number} for number in range(17)]
    assert asyncio.run(rewards(name, *examples)) == [float(number) for number in range(17)]
    assert len(imports.read_text().split()) == 2
    [server] = servers()
    assert str(server.pid) in imports.read_text().split()


@pytest.mark.parametrize("python", INTERPRETERS, ids=lambda path: path.name)
def test_a_server_runs_in_any_interpreter(
    python: Path, imports: Path, written: Any, tmp_path: Path
) -> None:
    written(f"{LATE}\nimport multiprocessing, ssl\nprint(play() + json.load(sys.stdin)['number'])")
    name = f"forks:{python} -W error {tmp_path / 'program.py'}"
    for number in range(3):
        assert asyncio.run(rewards(name, {"number": number})) == [float(number)]
    assert len(imports.read_text().split()) == 2


def test_rollouts_begin_while_the_first_goes_on(
    imports: Path, written: Any, tmp_path: Path
) -> None:
    name = written(waiting(tmp_path))

    async def both() -> None:
        first = asyncio.create_task(rewards(name, {"first": True}))
        await appears(tmp_path / "begun")
        assert await rewards(name, {}) == [1.0]
        assert not first.done()
        (tmp_path / "go").touch()
        await first

    asyncio.run(both())


def test_rollouts_see_nothing_of_each_other(imports: Path, written: Any) -> None:
    """A rollout says what it finds, and leaves something of each kind."""
    name = written(f"""{LATE}
import random, uuid
play()
found = [play(), random.random(), str(uuid.uuid4()), os.environ.get("LEFT"), sys.argv[1:]]
found += [os.environ["OPENAI_API_KEY"], os.getpid() == os.getpgid(0) == os.getsid(0)]
sys.modules["library"].said.append(1)
os.environ["LEFT"] = "something"
sys.argv.append("left")
print(json.dumps(found), file=sys.stderr)
raise SystemExit(1)
""")

    async def said() -> list[list[object]]:
        found = []
        for key in ("first", "second", "third"):
            with pytest.raises(CommandFailed) as failed:
                await load_agent(name)({}, endpoints(key))
            assert f'"{key}"' not in str(failed.value)
            found.append(json.loads(str(failed.value).splitlines()[-1].replace("***", key)))
        return found

    told = asyncio.run(said())
    assert len(imports.read_text().split()) == 2
    assert len({str(one[1:3]) for one in told}) == len(told)
    keys = ("first", "second", "third")
    assert [[one[0], *one[3:]] for one in told] == [[0, None, [], key, True] for key in keys]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            "raise ValueError('not found')",
            r"(?s)status 1;.*program.py\", line 1, in <module>.*not found",
        ),
        ("import sys; sys.exit('no task')", r"(?s)ended with exit status 1;.*no task"),
        ("import os; os.kill(os.getpid(), 9)", "was killed"),
        ("import os; os.kill(os.getppid(), 9)\nwhile True: pass", "was killed"),
    ],
)
def test_a_program_s_end_is_told_as_a_command_s_is(written: Any, end: str, said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        play(written(end))


def test_a_program_s_last_words_are_kept(written: Any, tmp_path: Path) -> None:
    """A file that is left open, a function for the end, and a thread all come to their end."""
    name = written(f"""
import atexit, threading, time
left = open({str(tmp_path / "left")!r}, "w")
left.write("written")
atexit.register(lambda: print(0.5))
threading.Thread(target=lambda: (time.sleep(0.2), left.write(" by a thread"))).start()
""")
    assert play(name).value == 0.5
    assert (tmp_path / "left").read_text() == "written by a thread"


def test_what_a_program_leaves_is_killed_at_its_end(written: Any, tmp_path: Path) -> None:
    """One child is of its process group; another, and its child, have left that without an exec."""
    left = tmp_path / "left"
    name = written(f"""
import os, subprocess, time
pids = [subprocess.Popen(["sleep", "999"]).pid]
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.fork()
    os.write(write, b"%9d" % os.getpid())
    time.sleep(999)
pids += [os.read(read, 9).decode(), os.read(read, 9).decode()]
open({str(left)!r}, "w").write(" ".join(map(str, pids)))
print(1)
""")
    assert play(name).value == 1.0
    assert [pid for pid in map(int, left.read_text().split()) if runs(pid)] == []
    assert len(left.read_text().split()) == 3


def test_a_cancelled_rollout_ends_its_program_and_no_other(written: Any, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    name = written(f"""
import json, os, subprocess, sys, time
if json.load(sys.stdin):
    child = subprocess.Popen(["sleep", "999"])
    open({str(ready)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
    time.sleep(999)
print(1)
""")

    async def cancelled() -> str:
        await rewards(name, {})
        rollout = asyncio.create_task(rewards(name, {"for": "ever"}))
        pids = await appears(ready)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert await rewards(name, {}, {}) == [1.0, 1.0]
        return pids

    pids = asyncio.run(cancelled())
    wait_until("the end of both", lambda: not any(map(runs, map(int, pids.split()))))
    assert len(servers()) == 1


def test_a_killed_server_costs_no_rollout_and_is_started_anew(
    imports: Path, written: Any, tmp_path: Path
) -> None:
    name = written(waiting(tmp_path))

    async def killed() -> None:
        await rewards(name, {})
        under_way = asyncio.create_task(rewards(name, {"number": 1}, {"number": 2}))
        await appears(tmp_path / "begun")
        [server] = servers()
        server.kill()
        for _ in range(3):  # the first may come before it is known
            assert await rewards(name, {}, {}) == [1.0, 1.0]
        assert not under_way.done()
        (tmp_path / "go").touch()
        assert await under_way == [1.0, 1.0]
        assert [one.pid for one in servers()] not in ([], [server.pid])
        assert str(servers()[0].pid) in imports.read_text().split()

    asyncio.run(killed())


def test_servers_and_programs_end_with_the_process_that_plays(written: Any, tmp_path: Path) -> None:
    name = written(
        "import json, os, sys, time\nif json.load(sys.stdin):\n"
        f"    begun = open({str(tmp_path / 'begun')!r}, 'w')\n"
        "    print(os.getpid(), os.getppid(), file=begun, flush=True)\n"
        "    time.sleep(999)\nprint(1)"
    )
    script = f"""
import asyncio, os, psutil
from tests.adapters.programs.test_forks import appears, Path, rewards, servers
async def begun():
    await rewards({name!r}, {{}})
    task = asyncio.create_task(rewards({name!r}, {{"for": "ever"}}))
    print(await appears(Path({str(tmp_path / "begun")!r})), servers()[0].pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(begun())
"""
    words = [sys.executable, "-c", script]
    played = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert played.returncode == -signal.SIGKILL
    pids = [*map(int, played.stdout.split())]
    assert len(pids) == 3
    wait_until("the end of all its processes", lambda: not any(map(runs, pids)))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()",
         r"they start 1 threads \(Thread-1 \(wait\)\)"),
        ("import socket\nkept = socket.socket()", "they keep a connection open"),
        ("import os\nif os.environ.get('OPENAI_API_KEY') is None:\n    os._exit(5)",
         "the server that does ended with exit status 5"),
        ("import random\nkept = random.Random()",
         r"they keep generators of random numbers \(Random\)"),
        ("from numpy.random import RandomState, default_rng\nkept = default_rng(), RandomState()",
         r"they keep generators of random numbers \(Generator, RandomState\)"),
    ],
    ids=["a thread", "a connection", "an end", "a generator", "numpy's generators"],
)  # fmt: skip
def test_a_program_that_cannot_be_forked_plays_as_a_command_and_is_told_to_be_one(
    body: str, reason: str, imports: Path, written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (imports.parent / "site-packages" / "spoiling.py").write_text(body)
    name = written(f"{LATE}\nplay(); import spoiling\nprint(1)")
    for _ in range(12):
        assert asyncio.run(rewards(name, {})) == [1.0]
        if "write command:" in caplog.text:
            break
    assert servers() == []
    assert asyncio.run(rewards(name, {}, {})) == [1.0, 1.0]
    [warned] = [one.getMessage() for one in caplog.records if "cannot be forked" in one.message]
    assert re.search(reason, warned), warned


def test_a_file_that_a_module_keeps_open_has_an_offset_for_each_rollout(
    imports: Path, written: Any
) -> None:
    file = imports.parent / "lines"
    file.write_text("".join(f"{number:8191}\n" for number in range(9)))
    library = imports.parent / "site-packages" / "library.py"
    counting = library.read_text()
    library.write_text(f"{counting}\nlines = open({str(file)!r}, 'rb', 0)\nlines.readline()")
    name = written("import library\nprint(int(library.lines.readline()))")
    assert [play(name).value for _ in range(4)] == [1.0] * 4
    assert len(imports.read_text().split()) == 2


def test_forks_that_read_one_file_at_once_read_each_its_own_records(
    imports: Path, written: Any
) -> None:
    file = imports.parent / "records"
    file.write_bytes(b"".join(b"%07d\n" % number for number in range(5000)))
    library = imports.parent / "site-packages" / "library.py"
    library.write_text(f"{library.read_text()}\nrecords = open({str(file)!r}, 'rb', 0)")
    name = written("""
import json, random, sys
import library
def read(number):
    library.records.seek(8 * number)
    return int(library.records.read(8)) == number
print(sum(read(number) for number in random.choices(range(5000), k=3000)) / 3000)
""")

    async def twice() -> list[float | None]:
        await rewards(name, {})
        return await rewards(name, *[{}] * 6)

    assert asyncio.run(twice()) == [1.0] * 6
    assert len(imports.read_text().split()) == 2


def test_a_file_of_a_place_is_not_taken_for_an_installed_module(
    imports: Path, written: Any, tmp_path: Path
) -> None:
    (tmp_path / "library.py").write_text("said = [1, 2, 3]")
    name = written(f"{LATE}\nprint(play())")
    assert [play(name).value for _ in range(3)] == [3.0] * 3
    assert not imports.exists()


def test_a_program_that_closes_all_its_descriptors_gets_no_line_of_ours(
    imports: Path, written: Any, tmp_path: Path
) -> None:
    name = written(f"""{LATE}
os.closerange(3, 256)
files = [open({str(tmp_path)!r} + f"/{{number}}", "w") for number in range(16)]
play()
print(1)
""")
    assert play(name).value == 1.0
    assert {(tmp_path / str(number)).read_text() for number in range(16)} == {""}


def settings(folder: Path, **given: Any) -> PlaceSettings:
    made = PlaceOfRollouts(kept="always", **given).of(folder)
    assert made is not None
    return made


def play_in(place: Place, name: str) -> Reward:
    fill(place, place.variables(endpoints()))
    return asyncio.run(load_agent(name, placed=True)(place.example, endpoints(), place))


def test_a_program_plays_in_its_place(imports: Path, written: Any, tmp_path: Path) -> None:
    name = written(
        f"""{LATE}
import random, tempfile
from pathlib import Path
play()
assert sys.argv[1:] == [os.environ["TASK"]], sys.argv
assert Path.cwd().name == "work" and not list(Path.cwd().iterdir())
place = Path.cwd().parent
assert (Path.home(), tempfile.gettempdir()) == (place / "home", f"{{place}}/tmp")
Path("made").touch()
print(place.name.removeprefix("r"))
""",
        "${example.task}",
    )
    given = settings(tmp_path / "places", variables={"TASK": "${example.task}"})
    for number in range(3):
        place = Place(given, f"r{number}", {"task": f"task {number}"})
        assert play_in(place, name).value == number
        assert [path.name for path in place.work.iterdir()] == ["made"]
        assert "ended with exit status 0" in (place.folder / PROGRAM_LOG).read_text()
    assert len(imports.read_text().split()) == 2


def test_a_server_has_the_recipe_s_variables_and_not_the_user_s_home(
    imports: Path, written: Any, tmp_path: Path
) -> None:
    told = f"told = [os.environ.get(n) for n in {('SET', 'TASK', 'HOME', 'OPENAI_API_KEY')}]"
    (imports.parent / "site-packages" / "library.py").write_text(f"import os\nsaid = []\n{told}")
    name = written(f"{LATE}\nplay()\nprint(json.dumps(sys.modules['library'].told))\nprint(1)")
    given = settings(tmp_path / "places", variables={"SET": "1", "TASK": "${example.task}"})
    for rollout in ("r0", "r1"):
        place = Place(given, rollout, {"task": "x"})
        play_in(place, name)
    said = (place.folder / PROGRAM_LOG).read_text()
    assert json.dumps(["1", None, str(tmp_path / "places" / ".server"), None]) in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "names no program; write one"),
        ("no-such-program --now", "there is no program 'no-such-program'"),
        ("sh -c true", "names no program in Python"),
        (f"{sys.executable} -B -m", "names no program in Python"),
    ],
)
def test_a_line_that_runs_no_program_in_python_is_refused(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_agent(f"forks:{line}")
