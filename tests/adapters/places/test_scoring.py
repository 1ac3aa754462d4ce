"""Rewards from a place: what the recipe's command finds there, and what its answer means."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from ratchet.adapters.door.door import Door
from ratchet.adapters.player_protocol import Failure
from ratchet.adapters.rewards import Reward
from tests.support.agents.placed_batch import play_in_places, rollout_id, shell

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure>no</failure></testcase>
<testcase name="c"><system-out>said</system-out></testcase><testcase name="d"><skipped/></testcase>
</testsuite></testsuites>"""

NEEDS_BUBBLEWRAP = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="the system's package bubblewrap is not installed"
)

GIT_INIT = "git init --quiet ."


def words(program: str) -> str:
    return shlex.join(["sh", "-c", program])


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("true", 1.0),
        ("exit 3", 0.0),
        ("echo 0.25", 0.25),
        ("echo 0.25; exit 1", 0.0),
        ("echo 7; echo done", 1.0),
        ("kill -9 $$", 0.0),
        ("sleep 60", 0.0),
        (f"printf '%s' {shlex.quote(REPORT)} > $REPORT; exit 1", 0.5),
        ("printf '<testsuite/>' > $REPORT", 0.0),
        ("printf '<not xml' > $REPORT", 0.0),
        ("ln -s /etc/passwd $REPORT", 0.0),
        ("mkfifo $REPORT", 0.0),
        ("head -c 20000000 /dev/zero > $REPORT", 0.0),
        ("""printf '<?xml version="1.0" encoding="no-such"?><a/>' > $REPORT""", 0.0),
        (f"(printf '<!DOCTYPE a>'; printf '%s' {shlex.quote(REPORT)}) > $REPORT", 0.0),
        (f"printf '%s' {shlex.quote(REPORT)} | iconv -t UTF-16 > $REPORT", 0.5),
        (f"printf '%s' {shlex.quote(REPORT)} > x; mv x $REPORT", 0.5),
        (f"printf '%s' {shlex.quote(REPORT)} > $REPORT; kill -9 $$", 0.0),
        ('echo 1; : "$REPORT"', 0.0),
        (": $REPORT", 0.0),
    ],
)
def test_a_reward_is_a_status_a_number_or_the_share_of_passed_tests(
    open_door: Door, tmp_path: Path, command: str, reward: float
) -> None:
    options: dict[str, Any] = {"reward": words(command), "reward_seconds": 1.5}
    [end] = play_in_places(open_door, "command:true", [{}], tmp_path, **options)
    assert end.outcome == Reward(reward)


@pytest.mark.parametrize("cage", ["none", pytest.param("bwrap", marks=NEEDS_BUBBLEWRAP)])
@pytest.mark.parametrize(
    "forged",
    [
        "write; tell",
        "tell; write",
        "tell; (write &) ; sleep 0.3",
        "tell; cp forged x; mv x $REPORT",
        "ln -s $HOME/x $REPORT; tell; rm $REPORT; write",
        "tell; ln $REPORT ${REPORT}x; cat forged > ${REPORT}x; rm ${REPORT}x",
        "mkdir ${REPORT}x; tell; ln $REPORT ${REPORT}x/x; cat forged > ${REPORT}x/x",
        "mv $(dirname $REPORT) x || exit 9; mkdir $(dirname $REPORT); tell; write",
        "chmod 500 $(dirname $REPORT); chmod 700 $(dirname $REPORT); write",
        "exec 5> $REPORT; tell; cat forged >&5",
        "tell; tail -c +999 forged > x; truncate -s 3 $REPORT",
    ],
)
def test_a_report_that_is_written_by_others_too_is_no_report(
    open_door: Door, tmp_path: Path, forged: str, cage: str
) -> None:
    functions = """
    tell() { printf '<t><testcase><failure/></testcase><testcase/></t>' > $REPORT; }
    write() { cat forged > $REPORT; }
    """
    files = {"forged": "<t><testcase/></t>"}
    given: dict[str, Any] = {"reward": words(functions + forged), "cage": cage}
    [end] = play_in_places(open_door, "command:true", [{"files": files}], tmp_path, **given)
    assert end.outcome == Reward(0.0)


PATCHED = {
    "tests": "diff --git a/tests/check.sh b/tests/check.sh\nnew file mode 100644\n--- /dev/null\n"
    '+++ b/tests/check.sh\n@@ -0,0 +1 @@\n+test "$(cat answer)" = 4\n'
}


@pytest.mark.parametrize("cage", ["none", pytest.param("bwrap", marks=NEEDS_BUBBLEWRAP)])
@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("echo 4 > answer", 1.0),
        ("mkdir -p tests; echo true > tests/check.sh; echo 5 > answer", 0.0),
        (f"{GIT_INIT}; git config core.worktree /; echo 4 > answer", 1.0),
        (f"{GIT_INIT}; git config core.worktree ..; mkdir tests; echo true > tests/check.sh", 0.0),
        ("echo 'gitdir: /nowhere' > .git; echo 4 > answer", 1.0),
        ("echo '* eol=crlf working-tree-encoding=UTF-16' > .gitattributes; echo 4 > answer", 1.0),
        (
            f"{GIT_INIT}; for at in filter.x.clean filter.x.smudge core.fsmonitor; do "
            "git config $at 'touch ran; cat'; done; echo '* filter=x' > .gitattributes; "
            "echo 4 > answer",
            1.0,
        ),
        (f"{GIT_INIT}; git config apply.whitespace error-all; echo 4 > answer", 1.0),
        ("mkdir other; ln -s other tests; echo 4 > answer", 0.0),
    ],
)
def test_a_patch_is_applied_to_the_place_alone(
    open_door: Door, tmp_path: Path, program: str, reward: float, cage: str
) -> None:
    """Git holds the project around it, and what the program makes is no repository of ours."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    given: dict[str, Any] = {"reward": "sh tests/check.sh", "cage": cage, "kept": "always"}
    places = tmp_path / "runs" / "places"
    [end] = play_in_places(open_door, shell(f"{program}; exit 0"), [PATCHED], places, **given)
    assert end.outcome == Reward(reward)
    assert not [*tmp_path.rglob("ran")]


DEEP = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')"


@pytest.mark.parametrize(
    "program",
    [
        f"mkdir -p tests/check.sh; cd tests/check.sh; python3 -c {shlex.quote(DEEP)}",
        f"python3 -c {shlex.quote(DEEP)}",
        "mkdir $(printf 'a\\377b'); : > $(printf 'a\\377b')/$(printf '\\377')",
        "mkdir -p tests/check.sh/a; : > tests/check.sh/a/x; chmod 0 tests/check.sh/a",
        "mkdir -p tests; mkfifo tests/check.sh",
        "echo '[[[[' > said",
    ],
)
def test_whatever_a_program_leaves_is_scored(open_door: Door, tmp_path: Path, program: str) -> None:
    example = {"tests": {"tests/check.sh": "exit 0"}}
    given: dict[str, Any] = {"reward": "sh tests/check.sh", "kept": "never"}
    [end] = play_in_places(open_door, shell(program), [example], tmp_path, **given)
    assert end.outcome == Reward(1.0)
    assert [*tmp_path.iterdir()] == []


def test_whatever_is_raised_by_what_is_read_in_a_place_is_its_rollout_s_failure(
    open_door: Door, tmp_path: Path
) -> None:
    deep = words("head -c 60000 /dev/zero | tr '\\0' '['")
    [end] = play_in_places(open_door, "command:true", [{}], tmp_path, reward=deep)
    assert cast(Failure, end.outcome).kind == "RecursionError"


def test_a_reward_command_may_name_roles_and_measures(open_door: Door, tmp_path: Path) -> None:
    answer = '{"policy": 0.5, "measure/files": 2}'
    options: dict[str, Any] = {"reward": words(f"echo {shlex.quote(answer)}")}
    [end] = play_in_places(open_door, "command:true", [{}], tmp_path, **options)
    assert end.outcome == Reward(0.5, {"policy": 0.5, "measure/files": 2.0})


def test_json_that_is_no_reward_fails_the_rollout(open_door: Door, tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": words("echo '[1]'")}
    [end] = play_in_places(open_door, "command:true", [{}], tmp_path, **options)
    assert cast(Failure, end.outcome).kind == "RewardError"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": "no-such-program -q"}, "there is no program 'no-such-program' to run as"),
        (
            {"reward": "sh ${example.check}"},
            "place.reward's '${example.check}' has ${example.check}",
        ),
        ({"reward": "true", "tests": "no-such-folder"}, "which does not exist"),
        ({"reward": "true", "tests": 7}, "give an object of texts by path"),
    ],
)
def test_a_reward_command_that_cannot_score_fails_the_rollout(
    open_door: Door, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    example = {"tests": options.pop("tests", {})}
    [end] = play_in_places(open_door, "command:true", [example], tmp_path, **options)
    assert said in cast(Failure, end.outcome).message


def test_the_tests_are_seen_by_the_reward_command_alone(open_door: Door, tmp_path: Path) -> None:
    program = """
    read -r line; case $line in *secret*) exit 9;; esac
    test -e hidden && exit 9; echo 4 > answer; mkdir -p tests; echo mine > tests/check.sh
    """
    example = {"task": "say", "tests": {"tests/check.sh": "# secret\ntest $(cat answer) = 4\n"}}
    options: dict[str, Any] = {"reward": "sh tests/check.sh", "kept": "always"}
    [end] = play_in_places(open_door, shell(program), [example], tmp_path, **options)
    assert end.outcome == Reward(1.0)
    assert "ended with exit status 0" in (tmp_path / rollout_id(0) / "program.log").read_text()


def test_tests_may_be_a_folder_or_a_patch(open_door: Door, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "tests"
    hidden.mkdir(parents=True)
    (hidden / "check.sh").write_text("test $(cat file) = 2")
    patch = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-1\n+2\n"
    changed = words("test $(cat file) = 2")
    for row, agent, reward in (
        ({"tests": str(tmp_path / "hidden")}, shell("echo 2 > file"), "sh tests/check.sh"),
        ({"tests": patch, "files": {"file": "1\n"}}, "command:true", changed),
    ):
        [end] = play_in_places(open_door, agent, [row], tmp_path / "places", reward=reward)
        assert end.outcome == Reward(1.0)
    unfit = {"tests": patch, "files": {"file": "other\n"}}
    [end] = play_in_places(open_door, "command:true", [unfit], tmp_path / "places", reward="true")
    assert end.outcome == Reward(0.0)


@pytest.mark.parametrize(
    "trap",
    [
        "ln -s {outside} tests",
        "mkdir tests; ln -s {outside}/kept tests/check.sh",
        "mkdir tests; ln {outside}/kept tests/check.sh",
        "mkdir -p tests/check.sh/more",
        "mkdir tests; mkfifo tests/check.sh",
        ": > tests",
    ],
)
def test_no_link_of_a_program_leads_the_tests_out_of_its_place(
    open_door: Door, tmp_path: Path, trap: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    example = {"tests": {"tests/check.sh": "true"}}
    program = shell(trap.format(outside=outside))
    options: dict[str, Any] = {"reward": "sh tests/check.sh"}
    [end] = play_in_places(open_door, program, [example], tmp_path / "places", **options)
    assert end.outcome == Reward(1.0)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}


def test_the_reward_command_has_neither_the_program_s_home_nor_its_key(
    open_door: Door, tmp_path: Path
) -> None:
    program = 'echo "exit 9" > "$HOME/.profile"; echo 1'
    check = 'test -z "$OPENAI_API_KEY$SECRET" && test -z "$(ls -A $HOME)"'
    options: dict[str, Any] = {"reward": words(check), "variables": {"SECRET": "x"}}
    [end] = play_in_places(open_door, shell(program), [{}], tmp_path, **options)
    assert end.outcome == Reward(1.0)


def test_the_tests_of_pytest_are_rewarded_by_the_share_that_passed(
    open_door: Door, tmp_path: Path
) -> None:
    program = "printf 'def double(n):\\n    return n + n\\n' > doubled.py"
    tests = """
from doubled import double
def test_a(): assert double(2) == 4
def test_b(): assert double(1) == 3
"""
    example = {"tests": {"test_doubled.py": tests}}
    command = (
        f"{sys.executable} -m pytest -q -p no:cacheprovider --junitxml=${{REPORT}} test_doubled.py"
    )
    [end] = play_in_places(open_door, shell(program), [example], tmp_path, reward=command)
    assert end.outcome == Reward(0.5)
