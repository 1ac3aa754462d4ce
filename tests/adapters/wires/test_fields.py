"""Fields that an older server does not know."""

from typing import Any

import pytest

from ratchet.adapters.wires.bridge import NEWER, without_newer
from ratchet.adapters.wires.older_server import CallRefused

HARMLESS = object()
"""What a field asks for that may always be left out."""
DIMUON = {"type": "dimuon"}
FIELDS: list[tuple[str, str, Any, Any]] = [
    ("create_session", "display_name", HARMLESS, "a run"),
    ("create_model", "optimizer_config", DIMUON, {"type": "adamw"}),
    ("load_weights", "optimizer_config", DIMUON, None),
    ("optim_step", "optimizer_params", {**DIMUON, "learning_rate": 0.1}, None),
    ("save_weights", "user_metadata", {"note": "x"}, {}),
    ("save_weights_for_sampler", "user_metadata", {"note": "x"}, None),
    ("save_weights_for_sampler", "kind", "inflight", "snapshot"),
    ("asample", "topk_sample_logprobs", 3, 0),
    ("asample", "target_prompt_logprobs", {"data": [1]}, None),
    ("asample", "prompt_alt_tokens_k", 2, 0),
    ("asample", "prompt_logprobs_last_n", HARMLESS, 4),
    ("asample", "record_stability_info", True, False),
]
"""Calls and their newer fields, each with a value that asks for something, and one that does not.
"""


def test_a_newer_field_is_left_out_or_refused_by_name_if_it_asks_for_something() -> None:
    assert {(call, name) for call, name, *_ in FIELDS} == {
        (call, name) for call, names in NEWER.items() for name in names
    }
    for call, name, asks, nothing in FIELDS:
        assert without_newer(call, {name: nothing, "kept": 1}, "protobuf") == {"kept": 1}
        if asks is not HARMLESS:
            with pytest.raises(CallRefused, match=rf"{call} asks for {name} .*SDK 0\.25"):
                without_newer(call, {name: asks}, "protobuf")
