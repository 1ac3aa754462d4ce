"""recipe → the live parts of a run: its folder, its policies and the runner."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapters.calls import POLICY, Sampling
from adapters.chat import Chat
from adapters.door.backends import create_backends
from adapters.harness.agents import load_agent
from adapters.loopback import Listening
from adapters.tinker.service import connect
from adapters.tracking import Tracker
from flows.players import inviting, player_of, routes_of
from flows.recipe import Recipe
from flows.runtime.policies import Trained, policies_of
from tasks.checkpoints import Ledger
from tasks.metrics import read_metrics
from tasks.rollouts import Runner
from tasks.shards import Source
from tasks.storage.run_folder import opened_run


@dataclass(frozen=True)
class Parts:
    """What a run holds while it is open."""

    folder: Path
    policies: tuple[Trained, ...]
    """The main one first."""
    runner: Runner
    tracker: Tracker

    @property
    def ledger(self) -> Ledger:
        """The main policy's, whose checkpoint stands for those of all after as many steps."""
        return self.policies[0].ledger

    def steps_done(self) -> int:
        """A step is done when its metrics are recorded, which is the last thing it does."""
        return len(read_metrics(self.folder / "metrics.jsonl"))

    def last_step(self) -> int:
        """Of the newest checkpoint that every policy has."""
        return min(policy.ledger.last_step() for policy in self.policies)


@contextmanager
def opened(recipe: Recipe, run: str, *, on_policy: bool = True) -> Iterator[Parts]:
    """The parts of a run. What its user can mend is refused before anything is started.

    Rebuilt weights must give the recorded log-probabilities only where they sampled them.
    """
    roles = create_backends(recipe.roles, recipe.seed)
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
        main, *others = policies = policies_of(recipe, folder, service, on_policy=on_policy)
        tokenizer = service.tokenizer(main.ledger.at(0).sampler, recipe.model.base)
        chat = Chat(tokenizer, recipe.model.renderer, service.context(recipe.model.base))
        with (
            Runner(
                service,
                main.learner.sampler,
                player,
                chat,
                run=run,
                run_seed=recipe.seed,
                concurrency=recipe.rollouts.concurrency,
                timeout_seconds=recipe.rollouts.timeout_seconds,
                replay=recipe.rollouts.replay,
                max_calls=recipe.rollouts.max_calls,
                roles=roles,
                others={policy.name: policy.at for policy in others},
                listening=Listening.at(recipe.rollouts.listen),
                beside=routes_of(player),
            ) as runner,
            inviting(player, folder, runner.door),
            Tracker(recipe.tracking.project, run, values, folder / "wandb") as tracker,
        ):
            yield Parts(folder, policies, runner, tracker)


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
