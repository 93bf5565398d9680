"""The client of a model that only infers, such as a teacher, or the reference of a KL divergence. The model has no gradients and no optimizer."""

from dataclasses import replace
from typing import ClassVar, Literal

from rl_actors.clients.call import Call
from rl_actors.clients.model import ModelClient
from rl_actors.config import TrainerConfig


class ReferenceClient(ModelClient):
    """A model that is never trained, in its own processes or in the processes of another client.

    >>> reference = trainer.spawn_reference()                                  # doctest: +SKIP
    >>> reference.forward(samples).result().logprobs                            # doctest: +SKIP
    >>> reference.refresh(trainer.push_model_state_dict().result()).result()    # doctest: +SKIP
    """

    default_name: ClassVar[str] = "reference"

    @classmethod
    def _own_config(cls, config: TrainerConfig) -> TrainerConfig:
        return replace(config, optimizer=None)

    def refresh(self, version: int) -> Call[int]:
        """Take the weights of a version that the trainer pushes, and return the version. Waits up to 60 s for the version to be published.

        The values are rounded to the dtype of the push: the widest dtype that a generator has announced to the transport, or float32 if no
        generator has announced a dtype. Only the two versions that were pushed last can be read.
        Raises TimeoutError if the version is not there in time, ValueError if the version holds another model or only adapters, and
        RuntimeError if this client has no transport.
        """
        return self._in_turn("refresh", self._first, "pull_model_state_dict", version)

    def load_checkpoint(self, path: str, *, optimizer: Literal[False] = False) -> Call[int]:
        """Load the weights of a checkpoint, and return the checkpoint's policy_version.

        path: a directory that save_checkpoint wrote. The trainer that wrote it may have had another parallel layout.
        """
        return self._load_checkpoint(path, optimizer=optimizer)
