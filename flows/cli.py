"""The command line: thin over the flows."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adapters.errors import UserError

if TYPE_CHECKING:
    from flows.outcome import Outcome

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains the agents you already have, and never slips back.",
)

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

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
        str | None, typer.Option(help="The run's name; an existing one is continued.")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show Prefect's own log.")] = False,
) -> None:
    """Train an agent's model; a run that exists continues where it stopped."""
    from flows.deployments import named_recipe

    overrides = [*(set_ or []), *([f"steps={steps}"] if steps else [])]
    recipe = named_recipe(name, overrides)
    run = run or f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    quiet_prefect(verbose)
    from flows.progress import showing_progress
    from flows.train import train as flow
    from tasks.runs import runs_root

    started = time.monotonic()
    with showing_progress(runs_root() / run, recipe.steps):
        outcome = flow(recipe=recipe, run=run)
    print(closing_line(outcome, runs_root() / run, time.monotonic() - started))


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
