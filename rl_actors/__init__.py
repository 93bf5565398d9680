"""An RL post-training service that is built from Monarch actors.

Importing this package imports nothing else: each name is imported at its first use. So programs
that need only a small module, such as the processes that compute rewards, do not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_actors.clients.generator import GeneratorClient as GeneratorClient
    from rl_actors.clients.trainer import ReferenceClient as ReferenceClient
    from rl_actors.clients.trainer import TrainerClient as TrainerClient
    from rl_actors.clients.trainer import ValueTrainerClient as ValueTrainerClient
    from rl_actors.clients.training import TenantClient as TenantClient
    from rl_actors.config import GeneratorConfig as GeneratorConfig
    from rl_actors.config import LoRAConfig as LoRAConfig
    from rl_actors.config import ModelConfig as ModelConfig
    from rl_actors.config import OptimizerConfig as OptimizerConfig
    from rl_actors.config import TrainerConfig as TrainerConfig
    from rl_actors.config import WeightsConfig as WeightsConfig
    from rl_actors.generator import Generator as Generator
    from rl_actors.hub import find_model as find_model
    from rl_actors.losses import CISPO as CISPO
    from rl_actors.losses import DRO as DRO
    from rl_actors.losses import GSPO as GSPO
    from rl_actors.losses import KL as KL
    from rl_actors.losses import PPO as PPO
    from rl_actors.losses import CrossEntropy as CrossEntropy
    from rl_actors.losses import IcePop as IcePop
    from rl_actors.losses import ImportanceSampling as ImportanceSampling
    from rl_actors.losses import Reinforce as Reinforce
    from rl_actors.losses import TruncatedImportanceSampling as TruncatedImportanceSampling
    from rl_actors.losses import ValueLoss as ValueLoss
    from rl_actors.losses import explained_variance as explained_variance
    from rl_actors.parts import HostMove as HostMove
    from rl_actors.policy_trainer import PolicyTrainer as PolicyTrainer
    from rl_actors.processes.output import LogRoute as LogRoute
    from rl_actors.transports.files import FilesTransport as FilesTransport
    from rl_actors.transports.index import IndexTransport as IndexTransport
    from rl_actors.transports.memory import MemoryTransport as MemoryTransport
    from rl_actors.transports.torchstore import TorchStoreTransport as TorchStoreTransport
    from rl_actors.types import Completion as Completion
    from rl_actors.types import ForwardBackwardOutput as ForwardBackwardOutput
    from rl_actors.types import GeneratorInfo as GeneratorInfo
    from rl_actors.types import OptimParams as OptimParams
    from rl_actors.types import OptimResult as OptimResult
    from rl_actors.types import Sample as Sample
    from rl_actors.types import SamplingParams as SamplingParams
    from rl_actors.types import TopLogprobs as TopLogprobs
    from rl_actors.types import TrainerInfo as TrainerInfo
    from rl_actors.types import num_loss_tokens as num_loss_tokens

_NAMES = {
    "clients.generator": "GeneratorClient",
    "clients.training": "TenantClient",
    "clients.trainer": "ReferenceClient TrainerClient ValueTrainerClient",
    "config": "GeneratorConfig LoRAConfig ModelConfig OptimizerConfig TrainerConfig WeightsConfig",
    "generator": "Generator",
    "hub": "find_model",
    "losses": "CISPO CrossEntropy DRO GSPO IcePop ImportanceSampling KL "
    "PPO Reinforce TruncatedImportanceSampling ValueLoss explained_variance",
    "parts": "HostMove",
    "policy_trainer": "PolicyTrainer",
    "processes.output": "LogRoute",
    "transports.files": "FilesTransport",
    "transports.index": "IndexTransport",
    "transports.memory": "MemoryTransport",
    "transports.torchstore": "TorchStoreTransport",
    "types": "Completion ForwardBackwardOutput GeneratorInfo OptimParams OptimResult Sample SamplingParams TopLogprobs TrainerInfo num_loss_tokens",
}
"""Module -> its public names."""
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
