"""`bench train`: names of variants, attention without a mask, figures that merge, kinds of kernels, and a tiny run."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8fn
from fp8fn import cli
from fp8fn.bench import record
from fp8fn.bench.train import attention, command, figure, kept, kinds, models, runs, table, variants, worker
from fp8fn.lowering import backend

CPU = torch.device("cpu")


# --- kinds of kernels


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<false, __nv_bfloat16>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("void at::native::(anonymous)::multi_tensor_apply_kernel<FusedAdamMathFunctor<c10::BFloat16>>", "optimizer"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT", "products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel>>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("scaled_mm", "products"),
        ("scaled_mm_tma", "products"),
        ("moe_gemm", "products"),
        ("grouped_rows_mm", "products"),
        ("gemv_a16w8", "products"),
        ("quantize", "quantizers"),
        ("quantize_columns", "quantizers"),
        ("stream_columns", "quantizers"),
        ("quantize_rms_norm", "quantizers"),
        ("partial_amax", "quantizers"),
        ("amax", "quantizers"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_backward__to_copy_clamp_exp2_floor_log2", "quantizers"),
        ("triton_poi_fused_mul_quantize_dual_silu_silu_backward_view_2", "rest"),
        ("triton_poi_fused__to_copy__unsafe_view_add_cat_cos_mul_neg_sin_slice_transpose_unsqueeze_view_1", "rest"),
        ("triton_poi_fused__unsafe_view_clone_transpose_view_7", "copies"),
        ("triton_red_fused__scaled_mm__to_copy_abs_max_mul_0", "quantizers"),
        ("triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_3", "quantizers"),
        ("triton_per_fused_abs_amax_clamp_silu_5", "quantizers"),
        ("void at::native::elementwise_kernel<128, 4, at::native::float8_copy_kernel_cuda()>", "copies"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("triton_poi_fused_clone_transpose_2", "copies"),
        ("triton_poi_fused__to_copy_t_7", "copies"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4", "rest"),
        ("triton_poi_fused_mul_silu_9", "rest"),
        ("triton_poi_fused_mm_mul_silu_9", "rest"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "rest"),
    ],
)  # fmt: skip
def test_kind_of_a_kernel(kernel: str, kind: str) -> None:
    assert kinds.kind_of(kernel) == kind


def test_profile_adds_up_by_kind() -> None:
    found = kinds.by_kind({"scaled_mm": (3000, 2), "quantize": (500, 4), "nvjet": (1000, 1), "none": (0, 1)})
    assert tuple(found) == kinds.KINDS
    assert (found["products"]["ms"], found["products"]["launches"]) == (4.0, 3.0)
    assert [kernel["name"] for kernel in found["products"]["kernels"]] == ["scaled_mm", "nvjet"]
    assert found["quantizers"]["ms"] == 0.5
    assert sum(part["ms"] for part in found.values()) == 4.5
    assert any("4.000 ms" in line and "products" in line for line in kinds.lines(found))


# --- variants


def test_names_of_variants() -> None:
    found = variants.listed(
        "bf16 torchao:rowwise fp8fn:blockwise,where=*,fuse_quantize=false fp8fn:TENSORWISE,scale=pow2"
    )
    assert [each.name for each in found] == [
        "bf16", "torchao:rowwise", "fp8fn:BLOCKWISE,where=*,fuse_quantize=false", "fp8fn:TENSORWISE,scale=pow2",
    ]  # fmt: skip
    assert dict(found[2].options) == {"recipe": "blockwise", "where": "*", "fuse_quantize": False}
    assert dict(found[3].options) == {"recipe": replace(fp8fn.TENSORWISE, scale="pow2").key}
    assert dict(variants.parse("fp8fn:ROWWISE,max_autotune=true").options) == {
        "recipe": "rowwise",
        "max_autotune": True,
    }
    # A field that the default recipe could not have.
    fast = dict(variants.parse("fp8fn:TENSORWISE,accumulate=fast").options)
    assert fast == {"recipe": replace(fp8fn.TENSORWISE, accumulate="fast").key}


def test_options_of_variants_are_the_backends() -> None:
    assert ("recipe", *variants.BACKEND_OPTIONS) == backend.OPTIONS


def test_every_preset_is_a_default_variant() -> None:
    from fp8fn.ops.recipe import PRESETS

    recipes = [dict(variants.parse(name).options).get("recipe") for name in variants.DEFAULTS]
    assert set(recipes) - {None} == set(PRESETS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp16", "'fp16' is not a variant"),
        ("torchao:columnwise", "torchao has no recipe 'columnwise'; use one of tensorwise"),
        ("fp8fn:BLOCK", "no preset 'BLOCK'; use one of BLOCKWISE"),
        ("fp8fn:BLOCKWISE,where", "'where' is not option=value"),
        ("fp8fn:BLOCKWISE,whree=*", "'whree' is no option of the backend"),
    ],
)
def test_a_wrong_variant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        variants.parse(text)


def test_an_absent_peer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: None)
    for name in ("torchao:tensorwise", "torchao:blockwise", "transformer_engine"):
        with pytest.raises(variants.UnavailableError, match="is not installed"):
            variants.parse(name).compile(torch.nn.Linear(16, 16), CPU)


# --- attention


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_attention_is_causal_without_a_mask(name: str) -> None:
    """Compiled, transformers' own attention has a mask and keys for each query head; `CAUSAL` has neither."""
    pytest.importorskip("transformers")
    attention.register()
    size = replace(models.SIZES[name], layers=1)
    (tokens,) = models.batches(size, 2, 32, 1)
    found = {}
    for implementation in (attention.CAUSAL, attention.MASKED):
        graphs: list[torch.fx.GraphModule] = []

        def keep(gm: torch.fx.GraphModule, inputs: Any, graphs: list[torch.fx.GraphModule] = graphs) -> Any:
            graphs.append(gm)
            return gm

        torch._dynamo.reset()
        model = models.build(size, 32, implementation, CPU, seed=0)
        loss = torch.compile(model, backend=keep, dynamic=False)(input_ids=tokens, labels=tokens).loss
        (call,) = [
            node for gm in graphs for node in gm.graph.nodes if "scaled_dot_product_attention" in str(node.target)
        ]
        heads = call.args[1].meta["example_value"].shape[1]
        found[implementation] = call.kwargs.get("attn_mask") is None, call.kwargs.get("is_causal"), heads, loss.detach()
    assert found[attention.CAUSAL][:3] == (True, True, size.kv_heads)
    assert found[attention.MASKED][:3] == (False, False, size.heads)
    torch.testing.assert_close(found[attention.CAUSAL][3], found[attention.MASKED][3], rtol=1e-3, atol=0)


def test_the_fastest_attention_is_chosen() -> None:
    assert attention.fastest({"cudnn": 2.0, "flash": 1.5, "efficient": "RuntimeError: no"}) == "flash"
    assert attention.fastest({"cudnn": "RuntimeError: no"}) == attention.DEFAULT


def test_attention_is_timed_on_each_kernel() -> None:
    """On a CPU only flash attention has a kernel; the others say why not."""
    found = attention.times(models.SIZES["tiny"], 1, 32, CPU)
    assert isinstance(found["flash"], float)
    assert all("RuntimeError" in str(found[name]) for name in ("cudnn", "efficient"))
    assert attention.fastest(found) == "flash"


# --- the model's operations


def test_operations_are_those_of_the_products() -> None:
    """Torch's own counter over the eager model, with an attention that computes both triangles."""
    pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    attention.register()
    size, batch, sequence = models.SIZES["tiny"], 2, 32
    model = models.build(size, sequence, attention.CAUSAL, CPU, seed=0)
    (tokens,) = models.batches(size, batch, sequence, 1)
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens)
    whole = size.layers * 4 * batch * sequence**2 * size.hidden
    assert models.operations(size, batch, sequence) == 3 * (counter.get_total_flops() - whole // 2)


def test_parameters_of_the_sizes() -> None:
    """The widths are Llama-3.1-8B's and Llama-3.2-1B's: 218M and 61M parameters a layer."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    for name, expected in (("8b", 218_112_000), ("1b", 60_821_504)):
        size = models.SIZES[name]
        with torch.device("meta"):
            one, two = (
                sum(p.numel() for p in AutoModelForCausalLM.from_config(models.config_of(s, 64)).parameters())
                for s in (replace(size, layers=1), replace(size, layers=2))
            )
        assert two - one == expected, name
    assert models.peak_rate("NVIDIA H100 80GB HBM3") == models.peak_rate("NVIDIA H200") == 989.4e12
    assert models.peak_rate("NVIDIA H100 PCIe") is models.peak_rate("AMD EPYC") is None


# --- figures on disk


def figures(name: str, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "variant": name, "first_step_s": 30.0, "graphs": 1, "graph_breaks": 0, "cached_graphs": 0, "parameters": 10,
        "kept_bytes": 1 << 20, "kept_bytes_per_token_and_layer": 100.0 * ms, "peak_bytes": int(1e8 * ms),
        "step_peak_bytes": int(2e8 * ms), "losses": [6.0, 5.0 + ms / 100], "reserved_bytes": 1 << 20, **more,
    }  # fmt: skip


SETTING = {
    "model": "8b", "size": asdict(models.SIZES["8b"]), "batch": 4, "sequence": 4096, "steps": 20,
    "attention": {"implementation": "is_causal, without a mask", "kernel": "cudnn"},
}  # fmt: skip
TIMES = {"bf16": 10.0, "torchao:tensorwise": 8.0, "torchao:rowwise": 9.0, "fp8fn:BLOCKWISE": 7.5}


def test_a_ratio_is_of_the_same_round() -> None:
    """The clock drops by a tenth from round to round: times move, ratios do not."""
    rows = {name: figures(name, ms) for name, ms in TIMES.items()}
    for slow in (1.0, 1.1, 1.21):
        times = {
            name: {"forward_backward_ms": [ms * slow, ms * slow, 99.0], "step_ms": [2 * ms * slow]}
            for name, ms in TIMES.items()
        }
        for name, found in runs.round_rows(times).items():
            rows[name].setdefault("rounds", []).append(found)
    ours = rows["fp8fn:BLOCKWISE"]
    assert runs.milliseconds(ours, "forward_backward_ms") == 7.5 * 1.1
    assert runs.speedup(ours, "forward_backward_ms") == pytest.approx(10 / 7.5)
    assert runs.speedup(rows["bf16"], "step_ms") == 1.0
    assert runs.best_torchao(ours, "forward_backward_ms") == pytest.approx(8 / 7.5)
    assert runs.milliseconds(figures("x", 1.0), "step_ms") is None
    assert runs.speedup(figures("x", 1.0), "step_ms") is None


def test_runs_merge_by_machine_commit_and_setting(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    for device in ("NVIDIA H100", "NVIDIA H200"):
        store = runs.Runs(path, runs.key_of(device, "commit abc", SETTING))
        store.put(figures("bf16", 10.0))
    again = runs.Runs(path, runs.key_of("NVIDIA H100", "commit abc", SETTING))
    assert again.finished() == set()  # no times yet
    again.put(figures("bf16", 9.0, rounds=[{"forward_backward_ms": 9.0, "step_ms": 18.0, "beside": {}}]))
    again.put({"variant": "transformer_engine", "unavailable": "transformer_engine is not installed"})
    assert again.finished() == {"bf16", "transformer_engine"}
    stored = record.read(path)
    assert stored["benchmark"] == "train"
    found = stored["results"]["runs"]
    assert [(run["device"], len(run["rows"])) for run in found] == [("NVIDIA H100", 2), ("NVIDIA H200", 1)]
    assert found[0]["rows"][0]["peak_bytes"] == int(9e8)
    assert {"date", "environment", "commit", "setting"} <= set(found[0])
    other = runs.Runs(path, runs.key_of("NVIDIA H100", "commit abc", {**SETTING, "batch": 2}))
    assert other.rows == []
    assert len(other.runs) == 3


def document() -> dict[str, Any]:
    """A file with one run: two rounds of three variants, and a peer that is not installed."""
    bf16 = figures("bf16", 100.0, peak_bytes=16_904_761_905, kept_bytes_per_token_and_layer=40960.0, losses=[9, 5.1])
    bf16 |= {"step_peak_bytes": 20_700_000_000, "cached_graphs": 2}
    peer = figures("torchao:tensorwise", 100.0, losses=[9, 5.099])
    ours = figures("fp8fn:BLOCKWISE", 100.0, peak_bytes=14_200_000_000, losses=[9, 5.101])
    ours["profile"] = kinds.by_kind({"scaled_mm": (80_000, 84), "quantize": (8_500, 72), "flash": (17_250, 8)})
    ours |= {"step_peak_bytes": 18_000_000_000, "kept_bytes_per_token_and_layer": 29696.0, "first_step_s": 31.5}
    rows = {row["variant"]: row for row in (bf16, peer, ours)}
    for _ in range(2):
        measured = {"bf16": (189.0, 218.0), "torchao:tensorwise": (147.0, 176.0), "fp8fn:BLOCKWISE": (142.0, 170.0)}
        times = {name: {"forward_backward_ms": [fb], "step_ms": [step]} for name, (fb, step) in measured.items()}
        for name, found in runs.round_rows(times).items():
            rows[name].setdefault("rounds", []).append(found)
    absent = {"variant": "transformer_engine", "unavailable": "transformer_engine is not installed"}
    key = runs.key_of("NVIDIA H200", "commit abc", SETTING)
    environment = {"torch": "2.11.0", "triton": "3.6.0"}
    run = {**key, "date": "2026-11-24", "environment": environment, "rows": [*rows.values(), absent]}
    return {"results": {"runs": [run]}}


def test_table_of_a_run() -> None:
    lines = table.of_document(document()).splitlines()
    assert lines[0] == "8b, 4 layers of 4096 x 14336, vocabulary 8192, 4 x 4096 tokens"
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in lines
        if line[:2] == "| " and line.count("|") == 16
    }
    assert cells["`fp8fn:BLOCKWISE`"] == [
        "142.00", "1.331x", "1.035x", "170.00", "1.282x", "96376", "68.1", "14.20", "0.840x", "18.00", "29.0", "0.725x",
        "31.5", "5.1010",
    ]  # fmt: skip
    assert cells["`bf16`"][1:3] == ["1.000x", "0.778x"]
    assert cells["`bf16`"][12:] == ["30.0 (cached)", "5.1000"]
    assert "transformer_engine: n/a: transformer_engine is not installed." in lines
    (kind_names, profile) = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines
        if "by kind" in line or (line.startswith("| `fp8fn") and line.count("|") == 9)
    )
    by_kind = dict(zip(kind_names[1:], profile[1:], strict=True))
    assert by_kind == {
        "attention": "17.2", "optimizer": "0.0", "quantizers": "8.5", "products": "80.0", "copies": "0.0",
        "rest": "0.0", "all": "105.8",
    }  # fmt: skip
    assert lines[-1] == "NVIDIA H200; torch 2.11.0, Triton 3.6.0; commit abc; 2026-11-24."


def test_revision_names_the_code() -> None:
    found = runs.revision()
    kind, _, name = found.partition(" ")
    assert kind in ("commit", "sources")
    assert re.fullmatch("[0-9a-f]{10}", name)
    assert found == runs.revision()


# --- the command


class FakeWorker:
    """Answers as a process would, at once."""

    made: ClassVar[list[str]] = []
    broken: ClassVar[dict[str, Exception]] = {}

    def __init__(self, setting: worker.Setting, variant: variants.Variant) -> None:
        self.name = variant.name
        self.made.append(self.name)

    def call(self, method: str, *args: Any) -> Any:
        if method == "prepare" and self.name in self.broken:
            raise self.broken[self.name]
        ms = TIMES.get(self.name, 5.0)
        answers: dict[str, Any] = {
            "prepare": figures(self.name, ms),
            "idle": {"reserved_bytes": 0},
            "profile": kinds.by_kind({"scaled_mm": (1000.0, 1.0)}),
            "turn": {"forward_backward_ms": [ms] * 3, "step_ms": [2 * ms] * 3},
        }
        found = answers[method]
        return {key: value for key, value in found.items() if key != "variant"} if method == "prepare" else found

    def close(self) -> None:
        self.made.append(f"closed {self.name}")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    pytest.importorskip("transformers")
    monkeypatch.setattr(FakeWorker, "made", [])
    monkeypatch.setattr(FakeWorker, "broken", {})
    monkeypatch.setattr(command, "Worker", FakeWorker)
    monkeypatch.setattr(command.Session, "_fits_another", lambda self: True)
    return FakeWorker


def run(*argv: str) -> int:
    return cli.main(["bench", "train", "--device", "cpu", "--rounds", "2", *argv])


def test_an_interrupted_run_is_resumed(
    fakes: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "train.json")
    assert run("--json", path, "--variants", "bf16 fp8fn:BLOCKWISE", "--profile") == 0
    printed = capsys.readouterr().out
    assert "round 2: " in printed
    assert "fp8fn:BLOCKWISE 7.50 / 15.00 ms 1.333x" in printed
    assert "products" in printed
    fakes.made.clear()
    assert run("--json", path, "--variants", "bf16 fp8fn:BLOCKWISE torchao:tensorwise") == 0
    # bf16 runs again beside what is new, since a ratio is of one round.
    assert [name for name in fakes.made if "closed" not in name] == ["bf16", "torchao:tensorwise"]
    assert f"fp8fn:BLOCKWISE: in {path} already" in capsys.readouterr().out
    (found,) = record.read(path)["results"]["runs"]
    assert [row["variant"] for row in found["rows"]] == ["bf16", "fp8fn:BLOCKWISE", "torchao:tensorwise"]
    assert [len(row["rounds"]) for row in found["rows"]] == [2, 2, 2]
    fakes.made.clear()
    assert run("--json", path, "--variants", "fp8fn:BLOCKWISE", "--again") == 0
    assert [name for name in fakes.made if "closed" not in name] == ["bf16", "fp8fn:BLOCKWISE"]


def test_a_failure_and_an_absent_peer_are_reported(
    fakes: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.broken.update(
        {"torchao:tensorwise": variants.UnavailableError("torchao is not installed"),
         "fp8fn:ROWWISE": worker.WorkerError("RuntimeError: no kernel")}
    )  # fmt: skip
    path = tmp_path / "train.json"
    argv = ("--json", str(path), "--variants", "bf16 torchao:tensorwise fp8fn:ROWWISE fp8fn:BLOCKWISE")
    assert run(*argv) == 1
    printed = capsys.readouterr().out
    assert "torchao:tensorwise: n/a: torchao is not installed." in printed
    assert "fp8fn:ROWWISE: n/a: RuntimeError: no kernel." in printed
    fakes.broken.clear()
    assert run(*argv) == 0  # what failed is measured again; what is not installed is not
    rows = record.read(path)["results"]["runs"][0]["rows"]
    assert [("rounds" in row, "unavailable" in row) for row in rows] == [
        (True, False), (False, True), (True, False), (True, False),
    ]  # fmt: skip


def test_groups_share_bf16(fakes: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each variant is timed beside bf16, which stays, where two processes fit at a time."""
    monkeypatch.setattr(command.Session, "_fits_another", lambda self: len(self.alive) < 2)
    path = tmp_path / "train.json"
    assert run("--json", str(path), "--variants", "bf16 fp8fn:BLOCKWISE fp8fn:ROWWISE") == 0
    rows = {row["variant"]: row for row in record.read(path)["results"]["runs"][0]["rows"]}
    assert [len(row["rounds"]) for row in rows.values()] == [4, 2, 2]
    assert fakes.made.count("bf16") == 1
    assert all("bf16" in each["beside"] for row in rows.values() for each in row["rounds"])


def test_time_that_is_over_begins_nothing(fakes: type[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    session = command.Session(worker_setting(), runs.Runs(None, runs.key_of("x", "y", SETTING)), 1, 1, False)
    session.measure([variants.parse("bf16"), variants.parse("fp8fn:BLOCKWISE")], deadline=0.0)
    assert session.rows == {}
    assert fakes.made.count("closed bf16") == fakes.made.count("closed fp8fn:BLOCKWISE") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tokens", "4096"), "'4096' is not sequences x length"),
        (("--variants", "bf16 fp8fn:BLOCKWIZE"), "no preset 'BLOCKWIZE'"),
        (("--layers", "0"), "'0' is not a positive whole number"),
    ],
)
def test_wrong_options(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run(*argv)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


# --- what is kept


def test_only_logits_are_the_losss() -> None:
    """At 8B's widths the inputs of an MLP's activation have more columns than the vocabulary has entries."""
    tokens, vocabulary = 64, 128
    gate, up, hidden = (torch.empty(tokens, 224, dtype=torch.bfloat16) for _ in range(3))
    residual, head = torch.empty(2, 32, 16), torch.empty(16, vocabulary)
    logits, flat, ids = torch.empty(2, 32, vocabulary), torch.empty(vocabulary, tokens), torch.empty(2, 32).long()
    found = kept.of_layers([gate, up, hidden, residual, head, logits, flat, ids], tokens, vocabulary)
    assert [id(x) for x in found] == [id(x) for x in (gate, up, hidden, residual, head, ids)]
    rows = kept.listing(found)
    assert [(row["shape"], row["dtype"], row["tensors"], row["bytes"]) for row in rows] == [
        ([64, 224], "bfloat16", 3, 3 * 64 * 224 * 2), ([16, 128], "float32", 1, 16 * 128 * 4),
        ([2, 32, 16], "float32", 1, 64 * 16 * 4), ([2, 32], "int64", 1, 64 * 8),
    ]  # fmt: skip
    text = kept.lines([*rows, {"shape": [], "dtype": "float32", "tensors": 1, "bytes": 4}], tokens, 2)
    assert text[0].endswith(f"layer: {(sum(row['bytes'] for row in rows) + 4) / 128:.1f}")
    assert text[1].split() == ["672.0", "3", "of", "64x224", "bfloat16"]
    assert text[-1].split() == ["0.0", "the", "rest"]


@pytest.mark.parametrize("name", models.SIZES)
def test_no_width_is_the_vocabularys(name: str) -> None:
    size = models.SIZES[name]
    widths = {size.hidden, size.intermediate, 2 * size.intermediate, size.head * size.kv_heads}
    assert size.vocabulary not in widths


# --- a tiny run


def worker_setting(steps: int = 2) -> worker.Setting:
    size = replace(models.SIZES["tiny"], layers=1)
    return worker.Setting(
        size=size, batch=2, sequence=32, attention=attention.CAUSAL, kernel="default", steps=steps, device="cpu"
    )


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_after_another_length_the_length_is_a_variable_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    lengths: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        (tokens,) = [node.meta["example_value"] for node in placeholders if "input_ids" in node.name]
        lengths.append(tokens.shape[1])
        return gm

    monkeypatch.setattr(variants.Variant, "compile", lambda self, model, device: torch.compile(model, backend=keep))
    setting = replace(worker_setting(), attention=attention.MASKED, ones=True, varied=True)
    worker.Trainer(setting, variants.parse("bf16")).prepare()
    first, second = lengths
    assert first == 24
    assert isinstance(second, torch.SymInt)


@pytest.mark.usefixtures("fresh_dynamo")
def test_trainer_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor: the losses are those of a plain loop, and what is kept is what autograd saves."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(variants.Variant, "compile", lambda self, model, device: model)
    trainer = worker.Trainer(worker_setting(), variants.parse("bf16"))
    found = trainer.prepare()

    setting = worker_setting()
    model = models.build(setting.size, setting.sequence, setting.attention, CPU, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    expected = []
    for rate, tokens in zip((0.5e-4, 1e-4), models.batches(setting.size, 2, 32, 2), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found["losses"] == expected
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["peak_bytes"] is None
    # A layer keeps at least the inputs of its seven products, in bf16, and at most ten times as much.
    inputs = 2 * (2 * 256 + 256 + 512)
    assert inputs < found["kept_bytes_per_token_and_layer"] < 10 * inputs
    assert found["kept_bytes"] > found["kept_bytes_per_token_and_layer"] * 64
    assert sum(row["bytes"] for row in found["kept"]) == found["kept_bytes_per_token_and_layer"] * 64
    # gate, up, silu(gate) and their product
    assert sum(row["tensors"] for row in found["kept"] if row["shape"][-1:] == [512]) == 4
    times = trainer.turn(3)
    assert [len(each) for each in times.values()] == [3, 3]
    assert all(ms > 0 for each in times.values() for ms in each)
    assert trainer.idle() == {"reserved_bytes": 0}
    assert trainer.profile(1)["products"]["ms"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tiny_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "train.json"
    argv = ("--layers", "1", "--tokens", "1x32", "--steps", "2", "--repeats", "1", "--kept", "--json", str(path))
    assert run(*argv, "--variants", "bf16 fp8fn:TENSORWISE,where=*") == 0
    (found,) = record.read(path)["results"]["runs"]
    bf16, ours = found["rows"]
    assert [row["variant"] for row in found["rows"]] == ["bf16", "fp8fn:TENSORWISE,where=*"]
    assert (bf16["graphs"], bf16["graph_breaks"]) == (ours["graphs"], ours["graph_breaks"]) == (1, 0)
    assert len(bf16["rounds"]) == len(ours["rounds"]) == 2
    assert 0 < abs(bf16["losses"][0] - ours["losses"][0]) < 0.1  # the same weights and tokens; products in FP8
    assert found["setting"]["attention"]["implementation"] == "is_causal, without a mask"
    out = capsys.readouterr().out
    assert "`fp8fn:TENSORWISE,where=*`" in out
    assert out.count("kept between forward and backward, bytes a token and layer") == 2


def test_the_picture_has_the_largest_run_of_each_card() -> None:
    """A run of a smaller model with as many tokens does not take its place."""

    def run(device: str, sequence: int, *variants: str, model: str = "8b") -> dict[str, Any]:
        setting = {"size": models.as_json(models.SIZES[model]), "batch": 2, "sequence": sequence}
        return {"device": device, "setting": setting, "rows": [{"variant": name} for name in variants]}

    all_of_them = ("bf16", "torchao:tensorwise", "fp8fn:BLOCKWISE_SQUARE", "fp8fn:ROWWISE")
    runs = [
        run("a", 64, *all_of_them), run("a", 128, *all_of_them), run("a", 128, *all_of_them[::-1]),
        run("a", 256, "bf16"), run("b", 32, *all_of_them), run("a", 128, *all_of_them, model="1b"),
    ]  # fmt: skip
    assert figure.shown({"results": {"runs": runs}}) == [runs[2], runs[4]]
