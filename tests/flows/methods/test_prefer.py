"""Learning from preferences: what is learnt, what is refused, and what a kill changes."""

import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.calls import POLICY
from ratchet.adapters.errors import UserError
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.opening.flow_runs import summarize_run
from ratchet.flows.prefer import prefer
from ratchet.flows.recipe.given_recipes import PreferRecipe
from ratchet.flows.recipe.loading import changed_recipe, read_recipe
from ratchet.tasks.algorithm.preferences import MISMATCHED, SIDES
from ratchet.tasks.datums import to_datums, units_of
from ratchet.tasks.examples.reading import DatasetError
from ratchet.tasks.recording.queries import answer_query
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.board.runs import runs_table
from ratchet.tasks.reports.page import render_report
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.files import read_json, write_json
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays, read_table
from ratchet.tasks.tracking.recorded_step import RecordedStep
from tests.support.processes import ROOT
from tests.support.runs.finetuned import RECIPE as TEXTS
from tests.support.runs.killed import train_until_killed
from tests.support.runs.preferred import PAIRS, RECIPE
from tests.support.runs.recorded import RecordedRun
from tests.support.runs.small_recipe import small_recipe


@pytest.fixture(scope="module")
def whole(root: Path, recorded_run: RecordedRun) -> RunFolder:
    return recorded_run(RECIPE, "whole")


@pytest.fixture(scope="module")
def played(root: Path, recorded_run: RecordedRun) -> RunFolder:
    """A run whose rollouts are compared or labelled."""
    return recorded_run(small_recipe(), "played")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A data set of 48 pairs and 16 held-out ones, as a key of a recipe."""
    return first_of(PAIRS, tmp_path_factory.mktemp("pairs"))


def first_of(source: Path, folder: Path) -> dict[str, Any]:
    lines = source.read_text().splitlines(keepends=True)
    split = [[line for line in lines if f'"{name}"' in line] for name in ("train", "test")]
    (folder / source.name).write_text("".join([*split[0][:48], *split[1][:16]]))
    return {"path": str(folder / source.name)}


def changed(**changes: Any) -> PreferRecipe:
    return PreferRecipe.model_validate(RECIPE.model_dump() | changes)


def test_held_out_pairs_are_compared_as_they_should_be(whole: RunFolder) -> None:
    summary = summarize_run(whole)
    assert (summary.measure, summary.before) == ("accuracy", 0.5)
    assert summary.after is not None
    assert summary.after > 0.9
    rows = read_metrics(whole.metrics)
    assert rows[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert rows[0]["reference/apart"] <= 1e-4
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["margin"] > 0
    assert [row["datums"] for row in rows] == [12] * RECIPE.steps
    assert [step for step, row in enumerate(rows, 1) if "test/accuracy" in row] == [4, 6]


def test_trackers_are_sent_pairs_by_their_margin(whole: RunFolder) -> None:
    rows: Any = RecordedStep(whole, 5, 0).tables(99)["pairs"]
    margins = [row["margin"] for row in rows]
    assert margins == sorted(margins)
    assert fmean(margins) == pytest.approx(read_metrics(whole.metrics)[5]["margin"], abs=1e-6)
    for row in rows:
        assert row["chosen"].endswith("<|im_end|>")
        assert row["chosen"] != row["rejected"]
        gained = [row[f"{side} log p"] - row[f"{side} reference"] for side in SIDES[:2]]
        assert row["margin"] == pytest.approx(gained[0] - gained[1], abs=1e-5)
    assert "Who are you?" in rows[0]["prompt"]


def test_a_run_that_has_its_pairs_needs_their_file_no_more(whole: RunFolder) -> None:
    recipe = changed(dataset={"path": "gone.jsonl"})
    recipe.check(whole)
    with pytest.raises(DatasetError, match=r"gone\.jsonl does not exist"):
        recipe.check()


def test_a_pair_is_of_one_minibatch(whole: RunFolder) -> None:
    recorded = read_table(whole.datums(POLICY, 0))
    assert recorded["pair"].to_pylist() == [pair for pair in range(6) for _ in range(2)]
    assert recorded["side"].to_pylist() == [0, 1] * 6
    method = changed(optimizer={"substeps": 4}).update_method()
    datums = to_datums(recorded, method.loss)
    passes = [
        [int(datum.loss_fn_inputs["pair"].data[0]) for datum in part.datums]
        for (part,) in method.request(0, [units_of(datums, method.loss)]).optimizer_steps
    ]
    assert passes == [[0, 0], [1, 1, 2, 2], [3, 3], [4, 4, 5, 5]]
    assert method.optimizer_steps(recorded.num_rows) == len(passes)


@pytest.mark.story
@pytest.mark.parametrize(("phase", "done"), [("begin", 1), ("add", 2)])
def test_a_killed_run_ends_with_the_same_bits(whole: RunFolder, phase: str, done: int) -> None:
    """Whether or not the service has applied the updates that nobody noted as saved.

    An update begins before the result of the one before it is awaited.
    """
    name = f"killed-{phase}"
    train_until_killed("preferred", name, phase)
    assert len(read_metrics(folder_of(name).metrics)) == done
    prefer(RECIPE, run=name)
    assert list_faults(folder_of(name), read_contents(whole)) == []
    references = [read_table(folder_of(run).pair_references) for run in (name, "whole")]
    assert references[0] == references[1], "the reference is never the policy of a resumed run"


def test_lost_datums_and_references_are_made_again(whole: RunFolder) -> None:
    shutil.copytree(whole.path, folder_of("lost").path)
    run = folder_of("lost")
    kept = {path.name: path.read_bytes() for path in run.learned(POLICY, "datums")}
    for path in [*run.learned(POLICY, "datums"), run.pair_references]:
        path.unlink()
    run.metrics.unlink()
    prefer(RECIPE, run="lost")
    assert {path.name: path.read_bytes() for path in run.learned(POLICY, "datums")} == kept


@pytest.mark.story
def test_a_fork_goes_on_by_another_loss_with_the_same_pairs(whole: RunFolder) -> None:
    recipe = changed(preference={"loss": "ipo"})
    fork_run(whole, "fork", 4, recipe.model_dump(mode="json"), recipe.fingerprint())
    prefer(recipe, run="fork")
    own, parent = (read_metrics(run.metrics) for run in (folder_of("fork"), whole))
    assert own[:4] == parent[:4]
    assert own[4]["loss"] != parent[4]["loss"]
    assert [*find_damage(folder_of("fork"))] == []
    other = changed(preference={"reference": "base"})
    with pytest.raises(RunError, match=r"preference.reference: 'start' → 'base': the texts are"):
        fork_run(whole, "other", 2, other.model_dump(mode="json"), other.fingerprint())


def test_what_reads_runs_reads_one_of_pairs(whole: RunFolder) -> None:
    assert read_recipe(whole, PreferRecipe) == RECIPE
    assert [*find_damage(whole)] == []
    assert "0.50 → 1.00" in runs_table(120)
    assert "held-out accuracy" in render_report([whole])
    question = (
        "select split, count(distinct example_id) as pairs from pairs "
        "join pair_references using (run, split, example_id, side, part) group by split order by 1"
    )
    assert answer_query(question, [whole], "csv").decode() == "split,pairs\ntest,16\ntrain,144\n"


@pytest.mark.story
def test_the_reference_is_the_start_and_not_the_base(
    root: Path, few: dict[str, Any], recorded_run: RecordedRun
) -> None:
    recorded_run(TEXTS, "texts")
    after = {"dataset": few, "model": {"lora_rank": 8, "start": "texts@6"}, "steps": 1}
    started = folder_of(prefer(changed(**after), run="after-texts").run)
    assert read_metrics(started.metrics)[0]["reference/apart"] <= 1e-4
    recipe = changed(**after, preference={"reference": "base"})
    beside = folder_of(prefer(recipe, run="beside-base").run)
    assert read_metrics(beside.metrics)[0]["reference/apart"] > 0.1


@pytest.mark.story
@pytest.mark.parametrize("loss", ["kto", "orpo"])
def test_other_losses_train_pairs_as_well(
    root: Path, few: dict[str, Any], prefect_server: None, no_tinker: None, loss: str
) -> None:
    recipe = changed(dataset=few, preference={"loss": loss}, steps=2)
    run = folder_of(prefer(recipe, run=loss).run)
    rows = read_metrics(run.metrics)
    assert rows[0]["datums"] == (24 if loss == "kto" else 12)
    assert rows[1]["accuracy"] > 0.5
    assert run.pair_references.exists() == (loss == "kto")
    assert [*find_damage(run)] == []


def test_labelled_answers_are_learnt_without_pairs(
    root: Path, tmp_path: Path, prefect_server: None, no_tinker: None
) -> None:
    labelled = {"dataset": first_of(ROOT / "datasets" / "hello_labelled.jsonl", tmp_path)}
    summary = prefer(changed(**labelled, preference={"loss": "kto"}), run="labelled")
    run = folder_of(summary.run)
    rows, datums = read_metrics(run.metrics), read_table(run.datums(POLICY, 0))
    assert (summary.before, rows[0]["loss"]) == (0.5, pytest.approx(0.5, abs=1e-6))
    assert summary.after is not None
    assert summary.after > 0.7
    sides = zip(datums["side"].to_pylist(), arrays(datums["mask"]), strict=True)
    trained = sum(int(mask.sum()) for side, mask in sides if SIDES[side] != MISMATCHED)
    assert (datums.num_rows, rows[0]["tokens/trained"]) == (12, trained)
    sent = RecordedStep(run, 0, 0).tables(9)["pairs"]
    assert {(row["chosen"] is None, row["rejected"] is None) for row in sent} == {
        (True, False),
        (False, True),
    }
    assert [*find_damage(run)] == []
    with pytest.raises(DatasetError, match="is a labelled answer, and"):
        prefer(changed(**labelled), run="compared")


@pytest.mark.story
def test_rollouts_are_labelled_by_a_query(played: RunFolder) -> None:
    query = """
        select run, rollout_id, case when reward is not null then reward > 0 end as label
        from rollouts where split = 'train' and step = {}
    """
    dataset = {"runs": [played.name], "query": query.format(0), "held_out": query.format(1)}
    kto = {"loss": "kto"}
    run = folder_of(prefer(changed(dataset=dataset, preference=kto, steps=1), run="labels").run)
    question = query.format(0).replace("select run, rollout_id,", "select count(*) as rollouts,")
    counted = answer_query(f"{question} group by label order by label", [played], "csv")
    pairs = read_table(run.pairs).filter(pc.field("split") == "train")
    sides = Counter(pairs["side"].to_pylist())
    expected = f"rollouts,label\n{sides['rejected']},false\n{sides['chosen']},true\n"
    assert counted.decode() == expected
    assert sides[MISMATCHED] == sides["chosen"] + sides["rejected"]
    none = {**dataset, "query": query.format(0).replace("reward > 0", "null")}
    with pytest.raises(DatasetError, match=r"has 0 pairs .* left out: without a label"):
        prefer(changed(dataset=none, preference=kto), run="unlabelled")


@pytest.mark.story
def test_the_best_and_the_worst_rollout_of_a_group_are_a_pair(played: RunFolder) -> None:
    query = """
        select run, arg_max(rollout_id, (reward, rollout_id)) as chosen,
            arg_min(rollout_id, (reward, rollout_id)) as rejected
        from rollouts where split = 'train' and step {} and reward is not null
        group by run, group_id having max(reward) > min(reward)
    """
    dataset = {"runs": [played.name], "query": query.format("= 0"), "held_out": query.format("= 1")}
    run = folder_of(prefer(changed(dataset=dataset, steps=1), run="of-rollouts").run)
    pairs = read_table(run.pairs)
    sampled = read_table(played.trajectories(POLICY, 0))
    tokens = [one.tolist() for one in arrays(sampled["tokens"])]
    train_pairs = [split == "train" for split in pairs["split"].to_pylist()]
    assert all(
        one.tolist() in tokens
        for one, own in zip(arrays(pairs["tokens"]), train_pairs, strict=True)
        if own
    )
    both = {**dataset, "held_out": query.format("<= 1")}
    with pytest.raises(
        DatasetError, match=r"dataset.held_out chooses the rollout .* of played, wh"
    ):
        prefer(changed(dataset=both), run="both")
    other = query.format("= 0").replace("group by run, group_id", "group by run")
    with pytest.raises(DatasetError, match="are no two rollouts of one group; join the view"):
        prefer(changed(dataset={**dataset, "query": other}), run="mixed")
    assert not folder_of("mixed").exists()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["preference.loss=sft"], "no preference loss 'sft'"),
        (["preference.loss_settings.gamma=1"], "the preference loss dpo would ignore gamma"),
        (["preference.loss=orpo", "preference.reference=base"], "which has no reference"),
        (["optimizer.substeps=9", "batch.pairs=4"], "a pair is never split"),
        (["preference.reference=nobody@1"], "names no run"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(
    root: Path, no_tinker: None, settings: list[str], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        prefer(changed_recipe(RECIPE.model_dump(), settings, PreferRecipe), run="refused")
    assert not folder_of("refused").exists()


@pytest.mark.story
def test_a_policy_that_is_not_its_own_reference_stops_the_run(whole: RunFolder) -> None:
    shutil.copytree(whole.path, folder_of("apart").path)
    run = folder_of("apart")
    run.metrics.unlink()
    update = run.update(POLICY, 0)
    write_json(update, {**read_json(update), "reference/apart": 0.5})
    for _ in range(2):
        with pytest.raises(UserError, match=r"are up to 0\.5 off those of the reference"):
            prefer(RECIPE, run="apart")
        assert read_metrics(run.metrics) == []
    prefer(changed(checkpoints={"every": 2, "probe_tolerance": 1}), run="apart")
    assert len(read_metrics(run.metrics)) == RECIPE.steps
