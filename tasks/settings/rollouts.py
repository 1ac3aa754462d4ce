"""Rollouts of a recipe: how and where they are played, answered and judged; held-out ones too."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ratchet.adapters.calls import PATHS, Sampling
from ratchet.adapters.door.roles import ROLE_NAME, CallsOf
from ratchet.adapters.network.addresses import check_runner
from ratchet.adapters.places.filling import folders_of
from ratchet.adapters.places.place import HOME, WORK
from ratchet.adapters.player_protocol import PlaceSettings
from ratchet.adapters.process.program import project_files
from ratchet.adapters.project.modules import locate
from ratchet.adapters.rewards import LARGEST
from ratchet.tasks.settings.run import HeldOut
from ratchet.tasks.settings.section import (
    LONGEST_SECONDS,
    MOST_ROLLOUTS,
    OTHERS,
    Needs,
    Refusals,
    Section,
)

SHIPPED = "judge:"
"""Prefix of the name of a judge that ships with Ratchet."""

Sees = Literal["group", "pair", "rollout"]
SHIPPED_SEE: Mapping[str, Sees] = {
    "judge:pairs": "pair",
    "judge:group": "group",
    "judge:criteria": "rollout",
}
"""What each shipped judge is shown at once."""


STEP_LIMITS = {
    "AgentMaxStepsError": 0.0,  # smolagents
    "GraphRecursionError": 0.0,  # LangGraph
    "LlmCallsLimitExceededError": 0.0,  # Google's ADK
    "MaxTurnsExceeded": 0.0,  # OpenAI's Agents SDK
    "ModelCallLimitExceededError": 0.0,  # LangChain
    "RecursionError": 0.0,  # CrewAI's flows
    "ToolCallLimitExceededError": 0.0,  # LangChain
    "UsageLimitExceeded": 0.0,  # Pydantic AI
}
"""Errors by which frameworks end a rollout at a limit of steps, and their rewards."""
RewardedErrors = dict[
    Annotated[str, Field(pattern=r"^\w+$")], Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None
]


class Rollouts(Section):
    """Settings of a step's rollouts."""

    groups: int = Field(default=16, ge=1, le=MOST_ROLLOUTS)
    """Examples a step; each becomes one group."""

    rounds: int = Field(default=1, ge=1, le=10_000)
    """Most rounds of a step: while fewer than `groups` groups have unequal rewards, as many further
    examples are played (DAPO's dynamic sampling)."""

    group_size: int = Field(default=8, ge=1, le=MOST_ROLLOUTS)
    """Rollouts of each example, whose rewards are compared with each other; 1 is for an advantage
    that compares over the whole step."""

    concurrency: int = Field(default=128, ge=1, le=100_000)
    """Rollouts of one step that run at the same time."""

    batches: int = Field(default=1, ge=1, le=10_000)
    """Rollout batches of a step: parallel tasks that fail, retry and resume apart. Tokens, datums
    and weights are the same with any number."""

    lag: int = Field(default=0, ge=0, le=10_000)
    """Updates by which sampling is behind: the rollouts of step s are sampled by checkpoint
    max(s - lag, 0), while the steps before s are trained."""

    runner: Literal["threads", "dask"] = "threads"
    """Where batches are played: in threads of the flow's process, or by the processes of a Dask
    cluster (docs/scaling.md)."""

    cluster: str | None = None
    """Address of the Dask cluster's scheduler, such as tls://10.0.0.1:8786; without one, the flow
    starts a cluster of processes on its own machine."""

    door: str | None = None
    """URL at which the cluster's workers reach the flow, such as https://10.0.0.2:8600; without
    one, only workers on the flow's machine reach it."""

    timeout_seconds: float = Field(default=120, gt=0, le=LONGEST_SECONDS)
    """A rollout whose agent takes longer has failed; waiting for the model's answers is free."""

    max_tokens: int = Field(default=64, ge=1, le=10_000_000)
    """The most tokens one call may sample."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature of the policy; losses assume 1."""

    stream: bool = False
    """Submit each batch's forward-backward as soon as its rollouts have ended, not all at once. The
    weights are the same but for the rounding of sums, which then depends on `batches`."""

    max_calls: int = Field(default=100, ge=1, le=1_000_000)
    """The most calls one rollout may make; any further one is refused, and counted."""

    attempts: int = Field(default=1, ge=1, le=1000)
    """Most attempts at a rollout that fails; the rest of its group is trained without it."""

    rewarded_errors: RewardedErrors = Field(default_factory=dict[str, float | None])
    """Rewards of rollouts whose agent raises an error, by the name of its class, such as
    `OutputParserException: -1`. The step limits of frameworks, in which a policy that loops ends,
    have 0 (docs/agents.md); an error with null fails its rollout, as every other does."""

    most_failed: float = Field(default=1.0, ge=0, le=1)
    """Share of a step's rollouts that may fail. The run stops at a step where more fail, or where
    no rollout has a reward; a run that is resumed plays such a step anew."""

    def refusals(self) -> Refusals:
        most = self.groups * self.group_size * self.rounds
        yield (
            most > MOST_ROLLOUTS,
            f"groups {self.groups}, group_size {self.group_size} and rounds {self.rounds} make up "
            f"to {most} rollouts a step, which is more than {MOST_ROLLOUTS}; give fewer",
        )
        yield (
            self.rounds > 1 and self.stream,
            f"rounds {self.rounds} with stream: whether another round begins is known when all "
            "rollouts of a step have ended; leave stream out, or give 1 round",
        )
        check_runner(self.runner, self.cluster, self.door)
        yield (
            self.stream and self.batches == 1,
            "stream with batches 1 does nothing, since a step begins when all of its rollouts have "
            "ended; give 2 batches or more, or leave stream out",
        )

    def sampling(self) -> Sampling:
        """Return the sampling of training and of sampled evaluations: the whole distribution."""
        return Sampling(self.max_tokens, self.temperature, top_p=1.0, top_k=-1)

    def rewards_of_errors(self) -> dict[str, float]:
        """Return the rewards of the rollouts that these errors end, by the errors' names."""
        rewards = STEP_LIMITS | self.rewarded_errors
        return {name: reward for name, reward in rewards.items() if reward is not None}

    def greedy_sampling(self) -> Sampling:
        """Return the sampling that always takes the likeliest token."""
        return replace(self.sampling(), temperature=0.0)

    def concurrency_of_batch(self) -> int:
        """Return how many rollouts of one batch run at the same time."""
        return max(1, self.concurrency // self.batches)

    def min_group_size(self) -> int:
        """Return the size below which a group is not trained on."""
        return min(2, self.group_size)


class Judge(Section):
    """Judge of the rollouts of each step, whose scores take the place of the agent's rewards.

    A judge is an agent whose examples are groups (docs/judges.md).
    """

    agent: str | None = None
    """Agent that judges: `judge:pairs`, `judge:group` or `judge:criteria`, or any other by its
    name, which returns a score for each rollout by its id."""

    role: str = "judge"
    """Role that the judge asks; `roles` says who answers it."""

    sees: Sees = "group"
    """What a judge is shown at once: a `group`, each `pair` of its rollouts, or each `rollout`
    alone; a rollout's score is the mean of those that it got. A shipped judge knows by itself."""

    question: str = "Which answer is better?"
    """What a shipped judge is asked of the answers."""

    criteria: dict[str, float] = Field(default_factory=dict[str, float])
    """Criteria of `judge:criteria`, each a text, and their weights in the score."""

    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """Most tokens of an answer of the judge, if a policy is behind it; it answers greedily."""

    @property
    def judges(self) -> bool:
        """Whether the recipe has a judge."""
        return self.agent is not None

    @property
    def ships(self) -> bool:
        """Whether the judge ships with Ratchet."""
        return (self.agent or "").startswith(SHIPPED)

    def shown(self) -> Sees:
        """Return what the judge is shown at once."""
        return SHIPPED_SEE.get(self.agent or "", self.sees)

    requirements = (
        Needs(OTHERS, "agent"),
        Needs("criteria", "agent", "judge:criteria", each_other=True),
    )

    def refusals(self) -> Refusals:
        yield (
            not ROLE_NAME.fullmatch(self.role),
            f"judge.role {self.role!r} cannot name a role; give lower-case letters, digits and "
            "underscores, a letter first",
        )
        yield (
            self.sees != "group" and self.agent in SHIPPED_SEE,
            f"judge.sees {self.sees} does nothing with agent {self.agent}, which knows what it "
            "sees; leave it out",
        )

    def sampling(self) -> Sampling:
        """Return the sampling of a policy that answers the judge: the likeliest token."""
        return Sampling(self.max_tokens, 0.0, top_p=1.0, top_k=-1)

    def asked(self) -> dict[str, Any]:
        """Return what the judge is asked, by names of its example."""
        return {"question": self.question, "criteria": dict(self.criteria)}


class Evaluation(HeldOut):
    """Settings of the scoring of held-out examples."""

    rollouts: int = Field(default=1, ge=1, le=MOST_ROLLOUTS)
    """Sampled rollouts of each example; with k of them pass@1 to pass@k are reported."""

    threshold: float = Field(default=1.0, ge=-1e9, le=1e9)
    """A rollout passes, for pass@k, if its reward is at least this."""

    greedy: bool = True
    """Run each example once at temperature 0 as well."""

    roles: dict[str, str] = Field(default_factory=dict[str, str])
    """Roles that a fixed policy answers when held-out examples are played, such as the opponent of
    self-play: `checkpoint:base`, or `checkpoint:RUN@STEP`."""

    judge: Judge = Judge()
    """Second judge, of which training knows nothing: it scores each held-out rollout, alone or
    beside that of checkpoint 0, and the scores are those that are `judged`."""

    def refusals(self) -> Refusals:
        judge = self.judge
        yield (
            judge.judges and judge.shown() == "group",
            f"evaluation.judge.agent {judge.agent} compares the rollouts of one checkpoint with "
            "each other, which says nothing of the checkpoint; give judge:pairs or judge:criteria, "
            "or sees pair or rollout",
        )


MIB = 2**20


class PlaceOfRollouts(Section):
    """Place of each rollout: a folder with a working folder, a HOME and a TMPDIR of its own."""

    kept: Literal["failed", "always", "never"] | None = None
    """Places that stay in the run's folder: `failed` (default), `always` or `never`. Giving this
    key alone gives each rollout an empty place."""

    template: str | None = None
    """Folder whose `work` and `home` each place begins with. In a file that ends in `.template`,
    `${NAME}` becomes a variable of the program, and `${example.COLUMN}` a column."""

    variables: dict[str, str] = Field(default_factory=dict[str, str])
    """Further variables of the agent's program, whose values are filled in like a template's."""

    cage: Literal["none", "bwrap"] = "none"
    """What holds the program: nothing, or `bwrap`, bubblewrap: no writable folder but the place, no
    network but the model, and no other process (docs/agents.md)."""

    reads: list[str] = Field(default_factory=list[str])
    """Further folders that a caged program may read, such as that of its own installation."""

    reward: str | None = None
    """Command that scores the place once the agent has ended, with the files of the column `tests`:
    a JUnit report in `$REPORT`, JSON in its last line, or its exit status."""

    reward_seconds: float = Field(default=120, gt=0, le=LONGEST_SECONDS)
    """Time that the reward command may take; the reward is 0 if it takes longer."""

    most_mib: int = Field(default=1024, ge=1, le=MIB)
    """MiB that a place may hold; a program that writes more is killed, and its rollout fails."""

    most_files: int = Field(default=50_000, ge=1, le=10**8)
    """Files and folders that a place may hold."""

    most_memory_mib: int = Field(default=4096, ge=1, le=2**24)
    """MiB of memory that the processes of a caged program may use together."""

    most_processes: int = Field(default=256, ge=1, le=10**6)
    """Processes and threads that a caged program may have."""

    requirements = (
        Needs(("reads", "most_memory_mib", "most_processes"), "cage", "bwrap"),
        Needs("reward_seconds", "reward"),
    )

    def refusals(self) -> Refusals:
        template = self.template
        folder = None if template is None else locate(Path(template))
        yield (
            folder is not None and not any((folder / name).is_dir() for name in (WORK, HOME)),
            f"template {template} is no folder with a folder {WORK!r} or {HOME!r}; give one, as "
            "docs/agents.md shows",
        )

    @property
    def is_given(self) -> bool:
        """Whether rollouts have places."""
        return self != PlaceOfRollouts()

    @property
    def caged(self) -> bool:
        return self.cage != "none"

    def files(self, examples: Iterable[Mapping[str, Any]]) -> dict[str, list[Path]]:
        """Map names of files that fill the places of examples, or score them, to where they are."""
        named = {name for example in examples for name in folders_of(example)}
        own = {name: [locate(Path(name))] for name in sorted({*named, self.template or ""}) if name}
        return own | project_files(self.reward or "")

    def of(self, folder: Path) -> PlaceSettings | None:
        """Return the settings of the places in a folder; None if rollouts have none."""
        if not self.is_given:
            return None
        given = self.model_dump(exclude={"cage", "kept"})
        kept = self.kept or "failed"
        return PlaceSettings(**given, folder=str(folder), kept=kept, caged=self.caged)


class SentCalls(Section):
    """Marks of a role's calls among those at the base URL of the policy.

    All that are given must fit. `*` stands for any text, `?` for any character.
    """

    model: str | None = None
    """Name of the model that is asked for."""

    system: str | None = None
    """First words of the system message."""

    path: str | None = None
    """API: /chat/completions, /responses, /messages or /models (Google's)."""

    def refusals(self) -> Refusals:
        given = [one for one in (self.model, self.system, self.path) if one is not None]
        yield (
            not given or not all(one.strip() for one in given),
            "nothing is said of the calls, or an empty text; give model, system or path",
        )
        yield (
            self.path is not None and self.path not in PATHS,
            f"path {self.path!r} is of no API; give {' or '.join(PATHS)}",
        )


class AskedRole(Section):
    """Role whose calls have marks, and who answers it."""

    who: str
    """Who answers the role."""

    when: SentCalls
    """What its calls say."""

    def calls(self, role: str) -> CallsOf:
        return CallsOf(role, self.when.model, self.when.system, self.when.path)


Answerer = Annotated[
    Annotated[str, Tag("name")] | Annotated[AskedRole, Tag("asked")],
    Discriminator(lambda given: "name" if isinstance(given, str) else "asked"),
]
"""Who answers a role, by a name or together with what its calls say."""
