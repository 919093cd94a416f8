"""Models of Hugging Face's transformers, compared with the library's own checkpointing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import assert_same
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import remat.nn
from benchmarks.libraries import transformer, watched
from benchmarks.measure import assert_freed_without_gc, held_bytes
from benchmarks.wrappers import MATMULS
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
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def applied(model: Any, **options: Any) -> Any:
    return remat.nn.apply(model, GradientCheckpointingLayer, **options)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def as_it_is(model: Any) -> Any:
    return model


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
def costs_of(how: Callable[[Any], Any], name: str = "llama") -> tuple[int, int, int]:
    return costs(how(made(name)))


@pytest.mark.parametrize("name", MODELS)
def test_a_region_runs_without_a_cache_in_training(name: str) -> None:
    """As with the library's checkpoint: the cache would keep what it is filled with. There is one warning."""
    plain, model = made(name), applied(made(name))
    kind = type(next(m for m in plain.modules() if isinstance(m, GradientCheckpointingLayer))).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert_same(step(model, use_cache=True), step(plain, use_cache=False))
        assert model(input_ids=IDS, use_cache=True).past_key_values.get_seq_length() == 0
    (message,) = [str(each.message) for each in caught if "without a cache" in str(each.message)]
    assert f"a {kind} that is a region runs without a cache" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Where nothing is recomputed, the cache is filled.
        for context in (torch.no_grad, remat.disable_remat):
            with context():
                assert model(input_ids=IDS, use_cache=True).past_key_values.get_seq_length() == IDS.shape[1]
        with torch.no_grad():
            assert_same(
                model.eval().generate(IDS[:, :4], max_new_tokens=4, do_sample=False),
                plain.eval().generate(IDS[:, :4], max_new_tokens=4, do_sample=False),
            )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["layers", "attention"])
def test_a_cache_that_has_keys_is_filled_once_in_training(name: str, how: str) -> None:
    """As a prefix is: the numbers, and what the cache has afterwards, are those of the plain model."""

    def of(model: Any) -> tuple[Tensor, list[Tensor], int, int]:
        with torch.no_grad():
            torch.manual_seed(2)
            cache = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
        saved = held_bytes(lambda: loss(model, past_key_values=copy.deepcopy(cache)))
        found = loss(model, past_key_values=cache)
        found.backward()
        return (found.detach(), [p.grad for p in model.parameters()], cache.get_seq_length()), saved

    attention = next(type(m) for m in made(name).modules() if type(m).__name__.endswith("Attention"))
    model = applied(made(name)) if how == "layers" else remat.nn.apply(made(name), attention)
    (found, saved), (expected, plain) = of(model), of(made(name))
    assert_same(found, expected)
    assert found[-1] == 4 + IDS.shape[1] and saved < plain


@pytest.mark.parametrize("name", MODELS)
def test_combination_with_the_librarys_checkpoint_is_an_error(name: str) -> None:
    model = checkpointed(made(name))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RematError, match=r"activation checkpointing is on .*gradient_checkpointing_disable\(\)"):
        applied(model)
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    with pytest.raises(RematError, match="activation checkpointing is on"):
        remat.remat(layer)
    with pytest.raises(RematError, match="activation checkpointing is on"):
        remat.compat.checkpoint_wrapper(layer)
    assert [type(module) for module in model.modules()] == classes
    model.gradient_checkpointing_disable()
    applied(model)
    checkpointed(model)  # after `apply`
    with pytest.raises(RematError, match=r"activation checkpointing is on .*`remat.nn.undo\(model\)`"):
        loss(model, use_cache=False)
    model.eval()  # in eval mode the library doesn't checkpoint, so this isn't an error
    assert_same(loss(model, use_cache=False), loss(made(name).eval()))
    assert_same(step(remat.nn.undo(model).train()), step(made(name), use_cache=False))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_run_their_own_forward(how: str) -> None:
    model, plain = applied(made("llama")), made("llama")
    again = COPIES[how](model)
    with torch.no_grad():
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(1.5)
    assert_same(step(again, use_cache=False), step(made("llama"), use_cache=False))
    assert_same(step(model, use_cache=False), step(plain, use_cache=False))
    assert held_bytes(lambda: loss(again, use_cache=False)) == held_bytes(lambda: loss(model, use_cache=False))
    assert list(again.state_dict()) == list(plain.state_dict())
    assert all(isinstance(a, type(b)) for a, b in zip(again.modules(), plain.modules(), strict=True))


def test_a_layer_is_freed_without_garbage_collection() -> None:
    model = applied(made("llama"))
    with assert_freed_without_gc() as watch:
        watch(*model.model.layers, *model.model.layers.parameters())
        del model.model.layers


def enabled(model: Any, policy: Any = None) -> Any:
    assert enable(model, policy) is model
    return model


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
    plain = made("llama")
    for policy in (None, policies.save_matmuls):
        model = enabled(copy.deepcopy(plain), policy)
        SWITCHES[switch](model)
        assert_same(step(model), step(plain, use_cache=False))
        found = costs(model)
        if policy is None:
            assert all(ours <= its for ours, its in zip(found, costs_of(checkpointed), strict=True))
        else:
            assert found[2] == costs_of(as_it_is)[2]
        again = copy.deepcopy(model)
        SWITCHES[switch](again)
        assert costs(again) == found
    model.gradient_checkpointing_disable()
    assert costs(model)[0] == costs_of(as_it_is)[0]


def test_enable_every_second_layer() -> None:
    plain = made("llama")
    model, its = enabled(copy.deepcopy(plain)), copy.deepcopy(plain)
    for each in (model, its):
        each.activation_checkpointing_enable(every_n_layers=2)
    assert_same(step(model), step(plain))
    assert costs_of(checkpointed)[0] < costs(model)[0] <= costs(its)[0] < costs_of(as_it_is)[0]


def test_enable_with_a_context_fn() -> None:
    """The policy of the call replaces the one that was given to ``enable``."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, products)
    for policy in (None, policies.everything_saveable):
        model = enabled(made("llama"), policy)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"context_fn": contexts})
        assert_same(step(model), step(made("llama"), use_cache=False))
        held, _, count = costs(model)
        assert count == costs_of(as_it_is)[2]
        assert costs_of(checkpointed)[0] < held < costs_of(as_it_is)[0]


def test_enable_before_peft() -> None:
    """The adapters are inserted into layers that are regions already."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(model, config)

    plain, its = with_adapters(made("llama")), with_adapters(checkpointed(made("llama")))
    for policy in (None, policies.save_matmuls):
        model = with_adapters(enabled(made("llama"), policy))
        assert_same(step(model), step(plain, use_cache=False))
        found = costs(model)
        if policy is None:
            assert all(ours <= theirs for ours, theirs in zip(found, costs(its), strict=True))
        else:
            assert found[0] < costs(plain)[0] and found[2] < costs(its)[2]


def test_install_before_and_after_the_switch() -> None:
    """The library makes a partial of torch's function when its checkpointing is enabled."""
    before = checkpointed(made("llama"))
    with remat.compat.install(policies.save_matmuls):
        after = checkpointed(made("llama"))
        figures = costs(before), costs(after)
        assert_same(step(after), step(before))
    assert figures[0][2] == costs_of(checkpointed)[2]
    assert figures[1][2] == costs_of(as_it_is)[2]


def test_a_part_with_a_policy_of_its_own() -> None:
    """It keeps its policy when checkpointing is enabled for the whole model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    plain = transformers.CLIPModel(config).train()
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)

    def step(model: Any) -> list[Tensor | None]:
        model.zero_grad()
        model(input_ids=IDS, pixel_values=images, return_loss=True).loss.backward()
        return [p.grad for p in model.parameters()]

    def products(*parts: tuple[str, Any]) -> int:
        model = copy.deepcopy(plain)
        for name, policy in parts:
            enabled(model.get_submodule(name), policy)
        checkpointed(model)
        assert_same(step(model), step(plain))
        return watched(step, model)[2]

    nothing, everything = products(("", None)), products(("", policies.save_matmuls))
    mixed = products(("", None), ("vision_model", policies.save_matmuls))
    assert everything < mixed < nothing
    assert products(("vision_model", policies.save_matmuls)) == mixed
    assert products(("vision_model", policies.save_matmuls), ("", None)) == nothing


def test_other_models_are_not_changed() -> None:
    enabled(made("llama"))
    other = checkpointed(made("llama"))
    functions = {layer._gradient_checkpointing_func.func for layer in other.model.layers}
    assert functions == {torch.utils.checkpoint.checkpoint}


def test_errors_of_enable() -> None:
    with pytest.raises(TypeError, match=r"takes a transformers\.PreTrainedModel.*got Linear"):
        enable(nn.Linear(2, 2))
    model = made("llama")
    with pytest.raises(PolicyError, match="dots"):
        enable(model, "dots")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no activation checkpointing.*remat\.nn\.apply"):
        enable(model)
    assert not model.is_gradient_checkpointing


class Batches(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": (IDS[i % 2] + i) % 64, "labels": (IDS[i % 2] + i) % 64}


def trained(model: Any, checkpointing: bool, output: str) -> tuple[list[Tensor], int, int]:
    """The parameters after three steps of a Trainer, the peak and the products."""
    model.config.use_cache = False
    arguments = transformers.TrainingArguments(
        output_dir=output, max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no", seed=3,
        use_cpu=True, disable_tqdm=True, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Batches())
    _, peak, products = watched(trainer.train)
    return list(model.parameters()), peak, products


@pytest.mark.parametrize(("name", "own_switch"), [("llama", [True, False]), ("gpt2", [True])])
def test_trainer(name: str, own_switch: list[bool], tmp_path: Any) -> None:
    """Regions stay, whether or not the Trainer enables the library's checkpointing."""
    expected, plain_peak, plain_products = trained(made(name), False, str(tmp_path))
    its, its_peak, its_products = trained(made(name), True, str(tmp_path))
    assert_same(its, expected)
    for switch in own_switch:
        for policy in (None, policies.save_matmuls):
            actual, peak, products = trained(enabled(made(name), policy), switch, str(tmp_path))
            assert_same(actual, expected)
            assert peak < plain_peak
            if policy is None:
                assert peak <= its_peak and plain_products < products <= its_products
            else:
                assert products == plain_products


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 fails at a guard of its own")
def test_compile() -> None:
    """The model is one graph; its backward recomputes a layer as with the library's own checkpointing."""
    plain = made("llama")
    plain.model.layers = plain.model.layers[:1]

    def compiled(model: Any) -> tuple[int, Any]:
        """The products in the backward's graph, and a step."""
        products: list[int] = []

        def backward(graph: Any, inputs: Any) -> Any:
            products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward)
        result = step(torch.compile(model, backend=backend, fullgraph=True), use_cache=False)
        return sum(products), result

    without, expected = compiled(plain)
    its_own, _ = compiled(checkpointed(copy.deepcopy(plain)))
    for policy in (None, policies.save_matmuls):
        products, result = compiled(applied(copy.deepcopy(plain), policy=policy))
        assert products == (its_own if policy is None else without)
        torch.testing.assert_close(result, expected)
    assert without < its_own
    for policy in (None, policies.save_matmuls):
        with remat.compat.install(policy):
            products, result = compiled(checkpointed(copy.deepcopy(plain)))
        assert products == (its_own if policy is None else without)
        torch.testing.assert_close(result, expected)


def test_peak_with_dropout() -> None:
    """Skipped values take no memory in a recompute, and values saved only for it are freed once they are used."""
    ids = torch.arange(16 * 32).reshape(16, 32) * 7 % 64

    def peak(model: Any) -> int:
        def training_step() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()

        training_step()
        return watched(training_step)[1]

    own = transformer("GPT-2")
    contexts = partial(create_selective_checkpoint_contexts, [*MATMULS])
    own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})
    assert peak(enabled(transformer("GPT-2"), policies.save_matmuls)) <= peak(own)
