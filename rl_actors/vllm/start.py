"""Starts vLLM's engine with the options of a config and this machine."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, get_args

import torch
from torch import nn

from rl_actors import adapters
from rl_actors.config import GeneratorConfig
from rl_actors.model_config import ModelConfig
from rl_actors.processes import collector
from rl_actors.seeds import hashed_seed
from rl_actors.vllm import cpu, gpu, sleeping
from rl_actors.vllm.core import Core, core_of

if TYPE_CHECKING:
    from vllm import LLMEngine

ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
BATCH_INVARIANT_ENV = {"VLLM_BATCH_INVARIANT": "1"}  # read when vLLM is imported
ADAPTERS_ON_HOST = 4
"""Adapters in host memory for each of a step. vLLM reads others from their directories."""

WORKER_EXTENSION = "rl_actors.vllm.weights.WeightsExtension"
"""Adds its methods to vLLM's workers, which so read weights directly."""


class Machine(Protocol):
    """What cpu.py and gpu.py define."""

    ENV: dict[str, str]  # environment of vLLM's process

    def require_possible(self, config: GeneratorConfig) -> None: ...
    def options(self, config: GeneratorConfig) -> dict[str, object]: ...
    def prepare_worker(self) -> None: ...
    def reloading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]: ...


def this_machine() -> Machine:
    if torch.cuda.is_available():
        return gpu
    return cpu


def require_machine(config: GeneratorConfig) -> None:
    """Raises ValueError if vLLM cannot run the config on a CPU. A GPU's limits are checked in the
    generator's process, because reading them takes memory of the GPU.
    """
    if not torch.cuda.is_available():
        cpu.require_possible(config)


def start_vllm(config: GeneratorConfig, core: Core | None = None) -> "LLMEngine":
    """Start an LLMEngine, with random weights without hf_path. core: None: by the config.

    vLLM's max_model_len is one more, because it samples a token even where only a prompt's logprobs
    are wanted. Raises ValueError for a config that vLLM cannot run here.
    """
    core = core or core_of(config)
    with arguments_of(config, core) as arguments:
        from vllm import EngineArgs, LLMEngine

        return LLMEngine.from_engine_args(EngineArgs(**arguments))


@contextlib.contextmanager
def arguments_of(config: GeneratorConfig, core: Core) -> Iterator[dict[str, Any]]:
    """vLLM's arguments, around the start of the engine. Sets up the process."""
    machine = this_machine()
    machine.require_possible(config)
    os.environ.update(ENGINE_ENV | machine.ENV)
    if config.batch_invariant:
        os.environ.update(BATCH_INVARIANT_ENV)
    with model_directory(config) as directory, core.starting():
        with collector.importing():
            # no garbage collection during this import
            import vllm.v1.engine.llm_engine  # noqa: F401
        config = replace(config, model=ModelConfig.from_hf(directory))
        options = machine.options(config) | core.options(config) | sleeping.options(config)
        yield _engine_arguments(replace(config, max_model_len=config.max_model_len + 1), directory, options)


@contextlib.contextmanager
def model_directory(config: GeneratorConfig) -> Iterator[str]:
    """config.hf_path, or a temporary directory with only config.json."""
    if config.hf_path:
        yield config.hf_path
        return
    with tempfile.TemporaryDirectory(prefix="rl_actors_model_") as directory:
        config.model.save(directory)
        yield directory


def _engine_arguments(config: GeneratorConfig, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """options: for machine, core and sleeping."""
    if config.lora.syncs_adapter:
        options |= adapter_options(adapters.modules(config.lora), num_adapters=1, rank=config.lora.rank)
    elif config.max_adapters:
        served = adapters.served(ModelConfig.from_hf(directory))
        options |= adapter_options(served, num_adapters=config.max_adapters, rank=config.max_adapter_rank)
    if config.max_model_len > ModelConfig.from_hf(directory).max_position_embeddings:
        # the token that `arguments_of` added has no position; safe, because it is never an input
        options["hf_overrides"] = {"max_position_embeddings": config.max_model_len}
    return dict(
        model=directory,
        skip_tokenizer_init=True,
        load_format="auto" if config.hf_path else "dummy",
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        # log_softmax(logits / temperature) after top-p and top-k, from which vLLM samples
        logprobs_mode="processed_logprobs",
        seed=hashed_seed(config.seed) % 2**32,  # NumPy's limit
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
        **options,
    )


def adapter_options(modules: list[str], *, num_adapters: int, rank: int) -> dict[str, object]:
    """num_adapters: of one step. rank: the largest."""
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": num_adapters,
        "max_cpu_loras": ADAPTERS_ON_HOST * num_adapters,
        "max_lora_rank": min(limit for limit in get_args(MaxLoRARanks) if limit >= rank),
        "lora_target_modules": modules,
    }
