"""Refusals of the engine: a 4xx with a message, or a failed request, at once."""

import asyncio
import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tinker
import zstandard
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import RequestErrorCategory

from ratchet.engine.api.server import LARGEST_BODY, LARGEST_JSON, ROUTERS, create_app
from tests.support.servers.engine_server import Address

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def http(address: Address) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": address.key, "content-type": "application/json"}
    with httpx.Client(base_url=f"{address.url}/api/v1", headers=headers, timeout=40) as client:
        yield client


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient, address: Address) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=address.base_model, rank=2).result()


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient, address: Address) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=address.base_model).result()


def datum(**inputs: list[float]) -> types.Datum:
    targets = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    given = {name: types.TensorData(data=one, dtype="float32") for name, one in inputs.items()}
    return types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": targets, **given})


def raised(call: Callable[[], object]) -> tinker.TinkerError:
    """Return the SDK's error, which must come at once: it repeats other errors for minutes."""
    start = time.monotonic()
    with pytest.raises(tinker.TinkerError) as caught:
        call()
    assert time.monotonic() - start < 30
    return caught.value


@pytest.mark.parametrize(
    ("loss", "inputs", "sentence"),
    [
        ("stable_reinforce", {"advantages": [1.0] * 3}, "stable_reinforce"),
        ("custom", {"weights": [1.0] * 3}, "custom"),
        ("ppo", {"weights": [1.0] * 3}, "datum 0 has no logprobs"),
        ("cross_entropy", {"weights": [1.0] * 2}, "weights"),
    ],
)
def test_loss_that_cannot_be_computed_is_a_user_error(
    trained: tinker.TrainingClient, loss: str, inputs: dict[str, list[float]], sentence: str
) -> None:
    error = raised(
        lambda: trained.forward_backward([datum(**inputs)], loss).result()  # type: ignore[arg-type]
    )
    assert sentence in str(error)
    assert isinstance(error, tinker.RequestFailedError)
    assert error.category is RequestErrorCategory.User


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a b", "a" * 300, "ü"])
def test_invalid_checkpoint_names_are_refused(trained: tinker.TrainingClient, name: str) -> None:
    for save in (trained.save_state, trained.save_weights_for_sampler):
        error = raised(lambda save=save: save(name).result())
        assert isinstance(error, tinker.BadRequestError)
        assert "cannot name a checkpoint" in str(error)


@pytest.mark.parametrize("ttl_seconds", [0, -5, 10**12])
def test_ttl_out_of_range_is_refused(trained: tinker.TrainingClient, ttl_seconds: int) -> None:
    assert "ttl_seconds" in str(raised(lambda: trained.save_state("t", ttl_seconds).result()))


def test_unserved_base_model_is_refused(service: tinker.ServiceClient) -> None:
    for create in (
        lambda: service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result(),
        lambda: service.create_sampling_client(base_model="Qwen/Qwen3-8B").result(),
    ):
        error = raised(create)
        assert isinstance(error, tinker.BadRequestError)
        assert "not 'Qwen/Qwen3-8B'" in str(error)


@pytest.mark.parametrize(
    "path", ["tinker://nothing/weights/here", "tinker://nothing/sampler_weights/here"]
)
def test_unknown_checkpoint_is_not_found(
    service: tinker.ServiceClient, rest: tinker.RestClient, path: str
) -> None:
    for use in (
        lambda: service.create_training_client_from_state(path).result(),
        lambda: service.create_sampling_client(model_path=path).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 60).result(),
    ):
        assert isinstance(raised(use), tinker.NotFoundError)


def test_unknown_runs_sessions_and_samplers_are_not_found(rest: tinker.RestClient) -> None:
    for ask in (rest.get_training_run, rest.list_checkpoints, rest.get_session, rest.get_sampler):
        assert isinstance(raised(lambda ask=ask: ask("nothing").result()), tinker.NotFoundError)


def test_an_invalid_sampling_request_is_refused(sampler: tinker.SamplingClient) -> None:
    error = raised(lambda: sampler.sample(PROMPT, 1, types.SamplingParams(top_p=0.0)).result())
    assert isinstance(error, tinker.BadRequestError)
    assert "top_p" in str(error)


def test_dimuon_optimizer_is_refused(
    service: tinker.ServiceClient, address: Address, trained: tinker.TrainingClient
) -> None:
    for use in (
        lambda: service.create_lora_training_client(
            base_model=address.base_model, optimizer=types.DimuonOptimizerConfig()
        ).result(),
        lambda: trained.optim_step(types.DimuonParams(learning_rate=0.1)).result(),
    ):
        assert "adamw only" in str(raised(use))


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_live_client_refuses_a_checkpoint_of_another_rank(
    service: tinker.ServiceClient, address: Address, trained: tinker.TrainingClient
) -> None:
    other = service.create_lora_training_client(base_model=address.base_model, rank=3).result()
    path = other.save_state("three").result().path
    assert "'rank': 3" in str(raised(lambda: trained.load_state(path).result()))


@pytest.mark.parametrize("key", [None, "", "tml-wrong", "x" * 5000])
def test_requests_without_the_key_are_refused(address: Address, key: str | None) -> None:
    headers = {} if key is None else {"X-API-Key": key}
    for path in ("healthz", "get_server_capabilities", "nothing"):
        response = httpx.get(f"{address.url}/api/v1/{path}", headers=headers, timeout=None)
        assert response.status_code == 401
        assert "TINKER_API_KEY" in response.json()["detail"]


def test_wrong_key_raises_the_authentication_error_of_the_sdk(address: Address) -> None:
    error = raised(
        lambda: (
            tinker.RestClient(base_url=address.url, api_key="tml-wrong")
            .get_server_capabilities()
            .result()
        )
    )
    assert isinstance(error, tinker.AuthenticationError)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "create_session", b"{", 422),
        ("POST", "create_session", b"[]", 422),
        ("POST", "create_session", b'{"tags": 3}', 422),
        ("POST", "create_session", b"[" * 100_000, 400),
        ("POST", "optim_step", b"\xff\xfe", 422),
        ("POST", "forward_backward", b"\xff", 400),
        ("POST", "forward_backward", b"", 404),
        ("POST", "retrieve_future", b'{"request_id": "nothing"}', 410),
        ("POST", "session_heartbeat", b'{"session_id": "nothing"}', 410),
        ("POST", "save_weights_external", b"{}", 422),
        ("GET", "checkpoints?limit=-1", b"", 422),
        ("GET", "training_runs/..%2f..%2fetc/checkpoints", b"", 404),
        ("DELETE", "training_runs/run/checkpoints/weights/..%2f..", b"", 404),
        ("PATCH", "checkpoints", b"", 405),
    ],
)
def test_malformed_requests_are_answered_with_a_message(
    http: httpx.Client, method: str, path: str, body: bytes, status: int
) -> None:
    gc.collect()
    gc.disable()  # the engine is in this process: a finalizer would run deep in its recursion
    try:
        response = http.request(method, path, content=body)
    finally:
        gc.enable()
    assert response.status_code == status
    assert len(response.json()["detail"]) > 10


@pytest.mark.parametrize(
    ("route", "most"),
    [
        ("create_session", LARGEST_JSON),
        ("asample", LARGEST_JSON),
        ("forward_backward", LARGEST_BODY),
    ],
)
def test_a_body_that_is_too_large_is_refused(http: httpx.Client, route: str, most: int) -> None:
    parts = (b" " * 2**20 for _ in range(most // 2**20 + 1))
    response = http.post(route, content=parts, headers=PROTOBUF)
    assert response.status_code == 413
    assert f"more than {most} bytes" in response.json()["detail"]


def test_a_rank_that_no_layer_has_is_refused(
    service: tinker.ServiceClient, address: Address
) -> None:
    made = raised(
        lambda: service.create_lora_training_client(
            base_model=address.base_model, rank=10**9
        ).result()
    )
    assert "rank 1000000000 is larger than every layer" in str(made)


def test_zstd_body_is_decompressed_and_a_corrupt_one_is_refused(
    http: httpx.Client, trained: tinker.TrainingClient
) -> None:
    message = pb.ForwardBackwardRequest(model_id=trained.model_id, loss_fn="cross_entropy")
    packed = zstandard.compress(message.SerializeToString())
    for body, sentence in ((packed, "no data"), (b"zstd?", "zstd")):
        headers = {**PROTOBUF, "content-encoding": "zstd"}
        response = http.post("forward_backward", content=body, headers=headers)
        assert response.status_code == 400
        assert sentence in response.json()["detail"]


def test_repeated_request_is_carried_out_once(http: httpx.Client, address: Address) -> None:
    session_id = http.post(
        "create_session", json={"tags": [], "user_metadata": None, "sdk_version": "t"}
    ).json()["session_id"]
    create = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": address.base_model,
        "lora_config": {"rank": 2},
    }
    made = [http.post("create_model", json=create).json() for _ in range(2)]
    assert made[0]["request_id"] == made[1]["request_id"]
    answer = http.post("retrieve_future", json={"request_id": made[0]["request_id"]})
    assert answer.json()["model_id"] == f"{session_id}:train:0"
    step = {"model_id": f"{session_id}:train:0", "seq_id": 1, "adam_params": {}}
    steps = [http.post("optim_step", json=step).json()["request_id"] for _ in range(3)]
    assert len(set(steps)) == 1
    metrics = http.post("retrieve_future", json={"request_id": steps[0]}).json()["metrics"]
    assert metrics["step:max"] == 1
    sample = {
        "sampling_session_id": http.post(
            "create_sampling_session",
            json={
                "session_id": session_id,
                "sampling_session_seq_id": 0,
                "base_model": address.base_model,
            },
        ).json()["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    sampled = [http.post("asample", json=sample).json() for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert len(sampled[0]["sample_sequence_ids"]) == 1


def test_finished_session_stays_closed(http: httpx.Client, address: Address) -> None:
    made = {"tags": [], "user_metadata": {"n": 1}, "sdk_version": "t", "display_name": "My Night"}
    session_id = http.post("create_session", json=made).json()["session_id"]
    assert http.get(f"sessions/{session_id}").json()["user_metadata"] == {"n": "1"}
    end = {"reason": {"type": "errored"}, "detail": "stopped"}
    assert http.post(f"sessions/{session_id}/finish", json=end).status_code == 204
    again = {"reason": {"type": "success"}}
    assert http.post(f"sessions/{session_id}/finish", json=again).status_code == 204
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": address.base_model}
    refused = http.post("create_model", json=create)
    assert (refused.status_code, "was closed" in refused.text) == (400, True)


def test_engine_failure_is_answered_with_status_400_and_a_message() -> None:
    async def ask() -> httpx.Response:
        broken = create_app(SimpleNamespace(), "tml-x")  # type: ignore[arg-type]
        transport = httpx.ASGITransport(broken, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.get("/api/v1/training_runs", headers={"X-API-Key": "tml-x"})

    response = asyncio.run(ask())
    assert response.status_code == 400
    assert "AttributeError" in response.json()["detail"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = [
    "session_id", "model_id", "seq_id", "model_seq_id", "path", "optimizer", "base_model",
    "lora_config", "rank", "adam_params", "learning_rate", "prompt", "chunks", "tokens", "type",
    "sampling_params", "max_tokens", "temperature", "num_samples", "stop", "tags", "user_metadata",
    "sdk_version", "request_id", "sampling_session_id", "sampling_session_seq_id", "model_path",
    "tinker_path", "ttl_seconds", "source_path", "kind", "reason", "limit", "cursor", "project_id",
]  # fmt: skip
ROUTES = sorted(
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods or ()
)
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6) | json_values


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES),
    body=bodies,
    names=st.lists(st.sampled_from(["x", "weights", "..", "%00", "ü", "a" * 300]), min_size=3),
)
def test_no_route_answers_5xx_to_any_body(
    http: httpx.Client, route: tuple[str, str], body: object, names: list[str]
) -> None:
    method, path = route
    for name in names[:3]:
        path = re.sub(r"\{\w+\}", name, path, count=1)
    response = http.request(method, path, content=json.dumps(body).encode())
    assert response.status_code < 500


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_nearly_valid_request_makes_the_engine_fail(
    http: httpx.Client,
    trained: tinker.TrainingClient,
    sampler: tinker.SamplingClient,
    data: st.DataObject,
) -> None:
    """Send valid bodies with one arbitrary value."""
    model = {"model_id": trained.model_id, "seq_id": None}
    sample = {
        "sampling_session_id": sampler._sampling_session_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 1},
    }
    right: dict[str, dict[str, object]] = {
        "optim_step": {**model, "adam_params": {}},
        "save_weights": {**model, "path": "fuzz", "overwrite": True},
        "save_weights_for_sampler": {**model, "path": "fuzz"},
        "asample": sample,
    }
    path = data.draw(st.sampled_from(sorted(right)))
    places = {
        "optim_step": ["adam_params"],
        "save_weights": ["path", "ttl_seconds", "overwrite", "user_metadata"],
        "save_weights_for_sampler": ["path", "ttl_seconds", "kind", "sampling_session_seq_id"],
        "asample": ["num_samples", "prompt", "topk_prompt_logprobs", "prompt_logprobs_last_n",
                    "target_prompt_logprobs"],
    }  # fmt: skip
    value = json_values | st.integers(-2, 5)
    inner = st.dictionaries(
        st.sampled_from(["learning_rate", "beta1", "eps", "seed", "stop", "top_k", "top_p"]), value
    )
    body = {**right[path], data.draw(st.sampled_from(places[path])): data.draw(value | inner)}
    if path == "asample":
        body["sampling_params"] = {"max_tokens": 1, **data.draw(inner)}
    response = http.post(path, content=json.dumps(body).encode())
    assert response.status_code < 500
    if response.status_code == 200:
        answer = http.post("retrieve_future", json={"request_id": response.json()["request_id"]})
        assert answer.status_code == 200
        if "json" in answer.headers["content-type"]:
            assert answer.json().get("category") != "server", answer.text


def test_extreme_numbers_are_computed_or_refused_as_user_errors(
    http: httpx.Client, trained: tinker.TrainingClient
) -> None:
    """Send NaN, infinity and huge numbers in a protobuf request."""
    for value in (np.nan, np.inf, 3.0e38):
        message = pb.ForwardBackwardRequest(model_id=trained.model_id, loss_fn="cross_entropy")
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
        for name, kind, values in (
            ("target_tokens", pb.DTYPE_INT64, np.array([2, 3], np.int64)),
            ("weights", pb.DTYPE_FLOAT32, np.array([value, 1.0], np.float32)),
        ):
            one.loss_fn_inputs[name].CopyFrom(
                pb.Tensor(dense=values.tobytes(), dtype=kind, shape=[2])
            )
        sent = http.post("forward_backward", content=message.SerializeToString())
        answer = http.post("retrieve_future", json={"request_id": sent.json()["request_id"]})
        assert answer.status_code == 200
        if "json" in answer.headers["content-type"]:
            assert answer.json()["category"] == "user"
