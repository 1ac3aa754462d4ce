"""The ledger of a policy's checkpoints: which were begun and saved."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from adapters.calls import POLICY
from adapters.errors import UserError
from tasks.comparison.promotions import find_promotion
from tasks.storage.json_files import JsonRow, read_json
from tasks.storage.manifest import read_manifest
from tasks.storage.owners import OwnedLog
from tasks.storage.run_folder import RunError, RunFolder, folder_of

INTENT, SAVED = "intent", "saved"
BEST = "best"
"""Step, in the name of a checkpoint, of the one that is best on held-out examples."""


class CheckpointError(UserError):
    """Refusal of a checkpoint that a run does not have."""


@dataclass(frozen=True)
class Checkpoint:
    """A policy after `step` updates; checkpoint 0 has its initial weights."""

    step: int
    sampler: str
    """Address of the weights to sample from, `tinker://…`."""
    state: str | None = None
    """Address of the weights and optimizer to train on from; None if only the sampler was saved."""


OR_NEWER = "+"
"""End of the name of weights that may have changed while they answered."""


def policy_version(policy: str, step: int) -> str:
    """Return the name of a policy after `step` updates in spans; the main policy's is a number."""
    return f"{step:05d}" if policy == POLICY else f"{policy}@{step:05d}"


def sampled_step(version: str) -> int:
    """Return how many updates, at least, made the weights that have a `policy_version`."""
    return int(version.rpartition("@")[2].removesuffix(OR_NEWER))


def is_version_of(policy: str, version: str) -> bool:
    """Return whether a version, as spans name what has answered, is one of a trained policy."""
    plain = version.removesuffix(OR_NEWER)
    step = plain.rpartition("@")[2]
    return step.isdecimal() and plain == policy_version(policy, int(step))


class Ledger(OwnedLog):
    """Ledger of checkpoints: the file checkpoints.jsonl.

    Every checkpoint has two lines: `intent` before its update is submitted, and `saved` when its
    weights are saved, which may be after the intent of the next one. A checkpoint exists when it is
    `saved`, and an update is complete when `updates/<step>.json` exists: one that is killed between
    the two is made again, on rebuilt weights, with the same result. A checkpoint that is made again
    gets new lines, and the last ones count. Each line has the epoch of the run's owner.
    """

    def checkpoints(self) -> list[Checkpoint]:
        """List the saved checkpoints, in the order in which they were saved."""
        saved = [row for row in self.rows() if row["phase"] == SAVED]
        return [Checkpoint(row["step"], row["sampler"], row["state"]) for row in saved]

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        return max((checkpoint.step for checkpoint in self.checkpoints()), default=0)

    def in_doubt(self) -> int | None:
        """Return the first checkpoint that was begun and never saved since."""
        begun = {row["step"]: row["phase"] for row in self.rows()}
        return min((step for step, phase in begun.items() if phase != SAVED), default=None)

    def states(self, step: int) -> list[Checkpoint]:
        """List the checkpoints up to `step` that have a training state, the newest first."""
        saved = [c for c in reversed(self.checkpoints()) if c.state is not None and c.step <= step]
        return sorted(saved, key=lambda checkpoint: -checkpoint.step)

    def at(self, step: int | None) -> Checkpoint:
        """Return the checkpoint after `step` updates, or the last; CheckpointError without one."""
        step = self.last_step() if step is None else step
        found = self.find(step)
        if found is None:
            there = f"it has 0 to {self.last_step()}" if self.checkpoints() else "it has none"
            raise CheckpointError(f"{self.path} has no checkpoint {step}; {there}")
        return found

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint after `step` updates as it was saved last, if there is one."""
        return {checkpoint.step: checkpoint for checkpoint in self.checkpoints()}.get(step)

    def name(self, step: int) -> str:
        """Return the name under which the run's owner saves checkpoint `step`."""
        owned = self.ownership
        return f"{step:05d}" if owned is None else owned.owner.checkpoint_name(step)

    def begin(self, step: int) -> None:
        """Note that the update that makes checkpoint `step` is about to be submitted."""
        self.append({"step": step, "phase": INTENT})

    def add(self, checkpoint: Checkpoint) -> None:
        self.append({**asdict(checkpoint), "phase": SAVED})

    def append(self, row: JsonRow) -> None:
        epoch = {} if self.ownership is None else {"epoch": self.ownership.owner.epoch}
        super().append(row | epoch)


def read_checkpoint(name: str) -> tuple[str, int | None]:
    """Read RUN, RUN@STEP, RUN@best or the name that a checkpoint was promoted to.

    RUN and the name may have a policy, as in RUN:POLICY; without a step it is the run's last one.
    """
    run, at, step = name.partition("@")
    if at:
        return run, read_step(run, step)
    promoted, _, policy = run.partition(":")
    if (found := find_promotion(promoted)) is not None:
        return f"{found.run}:{policy}".removesuffix(":"), found.step
    return run, None


def read_step(run: str, step: str) -> int:
    """Read the number of a run's checkpoint, or `best`.

    CheckpointError if nothing says which checkpoint is best.
    """
    if step == BEST:
        folder = folder_of(run.partition(":")[0])
        read_manifest(folder)  # refuses a run that does not exist
        return best_step(folder)
    if not (step.isascii() and step.isdecimal()):
        raise RunError(
            f"'{run}@{step}' names no checkpoint; RUN@STEP does, such as {run}@10, and so does "
            f"{run}@{BEST}"
        )
    return int(step)


def best_step(run: RunFolder) -> int:
    """Return the checkpoint that is best on held-out examples; CheckpointError if none is scored.

    Of equal ones it is the earliest.
    """
    held_out = read_held_out(run)
    if not held_out.by_step:
        raise CheckpointError(
            f"{run.path} has scored no checkpoint on held-out examples, so that none is known as "
            f"the best; give a step, such as {run.name}@10"
        )
    return held_out.best


@dataclass(frozen=True)
class HeldOutValues:
    """Values of a run's checkpoints on held-out examples, by step, and what they measure."""

    measure: str
    by_step: Mapping[int, float]

    @property
    def best(self) -> int:
        """Step of the lowest loss, or else of the highest reward or accuracy."""
        choose = min if self.measure == "loss" else max
        return choose(self.by_step, key=lambda step: self.by_step[step])

    @property
    def digits(self) -> int:
        """Decimals that are worth reading."""
        return 3 if self.measure == "loss" else 2

    def __str__(self) -> str:
        values = [*self.by_step.values()]
        ends = [*values[:1], *values[1:][-1:]]
        return " → ".join(f"{value:.{self.digits}f}" for value in ends)


def read_held_out(run: RunFolder) -> HeldOutValues:
    """Read what the run itself has measured of its checkpoints, in their order."""
    files = {int(path.stem): read_json(path) for path in run.measures()}
    if files:
        measure = next(iter(files.values()))["measure"]
        return HeldOutValues(measure, {step: float(row["value"]) for step, row in files.items()})
    own = [path for path in run.evaluations() if path.stem.isdecimal()]
    rewards = {int(path.stem): _mean(read_json(path)) for path in own}
    return HeldOutValues(
        "reward", {step: reward for step, reward in rewards.items() if reward is not None}
    )


def _mean(scores: JsonRow) -> float | None:
    """Return the mean reward of sampled rollouts, or else what they were judged."""
    means = (scores[how]["finished"]["mean"] for how in ("sampled", "judged") if how in scores)
    return next((mean for mean in means if mean is not None), None)
