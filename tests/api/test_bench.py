"""The benchmarks' parts that need no GPU: shapes, statistics, accuracy, peers' layouts, tables, runs on a CPU."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fp8fn
from fp8fn import cli
from fp8fn.bench import decoder, llm84, moe, overhead, peers, plot, quant, record, tables
from fp8fn.bench.accuracy import SampledProduct, snr_db, worst
from fp8fn.bench.command import Suite, peer_names, sizes
from fp8fn.bench.experts import TOP_K, CountedExperts, Experts, group_sizes
from fp8fn.bench.layer import Layer, normal
from fp8fn.bench.measure import Case, Row, measure
from fp8fn.bench.shapes import ANCHORS, DEEPGEMM, LLM84, QUANT, SILU_MUL, SMALL, TRAINING, Shape, shape
from fp8fn.cli.environment import device_name
from fp8fn.ops.targets import SM90
from fp8fn.timing import Call, CpuClock, GpuClock, Schedule, Timing, flush_bytes, interleaved, lead_us

CPU = torch.device("cpu")
QUICK = Schedule(rounds=2, burst_ms=0.1, warm_s=0.0)


def test_the_84_shapes() -> None:
    """Ids are the suite's; every size is a multiple of 128, and only layer 47 has over 2**31 elements."""
    assert [s.id for s in LLM84] == list(range(1, 85))
    assert shape(1)[2:] == (4096, 12288, 4096)
    assert shape(64)[2:] == (8192, 8192, 29568)
    assert shape(84)[2:] == (16384, 4096, 14336)
    assert all(size % 128 == 0 for s in LLM84 for size in (s.M, s.N, s.K))
    assert [s.id for s in LLM84 if max(s.M * s.N, s.N * s.K, s.M * s.K) > 2**31] == [47]
    assert len(llm84.SHAPES) == 69
    assert set(llm84.SHAPES) == {s[2:] for s in LLM84}


def test_overhead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of function calls, which no other process disturbs: a call makes those of its work, and its own."""
    made = itertools.count()
    monkeypatch.setattr(overhead, "time", SimpleNamespace(perf_counter=lambda: next(made)))
    profile = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: event in ("call", "c_call") and next(made))
    try:
        results = overhead.measure(rounds=2, repeats=3)
    finally:
        sys.setprofile(profile)
    assert set(results) == set(overhead.BARS)
    assert all(result.call > result.work > 0 for result in results.values())


def test_overhead_is_of_the_fastest_rounds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now, costs = [0.0], {"call": iter((9e-6, 5e-6, 6e-6)), "work": iter((4e-6, 7e-6, 3e-6))}
    monkeypatch.setattr(overhead, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(name: str) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + next(costs[name]))

    result = overhead._compare(run("call"), run("work"), rounds=3, repeats=1)
    assert result == pytest.approx((5.0, 3.0))
    assert result.extra == pytest.approx(2.0)


class TestTiming:
    def test_median_and_quartiles(self) -> None:
        timing = Timing((4.0, 1.0, 3.0, 2.0))
        assert timing.median == 2.5
        assert timing.quartiles == (1.75, 3.25)
        assert Timing((7.0,)).quartiles == (7.0, 7.0)

    def test_flush_is_twice_the_l2_at_least(self) -> None:
        assert flush_bytes(50 * 2**20) == 256 * 2**20
        assert flush_bytes(200 * 2**20) == 400 * 2**20

    @pytest.mark.parametrize(
        ("host", "device", "repeats", "expected"),
        [(100.0, 500.0, 10, 100.0), (100.0, 80.0, 10, 300.0), (1e4, 1.0, 50, 1e5)],
    )
    def test_lead(self, host: float, device: float, repeats: int, expected: float) -> None:
        """One launch if the device is slower, the lag of each repeat if the host is, and at most 0.1 s."""
        assert lead_us(host, device, repeats) == expected

    def test_calls_take_turns_and_a_failure_stops_no_other(self) -> None:
        calls: list[str] = []

        def count(name: str) -> None:
            calls.append(name)

        def fail_late() -> None:
            calls.append("late")
            if calls.count("late") > 5:
                raise RuntimeError("out of\n  luck")

        def fail_at_once() -> None:
            raise TypeError("no float8")

        functions: dict[str, Call] = {
            "a": partial(count, "a"),
            "late": fail_late,
            "never": fail_at_once,
            "b": partial(count, "b"),
        }
        times = interleaved(functions, CpuClock(CPU), Schedule(rounds=3, burst_ms=0.001, warm_s=0.0))
        assert times["never"] == "TypeError: no float8"
        assert times["late"] == "RuntimeError: out of luck"
        assert list(times) == ["a", "late", "never", "b"]
        for name in ("a", "b"):
            timing = times[name]
            assert isinstance(timing, Timing)
            assert len(timing.samples) >= 3
            assert min(timing.samples) > 0
            assert timing.host_us is None
        # One call alone, 3 timed and one before them; then a turn of at least 2 in each of 3 rounds.
        assert calls[:5] == ["a"] * 5
        assert len([name for name, _ in itertools.groupby(calls[15:])]) >= 6

    def test_gpu_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The order on the stream: the host's lead, then for each call the flush, an event, the call, an event."""
        log: list[str] = []
        clock = SimpleNamespace(now=0.0)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                log.append("event")
                self.at = clock.now

            def elapsed_time(self, end: Event) -> float:
                return float(end.at - self.at)

        def call() -> None:
            log.append("call")
            clock.now += 0.25

        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=2**20))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
        monkeypatch.setattr("fp8fn.timing.spin_gpu", lambda cycles: log.append(f"sleep {cycles}"))
        monkeypatch.setattr("fp8fn.timing.flush_bytes", lambda size: size)
        gpu = GpuClock(CPU)
        assert gpu.flush_us == 0.0
        buffer = SimpleNamespace(zero_=lambda: log.append("write"), sum=lambda: log.append("read"))
        monkeypatch.setattr(gpu, "_buffer", buffer)
        log.clear()
        assert gpu.samples(call, 2, 3.5) == [250.0, 250.0]
        assert log == ["sleep 7000", *["write", "event", "call", "event"] * 3, "synchronize"]
        log.clear()
        assert gpu.samples(call, 2, 3.5, "reads") == [250.0, 250.0]
        assert log == ["sleep 7000", *["read", "event", "call", "event"] * 3, "synchronize"]
        assert gpu.host_us(call) > 0
        times = interleaved({"call": call}, gpu, Schedule(rounds=2, burst_ms=1.0, warm_s=0.0))
        assert isinstance(times["call"], Timing)
        assert times["call"].samples == (250.0,) * 8  # 4 fill 1 ms
        assert "write" in log
        log.clear()
        interleaved({"call": call}, gpu, Schedule(rounds=2, burst_ms=1.0, warm_s=0.0, flush="reads"))
        assert "call" in log
        assert "read" in log
        assert "write" not in log


class TestAccuracy:
    def test_snr(self) -> None:
        reference = torch.ones(3, 4)
        assert snr_db(reference, reference * 0.9) == pytest.approx(20.0, abs=1e-5)
        assert snr_db(reference.double(), reference.bfloat16() * 1.125) == pytest.approx(20 * math.log10(8))
        assert snr_db(reference, reference) == math.inf
        assert snr_db(torch.zeros(2, 2), torch.ones(2, 2)) == -math.inf
        assert math.isnan(snr_db(reference, reference.masked_fill(reference.cumsum(1) == 2, math.nan)))
        with pytest.raises(ValueError, match=r"shape \(3, 4\) and found \(4, 3\)"):
            snr_db(reference, reference.mT)

    def test_worst(self) -> None:
        assert worst([30.0, 25.0, 28.0]) == 25.0
        assert worst([]) is None
        assert math.isnan(worst([30.0, math.nan, 1.0]) or 0.0)

    def test_sampled_product(self) -> None:
        """A small product is sampled whole, a large one at spread elements, and a wrong tile is found."""
        a, b = normal(70, 40, CPU, 0), normal(50, 40, CPU, 1).mT
        exact = a.double() @ b.double()
        noisy = exact + 1e-3 * torch.randn_like(exact)
        assert SampledProduct(a, b).snr_db(noisy) == pytest.approx(snr_db(exact, noisy))
        few = SampledProduct(a, b, most=8)
        assert few.snr_db(exact) > 200
        wrong = exact.clone()
        wrong[-1] = 0
        assert few.snr_db(wrong) < 20

    def test_no_tile_is_missed(self) -> None:
        largest = max(max(s.M, s.N, s.K) for s in LLM84)
        assert (largest - 1) / 1023 < 128


def test_operations_and_bytes() -> None:
    layer = Layer((2, 3, 5), CPU)
    assert layer.operations == 60
    assert layer.bytes_moved(1) == 10 + 15 + 2 * 6
    assert layer.bytes_moved(2) == 2 * (10 + 15 + 6)
    assert layer.wgrad_bytes_moved(1) == 6 + 10 + 2 * 15
    assert layer.step_bytes_moved() == 4 * (10 + 15 + 6)
    assert quant.bytes_moved(256, 512, [(1, 128)]) == 3 * 256 * 512 + 4 * 256 * 4
    assert quant.bytes_moved(256, 512, [(1, 128), (128, 1)]) == 4 * 256 * 512 + 4 * (256 * 4 + 2 * 512)
    assert quant.bytes_moved(256, 512, [(128, 128)]) == 3 * 256 * 512 + 4 * 2 * 4


class TestPeers:
    def test_scales_as_cublaslt_checks_them(self) -> None:
        """Scales have the shapes and strides that ATen's ScaledBlas.cpp demands; K / 128 = 3 is padded to 4."""
        m, n, k = 256, 512, 384
        layer = Layer((m, n, k), CPU)
        forward = peers.torch_blockwise(layer.x_row, layer.w_square.mT)
        assert isinstance(forward, partial)
        assert forward.func is F.scaled_mm
        a_scale, b_scale = forward.keywords["scale_a"], forward.keywords["scale_b"]
        assert (a_scale.shape, a_scale.stride()) == ((m, 3), (1, m))
        assert (b_scale.shape, b_scale.stride()) == ((4, 4), (1, 4))
        assert torch.equal(b_scale[:3], layer.w_square.scale.mT)
        assert [q.stride() for q in forward.args] == [(k, 1), (1, k)]
        assert forward.keywords["scale_recipe_a"] == F.ScalingType.BlockWise1x128
        assert forward.keywords["scale_recipe_b"] == F.ScalingType.BlockWise128x128

        wgrad = peers.torch_blockwise(layer.g_col.mT, layer.x_col)
        assert isinstance(wgrad, partial)
        a_scale, b_scale = wgrad.keywords["scale_a"], wgrad.keywords["scale_b"]
        assert (a_scale.shape, a_scale.stride()) == ((n, 2), (1, n))
        assert (b_scale.shape, b_scale.stride()) == ((k, 2), (1, k))
        assert [q.stride() for q in wgrad.args] == [(m, 1), (1, m)]
        assert wgrad.keywords["scale_recipe_b"] == F.ScalingType.BlockWise1x128

    def test_scales_as_scaled_mm_checks_them(self) -> None:
        layer = Layer((256, 512, 384), CPU)
        rowwise = peers.torch_scaled_mm(layer.x_line, layer.w_line.mT)
        assert isinstance(rowwise, partial)
        _, _, a_scale, b_scale = rowwise.args
        assert (a_scale.shape, a_scale.stride(-1)) == ((256, 1), 1)
        assert (b_scale.shape, b_scale.stride(-1)) == ((1, 512), 1)
        tensorwise = peers.torch_scaled_mm(layer.x_whole, layer.w_whole.mT)
        assert isinstance(tensorwise, partial)
        assert [scale.shape for scale in tensorwise.args[2:]] == [(), ()]
        assert tensorwise.keywords == {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def test_deep_gemm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The peer gets `(M, K)`, `(N, K)` with row-major scales of the weight, and an output."""

        def fp8_gemm_nt(a: Any, b: Any, out: torch.Tensor, disable_ue8m0_cast: bool) -> None:
            assert disable_ue8m0_cast
            assert b[1].is_contiguous()
            x, w = fp8fn.ScaledTensor(*a, (1, 128)), fp8fn.ScaledTensor(*b, (128, 128))
            out.copy_(fp8fn.gemm(x, w.mT))

        module = ModuleType("deep_gemm")
        vars(module).update(fp8_gemm_nt=fp8_gemm_nt, get_mn_major_tma_aligned_tensor=lambda scale: scale)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        layer = Layer((256, 512, 384), CPU)
        assert layer.out.snr_db(peers.deep_gemm(layer.x_row, layer.w_square.mT)()) > 25

    def test_deep_gemm_of_wgrad(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both operands have a scale a row and 128 of K, and what the output holds is added to."""

        def fp8_gemm_nt(a: Any, b: Any, out: torch.Tensor, c: Any, recipe: Any, disable_ue8m0_cast: bool) -> None:
            assert (c is out, recipe, disable_ue8m0_cast) == (True, (1, 1, 128), True)
            g, x = (fp8fn.ScaledTensor(*each, (1, 128)) for each in (a, b))
            out += fp8fn.gemm(g, x.mT, out_dtype=torch.float32)

        module = ModuleType("deep_gemm")
        vars(module).update(fp8_gemm_nt=fp8_gemm_nt)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        layer = Layer((256, 512, 384), CPU)
        assert layer.dB.snr_db(peers.deep_gemm_wgrad(layer.g_col.mT, layer.x_col)()) > 25

    def test_deep_gemm_of_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each row has the number of its group; along K a group is a matrix of its own."""
        experts = Experts((2, 2048, 256, 384), "balanced", CPU)
        experts.sizes = [1280, 768]
        experts.offsets = torch.tensor([1280, 2048], dtype=torch.int32)

        def by_rows(a: Any, b: Any, out: torch.Tensor, rows: torch.Tensor, disable_ue8m0_cast: bool) -> None:
            assert b[1].is_contiguous()
            assert (disable_ue8m0_cast, rows.dtype) == (True, torch.int32)
            x, w = fp8fn.ScaledTensor(*a, (1, 128)), fp8fn.ScaledTensor(*b, (128, 128))
            every = [fp8fn.gemm(x, each.mT) for each in w]
            out.copy_(torch.stack(every)[rows.long(), torch.arange(2048)])

        def along_k(a: Any, b: Any, out: torch.Tensor, sizes: Any, counts: torch.Tensor, c: torch.Tensor) -> None:
            assert (sizes, counts.tolist(), c is out) == ([1280, 768], [1280, 768], True)
            first = [0, 0]
            for group, size in enumerate(sizes):
                left, right = (
                    fp8fn.ScaledTensor(
                        data[first[0] * width : (first[0] + size) * width].view(width, size),
                        scale[:, first[1] : first[1] + size // 128], (1, 128),
                    )
                    for (data, scale), width in ((a, 256), (b, 384))
                )  # fmt: skip
                out[group] += fp8fn.gemm(left, right.mT, out_dtype=torch.float32)
                first = [first[0] + size, first[1] + size // 128]

        module = ModuleType("deep_gemm")
        vars(module).update(
            m_grouped_fp8_gemm_nt_contiguous=by_rows, k_grouped_fp8_gemm_nt_contiguous=along_k,
            get_mn_major_tma_aligned_tensor=lambda scale: scale,
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        assert experts.out_snr_db(moe._deep_gemm(experts)()) > 25
        assert experts.wgrad_snr_db(moe._deep_gemm_wgrad(experts)()) > 25
        experts.sizes = [1281, 767]
        with pytest.raises(ValueError, match="DeepGEMM takes multiples of 128"):
            moe._deep_gemm(experts)

    def test_deep_gemm_of_counted_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Experts with room for more rows than they have; the mean of the counts is known to the host."""
        experts = CountedExperts((3, 96, 40, 256, 384), CPU)

        def masked(
            a: Any, b: Any, out: torch.Tensor, counts: torch.Tensor, expected: int, disable_ue8m0_cast: bool
        ) -> None:
            assert b[1].is_contiguous()
            assert (disable_ue8m0_cast, counts.dtype, expected) == (True, torch.int32, 40)
            x, w = fp8fn.ScaledTensor(*a, (1, 128)), fp8fn.ScaledTensor(*b, (128, 128))
            for expert, count in enumerate(counts.tolist()):
                out[expert, :count] = fp8fn.gemm(x[expert], w[expert].mT)[:count]

        module = ModuleType("deep_gemm")
        vars(module).update(
            m_grouped_fp8_gemm_nt_masked=masked, get_mn_major_tma_aligned_tensor=lambda scale: scale
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        assert experts.out_snr_db(moe._deep_gemm_masked(experts)()) > 25

    def test_torchao(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torchao's functions get their own arguments; its quantizers keep the configurations with `num_stages` = 2."""

        def act_quant_lhs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q = fp8fn.quantize(x, (1, 128))
            return q.data, q.scale

        def gemm(a: Any, b: Any, a_s: Any, b_s: Any, out_dtype: torch.dtype) -> torch.Tensor:
            assert a_s.stride(-2) == b_s.stride(-2) == 1
            return fp8fn.gemm(fp8fn.ScaledTensor(a, a_s, (1, 128)), fp8fn.ScaledTensor(b, b_s, (128, 128)))

        class Function:
            @staticmethod
            def apply(
                x: torch.Tensor, w: torch.Tensor, block: int, dtype: torch.dtype, use_triton: bool
            ) -> torch.Tensor:
                assert (block, dtype) == (128, torch.bfloat16)
                return F.linear(x, w) * (2 if use_triton else 1)

        configs = [SimpleNamespace(num_stages=stages) for stages in (2, 4, 6)]
        kernels, linear = ModuleType("kernels"), ModuleType("linear")
        vars(kernels).update(
            triton_fp8_blockwise_act_quant_lhs=act_quant_lhs,
            triton_fp8_blockwise_act_quant_lhs_kernel=SimpleNamespace(configs=configs),
            triton_fp8_gemm_1x128_128x128=gemm,
            triton_fp8_gemm_1x128_128x1=None,
        )
        vars(linear).update(fp8_blockwise_mm=Function)
        for module in (kernels, linear):
            monkeypatch.setitem(sys.modules, f"torchao.prototype.blockwise_fp8_training.{module.__name__}", module)
        layer = Layer((256, 512, 384), CPU)
        assert layer.out.snr_db(peers.torchao_gemm(layer.x_row, layer.w_square.mT)()) > 25
        data, _ = peers.torchao_quantizer("act_quant_lhs")(layer.x)
        assert data.shape == (256, 384)
        assert vars(kernels)["triton_fp8_blockwise_act_quant_lhs_kernel"].configs == configs[:1]
        once, twice = (peers.torchao_linear(use_triton)(layer.x, layer.w) for use_triton in (False, True))
        assert torch.equal(2 * once, twice)

    def test_torchao_tunes_its_quantizer_of_groups_for_each_shape(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its tuner would keep the tiles of 16 groups, of 2048 rows, for 64 groups of 260 rows."""
        kernels = ModuleType("kernels")
        tuned = [SimpleNamespace(cache={(16640,): "2048 rows"}) for _ in range(2)]
        vars(kernels).update(
            triton_fp8_per_group_colwise_scales=lambda *args: args,
            _triton_fp8_per_group_colwise_scales_kernel=tuned[0],
            _triton_fp8_per_group_colwise_scales_fused_kernel=tuned[1],
        )
        name = "torchao.prototype.moe_training.kernels.jagged_float8_scales"
        monkeypatch.setitem(sys.modules, name, kernels)
        x, offsets = torch.ones(4, 8), torch.tensor([2, 4])
        call = peers.torchao_column_scales(x, offsets)
        assert [kernel.cache for kernel in tuned] == [{}, {}]
        assert call() == (x, offsets)


class TestMeasure:
    def test_rows(self) -> None:
        def missing() -> Any:
            return importlib.import_module("no_such_peer")

        cases = [
            Case("fp8fn", "good", lambda: lambda: 1, lambda value: {"out": 30.0}, operations=1e6, bytes=10.0),
            Case("torch", "ceiling", lambda: lambda: 1, None, operations=1e6, ceiling=True),
            Case("torch", "wrong", lambda: lambda: 1, lambda value: {"dA": 40.0, "dB": math.nan}, bytes=1e6),
            Case("peer", "absent", missing),
            Case("peer", "failing", lambda: lambda: 1 // 0),
        ]
        good, ceiling, wrong, absent, failing = measure((1, 2, 3), cases, CpuClock(CPU), QUICK)
        assert good.us is not None
        assert ceiling.us is not None
        assert good.rate == pytest.approx(1 / good.us)
        assert good.percent == pytest.approx(100 * ceiling.us / good.us)
        assert (good.label, good.unit, good.wrong, good.snr_db) == ("fp8fn good", "TFLOP/s", False, {"out": 30.0})
        assert ceiling.percent == pytest.approx(100)
        assert (wrong.unit, wrong.wrong) == ("TB/s", True)
        assert absent.unavailable == "ModuleNotFoundError: No module named 'no_such_peer'"
        assert failing.unavailable == "ZeroDivisionError: integer division or modulo by zero"
        assert (absent.us, failing.rate, failing.percent) == (None, None, None)

    def test_row_in_json(self) -> None:
        row = Row((1, 2, 3), "fp8fn", "x", "TFLOP/s", 12.0, 3.0, 4, 1.0, 0.5, 2.0, snr_db={"out": 30.0})
        assert Row.of_json(json.loads(json.dumps(dataclasses.asdict(row)))) == row


def run_of(rows: list[Row], suite: str = "anchors") -> dict[str, Any]:
    return {
        "benchmark": "dense",
        "date": "2026-01-02",
        "environment": {"cpu device": "a CPU", "cuda:0 device": "another GPU", "torch": "2.11", "triton": "3.6"},
        "results": {
            "suite": suite,
            "device": "a GPU",
            "copy_tb_s": 4.0,
            "rows": [dataclasses.asdict(row) for row in rows],
        },
    }


def row(shape: tuple[int, ...], label: str, us: float, operations: float = 1e9, snr: float | None = 28.6) -> Row:
    peer, _, case = label.partition(" ")
    rate = operations / us / 1e6
    snr_db = {} if snr is None else {"out": snr}
    return Row(
        shape, peer, case, "TFLOP/s", operations, 1e6, 9, us, 0.9 * us, 1.1 * us, 12.0, None, rate, rate / 20, snr_db
    )


ROWS = [
    row((1, 2, 3), "fp8fn a", 1.0),
    row((1, 2, 3), "torch b", 2.0, snr=24.0),
    row((4, 5, 6), "fp8fn a", 0.64, snr=27.25),
    Row((4, 5, 6), "torch", "b", "TFLOP/s", 1e9, 1e6, unavailable="ImportError: none"),
]


class TestTables:
    def test_rates(self) -> None:
        header, line, ours, theirs, *rest = tables.products(run_of(ROWS)).split("\n")
        assert cells(header) == ["TFLOP/s (of the ceiling)", "1,2,3", "4,5,6", "geomean", "worst SNR, dB"]
        assert set(line) == set("|:-")
        assert cells(ours) == ["fp8fn a", "1000 (50 %)", "1562 (78 %)", "1250", "27.2"]
        assert cells(theirs) == ["torch b", "500 (25 %)", "n/a", "", "24.0"]
        assert rest == ["", "n/a: `ImportError: none`: torch b.", "", "a GPU; torch 2.11, Triton 3.6; 2026-01-02."]

    def test_bandwidths(self) -> None:
        rows = [dataclasses.replace(ROWS[0], unit="TB/s", rate=3.2, percent=76.4)]
        header, _, ours, *_ = tables.quant(run_of(rows)).split("\n")
        assert cells(header)[0] == "TB/s (of the ceiling)"
        assert cells(ours) == ["fp8fn a", "3.20 (76 %)", "3.20", "28.6"]

    def test_microseconds(self) -> None:
        rows = [dataclasses.replace(ROWS[0], graph_us=0.75), dataclasses.replace(ROWS[1], graph_unavailable="why")]
        header, _, ours, theirs, *rest = tables.small(run_of(rows)).split("\n")
        assert cells(header) == ["µs (as a CUDA graph)", "1,2,3", "worst SNR, dB"]
        assert cells(ours) == ["fp8fn a", "1.0 (0.8)", "28.6"]
        assert cells(theirs) == ["torch b", "2.0", "24.0"]
        assert rest[1] == "no CUDA graph: `why`: torch b."

    def test_terminal(self) -> None:
        header, _, ours, theirs, *rest = tables.terminal([*ROWS[:2], ROWS[3]]).split("\n")
        assert header.split()[:4] == ["shape", "by", "case", "µs"]
        assert ours.split() == ["1,2,3", "fp8fn", "a", "1.0", "20.0", "12", "1000", "50", "28.6"]
        assert theirs.split()[-2:] == ["24.0", "WRONG"]
        assert rest == ["torch b: not available: ImportError: none"]

    def test_llm84(self) -> None:
        """Layer 1 is faster than bf16, layer 2 slower; the other 82 are missing."""
        rows = []
        for id, forward, backward in ((1, 1.0, 3.0), (2, 2.0, 6.0)):
            size = shape(id)[2:]
            rows += [row(size, "fp8fn forward", forward), row(size, "fp8fn backward", backward, 2e9, 26.0)]
            rows += [row(size, "torch bf16 forward", 2.0, snr=None), row(size, "torch bf16 backward", 4.0, 2e9, None)]
        rows.append(Row(shape(3)[2:], "fp8fn", "forward", "TFLOP/s", 1e9, 0.0, unavailable="OutOfMemoryError: no"))
        text = tables.llm84(run_of(rows, "llm84")).split("\n")
        assert cells(text[0])[0] == "model"
        layers = sum(s[2:] == shape(2)[2:] for s in LLM84)
        assert layers > 1  # equal sizes in several models
        assert cells(text[2]) == [
            "Llama-2-7B", "2", "500 → 707", "500 → 471", "500 → 530", "1.06x", "0.75x (2)", "26.0",
        ]  # fmt: skip
        assert cells(text[3])[:2] == ["Llama-2-70B", "0"]
        assert f"{layers} of {layers + 1} layers are slower than bf16 combined, 0 have under 25 dB" in text[-5]
        assert f"{84 - layers - 1} of 84 were not measured" in text[-5]
        assert text[-3] == "n/a: `OutOfMemoryError: no`: fp8fn forward."
        pair = llm84.pairs(rows)[shape(1)[2:]]
        assert (pair.fp8fn.combined, pair.bf16.combined, pair.speedup, pair.snr_db) == (4.0, 6.0, 1.5, 26.0)

    def test_llm84_has_a_line_of_the_square_recipe(self) -> None:
        """Its SNR is its own, and it changes no other line."""
        size = shape(1)[2:]
        rows = [row(size, "fp8fn forward", 1.0), row(size, "fp8fn backward", 3.0, 2e9, 26.0)]
        rows += [row(size, "torch bf16 forward", 2.0, snr=None), row(size, "torch bf16 backward", 4.0, 2e9, None)]
        plain = tables.llm84(run_of(rows, "llm84")).split("\n")
        rows += [row(size, "fp8fn square forward", 1.0), row(size, "fp8fn square backward", 2.0, 2e9, 24.0)]
        *lines, square = tables.llm84(run_of(rows, "llm84")).split("\n")[2:11]
        assert [*map(cells, lines)] == [*map(cells, plain[2:10])]
        assert cells(square) == [
            "all, `BLOCKWISE_SQUARE`", "1", "500 → 1000", "500 → 1000", "500 → 1000", "2.00x", "2.00x (1)", "24.0",
        ]  # fmt: skip


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


RUNS = [
    (("dense", "--shape", "128,256,128"), 9, "products", {"out"}),
    (("dense", "--suite", "small", "--shape", "100,132,128"), 9, "small", {"out"}),
    (("wgrad", "--shape", "128,256,128"), 7, "products", {"dB"}),
    (("linear", "--shape", "128,256,128"), 6, "products", {"out", "dA", "dB"}),
    (("linear", "--suite", "llm84", "--shape", "128,128,256"), 6, "llm84", {"out"}),
    (("quant", "--shape", "128,256"), 15, "quant", {"(1, 128)"}),
    (("quant", "--suite", "silu_mul", "--shape", "128,256"), 8, "quant", {"product", "gate", "up"}),
]


@pytest.mark.parametrize(
    ("argv", "count", "table", "outputs"),
    RUNS,
    ids=["forward", "small", "wgrad", "linear", "llm84", "quant", "silu_mul"],
)
def test_a_run_on_the_cpu(
    argv: tuple[str, ...], count: int, table: str, outputs: set[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """End to end: every case has a row with a time and a good SNR, or with a reason for neither; JSON, table, plot."""
    for peer in ("torchao", "deep_gemm"):
        monkeypatch.setitem(sys.modules, peer, None)  # not installed
    if table == "llm84":  # the table knows only the suite's shapes, which are too large for a CPU
        small = [Shape(id, "Llama-2-7B", 128, 128, 128 * id) for id in (1, 2)]
        monkeypatch.setattr(tables, "LLM84", small)
        monkeypatch.setattr(plot, "LLM84", small)
    path, figure = tmp_path / "run.json", tmp_path / "figure.png"
    status = cli.main(["bench", *argv, "--device", "cpu", "--rounds", "1", "--json", str(path)])
    printed = capsys.readouterr().out
    assert status == 0
    run = record.read(path)
    rows = tables.rows_of(run)
    assert len(rows) == count
    assert (run["benchmark"], run["results"]["schedule"]["rounds"]) == (argv[0], 1)
    assert run["results"]["copy_tb_s"] > 0
    assert run["environment"]["fp8fn"] == fp8fn.__version__
    assert run["results"]["device"] == device_name(CPU)
    assert rows[0].peer == "fp8fn"
    assert set(rows[0].snr_db) == outputs
    for row in rows:
        if row.us is None:
            assert row.peer != "fp8fn"
            assert row.unavailable
        else:
            assert row.us_q1 is not None
            assert row.us_q3 is not None
            assert 0 < row.us_q1 <= row.us <= row.us_q3
            assert not row.wrong
        if row.peer in ("torchao", "deep_gemm"):
            assert row.unavailable is not None
            assert row.unavailable.startswith("ModuleNotFoundError")
            assert f"{row.label}: not available: ModuleNotFoundError" in printed
    assert any(row.peer == "torch" and row.us is not None for row in rows)
    assert printed.endswith(f"{getattr(tables, table)(run)}\n")
    assert cli.main(["bench", "plot", str(path), str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_peers_are_chosen_and_a_failure_of_ours_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel")

    argv = ["bench", "wgrad", "--device", "cpu", "--rounds", "1", "--shape", "128,128,128", "--peers", "none"]
    assert cli.main(argv) == 0
    monkeypatch.setattr(fp8fn, "gemm", broken)
    assert cli.main(argv) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("dense", "--suite", "llm84"), "invalid choice: 'llm84'"),
        (("dense", "--shape", "8192,6144"), "anchors needs 3 sizes, M,N,K"),
        (("quant", "--shape", "1,2,3"), "quant needs 2 sizes, M,N"),
        (("moe", "--suite", "few", "--shape", "16,12,64,64"), "M=12, E=16: M must be a multiple of 8"),
        (("dense", "--shape", "8192,x"), "'8192,x' is not a list of sizes"),
        (
            ("quant", "--peers", "torch,jax"),
            "'jax' is not a peer; choose from torch, torchao, deep_gemm, triton, or none",
        ),
        (("wgrad", "--rounds", "0"), "'0' is not a positive whole number"),
    ],
)
def test_wrong_use(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *argv])
    assert message in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "dense"])
    assert "no GPU here; --device cpu" in capsys.readouterr().err


def test_missing_packages_are_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "dense", "--device", "cpu", "--plot", "x.png"])
    assert "needs tabulate, matplotlib: pip install" in capsys.readouterr().err


def test_arguments() -> None:
    assert sizes("8192,6144,4096") == (8192, 6144, 4096)
    assert peer_names("torch,torchao") == ("torch", "torchao")
    assert peer_names("none") == ()


def test_the_l2_is_emptied_by_reads_before_quantizers() -> None:
    from fp8fn.bench import moe, quant

    flushed_by_reads = {name for name, suite in moe.SUITES.items() if suite.schedule.flush == "reads"}
    assert flushed_by_reads == {"quant", "weights"}
    assert quant.SUITES["quant"].schedule.flush == "reads"


def test_routed_rows_are_of_distinct_experts() -> None:
    """Each token has `TOP_K` of them, of which those with large weights are drawn more often."""
    assert sorted(group_sizes(64, TOP_K, "routed")) == [0] * (64 - TOP_K) + [1] * TOP_K
    sizes = group_sizes(64, 100 * TOP_K, "routed")
    assert sum(sizes) == 100 * TOP_K
    assert max(sizes) > 60 > 3 * min(sizes)
    assert sizes == group_sizes(64, 100 * TOP_K, "routed")
    assert group_sizes(TOP_K, 3 * TOP_K, "routed") == [3] * TOP_K


@pytest.mark.parametrize(("experts", "rows"), [(16, TOP_K // 2), (16, TOP_K + 1), (TOP_K - 1, TOP_K)])
def test_rows_that_no_expert_would_have_are_not_routed(experts: int, rows: int) -> None:
    """A product of fewer rows than the table names was timed, and of 4 rows none was compared."""
    with pytest.raises(ValueError, match=rf"M={rows}, E={experts}: M must be a multiple of 8, and E 8 or more"):
        group_sizes(experts, rows, "routed")


@pytest.mark.parametrize("groups", [False, True], ids=["rows of experts", "columns of groups"])
def test_a_quantizer_by_triton_is_the_same_quantizer(monkeypatch: pytest.MonkeyPatch, groups: bool) -> None:
    launch = pytest.importorskip("fp8fn.ops.triton.launch").TritonLaunch
    monkeypatch.setattr(launch, "run", launch.interpret)
    monkeypatch.setattr(moe, "target_of", lambda _: SM90)
    if groups:
        x, offsets = torch.randn(70, 48).bfloat16(), torch.tensor([30, 30, 70], dtype=torch.int32)
        found, expected = moe._by_triton(x, offsets)(), fp8fn.quantize_grouped(x, offsets, block=-1)
    else:
        w = torch.randn(2, 48, 96).bfloat16().mT
        found, expected = moe._by_triton(w)(), fp8fn.quantize(w, (1, -1))
    assert torch.equal(found[0].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found[1], expected.scale)


@pytest.mark.parametrize("module", ["dense", "wgrad", "linear", "quant"])
def test_suites(module: str) -> None:
    """The shapes that a suite's name on the command line stands for."""
    suites: dict[str, Suite] = importlib.import_module(f"fp8fn.bench.{module}").SUITES
    expected = {
        "dense": {"anchors": ANCHORS, "small": SMALL, "deepgemm": DEEPGEMM},
        "wgrad": {"wgrad": TRAINING, "anchors": ANCHORS},
        "linear": {"linear": TRAINING, "llm84": llm84.SHAPES},
        "quant": {"quant": QUANT, "silu_mul": SILU_MUL},
    }
    assert {name: suite.shapes for name, suite in suites.items()} == expected[module]
    assert [name for name, suite in suites.items() if suite.graphs] == (["small"] if module == "dense" else [])


def test_deepgemms_shapes() -> None:
    """Its list: 1, 128 and 4096 rows of seven weights; groups of 8192 and 4096 rows; 8192, 4096 and 2048 along K.

    Experts with room for 4096 rows have 20, 192 and 1024 in the mean.
    """
    assert len(DEEPGEMM) == len(set(DEEPGEMM)) == 21
    assert {m for m, _, _ in DEEPGEMM} == {1, 128, 4096}
    assert {m // experts for experts, m, _, _ in moe.SUITES["deepgemm"].shapes} == {8192, 4096}
    assert {m // experts for experts, m, _, _ in moe.SUITES["deepgemm-wgrad"].shapes} == {8192, 4096, 2048}
    masked = moe.SUITES["deepgemm-masked"].shapes
    assert {shape[:3] for shape in masked} == {(32, 4096, 192), (6, 4096, 1024), (32, 4096, 20), (6, 4096, 20)}
    assert len({shape[3:] for shape in masked}) == 4
    assert all(0.7 * 192 - 1 <= size <= 1.3 * 192 for size in CountedExperts(masked[0], CPU).sizes)


def test_the_decoder_layer_of_the_bench() -> None:
    """Seven linear layers of Llama's shape, and a step that returns out, dx and the gradient of every weight."""
    setting = decoder.Setting((64, 512, 1024), CPU)
    assert setting.module.weights == 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024
    out, dx, *gradients = setting.eager
    assert out.shape == dx.shape == (1, 64, 512)
    assert [g.shape for g in gradients] == [p.shape for p in setting.module.parameters()]
    ours, theirs = decoder.cases((64, 512, 1024), CPU)
    assert [(case.peer, case.name) for case in (ours, theirs)] == [
        ("fp8fn", "compiled, FP8"),
        ("torch", "compiled, bf16"),
    ]
    assert ours.operations == theirs.operations == 6.0 * 64 * setting.module.weights
    rows = fp8fn.explain(setting.module, setting.x, where="*", show=False).rows
    assert [row.reason for row in rows if row.weight] == [None] * 7


def test_the_default_takes_all_seven_of_llama() -> None:
    with torch.device("meta"):
        module = decoder.Decoder(4096, 14336).bfloat16()
        x = torch.empty(1, 64, 4096, dtype=torch.bfloat16)
    rows = fp8fn.explain(module, x, show=False).rows
    assert [row.reason for row in rows if row.weight] == [None] * 7
