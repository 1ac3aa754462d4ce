"""Trinity-RFT's side of `benchmarks.peers.formulas`, in the environment of trinity-rft 0.6.0.

The request on stdin has trajectories with the losses and the divergences to compute of them, and
steps with the advantages to compute of their calls. The last line of stdout is the answer.
"""
# Trinity-RFT is not installed where the types are checked.
# pyright: reportMissingImports=false

import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass
class DataProto:
    """A stand-in for verl's batch, of which an advantage reads these two fields.

    verl needs a GPU's packages.
    """

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, Any]


sys.modules["verl"] = ModuleType("verl")
sys.modules["verl"].DataProto = DataProto  # pyright: ignore[reportAttributeAccessIssue]

from trinity.algorithm import ADVANTAGE_FN, KL_FN, POLICY_LOSS_FN  # noqa: E402
from trinity.common.experience import EID, Experience  # noqa: E402

OF_BATCHES = ("rloo", "reinforceplusplus")
"""Advantages of verl's batches; the others are of Trinity's experiences."""

MODE = "seq-mean-token-sum"
"""An aggregation that leaves the loss of a single trajectory as it is."""


def compute_losses(asked: dict[str, Any], trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the loss of each trajectory, and its gradient by each log-probability."""
    chosen = POLICY_LOSS_FN.get(asked["theirs"])
    defaults = chosen.default_args()
    mode = {"loss_agg_mode": MODE} if "loss_agg_mode" in defaults else {}
    function = chosen(**{**defaults, **asked["arguments"], **mode})
    losses, gradients = [], []
    for tokens in trajectories:
        leaf = make_row(tokens["logprobs"]).requires_grad_()
        mask = make_row(tokens["mask"])
        loss, _ = function(
            logprob=leaf,
            old_logprob=make_row(tokens["sampling_logprobs"]),
            action_mask=mask,
            advantages=make_row(tokens["advantages"]),
        )
        total = loss if mode else loss * (mask.sum() + 1e-8)  # a loss without modes is a mean
        total.backward()
        assert leaf.grad is not None
        losses.append(total.item())
        gradients.append(leaf.grad[0].tolist())
    return {"module": chosen.__module__, "losses": losses, "gradients": gradients}


def make_row(values: list[float]) -> torch.Tensor:
    """Make a batch of one trajectory, in double precision."""
    return torch.tensor([values], dtype=torch.float64)


def estimate_divergences(
    asked: dict[str, Any], trajectories: list[dict[str, Any]]
) -> dict[str, Any]:
    """Estimate at each token the divergence of the policy that sampled from the reference."""
    chosen = KL_FN.get(asked["theirs"])
    estimates = []
    for tokens in trajectories:
        sampling, reference = (
            make_row(tokens[name]) for name in ("sampling_logprobs", "reference_logprobs")
        )
        values = chosen().calculate_kl(sampling, reference, sampling) * make_row(tokens["mask"])
        estimates.append(values[0].tolist())
    return {"module": chosen.__module__, "values": estimates}


def compute_advantages(asked: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the advantage of each call, which is null where Trinity drops the call."""
    chosen = ADVANTAGE_FN.get(asked["theirs"])
    function = chosen(**{**chosen.default_args(), **asked["arguments"]})
    compute = compute_of_batch if asked["theirs"] in OF_BATCHES else compute_of_experiences
    try:
        return {"module": chosen.__module__, "values": compute(function, calls)}
    except UnboundLocalError as error:
        return {"module": chosen.__module__, "error": type(error).__name__}


def compute_of_experiences(function: Any, calls: list[dict[str, Any]]) -> list[float | None]:
    """Compute advantages of Trinity's experiences, one a call."""
    experiences = [
        Experience(
            eid=EID(batch=0, task=call["task"], run=call["run"], step=call["call"]),
            tokens=[0] * (1 + len(call["logprobs"])),
            prompt_length=1,
            logprobs=call["logprobs"],
            reward=call["reward"],
            info={"step_reward": call["call_reward"], "env_state_hash": call["state"]},
        )
        for call in calls
    ]
    kept, _ = function(experiences)
    by_id = {experience.eid.uid: experience.advantages[0].item() for experience in kept}
    return [by_id.get(experience.eid.uid) for experience in experiences]


def compute_of_batch(function: Any, calls: list[dict[str, Any]]) -> list[float]:
    """Compute advantages of verl's batch: a row a call, and its reward at its last token."""
    width = max(len(call["logprobs"]) for call in calls)
    rewards, mask = torch.zeros(2, len(calls), width)
    for row, call in enumerate(calls):
        rewards[row, len(call["logprobs"]) - 1] = call["reward"]
        mask[row, : len(call["logprobs"])] = 1.0
    batch = DataProto(
        {"token_level_rewards": rewards, "response_mask": mask},
        {"uid": [call["task"] for call in calls]},
    )
    computed, _ = function(batch)
    return computed.batch["advantages"][:, 0].tolist()


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    losses = [compute_losses(asked, request["trajectories"]) for asked in request["losses"]]
    advantages = [
        compute_advantages(asked, request["steps"][asked["step"]])
        for asked in request["advantages"]
    ]
    divergences = [
        estimate_divergences(asked, request["trajectories"]) for asked in request["divergences"]
    ]
    print(json.dumps({"losses": losses, "advantages": advantages, "divergences": divergences}))


if __name__ == "__main__":
    main()
