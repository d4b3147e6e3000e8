"""Options that fairseq evaluates as Python, read as literals only.

Some of fairseq's options are lists or tuples in a string (`adaptive_softmax_cutoff`, fconv's
layers), and `eval` reads them, those of a checkpoint too: a stranger's could run any code.
"""

from __future__ import annotations

import ast
import sys
from typing import Any


def install() -> None:
    """Let `evaluate` stand for `eval` in each of fairseq's modules. Repeatable."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq."):
            module.eval = evaluate  # type: ignore[attr-defined]


def evaluate(text: str) -> Any:
    """The value of `[(512, 3)] * 4 + [(1024, 1)]` and the like: literals, multiplied or added.

    Raises:
        ValueError: it is anything else.
    """
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _value(node.left) * _value(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left) + _value(node.right)
    return ast.literal_eval(node)
