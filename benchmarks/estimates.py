"""What runs spend beside what `ratchet estimate` says of them before, on the tiny base.

python -m benchmarks.estimates --folder runs/estimates
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from adapters.tinker.engines import engines_kept
from flows.estimating.whole import Estimating
from flows.recipe.loading import named_recipe
from flows.recipe.run_recipe import RunRecipe
from flows.server.prefect_startup import quiet_prefect, start_server
from flows.stages import FLOWS
from tasks.recording.views import open_views
from tasks.spending.estimate import ESTIMATED
from tasks.spending.ledger import read_ledger
from tasks.spending.ranges import Range
from tasks.storage.run_folder import RunFolder, runs_root

FEW = ("rollouts.groups=8", "rollouts.group_size=4", "evaluation.examples=16")
CASES: Mapping[str, tuple[str, ...]] = {
    "hello": ("hello", "steps=10", *FEW),
    "arithmetic": ("arithmetic", "steps=6", *FEW),
    "guess_the_number": ("guess_the_number", "steps=5", *FEW),
    "judge": (
        *("hello", "steps=4", *FEW, "judge.agent=judge:pairs", "judge.max_tokens=4"),
        "roles.judge=policy",
    ),
    "reference": ("hello", "steps=5", *FEW, "algorithm.kl.coefficient=0.1"),
    "two policies": ("whispers-apart", "steps=4", *FEW),
    "texts": ("hello-finetune", "epochs=1"),
    "pairs": ("hello-prefer", "epochs=0.5"),
    "lag": ("hello", "steps=6", *FEW, "rollouts.lag=1", "evaluation.every=2"),
    "minibatches": ("hello", "steps=4", *FEW, "optimizer.substeps=2", "optimizer.epochs=2"),
    "expert": ("hello-chord", "steps=4", *FEW),
    "self-play": ("hello-duel", "steps=5", *FEW),
}
"""Name of a run → its recipe, and what is set in it."""

DRIFT = """
with steps as (
    select
        step,
        sum(gen_ai_usage_input_tokens) / count(distinct rollout_id) as prompts,
        sum(gen_ai_usage_output_tokens) / count(distinct rollout_id) as sampled
    from spans
    where kind = 'llm' and error_type is null and split_of(group_id) = 'train'
    group by step
),
trained as (
    select
        coalesce(sum(len(tokens)) filter (step = 0), 0) as first,
        sum(len(tokens)) / (select count(*) from steps) as every
    from datums
)
select
    avg(prompts) / arg_min(prompts, step) as prompts,
    avg(sampled) / arg_min(sampled, step) as sampled,
    (select every / nullif(first, 0) from trained) as trained
from steps
"""
"""What training changes: the tokens of a step, as the mean of a run by those of its first step."""


def main() -> None:
    """Estimate and train each case; print a row for each, and how many were as estimated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/estimates"))
    parser.add_argument("--only", action="append", choices=[*CASES], help="of the cases")
    options = parser.parse_args()
    os.environ["RATCHET_RUNS"] = str(options.folder)
    names = options.only or [*CASES]
    quiet_prefect(verbose=False)
    columns = ["run", *(end for kind in ESTIMATED for end in (kind, "spent")), "seconds", "taken"]
    print(f"| {' | '.join([*columns, 'inside'])} |\n|{'---|' * (len(columns) + 1)}", flush=True)
    with engines_kept(), start_server() as served, served():
        inside = [_compare(name) for name in names]
    print(f"\n{sum(inside)} of {len(inside)} runs have spent what was estimated.", flush=True)
    _show_drift(options.folder, names)


def _compare(name: str) -> bool:
    """Estimate and train a case; print its row, and return whether all tokens are inside."""
    recipe, *settings = CASES[name]
    run, made = _run_of(name), named_recipe(recipe, settings, RunRecipe)
    estimate = Estimating(_train, f"dryruns/{run}", examples=4).estimate(made, run)
    started = time.monotonic()
    _train(made, run)
    taken = time.monotonic() - started
    spent = read_ledger(RunFolder(runs_root() / run)).tokens(answered=True)
    cells, held = [name], list[bool]()
    for kind, estimated in estimate.tokens().items():
        used = spent["prefill"] + spent["cached"] if kind == "prompts" else spent[kind]
        held.append(estimated.holds(used))
        cells += [_ends(estimated), f"{used:,}"]
    seconds = estimate.seconds()
    cells += ["-" if seconds is None else _ends(seconds), f"{taken:.0f}"]
    print(f"| {' | '.join([*cells, 'yes' if all(held) else 'no'])} |", flush=True)
    return all(held)


def _train(recipe: RunRecipe, run: str) -> None:
    FLOWS[recipe.flow](recipe=recipe, run=run)


def _ends(of: Range) -> str:
    low, high = f"{of.low:,.0f}", f"{of.high:,.0f}"
    return low if low == high else f"{low} to {high}"


def _run_of(name: str) -> str:
    return name.replace(" ", "-")


def _show_drift(folder: Path, names: Sequence[str]) -> None:
    """Print what training has changed in each run that has played rollouts."""
    print("\n| run | prompts | sampled | trained |\n|---|---|---|---|")
    for name in names:
        run = RunFolder(folder / _run_of(name))
        with open_views([run], ("spans", "datums")) as views:
            found = views.sql(DRIFT).fetchall()
        for ratios in found if found[0][0] is not None else ():
            said = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            print(f"| {name} | {' | '.join(said)} |")


if __name__ == "__main__":
    main()
