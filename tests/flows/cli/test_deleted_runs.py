"""Runs that give way to others: none is deleted before all that takes its place is checked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.flows.cli import training
from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.plan import StagesRecipe
from ratchet.tasks.comparison.promotions import Promotion, record_promotion
from ratchet.tasks.storage.files import write_text
from ratchet.tasks.storage.manifest import read_manifest
from ratchet.tasks.storage.plan_record import PlanRecord, write_plan
from ratchet.tasks.storage.run_folder import folder_of, runs_root
from tests.flows.test_wrong_inputs import start_no_process
from tests.support.runs.finished import write_finished, write_finished_stages
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.staged import VALUES

PLAYLESS = {key: value for key, value in VALUES.items() if key != "evaluate"}
UNPLAYED = StagesRecipe.model_validate(PLAYLESS)
STAGES = ["st-1-texts", "st-2-rewards", "st-3-pairs"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_tinker: None) -> Path:
    """A folder with finished runs: st in stages, the sweep ss, and one."""
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "st.yaml", json.dumps(PLAYLESS))
    judge = {"evaluation": {"judge": {"agent": "judge:pairs"}}}
    judged = {**VALUES["evaluate"], **judge, "roles": {"judge": "checkpoint:no@2"}}
    write_text(tmp_path / "judged.yaml", json.dumps({**PLAYLESS, "evaluate": judged}))
    write_text(tmp_path / "one.yaml", small_recipe().model_dump_json())
    write_finished_stages("st", UNPLAYED)
    write_finished("one", small_recipe())
    swept = {f"ss-seed{seed}": small_recipe(seed=seed) for seed in (1, 2)}
    for name, recipe in swept.items():
        write_finished(name, recipe)
    write_plan(folder_of("ss"), PlanRecord({}, [*swept], "held-out reward"))
    start_no_process(monkeypatch)
    return tmp_path


def ratchet(line: str) -> None:
    CliRunner().invoke(app, line.split(), catch_exceptions=False)


def files() -> list[Path]:
    return sorted(path for path in runs_root().rglob("*") if path.name != "lock")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train st.yaml --run st --from pairs {pairs}.dataset.path=no.jsonl", "no.jsonl does not"),
        ("train st.yaml --run st --from pairs --set stages.rewards.start=2", "another recipe"),
        ("train st.yaml --run st --from rewards {texts}.optimizer.learning_rate=1", "another rec"),
        ("train st.yaml --run st --from pairs {pairs}.seed=-1", "greater than or equal to 0"),
        (
            "train st.yaml --run st --from rewards {rewards}.algorithm.kl.coefficient=1 "
            "{rewards}.algorithm.kl.reference=st-3-pairs@2",
            "needs the run st-3-pairs, which is to be deleted first",
        ),
        ("train st.yaml --run st --if-exists delete {pairs}.dataset.path=no.jsonl", "no.jsonl doe"),
        (
            "train st.yaml --run st --if-exists delete {texts}.model.start=st-3-pairs@2",
            "needs the run st-3-pairs",
        ),
        (
            "train st.yaml --run st --if-exists delete {rewards}.algorithm.kl.coefficient=1 "
            "{rewards}.algorithm.kl.reference=no@2",
            "algorithm.kl.reference no@2 names no run",
        ),
        (
            "train st.yaml --run st --if-exists delete {rewards}.algorithm.kl.coefficient=1 "
            "{rewards}.algorithm.kl.reference=st-1-texts@5",
            "st-1-texts@5: that run will keep checkpoints of the steps 0 to 4, as",
        ),
        (
            "train st.yaml --run st --if-exists delete {rewards}.algorithm.kl.coefficient=1 "
            "{rewards}.algorithm.kl.reference=st-1-texts:other@2",
            "st-1-texts:other@2: that run will keep",
        ),
        (
            "train st.yaml --run st --if-exists delete "
            "{rewards}.algorithm.teacher.models=[st-1-texts@best]",
            "is the policy itself, which starts from it",
        ),
        (
            "train judged.yaml --run st --if-exists delete",
            "roles.judge names the checkpoint no@2, but the run st-1-texts has no copy of it, as",
        ),
        (
            "train judged.yaml --run st --if-exists delete --set evaluate.dataset.path=no.csv",
            "no.csv does not",
        ),
        ("train one.yaml --run st --if-exists resume", "is one of stages, or a sweep"),
        ("train one.yaml --run st --if-exists delete --set dataset.path=no.csv", "no.csv does not"),
        (
            "train one.yaml --run one --if-exists delete --set model.start=one@2",
            "needs the run one",
        ),
        ("train one.yaml --run one --if-exists delete --set model.start=no@2", "names no run"),
        (
            "train st.yaml --run one --if-exists delete {pairs}.dataset.path=no.jsonl",
            "no.jsonl doe",
        ),
        (
            "sweep one.yaml --set optimizer.learning_rate=1,nope {delete}",
            "should be a valid number",
        ),
        ("sweep one.yaml --set seed=1,3 --set dataset.path=no.csv {delete}", "no.csv does not"),
        ("sweep --replay ss-seed1 --set algorithm.loss=ppo,cispo {delete}", "the run ss-seed1, wh"),
        ("sweep one.yaml --set seed=1,2 --select loss {delete}", "measured by reward"),
    ],
)
@pytest.mark.usefixtures("project")
def test_nothing_is_deleted_for_a_recipe_that_is_refused(line: str, said: str) -> None:
    names = ("texts", "rewards", "pairs")
    keys = {name: f"--set stages.{name}.recipe" for name in names}
    before = files()
    with pytest.raises(UserError, match=said):
        ratchet(line.format(**keys, delete="--run ss --if-exists delete"))
    assert files() == before


@pytest.mark.usefixtures("project")
def test_nothing_is_deleted_where_the_weights_of_the_stage_before_are_gone() -> None:
    shutil.rmtree(folder_of(STAGES[0]).engine)
    before = files()
    with pytest.raises(UserError, match=r"model.start st-1-texts@best is gone: .* has no weights"):
        ratchet("train st.yaml --run st --from rewards")
    assert files() == before


@pytest.mark.usefixtures("project")
def test_nothing_is_deleted_while_any_of_the_runs_is_open() -> None:
    before = files()
    with folder_of(STAGES[1]).locked(), pytest.raises(UserError, match="is open in process"):
        ratchet("train st.yaml --run st --if-exists delete")
    assert files() == before


class Begun(Exception):
    """The flow that a command has called."""


@pytest.fixture
def no_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    monkeypatch.setattr(training, "call_flow", begin)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("train st.yaml --run st --from texts", []),
        ("train st.yaml --run st --from rewards", STAGES[:1]),
        ("train st.yaml --run st --from pairs", STAGES[:2]),
        ("train st.yaml --run st --if-exists delete", []),
        ("sweep one.yaml --set seed=1,2,3 --run st --if-exists delete", []),
    ],
)
@pytest.mark.usefixtures("project", "no_flow")
def test_what_is_trained_anew_is_deleted_and_the_stages_before_it_stay(
    line: str, left: list[str]
) -> None:
    with pytest.raises(Begun):
        ratchet(line)
    assert [path.name for path in sorted(runs_root().glob("st-*"))] == left
    assert folder_of("st").path.exists() == bool(left)


@pytest.mark.parametrize(
    ("gone", "line", "said"),
    [
        (STAGES[:1], "--from rewards", "st-1-texts of an earlier stage is not .* --from texts"),
        (STAGES[1:2], "--from pairs", "st-2-rewards of an earlier stage .* give --from rewards"),
        (STAGES[:2], "--from pairs", "st-1-texts of an earlier stage is not .* --from texts"),
        (STAGES[:1], "--from pairs", "st-1-texts of an earlier stage is not .* --from texts"),
        (STAGES[:1], "--if-exists resume", "st-1-texts of stage texts is gone, .* --from texts"),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_stage_is_not_trained_anew_unasked_since_its_run_is_gone(
    gone: list[str], line: str, said: str
) -> None:
    for name in gone:
        shutil.rmtree(folder_of(name).path)
    before = files()
    with pytest.raises(UserError, match=said):
        ratchet(f"train st.yaml --run st {line}")
    assert files() == before


@pytest.mark.usefixtures("project", "no_flow")
@pytest.mark.parametrize(
    ("run", "line"),
    [
        (STAGES[1], "train st.yaml --run st --from rewards"),
        (STAGES[0], "train st.yaml --run st --if-exists delete"),
        ("ss-seed2", "sweep one.yaml --set seed=1,2,3 --run ss --if-exists delete"),
    ],
)
def test_no_run_is_deleted_whose_checkpoint_has_a_name(run: str, line: str) -> None:
    created = read_manifest(folder_of(run))["created"]
    record_promotion(Promotion(name="best-yet", run=run, step=2, created=created))
    before = files()
    with pytest.raises(UserError, match=f"{run}@2 is best-yet, and the run {run} is to be deleted"):
        ratchet(line)
    assert files() == before
    shutil.rmtree(folder_of(run).path)
    with pytest.raises(Begun):
        ratchet(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sweep one.yaml --set seed=1,3 --run ss --if-exists resume", "has begun ss-seed2, which"),
        ("train two.yaml --run st --if-exists resume", "has begun st-3-pairs, which this recipe d"),
    ],
)
def test_a_recipe_without_runs_that_were_begun_is_refused(
    line: str, said: str, project: Path
) -> None:
    stages = {**PLAYLESS, "stages": VALUES["stages"][:2]}
    write_text(project / "two.yaml", json.dumps(stages))
    with pytest.raises(UserError, match=f"{said}.* start afresh with --if-exists delete"):
        ratchet(line)


@pytest.mark.usefixtures("project", "no_flow")
def test_a_sweep_that_goes_on_may_have_more_values() -> None:
    with pytest.raises(Begun):
        ratchet("sweep one.yaml --set seed=1,2,3 --run ss --if-exists resume")
