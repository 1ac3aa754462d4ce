"""checkpoint × pairs → how often it prefers the chosen side, with its interval."""

from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from adapters.errors import UserError
from tasks.algorithm.preferences import (
    SIDES,
    TRAINED_SIDES,
    PairTokens,
    compare_pairs,
    find_preference,
)
from tasks.algorithm.settings import Settings
from tasks.comparison.statistics import Z95, interval_of
from tasks.pairs.source import BoundPairs, score_sides
from tasks.references import Reference
from tasks.storage.durability import durable
from tasks.storage.json_files import read_json, write_json
from tasks.storage.tables import arrays
from tasks.texts.batches import choose_first
from tasks.texts.held_out import HeldOutMeasure


class ReferenceApart(UserError):
    """Refusal to train a policy that is its own reference, and whose scores differ from it."""


@durable
def score_pairs(
    path: Path,
    pairs: BoundPairs,
    policy: Reference,
    loss: tuple[str, Settings],
    most: int,
    seed: int,
) -> None:
    """Write how a policy compares `most` held-out pairs, the first in a seeded order.

    `accuracy` is the share of pairs whose chosen side has the higher score of the loss (its log p,
    less the reference's if the loss has one); equal scores count half. A labelled answer is
    compared with the loss's z, or 0. The standard error is that of a normal interval as wide as the
    share's own (`interval_of`). `margin` is the mean difference of the scores, and `loss` the mean
    loss.
    """
    table = pairs.of_split("test")
    drawn = choose_first(table["example_id"].to_pylist(), most, seed)
    table = table.filter(pc.field("example_id").isin([*drawn]))
    masks = [mask.astype(np.float64) for mask in arrays(table["mask"])]
    scored = score_sides(policy, arrays(table["tokens"]), masks)
    sides = np.array([SIDES.index(side) for side in table["side"].to_pylist()])
    references = [one.astype(np.float64) for one in arrays(table["references"])]
    numbers = table["example_id"].to_numpy()
    tokens = PairTokens(numbers, sides, references, masks)
    name, settings = loss
    losses, margins = compare_pairs(find_preference(name), settings, tokens, scored)
    wins = np.where(margins == 0, 0.5, margins > 0)
    interval = interval_of(wins.tolist())
    measured = HeldOutMeasure(
        measure="accuracy",
        examples=len(wins),
        tokens=int(sum(masks[at].sum() for at in np.flatnonzero(sides < TRAINED_SIDES))),
        value=float(wins.mean()),
        standard_error=None if interval is None else (interval[1] - interval[0]) / (2 * Z95),
        interval=interval,
        beside={"margin": float(margins.mean()), "loss": float(losses.mean())},
        by_example=tuple((won, 1.0) for won in wins.tolist()),
    )
    write_json(path, measured.model_dump())


def check_reference(update: Path, tolerance: float | None) -> None:
    """Refuse (ReferenceApart) a first update whose policy is not the reference that it starts as.

    The service then trains and samples in different precisions, or by different texts.
    """
    apart = read_json(update)["reference/apart"]
    if tolerance is not None and not apart <= tolerance:
        raise ReferenceApart(
            f"the log-probabilities of the untrained policy are up to {apart:.3g} off those of the "
            f"reference, which has the same weights, and checkpoints.probe_tolerance is "
            f"{tolerance:g}: the service trains in another precision than it samples. Give a "
            "larger checkpoints.probe_tolerance, if pairs may be compared that roughly"
        )
