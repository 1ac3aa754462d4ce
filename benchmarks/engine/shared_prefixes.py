"""Training steps on datums that begin alike, beside datums of the same lengths that share nothing.

The tokens are random, and the lengths those of groups of rollouts. The last rows tell how far the
gradient is from that of the same datums one by one, which share nothing either.
"""

import argparse
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.random_bases import SHAPES, write_base
from benchmarks.engine.speed import RANK, Sequences, load, loss_inputs, training_in_engine
from benchmarks.measuring import (
    SPEED,
    Comparison,
    describe_machine,
    format_table,
    note,
    speed_rows,
    time_in_turns,
)
from ratchet.engine.__main__ import default_threads
from ratchet.engine.model.base_models import TINY_CHAT, find
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraConfig, LoraWeights
from ratchet.engine.training.losses import TrainingDatum
from ratchet.engine.training.trainer import Trainer

SHARED, APART = "begin alike", "share nothing"


@dataclass(frozen=True)
class Shape:
    """Groups of datums: tokens that all of them share, that a group shares, and of each datum.

    Each entry of `turns` is the number of ways to go on, and the tokens of each.
    """

    name: str
    groups: int
    common: int
    prompt: int
    turns: Sequence[tuple[int, int]]

    def draw(self, random: np.random.Generator) -> Sequences:
        begun = _draw(random, self.common)
        found = []
        for _ in range(self.groups):
            group = [begun + _draw(random, self.prompt)]
            for ways, tokens in self.turns:
                group = [one + _draw(random, tokens) for one in group for _ in range(ways)]
            found += group
        return found


def _draw(random: np.random.Generator, count: int) -> list[int]:
    return random.integers(16, 1000, count).tolist()


GROUPS = (
    Shape("8 groups of 8, 100 of 116 tokens shared", 8, 0, 100, [(8, 17)]),
    Shape("4 groups of 16, 100 of 116 tokens shared", 4, 0, 100, [(16, 17)]),
    Shape("8 groups of 8 as in `people`: 88 of 116 tokens, 30 in all", 8, 30, 58, [(8, 29)]),
    Shape("4 groups of 8 that branch three times", 4, 0, 60, [(2, 40), (2, 40), (2, 21)]),
)


def main() -> None:
    """Run the benchmark from the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="of each pair")
    options.add_argument("--base", default=TINY_CHAT, help="base model")
    options.add_argument("--random", choices=SHAPES, help="shape of a random base model instead")
    options.add_argument("--shapes", type=int, default=len(GROUPS), help="the first ones only")
    options.add_argument("--cores", type=int, default=default_threads())
    arguments = options.parse_args()
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.random:
            write_base(SHAPES[arguments.random], folder)
        model = load(folder if arguments.random else find(arguments.base).folder, arguments.cores)
        for shape in GROUPS[: arguments.shapes]:
            print(compare(model, shape, arguments.rounds), flush=True)


def compare(model: LanguageModel, shape: Shape, rounds: int) -> str:
    """Time steps on a shape's datums, and on others of their lengths."""
    random = np.random.default_rng(0)
    alike = shape.draw(random)
    apart = [_draw(random, len(one)) for one in alike]
    of_alike = training_in_engine(model, alike)
    of_alike()
    peak = _peak()
    runs = {APART: training_in_engine(model, apart), SHARED: of_alike}
    took = time_in_turns(runs, rounds)
    tokens = sum(len(one) - 1 for one in alike)
    what = f"Training step: {shape.name}, LoRA of rank {RANK}"
    ours, theirs = ([one.cpu for one in took[name]] for name in (SHARED, APART))
    note(Comparison(f"{what}, processor time", ours, APART, theirs, tokens, "tokens"))
    table = format_table(what, SPEED, speed_rows(took, tokens, APART))
    return (
        f"{table}The process's peak of memory was {peak:.2f} GB so far with datums that begin "
        f"alike, and {_peak():.2f} GB with others.\nThe gradient differs by "
        f"{distance(model, alike):.1g} of its length from the sum of the datums' own.\n"
    )


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def distance(model: LanguageModel, sequences: Sequences) -> float:
    """Return the distance of the gradients of one request and of a request a datum."""
    whole = [sequences]
    single = [[one] for one in sequences]
    together, apart = (_gradient(model, requests) for requests in (whole, single))
    return float((together - apart).norm() / apart.norm())


def _gradient(model: LanguageModel, requests: Sequence[Sequences]) -> torch.Tensor:
    trainer = Trainer(model, LoraWeights.initial(model, LoraConfig(RANK, seed=0)))
    for sequences in requests:
        datums = [TrainingDatum(one[:-1], loss_inputs(one)) for one in sequences]
        trainer.forward_backward(datums, "cross_entropy")
    return torch.cat([one.flatten().double() for one in trainer.sums.total().values()])


if __name__ == "__main__":
    main()
