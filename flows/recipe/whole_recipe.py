"""Tokens of a whole recipe: of its rollouts by those of a dry run, of texts and pairs by count."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.adapters.tinker.costs import prices_of
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.flows.recipe.loading import count_steps
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.given.given import choose_first, choose_units
from ratchet.tasks.given.tallies import Tally
from ratchet.tasks.settings.given import TEST, TRAIN
from ratchet.tasks.spending.ledger import TOKEN_KINDS, missing_price, read_ledger
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import arrays, read_table
from ratchet.tasks.updates import MOST_SCORED


@dataclass(frozen=True)
class WholeRecipe:
    """Tokens that a recipe has the service compute, by kind, what they were found by, and dollars.

    Without a price of the model the dollars are None.
    """

    tokens: Mapping[str, int]
    found: str
    usd: float | None

    def __str__(self) -> str:
        tokens = ", ".join(f"{kind} {count:,}" for kind, count in self.tokens.items())
        usd = "no price is known" if self.usd is None else f"${self.usd:.2f}"
        return f"# whole recipe\n\n{tokens}\n{self.found}\n{usd}"


def multiply_played(recipe: Recipe, dry: RunFolder, played: int) -> WholeRecipe:
    """Multiply the mean of the rollouts that a dry run has `played` by the rollouts of a recipe.

    All trajectories count as trained, though a group of equal rewards trains nothing.
    """
    recipe, total = count_steps(recipe), Counter[str]()
    training = recipe.steps * recipe.rollouts.groups * recipe.rollouts.group_size
    evaluation, measured = recipe.evaluation, _measured(recipe)
    examples = len(recipe.held_out_split().examples()) if measured else 0
    held_out = measured * min(evaluation.examples, examples)
    held_out *= evaluation.rollouts + evaluation.greedy
    for row in read_ledger(dry).rows:
        times = training + held_out * (row.purpose == "rollouts")
        if row.ours and row.step is not None:
            total.update({kind: count * times for kind, count in row.tokens.items()})
    for policy in recipe.policies():
        rows = read_table(dry.trajectories(policy, 0), ["tokens", "mask"])
        trained = zip(*map(arrays, (rows["tokens"], rows["mask"])), strict=True)
        read = sum(len(tokens) - 1 for tokens, mask in trained if mask.any())
        total["trained"] += read * _times_read(recipe) * training
    mean = {kind: total[kind] / played for kind in TOKEN_KINDS}
    rollouts = f"{training:,} rollouts of training and {held_out:,} of evaluations"
    return _priced(recipe, mean, f"for {rollouts}, by the mean of the {played} that were played")


def count_given(recipe: GivenRecipe, tallies: Mapping[str, Tally]) -> WholeRecipe | None:
    """Count the tokens of texts or pairs as they will be drawn; None if a source has none.

    The last token of a sequence is a target alone. Scoring a sequence samples a token.
    """
    recipe, lengths = count_steps(recipe), dict[tuple[str, str, int], list[int]]()
    numbers = dict[str, list[int]]()
    for (split, _, source), tally in ((name.partition("/"), one) for name, one in tallies.items()):
        lengths |= {(split, source, number): own for number, own in tally.lengths.items()}
        if split == TRAIN:
            numbers[source] = [*tally.lengths]
    if not all(numbers.values()):
        return None
    evaluation, draws = recipe.evaluation, range(recipe.steps)
    drawn = [choose_units(numbers, recipe.drawing(), step) for step in draws]
    steps = [[length for unit in units for length in lengths[TRAIN, *unit]] for units in drawn]
    held_out = [(source, number) for split, source, number in lengths if split == TEST]
    chosen = choose_first(held_out, evaluation.examples, evaluation.drawn_by(recipe.seed))
    scored = [length for unit in chosen for length in lengths[TEST, *unit]] * _measured(recipe)
    if recipe.scores_units():
        scored += [length for own in lengths.values() for length in own]
    if not recipe.teachers().models:
        scored += steps[0][:MOST_SCORED]  # by which the first update is checked
    trained = sum(length - 1 for step in steps for length in step) * _times_read(recipe)
    tokens = {"prefill": sum(scored), "cached": 0, "sampled": len(scored), "trained": trained}
    rows = sum(tally.read for tally in tallies.values())
    return _priced(recipe, tokens, f"by the tokens of {rows:,} rows, as the steps draw them")


def _priced(recipe: RunRecipe, tokens: Mapping[str, float], found: str) -> WholeRecipe:
    counts, base = {kind: round(of) for kind, of in tokens.items()}, recipe.model.base
    prices = None if missing_price(base) else prices_of(base)
    return WholeRecipe(counts, found, prices and prices.cost(counts))


def _measured(recipe: RunRecipe) -> int:
    """Count the checkpoints that are measured on held-out examples."""
    due, steps = recipe.evaluation.due, recipe.steps
    return sum(due(step, steps) for step in range(steps + 1)) if recipe.holds_out() else 0


def _times_read(recipe: RunRecipe) -> int:
    """Count how often the service reads a datum: once a term and epoch, by weights once more."""
    terms = [term for term in recipe.update_method().terms(0) if term.file == 0]
    by_weights = terms[0].service_loss().derivative is not None
    return (len(terms) + by_weights) * recipe.optimizer.epochs
