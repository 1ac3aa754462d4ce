"""LoRA weights stay in memory while there is room."""

import torch

from engine.model.lora import LoraConfig, LoraWeights
from engine.sampling.resident_weights import ALWAYS_KEPT, ResidentWeights


def weights(size: int = 256) -> LoraWeights:
    """`size` float32 numbers: four bytes each."""
    return LoraWeights(LoraConfig(rank=1), {"layer.lora_A": torch.zeros(1, size)})


def test_the_least_recently_used_leave_first() -> None:
    resident = ResidentWeights(budget_bytes=6 * 1024)
    for name in "abcdef":
        resident.put(name, weights())
    assert resident.get("a")
    resident.put("g", weights())
    assert resident.get("b") is None
    assert all(resident.get(name) for name in "acdefg")


def test_a_few_stay_however_large_they_are() -> None:
    resident = ResidentWeights(budget_bytes=1)
    names = [str(number) for number in range(ALWAYS_KEPT + 2)]
    for name in names:
        resident.put(name, weights())
    assert [name for name in names if resident.get(name)] == names[2:]


def test_what_is_replaced_or_removed_no_longer_counts() -> None:
    resident = ResidentWeights(budget_bytes=6 * 1024)
    for _ in range(50):
        resident.put("same", weights())
    for name in "abcde":
        resident.put(name, weights())
    assert resident.get("same")
    resident.remove("same")
    resident.put("f", weights())
    assert all(resident.get(name) for name in "abcdef")
