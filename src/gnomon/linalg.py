"""Numerical kernels on plain tensors: products, polar factors, packed symmetric matrices, powers of two, norms.

Everything here is a pure function of tensors. Nothing knows of a structure, a manifold or an optimizer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""The types of half precision."""
promoted = functools.cache(torch.promote_types)
"""The type of a result, cached: torch's own function takes as long as an operation."""

CACHE_LINE = 16
"""Numbers in a cache line, in float32."""
ALIGNED_WIDTH = 600
"""From this width on, rows that do not begin at cache lines make a product take 1.3 times as long."""
PANEL = 128
"""The least number of rows of a symmetric product that are computed at a time; fewer would take as long."""
PANELS = 16
"""The largest number of panels. Devices with many cores need large products."""
NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


# ---------------------------------------------------------------------- types and shapes
def widen(x: Tensor) -> Tensor:
    """Return ``x``, in float32 if it is in half precision, which has neither FFTs nor factorizations."""
    return x.float() if x.dtype in HALF else x


def as_tensor(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """Return numbers, lists, arrays of any stride and type, and data frames as a tensor on the CPU; a tensor as it is.

    With ``like``, what is not a tensor gets its type and device.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "__array__"):
            import numpy as np  # where there is an array, there is NumPy

            array = np.asarray(value)
            known = array.dtype.kind == "c" or (array.dtype.kind in "bif" and array.dtype.itemsize <= 8)
            native = array.dtype.newbyteorder("=") if known else np.dtype(np.float64)
            value = np.array(
                array, dtype=native, order="C"
            )  # a copy: torch has no negative strides, nor read-only memory
        values = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        shown = repr(value)
        if hasattr(value, "__array__"):
            shown = f"a {type(value).__name__} with other entries; convert text, and fill or remove missing values"
        raise TypeError(f"{name} must be a number, or a tensor or an array of numbers, got {shown}") from None
    if values.is_complex():
        raise TypeError(f"{name} must be real, got {values.dtype}")
    if like is None:
        return values
    return torch.as_tensor(value, dtype=like.dtype, device="cpu").to(like.device)  # all digits of Python's numbers


def align(values: Tensor, block: Tensor) -> Tensor:
    """Return values of the batch shape with dimensions of size one appended, so that they multiply a block."""
    return values.reshape(values.shape + (1,) * (block.ndim - values.ndim))


def is_differentiated(*tensors: Tensor) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of ``like``."""
    kind = like.device.type
    if kind == "meta":  # which knows no autocast
        return NO_AUTOCAST
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NO_AUTOCAST


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached, so it must be usable outside of inference mode
def probe(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a fixed random vector of length k."""
    return torch.randn(k, generator=torch.Generator().manual_seed(k), device="cpu").to(device, dtype)


def power_of_two(size: Tensor) -> Tensor:
    """Return the smallest power of two above each size, and 1 where a size is zero or not finite.

    A product with it is exact.
    """
    return torch.exp2(torch.frexp(size).exponent.to(size.dtype))  # the exponent of zero, infinity and NaN is 0


# ---------------------------------------------------------------------- products
def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory for a matrix. Rows begin at cache lines where the matrix is so wide that it matters."""
    width = shape[-1]
    if width < ALIGNED_WIDTH or width % CACHE_LINE == 0:
        return like.new_empty(shape)
    return like.new_empty(*shape[:-1], math.ceil(width / CACHE_LINE) * CACHE_LINE)[..., :width]


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    batch, other = a.shape[:-2], b.shape[:-2]
    if batch != other:
        batch = torch.broadcast_shapes(batch, other)
    return (*batch, a.shape[-2], b.shape[-1])


def _is_traced(a: Tensor, b: Tensor) -> bool:
    """Return whether autograd or ``torch.compile`` follows the product, so that it must not write to given memory."""
    return torch.compiler.is_compiling() or is_differentiated(a, b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``A B`` of small matrices. For two batches torch's ``matmul`` would take five calls more."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] else torch.matmul(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``A B`` of large matrices, in aligned memory."""
    return a @ b if _is_traced(a, b) else torch.matmul(a, b, out=empty(a, _product_shape(a, b)))


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``A B``, which is known to be symmetric: the lower half is computed, the upper half is a copy of it.

    At sizes above 500 it takes 0.6 to 0.7 of the time of a full product.
    """
    if _is_traced(a, b):
        return a @ b
    result = empty(a, _product_shape(a, b))
    for first, end in _panels(a.shape[-2]):
        torch.matmul(a[..., first:end, :], b[..., :, :end], out=result[..., first:end, :end])
        if first:
            result[..., :first, first:end] = result[..., first:end, :first].mT
    return result


def apply_symmetric(matrix: Tensor, rows: Tensor, scratch: Tensor | None) -> Tensor:
    """Return ``S x`` for each row x and a symmetric S, in the memory ``scratch`` if it is given."""
    if scratch is None:
        return matmul(rows, matrix)
    if rows.stride(-1) == 1:
        return torch.matmul(rows, matrix, out=scratch)
    torch.matmul(matrix, rows.mT, out=scratch.mT)
    return scratch


def mirror(matrix: Tensor) -> Tensor:
    """Make a sum of symmetric matrices and results of :func:`symmetric_product` symmetric to the last bit, in place."""
    for first, end in _panels(matrix.shape[-1]):
        block = matrix[..., first:end, first:end]
        torch.mul(block + block.mT, 0.5, out=block)  # a sum does not depend on the order of two numbers
    return matrix


def _panels(k: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each panel of a matrix and the row after its last. Panels begin at cache lines."""
    width = max(PANEL, k // PANELS // CACHE_LINE * CACHE_LINE)
    return itertools.pairwise([*range(0, max(round(k / width), 1) * width, width), k])


# ---------------------------------------------------------------------- polar factors
POLAR_COEFFICIENTS = (
    (8.0132, -22.9258, 16.5994),
    (3.6006, -2.6419, 0.5105),
    (2.6613, -1.9772, 0.4526),
)
"""Coefficients of ``a x + b x^3 + c x^5``, a row for each iteration.

Each row is the polynomial nearest to 1 in the largest deviation, on the interval to which the rows before it map
[0.01, 1]. The first two rows leave one percent of room for rounding. Three iterations map [0.01, 1] to [0.73, 1.27].
"""
WIDE = 1.5
"""The ratio of the sides from which on the iteration is made with the smaller side's square matrices. In half precision
it is never so: their rounding would outweigh the squares of small singular values."""


def polar_factor(matrices: Tensor) -> Tensor:
    """Return about ``U V^T`` of ``U S V^T`` for a batch ``(blocks, d, p)``. Singular values are between 0.73 and 1.27.

    The iteration is that of Newton and Schulz with optimized coefficients, on the smaller side::

        X <- P X,    P = a I + b A + c A^2,    A = X X^T,    from X = D / ||D D^T||_F^(1/2)

    Singular values below a hundredth of that norm come out smaller.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar_factor(matrices.mT).mT
    tiny, sides = torch.finfo(matrices.dtype).tiny, (-2, -1)
    largest = torch.maximum(matrices.amax(sides, keepdim=True), -matrices.amin(sides, keepdim=True))
    x = matrices / largest.clamp(min=tiny)  # squares must not vanish
    square = symmetric_product(x, x.mT)
    size = torch.linalg.vector_norm(square, dim=sides, keepdim=True).clamp(min=tiny)
    square = square / size
    if x.shape[-1] >= WIDE * x.shape[-2] and x.dtype not in HALF:
        return product(_product_of_polynomials(square) * size.rsqrt(), x)
    x = x * size.rsqrt()
    for number, coefficients in enumerate(POLAR_COEFFICIENTS):
        square = symmetric_product(x, x.mT) if number else square
        x = product(_polynomial(square, *coefficients), x)
    return x


def polar_factors_of_halves(matrices: Tensor, interleaved: bool) -> Tensor:
    """Return a batch in which each half of the smaller side, which is even, is replaced by its own polar factor.

    The halves are the first and the last rows, or every second row. They need less than half of the multiplications of
    :func:`polar_factor`.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar_factors_of_halves(matrices.mT, interleaved).mT
    h = matrices.shape[-2] // 2
    if interleaved:
        halves = matrices.unflatten(-2, (h, 2)).transpose(-3, -2)
        return polar_factor(halves.flatten(0, -3)).view(halves.shape).transpose(-3, -2).flatten(-3, -2)
    halves = matrices.unflatten(-2, (2, h))
    return polar_factor(halves.flatten(0, -3)).view(halves.shape).flatten(-3, -2)


def _polynomial(square: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return ``a I + b A + c A^2`` of a symmetric A."""
    result = symmetric_product(square, square).mul_(c).add_(square, alpha=b)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _product_of_polynomials(square: Tensor) -> Tensor:
    """Return the product of all P, by ``A <- P A P`` on the smaller side alone. All of them commute.

    For wide matrices it takes half of the multiplications of the iteration on X.
    """
    total = polynomial = _polynomial(square, *POLAR_COEFFICIENTS[0])
    for coefficients in POLAR_COEFFICIENTS[1:]:
        square = symmetric_product(symmetric_product(polynomial, square), polynomial)
        polynomial = _polynomial(square, *coefficients)
        total = symmetric_product(polynomial, total)
    return total


# ---------------------------------------------------------------------- symmetric matrices with each number stored once
def packed_size(k: int) -> int:
    """Return the length of a packed k x k matrix: ``k (k + 1) / 2`` numbers, and at most ``k`` more."""
    h = k // 2
    q = k - h
    return q * (q + 1) + q * h


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return ``[[A, B^T], [B, C]]`` as B and a rectangle of A's upper and, one row lower, C's lower triangle.

    Rectangles are copied by rows; packing a triangle entry by entry would take thirty times as long.
    """
    k = matrix.shape[-1]
    h = k // 2
    rectangle = matrix.new_empty(*matrix.shape[:-2], k - h + 1, k - h)
    rectangle[..., 1:, :] = matrix[..., h:, h:]
    rectangle[..., :h, :h] = matrix[..., :h, :h].triu() + rectangle[..., :h, :h].tril(-1)
    rectangle[..., : h + 1, h:] = 0  # the column that is left over where k is odd
    return torch.cat([rectangle.flatten(-2), matrix[..., h:, :h].flatten(-2)], -1)


def unpack_symmetric(packed: Tensor, k: int) -> Tensor:
    """Return the matrix that :func:`pack_symmetric` has packed."""
    h = k // 2
    q = k - h
    rectangle = packed[..., : q * (q + 1)].unflatten(-1, (q + 1, q))
    coupling = packed[..., q * (q + 1) :].unflatten(-1, (q, h))
    upper, lower = rectangle[..., :h, :h].triu(), rectangle[..., 1:, :].tril()
    matrix = packed.new_empty(*packed.shape[:-1], k, k)
    matrix[..., :h, :h] = upper + upper.triu(1).mT
    matrix[..., h:, h:] = lower + lower.tril(-1).mT
    matrix[..., h:, :h] = coupling
    matrix[..., :h, h:] = coupling.mT
    return matrix


# ---------------------------------------------------------------------- norms
SMALL_SIZE = 64
"""Up to this size a few products are quicker than the many calls of the power method."""


def spectral_norm(matrices: Tensor) -> Tensor:
    """Return ``||(M^T M)^4||_F^(1/8)``, an upper bound of ``||M||_2`` within ``k^(1/16)``, for few columns k."""
    peak = matrices.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(matrices.dtype).tiny)
    power = matrices / peak
    for _ in range(3):
        power = matmul(power.mT, power)
    return peak[..., 0, 0] * torch.linalg.vector_norm(power, dim=(-2, -1)) ** 0.125


POWERS = 8
CHANCE = 1e-4
"""One matrix in a hundred has a first eigenvector whose square along a random direction is below this, times 1 / k."""


def spectral_bound(matrices: Tensor) -> Tensor:
    """Return at least ``||M||_2`` of symmetric matrices, with a probability of 99%, by 8 products with a random x.

    With the first eigenvector u it is ``|M^8 x| >= ||M||^8 |<u, x>|``. The bound is 1.5 to 2.5 times the norm.
    """
    k = matrices.shape[-1]
    size = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(matrices.dtype).tiny)
    unit, start = matrices / size, probe(k, matrices.dtype, matrices.device)
    x = start.expand(*matrices.shape[:-2], 1, k)
    for _ in range(POWERS):
        x = matmul(x, unit)
    growth = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / torch.linalg.vector_norm(start)
    return (size * (growth * (k / CHANCE) ** 0.5) ** (1 / POWERS))[..., 0, 0]


def spectral_norm_by_powers(
    apply: Callable[[Tensor], Tensor], apply_transposed: Callable[[Tensor], Tensor], start: Tensor
) -> Tensor:
    """Return about ``||N||_2``: a lower bound by four steps of the power method on ``N^T N``, in float64.

    The functions multiply rows ``(*batch, 1, k)`` with N and ``N^T``.
    """

    def length(rows: Tensor) -> Tensor:  # in float64, where no square of a float32 overflows or vanishes
        return torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=True, dtype=torch.float64)

    def unit(rows: Tensor, length: Tensor) -> Tensor:
        return rows / length.clamp(min=torch.finfo(rows.dtype).tiny).to(rows.dtype)

    rows = start
    there = back = length(rows)
    for _ in range(4):
        image = apply(unit(rows, back))
        there = length(image)
        rows = apply_transposed(unit(image, there))
        back = length(rows)
    return (there * back).sqrt()


SAFE_RMS = {torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}
"""Root mean squares between these come from squares that neither vanish nor overflow."""


@functools.lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached, so it must be usable outside of inference mode
def constant(values: tuple[object, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers that are the same at many steps. They go to the device once, and the host does not wait for it."""
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def rms_of(stacks: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the root mean square of each matrix in a list of stacks of matrices, in float64 and at any scale.

    It is not finite where an entry is not.
    """
    if not stacks:
        return torch.zeros(0, dtype=torch.float64, device=device)
    stacks = [stack.view(len(stack), -1) if stack.is_contiguous() else stack for stack in stacks]
    roots = tuple(math.prod(stack.shape[1:]) ** 0.5 for stack in stacks for _ in range(len(stack)))
    norms = [_norms(stack) for stack in stacks]
    lengths, (low, high) = torch.cat(norms).double(), SAFE_RMS[norms[0].dtype]
    rms = lengths / constant(roots, lengths.dtype, lengths.device)
    # Norms on other devices are in float64, which takes no longer there: the host need not wait for their values.
    if rms.device.type == "cpu" and not ((rms > low) & (rms < high)).all():
        lengths = torch.cat([_norms_in_units(stack) for stack in stacks])
        rms = lengths / constant(roots, lengths.dtype, lengths.device)
    return rms


def _norms(stack: Tensor) -> Tensor:
    wide = torch.float32 if stack.device.type == "cpu" else torch.float64
    dtype, norm = promoted(stack.dtype, wide), torch.linalg.vector_norm
    if stack.ndim == 3:
        stack = norm(stack, dim=-1, dtype=dtype)  # with gaps between rows six times quicker than all at once
    return norm(stack, dim=1 if len(stack) > 1 else None, dtype=dtype).view(-1)  # all of a single one is quicker


def _norms_in_units(stack: Tensor) -> Tensor:
    """Return the norms of numbers whose squares vanish or overflow."""
    wide = stack.to(promoted(stack.dtype, torch.float32))
    unit = power_of_two(wide.abs().flatten(1).amax(1))
    return _norms(wide / unit.view(-1, *(1,) * (stack.ndim - 1))).double() * unit


def peaks(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor, on the first one's device; not finite where an entry is not."""
    # A maximum norm takes twenty times as long.
    ends = [end for t in tensors for end in torch.aminmax(t if t.numel() else t.new_zeros(1))]
    device, dtype = tensors[0].device, functools.reduce(promoted, (t.dtype for t in tensors), torch.float32)
    if any(end.device != device or end.dtype != dtype for end in ends):
        ends = [end.to(device, dtype) for end in ends]
    return torch.stack(ends).view(-1, 2).abs().amax(1)
