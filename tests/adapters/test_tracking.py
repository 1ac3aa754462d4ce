"""Metrics sent to Weights & Biases."""

import sys
import time
from pathlib import Path

import pytest

from adapters.errors import UserError
from adapters.tracking import Tracker, public, run_id


def test_without_a_project_nothing_is_imported_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with Tracker(None, "hello-1", {"steps": 2}, tmp_path / "wandb") as tracker:
        tracker.log({"reward/mean": 0.5}, step=0)
    assert "wandb" not in sys.modules
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_a_missing_wandb_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.tracking.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ratchet-rl\[tracking\]'"):
        Tracker("ratchet", "hello-1", {}, tmp_path)


def test_a_run_s_id_depends_on_its_name_and_project_alone() -> None:
    assert run_id("ratchet", "hello 1/ü") == run_id("ratchet", "hello 1/ü")
    assert run_id("ratchet", "hello-1") != run_id("ratchet", "hello-2")
    assert run_id("ratchet", "hello-1") != run_id("other", "hello-1")
    assert run_id("ratchet", "hello-1").isalnum()


def test_secrets_are_left_out_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345")
    config = {
        "rollouts": {"max_tokens": 64, "api_key": "a", "judge_token": "b"},
        "note": "sk-12345",
        "seed": 0,
    }
    assert public(config) == {"rollouts": {"max_tokens": 64}, "seed": 0}


def test_a_run_without_a_key_is_kept_offline_and_continues_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for step in range(2):
        with Tracker("ratchet", "hello-1", {"steps": 2, "api_key": "hush"}, tmp_path) as tracker:
            tracker.log({"reward/mean": 0.5}, step=step)
    name = f"wandb/offline-run-*/run-{run_id('ratchet', 'hello-1')}.wandb"
    records = list(tmp_path.glob(name))
    assert len(records) == 2
    for record in records:
        assert b"reward/mean" in written(record)
        assert b"hush" not in written(record)


def written(record: Path) -> bytes:
    """Read a record, which W&B's own process completes a little after the run has finished."""
    for _ in range(600):
        if b"reward/mean" in record.read_bytes():
            break
        time.sleep(0.1)
    return record.read_bytes()
