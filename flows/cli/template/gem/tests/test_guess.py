"""The games of the recipe `guess`. Run it in the project's folder, by `pytest`."""

import gem

GAME = "game:GuessTheNumber-v0-easy"
"""The environment that prefect.yaml names, without the prefix `gem:`."""


def replies(seed: int) -> list[str]:
    """Return what the game of a seed says to the guesses 3 and 7."""
    game = gem.make(GAME)
    game.reset(seed=seed)
    return [game.step(f"\\boxed{{{guess}}}")[0] for guess in (3, 7)]


def test_a_seed_always_makes_the_same_game() -> None:
    games = [replies(seed) for seed in range(20)]
    assert games == [replies(seed) for seed in range(20)]
    assert any(game != games[0] for game in games)
