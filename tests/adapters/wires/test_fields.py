"""Fields that an older server does not know."""

from typing import Any

import pytest

from ratchet.adapters.wires.older_wire import NEWER, CallRefused, OlderWire, without_newer

PROTOBUF = OlderWire("protobuf")
ASKED: dict[tuple[str, str], Any] = {
    ("create_model", "optimizer_config"): {"type": "dimuon"},
    ("load_weights", "optimizer_config"): {"type": "dimuon"},
    ("optim_step", "optimizer_params"): {"type": "dimuon", "learning_rate": 0.1},
    ("save_weights", "user_metadata"): {"note": "x"},
    ("save_weights_for_sampler", "user_metadata"): {"note": "x"},
    ("save_weights_for_sampler", "kind"): "inflight",
    ("asample", "topk_sample_logprobs"): 3,
    ("asample", "target_prompt_logprobs"): {"data": [1]},
    ("asample", "prompt_alt_tokens_k"): 2,
    ("asample", "record_stability_info"): True,
}
UNASKED: dict[tuple[str, str], Any] = {
    ("create_session", "display_name"): "a run",
    ("create_model", "optimizer_config"): {"type": "adamw"},
    ("load_weights", "optimizer_config"): None,
    ("optim_step", "optimizer_params"): None,
    ("save_weights", "user_metadata"): {},
    ("save_weights_for_sampler", "user_metadata"): None,
    ("save_weights_for_sampler", "kind"): "snapshot",
    ("asample", "topk_sample_logprobs"): 0,
    ("asample", "target_prompt_logprobs"): None,
    ("asample", "prompt_alt_tokens_k"): 0,
    ("asample", "prompt_logprobs_last_n"): 4,
    ("asample", "record_stability_info"): False,
}


@pytest.mark.parametrize(("call", "name"), ASKED)
def test_a_newer_field_that_asks_for_something_is_refused_by_name(call: str, name: str) -> None:
    with pytest.raises(CallRefused, match=rf"{call} asks for {name} .*SDK 0\.25"):
        without_newer(call, {name: ASKED[call, name]}, PROTOBUF)


@pytest.mark.parametrize(("call", "name"), UNASKED)
def test_a_newer_field_that_asks_for_nothing_is_left_out(call: str, name: str) -> None:
    body = {name: UNASKED[call, name], "kept": 1}
    assert without_newer(call, body, PROTOBUF) == {"kept": 1}


def test_every_newer_field_is_tried_with_and_without_a_request() -> None:
    fields = {(call, name) for call, names in NEWER.items() for name in names}
    assert {*UNASKED} == fields
    harmless = {("create_session", "display_name"), ("asample", "prompt_logprobs_last_n")}
    assert {*ASKED} == fields - harmless
