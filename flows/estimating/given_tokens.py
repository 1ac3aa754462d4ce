"""Estimate of a run on texts or pairs: their tokens are counted, and nothing is played."""

import pyarrow.compute as pc

from adapters.calls import POLICY
from adapters.rendering.chat import Chat
from adapters.tinker.prices import prices_of
from adapters.tinker.token_texts import open_tokenizer
from flows.estimating.dry_training import passes_of
from flows.recipe.finetuning import FinetuneRecipe
from flows.recipe.given_examples import GivenRecipe
from flows.recipe.preferring import PreferRecipe
from tasks.given.given import Given, bind_given, choose_first, choose_units
from tasks.settings.given import TEST, TRAIN
from tasks.spending.estimate import EstimatedLine, EstimatedRun
from tasks.spending.ranges import ONE
from tasks.storage.run_folder import TEXT_TEACHERS, RunFolder
from tasks.storage.tables import arrays
from tasks.updates import MOST_SCORED

Name = tuple[str, int]
"""Source of a unit, and its number there."""
PAIR_REFERENCES = "pair_references"
"""Purpose, in a ledger, of what the reference of pairs reads."""


def estimate_given(recipe: GivenRecipe, name: str, folder: RunFolder) -> EstimatedRun:
    """Return the estimate of a run; the tokens of its units become a file of the folder."""
    given, model = recipe.units(folder), recipe.model
    chat = Chat(open_tokenizer(model.base), model.renderer, thinking=model.thinking)
    bind_given.make(given.path, given, recipe.given_examples(), chat, recipe.dataset)
    lines = [_updates(recipe, given), *_measures(recipe, given), *_read_once(recipe, given)]
    return EstimatedRun(name, lines, prices_of(model.base), None)


def _line(purpose: str, prompts: int, sampled: int, trained: int = 0) -> EstimatedLine:
    counted = (("prompts", prompts), ("sampled", sampled), ("trained", trained))
    return EstimatedLine(purpose, POLICY, {kind: ONE * many for kind, many in counted})


def _sequences(given: Given, split: str) -> dict[Name, list[int]]:
    """Map each unit of a split to the tokens of its sequences."""
    rows = given.table.filter(pc.field("split") == split)
    lengths: dict[Name, list[int]] = {}
    for name, tokens in zip(given.names(rows), arrays(rows["tokens"]), strict=True):
        lengths.setdefault(name, []).append(len(tokens))
    return lengths


def _updates(recipe: GivenRecipe, given: Given) -> EstimatedLine:
    """Sum the tokens of the units of all steps, as they are drawn; the last of each is a target.

    By the first sequences the first update is checked, unless their targets are a teacher's.
    """
    sequences, numbers, drawing = _sequences(given, TRAIN), dict[str, list[int]](), recipe.drawing()
    for source, number in sequences:
        numbers.setdefault(source, []).append(number)
    steps = [choose_units(numbers, drawing, step) for step in range(recipe.steps)]
    read = sum(length - 1 for units in steps for unit in units for length in sequences[unit])
    is_checked = not recipe.teachers().models
    first = [length for unit in steps[0] for length in sequences[unit]] if is_checked else []
    checked = first[:MOST_SCORED]
    return _line("updates", sum(checked), len(checked), read * passes_of(recipe)[0])


def _measures(recipe: GivenRecipe, given: Given) -> list[EstimatedLine]:
    """Return what is read to measure checkpoints on held-out units."""
    evaluation, steps = recipe.evaluation, recipe.steps
    if not recipe.holds_out():
        return []
    sequences = _sequences(given, TEST)
    chosen = choose_first([*sequences], evaluation.examples, evaluation.drawn_by(recipe.seed))
    lengths = [length for unit in chosen for length in sequences[unit]]
    due = sum(evaluation.due(step, steps) for step in range(steps + 1))
    return [_line("measures", due * sum(lengths), due * len(lengths))]


def _read_once(recipe: GivenRecipe, given: Given) -> list[EstimatedLine]:
    """Return what the reference of pairs, or the teacher of texts, reads when the run begins."""
    lengths = [len(tokens) for tokens in arrays(given.table["tokens"])]
    if isinstance(recipe, PreferRecipe) and recipe.preference.row().reference:
        return [_line(PAIR_REFERENCES, sum(lengths), len(lengths))]
    if isinstance(recipe, FinetuneRecipe) and recipe.teacher.model is not None:
        return [_line(TEXT_TEACHERS, sum(lengths), len(lengths))]
    return []
