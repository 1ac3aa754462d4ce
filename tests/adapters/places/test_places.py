"""Places: what fills them, what their program sees, what is kept, and what they may hold."""

import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from ratchet.adapters.door.door import Door
from ratchet.adapters.harness.agents import load_agent
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.project.modules import AgentError
from ratchet.adapters.rewards import Reward
from tests.support.agents.placed_batch import play_in_places, rollout_id, shell

LOOP = "i=0; while :; do {}; i=$((i+1)); done"


def failure(end: Any) -> str:
    return cast(Failure, end.outcome).message


def test_rollouts_of_a_group_write_the_same_names_and_see_nothing_of_each_other(
    open_door: Door, tmp_path: Path
) -> None:
    program = """
    test "$(ls -A . "$HOME" "$TMPDIR" | wc -l)" = 5 || exit 9
    echo mine > file; echo mine > "$HOME/file"; echo mine > "$TMPDIR/file"; pwd > where
    sleep 0.2; test "$(cat file)" = mine && test "$(ls | wc -l)" = 2 && echo 1
    """
    ends = play_in_places(open_door, shell(program), [{}] * 8, tmp_path, kept="always")
    assert [end.outcome for end in ends] == [Reward(1.0)] * 8
    where = [tmp_path / rollout_id(n) / "work" for n in range(8)]
    assert [(work / "where").read_text().strip() for work in where] == [*map(str, where)]


def test_a_template_and_an_example_fill_a_place(open_door: Door, tmp_path: Path) -> None:
    for name, text in {
        "work/notes/readme": "${example.task} stays",
        "work/task.template": "${example.task} in ${HOME}",
        "home/.program/config.toml.template": 'url = "${OPENAI_BASE_URL}"\nn = ${example.n}',
    }.items():
        path = tmp_path / "template" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files = {"src/a.py": "print(1)\n", "b": "ä", "of another row": None}
    example = {"task": "Tidy up", "n": 3, "files": files}
    program = 'test "$TASK" = "Tidy up!" && test "$1" = "Tidy up" && echo 1'
    agent = f"command:sh -c '{program}' sh ${{example.task}}"
    template = str(tmp_path / "template")
    options = {"kept": "always", "template": template, "variables": {"TASK": "${example.task}!"}}
    [end] = play_in_places(open_door, agent, [example], tmp_path / "places", **options)
    assert end.outcome == Reward(1.0)
    place = tmp_path / "places" / rollout_id(0)
    texts = {
        str(path.relative_to(place)): path.read_text()
        for path in place.rglob("*")
        if path.is_file() and path.name != "program.log"
    }
    address = texts.pop("home/.program/config.toml")
    assert address.startswith(f'url = "{open_door.address}/batch/')
    assert address.endswith("n = 3")
    assert texts == {
        "work/notes/readme": "${example.task} stays",
        "work/task": f"Tidy up in {place / 'home'}",
        "work/src/a.py": "print(1)\n",
        "work/b": "ä",
    }


def test_a_place_has_a_commit_without_what_came_later(open_door: Door, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    script = """
    git init -q . && git config user.email a@b && git config user.name a
    echo 1 > file && git add . && git commit -qm one && git rev-parse HEAD
    echo 2 > file && git commit -qam two
    """
    repository.mkdir()
    made = subprocess.run(["sh", "-c", script], cwd=repository, capture_output=True, text=True)
    commit = made.stdout.strip()
    program = 'test "$(cat file)" = 1 && test "$(git log --all --oneline | wc -l)" = 1 && echo 1'
    example = {"repository": str(repository), "commit": commit}
    ends = play_in_places(open_door, shell(program), [example] * 3, tmp_path / "places")
    assert [end.outcome for end in ends] == [Reward(1.0)] * 3
    [end] = play_in_places(open_door, shell("echo 1"), [{**example, "commit": "f" * 40}], tmp_path)
    assert "git fetch ended with exit status" in failure(end)
    assert "mend the columns 'repository' and 'commit'" in failure(end)


@pytest.mark.parametrize(
    ("agent", "example", "said"),
    [
        ("command:echo ${example.taks}", {"task": "x"}, "the columns are: example.task"),
        ("command:echo 1", {"files": {"../x": "y"}}, "'../x' is not inside the place"),
        ("command:echo 1", {"files": {"/x": "y"}}, "'/x' is not inside the place"),
        ("command:echo 1", {"files": "text"}, "give an object of texts by path"),
        ("command:echo 1", {"files": {"x": 1}}, "the file 'x' of the column 'files' is no text"),
        ("command:echo 1", {"files": {"a\0b": "y"}}, "null byte"),
        ("command:echo 1", {"files": {"a" * 300: "y"}}, "name too long"),
        ("command:echo 1", {"folder": "no-such"}, "no-such, which does not exist"),
    ],
)
def test_an_example_that_cannot_fill_its_place_is_a_row_with_the_remedy(
    open_door: Door, tmp_path: Path, agent: str, example: dict[str, Any], said: str
) -> None:
    [end] = play_in_places(open_door, agent, [example], tmp_path, kept="never")
    assert said in failure(end)


@pytest.mark.parametrize(
    ("kept", "left"), [("failed", {1}), ("always", {0, 1}), ("never", set[int]())]
)
def test_the_places_that_the_recipe_keeps_are_left_with_what_the_program_said(
    open_door: Door, tmp_path: Path, kept: str, left: set[int]
) -> None:
    program = """
    read -r line; echo "the key is $OPENAI_API_KEY"
    case $line in *ok*) echo 1;; *) exit 3;; esac
    """
    examples = [{"how": "ok"}, {"how": "bad"}]
    play_in_places(open_door, shell(program), examples, tmp_path, kept=kept)
    assert {path.name for path in tmp_path.iterdir()} == {rollout_id(n) for n in left}
    for number in left & {1}:
        said = (tmp_path / rollout_id(number) / "program.log").read_text()
        assert "ended with exit status 3" in said
        assert "the key is ***" in said


def test_whatever_a_program_leaves_is_removed(open_door: Door, tmp_path: Path) -> None:
    deep = "import os\nfor n in range(3000): os.mkdir('d'); os.chdir('d')"
    program = f'''
    python3 -c "{deep}"
    mkdir locked && touch locked/file && chmod 500 locked && ln -s / root && mkfifo pipe
    touch -- "-rf" "$(printf 'a\\nb')"; echo 1
    '''
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, kept="never")
    assert end.outcome == Reward(1.0)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("program", "bounds", "said"),
    [
        (LOOP.format("head -c 500000 /dev/zero > $i"), {"most_mib": 8}, "MiB, and may hold 8"),
        ("head -c 4000000 /dev/zero > a; cp a b; cp a c", {"most_mib": 8}, "MiB, and may hold 8"),
        (LOOP.format(": > $i"), {"most_files": 99}, "files, and may hold 99"),
    ],
)  # fmt: skip
def test_a_program_that_fills_its_place_too_far_is_ended_and_fails(
    open_door: Door, tmp_path: Path, program: str, bounds: dict[str, Any], said: str
) -> None:
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, kept="never", **bounds)
    assert said in failure(end)
    assert [*tmp_path.iterdir()] == []


def test_no_file_of_a_program_grows_beyond_its_place(open_door: Door, tmp_path: Path) -> None:
    program = "head -c 20000000 /dev/zero > file; echo 1"
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, kept="always", most_mib=8)
    assert "MiB, and may hold 8" in failure(end)
    assert (tmp_path / rollout_id(0) / "work" / "file").stat().st_size == 8 << 20


def test_a_process_that_leaves_its_group_ends_with_its_program(
    open_door: Door, tmp_path: Path
) -> None:
    program = "setsid sh -c 'while :; do date >> alive; sleep 0.1; done' & sleep 0.3; echo 1"
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, kept="always")
    assert end.outcome == Reward(1.0)
    alive = tmp_path / rollout_id(0) / "work" / "alive"
    lines = alive.read_text()
    subprocess.run(["sleep", "0.4"], check=True)
    assert alive.read_text() == lines


def test_a_rollout_whose_time_is_over_leaves_its_place(open_door: Door, tmp_path: Path) -> None:
    program = "echo begun > file; sleep 600"
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, seconds=1.0)
    assert "took longer than 1 s" in failure(end)
    assert (tmp_path / rollout_id(0) / "work" / "file").read_text() == "begun\n"


def test_a_rollout_that_is_played_again_finds_nothing_of_its_first_attempt(
    open_door: Door, tmp_path: Path
) -> None:
    left = tmp_path / rollout_id(0) / "work" / "left"
    left.parent.mkdir(parents=True)
    left.write_text("by a player that was killed")
    program = "ls -A | wc -l"
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, kept="failed")
    assert end.outcome == Reward(0.0)


def writes(example: dict[str, Any], *, place: Path, **_: str) -> float:
    (place / "file").write_text("1")
    return float(len([*place.iterdir()]))


def takes_none(example: dict[str, Any], **_: str) -> float:
    return 1.0


def test_a_function_that_takes_a_place_gets_its_folder(open_door: Door, tmp_path: Path) -> None:
    ends = play_in_places(open_door, f"{__name__}:writes", [{}] * 3, tmp_path, kept="failed")
    assert [end.outcome for end in ends] == [Reward(1.0)] * 3


def test_a_recipe_with_places_refuses_an_agent_that_takes_none() -> None:
    with pytest.raises(AgentError, match="takes none; give its function a keyword parameter"):
        load_agent(f"{__name__}:takes_none", placed=True)


@pytest.mark.parametrize(("words", "told"), [("", '{"task": "Tidy up"}'), ("${example.task}", "")])
def test_a_program_whose_words_have_the_example_finds_nothing_on_its_stdin(
    open_door: Door, tmp_path: Path, words: str, told: str
) -> None:
    agent = f"{shell('cat > told; echo 1')} {words}"
    play_in_places(open_door, agent, [{"task": "Tidy up"}], tmp_path, kept="always")
    assert (tmp_path / rollout_id(0) / "work" / "told").read_text().strip() == told


@pytest.mark.parametrize(
    ("first_line", "outcome"),
    [("#!/bin/sh", "reward"), ("#!/there/is/no/shell", "cannot be started; see why")],
)
def test_a_program_s_path_begins_where_ratchet_runs_and_one_that_cannot_start_has_no_reward(
    open_door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_line: str, outcome: str
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "installed" / "program"
    program.parent.mkdir()
    program.write_text(f"{first_line}\nexit 3\n")
    program.chmod(0o755)
    [end] = play_in_places(open_door, "command:installed/program", [{}], tmp_path, reward="true")
    if outcome == "reward":
        assert end.outcome == Reward(1.0)
    else:
        assert outcome in failure(end)
        assert "no/shell" in failure(end) or "not found" in failure(end)


@pytest.mark.parametrize("status", [126, 127])
def test_a_program_that_ends_like_a_missing_one_earns_what_its_place_is_worth(
    open_door: Door, tmp_path: Path, status: int
) -> None:
    program = f"echo made > file; exit {status}"
    ends = play_in_places(open_door, shell(program), [{}], tmp_path, reward="test -f file")
    assert [end.outcome for end in ends] == [Reward(1.0)]
