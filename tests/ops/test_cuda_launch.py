"""A launch: parameters, descriptors and addresses packed for a stub of the driver, threads, devices, errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fp8fn.ops.cuda.gemm.scaled_mm import ScaledMmConfig
from fp8fn.ops.cuda.runtime import driver, launch
from fp8fn.ops.cuda.runtime.launch import CudaLaunch, LaunchSequence, TensorMap, pointers
from fp8fn.ops.layout import Block
from fp8fn.ops.targets import SM90
from fp8fn.ops.torch_private import core
from support.stub_driver import FORWARD, ROWS, WGRAD, Launched, Operands, StubDriver, int32s

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def test_descriptors_are_encoded_innermost_axis_first(stub: StubDriver) -> None:
    operands = Operands()
    plan = operands.plan()
    plan.prepare()
    a, b, out, a_scale, b_scale = stub.encoded
    assert (a["type"], a["rank"], a["address"]) == (0, 3, operands.a.data_ptr())
    assert (a["shape"], a["strides"]) == ([300, 270, 1], [304, 304 * 270])
    assert (a["box"], a["steps"]) == ([128, 128, 1], [1, 1, 1])
    assert a["rest"] == (0, 3, 3, 0)  # no interleave, swizzle of 128 bytes, 256 bytes of L2, zeros outside
    assert (b["shape"], b["address"]) == ([300, 136, 1], operands.b.data_ptr())
    assert (out["type"], out["shape"], out["strides"]) == (9, [136, 270, 1], [272, 272 * 270])
    assert (out["box"], out["rest"]) == ([64, 64, 1], (0, 3, 3, 0))
    assert (a_scale["type"], a_scale["shape"], a_scale["strides"]) == (7, [270, 3, 1], [1088, 3264])
    assert (a_scale["box"], a_scale["rest"]) == ([128, 1, 1], (0, 0, 3, 0))
    assert (b_scale["shape"], b_scale["box"]) == ([136, 3, 1], [128, 1, 1])


def test_descriptors_lie_at_multiples_of_64_and_parameters_do_not_overlap(stub: StubDriver) -> None:
    for operands in (Operands(), Operands(blocks=FORWARD, bias=BF16, out=FP32), Operands(batch=3, bias=FP32)):
        plan = operands.plan()
        plan.prepare().launch(pointers(plan.args))
        addresses = stub.launched[-1].parameters
        assert len(addresses) == len(plan.args)
        sizes = [driver.MAP_BYTES if isinstance(arg, TensorMap) else driver.MAP_ALIGNMENT for arg in plan.args.values()]
        for address, size, following in zip(addresses, sizes, [*addresses[1:], None], strict=True):
            assert address % 64 == 0
            assert following is None or address + size <= following
    assert {map_["into"] % 64 for map_ in stub.encoded} == {0}


def test_scalars_and_the_problem_are_in_place(stub: StubDriver) -> None:
    operands = Operands((70, 131, 300), FORWARD, bias=FP16, batch=3, out=FP32)
    plan = operands.plan()
    plan.prepare().launch(pointers(plan.args))
    at = dict(zip(plan.args, stub.launched[0].parameters, strict=True))
    words = dict(zip(plan.args, stub.launched[0].words, strict=True))
    assert int32s(at["problem"], 4) == [70, 131, 300, 3]
    assert [int32s(at[name], 1) for name in ("a_batched", "b_batched", "out_m")] == [[1], [1], [131]]
    assert int32s(at["as_batch"], 1) == [operands.a_scale.stride(0)]
    assert [int32s(at[name], 1)[0] for name in ("bs_batch", "bs_n", "bs_k")] == [
        operands.b_scale.stride(i) for i in (0, 2, 1)
    ]
    assert (words["bias"], words["out"]) == (operands.bias.data_ptr(), operands.out.data_ptr())  # type: ignore[union-attr]
    assert words["b_scale"] == operands.b_scale.data_ptr()


def test_a_float_is_packed_as_float32_and_none_as_a_null_pointer(stub: StubDriver) -> None:
    x = torch.empty(4)
    args: dict[str, launch.Argument] = {"x": x, "none": None, "half": 0.5, "negative": -3}
    plan = CudaLaunch(ROWS, (1, 2, 3), 256, 0, args, target=SM90)
    assert pointers(plan.args) == [x.data_ptr(), 0]
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert seen.words[:2] == [x.data_ptr(), 0]
    assert ctypes.c_float.from_address(seen.parameters[2]).value == 0.5
    assert int32s(seen.parameters[3], 1) == [-3]
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((1, 2, 3), (256, 1, 1), 0, 77)


def test_shape_shared_memory_and_stream_reach_the_driver(stub: StubDriver) -> None:
    plan = Operands((300, 300, 300)).plan(ScaledMmConfig(MATH=3, DEPTH=1))
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert (seen.grid, seen.block) == ((6, 1, 1), (512, 1, 1))
    assert (seen.shared, seen.stream) == (plan.shared, 77)
    assert stub.attributes == [(8, plan.shared), (14, 1)]  # with clusters of more than 8 blocks


def test_a_launch_that_overlaps_reaches_the_driver_with_the_attribute(stub: StubDriver) -> None:
    plan = CudaLaunch(ROWS, (4, 5, 6), 256, 512, {"x": torch.empty(3)}, target=SM90, overlaps=True)
    plan.prepare().launch(pointers(plan.args))
    (seen,) = stub.launched
    assert (seen.grid, seen.block, seen.shared) == ((4, 5, 6), (256, 1, 1), 512)
    assert seen.words == pointers(plan.args)


def test_only_addresses_that_changed_are_replaced(stub: StubDriver) -> None:
    plan = Operands().plan()
    ready, addresses = plan.prepare(), pointers(plan.args)
    ready.launch(list(addresses))
    stub.replaced.clear()
    ready.launch(list(addresses))
    assert stub.replaced == []
    maps = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    for name in ("b", "out"):
        place = maps.index(name)
        addresses[place] += 1 << 20
        ready.launch(list(addresses))
        assert [address for _, address in stub.replaced] == [addresses[place]]
        stub.replaced.clear()
    assert len(stub.launched) == 4


@pytest.mark.parametrize("blocks", [FORWARD, WGRAD, ((1, -1), (-1, 1))], ids=str)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_each_launch_sees_its_own_addresses(blocks: tuple[Block, Block], out: torch.dtype, stub: StubDriver) -> None:
    """Descriptors and plain pointers alike, also back to addresses that were there before."""
    plan = Operands(blocks=blocks, bias=BF16, out=out).plan()
    ready = plan.prepare()
    names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    for base in (1 << 20, 1 << 30, 1 << 20, 1 << 40):
        addresses = [base + 256 * i for i in range(len(names))]
        ready.launch(list(addresses))
        words = dict(zip(plan.args, stub.launched[-1].words, strict=True))
        assert [words[name] for name in names] == addresses


def test_an_address_that_the_driver_refuses_does_not_stick(stub: StubDriver) -> None:
    """After a failed replacement, some descriptors are new and some old: the next launch writes all of them."""
    plan = Operands().plan()
    ready, addresses = plan.prepare(), pointers(plan.args)
    ready.launch(list(addresses))
    replace_address, count = stub.cuTensorMapReplaceAddress, iter(range(100))

    def third_fails(map_: Any, address: Any) -> int:
        return 1 if next(count) == 2 else replace_address(map_, address)

    stub.cuTensorMapReplaceAddress = third_fails  # type: ignore[method-assign]
    with pytest.raises(driver.DriverError, match="TMA descriptor: a reason"):
        ready.launch([address + 4096 for address in addresses])
    ready.launch(list(addresses))
    seen = stub.launched[-1].words[: len(addresses)]
    assert [
        word for word, arg in zip(seen, plan.args.values(), strict=False) if isinstance(arg, TensorMap)
    ] == addresses[: sum(isinstance(arg, TensorMap) for arg in plan.args.values())]


def test_threads_that_share_a_launch_each_see_their_own_addresses(stub: StubDriver) -> None:
    plan = Operands(bias=BF16).plan()
    ready = plan.prepare()
    names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, tuple))]
    stub.pause = 0.0002  # other threads run inside each call of the driver
    barrier, wrong = threading.Barrier(8), []

    def work(thread: int) -> None:
        barrier.wait()
        for i in range(10):
            try:
                ready.launch([(thread + 1) * 2**32 + i * 2**16 + 256 * place for place in range(len(names))])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(stub.launched) == 80
    bases = set()
    for seen in stub.launched:
        words = dict(zip(plan.args, seen.words, strict=True))
        base = words[names[0]]
        assert [words[name] for name in names] == [base + 256 * place for place in range(len(names))]
        bases.add(base)
    assert len(bases) == 80


def test_a_thread_without_a_context_gets_the_devices(stub: StubDriver) -> None:
    """A new thread, such as one of autograd's, may launch before any call of CUDA's runtime was made in it."""
    plan = Operands().plan()
    ready = plan.prepare()
    stub.calls.clear()
    stub.fail["cuLaunchKernel"] = driver.INVALID_CONTEXT
    ready.launch(pointers(plan.args))
    assert stub.calls[-4:] == ["cuLaunchKernel", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"]
    assert len(stub.launched) == 1
    stub.calls.clear()
    ready.launch(pointers(plan.args))
    assert stub.calls == ["cuLaunchKernel"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("cuModuleLoadData", "loading scaled_mm: a reason (1)"),
        ("cuModuleGetFunction", "finding scaled_mm: a reason (1)"),
        ("cuFuncSetAttribute", " bytes for scaled_mm: a reason (1)"),
        (
            "cuTensorMapEncodeTiled",
            "TMA descriptor of shape (300, 270, 1), strides (304, 82080), box (128, 128, 1) (torch.float8_e4m3fn): "
            "a reason (1)",
        ),
        ("cuTensorMapReplaceAddress", "TMA descriptor: a reason (1)"),
        ("cuLaunchKernel", "launch: a reason (1)"),
        ("cuDevicePrimaryCtxRetain", "context of device 0: a reason (1)"),
    ],
)
def test_an_error_of_the_driver_says_what_failed(call: str, message: str, stub: StubDriver) -> None:
    stub.fail[call] = 1
    plan = Operands().plan()
    with pytest.raises(driver.DriverError) as error:
        plan.prepare().launch(pointers(plan.args))
    assert message in str(error.value)


def test_a_kernel_is_loaded_once_for_all_launches_of_it(stub: StubDriver) -> None:
    for _ in range(3):
        Operands().plan().prepare()
    Operands((700, 1360, 300)).plan().prepare()  # other sizes, the same code
    assert stub.calls.count("cuModuleLoadData") == 1
    Operands(blocks=FORWARD).plan().prepare()
    assert stub.calls.count("cuModuleLoadData") == 2


def test_description_is_one_line_with_what_was_chosen_and_why() -> None:
    plan = CudaLaunch(ROWS, (4, 1, 1), 256, 0, {}, {"BM": 64}, target=SM90, reason="by the model")
    assert plan.describe() == "row_rstd[BM=64] grid=4x1x1 sm90 (by the model)"
    assert (plan.name, "\n" in plan.describe()) == ("row_rstd", False)


def test_a_launch_runs_on_the_device_of_its_tensors(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        inside.append(device)
        before = len(stub.launched)
        yield
        launched_on.extend([device] * (len(stub.launched) - before))
        inside.pop()

    launched_on: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", enter)
    operands = Operands()
    operands.plan().run()
    assert launched_on == [operands.a.device]
    assert inside == []


def sequence() -> tuple[LaunchSequence, list[CudaLaunch]]:
    """Two products: of the addresses 0 to 3 into 4, and of 4, 1, 2, 3 into 5, each with a bias of None."""
    plans = [Operands(blocks=FORWARD, bias=BF16).plan() for _ in range(2)]
    order = ("a", "b", "a_scale", "b_scale", "out")
    steps = []
    for plan, places in zip(plans, ((0, 1, 2, 3, 4), (4, 1, 2, 3, 5)), strict=True):
        at = dict(zip(order, places, strict=True))
        names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, float, tuple))]
        steps.append((plan.prepare(), [at.get(name) for name in names]))
    return LaunchSequence(steps, 6), plans


def words(plan: CudaLaunch, launched: Launched) -> list[int]:
    at = dict(zip(plan.args, launched.words, strict=True))
    return [at[name] for name in ("a", "b", "a_scale", "b_scale", "out", "bias")]


def test_launches_of_a_sequence_read_one_list_of_addresses(stub: StubDriver) -> None:
    launches, plans = sequence()
    for first in (4096, 8192):
        addresses = [first + 256 * i for i in range(6)]
        launches.start(addresses)
        one, other = (words(plan, launched) for plan, launched in zip(plans, stub.launched[-2:], strict=True))
        assert one == [*addresses[:5], 0]
        assert other == [addresses[4], *addresses[1:4], addresses[5], 0]
    for plan, launched in zip(plans, stub.launched[-2:], strict=True):
        assert (launched.grid, launched.block[0], launched.shared) == (plan.grid, plan.threads, plan.shared)
        assert launched.stream == 77


def test_a_sequence_with_the_same_addresses_writes_none(stub: StubDriver) -> None:
    launches, _ = sequence()
    addresses = [4096 + 256 * i for i in range(6)]
    launches.start(addresses)
    replaced = len(stub.replaced)
    assert replaced > 0
    launches.start(list(addresses))
    assert len(stub.replaced) == replaced
    launches.start([*addresses[:5], 16])
    assert [address for _, address in stub.replaced[replaced:]] == [16]


def test_a_sequence_leaves_the_parameters_of_its_launches_alone(stub: StubDriver) -> None:
    plan = Operands(blocks=FORWARD).plan()
    prepared = plan.prepare()
    own = pointers(plan.args)
    names = [name for name, arg in plan.args.items() if not isinstance(arg, (int, float, tuple))]
    prepared.launch(own)
    expected = stub.launched[-1].words
    LaunchSequence([(prepared, list(range(len(names))))], len(names)).start([16 * (i + 1) for i in range(len(names))])
    assert stub.launched[-1].words != expected
    prepared.launch(own)
    assert stub.launched[-1].words == expected


def test_a_sequence_follows_the_current_stream(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, _ = sequence()
    for stream in (5, 5, 0, 77):
        monkeypatch.setattr(core, "stream_handle", lambda index, stream=stream: stream)
        launches.start([4096] * 6)
        assert [launched.stream for launched in stub.launched[-2:]] == [stream] * 2


def test_a_sequence_gives_a_thread_the_devices_context(stub: StubDriver) -> None:
    launches, _ = sequence()
    stub.fail["cuLaunchKernel"] = driver.INVALID_CONTEXT  # until cuCtxSetCurrent
    launches.start([4096] * 6)
    assert len(stub.launched) == 2


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuTensorMapReplaceAddress"])
def test_a_sequence_that_fails_raises_and_works_again(call: str, stub: StubDriver) -> None:
    launches, plans = sequence()
    stub.fail[call] = 1
    with pytest.raises(driver.DriverError, match="a reason"):
        launches.start([4096] * 6)
    stub.fail.clear()
    stub.launched.clear()
    launches.start([4096] * 6)
    assert [words(plan, one) for plan, one in zip(plans, stub.launched, strict=True)] == [[4096] * 5 + [0]] * 2


def test_threads_that_share_a_sequence_each_see_their_own_addresses(stub: StubDriver) -> None:
    launches, plans = sequence()
    stub.pause = 1e-4

    def work(thread: int) -> None:
        for i in range(10):
            launches.start([4096 * (1 + thread * 10 + i)] * 6)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [{word for word in words(plans[0], launched) if word} for launched in stub.launched]
    assert all(len(each) == 1 for each in seen)
    assert len(seen) == 80
    assert {address for (address,) in seen} == {4096 * (i + 1) for i in range(40)}
