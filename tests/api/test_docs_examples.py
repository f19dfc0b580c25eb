"""The Python code of the documentation runs, block after block of a page, on a CPU with tiny models.

A block behind `<!-- not run: reason -->` is only compiled. Names that a page does not define itself are below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn import cli

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if BLOCK.search(path.read_text(encoding="utf-8")))


class Output(dict[str, Tensor]):
    """A model's result as transformers returns it."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


class Model(nn.Module):
    """A model with layers and a loss, as users have one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)])

    def forward(self, x: Tensor) -> Output:
        for layer in self.layers:
            x = F.silu(layer(x))
        return Output(loss=x.square().mean())


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


def of_training(folder: Path) -> dict[str, Any]:
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    model, x = Model(), torch.randn(16, 4, 512)
    return {
        "model": model, "batch": {"x": x}, "Accelerator": accelerate.Accelerator, "Trainer": transformers.Trainer,
        "TrainingArguments": transformers.TrainingArguments, "dataset": [{"x": row} for row in x],
        "arguments": {"output_dir": str(folder), "max_steps": 1, "use_cpu": True, "report_to": "none",
                      "save_strategy": "no", "remove_unused_columns": False, "disable_tqdm": True},
        "base": llama(), "peft": pytest.importorskip("peft"), "ids": torch.arange(8)[None],
    }  # fmt: skip


def of_compile(folder: Path) -> dict[str, Any]:
    return {"model": nn.Sequential(nn.Linear(512, 512)), "x": torch.randn(16, 512)}


def of_explain(folder: Path) -> dict[str, Any]:
    shown: list[str] = []
    return {
        "model": Model(), "batches": [torch.randn(128, 512)], "writer": SimpleNamespace(
            add_scalar=lambda tag, value, step: shown.append(tag)),
        "train": lambda model, batch: model(batch).loss.backward(),
    }  # fmt: skip


def of_functions(folder: Path) -> dict[str, Any]:
    return {
        "x": torch.randn(32, 256), "w": torch.randn(256, 128), "weight": torch.randn(128, 256),
        "bias": torch.randn(128),
        "params": {"w": torch.randn(128, 64)}, "batch": torch.randn(4, 16, 128),
        "loss_function": lambda params, x: (x @ params["w"]).square().mean(),
    }  # fmt: skip


def of_experts(folder: Path) -> dict[str, Any]:
    return {
        "x": torch.randn(64, 128), "w": torch.randn(2, 128, 256), "offsets": torch.tensor([24, 64], dtype=torch.int32),
        "w_gate_up": torch.randn(2, 128, 256), "w_down": torch.randn(2, 128, 128),
    }  # fmt: skip


def of_checkpoints(folder: Path) -> dict[str, Any]:
    llama().save_pretrained(folder / "bf16")
    assert cli.main(["convert", str(folder / "bf16"), str(folder / "Qwen3-8B-FP8"), "--block", "128,128"]) == 0
    return {"x": torch.randn(4, 256)}


def of_serving(folder: Path) -> dict[str, Any]:
    of_checkpoints(folder)
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    ids = torch.arange(8)[None]
    return {"transformers": transformers, "peft": peft, "batch": {"input_ids": ids, "labels": ids}}


def of_distributed(folder: Path) -> dict[str, Any]:
    """One process in a group of its own."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    return {
        "model": Model(), "fully_shard": fully_shard, "group": dist.group.WORLD, "x": torch.randn(8, 256),
        "order": torch.arange(8), "counts": torch.tensor([3, 5]), "weights": torch.randn(2, 256, 256),
    }  # fmt: skip


SETUPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "index.md": lambda folder: {},
    "distributed.md": of_distributed,
    "guides/training.md": of_training,
    "guides/compile.md": of_compile,
    "guides/explain.md": of_explain,
    "guides/functions.md": of_functions,
    "guides/recipes.md": lambda folder: {**of_compile(folder), "dataclasses": dataclasses},
    "guides/experts.md": of_experts,
    "guides/checkpoints.md": of_checkpoints,
    "guides/serving.md": of_serving,
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.mark.slow(but="guides/functions.md")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads names that transformers renames
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_a_page_runs(
    page: Path, fresh_dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    left = [compile(code, name_of(page), "exec") for skipped, code in blocks if skipped]
    if len(left) == len(blocks):
        return
    names = {"torch": torch, "fp8fn": fp8fn, **SETUPS[name_of(page)](tmp_path)}
    try:
        for skipped, code in blocks:
            if not skipped:
                exec(compile(code.replace('"cuda"', '"cpu"'), name_of(page), "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert [
        record.getMessage() for record in caplog.records if record.name == "fp8fn" and record.levelname == "WARNING"
    ] == []
