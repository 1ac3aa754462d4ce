"""Teachers: checkpoints of another run, a model of another service, and what cannot teach."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratchet.adapters.calls import POLICY
from ratchet.adapters.clients.scoring_server import CannotScore
from ratchet.adapters.errors import UserError
from ratchet.adapters.project.modules import load_agent_file
from ratchet.flows.checkpoints.binding import refuse_itself
from ratchet.flows.cli.recipes import shrink
from ratchet.flows.dryrun import dryrun
from ratchet.flows.opening.checks import check_run
from ratchet.flows.recipe.recipe import Recipe
from ratchet.flows.replay import replay
from ratchet.flows.train import train
from ratchet.tasks.examples.shards import read_shard
from ratchet.tasks.recording.step_log import read_metrics
from ratchet.tasks.recovery.recorded_steps import TrainedPolicy
from ratchet.tasks.recovery.rollout_steps import RolloutSteps
from ratchet.tasks.settings.run import Model
from ratchet.tasks.storage.manifest import ByStep
from ratchet.tasks.storage.run_folder import RunFolder, folder_of
from ratchet.tasks.storage.tables import arrays, read_table
from tests.support.runs.small_recipe import small_recipe
from tests.support.runs.two_policies import CHANGES
from tests.support.runs.whole_run import die_and_go_on, differences, fixture_of
from tests.support.servers.dying_engine import dying_in_update
from tests.support.servers.engine_server import KEY, TINY, TINY_CHAT, serving, tiny_chat_service
from tests.support.servers.plain_server import PlainServer, plain_server

hello = load_agent_file("hello")
ALONE = {"groups": 4, "group_size": 1, "max_tokens": 16}
SHORT, LATE = "whole@1", "whole@2"


async def play(example: dict[str, Any], *, base_url: str, **settings: str) -> float:
    """Play hello; in the second step all rollouts of the first example fail."""
    if "train-00001-0000" in base_url:
        raise ValueError("this rollout fails")
    return await hello.play(example, base_url=base_url, **settings)


def taught_by(*models: str, preset: str = "on_policy_distill", **changes: Any) -> Recipe:
    teacher = {"models": models, **changes.pop("teacher", {})}
    return small_recipe(
        **{"rollouts": ALONE, "algorithm": {"preset": preset, "teacher": teacher}} | changes
    )


def of_two(folder: Path) -> Recipe:
    """Make a recipe whose examples name one of two teachers, and whose agent fails at times."""
    rows = [
        {"identity": f"a {name} otter", "split": split, "topic": topic}
        for split in ("train", "test")
        for name, topic in (("quiet", "early"), ("loud", "late"), ("small", "late"))
    ]
    dataset = folder / "topics.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return taught_by(
        f"early={SHORT}",
        f"late={LATE}",
        teacher={"by": "topic", "coefficient": 0.5},
        agent="tests.flows.methods.test_teachers:play",
        dataset={"path": str(dataset), "columns": ["identity"]},
    )


school = fixture_of(small_recipe())
"""A run of two steps, whose checkpoints teach."""


@pytest.fixture(scope="module")
def of_both(school: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with two teachers."""
    train(of_two(tmp_path_factory.mktemp("data")), run="of_both")
    return folder_of("of_both")


def sampled(run: RunFolder, step: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return the group, log q and log t of the sampled tokens of each trajectory."""
    trajectories = read_table(run.trajectories(POLICY, step))
    teachers = read_table(run.references(POLICY, step, "teachers"))
    lists = (arrays(trajectories["logprobs"]), arrays(teachers["logprobs"]))
    groups, masks = trajectories["group_id"].to_pylist(), arrays(trajectories["mask"])
    return [
        (group, log_q[mask != 0], log_t[mask != 0])
        for group, mask, log_q, log_t in zip(groups, masks, *lists, strict=True)
    ]


def test_each_tokens_advantage_is_what_its_teacher_gives_it_beyond_the_policy(
    of_both: RunFolder,
) -> None:
    for step in (0, 1):
        datums = read_table(of_both.datums(POLICY, step)).to_pylist()
        made = {
            row["group_id"]: np.array(row["advantages"])[np.array(row["mask"]) != 0]
            for row in datums
        }
        expected = {group: 0.5 * (log_t - log_q) for group, log_q, log_t in sampled(of_both, step)}
        assert made.keys() == expected.keys()
        for group, advantages in made.items():
            assert advantages == pytest.approx(expected[group], abs=1e-6)
        assert {row["advantage"] for row in datums} == {0.0}, "no reward has a part in it"


def test_the_teacher_of_an_example_scores_it_whichever_rollouts_failed(of_both: RunFolder) -> None:
    assert [row["rollouts/failed"] for row in read_metrics(of_both.metrics)] == [0, 1]
    for step in (0, 1):
        shard = read_shard(of_both.shard(f"train-{step:05d}"))
        teachers = read_table(of_both.references(POLICY, step, "teachers"))
        named = [(row["rollout_id"], row["teacher"]) for row in teachers.to_pylist()]
        assert named == [
            (f"train-{step:05d}-{index:04d}-00", row["example"]["topic"])
            for index, row in enumerate(shard)
            if (step, index) != (1, 0)
        ]


def test_the_divergence_from_each_teacher_is_a_metric(of_both: RunFolder) -> None:
    for step, row in enumerate(read_metrics(of_both.metrics)):
        apart = {group: log_q - log_t for group, log_q, log_t in sampled(of_both, step)}
        assert row["teacher/kl"] == pytest.approx(np.concatenate([*apart.values()]).mean())
        topics = {
            f"train-{step:05d}-{index:04d}": found["example"]["topic"]
            for index, found in enumerate(read_shard(of_both.shard(f"train-{step:05d}")))
        }
        for topic in {topics[group] for group in apart}:
            own = [apart[group] for group in apart if topics[group] == topic]
            assert row[f"teacher/kl/{topic}"] == pytest.approx(np.concatenate(own).mean())


@pytest.mark.story
def test_a_distillation_that_dies_goes_on_as_if_it_had_not(of_both: RunFolder) -> None:
    broken = die_and_go_on(recipe_of_run(of_both), dying_in_update(1), of_both.path.parent)
    assert differences(broken, of_both) == []


def recipe_of_run(run: RunFolder) -> Recipe:
    return Recipe.model_validate(json.loads(run.manifest.read_text())["recipe"])


def test_datums_are_made_again_of_what_the_teachers_gave(of_both: RunFolder) -> None:
    recipe, path = recipe_of_run(of_both), of_both.datums(POLICY, 1)
    policy = TrainedPolicy(POLICY, (POLICY,), Model())  # pyright: ignore[reportArgumentType]
    steps, before = (
        RolloutSteps(of_both, policy, ByStep(((0, recipe.credit()),))),
        path.read_bytes(),
    )
    path.unlink()
    steps.restore(1)
    assert path.read_bytes() == before


@pytest.mark.story
def test_recorded_rollouts_are_distilled_from_a_checkpoint_beside_their_rewards(
    school: RunFolder,
) -> None:
    both = {"advantage": "centred", "teacher": {"models": [LATE], "divergence": "jsd"}}
    replay(small_recipe(algorithm=both), school.name, run="replayed")
    run = folder_of("replayed")
    rollouts = read_table(run.trajectories(POLICY, 0))["rollout_id"].to_pylist()
    for row in read_table(run.datums(POLICY, 0)).to_pylist():
        _, log_q, log_t = sampled(run, 0)[rollouts.index(row["rollout_id"])]
        term = 0.5 * np.log(0.5 + 0.5 * np.exp(log_t - log_q))
        made = np.array(row["advantages"])[np.array(row["mask"]) != 0]
        assert made == pytest.approx(row["advantage"] + term, abs=1e-6)


@pytest.mark.story
def test_each_policy_of_a_run_is_taught_its_own_tokens(school: RunFolder) -> None:
    changes = {**CHANGES, "rollouts": CHANGES["rollouts"] | {"group_size": 1}}
    train(taught_by(LATE, steps=1, **changes), run="policies")
    run = folder_of("policies")
    for name in ("policy", "listener"):
        rows = read_table(run.references(name, 0, "teachers"))
        assert rows["role"].to_pylist() == read_table(run.trajectories(name, 0))["role"].to_pylist()
    assert "policies/listener/teacher/kl" in read_metrics(run.metrics)[0]


@pytest.mark.story
def test_a_dry_run_asks_the_teacher(school: RunFolder) -> None:
    recipe = shrink(taught_by(LATE), 2)
    done = dryrun(recipe, run="dryruns/taught")
    assert (done.rollouts, done.failed) == (4, 0)
    assert read_table(folder_of("dryruns/taught").datums(POLICY, 0)).num_rows == 4


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nobody@1", "algorithm.teacher.models nobody@1 names no run"),
        ("whole@9", "has no checkpoint 9"),
        ("base", "base is the policy itself, which starts from it"),
        ("refused@2", "names no run"),
        ("local/tiny-chat", "tiny-chat is the policy itself"),
        ("http://127.0.0.1:9#some/model", "cannot be reached"),
    ],
)
def test_what_cannot_teach_is_refused_before_anything_starts(
    school: RunFolder, model: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        train(taught_by(model), run="refused")
    assert not folder_of("refused").path.exists()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    with (
        tiny_chat_service(tmp_path_factory.mktemp("plain")) as service,
        plain_server(service.base_sampler(str(TINY)), AutoTokenizer.from_pretrained(TINY)) as plain,
    ):
        yield plain


@pytest.fixture
def plain(served: PlainServer) -> Iterator[PlainServer]:
    yield served
    served.fault = None


@pytest.mark.story
def test_a_plain_server_that_scores_prompts_can_teach(
    school: RunFolder, plain: PlainServer
) -> None:
    train(taught_by(plain.model, steps=1), run="plainly")
    for _, log_q, log_t in sampled(folder_of("plainly"), 0):
        assert log_q == pytest.approx(log_t, abs=1e-5), "it is the model that has sampled"


def test_what_is_not_trained_needs_no_teacher(school: RunFolder) -> None:
    away = taught_by("http://127.0.0.1:9/v1#some/model")
    check_run(away, folder_of("evaluations/of-it"))
    with pytest.raises(UserError, match="cannot be reached"):
        check_run(away, folder_of("new"))


def test_a_plain_server_that_scores_no_prompts_is_refused_before_anything_starts(
    school: RunFolder, plain: PlainServer
) -> None:
    plain.fault = lambda _: None
    with pytest.raises(CannotScore, match="tiny-chat gives no log-probabilities of a prompt"):
        train(taught_by(plain.model), run="refused")
    assert not folder_of("refused").path.exists()


@pytest.mark.story
def test_a_plain_server_of_other_tokens_is_refused(school: RunFolder, plain: PlainServer) -> None:
    plain.fault = lambda places: [
        place and {token: {**told, "decoded_token": "x"} for token, told in place.items()}
        for place in places or []
    ]
    with pytest.raises(UserError, match="has other tokens than local/tiny-chat; give a mo"):
        train(taught_by(plain.model), run="refused-later")
    assert not folder_of("refused-later").trajectories(POLICY, 0).exists()


@pytest.mark.parametrize("topics", [{"topic": "none"}, {}])
def test_an_example_that_names_no_teacher_is_refused(
    school: RunFolder, topics: dict[str, str], tmp_path: Path
) -> None:
    recipe = of_two(tmp_path)
    with Path(recipe.dataset.path).open("a") as file:
        file.write(json.dumps({"identity": "an otter", "split": "train", **topics}) + "\n")
    with pytest.raises(UserError, match=r"names the teacher (n|N)one.*; give one, as NAME"):
        train(recipe, run="refused")
    assert not folder_of("refused").path.exists()


@pytest.mark.story
def test_a_teacher_of_another_service_is_asked_there(
    school: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(TINY_CHAT, tmp_path) as address:
        monkeypatch.setenv("RATCHET_TEACHER_KEY", KEY)
        train(taught_by(f"{address.url}#{TINY_CHAT}", steps=1), run="elsewhere")
    for _, log_q, log_t in sampled(folder_of("elsewhere"), 0):
        assert log_q == pytest.approx(log_t, abs=1e-5), "it is the model that has sampled"


def test_a_teacher_of_another_service_needs_its_key(school: RunFolder, tmp_path: Path) -> None:
    with (
        serving(TINY_CHAT, tmp_path) as address,
        pytest.raises(CannotScore, match=r"is not there; set RATCHET_TEACHER_KEY\. A se"),
    ):
        train(taught_by(f"{address.url}#{TINY_CHAT}"), run="refused")


def test_what_starts_elsewhere_is_taught_by_the_base_but_not_by_its_start() -> None:
    started: dict[str, Any] = {"model": {"lora_rank": 8, "start": LATE}}
    refuse_itself(taught_by("base", **started))
    with pytest.raises(UserError, match="whole@2 is the policy itself, which starts"):
        refuse_itself(taught_by(LATE, **started))
