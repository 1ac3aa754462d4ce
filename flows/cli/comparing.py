"""The commands that compare checkpoints and models, and name the better one."""

from typing import TYPE_CHECKING, Annotated

import typer

from adapters.errors import UserError, counted
from adapters.process.terminal import WIDTH, on_one_line, say, show, terminal_width, write_data
from flows.cli.command_line import Overrides, Verbose, call_flow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flows.recipe.recipe import Recipe
    from tasks.comparison.comparisons import Comparison

app = typer.Typer()

LONGEST_TEXT = 160
"""Letters of a question or an answer that are shown."""
NAMES = (
    *("target", "reward", "difference", "95 % interval", "p", "won", "lost", "tied"),
    *("failed", "tokens", "USD"),
)

Examples = Annotated[int | None, typer.Option(min=1, help="Short for --set evaluation.examples=N.")]


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
    examples: Examples = None,
    dataset: Annotated[str | None, typer.Option(help="Short for --set dataset.path=…")] = None,
    set_: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead.")] = False,
    verbose: Verbose = False,
) -> None:
    """Compare checkpoints and models on the same held-out examples, with the same seeds."""
    from flows.recipe.loading import named_recipe

    short = {"evaluation.examples": examples, "dataset.path": dataset}
    overrides = [*(set_ or []), *(f"{key}={n}" for key, n in short.items() if n is not None)]
    comparison = _play(named_recipe(agent, overrides), targets, against)
    if json:
        write_data(f"{comparison.model_dump_json(indent=2)}\n".encode())
    else:
        say(_describe(comparison))


@app.command()
def promote(
    checkpoint: Annotated[str, typer.Argument(help="RUN, RUN@STEP, RUN@best, or another name.")],
    name: Annotated[str, typer.Argument(help="The name that the checkpoint is to have.")],
    if_: Annotated[
        str | None,
        typer.Option("--if", help='"reward > NAME": promote only what is shown to be better.'),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="The recipe whose agent plays; by default the run's own.")
    ] = None,
    examples: Examples = None,
    set_: Overrides = None,
    verbose: Verbose = False,
) -> None:
    """Give a checkpoint a name, in place of the one that had it, or only if it is better."""
    from flows.comparison.promote import check_better, plan_promotion, read_condition
    from tasks.comparison.promotions import read_promotions, record_promotion
    from tasks.storage.manifest import recipe_of
    from tasks.storage.run_folder import folder_of

    planned, said = plan_promotion(checkpoint, name), ""
    if if_ is not None:
        overrides = [*(set_ or []), *([f"evaluation.examples={examples}"] if examples else [])]
        recipe = _recipe_of(planned.run, agent, overrides)
        comparison = _play(recipe, [read_condition(if_), planned.checkpoint])
        gain = check_better(planned.checkpoint, comparison)
        said = f"reward less that of {comparison.against}: {gain}"
    elif agent or examples or set_:
        raise UserError("--agent, --examples and --set do nothing without --if; leave them out")
    before = read_promotions().get(name)
    record_promotion(planned)
    say(f"{name} is {planned.checkpoint}{f', and was {before.checkpoint}' if before else ''}")
    if said:
        say(said)
    if kept := recipe_of(folder_of(planned.run))["checkpoints"]["ttl_seconds"]:
        show(f"expires {kept:,} s after it was saved, by checkpoints.ttl_seconds of its run")
    show(f"serve   ratchet serve {name}")


def _recipe_of(run: str, agent: str | None, overrides: "Sequence[str]") -> "Recipe":
    """Return the recipe whose agent plays: one that is named, or that of a run."""
    from flows.recipe.loading import TRAIN, changed_recipe, named_recipe
    from tasks.storage.manifest import recipe_of
    from tasks.storage.run_folder import folder_of

    if agent is not None:
        return named_recipe(agent, overrides)
    own = recipe_of(folder_of(run))
    if own["flow"] != TRAIN:
        raise UserError(f"the run {run} of flow {own['flow']} plays no agent; give --agent NAME")
    return changed_recipe(own, overrides)


def _play(recipe: "Recipe", targets: "Sequence[str]", against: str | None = None) -> "Comparison":
    from flows.comparison.compare import compare as flow
    from flows.comparison.compare import find_targets

    find_targets(recipe, targets, against)  # refuses before anything starts
    said = "stopped; the same command goes on, and repeats no game"
    return call_flow(flow, lambda: said, recipe=recipe, targets=targets, against=against)


def _describe(comparison: "Comparison") -> str:
    """Return a comparison as a table, with the examples on which the targets differ most."""
    from tasks.reports.tables import fitted
    from tasks.storage.run_folder import folder_of

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
    parts = [fitted(NAMES, rows, min(terminal_width(), WIDTH), ["target"])]
    parts += [part for one in comparison.targets if (part := _differing(comparison, one.target))]
    folder = folder_of(comparison.folder).path
    played = counted(comparison.examples, "example")
    said = f"{played}, each compared with {comparison.against}: {folder}"
    return "\n\n".join([*parts, said])


def _differing(comparison: "Comparison", target: str) -> str:
    """Return the examples on which a target and the other one differ most, as text."""
    from tasks.comparison.comparisons import most_different

    blocks = [f"{target} and {comparison.against} differ most in"]
    for own, other in most_different(comparison, target):
        answers = [(f"{one['reward']:.3g}", one["target"], one["answer"]) for one in (own, other)]
        lines = [f"example {own['example_id']}: {_shown(own['question'])}"]
        lines += [f"    {reward}  {name}: {_shown(answer)}" for reward, name, answer in answers]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) if blocks[1:] else ""


def _shown(text: str | None) -> str:
    """Return the beginning and the end of a text, on one line and without control characters."""
    from tasks.reports.tables import shorten

    return shorten(on_one_line(" ".join((text or "-").split())), LONGEST_TEXT)
