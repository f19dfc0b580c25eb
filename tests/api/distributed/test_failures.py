"""A failure of one rank ends the job on all of them: nobody waits for a rank that is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from support import one_rank_writes
from support.processes import DEVICES, skip_without

RANKS = 2


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@DEVICES
def test_a_weight_that_one_rank_alone_has_written_ends_the_job(device: str, tmp_path: Path) -> None:
    """The rank that wrote raises our error. gloo then loses its connection, and `torchrun` ends who waits in NCCL."""
    skip_without(device, RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    launcher += ["--monitor-interval", "3"]  # seconds in which the other rank can fail by itself
    job = subprocess.run(
        [*launcher, one_rank_writes.__file__, device, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert job.returncode != 0
    ends = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert ends[0].startswith("1.weight changed since the last update_scales; call fp8fn.distributed."), ends
    assert ends[0] in job.stderr
    if device == "cpu":
        assert "onnection" in ends[1], ends  # "Connection closed by peer", "Application timeout caused pair closure"
    assert ends.get(1) != "no error"
