"""Cost of TLS between a program and the workers that run its actors.

Two programs take the same steps alternately, one with workers at tls:// addresses and one with
workers at tcp:// addresses on loopback. A step is a GRPO step with fixed advantages. FSDP spreads the
trainer over two workers; the second also has the generator. TLS encrypts what goes through Monarch:
calls, samples and answers, but neither weights nor collectives.
"""

import argparse
import contextlib
import json
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.overhead import compare
from configs.tiny import tiny
from rl_actors import (
    PPO,
    GeneratorClient,
    IndexTransport,
    OptimParams,
    Sample,
    SamplingParams,
    TrainerClient,
    num_loss_tokens,
)
from rl_actors.clients.call import in_background
from rl_actors.processes import hosts
from rl_actors.processes.address import Address

ROOT = Path(__file__).parents[1]
NUM_WORKERS = 2
# Prompts of a step, completions of a prompt, and tokens of a completion. The first two are as in the config `tiny`.
NUM_PROMPTS, NUM_SAMPLES, NUM_NEW = 192, 4, 8
END_SECONDS = 60.0
LINE = "step of {:,} completions of {} tokens"


def program(addresses: str, certificates: str) -> None:
    """Take a step for each line of stdin. Print "ready" after the start, and the loss after each step.

    addresses: addresses of the workers, separated by commas. certificates: folder of the certificates; "": no TLS.
    """
    connected = hosts.connect(addresses.split(","), certificates=certificates)
    last = connected.part(NUM_WORKERS - 1, NUM_WORKERS)
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = NUM_WORKERS
    transport = IndexTransport()
    in_background(transport.open(), "open").result()
    with (
        TrainerClient.spawn(config.trainer, transport=transport, hosts=connected) as trainer,
        GeneratorClient.spawn(config.generator, transport=transport, hosts=last) as generator,
    ):
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        draw = random.Random(0)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(step(trainer, generator, draw)), flush=True)


def step(trainer: TrainerClient, generator: GeneratorClient, draw: random.Random) -> float:
    """Take one step, and return its loss."""
    vocab_size = tiny().trainer.model.vocab_size
    prompts = [[draw.randrange(2, vocab_size) for _ in range(6)] for _ in range(NUM_PROMPTS)]
    wanted = SamplingParams(max_tokens=NUM_NEW, ignore_stop=True, n=NUM_SAMPLES)
    samples = []
    for prompt, group in zip(prompts, generator.generate(prompts, wanted).result(), strict=True):
        for index, each in enumerate(group):
            advantage = 1.0 if index % 2 else -1.0
            samples.append(Sample.from_tokens(prompt, each.tokens, old_logprobs=each.logprobs, advantages=advantage))
    forward_backward = trainer.forward_backward(samples, loss=PPO())
    params = OptimParams(learning_rate=1e-4, grad_divisor=num_loss_tokens(samples))
    optim_step = trainer.optim_step(params)
    loss = forward_backward.result().metrics["loss:sum"]
    optim_step.result()
    generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
    return loss


@contextlib.contextmanager
def worker(scheme: str, certificates: str) -> Iterator[str]:
    """Start a worker on loopback, and yield its address. The worker ends with the `with` block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
    flags = ["--tls", certificates] if certificates else []
    command = [sys.executable, "-m", "rl_actors.processes.worker", address, *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while hosts.refusal(Address.parse(address)):
            if process.poll() is not None:
                raise RuntimeError(f"{shlex.join(command)} ended with status {process.returncode}")
            time.sleep(0.1)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)


@contextlib.contextmanager
def side(scheme: str, certificates: str = "") -> Iterator[Callable[[], float]]:
    """Start workers and a program that uses them. Yields a function that takes a step and returns its loss."""
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(worker(scheme, certificates)) for _ in range(NUM_WORKERS)]
        command = [sys.executable, "-m", "benchmarks", "tls_overhead", "--program", ",".join(addresses), certificates]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def answer() -> str:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the program of {scheme}:// ended with status {process.wait(END_SECONDS)}")
            return line.strip()

        def one_step() -> float:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            return json.loads(answer())

        try:
            while answer() != "ready":
                pass
            yield one_step
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(END_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each program")
    parser.add_argument("--program", nargs=2, metavar=("ADDRESSES", "CERTIFICATES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        program(*arguments.program)
        return
    with tempfile.TemporaryDirectory(prefix="rl_actors_tls_") as folder:
        certificates = str(Path(folder) / "certificates")
        subprocess.run([sys.executable, str(ROOT / "scripts/certificates.py"), certificates], check=True)
        with side("tls", certificates) as encrypted, side("tcp") as plain:
            measure = partial(compare, benchmark="tls_overhead", sides=("tls", "tcp"))
            measure(LINE.format(NUM_PROMPTS * NUM_SAMPLES, NUM_NEW), encrypted, plain, arguments.repeats, tokens=0)
