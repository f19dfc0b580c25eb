"""A mixture of experts by `expert_mlp`: `python -m fp8fn.examples.moe`."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8fn


class Experts(nn.Module):
    """Top-1 routing to gated MLPs; `expert_mlp` keeps `silu(gate) * up` and its gradient in FP8."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        offsets = F.one_hot(expert, len(self.down)).sum(0).cumsum(0).int()  # where each expert's tokens end
        y = fp8fn.expert_mlp(x[order], self.gate_up, self.down, offsets)
        out: Tensor = x + torch.zeros_like(x).index_copy(0, order, y) * weight.unsqueeze(-1)
        return out


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=2048 if gpu else 256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 128)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    model = Experts(args.width, args.width, args.experts).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(args.tokens, args.width, device=device, dtype=torch.bfloat16)
    for step in range(args.steps):
        loss = (model(x) - x.roll(1, -1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
