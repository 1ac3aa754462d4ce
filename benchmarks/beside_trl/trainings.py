"""`ratchet train` on texts and pairs beside TRL's SFTTrainer, DPOTrainer and KTOTrainer.

python -m benchmarks.beside_trl.trainings [--methods texts dpo kto] [--steps 5]

Both start at checkpoint 0 of the run of `ratchet train`, exported in PEFT's form, and train the
run's own tokens, batch for batch, with the same AdamW and a constant learning rate. TRL is
unmodified, in an environment of its own (`make peers`). In what its defaults differ from ours, it
is told to do as we do, or both are:

- TRL's betas are 0.9 and 0.999, its learning rate falls, and it clips gradients at a norm of 1. It
  computes in bfloat16.
- The rank of the LoRA is 32, so that α / rank is 1. The output layer has none, since TRL refuses
  an adapter there.
- TRL makes tokens of conversations by itself. It is given those of the run, of which the completion
  alone is trained.
- TRL compares a batch's prompts with the batch's answers, moved by one, for the z of `kto`. It is
  given the run's mismatched answers. Each of its rows is a labelled answer, of which a pair is two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from adapters.calls import POLICY
from benchmarks.measuring import describe_machine, format_table
from benchmarks.peers.formulas import PEERS
from engine.model.base_models import find
from flows.recipe.finetuning import FinetuneRecipe
from flows.recipe.loading import named_recipe
from flows.recipe.preferring import PreferRecipe
from tasks.recording.step_log import read_metrics
from tasks.storage.run_folder import RunFolder
from tasks.storage.tables import read_table

ROOT = Path(__file__).parent.parent.parent
TRL = PEERS["trl"].python
PROGRAM = Path(__file__).with_name("trl_trainers.py")
TENSORS = "adapter_model.safetensors"
METHODS = {
    "texts": ("hello-finetune", ()),
    "dpo": ("hello-prefer", ()),
    "kto": ("hello-prefer", ("preference.loss=kto",)),
}
"""Method → the recipe and the settings by which it is trained."""
CLOSE, NEAR = 1e-6, 1e-2
"""Largest difference of equal losses, and of equal weights as a share of their movement."""


@dataclass(frozen=True)
class Distance:
    """Distance of two adapters: the largest difference of a weight, and the norm of all."""

    largest: float
    norm: float


@dataclass(frozen=True)
class BothTrained:
    """A training by both: the loss of each step, and how far weights have moved and are apart."""

    ours: Sequence[float]
    theirs: Sequence[float]
    moved: Distance
    """From our weights at the start to those at the end."""
    apart: Distance
    """From our weights at the end to TRL's."""

    @property
    def losses_apart(self) -> float:
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def is_equal(self) -> bool:
        return self.losses_apart <= CLOSE and self.apart.largest <= NEAR * self.moved.largest


def train_both(folder: Path, method: str, steps: int) -> BothTrained:
    """Train by `ratchet train` and then by TRL from the same weights."""
    name, own = METHODS[method]
    settings = [
        f"steps={steps}",
        f"checkpoints.every={steps}",
        "model.lora_rank=32",
        "model.train_unembedding=false",
        "evaluation.examples=2",
        *own,
    ]
    recipe = named_recipe(name, settings, FinetuneRecipe if method == "texts" else PreferRecipe)
    run, start, end, theirs = (folder / part for part in (method, "start", "end", "theirs"))
    train = [part for setting in settings for part in ("--set", setting)]
    ratchet(folder, "train", name, "--run", method, *train)
    for step, out in ((0, start), (steps, end)):
        ratchet(folder, "export", f"{method}@{step}", "--out", str(out))
    plan = folder / "plan.json"
    plan.write_text(json.dumps(make_plan(recipe, RunFolder(run), method, start)), encoding="utf-8")
    losses = json.loads(call([str(TRL), str(PROGRAM), str(plan), str(theirs)], {}).splitlines()[-1])
    first, last, other = (load_file(where / TENSORS) for where in (start, end, theirs))
    ours = [row["loss"] for row in read_metrics(RunFolder(run).metrics)]
    return BothTrained(ours, losses, distance(first, last), distance(last, other))


def make_plan(
    recipe: FinetuneRecipe | PreferRecipe, run: RunFolder, method: str, start: Path
) -> dict[str, Any]:
    """Make TRL's plan: the rows of each step as its collators want them, and the settings."""
    rows = {"texts": _texts, "dpo": _pairs, "kto": _answers}[method]
    optimizer = recipe.optimizer
    return {
        "method": method,
        "base": str(find(recipe.model.base).folder),
        "start": str(start),
        "steps": [
            rows(read_table(run.datums(POLICY, step)).to_pylist()) for step in range(recipe.steps)
        ],
        "optimizer": {
            "learning_rate": optimizer.learning_rate,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_epsilon": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        },
    }


def _texts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for row in rows:
        prompt, completion = _divide(row)
        made.append(
            {
                "input_ids": [*prompt, *completion],
                "labels": [*[-100] * len(prompt), *completion],
            }
        )
    return made


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for chosen, rejected, *_ in _sides(rows):
        (prompt, better), (_, worse) = chosen, rejected
        made.append({"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse})
    return made


def _answers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "KL_completion_ids": other,
            "label": label,
        }
        for chosen, rejected, *mismatched in _sides(rows)
        for (prompt, answer), (_, other), label in zip(
            (chosen, rejected), mismatched, (True, False), strict=True
        )
    ]


def _sides(rows: Sequence[Mapping[str, Any]]) -> list[list[tuple[list[int], list[int]]]]:
    """Return the prompt and the answer of each side of the pairs, in the order of the sides."""
    pairs: dict[int, list[tuple[list[int], list[int]]]] = {}
    for row in sorted(rows, key=lambda row: (row["pair"], row["side"])):
        pairs.setdefault(row["pair"], []).append(_divide(row))
    return [*pairs.values()]


def _divide(row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Divide a datum's tokens where the trained ones begin, which go on to the end."""
    tokens, weights = [*row["tokens"], row["targets"][-1]], row["mask"]
    trained = sum(map(bool, weights))
    if not all(weights[len(weights) - trained :]):
        raise SystemExit(f"{row['rollout_id']} trains other tokens than those of a last answer")
    return tokens[:-trained], tokens[-trained:]


def distance(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Distance:
    """Measure the distance of two adapters of the same tensors."""
    if one.keys() != other.keys():
        raise SystemExit(f"the adapters differ in {sorted({*one} ^ {*other})[:4]}")
    apart = np.concatenate([np.ravel(one[name] - other[name]) for name in one]).astype(np.float64)
    return Distance(float(np.abs(apart).max()), float(np.linalg.norm(apart)))


def ratchet(folder: Path, *command: str) -> None:
    """Run a command of ours, with its runs in a folder."""
    where = {"RATCHET_RUNS": str(folder), "PREFECT_HOME": str(folder / "prefect")}
    call([sys.executable, "-m", "flows.cli.main", *command], where)


def call(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a program, and return what it has printed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}"[-4000:]
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def report(method: str, of: BothTrained) -> str:
    """Format the losses of each step, and how far apart the weights are."""
    rows = [
        [f"{step + 1}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"]
        for step, (a, b) in enumerate(zip(of.ours, of.theirs, strict=True))
    ]
    table = format_table(method, ("step", "loss: ratchet train", "loss: TRL", "difference"), rows)
    moved, apart = of.moved, of.apart
    return (
        f"{table}\nA weight of the LoRA has moved by up to {moved.largest:.1e}, and the two end up "
        f"to {apart.largest:.1e} apart; of all weights these are norms of {moved.norm:.2g} and "
        f"{apart.norm:.2g}. They are {'equal' if of.is_equal else 'NOT EQUAL'}.\n"
    )


def main() -> None:
    """Train from the command line; the exit status is 1 if losses or weights are not equal."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options.add_argument("--steps", type=int, default=5, help="of each training")
    given = options.parse_args()
    if not TRL.exists():
        options.error(f"TRL is not installed: there is no {TRL}; run `make peers`")
    print(describe_machine(), flush=True)
    equal = True
    for method in given.methods:
        with tempfile.TemporaryDirectory() as scratch:
            trained = train_both(Path(scratch), method, given.steps)
        print(report(method, trained), flush=True)
        equal &= trained.is_equal
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
