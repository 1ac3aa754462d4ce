"""Matrix products of a model's layers, by one of two kernels.

Sampling needs products whose rows have the same bits however many rows are computed at once.
Products by tiles have this property because each is a batch of products of TILE rows, and the
kernel sees one shape. oneDNN's products have it from two rows on, and in float32 they may take half
the time of torch's own on x86. `choose_products` tries the property out.
"""

import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional as F

TILE = 16
"""Rows of one product by tiles. 16 rows reach four fifths of the speed of 128 on AVX-512 and waste
little when few rows are computed. 16 is a multiple of the vector width, so there are no scalar
tails."""

PROBES = ((2, 1), (2, 2), (3, 4), (16, 1), (17, 2), (64, 1), (100, 4))
"""Numbers of rows, and of the threads that share their product. Each product must equal the first
rows of a product by one thread of twice the largest number of rows."""

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest accepted error of a product by its type, relative to the largest number in it."""

FEW_ROWS = 16
"""Number of rows for which oneDNN lays out packed weights."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A LoRA's weights of one layer: A [rank, in] and B [out, rank]."""


class Products(Protocol):
    """Products x Wᵀ of rows x [..., in] with weights W [out, in]."""

    granule: int
    """Granule: sampling computes a multiple of this number of rows."""

    shared: bool
    """Whether a product has the same bits if torch's threads share it."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the form of a frozen weight that `multiply` takes fastest."""
        ...

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ with a packed weight, without a gradient."""
        ...

    def update(self, outputs: torch.Tensor, rows: torch.Tensor, packed: Pair) -> torch.Tensor:
        """Compute outputs + (x Aᵀ) Bᵀ without a gradient; outputs may be overwritten."""
        ...

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute x Wᵀ + bias of inputs [..., in], with the inputs' gradient."""
        ...

    def linear_with_lora(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pair: Pair,
        scale: float,
    ) -> torch.Tensor:
        """Compute x Wᵀ + bias + scale · (x Aᵀ) Bᵀ, with gradients of x, A and B."""
        ...


class TiledProducts:
    """Products by torch's own kernels, in sampling over tiles of TILE rows."""

    granule = TILE
    shared = False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return Wᵀ as a view, made once because creating a view at every call is slow."""
        return weight.detach().t()

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        tiles = _tiles(rows)
        return torch.bmm(tiles, packed.expand(len(tiles), -1, -1)).view(*rows.shape[:-1], -1)

    def update(self, outputs: torch.Tensor, rows: torch.Tensor, packed: Pair) -> torch.Tensor:
        a, b = packed
        low = _tiles(self.multiply(rows, a))
        _tiles(outputs).baddbmm_(low, b.expand(len(low), -1, -1))
        return outputs

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(inputs, weight, bias)

    def linear_with_lora(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pair: Pair,
        scale: float,
    ) -> torch.Tensor:
        a, b = pair
        return F.linear(inputs, weight, bias) + F.linear(F.linear(inputs, a), b) * scale


class OneDnnProducts:
    """Products by oneDNN, in the type of the weight, with float32 outside them.

    A product of a single row has other bits than the same row among others.
    """

    granule = 2
    shared = True

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy in oneDNN's layout, without which few rows take as long as many."""
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return _multiply(rows, packed)

    def update(self, outputs: torch.Tensor, rows: torch.Tensor, packed: Pair) -> torch.Tensor:
        a, b = packed
        return _multiply_and_add(_multiply(rows, a), b, outputs)

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _Linear.apply(inputs, weight, bias)

    def linear_with_lora(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pair: Pair,
        scale: float,
    ) -> torch.Tensor:
        return _LinearWithLora.apply(inputs, *pair, (weight, bias), scale)


def choose_products(weights: Iterable[torch.Tensor]) -> Products:
    """Return oneDNN's products for large layers on an x86 CPU where a trial finds them sound."""
    shapes = {weight.shape: weight for weight in weights}
    found = OneDnnProducts()
    if all(map(_is_served, shapes.values())) and all(
        is_sound(found, weight) for weight in shapes.values()
    ):
        return found
    return TiledProducts()


def _is_served(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in ROUNDING
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
    )


@torch.no_grad()
def is_sound(products: Products, weight: torch.Tensor) -> bool:
    """Tell whether a row's bits depend on neither other rows nor threads, and its error is small.

    The error of a product is at most the rounding error of its type.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2 * max(PROBES)[0], weight.shape[1]), generator=generator)
    packed = products.pack(weight)
    many = _multiply_by(1, products, rows, packed)
    exact = F.linear(rows, weight.float())
    accepted = ROUNDING[weight.dtype] * exact.abs().max()
    return bool((many - exact).abs().max() <= accepted) and all(
        torch.equal(_multiply_by(threads, products, rows[:count], packed), many[:count])
        for count, threads in PROBES
    )


def _multiply_by(
    threads: int, products: Products, rows: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    """Multiply in a thread of its own, so that its OpenMP threads end with it.

    While a process has more of them than there are cores, all of them sleep between operations.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, "probe", lambda: torch.set_num_threads(threads)) as probe:
            return probe.submit(products.multiply, rows, packed).result()
    finally:
        torch.set_num_threads(before)


def _tiles(rows: torch.Tensor) -> torch.Tensor:
    """View rows [..., width] as tiles [n / TILE, TILE, width]."""
    return rows.view(-1, TILE, rows.shape[-1])


def _multiply(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if rows.dtype == weight.dtype:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    products = _multiply(rows.to(weight.dtype), weight).to(rows.dtype)
    return products if bias is None else products.add_(bias)


def _multiply_and_add(
    rows: torch.Tensor, weight: torch.Tensor, others: torch.Tensor
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(rows, others, weight, None, "add")


class _Linear(torch.autograd.Function):
    """The product x Wᵀ + bias of a frozen W by oneDNN; torch has no gradient of its operation."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return _multiply(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        return _multiply(gradient, weight.t()), None, None


class _LinearWithLora(torch.autograd.Function):
    """The product x Wᵀ + bias + scale · (x Aᵀ) Bᵀ of a frozen W by oneDNN."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        frozen: tuple[torch.Tensor, torch.Tensor | None],
        scale: float,
    ) -> torch.Tensor:
        low = _multiply(inputs, a).mul_(scale)
        ctx.save_for_backward(inputs, a, b, low)
        ctx.weight, ctx.scale = frozen[0], scale
        return _multiply_and_add(low, b, _multiply(inputs, *frozen))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        inputs, a, b, low = ctx.saved_tensors
        for_low = _multiply(gradient, b.t()).mul_(ctx.scale)
        for_a = _multiply(for_low.flatten(0, -2).t(), inputs.flatten(0, -2).t())
        # The transposed product takes a quarter of the time.
        for_b = _multiply(low.flatten(0, -2).t(), gradient.flatten(0, -2).t()).t()
        for_inputs = None
        if ctx.needs_input_grad[0]:
            for_inputs = _multiply_and_add(for_low, a.t(), _multiply(gradient, ctx.weight.t()))
        return for_inputs, for_a, for_b, None, None
