"""`Recipe`: presets, its key as a string that ops take, its checks, and the recipes of the two gradients."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8fn
from fp8fn import Recipe
from fp8fn.ops.formats import FP8_DTYPES, SCALE_FORMATS
from fp8fn.ops.layout import BLOCKS, contracts_rows, is_square, swap
from fp8fn.ops.recipe import PRESETS, parse_recipe, recipe_key

LEFT = [block for block in BLOCKS if not contracts_rows(block)]
RIGHT = [block for block in BLOCKS if is_square(block) or contracts_rows(block)]
DTYPES = st.sampled_from([None, *FP8_DTYPES])
RECIPES = st.builds(
    Recipe,
    activation_block=st.sampled_from(LEFT),
    weight_block=st.sampled_from(RIGHT),
    gradient_block=st.sampled_from(LEFT),
    wgrad_activation_block=st.sampled_from((None, *RIGHT)),
    activation_dtype=DTYPES,
    weight_dtype=DTYPES,
    gradient_dtype=DTYPES,
    scale=st.sampled_from(SCALE_FORMATS),
    second_order=st.booleans(),
)


@pytest.mark.parametrize(
    ("preset", "key", "blocks", "gradient_dtype", "scale"),
    [
        (fp8fn.BLOCKWISE, "blockwise", ((1, 128), (128, 128), (1, 128)), None, "fp32"),
        (fp8fn.BLOCKWISE_POW2, "blockwise_pow2", ((1, 128), (128, 128), (1, 128)), None, "pow2"),
        (fp8fn.HYBRID, "hybrid", ((1, 128), (128, 128), (1, 128)), torch.float8_e5m2, "fp32"),
        (fp8fn.ROWWISE, "rowwise", ((1, -1), (-1, 1), (1, -1)), None, "fp32"),
        (fp8fn.TENSORWISE, "tensorwise", ((-1, -1), (-1, -1), (-1, -1)), None, "fp32"),
        (fp8fn.MXFP8, "mxfp8", ((1, 32), (32, 1), (1, 32)), None, "rceil"),
        (fp8fn.BLOCKWISE_SQUARE, "blockwise_square", ((1, 128), (128, 128), (1, 128)), None, "fp32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_presets(preset: Recipe, key: str, blocks: Any, gradient_dtype: Any, scale: str) -> None:
    assert preset.key == key
    assert (preset.activation_block, preset.weight_block, preset.gradient_block) == blocks
    assert (preset.activation_dtype, preset.weight_dtype, preset.gradient_dtype) == (None, None, gradient_dtype)
    assert (preset.scale, preset.second_order) == (scale, False)
    assert PRESETS[key] is preset
    assert parse_recipe(key) is preset
    assert parse_recipe(key.upper()) is preset
    assert getattr(fp8fn, key.upper()) is preset


def test_the_block_of_activations_in_a_wgrad() -> None:
    """By default the transposed block, whose two spellings are one recipe; else what the field says."""
    for preset in PRESETS.values():
        squared = preset is fp8fn.BLOCKWISE_SQUARE
        assert preset.wgrad_block == ((128, 128) if squared else swap(preset.activation_block))
        assert preset.wgrad.activation_block == swap(preset.wgrad_block)
        assert preset.wgrad.weight_block == swap(preset.gradient_block)
        assert preset.wgrad.wgrad_activation_block is preset.dgrad.wgrad_activation_block is None
    assert Recipe(wgrad_activation_block=(128, 1)) == fp8fn.BLOCKWISE
    assert Recipe(wgrad_activation_block=(128, 1)).key == "blockwise"
    assert parse_recipe("wgrad_activation_block=128x128") == fp8fn.BLOCKWISE_SQUARE
    both = Recipe(activation_block=(1, -1), wgrad_activation_block=(128, 128))
    assert both.key == "activation_block=1x-1,wgrad_activation_block=128x128"
    assert parse_recipe(both.key) == both
    with pytest.raises(ValueError, match=r"wgrad_activation_block=\(1, 128\) has a scale for each element of M, which"):
        Recipe(wgrad_activation_block=(1, 128))
    with pytest.raises(ValueError, match=r"wgrad_activation_block=\(64, 64\) is not a block"):
        Recipe(wgrad_activation_block=(64, 64))


def test_there_is_no_other_preset() -> None:
    assert len(PRESETS) == 7


@settings(max_examples=200, deadline=None)
@given(RECIPES)
def test_key_round_trip(recipe: Recipe) -> None:
    assert parse_recipe(recipe.key) == recipe
    assert recipe_key(recipe) == recipe.key
    assert recipe_key(recipe.key) == recipe.key


@settings(max_examples=200, deadline=None)
@given(RECIPES, RECIPES)
def test_equal_recipes_have_equal_keys_and_hashes(a: Recipe, b: Recipe) -> None:
    assert (a == b) == (a.key == b.key)
    same = dataclasses.replace(a)
    assert same == a
    assert hash(same) == hash(a)
    assert {a: 1}[same] == 1
    assert pickle.loads(pickle.dumps(a)) == a


@settings(max_examples=200, deadline=None)
@given(RECIPES)
def test_recipes_of_the_gradients(recipe: Recipe) -> None:
    """`dA = dC @ Bᵀ`: the gradient on the left, the weight on the right. `dB = Aᵀ @ dC`: the gradient on the right."""
    dgrad, wgrad = recipe.dgrad, recipe.wgrad
    assert (dgrad.activation_block, dgrad.activation_dtype) == (recipe.gradient_block, recipe.gradient_dtype)
    assert (dgrad.weight_block, dgrad.weight_dtype) == (recipe.weight_block, recipe.weight_dtype)
    assert (wgrad.activation_block, wgrad.activation_dtype) == (swap(recipe.wgrad_block), recipe.activation_dtype)
    assert (wgrad.weight_block, wgrad.weight_dtype) == (swap(recipe.gradient_block), recipe.gradient_dtype)
    assert dgrad.scale == wgrad.scale == recipe.scale
    assert dgrad.second_order == wgrad.second_order == recipe.second_order


def test_a_preset_written_out_is_the_preset() -> None:
    assert Recipe().key == "blockwise"
    assert Recipe(gradient_dtype=torch.float8_e5m2).key == "hybrid"
    assert Recipe(second_order=True).key == "second_order=True"
    assert parse_recipe("scale=pow2").key == "blockwise_pow2"
    assert Recipe(scale="pow2", weight_dtype=torch.float8_e5m2).key == "weight_dtype=e5m2,scale=pow2"


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fp8fn.BLOCKWISE.scale = "pow2"  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Recipe((1, 128))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blokwise", r"recipe='blokwise' does not exist; did you mean 'blockwise' or 'blockwise_pow2'\?"),
        ("mxfp", "did you mean 'mxfp8'"),
        ("row", "did you mean 'rowwise'"),
        ("qqq", "All presets: blockwise, blockwise_pow2, hybrid, rowwise, tensorwise, mxfp8"),
        ("", "recipe='' does not exist"),
        ("weigth_block=128x1", "Recipe has no field 'weigth_block'; did you mean 'weight_block'"),
        ("weight_dtype=e4m3", "weight_dtype='e4m3' is not an FP8 type; use one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz"),
        ("scale=fp16", r"scale='fp16' is not a scale format; use one of \('fp32', 'pow2', 'e8m0', 'rceil'\)"),
        ("weight_block=128x64", r"weight_block=\(128, 64\) is not a block of fp8fn"),
        ("weight_block=128", r"weight_block='128' is not a block; write it as '128x128'"),
        ("weight_block=axb", r"weight_block='axb' is not a block; write it as '128x128'"),
        ("second_order=yes", "second_order='yes' is neither 'True' nor 'False'"),
        ("key=x", "Recipe has no field 'key'"),
        ("scale=pow2,scale=fp32", "names the field 'scale' twice"),
    ],
)
def test_text_that_is_no_recipe(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"activation_block": (128, 1)}, r"activation_block=\(128, 1\) has a scale for each .* of K; use \(1, 128\)"),
        ({"weight_block": (1, 128)}, r"weight_block=\(1, 128\) has a scale for each element of K; use \(128, 1\)"),
        ({"gradient_block": (-1, 1)}, r"gradient_block=\(-1, 1\) has a scale for each element of K; use \(1, -1\)"),
        ({"weight_block": (64, 64)}, r"weight_block=\(64, 64\) is not a block of fp8fn; use one of"),
        ({"gradient_dtype": torch.bfloat16}, "gradient_dtype=torch.bfloat16 is not an FP8 type"),
        ({"scale": "fp16"}, "scale='fp16' is not a scale format"),
    ],
)
def test_fields_that_do_not_fit(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe(**values)


@pytest.mark.parametrize("block", [[128, 1], torch.Size([128, 1])], ids=repr)
def test_a_block_is_a_tuple_of_ints(block: Any) -> None:
    recipe = Recipe(weight_block=block)
    assert type(recipe.weight_block) is tuple
    assert recipe == Recipe(weight_block=(128, 1))
    assert recipe.key == "weight_block=128x1"
    assert hash(recipe) == hash(parse_recipe(recipe.key))


@pytest.mark.parametrize("block", [(128.0, 1.0), (128, True), (128, 1, 1), (128,)], ids=repr)
def test_a_block_of_something_else(block: Any) -> None:
    for name in ("weight_block", "activation_block", "gradient_block"):
        with pytest.raises(ValueError, match=r"is not a block of fp8fn; use one of .*128, 1") as raised:
            Recipe(**{name: block})
        assert f"Recipe: {name}={block}" in str(raised.value)


def test_a_recipe_can_be_copied_and_made_in_compiled_code(fresh_dynamo: None) -> None:
    """Its `__new__`, which refuses positional fields, is in nobody's way."""
    recipe = Recipe(scale="pow2", second_order=True)
    for again in (copy.copy(recipe), copy.deepcopy(recipe), dataclasses.replace(recipe)):
        assert again == recipe
        assert again.key == recipe.key
    a, b = torch.randn(5, 64), torch.randn(64, 48)
    compiled = torch.compile(
        lambda a, b: fp8fn.gemm(a, b, recipe=Recipe(scale="pow2")), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(a, b), fp8fn.gemm(a, b, recipe="blockwise_pow2"))


def test_recipe_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"recipe=3 is an int; pass an fp8fn.Recipe or a preset's name"):
        recipe_key(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PRESETS, "MXFP8", "scale=pow2,weight_block=128x1"])
def test_a_name_in_compiled_code(name: str, fresh_dynamo: None) -> None:
    """Without a warning, which would fail the test."""
    a, b = torch.randn(5, 64), torch.randn(64, 48)
    compiled = torch.compile(lambda a, b: fp8fn.gemm(a, b, recipe=name), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), fp8fn.gemm(a, b, recipe=name))
