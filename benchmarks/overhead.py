"""Cost of the actors: a training step and generation through the clients, compared with the same engines called directly.

The calls of the client and of the engine alternate, so that other load of the machine affects both alike. A ratio is
the client's median divided by the engine's median. For a training step these are medians of the time, so a lower ratio
is better. For generation they are medians of tokens/s, so a higher ratio is better.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness import results
from configs.tiny import tiny
from rl_actors import PPO, GeneratorClient, OptimParams, Sample, SamplingParams, TrainerClient, num_loss_tokens


def compare(
    name: str,
    through: Callable[[], Any],
    direct: Callable[[], Any],
    repeats: int,
    tokens: int,
    *,
    benchmark: str = "overhead",
    sides: tuple[str, str] = ("client", "engine"),
    warms_up: bool = True,
) -> None:
    """Time the two sides alternately. Record the median of each side and the ratio of the medians.

    through: does the work once on the first side, for example through a client. direct: does the same work on the
    second side, for example with the engine and without a client. tokens: number of tokens that a call generates; 0 for
    a training step. benchmark: name of the file of results. sides: names of the two sides in the results. warms_up:
    call each side once before the timed calls, because the first call fills caches.
    """
    if warms_up:
        through()
        direct()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, seconds in zip((through, direct), times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    client, engine = map(statistics.median, times)
    figures = {f"{sides[0]}_seconds": client, f"{sides[1]}_seconds": engine}
    figures["ratio"] = engine / client if tokens else client / engine
    if tokens:
        figures |= {"tokens_per_second": tokens / client, f"{sides[1]}_tokens_per_second": tokens / engine}
    results.add(benchmark, name, figures, results.milliseconds(client, engine))


def training(repeats: int) -> None:
    """Compare client and engine in a step of the tiny model: forward_backward of 1,024 samples, then optim_step."""
    config = tiny().trainer
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(1024):
        ids = torch.randint(2, config.model.vocab_size, (10,), generator=generator).tolist()
        samples.append(Sample.from_tokens(ids[:6], ids[6:], old_logprobs=-1.0, advantages=0.5))
    params = OptimParams(learning_rate=1e-4, grad_divisor=num_loss_tokens(samples))

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from rl_actors.engine.train_engine import TrainEngine

    engine = TrainEngine(config)

    def direct() -> None:
        engine.forward_backward(samples, PPO())
        engine.optim_step(params)

    with TrainerClient.spawn(config) as trainer:

        def through() -> None:
            trainer.forward_backward(samples, loss=PPO()).result()
            trainer.optim_step(params).result()

        compare("step of 1,024 samples", through, direct, repeats, tokens=0)
    torch.distributed.destroy_process_group()


def generation(repeats: int) -> None:
    """Compare client and engine twice: for one call of 256 prompts, and for 32 simultaneous calls of one prompt each.

    Client and engine generate 64 tokens for each prompt, with logprobs.
    """
    config = replace(tiny().generator, max_model_len=128)
    prompts = [[2 + (7 * i + j) % 14 for j in range(16)] for i in range(256)]
    params = SamplingParams(max_tokens=64, ignore_stop=True)
    from rl_actors.vllm.requests import vllm_params
    from rl_actors.vllm.start import start_vllm

    engine = start_vllm(config)

    def direct_calls(count: int) -> None:
        for index in range(count):
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, vllm_params(params, index)[0])
        while engine.has_unfinished_requests():
            engine.step()

    with GeneratorClient.spawn(config) as client:
        client.ready().result()

        def one_call() -> None:
            client.generate(prompts, params).result()

        async def all_callers() -> None:
            await asyncio.gather(*(client.generate([prompt], params) for prompt in prompts[:32]))

        def many_calls() -> None:
            asyncio.run(all_callers())

        compare("one generate, 256 prompts x 64", one_call, partial(direct_calls, 256), repeats, tokens=256 * 64)
        compare("32 callers, 1 prompt x 64 each", many_calls, partial(direct_calls, 32), repeats, tokens=32 * 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"training": training, "generation": generation}
    parser.add_argument("parts", nargs="*", default=list(parts), help=" or ".join(parts), metavar="PART")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each side")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - parts.keys()
    if unknown:
        parser.error(f"no part {unknown}; there are: {', '.join(parts)}")
    # torch.set_num_threads does nothing in a process with vLLM. In such a process the training engine could not set its number of threads. So
    # training and generation each run in a process of their own.
    for name in arguments.parts:
        child = multiprocessing.get_context("spawn").Process(target=parts[name], args=(arguments.repeats,))
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(child.exitcode)


if __name__ == "__main__":
    main()
