"""Bytes that a Llama of 8B's widths keeps between forward and backward on Hopper, from its graphs alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

from fp8fn.bench.scale_out import Layer
from fp8fn.bench.train.models import SIZES
from fp8fn.lowering.graph.nodes import arguments_of
from fp8fn.lowering.saved import SavePlan
from fp8fn.ops.recipe import PRESETS
from support.fake_hopper import Saved, calls, compiled_layer, compiled_llama, fused, per_token_and_layer, saved_by
from support.kept import OpByOp

BATCH, LAYERS = (4, 4096), 2
TOKENS = BATCH[0] * BATCH[1]
SIZE = SIZES["8b"]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EXACT, HALF = SavePlan(), SavePlan("fp8")


@cache
def llama(recipe: str, plan: SavePlan | None = EXACT) -> OpByOp:
    return compiled_llama("8b", BATCH, plan, PRESETS.get(recipe), LAYERS)


def saved(recipe: str, plan: SavePlan | None = EXACT) -> list[Saved]:
    return saved_by(llama(recipe, plan), SIZE.vocabulary)


def count(found: list[Saved], width: int, dtype: torch.dtype) -> int:
    """The saved matrices of tokens with `width` columns."""
    return sum(nbytes == TOKENS * width * dtype.itemsize and of == dtype for nbytes, _, of in found)


def of_four_layers(found: list[Saved]) -> float:
    """Bytes a token and layer of `bench train`'s 4 layers: the final norm keeps its input and its output once."""
    ends = 2 * SIZE.hidden * BF16.itemsize
    return per_token_and_layer(found, BATCH, LAYERS) - ends / LAYERS + ends / 4


def test_bf16_keeps_what_it_kept_on_a_gpu() -> None:
    """9.673 GB on an H200, of which 0.268 are logits: 143500 bytes a token and layer."""
    found = saved("bf16", None)
    assert of_four_layers(found) == pytest.approx(143500, rel=1e-4)
    assert count(found, SIZE.intermediate, BF16) == 3 * LAYERS


@pytest.mark.parametrize(
    ("recipe", "plan", "share"),
    [
        ("blockwise", EXACT, 0.69), ("blockwise_square", EXACT, 0.69), ("tensorwise", EXACT, 0.745),
        ("rowwise", EXACT, 0.745), ("blockwise", HALF, 0.495), ("blockwise_square", HALF, 0.495),
    ],
)  # fmt: skip
def test_share_of_bf16(recipe: str, plan: SavePlan, share: float) -> None:
    ours, bf16 = (of_four_layers(found) for found in (saved(recipe, plan), saved("bf16", None)))
    print(f"{recipe}, {plan.save}: {ours:.0f} bytes a token and layer, {ours / bf16:.3f} of bf16's {bf16:.0f}")
    assert ours <= share * bf16


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_square", "tensorwise", "rowwise"])
def test_no_fp8_form_of_an_mlps_product_or_of_a_weight(recipe: str) -> None:
    """A square block's columns are made again too; of an unfused norm, the columns are kept."""
    found = saved(recipe)
    assert count(found, SIZE.intermediate, BF16) == 2 * LAYERS
    assert count(found, SIZE.intermediate, FP8) == 0
    assert count(found, SIZE.hidden, FP8) == (0 if "blockwise" in recipe else 2 * LAYERS)
    weights = {SIZE.hidden * SIZE.intermediate, SIZE.hidden**2, SIZE.hidden * SIZE.head * SIZE.kv_heads}
    assert not [one for one in found if one[2] == FP8 and one[0] in weights and one[0] // TOKENS != SIZE.hidden]


def test_no_launch_writes_an_orientation_that_nothing_reads() -> None:
    """The forward writes rows of activations and the backward columns; both write one side of a weight."""
    for recipe in ("blockwise", "blockwise_square", "tensorwise"):
        (forward,), (backward,) = llama(recipe).forward, llama(recipe).backward
        norms = 0 if recipe != "tensorwise" else 2 * LAYERS
        assert calls(forward, "fp8fn.quantize_dual.default") == norms
        # gradients: of q, k, v, o, gate, up, down
        assert calls(backward, "fp8fn.quantize_dual.default") == 7 * LAYERS
        assert calls(backward, "fp8fn.quantize_rms_norm.default") == (0 if norms else 2 * LAYERS)


def test_a_matrix_that_is_quantized_on_both_sides_is_searched_once() -> None:
    """The largest magnitudes of weights and of attention's output are saved, 4 bytes each."""
    (forward,), (backward,) = llama("tensorwise").forward, llama("tensorwise").backward
    assert calls(forward, "fp8fn.amax.default") == 8 * LAYERS
    assert calls(backward, "fp8fn.amax.default") == 0
    quantizers = backward.graph.find_nodes(op="call_function", target=torch.ops.fp8fn.quantize.default)
    given = [arguments_of(node)["amax"] is not None for node in quantizers]
    assert (given.count(True), given.count(False)) == (8 * LAYERS, LAYERS)  # Inductor searches silu(gate) * up


def test_a_backward_writes_no_gradient_of_gate_and_up_in_16_bits() -> None:
    """One op computes the product and its factors' gradients, from FP8 or 16 bits, in every block of the recipes."""
    for recipe in ("blockwise", "blockwise_square"):
        for kept in (llama(recipe, HALF), llama(recipe)):
            backward = fused(kept.backward[0])
            assert calls(backward, "fp8fn.quantize_silu_mul_backward.default") == LAYERS
            assert calls(backward, "fp8fn.quantize_silu_mul.default") == 0


@pytest.mark.parametrize(("names", "count"), [(r".*proj\.weight", 7), (r".*[qk]_proj\.weight", 2)], ids=["all", "two"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_fsdp_gathers_is_neither_copied_in_the_forward_nor_kept(
    names: str, count: int, dynamic: bool
) -> None:
    """The layer keeps what it keeps with its weights in 16 bits, and its backward alone turns FP8 data."""
    plain, wired = (
        compiled_layer(lambda: Layer(512, 1792), rows=(1, 1024, 512), gathered=gathered, dynamic=dynamic)
        for gathered in ("none", names)
    )
    found = [saved_by(backend, vocabulary=-1) for backend in (plain, wired)]
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))
    (forward,), (backward,) = wired.forward, wired.backward
    assert calls(forward, "aten.copy.default") == 0
    assert calls(forward, "aten.clone.default") == calls(plain.forward[0], "aten.clone.default")
    assert calls(backward, "aten.copy.default") == count  # of the data; scales are read where they lie
