"""Sizes, bytes and FLOPs as text: arithmetic over the dynamic dims of a batch ("batch", "tokens", "source").

Captures and facts carry these texts, so that one capture serves every shape. Evaluating one is exact integer arithmetic
and needs neither torch nor sympy. One is made from measurements by solving for the polynomial through a few points in
rational arithmetic, which must also give what was measured at one point more. Pure mathematics.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, cached_property
from itertools import product
from types import CodeType
from typing import Any


def _floor_division(a: Fraction, b: Fraction) -> int:
    return a // b


# What sympy writes besides operators.
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": _floor_division,
    "CleanDiv": _floor_division,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
    "floor": math.floor,
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Fraction": Fraction,
}
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call,
    ast.Compare, ast.cmpop,
)  # fmt: skip


def evaluate(expression: str, dims: Mapping[str, int]) -> int:
    """The value of a size, byte or FLOP expression for concrete dims; of a condition, 1 where it holds, else 0."""
    return int(eval(_compiled(expression), {"__builtins__": {}, **_FUNCTIONS}, dims))


class _ExactDivision(ast.NodeTransformer):
    """`a / b` as a fraction: a float would round beyond 2**53, and FLOPs of a large model are beyond it."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("Fraction", ast.Load()), [node.left, node.right], [])


@cache
def _compiled(expression: str) -> CodeType:
    tree = ast.parse(expression, mode="eval")
    # Expressions are read from files; nothing but arithmetic is run.
    assert all(isinstance(node, _ALLOWED) for node in ast.walk(tree)), f"not an arithmetic expression: {expression}"
    return compile(ast.fix_missing_locations(_ExactDivision().visit(tree)), "<expression>", "eval")


_FIRST = {"batch": 2, "tokens": 16, "source": 19}  # apart from each other, and never 1: sizes of 1 broadcast
_STEP = {"batch": 1, "tokens": 5, "source": 7}  # odd, so that what depends on parity is found out
_DEGREE = {"batch": 1, "tokens": 2, "source": 2}
_FURTHER = 3  # steps to the point at which the polynomial is checked

Exponents = tuple[int, ...]  # one per dim


class Fit:
    """Polynomials linear in "batch" and of total degree 2 in the other dims, known by their values at `points`."""

    def __init__(self, dims: Sequence[str]) -> None:
        self.dims = tuple(dims)
        grid = product(*[range(_DEGREE[dim] + 1) for dim in self.dims])
        self._monomials: list[Exponents] = [e for e in grid if self._total(e) <= 2]

    def _total(self, exponents: Exponents) -> int:
        return sum(e for dim, e in zip(self.dims, exponents, strict=True) if dim != "batch")

    @property
    def points(self) -> list[dict[str, int]]:
        """Where to measure. The steps from the first point are the exponents themselves, so exactly one polynomial
        passes through what is measured; the last point is the one to check it at."""
        steps = [*self._monomials, (_FURTHER,) * len(self.dims)]
        return [
            {dim: _FIRST[dim] + _STEP[dim] * step for dim, step in zip(self.dims, exponents, strict=True)}
            for exponents in steps
        ]

    def polynomial(self, values: Sequence[int]) -> str | None:
        """The expression with these values at `points`; None when there is none with integer coefficients."""
        *known, further = values
        coefficients = [sum((w * v for w, v in zip(row, known, strict=True)), Fraction()) for row in self._inverse]
        terms = {e: int(c) for e, c in zip(self._monomials, coefficients, strict=True) if c}
        at_further = sum(c * self._monomial(e, self.points[-1]) for e, c in terms.items())
        if any(c.denominator != 1 for c in coefficients) or at_further != further:
            return None
        return self._text(terms)

    def _monomial(self, exponents: Exponents, point: Mapping[str, int]) -> int:
        return math.prod(point[dim] ** e for dim, e in zip(self.dims, exponents, strict=True))

    @cached_property
    def _inverse(self) -> list[list[Fraction]]:
        """From values to coefficients: the inverse of the matrix of monomials at points, by Gauss and Jordan."""
        size = len(self._monomials)
        rows = [
            [Fraction(self._monomial(e, point)) for e in self._monomials] + [Fraction(i == j) for j in range(size)]
            for i, point in enumerate(self.points[:size])
        ]
        for column in range(size):
            pivot = next(i for i in range(column, size) if rows[i][column])
            rows[column], rows[pivot] = rows[pivot], rows[column]
            rows[column] = [value / rows[column][column] for value in rows[column]]
            for i in range(size):
                if i != column and (factor := rows[i][column]):
                    rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
        return [row[size:] for row in rows]

    def _text(self, terms: Mapping[Exponents, int]) -> str:
        if not terms:
            return "0"
        ordered = sorted(terms.items(), key=lambda term: (sum(term[0]), term[0]), reverse=True)
        return " + ".join(self._term(exponents, c) for exponents, c in ordered).replace("+ -", "- ")

    def _term(self, exponents: Exponents, coefficient: int) -> str:
        powers = [f"{dim}**{e}" if e > 1 else dim for dim, e in zip(self.dims, exponents, strict=True) if e]
        if not powers or abs(coefficient) != 1:
            return "*".join([str(coefficient), *powers])
        return ("-" if coefficient < 0 else "") + "*".join(powers)
