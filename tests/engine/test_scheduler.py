import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.sampling.scheduler import ALWAYS_KEPT, ResidentWeights, Scheduler
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import AdamParams, Trainer
from tests.support.servers.engine_server import tiny_network


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(tiny_network(max_position_embeddings=4096), "tiny")


@pytest.fixture
def scheduler(model: LanguageModel) -> Iterator[Scheduler]:
    scheduler = Scheduler(model, max_rows=8)
    yield scheduler
    scheduler.close()


def request(max_tokens: int, seed: int = 1) -> SampleRequest:
    return SampleRequest([1, 2, 3], max_tokens=max_tokens, seed=seed, stop=[])


def test_training_runs_in_order_of_arrival_on_one_thread(scheduler: Scheduler) -> None:
    ran: list[tuple[int, int]] = []

    def work(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for future in [scheduler.run(lambda number=number: work(number)) for number in range(20)]:
        future.result(timeout=60)
    assert [number for number, _ in ran] == list(range(20))
    assert len({thread for _, thread in ran}) == 1


def test_more_requests_than_slots_are_all_answered(scheduler: Scheduler) -> None:
    futures = [scheduler.sample(request(10, seed), None) for seed in range(30)]
    futures.append(scheduler.sample(SampleRequest([4], num_samples=20, max_tokens=3), None))
    results = [future.result(timeout=30) for future in futures]
    assert [len(result.sequences) for result in results] == [1] * 30 + [20]
    again = scheduler.sample(request(10, 7), None).result(timeout=60)
    assert again == results[7]


def test_sampling_continues_between_microbatches_of_training(
    model: LanguageModel, scheduler: Scheduler
) -> None:
    trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(rank=2)))
    texts = [[first] + [1] * 1499 for first in range(8)]
    data = [TrainingDatum(text, {"target_tokens": np.array(text)}) for text in texts]
    sampled: list[Future] = []
    finished: list[str] = []

    def train() -> None:
        sampled.append(scheduler.sample(request(20), None))
        sampled[0].add_done_callback(lambda _: finished.append("sampling"))
        trainer.forward_backward(data, "cross_entropy")
        finished.append("training")

    scheduler.run(train).result(timeout=120)
    sampled[0].result(timeout=60)
    assert finished == ["sampling", "training"]


def test_training_does_not_wait_for_long_completions(scheduler: Scheduler) -> None:
    gate = threading.Event()
    scheduler.run(gate.wait)
    sampling = scheduler.sample(request(3000), None)
    done = [scheduler.run(sampling.done) for _ in range(5)]
    gate.set()
    assert [look.result(timeout=60) for look in done] == [False] * 5


def test_interleaving_changes_neither_sampling_nor_training(
    model: LanguageModel, scheduler: Scheduler
) -> None:
    data = [TrainingDatum([1, 2, 3], {"target_tokens": np.array([2, 3, 4])})]

    def trained(crowded: bool) -> dict[str, torch.Tensor]:
        trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(rank=2, seed=1)))
        samples = [scheduler.sample(request(40, seed), None) for seed in range(4 * crowded)]
        for _ in range(5):
            scheduler.run(lambda: trainer.forward_backward(data, "cross_entropy")).result(60)
            scheduler.run(lambda: trainer.optim_step(AdamParams(learning_rate=0.1))).result(60)
        for seed, sample in enumerate(samples):
            alone = scheduler.sample(request(40, seed), None).result(timeout=60)
            assert sample.result(timeout=60) == alone
        return trainer.lora.tensors

    alone, crowded = trained(False), trained(True)
    assert all(torch.equal(alone[name], crowded[name]) for name in alone)


def test_error_fails_only_its_own_future(scheduler: Scheduler) -> None:
    good = scheduler.sample(request(50), None)
    too_long = scheduler.sample(SampleRequest([1] * 5000), None)
    broken = scheduler.run(lambda: 1 // 0)
    with pytest.raises(RequestRefused, match="5000 tokens"):
        too_long.result(timeout=60)
    with pytest.raises(ZeroDivisionError):
        broken.result(timeout=60)
    assert len(good.result(timeout=60).sequences[0].tokens) == 50
    assert scheduler.run(lambda: "alive").result(timeout=60) == "alive"


def test_waiting_request_can_be_cancelled(scheduler: Scheduler) -> None:
    gate = threading.Event()
    scheduler.run(gate.wait)
    waiting, training = scheduler.sample(request(5), None), scheduler.run(lambda: None)
    assert waiting.cancel()
    assert training.cancel()
    gate.set()
    assert scheduler.sample(request(5), None).result(timeout=60)


def test_close_ends_the_thread_and_fails_remaining_requests(model: LanguageModel) -> None:
    scheduler = Scheduler(model)
    endless = scheduler.sample(request(4000), None)
    time.sleep(0.05)
    scheduler.close()
    with pytest.raises(RuntimeError, match="closed"):
        endless.result(timeout=1)
    with pytest.raises(RuntimeError, match="closed"):
        scheduler.run(lambda: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def weights(size: int = 256) -> LoraWeights:
    """Return weights of `size` float32 numbers of four bytes each."""
    return LoraWeights(LoraConfig(rank=1), {"layer.lora_A": torch.zeros(1, size)})


def test_least_recently_used_weights_are_evicted_first() -> None:
    resident = ResidentWeights(budget_bytes=6 * 1024)
    for name in "abcdef":
        resident.put(name, weights())
    assert resident.get("a")
    resident.put("g", weights())
    assert resident.get("b") is None
    assert all(resident.get(name) for name in "acdefg")


def test_a_few_weights_are_kept_whatever_their_size() -> None:
    resident = ResidentWeights(budget_bytes=1)
    names = [str(number) for number in range(ALWAYS_KEPT + 2)]
    for name in names:
        resident.put(name, weights())
    assert [name for name in names if resident.get(name)] == names[2:]


def test_replaced_and_removed_weights_free_their_budget() -> None:
    resident = ResidentWeights(budget_bytes=6 * 1024)
    for _ in range(50):
        resident.put("same", weights())
    for name in "abcde":
        resident.put(name, weights())
    assert resident.get("same")
    resident.remove("same")
    resident.put("f", weights())
    assert all(resident.get(name) for name in "abcdef")
