"""The package uses torch's private names in one file only, and all of them exist in this torch."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat._core import private
from remat._core.state import carry

PACKAGE = Path(remat.__file__).parent
OWN = PACKAGE / "_core" / "private.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != OWN)


def tracer() -> Any:
    """The object that traces a graph in Dynamo."""
    found: list[Any] = []

    @torch.compiler.assume_constant_result
    def find() -> int:
        found.append(torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.current_tracer)
        return 0

    torch.compile(lambda x: x + find(), backend="eager")(torch.ones(1))
    return found[0]


# Private attributes of objects, each with an object that has it.
ON_OBJECTS = {
    "_sequence_nr": lambda: torch.ones(1, requires_grad=True).sin().grad_fn,
    "_dynamo_marked_constant": lambda: torch.compiler.assume_constant_result(lambda: None),
    "_torchdynamo_disable": lambda: torch.compiler.disable(lambda: None),
    "_version": lambda: torch.ones(1),
    "_input_versions_at_beginning": tracer,
    "_base": lambda: torch.ones(1),
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_backward_hooks": lambda: torch.ones(1),
    "_post_accumulate_grad_hooks": lambda: torch.ones(1),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.expr) -> str | None:
    """The text of an expression of the form ``a.b.c``, or None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (root := dotted(node.value)) is not None:
        return f"{root}.{node.attr}"
    return None


def torch_aliases(tree: ast.AST) -> dict[str, str]:
    """A file's names for torch's modules and the objects that it imports from them."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def torch_names(tree: ast.AST) -> Iterator[str]:
    """The full names that a file imports or reads from torch, the longest name of each attribute chain."""
    aliases = torch_aliases(tree)
    yield from aliases.values()
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            inner.add(id(node.value))
            name = dotted(node) if id(node) not in inner else None
            root, _, rest = (name or "").partition(".")
            if root in aliases:
                yield f"{aliases[root]}.{rest}"


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def private_ones(names: Iterator[str]) -> list[str]:
    return sorted({name for name in names if any(map(is_private, name.split(".")))})


SOURCE = parsed(OWN)
PRIVATE = private_ones(torch_names(SOURCE))


def find(name: str) -> Any:
    """The object with a dotted name; raises if it doesn't exist."""
    torch.set_default_device(None)  # after a first call, its context has an attribute
    parts, value = name.split("."), torch
    for i in range(1, len(parts)):
        if not hasattr(value, parts[i]):
            import_module(".".join(parts[: i + 1]))
        value = getattr(value, parts[i])
    return value


def test_the_search_finds_names() -> None:
    tree = ast.parse(
        "import torch\nimport torch._a.b as c\nfrom torch.d import _e as f\nfrom x import _y\n"
        "torch.nn.g(torch._C._h.i)(1)._j\nc.k._l\nf\nself._m"
    )
    assert private_ones(torch_names(tree)) == ["torch._C._h.i", "torch._a.b", "torch._a.b.k._l", "torch.d._e"]
    assert len(PRIVATE) > 20


@pytest.mark.parametrize("name", PRIVATE)
def test_private_name_exists(name: str) -> None:
    find(name)


def test_a_missing_name_is_an_error() -> None:
    for name in ("torch._C._autograd._no_such_name", "torch._no_such_module.name"):
        with pytest.raises((AttributeError, ImportError)):
            find(name)


def test_private_attributes_of_objects_exist() -> None:
    aliases = torch_aliases(SOURCE)
    used = set()
    for node in ast.walk(SOURCE):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = (dotted(node) or "").partition(".")[0]
            if root not in aliases:
                used.add(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("attrgetter", "methodcaller"):
            used |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and is_private(arg.value)}
    assert used == set(ON_OBJECTS)
    for name, make in ON_OBJECTS.items():
        assert hasattr(make(), name), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_private_name_elsewhere(path: Path) -> None:
    assert private_ones(torch_names(parsed(path))) == []
    text = path.read_text()
    assert not re.search(r"\btorch(\.\w+)*\._[a-zA-Z]", text)
    assert not re.search(r"^\s*from torch\S* import .*(?<!\w)_[a-zA-Z]", text, re.MULTILINE)
    assert not re.search(r"^\s*from torch(\.\w+)*\._", text, re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_private_attribute_of_tensors_and_nodes_elsewhere(path: Path) -> None:
    used = {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    assert not used & set(ON_OBJECTS)


def test_every_name_of_the_file_is_used() -> None:
    """A new torch version can break the names in this file, so it has no unused ones."""
    texts = [path.read_text() for path in FILES]
    own, body = OWN.read_text(), SOURCE.body
    defined = [
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    defined += [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(defined) > 20
    for name in defined:
        word = re.compile(rf"\b{name}\b")
        used = any(word.search(text) for text in texts) or len(word.findall(own)) > 1
        assert used and hasattr(private, name), name


def test_a_carried_value_has_one_reference() -> None:
    """torch 2.11 steals a reference to the value."""
    value = (object(),)
    before = sys.getrefcount(value)
    for _ in range(3):
        carry("remat.test", value)
        assert sys.getrefcount(value) == before + 1 and private.carried("remat.test") is value
    carry("remat.test", None)
    assert sys.getrefcount(value) == before
