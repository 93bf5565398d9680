"""Fakes for tests: environments, generators and trainers. None has a neural network."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from controllers.environments import Message, Problem
from rl_actors import (
    Completion,
    ForwardBackwardOutput,
    OptimParams,
    OptimResult,
    Sample,
    SamplingParams,
    TopLogprobs,
    TrainerConfig,
    TrainerInfo,
    adapters,
    metrics,
)
from rl_actors.clients.base import ActorDiedError
from rl_actors.clients.limits import TrainerLimits
from rl_actors.clients.training import SavedCheckpoint
from rl_actors.metrics import PartialsCopy
from rl_actors.seeds import hashed_seed


class ConstantReward:
    """Additions with the same reward for every completion."""

    def __init__(self, reward: float, num_held_out: int):
        self.value, self.num_held_out = reward, num_held_out

    def problem(self, index: int) -> Problem:
        a, b = index % 50, index // 50 % 50
        return Problem(prompt=f"{a}+{b}=", answer=str(a + b), key=f"{a} {b}")

    def held_out(self) -> list[Problem]:
        return [Problem(prompt=f"{a}+99=", answer=str(a + 99), key=f"{a} 99") for a in range(self.num_held_out)]

    def reward(self, problem: Problem, completion: str) -> float:
        return self.value


class ParityReward(ConstantReward):
    """Additions. The reward is 1 if the character codes of the completion add up to an odd number,
    as for about half.
    """

    def reward(self, problem: Problem, completion: str) -> float:
        return float(sum(map(ord, completion)) % 2)


class Conversations(ConstantReward):
    """Problems with the same conversation of three messages."""

    def __init__(self, num_held_out: int):
        super().__init__(0.0, num_held_out)

    def problem(self, index: int) -> Problem:
        return self._about(index % 6)

    def held_out(self) -> list[Problem]:
        return [self._about(6 + index) for index in range(self.num_held_out)]

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == problem.answer)

    def _about(self, number: int) -> Problem:
        messages = [
            Message(role="user", content="say it"),
            Message(role="assistant", content="it"),
            Message(role="user", content="once more"),
        ]
        return Problem(prompt=str(number), answer="it!", key=str(number), messages=messages)


# for --environment.task, as in tests.fakes:parity_reward


def conversations(*, seed: int, num_held_out: int) -> Conversations:
    return Conversations(min(num_held_out, 3))


def parity_reward(*, seed: int, num_held_out: int) -> ParityReward:
    return ParityReward(0.0, min(num_held_out, 50))


def constant_reward(*, seed: int, num_held_out: int, reward: float) -> ConstantReward:
    return ConstantReward(reward, min(num_held_out, 50))


def trainer_info(**values: object) -> TrainerInfo:
    """One rank on a CPU, with a memory peak of 1 GiB, except for `values`."""
    fields = {
        "policy_version": 0,
        "steps_skipped": 0,
        "state": "idle",
        "num_parameters": 1,
        "vocab_size": 16,
        "max_sequence_length": 64,
        "tokens_per_row": 64,
        "max_call_bytes": 1 << 20,
        "layout": {},
        "device": "cpu",
        "device_name": "CPU",
        "dtype": "float32",
        "head": "logprobs",
        "rank": 0,
        "world_size": 1,
        "pid": 0,
        "optimizer": "AdamW",
        "optimizer_fields": (),
        "memory_bytes": 1 << 29,
        "peak_memory_bytes": 1 << 30,
        "logs": "",
    }
    return TrainerInfo(**(fields | values))


class AnswersEach:
    """Adds `generate_each` to a fake with `generate`. All prompts finish at once; it never dies."""

    returns = ()

    def on_news(self, tell) -> None: ...

    async def generate_each(
        self, prompts: list[list[int]], params: SamplingParams, indices: Sequence[int] | None = None
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        if indices is not None:  # `generate` takes no indices, so they go into the seed
            params = replace(params, seed=hashed_seed(params.seed, *indices))
        for pair in enumerate(await self.generate(prompts, params)):
            yield pair


class ReplayingGenerator(AnswersEach):
    """Returns a real generator's recorded answers, one per call. Tests set `recording`."""

    recording: list[Any]
    last_pull = None  # a pull moves no bytes

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def death(self, silent_after) -> None: ...

    async def pull_model_state_dict(self, version):
        return version

    async def generate(self, prompts, params):
        return self.recording.pop(0)


class ActorOfNothing:
    """Calls that start, close and watch an actor, for fakes without a process."""

    @classmethod
    def spawn(cls, config, **_):
        return cls()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def death(self, silent_after: float) -> None:
        """Returns None at once: no death."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call of optim_step, with the samples of forward_backward since the last."""

    params: OptimParams
    samples: list[Sample]


class NearTrainer(ActorOfNothing):
    """A trainer without a model: real losses from made-up logprobs.

    A logprob is the generator's (old_logprobs), or without that column -1, plus `difference`.
    """

    difference = 0.25

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.samples: list[Sample] = []  # since the last optim_step

    async def forward_backward(self, samples: Sequence[Sample], loss) -> ForwardBackwardOutput:
        self.samples += samples
        rows, partials = [], []
        for sample in samples:
            columns = {name: column[None] for name, column in sample.columns.items()}
            sampled = columns.get("old_logprobs", torch.full((1, len(sample)), -1.0))
            rows.append(sampled[0] + self.difference)
            total, values = loss(sampled + self.difference, **columns)
            partials.append({"loss:sum": total, **values})
        merged = PartialsCopy(metrics.merge(partials)).wait()
        return ForwardBackwardOutput(
            logprobs=rows, metrics=metrics.finish(merged), policy_version=len(self.steps), partials=merged
        )

    async def optim_step(self, params: OptimParams) -> OptimResult:
        self.steps.append(Step(params=params, samples=self.samples))
        self.samples = []
        return OptimResult(policy_version=len(self.steps), grad_norm=1.0)

    async def push_model_state_dict(self) -> int:
        return len(self.steps)

    async def info(self) -> list[TrainerInfo]:
        return [trainer_info(policy_version=len(self.steps))]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A call of `generate` or `generate_each`, and its answer."""

    prompts: list[list[int]]
    indices: Sequence[int]
    params: SamplingParams
    answer: list[list[Completion]]


class RandomGenerator(AnswersEach, ActorOfNothing):
    """A generator without a model: tokens from 2 to 11, seeded by call, prompt and index."""

    last_pull = None  # a pull moves no bytes

    def __init__(self) -> None:
        self.version = -1
        self.generations: list[Generation] = []

    async def pull_model_state_dict(self, version: int) -> int:
        self.version = version
        return version

    async def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
        return self._generate(prompts, params, range(len(prompts)))

    async def generate_each(
        self, prompts: list[list[int]], params: SamplingParams, indices: Sequence[int] | None = None
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        for pair in enumerate(self._generate(prompts, params, indices or range(len(prompts)))):
            yield pair

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams, indices: Sequence[int]
    ) -> list[list[Completion]]:
        answer = []
        for prompt, index in zip(prompts, indices, strict=True):
            draws = [random.Random(f"{params.seed}/{index}/{prompt}/{i}") for i in range(params.n)]
            answer.append([self._completion(draw, params) for draw in draws])
        self.generations.append(Generation(prompts=prompts, indices=indices, params=params, answer=answer))
        return answer

    def _completion(self, draw: random.Random, params: SamplingParams) -> Completion:
        tokens = [draw.randint(2, 11) for _ in range(draw.randint(1, params.max_tokens))]
        logprobs = [-4 * draw.random() for _ in tokens]
        versions = [self.version] * len(tokens)
        return Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason="stop")


class UnigramTrainer:
    """A model of one number per token id: logprobs are log_softmax(numbers) at every position.

    Gradients and optimizer steps are real. A tenant is another object, and adds to `trainer.calls`.
    """

    def __init__(self, config: TrainerConfig, *, trainer: "UnigramTrainer | None" = None, name: str = "") -> None:
        """trainer, name: of a tenant."""
        self.config, self.name = config, name
        self.numbers = torch.zeros(config.model.vocab_size, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.numbers], lr=0.0)
        self.trainer = trainer or self
        self.tenants: dict[str, UnigramTrainer] = {}
        self.seeds: dict[str, int] = {}  # of all tenants by name, also closed ones
        self.calls: list[str] = []
        self.version = 0
        self.is_closed = self.is_dead = False
        self.gate = asyncio.Event()  # forward_backward waits for it
        self.gate.set()
        if trainer is not None:
            self.calls, self.gate = trainer.calls, trainer.gate

    async def ready(self) -> None: ...

    async def close(self) -> None:
        if self.name:
            self._begin("close")
            del self.trainer.tenants[self.name]
        self.is_closed = True

    def new_tenant(self, name: str, *, seed: int = 0) -> "UnigramTrainer":
        self._begin("new_tenant")
        assert name not in self.tenants
        self.tenants[name] = UnigramTrainer(self.config, trainer=self, name=name)
        self.seeds[name] = seed
        return self.tenants[name]

    def _begin(self, call: str) -> None:
        """Add to `calls`. Raises ActorDiedError if the trainer is dead."""
        if self.trainer.is_dead:
            raise ActorDiedError("trainer: the process of rank 0 ended", "trainer")
        self.calls.append(f"{self.name} {call}".strip())

    def _run(self, samples: Sequence[Sample], loss) -> tuple[torch.Tensor, ForwardBackwardOutput]:
        TrainerLimits.of_config(self.config).check_samples(samples, loss)  # as a TrainerClient does
        rows, wide_rows, partials = [], [], []
        total = torch.zeros(())
        for sample in samples:
            columns = {name: column[None] for name, column in sample.columns.items()}
            logprobs = self.numbers.log_softmax(0)
            if "target_ids" in columns:
                columns["target_logprobs"] = logprobs[columns["target_ids"]]
                wide_rows.append(columns["target_logprobs"][0].detach())
            row = logprobs[sample.targets][None]
            rows.append(row[0].detach())
            value, found = loss(row, **columns)
            total = total + value
            partials.append(found)
        merged = PartialsCopy(metrics.merge(partials)).wait()
        output = ForwardBackwardOutput(
            logprobs=rows,
            metrics=metrics.finish(merged),
            policy_version=self.version,
            target_logprobs=wide_rows or None,
        )
        return total, output

    async def forward(self, samples: Sequence[Sample], loss) -> ForwardBackwardOutput:
        self._begin("forward")
        return self._run(samples, loss)[1]

    async def forward_backward(self, samples: Sequence[Sample], loss) -> ForwardBackwardOutput:
        await self.gate.wait()
        self._begin("forward_backward")
        total, output = self._run(samples, loss)
        total.backward()
        return output

    async def optim_step(self, params: OptimParams) -> OptimResult:
        self._begin("optim_step")
        if self.numbers.grad is None:
            raise ValueError("optim_step: no gradients are accumulated")
        [group] = self.optimizer.param_groups
        group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps}
        group["weight_decay"] = params.weight_decay
        norm = float(self.numbers.grad.norm())
        if not math.isfinite(norm):
            self.numbers.grad = None
            return OptimResult(policy_version=self.version, grad_norm=norm, skipped=True)
        if params.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([self.numbers], params.grad_clip_norm)
        self.optimizer.step()
        self.numbers.grad = None
        self.version += 1
        return OptimResult(policy_version=self.version, grad_norm=norm)

    async def discard_gradients(self) -> None:
        self._begin("discard_gradients")
        self.numbers.grad = None

    async def save_checkpoint(self, path: str, *, optimizer: bool = True) -> SavedCheckpoint:
        self._begin("save_checkpoint")
        if self.numbers.grad is not None:
            raise RuntimeError("save_checkpoint is not possible in an open step")
        Path(path).mkdir(parents=True, exist_ok=True)
        state = {"numbers": self.numbers.detach(), "optimizer": self.optimizer.state_dict(), "version": self.version}
        torch.save(state, Path(path) / "state.pt")
        return SavedCheckpoint(path=path, policy_version=self.version, wait=self.ready)

    async def load_checkpoint(self, path: str, *, optimizer: bool = True) -> int:
        self._begin("load_checkpoint")
        state = torch.load(Path(path) / "state.pt")
        with torch.no_grad():
            self.numbers.copy_(state["numbers"])
        self.optimizer = torch.optim.AdamW([self.numbers], lr=0.0)
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
        return self.version

    async def export_hf(self, path: str, dtype: str = "float32") -> None:
        Path(path).mkdir(parents=True)
        torch.save(self.numbers.detach(), Path(path) / "numbers.pt")

    async def export_lora(self, path: str) -> None:
        """Write the numbers as adapters, in a directory like peft's."""
        await self.export_hf(path)
        (Path(path) / adapters.CONFIG_FILE).write_text("{}")


class UnigramGenerator:
    """Samples from the UnigramTrainer's model.

    A version is a directory in `folder`; without numbers.pt it is the untrained model of zeros.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.numbers = torch.zeros(vocab_size)
        self.version = -1
        self.pulls: list[int] = []
        self.adapters: dict[str, torch.Tensor] = {}  # by name of the adapter
        self.loads: list[str] = []  # adapter of each load_adapter call
        self.calls: list[list[list[int]]] = []  # prompts of each call of generate_each
        self.gate = asyncio.Event()  # generate_each waits for it
        self.gate.set()

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def pull_model_state_dict(self, version: int) -> int:
        directory = self.folder / str(version)
        if not directory.is_dir():
            raise TimeoutError(f"version {version} was not published")
        file = directory / "numbers.pt"
        self.numbers = torch.load(file) if file.is_file() else torch.zeros_like(self.numbers)
        self.version = version
        self.pulls.append(version)
        return version

    async def load_adapter(self, name: str, directory: str) -> None:
        self.adapters[name] = torch.load(Path(directory) / "numbers.pt")
        self.loads.append(name)

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def _logprobs(self, adapter: str | None) -> torch.Tensor:
        return (self.numbers if adapter is None else self.adapters[adapter]).log_softmax(0)

    async def generate_each(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, adapter: str | None = None
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        self.calls.append([list(prompt) for prompt in prompts])
        await self.gate.wait()
        logprobs = self._logprobs(adapter)
        for index, prompt in enumerate(prompts):
            draws = [random.Random(f"{params.seed}/{list(prompt)}/{each}") for each in range(params.n)]
            prompt_top = self._top(logprobs, len(prompt) - 1, params.prompt_top_logprobs)
            yield index, [replace(self._completion(logprobs, draw, params), prompt_top=prompt_top) for draw in draws]

    def _top(self, logprobs: torch.Tensor, num_positions: int, count: int) -> TopLogprobs | None:
        if not count:
            return None
        top = logprobs.topk(count)
        return TopLogprobs(
            token_ids=top.indices.expand(num_positions, count), logprobs=top.values.expand(num_positions, count)
        )

    def _completion(self, logprobs: torch.Tensor, draw: random.Random, params: SamplingParams) -> Completion:
        tokens: list[int] = []
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop_token_ids):
            tokens += draw.choices(range(len(logprobs)), weights=logprobs.exp().tolist())
        stopped = tokens[-1] in params.stop_token_ids
        return Completion(
            tokens=tokens,
            logprobs=[float(logprobs[token]) for token in tokens],
            policy_versions=[self.version] * len(tokens),
            finish_reason="stop" if stopped else "length",
            top=self._top(logprobs, len(tokens), params.top_logprobs),
        )

    async def compute_logprobs(
        self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[torch.Tensor]:
        logprobs = self._logprobs(adapter)
        return [logprobs[torch.tensor(list(sequence[1:]))] for sequence in sequences]
