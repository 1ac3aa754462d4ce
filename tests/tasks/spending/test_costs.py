"""The ledger of a run: its tokens by purpose and by use."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.adapters.tinker.costs import prices_of
from ratchet.flows.cli.commands import app
from ratchet.flows.recipe.recipe import Recipe
from ratchet.tasks.recording.spans import OURS
from ratchet.tasks.reports.tables import describe_costs
from ratchet.tasks.spending.ledger import TOKEN_KINDS, USED, read_ledger
from ratchet.tasks.storage.manifest import write_manifest
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import read_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update
from tests.tasks.test_reports import ended, rollout, said, sealed


def kept_near(**changes: object) -> Recipe:
    kl = {"coefficient": 0.1, "reference": "base"}
    return small_recipe(algorithm={"kl": kl}, **changes)


whole = fixture_of(kept_near())


def used_by(run: RunFolder) -> dict[tuple[str, int | None], tuple[int, ...]]:
    """Return by purpose and step the tokens of prompts, of answers and of training that were used.

    How many of those of prompts were in a cache depends on the time.
    """
    return {
        (row.purpose, row.step): (
            row.tokens["prefill"] + row.tokens["cached"],
            row.tokens["sampled"],
            row.tokens["trained"],
        )
        for row in read_ledger(run).rows
        if row.use == USED
    }


def test_the_ledger_of_a_run_has_the_tokens_of_its_files(whole: RunFolder) -> None:
    used = used_by(whole)
    for step in (0, 1):
        spans = [read_table(path) for path in whole.path.glob(f"spans/train-{step:05d}.*")]
        calls = [row for table in spans for row in table.to_pylist() if row["kind"] == "llm"]
        prompts, answers = (
            sum(len(row[f"{name}_token_ids"]) for row in calls) for name in ("prompt", "response")
        )
        assert used["rollouts", step] == (prompts, answers, 0)
        datums = read_table(whole.datums("policy", step))["tokens"].to_pylist()
        scored, asked, trained = used["updates", step]
        assert trained == sum(map(len, datums))
        assert (asked > 0) == (scored > 0)
    assert read_ledger(whole).tokens(answered=False) == dict.fromkeys(TOKEN_KINDS, 0)


@pytest.mark.parametrize(
    ("killed", "purpose"),
    [(dying_in_update(1), "updates"), (dying_in_batch("train-00001.0"), "rollouts")],
)
def test_a_run_whose_engine_died_has_used_the_tokens_of_one_that_nothing_disturbed(
    killed: AbstractContextManager[None], purpose: str, whole: RunFolder, tmp_path: Path
) -> None:
    run = die_and_go_on(kept_near(), killed, tmp_path)
    used, of_whole = used_by(run), used_by(whole)
    again = [used.pop(("updates", 1)), of_whole.pop(("updates", 1))]
    assert used == of_whole
    assert again[0] >= again[1]  # the weights that were made again are compared with those before
    assert {row.use for row in read_ledger(run).rows if row.purpose == purpose} - {USED}


def test_a_failed_rollouts_tokens_are_told_apart(root: Path) -> None:
    taken = {"gen_ai_usage_input_tokens": 10, "gen_ai_usage_output_tokens": 4}
    call = said("?", "yes", gen_ai_provider_name=OURS, attributes={"cached_tokens": 2}, **taken)
    write_manifest(run := folder_of("one"), small_recipe().model_dump(mode="json"), "f00d")
    won, lost = rollout(0, call, ended(1.0)), rollout(1, call, call | {"call": 1}, ended(None))
    sealed(run.spans("train-00000.0"), won, lost)
    assert {row.use: tuple(row.tokens.values()) for row in read_ledger(run).rows} == {
        USED: (8, 2, 4, 0),
        "failed": (16, 4, 8, 0),
    }


def test_costs_are_shown_by_purpose(whole: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    shown = CliRunner().invoke(app, ["costs", "whole"]).stdout.splitlines()
    assert shown[0] == "whole"
    assert {line.split()[0] for line in shown[2:6]} == {
        "evaluation",
        "references",
        "rollouts",
        "updates",
    }
    assert shown[-2].startswith("all answered")
    assert shown[-1] == "The run's model has no price."
    (record,) = json.loads(CliRunner().invoke(app, ["costs", "whole", "--json"]).stdout)
    assert record["tokens"] == read_ledger(whole).tokens(answered=True)


def test_a_known_price_makes_a_cost_and_a_missing_one_none(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.json"
    monkeypatch.setenv("RATCHET_PRICES", str(prices))
    model = {"tinker_id": "local/tiny-chat", "prefill": "$2", "sample": "3", "train": 4}
    prices.write_text(json.dumps([model]))
    ledger = read_ledger(whole)
    tokens = ledger.tokens(answered=True)
    known = tokens["prefill"] * 2 + tokens["cached"] * 0.4
    known += tokens["sampled"] * 3 + tokens["trained"] * 4
    total = sum(ledger.cost_of(row) or 0 for row in ledger.rows)
    assert total == pytest.approx(known / 1_000_000)
    del model["train"]
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"date": "2026-01-01", "models": [model]}))
    monkeypatch.setenv("RATCHET_PRICES", str(newer))
    ledger = read_ledger(whole)
    assert {ledger.cost_of(row) for row in ledger.rows if row.purpose == "updates"} == {None}
    assert describe_costs(ledger).endswith(
        "The file of prices has none of trained tokens of the run's model."
    )


def test_the_shipped_prices_have_the_models_of_the_service() -> None:
    known = prices_of("Qwen/Qwen3-8B")
    assert known is not None
    assert known.by_kind == pytest.approx(
        {"prefill": 0.195, "cached": 0.039, "sampled": 0.6, "trained": 0.44}
    )
    assert known.date == "2026-10-07"
    assert prices_of("nobody/has-this") is None
