"""run → another run that shares the first run's files, by hard links: no token is copied."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from ratchet.adapters.door.roles import answerers, policy_of
from ratchet.adapters.errors import counted
from ratchet.adapters.tinker.engines import saved_files
from ratchet.durable.files import link_or_copy
from ratchet.flows.checkpoints.binding import bind_checkpoints, carried_files
from ratchet.flows.recipe.loading import changed_recipe, read_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.scores import is_scored
from ratchet.tasks.recording.step_log import read_metrics, record_metrics, steps_done
from ratchet.tasks.settings.rollouts import Judge
from ratchet.tasks.storage.files import is_written
from ratchet.tasks.storage.manifest import (
    FORK,
    REPLAY,
    differences,
    file_rows,
    read_manifest,
    record_files,
    write_manifest,
)
from ratchet.tasks.storage.names import JUDGE, shard_name
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of

WEIGHTS = ("model.base", "model.lora_rank", "model.train_", "model.start")
"""Keys that made the weights of a run; a fork cannot change them."""
SAMPLED = ("agent", "roles.", "dataset.", "model.", "seed", "rollouts.")
"""Keys that shaped the sampled rollouts; a replay cannot change them, except a judge's roles."""
GIVEN = ("dataset.", "model.renderer", "model.thinking", "preference.reference", "teacher.")
"""Keys that made the tokens of a run's texts or pairs, and their scores by the reference or the
teacher; a fork cannot change them."""
OF_EXPERT = (
    "model.renderer",
    "model.thinking",
    *(f"algorithm.expert.{key}" for key in ("path", "runs", "query", "trained", "most_tokens")),
    "algorithm.expert.too_long",
)
"""The same keys for the texts of an expert, in a run that plays rollouts."""
NOT_SAMPLED = (
    "rollouts.most_failed",
    "rollouts.batches",
    "rollouts.runner",
    "rollouts.cluster",
    "rollouts.door",
)


def fork_run(
    parent: RunFolder, name: str, step: int, recipe: dict[str, Any], fingerprint: str
) -> RunFolder:
    """Make the run `name`, whose first `step` steps are the parent's."""
    done = steps_done(parent.metrics)
    if not 0 <= step <= done:
        made = counted(done, "step")
        raise RunError(f"{parent.path} has done {made}: it can be forked at 0 to {done}")
    if recipe["steps"] <= step:
        raise RunError(f"a fork at {step} needs more steps than that: give --set steps={step + 1}")
    _refuse(parent, recipe, WEIGHTS, "the weights are the parent's; train a new run instead")
    _refuse_new_policies(parent, recipe, step)
    if parent.bound_files():
        given = OF_EXPERT if read_recipe(parent).plays_rollouts else GIVEN
        _refuse(parent, recipe, given, "the texts are the parent's; train a new run instead")
    with _new_run(parent, name, recipe, fingerprint, {"how": FORK, "step": step}) as fork:
        for passed in range(step):
            batches = parent.batches_of(passed) + parent.journalled(shard_name(JUDGE, passed))
            batches += parent.held_out(passed)
            files = parent.learning_files(passed) + parent.evaluations(f"{passed:05d}")
            _share(parent, fork, parent.batch_files(batches) + files)
        measures = [path for path in parent.measures() if int(path.stem) <= step]
        _share(parent, fork, [*measures, *parent.bound_files()])
        _share(parent, fork, saved_files(parent.fetched(whole=True).engine))
        for policy in parent.policies():
            ledger = Ledger(fork.checkpoints(policy))
            for checkpoint in Ledger(parent.checkpoints(policy)).checkpoints():
                if checkpoint.step <= step:
                    ledger.add(checkpoint)
        for row in read_metrics(parent.metrics)[:step]:
            measured = {key: value for key, value in row.items() if key != "step"}
            record_metrics(fork.metrics, int(row["step"]), measured)
    return folder_of(name)


def replay_run(parent: RunFolder, name: str, recipe: dict[str, Any], fingerprint: str) -> RunFolder:
    """Make the run `name`, which has the parent's recorded rollouts, and no update."""
    check_replay(parent, recipe)
    old, new = read_recipe(parent, Recipe), changed_recipe(recipe)
    same_judge = _asked(old, old.judge) == _asked(new, new.judge)
    with _new_run(parent, name, recipe, fingerprint, {"how": REPLAY, "step": 0}) as replay:
        share_end(parent, replay, new.steps)
        for step in range(replay.steps_of(new.steps)):
            judged = parent.journalled(shard_name(JUDGE, step)) if same_judge else []
            rollouts = parent.batch_files(parent.batches_of(step) + judged)
            trajectories = [parent.trajectories(policy, step) for policy in parent.policies()]
            _share(parent, replay, [*rollouts, *filter(is_written, trajectories)])
        _share(parent, replay, carried_files(parent))
        examiners = [_asked(one, one.evaluation.judge) for one in (old, new)]
        if old.evaluation == new.evaluation and examiners[0] == examiners[1]:
            first = [parent.evaluation("00000")]  # the untrained weights are the same
            _share(parent, replay, filter(is_scored, first))
    return folder_of(name)


def share_end(parent: RunFolder, replay: RunFolder, steps: int) -> None:
    """Record that a replay ends where its parent ended early, with fewer than `steps`."""
    if not is_written(replay.end) and (end := parent.steps_of(steps)) < steps:
        replay.record_end(end, f"where {parent.name} did, {parent.why_ended()}")


def check_replay(parent: RunFolder, recipe: dict[str, Any]) -> None:
    """Refuse (UserError) a recipe that cannot be trained on the rollouts of `parent`."""
    if not read_recipe(parent).plays_rollouts:
        raise RunError(
            f"{parent.path} has texts or pairs and no rollouts: `ratchet fork {parent.name} --at 0 "
            "--set KEY=VALUE` trains them anew, say under another loss"
        )
    made = read_recipe(parent, Recipe)
    done, ends = steps_done(parent.metrics), parent.steps_of(made.steps)
    if (steps := min(recipe["steps"], parent.steps_of(recipe["steps"]))) > done:
        ways = [f"give --set steps={done}"] if done else []
        ways += [f"let it go on with `ratchet resume {parent.name}`"] if done < ends else []
        made_so_far = f"{parent.path} has recorded {done} of {counted(steps, 'step')}"
        raise RunError(f"{made_so_far}: {', or '.join(ways)}")
    if changed_recipe(recipe).stop.is_given:
        ends_there = "a replay ends where its parent has ended; leave stop as it is, or out"
        _refuse(parent, recipe, ("stop.",), ends_there)
    why = "nothing is sampled, so it would be ignored; fork the run instead"
    free = (*NOT_SAMPLED, *_roles_of_judges(made, changed_recipe(recipe)))
    _refuse(parent, recipe, SAMPLED, why, free)


def _asked(recipe: Recipe, judge: Judge) -> tuple[Judge, list[str | None]]:
    """Return a judge and the backends of its roles; no backends if it judges nothing."""
    asked = recipe.plays(judge)[1] if judge.judges else []
    return judge, [recipe.answerers.get(role) for role in asked]


def _roles_of_judges(*recipes: Recipe) -> list[str]:
    """List the keys of roles that judges ask, and no agent does."""
    asked = {judge.role for recipe in recipes for judge in recipe.judges()}
    played = {role for recipe in recipes for role in recipe.plays()[1]}
    return [f"roles.{role}:" for role in sorted(asked - played)]


@contextmanager
def _new_run(
    parent: RunFolder, name: str, recipe: dict[str, Any], fingerprint: str, how: dict[str, Any]
) -> Iterator[RunFolder]:
    """Yield a folder to fill; on a clean exit it becomes the run `name`."""
    run = folder_of(name)
    if run.exists():
        raise RunError(f"the run {run.path} exists; `ratchet resume {name}`, or give another --run")
    manifest = read_manifest(parent)
    kept = {key: manifest[key] for key in ("fingerprint", "recipe", "parent") if key in manifest}
    made = changed_recipe(recipe, kind=RunRecipe)
    bound = bind_checkpoints(made, manifest.get("bound", {}))
    (_, first), *files = [(row["step"], row["files"]) for row in file_rows(parent)]
    aside = RunFolder(run.path.with_name(f".{run.name}.{uuid4().hex[:8]}.partial"))
    aside.path.mkdir(parents=True)
    try:
        yield aside
        told = {"run": parent.name, **how, **kept}
        further = {"parent": told, "bound": bound, "files": first}
        write_manifest(aside, recipe, fingerprint, further)
        for step, changed in files:
            if step < how["step"]:
                record_files(aside, changed, step)
        record_files(aside, made.checksums(aside), how["step"])
        aside.path.replace(run.path)
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)


def _refuse(
    parent: RunFolder,
    recipe: dict[str, Any],
    fixed: Sequence[str],
    why: str,
    free: Sequence[str] = (),
) -> None:
    """Refuse (RunError) a changed key that begins with one of `fixed`, and with none of `free`.

    A key that is newer than the parent's recipe has its default there.
    """
    made = read_recipe(parent).model_dump(mode="json")
    refused = [
        change
        for change in differences(made, recipe)
        if change.startswith(tuple(fixed)) and not change.startswith(tuple(free))
    ]
    if refused:
        raise RunError(f"{'; '.join(refused)}: {why}")


def _refuse_new_policies(parent: RunFolder, recipe: dict[str, Any], step: int) -> None:
    """Refuse (RunError) a policy that the parent has not trained, if any step is shared."""
    roles = answerers(recipe.get("roles", {}))
    asked = {policy for who in roles.values() if (policy := policy_of(who))}
    for policy in sorted(asked) if step > 0 else ():
        checkpoints = Ledger(parent.checkpoints(policy)).checkpoints()
        if all(checkpoint.step != step for checkpoint in checkpoints):
            raise RunError(
                f"{parent.path} has trained no policy {policy} up to step {step}: give its roles "
                "to another one, fork at 0, or train a new run"
            )


def _share(parent: RunFolder, child: RunFolder, files: Iterable[Path]) -> None:
    for path in files:
        link_or_copy(path, child.path / path.relative_to(parent.path))
