"""Sizes, bytes and FLOPs as text: arithmetic over the dynamic dims of a batch ("batch", "tokens", "source").

Captures and facts carry these texts, so that one capture serves every shape. Evaluating one is exact integer arithmetic
and needs neither torch nor sympy; making one from measurements is the business of `model/facts/fit.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from types import CodeType
from typing import Any

# What sympy writes besides operators.
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": max,
    "Min": min,
    "floor": lambda a: a // 1,
    "Fraction": Fraction,
}
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call,
)  # fmt: skip


def evaluate(expression: str, dims: Mapping[str, int]) -> int:
    """The value of a size, byte or FLOP expression for concrete dims."""
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
