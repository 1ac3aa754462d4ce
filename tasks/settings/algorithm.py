"""How rewards become advantages and a loss: the algorithm of a recipe, and its terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from ratchet.adapters.network.addresses import check_place
from ratchet.tasks.algorithm.advantages import (
    ADVANTAGES,
    Aggregation,
    check_advantage,
    find_advantage,
)
from ratchet.tasks.algorithm.divergences import (
    ESTIMATORS,
    TEACHER_ESTIMATORS,
    Placement,
    Source,
    check_placement,
    check_teaching,
)
from ratchet.tasks.algorithm.losses import (
    TOKEN_LOSSES,
    advantage_factor,
    check_loss,
    is_regularized,
)
from ratchet.tasks.algorithm.settings import PATTERN, bind_source, is_as_bound
from ratchet.tasks.algorithm.shaping import check_query
from ratchet.tasks.examples.reading import check_reads
from ratchet.tasks.settings.given import Expert
from ratchet.tasks.settings.presets import PRESETS, find_preset
from ratchet.tasks.settings.section import OTHERS, Needs, Refusals, Section

BASE = "base"
"""The untrained model, as a reference and as what an evaluation scores."""


def names_checkpoint(policy: str) -> bool:
    """Return whether a policy is named as RUN@STEP: neither the base nor another base model."""
    return policy != BASE and "/" not in policy


SettingValue = Annotated[float | str, Field(union_mode="left_to_right")]
"""A number, also one that the command line gives as text, or a name."""


class Divergence(Section):
    """Penalty for divergence from a reference policy."""

    source: ClassVar[Source] = "references"
    beta: ClassVar[float] = 0.5

    coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the penalty; 0 has none, and then the reference computes nothing."""

    reference: str = BASE
    """Policy that is the reference: `base`, the untrained model; `RUN@STEP`, a checkpoint; or
    another base model of the service, by a name with a slash, that has the same tokens."""

    estimator: str = "k1"
    """Estimator of the divergence at a token (docs/algorithms.md): k1, k2, k3, low_var_kl, abs,
    and jsd, with β 1/2."""

    placement: Placement = "advantage"
    """Place of the penalty: each token's `advantage`, the `reward` of its call, or the `loss`, as
    a term of its own, which takes a pass more. Each estimator has its places: k1 the first two,
    jsd the first, all others the loss, which is then the default."""

    @model_validator(mode="before")
    @classmethod
    def _placement_is_one_of_the_estimator(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "placement" in values:
            return values
        row = ESTIMATORS.get(str(values.get("estimator", "k1")))
        place = row.placements[0] if row else "advantage"
        return values if place == "advantage" else {**values, "placement": place}

    requirements = (Needs(OTHERS, "coefficient"),)

    def refusals(self) -> Refusals:
        check_placement(self.estimator, self.placement)
        return super().refusals()

    @property
    def in_loss(self) -> bool:
        """Whether the penalty is a term of the loss."""
        return self.coefficient > 0 and self.placement == "loss"


class Teacher(Section):
    """Teachers whose log-probabilities of the sampled tokens are a term of their advantages."""

    source: ClassVar[Source] = "teachers"
    placement: ClassVar[Placement] = "advantage"

    models: tuple[str, ...] = ()
    """Teachers: `RUN@STEP`, a checkpoint; another base model of the service, by a name with a
    slash; or `URL#MODEL`, a base model of another service, or one of a server such as vLLM, which
    scores prompts. Their key is RATCHET_TEACHER_KEY. All have the policy's tokens. Where there are
    several, each is `NAME=MODEL`."""

    by: str | None = None
    """The column of an example that names its teacher, where there are several."""

    reads: str | None = None
    """Text that the teachers read before each conversation, as a system message, and the policy
    does not; `$column` is a column of the example, such as `A worked answer: $answer`."""

    coefficient: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the term in each token's advantage, beside the comparison of rewards."""

    divergence: Annotated[
        str,
        WithJsonSchema({"type": "string", "enum": [*TEACHER_ESTIMATORS]}),
        AfterValidator(check_teaching),
    ] = "reverse_kl"
    """Divergence from the teacher that is lessened (docs/algorithms.md): `reverse_kl` or `jsd`."""

    beta: float = Field(default=0.5, gt=0, lt=1)
    """β of the divergence jsd: the teacher's share of the mixture."""

    requirements = (Needs(OTHERS, "models"), Needs("beta", "divergence", "jsd"))

    def refusals(self) -> Refusals:
        if self.reads is not None:
            check_reads(self.reads)
        several = len(self.models) > 1
        yield (
            several != (self.by is not None),
            f"algorithm.teacher.by {self.by} with {len(self.models)} models: the column chooses "
            "among several teachers; give both, or neither",
        )
        yield (
            not all(("=" in model) == several for model in self.models)
            or len(self.named()) < len(self.models),
            f"algorithm.teacher.models {', '.join(self.models)}: several teachers have a name "
            "each, and one has none; give NAME=MODEL of each, or one MODEL",
        )
        places = {check_place(model) for model in self.named().values() if "://" in model}
        yield (
            len(places) > 1,
            f"algorithm.teacher.models are of the services {', '.join(sorted(places))}, and there "
            "is one key, RATCHET_TEACHER_KEY; give models of one of them",
        )

    def named(self) -> dict[str, str]:
        """Map the name of each teacher to its model; one alone has the model's."""
        parts = [model.rpartition("=") for model in self.models]
        return {name or model: model for name, _, model in parts}

    @property
    def estimator(self) -> str:
        """Estimator whose penalty has the gradient of the divergence."""
        return TEACHER_ESTIMATORS[self.divergence]


Penalty = Divergence | Teacher
"""Penalty of each sampled token for its divergence from another policy.

The `source` has the other policy's log-probabilities, and only the estimator jsd reads `beta`.
"""


def _own_or(table: Mapping[str, object]) -> WithJsonSchema:
    """Return the schema of a name: of a table, or of a function of the project."""
    named = {"type": "string", "enum": [*table]}
    return WithJsonSchema({"anyOf": [named, {"type": "string", "pattern": PATTERN}]})


class Algorithm(Section):
    """Path from rewards to a loss."""

    preset: Annotated[
        str | None,
        WithJsonSchema({"anyOf": [{"type": "string", "enum": [*PRESETS]}, {"type": "null"}]}),
    ] = None
    """Algorithm, by the field's name (docs/algorithms.md): its values lie under the recipe's."""

    advantage: Annotated[str, _own_or(ADVANTAGES), AfterValidator(bind_source)] = "standardized"
    """Comparison of rewards, by name (docs/algorithms.md): `standardized` is GRPO's, `centred` Dr.
    GRPO's, `leave_one_out` RLOO's; or a function of the project, as `module:function`."""

    advantage_settings: dict[str, SettingValue] = Field(default_factory=dict[str, SettingValue])
    """The advantage's own settings, such as asymre's shift; one it does not read is refused."""

    loss: Annotated[str, _own_or(TOKEN_LOSSES), AfterValidator(bind_source)] = "importance_sampling"
    """Name of the loss (docs/algorithms.md). Tinker computes its own losses in one pass. All
    others, and functions of the project, need one more forward pass."""

    loss_settings: dict[str, SettingValue] = Field(default_factory=dict[str, SettingValue])
    """The loss's own settings, such as ppo's clip_low_threshold; no other is taken."""

    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount γ of later rewards at a call, if an agent rewards its calls; below 1, a reward that
    is one number is the reward of the last call."""

    aggregation: Aggregation = "sum"
    """Tinker sums a loss over tokens; `token_mean` divides it by the step's tokens, `rollout_mean`
    each rollout's by its tokens and by the rollouts, `rollout_sum` by the rollouts, and `fixed` by
    the divisor."""

    divisor: float | None = Field(default=None, gt=0, le=1e12)
    """The number by which aggregation `fixed` divides a loss."""

    rewards: str | None = None
    """Query that shapes or filters the rewards of a step before they are compared: a select over
    the table `rewards` (docs/algorithms.md)."""

    trained_calls: int | None = Field(default=None, ge=1, le=10**9)
    """The most calls of a step that are trained, drawn by chance after all were compared; further
    rounds are played while there are fewer."""

    kl: Divergence = Divergence()
    teacher: Teacher = Teacher()
    expert: Expert = Expert()

    entropy_coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of an entropy bonus: -log q of each sampled token, an estimate of the entropy, is
    added to its advantage."""

    @field_validator("preset")
    @classmethod
    def _preset_is_in_its_table(cls, preset: str | None) -> str | None:
        if preset is not None:
            find_preset(preset)
        return preset

    @field_validator("rewards")
    @classmethod
    def _the_query_runs(cls, query: str | None) -> str | None:
        if query is not None:
            check_query(query)
        return query

    def penalties(self) -> tuple[Penalty, ...]:
        """Return the terms that lessen rewards or advantages: the reference's, the teachers'."""
        kl = (self.kl,) if self.kl.coefficient else ()
        return (*kl, *((self.teacher,) if self.teacher.models else ()))

    @property
    def regularized(self) -> bool:
        """Whether sampled tokens of zero advantage have a loss too."""
        return self.kl.in_loss or is_regularized(self.loss, self.loss_settings)

    requirements = (Needs("divisor", "aggregation", "fixed", each_other=True),)

    def refusals(self) -> Refusals:
        check_advantage(self.advantage, self.advantage_settings)
        check_loss(self.loss, self.loss_settings)
        yield (
            self.discount != 1 and not find_advantage(self.advantage).discounts,
            f"algorithm.discount {self.discount:g} does nothing with advantage {self.advantage}, "
            "which compares the rewards of rollouts; leave it out, or give another advantage",
        )
        unread = self.advantage == "zero"
        other = any(penalty.placement != "reward" for penalty in self.penalties())
        other |= self.expert.given_texts
        yield (
            unread and not other and self.entropy_coefficient == 0,
            "algorithm.advantage zero reads no rewards, and no other term of a token's advantage "
            "is given, so that nothing is learnt; give algorithm.teacher.models, an expert, "
            "algorithm.kl.coefficient with placement advantage, or another advantage",
        )
        terms = {
            "algorithm.kl": self.kl.coefficient > 0 and self.kl.placement == "advantage",
            "algorithm.teacher": bool(self.teacher.models),
            "algorithm.entropy_coefficient": self.entropy_coefficient > 0,
        }
        given = ", ".join(name for name, is_given in terms.items() if is_given)
        yield (
            given != ""
            and is_as_bound(self.loss)
            and advantage_factor(self.loss, self.loss_settings) == 0,
            f"algorithm.loss {self.loss} weighs a token by more than its advantage, so that what "
            f"{given} adds to the advantage has not its own gradient; give loss "
            "importance_sampling, leave it out, or keep the policy near its reference by "
            "algorithm.kl.estimator k2, a term of its own",
        )
        yield (
            unread and self.kl.placement == "reward",
            "algorithm.kl.placement reward does nothing with advantage zero, which reads no "
            "rewards; give placement advantage",
        )


@dataclass(frozen=True)
class CreditAssignment:
    """Method by which rewards become the advantages of sampled tokens.

    A group with fewer than `min_group_size` rollouts to train on is left out, and so is a
    trajectory of zero advantage, unless the algorithm's loss is regularized. The rewards are a
    judge's if the step is `judged`. The algorithm's `trained_calls` are drawn by the `seed`.
    """

    algorithm: Algorithm
    min_group_size: int = 1
    judged: bool = False
    seed: int = 0
