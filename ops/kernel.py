"""The dispatch of every op: its kernels as values, the choice among them, and the calls that are kept.

An op is a `Dispatch`: a list of `Kernel`s, and how its arguments become operands. The first call on tensors of some
kinds checks the arguments, chooses a kernel, plans its launches and keeps them. Each later call on tensors of the same
kinds only looks the launches up and starts them. The key is made of everything that the plan is made from, so that no
argument can be left out of it. `explain`, the log and the tests read the same `Choice`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from fp8fn.ops import ranges, targets
from fp8fn.ops.code_cache import warn_once
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import Outputs, call_of, keep, kind, recall
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.launch import Launch, described
from fp8fn.ops.operands import Quantized
from fp8fn.ops.targets import Target

Refusal: TypeAlias = str | None
"""Why not, or None."""

_log = logging.getLogger("fp8fn")


class Operands(Protocol):
    """An op's arguments after the checks, for one target, with the outputs that a kernel fills."""

    @property
    def target(self) -> Target: ...

    @property
    def outputs(self) -> Outputs: ...


def takes_all(_: Any) -> None:
    """A kernel's `accepts` where there is nothing that it refuses."""


def no_config(_: Any) -> None:
    """A kernel's `configure` where its plan decides, or there is nothing to decide."""


def _nothing(_: Any) -> None:
    return None


def _itself(operands: Any) -> Any:
    return operands


class deferred:
    """Stands for a module of kernels, which is imported when one of its functions is first called.

    `import fp8fn` registers every op, a process calls few of them, and an op few of its kernels. Each attribute is a
    function that calls the module's own; a constant needs an import where it is read. Type checkers read an import:

        if TYPE_CHECKING:
            from fp8fn.ops.cuda.gemm import gemv_mx
        else:
            gemv_mx = deferred("fp8fn.ops.cuda.gemm.gemv_mx")
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, function: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.module), function)(*args, **kwargs)

        return call


@dataclass(frozen=True)
class Kernel:
    """One kernel of an op.

    Args:
        accepts: why the kernel can't compute a problem, or None.
        configure: the kernel's own configuration of a problem that it accepts.
        plan: the launches, in order, that fill the outputs.
        untuned: why the kernel should not serve a problem that no table names it for, or None.
        source: who decides where `configure` does: the word for the log.
        named_only: whether the kernel serves only where a table names it.
        fault: why a launch of the plan can't be compiled or loaded on this machine, or None where it only has to start.
    """

    name: str
    accepts: Callable[[Any], Refusal]
    configure: Callable[[Any], Any]
    plan: Callable[[Any, Any], tuple[Launch, ...]]
    untuned: Callable[[Any], Refusal] = takes_all
    source: str = "default"
    named_only: bool = False
    fault: Callable[[Any], Refusal] = takes_all

    @property
    def backend(self) -> str:
        """`"cuda"`, `"hip"` or `"triton"`: what compiles the kernel; the first part of its name."""
        return self.name.partition("_")[0]


@dataclass(frozen=True)
class Named:
    """A table's verdict on a problem.

    `kernel` is the fastest one, if any is named; `configure` makes its configuration from the kernel's own, and
    `source` is the table's name. `slower` are kernels that the table has found to be slower, each with the reason.
    """

    kernel: str | None
    source: str
    configure: Callable[[Any], Any]
    slower: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The kernel of a problem, None for plain PyTorch; who chose it; and why not those before it in the list."""

    kernel: Kernel | None
    config: Any
    source: str
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "reference" if self.kernel is None else self.kernel.name

    def describe(self) -> str:
        """One line for the log and for `explain`."""
        others = "".join(f"; not {name}: {reason}" for name, reason in self.refused)
        return f"{self.name} by {self.source}{others}"

    def plan(self, operands: Operands) -> tuple[Launch, ...]:
        """The launches, each with this choice as its reason; none where plain PyTorch serves."""
        if self.kernel is None:
            return ()
        launches = self.kernel.plan(operands, self.config)
        return tuple(replace(launch, reason=self._reason(launch)) for launch in launches)

    def _reason(self, launch: Launch) -> str:
        """The plan's own reason first, where it has one."""
        return f"{launch.reason}; {self.describe()}" if launch.reason else self.describe()


def choose(
    problem: Any, kernels: Sequence[Kernel], named: Named | None = None, faults: Mapping[str, str] | None = None
) -> Choice:
    """The kernel that a table names, where it accepts the problem, else the first of the list that does.

    `faults` are kernels that this machine can't compile or load, by name, each with the reason.
    """
    refusals = dict(faults or {})
    refused: list[tuple[str, str]] = []
    if named is not None:
        refusals |= named.slower
    if named is not None and named.kernel is not None:
        kernel = next((kernel for kernel in kernels if kernel.name == named.kernel), None)
        reason = "no kernel has the name" if kernel is None else refusals.get(named.kernel) or kernel.accepts(problem)
        if kernel is not None and reason is None:
            return Choice(kernel, named.configure(kernel.configure(problem)), named.source)
        refused.append((named.kernel, f"{named.source} names it, but {reason}"))
    for kernel in kernels:
        if kernel.named_only:
            continue
        reason = refusals.get(kernel.name) or kernel.accepts(problem) or kernel.untuned(problem)
        if reason is None:
            return Choice(kernel, kernel.configure(problem), kernel.source, tuple(refused))
        refused.append((kernel.name, reason))
    return Choice(None, None, "default", tuple(refused))


Tensors: TypeAlias = tuple[Tensor | None, ...]
Values: TypeAlias = tuple[Hashable, ...]


def no_compiler() -> str | None:
    """Why NVRTC compiles no kernel of those that are chosen now, or None."""
    return None if nvrtc.CHOOSES_ELSEWHERE.get() else nvrtc.unavailable()


@dataclass(frozen=True, eq=False)
class Dispatch:
    """An op: from its arguments to its results, on a device that has kernels.

    Args:
        op: the name of the op.
        inputs: the names of the op's tensors, in the order of `tensors`.
        operands: checks the arguments, `tensors` and `values`, and allocates the outputs.
        kernels: the op's kernels, the preferred ones first.
        reference: the results where no kernel serves: by plain PyTorch, or by other ops.
        problem: what the kernels decide by; the operands themselves by default.
        unserved: why no kernel takes some operands at all, or None. It is asked before the outputs are allocated.
        settled: tensors that take the place of the op's, where kernels don't take these as they lie, or None.
        named: what a table says of a problem, or None.
        by_value: whether problems are equal by value, so that a choice may be kept for equal ones.
    """

    op: str
    inputs: tuple[str, ...]
    operands: Callable[[Tensors, Values], Any]
    kernels: tuple[Kernel, ...]
    reference: Callable[[Any], Sequence[Tensor]]
    problem: Callable[[Any], Any] = _itself
    unserved: Callable[[Any], Refusal] = _nothing
    settled: Callable[[Any], Tensors | None] = _nothing
    named: Callable[[Any], Named | None] = _nothing
    by_value: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    """Kernels that could not be compiled or loaded in this process, by name, each with the reason."""

    def __call__(self, tensors: Tensors, values: Values) -> Sequence[Tensor]:
        """The results; `values` are the arguments that are not tensors, each hashable."""
        key = (self.op, values, *map(kind, tensors))
        call = recall(key)
        if call is not None:  # the key holds everything that the checks read
            return call(*tensors)  # type: ignore[no-any-return]
        return self._first(key, tensors, values)

    def choose(self, operands: Any) -> Choice:
        """The kernel for operands, from which `plan` makes the launches."""
        problem = self.problem(operands)
        faults = () if nvrtc.CHOOSES_ELSEWHERE.get() else (*self.faults.items(), *self._missing())
        if self.by_value:
            return _choice_by_value(self, problem, faults)
        return choose(problem, self.kernels, self.named(problem), dict(faults))

    def plan(self, operands: Any) -> tuple[Launch, ...]:
        """The launches for operands; none where plain PyTorch serves."""
        return self._chosen(operands)[1]

    def _first(self, key: Hashable, tensors: Tensors, values: Values) -> Sequence[Tensor]:
        operands = self.operands(tensors, values)
        targets.check_supported(operands.target, next(x.device for x in tensors if x is not None))
        if (reason := self.unserved(operands)) is not None:
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s %s: no kernel: %s", self.op, _shapes(operands), reason)
            self._warn_of_types((*(x.dtype for x in tensors if x is not None), *values), operands.target)
            return self.reference(operands)
        outputs: Outputs = operands.outputs
        if all(x.numel() == 0 for x in outputs.results):
            return outputs.results
        if (settled := self.settled(operands)) is not None:
            return self(settled, values)
        choice, launches = self.loadable(operands)
        if not launches:
            self._warn_of_types((*(x.dtype for x in tensors if x is not None), *values), operands.target)
            return self.reference(operands)
        if all(isinstance(launch, CudaLaunch) for launch in launches):
            call: Any = call_of(launches, self.inputs, outputs)  # type: ignore[arg-type]
        else:
            call = launches[0].call() if len(launches) == 1 else None
            if call is None:
                from fp8fn.ops.triton.launch import kept

                call = kept(launches, dict(zip(self.inputs, tensors, strict=True)), outputs)
        if ranges.ENABLED:
            title = f"fp8fn::{self.op} {_shapes(operands)} {'; '.join(launch.describe() for launch in launches)}"
            return keep(key, ranges.Named(call or _Planned(self, choice, values), title))(*tensors)  # type: ignore[no-any-return]
        if call is not None:
            return keep(key, call)(*tensors)  # type: ignore[no-any-return]
        keep(key, _Planned(self, choice, values))
        for launch in launches:
            launch.run()
        return outputs.results

    def _warn_of_types(self, given: Values, target: Target) -> None:
        """Says once which FP8 types the target's kernels lack, as those of most checkpoints on gfx942."""
        own = targets.fp8_dtypes(target)
        foreign = [dtype for dtype in targets.OCP + targets.FNUZ if dtype in given and dtype not in own]
        if foreign:
            warn_once(
                f"{self.op}: {' and '.join(map(str, foreign))} has no kernel on {target.name}, so that plain PyTorch "
                f"computes it, slowly; quantize to {own[0]}"
            )

    def loadable(self, operands: Any) -> tuple[Choice, tuple[Launch, ...]]:
        """The first choice whose kernels can be compiled and loaded on this machine, and its launches."""
        while True:
            choice, launches = self._chosen(operands)
            faults = [] if choice.kernel is None else filter(None, map(choice.kernel.fault, launches))
            if (fault := next(iter(faults), None)) is None:
                return choice, launches
            self.faults[choice.name] = fault

    def _chosen(self, operands: Any) -> tuple[Choice, tuple[Launch, ...]]:
        choice = self.choose(operands)
        launches = choice.plan(operands)
        if _log.isEnabledFor(logging.DEBUG):
            chosen = described(launches) if launches else choice.describe()
            _log.debug("%s %s: %s", self.op, _shapes(operands), chosen)
        return choice, launches

    def _missing(self) -> tuple[tuple[str, str], ...]:
        """The kernels in CUDA C++, each with the reason, where nothing compiles them."""
        reason = no_compiler()
        return () if reason is None else tuple((k.name, reason) for k in self.kernels if k.backend == "cuda")


@dataclass(frozen=True, eq=False)
class _Planned:
    """A kept choice, for kernels whose launches are planned anew for each call."""

    dispatch: Dispatch
    choice: Choice
    values: Values

    def __call__(self, *tensors: Tensor | None) -> Sequence[Tensor]:
        operands = self.dispatch.operands(tensors, self.values)
        assert self.choice.kernel is not None
        for launch in self.choice.kernel.plan(operands, self.choice.config):
            launch.run()
        results: Sequence[Tensor] = operands.outputs.results
        return results


def _shapes(operands: Any) -> str:
    """The shapes of the operands for the log, which reads no values: a GPU's would be waited for."""
    names = sorted((part.name for part in fields(operands)), key="out".__eq__)  # the output last
    parts = (getattr(operands, name) for name in names)
    tensors = (part.data if isinstance(part, Quantized) else part for part in parts)
    return " x ".join(str(tuple(x.shape)) for x in tensors if isinstance(x, Tensor))


@lru_cache(maxsize=4096)
def _choice_by_value(dispatch: Dispatch, problem: Hashable, faults: tuple[tuple[str, str], ...]) -> Choice:
    return choose(problem, dispatch.kernels, dispatch.named(problem), dict(faults))


def forget() -> None:
    """Chooses again for problems that are equal by value, as after a table has changed."""
    _choice_by_value.cache_clear()
