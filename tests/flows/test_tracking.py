"""A training whose recipe names a project of W&B: what W&B has at its end, or what it lacks."""

from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.flows.cli.training import _closing_lines
from ratchet.flows.train import train
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.settings.run import Tracking
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.tracking.trackers import offline_folders
from tests.support.runs.small_recipe import small_recipe
from tests.support.servers.engine_server import Address
from tests.support.wandb_files import artifacts, config, history

pytest.importorskip("wandb")

RECIPE = small_recipe(
    steps=1,
    rollouts={"groups": 2, "group_size": 2, "max_tokens": 8},
    evaluation={"examples": 1, "greedy": False},
    checkpoints={"every": 1},
    tracking={"project": "demo", "rollouts": 3},
)


def test_a_training_without_a_key_is_kept_offline_whole(
    root: Path, prefect_server: None, tiny_chat: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    summary = train(RECIPE, run="tracked")
    run = RunFolder(root / "tracked")
    [folder] = offline_folders(run.tracking)
    first, last = history(folder)
    assert (first["_step"], first["test/checkpoint"], first["rollouts.nrows"]) == (0, 0, 3)
    assert (last["_step"], last["test/checkpoint"]) == (1, 1)
    assert "reward/mean" in first
    assert config(folder)["rollouts.group_size"] == 2
    [saved] = artifacts(folder)
    assert (saved.name, sorted(saved.aliases)) == ("tracked", ["latest", "step-1"])
    last_line = _closing_lines(summary, run, "1 s").splitlines()[-1]
    assert last_line == f"W&B     wandb sync {folder}"
    assert [*find_damage(run)] == []


def test_the_error_for_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.tasks.settings.run.find_spec", lambda name: None)
    Tracking().check_installed()
    with pytest.raises(UserError, match=r"wandb.*pip install 'ratchet-rl\[tracking\]'"):
        Tracking(project="p").check_installed()
