"""A dry run of texts and pairs shows the rows as they are trained, and starts nothing."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from ratchet.adapters.errors import UserError
from ratchet.flows.cli.commands import app
from ratchet.flows.cli.recipes import describe_given
from ratchet.flows.recipe.given_examples import GivenRecipe
from ratchet.flows.recipe.given_recipes import FinetuneRecipe, PreferRecipe
from tests.tasks.test_examples import jsonl

MARKED = re.compile(r"⟦(.*?)⟧", re.S)
SMALL: dict[str, Any] = {"steps": 1, "optimizer": {"learning_rate": 0.001}}


def dry(recipe: GivenRecipe, examples: int) -> str:
    return str(describe_given(recipe, examples)["report"])


def chat(question: str, answer: str) -> dict[str, Any]:
    said = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def texts(path: Path, **dataset: Any) -> FinetuneRecipe:
    return FinetuneRecipe.model_validate({"dataset": {"path": str(path), **dataset}, **SMALL})


def count(report: str, split: str, name: str) -> str:
    """Return what a report counts of a split."""
    of_split = report.partition("# counts")[2].partition(f"\n{split}\n")[2].partition("\n\n")[0]
    found = re.search(rf"^    {name} {{2,}}(.*)$", of_split, re.M)
    assert found is not None, of_split
    return found[1]


def test_texts_are_shown_as_they_are_trained_and_counted(tmp_path: Path) -> None:
    rows = [chat(f"Who are you, {n}?", f"I am owl {n}.") for n in range(10)]
    report = dry(texts(jsonl(tmp_path / "a.jsonl", *rows), held_out=0.2), 2)
    shown = MARKED.findall(report.partition("# counts")[0])[1:]
    assert len(shown) == 4
    assert all(re.fullmatch(r"I am owl \d\.<\|im_end\|>", text) for text in shown)
    assert "    <|im_start|>user\n    Who are you, " in report
    assert count(report, "train", "rows") == "8"
    assert count(report, "test", "rows") == "2"
    assert int(count(report, "train", "trained tokens")) < int(count(report, "train", "tokens"))
    assert "dataset.most_tokens is 2,048" in count(report, "train", "longest")
    assert "2 of the 10 rows of a.jsonl are held out" in report


def test_rows_that_a_run_would_refuse_or_leave_out_are_counted_by_reason(tmp_path: Path) -> None:
    long = chat("Who are you?", "I am an owl. " * 50)
    rows = [chat("Who?", "I."), {"messages": [{"role": "user", "content": "Who?"}]}, long]
    recipe = texts(jsonl(tmp_path / "a.jsonl", *rows), held_out=0, most_tokens=64)
    report = dry(recipe, 1)
    assert count(report, "train", "rows") == "3"
    assert count(report, "train", "refused") == "1"
    assert re.search(r"row 1 of .* has no message of the role assistant", report)
    assert count(report, "train", "too long, which is refused") == "1"
    assert count(report, "train", "longest").endswith("and the model has read 2,048")
    assert int(count(report, "train", "longest").split()[0]) > 200
    cut = dry(
        recipe.model_copy(
            update={"dataset": recipe.dataset.model_copy(update={"too_long": "cut"})}
        ),
        1,
    )
    assert count(cut, "train", "cut") == "1"


def test_pairs_are_shown_with_both_sides(tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "chosen": f"An owl, {n}.", "rejected": "No."} for n in range(3)]
    rows.append({"prompt": "Who?", "chosen": "Same.", "rejected": "Same."})
    path = jsonl(tmp_path / "a.jsonl", *rows)
    values = {"dataset": {"path": str(path), "held_out": 0}, "steps": 1}
    report = dry(PreferRecipe.model_validate(values), 1)
    assert MARKED.findall(report)[1:] == ["An owl, 0.<|im_end|>", "No.<|im_end|>"]
    assert "train, row 0, chosen (" in report
    assert count(report, "train", "pairs") == "4"
    assert count(report, "train", "left out: identical sides") == "1"


def test_what_a_terminal_would_obey_is_shown_as_text(tmp_path: Path) -> None:
    row = chat("\x1b[31mWho?", "I am\x1b]0;owl\x07.")
    report = dry(texts(jsonl(tmp_path / "a.jsonl", row), held_out=0), 1)
    assert "\x1b" not in report
    assert "\x07" not in report


def test_a_terminal_is_shown_the_rows_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[chat("Who are you? " * 20, f"Owl {n}.") for n in range(3)])
    recipe = {"flow": "finetune", "dataset": {"path": str(path)}, **SMALL}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    get_command(app)(["dryrun", str(tmp_path / "r.yaml")], standalone_mode=False)
    assert terminal.buffer.getvalue().decode() == f"{dry(texts(path), 4)}\n"


def test_the_command_starts_no_server_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    jsonl(tmp_path / "a.jsonl", *[chat("Who?", f"Owl {n}.") for n in range(3)])
    recipe = {"flow": "finetune", "dataset": {"path": "a.jsonl"}, **SMALL}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    said = CliRunner().invoke(app, ["dryrun", "r.yaml", "--examples", "1"])
    assert said.exit_code == 0, said.output
    assert "# rows as they are trained" in said.output
    assert not (tmp_path / "runs").exists()
    told = CliRunner().invoke(app, ["dryrun", "r.yaml", "--examples", "1", "--json"])
    record = json.loads(told.stdout)
    assert "# rows as they are trained" in record["report"]
    assert [*record["whole"]["tokens"]] == ["prefill", "cached", "sampled", "trained"]


def test_a_dry_run_of_which_no_row_is_left_says_so_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", *[chat("Who? " * 99, f"Owl {n}.") for n in range(3)])
    data = {"path": "a.jsonl", "held_out": 0, "most_tokens": 16}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"flow": "finetune", "dataset": data, **SMALL}))
    said = CliRunner().invoke(app, ["dryrun", "r.yaml"])
    assert "too long, which is refused" in said.stdout
    assert isinstance(said.exception, UserError)
    assert "no row is left of a source to train on" in str(said.exception)
