"""The callers' side of a generator: every answer comes by `await` in a program or by `.result()` in a REPL. Holds the actor mesh."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_actors import validation
from rl_actors.clients.base import Client
from rl_actors.clients.call import Call, in_background
from rl_actors.config import GeneratorConfig
from rl_actors.generator import Generator
from rl_actors.processes.spawn import LogRoute
from rl_actors.types import Completion, GeneratorInfo, SamplingParams
from rl_actors.validation import validate_prompts


class GeneratorClient(Client):
    """Calls to one generator; they run at the same time, and each waits until the generator is up."""

    def __init__(
        self,
        mesh: Any,
        *,
        name: str = "generator",
        call_timeout: float = GeneratorConfig.call_timeout,
        setup_timeout: float = GeneratorConfig.setup_timeout,
    ) -> None:
        """Call a Generator mesh of one process that the caller spawned and will stop."""
        super().__init__(mesh)
        self.name, self.call_timeout, self.setup_timeout = name, call_timeout, setup_timeout
        self._started = in_background(self._set_up(None), f"{name}: setup")

    @classmethod
    def spawn(
        cls, config: GeneratorConfig, *, transport: Any = None, name: str = "generator", logs: LogRoute | None = None
    ) -> "GeneratorClient":
        """Spawn a process on this host and start vLLM in it; returns at once, the first answer waits for it."""
        client = cls.__new__(cls)
        Client.__init__(client, transport=transport)
        config.validate()
        client.config, client.name = config, name
        client.call_timeout, client.setup_timeout = config.call_timeout, config.setup_timeout
        client._started = in_background(client._set_up(logs), f"{name}: setup")
        client._remember()
        return client

    config: GeneratorConfig | None = None  # None: the caller spawned the mesh
    _info: GeneratorInfo

    async def _set_up(self, logs: LogRoute | None) -> None:
        if self._mesh is None:
            assert self.config is not None
            processes = await self._spawn(1, logs, process_environment(self.config))
            transport = self._transport() if callable(self._transport) else self._transport
            self._mesh = processes.spawn(self.name, Generator, self.config, transport)
        self._info = (await self._ask(self._mesh.setup, "setup", self.setup_timeout))[0]
        if self._processes is None:
            self._probes = await self._ask(self._mesh.probe, "setup", self.setup_timeout)

    def _pull_first(self, push: Call[int]) -> None:
        set_up = self._started

        async def pull() -> None:
            version = await push
            await set_up
            await self._one("pull_model_state_dict", self.call_timeout, version)

        self._started = in_background(pull(), f"{self.name}: first pull")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> Call[list[list[Completion]]]:
        """params.n completions of each prompt, in order. Raises ValueError for a prompt or parameter out of its limits."""
        return self._call_on_prompts("generate", prompts, params or SamplingParams())

    def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> Call[list[Tensor]]:
        """Log probability of every token after the first, at temperature 1: float32 [T - 1] for each sequence."""
        return self._call_on_prompts("compute_logprobs", sequences)

    def pull_model_state_dict(self, version: int, timeout: float = 60.0) -> Call[int]:
        """Replace the weights by those published under `version`, waiting up to `timeout` seconds for them."""
        return self._call("pull_model_state_dict", version, timeout)

    def _call_on_prompts(self, endpoint: str, prompts: Any, *params: SamplingParams) -> Call[Any]:
        if isinstance(prompts, Sequence):  # copied: the caller may change its list before the generator is up
            prompts = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]

        def validate() -> None:
            given = params[0] if params else SamplingParams(max_tokens=1)
            info = self._info
            validate_prompts(prompts, given, max_model_len=info.max_model_len, vocab_size=info.vocab_size)

        return self._call(endpoint, prompts, *params, validate=validate)

    def _call(self, endpoint: str, *args: Any, validate: Callable[[], None] = lambda: None) -> Call[Any]:
        if self._closed:
            raise RuntimeError(f"{self.name}: {endpoint} after close")

        async def run() -> Any:
            await self._started
            validate()
            return await self._one(endpoint, self.call_timeout, *args)

        return in_background(run(), f"{self.name}: {endpoint}")

    async def _one(self, endpoint: str, timeout: float, *args: Any) -> Any:
        return (await self._ask(getattr(self._mesh, endpoint), endpoint, timeout, *args))[0]


def process_environment(config: GeneratorConfig) -> dict[str, str]:
    """Of a generator's process. Raises ValueError for a GPU that the program does not see."""
    environment = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    if config.gpu is None or not torch.cuda.is_available():
        return environment
    validation.require_gpu(config)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[config.gpu] if visible else str(config.gpu)
    return environment | {"CUDA_VISIBLE_DEVICES": chosen}
