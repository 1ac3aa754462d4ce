"""The recipe of reinforcement learning on an agent's rollouts; its values stand in prefect.yaml."""

from collections.abc import Iterator, Mapping, Set
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from ratchet.adapters.calls import POLICY, Sampling
from ratchet.adapters.door.roles import (
    FUNCTION,
    CallsOf,
    answerers,
    check_role,
    checkpoint_of,
    earlier_of,
    policy_of,
)
from ratchet.adapters.harness.agents import files_of, load_agent
from ratchet.adapters.places.cage import check_cage
from ratchet.adapters.process.program import name_program
from ratchet.adapters.programs.commands import warn_of_shown_keys, warn_once
from ratchet.flows.recipe.given_examples import Dataset
from ratchet.flows.recipe.run_recipe import RunRecipe, Teachers
from ratchet.tasks.algorithm.advantages import ADVANTAGES, find_advantage
from ratchet.tasks.algorithm.settings import check_source
from ratchet.tasks.examples.reading import Source
from ratchet.tasks.recording.scores import headline, is_scored, read_evaluation
from ratchet.tasks.settings.algorithm import BASE, Algorithm, CreditAssignment, names_checkpoint
from ratchet.tasks.settings.given import EXPERT, TEST, TRAIN
from ratchet.tasks.settings.presets import expand_preset
from ratchet.tasks.settings.rollouts import Answerer, Evaluation, Judge, PlaceOfRollouts, Rollouts
from ratchet.tasks.settings.section import Refusals
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.names import shard_name
from ratchet.tasks.storage.plan_record import Examples
from ratchet.tasks.storage.run_folder import RunError, RunFolder

if TYPE_CHECKING:  # they import the SDK, which takes a while
    from ratchet.tasks.datums import UpdateMethod
    from ratchet.tasks.given.given import GivenSource
    from ratchet.tasks.recovery.recorded_steps import StepSource, TrainedPolicy

HELD_OUT = {"path", "test_split", "splits", "held_out"}
"""Keys of a dataset that say which of its examples are held out."""

COMMAND = "command:"
PROGRAMS = ("command", "forks", "resident")
"""Kinds of agents that are the command line of a program."""


class Recipe(RunRecipe):
    """The recipe of `train` and of `replay`: reinforcement learning on an agent's rollouts."""

    plays_rollouts: ClassVar[bool] = True

    flow: str = "train"
    """The flow that the recipe is for."""

    agent: str
    """Agent: a file of `agents/`, `package.module:function`, `command:`, `forks:` or `resident:`
    and a command line, or `gem:` or `verifiers:` and the id of an environment (docs/agents.md)."""

    roles: dict[str, Answerer] = Field(default_factory=dict[str, Answerer])
    """Backend of each role of the agent: `policy`, which is trained in it, another policy that is
    trained beside it, as `policy:name`, a scripted `function:package.module:name`, LiteLLM's
    `openai/gpt-4o-mini`, or `URL#MODEL` of OpenAI's API. In self-play, `earlier:N` is the policy at
    the last multiple of N steps, and `pool:N` one that each step draws of those until then. With
    `who` and `when` a role has the calls that say so (docs/agents.md)."""

    # What each section is for, its own docstring says.
    dataset: Dataset
    rollouts: Rollouts = Rollouts()
    place: PlaceOfRollouts = PlaceOfRollouts()
    judge: Judge = Judge()
    algorithm: Algorithm = Algorithm()
    evaluation: Evaluation = Evaluation()

    @property
    def subject(self) -> str:
        kind, _, line = self.agent.partition(":")
        return name_program(line) if kind in PROGRAMS else self.agent

    @model_validator(mode="before")
    @classmethod
    def _preset_is_expanded(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {
            key: value.model_dump(exclude_unset=True) if isinstance(value, Algorithm) else value
            for key, value in values.items()
        }
        return expand_preset(given)

    @field_validator("roles")
    @classmethod
    def _roles_can_be_answered(cls, roles: dict[str, Answerer]) -> dict[str, Answerer]:
        for role, asked in roles.items():
            check_role(role, asked if isinstance(asked, str) else asked.who)
            if role == POLICY and not isinstance(asked, str):
                raise ValueError(
                    f"the role {POLICY} has the calls that no other role has, and needs no `when`; "
                    "give the other roles one"
                )
        return roles

    @property
    def answerers(self) -> dict[str, str]:
        return answerers(self.model_dump(include={"roles"})["roles"])

    def sent_calls(self) -> list[CallsOf]:
        """List the roles whose calls are known by what they say."""
        named = self.roles.items()
        return [asked.calls(role) for role, asked in named if not isinstance(asked, str)]

    def refusals(self) -> Refusals:
        yield from super().refusals()
        yield from self._refused_stream()
        yield from self._refused_calls()
        yield from self._refused_judge()
        yield (
            self.place.caged and not self.agent.startswith(COMMAND),
            f"place.cage {self.place.cage} with agent {self.agent}: only the program of a "
            f"{COMMAND} can be caged; write the agent as one, or give place.cage none",
        )
        for role, who in self.evaluation.roles.items():
            yield (
                checkpoint_of(who) is None or not self._is_a_player(role),
                f"evaluation.roles.{role} {who}: a role that a policy answers in training is "
                f"given checkpoint:base or checkpoint:RUN@STEP, and roles.{role} is "
                f"{self.answerers.get(role)}; leave it out, or mend one of them",
            )
        policies = self.policies()
        yield (
            self.algorithm.expert.given_texts and len(policies) > 1,
            f"algorithm.expert with roles that train {', '.join(policies)}: its texts train one "
            "policy; leave it out, or train one",
        )

    def check_agent(self) -> None:
        _, asked = self.plays()
        if self.roles:
            from ratchet.adapters.door.backends import create_backends  # imports LiteLLM's parts

            create_backends(self.answerers, self.seed)
        others = sorted(role for role in asked if role != POLICY)
        load_agent(self.agent, others, placed=self.place.is_given)
        if self.place.is_given:
            warn_of_shown_keys(self.agent)
        for one in self.sent_calls():
            if one.system is not None and not self._is_a_player(one.role):
                warn_once(
                    f"roles.{one.role} is chosen by what a message says, which the policy may say "
                    f"too: {self.answerers[one.role]} then answers it; give `when` a model or path"
                )
        if self.place.caged:
            check_cage()
        for judge in self.judges():
            load_agent(judge.agent or "")

    def check_algorithm(self) -> None:
        check_source(self.algorithm.loss)
        check_source(self.algorithm.advantage)

    def check_answering(self, bound: RunRecipe, run: str) -> None:
        """Refuse (RunError) checkpoints that answer if the weights' run is not bound to them."""
        for name, key in self.answering_checkpoints().items():
            if name not in bound.named_checkpoints():
                raise RunError(
                    f"{key} names the checkpoint {name}, but the run {run} has no copy of it, as "
                    "its recipe does not name it; give checkpoint:base, a model of LiteLLM, or "
                    "train that run by a recipe with the same role"
                )

    def _refused_stream(self) -> Refusals:
        algorithm, optimizer = self.algorithm, self.optimizer
        row, once = find_advantage(algorithm.advantage), optimizer.substeps * optimizer.epochs == 1
        by_batch = {
            f"algorithm.aggregation {algorithm.aggregation}": algorithm.aggregation
            in ("sum", "fixed"),
            f"algorithm.advantage {algorithm.advantage}": row.in_groups,
            "algorithm.rewards": algorithm.rewards is None,
            f"algorithm.trained_calls {algorithm.trained_calls}": algorithm.trained_calls is None,
            f"algorithm.kl.coefficient {algorithm.kl.coefficient:g}": algorithm.kl.coefficient == 0,
            "algorithm.teacher.models": not algorithm.teacher.models,
            "algorithm.expert": not algorithm.expert.given_texts,
            f"optimizer.substeps {optimizer.substeps}": once,
            f"optimizer.epochs {optimizer.epochs}": once,
        }
        whole = [name for name, known in by_batch.items() if not known]
        yield (
            self.rollouts.stream and whole != [],
            f"rollouts.stream with {' and '.join(whole)} would change the result, since a step's "
            "losses are known when all of its rollouts have ended; leave stream out, or give them "
            "their defaults",
        )

    def _refused_calls(self) -> Refusals:
        rollouts, algorithm = self.rollouts, self.algorithm
        alone, trained = rollouts.group_size == 1, algorithm.trained_calls
        yield (
            alone and not find_advantage(algorithm.advantage).alone,
            f"rollouts.group_size 1 with algorithm.advantage {algorithm.advantage}, which compares "
            "the rollouts of a group with each other, teaches nothing; give 2 or more, or one of: "
            f"{', '.join(name for name, row in ADVANTAGES.items() if row.alone)}",
        )
        yield (
            alone and rollouts.rounds > 1 and trained is None,
            f"rollouts.rounds {rollouts.rounds} with group_size 1: a round follows while too few "
            "groups have unequal rewards, which a rollout alone never has; give "
            "algorithm.trained_calls, or 1 round",
        )
        most = rollouts.rounds * rollouts.groups * rollouts.group_size * rollouts.max_calls
        yield (
            trained is not None and trained >= most,
            f"algorithm.trained_calls {trained} does nothing, since a step has at most {most} "
            "calls; give fewer, or leave it out",
        )

    def _refused_judge(self) -> Refusals:
        judge, rollouts, examiner = self.judge, self.rollouts, self.evaluation.judge
        for key, one in (("judge", judge), ("evaluation.judge", examiner)):
            yield (
                one.judges and one.ships and one.role not in self.roles,
                f"{key}.agent {one.agent} asks the role {one.role}, which nobody answers; give "
                f"roles.{one.role}: checkpoint:RUN@STEP, or a model of LiteLLM",
            )
        yield (
            examiner.judges and self._is_a_player(examiner.role),
            f"roles.{examiner.role} {self.answerers.get(examiner.role)} judges evaluations, and "
            "changes as it is trained; give checkpoint:RUN@STEP, or a model of LiteLLM",
        )
        sent = {calls.role for calls in self.sent_calls()}
        for one in self.judges():
            yield (
                one.role in sent,
                f"roles.{one.role} has the calls of the agent that say so, and a judge asks it at "
                "an address of its own; leave out its `when`, or give the judge another role",
            )
        who = self.answerers.get(judge.role)
        yield (
            judge.judges and policy_of(who or POLICY) not in (None, POLICY),
            f"roles.{judge.role} {who} would be a policy that nothing trains; give policy, "
            "checkpoint:RUN@STEP, or a model of LiteLLM",
        )
        unknown = {
            f"rollouts.rounds {rollouts.rounds}": rollouts.rounds > 1,
            "rollouts.stream": rollouts.stream,
            "algorithm.discount": self.algorithm.discount != 1,
        }
        given = [name for name, holds in unknown.items() if holds]
        yield (
            judge.judges and given != [],
            f"judge.agent {judge.agent} with {' and '.join(given)}, which needs the agent's own "
            "rewards; leave one of them out",
        )

    def sampling(self) -> Sampling:
        return self.rollouts.sampling()

    def measures(self) -> list[str]:
        evaluation = self.evaluation
        has = {"reward": True, "greedy": evaluation.greedy, "judged": evaluation.judge.judges}
        return [name for name, is_measured in has.items() if is_measured]

    def is_measured(self, run: RunFolder, step: int) -> bool:
        return is_scored(run.evaluation(f"{step:05d}"))

    def read_measured(
        self, run: RunFolder, step: int, select: str
    ) -> tuple[float | None, tuple[float, float] | None]:
        scores = read_evaluation(run.evaluation(f"{step:05d}"))
        found = headline(scores) if select == "reward" else scores[select].finished
        return found.mean, found.interval

    def read_examples(self, run: RunFolder, step: int, select: str) -> Examples:
        from ratchet.tasks.evaluations import played_means  # loads slowly, with DuckDB

        split = {"reward": "test", "greedy": "greedy"}.get(select)
        drawn = self.evaluation.drawn_by(self.seed)
        means = {} if split is None else played_means(run, shard_name(split, step))
        return {f"{drawn}/{place}": (reward, 1.0) for place, reward in means.items()}

    def scored_by(self) -> Iterator[str]:
        if self.algorithm.kl.coefficient > 0:
            yield f"algorithm.kl.coefficient {self.algorithm.kl.coefficient:g}"
        if any("://" not in model for model in self.teachers().models.values()):
            yield "algorithm.teacher.models"

    def measured_by(self, select: str) -> dict[str, Any]:
        """Map the keys by which held-out rollouts are played; a role may be fixed in evaluations.

        A judge of pairs compares with checkpoint 0, whose weights are then a part of the measure.
        """
        rollouts, judge = self.rollouts, self.evaluation.judge
        sampling = rollouts.greedy_sampling() if select == "greedy" else rollouts.sampling()
        asked = {*self.plays()[1], *(self.plays(judge)[1] if judge.judges else ())}
        fixed = self.evaluation.roles
        asked |= {calls.role for calls in self.sent_calls()}
        answering = {
            role: self.answerers[role] for role in self.roles if role in asked - fixed.keys()
        }
        said = self.model_dump(mode="json", include={"roles"})["roles"]
        by_base = BASE in map(checkpoint_of, (*answering.values(), *fixed.values()))
        beside_start = select != "greedy" and judge.judges and judge.shown() == "pair"
        weights = {"base"} if by_base else set[str]()
        weights |= {"base", "start"} if beside_start else set()
        played = {"max_calls": rollouts.max_calls, "timeout_seconds": rollouts.timeout_seconds}
        return {
            "evaluation": self.evaluation.model_dump(mode="json"),
            "agent": self.agent,
            "roles": {role: said[role] for role in answering},
            "dataset": self.dataset.model_dump(mode="json", include=HELD_OUT),
            **({"place": self.place.model_dump(mode="json")} if self.place.is_given else {}),
            "rollouts": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                **played,
            },
            "model": self.model.model_dump(include=weights),
        }

    def changes_no_result(self) -> Set[str]:
        places = {f"rollouts.{key}" for key in ("runner", "cluster", "door", "most_failed")}
        batches = set() if self.rollouts.stream else {"rollouts.batches"}
        return super().changes_no_result() | places | batches | {"algorithm.preset"}

    @property
    def lag(self) -> int:
        """Steps by which the evaluation of a checkpoint may be behind the step that it samples."""
        return self.rollouts.lag

    def steps_of(self, epochs: float) -> int:
        """Return the steps whose groups are so many passes over the training examples."""
        examples = len(self.train_split().examples())
        return ceil(Fraction(str(epochs)) * examples / self.rollouts.groups)

    def sources(self) -> dict[str, Source]:
        own = self.dataset.sources(self.evaluation.drawn_by(self.seed))
        return own if self.holds_out() else {TRAIN: own[TRAIN]}

    def data_sets(self, *, bound: bool) -> list[str | None]:
        return [self.dataset.path, None if bound else self.algorithm.expert.path]

    def files(self) -> dict[str, list[Path]]:
        scripts = [who for who in self.answerers.values() if who.startswith(FUNCTION)]
        names = [self.agent, *(one.agent or "" for one in self.judges())]
        own: dict[str, list[Path]] = {}
        for name in (*names, *(who.removeprefix(FUNCTION) for who in scripts)):
            own |= files_of(name)
        if self.place.is_given:
            rows = [row for source in self.sources().values() for row in source.examples()]
            own |= self.place.files(row["example"] for row in rows)
        return own

    def holds_out(self) -> bool:
        return self.dataset.holds_out()

    def train_split(self) -> Source:
        return self.sources()[TRAIN]

    def held_out_split(self) -> Source:
        """Return the examples that are held out; their reading refuses a set without any."""
        return self.dataset.sources(self.evaluation.drawn_by(self.seed))[TEST]

    def given_examples(self) -> "dict[str, GivenSource]":
        """Map the split of the expert's texts, if there is an expert, to the texts."""
        expert = self.algorithm.expert
        if not expert.given_texts:
            return {}
        from ratchet.tasks.given.selections import ChosenRollouts, queries_of
        from ratchet.tasks.given.texts import WrittenTexts

        if queries := queries_of(expert, self.model.base, EXPERT):
            return {TRAIN: ChosenRollouts(queries[TRAIN])}
        return {TRAIN: WrittenTexts(expert.files()[TRAIN], expert.trained)}

    def queried_runs(self) -> Iterator[str]:
        yield from self.algorithm.expert.runs

    def plays(self, judge: Judge | None = None) -> tuple[str, list[str]]:
        """Return the agent that plays rollouts, or a judge, and the roles with an address."""
        if judge is not None:
            return judge.agent or self.agent, [judge.role if judge.role in self.roles else POLICY]
        others = {one.role for one in (*self.judges(), *self.sent_calls())}
        return self.agent, [role for role in {POLICY: POLICY, **self.roles} if role not in others]

    def judges(self) -> list[Judge]:
        """List the judges of training and of evaluations that there are."""
        return [one for one in (self.judge, self.evaluation.judge) if one.judges]

    def policies(self) -> dict[str, tuple[str, ...]]:
        trained: dict[str, list[str]] = {POLICY: [POLICY]}
        for role, who in sorted(self.answerers.items(), key=lambda item: (item[1], item[0])):
            name = policy_of(who)
            asks = self.judge.judges and role == self.judge.role
            if name is not None and role != POLICY and not asks:
                trained.setdefault(name, []).append(role)
        return {name: tuple(roles) for name, roles in trained.items()}

    def _is_a_player(self, role: str) -> bool:
        """Return whether the policy, or an earlier one, answers a role in training."""
        who = self.answerers.get(role, "")
        return policy_of(who) is not None or earlier_of(who) is not None

    def earlier(self, step: int) -> dict[str, int]:
        """Map who answers a role as an earlier policy to its checkpoint.

        It is that of rollouts which checkpoint `step` samples.
        """
        found = filter(None, map(earlier_of, self.answerers.values()))
        return {one.name: one.checkpoint(step, self.seed) for one in found}

    def answering(self) -> dict[str, str]:
        """Map the keys that say who answers a role to who does."""
        trained = {f"roles.{role}": who for role, who in self.answerers.items()}
        held_out = {f"evaluation.roles.{role}": who for role, who in self.evaluation.roles.items()}
        return {**trained, **held_out}

    def answering_checkpoints(self) -> dict[str, str]:
        """Map each checkpoint of another run that answers a role to the key that names it."""
        return {
            name: key
            for key, who in self.answering().items()
            if (name := checkpoint_of(who)) is not None and names_checkpoint(name)
        }

    def teachers(self) -> Teachers:
        teacher = self.algorithm.teacher
        models, splits = teacher.named(), (TRAIN,)
        return Teachers("algorithm.teacher.models", models, teacher.reads, teacher.by, splits)

    def named_checkpoints(self) -> dict[str, str]:
        name = self.algorithm.kl.reference
        own = {name: "algorithm.kl.reference"} if names_checkpoint(name) else {}
        return own | self.answering_checkpoints() | super().named_checkpoints()

    def credit(self) -> CreditAssignment:
        smallest = self.rollouts.min_group_size()
        return CreditAssignment(self.algorithm, smallest, self.judge.judges, self.seed)

    def update_method(self) -> "UpdateMethod":
        algorithm, stream = self.algorithm, self.rollouts.stream
        terms = {"expert": algorithm.expert, "divergence": algorithm.kl}
        return self.minimize(algorithm.loss, algorithm.loss_settings, by_batch=stream, **terms)

    def source(
        self, run: RunFolder, policy: "TrainedPolicy", recipes: ByStep[RunRecipe]
    ) -> "StepSource":
        """Return what restores the datums of a policy: the recorded rollouts."""
        from ratchet.tasks.given.given import Drawing, GivenSteps
        from ratchet.tasks.given.texts import Texts
        from ratchet.tasks.recovery.rollout_steps import RolloutSteps

        expert: StepSource | None = None
        if self.algorithm.expert.given_texts:
            drawings = recipes.make(Recipe, lambda of: Drawing(of.algorithm.expert, of.seed))
            expert = GivenSteps(Texts(run.expert_texts), run.expert, drawings)
        return RolloutSteps(run, policy, recipes.make(Recipe, Recipe.credit), expert)
