"""recipe → the live parts of a run: its folder, the learner and the runner."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinker import AdamParams

from adapters.agents import load_agent
from adapters.answerers import answerers
from adapters.calls import POLICY, Sampling
from adapters.chat import Chat
from adapters.loopback import Listening
from adapters.tinker import Service, connect
from adapters.tracking import Tracker
from flows.players import inviting, player_of, routes_of
from flows.recipe import Recipe
from tasks.checkpoints import Ledger
from tasks.metrics import read_metrics
from tasks.remaking import datums_of
from tasks.rollouts import Runner
from tasks.runs import opened_run, recipe_at
from tasks.shards import Source
from tasks.updates import Learner, Lora, Method


@dataclass(frozen=True)
class Parts:
    """What a run holds while it is open."""

    folder: Path
    ledger: Ledger
    learner: Learner
    runner: Runner
    tracker: Tracker

    def steps_done(self) -> int:
        """A step is done when its metrics are recorded, which is the last thing it does."""
        return len(read_metrics(self.folder / "metrics.jsonl"))


@contextmanager
def opened(recipe: Recipe, run: str, *, on_policy: bool = True) -> Iterator[Parts]:
    """The parts of a run. What its user can mend is refused before anything is started.

    Rebuilt weights must give the recorded log-probabilities only where they sampled them.
    """
    roles = answerers(recipe.roles, recipe.seed)
    beside_policy = [role for role in roles if role != POLICY]
    player = player_of(recipe, load_agent(recipe.agent, beside_policy))
    for source in (train_split(recipe), test_split(recipe)):
        source.examples()
    values = recipe.model_dump(mode="json")
    with (
        opened_run(run, values, recipe.fingerprint()) as folder,
        player,
        connect(recipe.model.base, folder / "engine", recipe.service.timeout_seconds) as service,
    ):
        ledger = Ledger(folder / "checkpoints.jsonl")
        learner = _learner(recipe, folder, ledger, service)
        if not on_policy:
            learner.probe_tolerance = None
        tokenizer = service.tokenizer(learner.initial().sampler, recipe.model.base)
        chat = Chat(tokenizer, recipe.model.renderer, service.context(recipe.model.base))
        with (
            Runner(
                service,
                learner.sampler,
                player,
                chat,
                run=run,
                run_seed=recipe.seed,
                concurrency=recipe.rollouts.concurrency,
                timeout_seconds=recipe.rollouts.timeout_seconds,
                replay=recipe.rollouts.replay,
                max_calls=recipe.rollouts.max_calls,
                roles=roles,
                listening=Listening.at(recipe.rollouts.listen),
                beside=routes_of(player),
            ) as runner,
            inviting(player, folder, runner.door),
            Tracker(recipe.tracking.project, run, values, folder / "wandb") as tracker,
        ):
            yield Parts(folder, ledger, learner, runner, tracker)


def train_split(recipe: Recipe) -> Source:
    """The examples that are trained on."""
    return Source(Path(recipe.dataset.path), "train", recipe.dataset.columns)


def test_split(recipe: Recipe) -> Source:
    """The examples that are held out."""
    return Source(Path(recipe.dataset.path), "test", recipe.dataset.columns)


def sampled(recipe: Recipe) -> Sampling:
    """How training rollouts and sampled evaluations are sampled: the distribution is left whole."""
    rollouts = recipe.rollouts
    return Sampling(rollouts.max_tokens, rollouts.temperature, top_p=1.0, top_k=-1)


def greedy(recipe: Recipe) -> Sampling:
    """Always the likeliest token."""
    return Sampling(recipe.rollouts.max_tokens, temperature=0.0, top_p=1.0, top_k=-1)


def _learner(recipe: Recipe, folder: Path, ledger: Ledger, service: Service) -> Learner:
    model = recipe.model
    return Learner(
        service,
        ledger,
        datums=lambda step: _datums(Recipe.model_validate(recipe_at(folder, step)), folder, step),
        lora=Lora(
            model.base,
            model.lora_rank,
            recipe.seed,
            train_attn=model.train_attention,
            train_mlp=model.train_mlp,
            train_unembed=model.train_unembedding,
        ),
        method=lambda step: _method(Recipe.model_validate(recipe_at(folder, step))),
        ttl_seconds=recipe.checkpoints.ttl_seconds,
        probe_tolerance=recipe.checkpoints.probe_tolerance,
    )


def _datums(recipe: Recipe, folder: Path, step: int) -> Path:
    algorithm = recipe.algorithm
    return datums_of(
        folder,
        step,
        algorithm.advantage,
        algorithm.normalise,
        recipe.rollouts.smallest_group(),
        algorithm.discount,
        recipe.trained_roles(),
    )


def _method(recipe: Recipe) -> Method:
    algorithm, optimizer = recipe.algorithm, recipe.optimizer
    return Method(algorithm.loss, algorithm.loss_settings, AdamParams(**optimizer.model_dump()))
