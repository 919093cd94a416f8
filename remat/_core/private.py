"""Every private name of torch that the package uses, with its reason; ``tests/test_private_names.py`` tries them."""

from __future__ import annotations

import functools
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
import torch.autograd.forward_ad as fwAD
import torch.nn.utils.parametrize as _parametrize
import torch.overrides as _overrides
import torch.utils._device as _device
import torch.utils._python_dispatch as _python_dispatch
import torch.utils._pytree as _torch_pytree
import torch.utils.checkpoint as _checkpoint

F = TypeVar("F", bound=Callable)
_SKIP = _eval_frame._FrameAction.SKIP


def skipped_unless_inlined(fn: F) -> F:
    """Have Dynamo trace a function within its callers alone. Called by Python, it runs as it is, with all it calls."""
    _eval_frame.set_code_exec_strategy(fn.__code__, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))
    return fn


def never_traced(fn: F) -> F:
    """The same, and in its callers it breaks the graph: ``torch.compiler.disable`` without its cost in each call."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return skipped_unless_inlined(fn)


def no_nested_graph_breaks() -> Any:
    """Have Dynamo not break the graph within functions that it inlines: it does where the user's setting says so."""
    return torch._dynamo.patch_dynamo_config(nested_graph_breaks=False)


PlainDispatchMode = _python_dispatch.TorchDispatchMode  # Dynamo leaves code alone that is called under it


class DispatchMode(PlainDispatchMode):
    """A mode that sees operations. Dynamo leaves its code alone for good; torch's own wrapper says so in each call."""

    supports_higher_order_operators = True
    _should_skip_dynamo = classmethod(lambda cls: False)

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether Dynamo compiles under it: ``torch.cond`` and its like, which do that themselves and fail without."""
        return torch._higher_order_ops.utils._in_hop_compile()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        skipped_unless_inlined(cls.__torch_dispatch__)


# --- saved-tensor hooks -------------------------------------------------------------------------------------------
# The public context manager costs two Python objects and four calls per region.
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# A region hands its inputs to the hooks around it (an outer region, ``save_on_cpu``), as autograd does.
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# torch.func.grad and vjp switch the hooks off for the thread; the engine under them lifts that and puts it back.
hooks_disabled_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
hooks_disable = torch._C._autograd._saved_tensors_hooks_disable
hooks_enable = torch._C._autograd._saved_tensors_hooks_enable

# --- the running backward -----------------------------------------------------------------------------------------
# -1 outside of a backward pass: then an unpack serves one reader and stores nothing.
graph_task_id = torch._C._current_graph_task_id
set_grad_enabled = torch._C._set_grad_enabled  # for each recompute; the public ones take as long as an operation
# With a graph that is kept, nodes don't release what they saved, so slots must let go by themselves.
graph_task_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
current_node = torch._C._current_autograd_node
# Whether the backward pass that runs now, which may be for some inputs alone, goes through a node.
will_execute_node = torch._C._will_engine_execute_node
# The ``GraphExecGroup`` in whose scope a backward runs; torch has the getter for those who build checkpoints.
graph_exec_group = torch._C._get_graph_exec_group


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass ends (the hook that DDP uses; there is no public one)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# The number of a graph node, which grows with its creation in a thread: older than the region or not.
sequence_number = methodcaller("_sequence_nr")


def version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor (inference tensors have none and can't be changed): changed in place or not."""
    try:
        return tensor._version
    except RuntimeError:
        return NO_VERSION


NO_VERSION = -1
raw_version = attrgetter("_version")  # of many tensors, without a Python frame for each; inference tensors raise
# What a view is a view of: a saved view of a region's input needs no recompute. And the node that made a tensor.
origin = attrgetter("_base", "grad_fn")
saved_look = attrgetter("dtype", "shape", "device", "grad_fn.__class__", "_version")  # all in one call


# How many ``torch.autograd.grad(..., is_grads_batched=True)`` run, which forbid random operations: both return that.
increment_batched_depth = torch._C._vmapmode_increment_nesting
decrement_batched_depth = torch._C._vmapmode_decrement_nesting


def dual_level_active() -> bool:
    """Whether any forward-mode level is active, before every input is asked for its tangent."""
    return fwAD._current_level >= 0


# A method of a tensor subclass may have switched it off for the backward that it started.
torch_function_enabled = torch._C._EnableTorchFunction
is_torch_function_enabled = torch._C._is_torch_function_enabled

set_forward_grad_enabled = fwAD._set_fwd_grad_enabled  # autograd.Function switches it off; a level below needs it

# --- torch.func levels --------------------------------------------------------------------------------------------
transforms_active = torch._C._are_functorch_transforms_active
current_interpreter = _pyfunctorch.retrieve_current_functorch_interpreter
top_interpreter = torch._C._functorch.peek_interpreter_stack
interpreter_stack = torch._C._functorch.get_interpreter_stack  # without the Python objects that stand for levels
without_levels = _pyfunctorch.temporarily_clear_interpreter_stack
# The kinds of levels, as numbers: to compare two of torch's objects takes ten times as long.
_Kind = torch._C._functorch.TransformType
GRAD, JVP, VMAP, FUNCTIONALIZE = (kind.value for kind in (_Kind.Grad, _Kind.Jvp, _Kind.Vmap, _Kind.Functionalize))
current_level = torch._C._functorch.maybe_current_level
level_of = torch._C._functorch.maybe_get_level
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_dead = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
unwrap_once = torch._C._functorch.get_unwrapped
is_grad_wrapper = torch._C._functorch.is_gradtrackingtensor
unwrap_grad, wrap_grad = torch._C._functorch._unwrap_for_grad, torch._C._functorch._wrap_for_grad
unwrap_batched, wrap_batched = torch._C._functorch._unwrap_batched, torch._C._functorch._add_batch_dim
vmap_level = _vmap.vmap_increment_nesting
grad_level = _eager_transforms.grad_increment_nesting
allow_requires_grad = _eager_transforms.enable_inplace_requires_grad  # torch.func marks what it differentiates with it
# One Function node at one level, not at all of them: what torch uses for its own Functions under torch.func.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
custom_function_call = torch.autograd.function.custom_function_call  # what ``Function.apply`` calls under transforms
single_level_functions_allowed = _functorch_utils.enable_single_level_autograd_function
# The backward that torch.func.grad runs itself: nobody can reach its graph (see ``_functorch/proof.py``).
func_grad_engine_call = _eager_transforms._autograd_grad
engine_call = torch.autograd.graph._engine_run_backward
# What grad_fn's number is compared with: everything that a region records has a larger one.
next_sequence_number = torch._C._autograd._get_sequence_nr


def fills_what_it_saves() -> bool:
    """Whether the node that runs now is of an operation that saves a tensor and then fills it: but one is known."""
    node = torch._C._current_autograd_node()
    return type(node).__name__.startswith("RreluWithNoise")


def gradient_hooks(tensor: torch.Tensor) -> tuple[dict, dict]:
    """The hooks registered on a tensor, by their numbers: those that a recompute has added must not stay."""
    return tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}


def tracing() -> bool:
    """Whether ``make_fx``, ``torch.export`` or ``torch.jit.trace`` takes a trace: then a region is inlined."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None or torch.jit.is_tracing()


def exporting() -> bool:
    """Whether ``torch.export`` runs: Dynamo of torch 2.11 takes the public ``is_exporting()`` for true at all times."""
    return torch.compiler._is_exporting_flag


profiling = torch._C._autograd._profiler_enabled  # nothing public tells whether a profiler runs in this thread

# --- operations ---------------------------------------------------------------------------------------------------
without_dispatch = torch._C._DisableTorchDispatch  # aliases of plain tensors are no business of any mode
modes_that_see = torch._C._len_torch_dispatch_stack  # how many there are: most often none
as_subclass = torch.Tensor._make_subclass  # an alias that no mode sees; ``as_subclass`` would record it
without_overrides = torch._C.DisableTorchFunctionSubclass  # for tensors that watch what is done with them
without_torch_function = torch._C.DisableTorchFunction  # the bookkeeping of operations is not the user's doing

FakeTensor = torch._subclasses.fake_tensor.FakeTensor  # has shapes alone, so there is nothing to keep
has_no_memory = torch._is_zerotensor  # the zeros of forward mode: a kernel can't read them as plain memory


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the memory of this one (nothing public counts that)."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # the tensor and its storage in Python


# The two modes of its selective form, which have the user's policy in them.
SelectiveModes = _checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode


module_calls = {torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__}  # in stacks
original_checkpoint = _checkpoint.checkpoint  # another may be put in its place


def let_dynamo_trace_checkpoint(replaced: bool) -> None:
    """Dynamo takes whatever has the public name for torch's function: it would not look into what replaces that."""
    from torch._dynamo.variables import builder

    builder.is_utils_checkpoint = (
        (lambda obj: obj is original_checkpoint) if replaced else torch._dynamo.utils.is_utils_checkpoint
    )


def activation_checkpointing() -> tuple[Callable, Callable]:
    """Torch's functions that choose modules and wrap one, which FSDP's users call; they have no public place."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper.apply_activation_checkpointing, checkpoint_wrapper.checkpoint_wrapper


def switched() -> bool:
    """Whether ``set_checkpoint_debug_enabled`` or ``set_checkpoint_early_stop`` is on: these have no getters."""
    return _checkpoint._checkpoint_debug_enabled is not None or _checkpoint._enable_checkpoint_early_stop is not None


def checkpoint_switches() -> dict[str, bool]:
    """What they say, by the names of options."""
    says = {"debug": _checkpoint._checkpoint_debug_enabled, "early_stop": _checkpoint._enable_checkpoint_early_stop}
    return {name: bool(value) for name, value in says.items() if value is not None}


# --- modules ------------------------------------------------------------------------------------------------------


def cached_weights() -> tuple[int, dict]:
    """How often ``parametrize.cached()`` is entered, and what it has computed so far; it has no public name."""
    return _parametrize._cache_enabled, _parametrize._cache


def set_cached_weights(depth: int, weights: dict) -> None:
    _parametrize._cache_enabled, _parametrize._cache = depth, weights


# Types registered with torch only (Hugging Face's outputs are), with the functions that take them apart.
TORCH_NODES = _torch_pytree.SUPPORTED_NODES
MappingKey = _torch_pytree.MappingKey  # they print the path to a leaf of such a type
SequenceKey = _torch_pytree.SequenceKey

# --- ambient state ------------------------------------------------------------------------------------------------
# What the functions of torch.backends.cuda call: a region asks for all of these three times.
sdpa_enabled = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)
# Which attention kernel is tried first; only `sdpa_kernel(..., set_priority=True)` sets it in public.
sdpa_priority, set_sdpa_priority = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order


# What ``torch.set_float32_matmul_precision`` sets, by one of the two places where it does, which tells all its values
# apart. The public getter takes 18 us to refuse where newer setters are in use.
float32_precision = functools.partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul")
# A device as a context puts its mode on top of the stack of modes, ``torch.set_default_device`` at the bottom: what is
# there is read and put back mode by mode, for the public ways can only add one.
DeviceMode = _device.DeviceContext
function_modes = torch._C._len_torch_function_stack
function_mode_at = torch._C._get_function_stack_at
pop_function_mode, push_function_mode = _overrides._pop_mode, _overrides._push_mode


def default_device_notes() -> tuple[Any, Any]:
    """What two others note of the mode at the bottom, the one of ``set_default_device``: torch, and Dynamo."""
    return _device.CURRENT_DEVICE, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def set_default_device_notes(value: tuple[Any, Any]) -> None:
    _device.CURRENT_DEVICE, torch._GLOBAL_DEVICE_CONTEXT.device_context = value


# In a thread, and those of devices in a backward pass that it starts.
carry = torch._C._stash_obj_in_tls
is_carried, carried = torch._C._is_key_in_tls, torch._C._get_obj_in_tls

# What a policy is asked about; torch documents `torch.ops` but not the types of what stands there.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
OPERATORS = OpOverload, OpOverloadPacket, HigherOrderOperator
operator_names = torch._C._dispatch_get_all_op_names  # for "did you mean"
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # tells composites from what a dispatch mode sees


def overload_of(op: Any) -> Any:
    """The operator behind a function made by ``torch.library.custom_op``, which is what users have at hand."""
    return getattr(op, "_opoverload", op)
