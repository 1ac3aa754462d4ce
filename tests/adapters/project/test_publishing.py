"""Folders are pushed to a hub as models by the hub's own client."""

from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.adapters.project.hub import check_push, push
from tests.support.servers.hub_server import TOKEN, hub_server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the stand-in has the older transfer
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as a run has set it for this process
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# An adapter\n")
    (made / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return made


def test_a_pushed_folder_is_a_private_model_with_all_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert push(folder, "ada/otters", "Add otters@4") == f"{hub.url}/ada/otters"
    assert hub.private == {"ada/otters": True}
    assert hub.titles == ["Add otters@4"]
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files["ada/otters"] == written


def test_a_refusal_leaves_the_folder_and_names_the_command_that_pushes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(UserError, match=rf"`hf upload ada/otters {folder}`") as refused:
            push(folder, "ada/otters", "Add otters@4")
    assert "hf_of_nobody" not in str(refused.value)
    assert folder.exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be pushed to ada/otters"):
        push(folder, "ada/otters", "Add otters@4")


@pytest.mark.parametrize("name", ["ada/otters", "hub:otters", "hub:ada/", "hub:a/b/c"])
def test_a_name_that_is_no_model_of_the_hub_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="give --push hub:OWNER/NAME"):
        check_push(name)


def test_a_push_is_refused_before_anything_is_written_where_the_hub_may_not_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert check_push("hub:ada/otters") == "ada/otters"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="unset it, or leave --push out"):
        check_push("hub:ada/otters")
