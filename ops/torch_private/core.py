"""PyTorch's private names that every call may use."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8fn.ops.torch_private import look_for, needed_by


def _of_gpus(name: str) -> Callable[..., Any]:
    """A function that only builds of PyTorch for GPUs have."""
    if torch.backends.cuda.is_built():  # for ROCm too
        found: Callable[..., Any] = getattr(torch._C, name)
        return found

    def absent(*_: object) -> Any:
        raise RuntimeError(f"torch {torch.__version__} is built for CPUs alone and has no torch._C.{name}")

    return absent


with needed_by("fp8fn"):
    import torch._prims_common as prims_common
    import torch.fx.experimental._config as symbolic_shapes
    import torch.utils._pytree as pytree
    from torch import _foreach_copy_ as copy_each
    from torch._C import DispatchKey, DispatchKeySet
    from torch._C import _AutoDispatchBelowAutograd as BelowAutograd
    from torch._C import _current_graph_task_id as graph_task
    from torch._C import _disabled_torch_function_impl as no_torch_function
    from torch._C import _dispatch_keys as keys_of
    from torch._C import _dispatch_keyset_full_after as keys_after
    from torch._C import _get_tracing_state as tracing_state
    from torch._C import _len_torch_dispatch_stack as dispatch_depth
    from torch._C import _len_torch_function_stack as function_depth
    from torch._C import _parse_dispatch_key as parse_key
    from torch._C._autograd import _profiler_enabled as is_profiling
    from torch._C._autograd import _top_saved_tensors_default_hooks as saving_hooks
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy as set_strategy
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_on_gpu  # type: ignore[attr-defined]
    from torch._C._functorch import (
        TransformType,
        get_interpreter_stack,
        get_unwrapped,
        is_batchedtensor,
        is_functorch_wrapped_tensor,
        maybe_current_level,
    )
    from torch._C._nn import linear
    from torch._functorch.autograd_function import enable_single_level_autograd_function
    from torch._guards import CompileContext, HopDispatchSetCache, TracingContext, compile_context, tracing
    from torch._library.simple_registry import singleton as registrations
    from torch._ops import HigherOrderOperator
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
    from torch.autograd.forward_ad import _set_fwd_grad_enabled as set_forward_mode
    from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
    from torch.cuda import _sleep as spin_gpu
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    look_for(forward_ad, "_current_level")
    look_for(prims_common, "is_non_overlapping_and_dense_or_false")
    look_for(torch.Tensor, "_base", "_version", "_make_wrapper_subclass")
    look_for(torch.nn.Module, "_compiled_call_impl")
    look_for(torch.ops.aten.add.Tensor, "_schema")
    current_gpu = _of_gpus("_cuda_getDevice")
    stream_handle = _of_gpus("_cuda_getCurrentRawStream")
    stream_identity = _of_gpus("_cuda_getCurrentStream")
