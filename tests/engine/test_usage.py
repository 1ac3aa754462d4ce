"""What an engine counts of its sessions, by the SDK's billing call."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker

from engine.state.usage import UsageLog
from tests.support.servers.engine_server import Address

HOUR = timedelta(hours=1)
START = datetime(2026, 5, 4, 10, tzinfo=UTC)


def this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def events_of(address: Address, client: tinker.ServiceClient) -> Counter[str]:
    admin = tinker.AdminClient(base_url=address.url, api_key=address.key)
    now = this_hour()
    usage = admin.get_billing_usage(now - HOUR, now + HOUR).result()
    session = client.holder.get_session_id()
    counted: Counter[str] = Counter()
    for event in usage.data:
        if event.session_id == session:
            info = event.event_info.model_dump()
            counted[f"{info['type']}{'_cached' if info.get('cached') else ''}"] += info[
                "token_count"
            ]
    assert usage.sessions[session].user_metadata == {"whose": "ours"}
    return counted


def test_every_token_of_a_session_is_counted_once(address: Address) -> None:
    client = tinker.ServiceClient({"whose": "ours"}, base_url=address.url, api_key=address.key)
    training = client.create_lora_training_client(address.base_model, rank=4).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*range(20, 32)]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[*range(21, 33)], dtype="int64"),
            "weights": tinker.TensorData(data=[1.0] * 12, dtype="float32"),
        },
    )
    training.forward_backward([datum, datum], "cross_entropy").result()
    training.forward([datum], "cross_entropy").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([*range(30, 70)])
    answers = [
        sampler.sample(prompt, 2, tinker.SamplingParams(max_tokens=3, seed=1)).result()
        for _ in range(2)
    ]
    sampler.compute_logprobs(prompt).result()
    sampled = sum(len(one.tokens) for answer in answers for one in answer.sequences)
    cached = sum(answer.prompt_cache_hit_tokens for answer in answers)
    assert cached > 0
    assert events_of(address, client) == {
        "training": 3 * 12,
        "sampling_prefill": 3 * 40 - cached,
        "sampling_prefill_cached": cached + 2 * 40,  # those of each second completion
        "sampling_sample": sampled + 1,
    }
    client.close("success").result()


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (this_hour() + timedelta(minutes=5), this_hour() + HOUR),
        (this_hour(), this_hour()),
        (this_hour(), this_hour() - HOUR),
        (this_hour() - timedelta(days=15), this_hour()),
    ],
)
def test_hours_that_are_none_or_too_many_are_refused(
    address: Address, start: datetime, end: datetime
) -> None:
    admin = tinker.AdminClient(base_url=address.url, api_key=address.key)
    with pytest.raises(tinker.APIStatusError, match="hour"):
        admin.get_billing_usage(start, end).result()


def test_the_next_engine_goes_on_counting_behind_a_torn_line(tmp_path: Path) -> None:
    now = START
    first = UsageLog(tmp_path, lambda: now)
    first.add("one", prefill=5, cached=0, sampled=2)
    now = START + HOUR
    first.add("one", trained=7)
    first.add("two", prefill=1, cached=4, sampled=1)
    path = tmp_path / "usage.jsonl"
    whole = first.events(START, START + 2 * HOUR, "model")
    with path.open("ab") as file:
        file.write(b'["2026-05-04T11:00:00+00:00", "two", {"pre')
    again = UsageLog(tmp_path, lambda: now)
    assert again.events(START, START + 2 * HOUR, "model") == whole
    assert [one.event_info for one in again.events(START, START + HOUR, "model")] == [
        tinker.types.SamplingPrefillBillingEvent(cached=False, token_count=5),
        tinker.types.SamplingSampleBillingEvent(token_count=2),
    ]
    again.add("two", trained=3)
    assert len(UsageLog(tmp_path, lambda: now).events(START, START + 2 * HOUR, "model")) == 7
