"""Checks of what a recipe names, before a server, an engine or a run's folder exists.

A command makes them before anything starts, and a flow makes the same ones as its first act, since
a flow may have been started by a Prefect server. What they import is imported where it is needed:
a refusal should not wait for a library.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.network.addresses import check_listener
from ratchet.adapters.places.cage import check_cage
from ratchet.adapters.programs.commands import warn_of_shown_keys
from ratchet.adapters.rendering.renderer_names import AUTO, TEMPLATE, find_config, set_thinking
from ratchet.adapters.tinker.bases import base_folder, check_base, check_template
from ratchet.adapters.tinker.engines import check_key, check_reachable
from ratchet.flows.checkpoints.binding import CheckpointRefused, bind_checkpoints
from ratchet.flows.recipe.loading import (
    RecipeError,
    changed_recipe,
    count_steps,
    read_recipe,
    training_command,
)
from ratchet.flows.recipe.plan import BEST, Plan, PlannedRun, StagesRecipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe, differing, without_free
from ratchet.tasks.algorithm.own_functions import check_source
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.examples.teachers import choose_teacher, fill_reads
from ratchet.tasks.recording.scores import is_scored
from ratchet.tasks.recording.step_log import steps_done
from ratchet.tasks.settings.algorithm import BASE
from ratchet.tasks.settings.run import Model, Tracking
from ratchet.tasks.spending.budgets import budget_of, check_priced
from ratchet.tasks.storage.files import check_output, is_written
from ratchet.tasks.storage.manifest import (
    FORK,
    REPLAY,
    Manifest,
    differences,
    parent_of,
    read_manifest,
    recipe_of,
)
from ratchet.tasks.storage.plan_record import child_runs, has_plan, read_plan
from ratchet.tasks.storage.run_folder import UNTRAINED_FOLDERS, RunError, RunFolder, folder_of

R = TypeVar("R", bound=RunRecipe)


def check_start(
    recipe: R,
    run: RunFolder,
    deleted: Collection[str] = (),
    awaited: Mapping[str, RunRecipe] = MappingProxyType({}),
    *,
    trains: bool = True,
) -> R:
    """Return the recipe that a run, new or not, is bound to: its epochs are counted in steps.

    Refuse (UserError) what would end the run before its first step. Runs that are to be `deleted`
    first, itself perhaps, count as absent. The `awaited` runs end before this one begins; until
    then only their steps and policies can be checked. What only `trains` is not needed to play.
    """
    later = not awaited.keys().isdisjoint(recipe.queried_runs())
    recipe = recipe if later else count_steps(recipe)
    check_run(recipe, run, deleted, awaited)
    there = is_there(run, deleted)
    check_recipe(recipe, run if there else None)
    if isinstance(recipe, Recipe) and trains:
        check_source(recipe.algorithm.loss)
        check_source(recipe.algorithm.advantage)
    if not (later or (there and run.bound_files())):
        refuse_deleted(recipe.queried_runs(), deleted)
        refuse_absent(recipe.queried_runs())
        for examples in recipe.given_examples().values():
            len(examples)  # refuses a query that cannot be asked, or chooses nothing
    return recipe


def _find_awaited(recipe: RunRecipe, awaited: Mapping[str, RunRecipe]) -> dict[str, dict[str, str]]:
    """Map the checkpoints of awaited runs that a recipe names to those runs.

    Refuse (RunError) a checkpoint that a run, when it has finished, will not have.
    """
    found: dict[str, dict[str, str]] = {}
    for name, key in recipe.named_checkpoints().items():
        of, at, step = name.partition("@")
        run, _, policy = of.partition(":")
        if (trained := awaited.get(run)) is None:
            continue
        policies, steps = trained.policies(), trained.steps
        known = not at or step == BEST or (step.isdecimal() and (not steps or int(step) <= steps))
        if step.isdecimal() and not trained.checkpoints.keeps(int(step), steps):
            raise RunError(
                f"{key} {name}: that run deletes this checkpoint, since its checkpoints.keep is "
                f"{trained.checkpoints.keep}; leave that out there, or give @{BEST}"
            )
        if not known or (policy and policy not in policies):
            raise RunError(
                f"{key} {name}: that run will have the checkpoints 0 to {steps or 'its last'} of "
                f"{', '.join(policies)}; give one of them, by its step or as @{BEST}"
            )
        found[name] = {"run": run}
    return found


def check_plan(plan: Plan, deleted: Collection[str] = ()) -> Plan:
    """Return a plan; refuse (UserError) what would end any of its runs before its first step.

    Runs that are to be `deleted` first count as absent.
    """
    if is_there(folder := folder_of(plan.run), deleted):
        raise RunError(
            f"the run {folder.path} exists, and is no run of {plan.recipe.flow}; give another name"
        )
    names = [child.name for child in plan.children]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"several runs would be called {min(twice)}; give each other values")
    refuse_left_out(plan.run, [*names, *deleted])
    gone = gone_children(plan.children, deleted)
    refuse_changed(plan, gone)
    pending = dict[str, RunRecipe]()
    for child in plan.children:
        there = is_there(folder_of(child.name), deleted)
        if child in gone or (there and is_finished(child)):
            continue
        needed = [one for one in gone if not there and one.name in child.awaits]
        if needed:
            raise RunError(
                f"stage {child.stage} needs the run {folder_of(needed[0].name).path}, which is "
                f"gone; put it back, or give --from {needed[0].stage}, which trains it and all "
                "after it anew"
            )
        check_child(child, pending, deleted)
        pending[child.name] = child.recipe
    return plan


def check_child(
    child: PlannedRun, pending: Mapping[str, RunRecipe], deleted: Collection[str]
) -> None:
    """Refuse (UserError) what would end a run before its first step, if `pending` ones train."""
    folder = folder_of(child.name)
    there = is_there(folder, deleted)
    awaited = {} if there else {name: pending[name] for name in child.awaits & pending.keys()}
    try:
        if child.replayed is not None and not there:
            refuse_deleted([child.replayed], deleted)
            recipe = count_steps(child.recipe)
            from ratchet.flows.checkpoints.forks import check_replay  # imports reports

            check_replay(folder_of(child.replayed), recipe.model_dump(mode="json"))
        check_start(child.recipe, folder, deleted, awaited)
    except UserError as error:
        raise RecipeError(f"{child.name}: {error}") from error


def gone_children(
    children: Sequence[PlannedRun], deleted: Collection[str] = ()
) -> list[PlannedRun]:
    """List the runs that are gone: they are not there, and one that waits for them has begun.

    They are not trained anew, since the later run has the weights at which it started. Runs that
    are to be `deleted` count as absent.
    """
    gone, awaited = list[PlannedRun](), set[str]()
    for child in reversed(children):
        there = is_there(folder_of(child.name), deleted)
        if child.name in awaited and not there:
            gone.insert(0, child)
        if child.name in awaited or there:
            awaited |= child.awaits
    return gone


def is_finished(child: PlannedRun) -> bool:
    """Return whether a run has all it is to have; RunError if it is there by another recipe."""
    run = folder_of(child.name)
    if not run.exists():
        return False
    recipe = count_steps(child.recipe)
    check_binding(run, recipe)
    unscored = not recipe.plays_rollouts or not recipe.holds_out()
    steps = run.steps_of(recipe.steps)
    scored = unscored or is_scored(run.evaluation(f"{steps:05d}"))
    return steps_done(run.metrics) == steps and scored


def is_complete(run: RunFolder, recipe: RunRecipe) -> bool:
    """Return whether a run has all that training it would make, so that nothing need be opened.

    RunError if it was started with another recipe. A run whose tracker may be behind is not
    complete, nor is one that lacks a checkpoint or an evaluation, which are then made again.
    """
    if not run.exists() or recipe.tracking.project is not None:
        return False
    check_binding(run, recipe := count_steps(recipe))
    steps, parent = run.steps_of(recipe.steps), parent_of(run)
    ledgers = (Ledger(run.checkpoints(policy)) for policy in recipe.policies())
    if steps_done(run.metrics) < steps or any(one.last_step() < steps for one in ledgers):
        return False
    if not recipe.holds_out():
        return True
    if not isinstance(recipe, Recipe):
        return is_written(run.measure(steps))
    first = steps if parent is not None and parent["how"] == REPLAY else 0
    due = (step for step in range(first, steps + 1) if recipe.evaluation.due(step, steps))
    return all(is_scored(run.evaluation(f"{step:05d}")) for step in due)


def refuse_left_out(run: str, names: Collection[str]) -> None:
    """Refuse (RunError) a recipe without some of the runs that were begun.

    The record would name them no more, so that no table had them and nothing deleted them.
    """
    if left := [one.name for one in child_runs(folder_of(run)) if one.name not in names]:
        raise RunError(
            f"{folder_of(run).path} has begun {', '.join(left)}, which this recipe does not have; "
            "give their stages or values too, or another name with --run, or start afresh with "
            "--if-exists delete"
        )


def refuse_changed(plan: Plan, gone: Sequence[PlannedRun]) -> None:
    """Refuse (RunError) stages whose runs are gone, and with them their manifests, if they differ.

    A line of the table that stays is of the recipe, and of the evaluations, that are recorded.
    """
    if not gone or not has_plan(folder := folder_of(plan.run)):
        return
    assert isinstance(plan.recipe, StagesRecipe), "no run of a sweep waits for another"
    recorded = changed_recipe(read_plan(folder).recipe, kind=StagesRecipe)
    known = {one.name: one.recipe for one in recorded.children(plan.run)}
    for child in gone:
        changed = [*_changes(known.get(child.name), child.recipe)]
        changed += [f"evaluate.{at}" for at in _changes(recorded.evaluate, plan.recipe.evaluate)]
        if changed:
            raise RunError(
                f"the run {folder_of(child.name).path} of stage {child.stage} is gone, and was of "
                f"another recipe, which differs in {', '.join(changed)}; give the same values, or "
                f"--from {child.stage}, which trains it and all after it anew"
            )


def _changes(old: RunRecipe | None, new: RunRecipe | None) -> Iterator[str]:
    """Yield what two recipes differ in; nothing if they make the same results."""
    if old is not None and new is not None:
        yield from differing(old, new)
    else:
        was, now = (one.model_dump(mode="json") if one else {} for one in (old, new))
        yield from differences(was, now)


def check_answering(played: Recipe, bound: RunRecipe, run: str) -> None:
    """Refuse (RunError) to play by checkpoints of others to which the weights' run is not bound."""
    for name, key in played.answering_checkpoints().items():
        if name not in bound.named_checkpoints():
            raise RunError(
                f"{key} {name} is to answer beside the weights of the run {run}, whose recipe "
                "names no such checkpoint, so that it has no weights of it; give checkpoint:base, "
                "a model of LiteLLM, or train that run by a recipe with the same role"
            )


def check_binding(run: RunFolder, recipe: RunRecipe) -> None:
    """Raise RunError if a run was started with a recipe of other results, or in another format.

    The recipe of an evaluation may break rules of trained recipes, so the recorded one is validated
    only where a value that binds differs, or is of a newer key.
    """
    values, free = recipe.model_dump(mode="json"), recipe.changes_no_result()
    if not without_free(recipe_of(run), values, free):
        return
    if changed := differing(read_recipe(run), recipe):
        raise RunError(
            f"the run {run.path} was started with another recipe, which differs in "
            f"{', '.join(changed)}; give the same values, or another name with --run"
        )


def check_run(
    recipe: RunRecipe,
    run: RunFolder,
    deleted: Collection[str] = (),
    awaited: Mapping[str, RunRecipe] = MappingProxyType({}),
) -> None:
    """Refuse (UserError) what would end a run of any flow, new or not, before its first step."""
    _check_name(run, deleted)
    budget, there = recipe.budget, is_there(run, deleted)
    if there:
        check_binding(run, recipe)
        budget = budget_of(run, budget)
        bound, parent = read_manifest(run).get("bound", {}), parent_of(run)
    else:
        known, parent = _find_awaited(recipe, awaited), None
        found = bind_checkpoints(recipe, known)
        bound = {name: one for name, one in found.items() if name not in known}
        refuse_deleted((one["run"] for one in bound.values()), deleted)
    check_teachers(recipe, parent, bound)
    if not there and run.path.parent.name not in UNTRAINED_FOLDERS:
        check_places(recipe)
    check_tracker(recipe.tracking)
    check_service(recipe.model.base)
    check_priced(budget, recipe.model.base)


def check_tracker(chosen: Tracking) -> None:
    """Refuse (UserError) W&B if its library, which is not imported, is not installed."""
    if chosen.project is not None and find_spec("wandb") is None:
        raise UserError(
            "the recipe has tracking.project, and wandb is not installed: "
            "`pip install 'ratchet-rl[tracking]'`, or leave tracking.project empty"
        )


def check_teachers(recipe: RunRecipe, parent: Manifest | None, bound: Mapping[str, Any]) -> None:
    """Refuse (UserError) a teacher that is the policy itself.

    The policy is itself where its weights start: the base, a checkpoint of another run that it is
    `bound` to, or what a fork of `parent` begins with. A teacher that reads more is another.
    """
    start = recipe.model.start or BASE
    if parent is not None and parent["how"] == FORK and parent["step"] > 0:
        start = f"{parent['run']}@{parent['step']}"
    teachers = recipe.teachers()
    for model in teachers.models.values():
        of = bound.get(model)
        untrained = (
            model in (BASE, recipe.model.base)
            if of is None
            else of["step"] == 0 and of["model"]["start"] is None
        )
        if teachers.reads is None and (model == start or (untrained and start == BASE)):
            raise CheckpointRefused(
                f"{teachers.key} {model} is the policy itself, which starts from {start}, and "
                "teaches it nothing; give a checkpoint of another run, RUN@STEP, another model, "
                f"or {teachers.key.rpartition('.')[0]}.reads, what it reads and the policy does "
                "not; to stay near the start, give algorithm.kl.coefficient of flow train"
            )


def check_places(recipe: RunRecipe) -> None:
    """Refuse (UserError) a teacher of another service or server that cannot be asked."""
    teachers = recipe.teachers()
    for model in teachers.models.values():
        if "://" in model:
            _check_place(teachers.key, model, teachers.likeliest)


def _check_place(key: str, model: str, likeliest: int) -> None:
    from ratchet.adapters.clients.scoring_server import (  # imports a client that few runs need
        CHECK_SECONDS,
        TEACHER_KEY,
        ScoringServer,
        speaks_openai,
    )

    url = model.partition("#")[0]
    try:
        check_listener(url)
    except (OSError, ValueError) as error:
        raise CheckpointRefused(
            f"{key} {model} cannot be reached ({error}); start that service, or give another "
            "teacher"
        ) from error
    if speaks_openai(url):
        with ScoringServer(model, CHECK_SECONDS) as scoring:
            scoring.check(likeliest)
    elif not os.environ.get(TEACHER_KEY):
        raise CheckpointRefused(
            f"{key} {model} is of a service whose key is not there; set {TEACHER_KEY}. A server "
            "of OpenAI's API needs none; its URL has the path of the API, such as /v1"
        )


def check_choices(recipe: RunRecipe) -> None:
    """Refuse (DatasetError) an example that lacks its teacher's name, or what that one reads.

    Held-out rollouts have no teacher; held-out texts have one.
    """
    teachers, sources = recipe.teachers(), recipe.sources()
    if teachers.by is None and teachers.reads is None:
        return
    taught = [sources[split] for split in teachers.splits or sources]
    for row in chain.from_iterable(rows.examples() for rows in taught):
        if teachers.by is not None:
            choose_teacher(row["example"], teachers.by, teachers.models)
        if teachers.reads is not None:
            fill_reads(teachers.reads, row["example"])


def _check_name(run: RunFolder, deleted: Collection[str]) -> None:
    run.check_writable()
    if not run.exists():  # one that exists waits for space, or makes it where it is deleted
        check_output(run.manifest, "another folder of runs as RATCHET_RUNS")
    if has_plan(run) and run.name not in deleted:
        raise RunError(f"the run {run.path} is one of stages, or a sweep; give another name")


def is_there(run: RunFolder, deleted: Collection[str]) -> bool:
    """Return whether a run exists, and is not one of those that are to be `deleted` first."""
    return run.exists() and run.name not in deleted


def refuse_deleted(needed: Iterable[str], deleted: Collection[str]) -> None:
    """Refuse (RunError) to delete a run that the recipe needs."""
    if lost := sorted({*needed} & {*deleted}):
        raise RunError(
            f"the recipe needs the run {lost[0]}, which is to be deleted first; give the new run "
            "another name by --run, or name another run in the recipe"
        )


def refuse_absent(needed: Iterable[str]) -> None:
    """Refuse (RunError) a recipe that takes what is learnt from a run that does not exist."""
    for run in needed:
        if not (folder := folder_of(run)).exists():
            raise RunError(
                f"the recipe needs the run {run} ({folder.path} is not there); "
                f"`{training_command(run)}` makes it; or name one that `ratchet runs` lists"
            )


def check_service(base: str) -> None:
    """Refuse (UserError) a service or a base model that does not exist.

    A service is only looked for, and asked nothing, so it may still refuse a base model.
    """
    check_key()
    check_reachable()
    check_base(base)


def check_recipe(recipe: RunRecipe, run: RunFolder | None = None) -> None:
    """Refuse (UserError) a recipe that names what does not exist; quick checks come first.

    A `run` that has the tokens of its texts or pairs, and a fork of it, need their dataset no more.
    """
    check_service(recipe.model.base)
    if run is None or not run.given_files():
        for source in recipe.sources().values():
            source.examples()
        check_choices(recipe)
    if isinstance(recipe, Recipe):
        _check_agent(recipe)
    check_renderer(recipe.model)


def _check_agent(recipe: Recipe) -> None:
    _, asked = recipe.plays()
    if recipe.roles:
        from ratchet.adapters.door.backends import create_backends  # imports LiteLLM's parts

        create_backends(recipe.answerers, recipe.seed)
    others = sorted(role for role in asked if role != POLICY)
    load_agent(recipe.agent, others, placed=recipe.place.is_given)
    if recipe.place.is_given:
        warn_of_shown_keys(recipe.agent)
    if recipe.place.caged:
        check_cage()
    for judge in recipe.judges():
        load_agent(judge.agent or "")


def check_renderer(model: Model) -> None:
    """Refuse (UserError) a renderer that does not exist, or does not fit a model of this machine.

    So is a value of `thinking` that the renderer or template has no switch for.

    `auto` always fits a model that has a chat template.
    """
    renderer, folder = model.renderer, base_folder(model.base)
    if renderer == AUTO:
        if folder is not None:
            check_template(folder)
        if folder is None or model.thinking is None:
            return
    elif not renderer.startswith(TEMPLATE):
        config = find_config(renderer)
        if model.thinking is not None:
            set_thinking(config, model.thinking)
    if folder is not None:
        from renderers.base import load_tokenizer

        from ratchet.adapters.rendering.chat import Chat

        Chat(load_tokenizer(str(folder)), renderer, thinking=model.thinking)
