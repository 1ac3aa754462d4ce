"""The commands about a recipe: its import, a dry run of it, and where it is trained."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ratchet.adapters.door.roles import FUNCTION, is_untrained, policy_of, roles_of_policies
from ratchet.adapters.errors import UserError
from ratchet.adapters.process.terminal import show, terminal_width, write_data, write_json
from ratchet.adapters.tinker.bases import has_tokenizer, is_here, open_tokenizer
from ratchet.adapters.tinker.engines import LOCAL
from ratchet.flows.cli.commands import AsJson, Name, Overrides, Verbose
from ratchet.flows.importing.trinity import import_trinity
from ratchet.flows.opening.checks import check_start
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.flows.recipe.loading import named_recipe
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.recipe.run_recipe import RunRecipe
from ratchet.tasks.reports.facts import ask_failures
from ratchet.tasks.settings.algorithm import Divergence, Teacher
from ratchet.tasks.settings.run import Model, Tracking
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.run_folder import folder_of, name_run

EXAMPLES = 4
"""Examples that are played, or rows that are shown, by default."""


def trinity(
    file: Annotated[typer.FileText, typer.Argument(help="A configuration of Trinity-RFT 0.6.0.")],
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the recipe; by default the terminal.")
    ] = None,
) -> None:
    text = import_trinity(file.name, file.read(), set_ or [])
    if out is None:
        write_data(text.encode())
        return
    show(f"{write_text(out, text)} is a recipe: `ratchet train {out}` trains it")


def dryrun(
    name: Name,
    set_: Overrides = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples to play, twice each, or rows to show: 4, or 1 with --say."
        ),
    ] = None,
    say_: Annotated[
        Path | None,
        typer.Option("--say", exists=True, help="JSON lines of the model's turns, in its place."),
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the files, for `ratchet sql`.")] = False,
    online: Annotated[
        bool, typer.Option(help="Use the recipe's own model, service and helper models.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    recipe = named_recipe(name, set_ or [], RunRecipe)
    if isinstance(recipe, GivenRecipe):
        _write_report(describe_given(recipe, examples or EXAMPLES, online=online), as_json=as_json)
        return
    assert isinstance(recipe, Recipe), "no other flow plays rollouts"
    from ratchet.flows.cli.training import call_flow, now

    whole, recipe = recipe, prepare_rollouts(recipe, examples, say_, online=online)
    run = f"dryruns/{name_run(Path(name).stem, now(), str(os.getpid()))}"
    folder = folder_of(run)
    check_start(recipe, folder)
    from ratchet.flows.dryrun import dryrun as flow
    from ratchet.flows.recipe.whole_recipe import multiply_played

    def explain() -> str:
        return f"stopped; {folder.path if folder.exists() else 'nothing'} is left"

    try:
        result = call_flow(flow, explain, recipe=recipe, run=run, said=say_)
        taken = multiply_played(whole, folder, result.rollouts)
    finally:
        if not keep and folder.exists():
            folder.delete()
    said = {"report": f"{result.report}\n\n{taken}", "whole": asdict(taken)}
    _write_report({**result.model_dump(mode="json"), **said}, as_json=as_json)
    if keep:
        query = ask_failures(run) if result.failed else f"ratchet sql --run {run} 'from rollouts'"
        show(f"\nkept in {folder.path}; {query}", sys.stderr if as_json else None)
    result.check()


def doctor(
    name: Annotated[str | None, typer.Argument(help="A recipe to train there.")] = None,
    set_: Overrides = None,
    url: Annotated[
        str | None, typer.Option(help="The service; by default TINKER_BASE_URL, or the engine.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model; by default the recipe's, or the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from ratchet.flows.recipe.service_needs import Examined

    examined = Examined.ask(name, set_ or [], url, base)
    if as_json:
        write_json(examined.record())
    else:
        show(examined.table(terminal_width()))
        show(examined.verdict())
    if examined.refuses:
        raise SystemExit(UserError.status)


def _write_report(record: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        write_json(record)
    else:
        show(str(record["report"]))
    if record["whole"] is None:
        raise UserError("no row is left of a source to train on; see above, and mend its rows")


def shrink(recipe: Recipe, examples: int) -> Recipe:
    """Return the recipe with one step of `examples` examples, two rollouts each."""
    rollouts = recipe.rollouts.model_copy(update={"groups": examples, "group_size": 2})
    changes = {"steps": 1, "epochs": 0, "rollouts": rollouts, "tracking": Tracking()}
    return recipe.model_copy(update=changes)


def prepare_rollouts(
    recipe: Recipe, examples: int | None, said: Path | None, *, online: bool
) -> Recipe:
    """Return the recipe by which an agent is tried, in this process's own place.

    What a stand-in says is the same in all rollouts, so that it plays one example by default.
    """
    if said is not None:
        from ratchet.adapters.door.stand_in import read_turns  # imports the SDK

        read_turns(said, roles_of_policies(recipe.answerers))
    recipe = shrink(recipe, examples or (EXAMPLES if said is None else 1))
    if said is not None:
        recipe = leave_to_file(recipe)
    if said is not None or not online:
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
            os.environ.pop(name, None)
    return recipe if online else take_offline(recipe, told=said is not None)


def leave_to_file(recipe: Recipe) -> Recipe:
    """Return the recipe for a stand-in: no weights are needed to play it, or to read its tokens."""
    algorithm = recipe.algorithm.model_copy(update={"kl": Divergence(), "teacher": Teacher()})
    model = recipe.model.model_copy(update={"start": None, "start_optimizer": False})
    here = {"runner": "threads", "cluster": None, "door": None}
    rollouts = recipe.rollouts.model_copy(update=here)
    changes = {"algorithm": algorithm, "model": model, "rollouts": rollouts}
    return recipe.model_copy(update=changes)


def take_offline(recipe: Recipe, *, told: bool = False) -> Recipe:
    """Return the recipe with the tiny model, unless its own is on this machine.

    If a file is `told`, the model's tokenizer is enough. Other roles must be scripted.
    """
    for role, answerer in recipe.answerers.items():
        if not (policy_of(answerer) or is_untrained(answerer) or answerer.startswith(FUNCTION)):
            raise UserError(
                f"the role {role} is answered by {answerer}, which needs a network: allow it by "
                f'--online, or script it by --set \'roles={{"{role}": "{FUNCTION}module:name"}}\''
            )
    for model in recipe.algorithm.teacher.models:
        if "://" in model:
            raise UserError(
                f"the teacher {model} is of another service, which needs a network: allow it by "
                "--online, or give --set algorithm.teacher.models=RUN@STEP"
            )
    base = recipe.model.base
    if base.startswith(LOCAL) or is_here(base):
        return recipe
    if told:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's library is imported
        if has_tokenizer(base):
            return recipe
    tiny = {"base": Model().base, "renderer": Model().renderer, "thinking": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=tiny)})


def describe_given(
    recipe: GivenRecipe, examples: int, *, online: bool = False
) -> dict[str, object]:
    """Describe the texts or pairs of a recipe as they are trained: the first ones, and counts.

    The tokenizer is the recipe's own model's; its weights are not read.
    """
    if not online:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub's library is imported
    from ratchet.adapters.rendering.chat import Chat
    from ratchet.flows.recipe.whole_recipe import count_given
    from ratchet.tasks.given.tallies import describe_rows, tally_rows

    divided = dict.fromkeys(one.describe_division() for one in recipe.sources().values())
    model = recipe.model
    chat = Chat(open_tokenizer(model.base), model.renderer, thinking=model.thinking)
    given = recipe.units(folder_of(recipe.subject))
    sources, lengths = recipe.given_examples(), recipe.dataset
    tallies = tally_rows(given, sources, chat, lengths, examples)
    whole = count_given(recipe, tallies)
    said = [describe_rows(tallies, sources, chat, lengths), *divided, str(whole or "")]
    return {"report": "\n\n".join(filter(None, said)), "whole": whole and asdict(whole)}
