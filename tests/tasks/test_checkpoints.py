"""The ledger: what is written is read back, and a torn line never counted."""

from pathlib import Path

import pytest

from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.names import best_step, read_step
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.run_folder import RunError, RunFolder


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "checkpoints.jsonl")
    ledger.add(Checkpoint(0, "tinker://r/s/0", "tinker://r/w/0"))
    ledger.add(Checkpoint(1, "tinker://r/s/1"))
    ledger.add(Checkpoint(2, "tinker://r/s/2", "tinker://r/w/2"))
    ledger.add(Checkpoint(3, "tinker://r/s/3"))
    return ledger


@pytest.mark.parametrize(("step", "saved"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_training_goes_on_from_the_last_saved_state(ledger: Ledger, step: int, saved: int) -> None:
    assert ledger.states(step)[0].step == saved


def test_a_step_that_was_made_again_counts_as_it_was_made_last(ledger: Ledger) -> None:
    ledger.add(Checkpoint(3, "tinker://other/s/3"))
    assert ledger.at(3).sampler == "tinker://other/s/3"


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing(ledger: Ledger) -> None:
    with pytest.raises(UserError, match="no checkpoint 4; it has 0 to 3"):
        ledger.at(4)


def test_a_deleted_checkpoint_is_none_until_it_is_made_again(ledger: Ledger) -> None:
    ledger.delete(2)
    with pytest.raises(UserError, match=r"checkpoint 2 no more, .* it keeps 0, 1, 3"):
        ledger.at(2)
    assert ledger.find(2) is None
    assert ledger.states(3)[0].step == 0
    assert ledger.condemned() == {2: [Checkpoint(2, "tinker://r/s/2", "tinker://r/w/2")]}
    ledger.forget(2)
    assert ledger.condemned() == {}
    assert ledger.is_deleted(2)
    again = Checkpoint(2, "tinker://again/s/2")
    ledger.add(again)
    assert Ledger(ledger.path).at(2) == again
    assert not ledger.is_deleted(2)


def test_an_update_that_was_begun_and_not_saved_is_in_doubt(ledger: Ledger) -> None:
    assert ledger.in_doubt() is None
    ledger.begin(4)
    assert ledger.in_doubt() == 4
    assert ledger.in_doubt() == 4
    assert ledger.last_step() == 3

    ledger.begin(4)  # by another process, which rebuilt
    ledger.add(Checkpoint(4, "tinker://r/s/4"))
    assert ledger.in_doubt() is None
    assert ledger.last_step() == 4


def test_states_are_tried_from_the_newest_and_the_last_made_first(ledger: Ledger) -> None:
    ledger.add(Checkpoint(2, "tinker://again/s/2", "tinker://again/w/2"))
    ledger.add(Checkpoint(2, "tinker://again/s/2", "tinker://again/w/2"))
    tried = [checkpoint.state for checkpoint in ledger.states(3)]
    assert tried == ["tinker://again/w/2"] * 2 + ["tinker://r/w/2", "tinker://r/w/0"]


def test_the_best_checkpoint_has_the_highest_held_out_reward(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"run has scored no checkpoint .* give a step"):
        best_step(run)
    scored = {"00000": 0.2, "00002": 0.7, "00004": 0.7, "00006": None, "00004.abcdef": 0.9}
    for name, mean in scored.items():
        write_json(run.evaluation(name), {"sampled": {"finished": {"mean": mean, "examples": 8}}})
    assert best_step(run) == 2


def test_the_best_checkpoint_has_the_lowest_held_out_loss(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for step, loss in {0: 0.5, 3: 0.2, 6: 0.3}.items():
        write_json(run.measure(step), {"measure": "loss", "value": loss})
    assert best_step(run) == 3


def test_the_best_of_a_run_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    with pytest.raises(RunError, match=r"there is no run at .*none"):
        read_step("none", "best")
