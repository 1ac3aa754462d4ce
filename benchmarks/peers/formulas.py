"""Our formulas beside the peers' own code, on the same random inputs.

python -m benchmarks.peers.formulas          print the tables; docs/algorithms.md has what differs

Each peer runs unmodified in an environment of its own (`make peers`). Losses and estimates of the
KL divergence are computed in double precision; the peers compute advantages in single precision.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import format_table
from benchmarks.peers import ours
from benchmarks.peers.inputs import draw_pairs, draw_steps, draw_trajectories, label_answers
from benchmarks.peers.pairs import (
    ADVANTAGES,
    DIVERGENCES,
    LOSSES,
    PREFERENCES,
    AdvantagePair,
    Arguments,
    Pair,
)
from ratchet.tasks.settings.algorithm import Divergence

ROOT = Path(__file__).parent.parent.parent
SEED = 7
TRAJECTORIES = draw_trajectories(200, SEED)
STEPS = draw_steps(SEED)
PAIRS = draw_pairs(64, SEED)
LABELLED = label_answers(PAIRS)

AGREE = 1e-6
"""Largest difference of formulas that agree."""

NOTHING = 1e-9
"""Difference that the tables show as 0: a rounding, or the 1e-8 in a divisor of Trinity-RFT."""


@dataclass(frozen=True)
class Peer:
    """A peer: the Python of its environment, and the program that runs there."""

    python: Path
    program: Path

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the peer's program."""
        finished = subprocess.run(
            [self.python, self.program],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=240,
        )
        return json.loads(finished.stdout.splitlines()[-1])


def _find_peer(name: str) -> Peer:
    python = os.environ.get(f"{name.upper()}_PYTHON", f".venv-{name}/bin/python")
    return Peer(ROOT / python, Path(__file__).with_name(f"{name}_program.py"))


PEERS = {name: _find_peer(name) for name in ("trinity", "cookbook", "trl")}


@dataclass(frozen=True)
class Compared:
    """A pair, the peer's answer, and the largest difference of each quantity.

    The quantities are `loss` (of a trajectory) and `gradient` (of a token), or `value` (an
    advantage or an estimate). There is none if the peer raised an error.
    """

    pair: Pair
    answer: Mapping[str, Any]
    differences: Mapping[str, float]


def compare(peer: str) -> list[Compared]:
    """Compare the pairs of a peer: losses, advantages, divergences, preferences."""
    kinds = {
        "losses": LOSSES,
        "advantages": ADVANTAGES,
        "divergences": DIVERGENCES,
        "preferences": PREFERENCES,
    }
    pairs = {kind: [pair for pair in of if pair.peer == peer] for kind, of in kinds.items()}
    asked = {kind: [asdict(pair) for pair in of] for kind, of in pairs.items()}
    inputs = {"trajectories": TRAJECTORIES, "steps": STEPS, "pairs": PAIRS, "labelled": LABELLED}
    answers = PEERS[peer].ask({**inputs, **asked})
    computes = {
        "losses": _losses_apart,
        "advantages": _advantages_apart,
        "divergences": _divergences_apart,
        "preferences": _preferences_apart,
    }
    return [
        Compared(pair, answer, {} if "error" in answer else computes[kind](pair, answer))
        for kind, of in pairs.items()
        for pair, answer in zip(of, answers.get(kind, ()), strict=True)
    ]


def describe_compared(compared: Sequence[Compared]) -> str:
    """Describe losses, advantages and divergences, a table of each."""
    tables = {
        "Losses": (LOSSES, ("loss", "gradient")),
        "Advantages": (ADVANTAGES, ("value",)),
        "KL divergences": (DIVERGENCES, ("value",)),
        "Preferences": (PREFERENCES, ("loss", "gradient")),
    }
    return "\n".join(
        format_table(
            title,
            ("ours", "the peer's", *(f"{name} apart" for name in names), "what the peer does"),
            [_row(of, names) for of in compared if any(of.pair is pair for pair in pairs)],
        )
        for title, (pairs, names) in tables.items()
        if any(of.pair in pairs for of in compared)
    )


def _losses_apart(pair: Pair, answer: Mapping[str, Any]) -> dict[str, float]:
    computed = ours.compute_losses(pair.ours, pair.settings, TRAJECTORIES)
    return {
        "loss": _largest([computed.losses], [answer["losses"]]),
        "gradient": _largest(computed.gradients, answer["gradients"]),
    }


def _advantages_apart(pair: Pair, answer: Mapping[str, Any]) -> dict[str, float]:
    assert isinstance(pair, AdvantagePair)
    computed = ours.compute_advantages(pair.ours, pair.settings, STEPS[pair.step])
    dropped_as_zero = [value or 0.0 for value in answer["values"]]
    return {"value": _largest([computed], [dropped_as_zero])}


def _divergences_apart(pair: Pair, answer: Mapping[str, Any]) -> dict[str, float]:
    if not pair.settings:
        computed = ours.estimate_divergences(pair.ours, TRAJECTORIES)
        return {"value": _largest(computed, answer["values"])}
    penalty = Divergence(coefficient=float(pair.settings["coefficient"]), estimator=pair.ours)
    return {"value": _largest(ours.lessen_advantages(penalty, TRAJECTORIES), answer["values"])}


def _preferences_apart(pair: Pair, answer: Mapping[str, Any]) -> dict[str, float]:
    sums = LABELLED if pair.arguments.get("labelled") else PAIRS
    computed = ours.compute_preferences(pair.ours, pair.settings, sums)
    return {
        "loss": _largest([computed.losses], [answer["losses"]]),
        "gradient": _largest(computed.gradients, answer["gradients"]),
    }


def _largest(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of two lists of lists."""
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(ours, theirs, strict=True))


def _row(compared: Compared, names: Sequence[str]) -> list[str]:
    pair = compared.pair
    module = compared.answer["module"].rpartition(".")[2]
    peer = f"{pair.peer}: {_name(f'{module}.{pair.theirs}', pair.arguments)}"
    calls = f", {pair.step}" if isinstance(pair, AdvantagePair) else ""
    return [_name(pair.ours, pair.settings) + calls, peer, *_numbers(compared, names), pair.differs]


def _name(name: str, settings: Arguments) -> str:
    return ", ".join([f"`{name}`", *(f"`{key}` {_show(value)}" for key, value in settings.items())])


def _show(value: float | str | bool) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(compared: Compared, names: Sequence[str]) -> list[str]:
    if not compared.differences:
        return [compared.answer["error"]] * len(names)
    values = (compared.differences[name] for name in names)
    return [f"{value:.2g}" if value >= NOTHING else "0" for value in values]


def main() -> None:
    """Print the tables."""
    print(describe_compared([of for peer in PEERS for of in compare(peer)]))


if __name__ == "__main__":
    main()
