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
    tokenizer = train_vocabulary(folder / "vocabulary", seed, VOCABULARY_SIZE, budget.clean // 300)
    model = create_model(folder / "new", tokenizer, shape, seed)
    for phase in (clean, sharp):
        for part in range(phase.parts):
            model = train_part(folder / f"{phase.name}-{part}", tokenizer, model, phase, part)
    before = score_model(folder / f"scores-{model.name}.json", tokenizer, model, games)
    model = train_part(folder / "noisy-0", tokenizer, model, noisy, 0)
    shipped = export_model(folder / "shipped", tokenizer, model)
    after = score_model(folder / "scores-shipped.json", tokenizer, shipped, games)
    write_card(shipped / "README.md", before, after)
    return shipped
