"""The Tinker cookbook's side of `benchmarks.peers.formulas`, in the environment of tinker-cookbook.

The request on stdin has steps with the advantages to compute of their calls, trajectories with the
penalties by which to lessen their tokens' advantages, and sums of the sides of pairs. The last line
of stdout is the answer.
"""
# The cookbook is not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

import tinker
import torch
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import data_processing, metrics
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup


def compute_advantages(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the advantage of each rollout of one call."""
    tasks = sorted({call["task"] for call in calls})
    groups = []
    for task in tasks:
        rewards = [call["reward"] for call in calls if call["task"] == task]
        played = [Trajectory([], tinker.ModelInput.empty()) for _ in rewards]
        groups.append(TrajectoryGroup(played, rewards, [{} for _ in rewards]))
    computed = [
        value for group in data_processing.compute_advantages(groups) for value in group.tolist()
    ]
    return {"module": data_processing.__name__, "values": computed}


class Reference:
    """A sampling client that knows the log-probabilities of trajectories, by their first token."""

    def __init__(self, trajectories: list[dict[str, Any]]) -> None:
        self.logprobs = [[None, *tokens["reference_logprobs"]] for tokens in trajectories]

    async def compute_logprobs_async(self, prompt: tinker.ModelInput) -> list[float | None]:
        """Return the log-probabilities of a trajectory's tokens."""
        return self.logprobs[prompt.to_ints()[0]]


def lessen_advantages(asked: dict[str, Any], trajectories: list[dict[str, Any]]) -> dict[str, Any]:
    """Lessen the advantages of tokens by their penalties."""
    datums = []
    for place, tokens in enumerate(trajectories):
        inputs = {
            "target_tokens": torch.zeros(len(tokens["mask"]), dtype=torch.int64),
            "logprobs": torch.tensor(tokens["sampling_logprobs"]),
            "advantages": torch.tensor(tokens["advantages"]),
            "mask": torch.tensor(tokens["mask"]),
        }
        prompt = tinker.ModelInput.from_ints([place] + [0] * (len(tokens["mask"]) - 1))
        made = {name: tinker.TensorData.from_torch(values) for name, values in inputs.items()}
        datums.append(tinker.Datum(model_input=prompt, loss_fn_inputs=made))
    reference: Any = Reference(trajectories)
    asyncio.run(metrics.incorporate_kl_penalty(datums, reference, **asked["arguments"]))
    lessened = [datum.loss_fn_inputs["advantages"].to_torch().tolist() for datum in datums]
    return {"module": metrics.__name__, "values": lessened}


def compute_preference(asked: dict[str, Any], pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compute the DPO loss of pairs, and its gradients by the log-probability of each side."""
    policy, reference = (
        [torch.tensor(pairs[side][key], dtype=torch.float64) for side in ("chosen", "rejected")]
        for key in ("log_p", "log_ref")
    )
    leaves = [one.requires_grad_() for one in policy]
    sides = [[*side] for side in (*leaves, *reference)]
    loss, _ = train_dpo.compute_dpo_loss(*sides, **asked["arguments"])
    gradients = [one.tolist() for one in torch.autograd.grad(loss, leaves)]
    return {"module": train_dpo.__name__, "losses": [loss.item()], "gradients": gradients}


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    advantages = [
        compute_advantages(request["steps"][asked["step"]]) for asked in request["advantages"]
    ]
    divergences = [
        lessen_advantages(asked, request["trajectories"]) for asked in request["divergences"]
    ]
    answers = {"losses": [], "advantages": advantages, "divergences": divergences}
    answers["preferences"] = [
        compute_preference(asked, request["pairs"]) for asked in request["preferences"]
    ]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
