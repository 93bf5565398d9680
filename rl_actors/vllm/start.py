"""Starts vLLM's engine with the options that a config and this machine need."""

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
from rl_actors.vllm.core import Core, OwnProcess, core_of

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.v1.engine.async_llm import AsyncLLM

ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
BATCH_INVARIANT_ENV = {"VLLM_BATCH_INVARIANT": "1"}  # vLLM reads this variable when vLLM's modules are imported
ADAPTERS_ON_HOST = 4
"""Largest number of adapters in host memory, divided by the largest number of adapters in one step. vLLM reads all
other adapters from their directories when requests need them."""

WORKER_EXTENSION = "rl_actors.vllm.weights.WeightsExtension"
"""Class whose methods vLLM adds to its workers. A pull of weights calls these methods, so the worker process reads the
weights directly."""


class Machine(Protocol):
    """Protocol of the modules cpu.py and gpu.py."""

    ENV: dict[str, str]  # environment variables for vLLM's process

    def require_possible(self, config: GeneratorConfig) -> None:
        """Raises ValueError naming the value and the reason if vLLM cannot run this config on the machine."""

    def options(self, config: GeneratorConfig) -> dict[str, object]:
        """vLLM's arguments for the machine. Also sets up the process."""

    def prepare_worker(self) -> None:
        """Prepare the process of a vLLM worker, before it loads the model."""

    def reloading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Context manager for a reload of all weights."""


def this_machine() -> Machine:
    """vllm/gpu.py if torch sees a GPU, otherwise vllm/cpu.py."""
    if torch.cuda.is_available():
        return gpu
    return cpu


def require_machine(config: GeneratorConfig) -> None:
    """Raises ValueError naming the value and the reason if this machine has no GPU and vLLM cannot run the config on a CPU.

    This function does not check the limits of a GPU, because reading them initializes CUDA and so takes memory of the
    GPU. The generator's process checks them.
    """
    if not torch.cuda.is_available():
        cpu.require_possible(config)


def start_vllm(config: GeneratorConfig, core: Core | None = None) -> "LLMEngine":
    """Start an LLMEngine. It has the weights of config.hf_path. If hf_path is empty, it has random weights until the
    first pull.

    core: says in which process vLLM's engine core (scheduler and model) runs. None: the config decides.

    vLLM's own max_model_len is config.max_model_len + 1, because vLLM samples a token after every prompt, even if the
    caller wants only the logprobs of the prompt. Without the extra token, vLLM would refuse to compute the logprobs of
    a sequence of config.max_model_len tokens.

    Raises ValueError for a config that vLLM cannot run on this machine.
    """
    core = core or core_of(config)
    with _arguments(config, core) as arguments:
        from vllm import EngineArgs, LLMEngine

        return LLMEngine.from_engine_args(EngineArgs(**arguments))


def start_async_vllm(config: GeneratorConfig) -> "AsyncLLM":
    """Start an AsyncLLM with the arguments of `start_vllm`. Its engine core always runs in a process of its own.
    Benchmarks compare the generator with an AsyncLLM.
    """
    with _arguments(config, OwnProcess()) as arguments:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


@contextlib.contextmanager
def _arguments(config: GeneratorConfig, core: Core) -> Iterator[dict[str, Any]]:
    """Context manager that gives vLLM's arguments and sets up the process. The engine must be started inside it."""
    machine = this_machine()
    machine.require_possible(config)
    os.environ.update(ENGINE_ENV | machine.ENV)
    if config.batch_invariant:
        os.environ.update(BATCH_INVARIANT_ENV)
    with model_directory(config) as directory, core.starting():
        with collector.importing():
            # Python collects no garbage while this import loads all modules of an engine.
            import vllm.v1.engine.llm_engine  # noqa: F401
        options = machine.options(config) | core.options(config) | sleeping.options(config)
        yield _engine_arguments(replace(config, max_model_len=config.max_model_len + 1), directory, options)


@contextlib.contextmanager
def model_directory(config: GeneratorConfig) -> Iterator[str]:
    """Context manager that gives a directory with the model's config.json: config.hf_path, or a temporary directory
    without weights if hf_path is empty.
    """
    if config.hf_path:
        yield config.hf_path
        return
    with tempfile.TemporaryDirectory(prefix="rl_actors_model_") as directory:
        config.model.save(directory)
        yield directory


def _engine_arguments(config: GeneratorConfig, directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of vLLM's engine. options: the arguments for the machine, for the core and for sleeping."""
    if config.lora.syncs_adapter:
        options |= adapter_options(adapters.modules(config.lora), num_adapters=1, rank=config.lora.rank)
    elif config.max_adapters:
        served = adapters.served(ModelConfig.from_hf(directory))
        options |= adapter_options(served, num_adapters=config.max_adapters, rank=config.max_adapter_rank)
    if config.max_model_len > ModelConfig.from_hf(directory).max_position_embeddings:
        # `_arguments` has added one token to max_model_len, and the model has no position for this token. Without the
        # override vLLM would refuse the limit. The override is safe, because the model never computes at this position:
        # the token there is sampled last, so it is never an input.
        options["hf_overrides"] = {"max_position_embeddings": config.max_model_len}
    return dict(
        model=directory,
        skip_tokenizer_init=True,
        load_format="auto" if config.hf_path else "dummy",
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        # The logprobs are log_softmax(logits / temperature) after top-p and top-k. This is the distribution that vLLM
        # samples from.
        logprobs_mode="processed_logprobs",
        seed=hashed_seed(config.seed) % 2**32,  # NumPy takes no larger seed
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
        **options,
    )


def adapter_options(modules: list[str], *, num_adapters: int, rank: int) -> dict[str, object]:
    """vLLM's arguments for LoRA adapters on these modules.

    num_adapters: largest number of adapters in one step. rank: largest LoRA rank.
    """
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": num_adapters,
        "max_cpu_loras": ADAPTERS_ON_HOST * num_adapters,
        "max_lora_rank": min(limit for limit in get_args(MaxLoRARanks) if limit >= rank),
        "lora_target_modules": modules,
    }
