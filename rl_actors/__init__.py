"""An RL post-training service that is built from Monarch actors.

Importing this package does not import vLLM, and does not initialize CUDA. Each actor class, client class and transport class is imported
at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rl_actors.config import GeneratorConfig, LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig, WeightsConfig
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
from rl_actors.processes.output import LogRoute
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

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_actors.clients.generator import GeneratorClient
    from rl_actors.clients.reference import ReferenceClient
    from rl_actors.clients.tenant import TenantClient
    from rl_actors.clients.trainer import TrainerClient
    from rl_actors.clients.value_trainer import ValueTrainerClient
    from rl_actors.generator import Generator
    from rl_actors.policy_trainer import PolicyTrainer
    from rl_actors.transports.files import FilesTransport
    from rl_actors.transports.index import IndexTransport
    from rl_actors.transports.memory import MemoryTransport
    from rl_actors.transports.torchstore import TorchStoreTransport

_LAZY = {
    "FilesTransport": "rl_actors.transports.files",
    "Generator": "rl_actors.generator",
    "GeneratorClient": "rl_actors.clients.generator",
    "IndexTransport": "rl_actors.transports.index",
    "MemoryTransport": "rl_actors.transports.memory",
    "PolicyTrainer": "rl_actors.policy_trainer",
    "ReferenceClient": "rl_actors.clients.reference",
    "TenantClient": "rl_actors.clients.tenant",
    "TorchStoreTransport": "rl_actors.transports.torchstore",
    "TrainerClient": "rl_actors.clients.trainer",
    "ValueTrainerClient": "rl_actors.clients.value_trainer",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
