"""The command line: thin over the flows."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapters.engines import engine_begun
from adapters.errors import UserError
from flows.ahead import server_begun
from flows.asking import IfExists, settle

if TYPE_CHECKING:
    from flows.outcome import Outcome
    from flows.recipe import Recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains the agents you already have, and never slips back.",
)

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Run = Annotated[str, typer.Argument(help="A run's name; `ratchet runs` lists them.")]
Verbose = Annotated[bool, typer.Option(help="Show Prefect's own log.")]
Name = Annotated[str, typer.Argument(help="A training deployment of prefect.yaml, such as hello.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value over the recipe; `ratchet keys` lists the keys."),
]


@app.command()
def train(
    name: Name,
    set_: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set steps=N.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The run's name; that of the agent and the time if empty.")
    ] = None,
    if_exists: Annotated[
        IfExists, typer.Option(help="What to do where the run exists; only a terminal is asked.")
    ] = IfExists.ASK,
    verbose: Verbose = False,
) -> None:
    """Train an agent's model."""
    from flows.deployments import named_recipe

    overrides = [*(set_ or []), *([f"steps={steps}"] if steps else [])]
    recipe = named_recipe(name, overrides)
    run = run or f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    settle(run, if_exists)
    trained(run, recipe, verbose)


@app.command()
def resume(run: Run, verbose: Verbose = False) -> None:
    """Go on with a run where it stopped, by the recipe it was started with."""
    from flows.deployments import changed_recipe
    from tasks.runs import folder_of, recipe_of

    trained(run, changed_recipe(recipe_of(folder_of(run))), verbose)


@app.command()
def fork(
    run: Run,
    at: Annotated[int, typer.Option(help="How many of its steps the fork shares.")],
    as_: Annotated[str | None, typer.Option("--as", help="The fork's name.")] = None,
    set_: Overrides = None,
    verbose: Verbose = False,
) -> None:
    """Go on with a copy of a run from any of its steps; what lies before is shared, not copied."""
    from flows.deployments import changed_recipe
    from tasks.forks import fork_run
    from tasks.runs import folder_of, recipe_of

    parent, name = folder_of(run), as_ or f"{run}-at-{at}"
    recipe = changed_recipe(recipe_of(parent), set_ or [])
    fork_run(parent, name, at, recipe.model_dump(mode="json"), recipe.fingerprint())
    trained(name, recipe, verbose)


@app.command()
def replay(
    run: Run,
    set_: Overrides = None,
    as_: Annotated[str | None, typer.Option("--as", help="The new run's name.")] = None,
    verbose: Verbose = False,
) -> None:
    """Train anew from a run's recorded rollouts, say with another algorithm; nothing is sampled."""
    from flows.deployments import changed_recipe
    from tasks.forks import replay_run
    from tasks.runs import folder_of, recipe_of

    parent, name = folder_of(run), as_ or f"{run}-replay-{datetime.now():%Y%m%d-%H%M%S}"
    recipe = changed_recipe(recipe_of(parent), set_ or [])
    replay_run(parent, name, recipe.model_dump(mode="json"), recipe.fingerprint())
    trained(name, recipe, verbose)


@app.command()
def evaluate(
    name: Name,
    set_: Overrides = None,
    run: Annotated[
        str | None, typer.Option(help="Whose checkpoint; the agent's newest run.")
    ] = None,
    checkpoint: Annotated[int | None, typer.Option(help="After how many steps; the last.")] = None,
    verbose: Annotated[bool, typer.Option(help="Show Prefect's own log.")] = False,
) -> None:
    """Score a checkpoint on held-out examples."""
    from flows.deployments import named_recipe

    recipe = named_recipe(name, set_ or [])
    quiet_prefect(verbose)
    from flows.evaluate import evaluate as flow

    scores = flow(recipe=recipe, run=run, checkpoint=checkpoint)
    print(json.dumps({how: score.model_dump() for how, score in scores.items()}, indent=2))


@app.command()
def runs() -> None:
    """List the runs of this folder."""
    from tasks.reports import runs_table
    from tasks.runs import runs_root

    print(runs_table(runs_root()))


@app.command()
def sql(statement: Annotated[str, typer.Argument(help="One statement, in DuckDB's SQL.")]) -> None:
    """Ask the files of a run: spans, trajectories, datums and metrics."""
    import duckdb

    try:
        duckdb.connect().sql(statement).show(max_width=160)
    except duckdb.Error as error:
        raise UserError(str(error)) from error


@app.command()
def keys() -> None:
    """List every key of a recipe, for --set."""
    from flows.deployments import recipe_options

    print(recipe_options())


@app.command(context_settings=PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Serve the Tinker API on this machine, for any Tinker program."""
    os.execv(sys.executable, [sys.executable, "-m", "engine", *context.args])


@app.command()
def pretrain(
    folder: Annotated[
        Path, typer.Option(help="Where it is built; an interrupted one goes on.")
    ] = Path("runs/pretrain"),
    seed: Annotated[int, typer.Option(help="Of the weights and of every document.")] = 0,
) -> None:
    """Build the engine's tiny base model anew; takes about an hour on two cores."""
    quiet_prefect(verbose=True)
    from flows.pretrain import pretrain as flow

    built = flow(folder=folder, seed=seed)
    print(f"{built} is ready: `ratchet engine --base-model {built.resolve()}` serves it")


def trained(run: str, recipe: "Recipe", verbose: bool) -> None:
    """Run the flow that a run is of, with a bar, and say what came of it."""
    quiet_prefect(verbose)
    started = time.monotonic()
    with engine_begun(recipe.model.base), server_begun() as answers:
        from flows.progress import showing_progress
        from tasks.runs import folder_of

        folder = folder_of(run)
        with showing_progress(folder, recipe.steps):
            flow = _flow_of(folder)
            answers()
            outcome = flow(recipe=recipe, run=run)
    if outcome.drift:
        print(f"drift (kl_sample_train_v2) by step: {' '.join(f'{d:.2g}' for d in outcome.drift)}")
    print(closing_line(outcome, folder, time.monotonic() - started))


def _flow_of(folder: Path) -> "Callable[..., Outcome]":
    from tasks.forks import REPLAY, parent_of
    from tasks.runs import exists

    parent = parent_of(folder) if exists(folder) else None
    if parent and parent["how"] == REPLAY:
        from flows.replay import replay

        return partial(replay, parent=parent["run"])
    from flows.train import train

    return train


def closing_line(outcome: "Outcome", folder: Path, seconds: float) -> str:
    """What was won, in how long, and where to look."""
    before, after = (
        "unknown" if reward is None else f"{reward:.2f}"
        for reward in (outcome.before, outcome.after)
    )
    statement = f"from '{folder}/metrics.jsonl'"
    return (
        f"held-out reward {before} → {after} in {outcome.steps} steps: {outcome.seconds:.0f} s of "
        f"sampling and training, {seconds:.0f} s in all. The run is {folder}; see it in Prefect's "
        f'UI with `make server`, and by SQL with `ratchet sql "{statement}"`'
    )


def quiet_prefect(verbose: bool) -> None:
    """Prefect reads its settings when it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if verbose else "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TINKER_TELEMETRY", "0")


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can mend is said in one line; the rest keeps its stack trace."""
    try:
        yield
    except UserError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """The console script `ratchet`."""
    sys.path.insert(0, str(Path.cwd()))  # agents of the project that we are run in
    with plain_errors():
        app()


if __name__ == "__main__":
    main()
