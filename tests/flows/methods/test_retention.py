"""Checkpoints that are kept: the newest, and what something needs; the others are deleted."""

import shutil
from pathlib import Path

import pytest
import tinker
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from typer.testing import CliRunner

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.adapters.tinker.service import Service, ServiceFailed
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.checkpoints.names import find_weights, promote
from ratchet.flows.cli.commands import app
from ratchet.flows.finetune import finetune
from ratchet.flows.opening.checks import check_start
from ratchet.flows.opening.run import open_run
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.flows.server.deployed_runs import delete_flow_runs
from ratchet.tasks.checkpoints import Ledger
from ratchet.tasks.reports.facts import read_facts
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.support.runs.finetuned import RECIPE
from tests.support.servers.engine_server import Address

pytestmark = pytest.mark.usefixtures("prefect_server", "no_tinker")

FEW = RECIPE.model_copy(update={"checkpoints": RECIPE.checkpoints.model_copy(update={"keep": 1})})
"""The same recipe; 2 checkpoints are kept for their number, since a step may be resumed."""


@pytest.fixture(scope="module")
def whole(root: Path, prefect_server: None, no_tinker: None) -> RunFolder:
    finetune(RECIPE, run="all-kept")
    return folder_of("all-kept")


@pytest.fixture(scope="module")
def few(whole: RunFolder) -> RunFolder:
    finetune(FEW, run="few-kept")
    return folder_of("few-kept")


def kept(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in Ledger(run.checkpoints(POLICY)).checkpoints()]


def saved(run: RunFolder, kind: str) -> set[int]:
    """Return the steps of which the engine has weights of a kind."""
    return {int(path.name[:5]) for path in run.engine.glob(f"tensors/*/{kind}/*")}


def delete_unneeded(run: RunFolder) -> None:
    with open_run(FEW, run.name) as opened:
        opened.policies.delete_unneeded(opened.service)


def copied(run: RunFolder, name: str) -> RunFolder:
    shutil.copytree(run.path, folder_of(name).path)
    return folder_of(name)


@pytest.mark.story
def test_what_is_not_kept_is_deleted_on_the_service_and_changes_nothing(
    whole: RunFolder, few: RunFolder
) -> None:
    assert kept(few) == [0, 4, 5, 6]  # 4 has the state from which 5 is rebuilt
    assert saved(few, "sampler_weights") == {0, 4, 5, 6}
    assert saved(few, "weights") == {0, 4, 6}
    assert list_faults(few, read_contents(whole)) == []
    assert [*find_damage(few)] == []


@pytest.mark.story
def test_a_deleted_checkpoint_is_refused_by_its_number(few: RunFolder) -> None:
    gone = r"has checkpoint 3 no more, since it was deleted; it keeps 0, 4, 5, 6"
    with pytest.raises(UserError, match=gone):
        find_weights(f"{few.name}@3")
    start = {"start": f"{few.name}@2", "lora_rank": 8}
    recipe = FinetuneRecipe.model_validate(RECIPE.model_dump() | {"model": start})
    with pytest.raises(UserError, match="has checkpoint 2 no more"):
        check_start(recipe, folder_of("started"))


@pytest.mark.story
def test_a_fork_at_a_deleted_checkpoint_makes_it_again(whole: RunFolder, few: RunFolder) -> None:
    fork = fork_run(few, "fork-of-few", 3, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    finetune(RECIPE, run=fork.name)
    assert read_contents(fork)["weights"] == read_contents(whole)["weights"]


@pytest.mark.story
def test_checkpoints_with_a_name_and_those_of_other_runs_are_kept(whole: RunFolder) -> None:
    run = copied(whole, "named")
    promote(f"{run.name}@1", "first")
    fork_run(run, "fork-of-named", 3, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    delete_unneeded(run)
    assert kept(run) == [0, 1, 2, 3, 4, 5, 6]  # 2 has the state from which the fork is rebuilt


@pytest.mark.story
def test_a_deletion_that_failed_is_made_with_the_next(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = copied(whole, "failed-once")

    def fail(service: Service, path: str) -> None:
        raise ServiceFailed("the line is down")

    with monkeypatch.context() as patch:
        patch.setattr(Service, "delete", fail)
        delete_unneeded(run)
    assert "the line is down. Checkpoint 1 is deleted with the next ones" in caplog.text
    assert kept(run) == [0, 4, 5, 6]
    assert 1 in saved(run, "sampler_weights")
    delete_unneeded(run)
    assert saved(run, "sampler_weights") == {0, 4, 5, 6}


def prune(*words: str) -> None:
    CliRunner().invoke(app, ["prune", *words, "--yes"], catch_exceptions=False)


@pytest.mark.story
def test_prune_deletes_weights_of_an_engine_that_does_not_run(whole: RunFolder) -> None:
    run = copied(whole, "pruned")
    best = read_facts(run).held_out.best
    prune("--checkpoints")
    assert kept(run) == sorted({0, best, 6})
    assert saved(run, "sampler_weights") == {0, best, 6}
    assert [*find_damage(run)] == []
    fork = fork_run(run, "fork-of-pruned", 3, RECIPE.model_dump(mode="json"), RECIPE.fingerprint())
    finetune(RECIPE, run=fork.name)
    assert read_contents(fork)["weights"] == read_contents(whole)["weights"]


@pytest.mark.story
def test_prune_deletes_weights_on_the_service_that_the_environment_names(
    tiny_chat: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path))
    finetune(RECIPE, run="served")
    rest = tinker.RestClient(base_url=tiny_chat.url, api_key=tiny_chat.key)

    def left() -> set[str]:
        listed = rest.list_user_checkpoints(100).result().checkpoints
        return {one.tinker_path for one in listed if "/doctor" not in one.tinker_path}

    run, all_saved = folder_of("served"), left()
    prune("--checkpoints")
    there = {path for one in Ledger(run.checkpoints(POLICY)).checkpoints() for path in one.paths}
    assert left() == there < all_saved
    with monkeypatch.context() as patch:
        patch.delenv("TINKER_BASE_URL")
        prune("--older", "0")
        assert (left(), run.exists()) == (there, True)
    delete_flow_runs(["served"], ["2020-01-01 00:00:00 UTC"])  # another project's run
    assert flow_runs("served") == 1
    prune("--older", "0")
    assert (left(), run.exists(), flow_runs("served")) == (set(), False, 0)


def flow_runs(name: str) -> int:
    with get_client(sync_client=True) as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        return len(client.read_flow_runs(flow_run_filter=named))
