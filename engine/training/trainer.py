"""Training of one LoRA: gradients of a loss over datums, and AdamW steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from engine.errors import RequestRefused
from engine.model.attention import Attention, LoraLinear, SequenceAttention
from engine.model.language_model import LanguageModel
from engine.model.lora import LoraWeights, check_shapes
from engine.model.products import Products
from engine.training.datums import TrainingDatum, check_datums
from engine.training.losses import Config, EngineLoss, resolve_loss

LOGITS_AT_ONCE = 2**18
"""Logits that a few operations compute one after another: a processor's second cache holds them."""


def compute_target_logprobs(
    logits: torch.Tensor, targets: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Compute each datum's log-probabilities, in the shape of its targets [T] or [T, K].

    `logits` [tokens, vocabulary] has the datums' rows one after another. The gradient overwrites
    the logits.
    """
    tables = [one.view(len(one), -1) for one in targets]
    widest = max(table.shape[1] for table in tables)
    padded = torch.cat([F.pad(table, (0, widest - table.shape[1])) for table in tables])
    known: torch.Tensor = _TargetLogprobs.apply(logits, padded)
    rows = known.split([len(table) for table in tables])
    return [
        own[:, : table.shape[1]].reshape(one.shape)
        for own, table, one in zip(rows, tables, targets, strict=True)
    ]


class _TargetLogprobs(torch.autograd.Function):
    """The log-probabilities [n, K] of targets [n, K] under logits [n, vocabulary]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = logits.split(_rows_at_once(logits))
        normalizers = torch.cat([rows.logsumexp(-1, keepdim=True) for rows in parts])
        ctx.save_for_backward(logits, targets, normalizers)
        return logits.gather(1, targets) - normalizers

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, *others = ctx.saved_tensors
        count = _rows_at_once(logits)
        columns = (one.split(count) for one in (logits, *others, gradients[0]))
        for rows, targets, normalizers, gradient in zip(*columns, strict=True):
            rows.sub_(normalizers).exp_().mul_(-gradient.sum(1, keepdim=True))
            rows.scatter_add_(1, targets, gradient)
        return logits, None


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // logits.shape[1])


MICROBATCH_TOKENS = 2048
"""Tokens computed at once. More tokens need more memory and are no faster on a CPU."""

MICROBATCH_WORK = 2**36
"""Products of a token and a weight computed at once: half a second of a core, and one to one and a
half gigabytes of activations. A model of many weights shrinks microbatches."""

MICROBATCH_LOGITS = 2**27
"""Logits computed at once: half a gigabyte in float32. A large vocabulary shrinks microbatches."""


Computed: TypeAlias = tuple[list[np.ndarray], float, Sequence[torch.Tensor | None]]
"""A microbatch's log-probabilities by datum, its loss, and its gradients by weight."""


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


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """A forward pass in which every token belongs to one LoRA and gradients flow to it."""

    lora: LoraWeights
    attention: Attention
    products: Products

    def linear(self, layer: LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
        pair = self.lora.pairs.get(layer.name)
        if pair is None:
            return self.products.linear(inputs, layer.weight, layer.bias)
        scale = self.lora.config.scale
        return self.products.linear_with_lora(inputs, layer.weight, layer.bias, pair, scale)


class Trainer:
    """A LoRA in training: its weights, their gradients and AdamW's moments.

    Equal calls in equal states give equal bits on one machine, with one build of torch and one
    number of threads.
    """

    def __init__(self, model: LanguageModel, lora: LoraWeights) -> None:
        self.model = model
        self.lora = lora
        self.step = 0
        for tensor in lora.tensors.values():
            tensor.requires_grad_(True)
        self.first_moments = _zeros(lora)
        self.second_moments = _zeros(lora)

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
        function, settings = resolve_loss(loss, config or {})
        datums = check_datums(data, loss, function, self.model)
        outputs: dict[int, np.ndarray] = {}
        total = 0.0

        def compute(members: list[int]) -> Computed:
            chosen = [datums[number] for number in members]
            return self._compute(chosen, function, settings, backward)

        lots, workers = self._microbatches(datums), self.model.workers
        for start in range(0, len(lots), workers.count):
            together = lots[start : start + workers.count]
            computed = workers.compute(compute, together)
            for members, (logprobs, lot_loss, gradients) in zip(together, computed, strict=True):
                total += lot_loss
                outputs.update(zip(members, logprobs, strict=True))
                self._accumulate(gradients)
            self.model.pause()
        return [outputs[number] for number in range(len(datums))], {"loss:sum": total}

    def _compute(
        self, datums: list[TrainingDatum], loss: EngineLoss, config: Config, backward: bool
    ) -> Computed:
        """Compute a microbatch, and leave no graph and no activation of it."""
        with torch.set_grad_enabled(backward):
            logprobs, lot_loss = self._forward(datums, loss, config)
            tensors = [*self.lora.tensors.values()]
            gradients = (
                torch.autograd.grad(lot_loss, tensors, allow_unused=True) if backward else ()
            )
        known = [one.detach().cpu().numpy() for one in logprobs]
        return known, float(lot_loss.detach()), gradients

    def _accumulate(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a microbatch's gradients, in the order of the weights, to the gradients before."""
        for tensor, gradient in zip(self.lora.tensors.values(), gradients, strict=False):
            if tensor.grad is None:
                tensor.grad = gradient
            elif gradient is not None:
                tensor.grad += gradient

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Take one AdamW step on the accumulated gradients and clear them.

        Missing gradients count as zero, as in torch: moments fade and weight decay acts. If the
        gradients are not finite, clear them and raise RequestRefused.
        """
        gradients = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self.lora.tensors.items()
        }
        for tensor in self.lora.tensors.values():
            tensor.grad = None
        norm = float(torch.stack([grad.norm() for grad in gradients.values()]).norm())
        if not math.isfinite(norm):
            raise RequestRefused(
                f"the gradient's norm is {norm}: no step was taken and the gradient was dropped; "
                "check the loss inputs, or lower the learning rate"
            )
        if params.grad_clip_norm > 0:
            scale = min(1.0, params.grad_clip_norm / (norm + 1e-6))
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
        self._adamw(gradients, params)
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

    def _microbatches(self, datums: list[TrainingDatum]) -> list[list[int]]:
        """Split the datums' numbers, longest first, into lots that fit the token budget."""
        budget = min(
            MICROBATCH_TOKENS,
            MICROBATCH_WORK // self.model.size,
            MICROBATCH_LOGITS // self.model.vocab_size,
        )
        order = sorted(range(len(datums)), key=lambda number: -len(datums[number].tokens))
        lots: list[list[int]] = []
        room = 0
        for number in order:
            length = len(datums[number].tokens)
            if not lots or length > room:
                lots.append([])
                room = budget
            lots[-1].append(number)
            room -= length
        return lots

    def _forward(
        self, datums: list[TrainingDatum], loss: EngineLoss, config: Config
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Compute the log-probabilities of each datum's targets, and the sum of their losses."""
        lengths = [len(datum.tokens) for datum in datums]
        device = self.model.device
        tokens = torch.from_numpy(np.concatenate([datum.tokens for datum in datums])).to(device)
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
        current = TrainingPass(self.lora, SequenceAttention(lengths, device), self.model.products)
        logits = self.model.logits(tokens, positions.to(device), current)
        inputs = [
            {name: torch.from_numpy(values).to(device) for name, values in datum.inputs.items()}
            for datum in datums
        ]
        known = compute_target_logprobs(logits, [own["target_tokens"] for own in inputs])
        losses = [loss(one, own, config) for one, own in zip(known, inputs, strict=True)]
        return known, torch.stack(losses).sum()

    @torch.no_grad()
    def _adamw(self, gradients: Mapping[str, torch.Tensor], params: AdamParams) -> None:
        """Apply AdamW (Loshchilov and Hutter, 2019), in the order of torch.optim.AdamW."""
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


def _zeros(lora: LoraWeights) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in lora.tensors.items()}
