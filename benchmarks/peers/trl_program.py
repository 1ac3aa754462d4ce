"""TRL's side of `benchmarks.peers.formulas`, in the environment of trl.

The request on stdin has sums over the trained tokens of the sides of pairs, and of `labelled`
answers, of which one side has no tokens, and the losses to compute. The last line of stdout is the
answer: the mean loss of the batch, and its gradients.
"""
# TRL is not installed where the types are checked.
# pyright: reportMissingImports=false

import json
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

Sums = dict[str, dict[str, torch.Tensor]]

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    gather=lambda values: values,
    gather_for_metrics=lambda values: values,
    num_processes=1,
)
DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "loss_weights": [1.0],
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "use_weighting": False,
    "simpo_gamma": 0.5,
    "alpha": 0.0,
    "cpo_alpha": 1.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "precompute_ref_logps": True,
    "aux_loss_enabled": False,
    "model": SimpleNamespace(training=True),
    "accelerator": ACCELERATOR,
    "_total_train_tokens": 0,
    "_tp_size": 1,
}


class Answers:
    """Answers as a batch of the trainers', and the model that gives them their log-probabilities.

    The tokens of an answer are all its number, and its whole log-probability is the first one's.
    """

    def __init__(self, *sides: dict[str, torch.Tensor]) -> None:
        self.log_p, self.log_ref, tokens = (
            torch.cat([side[key] for side in sides]) for key in ("log_p", "log_ref", "tokens")
        )
        place = torch.arange(int(tokens.max()) + 1)
        self.completion_mask = ((place > 0) & (place <= tokens[:, None])).long()
        numbers = torch.arange(len(tokens))
        self.input_ids = numbers[:, None].expand_as(self.completion_mask)

    def batch(self, prefix: str = "") -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_ids": self.input_ids,
            f"{prefix}attention_mask": torch.ones_like(self.input_ids),
            f"{prefix}completion_mask": self.completion_mask,
        }

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        log_probs = torch.zeros(input_ids[:, 1:].shape, dtype=self.log_p.dtype)
        log_probs[:, 0] = self.log_p[input_ids[:, 0]]
        nothing = torch.zeros_like(log_probs)
        measured = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
        return SimpleNamespace(log_probs=log_probs, **measured)


def compute_loss(asked: dict[str, Any], sums: Sums) -> torch.Tensor:
    """Compute the mean loss of a batch as TRL's trainers do, whose methods these are."""
    name, settings = asked["theirs"], trainer(asked)
    if name in ("simpo", "cpo", "orpo"):
        return without_reference(name, settings, sums)
    if settings.label_smoothing:  # which DPOTrainer has not: CPOTrainer's loss, of log-ratios
        ratios = [sums[side]["log_p"] - sums[side]["log_ref"] for side in ("chosen", "rejected")]
        return CPOTrainer.cpo_loss(settings, *ratios)[0].mean()
    if name in ("kto", "apo_zero_unpaired"):
        return of_labelled(settings, sums)
    answers = Answers(sums["chosen"], sums["rejected"])
    references = answers.log_ref.chunk(2)
    given = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), references, strict=True))
    return DPOTrainer._compute_loss(settings, answers, {**answers.batch(), **given}, False)


def trainer(asked: dict[str, Any]) -> Any:
    """Return what the methods read of a trainer."""
    name = asked["theirs"]
    settings = {"loss_type": name, "loss_types": [name], "calculate_KL": name == "kto"}
    metrics = {"train": defaultdict(list)}
    return SimpleNamespace(**{**DEFAULTS, **settings, "_metrics": metrics, **asked["arguments"]})


def of_labelled(settings: Any, sums: Sums) -> torch.Tensor:
    """Compute a loss of labelled answers, those that are chosen first."""
    answers = Answers(sums["chosen"], sums["rejected"])
    others = Answers(sums["mismatched"])
    chosen = len(sums["chosen"]["log_p"])
    batch = {
        **answers.batch(),
        "label": torch.arange(len(answers.log_p)) < chosen,
        "ref_logps": answers.log_ref,
        "ref_KL_logps": others.log_ref,
        **others.batch("KL_"),
    }
    of_others = partial(KTOTrainer._compute_kl_logps, settings, others)
    settings._compute_kl_logps = lambda _, batch: of_others(batch)
    return KTOTrainer._compute_loss(settings, answers, batch, False)


def without_reference(name: str, settings: Any, sums: Sums) -> torch.Tensor:
    """Compute a loss without a reference, of log-probabilities that are averaged before."""
    chosen, rejected = (
        sums[side]["log_p"] if name == "cpo" else sums[side]["log_p"] / sums[side]["tokens"]
        for side in ("chosen", "rejected")
    )
    if name == "orpo":
        gained = ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]
        return likelihood(sums) - gained.mean()
    settings.loss_type = "simpo" if name == "simpo" else "sigmoid"
    losses = CPOTrainer.cpo_loss(settings, chosen, rejected)[0]
    return losses.mean() + (settings.cpo_alpha * likelihood(sums) if name == "cpo" else 0.0)


def likelihood(sums: Sums) -> torch.Tensor:
    """Compute the mean negative log-likelihood of chosen tokens, which the trainers add."""
    return -sums["chosen"]["log_p"].sum() / sums["chosen"]["tokens"].sum()


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
