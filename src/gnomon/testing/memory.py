"""Checks of batches, dtypes, memory and derivatives: what a call takes, gives and leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..groups import Element, Group
from .elements import near_identity, random_algebra, random_blocks
from .verdict import close, owner, require

Operation = Callable[[Group, Element, Element, Tensor], Element]

OPERATIONS: dict[str, Operation] = {
    "identity_like": lambda group, a, n, x: group.identity_like(a),
    "mul": lambda group, a, n, x: group.mul(a, n),
    "apply": lambda group, a, n, x: (group.apply(a, x), group.apply(a, x, transpose=True)),
    "ldiv": lambda group, a, n, x: group.ldiv(a, n),
    "to_dense": lambda group, a, n, x: (group.to_dense(a),),
    "from_dense": lambda group, a, n, x: group.from_dense(group.to_dense(a)),
    "from_diagonal": lambda group, a, n, x: group.from_diagonal(x[..., 0, :].abs() + 1),
    "apply_inverse": lambda group, a, n, x: (group.apply_inverse(a, x), group.apply_inverse(a, x, transpose=True)),
    "logabsdet": lambda group, a, n, x: (group.logabsdet(a),),
    "restrict": lambda group, a, n, x: group.restrict(x, 2 * x),
    "pullback": lambda group, a, n, x: group.pullback(a, n) + group.pullback(a, n, left=True),
    "dual": lambda group, a, n, x: group.dual(n),
    "scale": lambda group, a, n, x: group.scale(n),
    "unscale": lambda group, a, n, x: group.unscale(n),
    "gram": lambda group, a, n, x: group.gram(a, x),
    "trace": lambda group, a, n, x: (group.trace(n),),
    "squared_norm": lambda group, a, n, x: (group.squared_norm(a),),
    "square_diagonal": lambda group, a, n, x: (group.square_diagonal(a),),
    "metric_dual": lambda group, a, n, x: group.metric_dual(tuple(block.clone() for block in group.restrict(x, x))),
    "bracket": lambda group, a, n, x: group.bracket(n, a),
    "norm_bound": lambda group, a, n, x: (group.norm_bound(n),),
    "norm_estimate": lambda group, a, n, x: (group.norm_estimate(n),),
    "reach": lambda group, a, n, x: (group.reach(n),),
    "stretch": lambda group, a, n, x: (group.stretch(n),),
    "exp": lambda group, a, n, x: group.exp(n, 1) + group.exp(n, 2) + group.exp(n),
    "move": lambda group, a, n, x: group.move(a, n, 2) + group.move(a, n, 2, left=True),
    "retract": lambda group, a, n, x: group.retract(a, n, 2),
    "transpose": lambda group, a, n, x: group.transpose(a),
    "times_square": lambda group, a, n, x: (group.times_square(group.squared(a), x),),
    "apply_squared": lambda group, a, n, x: (group.apply_squared(a, x),),
}
"""One call of each operation for an element, an algebra element and rows, of which the first is the member's."""
FRESH = ("mul", "pullback", "scale", "bracket", "times_square", "apply_squared")
"""Operations whose results are changed in place."""


def _arguments(group: Group, batch: tuple[int, ...], device: torch.device | str) -> tuple[Element, Element, Tensor]:
    rows = torch.randn(*batch, 3, group.k, dtype=torch.float64, device=device)
    return near_identity(group, batch, device), random_algebra(group, batch, device=device), rows


def check_batch(group: Group, batch_shape: tuple[int, ...], device: torch.device | str = "cpu") -> None:
    """Check that a batch gives what a loop over its elements gives."""
    a, n, x = _arguments(group, batch_shape, device)
    indices = torch.cartesian_prod(*(torch.arange(size) for size in batch_shape)).reshape(-1, len(batch_shape)).tolist()
    for name, operation in {**OPERATIONS, "length": _length}.items():
        together = operation(group, a, n, x)
        for i in map(tuple, indices):
            alone = operation(group, tuple(b[i] for b in a), tuple(b[i] for b in n), x[i])
            for batched, single in zip(together, alone, strict=True):
                right = batched.shape == (*batch_shape, *single.shape)
                shapes = f"has shape {tuple(batched.shape)}, and {tuple(single.shape)} alone"
                require(group, name, right, f"{name} of a batch {batch_shape} {shapes}")
                close(group, name, batched[i], single, what=f"{name} of a batch")
    y = torch.randn(4, *batch_shape, group.k, dtype=torch.float64, device=device)
    A = group.to_dense(a)
    samples = (A @ y.unsqueeze(-1)).squeeze(-1)
    close(group, "matvec", group.matvec(a, y), samples, what="matvec of samples of a batch")
    one = y[(0,) * (len(batch_shape) + 1)]
    close(group, "matvec", group.matvec(a, one), A @ one, what="matvec of one vector for a batch")


def _length(group: Group, a: Element, n: Element, x: Tensor) -> Element:
    return (group.length(n),)  # in float64 whatever the dtype, so that it is no part of OPERATIONS


def check_dtype(group: Group, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Check that precision and device are kept, and that results agree with float64 to the precision."""
    a, n, x = _arguments(group, (), device)
    a, n, x = tuple(block.to(dtype) for block in a), tuple(block.to(dtype) for block in n), x.to(dtype)
    wide_a, wide_n = tuple(block.double() for block in a), tuple(block.double() for block in n)
    for name, operation in OPERATIONS.items():
        wanted = operation(group, wide_a, wide_n, x.double())
        for block, exact in zip(operation(group, a, n, x), wanted, strict=True):
            require(group, name, block.dtype == dtype, f"{name} turns {dtype} into {block.dtype}")
            here = block.device.type == torch.device(device).type
            require(group, name, here, f"{name} moves to {block.device}")
            tolerance = 64 * torch.finfo(dtype).eps
            close(group, name, block.double(), exact, what=f"{name} in {dtype}", tolerance=tolerance)


def check_memory(group: Group, device: torch.device | str = "cpu") -> None:
    """Check that operations leave their arguments as they are.

    Results that the library changes in place must be fresh.
    """
    a, n, x = _arguments(group, (2,), device)
    places = {t.untyped_storage().data_ptr() for t in (*a, *n, x)}
    for name in OPERATIONS:
        results = check_arguments_are_kept(group, name, a, n, x)
        if name in FRESH:
            fresh = all(block.untyped_storage().data_ptr() not in places for block in results)
            require(group, name, fresh, f"{name} gives a result in the memory of its arguments")


def check_arguments_are_kept(group: Group, name: str, a: Element, n: Element, x: Tensor) -> Element:
    """Return the results of an operation, and check that it does not change its arguments."""
    before = [t.clone() for t in (*a, *n, x)]
    results = OPERATIONS[name](group, a, n, x)
    same = all(torch.equal(old, new) for old, new in zip(before, (*a, *n, x), strict=True))
    require(group, name, same, f"{name} changes its arguments")
    return results


def check_squares(group: Group, device: torch.device | str = "cpu") -> None:
    """Check ``A A^T x`` with and without ``overwrite`` and ``scratch``, for rows in both layouts, and for batches."""
    for batch in ((2,), (), (2, 3)):
        a = near_identity(group, batch, device)
        A = group.to_dense(a)
        square = group.squared(a)
        leading = all(tuple(block.shape[: len(batch)]) == batch for block in square)
        require(group, "squared", leading, f"squared of a batch {batch} does not have its dimensions in front")
        for transposed in (False, True):
            rows = torch.randn(*batch, 5, group.k, dtype=torch.float64, device=device)
            wanted = rows @ A @ A.mT
            lay = functools.partial(_laid_out, transposed=transposed)
            _check_products(group, lay, square, rows, wanted)
            for overwrite in (False, True):
                given = lay(rows)
                what = f"apply_squared(overwrite={overwrite})"
                close(group, "apply_squared", group.apply_squared(a, given, overwrite), wanted, what=what)
                kept = overwrite or torch.equal(given, rows)
                require(group, "apply_squared", kept, f"{what} changes the rows")


def _laid_out(x: Tensor, transposed: bool) -> Tensor:
    """Return a copy, in memory as a transposed matrix or as a plain one."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT if transposed else x.clone()


def _check_products(
    group: Group, lay: Callable[[Tensor], Tensor], square: Element, rows: Tensor, wanted: Tensor
) -> None:
    """Check every way to call ``times_square``, for rows of one layout."""
    before = [block.clone() for block in square]
    for overwrite in (False, True):
        for scratch in (None, lay(torch.full_like(rows, torch.nan))):
            given = lay(rows)
            result = group.times_square(square, given, overwrite, scratch)
            memory = "" if scratch is None else ", with scratch"
            what = f"times_square(overwrite={overwrite}{memory})"
            others = ("squared",) if owner(group, "squared") else ()  # times_square takes what squared gives
            close(group, "times_square", result, wanted, *others, what=what)
            same = all(torch.equal(old, new) for old, new in zip(before, square, strict=True))
            require(group, "times_square", same, f"{what} changes the square")
            if not overwrite:
                require(group, "times_square", torch.equal(given, rows), f"{what} changes the rows")
                apart = result.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                require(group, "times_square", apart, f"{what} gives a result in the memory of the rows")


# ---------------------------------------------------------------------- derivatives
DIFFERENTIATED = (
    *("mul", "apply", "ldiv", "to_dense", "apply_inverse", "logabsdet", "squared_norm", "square_diagonal"),
    "apply_squared",
)
"""Operations that losses of points and mixtures contain."""


def check_gradients(group: Group, device: torch.device | str = "cpu") -> None:
    """Check that elements and vectors are differentiable through what losses use."""
    a, b = near_identity(group, (2,), device), random_blocks(group, (2,), device)
    x = torch.randn(2, 3, group.k, dtype=torch.float64, device=device)
    inputs = tuple(t.requires_grad_() for t in (*a, *b, x))
    count = len(a)
    for name in DIFFERENTIATED:

        def call(*tensors: Tensor, name: str = name) -> Element:
            return OPERATIONS[name](group, tensors[:count], tensors[count:-1], tensors[-1])

        require(group, name, _has_gradient(call, inputs), f"gradients through {name} are wrong")


def _has_gradient(call: Callable[..., Element], inputs: Element) -> bool:
    try:
        return torch.autograd.gradcheck(call, inputs, raise_exception=False, fast_mode=True)
    except (RuntimeError, ValueError):  # nothing depends on the inputs, or an input was changed in place
        return False
