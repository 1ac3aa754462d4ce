"""Each benchmark, in a short form: it ends with its table, or with what it compares being equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.formulas import PEERS
from ratchet.tasks.storage.run_folder import RunFolder
from tests.support.processes import ROOT
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import fixture_of

whole = fixture_of(small_recipe(steps=1))

OVERLAP = ("--lag", "0", "--streamed", "2", "--seeds", "1", "--steps", "1", "--folder", "o")
ALGORITHMS = ("--seeds", "1", "--steps", "1", "--only", "loss ppo", "--folder", "a")
ALONE = ("--seeds", "1", "--steps", "1")
BY_SEED = ("--seeds", "1", "--set", "steps=1", "--folder", "d")
METHODS = ("--folder", "m", "--picture", "m.svg")
FEW = ("--set", "rollouts.groups=2", "--set", "rollouts.group_size=4")
BESIDE = (*ALONE, "--set", "model.base=local/tiny-chat", *FEW)
SHORT = {
    "run_speed": (("--rounds", "1", "--steps", "2"), "### Pauses of an interpreter in steps 2"),
    "starts": (("--rounds", "1"), "| ratchet dryrun, and its engine |"),
    "engine.speed": (
        ("--rounds", "1", "--at-once", "8", "--sequences", "4", "--cores", "1"),
        "### Update by a loss",
    ),
    "engine.product_types": (
        ("--base", "local/tiny-chat", "--rounds", "1", "--at-once", "2", "--sequences", "2"),
        "The cosine of the LoRA's gradients is 0.99",
    ),
    "engine.shared_prefixes": (
        ("--rounds", "1", "--shapes", "1", "--cores", "1"),
        "The gradient differs by",
    ),
    "durability": (("--rounds", "1", "--rollouts", "8"), "### 40 spans of a mean prompt"),
    "door.load": (
        ("--rollouts", "4", "--calls", "2", "--batches", "2", "--rounds", "1"),
        "| socket |",
    ),
    "places": (("--rounds", "1", "--rollouts", "4"), "| a place, and its reward |"),
    "bench": (("--only", "recording.assembly", "--", "--spans", "40"), "| seal spans, 25 turns"),
    "overlap": (OVERLAP, "| 1.00 |"),
    "learning.algorithms": ((*ALGORITHMS, "--picture", "a.png"), "loss ppo"),
    "interruptions.golden": (
        ("--only", "plain", "--folder", "g", "--record", "g.json"),
        "The record of 1 run(s) is",
    ),
    "interruptions.stops": (
        ("--seconds", "1", "--victims", "engine", "--folder", "s"),
        "| engine, 1 s |",
    ),
    "learning.methods": (
        ("--seeds", "1", "--only", "pairs", "--set", "steps=2", *METHODS),
        "| pairs |",
    ),
    "learning.by_seeds": (
        (*("hello-duel", "--vary", "roles.opponent=earlier:4", "--sum", "datums"), *BY_SEED, *FEW),
        "| `earlier:4` |",
    ),
    "servers.bridge_cost": (
        ("--calls", "20", "--rounds", "0"),
        "| JSON | a sample of 8 tokens (2) |",
    ),
    "learning.replayed_sweep": (
        (*ALONE, "--advantages", "centred", *FEW, "--folder", "s"),
        "| centred |",
    ),
    "beside_cookbook.rollouts": (BESIDE, "| all |"),
    "beside_cookbook.texts": (
        ("--steps", "3", "--kill-at", "2", "--save-every", "2"),
        "The losses are equal to 0.0001.",
    ),
}


QUICK = "places"
"""A short form of seconds. The others take up to three minutes: `make stories` has them."""

PEER = {
    "beside_cookbook.rollouts": PEERS["cookbook"].python,
    "beside_cookbook.texts": PEERS["cookbook"].python,
}
"""Python of the peer that a short form runs."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.story] * (name != QUICK)) for name in SHORT]
)
def test_a_benchmark_prints_what_it_measures(name: str, tmp_path: Path) -> None:
    if name in PEER and not PEER[name].exists():
        pytest.skip(f"the peer is not installed: there is no {PEER[name]}; run `make peers`")
    options, printed = SHORT[name]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "prefect")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "nothing to compare" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert printed in done.stdout


@pytest.mark.story
def test_copies_of_a_run_are_listed_and_asked(whole: RunFolder) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth.many_runs", whole.name, "2"],
        cwd=ROOT,
        env={**os.environ, "RATCHET_RUNS": str(whole.path.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "### 2 runs" in done.stdout
    assert "| sql select count(*) from spans |" in done.stdout
