"""Fields of calls that an older server does not know: left out where that changes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

from ratchet.adapters.wires.asking import OlderWire

Says = Callable[[Any], bool]
"""Whether a field's value asks for something that no server does of itself."""


class CallRefused(Exception):
    """A call that an older server cannot carry out, or one that it has refused for good."""

    def __init__(self, text: str, category: str = "user") -> None:
        super().__init__(text)
        self.category = category
        """Whom the SDK blames: the user, the server, or nobody (unknown)."""


def never(_: Any) -> bool:
    """Tell that a field can be left out: it is a label, or asks for less than is given."""
    return False


def other_than_adam(config: Any) -> bool:
    return config not in (None, {"type": "adamw"})


NEWER: Mapping[str, Mapping[str, Says]] = {
    "create_session": {"display_name": never},
    "create_model": {"optimizer_config": other_than_adam},
    "load_weights": {"optimizer_config": other_than_adam},
    "optim_step": {"optimizer_params": bool},
    "save_weights": {"user_metadata": bool},
    "save_weights_for_sampler": {
        "user_metadata": bool,
        "kind": lambda kind: kind not in (None, "snapshot"),
    },
    "asample": {
        "topk_sample_logprobs": bool,
        "target_prompt_logprobs": bool,
        "prompt_alt_tokens_k": bool,
        "prompt_logprobs_last_n": never,  # an older server scores all tokens
        "record_stability_info": bool,
    },
}
"""Call → its fields that came after SDK 0.25, and what each asks for."""


def without_newer(call: str, body: Mapping[str, Any], wire: OlderWire) -> dict[str, Any]:
    """Return a call's body without the newer fields; CallRefused for one that asks for something.

    A server may ignore what it does not know, so what it would be asked for is refused here.
    """
    newer = NEWER.get(call, {})
    for name, asks in newer.items():
        if name in body and asks(body[name]):
            raise CallRefused(
                f"{call} asks for {name} {body[name]!r:.100}, which the wire of this server (SDK "
                f"{wire.sdk}) does not have; leave it out of the recipe, or use a server of a "
                "newer wire (docs/servers.md)"
            )
    return {name: value for name, value in body.items() if name not in newer}
