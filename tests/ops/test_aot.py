"""`aot`: which kernels of a layer and a model it compiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fp8fn
from fp8fn import cli
from fp8fn.cli import aot
from fp8fn.cli.layer_kernels import LayerSetting, kernels_of, launches_of
from fp8fn.ops import mx_mm, quantize, scaled_mm, targets
from fp8fn.ops.cuda.runtime import nvrtc
from fp8fn.ops.cuda.runtime.launch import CudaLaunch
from fp8fn.ops.kernel import Dispatch
from fp8fn.ops.recipe import parse_recipe
from fp8fn.ops.targets import SM90, Target
from fp8fn.ops.tuning.problem import Problem, linear_problems
from fp8fn.ops.tuning.rates import NAMED
from support.compilers import needs_nvrtc
from support.products import dispatched
from support.tuning import H100, H200, operands

pytestmark = pytest.mark.usefixtures("cache")


def cubins(cache: Path) -> dict[str, int]:
    names = [path.name.split("-")[0] for path in (cache / "cubin").glob("*.cubin")]
    return {name: names.count(name) for name in sorted(set(names))}


@needs_nvrtc
def test_aot_compiles_every_kernel_of_a_layer_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["aot", "--shapes", "8192,6144,4096"]) == 0
    # Forward and dgrad share a kernel, wgrad has its own; x and g are quantized alike, and each of x and w has a kernel
    # for training, one for inference, and one for a backward that quantizes it again.
    assert cubins(cache) == {"quantize": 6, "scaled_mm": 2}
    assert f"8 kernels, 8 compiled now, 0 there before, in {cache / 'cubin'}" in capsys.readouterr().out
    # Another layer needs what differs in it: 64 rows and clusters that share K.
    assert cli.main(["aot", "--shapes", "8192,6144,4096", "64,512,16384"]) == 0
    setting = LayerSetting(fp8fn.BLOCKWISE, torch.bfloat16, Target("cuda", 90, 32, 132), H200)
    kernels = kernels_of(((8192, 6144, 4096), (64, 512, 16384)), setting)
    assert sum(cubins(cache).values()) == len(kernels)
    assert f"{len(kernels)} kernels, {len(kernels) - 8} compiled now, 8 there before" in capsys.readouterr().out


@needs_nvrtc
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--recipe", "rowwise"), {"quantize_rows": 1, "scaled_mm": 1, "stream_columns": 1}),
        (("--recipe", "tensorwise"), {"amax": 1, "quantize": 3, "scaled_mm": 1}),
        ((), {"quantize": 6, "scaled_mm": 2}),
        (("--bias",), {"quantize": 6, "scaled_mm": 3}),
        (
            ("--fused", "--recipe", "blockwise_square"),
            {
                "quantize": 13, "quantize_rms_norm": 1, "row_rstd": 1, "scaled_mm": 1, "silu_mul_backward": 4,
                "silu_mul_saved": 1,
            },
        ),
    ],
)  # fmt: skip
def test_aot_compiles_the_quantizers_of_every_recipe(
    options: tuple[str, ...], expected: dict[str, int], cache: Path
) -> None:
    assert cli.main(["aot", "--shapes", "4096,4096,4096", *options]) == 0
    assert cubins(cache) == expected


@needs_nvrtc
def test_aot_compiles_nothing_for_a_product_that_cublaslt_multiplies_faster(cache: Path) -> None:
    """The H200's table says so of the weight's gradient; the forward product and that of x's are one kernel."""
    assert cli.main(["aot", "--shapes", "8192,4096,4096"]) == 0
    assert cubins(cache)["scaled_mm"] == 1


@needs_nvrtc
def test_aot_compiles_what_the_plan_of_a_call_is(cache: Path) -> None:
    cli.main(["aot", "--shapes", "8192,6144,4096", "--recipe", "rowwise"])
    assert cubins(cache)["scaled_mm"] >= 1
    before = cubins(cache)
    for problem in linear_problems(8192, 6144, 4096, parse_recipe("rowwise")).values():
        launch = dispatched(operands(problem).product(Target("cuda", 90, 32, 132), H200))
        assert isinstance(launch, CudaLaunch)
        launch.compile()
    assert cubins(cache) == before


def test_a_product_by_name_has_its_own_table() -> None:
    """An image for H100s is made without one; a product that nobody measured is served by the nearest table."""
    shape, setting = (
        (4096, 12288, 4096),
        LayerSetting(recipe=fp8fn.BLOCKWISE, dtype=torch.bfloat16, target=SM90, chip=H200),
    )
    by_name = {}
    others = ((name, NAMED[name.lower()]) for name in ("h100 pcie", "GH200", "h800", "H20"))
    for name, chip in (("H100", H100), ("h200", H200), *others):
        found, target = aot.chip_and_target(name)
        assert (found, target) == (chip, replace(SM90, multiprocessors=chip.multiprocessors))
        by_name[name] = set(kernels_of((shape,), replace(setting, target=target, chip=found)))
        for problem in linear_problems(*shape, fp8fn.BLOCKWISE).values():
            launch = dispatched(operands(problem).product(target, chip))
            assert isinstance(launch, CudaLaunch)
            assert launch.kernel in by_name[name]
    assert by_name["H100"] != by_name["h200"]
    assert by_name["GH200"] == by_name["h800"] == by_name["H100"]


@needs_nvrtc
def test_aot_compiles_the_forward_without_temporaries_of_a_fast_recipe(cache: Path) -> None:
    """Its gradients are promoted, as those of the same recipe without it."""
    target = Target("cuda", 90, 32, 132)
    fast = replace(fp8fn.TENSORWISE, accumulate="fast")
    kernels, promoted = (
        kernels_of(((8192, 6144, 4096),), LayerSetting(recipe, torch.bfloat16, target, H200))
        for recipe in (fast, fp8fn.TENSORWISE)
    )
    (launch,) = scaled_mm.SCALED_MM_FAST.plan(
        replace(operands(Problem(8192, 6144, 4096, "WHOLE", "WHOLE")).product(target, H200), fast=True)
    )
    assert isinstance(launch, CudaLaunch)
    assert launch.kernel in kernels
    depths = [dict(kernel.macros)["DEPTH"] for kernel in kernels if kernel.entry == "scaled_mm"]
    assert depths.count(0) == 1
    assert {kernel for kernel in kernels if kernel != launch.kernel} <= set(promoted)


@needs_nvrtc
def test_aot_compiles_what_a_batch_invariant_recipe_runs(cache: Path) -> None:
    """The weight's shape divides K; wgrad, whose rows are columns of the weight, is the plain recipe's."""
    target, invariant = Target("cuda", 90, 32, 132), replace(fp8fn.BLOCKWISE, batch_invariant=True)
    kernels = kernels_of(((64, 1536, 24576),), LayerSetting(invariant, torch.bfloat16, target, H200))
    for problem, batch_invariant in zip(
        linear_problems(64, 1536, 24576, invariant).values(), (True, True, False), strict=True
    ):
        (launch,) = scaled_mm.dispatch_of(batch_invariant, False).plan(operands(problem).product(target, H200))
        assert isinstance(launch, CudaLaunch)
        assert launch.kernel in kernels
    splits = [dict(kernel.macros)["SPLIT"] for kernel in kernels if dict(kernel.macros).get("B_SCALE") == "BLOCK"]
    assert set(splits) == {4, 1}  # of the forward, whose K is long, and of dgrad


def example() -> tuple[nn.Module, tuple[Tensor]]:
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
    return model.bfloat16(), (torch.randn(128, 512, dtype=torch.bfloat16),)


def nothing() -> int:
    return 3


def test_aot_finds_the_layers_of_a_model(fresh_dynamo: None) -> None:
    assert aot.shapes_of_model(f"{__name__}:example") == ((128, 1024, 512), (128, 512, 1024))


class _Driver:
    """What Triton's JIT asks a driver, as if the processor were there."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target.to_triton()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Calls(TorchDispatchMode):
    """The products and quantizers that run, each by its op's name, with its arguments on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8fn":
            self.found.append((func._schema.name.removeprefix("fp8fn::"), tree_map_only(Tensor, _on_meta, args)))
        return func(*args, **(kwargs or {}))


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


_KERNELS = {
    "quantize": quantize.quantize_kernel, "quantize_dual": quantize.quantize_dual_kernel,
    "scaled_mm": scaled_mm.scaled_mm_kernel, "mx_mm": mx_mm.mx_mm_kernel,
}  # fmt: skip


def _launches_of_calls(shape: tuple[int, int, int], recipe: str, target: Target) -> list[Any]:
    """The launches of a layer's forward and backward on the target, by the ops that they call."""
    m, n, k = shape
    x, w = (torch.randn(rows, k, dtype=torch.bfloat16, requires_grad=True) for rows in (m, n))
    launches: list[Any] = []

    def planned(dispatch: Dispatch, tensors: Any, values: Any) -> Any:
        launches.extend(dispatch.plan(dispatch.operands(tensors, values)))
        raise InterruptedError

    with mock.patch.object(targets, "target_of", return_value=target):
        with _Calls() as calls:
            out = fp8fn.linear(x, w, recipe=recipe)
            out.backward(torch.ones_like(out))
        with mock.patch.object(Dispatch, "__call__", planned):
            for name, args in calls.found:
                with pytest.raises(InterruptedError):
                    _KERNELS[name](*args)
    return launches


@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("b200", "blockwise"), ("b200", "mxfp8"), ("rtx5090", "blockwise_square"), ("rtx5090", "mxfp8"),
        ("l40s", "rowwise"), ("l40s", "hybrid"), ("mi355x", "tensorwise"), ("mi355x", "mxfp8"),
    ],
)  # fmt: skip
def test_aot_fills_the_cache_that_a_call_in_triton_reads(
    arch: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from triton import knobs, runtime
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    argv = ["aot", "--arch", arch, "--shapes", "512,1024,1280", "--recipe", recipe]
    assert cli.main(argv) == 0
    folders = {path.name for path in tmp_path.iterdir()}
    chip, target = aot.chip_and_target(arch)
    assert (
        f"{len(folders)} kernels, {len(folders)} compiled now, 0 there before, in {tmp_path}" in capsys.readouterr().out
    )
    assert cli.main(argv) == 0
    assert f"{len(folders)} kernels, 0 compiled now, {len(folders)} there before" in capsys.readouterr().out

    monkeypatch.setattr(runtime.driver, "_active", _Driver(target))

    def read(launches: list[Any]) -> set[str]:
        """The folders that calls of the launches read."""
        found = set()
        for launch in launches:
            launch.kernel.device_caches.clear()
            args = (*launch.args.values(), *launch.constexprs.values())
            compiled = launch.kernel.run(*args, grid=launch.grid, warmup=True, **launch.options)
            launch.kernel.device_caches.clear()
            found.add(Path(get_cache_manager(compiled.hash).cache_dir).name)
        assert {"mm" in launch.name for launch in launches} == {True, False}
        return found

    setting = LayerSetting(parse_recipe(recipe), torch.bfloat16, target, chip)
    assert read(list(launches_of(((512, 1024, 1280),), setting))) == folders
    assert read(_launches_of_calls((512, 1024, 1280), recipe, target)) <= folders
    assert folders == {path.name for path in tmp_path.iterdir()}


def test_what_the_target_takes_natively(cache: Path) -> None:
    """On gfx942 a recipe without types is of e4m3fnuz."""
    pytest.importorskip("triton")
    chip, target = aot.chip_and_target("mi300x")
    launches = list(launches_of(((512, 1024, 256),), LayerSetting(fp8fn.BLOCKWISE, torch.bfloat16, target, chip)))
    types = {arg.dtype for launch in launches for arg in launch.args.values() if isinstance(arg, Tensor)}
    assert types == {torch.bfloat16, torch.float8_e4m3fnuz, torch.float32}
    assert (chip.name, chip.multiprocessors) == ("mi300x", 304)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "one of the arguments --shapes --suite --model is required"),
        (("--model", "json"), "is no module:callable"),
        (("--model", "no_such_module:f"), "No module named 'no_such_module'"),
        (("--model", "json:nothing_of_it"), "has no attribute 'nothing_of_it'"),
        (("--model", f"{__name__}:nothing"), "returned int; it must return (model, args)"),
        (("--shapes", "128,128,128", "--recipe", "mxfp8"), "use blockwise, rowwise or tensorwise"),
        (("--shapes", "128,128,128", "--arch", "sm80"), "'sm80' is no processor to compile for; choose gfx942"),
        (("--arch", "b200"), "one of the arguments --shapes --suite --model is required"),
        (("--shapes", "128,128,128", "--arch", "b200", "--out", "."), "--out writes kernels for Hopper alone"),
        (("--shapes", "128,128,128", "--out", "no/such/folder"), "it must be a folder that exists"),
        (("--arch", "gfx950", "--fused"), "leave --bias, --fused and --out out, or name layers"),
    ],
)
def test_wrong_use_of_aot_exits_2(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    with pytest.raises(SystemExit) as leave:
        cli.main(["aot", *argv])
    assert leave.value.code == 2
    assert message in capsys.readouterr().err
