"""An agent with several roles: who answers each, what each earns, and what is trained of it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from ratchet.adapters.calls import POLICY, CallId, Message, Policy, Request, Sampling
from ratchet.adapters.door.backends import create_backends
from ratchet.adapters.door.batches import SampledBy
from ratchet.adapters.door.door import Door
from ratchet.adapters.door.role_calls import KeptCalls, Memory
from ratchet.adapters.door.roles import CallsOf, check_role
from ratchet.adapters.harness.player import play_batch
from ratchet.adapters.player_protocol import PlaySettings
from ratchet.tasks.metrics import StepFiles, measure_step
from ratchet.tasks.recording.journal import read_journal, seal
from ratchet.tasks.recording.spans import Span
from ratchet.tasks.rollouts import RolloutHost, collect_rollouts
from ratchet.tasks.storage.names import ShardBatch
from ratchet.tasks.storage.run_folder import RunFolder
from ratchet.tasks.storage.tables import read_table
from ratchet.tasks.trajectories import assemble_trajectories
from tests.support.credited import credited, write_datums
from tests.support.door.opened_door import Opened, opened_batch
from tests.support.door.played_batch import BATCH, SHARD, service_without_engine, write_examples
from tests.support.door.stand_in import CHAT, END, StandIn, letters, turn

JUDGE = "function:tests.adapters.door.test_roles:judge"
ROLES = {"listener": "policy", "judge": JUDGE}
TRAINED = ("policy", "listener")
SAMPLING = Sampling(max_tokens=16, temperature=1.0, top_p=1.0, top_k=-1)

returned: dict[str, Any] = {}
"""What the agent returns, by what its judge says."""
judged: Counter[str] = Counter()

Collect = Callable[..., list[Span]]


async def tells_and_listens(
    example: dict[str, Any], *, roles: dict[str, dict[str, str]], **_: str
) -> Any:
    """The teller, which is the policy, speaks twice, the listener once, and a judge looks on."""
    first = await ask(roles["policy"], [user("begin")])
    told = [user("begin"), first, user("go on")]
    await ask(roles["policy"], told)
    await ask(roles["listener"], [user("what was said?")])
    verdict = await ask(roles["judge"], [user("who won?")])
    return returned.get(verdict["content"], 1.0)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def ask(role: dict[str, str], messages: list[Any], **fields: Any) -> dict[str, str]:
    async with AsyncOpenAI(base_url=role["base_url"], api_key=role["api_key"]) as client:
        asked = {"model": role["model"], "messages": messages, **fields}
        answer = await client.chat.completions.create(**asked)
    return {"role": "assistant", "content": answer.choices[0].message.content or ""}


def judge(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    """Numbers the games that it was asked about."""
    judged[messages[-1]["content"]] += 1
    assert example == {"secret": "otter"}
    return f"game {judged.total()}"


async def fails(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    judged["failed"] += 1
    raise ValueError("no idea")


def says_nothing(messages: list[dict[str, Any]], example: dict[str, Any]) -> Any:
    return 3


def looks(messages: list[dict[str, Any]], example: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}


def leaves(messages: list[dict[str, Any]], example: dict[str, Any]) -> str:
    raise SystemExit(3)


async def has_one_address(
    example: dict[str, Any], *, base_url: str, api_key: str, model: str
) -> float:
    """A program that asks for a title beside, and a smaller model, at the only address it has."""
    place, titled = {"base_url": base_url, "api_key": api_key}, system("You write titles. Short!")
    await ask({**place, "model": model}, [system("Play."), user("begin")])
    await ask({**place, "model": model}, [titled, user("what is this?")])
    await ask({**place, "model": "small-model"}, [user("is it polite?")], logit_bias={"5": 1})
    return 1.0


def system(text: str) -> Message:
    return {"role": "system", "content": text}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    judged.clear()
    returned.clear()


@pytest.fixture
def collect(tmp_path: Path) -> Collect:
    """Return a function that plays the rollouts one after the other."""

    def collected(
        roles: dict[str, str] = ROLES,
        group_size: int = 3,
        agent: str = "tells_and_listens",
        sent: Sequence[CallsOf] = (),
    ) -> list[Span]:
        """Return the journal's spans; `policy` says anything, and another policy, fox, its name."""
        run, batch = RunFolder(tmp_path), ShardBatch(SHARD, 0, group_size)
        shard = write_examples(run, [{"secret": "otter"}])
        policy: Any = StandIn(lambda chosen, *_: turn(chosen))
        fox: Any = StandIn(lambda *_: [*letters("I am a fox"), END])
        policies = {POLICY: Policy(policy, "00000"), "fox": Policy(fox, "fox@00000")}
        name, backends = f"tests.adapters.door.test_roles:{agent}", create_backends(roles, 0)
        with Door(CHAT, backends, run_seed=0, sent=sent) as door:
            asked = [role for role in door.roles if role not in {calls.role for calls in sent}]
            settings = PlaySettings(name, asked, concurrency=1, timeout_seconds=60.0)
            server = RolloutHost(run, door, service_without_engine(), settings)
            sampled_by = SampledBy(policies, SAMPLING)
            run.spans(BATCH).unlink(missing_ok=True)
            collect_rollouts.make(
                run.spans(BATCH), shard, batch, server, lambda: sampled_by, play_batch
            )
        return read_journal(run.journal(BATCH))

    return collected


def made(folder: Path, discount: float = 1.0) -> tuple[list[Span], dict[str, float]]:
    """Return the datums of the journal in a run's folder, and the step's metrics."""
    run = RunFolder(folder)
    spans = [seal(run.journal(BATCH), run.spans(BATCH))]
    trajectories, datums = folder / "trajectories.parquet", folder / "datums.parquet"
    trajectories.unlink(missing_ok=True)
    assemble_trajectories.make(trajectories, spans, TRAINED)
    write_datums(datums, trajectories, credited("centred", 2, discount=discount))
    files = StepFiles(spans, trajectories, {}, datums)
    return read_table(datums).to_pylist(), measure_step(
        files, trained_roles=TRAINED, min_group_size=2
    )


def calls_of(spans: list[Span], role: str) -> list[Span]:
    return [span for span in spans if span["kind"] == "llm" and span["role"] == role]


def failures(spans: list[Span]) -> list[str]:
    return [span["error_message"] for span in spans if span["kind"] == "error"]


def cut_ends_off(folder: Path, *kinds: str) -> None:
    """Leave what a kill leaves that came before spans of these kinds were written."""
    RunFolder(folder).spans(BATCH).unlink()
    journal = RunFolder(folder).journal(BATCH)
    lines = journal.read_bytes().splitlines(keepends=True)
    spans = read_journal(journal)
    kept = [line for line, span in zip(lines, spans, strict=True) if span["kind"] not in kinds]
    journal.write_bytes(b"".join(kept))


def test_a_scripted_role_is_recorded_without_tokens_and_not_trained(
    collect: Collect, tmp_path: Path
) -> None:
    returned.update({"game 1": 1.0, "game 2": 0.0, "game 3": 0.5})
    first = calls_of(collect(), "judge")[0]
    assert first["messages"] == [{"role": "user", "content": "who won?"}]
    assert first["reply"] == {"role": "assistant", "content": "game 1"}
    assert (first["policy_version"], first["gen_ai_provider_name"]) == (JUDGE, "other")
    assert [*first["prompt_token_ids"], *first["response_token_ids"]] == []
    datums, metrics = made(tmp_path)
    assert {row["role"] for row in datums} == {"policy", "listener"}
    assert (metrics["calls"], metrics["calls/other_roles"]) == (9, 3)
    assert not [name for name in metrics if name.startswith(("cost/", "reward/judge"))]


def test_one_reward_counts_for_each_role(collect: Collect, tmp_path: Path) -> None:
    returned.update({"game 1": 1.0, "game 2": 0.0, "game 3": 0.5})
    collect()
    datums, metrics = made(tmp_path)
    by_role = Counter((row["role"], row["advantage"]) for row in datums)
    assert by_role.keys() == {(role, advantage) for role in TRAINED for advantage in (0.5, -0.5)}
    assert (metrics["reward/mean"], metrics["groups"]) == (0.5, 2)


def test_roles_are_credited_by_their_own_rewards(collect: Collect, tmp_path: Path) -> None:
    """With γ = 0.5 the teller's returns are [1, 0], [0.5, 1] and [0, 0], and their means 0.5 and
    1/3; the listener's rewards are 1 and 0, and in the third game it has none."""
    returned["game 1"] = {"policy": [1, 0], "listener": 1}
    returned["game 2"] = {"policy": [0, 1], "listener": 0}
    returned["game 3"] = {"policy": [0, 0]}
    collect()
    datums, metrics = made(tmp_path, discount=0.5)
    told = {row["rollout_id"][-2:]: row for row in datums if row["role"] == "policy"}
    assert {k: by_call(row) for k, row in told.items()} == {
        "00": pytest.approx([0.5, -1 / 3]),
        "01": pytest.approx([0.0, 2 / 3]),
        "02": pytest.approx([-0.5, -1 / 3]),
    }
    heard = [row for row in datums if row["role"] == "listener"]
    assert [(row["rollout_id"][-2:], row["advantage"]) for row in heard] == [
        ("00", 0.5),
        ("01", -0.5),
    ]
    assert (metrics["reward/policy/mean"], metrics["reward/listener/mean"]) == (2 / 3, 0.5)
    assert metrics["reward/mean"] == 2 / 3


def by_call(row: Span) -> list[float]:
    """The advantage of each stretch of sampled tokens, which are alike."""
    stretches: list[set[float]] = []
    before = 0
    for value, bit in zip(row["advantages"], row["mask"], strict=True):
        if bit and not before:
            stretches.append(set())
        if bit:
            stretches[-1].add(value)
        before = bit
    return [value for (value,) in stretches]


def test_a_rollout_that_is_started_again_asks_nobody_twice(
    collect: Collect, tmp_path: Path
) -> None:
    returned.update({"game 1": {"policy": [1, 0]}, "game 2": {"policy": [0, 1]}})
    first = collect(group_size=2)
    datums, _ = made(tmp_path)
    cut_ends_off(tmp_path, "reward")
    again = collect(group_size=2)
    assert judged.total() == 2
    assert [call["recalled"] for call in calls_of(again, "judge")] == [False] * 2 + [True] * 2
    assert [call["reply"] for call in calls_of(again, "judge")[2:]] == [
        call["reply"] for call in calls_of(first, "judge")
    ]
    resumed, metrics = made(tmp_path)
    assert resumed == datums
    assert metrics["calls/other_roles"] == 2


def test_another_policy_answers_its_roles_and_is_never_taken_for_the_main_one(
    collect: Collect,
) -> None:
    apart = ROLES | {"listener": "policy:fox"}
    first = collect(apart, group_size=1)
    (heard,) = calls_of(first, "listener")
    assert (heard["policy_version"], heard["reply"]["content"]) == ("fox@00000", "I am a fox")
    assert {call["policy_version"] for call in calls_of(first, "policy")} == {"00000"}


def test_what_one_policy_has_answered_is_not_given_again_as_another_s(
    collect: Collect, tmp_path: Path
) -> None:
    collect(ROLES | {"listener": "policy:fox"}, group_size=1)
    cut_ends_off(tmp_path, "reward")
    again = collect(ROLES, group_size=1)
    recalled = {role: [c["recalled"] for c in calls_of(again, role)] for role in TRAINED}
    assert recalled == {"policy": [False, False, True, True], "listener": [False, False]}


def test_a_rollout_that_was_killed_between_its_rewards_is_not_rewarded(
    collect: Collect, tmp_path: Path
) -> None:
    """Its credits are there, and its reward is not; of its next attempt they are others."""
    returned.update({"game 1": {"policy": [1, 0]}, "game 2": {"policy": [0, 0]}})
    collect(group_size=2)
    cut_ends_off(tmp_path, "reward")
    assert made(tmp_path)[0] == []
    RunFolder(tmp_path).spans(BATCH).unlink()
    returned.update({"game 1": 0.0, "game 2": 1.0})
    collect(group_size=2)
    assert [row["advantage"] for row in made(tmp_path)[0]] == [-0.5, -0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"gues": 1}, "a reward for 'gues', and what it can reward is: policy, listener, judge"),
        ({"policy": [1]}, "1 rewards for the calls of the role 'policy', and 2 were answered"),
    ],
)
def test_a_reward_that_does_not_fit_fails_its_rollout(
    collect: Collect, value: Any, message: str
) -> None:
    returned["game 1"] = value
    spans = collect(group_size=1)
    assert message in failures(spans)[0]
    assert not [span for span in spans if span["kind"] in ("credit", "reward")]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "The function tests.adapters.door.test_roles:fails raised ValueError: no idea"),
        (
            "says_nothing",
            "tests.adapters.door.test_roles:says_nothing returned 3; a text or an assistant's",
        ),
        ("leaves", "SystemExit: 3"),
    ],
)
def test_a_function_that_fails_is_not_asked_again_by_the_client(
    collect: Collect, function: str, message: str
) -> None:
    spans = collect(
        {**ROLES, "judge": f"function:tests.adapters.door.test_roles:{function}"}, group_size=1
    )
    assert message in failures(spans)[0]
    assert judged["failed"] == (function == "fails")


def test_a_model_of_litellm_answers_a_role_and_its_cost_is_counted(
    collect: Collect, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another door stands in the place of OpenAI."""
    opened.say("game 1<|im_end|>")
    monkeypatch.setenv("OPENAI_API_KEY", opened.key)
    monkeypatch.setenv("OPENAI_API_BASE", opened.url)
    spans = collect({**ROLES, "judge": "openai/gpt-4o-mini"}, group_size=1)
    (call,) = calls_of(spans, "judge")
    (asked,) = opened.spans
    tokens = len(asked.prompt_token_ids), len(asked.response_token_ids)
    assert (call["gen_ai_usage_input_tokens"], call["gen_ai_usage_output_tokens"]) == tokens
    # $0.15 and $0.60 per million tokens, by LiteLLM's own table
    cost = tokens[0] * 0.15e-6 + tokens[1] * 0.6e-6
    assert call["attributes"]["cost"] == pytest.approx(cost)
    assert made(tmp_path)[1]["cost/judge"] == pytest.approx(cost)


def test_a_function_may_call_tools_and_their_ids_are_given() -> None:
    backend = create_backends(
        {"judge": "function:tests.adapters.door.test_roles:looks"}, run_seed=0
    )["judge"]
    assert callable(backend)
    request = Request("judge", [user("who won?")], [], None, [], {})
    memory = Memory(KeptCalls(CHAT), lambda begun: None)
    place = CallId(f"{SHARD}-0000-00", 0, "judge", 0)
    completion = asyncio.run(cast(Any, backend({})(request, place, memory)))
    (call,) = completion.message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"}
    assert (call["id"], call["type"]) == (f"call_{place.name('tool call')}0", "function")
    assert (completion.finish_reason, completion.message["content"]) == ("tool_calls", "")


@pytest.mark.parametrize(
    ("role", "who", "message"),
    [
        ("Judge", "policy", "role 'Judge' needs another name: lower-case"),
        ("policy", "openai/gpt-4o-mini", "the role policy is the model that is trained"),
        ("judge", "polcy", "answered by 'polcy'; give policy, policy:name for another"),
        (
            "judge",
            "function:tests.adapters.door.test_roles",
            "answered by 'function:tests.adapters.door.test_roles'; give",
        ),
        ("policy", "policy:other", "cannot be answered by 'policy:other'; give that a role of its"),
        *(
            ("judge", f"policy:{name}", f"answered by 'policy:{name}'; give policy, policy:name")
            for name in ("", "policy", "Bad Name", "a/b")
        ),
    ],
)
def test_a_role_that_nobody_can_answer_is_refused(role: str, who: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_role(role, who)


SENT = (CallsOf("title", system="You write titles*"), CallsOf("judge", model="small-*"))


def test_a_program_with_one_address_has_helpers_by_what_it_sends(
    collect: Collect, tmp_path: Path
) -> None:
    spans = collect({"title": "policy:fox", "judge": JUDGE}, 2, "has_one_address", SENT)
    calls = [span for span in spans if span["kind"] == "llm"]
    assert [(call["role"], call["call"]) for call in calls] == [
        (role, 0) for role in ("policy", "title", "judge")
    ] * 2
    assert {call["policy_version"] for call in calls} == {"00000", "fox@00000", JUDGE}
    assert all(call["status"] == "ok" for call in calls), "the judge's model takes a logit_bias"
    datums, _ = made(tmp_path)
    assert datums == [], "equal rewards train nothing"


def test_a_call_that_is_a_helper_s_by_what_it_says_is_recalled_in_the_next_attempt() -> None:
    asked: Any = [system("You write titles."), user("what is this?")]
    with (
        Door(CHAT, {"title": POLICY}, run_seed=7, sent=SENT[:1]) as door,
        opened_batch(door) as opened,
    ):
        opened.ask(messages=asked)
        client = opened.begin_again([*opened.spans])
        client.chat.completions.create(model="any", messages=asked)
        told = [(one.id.role, one.id.number, one.recalled) for one in opened.spans]
    assert told == [("title", 0, False), ("title", 0, True)]


def test_a_field_that_only_a_helper_takes_is_refused_of_the_policy(opened: Opened) -> None:
    opened.door._sent = [CallsOf("nobody", model="small-*")]
    try:
        with pytest.raises(openai.BadRequestError, match="logit_bias is not honoured here"):
            opened.ask(logit_bias={"5": 1})
        with pytest.raises(openai.NotFoundError, match="Nobody answers the role 'nobody'"):
            opened.ask(model="small-model")
    finally:
        opened.door._sent = []
    assert [refused.role for refused in opened.refusals] == ["policy", "nobody"]


@pytest.mark.parametrize(
    ("calls", "fits"),
    [
        (CallsOf("x", model="m"), True),
        (CallsOf("x", model="M"), False),
        (CallsOf("x", system="You are [a]"), True),
        (CallsOf("x", system="are [a]"), False),
        (CallsOf("x", system="*titler"), True),
        (CallsOf("x", path="/messages"), True),
        (CallsOf("x", path="/responses"), False),
        (CallsOf("x", model="m", system="You", path="/responses"), False),
    ],
)
def test_a_role_has_the_calls_of_which_everything_fits(calls: CallsOf, fits: bool) -> None:
    messages = [system("You are [a] titler.\nBe short."), user("hello")]
    request = Request("m", messages, [], None, [], {})
    assert calls.fit(request, "/batch/b/role/policy/v1/messages") is fits
