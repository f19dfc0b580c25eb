"""MoE in torchtitan: `--override.imports fp8fn.examples.torchtitan_moe.dispatcher`, and the same with `experts`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

import fp8fn
from fp8fn.distributed import combine, dispatch


@dataclass(frozen=True, kw_only=True)
class Sent(LocalDispatchMetadata):  # type: ignore[misc]  # torchtitan has no types
    routing: Any


class Dispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def dispatch(self, x: Tensor, scores: Tensor, experts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(self, x, scores, experts, counts)  # type: ignore[no-any-return]
        rows, tokens, scores = self._local_reorder(x, scores, experts)
        rows, routing = dispatch(rows.bfloat16(), counts, self.ep_mesh.get_group())
        sent = Sent(token_indices_experts_sorted_N=tokens, topk_scores_experts_sorted_N=scores, routing=routing)
        return rows, torch.diff(routing.offsets, prepend=routing.offsets.new_zeros(1)), sent

    def combine(self, y: Tensor, sent: LocalDispatchMetadata, x: Tensor) -> Tensor:
        if isinstance(sent, Sent):
            y = combine(y, sent.routing).to(x.dtype)
        return LocalTokenDispatcher.combine(self, y, sent, x)  # type: ignore[no-any-return]


class Experts(GroupedExperts):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        pass

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return fp8fn.grouped_gemm(A, B_t, offs, recipe="blockwise_pow2")


@override(target=AllToAllTokenDispatcher.Config)  # type: ignore[untyped-decorator]
def dispatcher(config: Any) -> Any:
    return derive(config, Dispatcher.Config)


@override(target=GroupedExperts.Config)  # type: ignore[untyped-decorator]
def experts(config: Any) -> Any:
    return derive(config, Experts.Config)
