import math

import pytest
import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.training.losses import resolve_loss

HALF = math.log(0.5)


def computed(
    name: str, logprobs: list[float], inputs: dict[str, list[float]], **config: float
) -> tuple[float, list[float]]:
    """Return the loss, and its gradient with respect to each log-probability."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    row, settings = resolve_loss(name, config)
    given = {key: torch.tensor(values) for key, values in inputs.items()}
    value = row.function(settings, leaf, given)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.tolist()


def test_cross_entropy_without_weights_counts_every_target_once() -> None:
    assert computed("cross_entropy", [-1.0, -2.0], {})[0] == pytest.approx(3.0)


def test_clip_thresholds_of_a_datum_override_the_config() -> None:
    inputs = {"logprobs": [HALF, HALF], "advantages": [1.0, 1.0]}
    assert computed("ppo", [0.0, 0.0], inputs, clip_high_threshold=1.5)[0] == pytest.approx(-3.0)
    own = {**inputs, "clip_high_threshold": [1.1, 3.0]}
    assert computed("ppo", [0.0, 0.0], own, clip_high_threshold=1.5)[0] == pytest.approx(-1.1 - 2.0)


def test_dro_penalises_distance_from_the_sampling_policy() -> None:
    # -(-1 · 2 - ½ · 0.5 · (-1 + 3)²) = 2 + 1; gradient -2 + 0.5 · 2.
    inputs = {"logprobs": [-3.0], "advantages": [2.0]}
    value, gradient = computed("dro", [-1.0], inputs, beta=0.5)
    assert value == pytest.approx(3.0)
    assert gradient == pytest.approx([-1.0])


def test_gspo_gives_every_token_the_ratio_of_the_marked_sequence() -> None:
    # Log ratios 0.2 and 0.4 are marked, their mean is 0.3; the third, unmarked, shares it.
    inputs = {
        "logprobs": [-1.2, -1.4, -9.0],
        "advantages": [1.0, 1.0, 2.0],
        "sequence_ratio_mask": [1.0, 1.0, 0.0],
    }
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}
    value, gradient = computed("gspo", [-1.0, -1.0, -1.0], inputs, **wide)
    ratio = math.exp(0.3)
    assert value == pytest.approx(-4 * ratio)
    assert gradient == pytest.approx([-ratio, -ratio, -2 * ratio])
    clipped, gradient = computed("gspo", [-1.0, -1.0, -1.0], inputs)
    assert clipped == pytest.approx(-4 * 1.0004)
    assert gradient == pytest.approx([0.0, 0.0, 0.0])


def test_unknown_losses_and_config_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestRefused, match=r"no loss 'grpo'.*cispo, cross_entropy"):
        resolve_loss("grpo", {})
    with pytest.raises(RequestRefused, match=r"no config 'clip'.*clip_high_threshold"):
        resolve_loss("ppo", {"clip": 0.2})
    with pytest.raises(RequestRefused, match="no config at all"):
        resolve_loss("cross_entropy", {"beta": 0.1})
    with pytest.raises(RequestRefused, match="not a number"):
        resolve_loss("dro", {"beta": "large"})
    with pytest.raises(RequestRefused, match="not a number"):
        resolve_loss("dro", {"beta": math.nan})
