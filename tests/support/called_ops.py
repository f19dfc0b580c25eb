"""The ops of fp8fn that a call reaches."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    """The ops of fp8fn that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8fn":
            self.called.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))
