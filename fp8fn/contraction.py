"""Contractions of two tensors, such as einsums, as products of two matrices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple


class Product(NamedTuple):
    """The orders of axes that make a contraction a matrix product; `contracted` axes are summed over.

    Order `a` moves the contracted axes of the left operand to its end, `b` those of the right operand to its front.
    Order `out` moves the free axes of both operands to their places in the result. The first `batch` axes of each order
    are those of a batch of products.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    contracted: int
    batch: int = 0

    def repeats(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Whether a contracted or batch axis has size 1 in one of tensors of these shapes, which einsum repeats.

        Symbolic sizes are not compared, because a comparison adds a guard; beside 1 they count as another size.
        """
        left = [a[axis] for axis in self.a[len(self.a) - self.contracted :]]
        right = [b[axis] for axis in self.b[self.batch : self.batch + self.contracted]]
        left += [a[axis] for axis in self.a[: self.batch]]
        right += [b[axis] for axis in self.b[: self.batch]]
        known = ([size for size in pair if isinstance(size, int)] for pair in zip(left, right, strict=True))
        return any(len(set(sizes)) == 2 or sizes == [1] for sizes in known)


def as_product(equation: str, a_ndim: int, b_ndim: int, *, batched: bool = False) -> Product | None:
    """The product that an einsum equation describes; None if it describes another sum, or no product.

    Equations with an axis of both operands and of the result describe a batch, and are taken only if `batched`.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    spare = "".join(letter for letter in string.ascii_letters if letter not in equation)
    lead = spare[: a_ndim - len(terms[0].replace("...", ""))] if "..." in terms[0] else ""
    a, b, out = terms[0].replace("...", lead), terms[1], out.replace("...", lead)
    if (len(a), len(b)) != (a_ndim, b_ndim) or any(len(set(term)) != len(term) for term in (a, b, out)):
        return None
    # Batch and free axes in the result's order: PyTorch's einsum lays its result out by them.
    batch = [axis for axis in out if axis in a and axis in b] if batched else []
    contracted = [axis for axis in a if axis in b and axis not in batch]
    free = [[axis for axis in out if axis in term and axis not in (*batch, *contracted)] for term in (a, b)]
    if not contracted or sorted({*a, *b}) != sorted([*contracted, *out]):
        return None
    return Product(
        a=tuple(map(a.index, batch + free[0] + contracted)),
        b=tuple(map(b.index, batch + contracted + free[1])),
        out=tuple(map((batch + free[0] + free[1]).index, out)),
        contracted=len(contracted),
        batch=len(batch),
    )
