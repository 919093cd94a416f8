"""Random programs with regions, against the same programs without. `make fuzz` runs more of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import outcome
from random_programs.compare import Unrunnable

COUNT, PART = 2000, 250
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", range(0, COUNT, PART))
def test_random_programs(start: int) -> None:
    """In processes of their own, as torch itself dies in some programs, such as attention with dropout in `vmap`."""
    options = ["--start", str(start), "--count", str(PART), "--chunk", "50", "--patience", "0"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "fuzz.py", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"'ok': (\d+)", done.stdout)[-1]) > PART / 2, done.stdout


PROGRAM = """
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    @remat
    def f(x, y):
        t = x.sin()
        return t * {value}
    return f, []


compare(make, 'backward', exact=True)
"""


def test_the_check_finds_a_difference() -> None:
    """The check fails for a program whose value is different with regions."""
    assert outcome(PROGRAM.format(value="y.sin()")) is None
    assert outcome(PROGRAM.format(value="(2.0 if REGIONS[0] else 3.0)")) is not None


# The values that inner regions handed over depended on which tensors were still alive.
REFERRED_TO = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)
    w2 = tensor(3)
    layer = nn.Sequential(Counter(), Average(), nn.BatchNorm1d(4))

    def whole(a, b):
        @remat
        def middle(a, *, b):
            first = w1.softmax(-1)
            first + first * 0.5

            @remat(policy=policies.everything_saveable)
            def inner(a, b):
                w1.tril() + w1.triu()
                t = a
                for v in (b, a):
                    step = remat(lambda p: (p * v).tanh() @ v, policy=policies.save_ops("aten.sin", "aten.mul"))
                    t = step(t)
                return w2, w2

            inner(a, first)
            again = differentiated(lambda p, q: sum(inner(p, q)), w1, w1)
            return again, again

        differentiated_again(lambda p, q: sum(middle(p, b=q)), w1, w1)
        return layer(a)

    return whole, [w1, w2], [layer]


recomputes_no_more(make, policies.save_convolutions, ~policies.save_ops("aten.add", "aten.tanh"))
"""

# A call of a function can't run under saved-tensor hooks, though an earlier call could.
FOUND_LATE = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)
    w2 = tensor(3)
    constant = tensor(4, False)

    @remat
    def outer(a, b):
        t = F.conv2d(constant[None, None], w1[None, None, :3, :3], padding=1)[0, 0].tanh()

        @remat
        def inner(p, q):
            differentiated(lambda a, b: b + a * 0.5, w2, q)
            return w2

        inner(t, constant)
        return dual(inner, constant, a)

    return outer, [w1, w2], []


compare(make, 'hooks around', exact=True)
"""

# A recompute in the middle of a first run got further than the first run, and updated statistics.
TOO_FAR = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)
    region = remat(nn.Sequential(Counter(), Average(), nn.BatchNorm1d(4)))

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
"""


# Below the level of `vjp`, an operand was also a captured tensor; only the first run distinguished the two.
APART = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


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
"""

# A recompute inside a traced region made a call that the first one had not made.
TRACED = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)

    def whole(a, b):
        @remat
        def outer(p, q):
            @remat(policy=~policies.save_ops("aten.add"))
            def middle(p, q):
                inner = remat(lambda p, q: q)
                jacfwd(inner)(q, p)
                return [b.sin(), b.sin()]
            return differentiated_again(middle, q, a)
        return vjp(outer, w1, b)[0]
    return whole, [w1]


compare(make, 'two calls', exact=False)
"""

# An operation that a replay had postponed was recorded in the log of `debug=True` when it finally ran.
PUT_OFF = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)
    w2 = tensor(3)
    def f1(a, b):
        t2, t3 = a, b
        @remat(policy=policies.everything_saveable & ("aten.mul_", "aten.copy_"))
        def f4(a, *, b):
            t5, t6 = a, b
            @remat(policy=policies.nothing_saveable, debug=True)
            def f7(a, *, b):
                t10 = t6 * 0.5
                @remat(policy=chosen(4), determinism_check='values')
                def f11(a, b):
                    t16 = torch.addmm(t10, t10, t10)
                    return {'h': t16, 'n': [t16]}
                t18 = (lambda p, q: f11(p, q)['h'])(t10, b)
                t19 = t10.sin()
                return {'h': t19, 'n': [t10]}
            call = lambda p, q: f7(p, b=q)['h']
            t20 = grad(lambda p, q: (lambda r: (r.sum(), r))(call(p, q)), has_aux=True)(t6, t2)
            return t20
        return added(vmap(lambda p, q: f4(p, b=q))(pair(t2), pair(t2)))
    return f1, [w1, w2]


compare(make, 'three calls', exact=False)
"""

# The log of `debug=True` recorded a recompute of the outer region, which happens only in a first run.
AROUND = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    def whole(a, b):
        @remat
        def outer(p, q):
            @remat(debug=True)
            def middle(p, q):
                inner = remat(lambda r: differentiated_again(lambda s, t: s * t, b, r))
                return inner(p) + p.relu()
            return differentiated_again(middle, p, p)
        return outer(a, b)
    return whole, []


compare(make, 'backward', exact=False)
"""

# Two equal chains of operations, where the region overwrites one result: a recompute mistook one for the other.
EQUAL = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    w1 = tensor(2)
    w2 = tensor(3)
    constant = tensor(4, False)
    @remat(policy=(policies.everything_saveable & ~policies.save_ops("aten.add", "aten.tanh")))
    def f1(a, b):
        t2, t3 = a, b
        def f4(a, b):
            t5, t6 = a, b
            t7 = t3.sin()
            def f8(tree, flag=True):
                t9, t10 = tree['a'], tree['b'][0]
                def f11(a, b):
                    t12, t13 = a, b
                    t14 = t12
                    t15 = t13
                    for v16 in (t5, t14):
                        f16 = remat(lambda p: (p * v16).tanh() @ v16, debug=True)
                        t15 = f16(t15)
                    t17 = t13
                    return t17
                t18 = grad(lambda p, q: f11(p, q).sum())(t10, t5)
                checkpoint_name(t7, "other")
                t19 = t5 @ t10 * 0.3
                @remat(policy=policies.everything_saveable, early_stop=False)
                def f20(a, *, b):
                    t21, t22 = a, b
                    t23 = t22
                    for v24 in (t22, t10):
                        f24 = remat(lambda p: (p * v24).tanh() @ v24, policy=policies.save_if(chosen(89)))
                        t23 = f24(t23)
                    t23[:, 1] *= 2
                    t25 = t18 + t21 * 0.5
                    return {'h': t25, 'n': [t25]}
                t26 = added(vjp((lambda p, q: f20(p, b=q)['h']), t9, t6)[1](t9.cos()))
                t27 = t19 * torch.bernoulli(torch.full((4, 4), 0.5))
                t28 = t27
                return {'h': t28, 'n': [t9]}
            t29 = added(vjp((lambda p, q: f8({'a': p, 'b': [q, None, 2.0, 'text']})['h']), t6, t7)[1](t6.cos()))
            t30 = F.linear(t7, w1, t7[0]).tanh()
            t31 = t5 + t7 * 0.5
            return t31
        t32 = f4(constant, w1)
        t33 = jvp(lambda p: f4(p, t32), (t32,), (t32,))[1]
        box34 = {'w': t32}
        t35 = box34['w'] + t33 * 0.5
        return t35
    return f1, [w1, w2]


compare(make, 'twice', exact=False)
"""

# Under a dispatch mode, torch crashed where it multiplied the zeros of forward mode, which have no memory.
ZEROS = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    constant = tensor(4)

    @remat(policy=policies.budget(0.7))
    def f1(a, b):
        t = (a.amax() * constant).squeeze()
        return F.scaled_dot_product_attention(constant, t, constant[None])[0]

    f8 = lambda p, q: added(vjp(f1, p, q)[1](p.cos()))
    f9 = lambda p, q: jvp(lambda p: f8(p, q), (p,), (torch.ones_like(p),))[1]
    f10 = lambda p, q: added(jvp(f9, (p, q), (q, p.cos())))
    return lambda p, q: vmap(f10, (0, None))(pair(p), q), []


compare(make, 'backward')
"""

NAMES = ["referred to", "found late", "too far", "apart", "traced", "put off", "around", "equal", "zeros"]


REDUCED = [REFERRED_TO, FOUND_LATE, TOO_FAR, APART, TRACED, PUT_OFF, AROUND, EQUAL, ZEROS]


@pytest.mark.parametrize("program", REDUCED, ids=NAMES)
def test_reduced_programs(program: str) -> None:
    assert outcome(program) is None


# torch's forward derivative of softmax changes a tensor that it has saved. Without hooks this is an error in the
# backward. If hooks pack the tensor itself, torch computes a wrong gradient, and the region the right one.
WRONG_WITHOUT = """
from random_programs.modules import *
from random_programs.toolbox import *
from random_programs.compare import *


def make():
    return remat(lambda p, q: dual(lambda a, b: a.softmax(-1), q, q), policy=policies.everything_saveable), []


compare(make, 'hooks around', exact=False)
"""


def test_wrong_gradients_of_torch_are_not_compared() -> None:
    error = outcome(WRONG_WITHOUT)
    assert error is None or isinstance(error, Unrunnable), error
