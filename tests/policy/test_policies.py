"""Policies are values, return the promised verdicts, combine, and reject what can't be a policy."""

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
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat import PolicyError, policies
from remat import checkpoint_policies as in_jax
from remat._policy.policy import Policy, Verdict, as_policy, effective
from remat._policy.predicates import AnswerLog, Question


def name_of(value: Any) -> str:
    """For the ids of tests, which must be the same in every process: without addresses."""
    return re.sub(r" at 0x\w+", "", repr(value))


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
aten = torch.ops.aten
MM, BMM, RELU, CONV = aten.mm.default, aten.bmm.default, aten.relu.default, aten.convolution.default
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
FLEX = torch.ops.higher_order.flex_attention
only, offload, matmuls, attention = (
    policies.save_only_these_names, policies.offload, policies.save_matmuls, policies.save_attention,
)  # fmt: skip
NOTHING, EVERYTHING = policies.nothing_saveable, policies.everything_saveable


@torch.library.custom_op("remat_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def large(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return args[0] > 10


product = type(large)(large.__code__, globals(), "mm")  # with the name of an operator


class Unhashable:
    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return False

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Unhashable)


def judge(policy: Policy, op: Any = RELU, *names: str, args: tuple = ()) -> Verdict:
    return policy.judge(Question(None, op, args, {}, {}), frozenset(names))


NAMED, save_and_offload = only("q", "k*"), in_jax.save_and_offload_only_these_names
PAIR = save_and_offload(names_which_can_be_saved=["q"], names_which_can_be_offloaded=["k*"])
EXPRESSIONS = {
    "policies.save_matmuls": in_jax.dots_saveable,
    "policies.nothing_saveable": as_policy(None),
    "policies.save_ops(torch.ops.aten.mm.default)": policies.save_ops(MM),
    "policies.save_ops(torch.ops.aten.add.Tensor, torch.ops.aten.mm)": policies.save_ops(aten.mm, "aten::add.Tensor"),
    "policies.save_ops()": as_policy([]),
    "policies.save_only_these_names('q', 'k*')": NAMED,
    "policies.save_any_names_but_these('q')": policies.save_any_names_but_these("q"),
    "policies.save_if(large)": policies.save_if(large),
    "policies.budget(0.5)": policies.budget(0.5),
    "policies.budget('64MiB', cost='flops')": policies.budget("64MiB", cost="flops"),
    "policies.offload(policies.save_matmuls_without_batch_dims)": in_jax.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "policies.save_only_these_names('q') | policies.offload(policies.save_only_these_names('k*'))": PAIR,
    "policies.save_ops(torch.ops.aten.bmm) | policies.save_matmuls": [aten.bmm] | matmuls,
    "policies.save_if(large) & policies.save_matmuls": large & matmuls,
    "~(policies.save_matmuls & policies.save_if(large))": ~(matmuls & large),
    "policies.save_matmuls & ~policies.save_if(large) | policies.save_attention": (
        matmuls & ~policies.save_if(large) | attention
    ),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_policy_prints_as_its_expression_and_copies_are_equal(text: str) -> None:
    policy = EXPRESSIONS[text]
    again = eval(text, {"policies": policies, "torch": torch, "large": large})
    for made in (again, pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), copy.copy(policy)):
        assert (repr(made), made, hash(made)) == (text, policy, hash(policy))


def test_different_policies_differ() -> None:
    assert len(set(EXPRESSIONS.values())) == len(EXPRESSIONS)
    assert all(a != b for a, b in itertools.combinations(EXPRESSIONS.values(), 2))
    assert policies.budget(1) != policies.budget(1, cost=large) != policies.budget(1, cost=Unhashable())
    assert policies.save_if(large) != policies.save_if(Unhashable()) and matmuls != "policies.save_matmuls"
    assert {policies.save_if(Unhashable()), policies.save_if(Unhashable())} == {policies.save_if(Unhashable())}
    assert "Unhashable object at" in repr(policies.save_if(Unhashable()))
    assert policies.save_ops(MM, BMM) == policies.save_ops(BMM, MM, MM) == as_policy({MM, BMM})
    assert only("a", "b") == only("b", "a")  # the order does not matter


def test_presets_are_single_objects_with_the_names_of_jax() -> None:
    assert in_jax.dots_saveable is in_jax.checkpoint_dots is matmuls is pickle.loads(pickle.dumps(matmuls))
    assert in_jax.dots_with_no_batch_dims_saveable is policies.save_matmuls_without_batch_dims
    assert in_jax.checkpoint_dots_with_no_batch_dims is policies.save_matmuls_without_batch_dims
    assert "matrix products" in matmuls.__doc__  # for `help`
    with pytest.raises(TypeError, match=r"save_matmuls is a policy itself.*policy=policies\.save_matmuls"):
        matmuls()


def test_everything_public_is_listed() -> None:
    mine = lambda value: isinstance(value, Policy) or getattr(value, "__module__", "") == policies.__name__
    own = {name for name, value in vars(policies).items() if mine(value) and not name.startswith("_")}
    assert own == set(policies.__all__) == set(dir(policies))


@pytest.mark.parametrize(
    "policy, kept",
    [
        (NOTHING, ()), (EVERYTHING, (MM, BMM, RELU, CONV, SDPA, FLEX)), (matmuls, (MM, BMM, CONV)),
        (policies.save_matmuls_without_batch_dims, (MM,)), (policies.save_convolutions, (CONV,)),
        (attention, (SDPA, FLEX)), (policies.save_ops(RELU, aten.bmm), (BMM, RELU)),
    ],
    ids=name_of,
)  # fmt: skip
def test_verdicts_on_operators(policy: Policy, kept: tuple) -> None:
    for op in (MM, BMM, RELU, CONV, SDPA, FLEX):
        assert judge(policy, op) is (SAVE if op in kept else RECOMPUTE)
        hangs_on_the_call = op is BMM and policy is policies.save_matmuls_without_batch_dims
        assert policy.verdict_for(op) is (None if hangs_on_the_call else judge(policy, op))
        assert judge(offload(policy), op) is (OFFLOAD if op in kept else RECOMPUTE)
        assert judge(~policy, op) is judge(~offload(policy), op) is (RECOMPUTE if op in kept else SAVE)


@pytest.mark.parametrize(
    "policy, unnamed, q, k, both",
    [
        (only("q"), RECOMPUTE, SAVE, RECOMPUTE, SAVE),
        (policies.save_any_names_but_these("q"), RECOMPUTE, RECOMPUTE, SAVE, RECOMPUTE),
        (policies.save_any_names_but_these(), RECOMPUTE, SAVE, SAVE, SAVE),
        (policies.save_anything_except_these_names("q"), SAVE, RECOMPUTE, SAVE, RECOMPUTE),
        (~only("q"), SAVE, RECOMPUTE, SAVE, RECOMPUTE),
        (PAIR, RECOMPUTE, SAVE, OFFLOAD, None),
    ],
    ids=name_of,
)
def test_verdicts_on_names(policy: Policy, unnamed: Verdict, q: Verdict, k: Verdict, both: Verdict | None) -> None:
    assert (judge(policy), judge(policy, RELU, "q"), judge(policy, RELU, "k")) == (unnamed, q, k)
    if both is not None:
        assert judge(policy, RELU, "q", "k") is both


@pytest.mark.parametrize(
    "pattern, matching, others",
    [
        ("q", ["q"], ["Q", "qk", ""]), ("k*", ["k", "k.1\n"], ["ak"]), ("*.mlp", ["3.mlp"], ["3.mlp.up"]),
        ("a*b*c", ["a1b2c", "abc"], ["acb"]), ("[q]", ["[q]"], ["q"]), ("q?.", ["q?."], ["qkx", "q?x"]),
    ],
)  # fmt: skip
def test_only_the_star_is_special_in_a_name(pattern: str, matching: list[str], others: list[str]) -> None:
    for name in (*matching, *others):
        assert judge(only(pattern), RELU, name) is (SAVE if name in matching else RECOMPUTE)


@pytest.mark.parametrize("answer", [True, False, *CheckpointPolicy], ids=str)
def test_a_predicate_gets_the_call_and_returns_a_bool_or_a_checkpoint_policy(answer: Any) -> None:
    seen: list = []
    policy = as_policy(lambda *args, **kwargs: seen.append((*args, kwargs)) or answer)
    word = getattr(answer, "name", "_SAVE" if answer else "_RECOMPUTE")
    assert word.endswith(policy.judge(Question("ctx", MM, (1, 2), {"a": 3}, {})).name)
    assert policy.verdict_for(MM) is None
    assert seen == [("ctx", MM, 1, 2, {"a": 3})]


@pytest.mark.parametrize("answer", [None, 1, "yes", SAVE, matmuls])
def test_any_other_answer_of_a_predicate_is_an_error(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"must return True, .*<lambda> returned .* for aten\.mm\.default"):
        judge(policies.save_if(lambda ctx, op, *args, **kwargs: answer), MM)
    with pytest.raises(PolicyError, match=r"The predicate .*<lambda> failed for aten\.mm\.default: .* is called as"):
        judge(policies.save_if(lambda ctx, op, *args, **kwargs: answer.nothing), MM)
    with pytest.raises(TypeError, match=r"Combine: `p \| q`, `p & q`, `~p`; compare with None\."):
        _ = matmuls or answer


BY_ANSWER = {RECOMPUTE: NOTHING, SAVE: policies.save_ops(MM), OFFLOAD: offload(policies.save_ops(MM))}


@pytest.mark.parametrize("a, b", list(itertools.product(BY_ANSWER, BY_ANSWER)))
def test_truth_tables(a: Verdict, b: Verdict) -> None:
    p, q = BY_ANSWER[a], BY_ANSWER[b]
    if {a, b} == {SAVE, OFFLOAD}:
        for combine in (lambda: p | q, lambda: p & q):
            with pytest.raises(PolicyError, match=r"made by aten\.mm\.default would be saved by .* and offloaded by"):
                combine()
        return
    either, both = (b if a is RECOMPUTE else a), (b if b is RECOMPUTE else a)
    assert judge(p | q, MM) is (p | q).verdict_for(MM) is either
    assert judge(p & q, MM) is (p & q).verdict_for(MM) is both
    assert judge(~(p | q), MM) is judge(~p & ~q, MM)
    assert judge(p | q) is judge(p & q) is RECOMPUTE


def test_a_predicate_is_called_only_for_what_the_first_policy_saves() -> None:
    policy = matmuls & large
    assert policy.verdict_for(RELU) is RECOMPUTE and policy.verdict_for(MM) is None
    assert judge(policy, RELU) is RECOMPUTE  # without a call of `large`, which would fail without an argument
    assert [judge(policy, MM, args=(n,)) for n in (9, 11)] == [RECOMPUTE, SAVE]
    assert (large & matmuls).verdict_for(RELU) is None
    assert (large | matmuls).verdict_for(MM) is None  # it might decide to offload
    assert (~as_policy(large)).verdict_for(MM) is offload(large).verdict_for(MM) is None
    assert judge(~as_policy(large), args=(9,)) is SAVE


CERTAIN = {
    "operator": lambda: EVERYTHING | offload(policies.save_convolutions),
    "name": lambda: only("a*") | offload(only("ab")),
    "both": lambda: offload(NAMED) & only("q"),
    "other name": lambda: policies.save_any_names_but_these() | offload(policies.save_any_names_but_these()),
    "other operator": lambda: ~matmuls | offload(EVERYTHING),
}


@pytest.mark.parametrize("make", CERTAIN.values(), ids=CERTAIN)
def test_a_certain_conflict_raises_when_the_policy_is_created(make: Callable) -> None:
    with pytest.raises(PolicyError, match=r"^A value( named '\w+')?( made by \S+)? would be saved by p = .*To offload"):
        make()


def test_another_conflict_raises_when_it_occurs() -> None:
    by_name = offload(only("q"))
    policy = matmuls | by_name
    assert judge(policy, MM) is judge(policy, MM, "k") is SAVE and judge(policy, RELU, "q") is OFFLOAD
    with pytest.raises(PolicyError) as error:
        judge(policy, MM, "q", "k")
    assert str(error.value) == (
        "A value named 'k', 'q' made by aten.mm.default would be saved by p = policies.save_matmuls and offloaded by "
        "q = policies.offload(policies.save_only_these_names('q')). To offload it, exclude it from p: "
        "`(p & ~q) | q`."
    )
    with pytest.raises(PolicyError, match=r"^A value made by aten\.mm\.\w+ would be saved by p"):
        matmuls | offload(policies.save_ops("aten.mm"))
    remedied = (matmuls & ~by_name) | by_name
    assert judge(remedied, MM, "q") is OFFLOAD and judge(remedied, MM) is SAVE


def test_a_verdict_is_repeated_about_the_same_operator_only() -> None:
    again = AnswerLog([(MM, 1), (RELU, 2), (CONV, 3)])
    assert [again.verdict(op, lambda: 4) for op in (MM, BMM, CONV)] == [1, 4, 3]
    again.go_back(1)
    assert again.count == 1 and again.verdict(RELU, lambda: 4) == 2


def test_the_policy_of_an_enclosing_region_decides_first() -> None:
    assert effective(None, matmuls) is effective(matmuls, matmuls) is effective(matmuls, NOTHING) is matmuls
    policy = effective(offload(matmuls), NAMED | matmuls)
    assert judge(policy, MM) is judge(policy, MM, "q") is OFFLOAD
    assert judge(policy, RELU) is RECOMPUTE and judge(policy, RELU, "q") is SAVE
    assert policy.judges_names and not policy.saves_nothing
    assert effective(matmuls, as_policy(large)).predicates == (large,)


@pytest.mark.parametrize(
    "given, policy",
    [
        (None, NOTHING),
        (matmuls, matmuls),
        ([aten.mm], policies.save_ops("aten.mm")),
        (("aten::mm.default", "torch.ops.aten.bmm.default"), policies.save_ops(MM, BMM)),
        (frozenset({"aten.mm.default"}), policies.save_ops(MM)),
        ([twice], policies.save_ops(torch.ops.remat_tests.twice.default)),
        (["higher_order.flex_attention"], policies.save_ops(FLEX)),
        (large, policies.save_if(large)),
        (product, policies.save_if(product)),
        (dir, policies.save_if(dir)),  # has no signature
        (["aten.silu_backward.default"], policies.save_ops(aten.silu_backward.default)),  # a composite with a kernel
    ],
    ids=name_of,
)
def test_accepted_as_a_policy(given: Any, policy: Policy) -> None:
    assert as_policy(given) == policy


def of_jax(prim: Any, *args: Any, **params: Any) -> bool:
    return True


of_jax.__name__, of_jax.__module__ = "dots_saveable", "jax._src.ad_checkpoint"


@pytest.mark.parametrize(
    "given, says",
    [
        ("dots", r"got 'dots'\. Did you mean checkpoint_policies\.dots_saveable "),
        ("checkpoint_policies.dots-saveable", r"Did you mean checkpoint_policies\.dots_saveable\?"),
        ("save_matmulls", r"Did you mean policies\.save_matmuls\b"),
        ("save_only_these_names", r"Did you mean policies\.save_only_these_names\(\.\.\.\)\?"),
        ("zzz", r"A policy is one of remat\.policies .* got 'zzz'\. For values named"),
        ("h", r"got 'h'\. For values named"),  # a name of the user's, though many policies have this letter
        ("64 MiB", r"write `policies\.budget\('64 MiB'\)`"),
        (True, "got True"),
        (CheckpointPolicy.MUST_SAVE, "CheckpointPolicy.MUST_SAVE"),
        (policies.save_ops, r"call it, as in `policies\.save_ops\(\.\.\.\)`"),
        (functools.partial(policies.save_only_these_names, "q"), r"call it, as in `policies\.save_only"),
        (functools.partial(create_selective_checkpoint_contexts, large), "without create_selective"),
        (MM, r"write `policies\.save_ops\("),
        (torch.mm, "doesn't accept"),
        (torch.nn.Identity(), r"A policy is one of .*got Identity"),
        (type("AnyArguments", (), {"__init__": lambda self, *args: None}), "A policy is one of .*got <class"),
        (lambda ctx, op: True, "doesn't accept"),
        (of_jax, r"JAX's .* Did you mean checkpoint_policies\.dots_saveable\?"),
        ([matmuls], r"combine them by `p \| q`"),
        ([3], r"save_ops takes operators such as torch\.ops\.aten\.mm, got 3"),
        ([None], r"save_ops takes operators such as torch\.ops\.aten\.mm, got None"),
        ([["aten.mm"]], "Pass them separately"),
    ],
    ids=name_of,
)
def test_rejected_as_a_policy(given: Any, says: str) -> None:
    for take in (as_policy, offload, lambda value: matmuls | value):
        with pytest.raises(PolicyError, match=says):
            take(given)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: policies.save_anything_except_these_names(3), "got 3"),
        (lambda: only("q", ""), r"nonempty strings.*got ''\.$"),
        (lambda: only(["q"]), r"nonempty strings.*got \['q'\]\. Pass the names separately\."),
        (lambda: policies.save_if(None), "got None"),
        (lambda: policies.budget(-1), "must not be negative, got -1"),
        (lambda: policies.budget(None), "must be a number of bytes"),
        (lambda: policies.budget(1, cost="money"), "The cost of a budget must be one of 'roofline', 'flops', 'time'"),
        (lambda: matmuls & policies.budget(1), "can't be combined with another policy"),
        (lambda: offload(policies.budget(1)), "can't be combined with another policy"),
        (lambda: ~policies.budget(1), "can't be combined with another policy"),
        (lambda: offload(matmuls, to="cuda"), "only to 'cpu'.*got 'cuda'"),
        (lambda: in_jax.offload_dot_with_no_batch_dims("cpu", "device"), "only from 'device'; got 'cpu'"),
        (lambda: save_and_offload(names_which_can_be_saved="q"), r"as a list: \['q'\]"),
        (
            lambda: save_and_offload(names_which_can_be_saved=["a", "q"], names_which_can_be_offloaded=["q"]),
            "A value named 'q' would be saved by",
        ),
    ],
)
def test_arguments_are_checked(make: Callable, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        make()


@pytest.mark.parametrize(
    "op, says",
    [
        ("torch.mm", r"no operator 'torch\.mm'\. Did you mean 'aten\.mm'"),
        ("aten.mmm", r"no operator 'aten\.mmm'\. Did you mean 'aten\.\w*mm'"),
        ("mm", "Did you mean 'aten.mm'"),
        ("aten.mm.nope", r"overloads of aten\.mm are default, out"),
        ("nowhere::nothing", r"no operator 'nowhere::nothing'\. Operators are written"),
        ("aten.linear", r"aten\.linear is a composite.*policies\.save_matmuls"),
        (aten.scaled_dot_product_attention, r"policies\.save_attention"),
        (aten.softmax, r"Use 'aten\._softmax'"),
        (aten.cdist, r"composite.*checkpoint_name"),
        (torch.mm, r"Did you mean torch\.ops\.aten\.mm\?"),
        (F.linear, r"aten\.linear is a composite.*policies\.save_matmuls"),
        (torch.nn.Linear, r"takes operators such as .*, got <class"),
        ("aten.view", r"only returns views.*checkpoint_name"),
        ("aten.squeeze_", r"only returns views.*checkpoint_name"),
    ],
    ids=name_of,
)
def test_operators_that_save_ops_rejects(op: Any, says: str) -> None:
    for ops in ((op,), (op, "aten.mm")):
        with pytest.raises(PolicyError, match=says):
            policies.save_ops(*ops)


def test_a_list_stands_for_the_overloads_that_reach_a_policy_and_may_contain_views() -> None:
    assert as_policy([aten.mm]) == as_policy([getattr(aten.mm, name) for name in aten.mm.overloads()])
    sums = as_policy(["aten.sum", "aten.view", aten.transpose.int])
    assert [sums.verdict_for(op) for op in (aten.sum.dim_IntList, aten.sum.int, MM)] == [SAVE, RECOMPUTE, RECOMPUTE]


def test_names_are_found_where_they_were_before() -> None:
    for name in in_jax.__all__:
        assert getattr(policies, name) is getattr(in_jax, name)
    assert in_jax.save_matmuls is policies.save_matmuls
    for module in (policies, in_jax):
        with pytest.raises(AttributeError, match="has no attribute 'save_everything'"):
            module.save_everything  # noqa: B018
