"""An RL post-training service that is built from Monarch actors.

Importing this package imports nothing else: each name is imported at its first use. So programs that need only a small module, such as the
processes that compute rewards, do not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_actors.clients.generator import GeneratorClient
    from rl_actors.clients.trainer import ReferenceClient, TrainerClient, ValueTrainerClient
    from rl_actors.clients.training import TenantClient
    from rl_actors.config import GeneratorConfig, LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig, WeightsConfig
    from rl_actors.generator import Generator
    from rl_actors.hub import find_model
    from rl_actors.losses import (
        CISPO,
        DRO,
        GSPO,
        KL,
        PPO,
        CrossEntropy,
        IcePop,
        ImportanceSampling,
        Reinforce,
        TruncatedImportanceSampling,
        ValueLoss,
        explained_variance,
    )
    from rl_actors.parts import HostMove
    from rl_actors.policy_trainer import PolicyTrainer
    from rl_actors.processes.output import LogRoute
    from rl_actors.transports.files import FilesTransport
    from rl_actors.transports.index import IndexTransport
    from rl_actors.transports.memory import MemoryTransport
    from rl_actors.transports.torchstore import TorchStoreTransport
    from rl_actors.types import (
        Completion,
        ForwardBackwardOutput,
        GeneratorInfo,
        OptimParams,
        OptimResult,
        Sample,
        SamplingParams,
        TopLogprobs,
        TrainerInfo,
        num_loss_tokens,
    )

_LAZY = {
    "CISPO": "rl_actors.losses",
    "Completion": "rl_actors.types",
    "CrossEntropy": "rl_actors.losses",
    "DRO": "rl_actors.losses",
    "FilesTransport": "rl_actors.transports.files",
    "ForwardBackwardOutput": "rl_actors.types",
    "GSPO": "rl_actors.losses",
    "Generator": "rl_actors.generator",
    "GeneratorClient": "rl_actors.clients.generator",
    "GeneratorConfig": "rl_actors.config",
    "GeneratorInfo": "rl_actors.types",
    "HostMove": "rl_actors.parts",
    "IcePop": "rl_actors.losses",
    "ImportanceSampling": "rl_actors.losses",
    "IndexTransport": "rl_actors.transports.index",
    "KL": "rl_actors.losses",
    "LoRAConfig": "rl_actors.config",
    "LogRoute": "rl_actors.processes.output",
    "MemoryTransport": "rl_actors.transports.memory",
    "ModelConfig": "rl_actors.config",
    "OptimParams": "rl_actors.types",
    "OptimResult": "rl_actors.types",
    "OptimizerConfig": "rl_actors.config",
    "PPO": "rl_actors.losses",
    "PolicyTrainer": "rl_actors.policy_trainer",
    "ReferenceClient": "rl_actors.clients.trainer",
    "Reinforce": "rl_actors.losses",
    "Sample": "rl_actors.types",
    "SamplingParams": "rl_actors.types",
    "TenantClient": "rl_actors.clients.training",
    "TopLogprobs": "rl_actors.types",
    "TorchStoreTransport": "rl_actors.transports.torchstore",
    "TrainerClient": "rl_actors.clients.trainer",
    "TrainerConfig": "rl_actors.config",
    "TrainerInfo": "rl_actors.types",
    "TruncatedImportanceSampling": "rl_actors.losses",
    "ValueLoss": "rl_actors.losses",
    "ValueTrainerClient": "rl_actors.clients.trainer",
    "WeightsConfig": "rl_actors.config",
    "explained_variance": "rl_actors.losses",
    "find_model": "rl_actors.hub",
    "num_loss_tokens": "rl_actors.types",
}

__all__ = [
    "CISPO",
    "DRO",
    "GSPO",
    "KL",
    "PPO",
    "Completion",
    "CrossEntropy",
    "FilesTransport",
    "ForwardBackwardOutput",
    "Generator",
    "GeneratorClient",
    "GeneratorConfig",
    "GeneratorInfo",
    "HostMove",
    "IcePop",
    "ImportanceSampling",
    "IndexTransport",
    "LoRAConfig",
    "LogRoute",
    "MemoryTransport",
    "ModelConfig",
    "OptimParams",
    "OptimResult",
    "OptimizerConfig",
    "PolicyTrainer",
    "ReferenceClient",
    "Reinforce",
    "Sample",
    "SamplingParams",
    "TenantClient",
    "TopLogprobs",
    "TorchStoreTransport",
    "TrainerClient",
    "TrainerConfig",
    "TrainerInfo",
    "TruncatedImportanceSampling",
    "ValueLoss",
    "ValueTrainerClient",
    "WeightsConfig",
    "explained_variance",
    "find_model",
    "num_loss_tokens",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
