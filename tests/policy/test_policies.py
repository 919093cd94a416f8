"""Policies are values, decide about real operators as promised, and reject what can't be a policy."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.measure import OpCounter, count_ops, held_bytes
from remat import PolicyError, policies, remat
from remat._core.private import operator_names
from remat._policy import operators
from remat._policy import operators as groups
from remat._policy.policy import Policy, Verdict, as_policy
from remat._policy.predicates import PUBLIC_NAMES


def name_of(value: Any) -> str:
    """For the ids of tests, which must be the same in every process: without addresses."""
    return re.sub(r" at 0x\w+", "", repr(value))


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
aten = torch.ops.aten
MM, BMM, RELU, CONV = aten.mm.default, aten.bmm.default, aten.relu.default, aten.convolution.default
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
FLEX = torch.ops.higher_order.flex_attention


@torch.library.custom_op("remat_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def large(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return args[0] > 10


def other(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def judge(policy: Policy, op: Any = RELU, *names: str, args: tuple = ()) -> Verdict:
    return policy.judge(None, op, args, {}, frozenset(names))


NAMED = policies.save_only_these_names("q", "k*")
PAIR = policies.save_and_offload_only_these_names(names_which_can_be_saved=["q"], names_which_can_be_offloaded=["k*"])
EXPRESSIONS = {
    "policies.save_matmuls": policies.dots_saveable,
    "policies.nothing_saveable": as_policy(None),
    "policies.save_ops(torch.ops.aten.mm.default)": policies.save_ops(MM),
    "policies.save_ops(torch.ops.aten.add.Tensor, torch.ops.aten.mm)": policies.save_ops(aten.mm, "aten::add.Tensor"),
    "policies.save_ops(torch.ops.aten.linear.out)": policies.save_ops(aten.linear.out),
    "policies.save_ops(torch.ops.higher_order.flex_attention)": policies.save_ops(FLEX),
    "policies.save_ops()": as_policy([]),
    "policies.save_only_these_names('q', 'k*')": NAMED,
    "policies.save_any_names_but_these('q')": policies.save_any_names_but_these("q"),
    "policies.save_anything_except_these_names('q')": policies.save_anything_except_these_names("q"),
    "policies.save_if(large)": policies.save_if(large),
    "policies.offload(policies.save_matmuls)": policies.offload(policies.save_matmuls, to="pinned_host"),
    "policies.offload(policies.save_matmuls_without_batch_dims)": policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "policies.save_only_these_names('q') | policies.offload(policies.save_only_these_names('k*'))": PAIR,
    "policies.save_matmuls | policies.save_only_these_names('q', 'k*')": policies.save_from_both_policies(
        policies.save_matmuls, NAMED
    ),
    "policies.save_ops(torch.ops.aten.bmm) | policies.save_matmuls": [aten.bmm] | policies.save_matmuls,
    "policies.save_if(large) & policies.save_matmuls": large & policies.save_matmuls,
    "~policies.save_matmuls": ~policies.save_matmuls,
    "~~policies.save_matmuls": ~~policies.save_matmuls,
    "~(policies.save_matmuls & policies.save_if(large))": ~(policies.save_matmuls & large),
    "policies.save_matmuls & ~policies.save_if(large) | policies.save_attention": (
        policies.save_matmuls & ~policies.save_if(large) | policies.save_attention
    ),
    "policies.save_matmuls & (policies.save_if(large) | policies.save_attention)": (
        policies.save_matmuls & (policies.save_if(large) | policies.save_attention)
    ),
    "policies.save_matmuls | (policies.save_if(large) | policies.save_attention)": (
        policies.save_matmuls | (policies.save_if(large) | policies.save_attention)
    ),
}
EVERY = pytest.mark.parametrize("text", EXPRESSIONS)


# --- values -------------------------------------------------------------------------------------------------------


@EVERY
def test_prints_as_the_expression_that_makes_it(text: str) -> None:
    assert repr(EXPRESSIONS[text]) == text
    assert eval(text, {"policies": policies, "torch": torch, "large": large}) == EXPRESSIONS[text]


@EVERY
@pytest.mark.parametrize("copied", [lambda p: pickle.loads(pickle.dumps(p)), copy.deepcopy, copy.copy])
def test_copies_are_equal(text: str, copied: Callable) -> None:
    policy = EXPRESSIONS[text]
    assert copied(policy) == policy and hash(copied(policy)) == hash(policy)
    assert repr(copied(policy)) == text


def test_different_policies_differ() -> None:
    assert len(set(EXPRESSIONS.values())) == len(EXPRESSIONS)
    for a, b in itertools.combinations(EXPRESSIONS.values(), 2):
        assert a != b
    assert policies.save_if(large) != policies.save_if(other)
    assert policies.save_matmuls != "policies.save_matmuls"


def test_order_of_listed_items_does_not_matter() -> None:
    assert policies.save_ops(MM, BMM) == policies.save_ops(BMM, MM, MM) == as_policy({MM, BMM})
    assert policies.save_only_these_names("a", "b") == policies.save_only_these_names("b", "a")


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        policies.save_matmuls.name = "x"  # type: ignore[attr-defined]


def test_presets_are_single_objects() -> None:
    assert policies.dots_saveable is policies.checkpoint_dots is policies.save_matmuls
    assert policies.dots_with_no_batch_dims_saveable is policies.save_matmuls_without_batch_dims
    assert policies.checkpoint_dots_with_no_batch_dims is policies.save_matmuls_without_batch_dims
    assert pickle.loads(pickle.dumps(policies.save_matmuls)) is policies.save_matmuls
    assert copy.deepcopy(policies.save_matmuls) is policies.save_matmuls


def test_everything_public_is_listed() -> None:
    own = {
        n
        for n, v in vars(policies).items()
        if isinstance(v, Policy) or getattr(v, "__module__", "") == policies.__name__
    }
    assert {name for name in own if not name.startswith("_")} == set(policies.__all__)
    assert policies.__all__ == PUBLIC_NAMES  # which error messages use


# --- verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, kept",
    [
        (policies.nothing_saveable, ()),
        (policies.everything_saveable, (MM, BMM, RELU, CONV, SDPA, FLEX)),
        (policies.save_matmuls, (MM, BMM, CONV)),
        (policies.save_matmuls_without_batch_dims, (MM,)),
        (policies.save_convolutions, (CONV,)),
        (policies.save_attention, (SDPA, FLEX)),
        (policies.save_collectives, ()),
        (policies.save_ops(RELU, aten.bmm), (BMM, RELU)),
        (NAMED, ()),
        (policies.save_anything_except_these_names("q"), (MM, BMM, RELU, CONV, SDPA, FLEX)),
    ],
    ids=name_of,
)
def test_verdicts_on_operators(policy: Policy, kept: tuple) -> None:
    for op in (MM, BMM, RELU, CONV, SDPA, FLEX):
        assert judge(policy, op) is (SAVE if op in kept else RECOMPUTE)
        hangs_on_the_call = op is BMM and policy is policies.save_matmuls_without_batch_dims
        assert policy.verdict_for(op) is (None if hangs_on_the_call else judge(policy, op))
        assert judge(policies.offload(policy), op) is (OFFLOAD if op in kept else RECOMPUTE)
        assert judge(~policy, op) is judge(~policies.offload(policy), op) is (RECOMPUTE if op in kept else SAVE)


@pytest.mark.parametrize(
    "policy, unnamed, q, k, both",
    [
        (policies.save_only_these_names("q"), RECOMPUTE, SAVE, RECOMPUTE, SAVE),
        (policies.save_only_these_names(), RECOMPUTE, RECOMPUTE, RECOMPUTE, RECOMPUTE),
        (policies.save_any_names_but_these("q"), RECOMPUTE, RECOMPUTE, SAVE, RECOMPUTE),
        (policies.save_any_names_but_these(), RECOMPUTE, SAVE, SAVE, SAVE),
        (policies.save_anything_except_these_names("q"), SAVE, RECOMPUTE, SAVE, RECOMPUTE),
        (policies.everything_saveable, SAVE, SAVE, SAVE, SAVE),
        (policies.save_matmuls & ~policies.save_only_these_names("q"), RECOMPUTE, RECOMPUTE, RECOMPUTE, RECOMPUTE),
        (~policies.save_only_these_names("q"), SAVE, RECOMPUTE, SAVE, RECOMPUTE),
        (PAIR, RECOMPUTE, SAVE, OFFLOAD, None),
    ],
    ids=name_of,
)
def test_verdicts_on_names(policy: Policy, unnamed: Verdict, q: Verdict, k: Verdict, both: Verdict | None) -> None:
    assert judge(policy) is unnamed
    assert judge(policy, RELU, "q") is q
    assert judge(policy, RELU, "k") is k
    if both is not None:
        assert judge(policy, RELU, "q", "k") is both


@pytest.mark.parametrize(
    "pattern, name, matches",
    [
        ("q", "q", True),
        ("q", "Q", False),
        ("q", "qk", False),
        ("k*", "k", True),
        ("k*", "k.1\n", True),
        ("*.mlp", "3.mlp", True),
        ("*.mlp", "3.mlp.up", False),
        ("a*b*c", "a1b2c", True),
        ("*", "anything", True),
        ("q?", "qk", False),
        ("[q]", "q", False),
        ("[q]", "[q]", True),
        ("a.c", "abc", False),
    ],
)
def test_only_the_star_is_special(pattern: str, name: str, matches: bool) -> None:
    assert judge(policies.save_only_these_names(pattern), RELU, name) is (SAVE if matches else RECOMPUTE)


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (True, SAVE),
        (False, RECOMPUTE),
        *((p, SAVE) for p in CheckpointPolicy if p.name.endswith("_SAVE")),
        *((p, RECOMPUTE) for p in CheckpointPolicy if p.name.endswith("_RECOMPUTE")),
        *((p, OFFLOAD) for p in CheckpointPolicy if p.name.endswith("_OFFLOAD")),
    ],
)
def test_results_of_predicates(answer: Any, verdict: Verdict) -> None:
    seen = []

    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((ctx, op, args, kwargs))
        return answer

    policy = as_policy(predicate)
    assert policy.judge("ctx", MM, (1, 2), {"a": 3}, frozenset()) is verdict
    assert seen == [("ctx", MM, (1, 2), {"a": 3})]
    assert policy.verdict_for(MM) is None
    assert len(seen) == 1


@pytest.mark.parametrize("answer", [None, 1, "yes", SAVE, policies.save_matmuls])
def test_other_results_are_errors(answer: Any) -> None:
    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return answer

    with pytest.raises(PolicyError, match=r"predicate returned .* for aten\.mm\.default"):
        judge(policies.save_if(predicate), MM)


def test_predicates_need_no_hash() -> None:
    class Larger:
        def __init__(self, than: int) -> None:
            self.than = than

        def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return args[0] > self.than

        def __eq__(self, other: Any) -> bool:
            return isinstance(other, Larger) and self.than == other.than

    assert {policies.save_if(Larger(1)), policies.save_if(Larger(1))} == {policies.save_if(Larger(1))}
    assert policies.save_if(Larger(1)) != policies.save_if(Larger(2))
    assert judge(policies.save_if(Larger(1)), args=(2,)) is SAVE
    assert policies.save_if(functools.partial(large)).verdict_for(MM) is None


# --- combinations -------------------------------------------------------------------------------------------------

BY_ANSWER = {
    RECOMPUTE: policies.nothing_saveable,
    SAVE: policies.save_ops(MM),
    OFFLOAD: policies.offload(policies.save_ops(MM)),
}


@pytest.mark.parametrize("a, b", list(itertools.product(BY_ANSWER, BY_ANSWER)))
def test_truth_tables(a: Verdict, b: Verdict) -> None:
    p, q = BY_ANSWER[a], BY_ANSWER[b]
    if {a, b} == {SAVE, OFFLOAD}:
        for combine in (lambda: p | q, lambda: p & q):
            with pytest.raises(PolicyError, match=r"made by aten\.mm\.default would be saved by .* and offloaded by"):
                combine()
        return
    either = next((x for x in (a, b) if x is not RECOMPUTE), RECOMPUTE)
    both = RECOMPUTE if RECOMPUTE in (a, b) else a
    assert judge(p | q, MM) is (p | q).verdict_for(MM) is either
    assert judge(p & q, MM) is (p & q).verdict_for(MM) is both
    assert judge(~(p | q), MM) is judge(~p & ~q, MM)
    assert judge(p | q) is judge(p & q) is RECOMPUTE


def test_a_predicate_is_called_only_for_what_the_first_policy_saves() -> None:
    policy = policies.save_matmuls & large
    assert policy.verdict_for(RELU) is RECOMPUTE
    assert policy.verdict_for(MM) is None
    assert judge(policy, RELU) is RECOMPUTE  # without a call of `large`, which would fail without an argument
    assert [judge(policy, MM, args=(n,)) for n in (9, 11)] == [RECOMPUTE, SAVE]
    assert (large & policies.save_matmuls).verdict_for(RELU) is None
    assert (large | policies.save_matmuls).verdict_for(MM) is None  # it might decide to offload
    assert (~as_policy(large)).verdict_for(MM) is policies.offload(large).verdict_for(MM) is None
    assert judge(~as_policy(large), args=(9,)) is SAVE


CERTAIN = {
    "operator": lambda: policies.everything_saveable | policies.offload(policies.save_convolutions),
    "group": lambda: policies.save_matmuls | policies.offload([MM]),
    "name": lambda: policies.save_only_these_names("a*") | policies.offload(policies.save_only_these_names("ab")),
    "both": lambda: policies.offload(NAMED) & policies.save_only_these_names("q"),
    "other operator": lambda: ~policies.save_matmuls | policies.offload(policies.everything_saveable),
    "other name": lambda: (
        policies.save_any_names_but_these("a") | policies.offload(policies.save_any_names_but_these("b"))
    ),
}


@pytest.mark.parametrize("make", CERTAIN.values(), ids=CERTAIN)
def test_a_certain_conflict_raises_at_construction(make: Callable) -> None:
    with pytest.raises(PolicyError, match=r"would be saved by p = .* and offloaded by q = .*\. To offload"):
        make()


def test_another_conflict_raises_when_it_occurs() -> None:
    by_name = policies.offload(policies.save_only_these_names("q"))
    policy = policies.save_matmuls | by_name
    assert judge(policy, MM) is judge(policy, MM, "k") is SAVE
    assert judge(policy, RELU, "q") is OFFLOAD
    with pytest.raises(PolicyError) as error:
        judge(policy, MM, "q", "k")
    assert str(error.value) == (
        "A value named 'k', 'q' made by aten.mm.default would be saved by p = policies.save_matmuls and offloaded by "
        "q = policies.offload(policies.save_only_these_names('q')). To offload it, exclude it from p: "
        "`(p & ~q) | q`."
    )
    remedied = (policies.save_matmuls & ~by_name) | by_name
    assert judge(remedied, MM, "q") is OFFLOAD and judge(remedied, MM) is SAVE
    offloads = policies.save_if(lambda ctx, op, *args, **kwargs: True) | policies.offload(large)
    assert judge(offloads, MM, args=(1,)) is SAVE
    with pytest.raises(PolicyError, match=r"offloaded by q = policies\.offload\(policies\.save_if\(large\)\)"):
        judge(offloads, MM, args=(11,))


# --- queries of the engine ----------------------------------------------------------------------------------------

NOTHING, EVERYTHING = policies.nothing_saveable, policies.everything_saveable


@pytest.mark.parametrize(
    "policy, judges_names, everything, nothing",
    [
        (NOTHING, False, False, True),
        (EVERYTHING, False, True, False),
        (policies.offload(EVERYTHING), False, False, False),
        (policies.save_matmuls, False, False, False),
        (as_policy([]), False, False, True),
        (as_policy(large), False, False, False),
        (NAMED, True, False, False),
        (policies.save_only_these_names(), False, False, True),
        (policies.save_any_names_but_these("*"), False, False, True),
        (policies.save_any_names_but_these("q"), True, False, False),
        (policies.save_anything_except_these_names("q"), True, False, False),
        (policies.save_anything_except_these_names(), False, True, False),
        (policies.save_any_names_but_these(), True, False, False),
        (~policies.save_any_names_but_these() & policies.save_matmuls, True, False, False),
        (PAIR, True, False, False),
        (NAMED | policies.save_matmuls, True, False, False),
        (NAMED & policies.save_matmuls, True, False, False),
        (policies.save_attention & policies.save_matmuls, False, False, False),
        (~NAMED, True, False, False),
        (~NOTHING, False, True, False),
        (~EVERYTHING, False, False, True),
        (~policies.offload(EVERYTHING), False, False, True),
        (~policies.save_anything_except_these_names("q"), True, False, False),
        (EVERYTHING | policies.save_matmuls, False, True, False),
        (NOTHING & policies.save_matmuls, False, False, True),
        (policies.offload(NOTHING), False, False, True),
    ],
    ids=name_of,
)
def test_certain_verdicts(policy: Policy, judges_names: bool, everything: bool, nothing: bool) -> None:
    assert (policy.judges_names, policy.saves_everything, policy.saves_nothing) == (judges_names, everything, nothing)


def test_mentioned_names() -> None:
    assert (NAMED | ~policies.save_any_names_but_these("a", "q") & large).mentioned_names == ("q", "k*", "a")
    assert policies.save_matmuls.mentioned_names == ()


# --- policy arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, policy",
    [
        (None, NOTHING),
        (policies.save_matmuls, policies.save_matmuls),
        ([aten.mm], policies.save_ops("aten.mm")),
        (("aten::mm.default", "torch.ops.aten.bmm.default"), policies.save_ops(MM, BMM)),
        ({"aten.mm.default"}, policies.save_ops(MM)),
        ([twice], policies.save_ops(torch.ops.remat_tests.twice.default)),
        (["higher_order.flex_attention"], policies.save_ops(FLEX)),
        (large, policies.save_if(large)),
    ],
    ids=name_of,
)
def test_accepted_as_a_policy(given: Any, policy: Policy) -> None:
    assert as_policy(given) == policy


@pytest.mark.parametrize(
    "given, says",
    [
        ("dots", r"got 'dots'\. Did you mean policies\.dots_saveable "),
        ("save_matmul", r"Did you mean policies\.save_matmuls or "),
        ("dots_saveable", r"Did you mean policies\.dots_saveable\?"),
        ("checkpoint_policies.dots_saveable", r"Did you mean policies\.dots_saveable\?"),
        ("save_only_these_names", r"Did you mean policies\.save_only_these_names\(\.\.\.\)\?"),
        ("zzz", r"A policy is one of remat\.policies .* got 'zzz'\. For values named"),
        (3, "got 3"),
        (True, "got True"),
        (CheckpointPolicy.MUST_SAVE, "CheckpointPolicy.MUST_SAVE"),
        ({}, "got {}"),
        (Policy, "got <class"),
        (torch.nn.Linear(1, 1), "got Linear"),
        (policies, "got <module"),
        (policies.save_ops, r"call it, as in `policies\.save_ops\(\.\.\.\)`"),
        (policies.save_only_these_names, r"call it, as in `policies\.save_only_these_names\(\.\.\.\)`"),
        (functools.partial(policies.save_only_these_names, "q"), r"call it, as in `policies\.save_only"),
        (create_selective_checkpoint_contexts, "without create_selective_checkpoint_contexts"),
        (functools.partial(create_selective_checkpoint_contexts, large), "without create_selective"),
        (MM, r"write `policies\.save_ops\("),
        (aten.mm, r"write `policies\.save_ops\("),
        (twice, r"write `policies\.save_ops\("),
        (torch.mm, "doesn't accept"),
        (F.relu, "doesn't accept"),
        (lambda: True, "doesn't accept"),
        (lambda ctx, op: True, "doesn't accept"),
        (lambda op, **kwargs: True, "doesn't accept"),
        ([policies.save_matmuls], r"combine them by `p \| q`"),
        (["q"], r"no operator 'q'.*save_only_these_names"),
        ([3], r"save_ops takes operators such as torch\.ops\.aten\.mm, got 3"),
    ],
    ids=name_of,
)
def test_rejected_as_a_policy(given: Any, says: str) -> None:
    for take in (as_policy, policies.offload, lambda value: policies.save_matmuls | value):
        with pytest.raises(PolicyError, match=says):
            take(given)


def test_policies_of_jax_are_rejected() -> None:
    def dots_saveable(prim: Any, *args: Any, **params: Any) -> bool:
        return True

    dots_saveable.__module__ = "jax._src.ad_checkpoint"
    with pytest.raises(PolicyError, match=r"JAX's .* Did you mean policies\.dots_saveable\?"):
        as_policy(dots_saveable)


@pytest.mark.parametrize(
    "op, says",
    [
        ("aten.mmm", r"no operator 'aten\.mmm'\. Did you mean 'aten\.\w*mm'"),
        ("mm", "Did you mean 'aten.mm'"),
        ("aten.mm.nope", r"overloads of aten\.mm are default, out"),
        ("nowhere::nothing", "no operator 'nowhere::nothing'"),
        ("", "no operator ''"),
        ("aten.linear", r"aten\.linear is a composite.*policies\.save_matmuls"),
        (aten.linear.default, r"aten\.linear\.default is a composite.*policies\.save_matmuls"),
        (aten.matmul, r"policies\.save_matmuls"),
        (aten.einsum, r"policies\.save_matmuls"),
        (aten.scaled_dot_product_attention, r"policies\.save_attention"),
        (aten.conv2d, r"policies\.save_convolutions"),
        (aten.softmax, r"Use 'aten\._softmax'"),
        (aten.cdist, r"composite.*checkpoint_name"),
        (torch.mm, r"Did you mean torch\.ops\.aten\.mm\?"),
        (F.linear, r"aten\.linear is a composite.*policies\.save_matmuls"),
        (torch.Tensor.matmul, r"policies\.save_matmuls"),
        (torch.nn.Linear, r"takes operators such as .*, got <class"),
        (None, "got None"),
    ],
    ids=name_of,
)
def test_operators_that_never_reach_a_policy(op: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        policies.save_ops(op)


VIEWS = ["aten.view", "aten.t", "aten.detach", aten.view.default, aten.transpose.int, aten.expand, aten.alias]


@pytest.mark.parametrize("op", [*VIEWS, "aten.split", "aten.squeeze_", "aten._unsafe_view"], ids=name_of)
def test_operators_that_only_make_views(op: Any) -> None:
    """Only `save_ops` rejects it. A list may contain it, as for torch's selective checkpoint, without any effect."""
    for ops in ((op,), (op, "aten.mm")):
        with pytest.raises(PolicyError, match=r"only returns views.*checkpoint_name"):
            policies.save_ops(*ops)
        assert as_policy([*ops]).verdict_for(aten.mm.default) is (SAVE if len(ops) > 1 else RECOMPUTE)


def test_views_in_a_list_change_nothing() -> None:
    w = rand(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (x @ w).t().reshape(2, 8).sin().view(4, 4) @ w

    x = rand(4, 4)
    expected = torch.autograd.grad(fn(x).sum(), (x, w))
    for ops in ([aten.mm], [*VIEWS, aten.mm]):
        region = remat(fn, policy=ops)
        assert held_bytes(region, x) == 2 * x.nbytes  # a product, and the result
        with OpCounter() as counter:
            found = torch.autograd.grad(region(x).sum(), (x, w))
        assert counter["aten.mm"] == 2 + 4 and all(map(torch.equal, found, expected))


def test_a_packet_represents_its_overloads() -> None:
    assert operators.resolve(aten.mm) == {getattr(aten.mm, name) for name in aten.mm.overloads()}
    assert aten.sum.dim_IntList in operators.resolve("aten.sum") and aten.sum.int not in operators.resolve("aten.sum")


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: policies.save_only_these_names(["q"]), r"takes names as nonempty strings.*got \['q'\]"),
        (lambda: policies.save_any_names_but_these(""), "got ''"),
        (lambda: policies.save_anything_except_these_names(3), "got 3"),
        (lambda: policies.save_if(3), "got 3"),
        (lambda: policies.save_if(None), "got None"),
        (lambda: policies.offload(policies.save_matmuls, to="cuda"), "only to 'cpu'.*got 'cuda'"),
        (lambda: policies.offload_dot_with_no_batch_dims("device", "disk"), "only to 'cpu'.*got 'disk'"),
        (lambda: policies.offload_dot_with_no_batch_dims("cpu", "device"), "only from 'device'; got 'cpu'"),
        (lambda: policies.save_and_offload_only_these_names(names_which_can_be_saved="q"), r"as a list: \['q'\]"),
        (
            lambda: policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["a", "q"], names_which_can_be_offloaded=["q"]
            ),
            "both saved and offloaded: 'q'",
        ),
    ],
)
def test_arguments_are_checked(make: Callable, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        make()


# --- operators that reach a policy --------------------------------------------------------------------------------


class Kept(TorchDispatchMode):
    """Records the names of the operators that reach a dispatch mode and that a policy saves."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if judge(self.policy, op, args=args) is SAVE:
            self.names.append(operators.packet_name(op).partition("::")[2])
        return op(*args, **(kwargs or {}))


def kept(policy: Policy, fn: Callable, *args: Any) -> list[str]:
    """The names of the operators in a call that a policy saves."""
    with Kept(policy) as kept:
        fn(*args)
    return kept.names


def rand(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).requires_grad_()


def attend(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x, need_weights=False)[0]


PRODUCTS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "matrix @ matrix": (torch.matmul, (rand(4, 4), rand(4, 4))),
    "batch @ matrix": (torch.matmul, (rand(2, 4, 4), rand(4, 4))),
    "matrix @ vector": (torch.matmul, (rand(4, 4), rand(4))),
    "vector @ matrix": (torch.matmul, (rand(4), rand(4, 4))),
    "vector @ vector": (torch.matmul, (rand(4), rand(4))),
    "linear": (F.linear, (rand(3, 4), rand(5, 4))),
    "linear with bias": (F.linear, (rand(3, 4), rand(5, 4), rand(5))),
    "linear of 3-D": (F.linear, (rand(2, 3, 4), rand(5, 4))),
    "linear of 3-D with bias": (F.linear, (rand(2, 3, 4), rand(5, 4), rand(5))),
    "addmm": (torch.addmm, (rand(4, 4), rand(4, 4), rand(4, 4))),
    "mv": (torch.mv, (rand(4, 4), rand(4))),
    "addmv": (torch.addmv, (rand(4), rand(4, 4), rand(4))),
    "dot": (torch.dot, (rand(4), rand(4))),
    "vdot": (torch.vdot, (rand(4), rand(4))),
    "inner": (torch.inner, (rand(4, 4), rand(4, 4))),
    "tensordot": (functools.partial(torch.tensordot, dims=1), (rand(4, 4), rand(4, 4))),
    "einsum of matrices": (functools.partial(torch.einsum, "ij,jk->ik"), (rand(4, 4), rand(4, 4))),
    "einsum with a weight": (functools.partial(torch.einsum, "bth,hf->btf"), (rand(2, 3, 4), rand(4, 5))),
    "einsum of three": (functools.partial(torch.einsum, "bi,ij,jk->bk"), (rand(2, 3), rand(3, 4), rand(4, 5))),
    "multi_dot": (lambda *xs: torch.linalg.multi_dot(xs), (rand(4, 4), rand(4, 4), rand(4, 4))),
    "LSTM cell": (torch.nn.LSTMCell(4, 4), (rand(2, 4),)),
}
BATCHED: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "batch @ batch": (torch.matmul, (rand(2, 4, 4), rand(2, 4, 4))),
    "baddbmm": (torch.baddbmm, (rand(2, 4, 4), rand(2, 4, 4), rand(2, 4, 4))),
    "addbmm": (torch.addbmm, (rand(4, 4), rand(2, 4, 4), rand(2, 4, 4))),
    "bmm of one": (torch.bmm, (rand(1, 4, 4), rand(1, 4, 4))),
    "matmul of one": (torch.matmul, (rand(1, 1, 4, 4), rand(1, 1, 4, 4))),
    "einsum": (functools.partial(torch.einsum, "bij,bjk->bik"), (rand(2, 4, 4), rand(2, 4, 4))),
    "bilinear": (F.bilinear, (rand(2, 3), rand(2, 4), rand(5, 3, 4))),
}
CONVOLUTIONS: dict[str, tuple[Callable, tuple[torch.Tensor, ...]]] = {
    "conv1d": (F.conv1d, (rand(1, 2, 5), rand(3, 2, 2))),
    "conv1d, same": (functools.partial(F.conv1d, padding="same"), (rand(1, 2, 5), rand(3, 2, 3))),
    "conv2d": (F.conv2d, (rand(1, 2, 5, 5), rand(3, 2, 2, 2), rand(3))),
    "conv2d by groups": (functools.partial(F.conv2d, groups=2), (rand(1, 2, 5, 5), rand(2, 1, 2, 2))),
    "conv3d": (F.conv3d, (rand(1, 2, 5, 5, 5), rand(3, 2, 2, 2, 2))),
    "conv_transpose1d": (F.conv_transpose1d, (rand(1, 2, 5), rand(2, 3, 2))),
    "conv_transpose2d": (F.conv_transpose2d, (rand(1, 2, 5, 5), rand(2, 3, 2, 2))),
    "conv_transpose3d": (F.conv_transpose3d, (rand(1, 2, 5, 5, 5), rand(2, 3, 2, 2, 2))),
    "conv_tbc": (F.conv_tbc, (rand(5, 1, 2), rand(2, 2, 3), rand(3))),
}


AMBIENT = pytest.mark.parametrize(
    "ambient",
    [torch.enable_grad, torch.no_grad, functools.partial(torch.autocast, "cpu", torch.bfloat16)],
    ids=["grad", "no grad", "autocast"],
)
NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop")


@AMBIENT
@pytest.mark.parametrize("fn, args", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_seen(fn: Callable, args: tuple, ambient: Callable) -> None:
    with ambient():
        seen = kept(policies.save_matmuls, fn, *args)
        assert seen == kept(policies.save_matmuls_without_batch_dims, fn, *args) != []
        assert not kept(policies.save_convolutions, fn, *args)


@AMBIENT
@pytest.mark.parametrize("fn, args", BATCHED.values(), ids=BATCHED)
def test_batched_products_are_seen(fn: Callable, args: tuple, ambient: Callable) -> None:
    with ambient():
        assert kept(policies.save_matmuls, fn, *args)
        assert not kept(policies.save_matmuls_without_batch_dims, fn, *args)


@AMBIENT
@pytest.mark.parametrize("fn, args", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_are_seen(fn: Callable, args: tuple, ambient: Callable) -> None:
    with ambient():
        assert kept(policies.save_convolutions, fn, *args) == kept(policies.save_matmuls, fn, *args) != []
        assert not kept(policies.save_matmuls_without_batch_dims, fn, *args)


VMAPPED = {name: case for name, case in (PRODUCTS | BATCHED | CONVOLUTIONS).items() if name != "LSTM cell"}


@NO_BATCHING_RULE
@pytest.mark.parametrize("fn, args", VMAPPED.values(), ids=VMAPPED)
def test_vmapped_products_are_seen(fn: Callable, args: tuple) -> None:
    stacked = tuple(torch.stack([x.detach(), x.detach()]).requires_grad_() for x in args)
    assert kept(policies.save_matmuls, vmap(fn), *stacked)


MASK = torch.zeros(3, 3)
FUSED = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": MASK},
    "bool mask": {"attn_mask": MASK == 0},
    "scale": {"scale": 0.5},
}


@NO_BATCHING_RULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", FUSED.values(), ids=FUSED)
def test_fused_attention_is_seen(options: dict, dtype: torch.dtype) -> None:
    options = {k: v.to(dtype) if v is MASK else v for k, v in options.items()}
    x = torch.randn(2, 2, 3, 4, dtype=dtype, requires_grad=True)
    kernel = "_scaled_dot_product_flash_attention_for_cpu"

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, **options)

    assert kept(policies.save_attention, f, x) == [kernel]
    assert kept(policies.save_attention, grad(lambda x: f(x).sum()), x.detach()) == [kernel]
    assert kept(policies.save_attention, vmap(f), torch.stack([x, x])) == [kernel] * 2
    with torch.no_grad():
        assert kept(policies.save_attention, f, x) == [kernel]


def test_attention_in_modules_is_seen() -> None:
    x = rand(2, 3, 4)
    assert len(kept(policies.save_attention, attend, x)) == 1
    assert len(kept(policies.save_matmuls, attend, x)) == 2
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    assert len(kept(policies.save_attention, layer, x)) == 1
    with torch.no_grad():  # one kernel computes the whole layer
        assert len(kept(policies.save_attention, layer.eval(), x)) == 1


@pytest.mark.parametrize("how", ["backend", "dropout", "3-D", "mask with gradient"])
def test_attention_without_a_kernel_is_matrix_products(how: str) -> None:
    x = rand(2, 2, 3, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        if how == "backend":
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(x, x, x)
        if how == "dropout":
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        if how == "3-D":
            return F.scaled_dot_product_attention(x[0], x[0], x[0])
        return F.scaled_dot_product_attention(x, x, x, attn_mask=rand(3, 3))

    if how == "3-D" and not count_ops(f, x)["aten.bmm"]:
        pytest.skip("this version of torch has a kernel for it")
    assert kept(policies.save_attention, f, x) == []
    assert kept(policies.save_matmuls, f, x) == ["bmm", "bmm"]
    assert kept(policies.save_matmuls_without_batch_dims, f, x) == []


def test_composites_in_inference_mode_are_seen() -> None:
    """In inference mode operators are not decomposed."""
    with torch.inference_mode():
        assert kept(policies.save_matmuls, F.linear, *PRODUCTS["linear"][1]) == ["linear"]
        assert kept(policies.save_matmuls, F.conv2d, *CONVOLUTIONS["conv2d"][1]) == ["conv2d"]
        attention = kept(policies.save_attention, F.scaled_dot_product_attention, *[rand(1, 2, 3, 4)] * 3)
        assert attention == ["scaled_dot_product_attention"]


def test_nested_tensors_do_not_decompose_linear() -> None:
    nested = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.jagged, requires_grad=True)
    assert kept(policies.save_matmuls, F.linear, nested, rand(5, 4)) == ["linear"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
def test_collectives_are_seen() -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, x = dist.group.WORLD, rand(4)
        for name, call in {
            "all_reduce": lambda: functional.all_reduce(x, "sum", world),
            "broadcast": lambda: functional.broadcast(x, 0, world),
            "all_reduce_coalesced": lambda: functional.all_reduce_coalesced([x], "sum", world)[0],
            "all_to_all_single": lambda: functional.all_to_all_single_autograd(x, None, None, world),
        }.items():
            seen = kept(policies.save_collectives, lambda call=call: functional.wait_tensor(call()))
            assert seen[0] == name and seen[-1] == "wait_tensor"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("group", ["MATMULS", "ATTENTION"])
def test_names_in_groups_exist(group: str) -> None:
    """A misspelled name would silently save nothing; names of other packages and of newer torch are few."""
    expected = {name for name in getattr(groups, group) if name.startswith(("aten::", "quantized::", "mkl"))}
    missing = expected - {name.partition(".")[0] for name in operator_names()}
    newer = {"aten::_scaled_mm_v2", "aten::_scaled_grouped_mm_v2", "aten::_foreach_mm"}
    newer |= {"aten::_flash_attention_forward_no_dropout_inplace"}
    assert missing <= newer
