"""The commands about checkpoints: they are scored, compared, named, served and written."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import show, terminal_width, write_json
from ratchet.adapters.project.hub import check_push, push
from ratchet.flows.checkpoints.names import find_weights
from ratchet.flows.checkpoints.names import promote as record
from ratchet.flows.checkpoints.serving import serve_model, serve_until, stdin_closed
from ratchet.flows.cli.commands import AsJson, Name, Overrides, Port, Verbose
from ratchet.flows.cli.training import call_flow
from ratchet.flows.opening.eval_targets import find_target
from ratchet.flows.recipe.loading import named_recipe
from ratchet.tasks.comparison.comparisons import most_different
from ratchet.tasks.reports.tables import describe_comparison, scores_table
from ratchet.tasks.storage.files import check_absent
from ratchet.tasks.storage.manifest import recipe_of
from ratchet.tasks.storage.run_folder import folder_of


def evaluate(
    name: Name,
    set_: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="RUN, RUN@STEP, RUN@best, a promoted name, base, LiteLLM's, URL#MODEL."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The run to evaluate; by default the agent's newest.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(help="The checkpoint's step; by default the last.")
    ] = None,
    redo_failed: Annotated[
        bool, typer.Option("--redo-failed", help="Play again the rollouts that failed before.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    recipe = named_recipe(name, set_ or [])
    find_target(recipe, run, checkpoint, model)
    from ratchet.flows.evaluate import evaluate as flow

    said = "stopped; the same command goes on, and repeats no game"
    asked = {"run": run, "checkpoint": checkpoint, "model": model, "redo_failed": redo_failed}
    evaluated = call_flow(flow, lambda: said, recipe=recipe, **asked)
    if as_json:
        write_json(evaluated.model_dump(mode="json"))
        return
    show(scores_table(evaluated.scores))
    if failed := sum(score.failed for score in evaluated.scores.values()):
        them = "it" if failed == 1 else "them"
        again = f"the same command with --redo-failed plays {them} again"
        show(f"\n{counted(failed, 'rollout')} failed: mend the agent, and {again}")
    show(f"\nnumbers {evaluated.file}")
    for games in evaluated.games.values():
        show(f"games   {games}")


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(help="RUN, RUN@STEP, RUN@best, a promoted name, base, or LiteLLM's models."),
    ],
    agent: Annotated[
        str, typer.Option(help="The recipe whose agent plays: a deployment, example or YAML file.")
    ],
    against: Annotated[
        str | None, typer.Option(help="The target to compare with; by default the first.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Short for --set evaluation.examples=N.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Short for --set dataset.path=…")] = None,
    set_: Overrides = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="End with status 1 unless each is shown to be better.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    short = {"evaluation.examples": examples, "dataset.path": dataset}
    overrides = [*(set_ or []), *(f"{key}={n}" for key, n in short.items() if n is not None)]
    recipe = named_recipe(agent, overrides)
    from ratchet.flows import compare as comparing

    comparing.find_targets(recipe, targets, against)  # refuses before anything starts
    said = "stopped; the same command goes on, and repeats no game"
    asked = {"targets": targets, "against": against}
    comparison = call_flow(comparing.compare, lambda: said, recipe=recipe, **asked)
    if as_json:
        write_json(comparison.model_dump(mode="json"))
    else:
        apart = {one.target: most_different(comparison, one.target) for one in comparison.targets}
        show(describe_comparison(comparison, apart, terminal_width()))
    if gate:
        comparison.check_gains()


def promote(
    checkpoint: Annotated[str, typer.Argument(help="RUN, RUN@STEP, RUN@best, or another name.")],
    name: Annotated[str, typer.Argument(help="The name that the checkpoint is to have.")],
) -> None:
    promoted, before = record(checkpoint, name)
    show(f"{name} is {promoted.checkpoint}{f', and was {before.checkpoint}' if before else ''}")
    if kept := recipe_of(folder_of(promoted.run))["checkpoints"]["ttl_seconds"]:
        show(f"expires {kept:,} s after it was saved, by checkpoints.ttl_seconds of its run")
    show(f"serve   ratchet serve {name}")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="RUN, RUN@STEP, RUN:POLICY@STEP, a promoted name, an export, or a base model."
        ),
    ],
    port: Port = 0,
) -> None:
    with serve_model(find_weights(model), port) as (endpoint, service):
        for variable, value in endpoint.variables().items():
            show(f"export {variable}={value}")
        serve_until(stdin_closed(), service)
    show(
        "ratchet: stdin has ended, and so has the server; `sleep infinity | ratchet serve …` keeps "
        "one in the background",
        sys.stderr,
    )


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="RUN, RUN@STEP, RUN:POLICY@STEP or a promoted name.")
    ],
    out: Annotated[Path, typer.Option(help="The new folder; nothing is written over.")],
    format_: Annotated[
        Literal["peft", "merged"],
        typer.Option("--format", help="An adapter of PEFT's, or the base with it merged in."),
    ] = "peft",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Type of merged weights; bfloat16 is half as large, and rounds."),
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest difference of log-probabilities to the service's; by default 1e-4 on "
            "the engine of this machine, else 0.1.",
        ),
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option("--push", help="hub:OWNER/NAME: push the folder to this model of the hub."),
    ] = None,
) -> None:
    check_absent(out)
    model = None if push_to is None else check_push(push_to)
    weights = find_weights(checkpoint)
    from ratchet.flows import export as exporting

    form = exporting.ExportForm(format_, dtype, tolerance)
    exported = exporting.export(weights, out, form)
    show(f"{out} has {exported.name}, {exported.contents}")
    lines = {
        "checked": [str(exported.parity)],
        "note": exported.notes(),
        "serve": [f"ratchet serve {out}"],
    }
    for label, said in lines.items():
        for line in said:
            show(f"{label:8}{line}")
    if model is not None:
        show(f"pushed  {push(out, model, f'Add {exported.name}')}")
