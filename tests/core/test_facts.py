"""The facts about an operation are what a call of it does."""

from typing import Any

import pytest
import torch

from remat._core.facts import Facts, facts_of, tensors

aten = torch.ops.aten
Q = torch.ones(1, 1, 3, 4)
NORM = torch.ones(2, 2), None, None, torch.zeros(2), torch.ones(2)
flash = aten._scaled_dot_product_flash_attention_for_cpu.default

CALLS: dict[str, tuple[Any, tuple, dict]] = {
    "pure": (aten.sin.default, (torch.ones(3),), {}),
    "in place": (aten.add_.Tensor, (torch.ones(3), torch.ones(3)), {}),
    "into results": (aten.frexp.Tensor_out, (torch.full((3,), 3.0),),
                     {"mantissa": torch.ones(3), "exponent": torch.ones(3, dtype=torch.int32)}),
    "into a list": (aten._foreach_mul_.Scalar, ([torch.ones(2), torch.ones(3)], 2.0), {}),
    "view": (aten.select.int, (torch.ones(3, 2), 0, 1), {}),
    "unsafe view": (aten._unsafe_view.default, (torch.ones(4), [2, 2]), {}),
    "shape in place": (aten.t_.default, (torch.ones(3, 2),), {}),
    "random": (aten.bernoulli.p, (torch.ones(3), 0.5), {}),
    "random in place": (aten.normal_.default, (torch.ones(3),), {}),
    "dropout": (aten.native_dropout.default, (torch.ones(3), 0.5, True), {}),
    "attention": (flash, (Q, Q, Q), {}),
    "attention without dropout": (flash, (Q, Q, Q, 0.0), {}),
    "statistics": (aten.native_batch_norm.default, (*NORM, True, 0.1, 1e-5), {}),
    "a number": (aten._local_scalar_dense.default, (torch.ones(()),), {}),
    "memory": (aten.empty_like.default, (torch.ones(3),), {}),
    "new memory": (aten.new_empty.default, (torch.ones(3), [2]), {}),
    "zeros of this shape": (aten.zeros_like.default, (torch.ones(3),), {}),
    "ones of this dtype": (aten.new_ones.default, (torch.ones(3), [2]), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_writes_shares_and_draws(name: str) -> None:
    op, args, kwargs = CALLS[name]
    facts, given = facts_of(op), [*tensors(args), *tensors(kwargs)]
    before, state = [t.clone() for t in given], torch.get_rng_state()
    result = op(*args, **kwargs)
    changed = [t for t, old in zip(given, before) if t.shape == old.shape and not torch.equal(t, old)]
    assert list(map(id, facts.written(args, kwargs))) == list(map(id, changed))
    assert facts.draws(args, kwargs) != torch.equal(torch.get_rng_state(), state)
    storages, written = ({t.untyped_storage().data_ptr() for t in each} for each in (given, changed))
    assert facts.views == any(t.untyped_storage().data_ptr() in storages - written for t in tensors(result))
    assert facts.observes == (not tensors(result)) and facts.updates_statistics == (name == "statistics")
    assert facts.makes_nothing == ("memory" in name) and not facts.foreign and facts.func is op
    assert facts.reads_nothing == ("memory" in name or " of this " in name)


def test_operators_of_other_kinds() -> None:
    assert facts_of(aten.record_stream.default).writes == [] and not facts_of(torch.ops.higher_order.cond).observes
    mark = torch.ops.profiler._record_function_exit._RecordFunction
    assert facts_of(mark).marks and facts_of(mark).foreign and not facts_of(aten.sin.default).marks
    assert facts_of(aten.sin.default).run is aten.sin.default is not facts_of(aten.mul.Scalar).run


def test_dropout_of_attention_draws_by_position_and_by_name() -> None:
    facts = Facts(flash)
    assert not facts.draws((Q, Q, Q), {}) and not facts.draws((Q, Q, Q), {"dropout_p": 0.0})
    draws = Facts(aten._scaled_dot_product_flash_attention.default)  # of a device
    assert draws.draws((Q, Q, Q, 0.5), {}) and draws.draws((Q, Q, Q), {"dropout_p": 0.5})
    assert not draws.draws((Q, Q, Q, 0.0), {}) and not draws.draws((Q, Q, Q), {"scale": 0.5})
    assert not Facts(aten._scaled_dot_product_flash_attention_backward.default).draws((), {"dropout_p": 0.5})
