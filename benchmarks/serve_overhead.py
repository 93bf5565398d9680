"""Measures the cost of the Tinker server.

The parts `sampling` and `training` compare two sides: calls through the official SDK and the server, and the same calls
through the actors' clients (GeneratorClient and TrainerClient). The server runs as a separate program, the one that
`make tinker-server` runs. Each side has its own actors, with the same config. The calls of the two sides are timed alternately,
so that the load of the machine is the same for both. The ratio of training steps compares times (SDK / client), so
lower is better. The ratio of sampling compares tokens/s (SDK / client), so higher is better.
The part `together` does not use the actors' clients. It times sampling requests to the server twice: while another
client of the SDK trains, and while no client trains. Its ratio is the time without training divided by the time with
training.
By default the server has the config `tiny_chat` and the small model of that config. With `--model tiny` it has the config
`qwen3` and the same small model. With `--model 0_6b` it has the config `qwen3` and random weights in the shape of Qwen3
0.6B.
This benchmark needs the SDK `tinker`.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import tinker
from tinker import types

from benchmarks.harness import results
from benchmarks.overhead import compare
from configs.qwen3 import MODELS, qwen3_server
from configs.tiny_chat import tiny_chat, write_chat_tokenizer, write_tiny_chat
from controllers.tinker_server.config import ServeConfig
from rl_actors import PPO, GeneratorClient, OptimParams, Sample, SamplingParams, TrainerClient

START_SECONDS = 600.0  # limit of the server's start
END_SECONDS = 120.0  # limit of the server's end
LEARNING_RATE = 1e-4
NUM_BYTES = 256  # token ids below this number are bytes, and special tokens have larger ids
CALL_SECONDS = 600.0  # limit of one call through the SDK
TRAINED_TOGETHER = 64  # samples of a training step in the part `together`
TINY = "tiny_chat"
compare_sides = partial(compare, benchmark="serve_overhead", sides=("sdk", "client"))


def served(model: str, folder: Path) -> tuple[ServeConfig, list[str]]:
    """The server's config and its command-line arguments. Writes the model's directory, unless the model is TINY.

    model: TINY, "tiny", or a key of MODELS, such as "0_6b". TINY: the config `tiny_chat` with its own model. "tiny":
    the config `qwen3` with the model of tiny_chat. A key of MODELS: the config `qwen3` with random weights in that
    shape.
    """
    if model == TINY:
        config = tiny_chat()
        return config, ["--config", TINY, "--state", str(folder)]
    config, directory = qwen3_server(), folder / "model"
    config.name = model
    if model == "tiny":
        write_tiny_chat(directory)
    else:
        # Another process writes the weights. If this process wrote them, its CUDA context would take memory of the GPU.
        subprocess.run([sys.executable, "-m", "benchmarks", "random_weights", model, str(directory)], check=True)
        write_chat_tokenizer(directory)
    return config, ["--config", "qwen3", "--serve-as", f"{model}={directory}", "--state", str(folder)]


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[str]:
    """Start a server, and yield its address. At the end of the `with` block the server is stopped."""
    command = [sys.executable, "-m", "controllers.tinker_server", "--address", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    too_late = threading.Timer(START_SECONDS, process.kill)
    too_late.start()
    try:
        lines = (line.strip() for line in process.stdout)
        addresses = (line.partition("=")[2] for line in lines if line.startswith("export TINKER_BASE_URL="))
        address = next(addresses, None)
        too_late.cancel()
        if address is None:
            raise RuntimeError(
                f"the server ended with status {process.wait(END_SECONDS)} before it had started "
                f"(after {START_SECONDS:g} s it is killed, which gives status -9)"
            )
        yield address
    finally:
        too_late.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)


def tokens_of(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(NUM_BYTES) for _ in range(count)]


def both_forms(count: int, length: int, draw: random.Random) -> tuple[list[types.Datum], list[Sample]]:
    """The same random data for a step of PPO in two forms: as datums of the SDK and as samples of a client.

    Both lists have `count` entries of `length` positions.
    """
    data, samples = [], []
    for _ in range(count):
        ids = tokens_of(length + 1, draw)
        inputs = {"target_tokens": ids[1:], "logprobs": [-5.5] * length, "advantages": [0.5] * length}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        samples.append(Sample.from_tokens(ids[:1], ids[1:], old_logprobs=-5.5, advantages=0.5))
    return data, samples


def train(trainer: tinker.TrainingClient, data: list[types.Datum], adam: types.AdamParams) -> None:
    """Take a training step through the SDK, and wait for its end."""
    forward_backward = trainer.forward_backward(data, "ppo")
    step = trainer.optim_step(adam)
    forward_backward.result(CALL_SECONDS)
    step.result(CALL_SECONDS)


def sample(sampler: tinker.SamplingClient, inputs: list[types.ModelInput], wanted: types.SamplingParams) -> None:
    """Send one request for each input through the SDK, all at once, and wait for all answers."""
    futures = [sampler.sample(each, 1, wanted) for each in inputs]
    for future in futures:
        future.result(CALL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    repeats: int  # timed calls on each side; a call with only one sample or request is timed ten times as often
    samples: int  # number of samples of the large step
    requests: int  # number of requests that are sent at once
    prefix: str  # prefix of the names of results


def training(service: tinker.ServiceClient, config: ServeConfig, sizes: Sizes) -> None:
    """Compare SDK and client in a training step (forward_backward and optim_step) on many samples of 256 tokens, and in a step on a single
    sample of nine tokens.
    """
    draw = random.Random(0)
    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    params = OptimParams(learning_rate=LEARNING_RATE, beta2=adam.beta2, eps=adam.eps, grad_clip_norm=None)
    creating = service.create_lora_training_client(config.name, rank=0)
    with TrainerClient.spawn(config.trainer) as trainer:
        trainer.ready().result()
        client = creating.result()
        # The small step comes first and warms up server and client. On a CPU the large step takes most of a minute, so
        # there it has no warm-up of its own.
        for count, length, times in ((1, 9, 10 * sizes.repeats), (sizes.samples, 256, sizes.repeats)):
            data, samples = both_forms(count, length, draw)

            through = partial(train, client, data, adam)

            def direct(samples: list[Sample] = samples) -> None:
                forward_backward = trainer.forward_backward(samples, loss=PPO())
                step = trainer.optim_step(params)
                forward_backward.result()
                step.result()

            name = f"{sizes.prefix}step of {count:,} sample{'s' * (count > 1)} of {length} tokens"
            warms_up = count == 1 or bool(results.gpus())
            compare_sides(name, through, direct, times, tokens=0, warms_up=warms_up)


def sampling(service: tinker.ServiceClient, config: ServeConfig, sizes: Sizes) -> None:
    """Compare SDK and client in many requests with 32 prompt tokens and 128 new tokens, and in a single request
    with eight prompt tokens and one new token.
    """
    draw = random.Random(0)
    sampler = service.create_sampling_client(base_model=config.name).result()
    generator_config = replace(config.generator, hf_path=config.hf_path)
    with GeneratorClient.spawn(generator_config) as generator:
        generator.ready().result()
        for count, num_prompt, num_new, times in (
            (sizes.requests, 32, 128, sizes.repeats),
            (1, 8, 1, 10 * sizes.repeats),
        ):
            prompts = [tokens_of(num_prompt, draw) for _ in range(count)]
            inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts]
            wanted = types.SamplingParams(max_tokens=num_new, stop=[])
            ours = SamplingParams(max_tokens=num_new, ignore_stop=True)

            through = partial(sample, sampler, inputs, wanted)

            def direct(prompts: list[list[int]] = prompts, ours: SamplingParams = ours) -> None:
                generator.generate(prompts, ours).result()

            name = f"{sizes.prefix}{count} request{'s' * (count > 1)} of {num_prompt} + {num_new} tokens"
            compare_sides(name, through, direct, times, tokens=count * num_new)


@contextlib.contextmanager
def in_background(call: Callable[[], None]) -> Iterator[None]:
    """Repeat a call in a thread until the `with` block ends. The block starts after the first call has ended."""
    called, ends = threading.Event(), threading.Event()

    def repeat() -> None:
        while not ends.is_set():
            call()
            called.set()

    with ThreadPoolExecutor(1) as pool:
        repeating = pool.submit(repeat)
        try:
            while not called.wait(0.1) and not repeating.done():
                pass
            yield
        finally:
            ends.set()
        repeating.result()


def together(service: tinker.ServiceClient, config: ServeConfig, sizes: Sizes) -> None:
    """Time many requests while a client trains, and again while no client trains. Compare the two times.

    A training step has 64 samples of 256 tokens.
    """
    draw = random.Random(0)
    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    trainer = service.create_lora_training_client(config.name, rank=0).result()
    sampler = service.create_sampling_client(base_model=config.name).result()
    inputs = [types.ModelInput.from_ints(tokens_of(32, draw)) for _ in range(sizes.requests)]
    wanted = types.SamplingParams(max_tokens=128, stop=[])
    data, _ = both_forms(TRAINED_TOGETHER, 256, draw)

    step = partial(train, trainer, data, adam)

    def seconds_of_samples() -> float:
        start = time.perf_counter()
        sample(sampler, inputs, wanted)
        return time.perf_counter() - start

    step()
    seconds_of_samples()
    alone, beside = [], []
    for _ in range(sizes.repeats):
        alone.append(seconds_of_samples())
        with in_background(step):
            beside.append(seconds_of_samples())
    figures = {"beside_training_seconds": statistics.median(beside), "alone_seconds": statistics.median(alone)}
    figures["ratio"] = figures["alone_seconds"] / figures["beside_training_seconds"]
    text = results.milliseconds(figures["beside_training_seconds"], figures["alone_seconds"])
    results.add("serve_overhead", f"{sizes.prefix}{sizes.requests} requests beside training", figures, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Sampling comes first, because on a GPU a generator must start while no trainer takes or frees memory.
    parts = {"sampling": sampling, "training": training, "together": together}
    parser.add_argument("parts", nargs="*", default=list(parts), help=", ".join(parts), metavar="PART")
    parser.add_argument("--model", choices=[TINY, "tiny", *MODELS], default=TINY)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="timed calls on each side; a call with only one sample or request is timed ten times as often",
    )
    parser.add_argument("--samples", type=int, default=1024, help="number of samples of the large step")
    parser.add_argument("--requests", type=int, default=256, help="number of requests that are sent at once")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - parts.keys()
    if unknown:
        parser.error(f"no part {unknown}; there are: {', '.join(parts)}")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    sizes = Sizes(
        repeats=arguments.repeats,
        samples=arguments.samples,
        requests=arguments.requests,
        prefix="" if arguments.model == TINY else f"{arguments.model}: ",
    )
    with tempfile.TemporaryDirectory(prefix="rl_actors_serve_") as scratch:
        folder = Path(scratch)
        config, options = served(arguments.model, folder)
        with serving(options) as address, tinker.ServiceClient(base_url=address, api_key="tml-local") as service:
            config.for_base(folder / "model" if sizes.prefix else folder / "base" / config.name)
            for name in parts:
                if name in arguments.parts:
                    parts[name](service, config, sizes)


if __name__ == "__main__":
    main()
