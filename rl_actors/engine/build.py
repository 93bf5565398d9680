"""Builds a trainer's model and optimizer from a TrainerConfig, by torchtitan."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torchao.float8 import Float8LinearConfig
from torchtitan.components.optimizer import OptimizersContainer, register_moe_load_balancing_hook
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import CommConfig, DebugConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import Embedding, Linear, RMSNorm, TransformerBlock
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.qwen3 import (
    _EMBEDDING_INIT,
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    Qwen3StateDictAdapter,
    _build_qwen3_layers,
    _build_qwen3_moe_layers,
    _qwen3_norm,
    parallelize_qwen3,
)
from torchtitan.protocols.sharding import ShardingConfig

from rl_actors.config import HeadName, ModelConfig, TrainerConfig
from rl_actors.engine import deadlines, initial_weights, lora, recomputation
from rl_actors.engine.batch import PackedBatch
from rl_actors.engine.context_parallel import RowShards
from rl_actors.engine.cpu import Machine
from rl_actors.engine.gpu import this_machine
from rl_actors.engine.moe import Experts, RouterCounters, wait_for_input
from rl_actors.engine.optimizer import Hyperparameters, NoOptimizers
from rl_actors.engine.pipeline_stages import LocalModel, split_into_stages
from rl_actors.engine.rope import rope_config
from rl_actors.metrics import HostCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    model: nn.Module  # the whole model, sharded; in a pipeline this rank's stages
    stages: list[PipelineStage]  # this rank's; empty without a pipeline
    num_parameters: int  # of the whole model
    has_value_head: bool
    optimizers: OptimizersContainer  # a NoOptimizers if the trainer only infers
    hyperparameters: Hyperparameters | None  # None if there is no optimizer
    parallel_dims: ParallelDims
    device: torch.device
    weights_device: torch.device  # of parameters, gradients and optimizer state: the CPU if fsdp_cpu_offload
    to_device: Callable[[torch.Tensor], torch.Tensor]
    to_host: type[HostCopy]
    # whole rows -> this rank's shard, with attention masks
    shard_rows: Callable[[PackedBatch], PackedBatch]
    forward_context: Callable[[], AbstractContextManager[None]]  # torchtitan's context around forward and backward
    hf_adapter: Qwen3StateDictAdapter
    routers: RouterCounters


def qwen3_config(
    model: ModelConfig, *, load_balance_coeff: float = 0.0, fuse_qkv: bool = True, head: HeadName = "logprobs"
) -> Qwen3Model.Config:
    """torchtitan's config of this model, from the functions that make its own Qwen3's layers.

    head="values" has one output, whose weights begin at 0.
    """
    is_tied = model.tie_word_embeddings and head == "logprobs"
    output = Linear.Config(in_features=model.hidden_size, out_features=model.vocab_size, param_init=_LINEAR_INIT)
    if head == "values":
        output = Linear.Config(in_features=model.hidden_size, out_features=1, param_init={"weight": nn.init.zeros_})
    return Qwen3Model.Config(
        vocab_size=model.vocab_size,
        dim=model.hidden_size,
        norm=_norm(model, model.hidden_size),
        enable_weight_tying=is_tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size,
            embedding_dim=model.hidden_size,
            param_init=_EMBEDDING_SKIP_INIT if is_tied else _EMBEDDING_INIT,
        ),
        lm_head=output,
        layers=_layers(model, load_balance_coeff, fuse_qkv),
    )


def _norm(model: ModelConfig, size: int) -> RMSNorm.Config:
    return replace(_qwen3_norm(size), eps=model.rms_norm_eps)


def _layers(model: ModelConfig, load_balance_coeff: float, fuse_qkv: bool) -> list[TransformerBlock.Config]:
    common = {
        "n_layers": model.num_hidden_layers,
        "dim": model.hidden_size,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "fuse_qkv": fuse_qkv,
        "attn_backend": "flex",
        "rope": rope_config(model),
    }
    layers = _build_qwen3_layers(**common, hidden_dim=model.intermediate_size)
    if model.num_experts:
        sparse = _build_qwen3_moe_layers(
            **common,
            moe_hidden_dim=model.moe_intermediate_size,
            num_experts=model.num_experts,
            top_k=model.num_experts_per_tok,
            moe_comm_backend="standard",
        )
        layers = [sparse[i] if model.has_experts(i) else dense for i, dense in enumerate(layers)]
    for i, layer in enumerate(layers):
        layer.attention_norm = _norm(model, model.hidden_size)
        layer.ffn_norm = _norm(model, model.hidden_size)
        layer.attention.qk_norm = _norm(model, model.head_dim) if model.has_qk_norm else None
        if model.has_experts(i):
            layer.moe.router.route_norm = model.norm_topk_prob
            layer.moe.load_balance_coeff = load_balance_coeff or None
            theirs = layer.moe.routed_experts.inner_experts
            values = {field.name: getattr(theirs, field.name) for field in fields(theirs) if field.init}
            layer.moe.routed_experts.inner_experts = Experts.Config(**values)
    return layers


def _float8(model_config: Qwen3Model.Config, config: TrainerConfig, machine: Machine) -> Qwen3Model.Config:
    if not config.float8:
        return model_config
    emulate = not machine.has_float8()
    if emulate and config.compile.enable:
        raise ValueError(
            "float8=True with compile.enable=True: this machine has no float8, and emulated float8 does not compile"
        )
    # not the head, whose results are the logprobs
    converter = Float8LinearConverter.Config(
        recipe_name=config.float8_recipe,  # type: ignore[arg-type]  # torchtitan's type has two of torchao's three recipes
        emulate=emulate,
        model_compile_enabled=config.compile.enable,
        filter_fqns=["lm_head"],
    ).build()
    # torchtitan's emulation ignores the recipe, with one scale for a tensor
    recipe = Float8LinearConfig.from_recipe_name(config.float8_recipe)
    converter.torchao_config = replace(recipe, emulate=emulate)
    return converter.convert(model_config)


def _row_sharding(
    model: nn.Module, parallel_dims: ParallelDims, config: TrainerConfig, machine: Machine
) -> Callable[[PackedBatch], PackedBatch]:
    mesh = parallel_dims.get_optional_mesh("cp")
    if mesh is None:
        return lambda batch: replace(batch, attention_masks=machine.attention_masks(model, config.attention, batch))
    return RowShards(
        masks=model.get_attention_masks,
        local_masks=machine.local_masks,
        mesh=mesh,
        load_balancer=config.parallelism.context_parallel_load_balancer,
    )


def build(config: TrainerConfig) -> BuiltModel:
    """Build and shard the model on this rank, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ValueError if WORLD_SIZE is not the number of processes that the layout needs.
    """
    machine = this_machine()
    if config.fsdp_cpu_offload:
        machine.require_cpu_offload()
    parallel_dims, device = _join_ranks(config, machine)
    debug = DebugConfig(seed=config.seed, deterministic=config.deterministic)
    training = TrainingConfig(
        seq_len=config.tokens_per_row,
        mixed_precision_param=config.compute_dtype,
        enable_cpu_offload=config.fsdp_cpu_offload,
    )
    model_config = _model_config(config, machine, training, debug)
    with torch.device("meta"):
        whole = model_config.build()
    lora.require_found(whole, config.lora)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    initialisers = initial_weights.take_initialisers(whole)
    stages, modules = _parallelize(whole, model_config, config, training, parallel_dims, device)
    model = LocalModel(modules) if stages else modules[0]
    dist_utils.set_determinism(parallel_dims, device, debug, distinct_seed_mesh_dims=["pp"])
    _allocate(modules, device, machine, on_host=config.fsdp_cpu_offload)
    if not config.hf_path:  # hf.load comes later
        initial_weights.draw(initialisers, model, config.seed)
    elif config.head == "values" and model.lm_head is not None:
        # begins at 0: a Hugging Face directory has no such head
        nn.init.zeros_(model.lm_head.weight)
    lora.initialise(model, config.lora.seed)
    model.train()
    hyperparameters = None
    optimizers = NoOptimizers()
    if config.optimizer is not None:
        hyperparameters = Hyperparameters(config.optimizer, model, trained)
        optimizers = hyperparameters.optimizers
        register_moe_load_balancing_hook(optimizers, [model], parallel_dims)
    return BuiltModel(
        model=model,
        stages=stages,
        num_parameters=num_parameters,
        has_value_head=config.head == "values",
        optimizers=optimizers,
        hyperparameters=hyperparameters,
        parallel_dims=parallel_dims,
        device=device,
        weights_device=torch.device("cpu") if config.fsdp_cpu_offload else device,
        to_device=partial(machine.to_device, device=device),
        to_host=machine.host_copy,
        shard_rows=_row_sharding(modules[0], parallel_dims, config, machine),
        forward_context=dist_utils.get_spmd_context(parallel_dims=parallel_dims, spmd_typechecking=False),
        hf_adapter=Qwen3StateDictAdapter(model_config, None),
        routers=RouterCounters(model),
    )


def _join_ranks(config: TrainerConfig, machine: Machine) -> tuple[ParallelDims, torch.device]:
    """Make the process groups. Returns (the meshes, this rank's device)."""
    # collective_timeout comes after the setup
    comm = CommConfig(trace_buf_size=0, init_timeout_seconds=math.ceil(config.setup_timeout))
    world_size = dist_utils.init_distributed(comm, enable_cpu_backend=torch.cuda.is_available())
    if config.num_processes() != world_size:
        layout = " x ".join(f"{name}={degree}" for name, degree in config.layout().items())
        raise ValueError(f"{layout} needs {config.num_processes()} processes but there are {world_size}")
    device = machine.device()
    machine.prepare(world_size)
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    with deadlines.default_timeout(config.collective_timeout):
        parallel_dims.build_mesh()
    deadlines.set_timeouts(parallel_dims, config.setup_timeout)
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    return parallel_dims, device


def _model_config(
    config: TrainerConfig, machine: Machine, training: TrainingConfig, debug: DebugConfig
) -> Qwen3Model.Config:
    # an adapter belongs to one projection
    fuse_qkv = not config.lora.rank
    model_config = qwen3_config(
        config.model, load_balance_coeff=config.load_balance_coeff, fuse_qkv=fuse_qkv, head=config.head
    )
    for layer in model_config.layers:
        layer.attention.inner_attention = machine.attention(config.attention)
        # Every block has its own table: 1.2 GB in Qwen3 0.6B with 40,960 positions.
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=config.max_sequence_length)
    model_config = lora.convert(_float8(model_config, config, machine), config.lora)
    run = SimpleNamespace(training=training, parallelism=config.parallelism, debug=debug, compile=config.compile)
    model_config.update_from_config(config=run)
    if config.head == "values":
        model_config.lm_head.sharding_config = _whole_on_every_rank()
    return model_config


def _whole_on_every_rank() -> ShardingConfig:
    """Whole on every tensor-parallel rank: torchtitan would split the one output."""
    activation = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": activation},
        in_dst_shardings={"input": activation},
        out_src_shardings=activation,
        out_dst_shardings=activation,
    )


def _parallelize(
    whole: nn.Module,
    model_config: Qwen3Model.Config,
    config: TrainerConfig,
    training: TrainingConfig,
    parallel_dims: ParallelDims,
    device: torch.device,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """(this rank's stages, their modules), or ([], [the model]), on the meta device."""
    options = {
        "parallel_dims": parallel_dims,
        "training": training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": recomputation.policy(config.activation_checkpointing),
        "dump_folder": "",
    }
    if not parallel_dims.pp_enabled:
        return [], [parallelize_qwen3(whole, **options)]
    stages = split_into_stages(whole, device=device, model_config=model_config, **options)
    return stages, [stage.submod for stage in stages]


def _allocate(modules: list[nn.Module], device: torch.device, machine: Machine, *, on_host: bool) -> None:
    """Give the modules memory, and initialise buffers but no parameters. on_host: for FSDP to pin."""
    for module in modules:
        machine.after_parallelize(module)
        wait_for_input(module)
        module.to_empty(device="cpu" if on_host else device)
        with torch.no_grad():
            module.init_weights(buffer_device=device if on_host else None)
