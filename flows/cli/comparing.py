"""The commands that compare checkpoints and models, and name the better one."""

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.adapters.errors import counted
from ratchet.adapters.process.terminal import on_one_line, say, show, table_width, write_json
from ratchet.flows.cli.command_line import Overrides, Verbose, call_flow
from ratchet.flows.cli.inspect_runs import AsJson
from ratchet.tasks.storage.run_folder import folder_of

if TYPE_CHECKING:
    from ratchet.tasks.comparison.comparisons import Comparison

app = typer.Typer()

LONGEST_TEXT = 160
"""Letters of a question or an answer that are shown."""
TARGET_COLUMNS = (
    *("target", "reward", "difference", "95 % interval", "p", "won", "lost", "tied"),
    *("failed", "tokens", "USD"),
)


@app.command()
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
    """Compare checkpoints and models on the same held-out examples, with the same seeds."""
    from ratchet.flows.recipe.loading import named_recipe

    short = {"evaluation.examples": examples, "dataset.path": dataset}
    overrides = [*(set_ or []), *(f"{key}={n}" for key, n in short.items() if n is not None)]
    recipe = named_recipe(agent, overrides)
    from ratchet.flows.compare import compare as flow
    from ratchet.flows.compare import find_targets

    find_targets(recipe, targets, against)  # refuses before anything starts
    stopped = "stopped; the same command goes on, and repeats no game"
    comparison = call_flow(flow, lambda: stopped, recipe=recipe, targets=targets, against=against)
    if as_json:
        write_json(comparison.model_dump(mode="json"))
    else:
        say(_describe(comparison))
    if gate:
        comparison.check_gains()


@app.command()
def promote(
    checkpoint: Annotated[str, typer.Argument(help="RUN, RUN@STEP, RUN@best, or another name.")],
    name: Annotated[str, typer.Argument(help="The name that the checkpoint is to have.")],
) -> None:
    """Give a checkpoint a name, in place of the one that had it."""
    from ratchet.flows.checkpoints.binding import promote as record
    from ratchet.tasks.storage.manifest import recipe_of

    promoted, before = record(checkpoint, name)
    say(f"{name} is {promoted.checkpoint}{f', and was {before.checkpoint}' if before else ''}")
    if kept := recipe_of(folder_of(promoted.run))["checkpoints"]["ttl_seconds"]:
        show(f"expires {kept:,} s after it was saved, by checkpoints.ttl_seconds of its run")
    show(f"serve   ratchet serve {name}")


def _describe(comparison: "Comparison") -> str:
    """Return a comparison as a table, with the examples on which the targets differ most."""
    from ratchet.tasks.reports.tables import fitted

    rows: list[list[object]] = []
    for one in comparison.targets:
        row: list[object] = [one.target, one.reward]
        if (by := one.difference) is not None:
            interval = " to ".join(f"{end:+.3f}" for end in by.interval or ()) or None
            mean = None if by.mean is None else f"{by.mean:+.3f}"
            row += [mean, interval, by.p_value, by.won, by.lost, by.tied]
        else:
            row += [None] * 6
        rows.append([*row, one.failed or None, one.tokens, one.cost])
    parts = [fitted(TARGET_COLUMNS, rows, table_width(), ["target"])]
    parts += [part for one in comparison.targets if (part := _differing(comparison, one.target))]
    folder = folder_of(comparison.folder).path
    played = counted(comparison.examples, "example")
    said = f"{played}, each compared with {comparison.against}: {folder}"
    return "\n\n".join([*parts, said])


def _differing(comparison: "Comparison", target: str) -> str:
    """Return the examples on which a target and the other one differ most, as text."""
    from ratchet.tasks.comparison.comparisons import most_different

    blocks = [f"{target} and {comparison.against} differ most in"]
    for own, other in most_different(comparison, target):
        answers = [(f"{one['reward']:.3g}", one["target"], one["answer"]) for one in (own, other)]
        lines = [f"example {own['example_id']}: {_shown(own['question'])}"]
        lines += [f"    {reward}  {name}: {_shown(answer)}" for reward, name, answer in answers]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) if blocks[1:] else ""


def _shown(text: str | None) -> str:
    """Return the beginning and the end of a text, on one line and without control characters."""
    from ratchet.tasks.reports.tables import shorten

    return shorten(on_one_line(" ".join((text or "-").split())), LONGEST_TEXT)
