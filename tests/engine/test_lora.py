import pytest
import torch
from transformers import Qwen3ForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.model.segments import Segment, SegmentAttention
from ratchet.engine.training.training_pass import GradientSums, LotSums, TrainingPass
from tests.support.servers.engine_server import tiny_network


def network() -> Qwen3ForCausalLM:
    return tiny_network(tie_word_embeddings=True, initializer_range=0.2)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(network(), "tiny")


def logits(model: LanguageModel, lora: LoraWeights | None) -> torch.Tensor:
    tokens = torch.arange(10)
    segments = [Segment(10)]
    with torch.no_grad():
        if lora is None:
            return network()(tokens[None]).logits[0]
        attention = SegmentAttention(segments, model.device)
        sums = LotSums(GradientSums(lora), segments, 0)
        current = TrainingPass(lora, attention, model.products, sums)
        return model.logits(tokens, tokens, current)


def test_new_lora_computes_the_base_model(model: LanguageModel) -> None:
    """The kernels of training may round otherwise than those of the base model's own pass."""
    first, other = (
        logits(model, LoraWeights.initial(model, LoraConfig(rank=4, seed=seed))) for seed in (1, 2)
    )
    assert torch.equal(first, other)
    assert torch.allclose(first, logits(model, None), rtol=0, atol=1e-5)


def test_seed_determines_the_initial_weights(model: LanguageModel) -> None:
    first, again, other = (
        LoraWeights.initial(model, LoraConfig(rank=4, seed=seed)).tensors for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.lora_A"], other["model.layers.0.mlp.up_proj.lora_A"]
    )
    unseeded = [
        LoraWeights.initial(model, LoraConfig(rank=4)).tensors["lm_head.lora_A"] for _ in "ab"
    ]
    assert not torch.equal(*unseeded)


def test_lora_a_is_initialised_uniformly_and_lora_b_with_zeros(model: LanguageModel) -> None:
    tensors = LoraWeights.initial(model, LoraConfig(rank=48, seed=1)).tensors
    a = tensors["model.layers.0.mlp.down_proj.lora_A"]
    assert a.shape == (48, 48)
    bound = 48**-0.5
    assert 0.95 * bound < a.abs().max() <= bound
    assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not tensors["model.layers.0.mlp.down_proj.lora_B"].any()


@pytest.mark.parametrize(
    ("switches", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_train_switches_select_the_layers(
    model: LanguageModel, switches: dict[str, bool], layers: set[str]
) -> None:
    lora = LoraWeights.initial(model, LoraConfig(rank=2, seed=1, **switches))
    assert {name.split(".")[-2] for name in lora.tensors} == layers


def test_update_is_scaled_by_32_over_rank(model: LanguageModel) -> None:
    lora = LoraWeights.initial(model, LoraConfig(rank=8, seed=1, train_attn=False, train_mlp=False))
    lora.tensors["lm_head.lora_B"].normal_(generator=torch.Generator().manual_seed(1))
    a, b = lora.pairs["lm_head"]
    head = model.linears["lm_head"]
    merged = head.weight + 4.0 * (b @ a)
    hidden = torch.linalg.lstsq(head.weight, logits(model, None).T).solution.T
    torch.testing.assert_close(logits(model, lora), hidden @ merged.T, atol=2e-3, rtol=1e-3)


def test_training_the_head_leaves_the_tied_embedding_unchanged(model: LanguageModel) -> None:
    embedding = model.network.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    assert model.linears["lm_head"].weight is embedding
    before = embedding.clone()
    lora = LoraWeights.initial(model, LoraConfig(rank=2, seed=1, train_attn=False, train_mlp=False))
    lora.tensors["lm_head.lora_B"].fill_(0.5)
    assert not torch.equal(logits(model, lora), logits(model, None))
    assert torch.equal(embedding, before)


def test_weights_of_another_shape_are_refused_with_the_tensors_name(model: LanguageModel) -> None:
    tensors = dict(LoraWeights.initial(model, LoraConfig(rank=4, seed=1)).tensors)
    with pytest.raises(
        RequestRefused, match=r"q_proj.lora_A has the shape \(4, 32\), expected \(8, 32"
    ):
        LoraWeights.from_tensors(model, LoraConfig(rank=8), tensors)
    with pytest.raises(RequestRefused, match="unexpected tensor lm_head"):
        LoraWeights.from_tensors(model, LoraConfig(rank=4, train_unembed=False), tensors)
    del tensors["lm_head.lora_B"]
    with pytest.raises(RequestRefused, match=r"lm_head\.lora_B is missing"):
        LoraWeights.from_tensors(model, LoraConfig(rank=4), tensors)


def test_lora_that_trains_nothing_is_refused() -> None:
    with pytest.raises(RequestRefused, match="rank 0"):
        LoraConfig(rank=0)
    with pytest.raises(RequestRefused, match="trains nothing"):
        LoraConfig(rank=1, train_attn=False, train_mlp=False, train_unembed=False)
