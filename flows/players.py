"""recipe → who plays its rollouts, and how workers find a run that wants them."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fastapi import APIRouter

from adapters.agents import Play
from adapters.players import Here, Player
from adapters.processes import Processes
from adapters.workers import Workers
from flows.recipe import Recipe
from tasks.doors import Announced, announced, run_token


def player_of(recipe: Recipe, play: Play) -> Player:
    """As `rollouts.where` says; `play` is the recipe's agent."""
    rollouts = recipe.rollouts
    if rollouts.where == "processes":
        return Processes(recipe.agent, rollouts.processes)
    if rollouts.where == "workers":
        return Workers(recipe.agent, run_token())
    return Here(play)


def routes_of(player: Player) -> APIRouter | None:
    """What the door answers beside the agents' calls."""
    return player.routes() if isinstance(player, Workers) else None


@contextmanager
def inviting(player: Player, folder: Path, door: str) -> Iterator[None]:
    """Let workers find the door, if the player needs any, and know in the end that it is over."""
    if isinstance(player, Workers):
        with closing(player), announced(folder, Announced(door, player.token)):
            yield
    else:
        yield
