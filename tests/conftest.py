"""Fixtures that several test files share."""

import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from ratchet.durable.process import collect_garbage

if TYPE_CHECKING:
    from ratchet.adapters.door.door import Door
    from tests.support.door.opened_door import Opened
    from tests.support.door.played_batch import Stage

# Read when the packages are imported: nothing leaves this machine, and ids are found in the cache.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")

pytest_plugins = [
    "tests.support.servers.engine_server",
    "tests.support.servers.prefect_server",
    "tests.support.runs.recorded",
]

# A busy machine fails no test: neither an example nor its generation has a time limit. CI draws the
# same examples each time, as Hypothesis's own profile for it does. `make stories` draws more.
settings.register_profile(
    "untimed",
    max_examples=int(os.environ.get("EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the two million objects of the libraries that are imported.

    Their import would take half as long again, and each of its full collections a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        collect_garbage()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def kept_engines() -> Iterator[None]:
    """Have the tests' own runs share engines, and start them warm: a cold start takes seconds."""
    from ratchet.adapters.tinker.engines import end_begun, engines_kept
    from tests.support.processes import WarmEngine

    with engines_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmEngine)
        yield
        end_begun()


@pytest.fixture(scope="module", autouse=True)
def same_runs_root() -> Iterator[None]:
    """Check that a module's tests leave the folder of all runs as it was."""
    before = os.environ.get("RATCHET_RUNS")
    yield
    assert os.environ.get("RATCHET_RUNS") == before


@pytest.fixture(scope="session")
def no_tinker() -> Iterator[None]:
    """Name no Tinker service, whatever the developer's environment names."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of this module's runs."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        yield root


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's runs."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Stage]":
    """Open an engine on which the module's tests play batches."""
    from tests.support.door.played_batch import open_stage

    with open_stage(tmp_path_factory.mktemp("state")) as stage:
        yield stage


@pytest.fixture(scope="module")
def open_door() -> "Iterator[Door]":
    """Open a door for the module's tests."""
    from tests.support.door.opened_door import open_door

    with open_door() as door:
        yield door


@pytest.fixture
def opened(open_door: "Door") -> "Iterator[Opened]":
    """Open a batch with a new rollout, of which nothing is recorded yet."""
    from tests.support.door.opened_door import opened_batch

    with opened_batch(open_door) as opened:
        yield opened


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
