"""Regions under each parallelism of torch.distributed in two processes, against plain models and torch's checkpoint.

Both processes run all programs of `distributed_programs.py`, once for all tests of this file. Each test reads one
of their results.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ROOT, assert_same

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)
from distributed_programs import PROGRAMS, RANKS, Costs, Result

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]  # the first test waits for all programs

MAIN = "import sys, distributed_programs; distributed_programs.main(sys.argv[1])"
# The way with torch's checkpoint whose costs are the limit.
BOUNDS = {
    "apply": "torch", "apply first": "torch", "apply last": "torch", "apply, products": "torch, products",
    "apply, collectives": "torch, collectives", "called": "torch, called",
    "called, products": "torch, called, products",
}  # fmt: skip
ALL = [(name, way) for name, program in PROGRAMS.items() for way in program.ways]


def each(pairs: Iterable[tuple[str, str]]) -> Any:
    return pytest.mark.parametrize("program, way", [pytest.param(*pair, id=": ".join(pair)) for pair in pairs])


ours = each(pair for pair in ALL if pair[1] in BOUNDS)
torchs = each(pair for pair in ALL if pair[1].startswith("torch"))


def bound_of(program: str, way: str) -> tuple[str, str]:
    """A program and its way with torch's checkpoint. If torch's selective checkpoint fails there, another program's."""
    bound, chosen = BOUNDS[way], PROGRAMS[program]
    if bound in chosen.ways:
        return program, bound
    return (chosen.products_of, bound) if chosen.products_of else (program, "torch")


class Outcomes:
    """The results of the programs in both processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, program: str, way: str) -> list[Any]:
        return [self.read(program, way, rank) for rank in range(RANKS)]

    def read(self, program: str, way: str, rank: int) -> Any:
        path = self.folder / f"{program}, {way}, {rank}"
        assert path.exists(), f"process {rank} ended before this program:\n{(self.folder / 'log').read_text()}"
        found = torch.load(path, weights_only=False)
        assert not isinstance(found, str), f"in process {rank}:\n{found}"
        return found

    def costs(self, program: str, *ways: str) -> Iterator[tuple[Costs, ...]]:
        """For each process the costs of these ways, and last those of the first way's equivalent with torch."""
        results = [self(program, way) for way in ways]
        if ways[0] in BOUNDS:
            results.append(self(*bound_of(program, ways[0])))
        for in_one in zip(*results):
            yield tuple(result.costs for result in in_one)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """One of pytest's worker processes starts the programs, the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.1)
        return Outcomes(folder)
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    try:
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-c", MAIN, str(folder)]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=240)
    finally:
        done.touch()
    return Outcomes(folder)


@ours
def test_losses_and_gradients(outcomes: Outcomes, program: str, way: str) -> None:
    result: Result
    expected: Result
    for result, expected in zip(outcomes(program, way), outcomes(program, "plain")):
        assert_same(result.losses, expected.losses)
        assert_same(result.grads, expected.grads)
        assert len(expected.grads) > 2
        assert result.keys == expected.keys  # so torch.distributed.checkpoint loads each other's checkpoints


@torchs
def test_the_reference_saves_memory_and_recomputes(outcomes: Outcomes, program: str, way: str) -> None:
    for taken, plain in outcomes.costs(program, way, "plain"):
        assert taken.kept < plain.kept or "pipeline" in program
        assert (taken.products > plain.products) is ("products" not in way)
        assert taken.collectives == plain.collectives or "collectives" not in way


@ours
def test_memory(outcomes: Outcomes, program: str, way: str) -> None:
    """Nothing but gradients is left after a step, as without regions."""
    for taken, plain, bound in outcomes.costs(program, way, "plain"):
        assert taken.kept <= bound.kept and taken.left == plain.left
        assert taken.peak < plain.peak
        if BOUNDS[way] in ("torch", "torch, called"):
            assert taken.peak <= 1.1 * bound.peak  # one more gradient of a bias, or a tensor that gloo holds briefly


@ours
def test_products(outcomes: Outcomes, program: str, way: str) -> None:
    for taken, plain, bound in outcomes.costs(program, way, "plain"):
        assert taken.products <= bound.products
        assert (taken.products == plain.products) is ("products" in way)


@ours
def test_collectives(outcomes: Outcomes, program: str, way: str) -> None:
    """They are those of torch's checkpoint; none is repeated if the policy saves the results."""
    other = "plain" if "collectives" in way else "torch, called" if "torch, called" in BOUNDS[way] else "torch"
    for taken, expected, _ in outcomes.costs(program, way, other):
        assert taken.collectives == expected.collectives
        assert taken.collectives.total() > 0
