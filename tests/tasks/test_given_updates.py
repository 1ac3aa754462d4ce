"""Datums that no policy sampled: two updates of them are in flight, and the sampler scores some."""

import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
import tinker

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.engines import TinkerServer
from ratchet.adapters.tinker.live_policy import LoraSpec
from ratchet.adapters.tinker.service import Service
from ratchet.flows.checkpoints.policies import delete_unnoted
from ratchet.tasks.checkpoints import Checkpoint, Ledger
from ratchet.tasks.datums import DATUM_SCHEMA, UpdateMethod
from ratchet.tasks.recovery.recorded_steps import RecordedSteps, StepSource, TrainedPolicy
from ratchet.tasks.settings.run import Optimizer
from ratchet.tasks.storage.durability import durable
from ratchet.tasks.storage.logs import read_log
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import write_table
from ratchet.tasks.updates import PolicyUpdater, StepUpdate
from tests.support.servers.engine_server import Address

METHOD = UpdateMethod("cross_entropy", {}, Optimizer(learning_rate=0.05), steps=9)

LISTS = ("tokens", "targets", "logprobs", "advantages", "mask")


@durable
def count_on(path: Path, step: int) -> None:
    """Write datums that count on from the step's number; no policy sampled them."""
    ones, rows = [1] * 7, []
    for first in (3 * step + 1, 3 * step + 2):
        tokens, targets = [*range(first, first + 7)], [*range(first + 1, first + 8)]
        lists = dict(zip(LISTS, (tokens, targets, [0.0] * 7, ones, ones), strict=True))
        rows.append({**lists, "scale": 1 / 14})
    write_table(pa.Table.from_pylist(rows, schema=DATUM_SCHEMA), path)


class Trained:
    """A run that trains datums which no policy sampled, each time as by a new process."""

    def __init__(self, service: Service, address: Address, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.service, self.address, self.run = service, address, RunFolder(folder).take_over()
        lora = LoraSpec(
            address.base_model, 4, 7, train_attn=True, train_mlp=True, train_unembed=True
        )
        self._policy = TrainedPolicy(POLICY, (POLICY,), lora)
        self.ledger = Ledger(self.run.checkpoints(POLICY), self.run.ownership)

    def updater(self, tolerance: float | None = 1e-4) -> PolicyUpdater:
        recorded = RecordedSteps(self.run, self._policy, ByStep(((0, METHOD),)), StepSource())
        made = PolicyUpdater(self.service, self.ledger, recorded, lambda _: True, None, tolerance)
        made.make_initial()
        return made

    def datums(self, step: int) -> Path:
        return count_on.make(self.run.datums(POLICY, step), step)


@pytest.fixture
def trained(service: tinker.ServiceClient, address: Address, tmp_path: Path) -> Trained:
    server = TinkerServer(address.url, address.key, Future(), None)
    return Trained(Service(service, server, patience=60), address, tmp_path)


def test_an_update_is_submitted_before_the_result_of_the_one_before_it_is_awaited(
    trained: Trained, tmp_path: Path
) -> None:
    updater = trained.updater()
    made = []
    for step in range(3):
        ahead = StepUpdate(step + 1, lambda step=step: [trained.datums(step + 1)])
        made.append(updater.update(step, [trained.datums(step)], next_update=ahead))
    rows = [(row["phase"], row["step"]) for row in read_log(trained.ledger.path)]
    assert rows == [
        *[("saved", 0), ("intent", 1), ("intent", 2), ("saved", 1)],
        *[("intent", 3), ("saved", 2), ("intent", 4), ("saved", 3)],
    ]
    assert trained.ledger.in_doubt() == 4
    alone = Trained(trained.service, trained.address, tmp_path / "alone")
    updater = alone.updater()
    for step, ahead in enumerate(made):
        single = updater.update(step, [alone.datums(step)])
        for one, other in zip(single.logprobs[0], ahead.logprobs[0], strict=True):
            assert one.tolist() == other.tolist()


def test_a_client_that_is_given_up_takes_the_update_along_that_it_was_given_ahead(
    trained: Trained,
) -> None:
    updater = trained.updater()
    ahead = StepUpdate(1, lambda: [trained.datums(1)])
    updater.update(0, [trained.datums(0)], next_update=ahead)
    known = trained.ledger.at(1)
    trained.ledger.add(replace(known, sampler="tinker://gone:train:0/sampler_weights/none"))
    tokens = [[5, 6, 7, 8]]
    scored = updater.sampler(1).score(tokens, [3])[0]
    assert scored.tolist() == updater.service.sampler(known.sampler).score(tokens, [3])[0].tolist()
    again = updater.update(1, [trained.datums(1)])
    assert set(again.checks) == {"probe/optimizer_step", "probe/max_difference"}
    phases = [row["phase"] for row in read_log(trained.ledger.path) if row["step"] == 2]
    assert phases == ["intent", "intent", "saved"]


def test_the_first_step_is_measured_against_the_sampler(trained: Trained) -> None:
    updater = trained.updater()
    first, second = (updater.update(step, [trained.datums(step)]) for step in (0, 1))
    assert set(first.checks) == {"sampler/apart", "sampler/kl"}
    assert max(map(abs, first.checks.values())) <= 1e-4
    assert second.checks == {}


def test_rebuilt_weights_are_probed_by_the_sampler_of_their_checkpoint(trained: Trained) -> None:
    trained.updater().update(0, [trained.datums(0)])
    again = trained.updater().update(1, [trained.datums(1)])
    assert again.checks["probe/max_difference"] <= 1e-4
    trained.ledger.add(replace(trained.ledger.at(2), state=trained.ledger.at(0).state))
    with pytest.raises(UserError, match=r"recorded at step 2.*Nothing was applied"):
        trained.updater().update(2, [trained.datums(2)])
    assert trained.ledger.last_step() == 2


def test_a_policy_that_its_sampler_does_not_sample_is_not_trained(trained: Trained) -> None:
    trained.updater().update(0, [trained.datums(0)])
    other = trained.ledger.at(1).sampler
    trained.ledger.path.unlink()
    updater = trained.updater()
    trained.ledger.add(Checkpoint(0, other, trained.ledger.at(0).state))
    with pytest.raises(UserError, match=r"up to .* off those of its sampler; checkpoints"):
        updater.update(0, [trained.datums(0)])
    assert trained.ledger.last_step() == 0
    update = trained.updater(None).update(0, [trained.datums(0)])
    assert update.checks["sampler/apart"] > 0.01


def test_weights_that_are_gone_score_nothing(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    updater = trained.updater()
    state = trained.ledger.at(0).state
    trained.ledger.add(Checkpoint(0, "tinker://gone:train:0/sampler_weights/none", state))
    update = updater.update(0, [trained.datums(0)])
    assert update.checks == {}
    assert "The first datums of step 0 are not scored" in caplog.text


def test_a_save_without_a_line_is_deleted_by_the_next_owner_and_not_by_one_of_a_copy(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, run = trained.service, trained.run
    before = service.saved()
    updater = trained.updater()
    monkeypatch.setattr(service, "saved", lambda: pytest.fail("a plain start asks for a list"))
    delete_unnoted(run.take_over(), service)
    monkeypatch.undo()
    again = Trained(service, trained.address, run.path)
    monkeypatch.setattr(Ledger, "add", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        again.updater().update(0, [trained.datums(0)])
    monkeypatch.undo()
    noted = before | {*updater.ledger.at(0).paths}
    saved = service.saved()
    assert len(saved - noted) == 2
    copy = Path(shutil.copytree(run.path, f"{run.path}-copy"))
    delete_unnoted(RunFolder(copy).take_over(), service)
    nowhere = replace(service.server, url=f"{service.server.url}/nowhere")
    delete_unnoted(run.take_over(), Service(service.client, nowhere, patience=60))
    assert "(404). If a killed process saved 00001-" in caplog.text
    assert service.saved() == saved
    delete_unnoted(run.take_over(), service)
    assert service.saved() == noted
