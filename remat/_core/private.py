"""Every private name of torch that the package uses, with its reason; ``test_private_names.py`` tests them."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame
import torch._functorch.eager_transforms as _eager_transforms
import torch._functorch.pyfunctorch as _pyfunctorch
import torch._functorch.utils as _functorch_utils
import torch._functorch.vmap as _vmap
import torch._subclasses.fake_tensor
import torch._subclasses.functional_tensor
import torch.autograd.forward_ad as fwAD
import torch.fx.experimental.proxy_tensor as _proxy_tensor
import torch.nn.utils.parametrize as _parametrize
import torch.utils._device as _device
import torch.utils._python_dispatch as _python_dispatch
import torch.utils._pytree as _torch_pytree
import torch.utils.checkpoint as _checkpoint
from torch._C import _autograd, _functorch
from torch.autograd import profiler_legacy

F = TypeVar("F", bound=Callable)
_SKIP = _eval_frame._FrameAction.SKIP


def skipped_unless_inlined(fn: F) -> F:
    """Make Dynamo trace a function only within its callers. Called by Python, it and all that it calls run eagerly."""
    _eval_frame.set_code_exec_strategy(fn.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return fn


def never_traced(fn: F) -> F:
    """Make Dynamo never trace a function, like ``torch.compiler.disable``, but without the latter's cost per call."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped_unless_inlined(fn)


def no_nested_graph_breaks() -> Any:
    """Keep Dynamo from breaking the graph within functions that it inlines, even if the user's config allows it."""
    return torch._dynamo.patch_dynamo_config(nested_graph_breaks=False)


PlainDispatchMode = _python_dispatch.TorchDispatchMode  # Dynamo skips code that is called under it


class DispatchMode(PlainDispatchMode):
    """A dispatch mode. Dynamo skips its code permanently, instead of in each call as with torch's own wrapper."""

    supports_higher_order_operators = True
    _should_skip_dynamo = classmethod(lambda cls: False)

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether Dynamo compiles under it: only in operators that compile, like ``torch.cond``, and fail otherwise."""
        return torch._higher_order_ops.utils._in_hop_compile()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        skipped_unless_inlined(cls.__torch_dispatch__)


# --- saved-tensor hooks -------------------------------------------------------------------------------------------
push_hooks, pop_hooks = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks
# A region hands its inputs to the hooks around it (an outer region, ``save_on_cpu``), as autograd does.
top_hooks = _autograd._top_saved_tensors_default_hooks
# torch.func.grad and vjp disable the hooks for the thread; the engine below them enables the hooks, then restores that.
hooks_disabled_message = _autograd._saved_tensors_hooks_get_disabled_error_message
hooks_disable, hooks_enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable

# --- the running backward -----------------------------------------------------------------------------------------
graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward pass
set_grad_enabled = torch._C._set_grad_enabled  # for each recompute; the public ones take as long as an operation
graph_task_keeps_graph = _autograd._get_current_graph_task_keep_graph  # nodes keep tensors then; true outside of one
current_node = torch._C._current_autograd_node
will_execute_node = torch._C._will_engine_execute_node  # a pass may be for some inputs only
graph_exec_group = torch._C._get_graph_exec_group  # the ``GraphExecGroup`` in whose scope a backward runs
# Calls a function when the running backward pass ends (the hook that DDP uses; there is no public one).
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
# The number of a graph node, which grows with each node that a thread makes: it shows which nodes are older.
sequence_number = methodcaller("_sequence_nr")


def version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor, which counts in-place modifications; -1 for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


raw_version = attrgetter("_version")  # for many tensors, without a Python frame for each; inference tensors raise
base_of = attrgetter("_base")  # an attribute, as subclasses may refuse methods such as `_is_view`
origin = attrgetter("_base", "grad_fn")  # the base of a view, and the node that made a tensor
saved_look = attrgetter("dtype", "shape", "device", "grad_fn.__class__", "_version")  # all in one call
# How many ``torch.autograd.grad(..., is_grads_batched=True)`` run, which forbid random operations.
increment_batched_depth = torch._C._vmapmode_increment_nesting
decrement_batched_depth = torch._C._vmapmode_decrement_nesting


def dual_level_active() -> bool:
    """Whether any forward-mode level is active; without one, no tensor has a tangent to look for."""
    return fwAD._current_level >= 0


# A method of a tensor subclass may have disabled ``__torch_function__`` for a backward that it started.
torch_function_enabled, is_torch_function_enabled = torch._C._EnableTorchFunction, torch._C._is_torch_function_enabled

set_forward_grad_enabled = fwAD._set_fwd_grad_enabled  # autograd.Function disables it; a level below needs it

# --- torch.func levels --------------------------------------------------------------------------------------------
transforms_active = torch._C._are_functorch_transforms_active
current_interpreter = _pyfunctorch.retrieve_current_functorch_interpreter
top_interpreter = _functorch.peek_interpreter_stack
interpreter_stack = _functorch.get_interpreter_stack  # without the Python objects that represent levels
without_levels = _pyfunctorch.temporarily_clear_interpreter_stack
# The kinds of levels, as numbers: to compare two of torch's enum members takes ten times as long.
_Kind = _functorch.TransformType
GRAD, JVP, VMAP, FUNCTIONALIZE = (kind.value for kind in (_Kind.Grad, _Kind.Jvp, _Kind.Vmap, _Kind.Functionalize))
current_level, level_of = _functorch.maybe_current_level, _functorch.maybe_get_level
is_dead = _functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
unwrap_once = _functorch.get_unwrapped
is_wrapped = _functorch.is_functorch_wrapped_tensor
is_grad_wrapper, is_batched = _functorch.is_gradtrackingtensor, _functorch.is_batchedtensor
unwrap_grad, wrap_grad = _functorch._unwrap_for_grad, _functorch._wrap_for_grad
unwrap_batched, wrap_batched = _functorch._unwrap_batched, _functorch._add_batch_dim
DYNAMO = "torch._dynamo"  # the module of the compiler, which is imported at its first use
vmap_level, grad_level = _vmap.vmap_increment_nesting, _eager_transforms.grad_increment_nesting
allow_requires_grad = _eager_transforms.enable_inplace_requires_grad  # for inputs that torch.func differentiates
SingleLevelFunction = torch.autograd.function._SingleLevelFunction  # a node at one level, not at all of them
custom_function_call = torch.autograd.function.custom_function_call  # what ``Function.apply`` calls under transforms
single_level_functions_allowed = _functorch_utils.enable_single_level_autograd_function
# The backward that torch.func.grad runs itself: its graph is not reachable (see ``_functorch/levels.py``).
func_grad_engine_call = _eager_transforms._autograd_grad
engine_call = torch.autograd.graph._engine_run_backward
next_sequence_number = _autograd._get_sequence_nr  # older nodes have smaller numbers


def excludes_autograd() -> bool:
    """Whether the thread is in inference mode. ``torch.is_inference_mode_enabled`` says no inside of a transform."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def fills_what_it_saves() -> bool:
    """Whether the current node's operation saves a tensor before it fills it. Only one such operation is known."""
    return type(current_node()).__name__.startswith("RreluWithNoise")


def unwrap_if_dead(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrappers of levels that have ended. torch unwraps one, but they may be nested."""
    while is_dead(tensor):
        tensor = _functorch.unwrap_if_dead(tensor)
    if is_batched(tensor) and (content := unwrap_if_dead(inner := unwrap_once(tensor))) is not inner:
        return wrap_batched(content, _functorch.maybe_get_bdim(tensor), level_of(tensor))
    return tensor


def gradient_hooks(tensor: torch.Tensor) -> tuple[dict, dict]:
    """The hooks registered on a tensor, by their numbers. Those that a recompute adds are removed."""
    return tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}


backward_hooks = attrgetter("_backward_hooks")  # for many tensors; None if there are none


def set_backward_hooks(tensor: torch.Tensor, hooks: dict) -> None:
    """Give a tensor hooks on its gradient, those of the tensor whose place it takes in a recompute."""
    tensor._backward_hooks = OrderedDict(hooks)
    if tensor.grad_fn is not None:
        tensor.grad_fn._register_hook_dict(tensor)


_mode, _PROXY, _jit_traces = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY, torch._C._is_tracing


def tracing() -> bool:
    """Whether ``make_fx``, ``torch.export`` or ``torch.jit.trace`` is tracing: then a region is inlined."""
    return _jit_traces() or _mode(_PROXY) is not None


def exporting() -> bool:
    """Whether ``torch.export`` runs. Dynamo of torch 2.11 treats the public ``is_exporting()`` as always true."""
    return torch.compiler._is_exporting_flag


profiling = _autograd._profiler_enabled  # no public function reports whether a profiler runs in this thread

# --- operations ---------------------------------------------------------------------------------------------------
without_dispatch = torch._C._DisableTorchDispatch  # for the package's aliases of plain tensors, which no mode must see
modes_that_see = torch._C._len_torch_dispatch_stack  # the number of active dispatch modes, most often 0
as_subclass = torch.Tensor._make_subclass  # an alias that no mode sees; the public ``as_subclass`` would be recorded
without_overrides = torch._C.DisableTorchFunctionSubclass  # for subclasses that watch operations on their tensors
without_torch_function = torch._C.DisableTorchFunction  # for the package's bookkeeping, which overrides must not see

FakeTensor, FakeTensorMode = torch._subclasses.FakeTensor, torch._subclasses.FakeTensorMode  # shapes without values
has_no_memory = torch._is_zerotensor  # the zeros of forward mode: a kernel can't read them as plain memory
# Lets an operation in a mode handle these zeros as elsewhere. Torch's own checkpoint has such a guard too.
with_zeros = functools.partial(torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ZeroTensor, False)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor shares the memory of this one (no public function counts that)."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # the tensor and its storage in Python


# The two modes of torch's selective checkpoint, which contain the user's policy.
SelectiveModes = _checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode
module_calls = {torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__}  # in stacks
original_checkpoint = _checkpoint.checkpoint  # ``remat.compat.install`` may replace the public name


def let_dynamo_trace_checkpoint(replaced: bool) -> None:
    """Let Dynamo trace a replacement of torch's checkpoint: it treats whatever has that name as torch's function."""
    from torch._dynamo.variables import builder

    own = torch._dynamo.utils.is_utils_checkpoint
    builder.is_utils_checkpoint = (lambda obj: obj is original_checkpoint) if replaced else own


def activation_checkpointing() -> tuple[Callable, Callable]:
    """Torch's functions that choose modules and wrap one, which FSDP's users call; they have no public name."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper.apply_activation_checkpointing, checkpoint_wrapper.checkpoint_wrapper


def checkpoint_switches() -> dict[str, bool]:
    """What ``set_checkpoint_debug_enabled`` and ``set_checkpoint_early_stop`` set, by option. They have no getters."""
    values = {"debug": _checkpoint._checkpoint_debug_enabled, "early_stop": _checkpoint._enable_checkpoint_early_stop}
    return {name: bool(value) for name, value in values.items() if value is not None}


# --- modules ------------------------------------------------------------------------------------------------------
def cached_weights() -> tuple[int, tuple]:
    """The depth of ``parametrize.cached()``, and the entries of its cache of weights; there is no public getter."""
    return _parametrize._cache_enabled, tuple(_parametrize._cache.items())


def set_cached_weights(depth: int, entries: tuple) -> None:
    _parametrize._cache_enabled, _parametrize._cache = depth, dict(entries)


# Types registered only with torch's pytree, such as Hugging Face's outputs, with the functions that flatten them.
TORCH_NODES = _torch_pytree.SUPPORTED_NODES

# --- ambient state ------------------------------------------------------------------------------------------------
# The getters that the functions of torch.backends.cuda call. A region calls all of them three times.
sdpa_enabled = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)
# The switches of the libraries that have kernels for recurrent networks; the public ones are properties of modules.
kernel_libraries = (
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)
# The order in which attention kernels are tried; the only public setter is `sdpa_kernel(..., set_priority=True)`.
sdpa_priority, set_sdpa_priority = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
# The setting of ``torch.set_float32_matmul_precision``, read from one of the two places that it sets, in which all its
# values differ. The public getter takes 18 us to raise an error where newer setters are in use.
float32_precision = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
DeviceMode = _device.DeviceContext  # the mode of a default device; ``torch.get_default_device`` makes a tensor
function_modes, function_mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at

# Values of a thread, and of the device threads in a backward pass that it starts.
carry = torch._C._stash_obj_in_tls
is_carried, carried = torch._C._is_key_in_tls, torch._C._get_obj_in_tls

# The operators that a policy judges; torch documents `torch.ops` but not the types of its members.
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
OPERATORS = OpOverload, OpOverloadPacket, HigherOrderOperator
operator_names = torch._C._dispatch_get_all_op_names  # for "did you mean"
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # a dispatch mode doesn't see composite operators


def overload_of(op: Any) -> Any:
    """The operator behind a function made by ``torch.library.custom_op``, which users pass instead of the operator."""
    return getattr(op, "_opoverload", op)


tree_map, tree_map_only = _torch_pytree.tree_map, _torch_pytree.tree_map_only  # Dynamo traces them, and not optree's
FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor  # what AOT autograd traces with


def said_of_node() -> dict[str, Any]:
    """The annotations that ``torch.fx.traceback.annotate`` gave the current node; they have no getter."""
    return torch.fx.traceback.current_meta.get("custom") or {}


def traced_node(tensor: torch.Tensor) -> Any:
    """The node of a tensor in the graph that AOT autograd is tracing; None if it isn't tracing."""
    mode = _mode(_PROXY)
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    proxy = _proxy_tensor.get_proxy_slot(value_now(tensor), mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


def traced_by_torch(function: Any) -> bool:
    """Whether torch itself calls its checkpoint with this function, to trace a region that Dynamo has captured."""
    owner = getattr(function, "__self__", function)
    return getattr(owner, "__module__", None) in ("torch._higher_order_ops.wrap", "torch.fx.interpreter")


def functionalizing() -> bool:
    """Whether AOT autograd runs the function, which it does first without a graph."""
    return _mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


# Passes a function's graph, with its tensors as arguments, to a wrapper that only AOT autograd traces, not Dynamo.
lifted = torch._higher_order_ops.wrap.dynamo_bypassing_wrapper
# Whether Dynamo can pass an object such as a policy to a constant function: that of torch 2.11 can't.
TAKES_OBJECTS_AS_CONSTANTS = torch.__version__ >= "2.12"


def constant(fn: Any) -> Any:
    """``torch.compiler.assume_constant_result``, without its import of Dynamo, which takes as long as that of torch."""
    fn._dynamo_marked_constant = True
    return fn


def graph_break(reason: str) -> None:
    """Make Dynamo break the graph."""
    torch._dynamo.graph_break(msg=reason)


def traced_function() -> tuple[torch.fx.Graph, list[torch.fx.GraphModule], list[int], torch.fx.Graph]:
    """What Dynamo traces now for an operator, with fake tensors on the nodes.

    These are the graph of the operator's function, the functions that operators in it call, the first versions of its
    tensor inputs, and the whole graph.
    """
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    tracer = output.current_tracer
    attributes = [output.nn_modules.get(node.target) for node in tracer.graph.find_nodes(op="get_attr")]
    called = [each for each in attributes if isinstance(each, torch.fx.GraphModule)]
    return tracer.graph, called, tracer._input_versions_at_beginning, output.root_tracer.graph


graph_ids = torch._higher_order_ops.wrap.uid  # of checkpointed parts: the partitioner saves values between two parts


def value_now(tensor: Any) -> Any:
    """The current value of a tensor of AOT autograd. A later in-place modification makes another value."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def holding(value: Any) -> Any:
    """A new tensor with a value that ``value_now`` has returned."""
    return FunctionalTensor.to_functional(value) if isinstance(value, torch.Tensor) else value


def start_recording_allocations() -> None:
    """Record what the CPU's allocator does in this thread, with kernels' own memory: no public mode is as quiet."""
    torch.autograd._enable_profiler_legacy(profiler_legacy.profile(profile_memory=True).config())


def recorded_allocations(mark: str) -> list[int | None]:
    """Stop, and return the bytes that were allocated or, as negative numbers, freed; None at each range ``mark``."""
    events: Any = itertools.chain.from_iterable(torch.autograd._disable_profiler_legacy())
    allocations = (event for event in events if event.kind() == "memory_alloc" or event.name() == mark)
    return [event.cpu_memory_usage() if event.kind() == "memory_alloc" else None for event in allocations]
