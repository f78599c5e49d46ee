"""Scorer of reasoning-gym's answers: a program of the sandbox, into which it is sent as text.

Scorers of some datasets evaluate the answer as Python. The sandbox contains what it does, but it
could still print its own score. So `eval` takes expressions alone here: literals and operators,
and where a caller gives it names, as sympy does, sympy's numbers, symbols and functions.
"""

import ast
import builtins
import importlib
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any

READY = "the question is there"  # the line before all that the scorer prints
FUNCTIONS = ("abs", "cbrt", "pow", "real_root", "root", "round", "sqrt")
# Of sympy: what its parser makes, and what a dataset's own answers hold.
MAKERS = ("Symbol", "Integer", "Float", "Rational", "Integral")
OPEN = ("Function", "WildFunction")  # those of sympy's functions that become any other
TEXT = re.compile(r"[\w.+-]*")  # that sympy gets: a name or a number
EXPRESSIONS = (ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare)
EXPRESSIONS += (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.operator, ast.unaryop, ast.boolop)
EXPRESSIONS += (ast.cmpop, ast.Load)


def evaluate(text: str, names: Any = None, local: Any = None) -> Any:
    """Evaluate an expression as `eval` does; ValueError for one that could run other code."""
    tree = ast.parse(text.strip(), mode="eval")
    known = None if names is None else {**names, **(local or {})}
    for node in ast.walk(tree):
        if not allowed(node, known):
            raise ValueError(f"{type(node).__name__} is not evaluated")
    return builtins.eval(compile(tree, "answer", "eval"), names or {}, local)


def allowed(node: ast.AST, known: Mapping[str, Any] | None) -> bool:
    """Return True for a part of an expression that runs no code but sympy's with these names."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Name):
        return known is not None and computes(node.id, known.get(node.id))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and known is not None:
        return TEXT.fullmatch(node.value) is not None
    return isinstance(node, EXPRESSIONS)


def computes(name: str, value: Any) -> bool:
    """Return True if the value of a name is a number, a symbol or a function of sympy."""
    sympy: Any = sys.modules["sympy"]  # from which the names are
    if isinstance(value, type):
        function = issubclass(value, sympy.core.function.Application) and name not in OPEN
        return function or name in MAKERS
    return name in FUNCTIONS or isinstance(value, sympy.Basic)


def confine_evaluation() -> None:
    """Give reasoning-gym and sympy the `eval` of this module."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "reasoning_gym" or name == "sympy.parsing.sympy_parser":
            module.__dict__["eval"] = evaluate


def score(answer: str, entry: str, dataset: str, seed: int, kwargs: dict[str, Any]) -> None:
    """Print READY, then, as the last line, the score of an answer to `entry`, a literal; null for
    an answer that cannot be read."""
    reasoning_gym = importlib.import_module("reasoning_gym")
    questions = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **kwargs)
    asked = ast.literal_eval(entry)
    confine_evaluation()
    print(f"\n{READY}")
    try:
        found = float(questions.score_answer(answer, asked))
    except (Exception, SystemExit):
        found = math.nan
    print(f"\n{json.dumps(found if math.isfinite(found) else None)}")
