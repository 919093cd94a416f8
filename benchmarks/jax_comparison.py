"""The column `jax.checkpoint` of the README's table "Comparison", without the rows that JAX has no word for.

    python benchmarks/jax_comparison.py > tests/compat/jax_0_10_2.json

`make test` doesn't install JAX. `tests/compat/test_comparison_table.py` compares the file with the README.
"""

import contextlib
import io
import json
from collections.abc import Callable
from typing import Any


def cells() -> dict[str, Any]:
    """Run the programs of each row with and without `jax.checkpoint`."""
    import jax
    from jax import numpy as jnp
    from jax.ad_checkpoint import print_saved_residuals

    x, w = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(-1, 1, 16).reshape(4, 4)
    key = jax.random.key(0)

    def loss(x: Any, key: Any = None) -> Any:
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.square(jnp.exp(jnp.sin(jnp.tanh(x @ w) @ w))).sum()

    def works(*programs: Callable[[Any], Any]) -> str:
        pairs = [(program(jax.checkpoint(loss)), program(loss)) for program in programs]
        same = all(bool(jnp.allclose(a, b)) for pair in pairs for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
        return "yes" if same else "silently wrong"

    def saved(policy: Any) -> int:
        """The number of saved values that are no arguments or constants."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_saved_residuals(jax.checkpoint(loss, policy=policy), x)
        return sum("output of" in line for line in printed.getvalue().splitlines())

    gradient, policies = jax.grad, jax.checkpoint_policies
    counts = [saved(policy) for policy in (policies.nothing_saveable, policies.dots_saveable)]
    assert counts == [0, 2], counts
    assert works(lambda f: gradient(f)(x, key)) == "yes"
    return {
        "`grad`, `vjp`, `jacrev`, `hessian`, `vmap(grad)`, `jvp(grad)`": works(
            lambda f: gradient(f)(x),
            lambda f: jax.vjp(f, x)[1](jnp.ones(())),
            lambda f: jax.jacrev(f)(x),
            lambda f: jax.hessian(f)(x),
            lambda f: jax.vmap(gradient(f))(x),
            lambda f: jax.jvp(gradient(f), (x,), (x,)),
        ),
        "`jvp`, `jacfwd`": works(lambda f: jax.jvp(f, (x,), (x,)), lambda f: jax.jacfwd(f)(x)),
        "choice of what is saved": "policies",
        "same random numbers in the recompute": "explicit keys",
    }


if __name__ == "__main__":
    import jax

    print(json.dumps({"version": jax.__version__, "cells": cells()}, indent=1, ensure_ascii=False))
