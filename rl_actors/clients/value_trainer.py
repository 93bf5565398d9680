"""The client of a value model, such as PPO's critic. The model gives one number for each position instead of logprobs."""

from dataclasses import replace
from typing import ClassVar

from rl_actors.clients.trainer import TrainerClient
from rl_actors.config import TrainerConfig


class ValueTrainerClient(TrainerClient):
    """A TrainerClient that trains a value model.

    `forward` returns one value for each target token: the value of the state before this token.

    >>> critic = trainer.spawn_value_trainer()                                   # doctest: +SKIP
    >>> critic.forward_backward(samples, loss=ValueLoss(clip=0.5)).result()      # doctest: +SKIP

    Calls that need a language model, such as push_model_state_dict, raise ValueError.
    """

    default_name: ClassVar[str] = "value_trainer"
    opens_transport: ClassVar[bool] = False  # no generator loads a value model

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        return replace(config, head="values")
