"""The programs of `fp8fn.examples`, and the benchmark of FSDP2, as `torchrun` starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


def _torchrun(module: str, *args: str, ranks: int = 2) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-m", module, *args], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("fsdp2", 2), ("fsdp2_tp", 4), ("ep", 2)])
def test_an_example_learns(name: str, ranks: int) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", _torchrun(f"fp8fn.examples.{name}", ranks=ranks))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_the_benchmark_of_fsdp2(tmp_path: Path) -> None:
    sizes = {"hidden": 512, "ffn": 256, "layers": 1, "tokens": 32, "steps": 1, "warmup": 1}
    small = [f"--{name}={size}" for name, size in sizes.items()]
    _torchrun("fp8fn.bench.scale_out", *small, "--no-compile", "--json", str(tmp_path / "out.json"))
    results = json.loads((tmp_path / "out.json").read_text())["results"]["rows"]
    assert [each["variant"] for each in results][::3] == ["bf16", "fp8fn, FP8 on the wire"]
    assert all("skipped" in each or len(each["losses"]) == 2 for each in results)
