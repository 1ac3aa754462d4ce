"""run → another run that shares what the first one has made, by hard links: no token is copied."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

from adapters.door.roles import policy_of
from tasks.checkpoints import Ledger
from tasks.metrics import read_metrics, record_metrics
from tasks.storage.run_folder import (
    RunError,
    differences,
    exists,
    folder_of,
    manifest_of,
    policy_folder,
    policy_names,
    recipe_of,
    write_manifest,
)

FORK, REPLAY = "fork", "replay"
STEP = re.compile(r"(?:^|-)(\d{5,})\.")
"""In the name of a stage's file: train-00003.parquet, 00003.json, test.4f2a10-00003.jsonl."""

ROLLOUTS = ("shards", "journal", "spans", "rollouts")
STAGES = (*ROLLOUTS, "trajectories", "datums", "updates", "evaluations")
OF_ONE_ENGINE = ("lock", "engine.log")

WEIGHTS = ("model.base", "model.lora_rank", "model.train_")
"""What the weights of a fork were made by, and cannot be changed."""
SAMPLED = ("agent", "roles.", "dataset.", "model.", "seed", "rollouts.")
"""What the rollouts of a replay were sampled by, and the weights before its first step."""
NOT_SAMPLED = ("rollouts.partial_groups", "rollouts.minimum_group")


def fork_run(parent: Path, name: str, step: int, recipe: dict[str, Any], fingerprint: str) -> Path:
    """The run `name`, whose first `step` steps are those of `parent`, and the rest its own."""
    done = len(read_metrics(parent / "metrics.jsonl"))
    if not 0 <= step <= done:
        raise RunError(f"{parent} has done {done} steps: it can be forked at 0 to {done}")
    if recipe["steps"] <= step:
        raise RunError(f"a fork at {step} needs more steps than that: give --set steps={step + 1}")
    _refuse(parent, recipe, WEIGHTS, "the weights are the parent's; train a new run instead")
    _refuse_new_policies(parent, recipe, step)
    with _new_run(parent, name, recipe, fingerprint, {"how": FORK, "step": step}) as folder:
        for path in _shared(parent, step, STAGES):
            _link(path, folder / path.relative_to(parent))
        for path in _files_of_engine(parent / "engine"):
            _link(path, folder / path.relative_to(parent))
        for policy in policy_names(parent):
            ours = _ledger(folder, policy)
            for checkpoint in _ledger(parent, policy).checkpoints():
                if checkpoint.step <= step:
                    ours.add(checkpoint)
        for row in read_metrics(parent / "metrics.jsonl")[:step]:
            measured = {key: value for key, value in row.items() if key != "step"}
            record_metrics(folder / "metrics.jsonl", int(row["step"]), measured)
    return folder_of(name)


def replay_run(parent: Path, name: str, recipe: dict[str, Any], fingerprint: str) -> Path:
    """The run `name`, which finds the rollouts that `parent` recorded, and nothing made of them."""
    done = len(read_metrics(parent / "metrics.jsonl"))
    if recipe["steps"] > done:
        raise RunError(
            f"{parent} has recorded {done} of {recipe['steps']} steps: give --set steps={done}, "
            f"or let it go on with `ratchet resume {parent.name}`"
        )
    _refuse(
        parent, recipe, SAMPLED, "nothing is sampled, so it would be ignored; fork the run instead"
    )
    with _new_run(parent, name, recipe, fingerprint, {"how": REPLAY, "step": 0}) as folder:
        for path in _shared(parent, recipe["steps"], (*ROLLOUTS, "trajectories")):
            if path.stem.startswith("train-") or path.parent.name == "trajectories":
                _link(path, folder / path.relative_to(parent))
        first = Path("evaluations", "00000.json")
        if recipe["evaluation"] == recipe_of(parent)["evaluation"] and (parent / first).exists():
            _link(parent / first, folder / first)  # the untrained weights are the same
    return folder_of(name)


def parent_of(folder: Path) -> dict[str, Any] | None:
    """Of a fork or a replay: `run`, `step`, `fingerprint`, `recipe` and `how`."""
    return manifest_of(folder).get("parent")


@contextmanager
def _new_run(
    parent: Path, name: str, recipe: dict[str, Any], fingerprint: str, how: dict[str, Any]
) -> Iterator[Path]:
    """A folder to fill, which on a clean exit becomes the run `name`, whole."""
    folder = folder_of(name)
    if exists(folder):
        raise RunError(f"the run {folder} exists; `ratchet resume {name}`, or give another --as")
    manifest = manifest_of(parent)
    kept = {key: manifest[key] for key in ("fingerprint", "recipe", "parent") if key in manifest}
    aside = folder.with_name(f".{name}.{uuid4().hex[:8]}.partial")
    aside.mkdir(parents=True)
    try:
        yield aside
        write_manifest(aside, recipe, fingerprint, {"run": parent.name, **how, **kept})
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refuse(parent: Path, recipe: dict[str, Any], fixed: Sequence[str], why: str) -> None:
    changed = differences(recipe_of(parent), recipe)
    refused = [
        change
        for change in changed
        if change.startswith(tuple(fixed)) and not change.startswith(NOT_SAMPLED)
    ]
    if refused:
        raise RunError(f"{'; '.join(refused)}: {why}")


def _refuse_new_policies(parent: Path, recipe: dict[str, Any], step: int) -> None:
    """At step 0 a policy may be new: none is trained yet."""
    asked = {policy for who in recipe["roles"].values() if (policy := policy_of(who))}
    for policy in sorted(asked) if step > 0 else ():
        if all(checkpoint.step != step for checkpoint in _ledger(parent, policy).checkpoints()):
            raise RunError(
                f"{parent} has trained no policy {policy} up to step {step}: give its roles to "
                "another one, fork at 0, or train a new run"
            )


def _ledger(folder: Path, policy: str) -> Ledger:
    return Ledger(policy_folder(folder, policy) / "checkpoints.jsonl")


def _shared(parent: Path, before: int, stages: Sequence[str]) -> Iterator[Path]:
    """The files of the steps before `before`; of the journals, those that are not written to."""
    homes = [policy_folder(parent, name) for name in policy_names(parent)]
    for home, stage in product(homes, stages):
        for path in sorted((home / stage).glob("*.*")):
            named = STEP.search(path.name)
            if named is None or path.name.startswith(".") or int(named[1]) >= before:
                continue
            if stage != "journal" or (home / "spans" / f"{path.stem}.parquet").exists():
                yield path


def _files_of_engine(engine: Path) -> Iterator[Path]:
    """What the engine saved: it replaces its files and never changes one, so they can be shared."""
    for path in sorted(engine.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(engine).parts)
        if path.is_file() and not hidden and path.name not in OF_ONE_ENGINE:
            yield path


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
