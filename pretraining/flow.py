"""pretrain: the tiny base model from nothing. A clean reading for skill, then a noisy one."""

from pathlib import Path

from prefect import flow

from pretraining.corpora.mixture import FIRST_SHARES
from pretraining.durable_tasks import (
    Reading,
    Shape,
    begin,
    describe,
    read,
    score,
    ship,
    train_vocabulary,
)


@flow(name="pretrain")
def pretrain(
    folder: Path = Path("runs/pretrain"),
    clean_tokens: int = 12_000_000,
    sharp_tokens: int = 4_000_000,
    noisy_tokens: int = 1_500_000,
    parts: int = 6,
    games: int = 256,
    width: int = 128,
    layers: int = 5,
    seed: int = 0,
) -> Path:
    """Read the corpora, score the model, and return its folder, ready for the engine.

    Args:
        folder: Where everything is kept; a pretraining that was interrupted continues there.
        clean_tokens: Read with right answers only.
        sharp_tokens: Read next, of which only the answers are learnt.
        noisy_tokens: Read last, with the natural mistakes that RL is to remove.
        parts: How many pieces the clean reading is done in; one that is whole is not repeated.
        games: Held-out examples that each format is scored on.
        width: Of the transformer; a multiple of 32.
        layers: How many of them.
        seed: Of the weights and of every document.
    """
    clean = Reading("clean", clean_tokens, seed, parts, prompt_weight=0.2, shares=FIRST_SHARES)
    sharp = Reading("sharp", sharp_tokens, seed, peak=0.5)
    noisy = Reading("noisy", noisy_tokens, seed, noise=1.0, peak=0.2)
    tokenizer = train_vocabulary(folder, seed, 1536, clean_tokens // 300)
    model = begin(folder, tokenizer, Shape(width, layers), seed)
    for part in range(parts):
        model = read(folder, tokenizer, model, clean, part)
    model = read(folder, tokenizer, model, sharp, 0)
    before = score(folder, tokenizer, model, games)
    model = read(folder, tokenizer, model, noisy, 0)
    shipped = ship(folder, tokenizer, model)
    after = score(folder, tokenizer, shipped, games)
    describe(folder, before, after)
    return shipped
