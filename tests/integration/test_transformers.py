"""Models of Hugging Face's transformers, compared with the library's own checkpointing."""

import copy
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import assert_same
from cases import plain as as_it_is
from graphs import count, graphs_of
from torch import Tensor, nn

import remat.nn
from benchmarks.libraries import applied, own_transformer, transformer, watched
from benchmarks.measure import held_bytes, leaked_bytes
from remat import PolicyError, RematError, policies
from remat.integrations.transformers import enable

transformers = pytest.importorskip("transformers")
GradientCheckpointingLayer = pytest.importorskip("transformers.modeling_layers").GradientCheckpointingLayer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("collector_off"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

IDS = torch.arange(2 * 16).reshape(2, 16) * 7 % 64
both_models = pytest.mark.parametrize("name", ["Llama", "GPT-2"])


def loss(model: Any, **arguments: Any) -> Tensor:
    torch.manual_seed(1)  # for dropout
    return model(input_ids=IDS, labels=IDS, **arguments).loss


def step(model: Any, **arguments: Any) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    found = loss(model, **arguments)
    found.backward()
    return found.detach(), [p.grad for p in model.parameters()]


def costs(model: Any) -> tuple[int, int, int]:
    """The bytes saved after the forward, the peak, and the products of a step."""
    step(model)  # creates the gradients
    _, peak, products = watched(step, model)
    return held_bytes(loss, model), peak, products


@cache
def costs_of(how: Callable[[Any], Any], name: str = "Llama") -> tuple[int, int, int]:
    return costs(how(transformer(name)))


@both_models
def test_a_region_runs_without_a_cache_in_training(name: str) -> None:
    """As with the library's checkpoint: the cache would keep what it is filled with. There is one warning."""
    plain, model = transformer(name), applied(transformer(name), None)
    kind = type(next(m for m in plain.modules() if isinstance(m, GradientCheckpointingLayer))).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert_same(step(model, use_cache=True), step(plain))
        assert model(input_ids=IDS, use_cache=True).past_key_values.get_seq_length() == 0
    (message,) = [str(each.message) for each in caught if "without a cache" in str(each.message)]
    assert f"a {kind} that is a region runs without a cache" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert_same(
                model.eval().generate(IDS[:, :4], max_new_tokens=4, do_sample=False),
                plain.eval().generate(IDS[:, :4], max_new_tokens=4, do_sample=False),
            )


@both_models
def test_a_cache_that_has_keys_is_filled_once_in_training(name: str) -> None:
    """As a prefix is: the numbers, and what the cache has afterwards, are those of the plain model."""

    def of(model: Any) -> tuple[Tensor, list[Tensor], int, int]:
        with torch.no_grad():
            torch.manual_seed(2)
            cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
        saved = held_bytes(lambda: loss(model, past_key_values=copy.deepcopy(cache)))
        found = loss(model, past_key_values=cache)
        found.backward()
        return (found.detach(), [p.grad for p in model.parameters()], cache.get_seq_length()), saved

    attention = next(type(m) for m in transformer(name).modules() if type(m).__name__.endswith("Attention"))
    (expected, plain), layers = of(transformer(name)), applied(transformer(name), None)
    for model in (layers, remat.nn.apply(transformer(name), attention)):
        found, saved = of(model)
        assert_same(found, expected)
        assert found[-1] == 4 + IDS.shape[1] and saved < plain


@both_models
def test_combination_with_the_librarys_checkpoint_is_an_error(name: str) -> None:
    model = own_transformer(transformer(name))
    with pytest.raises(RematError, match=r"activation checkpointing is on .*gradient_checkpointing_disable\(\)"):
        applied(model, None)
    model.gradient_checkpointing_disable()
    applied(model, None)
    own_transformer(model)  # after `apply`
    with pytest.raises(RematError, match=r"activation checkpointing is on .*`remat.nn.undo\(model\)`"):
        loss(model)
    assert_same(step(remat.nn.undo(model)), step(transformer(name)))


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "enable alone": lambda model: None,
    "by the older name": lambda model: model.gradient_checkpointing_enable(),
    "with arguments": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "by the newer name": lambda model: model.activation_checkpointing_enable(),
    "reentrant": lambda model: model.activation_checkpointing_enable({"use_reentrant": True}),
    "offload": lambda model: model.activation_checkpointing_enable(offload=True),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_enable(switch: str) -> None:
    """However its checkpointing is enabled afterwards, layers are regions with the policy."""
    plain = transformer("Llama")
    for policy in (None, policies.save_matmuls):
        model = copy.deepcopy(plain)
        assert enable(model, policy) is model
        SWITCHES[switch](model)
        assert_same(step(model, use_cache=True), step(plain))
        found = costs(model)
        if policy is None:
            assert all(ours <= its for ours, its in zip(found, costs_of(own_transformer), strict=True))
        else:
            assert found[2] == costs_of(as_it_is)[2]
        again = copy.deepcopy(model)
        SWITCHES[switch](again)
        assert costs(again) == found
    model.gradient_checkpointing_disable()
    assert costs(model)[0] == costs_of(as_it_is)[0]


def test_enable_every_second_layer() -> None:
    plain = transformer("Llama")
    model, its = enable(copy.deepcopy(plain)), copy.deepcopy(plain)
    for each in (model, its):
        each.activation_checkpointing_enable(every_n_layers=2)
    assert_same(step(model), step(plain))
    assert costs_of(own_transformer)[0] < costs(model)[0] <= costs(its)[0] < costs_of(as_it_is)[0]


def test_enable_with_a_context_fn() -> None:
    """The policy of the call replaces the one that was given to ``enable``."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, products)
    for policy in (None, policies.everything_saveable):
        model = enable(transformer("Llama"), policy)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"context_fn": contexts})
        assert_same(step(model), step(transformer("Llama")))
        held, _, count = costs(model)
        assert count == costs_of(as_it_is)[2]
        assert costs_of(own_transformer)[0] < held < costs_of(as_it_is)[0]


def test_enable_before_peft() -> None:
    """The adapters are inserted into layers that are regions already."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(model, config)

    plain, its = with_adapters(transformer("Llama")), with_adapters(own_transformer(transformer("Llama")))
    model = with_adapters(enable(transformer("Llama")))
    assert_same(step(model), step(plain))
    assert all(ours <= theirs for ours, theirs in zip(costs(model), costs(its), strict=True))


def test_install_before_and_after_the_switch() -> None:
    """The library makes a partial of torch's function when its checkpointing is enabled."""
    before = own_transformer(transformer("Llama"))
    with remat.compat.install(policies.save_matmuls):
        after = own_transformer(transformer("Llama"))
        figures = costs(before), costs(after)
        assert_same(step(after), step(before))
    assert figures[0][2] == costs_of(own_transformer)[2]
    assert figures[1][2] == costs_of(as_it_is)[2]


def test_a_part_with_a_policy_of_its_own() -> None:
    """It keeps its policy when checkpointing is enabled for the whole model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    plain = transformers.CLIPModel(config).train()
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)

    def step(model: Any) -> list[Tensor | None]:
        model.zero_grad()
        model(input_ids=IDS, pixel_values=images, return_loss=True).loss.backward()
        return [p.grad for p in model.parameters()]

    def products(*parts: tuple[str, Any]) -> int:
        model = copy.deepcopy(plain)
        for name, policy in parts:
            enable(model.get_submodule(name), policy)
        own_transformer(model)
        assert_same(step(model), step(plain))
        return watched(step, model)[2]

    nothing, everything = products(("", None)), products(("", policies.save_matmuls))
    mixed = products(("", None), ("vision_model", policies.save_matmuls))
    assert everything < mixed < nothing
    assert products(("vision_model", policies.save_matmuls)) == mixed
    assert products(("vision_model", policies.save_matmuls), ("", None)) == nothing


def test_other_models_are_not_changed() -> None:
    enable(transformer("Llama"))
    other = own_transformer(transformer("Llama"))
    functions = {layer._gradient_checkpointing_func.func for layer in other.model.layers}
    assert functions == {torch.utils.checkpoint.checkpoint}


def test_errors_of_enable() -> None:
    with pytest.raises(TypeError, match=r"takes a transformers\.PreTrainedModel.*got Linear"):
        enable(nn.Linear(2, 2))
    model = transformer("Llama")
    with pytest.raises(PolicyError, match="dots"):
        enable(model, "dots")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no activation checkpointing.*remat\.nn\.apply"):
        enable(model)
    assert not model.is_gradient_checkpointing


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 fails at a guard of its own")
def test_compile() -> None:
    """The model is one graph; its backward recomputes a layer as with the library's own checkpointing."""
    plain = transformer("Llama")
    plain.model.layers = plain.model.layers[:1]

    def compiled(model: Any) -> tuple[int, Any]:
        """The products in the backward's graph, and a step."""
        graphs, result = graphs_of(model, step)
        return count(graphs.backward), result

    without, expected = compiled(plain)
    its_own, _ = compiled(own_transformer(copy.deepcopy(plain)))
    for policy in (None, policies.save_matmuls):
        ours = applied(copy.deepcopy(plain), policy)
        products, result = compiled(ours)
        assert products == (its_own if policy is None else without)
        torch.testing.assert_close(result, expected)
        with remat.disable_remat():
            out = torch.compile(ours, backend="eager")(IDS, use_cache=True)
        torch.testing.assert_close(out.logits, plain(IDS).logits)
        assert out.past_key_values.get_seq_length() == IDS.shape[1]
    assert without < its_own


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=["nothing", "matmuls"])
def test_what_a_model_collects_in_lists_is_complete_and_freed(policy: Any) -> None:
    """Through a context variable it collects router logits, attentions and hidden states."""
    plain, ours = (transformer("Mixtral", num_hidden_layers=3, attn_implementation="eager") for _ in range(2))
    enable(ours, policy)

    def step(model: Any) -> Any:
        out = model(IDS, output_attentions=True, output_hidden_states=True, output_router_logits=True)
        gradients = torch.autograd.grad(out.logits.sum(), list(model.parameters()), allow_unused=True)
        return [t.detach() for t in (*out.router_logits, *out.attentions, *out.hidden_states)], gradients

    found = step(ours)
    assert_same(found, step(plain))
    assert len(found[0]) == 3 + 3 + 4
    del found
    assert leaked_bytes(step, ours) == 0
