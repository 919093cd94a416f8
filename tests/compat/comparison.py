"""Tests that run one program with an original and with its drop-in, for the tables of docs/reference/differences.md."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch.utils.checkpoint
from cases import ROOT, assert_same
from side_by_side import values_and_grads
from torch._dynamo.testing import CompileCounterWithBackend

import remat.compat

DIFFERENCES = ROOT / "docs" / "reference" / "differences.md"
NEWER = torch.__version__ >= (2, 13)


class Fails(NamedTuple):
    """The outcome of a program that raises an error."""

    kind: type[BaseException]
    text: str | None = None


libraries = pytest.mark.parametrize("library", ["original", "ours"])
SAME, OTHER = "the result of plain code", "another result"
Outcome = str | Fails


def assert_outcome(outcome: Outcome, program: Callable[[], Any], expected: Any, exact: bool = True) -> None:
    """Assert that a program returns what is expected, returns something else, or raises an error."""
    if isinstance(outcome, Fails):
        with pytest.raises(outcome.kind, match=outcome.text):
            program()
    elif outcome == SAME:
        assert_same(program(), expected, exact)
    else:
        found = program()
        with pytest.raises(AssertionError):
            assert_same(found, expected)


@dataclass(frozen=True)
class Original:
    """A section of the documentation, and what programs get as their first argument: one of three functions."""

    section: str
    original: Callable[[], Any]  # returns the library's function
    ours: Any  # its drop-in
    plain: Any  # the same without checkpointing

    def row(self, *names: str) -> Callable[[Callable], Callable]:
        """Mark a test as one about these rows of the tables."""
        _TESTED.setdefault(self.section, set()).update(names)
        return lambda test: test

    def compared(self, *rows: str, theirs: Outcome = SAME, ours: Outcome = SAME, exact: bool = True) -> Callable:
        """Make a test of a program: with the drop-in and with the original it has these outcomes."""
        self.row(*rows)

        def decorate(program: Callable) -> Callable:
            def test(library: str, **case: Any) -> None:
                self.check(library, lambda call: program(call, **case), theirs, ours, exact)

            first, *rest = inspect.signature(program).parameters.values()
            test.__signature__ = inspect.Signature([first.replace(name="library"), *rest])  # type: ignore[attr-defined]
            test.__name__, test.__doc__, test.__module__ = program.__name__, program.__doc__, program.__module__
            test.pytestmark = getattr(program, "pytestmark", [])  # type: ignore[attr-defined]
            return libraries(test)

        return decorate

    def check(self, library: str, program: Callable, theirs: Outcome, ours: Outcome = SAME, exact: bool = True) -> None:
        """Check the outcome of a program with one of the two libraries."""
        outcome, call = (ours, self.ours) if library == "ours" else (theirs, self.original())
        assert_outcome(outcome, lambda: program(call), program(self.plain), exact)

    def assert_rows_are_tested(self, *modules: str) -> None:
        """Assert that these modules have tests of exactly the rows of the section's tables."""
        for name in modules:
            importlib.import_module(name)
        (text,) = (part for part in DIFFERENCES.read_text().split("\n## ") if part.startswith(self.section))
        tables = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", text + "\n", re.MULTILINE)
        rows = [line.split(" | ")[0].removeprefix("| ") for table in tables for line in table.splitlines()]
        assert sorted(rows) == sorted(_TESTED[self.section])


_TESTED: dict[str, set[str]] = {}


def _call(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function without the options of a checkpoint."""
    return fn(*args, **{name: value for name, value in kwargs.items() if name not in _OPTIONS})


_OPTIONS = {*inspect.signature(remat.compat.checkpoint).parameters, "preserve_rng_state"} - {"function", "args"}


_fairscales = lambda: pytest.importorskip("fairscale.nn.checkpoint.checkpoint_activations").checkpoint_wrapper
_torchs, _ours = (functools.partial(m.checkpoint, use_reentrant=False) for m in (torch.utils.checkpoint, remat.compat))
TORCH = Original("From torch.utils.checkpoint", lambda: _torchs, _ours, _call)
FAIRSCALE = Original("From fairscale", _fairscales, remat.compat.checkpoint_wrapper, lambda module, *_, **__: module)


def checkpoints_in_graph(fn: Callable, *args: Any) -> list[bool]:
    """Compile a function to one graph, and return which of its checkpoint operators are selective."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    found = values_and_grads(torch.compile(fn, backend=counter, fullgraph=True), *args)
    torch._dynamo.reset()
    assert_same(found, values_and_grads(fn, *args), exact=False)
    (graph,) = counter.graphs
    nodes = [node for node in graph.graph.nodes if "tag_activation_checkpoint" in str(node.target)]
    return ["_checkpoint_context_fn" in getattr(graph, node.args[0].target).meta for node in nodes]
