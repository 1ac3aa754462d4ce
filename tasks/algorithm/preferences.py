"""The table of preference losses: what is learnt from pairs of a chosen and a rejected side.

A loss is a function of each side's log-probability, summed over its trained tokens: log p under the
policy, and log ref under the reference. h is log p - log ref, a bar divides by the side's tokens,
c is the chosen side and r the rejected one, and Δ is h_c - h_r. A batch's loss is the mean over its
pairs. σ is the logistic function. A labelled answer is a pair without one of its sides:
the absent side has no tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ratchet.tasks.algorithm.loss import Arrays, Columns, Input, Loss, column, precise
from ratchet.tasks.algorithm.settings import Known, Number, Settings, complete_settings, find_row

CHOSEN, REJECTED, MISMATCHED = "chosen", "rejected", "mismatched"
SIDES = (CHOSEN, REJECTED, MISMATCHED)
"""Sides of a pair. The mismatched one is the prompt with each answer to another."""

TRAINED_SIDES = SIDES.index(MISMATCHED)
"""Number of the SIDES that are trained: the first ones."""


@dataclass(frozen=True)
class Side:
    """Sums over the trained tokens of one side of each pair, and their number: [pairs].

    A side that is absent has no tokens, and sums of 0.
    """

    log_p: np.ndarray
    log_ref: np.ndarray
    tokens: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        return self.log_p - self.log_ref

    @property
    def present(self) -> np.ndarray:
        return self.tokens > 0


@dataclass(frozen=True)
class Pairs:
    """The sides of the pairs of a batch.

    `answers` is how many answers the mismatched sides have, one for each answer of a pair; it is
    one a pair if it is not given.
    """

    chosen: Side
    rejected: Side
    mismatched: Side
    answers: int | None = None

    def __len__(self) -> int:
        return len(self.chosen.tokens)

    @property
    def zero(self) -> float:
        """Mean of h over the mismatched answers, at least 0: where answers count as no better."""
        return max(0.0, float(self.mismatched.ratio.sum() / (self.answers or len(self))))


Gradients = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The loss of each pair, and its derivatives by log p of the chosen and of the rejected side."""

PreferenceLoss = Callable[[Pairs, Settings], Gradients]


PAIRED: Mapping[str, Input] = {
    "target_tokens": column("targets"),
    "weights": column("mask"),
    "references": column("references"),
    "pair": column("pair"),
    "side": column("side"),
}
"""Inputs of a preference loss: the service gets the first two, the derivative all of them."""


@dataclass(frozen=True)
class Preference(Loss):
    """A row of the table, a loss of pairs.

    The two sides are compared by their log p, less log ref if the policy is compared with a
    `reference`, divided by the tokens if it is `by_token`. `mismatched` is whether the loss reads
    that side, `labelled` whether it is one of labelled answers too.
    """

    formula: str
    source: str
    function: PreferenceLoss
    settings: Known
    reference: bool = False
    by_token: bool = False
    mismatched: bool = False
    labelled: bool = False
    inputs = PAIRED
    unit = "pair"

    def score(self, side: Side) -> np.ndarray:
        """Return what the loss compares a side by, of each pair."""
        value = side.ratio if self.reference else side.log_p
        return value / side.tokens if self.by_token else value

    def margins(self, pairs: Pairs) -> np.ndarray:
        """Return by how much each pair's chosen side has the higher score.

        The side that a labelled answer lacks has the score z of the loss, 0 in one without.
        """
        zero = pairs.zero if self.mismatched else 0.0
        chosen, rejected = (
            np.where(side.present, self.score(side), zero) if self.labelled else self.score(side)
            for side in (pairs.chosen, pairs.rejected)
        )
        return chosen - rejected

    def derive(
        self, settings: Settings, logprobs: Arrays, inputs: Sequence[Columns]
    ) -> list[np.ndarray]:
        tokens = pair_tokens([*map(precise, inputs)])
        return derivatives(self, settings, tokens, [log_p.astype(np.float64) for log_p in logprobs])

    def measure(
        self, settings: Settings, batch: Sequence[Columns], logprobs: Arrays
    ) -> dict[str, float]:
        """Measure the loss of a step's pairs, and how their sides compare.

        `accuracy` and `margin` are as of held-out pairs. `reference/apart` is the largest
        difference of a log-probability to the reference's, if there is one, over the trained tokens
        of the first pair, which no optimizer step of the update precedes: 0 at the start, if that
        is the reference.
        """
        read = ({name: make(own, settings) for name, make in PAIRED.items()} for own in batch)
        tokens = pair_tokens([*map(precise, read)])
        losses, margins = compare_pairs(self, settings, tokens, logprobs)
        measured = {
            "loss": float(losses.mean()),
            "accuracy": float(np.where(margins == 0, 0.5, margins > 0).mean()),
            "margin": float(margins.mean()),
        }
        if self.reference:
            rows = zip(tokens.pairs, tokens.masks, logprobs, tokens.references, strict=True)
            apart = [
                np.abs(mask * (log_p - log_ref)).max()
                for pair, mask, log_p, log_ref in rows
                if pair == 0
            ]
            measured["reference/apart"] = float(max(apart))
        return measured

    def weights(self, batch: Sequence[Columns]) -> list[np.ndarray]:
        return [own["mask"] for own in batch]

    def trained(self, datum: Columns) -> int:
        """Count the trained tokens of a side; a mismatched side has no trained token."""
        return super().trained(datum) if datum["side"] < TRAINED_SIDES else 0


def dpo(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)."""
    beta, smoothing = _numbers(settings, "beta", "smoothing")
    z = beta * (pairs.chosen.ratio - pairs.rejected.ratio)
    slope = -beta * (1 - smoothing - _sigmoid(z))
    return -(1 - smoothing) * _log_sigmoid(z) - smoothing * _log_sigmoid(-z), slope, -slope


def hinge(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute max(0, 1 - βΔ)."""
    (beta,) = _numbers(settings, "beta")
    loss = np.maximum(0.0, 1 - beta * (pairs.chosen.ratio - pairs.rejected.ratio))
    slope = np.where(loss > 0, -beta, 0.0)
    return loss, slope, -slope


def ipo(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute (h̄_c - h̄_r - 1 / (2β))²."""
    (beta,) = _numbers(settings, "beta")
    chosen, rejected = pairs.chosen, pairs.rejected
    apart = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * beta)
    return apart**2, 2 * apart / chosen.tokens, -2 * apart / rejected.tokens


def simpo(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute -log σ(β (p̄_c - p̄_r) - γ), p̄ being log p by token."""
    beta, gamma = _numbers(settings, "beta", "gamma")
    chosen, rejected = pairs.chosen, pairs.rejected
    z = beta * (chosen.log_p / chosen.tokens - rejected.log_p / rejected.tokens) - gamma
    slope = -beta * _sigmoid(-z)
    return -_log_sigmoid(z), slope / chosen.tokens, -slope / rejected.tokens


def cpo(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute -log σ(β (log p_c - log p_r)) + α NLL of the chosen sides, by token."""
    beta, alpha = _numbers(settings, "beta", "alpha")
    z = beta * (pairs.chosen.log_p - pairs.rejected.log_p)
    slope, (nll, by_chosen) = -beta * _sigmoid(-z), _likelihood(pairs)
    return -_log_sigmoid(z) + alpha * nll, slope + alpha * by_chosen, -slope


def orpo(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute the NLL of the chosen sides, by token, - β log σ(odds), of the sides' odds ratio."""
    (beta,) = _numbers(settings, "beta")
    mean_c, mean_r = (side.log_p / side.tokens for side in (pairs.chosen, pairs.rejected))
    odds_c, by_c = _log_odds(mean_c)
    odds_r, by_r = _log_odds(mean_r)
    slope, (nll, by_chosen) = -beta * _sigmoid(odds_r - odds_c), _likelihood(pairs)
    return (
        nll - beta * _log_sigmoid(odds_c - odds_r),
        by_chosen + slope * by_c / pairs.chosen.tokens,
        -slope * by_r / pairs.rejected.tokens,
    )


def kto(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute the mean of w_c (1 - σ(β (h_c - z))) and w_r (1 - σ(β (z - h_r))).

    z is the batch's mean of h over the mismatched answers, of both sides, at least 0, and has no
    derivative. A labelled answer has the term of its side.
    """
    beta, wanted, unwanted = _numbers(settings, "beta", "desirable_weight", "undesirable_weight")
    present = np.stack([pairs.chosen.present, pairs.rejected.present])
    wanted, unwanted = present * [[wanted], [unwanted]] / present.sum(axis=0)
    good = _sigmoid(beta * (pairs.chosen.ratio - pairs.zero))
    bad = _sigmoid(beta * (pairs.zero - pairs.rejected.ratio))
    loss = wanted * (1 - good) + unwanted * (1 - bad)
    return loss, -beta * wanted * good * (1 - good), beta * unwanted * bad * (1 - bad)


def apo_zero(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute 1 - σ(βh_c) + σ(βh_r); a labelled answer has the term of its side."""
    (beta,) = _numbers(settings, "beta")
    good, bad = _sigmoid(beta * pairs.chosen.ratio), _sigmoid(beta * pairs.rejected.ratio)
    wanted, unwanted = pairs.chosen.present, pairs.rejected.present
    loss = wanted * (1 - good) + unwanted * bad
    return loss, -beta * wanted * good * (1 - good), beta * unwanted * bad * (1 - bad)


def apo_down(pairs: Pairs, settings: Settings) -> Gradients:
    """Compute σ(βh_c) + 1 - σ(βΔ)."""
    (beta,) = _numbers(settings, "beta")
    good = _sigmoid(beta * pairs.chosen.ratio)
    apart = _sigmoid(beta * (pairs.chosen.ratio - pairs.rejected.ratio))
    slope = beta * apart * (1 - apart)
    return good + 1 - apart, beta * good * (1 - good) - slope, slope


BETA = Number(0.1, 1e-6, 1e6)

PREFERENCES: Mapping[str, Preference] = {
    "dpo": Preference(
        "-(1 - ε) log σ(βΔ) - ε log σ(-βΔ)",
        "arXiv:2305.18290",
        dpo,
        {"beta": BETA, "smoothing": Number(0.0, 0, 0.5)},
        reference=True,
    ),
    "hinge": Preference(
        "max(0, 1 - βΔ)", "arXiv:2305.10425", hinge, {"beta": BETA}, reference=True
    ),
    "ipo": Preference(
        "(h̄_c - h̄_r - 1 / (2β))²",
        "arXiv:2310.12036",
        ipo,
        {"beta": BETA},
        reference=True,
        by_token=True,
    ),
    "simpo": Preference(
        "-log σ(β (p̄_c - p̄_r) - γ), p̄ being log p by token",
        "arXiv:2405.14734",
        simpo,
        {"beta": Number(2.0, 1e-6, 1e6), "gamma": Number(0.5, 0, 1e6)},
        by_token=True,
    ),
    "cpo": Preference(
        "-log σ(β (log p_c - log p_r)) + α NLL_c",
        "arXiv:2401.08417",
        cpo,
        {"beta": BETA, "alpha": Number(1.0, 0, 1e6)},
    ),
    "orpo": Preference(
        "NLL_c - β log σ(log odds(p̄_c) - log odds(p̄_r))",
        "arXiv:2403.07691",
        orpo,
        {"beta": BETA},
        by_token=True,
    ),
    "kto": Preference(
        "½ w_c (1 - σ(β (h_c - z))) + ½ w_r (1 - σ(β (z - h_r))), z of mismatched answers",
        "arXiv:2402.01306",
        kto,
        {
            "beta": BETA,
            "desirable_weight": Number(1.0, 0, 1e6),
            "undesirable_weight": Number(1.0, 0, 1e6),
        },
        reference=True,
        mismatched=True,
        labelled=True,
    ),
    "apo_zero": Preference(
        "1 - σ(βh_c) + σ(βh_r)",
        "arXiv:2408.06266",
        apo_zero,
        {"beta": BETA},
        reference=True,
        labelled=True,
    ),
    "apo_down": Preference(
        "σ(βh_c) + 1 - σ(βΔ)", "arXiv:2408.06266", apo_down, {"beta": BETA}, reference=True
    ),
}


def find_preference(name: str) -> Preference:
    """Return the row of a preference loss; ValueError if there is no such row."""
    return find_row("preference loss", name, PREFERENCES)


def check_preference(name: str, settings: Settings) -> None:
    """Refuse (ValueError) an unknown loss, and a setting that it would ignore."""
    complete_settings(f"the preference loss {name}", settings, find_preference(name).settings)


@dataclass(frozen=True)
class PairTokens:
    """Sequences of a batch of pairs, each a part of a side: [sequences], and of each [tokens].

    `pairs` numbers the pair of each sequence and `sides` names its side by its place in SIDES;
    `masks` is 0 where a token is not trained.
    """

    pairs: np.ndarray
    sides: np.ndarray
    references: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]

    def sum(self, logprobs: Sequence[np.ndarray]) -> Pairs:
        """Sum log-probabilities over the trained tokens of each side of each pair."""
        pairs = np.unique(self.pairs, return_inverse=True)[1]
        size = int(pairs.max(initial=-1)) + 1
        columns = {
            "log_p": [float(m @ p) for m, p in zip(self.masks, logprobs, strict=True)],
            "log_ref": [float(m @ p) for m, p in zip(self.masks, self.references, strict=True)],
            "tokens": [float(mask.sum()) for mask in self.masks],
        }
        of_side = [self.sides == side for side in range(len(SIDES))]
        summed = [
            Side(
                **{
                    name: np.bincount(pairs[own], np.array(values)[own], size)
                    for name, values in columns.items()
                }
            )
            for own in of_side
        ]
        return Pairs(*summed, answers=int(of_side[TRAINED_SIDES].sum()))


def pair_tokens(inputs: Sequence[Mapping[str, np.ndarray]]) -> PairTokens:
    """Return the sides of a batch of pairs by the inputs of its datums."""
    pair, side = (
        np.array([of[name].item() for of in inputs], np.int64) for name in ("pair", "side")
    )
    return PairTokens(
        pair, side, [of["references"] for of in inputs], [of["weights"] for of in inputs]
    )


def compare_pairs(
    row: Preference, given: Settings, tokens: PairTokens, logprobs: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each pair, and by how much its chosen side's score is higher: [pairs]."""
    settings = complete_settings("the preference loss", given, row.settings)
    pairs = tokens.sum([one.astype(np.float64) for one in logprobs])
    return row.function(pairs, settings)[0], row.margins(pairs)


def derivatives(
    row: Preference, settings: Settings, tokens: PairTokens, logprobs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Compute the derivative of a batch's loss by each log-probability of each sequence."""
    pairs = tokens.sum(logprobs)
    _, chosen, rejected = row.function(pairs, settings)
    by_side = np.stack([chosen, rejected, np.zeros(len(pairs))]) / len(pairs)
    numbers = np.unique(tokens.pairs, return_inverse=True)[1]
    slopes = by_side[tokens.sides, numbers]
    return [slope * mask for slope, mask in zip(slopes, tokens.masks, strict=True)]


def _likelihood(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair's part of the batch's mean NLL of chosen tokens, and its derivative."""
    share = -len(pairs) / pairs.chosen.tokens.sum()
    return share * pairs.chosen.log_p, np.full(len(pairs), share)


def _log_odds(log_p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log(p / (1 - p)), and its derivative by log p; p is at most 1 - 1e-12."""
    against = np.maximum(-np.expm1(log_p), 1e-12)
    return log_p - np.log(against), 1 / against


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return np.exp(_log_sigmoid(z))


def _log_sigmoid(z: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -z)


def _numbers(settings: Settings, *names: str) -> list[float]:
    return [float(settings[name]) for name in names]
