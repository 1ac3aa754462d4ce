"""Training on datums that begin alike, which is computed along the trees of their tokens."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.products import OneDnnProducts, Products, TiledProducts, Workers
from ratchet.engine.model.segments import SegmentAttention
from ratchet.engine.training import prefix_tree, training_pass
from ratchet.engine.training.losses import LOSSES, TrainingDatum
from ratchet.engine.training.prefix_tree import Node, grow_forest
from ratchet.engine.training.trainer import Trainer
from tests.engine.test_products import needs_onednn
from tests.engine.test_sampling import changed_lora
from tests.engine.test_training import network

Text = list[int]
PRODUCTS = [TiledProducts(), pytest.param(OneDnnProducts(), marks=needs_onednn)]


@pytest.fixture(scope="module", params=PRODUCTS, ids=lambda one: type(one).__name__)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    products: Products = request.param
    return LanguageModel(network(), "tiny", products=products)


def drawn(seed: int, length: int) -> Text:
    return np.random.default_rng(seed).integers(1, 48, length).tolist()


def group(seed: int, prompt: int, answers: Sequence[int]) -> list[Text]:
    """Return a prompt with answers of these lengths."""
    begun = drawn(seed, prompt)
    return [begun + drawn(1000 * seed + number, n) for number, n in enumerate(answers)]


def deep_group(seed: int) -> list[Text]:
    """Return turns of conversations that branch at their first, second and third answer."""
    turns = [group(seed, 70, [40, 41])[one] for one in range(2)]
    second = [turn + drawn(seed + 10 + one, 35) for one, turn in enumerate(turns)]
    return [
        first + drawn(seed + 100 * number + one, 5 + 9 * one)
        for number, first in enumerate([*turns, *second])
        for one in range(3)
    ]


def datum(tokens: Text) -> TrainingDatum:
    """Return a datum with the inputs of every loss."""
    chosen = np.random.default_rng(len(tokens) + sum(tokens))
    count = len(tokens)
    numbers = {
        "weights": chosen.uniform(0, 1, count),
        "logprobs": chosen.uniform(-5, -3, count),
        "advantages": chosen.normal(size=count),
        "sequence_ratio_mask": np.ones(count),
    }
    inputs = {name: values.astype(np.float32) for name, values in numbers.items()}
    return TrainingDatum(tokens, {"target_tokens": np.array([*tokens[1:], 0]), **inputs})


def begin(model: LanguageModel, **layers: bool) -> Trainer:
    return Trainer(model, changed_lora(model, **layers))


def computed(
    model: LanguageModel, *requests: list[Text], loss: str = "importance_sampling"
) -> tuple[list[np.ndarray], torch.Tensor]:
    """Return the log-probabilities and the gradient after requests, one after the other."""
    trainer, outputs = begin(model), []
    for texts in requests:
        outputs += trainer.forward_backward([datum(text) for text in texts], loss)[0]
    gradient = [one.flatten() for one in trainer.sums.total().values()]
    return outputs, torch.cat(gradient)


def assert_same_bits(
    found: tuple[list[np.ndarray], torch.Tensor], expected: tuple[list[np.ndarray], torch.Tensor]
) -> None:
    assert [one.tobytes() for one in found[0]] == [one.tobytes() for one in expected[0]]
    assert torch.equal(found[1], expected[1])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_a_group_is_that_of_its_sequences_one_by_one(loss: str) -> None:
    model = LanguageModel(network(), "tiny", products=TiledProducts())
    texts = group(1, 100, [16, 3, 40, 1, 16, 9, 22, 16])
    outputs, gradient = computed(model, texts, loss=loss)
    alone, expected = computed(model, *([text] for text in texts), loss=loss)
    assert [one.tobytes() for one in outputs] == [one.tobytes() for one in alone]
    assert distance(gradient, expected) < 1e-6


def test_a_tree_of_three_levels_has_the_gradient_of_its_sequences(model: LanguageModel) -> None:
    texts = [*deep_group(1), *deep_group(2)]
    forest = grow_forest([np.array(text) for text in texts])
    assert len(forest) == 2
    assert depth(forest) >= 3
    outputs, gradient = computed(model, texts)
    alone, expected = computed(model, *([text] for text in texts))
    assert [one.tobytes() for one in outputs] == [one.tobytes() for one in alone]
    assert distance(gradient, expected) < 1e-6


def depth(nodes: list[Node]) -> int:
    return max((1 + depth(node.children) for node in nodes), default=0)


@pytest.mark.parametrize("most_tokens", [1, 200])
def test_lots_and_threads_change_no_bit(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, most_tokens: int
) -> None:
    texts = [*deep_group(1), drawn(9, 30), *group(4, 64, [7] * 3), drawn(8, 3)]
    expected = computed(model, texts)
    monkeypatch.setattr(training_pass, "MICROBATCH_TOKENS", most_tokens)
    for threads in (1, 5):
        monkeypatch.setattr(model, "workers", Workers(threads))
        assert_same_bits(computed(model, texts), expected)


def test_a_batch_cut_anywhere_between_trees_has_the_same_bits(model: LanguageModel) -> None:
    parts = [group(3, 90, [5, 30, 17]), [drawn(9, 30)], deep_group(2), [drawn(6, 65)]]
    expected = computed(model, [text for part in parts for text in part])
    assert_same_bits(computed(model, *parts), expected)
    for cut in range(1, len(parts)):
        first, second = parts[:cut], parts[cut:]
        requests = [[text for part in half for text in part] for half in (first, second)]
        assert_same_bits(computed(model, *requests), expected)


def test_a_cut_through_a_tree_changes_no_log_probability_and_rounds_the_gradient_anew(
    model: LanguageModel,
) -> None:
    texts = group(1, 100, [16, 3, 40, 1, 16, 9, 22, 16])
    outputs, gradient = computed(model, texts)
    cut, other = computed(model, texts[:3], texts[3:])
    assert [one.tobytes() for one in outputs] == [one.tobytes() for one in cut]
    assert 0 < distance(other, gradient) < 1e-6


def test_equal_requests_give_equal_bits_and_equal_sequences_are_computed_once(
    model: LanguageModel,
) -> None:
    texts = group(1, 100, [70, 70]) * 2
    assert_same_bits(computed(model, texts), computed(model, texts))
    forest = grow_forest([np.array(text) for text in texts])
    assert [child.length for child in forest[0].children] == [70, 70]
    assert distance(computed(model, texts)[1], 2 * computed(model, texts[:2])[1]) < 1e-6


def graphs() -> int:
    """Count the passes whose graphs are in memory."""
    gc.collect()
    return sum(isinstance(one, SegmentAttention) for one in gc.get_objects())


def test_a_request_leaves_no_graph_even_if_it_fails(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    before = graphs()
    begin(model).forward_backward([datum(one) for one in deep_group(3)], "importance_sampling")
    assert graphs() == before
    monkeypatch.setattr(training_pass._Lot, "backward", fail)
    with pytest.raises(MemoryError):
        begin(model).forward_backward([datum(one) for one in deep_group(3)], "importance_sampling")
    assert graphs() == before


def test_where_nothing_is_shared_there_is_one_node_a_datum() -> None:
    texts = [drawn(seed, 50) for seed in range(20)]
    forest = grow_forest([np.array(text) for text in texts])
    assert [node.tokens.tolist() for node in forest] == texts
    assert not any(node.children for node in forest)


def test_what_saves_less_than_a_pass_costs_is_not_shared() -> None:
    short = [np.array(text) for text in group(1, prefix_tree.LEAST_SHARED - 1, [20] * 30)]
    assert len(grow_forest(short)) == 30
    few = [np.array(text) for text in group(1, prefix_tree.LEAST_SAVED - 1, [20] * 2)]
    assert len(grow_forest(few)) == 2


def test_a_long_chain_of_growing_sequences_ends_in_whole_tails() -> None:
    text = np.arange(64 * 100)
    forest = grow_forest([text[: 64 * turn] for turn in range(1, 101)])
    assert depth(forest) <= prefix_tree.LONGEST_PATH + 1


TEXTS = st.lists(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12), min_size=1, max_size=9)


@given(TEXTS)
def test_every_path_spells_its_datum(texts: list[list[int]]) -> None:
    # Each token stands for thirty, so that short texts share enough.
    sequences = [np.repeat(np.array(text) * 7 + np.arange(len(text)), 30) for text in texts]
    spelled: dict[int, Text] = {}
    waiting = grow_forest(sequences)
    while waiting:
        node = waiting.pop()
        waiting += node.children
        for number in node.ends:
            spelled[number] = np.concatenate([one.tokens for one in node.path]).tolist()
    assert [spelled[number] for number in range(len(texts))] == [one.tolist() for one in sequences]


@pytest.mark.parametrize("layers", ["attn", "mlp", "unembed"])
def test_a_lora_of_some_layers_is_trained_along_the_tree(model: LanguageModel, layers: str) -> None:
    switches = {f"train_{one}": one == layers for one in ("attn", "mlp", "unembed")}
    datums = [datum(text) for text in deep_group(1)]
    together, apart = begin(model, **switches), begin(model, **switches)
    together.forward_backward(datums, "ppo")
    for one in datums:
        apart.forward_backward([one], "ppo")
    (found, expected) = (
        torch.cat([one.flatten() for one in trainer.sums.total().values()])
        for trainer in (together, apart)
    )
    assert expected.any()
    assert distance(found, expected) < 1e-6
