"""transformers' experts over several ranks: `torchrun --nproc-per-node 2 -m fp8fn.examples.ep_transformers`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import fp8fn
from fp8fn.distributed import combine, dispatch


def experts(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """By this rank's part of both weights."""
    chosen, order = index.flatten().sort(stable=True)
    of_all = self.gate_up_proj.shape[0] * dist.get_world_size()
    counts = torch.zeros(of_all, dtype=torch.int64, device=x.device).index_add_(0, chosen, torch.ones_like(chosen))
    rows, routing = dispatch(x[order // index.shape[-1]], counts)
    up, down = (w if self.is_transposed else w.mT for w in (self.gate_up_proj, self.down_proj))
    inner = self._apply_gate(fp8fn.grouped_gemm(rows, up, routing.offsets, recipe="blockwise_pow2"))
    out = combine(fp8fn.grouped_gemm(inner, down, routing.offsets, recipe="blockwise_pow2"), routing)
    out = torch.zeros_like(out).index_copy(0, order, out) * weights.flatten()[:, None]
    return out.view(*index.shape, -1).sum(1).to(x.dtype)


def keep_own_experts(module: nn.Module) -> None:
    """Each rank keeps its part of the experts."""
    if hasattr(module, "gate_up_proj"):
        for name in ("gate_up_proj", "down_proj"):
            part = getattr(module, name).detach().chunk(dist.get_world_size())[dist.get_rank()]
            setattr(module, name, nn.Parameter(part.clone()))


def main() -> None:
    dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=256, num_hidden_layers=1, num_experts=8)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 2, 128
    config.num_experts_per_tok, config.moe_intermediate_size = 2, 128
    model = AutoModelForCausalLM.from_config(config)
    model.apply(keep_own_experts)
    ALL_EXPERTS_FUNCTIONS.register("fp8fn_ep", experts)
    model.set_experts_implementation("fp8fn_ep")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(64).view(2, 32) * 37 % 256  # the same on each rank, as are all other parameters
    for step in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}\n" * (dist.get_rank() == 0), end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
