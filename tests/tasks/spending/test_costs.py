"""The ledger of a run: its tokens by purpose, beside what the engine has counted."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapters.errors import UserError
from adapters.tinker.prices import prices_of
from flows.cli.commands import app
from flows.recipe.recipe import Recipe
from flows.train import train
from tasks.reports.costs import describe_costs
from tasks.spending.ledger import REPEATED, UNANSWERED, USED, read_ledger
from tasks.spending.statement import Costs, read_costs
from tasks.storage.run_folder import RunFolder
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.whole_run import die_and_go_on, fixture_of
from tests.support.servers.dying_engine import dying_in_batch, dying_in_update

NONE = {"prompts": 0, "sampled": 0, "trained": 0}


def kept_near(**changes: object) -> Recipe:
    kl = {"coefficient": 0.1, "reference": "base"}
    return small_recipe(algorithm={"kl": kl}, **changes)


whole = fixture_of(kept_near())


def test_the_ledger_of_a_run_is_what_its_engine_has_counted(whole: RunFolder) -> None:
    costs = read_costs(whole, billed=True)
    assert costs.billed == costs.ledger.tokens(answered=True)
    assert costs.unexplained == NONE
    assert costs.ledger.tokens(answered=False) == dict.fromkeys(costs.billed or (), 0)


def test_every_purpose_of_a_run_has_its_rows(whole: RunFolder) -> None:
    rows = read_ledger(whole).rows
    assert {(row.purpose, row.role, row.use) for row in rows} == {
        ("evaluation", "policy", USED),
        ("references", "policy", USED),
        ("rollouts", "policy", USED),
        ("updates", "policy", USED),
    }
    assert [row.step for row in rows if row.purpose == "updates"] == [0, 1]
    assert all(row.tokens["trained"] for row in rows if row.purpose == "updates")


@pytest.mark.parametrize("killed", [dying_in_update(1), dying_in_batch("train-00001.0")])
def test_a_run_whose_engine_died_has_no_token_that_the_ledger_does_not_explain(
    killed: AbstractContextManager[None], prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    run = die_and_go_on(kept_near(), killed, tmp_path)
    costs = read_costs(run, billed=True)
    assert costs.unexplained == NONE
    assert {row.use for row in costs.ledger.rows} - {USED}


def test_an_update_that_was_made_again_is_repeated_or_was_not_answered(
    prefect_server: None, no_tinker: None, tmp_path: Path
) -> None:
    run = die_and_go_on(small_recipe(), dying_in_update(1), tmp_path)
    uses = {row.use for row in read_ledger(run).rows if row.purpose == "updates"}
    assert uses & {REPEATED, UNANSWERED}


def test_a_failed_rollouts_tokens_are_told_apart(
    root: Path, prefect_server: None, no_tinker: None
) -> None:
    recipe = small_recipe(agent="tests.support.agents.mended_agent:play", steps=1)
    (root / "broken").write_text("train-00000-0001-00")
    train(recipe, run="one")
    (root / "broken").unlink()
    costs = read_costs(RunFolder(root / "one"), billed=True)
    assert costs.unexplained == NONE


def test_costs_are_shown_by_purpose_with_what_the_service_counts(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    shown = CliRunner().invoke(app, ["costs", "whole", "--bill"]).stdout.splitlines()
    assert shown[0] == "whole"
    assert {line.split()[0] for line in shown[2:6]} == {
        "evaluation",
        "references",
        "rollouts",
        "updates",
    }
    assert shown[-2].split()[-5:-1] == ["0"] * 4
    assert shown[-1] == "The run's model has no price."
    (record,) = json.loads(CliRunner().invoke(app, ["costs", "whole", "--json"]).stdout)
    assert record["tokens"] == read_ledger(whole).tokens(answered=True)
    assert record["billed"] is None


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
    said = describe_costs(Costs("whole", ledger, None, None))
    assert said.endswith("The file of prices has none of trained tokens of the run's model.")


def test_the_shipped_prices_have_the_models_of_the_service() -> None:
    known = prices_of("Qwen/Qwen3-8B")
    assert known is not None
    assert known.by_kind == pytest.approx(
        {"prefill": 0.195, "cached": 0.039, "sampled": 0.6, "trained": 0.44}
    )
    assert known.date == "2026-10-07"
    assert prices_of("nobody/has-this") is None


@pytest.mark.parametrize(
    "content", ["", "[1]", '[{"prefill": 1}]', '[{"tinker_id": "a", "train": -1}]']
)
def test_prices_that_cannot_be_read_are_refused_by_the_file(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "prices.json"
    path.write_text(content)
    monkeypatch.setenv("RATCHET_PRICES", str(path))
    with pytest.raises(UserError, match="unset RATCHET_PRICES"):
        prices_of("a")
