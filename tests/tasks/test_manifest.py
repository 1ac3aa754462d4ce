"""A run is bound to one recipe and to one format, and knows its parent."""

from pathlib import Path
from typing import Any

import pytest

from ratchet.tasks.reports.board.runs import list_runs, runs_table
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.manifest import (
    FORK,
    FORMAT,
    bind_run,
    latest_run,
    lineage,
    parent_of,
    read_manifest,
    recipe_of,
    write_manifest,
)
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from tests.support.gguf_models import write_gguf
from tests.support.processes import ROOT

RECIPE = {
    "agent": "hello",
    "steps": 2,
    "dataset": {"path": __file__},
    "roles": {},
    "optimizer": {"learning_rate": 0.1},
}


pytestmark = pytest.mark.usefixtures("runs")


def make_run(name: str, **changes: Any) -> RunFolder:
    with bind_run(name, RECIPE | changes, "f00d") as run:
        return run


def test_the_docs_name_the_format_that_is_read() -> None:
    said = (ROOT / "docs" / "what-survives.md").read_text(encoding="utf-8")
    assert f"(this version reads format {FORMAT})" in said


def make_run_of_format(name: str, number: int) -> RunFolder:
    run = make_run(name)
    write_json(run.manifest, read_manifest(run) | {"format": number})
    return run


def test_the_manifest_says_what_the_run_depends_on(runs: Path) -> None:
    run = make_run("one")
    manifest = read_manifest(run)
    assert run.path == runs / "one"
    assert recipe_of(run) == RECIPE
    assert (manifest["fingerprint"], manifest["format"]) == ("f00d", FORMAT)
    assert manifest["versions"]["tinker"] == "0.38.0"


def test_the_newest_run_of_an_agent_is_found() -> None:
    for name in ("b", "a"):
        make_run(name)
    assert latest_run("hello", {}).name == "a"
    with pytest.raises(RunError, match="no run of the agent 'arithmetic'; evaluate"):
        latest_run("arithmetic", {})


def test_the_newest_run_of_an_agent_has_the_same_roles_whoever_helps_in_them() -> None:
    make_run("one", roles={"teller": "policy", "judge": "function:package.module:name"})
    make_run("two", roles={"teller": "policy:teller", "judge": "function:package.module:name"})
    make_run("three")
    assert latest_run("hello", {"teller": "policy", "judge": "openai/gpt-4o-mini"}).name == "one"
    assert latest_run("hello", {"teller": "policy:teller", "judge": "openai/o"}).name == "two"
    with pytest.raises(RunError, match="the agent 'hello' with the roles teller; evaluate"):
        latest_run("hello", {"teller": "policy"})


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_a_run_of_another_format_is_refused(number: int) -> None:
    run = make_run_of_format("old", number)
    said = f"was written in format {number}, and this version reads format {FORMAT}; continue it"
    for refuse in (read_manifest, recipe_of, parent_of, lineage):
        with pytest.raises(RunError, match=said):
            refuse(run)
    with pytest.raises(RunError, match=said), bind_run("old", RECIPE, "f00d"):
        pass


def test_a_run_of_another_format_is_listed_with_what_to_do() -> None:
    make_run("new")
    make_run_of_format("old", 1)
    states = [row["record"]["state"] for row in list_runs()]
    assert states == ["stopped", "unreadable"]
    table, explanation = runs_table(100).split("\n\n")
    assert table.splitlines()[-1].split()[0] == "old"
    assert explanation.startswith("old: the run ")
    assert "in format 1" in explanation
    assert "continue it with the version that wrote it" in explanation


def test_the_newest_run_may_be_beside_runs_of_another_format(runs: Path) -> None:
    make_run("new")
    make_run_of_format("old", 1)
    foreign = runs / "foreign" / "manifest.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    assert latest_run("hello", {}).name == "new"
    folder_of("new").delete()
    with pytest.raises(RunError, match="'hello'; evaluate the untrained model by --model base"):
        latest_run("hello", {})


def make_fork(name: str, parent: RunFolder, step: int, rate: float) -> RunFolder:
    """Bind a folder as a fork of `parent` at `step`, with a learning rate of its own."""
    manifest, run = read_manifest(parent), folder_of(name)
    kept = {key: manifest[key] for key in ("fingerprint", "recipe", "parent") if key in manifest}
    recipe = RECIPE | {"optimizer": {"learning_rate": rate}}
    described = {"run": parent.name, "how": FORK, "step": step, **kept}
    write_manifest(run, recipe, f"{rate}", {"parent": described})
    return run


def rates(run: RunFolder) -> list[tuple[int, float]]:
    return [(step, recipe["optimizer"]["learning_rate"]) for step, recipe in lineage(run)]


def test_the_lineage_of_a_run_is_its_ancestors_recipes_by_their_first_steps() -> None:
    first = make_run("first")
    assert rates(first) == [(0, 0.1)]
    second = make_fork("second", first, 3, 0.2)
    assert rates(second) == [(0, 0.1), (3, 0.2)]
    assert rates(make_fork("third", second, 5, 0.3)) == [(0, 0.1), (3, 0.2), (5, 0.3)]


def test_a_run_says_where_its_base_comes_from_if_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, _ = write_gguf(tmp_path / "model.gguf")
    write_manifest(folder_of("real"), {**RECIPE, "model": {"base": str(file)}}, "f00d")
    origin = read_manifest(folder_of("real"))["base_origin"]
    assert (origin["license"], origin["file"]) == ("apache-2.0", "model.gguf")
    write_manifest(folder_of("tiny"), RECIPE, "f00d")
    assert "base_origin" not in read_manifest(folder_of("tiny"))
