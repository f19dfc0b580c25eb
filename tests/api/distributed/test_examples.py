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
@pytest.mark.parametrize(("name", "ranks"), [("fsdp2", 2), ("fsdp2_tp", 4), ("ep", 2), ("ep_transformers", 2)])
def test_an_example_learns(name: str, ranks: int) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", _torchrun(f"fp8fn.examples.{name}", ranks=ranks))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_the_benchmark_of_several_gpus(tmp_path: Path) -> None:
    """Each kind learns in two steps, by FP8 nearly as in bf16, and FSDP2 as one rank on the batches of both.

    Modules that are not compiled multiply in 16 bits.
    """
    sizes = {
        "hidden": 1024, "ffn": 256, "layers": 1, "tokens": 64, "steps": 1, "warmup": 1, "expert-ffn": 256,
        "expert-layers": 1,
    }  # fmt: skip
    small = ["--no-compile", *(f"--{name}={size}" for name, size in sizes.items())]
    kinds = ["fsdp", "fsdp-tp", "experts", "gathers"]
    one, out = tmp_path / "one.json", tmp_path / "out.json"
    _torchrun("fp8fn.bench.scale_out", *small, "--replicas=2", f"--json={one}", ranks=1)
    _torchrun(
        "fp8fn.bench.scale_out", *small, f"--beside={one}", f"--json={out}", "--kinds", *kinds, "--megabytes", "1", "2"
    )
    results = json.loads(out.read_text())["results"]
    assert [row["megabytes"] for row in results["gathers"]] == [1, 2]
    for kind, variants in (("fsdp", 4), ("fsdp-tp", 3), ("experts", 4)):
        rows = [row for row in results["rows"] if row["kind"] == kind]
        assert len(rows) == variants
        measured = [row["losses"] for row in rows if "skipped" not in row]
        assert all(second < first for first, second in measured)
        assert measured[-1] == pytest.approx(measured[0], rel=5e-3)
        beside = [(row["losses"], row["losses_beside"]) for row in rows if "losses_beside" in row]
        assert len(beside) == (len(measured) if kind == "fsdp" else 0)
        for losses, others in beside:
            assert losses == pytest.approx(others, rel=1e-3)
