"""The flow `pretrain`: it builds the tiny base model from random weights."""

from pathlib import Path

from prefect import flow

from pretraining.corpora.mixture import FIRST_SHARES
from pretraining.durable_tasks import (
    Phase,
    TokenBudget,
    create_model,
    export_model,
    score_model,
    train_part,
    train_vocabulary,
    write_card,
)
from pretraining.training_loop import Shape

DEFAULT_SHAPE, DEFAULT_BUDGET = Shape(), TokenBudget()
VOCABULARY_SIZE = 1536


@flow(name="pretrain")
def pretrain(
    folder: Path = Path("runs/pretrain"),
    seed: int = 0,
    shape: Shape = DEFAULT_SHAPE,
    budget: TokenBudget = DEFAULT_BUDGET,
    games: int = 256,
) -> Path:
    """Train on the corpora, score the model, and return its folder, ready for the engine.

    Args:
        folder: Folder of all files; an interrupted pretraining continues there.
        seed: Seed of the weights and of every document.
        shape: Width and layers of the transformer.
        budget: Tokens of each phase.
        games: Number of held-out examples that each corpus is scored on.
    """
    clean = Phase("clean", budget.clean, seed, budget.parts, prompt_weight=0.2, shares=FIRST_SHARES)
    sharp = Phase("sharp", budget.sharp, seed, peak=0.5)
    noisy = Phase("noisy", budget.noisy, seed, noise=1.0, peak=0.2)
    tokenizer = train_vocabulary(folder, seed, VOCABULARY_SIZE, budget.clean // 300)
    model = create_model(folder, tokenizer, shape, seed)
    for part in range(budget.parts):
        model = train_part(folder, tokenizer, model, clean, part)
    model = train_part(folder, tokenizer, model, sharp, 0)
    before = score_model(folder, tokenizer, model, games)
    model = train_part(folder, tokenizer, model, noisy, 0)
    shipped = export_model(folder, tokenizer, model)
    after = score_model(folder, tokenizer, shipped, games)
    write_card(folder, before, after)
    return shipped
