"""The cache of LoRA weights in memory."""

import torch

from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.sampling.scheduler import ALWAYS_KEPT, ResidentWeights


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
