"""The package uses torch's private names in one file only, all of them exist in this torch, and their helpers work."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables import builder
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

import remat
from remat._core import private
from remat._core.state import _carry_in_torch_2_11, carry

PACKAGE = Path(remat.__file__).parent
OWN = PACKAGE / "_core" / "private.py"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != OWN)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> str:
    """The text of an expression of the form `a.b.c`; it starts with a dot if the root is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def torch_names(tree: ast.AST) -> tuple[dict[str, str], set[str]]:
    """A file's own names for what it imports from torch, and the full names of all that it reads there."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            aliases |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in ours}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    chains = [dotted(node).partition(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return aliases, {*aliases.values(), *(f"{aliases[root]}.{rest}" for root, _, rest in chains if root in aliases)}


def private_torch_names(tree: ast.AST) -> list[str]:
    return sorted(name for name in torch_names(tree)[1] if any(map(is_private, name.split("."))))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def private_attributes(tree: ast.AST) -> set[str]:
    """The private attributes of objects that a file reads or sets, also by `attrgetter` and `methodcaller`."""
    aliases, nodes = torch_names(tree)[0], list(ast.walk(tree))
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and dotted(node).split(".")[0] not in aliases]
    calls = [n for n in nodes if isinstance(n, ast.Call) and dotted(n.func) in ("attrgetter", "methodcaller")]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return set(filter(is_private, [*(node.attr for node in reads), *texts]))


SOURCE = parsed(OWN)
PRIVATE, ON_OBJECTS = private_torch_names(SOURCE), private_attributes(SOURCE)


def test_all_private_names_exist() -> None:
    torch.set_default_device(None)  # after a first call, its context has an attribute
    assert len(PRIVATE) > 20
    for name in PRIVATE:
        resolve_name(name)
    for name in ("torch._C._autograd._no_such_name", "torch._no_such_module.name"):
        with pytest.raises(AttributeError):
            resolve_name(name)


def test_dynamo_has_the_attributes_that_are_set() -> None:
    """A missing one that is read is an error in the tests of what reads it."""
    for disable in (torch.compiler.disable, private.never_traced):
        assert hasattr(disable(lambda: None), "_torchdynamo_disable")
    for constant in (torch.compiler.assume_constant_result, private.constant):
        assert hasattr(constant(lambda: None), "_dynamo_marked_constant")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_other_file_uses_private_names(path: Path) -> None:
    tree, text = parsed(path), path.read_text()
    assert private_torch_names(tree) == []
    assert not re.search(r"\btorch(\.\w+)*\._[a-zA-Z]", text)
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not {node.attr for node in reads} & ON_OBJECTS
    assert all(hasattr(private, node.attr) for node in reads if dotted(node) == f"private.{node.attr}")


def test_every_name_of_the_file_is_used() -> None:
    """A new torch version can break the names in this file, so it has no unused ones."""
    text, own = "".join(path.read_text() for path in FILES), OWN.read_text()
    assigned = [target for node in SOURCE.body if isinstance(node, ast.Assign) for target in node.targets]
    defined = [name.id for target in assigned for name in ast.walk(target) if isinstance(name, ast.Name)]
    defined += [node.name for node in SOURCE.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(defined) > 20
    for name in defined:
        word = re.compile(rf"\b{name}\b")
        assert (word.search(text) or len(word.findall(own)) > 1) and hasattr(private, name), name


def test_a_carried_value_has_one_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 steals a reference to the value."""
    value = (object(),)
    before = sys.getrefcount(value)
    for _ in range(3):
        carry("remat.test", value)
        assert sys.getrefcount(value) == before + 1 and private.carried("remat.test") is value
    carry("remat.test", None)
    assert sys.getrefcount(value) == before
    stolen: list[Any] = []
    monkeypatch.setattr(private, "carry", lambda key, value: stolen.append(id(value)))
    _carry_in_torch_2_11("remat.test", value)
    assert stolen == [id(value)] and sys.getrefcount(value) == before + 1


def test_hooks_that_a_tensor_gets_are_called_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    for tensor in (x, y):
        private.set_backward_hooks(tensor, {0: lambda grad: grad * 3})
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [18, 18]


def test_what_tracers_show_and_values_between_modifications() -> None:
    found: list[tuple] = []

    def fn(x: Tensor) -> tuple[Any, Any]:
        y = x.sin()
        before = private.value_now(y)
        y.view(3).mul_(2)
        after = private.value_now(y)
        y.unsqueeze(0).add_(1)
        node = private.traced_node(y)
        found.append((private.tracing(), private.functionalizing(), None if node is None else node.target))
        return (before, after) if before is after else (private.holding(before), private.holding(after))

    x = torch.ones(3)
    fn(x), make_fx(fn)(x), torch.jit.trace(fn, x, check_trace=False)
    assert found == [(False, False, None), (True, False, None), (True, False, None)]
    found.clear()
    results = aot_function(fn, lambda graph, _: graph)(x)
    assert found[0] == (False, True, None) and found[-1] == (True, True, torch.ops.aten.squeeze.dim)
    assert torch.equal(results[0], x.sin()) and torch.equal(results[1], x.sin() * 2) and private.holding(2) == 2


def test_what_dynamo_traces(fresh_dynamo: None) -> None:
    x, graphs = torch.ones(3), list[Any]()

    def count(fn: Callable, *args: Any, **options: Any) -> int:
        graphs.clear()
        torch.compile(fn, backend=lambda graph, _: graphs.append(graph) or graph.forward, **options)(*args)
        return len(graphs)

    skipped, never = private.skipped_unless_inlined(lambda x: x.sin()), private.never_traced(lambda x: x.cos())
    mode = type("Mode", (private.DispatchMode,), {"__torch_dispatch__": lambda self, x: x.sin()})()
    assert count(skipped, x) == count(mode.__torch_dispatch__, x) == 0
    assert count(lambda x: skipped(x) + 1, x, fullgraph=True) == count(lambda x: never(x) + 1, x) == 1
    for fn, error in [(never, "disable"), (lambda x: private.graph_break("a reason"), "a reason")]:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=error):
            count(lambda x: (fn(x), x.exp()), x, fullgraph=True)


def test_dynamo_knows_the_function_that_replaces_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.checkpoint
    monkeypatch.setattr(builder, "is_utils_checkpoint", builder.is_utils_checkpoint)
    monkeypatch.setattr(checkpoint, "checkpoint", len)
    for replaced in (True, False):
        private.let_dynamo_trace_checkpoint(replaced)
        assert builder.is_utils_checkpoint(original if replaced else len)
        assert not builder.is_utils_checkpoint(len if replaced else original)


def test_switches_caches_and_allocations() -> None:
    assert private.checkpoint_switches() == {}
    with checkpoint.set_checkpoint_debug_enabled(False):
        assert private.checkpoint_switches() == {"debug": False}
    private.set_cached_weights(1, (("key", 2),))
    assert private.cached_weights() == (1, (("key", 2),))
    private.set_cached_weights(0, ())
    private.start_recording_allocations()
    x = torch.empty(100)
    for name in ("mark", "other"):
        with torch.profiler.record_function(name):
            pass
    del x
    assert private.recorded_allocations("mark") == [400, None, -400]
    with torch.fx.traceback.preserve_node_meta(), torch.fx.traceback.annotate({"said": 1}):
        assert private.said_of_node() == {"said": 1}
    assert private.said_of_node() == {}
