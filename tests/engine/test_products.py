"""The products of large models, tried on a small one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.attention import LoraLinear
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.model.products import (
    MOST_APART,
    ROUNDING,
    TILE,
    OneDnnProducts,
    TiledProducts,
    Workers,
    choose_products,
    has_bfloat16,
    is_sound,
    tile_products,
)
from ratchet.engine.model.segments import Segment, SegmentAttention
from ratchet.engine.sampling import decoder
from ratchet.engine.sampling.requests import SampleRequest
from ratchet.engine.sampling.sampling_pass import SamplingPass, Share
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import AdamParams, Trainer
from ratchet.engine.training.training_pass import GradientSums, LotSums, TrainingPass
from tests.engine.test_sampling import Asked, answer, answers, bits, changed_lora
from tests.support.servers.engine_server import tiny_network

CPU = torch.device("cpu")
VOCABULARY = 160
TYPES = (torch.float32, *([torch.bfloat16] if has_bfloat16() else []))
SHAPES = ((128, 96), (96, 128), (576, 192), (16, 576), (576, 16), (VOCABULARY, 64))

needs_onednn = pytest.mark.skipif(
    isinstance(choose_products([torch.ones(64, 64)]), TiledProducts),
    reason="this machine's oneDNN is absent, or its rows depend on their number",
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def network(attention_bias: bool = False) -> Qwen3ForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"max_position_embeddings": 256, "initializer_range": 0.2, "tie_word_embeddings": True}
    made = tiny_network(**sizes, **heads, **rest, attention_bias=attention_bias)
    for name, layer in made.named_modules():
        if name.endswith("k_proj"):
            layer.register_parameter("bias", None)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_()
    return made


@pytest.fixture(scope="module", params=TYPES, ids=str)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return LanguageModel(network(), "small", products=OneDnnProducts(), dtype=request.param)


@pytest.fixture(scope="module")
def loras(model: LanguageModel) -> list[LoraWeights]:
    return [changed_lora(model, rank, seed=rank) for rank in (4, 12, 16)]


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others_on_one_thread_and_on_two(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    products, weight = OneDnnProducts(), weight_of(shape).to(dtype)
    rows = torch.randn(300, shape[1], generator=torch.Generator().manual_seed(0))
    packed = products.pack(weight)
    with threads(1):
        many = products.multiply(rows, packed)
    for count in (1, 2):
        with threads(count):
            for start, stop in ((0, 2), (2, 7), (6, 70), (50, 300)):
                for form in (weight, packed):
                    found = products.multiply(rows[start:stop], form)
                    assert torch.equal(found, many[start:stop])
    exact = F.linear(rows, weight.float())
    assert many.dtype == torch.float32
    assert (many - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


class Uneven(OneDnnProducts):
    """Products of which some numbers of rows are rounded in another way."""

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return super().multiply(rows, packed) * (1 + 1e-6 * (len(rows) == 17))


class Coarse(OneDnnProducts):
    """Products in bfloat16, as oneDNN computes them where its settings allow it."""

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return super().multiply(rows.bfloat16().float(), packed)


@needs_onednn
def test_products_that_depend_on_other_rows_or_are_not_in_float32_are_not_used() -> None:
    weight = weight_of((96, 64))
    assert not is_sound(Coarse(), weight)
    for dtype in TYPES:
        assert is_sound(OneDnnProducts(), weight.to(dtype))
        assert not is_sound(Uneven(), weight.to(dtype))


def test_few_rows_are_computed_alone_where_they_have_the_bits_of_a_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = weight_of((96, 64))
    products, rows = tile_products([weight], [64]), torch.randn(2 * TILE, 64)
    packed = products.pack(weight)
    for count in map(products.round_up, range(1, 2 * TILE)):
        few = products.multiply(rows[:count], packed)
        assert torch.equal(few, products.multiply(rows, packed)[:count])
    assert tile_products([weight], [64, 40]).round_up(1) == TILE
    uneven = lambda _, rows, packed: rows @ packed * (1 + 1e-6 * (len(rows) < TILE))  # noqa: E731
    monkeypatch.setattr(TiledProducts, "multiply", uneven)
    assert tile_products([weight], [64]).round_up(1) == TILE


def test_small_models_and_other_devices_have_their_products_by_tiles() -> None:
    assert LanguageModel(network(), "small").merges
    assert isinstance(choose_products([torch.ones(64, 64, device="meta")]), TiledProducts)
    assert isinstance(choose_products([torch.ones(64, 64).double()]), TiledProducts)


@needs_onednn
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_gradients_are_those_of_torchs_own_products(biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, trained: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(trained)

    inputs, a, b = drawn(1, 70, 96), drawn(12, 96), drawn(160, 12)
    weight, slope = drawn(160, 96, trained=False), drawn(1, 70, 160, trained=False)
    bias = drawn(160, trained=False) if biased else None
    found = []
    layer = LoraLinear(torch.nn.Linear(96, 160, bias=biased), "layer", "mlp")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    lora = LoraWeights(LoraConfig(12), {"layer.lora_A": a, "layer.lora_B": b})
    for products in (OneDnnProducts(), TiledProducts()):
        sums = GradientSums(lora)
        of_lot = LotSums(sums, [Segment(40), Segment(30)], 0)
        attention = SegmentAttention([Segment(70)], CPU)
        outputs = TrainingPass(lora, attention, products, of_lot).linear(layer, inputs)
        (gradient, *_) = torch.autograd.grad(outputs, (inputs, a, b), slope, allow_unused=True)
        frozen = TrainingPass(LoraWeights(LoraConfig(12), {}), attention, products, of_lot)
        alone = frozen.linear(layer, inputs)
        (of_alone,) = torch.autograd.grad(alone, inputs, slope)
        found.append([outputs.detach(), alone.detach(), gradient, of_alone, *sums.total().values()])
    outputs = F.linear(inputs, weight, bias) + F.linear(F.linear(inputs, a), b) * (32 / 12)
    alone = F.linear(inputs, weight, bias)
    gradient, *of_pair = torch.autograd.grad(outputs, (inputs, a, b), slope)
    of_alone = torch.autograd.grad(alone, inputs, slope)
    found.append([outputs.detach(), alone.detach(), gradient, *of_alone, *of_pair])
    for ours, tiled, theirs in zip(*found, strict=True):
        for own in (ours, tiled):
            assert float((own - theirs).abs().max() / theirs.abs().max()) < 1e-5


@needs_onednn
def test_32_companions_their_arrival_and_the_threads_change_no_bit_of_an_answer(
    model: LanguageModel, loras: list[LoraWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = np.random.default_rng(0)
    asked: list[Asked] = []
    for number in range(33):
        prompt = chosen.integers(0, VOCABULARY, int(chosen.integers(1, 80))).tolist()
        most, scored = int(chosen.integers(1, 12)), number % 5 == 0
        request = SampleRequest(
            prompt, max_tokens=most, seed=number, stop=[], prompt_logprobs=scored
        )
        asked.append((request, [None, *loras][number % 4]))
    spread = [2 * number for number in range(len(asked))]

    def together(asked: list[Asked], arrivals: list[int] | None = None) -> list[tuple]:
        return [bits(one) for one in answers(model, asked, arrivals, max_rows=33)]

    with threads(1):
        alone = [together([one])[0] for one in asked]
        assert together(asked) == alone
        assert together(asked[::-1], spread)[::-1] == alone
    monkeypatch.setattr(decoder, "SHARED_WEIGHTS", 0)
    # Every step without a prompt is shared.
    monkeypatch.setattr("ratchet.engine.model.products.DISTURBED", 0.0)
    for count in (2, 4):
        monkeypatch.setattr(model, "workers", Workers(count))
        assert together(asked, spread) == alone
        assert together(asked[7:8]) == alone[7:8]


def sampling_pass(model: LanguageModel, lora: LoraWeights | None, rows: int) -> SamplingPass:
    """Return a pass of rows of one LoRA, without attention."""
    shares = [Share(lora, 0, rows)]
    ready = {} if lora is None else {lora: lora.packed(model)}
    return SamplingPass(
        model.products, shares, shares, SegmentAttention([Segment(rows)], CPU), ready
    )


@needs_onednn
def test_layers_that_read_one_input_are_sampled_by_one_product_with_the_bits_of_their_own(
    model: LanguageModel, loras: list[LoraWeights]
) -> None:
    leaves = [[one.name.rpartition(".")[2] for one in group.layers] for group in model.groups[:4]]
    assert leaves == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    products = model.products
    for lora in (None, *loras):
        current = sampling_pass(model, lora, 6)
        for layer in model.linears.values():
            rows = torch.randn(1, 6, layer.weight.shape[1])
            alone = products.multiply(rows, products.pack(layer.weight))
            if lora is not None:
                a, b = lora.pairs[layer.name]
                alone = products.update(alone, rows, (a, b * lora.config.scale))
            assert torch.equal(current.linear(layer, rows), alone)


@needs_onednn
def test_a_lora_of_some_layers_of_a_group_leaves_the_others_as_they_are(
    model: LanguageModel,
) -> None:
    lora = changed_lora(model)
    layers = model.groups[0].layers
    for matrix in "AB":
        del lora.tensors[f"{layers[1].name}.lora_{matrix}"]
    rows = torch.randn(1, 6, 64)
    base, changed = sampling_pass(model, None, 6), sampling_pass(model, lora, 6)
    same = [torch.equal(base.linear(one, rows), changed.linear(one, rows)) for one in layers]
    assert same == [False, True, False]


@needs_onednn
def test_biases_of_some_layers_of_a_group_are_added_to_their_own_outputs() -> None:
    model = LanguageModel(network(attention_bias=True), "small", products=OneDnnProducts())
    rows = torch.randn(1, 6, 64)
    layers = model.groups[0].layers
    assert [layer.bias is None for layer in layers] == [False, True, False]
    for layer in layers:
        expected = F.linear(rows, layer.weight, layer.bias)
        found = sampling_pass(model, None, 6).linear(layer, rows)
        torch.testing.assert_close(found, expected)


def train(model: LanguageModel, lora: LoraWeights) -> tuple[list[np.ndarray], bytes]:
    """Take two steps on some datums; return their log-probabilities and the weights' bytes."""
    chosen = np.random.default_rng(0)
    datums = [
        TrainingDatum(tokens[:-1], {"target_tokens": tokens[1:]})
        for tokens in (chosen.integers(0, VOCABULARY, length) for length in (9, 70, 33, 70, 2))
    ]
    trainer = Trainer(model, lora.frozen())
    trainer.forward_backward(datums, "cross_entropy")
    trainer.optim_step(AdamParams())
    outputs, _ = trainer.forward_backward(datums, "cross_entropy")
    trainer.optim_step(AdamParams())
    weights = (tensor.detach().numpy().tobytes() for tensor in trainer.lora.tensors.values())
    return outputs, b"".join(weights)


@needs_onednn
@pytest.mark.parametrize("count", [1, 2])
def test_equal_training_gives_equal_bits(
    model: LanguageModel, loras: list[LoraWeights], count: int
) -> None:
    with threads(count):
        (outputs, weights), (again, same) = (train(model, loras[1]) for _ in range(2))
    assert weights == same
    assert all(map(np.array_equal, outputs, again))


@needs_onednn
@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_both_kinds_of_products_train_and_sample_alike(
    model: LanguageModel, loras: list[LoraWeights]
) -> None:
    tiled = LanguageModel(network(), "small")
    (outputs, _), (expected, _) = train(model, loras[0]), train(tiled, loras[0])
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    request = SampleRequest(list(range(40)), max_tokens=30, seed=1, temperature=0.0, stop=[])
    ours, theirs = (answer(one, request, changed_lora(one)).sequences[0] for one in (model, tiled))
    assert ours.tokens == theirs.tokens
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@needs_onednn
@pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no products in bfloat16")
@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True)
def test_layers_in_bfloat16_move_log_probabilities_a_little_in_training_as_in_sampling(
    model: LanguageModel, loras: list[LoraWeights]
) -> None:
    exact = LanguageModel(network(), "small")
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 71)
    datum = TrainingDatum(prompt[:-1], {"target_tokens": prompt[1:]})
    (trained,), _ = Trainer(model, loras[0]).forward_backward([datum], "cross_entropy")
    (wanted,), _ = Trainer(exact, loras[0]).forward_backward([datum], "cross_entropy")
    request = SampleRequest(prompt.tolist(), max_tokens=1, seed=1, prompt_logprobs=True)
    read = answer(model, request, loras[0]).prompt_logprobs
    assert read is not None
    sampled = read[1:]
    assert 1e-4 < np.abs(trained - wanted).max() < 0.1
    assert np.abs(sampled - trained).mean() < np.abs(sampled - wanted).mean()


@needs_onednn
def test_bfloat16_is_refused_where_its_products_are_not_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ratchet.engine.model.products.OneDnnProducts", Uneven)
    with pytest.raises(RequestRefused, match=r"bfloat16 give a row other bits .*leave --dtype out"):
        LanguageModel(network(), "small", dtype=torch.bfloat16)


class Clocks:
    """Clocks of the machine and of the process, which a step puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.used = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "process_time", lambda: self.used)

    def step(self, used: float) -> int:
        """Take a second, of which so much was used; return the number of torch's threads."""
        self.wall += 1
        self.used += used
        return torch.get_num_threads()


def test_disturbed_steps_are_followed_by_ever_more_steps_that_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, two = Clocks(monkeypatch), Workers(2)
    assert two.may_share()
    assert two.share(clocks.step, 1.9) == 2
    assert torch.get_num_threads() == 1
    assert two.may_share()
    for apart in (1, 2, 4):
        two.share(clocks.step, 1.2)
        assert [two.may_share() for _ in range(apart + 1)] == [False] * apart + [True]
    for _ in range(10):
        two.share(clocks.step, 1.2)
    assert [two.may_share() for _ in range(MOST_APART + 1)] == [False] * MOST_APART + [True]
    two.share(clocks.step, 1.9)
    two.share(clocks.step, 1.2)
    assert [two.may_share() for _ in range(2)] == [False, True]


def test_a_step_that_fails_leaves_one_thread_which_shares_nothing() -> None:
    with pytest.raises(KeyError, match="a step"):
        Workers(2).share({}.__getitem__, "a step")
    assert torch.get_num_threads() == 1
    assert not Workers(1).may_share()
