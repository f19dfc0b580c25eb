"""The dispatch: which kernel is chosen and why not the others, and what the key of a kept call holds."""

from __future__ import annotations

import ast
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8fn import ops
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.call_cache import Outputs
from fp8fn.ops.kernel import Choice, Dispatch, Kernel, Named, Tensors, Values, choose, deferred
from fp8fn.ops.launch import Launch
from fp8fn.ops.targets import CPU, Target

SMALL, EVEN = "more than 10", "not even"


def accepts_small(problem: int) -> str | None:
    return SMALL if problem > 10 else None


def accepts_even(problem: int) -> str | None:
    return EVEN if problem % 2 else None


def kernel(name: str, **changes: Any) -> Kernel:
    def no_plan(*_: Any) -> tuple[Launch, ...]:
        raise AssertionError("a choice plans nothing")

    given = Kernel(name, lambda _: None, lambda problem: f"{name} of {problem}", no_plan)
    return replace(given, **changes)


KERNELS = (
    kernel("cuda_small", accepts=accepts_small),
    kernel("cuda_named", named_only=True),
    kernel("triton_even", accepts=accepts_even, untuned=lambda problem: "slow for 12" if problem == 12 else None),
    kernel("triton_any", source="model", accepts=lambda problem: "negative" if problem < 0 else None),
)


@pytest.mark.parametrize(
    ("problem", "described"),
    [
        (3, "cuda_small by default"),
        (14, "triton_even by default; not cuda_small: more than 10"),
        (12, "triton_any by model; not cuda_small: more than 10; not triton_even: slow for 12"),
        (13, "triton_any by model; not cuda_small: more than 10; not triton_even: not even"),
    ],
)
def test_the_first_kernel_that_accepts_a_problem_is_chosen(problem: int, described: str) -> None:
    choice = choose(problem, KERNELS)
    assert choice.describe() == described
    assert choice.config == f"{choice.name} of {problem}"


def test_where_no_kernel_accepts_plain_pytorch_serves() -> None:
    refusing = tuple(replace(each, accepts=lambda _: "never") for each in KERNELS)
    choice = choose(3, refusing)
    assert (choice.kernel, choice.config, choice.plan(None)) == (None, None, ())
    assert choice.describe() == (
        "reference by default; not cuda_small: never; not triton_even: never; not triton_any: never"
    )


def named(kernel: str | None, slower: dict[str, str] | None = None) -> Named:
    return Named(kernel, "table.json", lambda config: f"tuned {config}", slower or {})


@pytest.mark.parametrize(
    ("problem", "table", "faults", "described", "config"),
    [
        (3, named("triton_any"), {}, "triton_any by table.json", "tuned triton_any of 3"),
        (12, named("triton_even"), {}, "triton_even by table.json", "tuned triton_even of 12"),
        (3, named("cuda_named"), {}, "cuda_named by table.json", "tuned cuda_named of 3"),
        (
            3, named("gone"), {},
            "cuda_small by default; not gone: table.json names it, but no kernel has the name", None,
        ),
        (
            4, named(None, {"cuda_small": "7 us, 9 us"}), {},
            "triton_even by default; not cuda_small: 7 us, 9 us", None,
        ),
        (
            -1, named("triton_any"), {},
            "cuda_small by default; not triton_any: table.json names it, but negative", None,
        ),
        (
            4, named("triton_any", {"triton_any": "slower"}), {},
            "cuda_small by default; not triton_any: table.json names it, but slower", None,
        ),
        (
            4, named("cuda_small"), {"cuda_small": "no compiler"},
            "triton_even by default; not cuda_small: table.json names it, but no compiler; "
            "not cuda_small: no compiler", None,
        ),
        (
            3, None, {"cuda_small": "no compiler"},
            "triton_any by model; not cuda_small: no compiler; not triton_even: not even", None,
        ),
    ],
)  # fmt: skip
def test_a_table_and_faults_change_the_choice(
    problem: int, table: Named | None, faults: dict[str, str], described: str, config: str | None
) -> None:
    choice = choose(problem, KERNELS, table, faults)
    assert choice.describe() == described
    assert choice.config == (config or f"{choice.name} of {problem}")


@dataclass(frozen=True, kw_only=True)
class Filling(Launch):
    """Fills an output with a number."""

    out: Tensor
    value: float
    broken: str | None = None
    kept: bool = False
    """Whether later calls fill with the same number, as a launch on tensors of the same kinds does."""

    @property
    def name(self) -> str:
        return "filling"

    def describe(self) -> str:
        return f"filling {self.value}{self._because()}"

    def run(self) -> None:
        assert self.broken is None
        self.out.fill_(self.value)

    def fault(self) -> str | None:
        return self.broken

    def call(self) -> Callable[..., Sequence[Tensor]] | None:
        return (lambda *_: [torch.full((2,), self.value)]) if self.kept else None


@dataclass(frozen=True)
class Sum:
    """The operands of an op that counts elements: those of `b` twice."""

    tensors: Tensors
    values: Values
    out: Tensor
    target: Target = CPU

    @property
    def elements(self) -> int:
        return sum(0 if x is None else x.numel() * (i + 1) for i, x in enumerate(self.tensors))

    @property
    def outputs(self) -> Outputs:
        return Outputs({"out": self.out}, 1)


def sum_op(name: str, *kernels: Kernel, **changes: Any) -> Dispatch:
    def operands(tensors: Tensors, values: Values) -> Sum:
        return Sum(tensors, values, torch.full((2,), torch.nan))

    def reference(given: Sum) -> Sequence[Tensor]:
        return (torch.full((2,), -1.0),)

    return Dispatch(name, ("a", "b"), operands, kernels, reference, **changes)


def filling(name: str, offset: float = 0.0, broken: str | None = None, kept: bool = False, **changes: Any) -> Kernel:
    def plan(given: Sum, config: Any) -> tuple[Launch, ...]:
        value = given.elements + 1000.0 * sum(map(float, given.values)) + offset  # type: ignore[arg-type]
        return (Filling(target=CPU, out=given.out, value=value, broken=broken, kept=kept),)

    return kernel(name, plan=plan, configure=lambda _: None, fault=Filling.fault, **changes)


@pytest.mark.parametrize("kept", [False, True])
def test_a_kept_call_is_found_by_the_op_its_values_and_all_tensors(kept: bool) -> None:
    """Each argument that a plan reads, changed alone, after a call that is kept."""
    first, second = (sum_op(name, filling("triton_a", at, kept=kept)) for name, at in (("first", 0.0), ("second", 0.5)))
    x, y = torch.ones(3), torch.ones(4)
    for _ in range(2):
        assert first((x, y), (1,))[0].tolist() == [1011.0] * 2
        assert second((x, y), (1,))[0].tolist() == [1011.5] * 2
        assert first((x, y), (2,))[0].tolist() == [2011.0] * 2
        assert first((x, y), (2, 3))[0].tolist() == [5011.0] * 2
        assert first((y, y), (1,))[0].tolist() == [1012.0] * 2
        assert first((x, x), (1,))[0].tolist() == [1009.0] * 2
        assert first((x, None), (1,))[0].tolist() == [1003.0] * 2
        assert first((None, y), (1,))[0].tolist() == [1008.0] * 2


def test_a_kept_choice_takes_the_configuration_that_was_chosen() -> None:
    configured = []

    def configure(given: Sum) -> float:
        configured.append(given.values)
        return 0.25

    def plan(given: Sum, config: float) -> tuple[Launch, ...]:
        return (Filling(target=CPU, out=given.out, value=given.elements + config),)

    op = sum_op("configured", kernel("triton_a", configure=configure, plan=plan))
    for _ in range(3):
        assert op((torch.ones(3), None), ())[0].tolist() == [3.25] * 2
    assert configured == [()]


def test_a_kernel_that_cannot_be_loaded_is_left_out_from_then_on() -> None:
    op = sum_op("faulty", filling("triton_a", broken="no room"), filling("triton_b", 0.5))
    assert op((torch.ones(3), None), ())[0].tolist() == [3.5] * 2
    assert op.faults == {"triton_a": "no room"}
    choice = op.choose(Sum((torch.ones(5), None), (), torch.empty(2)))
    assert choice.describe() == "triton_b by default; not triton_a: no room"
    alone = sum_op("alone", filling("triton_a", broken="no room"))
    assert alone((torch.ones(3), None), ())[0].tolist() == [-1.0] * 2  # the reference


def test_a_choice_by_value_is_not_the_one_from_before_a_fault() -> None:
    op = sum_op(
        "by_value", filling("triton_a"), filling("triton_b"), by_value=True, problem=lambda given: given.elements
    )
    given = Sum((torch.ones(3), None), (), torch.empty(2))
    assert op.choose(given).name == "triton_a"
    assert op.choose(given) is op.choose(given)
    op.faults["triton_a"] = "no room"
    assert op.choose(given).describe() == "triton_b by default; not triton_a: no room"
    other = replace(op, faults={})
    assert other.choose(given).name == "triton_a"


def test_without_a_compiler_kernels_in_cuda_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    op = sum_op("cuda", filling("cuda_a"), filling("triton_b"))
    given = Sum((torch.ones(3), None), (), torch.empty(2))
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    assert op.choose(given).name == "cuda_a"
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no NVRTC")
    assert op.choose(given).describe() == "triton_b by default; not cuda_a: no NVRTC"


def test_launches_have_the_choice_as_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    op = sum_op("reasons", filling("triton_a", accepts=lambda _: "never"), filling("triton_b"))
    with caplog.at_level(logging.DEBUG, logger="fp8fn"):
        (launch,) = op.plan(Sum((torch.ones(3), None), (), torch.empty(2)))
    assert launch.describe() == "filling 3.0 (triton_b by default; not triton_a: never)"
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [launch.describe()]
    own = Choice(replace(KERNELS[0], plan=lambda *_: (replace(launch, reason="its own"),)), None, "default")
    assert own.plan(None)[0].reason == "its own; cuda_small by default"  # type: ignore[arg-type]


def test_operands_that_no_kernel_takes_and_empty_results_start_none() -> None:
    op = sum_op("unserved", filling("triton_a"), unserved=lambda given: "a list" if given.values else None)
    assert op((torch.ones(3), None), (1,))[0].tolist() == [-1.0] * 2
    assert op((torch.ones(3), None), ())[0].tolist() == [3.0] * 2
    broken = filling("triton_a", accepts=lambda _: pytest.fail("an empty result is planned"))
    empty = replace(op, kernels=(broken,), operands=lambda tensors, values: Sum(tensors, values, torch.empty(0, 2)))
    assert empty((torch.ones(4), None), ())[0].shape == (0, 2)


def test_settled_operands_take_the_place_of_the_given() -> None:
    def settled(given: Sum) -> Tensors | None:
        x, y = given.tensors
        return None if x is None or x.is_contiguous() else (x.contiguous(), y)

    strides = []

    def accepts(given: Sum) -> None:
        assert given.tensors[0] is not None
        strides.append(given.tensors[0].stride())

    op = sum_op("settled", filling("triton_a", accepts=accepts), settled=settled)
    for _ in range(2):
        assert op((torch.ones(3, 4).mT, None), ())[0].tolist() == [12.0] * 2
    assert strides == [(3, 1)]


DEFERRED = [
    (module, name, value.module)
    for module in (import_module(f"fp8fn.ops.{info.name}") for info in pkgutil.iter_modules(ops.__path__))
    for name, value in vars(module).items()
    if isinstance(value, deferred)
]


@pytest.mark.parametrize(
    ("module", "name", "stands_for"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in DEFERRED]
)
def test_a_deferred_module_is_the_one_that_type_checkers_read_and_only_called(
    module: ModuleType, name: str, stands_for: str
) -> None:
    tree = ast.parse(inspect.getsource(module))
    imported = {
        each.asname or each.name: f"{node.module}.{each.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    assert imported[name] == stands_for
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    assert read
    assert [attribute for attribute in read if not callable(getattr(import_module(stands_for), attribute))] == []


def test_a_deferred_function_is_the_module_s_own() -> None:
    assert len(DEFERRED) >= 20
    assert deferred("fp8fn.ops.layout").swap((1, 128)) == (128, 1)
    assert deferred("fp8fn.ops.kernel").choose(3, kernels=KERNELS).name == "cuda_small"
    with pytest.raises(AttributeError, match="nothing"):
        deferred("fp8fn.ops.layout").nothing()
