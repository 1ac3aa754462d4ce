"""Log-probabilities of targets, and their gradients, beside torch's own."""

import pytest
import torch

from ratchet.engine.training.training_pass import compute_target_logprobs


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
