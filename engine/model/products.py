"""Matrix products of a model's layers, by one of two kernels.

Sampling needs products whose rows have the same bits however many rows are computed at once.
Products by tiles have this property because each is a batch of products of TILE rows, and the
kernel sees one shape; many kernels sum two rows in a tile's order too, which `tile_products` tries
out. oneDNN's products have the property from two rows on, and in float32 they may take half the
time of torch's own on x86. `choose_products` tries that out.
"""

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import torch
from torch.nn import functional as F

TILE = 16
"""Rows of one product by tiles. 16 rows reach four fifths of the speed of 128 on AVX-512 and waste
little when few rows are computed. 16 is a multiple of the vector width."""

TRAINING_TILE = 64
"""Rows of one product by tiles in training, which has many rows at once."""

FEW = 2
"""Rows of the smallest product: one of a single row is summed in another order."""

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest accepted error of a product by its type, relative to the largest number in it."""

FEW_ROWS = 16
"""Number of rows for which oneDNN lays out packed weights."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A LoRA's weights of one layer: A [rank, in] and B [out, rank]."""


class TiledProducts:
    """Products by torch's own kernels, in sampling over tiles of TILE rows.

    Fewer rows than a tile are a multiple of `granule`. Both kinds of products have these methods,
    which compute x Wᵀ of rows x [..., in] with weights W [out, in].
    """

    probes = tuple((rows, 1) for rows in range(FEW, TILE, FEW))
    """Numbers of rows, and of the threads that share their product, that a trial tries."""
    training_granule = TRAINING_TILE
    """Number of rows, of which a multiple is trained without rows that are computed in vain."""
    shared = False
    """Whether a product has the same bits if torch's threads share it."""

    def __init__(self, granule: int = TILE) -> None:
        self.granule = granule

    def round_up(self, rows: int) -> int:
        """Return the number of rows that sampling computes for so many."""
        return rows + -rows % (self.granule if rows < TILE else TILE)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a frozen weight as `multiply` takes it, by which few rows sum as a tile does."""
        return weight.detach().t().contiguous()

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ with a packed weight, without a gradient."""
        if rows.dim() == 2 and len(rows) < TILE:  # as many as a trial has found sound
            return torch.mm(rows, packed)
        tiles = _tiles(rows)
        return torch.bmm(tiles, packed.expand(len(tiles), -1, -1)).view(*rows.shape[:-1], -1)

    def update(self, outputs: torch.Tensor, rows: torch.Tensor, packed: Pair) -> torch.Tensor:
        """Compute outputs + (x Aᵀ) Bᵀ without a gradient; outputs may be overwritten."""
        a, b = packed
        low = _tiles(self.multiply(rows, a))
        _tiles(outputs).baddbmm_(low, b.expand(len(low), -1, -1))
        return outputs

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ of training, with any weight and without a gradient."""
        tiles, transposed = _padded_tiles(rows), weight.t()
        products = torch.bmm(tiles, transposed.expand(len(tiles), -1, -1))
        return _untiled(products, rows)

    def add_product(
        self, outputs: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Compute outputs + x Wᵀ of training; outputs may be overwritten."""
        tiles, transposed = _padded_tiles(rows), weight.t()
        sums = _padded_tiles(outputs).baddbmm_(tiles, transposed.expand(len(tiles), -1, -1))
        return _untiled(sums, rows)


class OneDnnProducts:
    """Products by oneDNN, in the type of the weight, with float32 outside them.

    A product of a single row has other bits than the same row among others.
    """

    probes = ((2, 1), (2, 2), (3, 4), (16, 1), (17, 2), (64, 1), (100, 4))
    training_granule = 2
    shared = True

    def round_up(self, rows: int) -> int:
        return rows + rows % 2

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy in oneDNN's layout, without which few rows take as long as many."""
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)

    def multiply(self, rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return _multiply(rows, packed)

    def update(self, outputs: torch.Tensor, rows: torch.Tensor, packed: Pair) -> torch.Tensor:
        a, b = packed
        return self.add_product(outputs, _multiply(rows, a), b)

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _multiply(rows, weight)

    def add_product(
        self, outputs: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(rows, outputs, weight, None, "add")


Products: TypeAlias = TiledProducts | OneDnnProducts


def choose_products(weights: Iterable[torch.Tensor]) -> Products:
    """Return oneDNN's products for large layers on an x86 CPU where a trial finds them sound."""
    shapes = {weight.shape: weight for weight in weights}.values()
    found = OneDnnProducts()
    if all(map(_is_served, shapes)) and all(is_sound(found, weight) for weight in shapes):
        return found
    return TiledProducts()


def tile_products(weights: Iterable[torch.Tensor], widths: Iterable[int]) -> TiledProducts:
    """Return products by tiles, or of fewer rows where a trial finds that these have their bits.

    Few rows of an uneven width would end within a vector, whose rest is rounded in another way.
    """
    found, shapes = TiledProducts(FEW), {weight.shape: weight for weight in weights}.values()
    whole = all(width % TILE == 0 for width in widths)
    return found if whole and all(is_sound(found, one) for one in shapes) else TiledProducts()


def _is_served(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in ROUNDING
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and (weight.dtype != torch.bfloat16 or has_bfloat16())
    )


def has_bfloat16() -> bool:
    """Return whether oneDNN computes in bfloat16 here, for which a CPU needs AVX-512 or like."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def is_sound(products: Products, weight: torch.Tensor) -> bool:
    """Tell whether a row's bits depend on neither other rows nor threads, and its error is small.

    The error of a product is at most the rounding error of its type.
    """
    rows = torch.randn((13 * TILE, weight.shape[1]), generator=torch.Generator().manual_seed(0))
    packed = products.pack(weight)
    many = _multiply_by(1, products, rows, packed)
    exact = F.linear(rows, weight.float())
    accepted = ROUNDING[weight.dtype] * exact.abs().max()
    return bool((many - exact).abs().max() <= accepted) and all(
        torch.equal(_multiply_by(threads, products, rows[:count], packed), many[:count])
        for count, threads in products.probes
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
    """View rows [..., width] as tiles [n / TILE, TILE, width], or as a smaller one."""
    return rows.view(-1, min(TILE, rows.numel() // rows.shape[-1]), rows.shape[-1])


def _padded_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., width] as tiles of training, the last of which may be padded."""
    flat = rows.reshape(-1, rows.shape[-1])
    padded = F.pad(flat, (0, 0, 0, lacking)) if (lacking := -len(flat) % TRAINING_TILE) else flat
    return padded.view(-1, TRAINING_TILE, rows.shape[-1])


def _untiled(tiles: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return tiles of outputs in the shape of their rows, without padding."""
    count = rows.numel() // rows.shape[-1]
    return tiles.view(-1, tiles.shape[-1])[:count].view(*rows.shape[:-1], -1)


def _multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if rows.dtype == weight.dtype:
        return torch.ops.mkldnn._linear_pointwise.default(rows, weight, None, "none", [], "")
    return _multiply(rows.to(weight.dtype), weight).to(rows.dtype)


Part = TypeVar("Part")
Result = TypeVar("Result")

DISTURBED = 0.85
"""Share of its threads' time that a shared step uses if no other program delays it, at least."""

MOST_APART = 128
"""Bound on the steps that are not shared after a disturbed step: 1, and twice as many after each
further disturbed step in a row."""


class Workers:
    """Up to `count` threads; with one, everything is computed by the calling thread."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._threads = (
            ThreadPoolExecutor(count, "compute", torch.set_num_threads, (1,)) if count > 1 else None
        )
        self._apart, self._next_apart = 0, 1

    def compute(self, function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Return the function's result for each part; raise the first part's error, if any."""
        if self._threads is None or len(parts) < 2:
            return [function(part) for part in parts]
        return list(self._threads.map(function, parts))

    def may_share(self) -> bool:
        """Tell whether the next step may be shared: not soon after a disturbed step."""
        if self._apart:
            self._apart -= 1
            return False
        return self.count > 1

    def share(self, function: Callable[[Part], Result], whole: Part) -> Result:
        """Return the function's result; all threads compute each of its operations together."""
        began, used = time.perf_counter(), time.process_time()
        torch.set_num_threads(self.count)
        try:
            return function(whole)
        finally:
            torch.set_num_threads(1)
            most = self.count * (time.perf_counter() - began)
            self._note(disturbed=time.process_time() - used < DISTURBED * most)

    def _note(self, disturbed: bool) -> None:
        self._apart = self._next_apart if disturbed else 0
        self._next_apart = min(2 * self._next_apart, MOST_APART) if disturbed else 1
