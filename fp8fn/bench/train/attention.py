"""The attention that every variant uses: causal without a mask, by the fastest kernel of this device.

Under torch.compile, transformers' `"sdpa"` passes an explicit causal mask to scaled_dot_product_attention. A kernel
with a mask computes both triangles. There are two reasons for the mask:

- transformers omits the mask where `is_causal=True` is enough, but never during an export. Before PyTorch 2.14, Dynamo
  replaces `torch.compiler.is_exporting()` by True in every compilation.
- Without a cache, transformers searches the positions for several sequences packed in one row. A compiled graph can't
  branch on the result, so transformers always builds the mask from the positions, in any version of PyTorch.

transformers builds no mask for an attention function that the user registered with `AttentionInterface`. `CAUSAL`
registers transformers' own `sdpa_attention_forward`, which sets `is_causal` and `enable_gqa` when there is no mask.
Keys and values are then not expanded to the query's heads. The code of the model does not change.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8fn.bench.train.models import Size
from fp8fn.timing import clock_of, reason

# The name of transformers' attention with is_causal, and of transformers' default.
CAUSAL: Final = "fp8fn_causal_sdpa"
MASKED: Final = "sdpa"
# PyTorch's kernels of causal attention on a GPU. Its priority among them is PyTorch's default.
KERNELS: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
DEFAULT: Final = "default"


def register() -> None:
    """Make `CAUSAL` known to transformers."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Attention by `kernel` alone, which PyTorch chooses when it traces; `DEFAULT` leaves the choice to PyTorch."""
    if kernel == DEFAULT:
        yield
        return
    with sdpa_kernel([KERNELS[kernel]]):
        yield


def share_compilations(command: str, device: torch.device, kernel: str) -> None:
    """One folder of Inductor's for all runs and processes of a command: what is compiled once is not compiled again.

    The attention's kernel is chosen while a graph is traced, and is not in the key of AOTAutograd's cache.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}_fp8fn_{command}_{device.type}_{kernel}"


def times(size: Size, batch: int, sequence: int, device: torch.device, backward: bool = True) -> dict[str, float | str]:
    """Milliseconds of causal attention, forward and `backward`, by each kernel; or why a kernel can't compute it."""
    clock = clock_of(device)

    def operand(heads: int) -> torch.Tensor:
        made = torch.randn(batch, sequence, heads, size.head, device=device, dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_(backward)

    q, k, v = (operand(heads) for heads in (size.heads, size.kv_heads, size.kv_heads))
    gradient = torch.randn_like(q)
    grouped = size.heads != size.kv_heads

    def once() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    found: dict[str, float | str] = {}
    clock.warm(0.5)
    for name in KERNELS:
        try:
            with using(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one for each kernel that is not used
                once()
                found[name] = statistics.median(clock.samples(once, 5, 1e3)) / 1e3
        except Exception as error:
            found[name] = reason(error)
    return found


def fastest(found: Mapping[str, float | str]) -> str:
    """The kernel with the shortest time; `DEFAULT` where none has a time."""
    timed = {name: time for name, time in found.items() if isinstance(time, float)}
    return min(timed, key=timed.__getitem__) if timed else DEFAULT
