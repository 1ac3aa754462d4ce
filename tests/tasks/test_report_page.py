"""`ratchet report`: a page about runs that shows what was said, runs none of it and asks nobody."""

import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from ratchet.adapters.calls import POLICY
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.cli.commands import app
from ratchet.tasks.comparison.statistics import student95
from ratchet.tasks.evaluations import ScoredRollout, score_outcomes
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.recording.step_log import record_metrics
from ratchet.tasks.recording.views import open_views
from ratchet.tasks.reports.facts import RunCurves, read_facts
from ratchet.tasks.reports.page import render_report, write_report
from ratchet.tasks.reports.plots import draw_panels, draw_rewards
from ratchet.tasks.storage.files import write_json
from ratchet.tasks.storage.logs import append_row
from ratchet.tasks.storage.manifest import checksum, read_manifest, record_files, write_manifest
from ratchet.tasks.storage.plan_record import ChildResult, PlanRecord, write_plan
from ratchet.tasks.storage.run_folder import RunFolder, folder_of, runs_root
from ratchet.tasks.tracking.prefect_pages import describe_curves, write_run_report
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.two_policies import two_policies
from tests.support.runs.whole_run import fixture_of
from tests.tasks.test_journal import NOON
from tests.tasks.test_reports import ended, rollout, said, sealed

TINY = Path(__file__).parents[2] / "engine" / "tiny_chat"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))
HOSTILE = "<script>alert(1)</script> & <img src='http://127.0.0.1:9/x.png' onerror=\"alert(2)\">"


whole = fixture_of(two_policies())


class PageReader(HTMLParser):
    """Elements of a page, each with its attributes, and the text of each class."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.text = ""
        self.pieces: list[tuple[str | None, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "span":
            self.pieces.append((attributes.get("class"), data))

    def titles(self, mark: str) -> list[str]:
        """List the titles of the tokens whose class begins with `mark`."""
        spans = [attributes for tag, attributes in self.elements if tag == "span"]
        marked = [span for span in spans if (span.get("class") or "").startswith(mark)]
        return [title for span in marked if (title := span.get("title"))]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def begin_run(name: str, base: str = str(TINY), **changes: Any) -> RunFolder:
    recipe = small_recipe(**changes).model_dump(mode="json")
    recipe["model"]["base"] = base
    run = RunFolder(runs_root() / name)  # whatever the folder is called
    write_manifest(run, recipe, "f00d")
    return run


def answered(answer: str, **columns: object) -> dict:
    tokens = TOKENIZER.encode(answer).ids
    return said(f"Say {HOSTILE}", answer) | {
        "prompt_token_ids": TOKENIZER.encode(f"Say {HOSTILE}").ids,
        "response_token_ids": tokens,
        "logprobs": [-0.5] * len(tokens),
        "started": NOON,
        "ended": NOON + timedelta(seconds=2),
        **columns,
    }


def rewarded(reward: float) -> dict:
    return {
        "kind": "reward",
        "reward_name": "reward",
        "reward": reward,
        "attributes": {"example_id": 0, "example": {"question": HOSTILE}},
        "started": NOON,
        "ended": NOON + timedelta(minutes=2),
    }


def record_step(run: RunFolder, step: int, *rollouts: list[Span]) -> None:
    spans = sealed(run.spans(f"train-{step:05d}.0"), *rollouts)
    run.journal(f"train-{step:05d}.0").parent.mkdir(exist_ok=True)
    run.journal(f"train-{step:05d}.0").touch()
    assemble_trajectories.make(run.trajectories(POLICY, step), [spans])
    write_datums(run.datums(POLICY, step), run.trajectories(POLICY, step), credited("centred"))
    record_metrics(
        run.metrics, step, {"reward/mean": 0.5, "tokens/sampled": 40, "calls": 4, "entropy": 0.7}
    )


def record_run(name: str, **changes: Any) -> RunFolder:
    """Record a run of one step: rewards 1, 0.25 and 0 in a group, and a judge's answer."""
    run = begin_run(name, **changes)
    judged = answered(f"Judged {HOSTILE}", role="judge", call=1) | {
        "prompt_token_ids": [],
        "response_token_ids": [],
        "logprobs": [],
        "attributes": {"cost": 0.25},
        "gen_ai_provider_name": "other",
    }
    record_step(
        run,
        0,
        rollout(0, answered(f"Good {HOSTILE}"), judged, rewarded(1.0)),
        rollout(1, answered("Fair"), rewarded(0.25)),
        rollout(2, answered("Bad"), rewarded(0.0)),
    )
    return run


def test_the_run_that_a_sweep_has_chosen_is_named_so_and_drawn_by_thicker_lines(
    tmp_path: Path,
) -> None:
    names = ["first", "second"]
    folders = [record_run(name) for name in names]
    swept = folders[0].path.with_name("swept")

    def page(chosen: str) -> str:
        results = [ChildResult(name, 1, measured=0.5, chosen=name == chosen) for name in names]
        write_plan(RunFolder(swept), PlanRecord({}, names, "reward", results))
        return write_report([RunFolder(swept)], tmp_path / "page.html").read_text()

    assert ("first, chosen" in page("second"), "second, chosen" in page("second")) == (False, True)
    assert re.search(r"stroke-width: 3\b", page("second"))
    assert not re.search(r"stroke-width: 3\b", page(""))


def test_a_page_asks_no_network_for_anything() -> None:
    page = render_report([record_run("hello")])
    elements = PageReader(page).elements
    links = [
        value
        for _, attributes in elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
    ]
    assert [link for link in links if not (link or "").startswith(("#", "data:,"))] == []
    assert re.findall(r"url\((?!#)", page) + re.findall(r"@import", page) == []
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in [
        (tag, attributes.get("content")) for tag, attributes in elements
    ]


def test_trained_tokens_carry_their_advantages() -> None:
    read = PageReader(render_report([record_run("hello")]))
    best, middle, worst = 1 - 1.25 / 3, 0.25 - 1.25 / 3, -1.25 / 3
    likely = "probability 0.607"
    assert {*read.titles("up-4")} == {f"advantage {best:+.4g}, {likely}"}
    assert {*read.titles("down-2")} == {f"advantage {middle:+.4g}, {likely}"}
    assert {*read.titles("down-3")} == {f"advantage {worst:+.4g}, {likely}"}
    assert len(read.titles("up")) == len(TOKENIZER.encode(f"Good {HOSTILE}").ids)
    assert "".join(text for mark, text in read.pieces if mark == "down-2").strip() == "Fair"


def test_tokens_of_a_uniform_group_are_sampled_and_not_trained() -> None:
    run = begin_run("hello")
    record_step(run, 0, *(rollout(k, answered("Same"), rewarded(1.0)) for k in range(3)))
    read = PageReader(render_report([run]))
    assert read.titles("up") + read.titles("down") == []
    assert {*read.titles("sampled")} == {"not trained, probability 0.607"}


def test_a_given_character_of_several_tokens_is_shown_as_it_is() -> None:
    tokens = TOKENIZER.encode("Say 漢字 🎻").ids
    assert any("\ufffd" in TOKENIZER.decode([token]) for token in tokens)
    run = begin_run("hello")
    answers = {"Good": 1.0, "Bad": 0.0}
    asked = {answer: answered(answer, prompt_token_ids=tokens) for answer in answers}
    record_step(
        run, 0, *(rollout(k, asked[one], rewarded(answers[one])) for k, one in enumerate(answers))
    )
    shown = [text for mark, text in PageReader(render_report([run])).pieces if mark == "given"]
    assert shown == ["Say 漢字 🎻"] * 2


def test_a_call_that_begins_a_trajectory_anew_says_why() -> None:
    run = begin_run("hello")
    anew = answered("Better", call=1, kept_how="tools")
    record_step(
        run,
        0,
        rollout(0, answered("Good"), anew, rewarded(1.0)),
        rollout(1, answered("Bad"), rewarded(0.0)),
    )
    text = PageReader(render_report([run])).text
    told = (
        "Call 1 of the policy begins a trajectory of its own: other tools are offered than before"
    )
    assert text.count(told) == 1


def test_without_the_tokenizer_tokens_are_numbers() -> None:
    run = begin_run("hello", base="nobody/has-this-model")
    record_step(run, 0, rollout(0, answered("Good"), rewarded(1.0)))
    text = PageReader(render_report([run])).text
    assert "The tokenizer of nobody/has-this-model is not on this machine" in text
    assert all(f" {token} " in text for token in TOKENIZER.encode("Good").ids)


def test_a_run_that_has_just_begun_has_a_page() -> None:
    assert "No step is done yet" in PageReader(render_report([begin_run("hello")])).text
    both = PageReader(render_report([begin_run("new"), record_run("old")])).text
    assert "0 of 2 steps" in both
    assert "1 of 2 steps" in both


def test_runs_are_compared_by_what_their_recipes_differ_in(tmp_path: Path) -> None:
    runs = [record_run("one"), record_run("two", seed=7, optimizer={"learning_rate": 0.001})]
    table = render_report(runs).split("key that differs")[1].split("</table>")[0]
    assert re.findall(r"<tr class=\"differs\"><td>(.*?)</td>", table) == [
        "seed",
        "optimizer.learning_rate",
    ]
    assert [*re.findall(r"<td class=\"value\">(.*?)</td>", table)] == ["0", "7", "0.005", "0.001"]


def test_scores_and_costs_are_told() -> None:
    run = record_run("hello", roles={"judge": "openai/gpt-4o-mini"})
    for step, reward in ((0, 0.0), (1, 1.0)):
        scores = score_outcomes([ScoredRollout(str(k), reward) for k in range(4)])
        write_json(run.evaluation(f"{step:05d}"), {"sampled": scores.model_dump(mode="json")})
    page = render_report([run])
    text = " ".join(PageReader(page).text.split())
    assert "held-out reward, sampled: 0.000 (0.00 to 0.49) → 1.000 (0.51 to 1.00)" in text
    timed, spent = (
        [*map(str.strip, re.findall(r"<td>(.*?)</td>", row))]
        for row in re.findall(r"<tr>(?:(?!</tr>).)*<td>judge</td>.*?</tr>", page, re.S)
    )
    assert timed == ["judge", "openai/gpt-4o-mini", "2", "2"]
    assert (spent[:4], spent[-1]) == (["rollouts", "judge", "used", "1"], "0.25")


def test_the_page_begins_with_the_gain_the_curve_and_a_rollout_before_and_after() -> None:
    run = record_run("hello")
    record_examples(run, 0, {0: 0.0}, {0: f"Before {HOSTILE}"})
    record_examples(run, 1, {0: 1.0}, {0: "Certainly after"})
    for step, reward in ((0, 0.25), (1, 0.75)):
        rewards = (reward - 0.25, reward + 0.25)
        scores = score_outcomes([ScoredRollout(str(k), rewards[k % 2]) for k in range(64)])
        write_json(run.evaluation(f"{step:05d}"), {"sampled": scores.model_dump(mode="json")})
    text = " ".join(PageReader(render_report([run])).text.split())
    first, _, rest = text.partition("By minutes and by tokens")
    margin = student95(63) * (2 * 0.25**2 / 63) ** 0.5
    ends = f"{0.5 - margin:+.2f} to {0.5 + margin:+.2f}"
    interval = f"({ends} with 95 % confidence, as if of other examples)"
    assert f"+0.50 held-out reward {interval}" in first
    assert "reward, by updates made" in first
    before, _, after = first.partition("After")
    assert "Before: reward 0 at checkpoint 0, test-00000-0000-00" in before
    assert f"Before {HOSTILE}" in before
    assert ": reward 1 at checkpoint 1, test-00001-0000-00" in after
    assert "Certainly after" in after
    assert "reward, by minutes" in rest


def test_the_examples_that_changed_most_are_shown_for_the_better_and_for_the_worse() -> None:
    run = record_run("hello")
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.25), 2: (0.0, 1.0), 3: (0.5, 0.25), 4: (0.25, 1.0)}
    for step in (0, 1):
        words = dict.fromkeys(rewards, f"By {step}")
        record_examples(run, step, {place: of[step] for place, of in rewards.items()}, words)
    text = " ".join(PageReader(render_report([run])).text.split())
    told = re.findall(r"(Its reward \w+ by [\d.]+) Before: reward \S+ at checkpoint 0, (\S+)", text)
    assert told == [
        ("Its reward rose by 1", "test-00000-0002-00"),
        ("Its reward rose by 0.75", "test-00000-0004-00"),
        ("Its reward fell by 0.25", "test-00000-0003-00"),
    ]


@pytest.mark.parametrize(
    ("second", "shown"),
    [
        (
            "Yes",
            "All that was asked and answered is equal; shown is the last call. Before: reward 0.5",
        ),
        ("No", "Before: reward 1"),
    ],
)
def test_where_no_reward_changed_the_first_example_with_other_words_is_shown(
    second: str, shown: str
) -> None:
    run = record_run("hello")
    for step, word in enumerate(("Yes", second)):
        record_examples(run, step, {0: 0.5, 1: 1.0}, {1: word})
    text = " ".join(PageReader(render_report([run])).text.split())
    assert f"Its reward is as it was {shown} at checkpoint 0, test-00000-" in text


def record_examples(
    run: RunFolder, step: int, rewards: dict[int, float], answers: Mapping[int, str] = {}
) -> None:
    """Record a rollout of each held-out example by a checkpoint."""
    rollouts: list[list[dict]] = []
    for place, reward in rewards.items():
        group = f"test-{step:05d}-{place:04d}"
        of = {"rollout_id": f"{group}-00", "group_id": group, "attempt": 0, "step": step}
        attributes = {"example_id": place, "example": {"question": str(place)}}
        played = answered(answers.get(place, "Yes"))
        rollouts.append([of | played, of | rewarded(reward) | {"attributes": attributes}])
    sealed(run.spans(f"test-{step:05d}.0"), *rollouts)
    run.journal(f"test-{step:05d}.0").touch()


def test_without_held_out_examples_two_steps_of_training_are_shown() -> None:
    run = record_run("hello")
    assert "before and after" not in PageReader(render_report([run])).text
    record_step(run, 1, rollout(0, answered("Later"), rewarded(0.5), step=1))
    text = " ".join(PageReader(render_report([run])).text.split())
    first, _, _ = text.partition("By minutes and by tokens")
    shown = "Before: reward 0.25 in step 0, train-00000-0000-01; the mean of 3 rollouts is 0.417"
    assert f"Its reward rose by 0.0833 {shown}" in first
    assert "After: reward 0.5 in step 1, train-00001-0000-00" in first
    assert "Fair" in first
    assert "Later" in first
    assert "reward in training from 0.500 to 0.500" in first


def test_a_constant_metric_has_its_value_in_a_sentence_and_no_panel() -> None:
    run = record_run("hello")
    for step in (1, 2):
        values = {"reward/mean": 0.5, "entropy": 0.7 - step / 10, "calls": 4, "tokens/sampled": 40}
        record_metrics(run.metrics, step, values | {"tokens/prompt": 8000, "rollouts/failed": 0})
    page = render_report([run])
    drawn = re.findall(r">\s*([^<>]+?)\s*</text>", page)
    assert "entropy of the sampling policy, in nats" in drawn
    text = " ".join(PageReader(page).text.split())
    for title, value in (("tokens of an answer", "10"), ("tokens of a prompt", "2,000")):
        assert title not in drawn
        assert f"{title}: {value};" in text
    assert "failed rollouts: 0" in text


@pytest.mark.parametrize("scale", [1e-4, -9e5, 4e7])
def test_no_number_of_an_axis_is_cut_off(scale: float) -> None:
    metrics = [{"entropy": scale * (1 + step / 7), "reward/mean": scale} for step in range(5)]
    along = [scale * step for step in range(6)]
    curves = RunCurves("hello", metrics, ["policy"], along, along, [], {})
    for drawing in [*draw_rewards([curves]), *draw_panels([curves])]:
        svg = ElementTree.fromstring(drawing)
        width = float(svg.attrib["viewBox"].split()[2])
        numbers = [one for one in svg.findall(".//{*}text") if re.search(r"\d", one.text or "")]
        assert len(numbers) > 6
        for number in numbers:
            assert number.text is not None
            x, wide = float(number.attrib["x"]), 5.73 * len(number.text)  # DejaVu's digits
            centred = "middle" in number.attrib["style"]
            assert x - (wide / 2 if centred else wide) >= 0, number.text
            assert x + (wide / 2 if centred else 0) <= width, number.text


def test_a_logarithmic_panel_counts_its_steps_as_every_other_one() -> None:
    metrics = [{"kl_sample_train_v2": 10.0**-step} for step in range(1, 8)]
    [drawn] = draw_panels([RunCurves("hello", metrics, ["policy"], [], [], [], {})])
    texts = re.findall(">([^<]+)</text>", drawn)
    assert texts[1:5] == ["0", "2", "4", "6"]
    assert "1e-07" in texts


def test_the_code_that_a_run_was_made_with_and_the_sizes_of_its_folders_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agents").mkdir()
    code = tmp_path / "agents" / "own.py"
    code.write_text("REWARD = '<b>1'\n")
    (tmp_path / "data.jsonl").write_text('{"seen": "nowhere"}\n')
    run = record_run("hello")
    paths = {name: Path(name) for name in ("agents/own.py", "data.jsonl")}
    record_files(run, {name: checksum([path]) for name, path in paths.items()}, 0)
    run.engine.mkdir()
    (run.engine / "weights").write_bytes(bytes(3_000_000))
    reader = PageReader(render_report([run]))
    assert "REWARD = '<b>1'" in reader.text
    assert "nowhere" not in reader.text
    assert "engine 3.0 MB" in " ".join(reader.text.split())
    code.write_text("REWARD = 2\n")
    assert "REWARD = " not in PageReader(render_report([run])).text, "the run was not made with it"


def test_errors_are_shown_to_their_last_line_and_equal_ones_once() -> None:
    error = f"{HOSTILE}\n" * 40 + "the last line"
    failed = {"kind": "error", "error_type": "TimeoutError", "error_message": error}
    failed |= {"started": NOON, "ended": NOON}
    run = record_run("hello")
    assert "What failed" not in PageReader(render_report([run])).text
    good = answered("Good"), rewarded(1.0)
    record_step(run, 1, *(rollout(k, failed, step=1) for k in range(2)), rollout(2, *good, step=1))
    text = PageReader(render_report([run])).text
    assert "2 times, in train-00001-0000-00, train-00001-0000-01" in text
    assert text.count(f"TimeoutError: {error}") == 1


def test_a_long_run_s_page_reads_a_part_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.tasks.reports.plots.MOST_POINTS", 2)
    run, failed = record_run("hello"), {"kind": "error", "started": NOON, "ended": NOON}
    for step in range(1, 7):
        played = failed | {"error_type": "E", "error_message": f"of {'ab'[step == 3]}"}
        record_metrics(run.metrics, step, {"rollouts/failed": int(step == 3)})
        record_step(run, step, rollout(0, played, step=step))
    page, ended = render_report([run]), "train-00006-0000-00"
    assert [one in page for one in ("E: of b", ended, "train-00001-0000-00")] == [True, True, False]


def test_minutes_are_those_in_which_the_run_was_open() -> None:
    run = record_run("hello")
    again = NOON + timedelta(hours=5)
    append_row(run.owners, {"opened": f"{again:%Y-%m-%d %H:%M:%S} UTC"})
    later = rewarded(1.0) | {"started": again, "ended": again + timedelta(minutes=3)}
    record_step(run, 1, rollout(0, answered("Good"), later, step=1))
    with open_views([run]) as views:
        curves = read_facts(run).curves(views)
    assert curves.minutes == [0, pytest.approx(2), pytest.approx(5)]
    assert curves.tokens == [0, 40, 80]


def test_the_command_writes_the_page_beside_what_it_is_about(runs: Path, tmp_path: Path) -> None:
    record_run("one")
    record_run("two")

    def report(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["report", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    assert report("one") == str(runs / "one" / "report.html")
    assert report("one", "two") == str(runs / "report.html")
    assert report("two", "--out", str(tmp_path / "page.html")) == str(tmp_path / "page.html")
    assert "2 runs" in (runs / "report.html").read_text()
    assert folder_of("one").report not in folder_of("one").files(), "it is made of the others"


def test_the_curves_of_an_artifact_are_a_picture_that_needs_no_page() -> None:
    run = record_run("hello")
    values = {"reward/mean": 0.5, "seconds/sampling": 2.0, "rollouts/failed": 0}
    for step in (1, 2):
        record_metrics(run.metrics, step, values | {"entropy": step / 10, "ess": step / 4})
    text = describe_curves(run)
    [(kind, encoded)] = re.findall(r"^!\[curves\]\(data:image/(.*?);base64,(.*)\)$", text, re.M)
    picture = ElementTree.fromstring(b64decode(encoded))
    assert kind == "svg+xml"
    panels = picture.findall("{*}svg")
    assert len({(panel.get("x"), panel.get("y")) for panel in panels}) == len(panels) >= 3
    [palette] = picture.findall("{*}style")
    titles = ["".join(title.itertext()).strip() for title in picture.iter() if "text" in title.tag]
    assert "entropy of the sampling policy, in nats" in titles
    assert "failed rollouts" not in titles
    assert re.search(r"^Constant, and so without a curve: .*failed rollouts: 0", text, re.M)
    used = {*re.findall(r"var\((--[\w-]+)\)", b64decode(encoded).decode())}
    assert used <= {*re.findall(r"(--[\w-]+): ", palette.text or "")}


def test_a_report_that_cannot_be_made_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = record_run("hello")
    write_run_report(run)
    assert run.report.exists()
    spans = run.spans("train-00000.0")
    spans.write_bytes(spans.read_bytes()[:-9] + b"x" + spans.read_bytes()[-8:])
    write_run_report(run)
    assert f"the report of {run.path} cannot be shown: " in caplog.text
    assert "train-00000.0.parquet is damaged" in caplog.text


def test_a_run_of_two_policies_ends_with_its_report_and_a_fork_names_its_parent(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PageReader(whole.report.read_text(encoding="utf-8"))
    assert "2 of 2 steps" in read.text
    assert "by the policy listener" in read.text
    assert "policy:listener" in read.text
    assert "solid, dashed" in read.text
    monkeypatch.setenv("RATCHET_RUNS", str(whole.path.parent))
    recipe = read_manifest(whole)["recipe"] | {"steps": 3}
    fork = fork_run(whole, "fork", 1, recipe, "f00d")
    text = " ".join(PageReader(render_report([fork])).text.split())
    assert "fork of whole, which gave 1 steps; changed: steps: 2 → 3" in text


def test_a_page_folds_what_failed_and_shows_each_kind_once() -> None:
    run = begin_run("hello")
    words = [f"a prompt of {count} tokens is too long" for count in (17, 23, 480)]
    rollouts = [rollout(k, ended(None, one)) for k, one in enumerate([*words, "another"])]
    sealed(run.spans("train-00000.0"), *rollouts)
    run.journal("train-00000.0").parent.mkdir()
    run.journal("train-00000.0").touch()
    page = render_report([run])
    folded = re.findall(
        r"<details><summary>(.*?)</summary>\s*<pre>(.*?)</pre></details>", page, re.S
    )
    assert len(folded) == 2
    (long,) = (summary for summary, text in folded if "too long" in text)
    assert "3 times" in long
    assert "the commonest of 3 messages" in " ".join(long.split())
    assert "TimeoutError: a prompt of" in long
