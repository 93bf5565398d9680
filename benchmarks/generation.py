"""Tokens a second of generation through GeneratorClient beside the bare vLLM engine with the same settings, in one run.

All requests are there at once: 128 prompt tokens and 256 new ones each on a GPU; logprobs of the sampled tokens on both sides.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import results
from configs.qwen3 import MODELS
from configs.tiny import tiny
from rl_actors import GeneratorClient, GeneratorConfig, SamplingParams

Run = Callable[[list[list[int]]], Any]
"""Generates for these prompts, to the end."""


def config_of(name: str, concurrency: int) -> GeneratorConfig:
    if name == "tiny":
        return replace(tiny().generator, max_model_len=128)
    return GeneratorConfig(
        model=MODELS[name],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=concurrency,
        gpu_memory_utilization=0.8,
        setup_timeout=600.0,
    )


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(2, vocab_size, (count, length), generator=draw).tolist()


def timed(run: Run, prompts: list[list[int]], counts: list[int], repeats: int) -> dict[int, float]:
    """Median seconds for each number of requests, after one round that warms up."""
    found = {}
    for number, count in enumerate(counts):
        seconds = []
        for turn in range(repeats + 1):
            # No prompt comes twice: vLLM would have its keys and values.
            first = 2 + number * (repeats + 1) + turn
            fresh = [[first, *prompt[1:]] for prompt in prompts[:count]]
            start = time.perf_counter()
            run(fresh)
            seconds.append(time.perf_counter() - start)
        found[count] = statistics.median(seconds[1:])
    return found


def bare(
    config: GeneratorConfig, prompts: list, params: SamplingParams, counts: list, repeats: int, answer: Connection
):
    """vLLM's own loop over its engine, in a process of its own."""
    from rl_actors.vllm_engine import start_vllm, vllm_params

    began = time.perf_counter()
    engine = start_vllm(config)
    started = time.perf_counter() - began

    def run(fresh: list[list[int]]) -> None:
        for index, prompt in enumerate(fresh):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, vllm_params(params, index)[0])
        while engine.has_unfinished_requests():
            engine.step()

    answer.send((timed(run, prompts, counts, repeats), started))


def through_client(config: GeneratorConfig, prompts: list, params: SamplingParams, counts: list, repeats: int):
    began = time.perf_counter()
    with GeneratorClient.spawn(config) as client:
        client.ready().result()
        started = time.perf_counter() - began

        def run(fresh: list[list[int]]) -> None:
            # As many calls at once as GRPO would make, with groups of 16.
            calls = [client.generate(fresh[i : i + 16], params) for i in range(0, len(fresh), 16)]
            for call in calls:
                call.result()

        return timed(run, prompts, counts, repeats), started


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--requests", nargs="*", type=int, default=[64, 256, 1024] if on_gpu else [16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = config_of(arguments.model, max(arguments.requests))
    prompt_tokens, new_tokens = (128, 256) if on_gpu else (16, 64)
    prompts = prompts_of(max(arguments.requests), prompt_tokens, config.model.vocab_size)
    params = SamplingParams(max_tokens=new_tokens, ignore_stop=True)
    shared = (config, prompts, params, arguments.requests, arguments.repeats)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=bare, args=(*shared, sender))
    child.start()
    sender.close()
    try:
        engine, engine_start = receiver.recv()
    except EOFError:
        raise SystemExit("the bare engine failed") from None
    child.join()
    client, client_start = through_client(*shared)
    for count in arguments.requests:
        tokens = count * new_tokens
        figures = {
            "tokens_per_second": tokens / client[count],
            "engine_tokens_per_second": tokens / engine[count],
            "ratio": engine[count] / client[count],
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "start_seconds": round(client_start, 1),
            "engine_start_seconds": round(engine_start, 1),
        }
        results.add("generation", f"{arguments.model} {count} requests", figures)


if __name__ == "__main__":
    main()
