"""FP8 in torchtitan: `torchrun -m torchtitan.train --module fp8fn.examples.torchtitan --config llama3_debugmodel`."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.protocols.sharding import ShardingConfig

import fp8fn
from fp8fn.distributed import PrepareModuleInput, RowwiseParallel, gather_fp8, update_scales

RECIPE = fp8fn.BLOCKWISE_POW2  # what is gathered in FP8 is quantized again without rounding


def llama3_debugmodel() -> Any:
    from torchtitan.models.llama3 import config_registry

    config = config_registry.llama3_debugmodel()
    config.parallelism.spmd_backend, config.model_spec = "partial_dtensor", in_fp8(config.model_spec)
    return replace(config, training=replace(config.training, disable_cuda_graphs=True))  # bytes to gather move


def in_fp8(spec: Any) -> Any:
    """The same model with its layers' products in FP8, and FP8 where FSDP2 and tensor parallelism gather."""
    cut, after = partial(parallelize, spec.parallelize_fn), partial(after_optimizers, spec.post_optimizer_build_fn)
    return replace(spec, parallelize_fn=cut, post_optimizer_build_fn=after)


def parallelize(then: Any, model: Any, *, parallel_dims: Any, **options: Any) -> Any:
    for layer in model.layers.values():
        layer.forward = fp8fn.fp8(layer.forward, recipe=RECIPE)
        if parallel_dims.tp_enabled:
            send_fp8(layer, parallel_dims.get_mesh("tp"))
    gather_fp8(model, where="layers.*", recipe=RECIPE)
    return then(model, parallel_dims=parallel_dims, **options)


def send_fp8(layer: Any, mesh: Any) -> None:
    """Puts fp8fn's styles in the place of torchtitan's gather and scatter of a sequence, which is on by default."""
    attention, mlp = layer.attention, layer.feed_forward
    for module, last, others in ((attention, attention.wo, [None, None]), (mlp, mlp.w2, [])):  # masks and positions
        module._sharding_config = None
        last._sharding_config = ShardingConfig(state_shardings=last._sharding_config.state_shardings)
        whole = PrepareModuleInput(input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others))
        parallelize_module(module, mesh, whole)
        parallelize_module(last, mesh, RowwiseParallel(output_layouts=Shard(1), use_local_output=False))


def after_optimizers(then: Any, optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
    def scales(*_: object) -> None:
        for model in model_parts:
            update_scales(model)

    scales()
    optimizers.register_step_post_hook(scales)
    for model in model_parts:
        model.register_load_state_dict_post_hook(scales)  # of checkpoints
    if then:
        then(optimizers, model_parts, parallel_dims)
