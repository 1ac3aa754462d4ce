"""The recipe: everything that a run depends on. Its values are written in prefect.yaml."""

import hashlib
import json
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from tinker import AdamParams
from tinker.types import LossFnType

from adapters.addresses import check_runner
from adapters.calls import POLICY
from adapters.door.roles import check_role, policy_of
from adapters.tinker.live_policy import UpdateMethod
from tasks.advantages import ADVANTAGES, CreditAssignment, find_advantage
from tasks.losses import LOSSES, check_loss

CHANGES_NO_RESULT: Any = {
    "service": True,
    "checkpoints": {"probe_tolerance"},
    "rollouts": {"batches", "runner", "cluster", "door"},
}
ADDED: dict[str, dict[str, Any]] = {
    "rollouts": {"lag": 0, "order": "shard", "stream": False, "weights": "snapshot"}
}
"""Keys that older recipes lack, and the values that stand for what those did."""


class Section(BaseModel):
    """A part of the recipe: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Dataset(Section):
    """Examples that the agent is asked."""

    path: str
    """A CSV, JSON-lines or Parquet file; its `split` column says train or test."""

    columns: tuple[str, ...] = ()
    """The columns the agent reads; a file without one of them is refused before anything runs."""


class Model(Section):
    """The policy: a base model and the LoRA that is trained on it."""

    base: str = "local/tiny-chat"
    """A model of the Tinker service, or, on the engine, a shipped id, a hub name or a directory."""

    renderer: str = "qwen3"
    """Renderer of messages as tokens: a name of the `renderers` package."""

    lora_rank: int = Field(default=16, ge=1, le=256)
    """Rank of the LoRA weights."""

    train_attention: bool = True
    """Train a LoRA on the attention's linear layers."""

    train_mlp: bool = True
    """Train a LoRA on the feed-forward layers."""

    train_unembedding: bool = True
    """Train a LoRA on the output layer."""


class Rollouts(Section):
    """Settings of a step's rollouts."""

    groups: int = Field(default=16, ge=1)
    """Examples a step; each becomes one group."""

    group_size: int = Field(default=8, ge=2)
    """Rollouts of each example, whose rewards are compared with each other."""

    concurrency: int = Field(default=128, ge=1)
    """Rollouts of one step that run at the same time."""

    batches: int = Field(default=1, ge=1)
    """Rollout batches of a step: parallel tasks that fail, retry and resume apart. Tokens, datums
    and weights are the same with any number."""

    lag: int = Field(default=0, ge=0)
    """Updates by which sampling is behind: the rollouts of step s are sampled by checkpoint
    max(s - lag, 0), while the steps before s are trained."""

    order: Literal["shard", "arrival"] = "shard"
    """Rollouts of a step: those of its `shard`, so that every run of the recipe is the same; or the
    first batches on `arrival`, at most `lag` updates behind, which no other run repeats."""

    weights: Literal["snapshot", "inflight"] = "snapshot"
    """Weights of a batch: those of the checkpoint by which it began; or `inflight` ones, which each
    update changes while rollouts are played, so that no other run repeats them."""

    runner: Literal["threads", "dask", "ray"] = "threads"
    """Where batches are played: in threads of the flow's process, or by the processes of a Dask
    cluster (docs/scaling.md)."""

    cluster: str | None = None
    """Address of the Dask cluster's scheduler, such as tls://10.0.0.1:8786; without one, the flow
    starts a cluster of processes on its own machine."""

    door: str | None = None
    """URL at which the cluster's workers reach the flow, such as https://10.0.0.2:8600; without
    one, only workers on the flow's machine reach it."""

    timeout_seconds: float = Field(default=120, gt=0)
    """A rollout whose agent takes longer has failed; waiting for the model's answers is free."""

    max_tokens: int = Field(default=64, ge=1)
    """The most tokens one call may sample."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature of the policy; losses assume 1."""

    stream: bool = False
    """Submit each batch's forward-backward as soon as its rollouts have ended, not all at once. The
    weights are the same but for the rounding of sums, which then depends on `batches`."""

    replay: bool = True
    """Give a rollout that is started again the answers that it had, for as long as it asks the
    same; if false, they are sampled again."""

    max_calls: int = Field(default=100, ge=1)
    """The most calls one rollout may make; any further one is refused, and counted."""

    partial_groups: Literal["wait", "drop_group", "use_rest"] = "use_rest"
    """Treatment of a group with failed rollouts: `use_rest` trains on the others, `drop_group` on
    none of them; `wait` plays the failed ones again, and then uses the rest."""

    attempts: int = Field(default=1, ge=1)
    """Most attempts at a rollout that fails; for `wait`, 2 or more."""

    minimum_group: int = Field(default=2, ge=2)
    """Size below which a group is not trained; `drop_group` trains whole groups only."""

    @model_validator(mode="after")
    def _groups_are_treated_as_asked(self) -> Self:
        waits = self.partial_groups == "wait"
        if waits != (self.attempts > 1):
            raise ValueError(
                f"partial_groups {self.partial_groups} with attempts {self.attempts}: one without "
                "the other does nothing; to play failed rollouts again give wait, and 2 or more"
            )
        if self.partial_groups == "drop_group" and self.minimum_group != 2:
            raise ValueError(
                f"minimum_group {self.minimum_group} would be ignored by drop_group, which trains "
                "whole groups only; leave it out, or use_rest"
            )
        if self.minimum_group > self.group_size:
            raise ValueError(
                f"minimum_group {self.minimum_group} is more than group_size {self.group_size}, "
                "so no group would be trained"
            )
        return self

    @model_validator(mode="after")
    def _batches_can_be_played_there(self) -> Self:
        check_runner(self.runner, self.cluster, self.door)
        return self

    @model_validator(mode="after")
    def _overlap_does_something(self) -> Self:
        if self.order == "arrival" and self.lag == 0:
            raise ValueError(
                "order arrival with lag 0 does nothing, since a step waits for all of its batches; "
                "give a lag of 1 or more, or order shard"
            )
        if self.weights == "inflight" and self.lag == 0:
            raise ValueError(
                "weights inflight with lag 0 does nothing, since no update is made while rollouts "
                "are played; give a lag of 1 or more, or weights snapshot"
            )
        if self.stream and (self.order == "arrival" or self.batches == 1):
            raise ValueError(
                f"stream with order {self.order} and batches {self.batches} does nothing, since a "
                "step begins when all of its rollouts have ended; give order shard and 2 batches "
                "or more, or leave stream out"
            )
        return self

    def not_reproducible(self) -> list[str]:
        """List why another run of the recipe would not have the same weights."""
        reasons = {
            "steps are made of batches as they arrive": self.order == "arrival",
            "updates change the weights of running rollouts": self.weights == "inflight",
        }
        return [f"{reason}: no other run repeats it" for reason, holds in reasons.items() if holds]

    def steps_under_way(self) -> int:
        """Return of how many steps the batches are played at the same time."""
        return 1 if self.order == "arrival" else self.lag + 1

    def concurrency_of_batch(self) -> int:
        """Return how many rollouts of one batch run at the same time."""
        return max(1, self.concurrency // self.batches)

    def min_group_size(self) -> int:
        """Return the size below which a group is not trained on."""
        return self.group_size if self.partial_groups == "drop_group" else self.minimum_group


class Algorithm(Section):
    """Path from rewards to a loss."""

    advantage: Annotated[str, WithJsonSchema({"type": "string", "enum": [*ADVANTAGES]})] = (
        "standardized"
    )
    """Rewards less their group's mean, or less the mean of the group's others (RLOO);
    `standardized` divides by the group's deviation as well (GRPO)."""

    loss: Annotated[str, WithJsonSchema({"type": "string", "enum": [*LOSSES]})] = (
        "importance_sampling"
    )
    """Tinker's name of the loss."""

    loss_settings: dict[str, float] = {}
    """The loss's own numbers, such as ppo's clip_low_threshold; one it does not read is refused."""

    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount γ of later rewards at a call, if an agent rewards its calls; below 1, a reward that
    is one number is the reward of the last call."""

    normalise: Literal["none", "tokens", "rollouts"] = "none"
    """Tinker sums a loss over tokens; divide it by the step's tokens, or by its rollouts."""

    @model_validator(mode="after")
    def _advantage_and_loss_are_in_their_tables(self) -> Self:
        find_advantage(self.advantage)
        check_loss(self.loss, self.loss_settings, self.normalise)
        return self


class Optimizer(Section):
    """AdamW, as Tinker runs it."""

    learning_rate: float = Field(gt=0)
    """Step size; LoRA wants about ten times that of full training."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of the LoRA weights."""

    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Gradients with a larger norm are scaled down to it; 0 leaves them."""


class Evaluation(Section):
    """Settings of the scoring of held-out examples."""

    every: int = Field(default=0, ge=0)
    """Score after every so many steps; 0 scores only before the first and after the last."""

    examples: int = Field(default=128, ge=1)
    """Held-out examples, the first of the test split in a seeded order; all if it has fewer."""

    rollouts: int = Field(default=1, ge=1)
    """Sampled rollouts of each example; with k of them pass@1 to pass@k are reported."""

    threshold: float = 1.0
    """A rollout passes, for pass@k, if its reward is at least this."""

    greedy: bool = True
    """Run each example once at temperature 0 as well."""

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` is scored."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


class Checkpoints(Section):
    """Settings of the saved weights."""

    every: int = Field(default=5, ge=1)
    """Save weights and optimizer after every so many steps; the last is always saved."""

    ttl_seconds: int | None = Field(default=None, ge=3600)
    """Seconds for which the service keeps what a run saves; empty keeps it until it is deleted."""

    probe_tolerance: float | None = Field(default=1e-4, ge=0)
    """Largest difference of rebuilt weights to recorded log-probabilities; empty only reports it.
    A service that samples in another precision than it trains needs more."""

    def due(self, step: int, steps: int) -> bool:
        """Return whether checkpoint `step` of `steps` saves the training state."""
        return step == steps or step % self.every == 0


class ServicePatience(Section):
    """Patience with the Tinker service."""

    timeout_seconds: float = Field(default=600, gt=0)
    """The longest wait for one answer; then the task fails, and is retried on a new client."""


class Tracking(Section):
    """Weights & Biases, beside the run's own metrics."""

    project: str | None = None
    """The project to log to; empty logs nowhere. Without WANDB_API_KEY the run is kept offline."""


class Recipe(Section):
    """Everything a run depends on."""

    agent: str
    """Agent: a module of `agents/`, `package.module:function`, `command:` and its words, or
    `gem:` or `verifiers:` and the id of an environment (docs/agents.md)."""

    steps: int = Field(ge=1)
    """Optimizer steps."""

    seed: int = Field(default=0, ge=0)
    """The one seed; all others derive from it."""

    roles: dict[str, str] = {}
    """Backend of each role of the agent: `policy`, which is trained in it, another policy that is
    trained beside it, as `policy:name`, a scripted `function:package.module:name`, or a model of
    LiteLLM's, such as `openai/gpt-4o-mini`."""

    # What each section is for, its own docstring says.
    dataset: Dataset
    model: Model = Model()
    rollouts: Rollouts = Rollouts()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    service: ServicePatience = ServicePatience()
    tracking: Tracking = Tracking()

    @field_validator("roles")
    @classmethod
    def _roles_can_be_answered(cls, roles: dict[str, str]) -> dict[str, str]:
        for role, who in roles.items():
            check_role(role, who)
        return roles

    @model_validator(mode="after")
    def _passes_are_of_the_scale_of_the_step(self) -> Self:
        if self.rollouts.stream and self.algorithm.normalise != "none":
            raise ValueError(
                f"rollouts.stream with algorithm.normalise {self.algorithm.normalise} would change "
                "the result, since a step's divisor is known when all of its rollouts have ended; "
                "give normalise none, or leave stream out"
            )
        return self

    def policies(self) -> dict[str, tuple[str, ...]]:
        """Map each policy to the roles that it is trained in, the main one first."""
        trained: dict[str, list[str]] = {POLICY: [POLICY]}
        for role, who in sorted(self.roles.items(), key=lambda item: (item[1], item[0])):
            name = policy_of(who)
            if name is not None and role != POLICY:
                trained.setdefault(name, []).append(role)
        return {name: tuple(roles) for name, roles in trained.items()}

    def credit(self) -> CreditAssignment:
        """Return the credit assignment: how rewards become advantages."""
        algorithm, min_group_size = self.algorithm, self.rollouts.min_group_size()
        return CreditAssignment(
            algorithm.advantage, algorithm.normalise, min_group_size, algorithm.discount
        )

    def update_method(self) -> UpdateMethod:
        """Return the loss, its settings and the optimizer."""
        loss = cast(LossFnType, self.algorithm.loss)
        optimizer = AdamParams(**self.optimizer.model_dump())
        return UpdateMethod(loss, self.algorithm.loss_settings, optimizer, self.rollouts.stream)

    def fingerprint(self) -> str:
        """Hash the recipe's canonical JSON by SHA-256; a run is bound to the hash.

        Keys that change no result are left out, so that they may change when a run continues; and
        ADDED ones that change nothing, so that older runs can continue.
        """
        values = self.model_dump(mode="json", exclude=CHANGES_NO_RESULT)
        if self.rollouts.order == "arrival" or self.rollouts.stream:
            values["rollouts"]["batches"] = self.rollouts.batches
        for section, added in ADDED.items():
            for key, value in added.items():
                if values[section][key] == value:
                    del values[section][key]
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
