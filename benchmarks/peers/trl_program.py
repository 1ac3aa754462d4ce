"""TRL's side of `benchmarks.peers.formulas`, in the environment of trl.

The request on stdin has sums over the trained tokens of the sides of pairs, and of `labelled`
answers, of which one side has no tokens, and the losses to compute. The last line of stdout is the
answer: the mean loss of the batch, and its gradients.
"""
# TRL is not installed where the types are checked.
# pyright: reportMissingImports=false

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.cpo_trainer import CPOTrainer
from trl.trainer.dpo_config import FDivergenceType
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.orpo_trainer import ORPOTrainer

Sums = dict[str, dict[str, torch.Tensor]]

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather_for_metrics=lambda values: values, num_processes=1
)
DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "reference_free": False,
    "f_divergence_type": FDivergenceType.REVERSE_KL,
    "f_divergence_params": None,
    "use_weighting": False,
    "simpo_gamma": 0.5,
    "alpha": 0.0,
    "cpo_alpha": 1.0,
    "calculate_KL": True,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "accelerator": ACCELERATOR,
}


def compute_loss(asked: dict[str, Any], sums: Sums) -> torch.Tensor:
    """Compute the mean loss of a batch as TRL's trainers do, whose methods these are."""
    name = asked["theirs"]
    settings: Any = SimpleNamespace(**{**DEFAULTS, "loss_type": name, **asked["arguments"]})
    chosen, rejected = sums["chosen"], sums["rejected"]
    if name in ("simpo", "orpo", "ipo"):  # the trainers average the log-probabilities before
        chosen, rejected = by_token(chosen), by_token(rejected)
    if name in ("simpo", "cpo"):
        settings.loss_type = "simpo" if name == "simpo" else "sigmoid"
        losses = CPOTrainer.cpo_loss(settings, chosen["log_p"], rejected["log_p"])[0]
        added = settings.cpo_alpha * likelihood(sums) if name == "cpo" else 0.0
        return losses.mean() + added
    if name == "orpo":
        gained = ORPOTrainer.odds_ratio_loss(settings, chosen["log_p"], rejected["log_p"])[0]
        return likelihood(sums) - gained.mean()
    policy, reference = (
        (chosen[key], rejected[key], sums["mismatched"][key]) for key in ("log_p", "log_ref")
    )
    if name in ("kto", "apo_zero_unpaired"):
        settings.calculate_KL = name == "kto"
        return KTOTrainer.kto_loss(settings, *policy, *reference)[0].mean()
    return DPOTrainer.dpo_loss(settings, *policy[:2], *reference[:2], name)[0].mean()


def likelihood(sums: Sums) -> torch.Tensor:
    """Compute the mean negative log-likelihood of chosen tokens, which the trainers add."""
    return -sums["chosen"]["log_p"].sum() / sums["chosen"]["tokens"].sum()


def by_token(side: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Divide the sums of a side by its tokens."""
    return {key: side[key] / side["tokens"] for key in ("log_p", "log_ref")}


def keep_present(side: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the answers that a side lacks."""
    return {key: values[side["tokens"] > 0] for key, values in side.items()}


def _inputs_of(asked: dict[str, Any]) -> str:
    return "labelled" if asked["arguments"].get("labelled") else "pairs"


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    answers = []
    for asked in request["preferences"]:
        sums = {
            side: {key: torch.tensor(values, dtype=torch.float64) for key, values in of.items()}
            for side, of in request[_inputs_of(asked)].items()
        }
        leaves = [sums[side]["log_p"].requires_grad_() for side in ("chosen", "rejected")]
        loss = compute_loss(asked, {side: keep_present(of) for side, of in sums.items()})
        gradients = [one.tolist() for one in torch.autograd.grad(loss, leaves)]
        module = "trl"
        answers.append({"module": module, "losses": [loss.item()], "gradients": gradients})
    print(json.dumps({"losses": [], "advantages": [], "divergences": [], "preferences": answers}))


if __name__ == "__main__":
    main()
