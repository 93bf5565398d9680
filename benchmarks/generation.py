"""Speed of generation through GeneratorClient, compared with the bare vLLM engine with the same settings.

All requests are submitted at once. A request has 128 prompt tokens and 256 new tokens on a GPU, and 16 and 64 on a CPU. Both sides return
the logprobs of the sampled tokens. The sides take turns, so that a slow moment of the machine affects both. On a GPU each side may use two
fifths of the memory.
"""

import argparse
import multiprocessing
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from benchmarks.harness import results
from configs.qwen3 import MODELS
from configs.tiny import tiny
from rl_actors import GeneratorClient, GeneratorConfig, SamplingParams


def config_of(name: str, concurrency: int) -> GeneratorConfig:
    if name == "tiny":
        return replace(tiny().generator, max_model_len=128)
    return GeneratorConfig(
        model=MODELS[name],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=concurrency,
        gpu_memory_utilization=0.4,
        setup_timeout=600.0,
    )


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(2, vocab_size, (count, length), generator=draw).tolist()


def serve_bare(config: GeneratorConfig, pipe: Connection) -> None:
    """Run vLLM's own loop over its engine, in a process of its own, until the pipe is closed.

    It first sends the seconds that the engine took to start. For every (prompts, params) that it receives it then sends the seconds that
    they took.
    """
    from rl_actors.vllm.requests import vllm_params
    from rl_actors.vllm.start import start_vllm

    start = time.perf_counter()
    engine = start_vllm(config)
    pipe.send(time.perf_counter() - start)
    with suppress(EOFError):
        while True:
            prompts, params = pipe.recv()
            start = time.perf_counter()
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), {"prompt_token_ids": prompt}, vllm_params(params, index)[0])
            while engine.has_unfinished_requests():
                engine.step()
            pipe.send(time.perf_counter() - start)


def through_client(client: GeneratorClient, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds that all prompts take through the client. A call has 16 prompts."""
    start = time.perf_counter()
    calls = [client.generate(prompts[i : i + 16], params) for i in range(0, len(prompts), 16)]
    for call in calls:
        call.result()
    return time.perf_counter() - start


def through_engine(pipe: Connection, prompts: list[list[int]], params: SamplingParams) -> float:
    """Seconds that all prompts take in serve_bare."""
    pipe.send((prompts, params))
    return _answer(pipe)


def _answer(pipe: Connection) -> float:
    """The next number that serve_bare sends. Exits if its process has ended."""
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("the bare engine failed") from None


def compare(client: GeneratorClient, pipe: Connection, arguments: argparse.Namespace, vocab_size: int) -> None:
    """Record one result for each number of requests. A rate comes from the median time; the first round is warm-up and does not count."""
    prompt_tokens, new_tokens = (128, 256) if torch.cuda.is_available() else (16, 64)
    prompts = prompts_of(max(arguments.requests), prompt_tokens, vocab_size)
    params = SamplingParams(max_tokens=new_tokens, ignore_stop=True)
    first_token = 2
    for count in arguments.requests:
        ours, theirs = [], []
        for _ in range(arguments.repeats + 1):
            # A new first token in every round makes all prompts new. vLLM would find repeated ones in its prefix cache and skip their prefill.
            fresh = [[first_token, *prompt[1:]] for prompt in prompts[:count]]
            first_token += 1
            theirs.append(through_engine(pipe, fresh, params))
            ours.append(through_client(client, fresh, params))
        our_rate, their_rate = (count * new_tokens / statistics.median(seconds[1:]) for seconds in (ours, theirs))
        figures = {
            "tokens_per_second": our_rate,
            "engine_tokens_per_second": their_rate,
            "ratio": our_rate / their_rate,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "seconds": [round(x, 3) for x in ours[1:]],
            "engine_seconds": [round(x, 3) for x in theirs[1:]],
        }
        results.add("generation", f"{arguments.model} {count} requests", figures)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--requests", nargs="*", type=int, default=[64, 256, 1024] if on_gpu else [16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = config_of(arguments.model, max(arguments.requests))
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    child = context.Process(target=serve_bare, args=(config, other_end))
    child.start()
    other_end.close()
    try:
        # The engines start one after the other, because vLLM measures at its start how much memory is free.
        print(f"bare engine: up after {_answer(pipe):.0f} s", flush=True)
        start = time.perf_counter()
        with GeneratorClient.spawn(config) as client:
            client.ready().result()
            print(f"client's engine: up after {time.perf_counter() - start:.0f} s", flush=True)
            compare(client, pipe, arguments, config.model.vocab_size)
    finally:
        pipe.close()
        child.join()


if __name__ == "__main__":
    main()
