"""How often the intervals of comparisons hold the truth, and the gate lets equal policies pass.

python -m benchmarks.intervals --pairs 1000
"""

import argparse
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from tasks.comparison.statistics import find_difference, interval_of_mean

SIZES = (8, 32, 128, 500)
"""Examples of a comparison."""
Generator: TypeAlias = np.random.Generator
Drawn: TypeAlias = tuple[np.ndarray, float]
"""Differences of simulated comparisons, a row each, and their true mean."""


def passes(generator: Generator, pairs: int, examples: int, gain: float = 0.2) -> Drawn:
    """Draw rewards of 0 and 1, of which some are won and 0.1 are lost."""
    shares = [0.1 + gain, 0.1, 0.8 - gain]
    return generator.choice([1.0, -1.0, 0.0], (pairs, examples), p=shares), gain


def continuous(generator: Generator, pairs: int, examples: int, gain: float = 0.2) -> Drawn:
    """Draw continuous rewards; that of an example is as difficult for both."""
    noise = generator.normal(0, 0.3, (2, pairs, examples))
    return gain + noise[0] - noise[1], gain


def rollouts(generator: Generator, pairs: int, examples: int, gain: float = 0.1) -> Drawn:
    """Draw the mean of four rollouts of each example, which share its chance of success."""
    chance = generator.beta(0.5, 0.5, (pairs, examples)) * 0.8
    means = [generator.binomial(4, chance + more) / 4 for more in (gain, 0.0)]
    return means[0] - means[1], gain


KINDS: Mapping[str, Callable[..., Drawn]] = {
    "0 or 1": passes,
    "continuous": continuous,
    "mean of 4 rollouts": rollouts,
}


def main() -> None:
    """Print a row for each kind of reward and number of examples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000, help="comparisons of each row")
    parser.add_argument("--gated", type=int, default=1_000, help="of equal policies, of each row")
    options = parser.parse_args()
    pairs, gated = options.pairs, options.gated
    print(f"{'rewards':20}{'examples':>9}{'held, of 100':>14}{f'passed, of {gated:,}':>18}")
    for kind, draw in KINDS.items():
        for examples in SIZES:
            generator = np.random.default_rng(examples)
            differences, truth = draw(generator, pairs, examples)
            known = filter(None, map(interval_of_mean, differences.tolist()))
            held = np.mean([low <= truth <= high for low, high in known])
            equal, _ = draw(generator, gated, examples, 0.0)
            passed = sum(
                find_difference([(one, 0.0) for one in row]).is_gain for row in equal.tolist()
            )
            print(f"{kind:20}{examples:9}{100 * held:14.1f}{passed:18}", flush=True)


if __name__ == "__main__":
    main()
