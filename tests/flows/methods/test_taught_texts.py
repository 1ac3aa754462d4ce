"""Texts with a teacher: its likeliest tokens are learnt, bound once, and what cannot teach."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.interruptions.compare_runs import list_faults, read_contents
from ratchet.adapters.errors import UserError
from ratchet.adapters.rendering.chat import Chat
from ratchet.adapters.tinker.service import PatientSampler, connect
from ratchet.flows.checkpoints.binding import open_teacher, read_bound
from ratchet.flows.checkpoints.forks import fork_run
from ratchet.flows.finetune import finetune
from ratchet.flows.recipe.given_recipes import FinetuneRecipe
from ratchet.tasks.algorithm.distillation import DISTILLATIONS, NO_TOKEN
from ratchet.tasks.examples.reading import DatasetError, read_before
from ratchet.tasks.given.measures import read_measure
from ratchet.tasks.given.texts import Texts, score_part
from ratchet.tasks.recording.queries import answer_query
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.reports.verification import find_damage
from ratchet.tasks.storage.run_folder import RunError, RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays, read_table
from tests.support.runs.finetuned import RECIPE, TAUGHT
from tests.support.runs.killed import train_until_killed
from tests.support.runs.recorded import RecordedRun

K = TAUGHT.teacher.top_k


@pytest.fixture(scope="module")
def whole(root: Path, recorded_run: RecordedRun) -> RunFolder:
    recorded_run(RECIPE, "school")
    finetune(TAUGHT, run="whole")
    return folder_of("whole")


def changed(**teacher: Any) -> FinetuneRecipe:
    values = RECIPE.model_dump(exclude_unset=True)
    return FinetuneRecipe.model_validate(values | {"teacher": teacher})


def cells(run: RunFolder, row: int) -> tuple[list[int], list[bool], np.ndarray, np.ndarray]:
    """Return the tokens of a sequence, which are trained, and what the teacher finds likeliest."""
    texts, taught = read_table(run.texts), read_table(run.text_teacher(0))
    top, log_q = (
        arrays(taught[name])[row].reshape(-1, K) for name in ("top_tokens", "top_logprobs")
    )
    trained = (arrays(texts["weights"])[row] > 0).tolist()
    return arrays(texts["tokens"])[row].tolist(), trained, top, log_q


def test_the_policy_comes_near_its_teacher(whole: RunFolder) -> None:
    rows = read_metrics(whole.metrics)
    assert rows[-1]["loss"] < 0.3 * rows[0]["loss"]
    assert all(0.95 < row["teacher/covered"] <= 1 for row in rows)
    measured = [read_measure(path) for path in whole.measures()]
    assert measured[-1].value < 0.3 * measured[0].value
    assert [*find_damage(whole)] == []


def test_likeliest_tokens_are_those_of_the_teacher(whole: RunFolder) -> None:
    tokens, trained, top, log_q = cells(whole, 3)
    first = trained.index(True)
    teacher = read_bound(whole, "school@6").of("policy").sampler
    with connect(RECIPE.model.base, whole.engine) as service:
        others = [[*tokens[:first], token] for token in (*top[0].tolist(), *range(300))]
        scored = [one.item() for one in service.sampler(teacher).score(others, [1] * len(others))]
    assert log_q[0] == pytest.approx(scored[:K], abs=1e-5)
    assert (np.diff(log_q) <= 0).all()
    rest = [score for token, score in enumerate(scored[K:]) if token not in top[0]]
    assert max(rest) <= log_q[0].min() + 1e-5


def test_the_loss_is_the_divergence_over_them_and_the_tail(whole: RunFolder) -> None:
    datums = read_table(whole.datums("policy", 0)).to_pylist()
    losses = list[float]()
    with connect(RECIPE.model.base, whole.engine) as service:
        base = service.base_sampler(RECIPE.model.base)
        for row in datums:
            top, log_q = (np.array(row[n]).reshape(-1, K) for n in ("top_tokens", "top_logprobs"))
            whole_text = [row["tokens"][0], *row["targets"]]
            [log_p] = base.score_chosen([whole_text], [np.where(log_q > NO_TOKEN, top, -1)])
            loss, _ = DISTILLATIONS["forward_kl"].function(log_p.astype(float), log_q)
            losses += loss[np.array(row["mask"]) != 0].tolist()
    assert read_metrics(whole.metrics)[0]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.story
@pytest.mark.parametrize("phase", ["begin", "add"])
def test_a_killed_run_ends_with_the_same_bits(whole: RunFolder, phase: str) -> None:
    name = f"killed-{phase}"
    train_until_killed("finetuned", name, phase, "taught")
    (folder_of(name).path / "datums" / "00001.parquet").unlink()  # is made again
    finetune(TAUGHT, run=name)
    assert list_faults(folder_of(name), read_contents(whole)) == []


@pytest.mark.story
def test_a_teacher_is_asked_once_in_parts_whatever_stops_the_run(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.tasks.given.texts.ROWS_A_PART", 60)
    score, asked = PatientSampler.score_likeliest, list[int]()

    def score_or_stop(
        self: PatientSampler, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        asked.append(len(sequences))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return score(self, sequences, last, k)

    monkeypatch.setattr(PatientSampler, "score_likeliest", score_or_stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(TAUGHT, run="parts")
    finetune(TAUGHT, run="parts")
    finetune(TAUGHT, run="parts")
    assert asked == [60, 60, 60, 40]
    run = folder_of("parts")
    parts = [read_table(run.text_teacher(part)) for part in range(3)]
    at_once = read_table(whole.text_teacher(0)).to_pylist()
    assert [row for part in parts for row in part.to_pylist()] == at_once
    counted = answer_query("select count(*) as n from text_teachers", [run], "csv").decode()
    assert counted == "n\n160\n"


@pytest.mark.story
def test_a_teacher_reads_more_than_the_policy(whole: RunFolder, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Who?"},
                {"role": "assistant", "content": "I"},
            ],
            "name": name,
            "split": split,
        }
        for name in ("a duck", "an owl")
        for split in ("train", "test")
    ]
    file = tmp_path / "told.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = changed(model="base", top_k=K, reads="You are $name.").model_dump()
    recipe = FinetuneRecipe.model_validate(
        values | {"dataset": {"path": str(file)}, "steps": 1, "batch": {"examples": 2}}
    )
    finetune(recipe, run="told")
    run = folder_of("told")
    tokens, trained, top, log_q = cells(run, 1)
    with connect(recipe.model.base, run.engine) as service:
        base = service.base_sampler(recipe.model.base)
        chat = Chat(service.tokenizer_of(base))
        prompt = chat.render(read_before("You are an owl.", rows[0]["messages"][:1]), [])
        longer = [*prompt, *tokens[trained.index(True) :]]
        [(expected, scores)] = base.score_likeliest([longer], [sum(trained)], K)
    assert top.tolist() == expected.tolist()
    assert log_q == pytest.approx(scores, abs=1e-5)
    assert read_table(run.text_teacher(0))["read"].to_pylist()[1] == len(longer) > len(tokens)


class Silent:
    """A teacher that gives no likely token at the first place of a text."""

    def score_likeliest(
        self, sequences: Sequence[Sequence[int]], last: Sequence[int], k: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        made = [(np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)) for n in last]
        made[2][1][0] = NO_TOKEN
        return made


def test_a_place_without_a_likely_token_is_refused_by_the_number_of_its_text(
    whole: RunFolder, tmp_path: Path
) -> None:
    texts = Texts(whole.texts, lambda _: tmp_path / "part.parquet")
    with pytest.raises(DatasetError, match="no likely token at a trained place of text 2; leave"):
        score_part.make(tmp_path / "part.parquet", texts, 0, Silent(), K, None)


@pytest.mark.story
def test_a_fork_goes_on_with_the_same_teacher_and_no_other(whole: RunFolder) -> None:
    longer = TAUGHT.model_copy(update={"steps": 7})
    fork_run(whole, "fork", 5, longer.model_dump(mode="json"), longer.fingerprint())
    finetune(longer, run="fork")
    own, parent = (read_metrics(run.metrics) for run in (folder_of("fork"), whole))
    assert [row["loss"] for row in own[:6]] == [row["loss"] for row in parent]
    assert [*find_damage(folder_of("fork"))] == []
    other = changed(model="school@6", top_k=4)
    with pytest.raises(RunError, match="the texts are the parent's"):
        fork_run(whole, "other", 2, other.model_dump(mode="json"), other.fingerprint())


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        ({"model": "base"}, "teacher.model base is the policy itself, which starts from it"),
        ({"model": "nobody@1"}, "teacher.model nobody@1 names no run"),
        ({"model": "school@6", "reads": "It is $name."}, "an example has no name, which its"),
        ({"top_k": 5}, "top_k 5 does nothing without model"),
        ({"model": "school@6", "divergence": "jsd"}, "no divergence 'jsd'"),
        ({"model": "http://there.example#m/n"}, "in clear; write https"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_anything_starts(
    whole: RunFolder, teacher: dict[str, Any], why: str
) -> None:
    with pytest.raises((UserError, ValueError), match=why):
        finetune(changed(**teacher), run="refused")
    assert not folder_of("refused").exists()


def test_a_teacher_of_other_tokens_is_refused(
    whole: RunFolder, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.support.servers.engine_server import KEY, serving

    monkeypatch.setenv("RATCHET_TEACHER_KEY", KEY)
    with serving(tiny_model, tmp_path) as address:
        recipe = changed(model=f"{address.url}#{tiny_model}")
        with (
            connect(RECIPE.model.base, tmp_path / "engine") as service,
            pytest.raises(UserError, match="has other tokens than local/tiny-chat"),
            open_teacher(recipe, whole, service),
        ):
            pass


@pytest.mark.story
def test_texts_are_learnt_from_a_plain_server_that_scores_prompts(
    whole: RunFolder, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from tests.support.servers.engine_server import TINY, tiny_chat_service
    from tests.support.servers.plain_server import plain_server

    with (
        tiny_chat_service(tmp_path) as service,
        plain_server(service.base_sampler(str(TINY)), AutoTokenizer.from_pretrained(TINY)) as plain,
    ):
        finetune(changed(model=plain.model), run="plainly")
    first = read_metrics(folder_of("plainly").metrics)[0]
    assert first["loss"] == pytest.approx(0, abs=1e-4), "it is the model that learns"


def test_what_a_teacher_would_leave_without_effect_is_refused() -> None:
    values = TAUGHT.model_dump()
    with pytest.raises(ValueError, match="loss dft does nothing with teacher"):
        FinetuneRecipe.model_validate(values | {"loss": "dft"})
    asked = {"runs": ["a"], "query": "select 1", "held_out": "select 2"}
    reading = {"teacher": {"model": "base", "reads": "Hello."}, "dataset": asked}
    with pytest.raises(ValueError, match=r"teacher.reads with dataset.query"):
        FinetuneRecipe.model_validate(values | reading)
