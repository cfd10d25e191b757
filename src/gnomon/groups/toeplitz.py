"""Triangular Toeplitz matrices: products are convolutions."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..linalg import widen
from .base import Element, Group, positive_size

_SAMPLES = 4
"""Points for each term at which a symbol is evaluated."""


def _fft_product(x: Tensor, y: Tensor, correlate: bool = False) -> Tensor:
    """Return the leading k terms of ``x * y``, or of ``sum_i y_i x_{i+j}`` with ``correlate``, by FFT."""
    k = x.shape[-1]
    if x.numel() == 0 or y.numel() == 0:  # an empty batch, which FFTs refuse
        return x * y
    length = _fast_length(2 * k - 1)  # holds a convolution without wrapping
    x_hat, y_hat = torch.fft.rfft(widen(x), length), torch.fft.rfft(widen(y), length)
    product = torch.fft.irfft(x_hat * (y_hat.conj() if correlate else y_hat), length)
    return product[..., :k].to(x.dtype)


def _symbol(n: Tensor, points: int) -> Tensor:
    """Return the symbol ``sum_j n_j exp(i j w)`` on the half circle, of which a whole one has that many points."""
    length = _fast_length(points)
    if n.numel() == 0:  # an empty batch, which FFTs refuse
        wide = widen(n)
        return torch.zeros(*n.shape[:-1], length // 2 + 1, dtype=wide.dtype.to_complex(), device=n.device)
    return torch.fft.rfft(widen(n), length)


@functools.lru_cache(maxsize=64)
def _fast_length(least: int) -> int:
    """Return the smallest length with no prime factor above 5, for which FFTs are quick, and even."""
    powers = [2**i * 3**j * 5**k for i in range(1, 40) for j in range(6) for k in range(4)]
    return min(length for length in powers if length >= least)


def _reciprocal(a: Tensor) -> Tensor:
    """Return the power series ``1 / a(z)`` to as many terms, by Newton's iteration ``b <- b (2 - a b)``."""
    k = a.shape[-1]
    b, terms = 1 / a[..., :1], 1
    while terms < k:
        terms = min(2 * terms, k)
        b = torch.nn.functional.pad(b, (0, terms - b.shape[-1]))
        b = 2 * b - _fft_product(_fft_product(a[..., :terms], b), b)
    return b


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept, and so fit for every later use
def _diagonal_lengths(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(k, 0, -1, dtype=dtype, device=device)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # kept, and so fit for every later use
def _toeplitz_scales(k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the scaling of coordinates: D_0 = 1 / (2 sqrt k), D_j = 1 / sqrt(2 (k - j))."""
    scales = (2 * _diagonal_lengths(k, torch.float64, device)).rsqrt()
    scales[0] = 0.5 / k**0.5
    return scales.to(dtype)


class Toeplitz(Group):
    """Lower (or upper) triangular Toeplitz matrices, stored as the first column (or row).

    Abelian: transport is the identity. A product costs O(k log k), an inverse a few products.
    """

    trivial_transport = True

    def __init__(self, k: int, upper: bool = False) -> None:
        self.k = k = positive_size("k", k)
        self.upper = upper
        self.shapes = ((k,),)
        self.dim = k

    def _arguments(self) -> str:
        return f"{self.k}, upper=True" if self.upper else str(self.k)

    def mul(self, a: Element, b: Element) -> Element:
        return (_fft_product(a[0], b[0]),)

    def apply(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return _fft_product(rows, a[0].unsqueeze(-2), correlate=transpose != self.upper)

    def move(self, a: Element, n: Element, order: int | None = None, left: bool = False) -> Element:
        if order != 2 or a[0].numel() == 0:
            return super().move(a, n, order, left)
        # A + A (N + N^2 / 2), by transforms that are long enough for three factors: three of them, not six.
        length = _fast_length(3 * self.k - 2)
        a_hat, n_hat = torch.fft.rfft(widen(a[0]), length), torch.fft.rfft(widen(n[0]), length)
        change = torch.fft.irfft(a_hat * torch.addcmul(n_hat, n_hat, n_hat, value=0.5), length)
        return (a[0] + change[..., : self.k].to(a[0].dtype),)

    # Inverses of power series lose digits: in float64, rounded once.
    def apply_inverse(self, a: Element, rows: Tensor, transpose: bool = False) -> Tensor:
        return self.apply((_reciprocal(a[0].double()),), rows.double(), transpose).to(rows.dtype)

    def ldiv(self, a: Element, b: Element) -> Element:
        return (_fft_product(_reciprocal(a[0].double()), b[0].double()).to(b[0].dtype),)

    def logabsdet(self, a: Element) -> Tensor:
        return self.k * a[0][..., 0].abs().log()

    def restrict(self, x: Tensor, y: Tensor) -> Element:
        below, right = (y, x) if self.upper else (x, y)
        # The rows are added up before they are rounded.
        return (_fft_product(widen(below), widen(right), correlate=True).sum(-2).to(x.dtype),)

    def pullback(self, a: Element, grad: Element, left: bool = False) -> Element:
        return (_fft_product(grad[0], a[0], correlate=True),)

    def scale(self, eta: Element) -> Element:
        return (eta[0] * _toeplitz_scales(self.k, eta[0].dtype, eta[0].device),)

    def unscale(self, n: Element) -> Element:
        return (n[0] / _toeplitz_scales(self.k, n[0].dtype, n[0].device),)

    def dual(self, n: Element) -> Element:
        return (n[0] * _diagonal_lengths(self.k, n[0].dtype, n[0].device),)

    def trace(self, covector: Element) -> Tensor:
        return covector[0][..., 0].clone()

    def square_diagonal(self, a: Element) -> Tensor:
        sums = a[0].square().cumsum(-1)
        return sums.flip(-1) if self.upper else sums

    def norm_estimate(self, n: Element) -> Tensor:
        """Return the largest magnitude of the symbol ``sum_j n_j exp(i j w)``, which bounds the norm from above."""
        return _symbol(n[0], 4 * self.k).abs().amax(-1).to(n[0].dtype)

    def stretch(self, eta: Element) -> Tensor:
        """Return a bound on the stretch, little above it, from twice the real part of the symbol."""
        return self._stretch(eta, _SAMPLES)

    def quick_stretch(self, eta: Element) -> Tensor:
        """Return a bound of at most twice the stretch, from fewer points."""
        return self._stretch(eta, 3)

    def _stretch(self, eta: Element, samples: int) -> Tensor:
        """Return a bound on the stretch from the symbol at ``samples k`` points.

        Between the points a symbol is at most ``1 / cos(pi / samples)`` times as large as at them.
        """
        symbol = _symbol(self.scale(eta)[0], samples * self.k).real
        largest = torch.maximum(symbol.amax(-1), -symbol.amin(-1))
        return (2 / math.cos(math.pi / samples) * largest).to(eta[0].dtype)

    @property
    def transposed(self) -> Group:
        return Toeplitz(self.k, not self.upper)

    def transpose(self, a: Element) -> Element:
        return a

    def to_dense(self, a: Element) -> Tensor:
        i = torch.arange(self.k, device=a[0].device)
        offset = i.unsqueeze(-1) - i
        lower = a[0][..., offset.clamp(min=0)] * (offset >= 0)
        return lower.mT if self.upper else lower

    def from_dense(self, matrix: Tensor) -> Element:
        lower = matrix.mT if self.upper else matrix
        means = [lower.diagonal(-j, dim1=-2, dim2=-1).mean(-1) for j in range(self.k)]
        return (torch.stack(means, -1),)

    def from_diagonal(self, diagonal: Tensor) -> Element:
        first = diagonal.mean(-1, keepdim=True)
        return (torch.nn.functional.pad(first, (0, self.k - 1)),)

    def factor(self, tau: Tensor) -> Element:
        if self.upper:
            return self.from_dense(torch.linalg.cholesky(tau.flip(-1, -2)).flip(-1, -2))
        return self.from_dense(torch.linalg.cholesky(tau))
