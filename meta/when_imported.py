"""Runs a function once a module is imported, so that fp8fn can extend a module that it does not import itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, function: Callable[[], None]) -> None:
    """Calls `function()` now if `module` is imported, else right after its import."""
    imported = sys.modules.get(module)
    if imported is None or getattr(imported.__spec__, "_initializing", False):
        sys.meta_path.insert(0, _Finder(module, function))
    else:
        function()


class _Finder(MetaPathFinder):
    """Finds one module as the finders behind it do, with a loader that calls a function behind theirs.

    It stays where it is. Other threads may be importing: with one finder fewer they would pass over the next, and not
    find their module. `importlib.util.find_spec` finds the module too, and imports nothing.
    """

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self.module, self.function = module, function
        self.called = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self.called:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.call)
        return spec

    def call(self) -> None:
        self.called = True
        self.function()


class _Loader(Loader):
    def __init__(self, loader: Loader, function: Callable[[], None]) -> None:
        self.loader, self.function = loader, function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.function()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
