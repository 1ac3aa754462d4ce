"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from adapters.calls import Completion
    from adapters.door.door import Door
    from tests.opened_door import Opened

# Read when the packages are imported: nothing leaves this machine, and ids are found in the cache.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "ERROR")

pytest_plugins = ["tests.engine_server"]


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of its own, with an empty database, for every flow and task of the tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def no_tinker() -> Iterator[None]:
    """Whatever the developer has set, no Tinker service is named."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the runs of this module lie."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_RUNS", str(root))
        yield root


@pytest.fixture(scope="module")
def open_door() -> "Iterator[tuple[Door, list[Completion]]]":
    from tests.opened_door import opening

    with opening() as door:
        yield door


@pytest.fixture
def opened(open_door: "tuple[Door, list[Completion]]") -> "Iterator[Opened]":
    """A door with a new rollout admitted, and nothing recorded yet."""
    from tests.opened_door import admitted

    with admitted(open_door) as opened:
        yield opened
