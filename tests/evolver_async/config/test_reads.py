"""A key that the product never reads would have no effect."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from evolver_async.config import Config
from evolver_async.config.values.rules import Open, annotations, item_kind, mark, unwrapped

ROOT = Path(__file__).parents[3]
# of the product: they name, compare and reset keys, and do nothing by them
NO_READERS = ("evolver_async/config/effective/", "evolver_async/config/ablation.py")


def held(kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that hold a section, or a list or mapping of sections, and its class."""
    for name, annotation in annotations(kind).items():
        for section in (unwrapped(annotation), unwrapped(item_kind(annotation))):
            if is_dataclass(section):
                yield name, section
                yield from held(section)


class Reads(ast.NodeVisitor):
    """Attributes that are read, by class of section.

    A name has the sections of its annotations and of what is assigned to it: a variable in its
    file, an attribute everywhere. `getattr` reads every name that is a text of its file.
    """

    def __init__(self) -> None:
        self.attributes: dict[str, set[str]] = defaultdict(set)
        for name, section in held(Config):
            self.attributes[name].add(section.__name__)
        self.classes = {"Config": {"Config"}}
        self.classes |= {section.__name__: {section.__name__} for _, section in held(Config)}
        self.found: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[ast.Module, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def visit_Module(self, node: ast.Module) -> None:
        self.module, self.variables = node, self.modules[node]
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if sections := self.named(base):
                self.classes.setdefault(node.name, sections)
        self.variables["self"] = {*self.classes.get(node.name, ())}
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.variables[node.arg] |= self.named(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.assign(node.target, self.named(node.annotation))
        if isinstance(node.target, ast.Name):  # perhaps a field of a class
            self.attributes[node.target.id] |= self.named(node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for part, value in zip(target.elts, node.value.elts, strict=False):
                    self.assign(part, self.sections(value))
            else:
                self.assign(target, self.sections(node.value))
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self.assign(node.target, self.sections(node.iter))
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            for section in self.sections(node.value):
                self.found[section].add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            for section in self.sections(node.args[0]):
                texts = (n.value for n in ast.walk(self.module) if isinstance(n, ast.Constant))
                self.found[section] |= {text for text in texts if isinstance(text, str)}
        self.generic_visit(node)

    def assign(self, target: ast.AST, sections: set[str]) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] |= sections
        elif isinstance(target, ast.Attribute):
            self.attributes[target.attr] |= sections
        elif isinstance(target, ast.Tuple):
            for part in target.elts:
                self.assign(part, sections)

    def sections(self, node: ast.AST) -> set[str]:
        """Return the classes of sections that the value of an expression can have."""
        match node:
            case ast.Name(id=name):
                return self.variables[name] or self.attributes[name]
            case ast.Attribute(value=value, attr="items" | "values"):
                return self.sections(value)
            case ast.Attribute(attr=name):
                return self.attributes[name]
            case ast.Call(func=value) | ast.Subscript(value=value):
                return self.sections(value)
        return set()

    def named(self, annotation: ast.AST | None) -> set[str]:
        """Return the classes of sections in an annotation."""
        names = ast.walk(annotation) if annotation else ()
        return {
            section
            for one in names
            if isinstance(one, ast.Name)
            for section in self.classes.get(one.id, ())
        }


def test_every_key_is_read_by_the_product() -> None:
    files = [
        path
        for top in ("actors", "learner", "evolver_async")
        for path in (ROOT / top).rglob("*.py")
    ]
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in files
        if not str(path.relative_to(ROOT)).startswith(NO_READERS)
    ]
    reads = Reads()
    for tree in (*trees, *trees):  # a file can come before one whose names it uses
        reads.visit(tree)
    unread = [
        f"{section.__name__}.{field.name}"
        for section in {section for _, section in held(Config)}
        for field in fields(section)
        if field.name not in reads.found[section.__name__]
        # the parameters of a function of the user's, which reads them itself
        and not (field.name == "params" and mark(annotations(section).get("kind"), Open))
    ]
    assert not unread
