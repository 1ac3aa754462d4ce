"""Log-probabilities of targets, and their gradients, beside torch's own."""

import pytest
import torch

from engine.training import trainer
from engine.training.trainer import compute_target_logprobs


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("at_once", [1, 3 * 50, 2**18])
def test_values_and_gradients_have_the_bits_of_torchs_own_operations(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(trainer, "LOGITS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    shapes = ((4,), (7, 3), (1, 1), (9,))
    targets = [torch.rand(shape[0], 50, generator=generator).argsort(1) for shape in shapes]
    targets = [
        one[:, : shape[-1]] if len(shape) > 1 else one[:, 0]
        for one, shape in zip(targets, shapes, strict=True)
    ]
    weights = [drawn(*shape, seed=number) for number, shape in enumerate(shapes)]
    lengths = [shape[0] for shape in shapes]
    found = []
    for chunked in (True, False):
        logits = (drawn(sum(lengths), 50) * 5).requires_grad_()
        # The gradient overwrites the logits, so they must not be a leaf.
        passed = logits * 1
        if chunked:
            known = compute_target_logprobs(passed, targets)
        else:
            normal = passed.logsumexp(-1, keepdim=True).split(lengths)
            known = [
                (rows.gather(1, one.view(len(one), -1)) - total).view(one.shape)
                for rows, one, total in zip(passed.split(lengths), targets, normal, strict=True)
            ]
        total = torch.stack(
            [(one * weight).sum() for one, weight in zip(known, weights, strict=True)]
        ).sum()
        found.append(([one.detach() for one in known], torch.autograd.grad(total, logits)[0]))
    (ours, gradient), (theirs, expected) = found
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(gradient, expected)
