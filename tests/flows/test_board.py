"""`ratchet board`: pages about a folder of runs, for whoever has the token, that change no run."""

import re
import shutil
import subprocess
import sys
import threading
from datetime import timedelta
from hashlib import sha256
from html import escape
from pathlib import Path

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient

from ratchet.adapters.network.app_server import AppServer
from ratchet.flows.server.board import COOKIE, SentHeaders, board_app
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.plan_record import Arm, ChildResult, PlanRecord, write_plan
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from tests.tasks.test_journal import NOON
from tests.tasks.test_report_page import (
    PageReader,
    answered,
    begin_run,
    record_run,
    record_step,
    rewarded,
)
from tests.tasks.test_reports import rollout, said, sealed

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-a-board"
ADDRESS = "http://127.0.0.1:8123"
RUN = "document.title='ran'"
ATTACKS = [
    f"<script>{RUN}</script>",
    f"</pre></td></select></title></textarea></style><script>{RUN}</script>",
    f'<svg onload="{RUN}"><animate onbegin="{RUN}"/></svg>',
    f"\"'><img src=x onerror={RUN}>",
    f'<a href="javascript:{RUN}" onfocus={RUN} autofocus tabindex=1>x</a>',
    f'<meta http-equiv="refresh" content="0;url=javascript:{RUN}"><base href="//x.example">',
    "{{ 7 * 191 }}{% raw %} \x1b[31mred\x07 \u202egnp.exe\u2066 \ud7ff\x00",
]
ATTACK = "\n".join(ATTACKS)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PAGES = [
    "/",
    "/runs/hostile",
    "/runs/hostile/rollouts",
    "/runs/hostile/groups",
    "/runs/hostile/groups/train-00000-0000",
    "/runs/hostile/examples",
    "/compare?run=hostile&run=other",
]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def stranger() -> TestClient:
    """A client without the token."""
    return TestClient(board_app(TOKEN), ADDRESS, follow_redirects=False)


@pytest.fixture
def board(stranger: TestClient) -> TestClient:
    """A client with the token's cookie."""
    assert stranger.get(f"/?token={TOKEN}").status_code == 303
    return stranger


def shown(board: TestClient, path: str) -> str:
    answer = board.get(path)
    assert answer.status_code == 200, answer.text
    return " ".join(PageReader(answer.text).text.split())


def names_of(board: TestClient, path: str) -> list[str]:
    """List the runs of the table, in its order."""
    return re.findall(r'aria-label="tick (.*?)"', board.get(path).text)


def failed(error: str) -> dict:
    ends = {"kind": "error", "error_type": "ValueError", "error_message": error}
    return ends | {"started": NOON, "ended": NOON + timedelta(seconds=1)}


def evaluate(run: RunFolder, step: int, *rewards: float) -> None:
    """Record a held-out evaluation: its scores, and the rollouts that they are of."""
    scored = score_outcomes([ScoredRollout(str(k), reward) for k, reward in enumerate(rewards)])
    write_json(run.evaluation(f"{step:05d}"), {"sampled": scored.model_dump(mode="json")})
    spans = []
    for k, reward in enumerate(rewards):
        example = {"example_id": k, "example": {"question": f"What is {k}? {ATTACK}"}}
        group = f"test-{step:05d}-{k:04d}"
        place = {"rollout_id": f"{group}-00", "group_id": group, "step": step, "attempt": 0}
        answer = said("?", f"At {step} I say {k}. {ATTACK}", started=NOON, ended=NOON)
        ends = rewarded(reward) | {"attributes": example}
        spans.append([place | answer, place | ends])
    sealed(run.spans(f"test-{step:05d}.0"), *spans)


def record_hostile(name: str = "hostile") -> RunFolder:
    """Record a run that says ATTACK wherever an agent, an example or a recipe can say something."""
    run = begin_run(name, roles={"judge": f"openai/{ATTACKS[0]}"})
    good = answered(f"Good {ATTACK}", messages=[{"role": "user", "content": ATTACK}])
    example = {"example_id": 0, "example": {"question": ATTACK, "long": "A" * 2**20}}
    record_step(
        run,
        0,
        rollout(0, good, rewarded(1.0) | {"attributes": example}),
        rollout(1, answered("Bad"), rewarded(0.0) | {"attributes": example}),
        rollout(2, answered(f"x {ATTACK}"), failed(ATTACK + "E" * 2**20)),
    )
    evaluate(run, 0, 0.0, 1.0)
    evaluate(run, 1, 1.0, 1.0)
    return run


def test_nothing_is_shown_without_the_token(stranger: TestClient) -> None:
    record_run("secret-plans")
    for path in ("/", "/runs/secret-plans", "/runs/none", "/nowhere", "/?token=wrong", "/?token="):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert "secret-plans" not in answer.text
    stranger.cookies.set(COOKIE.format(port=8123), "another")
    assert stranger.get("/").status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    record_run("hello")
    answer = stranger.get(f"/runs/hello/rollouts?step=0&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == f"{ADDRESS}/runs/hello/rollouts?step=0"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert stranger.get(answer.headers["location"]).status_code == 200
    assert stranger.get(f"/?token={TOKEN}").status_code == 303, "the printed address opens twice"


def test_another_host_is_refused_with_the_token_too(board: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8123", ""):
        assert board.get("/", headers={"host": host}).status_code == 400
    assert board.get("/", headers={"host": "localhost:8123"}).status_code == 200


def test_every_answer_forbids_scripts_frames_and_caches(stranger: TestClient) -> None:
    for path in ("/", f"/?token={TOKEN}", "/", "/nowhere", "/runs/none"):
        headers = stranger.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; style-src ")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_table_tells_runs_apart(board: TestClient) -> None:
    for name in ("one", "two"):
        record_run(name)
    run = record_run("three", seed=7)
    record_metrics(run.metrics, 1, {"reward/mean": 0.75, "tokens/sampled": 2, "cost/judge": 0.5})
    evaluate(run, 0, 0.0, 1.0)
    evaluate(run, 2, 1.0, 1.0)
    text = shown(board, "/")
    assert "hello seed 7 2 of 2 0.500" in text
    assert re.search(
        r"0\.500 \([^)]*\) → 1\.000 \([^)]*\)0\.75 in training 42 0\.50 finished", text
    )
    assert text.count("1 of 2") == 2
    assert text.count("stopped") == 2
    assert {*names_of(board, "/")} == {"one", "two", "three"}
    assert names_of(board, "/?sort=reward")[0] == "three"
    assert names_of(board, "/?sort=name") == ["one", "three", "two"]
    assert names_of(board, "/?key=seed%3D7") == names_of(board, "/?key=seed") == ["three"]
    assert names_of(board, "/?key=no.such.key") == names_of(board, "/?agent=nobody") == []
    assert len(names_of(board, "/?agent=hello&key=seed%3D0")) == 2
    assert {*names_of(board, "/?runs=t*")} == {"two", "three"}
    assert names_of(board, "/?runs=t") == []


def test_curves_of_the_ticked_runs_are_drawn_over_each_other(board: TestClient) -> None:
    for name in ("one", "two", "three"):
        record_run(name)
    page = board.get("/?run=one&run=two&metric=entropy").text
    legend = page.split('<p class="legend">')[1].split("</p>")[0]
    assert {*re.findall("<bdi>(.*?)</bdi>", legend)} == {"one", "two"}
    assert re.search(r">\s*entropy\s*</text>", page)
    assert "var(--series-1)" in page.split("<svg")[1]
    assert "2 runs" in shown(board, "/compare?run=one&run=two&sort=newest")


def test_the_arms_of_a_sweep_are_a_line_each_in_the_order_and_colours_of_its_table(
    board: TestClient,
) -> None:
    names = [f"{arm}-{seed}" for seed in (1, 2) for arm in ("low", "high")]
    for name in [*names, "other"]:
        record_metrics(record_run(name).metrics, 2, {"reward/mean": 0.5})
    arms = [Arm(arm, [f"{arm}-1", f"{arm}-2"], 2, 0.5) for arm in ("low", "high")]
    results = [ChildResult(name, 2, measured=0.5) for name in names]
    write_plan(folder_of("tried"), PlanRecord({}, names, "held-out reward", results, arms))
    page = board.get("/").text
    legend = page.split('<p class="legend">')[1].split("</p>")[0]
    lines = re.findall(r"var\(--series-(\d)\)\"></i><bdi>(.*?)</bdi>", legend)
    of = {line: place for place, line in lines}
    assert of.keys() == {"tried, low", "tried, high", "other"}
    assert int(of["tried, high"]) - int(of["tried, low"]) == 1
    for arm in ("low", "high"):
        place = of[f"tried, {arm}"]
        assert f'--series-{place})"></i>{arm}</td>' in page
        assert page.count(f"fill: var(--series-{place}); opacity: 0.18") == 2, "a band a drawing"
    assert f"fill: var(--series-{of['other']}); opacity" not in page
    alone = board.get("/?run=high-1&run=high-2").text
    assert "tried, low" not in alone
    assert "tried, high" in board.get("/compare?run=high-1&run=high-2").text


def test_a_damaged_or_half_written_run_is_a_row_that_says_so(board: TestClient, runs: Path) -> None:
    record_run("sound")
    for name in ("half", "metrics", "scores"):
        evaluate(record_run(name), 0, 1.0)
    (runs / "half" / "manifest.json").write_text('{"recipe": {"agent": "he')
    (runs / "metrics" / "metrics.jsonl").write_text('{"step": 0, "crc32": "00000000"}\n')
    (runs / "scores" / "evaluations" / "00000.json").write_bytes(b"\xff\x00{")
    (runs / "empty").mkdir()
    begin_run("<b>&$name")
    page = board.get("/").text
    rows = page.split("</table>")[0].split("<tr>")[2:]
    for name, word in {
        "half": "is damaged",
        "metrics": "line 1 of",
        "scores": "is damaged",
    }.items():
        [row] = [row for row in rows if re.search(f">{name}</(a|bdi)>", row)]
        assert word in row, name
        assert re.search(r'class="(damaged|unreadable)">', row), name
    assert "1 of 2" in shown(board, "/?agent=hello")
    assert escape("<b>&$name") in page
    assert board.get("/runs/half").status_code == 500
    assert "half" not in names_of(board, "/?sort=reward")


def test_rollouts_are_searched_by_reward_error_length_and_words(board: TestClient) -> None:
    run = begin_run("hello")
    long = answered("a rather long answer of many more words", gen_ai_usage_output_tokens=9)
    short = answered("short", gen_ai_usage_output_tokens=2)
    record_step(
        run,
        0,
        rollout(0, long, rewarded(1.0)),
        rollout(1, short, rewarded(0.25)),
        rollout(2, answered("Cut"), failed("the Disk is full")),
    )
    found = {
        "": "0 1 2",
        "?at_least=0.5": "0",
        "?at_least=0.25&order=lowest": "1 0",
        "?at_most=0.5": "1",
        "?ended=failed": "2",
        "?error=disk%20IS": "2",
        "?error=memory": "",
        "?said=LONG": "0",
        "?shortest=8": "0",
        "?longest=7&order=longest&ended=rewarded": "1",
        "?step=0&split=train&order=longest": "0 1 2",
        "?step=1": "",
        "?split=%27%20or%201%3D1": "",
    }
    for query, expected in found.items():
        page = board.get(f"/runs/hello/rollouts{query}").text
        names = re.findall(r"left=train-00000-0000-0(\d)", page)
        assert names == expected.split(), query


def test_a_page_has_fifty_rows_and_leads_to_the_next(board: TestClient) -> None:
    ends = (rollout(k, answered("x"), rewarded(k / 60)) for k in range(60))
    record_step(begin_run("hello"), 0, *ends)
    first = board.get("/runs/hello/rollouts?order=lowest").text
    assert first.count("left=") == 50
    assert "60 found." in first
    [following] = {*re.findall(r'href="(\?[^"]*page=2[^"]*)"', first)}
    second = board.get(f"/runs/hello/rollouts{following.replace('&amp;', '&')}").text
    assert second.count("left=") == 10


def test_two_rollouts_of_a_group_are_beside_each_other_with_their_tokens(board: TestClient) -> None:
    record_run("hello")
    group = "/runs/hello/groups/train-00000-0000"
    assert "train-00000-0000" in shown(board, "/runs/hello/groups?rewards=different")
    assert "train-00000-0000" not in shown(board, "/runs/hello/groups?rewards=equal")
    both = board.get(f"{group}?left=train-00000-0000-01&right=train-00000-0000-02").text
    pieces = PageReader(both.split('<div class="sides">')[1]).pieces
    for level, answer in (("down-2", "Fair"), ("down-3", "Bad")):
        assert "".join(text for mark, text in pieces if mark == level).strip() == answer
    ends = board.get(group).text
    assert re.findall(r"<h2>(.*?)</h2>", ends) == ["train-00000-0000-00", "train-00000-0000-02"]
    assert "Judged" in ends
    one = board.get(f"{group}?left=train-00000-0000-01").text
    assert re.findall(r"<h2>(.*?)</h2>", one) == ["train-00000-0000-01"]


def test_a_rollout_without_an_own_reward_or_under_way_shows_what_there_is(
    board: TestClient,
) -> None:
    run = begin_run("hello")
    line, limit = answered("I was cut"), rewarded(0.0) | {"error_type": "TurnLimit"}
    rollouts = rollout(0, line, failed("out of memory")), rollout(1, line), rollout(2, line, limit)
    sealed(run.spans("train-00000.0"), *rollouts)
    group = "/runs/hello/groups/train-00000-0000"
    text = shown(board, f"{group}?left=train-00000-0000-00&right=train-00000-0000-01")
    assert "ValueError: out of memory" in text
    assert "under way, " in text
    assert text.count("I was cut") == 2
    ended = shown(board, f"{group}?left=train-00000-0000-02")
    assert re.search(r"reward 0, for TurnLimit, \d+ tokens? in 1 call, ", ended)


def test_held_out_examples_are_shown_before_and_after(board: TestClient) -> None:
    run = record_run("hello")
    assert "No held-out example has been played" in shown(board, "/runs/hello/examples")
    evaluate(run, 0, 0.0, 1.0, 0.5)
    evaluate(run, 1, 1.0, 0.75, 0.5)
    for change, example, gain in (("better", 0, "+1"), ("worse", 1, "-0.25"), ("equal", 2, "+0")):
        text = shown(board, f"/runs/hello/examples?change={change}")
        assert "1 found." in text
        assert f"What is {example}?" in text
        assert f"At 0 I say {example}." in text
        assert f"At 1 I say {example}." in text
        assert text.count(f" {gain} ") == 1
    text = shown(board, "/runs/hello/examples?before=1&after=0&change=better")
    assert "What is 1?" in text


def test_a_page_is_loaded_again_while_its_run_trains(board: TestClient) -> None:
    run = record_run("hello")
    refresh = '<meta http-equiv="refresh" content="5">'
    paths = ("/", "/runs/hello", "/runs/hello/rollouts", "/runs/hello/examples")
    with run.locked():
        for path in paths:
            assert refresh in board.get(path).text, path
            assert refresh not in board.get(f"{path}?live=off").text
        assert "runningstep 2 of 2, reward 0.50" in shown(board, "/")
        assert "1 of 2 steps" in shown(board, "/runs/hello")
        record_step(run, 1, rollout(0, answered("Good"), rewarded(1.0), step=1))
        assert "2 of 2 steps" in shown(board, "/runs/hello")
    for path in paths:
        assert refresh not in board.get(path).text, path


def test_no_run_is_locked_or_changed_by_being_looked_at(board: TestClient, runs: Path) -> None:
    run = record_hostile()
    record_hostile("other")
    with run.locked():
        pass
    before = state_of(runs)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            run.is_held()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            with run.locked():  # refused, if looking took the lock for a moment
                pass
    finally:
        done.set()
        looking.join()
    before |= {run.path / "lock": state_of(runs)[run.path / "lock"]}
    for path in PAGES:
        assert board.get(path).status_code == 200
    assert state_of(runs) == before


def state_of(runs: Path) -> dict[Path, tuple[int, str]]:
    return {
        path: (
            path.stat().st_mtime_ns,
            sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(runs.rglob("*"))
    }


@pytest.mark.parametrize(
    "path",
    [
        "/runs/%2e%2e%2fhello",
        "/runs/hello%2f..%2fhello",
        "/runs/hello%00",
        "/runs/none",
        "/runs/none/rollouts",
        "/runs/hello/groups/%2e%2e%2f%2e%2e%2fetc-00000-0000",
        "/runs/hello/groups/*-00000-0000",
        "/runs/hello/groups/train-00009-0000",
        "/runs/hello/manifest.json",
        "/static/../runs/hello/manifest.json",
    ],
)
def test_an_address_that_names_no_run_or_group_leads_nowhere(board: TestClient, path: str) -> None:
    record_run("hello")
    assert board.get(path).status_code == 404


def test_a_query_is_checked(board: TestClient) -> None:
    record_run("hello")
    for query in ("step=x", "step=-1", "at_least=nan", "page=0", "nonsense=1", "order=reward;--"):
        answer = board.get(f"/runs/hello/rollouts?{query}")
        assert answer.status_code == 400
        assert query.split("=")[0] in answer.text
    assert board.get("/?run=" + "&run=".join("abcdefghi")).status_code == 400
    assert board.post("/").status_code == 405


def test_what_agents_say_is_text_on_every_page(board: TestClient) -> None:
    record_hostile()
    record_hostile("other")
    begin_run(f"<svg onload={RUN}>")
    for path in PAGES:
        page = board.get(path).text
        read = PageReader(page)
        tags = {tag for tag, _ in read.elements}
        assert tags.isdisjoint({"script", "img", "iframe", "object", "base", "animate", "title2"})
        assert not any(name.startswith("on") for _, found in read.elements for name in found)
        links = [found.get("href") or "" for tag, found in read.elements if tag == "a"]
        assert all(link.startswith(("/", "?")) for link in links)
        assert "1337" not in read.text
        assert not re.search(r"[\x00-\x08\x0b\x0e-\x1f\u202e\u2066]", page), path
        is_report = "<h2>Recipe</h2>" in page
        assert is_report or len(page) < 100_000, "of a line of a megabyte there is only the begin"
    text = shown(board, PAGES[4])
    assert r"\x1b[31mred\x07 \u202egnp.exe\u2066" in text
    assert text.count("A" * 10_000) == 1
    assert "A" * 20_001 not in text


def title_in_chromium(address: str, folder: Path) -> str:
    """Open an address in a browser; return the page's title after its scripts had time to run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=2000", address]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(r"<title>(.*?)</title>", page, re.S)
    assert found is not None, page
    return found[1]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_nothing_that_agents_say_runs_in_a_browser(tmp_path: Path) -> None:
    record_hostile()
    record_hostile("other")
    begin_run(f"<svg onload={RUN}>")
    bare = f"<!doctype html><html><head><title>still</title></head><body>{ATTACK}</body></html>"
    (tmp_path / "bare.html").write_text(bare, encoding="utf-8")
    assert title_in_chromium(f"file://{tmp_path}/bare.html", tmp_path / "profile") == "ran"

    policed = AppServer(SentHeaders(HTMLResponse(bare)))
    board = AppServer(board_app(TOKEN))
    for server in (policed, board):
        server.start()
    try:
        assert title_in_chromium(policed.url, tmp_path / "profile") == "still", (
            "by the policy alone"
        )
        for path in (PAGES[0], PAGES[2], PAGES[4], PAGES[5], PAGES[6]):
            address = f"{board.url}{path}{'&' if '?' in path else '?'}token={TOKEN}"
            title = title_in_chromium(address, tmp_path / "profile")
            assert re.match(
                r"(runs|rollouts|held-out examples) of|train-00000-0000 of|hostile, ", title
            )
    finally:
        for server in (policed, board):
            server.stop()


def test_the_command_prints_an_address_and_ends_by_a_signal_whatever_its_stdin_is() -> None:
    command = [sys.executable, "-m", "ratchet.flows.cli.main", "board"]
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **ends) as board:
        assert board.stdout is not None
        address = board.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", address)
        with pytest.raises(subprocess.TimeoutExpired):
            board.wait(1)
        board.terminate()
        assert board.wait(30) == 143
