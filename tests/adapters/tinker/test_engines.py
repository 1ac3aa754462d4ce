"""The engine as a child process that can start before its folder is known."""

import os
import signal
from pathlib import Path

import pytest

from ratchet.adapters.errors import ServiceError
from ratchet.adapters.tinker import engines
from ratchet.adapters.tinker.engines import begin_engine, engines_kept, running_engine, stay_offline
from ratchet.engine.disk import lock_state

pytestmark = pytest.mark.usefixtures("no_tinker")

MODEL = "local/tiny-chat"


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_engine_started_early_serves_from_a_folder_named_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_kept", [])
    monkeypatch.setattr(engines, "_begun", {})
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    begin_engine()
    [begun] = engines._begun.values()
    stay_offline(MODEL)
    with running_engine(MODEL, tmp_path / "state") as server:
        assert server.process == begun.child.process.pid
        assert str(server.url).startswith("http://127.0.0.1:")
        assert str(server.key).startswith("tml-")
        assert str(server.key) not in repr(server)
        assert not server.died.done()
    assert not is_alive(begun.child.process.pid)
    assert (tmp_path / "state" / "engine.log").exists()


def test_a_local_model_is_not_looked_for_in_the_hub_though_a_server_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    stay_offline("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "HF_HUB_OFFLINE" not in os.environ
    stay_offline(MODEL)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_no_engine_begins_beside_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_begun", {})
    for name in engines.SERVICE:
        with monkeypatch.context() as patch:
            patch.setenv(name, "tml-x")
            begin_engine()
    assert not engines._begun


def test_an_engine_that_began_with_other_variables_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_kept", [])
    monkeypatch.setattr(engines, "_begun", {})
    begin_engine()
    [begun] = engines._begun.values()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with running_engine(MODEL, tmp_path / "state") as server:
        assert server.process != begun.child.process.pid
    engines.end_begun()
    assert not begun.is_alive()


@pytest.mark.parametrize(
    ("variables", "model", "needed"),
    [
        ({}, "Qwen/Qwen3-8B", True),
        ({"TINKER_API_KEY": "tml-x"}, "Qwen/Qwen3-8B", False),
        ({"TINKER_CREDENTIAL_CMD": "pass"}, "Qwen/Qwen3-8B", False),
        ({"TINKER_API_KEY": "tml-x"}, MODEL, True),
        ({"TINKER_BASE_URL": "http://127.0.0.1:1"}, MODEL, False),
    ],
)
def test_an_engine_is_needed_if_no_server_has_the_model(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], model: str, needed: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert engines.needs_engine(model) is needed


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServiceError, match=r"^there is no base model local/none; .*tiny-chat"),
        running_engine("local/none", tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("loading\nout of memory\n\n", "ends with: out of memory"),
        pytest.param("", "is empty", marks=pytest.mark.story),
    ],
)
def test_the_death_of_an_engine_is_one_sentence_with_the_end_of_its_log(
    tmp_path: Path, lines: str, said: str
) -> None:
    with running_engine(MODEL, tmp_path) as server:
        assert server.process is not None
        log = tmp_path / "engine.log"
        log.write_text(lines)
        os.kill(server.process, signal.SIGKILL)
        error = server.died.exception(timeout=60)
    assert str(error) == (
        f"the engine (process {server.process}) was killed (signal 9), and its log {log} {said}; "
        "start the same run again and it continues"
    )


def test_a_kept_engine_serves_another_folder_and_forgets_the_one_before(tmp_path: Path) -> None:
    with engines_kept():
        with running_engine(MODEL, tmp_path / "one") as first:
            pass
        assert first.process is not None
        assert is_alive(first.process)
        with lock_state(tmp_path / "one", patience_seconds=0):
            pass
        with running_engine(MODEL, tmp_path / "two") as second:
            assert second.process == first.process
            assert not second.died.done()
            with running_engine(MODEL, tmp_path / "three") as third:
                assert third.process != second.process
        assert (tmp_path / "two" / "engine.log").exists()
    assert not is_alive(first.process)


def test_an_engine_that_died_is_not_kept(tmp_path: Path) -> None:
    with engines_kept():
        with running_engine(MODEL, tmp_path / "one") as first:
            assert first.process is not None
            os.kill(first.process, signal.SIGKILL)
            assert first.died.exception(timeout=60) is not None
        with running_engine(MODEL, tmp_path / "two") as second:
            assert second.process != first.process


def test_an_engine_is_kept_for_equal_variables_that_it_may_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch sets variables of this process, which no engine reads."""
    place = engines._place()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "compiled")
    assert engines._place() == place
    monkeypatch.setenv("HF_HOME", "hub")
    assert engines._place() != place


def test_a_block_within_another_ends_alone() -> None:
    with engines_kept(), engines_kept():
        before = [*engines._kept]
        with engines_kept():
            pass
        assert [id(kept) for kept in engines._kept] == [id(kept) for kept in before]
