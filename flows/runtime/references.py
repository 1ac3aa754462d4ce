"""The policies that a run's are compared with token by token: its reference and its teachers."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapters.calls import POLICY
from adapters.errors import UserError
from adapters.network.addresses import check_listener
from adapters.tinker.engines import TinkerServer, needs_engine, saved_files
from flows.recipe.algorithm import BASE, names_checkpoint
from flows.recipe.loading import read_recipe
from flows.recipe.recipe import Recipe
from flows.recipe.run_recipe import RunRecipe
from tasks.checkpoints import Ledger
from tasks.examples.reading import choose_teacher
from tasks.storage.files import is_written, link_or_copy
from tasks.storage.json_files import read_json, write_json
from tasks.storage.manifest import FORK, describe_parent, parent_of
from tasks.storage.run_folder import RunFolder, folder_of, read_checkpoint

if TYPE_CHECKING:  # they import torch or Prefect, which take seconds
    from adapters.tinker.service import PatientSampler, Service
    from tasks.references import References

TEACHER_KEY = "RATCHET_TEACHER_KEY"
"""Variable of the environment that has the key of the teachers' service, if that is another one."""


class ReferenceRefused(UserError):
    """Refusal of a reference or a teacher that cannot be compared with the policy."""


@dataclass(frozen=True)
class SavedReference:
    """Checkpoint of another run that a run is to be bound to: its name, run and sampler."""

    name: str
    run: RunFolder
    sampler: str


def find_references(recipe: RunRecipe, folder: RunFolder) -> list[SavedReference]:
    """Find the checkpoints that a run is to be bound to, and is not yet.

    Raises ReferenceRefused or CheckpointError if one is not there, or is of another model.
    """
    bound = read_json(folder.reference) if is_written(folder.reference) else {}
    asked = {name: key for name, key in recipe.references().items() if name not in bound}
    return [_find(name, key, recipe.model.base) for name, key in asked.items()]


def _find(name: str, key: str, base: str) -> SavedReference:
    run, step = read_checkpoint(name)
    parent = folder_of(run)
    if not parent.exists():
        raise ReferenceRefused(
            f"{key} {name} names no run ({parent.path} is not there); give RUN@STEP, base, or a "
            "model by a name with a slash"
        )
    trained = read_recipe(parent).model.base
    if trained != base and needs_engine(base):
        raise ReferenceRefused(
            f"{key} {name} is a checkpoint of {trained}, and the policy is {base}, beside which "
            "its engine has no other model; give a checkpoint of that model, or base"
        )
    return SavedReference(name, parent, Ledger(parent.checkpoints(POLICY)).at(step).sampler)


def bind_references(folder: RunFolder, found: list[SavedReference], base_model: str) -> None:
    """Keep the addresses of references in a run, and their weights in the run's engine.

    The engine has still to be started. The run goes on without the other ones from then on.
    """
    for reference in found if needs_engine(base_model) else ():
        parent = reference.run.engine
        for path in saved_files(parent, reference.sampler):
            target = folder.engine / path.relative_to(parent)
            if not is_written(target):
                link_or_copy(path, target)
    if found:
        write_json(folder.reference, {reference.name: reference.sampler for reference in found})


def check_teachers(recipe: Recipe, folder: RunFolder) -> None:
    """Refuse (UserError) a teacher that is the policy itself, or cannot be asked.

    The policy is itself where its weights start: the base, or what a fork begins with.
    """
    parent = parent_of(folder) if folder.exists() else None
    forked = parent is not None and parent["how"] == FORK and parent["step"] > 0
    start = describe_parent(parent) if forked else BASE
    for model in recipe.algorithm.teacher.named().values():
        run, _, step = model.rpartition("@")
        untrained = model in (BASE, recipe.model.base) or step == "0"
        if run == folder.name or model == start or (untrained and start == BASE):
            raise ReferenceRefused(
                f"algorithm.teacher.models {model} is the policy itself, which starts from "
                f"{start}, and teaches it nothing; give a checkpoint of another run, RUN@STEP, or "
                "another model; to stay near the start, give algorithm.kl.coefficient"
            )
        if "://" in model:
            _check_place(model)


def _check_place(model: str) -> None:
    url = model.partition("#")[0]
    if not os.environ.get(TEACHER_KEY):
        raise ReferenceRefused(
            f"algorithm.teacher.models {model} is of a service whose key is not there; set "
            f"{TEACHER_KEY}"
        )
    try:
        check_listener(url)
    except OSError as error:
        raise ReferenceRefused(
            f"algorithm.teacher.models {model} cannot be reached ({error}); start that service, or "
            "give another teacher"
        ) from error


def check_choices(recipe: Recipe) -> None:
    """Refuse (DatasetError) a training example that names none of several teachers."""
    teacher = recipe.algorithm.teacher
    if teacher.by is not None:
        for row in recipe.dataset.train_split().examples():
            choose_teacher(row["example"], teacher.by, teacher.named())


@contextmanager
def open_references(
    recipe: Recipe, folder: RunFolder, service: "Service"
) -> Iterator[Mapping[str, "References"]]:
    """Yield the policies that score a run's tokens: the reference and the teachers, if any."""
    from tasks.references import References  # imports Prefect

    algorithm = recipe.algorithm
    teacher, named = algorithm.teacher, algorithm.teacher.named()
    asked: dict[str, References] = {}
    with _teaching_service(recipe, service) as elsewhere:

        def opened(key: str, name: str) -> "PatientSampler":
            return _open(key, name, recipe.model.base, folder, (service, elsewhere))

        if algorithm.kl.penalty() is not None:
            key, name = "algorithm.kl.reference", algorithm.kl.reference
            asked["references"] = References({name: opened(key, name)})
        if named:
            key = "algorithm.teacher.models"
            teachers = {name: opened(key, model) for name, model in named.items()}
            asked["teachers"] = References(teachers, teacher.by)
        yield asked


@contextmanager
def _teaching_service(recipe: Recipe, service: "Service") -> Iterator["Service"]:
    """Yield the service of teachers elsewhere; the run's own if there are none."""
    from adapters.tinker.service import open_session

    models = recipe.algorithm.teacher.named().values()
    urls = {model.partition("#")[0] for model in models if "://" in model}
    if not urls:
        yield service
        return
    server = TinkerServer(urls.pop(), os.environ[TEACHER_KEY], Future(), None)
    with open_session(server, recipe.service.timeout_seconds) as elsewhere:
        yield elsewhere


def _open(
    key: str, name: str, base: str, folder: RunFolder, services: tuple["Service", "Service"]
) -> "PatientSampler":
    """Open a policy by its name; ReferenceRefused if its tokens are not those of the base."""
    from adapters.rendering.chat import fingerprint  # imports the renderers

    service, elsewhere = services
    if name == BASE:
        return service.base_sampler(base)
    if names_checkpoint(name):
        opened = service.sampler(read_json(folder.reference)[name])
    elif "://" in name:
        service = elsewhere
        opened = service.base_sampler(name.partition("#")[2])
    else:
        opened = service.base_sampler(name)
    own = services[0].tokenizer_of(services[0].base_sampler(base))
    if fingerprint(service.tokenizer_of(opened)) != fingerprint(own):
        raise ReferenceRefused(
            f"{key} {name} has other tokens than {base}; give a model of the same family"
        )
    return opened
