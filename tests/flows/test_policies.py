"""Several policies in one run: each learns by its own roles, and what is true of one is of all."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.checkpoints.policies import lora_seed
from ratchet.flows.evaluate import evaluate
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.board.runs import list_runs
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from tests.flows.test_train import without_clocks
from tests.support.runs.killed import train_until_killed
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.two_policies import CHANGES, two_policies

ROOT = Path(__file__).parents[2]
POLICIES = ("policy", "listener")

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")


@pytest.fixture(scope="module")
def run(root: Path, recorded_run: RecordedRun) -> RunFolder:
    """A run of two steps; in the first nothing can be learnt from the listener's rewards."""
    return recorded_run(two_policies(), "one")


def state(run: RunFolder, policy: str, step: int) -> Path:
    """Return the engine's folder with the weights and the optimizer of a checkpoint."""
    address = Ledger(run.checkpoints(policy)).at(step).state
    assert address is not None
    [folder] = (run.engine / "tensors").glob(f"{address.removeprefix('tinker://')}.*")
    return folder


def digests(folder: Path, pattern: str) -> dict[str, str]:
    files = folder.glob(pattern)
    return {str(f.relative_to(folder)): sha256(f.read_bytes()).hexdigest() for f in files}


def weights(run: RunFolder, policy: str, step: int) -> dict[str, str]:
    """Return the SHA-256 of the LoRA and of the optimizer's state."""
    found = digests(state(run, policy, step), "*.safetensors")
    assert len(found) == 2
    return found


def datums(run: RunFolder) -> dict[str, str]:
    return digests(run.path, "datums/*") | digests(run.path, "policies/*/datums/*")


def contents(run: RunFolder) -> dict[str, Any]:
    """Return what runs of one recipe share to the bit."""
    return {
        "weights": [weights(run, policy, step) for policy in POLICIES for step in (1, 2)],
        "datums": datums(run),
        "evaluations": digests(run.path, "evaluations/*"),
        "metrics": [
            {name: value for name, value in row.items() if "seconds/" not in name}
            for row in without_clocks(run.path)
        ],
    }


def updates_of(run: RunFolder, policy: str, step: int) -> int:
    """Return how many steps the optimizer of a checkpoint has taken."""
    return int(load_file(state(run, policy, step) / "optimizer.safetensors")["step"])


def test_a_policy_moves_only_by_what_its_own_roles_have_earned(run: RunFolder) -> None:
    lora = "adapter_model.safetensors"
    assert weights(run, "policy", 0)[lora] != weights(run, "policy", 1)[lora]
    assert weights(run, "listener", 0)[lora] == weights(run, "listener", 1)[lora]
    assert weights(run, "listener", 1)[lora] != weights(run, "listener", 2)[lora]
    assert [updates_of(run, "policy", 2), updates_of(run, "listener", 2)] == [2, 1]


def test_a_policy_s_datums_are_its_own_roles_and_say_whose_they_are(run: RunFolder) -> None:
    said = {"policy": ("teller", "00001"), "listener": ("listener", "listener@00001")}
    for policy, whose in said.items():
        rows = read_table(run.datums(policy, 1)).to_pylist()
        assert {(row["role"], row["policy_version"]) for row in rows} == {whose}


def test_the_loras_begin_apart_and_the_main_one_by_the_run_s_seed(run: RunFolder) -> None:
    assert lora_seed(5, "policy") == 5
    seeds = {lora_seed(run_seed, name) for run_seed in (0, 1) for name in ("a", "b")}
    assert len(seeds) == 4
    assert max(seeds) < 2**31
    assert weights(run, "policy", 0) != weights(run, "listener", 0)


def test_the_metrics_of_another_policy_stand_under_its_name(run: RunFolder) -> None:
    first, second = read_metrics(run.metrics)
    own = "policies/listener/"
    assert [row[f"{own}datums"] for row in (first, second)] == [0, 4]
    assert [row[f"{own}groups/uniform_fraction"] for row in (first, second)] == [1.0, 0.0]
    assert (first["datums"], first["calls"], first[f"{own}calls"]) == (4, 4, 4)
    assert (first["reward/teller/mean"], first["reward/listener/mean"]) == (0.5, 1.0)
    assert abs(second[f"{own}kl_sample_train_v1"]) <= 1e-4
    assert not [name for name in first if name.startswith((f"{own}reward", f"{own}rollouts"))]


@pytest.mark.story
def test_the_same_recipe_in_more_batches_is_the_same_run(run: RunFolder) -> None:
    train(two_policies(rollouts=CHANGES["rollouts"] | {"batches": 2}), run="two")
    two = folder_of("two")
    assert [path.stem for path in two.sealed("train-00001")] == ["train-00001.0", "train-00001.1"]
    assert contents(two) == contents(run)


@pytest.mark.story
@pytest.mark.parametrize(
    ("phase", "said"), [("begin", "stopped"), ("add", "stopped, update 1 of listener in doubt")]
)
def test_a_kill_between_the_updates_of_two_policies_changes_nothing(
    root: Path, run: RunFolder, phase: str, said: str
) -> None:
    """The main policy's is done; the other's is not begun, or it is applied and nobody knows."""
    name = f"killed-{phase}"
    train_until_killed("two_policies", name, phase)
    killed = folder_of(name)
    done = [Ledger(killed.checkpoints(policy)).last_step() for policy in POLICIES]
    assert done == [2, 1]
    assert {row["run"]: row["record"]["state"] for row in list_runs()}[name] == said
    before = killed.checkpoints("policy").read_text()

    train(two_policies(), run=name)
    assert contents(killed) == contents(run)
    assert killed.checkpoints("policy").read_text() == before  # it was not applied again
    assert [updates_of(killed, policy, 2) for policy in POLICIES] == [2, 1]
    ledgers = [Ledger(killed.checkpoints(policy)) for policy in POLICIES]
    noted = {path for ledger in ledgers for one in ledger.checkpoints() for path in one.paths}
    saved = killed.engine / "checkpoints"
    kept = (path.relative_to(saved).with_suffix("") for path in saved.rglob("*.json"))
    assert {f"tinker://{path}" for path in kept} == noted


@pytest.mark.story
def test_what_is_evaluated_last_is_what_every_policy_has(root: Path, run: RunFolder) -> None:
    evaluated = evaluate(two_policies(), run=run.name)
    assert evaluated.file == run.evaluation("00002")


def forked(run: RunFolder, name: str, step: int, recipe: Recipe) -> RunFolder:
    return fork_run(run, name, step, recipe.model_dump(mode="json"), recipe.fingerprint())


@pytest.mark.story
def test_a_fork_and_a_replay_by_the_same_settings_are_their_parent(
    root: Path, run: RunFolder
) -> None:
    copy = forked(run, "fork", 1, two_policies())
    assert copy.policies() == [*POLICIES]
    shared = [folder.datums("listener", 0) for folder in (copy, run)]
    assert shared[0].stat().st_ino == shared[1].stat().st_ino
    train(two_policies(), run="fork")
    assert contents(copy) == contents(run)

    replay(two_policies(), run.name, run="replay")
    assert contents(folder_of("replay"))["weights"] == contents(run)["weights"]
    rows = read_metrics(folder_of("replay").metrics)
    assert [row["policies/listener/tokens/sampled"] for row in rows] == [0, 0]


@pytest.mark.story
def test_policies_whose_states_are_gone_are_rebuilt_each_from_its_own_seed_and_datums(
    run: RunFolder,
) -> None:
    copy = forked(run, "stateless", 1, two_policies())
    for policy in POLICIES:
        copy.trajectories(policy, 0).unlink()
        copy.datums(policy, 0).unlink()
        ledger = Ledger(copy.checkpoints(policy))
        saved = ledger.checkpoints()
        copy.checkpoints(policy).unlink()
        for checkpoint in saved:
            ledger.add(replace(checkpoint, state=None))
    train(two_policies(), run="stateless")
    for policy in POLICIES:
        assert weights(copy, policy, 2) == weights(run, policy, 2)
    assert datums(copy) == datums(run)


def test_a_fork_cannot_begin_another_policy_in_its_middle(root: Path, run: RunFolder) -> None:
    recipe = two_policies(roles={"teller": "policy:teller", "listener": "policy:listener"})
    with pytest.raises(RunError, match="has trained no policy teller up to step 1: give its roles"):
        forked(run, "refused", 1, recipe)
    assert not list(root.glob("*refused*"))
