"""Expert parallelism with FP8 on the wire: `torchrun --nproc-per-node 2 -m fp8fn.examples.ep`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn
from fp8fn.distributed import combine, dispatch

EXPERTS, HIDDEN, FFN, TOKENS = 8, 256, 512, 128
RECIPE = fp8fn.BLOCKWISE_POW2


class Experts(nn.Module):
    """One expert for each token; this rank holds its part of the experts."""

    def __init__(self) -> None:
        super().__init__()
        local = EXPERTS // dist.get_world_size()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(local, HIDDEN, FFN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(local, FFN, HIDDEN) / FFN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        rows, routing = dispatch(x[order], counts)
        hidden = F.silu(fp8fn.grouped_gemm(rows, self.up, routing.offsets, recipe=RECIPE))
        out = combine(fp8fn.grouped_gemm(hidden, self.down, routing.offsets, recipe=RECIPE), routing)
        mixed: Tensor = x + weight[:, None] * torch.zeros_like(out).index_copy(0, order, out)
        return mixed


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = Experts().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, device=device)
    for step in range(5):
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        dist.all_reduce(model.router.weight.grad)  # the sum over all ranks, as the experts' gradients are
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
