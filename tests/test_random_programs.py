"""Random programs with regions, against the same programs without. `make fuzz` runs more of them."""

import os
import re
import subprocess
import sys

import pytest
from cases import ROOT
from fuzz import outcome
from random_programs.writer import HEAD

COUNT, PART = 2000, 250


@pytest.mark.parametrize("start", range(0, COUNT, PART))
def test_random_programs(start: int) -> None:
    """In processes of their own, as torch itself dies in some programs, such as attention with dropout in `vmap`."""
    command = [sys.executable, "-W", "ignore", "tests/fuzz.py", "--start", str(start), "--count", str(PART)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"'ok': (\d+)", done.stdout)[-1]) > PART / 2, done.stdout


def test_the_check_finds_a_difference() -> None:
    """The check fails for a program whose value is different with regions."""
    program = "def make():\n    return remat(lambda x, y: x.sin() * {}), []\n\ncompare(make, 'backward', exact=True)"
    assert outcome(HEAD + program.format("y.sin()")) is None
    assert outcome(HEAD + program.format("(2.0 if REGIONS[0] else 3.0)")) is not None


# Small programs that were wrong once, by what was wrong.
REDUCED = {
    "A recompute in the middle of a first run got further than the first run, and updated statistics.": """
def make():
    w1 = tensor(2)
    region = remat(nn.Sequential(Counter(), Average(4), nn.BatchNorm1d(4)))
    def whole(a, b):
        start = differentiated_again(lambda p, q: q, b, w1)
        end = dual(lambda p, q: start * 1.5, tensor(4, False), b)
        @remat(early_stop=False)
        def outer(a, b):
            def inside(p):
                region(p)
                return differentiated(lambda p, q: q + p * 0.5, p, p)
            differentiated_again(lambda p, q: inside(q), a, inside(b))
            return w1
        return differentiated(outer, end, end)
    return whole, [w1], [region]
compare(make, 'backward', exact=False)
""",
    "Below the level of `vjp`, an operand was also a captured tensor; only the first run distinguished the two.": """
def make():
    def whole(a, b):
        @remat
        def outer(p, q):
            captured = b
            inner = remat(lambda p, q: [captured, b, p][1:])
            return differentiated_again(inner, p, q)
        return vjp(outer, b, a)[1](b)[0]
    return whole, []
compare(make, 'double', exact=False)
""",
    "A mode multiplied a zero of forward mode by a number, in which torch crashes.": """
def make():
    inner = remat(lambda p, q: vmap(lambda q: p.lerp(q.tanh(), 0.3) * 0.5 + q)(pair(q)).sum(0))
    outer = lambda p, q: added(vjp(lambda p, q: jvp(lambda p: inner(p, q), (p,), (q,))[1], p, q)[1](p))
    return remat(outer, policy=policies.everything_saveable), []
compare(make, 'backward', exact=False)
""",
}


@pytest.mark.parametrize("program", REDUCED.values(), ids=REDUCED)
def test_reduced_programs(program: str) -> None:
    assert outcome(HEAD + program) is None
