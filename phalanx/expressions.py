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
_STEP = {"batch": 1, "tokens": 5, "source": 7, "whole_tokens": 3}  # odd, so that what depends on parity is found out
_FURTHER = 3  # steps to the point at which the polynomial is checked

Part = tuple[str, int]  # a dim, and in how many equal parts it is cut, the last ones padded
Monomial = tuple[tuple[int, ...], Part | None]  # an exponent per dim, times the length of a part
Terms = Mapping[Monomial, Fraction]


class Fit:
    """Polynomials linear in "batch" and of total degree 2 in the other dims, known by their values at `points`.

    parts: lengths of parts of dims, in which they are linear too. multiple: what every batch is a multiple of, so that
    its parts count whole samples.
    """

    def __init__(self, dims: Sequence[str], parts: Sequence[Part] = (), multiple: int = 1) -> None:
        self.dims, self._multiple = tuple(dims), multiple
        self._reach = _FURTHER + len(parts)
        grid = product(*[range(2 if dim == "batch" else 3) for dim in self.dims])
        self._monomials: list[Monomial] = [(e, None) for e in grid if self._total(e) <= 2]
        samples = [e for e, _ in self._monomials if not self._total(e)]
        self._monomials += [(e, part) for part in parts if part[0] in self.dims for e in samples]

    def _total(self, exponents: Sequence[int]) -> int:
        return sum(e for dim, e in zip(self.dims, exponents, strict=True) if dim != "batch")

    @cached_property
    def points(self) -> list[dict[str, int]]:
        """Where to measure: as few and as small as tell all polynomials apart, and one more to check at."""
        found: list[dict[str, int]] = []
        rows: list[list[Fraction]] = []
        steps = product(*[range(2 if dim == "batch" else self._reach) for dim in self.dims])
        for candidate in sorted(steps, key=lambda steps: (sum(steps), steps)):
            point = self._point(candidate)
            row = _reduced([Fraction(self._value(m, point)) for m in self._monomials], rows)
            if any(row):
                rows.append(row)
                found.append(point)
        assert len(found) == len(self._monomials), f"no points tell polynomials of {self.dims} apart"
        return [*found, self._point([self._reach] * len(self.dims))]

    def _point(self, steps: Sequence[int]) -> dict[str, int]:
        # What a slice is cut from is longer than any slice.
        first = _FIRST | {"whole_tokens": _FIRST["tokens"] + _STEP["tokens"] * (self._reach + 1)}
        sizes = {dim: first[dim] + _STEP[dim] * n for dim, n in zip(self.dims, steps, strict=True)}
        return {dim: size * self._multiple if dim == "batch" else size for dim, size in sizes.items()}

    def polynomial(self, values: Sequence[int]) -> str | None:
        """The expression with these values at `points`; None when there is none with integer values."""
        terms = self.terms(values)
        return None if terms is None else self._text(terms)

    def largest(self, values: Sequence[Sequence[int]]) -> str | None:
        """An expression for the largest of several quantities, of each the values at `points`. Whatever has smaller
        coefficients than another is left out, so that few remain."""
        found = [self.terms(own) for own in dict.fromkeys(map(tuple, values))]
        if any(terms is None for terms in found):
            return None
        polynomials: list[Terms] = sorted((t for t in found if t is not None), key=self._at_check, reverse=True)
        kept: list[Terms] = []
        for own in polynomials:
            if not any(all(c <= other.get(m, 0) for m, c in own.items()) and all(
                    c >= own.get(m, 0) for m, c in other.items()) for other in kept):  # fmt: skip
                kept.append(own)
        texts = [self._text(terms) for terms in kept] or ["0"]
        return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"

    def scaled(self, values: Sequence[int], divisor: int) -> str | None:
        """The polynomial divided by a number, its coefficients rounded."""
        terms = self.terms(values)
        if terms is None:
            return None
        return self._text({m: Fraction(number) for m, c in terms.items() if (number := round(c / divisor))})

    def terms(self, values: Sequence[int]) -> Terms | None:
        """The coefficients of the polynomial with these values; None where there is none."""
        *known, further = values
        coefficients = [sum((w * v for w, v in zip(row, known, strict=True)), Fraction()) for row in self._inverse]
        terms = {m: c for m, c in zip(self._monomials, coefficients, strict=True) if c}
        if any(self._multiple % c.denominator for c in terms.values()) or self._at_check(terms) != further:
            return None
        return terms

    def _at_check(self, terms: Terms) -> Fraction:
        return sum((c * self._value(m, self.points[-1]) for m, c in terms.items()), Fraction())

    def _value(self, monomial: Monomial, point: Mapping[str, int]) -> int:
        exponents, part = monomial
        length = -(-point[part[0]] // part[1]) if part else 1
        return length * math.prod(point[dim] ** e for dim, e in zip(self.dims, exponents, strict=True))

    @cached_property
    def _inverse(self) -> list[list[Fraction]]:
        """From values to coefficients: the inverse of the matrix of monomials at points, by Gauss and Jordan."""
        size = len(self._monomials)
        rows = [
            [Fraction(self._value(m, point)) for m in self._monomials] + [Fraction(i == j) for j in range(size)]
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

    def _text(self, terms: Terms) -> str:
        if not terms:
            return "0"

        def order(term: tuple[Monomial, Fraction]) -> tuple[object, ...]:
            (exponents, part), _ = term
            return sum(exponents) + (part is not None), exponents, part or ("", 0)

        ordered = sorted(terms.items(), key=order, reverse=True)  # pyright: ignore[reportArgumentType]
        return " + ".join(self._term(monomial, c) for monomial, c in ordered).replace("+ -", "- ")

    def _term(self, monomial: Monomial, coefficient: Fraction) -> str:
        exponents, part = monomial
        powers = [f"{dim}**{e}" if e > 1 else dim for dim, e in zip(self.dims, exponents, strict=True) if e]
        powers += [f"(({part[0]} + {part[1] - 1})//{part[1]})"] if part else []
        number, divisor = coefficient.numerator, f"/{coefficient.denominator}" if coefficient.denominator > 1 else ""
        if not powers or abs(number) != 1:
            return "*".join([str(number), *powers]) + divisor
        return ("-" if number < 0 else "") + "*".join(powers) + divisor


def _reduced(row: list[Fraction], others: Sequence[list[Fraction]]) -> list[Fraction]:
    """What of a row is no sum of others, each of which was reduced by those before it."""
    for other in others:
        column = next(i for i, value in enumerate(other) if value)
        if row[column]:
            factor = row[column] / other[column]
            row = [a - factor * b for a, b in zip(row, other, strict=True)]
    return row
