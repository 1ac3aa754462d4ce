import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import AdamParams, Trainer
from ratchet.engine.training.training_pass import compute_target_logprobs
from tests.support.servers.engine_server import tiny_network


def network() -> Qwen3ForCausalLM:
    return tiny_network(max_position_embeddings=512, initializer_range=0.2)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(network(), "tiny")


def trainer(model: LanguageModel, seed: int = 1) -> Trainer:
    return Trainer(model, LoraWeights.initial(model, LoraConfig(rank=4, seed=seed)))


def datum(tokens: list[int], targets: list[int] | None = None, **inputs: list) -> TrainingDatum:
    targets = targets or [*tokens[1:], 0]
    arrays = {name: np.array(values, dtype=np.float32) for name, values in inputs.items()}
    return TrainingDatum(tokens, {"target_tokens": np.array(targets), **arrays})


def gradients(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in of.sums.total().items()}


SHORT, LONG = [1, 2, 3, 4], [5, 6, 7, 8, 9] * 20


def test_logprobs_equal_those_of_transformers(model: LanguageModel) -> None:
    plain = network()
    outputs, metrics = trainer(model).forward_backward(
        [datum(SHORT), datum(LONG), datum([7])], "cross_entropy", backward=False
    )
    total = 0.0
    for tokens, output in zip((SHORT, LONG, [7]), outputs, strict=True):
        with torch.no_grad():
            known = plain(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = known.gather(1, torch.tensor([*tokens[1:], 0])[:, None])[:, 0]
        np.testing.assert_allclose(output, expected, atol=1e-5)
        assert output.dtype == np.float32
        total -= float(expected.sum())
    assert metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_several_targets_per_position_give_logprobs_of_their_shape(model: LanguageModel) -> None:
    targets = [[2, 9], [3, 8], [4, 7], [5, 6]]
    soft = TrainingDatum(
        SHORT,
        {"target_tokens": np.array(targets), "weights": np.full((4, 2), 0.5, dtype=np.float32)},
    )
    outputs, metrics = trainer(model).forward_backward([soft], "cross_entropy")
    first, second = (
        trainer(model).forward_backward(
            [datum(SHORT, [row[k] for row in targets])], "cross_entropy"
        )[0][0]
        for k in range(2)
    )
    np.testing.assert_array_equal(outputs[0], np.stack([first, second], 1))
    assert metrics["loss:sum"] == pytest.approx(-0.5 * float(first.sum() + second.sum()), rel=1e-5)


def test_gradients_accumulate_over_calls_until_the_step(model: LanguageModel) -> None:
    together, apart = trainer(model), trainer(model)
    together.forward_backward([datum(SHORT), datum(LONG)], "cross_entropy")
    apart.forward_backward([datum(SHORT)], "cross_entropy")
    apart.forward_backward([datum(LONG)], "cross_entropy")
    for name, gradient in gradients(together).items():
        torch.testing.assert_close(gradient, gradients(apart)[name], atol=1e-4, rtol=1e-4)
    together.optim_step(AdamParams())
    assert not any(gradient.any() for gradient in gradients(together).values())


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=0.01),
        AdamParams(learning_rate=0.01, beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.3),
        AdamParams(learning_rate=0.01, grad_clip_norm=0.5),
    ],
    ids=["defaults", "all_params", "clipped"],
)
def test_step_equals_torchs_adamw(model: LanguageModel, params: AdamParams) -> None:
    ours = trainer(model)
    copies = {name: tensor.detach().clone() for name, tensor in ours.lora.tensors.items()}
    reference = torch.optim.AdamW(
        list(copies.values()),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        foreach=False,
    )
    for _ in range(3):
        ours.forward_backward([datum(SHORT), datum(LONG)], "cross_entropy")
        for name, gradient in gradients(ours).items():
            copies[name].grad = gradient
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(copies.values(), params.grad_clip_norm)
        reference.step()
        ours.optim_step(params)
    for name, tensor in ours.lora.tensors.items():
        torch.testing.assert_close(tensor.detach(), copies[name], atol=1e-6, rtol=1e-5)


def test_step_reports_the_norm_before_clipping(model: LanguageModel) -> None:
    one = trainer(model)
    one.forward_backward([datum(LONG)], "cross_entropy")
    expected = torch.cat([gradient.flatten() for gradient in gradients(one).values()]).norm()
    metrics = one.optim_step(AdamParams(grad_clip_norm=1e-3))
    assert metrics["unclipped_grad_l2:mean"] == pytest.approx(float(expected), rel=1e-4)


def test_step_without_gradients_only_decays_weights(model: LanguageModel) -> None:
    one = trainer(model)
    before = {name: tensor.detach().clone() for name, tensor in one.lora.tensors.items()}
    metrics = one.optim_step(AdamParams(learning_rate=0.1, weight_decay=0.5))
    assert metrics["unclipped_grad_l2:mean"] == 0.0
    for name, tensor in one.lora.tensors.items():
        torch.testing.assert_close(tensor.detach(), before[name] * 0.95)


def test_step_is_refused_if_a_gradient_is_not_finite(model: LanguageModel) -> None:
    one = trainer(model)
    before = {name: tensor.detach().clone() for name, tensor in one.lora.tensors.items()}
    far = datum(SHORT, logprobs=[-200.0] * 4, advantages=[1.0] * 4)
    one.forward_backward([far], "importance_sampling")
    with pytest.raises(RequestRefused, match="no step was taken"):
        one.optim_step(AdamParams())
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.lora.tensors.items())
    assert one.optim_step(AdamParams())["unclipped_grad_l2:mean"] == 0.0


def refused(model: LanguageModel, data: list[TrainingDatum], loss: str = "ppo") -> str:
    with pytest.raises(RequestRefused) as caught:
        trainer(model).forward_backward(data, loss)
    return str(caught.value)


def test_errors_in_datums_name_the_datum_and_the_input(model: LanguageModel) -> None:
    good = datum(SHORT, logprobs=[-1.0] * 4, advantages=[1.0] * 4)
    assert "datum 0 has no tokens" in refused(model, [datum([], [1])])
    assert "datum 1 has no advantages" in refused(model, [good, datum(SHORT, logprobs=[0.0] * 4)])
    assert "found: target_tokens" in refused(model, [datum(SHORT)])
    short = datum(SHORT, logprobs=[-1.0] * 3, advantages=[1.0] * 4)
    assert "logprobs has the shape [3], but target_tokens has [4]" in refused(model, [short])
    assert "expected [4] or [4, K]" in refused(model, [datum(SHORT, [1, 2])], "cross_entropy")
    assert "token 48, but tiny has the tokens 0 to 47" in refused(model, [datum([1, 48])])
    assert "token -1" in refused(model, [datum(SHORT, [1, 2, -1, 3])], "cross_entropy")
    assert "context of tiny ends at 512" in refused(model, [datum([1] * 513)])
    wild = datum(SHORT, logprobs=[-1.0, float("nan"), 0.0, 0.0], advantages=[1.0] * 4)
    assert "logprobs is nan at position 1" in refused(model, [good, wild])
    assert "'advantage', which no loss reads" in refused(
        model, [datum(SHORT, logprobs=[0.0] * 4, advantages=[0.0] * 4, advantage=[0.0] * 4)]
    )
    floats = TrainingDatum(SHORT, {"target_tokens": np.ones(4, dtype=np.float32)})
    assert "float32; give integers" in refused(model, [floats], "cross_entropy")
    unmarked = datum(SHORT, logprobs=[0.0] * 4, advantages=[0.0] * 4, sequence_ratio_mask=[0.0] * 4)
    assert "marks no token" in refused(model, [unmarked], "gspo")


def test_refused_call_leaves_the_gradients_unchanged(model: LanguageModel) -> None:
    one = trainer(model)
    one.forward_backward([datum(SHORT)], "cross_entropy")
    before = gradients(one)
    with pytest.raises(RequestRefused):
        one.forward_backward([datum(SHORT), datum([99])], "cross_entropy")
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(one).items())


@pytest.mark.parametrize("wrong", [{"learning_rate": -1.0}, {"beta1": 1.0}, {"eps": float("nan")}])
def test_invalid_adam_params_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestRefused, match=next(iter(wrong))):
        AdamParams(**wrong)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("at_once", [1, 3 * 50, 2**18])
def test_values_and_gradients_are_those_of_torchs_own_operations(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("ratchet.engine.training.training_pass.LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    rows = torch.tensor([0, 1, 2, 2, 2, 5, 5, 1, 8, 9, 9])  # several targets of a row, and none
    targets = torch.randint(0, 50, rows.shape, generator=generator)
    targets[4] = targets[3]
    weights = drawn(len(rows), seed=2)
    logits = (drawn(10, 50) * 5).requires_grad_()
    # The gradient overwrites the logits, so they must not be a leaf.
    ours = compute_target_logprobs(logits * 1, rows, targets)
    theirs = logits.log_softmax(-1)[rows, targets]
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)
    found, expected = (
        torch.autograd.grad((known * weights).sum(), logits)[0] for known in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    assert not found[3].any(), "a row without a target has no gradient"
