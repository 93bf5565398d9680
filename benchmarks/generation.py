"""Speed of generation through GeneratorClient, compared with vLLM at its best with the same settings.

One side is the client. The other side is vLLM in a process of its own. vLLM is started in each of several ways (WAYS),
one after the other, and the fastest way counts. All requests are submitted at once. A request has 128 prompt tokens and
256 new tokens on a GPU. It has 16 prompt tokens and 64 new tokens on a CPU. Both sides return the logprobs of the
sampled tokens. The runs of the two sides alternate, so that a slow moment of the machine affects both sides. On a GPU
each side may use two fifths of the memory.

With --replicas N the first side is a client with N replicas of the engine. The second side is then not vLLM, but a
client with one replica. --requests is the number of requests for each replica, so the second side gets one N-th of the
first side's requests. With --quantization the second side is a client without it.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import results
from configs.qwen3 import MODELS
from configs.tiny import tiny
from rl_actors import GeneratorClient, GeneratorConfig, SamplingParams

if TYPE_CHECKING:
    from rl_actors.vllm.core import Core

Prompts = list[list[int]]
Measure = Callable[[Prompts, SamplingParams], float]
"""A function that completes prompts on one side of the comparison, and returns the seconds that the completions took."""
Run = Callable[[Prompts, SamplingParams], None]
Shutdown = Callable[[], None]

WARM_UP = 1 if torch.cuda.is_available() else 3
"""Number of rounds at the beginning that are not counted. In a round each side runs once. A CPU needs more of these
rounds than a GPU, because oneDNN compiles kernels for every new batch size, and the second round still has new sizes."""
FIRST_TOKEN = 2
"""The smallest token id in a prompt. Smaller ids are special tokens of the tiny model."""
WAYS = {
    "stepped": "vLLM's LLMEngine, which computes in the process that calls it",
    "llm": "vLLM's LLMEngine with its core in a process of its own, as LLM.generate uses it",
    "async": "vLLM's AsyncLLM, as vllm serve uses it",
}


def config_of(name: str, concurrency: int) -> GeneratorConfig:
    if name == "tiny":
        return replace(tiny().generator, max_model_len=128, max_num_seqs=concurrency)
    return GeneratorConfig(
        model=MODELS[name],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=concurrency,
        gpu=0 if torch.cuda.is_available() else None,
        gpu_memory_utilization=0.4,
        setup_timeout=600.0,
    )


def prompts_of(count: int, length: int, vocab_size: int) -> Prompts:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(FIRST_TOKEN, vocab_size, (count, length), generator=draw).tolist()


# --- vLLM without this package's client --------------------------------------------------------------------------


def own_process() -> "Core":
    """A core in a process of its own, with vLLM's own scheduler."""
    from rl_actors.vllm.core import OwnProcess

    class VLLMsOwn(OwnProcess):
        def options(self, config: GeneratorConfig) -> dict[str, object]:
            return {name: value for name, value in super().options(config).items() if name != "scheduler_cls"}

    return VLLMsOwn()


def start_llm(config: GeneratorConfig, core: "Core") -> tuple[Run, Shutdown]:
    """Start an LLMEngine. Returns a function that steps it until all requests have ended, and one that ends its core."""
    from vllm.inputs.engine import tokens_input

    from rl_actors.vllm.requests import vllm_params
    from rl_actors.vllm.start import start_vllm

    engine = start_vllm(config, core)

    def run(prompts: Prompts, params: SamplingParams) -> None:
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), tokens_input(prompt), vllm_params(params, index)[0])
        while engine.has_unfinished_requests():
            engine.step()

    return run, engine.engine_core.shutdown


def start_async(config: GeneratorConfig) -> tuple[Run, Shutdown]:
    """Start an AsyncLLM. Returns a function that sends each request in its own coroutine, and one that ends the core."""
    from vllm.inputs.engine import tokens_input

    from rl_actors.vllm.requests import vllm_params
    from rl_actors.vllm.start import arguments_of

    with arguments_of(config, own_process()) as arguments:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    loop = asyncio.new_event_loop()

    async def one(index: int, prompt: list[int], params: SamplingParams) -> None:
        async for _ in engine.generate(tokens_input(prompt), vllm_params(params, index)[0], str(index)):
            pass

    async def run_all(prompts: Prompts, params: SamplingParams) -> None:
        await asyncio.gather(*(one(index, prompt, params) for index, prompt in enumerate(prompts)))

    def run(prompts: Prompts, params: SamplingParams) -> None:
        loop.run_until_complete(run_all(prompts, params))

    return run, engine.shutdown


def start_way(way: str, config: GeneratorConfig) -> tuple[Run, Shutdown]:
    from rl_actors.vllm.core import Core

    if way == "async":
        return start_async(config)
    return start_llm(config, Core() if way == "stepped" else own_process())


def serve_bare(way: str, config: GeneratorConfig, pipe: Connection) -> None:
    """Run vLLM in one of WAYS until the pipe is closed: send the seconds of its start, then those of each (prompts, params)."""
    start = time.perf_counter()
    run, shutdown = start_way(way, config)
    pipe.send(time.perf_counter() - start)
    with suppress(EOFError):
        while True:
            prompts, params = pipe.recv()
            start = time.perf_counter()
            run(prompts, params)
            pipe.send(time.perf_counter() - start)
    # If vLLM's core has a process of its own, this function's process cannot end until `shutdown` has ended the core.
    shutdown()


@contextmanager
def bare(way: str, config: GeneratorConfig) -> Iterator[Measure]:
    """Start a process that runs vLLM in one of WAYS, and yield the function that measures vLLM."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    child = context.Process(target=serve_bare, args=(way, config, other_end))
    child.start()
    other_end.close()

    def answer() -> float:
        try:
            return pipe.recv()
        except EOFError:
            raise SystemExit(f"vLLM's process ended before it answered ({way}: {WAYS[way]})") from None

    def measure(prompts: Prompts, params: SamplingParams) -> float:
        pipe.send((prompts, params))
        return answer()

    try:
        print(f"{WAYS[way]}: started in {answer():.0f} s", flush=True)
        yield measure
    finally:
        pipe.close()
        child.join()


# --- the client --------------------------------------------------------------------------------------------------


@contextmanager
def through_client(config: GeneratorConfig, name: str = "generator") -> Iterator[Measure]:
    """Start a client, and yield the function that measures the client. Each call of `generate` has up to 16 prompts."""

    def measure(prompts: Prompts, params: SamplingParams) -> float:
        start = time.perf_counter()
        calls = [client.generate(prompts[i : i + 16], params) for i in range(0, len(prompts), 16)]
        for call in calls:
            call.result()
        return time.perf_counter() - start

    start = time.perf_counter()
    with GeneratorClient.spawn(config, name=name) as client:
        client.ready().result()
        print(f"client with replicas={config.replicas}: started in {time.perf_counter() - start:.0f} s", flush=True)
        yield measure


class Rounds:
    """Runs the two sides several times. In a round each side runs once. Every round has new prompts, because vLLM would
    find repeated prompts in its prefix cache and skip their prefill.
    """

    def __init__(self, arguments: argparse.Namespace, vocab_size: int) -> None:
        self.arguments = arguments
        self.share = arguments.replicas  # the client of N replicas gets N times as many requests as the other side
        prompt_tokens, self.new_tokens = (128, 256) if torch.cuda.is_available() else (16, 64)
        self.vocab_size = vocab_size
        self.prompts = prompts_of(max(arguments.requests) * self.share, prompt_tokens, vocab_size)
        self.num_drawn = 0

    def fresh_prompts(self, count: int) -> Prompts:
        """`count` prompts that are not in the prefix cache. They all begin with the same pair of tokens, which no earlier call has used.

        One token instead of a pair would not be enough, because the tiny model has fewer tokens than there are rounds.
        """
        num_tokens = self.vocab_size - FIRST_TOKEN
        first, second = divmod(self.num_drawn, num_tokens)
        self.num_drawn += 1
        return [[FIRST_TOKEN + first, FIRST_TOKEN + second, *prompt[2:]] for prompt in self.prompts[:count]]

    def compare(self, ours: Measure, theirs: Measure) -> dict[int, tuple[list[float], list[float]]]:
        """Run all rounds. Returns {number of requests: (seconds of our side's rounds, seconds of their side's rounds)}, without the first
        WARM_UP rounds.
        """
        params = SamplingParams(max_tokens=self.new_tokens, ignore_stop=True)
        answers = {}
        for count in self.arguments.requests:
            sides: tuple[list[float], list[float]] = ([], [])
            for _ in range(WARM_UP + self.arguments.repeats):
                fresh = self.fresh_prompts(count * self.share)
                sides[1].append(theirs(fresh[:count], params))
                sides[0].append(ours(fresh, params))
            answers[count] = (sides[0][WARM_UP:], sides[1][WARM_UP:])
        return answers

    def figures(self, count: int, ours: list[float], theirs: list[float]) -> dict[str, Any]:
        """The figures of a result. Rates are computed from median times."""
        our_rate = count * self.share * self.new_tokens / statistics.median(ours)
        their_rate = count * self.new_tokens / statistics.median(theirs)
        return {
            "tokens_per_second": our_rate,
            "engine_tokens_per_second": their_rate,
            "ratio": our_rate / their_rate,
            "prompt_tokens": len(self.prompts[0]),
            "new_tokens": self.new_tokens,
            "seconds": [round(x, 3) for x in ours],
            "engine_seconds": [round(x, 3) for x in theirs],
        }


def beside_vllm(arguments: argparse.Namespace, config: GeneratorConfig) -> None:
    """Record one result for each number of requests. The result compares the client with the fastest way to run vLLM at this number."""
    rounds = Rounds(arguments, config.model.vocab_size)
    by_way = {}
    with through_client(config) as client:
        # The engines start one after the other, because vLLM measures at its start how much memory is free.
        for way in arguments.ways:
            with bare(way, config) as measure:
                by_way[way] = rounds.compare(client, measure)
    for count in arguments.requests:
        rates = {way: count * rounds.new_tokens / statistics.median(by_way[way][count][1]) for way in arguments.ways}
        fastest = max(rates, key=rates.__getitem__)
        figures = rounds.figures(count, *by_way[fastest][count])
        figures |= {
            "beside": "vLLM at its best",
            "way": fastest,
            "ways": {way: round(rate) for way, rate in rates.items()},
        }
        record(arguments, count, figures | {"tensor_parallel": config.tensor_parallel})


def beside_a_client(arguments: argparse.Namespace, config: GeneratorConfig) -> None:
    """Compare a client of N replicas or with quantization with a client of one replica without it, and record one result for
    each number of requests.

    Each client has a generator on the first GPU. The runs of the two clients alternate, so these two generators never
    compute at the same time.
    """
    rounds = Rounds(arguments, config.model.vocab_size)
    plain = replace(config, replicas=1, quantization=None)
    with through_client(plain, "plain") as one, through_client(config) as changed:
        answers = rounds.compare(changed, one)
    for count in arguments.requests:
        figures = rounds.figures(count, *answers[count])
        record(arguments, count, figures | {"beside": "one replica" if arguments.replicas > 1 else config.dtype})


def record(arguments: argparse.Namespace, count: int, figures: dict[str, Any]) -> None:
    parallel = f", TP{arguments.tensor_parallel}" if arguments.tensor_parallel > 1 else ""
    replicas = f", {arguments.replicas} replicas" if arguments.replicas > 1 else ""
    engines = f", {arguments.engines_per_gpu} engines" if arguments.engines_per_gpu else ""
    quantization = f", {arguments.quantization}" if arguments.quantization else ""
    name = f"{arguments.model} {count} requests{parallel}{replicas}{engines}{quantization}"
    text = results.against(figures["tokens_per_second"], figures["engine_tokens_per_second"], "tokens/s")
    results.add("generation", name, figures, text)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--requests", nargs="*", type=int, default=[64, 256, 1024] if on_gpu else [16, 64, 256])
    parser.add_argument(
        "--ways", nargs="*", choices=list(WAYS), default=["llm", "async"] if on_gpu else ["stepped", "llm"]
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--engines-per-gpu", type=int, help="of the client; without it as GeneratorConfig chooses")
    parser.add_argument("--quantization", choices=["fp8"], help="of the client")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = config_of(arguments.model, max(arguments.requests))
    config = replace(
        config,
        tensor_parallel=arguments.tensor_parallel,
        replicas=arguments.replicas,
        engines_per_gpu=arguments.engines_per_gpu,
        quantization=arguments.quantization,
    )
    if arguments.replicas > 1 or arguments.quantization:
        beside_a_client(arguments, config)
    else:
        beside_vllm(arguments, config)


if __name__ == "__main__":
    main()
