"""Training of one LoRA: gradients of a loss over datums, and AdamW steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ratchet.engine.errors import RequestRefused
from ratchet.engine.model.language_model import LanguageModel
from ratchet.engine.model.lora import LoraWeights, check_shapes
from ratchet.engine.training.losses import TrainingDatum, check_datums, resolve_loss
from ratchet.engine.training.prefix_tree import grow_forest, pack
from ratchet.engine.training.training_pass import GradientSums, TreeComputation


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with Tinker's defaults. A `grad_clip_norm` of 0 disables clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise RequestRefused(f"{name} is {value}; it must be 0 or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RequestRefused(f"{name} is {getattr(self, name)}; it must be in [0, 1)")


class Trainer:
    """A LoRA in training: its weights, their gradients and AdamW's moments.

    Equal calls in equal states give equal bits on one machine, with one build of torch. So do the
    same datums in several calls before a step, unless a call ends between datums that begin alike:
    what they share is computed once, so their gradient is summed and rounded in another order.
    """

    def __init__(self, model: LanguageModel, lora: LoraWeights) -> None:
        self.model = model
        self.lora = lora
        self.step = 0
        for tensor in lora.tensors.values():
            tensor.requires_grad_(True)
        self.first_moments = {name: torch.zeros_like(one) for name, one in lora.tensors.items()}
        self.second_moments = {name: torch.zeros_like(one) for name, one in lora.tensors.items()}
        self.sums = GradientSums(lora)

    def forward_backward(
        self,
        data: Sequence[TrainingDatum],
        loss: str,
        config: Mapping[str, float | str] | None = None,
        backward: bool = True,
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return the log-probabilities of each datum's targets, and the summed loss as "loss:sum".

        Gradients accumulate over calls until `optim_step`. A RequestRefused leaves them unchanged.
        """
        row, settings = resolve_loss(loss, config or {})
        datums = check_datums(data, loss, row, self.model)
        loss_of = partial(row.function, settings)
        computation = TreeComputation(self.model, self.lora, self.sums, datums, loss_of, backward)
        forest = grow_forest([np.asarray(datum.tokens) for datum in datums])
        computation.run(pack(forest, computation.budget))
        return computation.outputs, {"loss:sum": sum(computation.losses)}

    @torch.no_grad()
    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Take one AdamW step on the accumulated gradients and clear them.

        AdamW (Loshchilov and Hutter, 2019) acts in the order of torch.optim.AdamW. Missing
        gradients count as zero, as in torch: moments fade and weight decay acts. If the gradients
        are not finite, clear them and raise RequestRefused.
        """
        gradients = self.sums.total()
        self.sums.clear()
        norm = float(torch.stack([grad.norm() for grad in gradients.values()]).norm())
        if not math.isfinite(norm):
            raise RequestRefused(
                f"the gradient's norm is {norm}: no step was taken and the gradient was dropped; "
                "check the loss inputs, or lower the learning rate"
            )
        if params.grad_clip_norm > 0:
            scale = min(1.0, params.grad_clip_norm / (norm + 1e-6))
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
        self.step += 1
        first_bias = 1 - params.beta1**self.step
        second_bias = 1 - params.beta2**self.step
        for name, weight in self.lora.tensors.items():
            gradient, m, v = gradients[name], self.first_moments[name], self.second_moments[name]
            weight.mul_(1 - params.learning_rate * params.weight_decay)
            m.lerp_(gradient, 1 - params.beta1)
            v.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
            spread = (v.sqrt() / math.sqrt(second_bias)).add_(params.eps)
            weight.addcdiv_(m, spread, value=-params.learning_rate / first_bias)
        return {"unclipped_grad_l2:mean": norm, "step:max": float(self.step)}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's step and moments by name, without accumulated gradients."""
        return {
            "step": torch.tensor(self.step),
            **{f"{name}.m": tensor.clone() for name, tensor in self.first_moments.items()},
            **{f"{name}.v": tensor.clone() for name, tensor in self.second_moments.items()},
        }

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore step and moments; raise RequestRefused if they do not fit this LoRA."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.optimizer_tensors().items()}
        check_shapes(tensors, expected, what="optimizer state")
        self.step = int(tensors["step"])
        for name in self.lora.tensors:
            self.first_moments[name].copy_(tensors[f"{name}.m"])
            self.second_moments[name].copy_(tensors[f"{name}.v"])
