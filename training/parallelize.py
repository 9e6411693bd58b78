"""From a model on paper to its part on this rank. The order of the steps in `build` matters; everything else follows from it."""

import shutil
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from training.config import RunConfig
from training.errors import ConfigurationError
from training.model import Decoder, initialize
from training.models import MODELS

NAMES = ("pipeline", "replicate", "shard", "tensor")
FP8_CAPABILITY = (8, 9)  # Ada and newer
SAVED = {  # what "selective" keeps: results that are dear to compute again and small to hold
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.mm.default,
}


@dataclass(frozen=True)
class Parts:
    """What `build` made: the module that is called, the plain decoder inside it, and where this rank is in the mesh."""

    module: nn.Module
    decoder: Decoder
    mesh: DeviceMesh
    data_rank: int
    stage: int


def build(config: RunConfig, device: torch.device) -> Parts:
    """Cut, materialize, shard. All ranks call it.

    1. Take this stage's layers, without memory (pipeline).
    2. Block by block, so that no rank ever holds more than one whole block: allocate and draw the weights,
    3. fp8, before anything hides the linear layers,
    4. tensor and sequence parallelism: it cuts weights that are still whole,
    5. recomputation: inside the compiled region, so that the compiler sees what is computed twice,
    6. compile each block,
    7. shard over the data-parallel ranks: outermost, its hooks must not be compiled.
    """
    shape, train = MODELS[config.model], config.train
    mesh = init_device_mesh(device.type, config.mesh.degrees(dist.get_world_size()), mesh_dim_names=NAMES)
    stage = mesh.get_local_rank("pipeline")
    with torch.device("meta"):
        decoder = Decoder(shape, stage_layers(shape.layers, config.mesh.pipeline)[stage])
    decoder.sequence_parts = config.mesh.tensor
    sharded = _is_sharded(config)
    policy = {"mesh": mesh["replicate", "shard"], "mp_policy": _mixed_precision(config), "reshard_after_forward": config.mesh.zero == 3}
    if train.compile:
        _check_compiler(config)
    for name, block in decoder.blocks.items():
        block.to_empty(device=device)
        initialize(block, f"blocks.{name}.", shape.layers, train.seed)
        _to_fp8(config, block, device)
        if config.mesh.tensor > 1:
            parallelize_module(block, mesh["tensor"], _BLOCK_PLAN, src_data_rank=None)
        _recompute(block, train.recompute)
        if train.compile:
            block.compile()
        if sharded:
            fully_shard(block, **policy)
    for name in ("embedding", "norm", "output"):
        if (part := getattr(decoder, name)) is not None:
            part.to_empty(device=device)
            initialize(part, f"{name}.", shape.layers, train.seed)
    if config.mesh.tensor > 1:
        parallelize_module(
            decoder,
            mesh["tensor"],
            {name: style for name, style in _EDGE_PLAN.items() if getattr(decoder, name) is not None},
            src_data_rank=None,
        )
    module: nn.Module = decoder
    if sharded:
        fully_shard(decoder, **policy)
    elif config.data_degree > 1:
        module = DistributedDataParallel(decoder, device_ids=[device] if device.type == "cuda" else None)
    data_rank = mesh.get_local_rank("replicate") * config.mesh.shard + mesh.get_local_rank("shard")
    return Parts(module, decoder, mesh, data_rank, stage)


_BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.gate": ColwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.output": RowwiseParallel(output_layouts=Shard(1)),
}
_EDGE_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def stage_layers(layers: int, stages: int) -> list[range]:
    """Share the layers out; the first stages get one more when they do not divide evenly."""
    share, more = divmod(layers, stages)
    starts = [stage * share + min(stage, more) for stage in range(stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(stages)]


def sync_gradients(module: nn.Module, config: RunConfig, *, last: bool) -> None:
    """Say whether the next backward pass reduces gradients: ZeRO-1 and plain replicas do so once a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or config.mesh.zero > 1)
        module.set_is_last_backward(last)
    elif isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = last


def _is_sharded(config: RunConfig) -> bool:
    """Plain replicas are DDP's. Anything else that is data parallel goes through FSDP, which copes with the other dimensions."""
    plain = config.mesh.shard == config.mesh.tensor == config.mesh.pipeline == 1
    return config.data_degree > 1 and not plain


def _mixed_precision(config: RunConfig) -> MixedPrecisionPolicy:
    """Compute in bfloat16 and add gradients up in float32."""
    low = config.train.precision != "float32"
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()


def _recompute(block: nn.Module, mode: str) -> None:
    """Have a block's activations computed again in the backward pass: all of them, or all but the dear ones."""
    if mode == "none":
        return
    forward = block.forward
    contexts = partial(create_selective_checkpoint_contexts, _keep_dear) if mode == "selective" else noop_context_fn
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)


def _keep_dear(_context: object, operation: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _to_fp8(config: RunConfig, block: nn.Module, device: torch.device) -> None:
    """Let the matrices of a block multiply in fp8 (torchao, dynamic tensorwise scaling)."""
    if config.train.precision != "fp8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigurationError("train.precision: fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; use bfloat16 here")
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise ConfigurationError("train.precision: fp8 needs torchao, which this image does not have; use bfloat16") from None
    convert_to_float8_training(block)


def _check_compiler(config: RunConfig) -> None:
    """Check what torch.compile needs: a compiler (C++, or C for Triton), and plain tensors: with torch 2.13 it loses DTensor gradients."""
    if config.mesh.tensor > 1:
        raise ConfigurationError("train.compile: cannot be combined with mesh.tensor above 1; set it to false")
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise ConfigurationError("train.compile: there is no C++ compiler (g++ or clang++) in this image; set it to false or install one")
