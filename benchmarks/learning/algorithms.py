"""The tables of docs/algorithms.md, and what each algorithm learns, by seeds, beside the others.

python -m benchmarks.learning.algorithms              print the tables
python -m benchmarks.learning.algorithms --seeds 3    train each algorithm, print what it learnt
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.interruptions import killable_runs
from benchmarks.measuring import describe_machine, format_table
from benchmarks.pictures.learning import read_held_out
from ratchet.tasks.algorithm.advantages import ADVANTAGES
from ratchet.tasks.algorithm.divergences import ESTIMATORS
from ratchet.tasks.algorithm.losses import TOKEN_LOSSES
from ratchet.tasks.algorithm.settings import Known
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.settings.presets import PRESETS, Preset
from ratchet.tasks.settings.section import TABLES
from ratchet.tasks.storage.dotted_keys import flatten
from ratchet.tasks.storage.run_folder import RunFolder

BESIDE = "centred REINFORCE"
"""Algorithm beside which the others stand."""

PLAIN = ("algorithm.advantage=centred", "algorithm.loss=cross_entropy")
"""Centred REINFORCE, of one update a step."""

DUAL_CLIP = "has the loss `dual_clip`"
MORE_KL = "adds KL k2 with 0.001"
IN_TRINITY = {
    "grpo": f"{DUAL_CLIP}; averages over tokens. The paper has KL k3 with 0.04",
    "grpo_verl": "is `grpo`, with advantages computed in the trainer",
    "dr_grpo": "has no such name",
    "dapo": "clips at 1.2 unless its file says otherwise, and plays one round",
    "rloo": "has PPO's clip, an average over tokens, and KL in the loss",
    "reinforceplusplus": "has KL in the loss",
    "asymre": "halves the loss, by the loss `opmd` with τ 1",
    "topr": f"takes each token's ratio; {MORE_KL}",
    "cispo": f"clips at 1.28; {MORE_KL}. The paper names no clip, and 4 is Tinker's",
    "gspo": f"averages over tokens; {MORE_KL}",
    "sapo": f"has no derivative through the gate; averages over tokens; {MORE_KL}",
    "rec": MORE_KL,
    "multi_step_grpo": DUAL_CLIP,
    "on_policy_distill": "has the loss ppo, and an average over tokens",
    "jsd": "has the opposite sign: it raises the tokens that the teacher rejects",
    "mix": f"{DUAL_CLIP}; {MORE_KL}, of the expert's tokens as well",
    "mix_chord": f"{DUAL_CLIP}; {MORE_KL}, and has no number where a step has no expert's text. "
    "The paper's µ without φ falls: `share` 0.9, `final_share` 0.05, `decay_steps` 200, and the "
    "loss `cross_entropy`",
    "gigpo": DUAL_CLIP,
}
"""Preset → what Trinity-RFT 0.6.0 does under the same name, where that differs."""

UNMASKED = ("algorithm.advantage=centred", "algorithm.loss=unmasked_dro")
"""Tinker's own dro, on-policy."""

SEVERAL = ("optimizer.substeps=4", "optimizer.learning_rate=0.002")
"""Four updates a step, so that ratios differ from 1, and losses with them."""


@dataclass(frozen=True)
class Learnt:
    """Course of one run: the reward by step, and the held-out rewards before and after."""

    rewards: list[float]
    before: float
    after: float


def describe_losses() -> str:
    """Describe the table of losses."""
    rows = [
        (
            f"`{name}`",
            f"{loss.formula}",
            loss.source,
            describe_settings(loss.settings),
            "1" if loss.weighted is None else "1 and a forward",
        )
        for name, loss in TOKEN_LOSSES.items()
    ]
    return format_table("Losses", ("name", "loss of a token", "source", "settings", "passes"), rows)


def describe_advantages() -> str:
    """Describe the table of advantages."""
    rows = [
        (
            f"`{name}`",
            row.formula,
            row.source,
            describe_settings(row.settings),
            "group" if row.in_groups else "step",
        )
        for name, row in ADVANTAGES.items()
    ]
    header = ("name", "advantage", "source", "settings", "compares within")
    return format_table("Advantages", header, rows)


def describe_estimators() -> str:
    """Describe the table of KL estimators."""
    rows = [(f"`{name}`", row.formula, row.source) for name, row in ESTIMATORS.items()]
    return format_table("KL estimators", ("name", "divergence at a token", "source"), rows)


def describe_presets() -> str:
    """Describe the table of presets."""
    rows = [
        (f"`{name}`", row.source, _describe_values(row), row.lacks, IN_TRINITY.get(name, ""))
        for name, row in PRESETS.items()
    ]
    header = ("name", "source", "values", "lacks", "Trinity-RFT 0.6.0")
    return format_table("Presets", header, rows)


def _describe_values(preset: Preset) -> str:
    """Describe the values of a preset in a cell, without sections' names and default settings."""
    values = flatten(preset.values, TABLES)
    algorithm = {key.removeprefix("algorithm."): value for key, value in values.items()}
    settings: dict[str, str] = {}
    for part, rows in (("advantage", ADVANTAGES), ("loss", TOKEN_LOSSES)):
        given = algorithm.pop(f"{part}_settings", None)
        known = rows[str(algorithm[part])].settings
        if isinstance(given, Mapping):
            other = [key for key, value in given.items() if value != known[key].default]
            settings[part] = ", ".join(f"`{key}` {given[key]}" for key in other)
    said = [
        f"{key} `{value}`" + (f" ({settings[key]})" if settings.get(key) else "")
        for key, value in algorithm.items()
    ]
    return ", ".join(said)


def describe_settings(known: Known) -> str:
    """Describe settings and their defaults in a cell."""
    return ", ".join(f"`{name}` {setting.default}" for name, setting in known.items())


def algorithms() -> dict[str, tuple[str, ...]]:
    """Map a name to the settings of its recipe: each row of the tables, the other one plain."""
    losses = {
        f"loss {name}": ("algorithm.advantage=centred", f"algorithm.loss={name}", *SEVERAL)
        for name in TOKEN_LOSSES
    }
    advantages = {
        f"advantage {name}": (f"algorithm.advantage={name}", "algorithm.loss=cross_entropy")
        for name in ADVANTAGES
    }
    return {BESIDE: PLAIN, **losses, **advantages, "dro without a mask": UNMASKED}


def train(
    folder: Path, recipe: str, settings: Sequence[str], seed: int, environment: Mapping[str, str]
) -> Learnt:
    """Train a run, unless it is there, and read its course."""
    name = "-".join(setting.partition("=")[2] for setting in settings)
    run = RunFolder(folder / f"{recipe}-{name}-{seed}")
    program = "benchmarks.learning.unmasked_dro"
    killable_runs.train_to_end(run, (*settings, f"seed={seed}"), environment, recipe, program)
    steps = read_metrics(run.metrics)
    before, after = (read_held_out(run, step).mean or 0.0 for step in (0, len(steps)))
    return Learnt([step["reward/mean"] for step in steps], before, after)


def train_all(
    runners: ThreadPoolExecutor,
    folder: Path,
    recipe: str,
    chosen: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
) -> dict[str, list[Learnt]]:
    """Train the chosen algorithms by each seed, as many runs at a time as there are runners."""
    learnt: dict[str, list[Learnt]] = {}
    with killable_runs.prefect_server(folder / "prefect") as api:
        environment = killable_runs.environment(folder / "prefect", api)
        training = {
            name: [
                runners.submit(train, folder, recipe, settings, seed, environment) for seed in seeds
            ]
            for name, settings in chosen.items()
        }
        for name, runs in training.items():
            learnt[name] = [run.result() for run in runs]
            print(name, [f"{run.after:.2f}" for run in learnt[name]], flush=True)
    return learnt


def report(learnt: Mapping[str, Sequence[Learnt]]) -> str:
    """Describe what each algorithm learnt: the mean over seeds, and the range."""
    rows = []
    for name, runs in learnt.items():
        after = [run.after for run in runs]
        before = fmean(run.before for run in runs)
        spread = f"{min(after):.2f} to {max(after):.2f}"
        rows.append((name, f"{before:.2f}", f"{fmean(after):.2f}", spread))
    return format_table("Held-out reward", ("algorithm", "before", "after", "seeds"), rows)


def draw(learnt: Mapping[str, Sequence[Learnt]], path: Path) -> None:
    """Draw the reward by step of each algorithm, over that of centred REINFORCE."""
    names = [name for name in learnt if name != BESIDE]
    columns = 4
    rows = -(-len(names) // columns)
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(3 * columns, 2 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel in panels.flat[len(names) :]:
        panel.set_axis_off()
    for panel, name in zip(panels.flat, names, strict=False):
        for of, color in ((BESIDE, "0.7"), (name, "tab:blue")):
            for run in learnt[of]:
                panel.plot(run.rewards, color=color, linewidth=1)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_title(name, fontsize=9)
        panel.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("mean reward of a step's rollouts")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Print the tables, or train and print what was learnt."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=0, help="runs of each algorithm")
    options.add_argument("--recipe", default="arithmetic", help="training deployment")
    options.add_argument("--steps", type=int, default=12, help="steps of each run")
    options.add_argument("--at-once", type=int, default=2, help="runs that train side by side")
    options.add_argument("--only", nargs="+", help="names of algorithms; all without it")
    options.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    options.add_argument("--picture", type=Path, default=Path("docs/pictures/algorithms.png"))
    arguments = options.parse_args()
    if not arguments.seeds:
        tables = (describe_losses, describe_advantages, describe_estimators, describe_presets)
        print("\n".join(describe() for describe in tables))
        return
    print(describe_machine(), flush=True)
    folder, steps = arguments.folder.absolute(), f"steps={arguments.steps}"
    chosen = [BESIDE, *(arguments.only or [name for name in algorithms() if name != BESIDE])]
    with ThreadPoolExecutor(arguments.at_once) as runners:
        learnt = train_all(
            runners,
            folder,
            arguments.recipe,
            {name: (steps, *algorithms()[name]) for name in chosen},
            range(arguments.seeds),
        )
    print(report(learnt))
    if len(learnt) > 1:
        draw(learnt, arguments.picture)


if __name__ == "__main__":
    main()
