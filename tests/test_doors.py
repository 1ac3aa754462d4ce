"""Workers find a run by its folder on this machine, and by the Prefect server from another."""

import socket
import stat
import subprocess
from pathlib import Path

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.doors import TOKEN, Announced, announced, found_doors, run_token

DOOR = Announced("http://10.0.0.5:7000", "a-token-of-the-run")

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    monkeypatch.delenv(TOKEN, raising=False)
    return tmp_path


@pytest.mark.parametrize("place", ["one", "evaluations/one"])
def test_a_run_is_found_by_its_folder_which_only_its_user_can_read(runs: Path, place: str) -> None:
    with announced(runs / place, DOOR):
        assert found_doors() == [DOOR]
        assert stat.S_IMODE((runs / place / "door.json").stat().st_mode) == 0o600
    assert found_doors() == []


def test_a_run_of_another_machine_is_found_on_the_prefect_server_by_whoever_has_the_token(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @flow
    def elsewhere() -> None:
        with announced(runs / "one", DOOR):
            monkeypatch.setenv("RATCHET_RUNS", str(runs / "none"))
            assert found_doors() == []
            monkeypatch.setenv(TOKEN, DOOR.token)
            assert found_doors() == [DOOR]

    elsewhere()
    assert found_doors() == []


def test_a_door_that_listens_everywhere_is_announced_where_the_prefect_server_sees_it(
    runs: Path,
) -> None:
    name = socket.getfqdn()
    seen = {address: address for address in own_addresses()}
    for server, address in {**seen, "127.0.0.1": name, "none.invalid": name}.items():
        with (
            temporary_settings({PREFECT_API_URL: f"http://{server}:4200/api"}),
            announced(runs / "one", Announced("http://0.0.0.0:7000", DOOR.token)),
        ):
            assert found_doors() == [Announced(f"http://{address}:7000", DOOR.token)]


def own_addresses() -> list[str]:
    """This machine's beside loopback, of IPv4; none where `hostname` cannot tell."""
    told = subprocess.run(["hostname", "-I"], capture_output=True, text=True)
    return [address for address in told.stdout.split() if "." in address]


def test_the_token_is_the_one_that_is_set_or_a_new_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_token() != run_token()
    monkeypatch.setenv(TOKEN, "chosen")
    assert run_token() == "chosen"


def test_a_prefect_server_that_is_away_hides_only_its_runs(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "chosen")
    with announced(runs / "one", DOOR), temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1"}):
        assert found_doors() == [DOOR]
    assert "the Prefect server at http://127.0.0.1:1 does not answer" in caplog.text
