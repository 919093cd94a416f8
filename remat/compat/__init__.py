"""Drop-ins for ``torch.utils.checkpoint`` and fairscale's ``checkpoint_wrapper``: change the import, keep the rest.

Every public name of ``torch.utils.checkpoint`` is here, except the reentrant ``CheckpointFunction``. Contexts, policies
and errors are torch's own objects, so code that imports them from torch works with these regions too.
"""

from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from .._core.state import disable_remat as disable_checkpointing
from .._core.state import is_recomputing
from ._checkpoint import checkpoint, checkpoint_sequential
from ._wrapper import apply_activation_checkpointing, checkpoint_wrapper, install, is_checkpointing, uninstall

__all__ = [
    "SAC_IGNORED_OPS", "CheckpointError", "CheckpointPolicy", "DefaultDeviceType", "GraphExecGroup",
    "SelectiveCheckpointContext", "apply_activation_checkpointing", "check_backward_validity", "checkpoint",
    "checkpoint_sequential", "checkpoint_wrapper", "create_selective_checkpoint_contexts", "detach_variable",
    "disable_checkpointing", "get_device_states", "install", "is_checkpointing", "is_recomputing", "noop_context_fn",
    "set_checkpoint_debug_enabled", "set_checkpoint_early_stop", "set_device_states", "uninstall",
]  # fmt: skip
