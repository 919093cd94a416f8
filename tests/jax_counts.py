"""What `jax.checkpoint` saves and recomputes: reference figures for the programs of `tests/remat_functions.py`.

Measured with jax 0.10.2 on the CPU, in float64, for the same functions written with `jax.numpy`:

- `kept` is the number of lines of `jax.ad_checkpoint.print_saved_residuals` that aren't arguments: values that are
  saved from the forward to the backward. An input of a region that another region has computed is counted. For
  `in_vmap_*` it is the number for one sample.
- `again` counts the primitives in the jaxpr of `f_vjp(ct)`, without dead code, with the bodies of `remat` and `jit`,
  less those of the same function without `jax.checkpoint`, which belong to the derivative itself. A jaxpr of forward
  and backward together has the same figures. XLA is not involved.

A name is an operation of its own in JAX. The derivatives of `exp`, `tanh` and the `relu` here read the result *before*
it was named, so saving the named value doesn't spare them. `NAMED_RESULT` has the figures for derivative rules that
read the named value (written with `jax.custom_jvp`), for the rows where they differ.

Kinds: `matmul` is `dot_general` (torch: `mm`, `bmm`). `relu` is a `maximum`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One program under one policy.

    A policy is `none`, a name out of `jax.checkpoint_policies`, or `only a,b` for `save_only_these_names("a", "b")`.
    """

    function: str  # the key in `remat_functions.PROGRAMS`
    policies: tuple[str, ...]  # one for each level of regions, outermost first
    kept: int
    again: dict[str, int]  # by kind of operation


def rows(table: str) -> list[Row]:
    """The rows of a table. A line has a function, and policies with the values kept and the operations repeated."""
    found = []
    for line in table.strip().splitlines():
        function, _, entries = line.strip().partition(": ")
        for entry in entries.split(" | "):
            policies, kept, *again = entry.split()
            counts = {kind: int(count) for kind, count in zip(again[::2], again[1::2])}
            found.append(Row(function, tuple(policies.replace(":", " ").split("/")), int(kept), counts))
    return found


ROWS = rows("""
    sin_sin: none 0 sin 1 | everything_saveable 2 sin 0
    three: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0 | only:a 1 sin 1 matmul 3
    three: only:b 1 sin 1 matmul 3 | only:c 0 sin 2 matmul 3 | only:a,b 2 sin 0 matmul 3
    three: only:a,c 1 sin 1 matmul 3 | only:b,c 1 sin 1 matmul 3 | only:a,b,c 2 sin 0 matmul 3
    three_pre: none 0 sin 2 matmul 3 | only:a 1 sin 2 matmul 2 | only:b 1 sin 2 matmul 2 | only:c 1 sin 2 matmul 2
    three_pre: only:a,b 2 sin 2 matmul 1 | only:a,c 2 sin 2 matmul 1 | only:b,c 2 sin 2 matmul 1
    three_pre: only:a,b,c 3 sin 2 matmul 0
    three_each: none 2 sin 0 matmul 3 | dots_saveable 5 sin 0 matmul 0
    block: none 0 sin 1 exp 1 matmul 7 | dots_saveable 7 sin 1 exp 1 matmul 0 | only:q,k,v 3 sin 1 exp 1 matmul 4
    block: only:mid 1 sin 1 exp 1 matmul 6 | only:o 1 sin 1 exp 1 matmul 6 | only:hidden 1 sin 0 exp 1 matmul 7
    exp_named: none 0 sin 2 exp 1 | only:n 1 sin 2 exp 1
    nested_3_0: none/none 0 sin 4 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_3_0: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_2_1: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_2_1: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_1_2: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_1_2: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_0_3: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_0_3: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    pair_first: none 0 sin 0
    pair: none 0 sin 1
    dead_linear: none 0 sin 1 matmul 0 | dots_saveable 0 sin 1 matmul 0
    named_linear: none 0 sin 1 matmul 2 | only:m 1 sin 1 matmul 1
    mlp_maximum: none 0 tanh 1 maximum 1 matmul 2 | only:h 1 tanh 1 maximum 1 matmul 2
    mlp_relu: none 0 tanh 1 maximum 1 matmul 2 | only:h 1 tanh 1 maximum 1 matmul 2
    square_sin: none 0 sin 0 mul 1
    exp_exp: none 0 exp 2 | everything_saveable 2 exp 0
    vmap_x: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    vmap_x: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    vmap_all: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    vmap_all: dots_with_no_batch_dims_saveable 0 sin 2 matmul 3
    in_vmap_x: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    in_vmap_x: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    in_vmap_all: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    in_vmap_all: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    loop_each: none 3 tanh 4 matmul 4 | dots_saveable 7 tanh 4 matmul 0 | only:h 3 tanh 4 matmul 4
    loop: none 0 tanh 4 matmul 4 | dots_saveable 4 tanh 4 matmul 0 | only:h 3 tanh 4 matmul 4
""")
NAMED_RESULT = rows("""
    exp_named: only:n 1 sin 1 exp 0
    mlp_relu: only:h 1 tanh 1 maximum 0 matmul 1
    loop_each: only:h 4 tanh 0 matmul 0
    loop: only:h 4 tanh 0 matmul 0
""")
