"""Tests whether trainers and generators repeat their results bit for bit.

There are two pairs of trainers: one pair with deterministic kernels, and one pair with the default kernels. The two trainers of a pair take
the same five steps (--steps) on the same rollouts. Every metric, logprob and entropy that they report is compared.
There are two generators. The first is in vLLM's batch-invariant mode, and the second is not. The batch-invariant mode
needs a GPU, so only the second generator starts on a machine without a GPU. Each generator gets the same seeded
requests four times: one at a time, twice together with other requests, and again one at a time. The tokens and logprobs
of the last three times are compared with those of the first time.
All actors start at the same time.
The exit status is 1 if the trainers with deterministic kernels differ, if the batch-invariant generator's tokens differ, or if a comparison
fails with an error. All other differences are only recorded.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results
from configs.qwen3 import MODELS
from configs.qwen3 import trainer as trainer_config
from configs.tiny import tiny
from rl_actors import (
    PPO,
    Completion,
    ForwardBackwardOutput,
    GeneratorClient,
    GeneratorConfig,
    OptimParams,
    OptimResult,
    Sample,
    SamplingParams,
    TrainerClient,
    TrainerConfig,
    num_loss_tokens,
)
from rl_actors.clients.call import Call

Generation = Call[list[list[Completion]]]
Answer = ForwardBackwardOutput | OptimResult
# Lengths of prompts in tokens. vLLM's prefix cache holds only whole blocks of 16 tokens, so it never holds a short prompt.
PROMPTS = {"short": 12, "long": 100}
# Value of all weights of the model's last norm, if there is a GPU. It multiplies the logits. The model 0_6b then has an entropy of one to two
# nats a token, so rounding errors can change which token is sampled.
SHARPNESS = 15.0
INVARIANT = "batch-invariant"  # the mode of a generator


def configs_of(name: str) -> tuple[TrainerConfig, GeneratorConfig]:
    if name == "tiny":
        model = replace(tiny().trainer.model, vocab_size=256, max_position_embeddings=512)
        trainer = TrainerConfig(model=model, max_sequence_length=256, tokens_per_row=512)
        return trainer, GeneratorConfig(model=model, max_model_len=256, max_num_seqs=64)
    trainer = replace(trainer_config(name, tokens_per_row=4096), max_sequence_length=1024)
    generator = GeneratorConfig(model=MODELS[name], dtype="bfloat16", max_model_len=1024, max_num_seqs=128)
    # vLLM's share of the GPU is small, because other actors start on the GPU at the same time.
    generator.gpu_memory_utilization, generator.kv_cache_bytes = 0.1, 4 << 30
    generator.setup_timeout = 600.0
    return trainer, generator


# --- generators ---------------------------------------------------------------------------------------------------


def prompts_by_kind(count: int, vocab_size: int) -> dict[str, list[list[int]]]:
    draw = torch.Generator().manual_seed(0)
    return {
        kind: torch.randint(2, vocab_size, (count, length), generator=draw).tolist() for kind, length in PROMPTS.items()
    }


def submit_seeded(client: GeneratorClient, prompts: Sequence[list[int]], num_tokens: int) -> list[Generation]:
    """Submit every prompt as a call with a seed of its own. Does not wait for answers."""
    calls = []
    for i, prompt in enumerate(prompts):
        calls.append(client.generate([prompt], seeded_params(i, num_tokens)))
    return calls


def seeded_params(index: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_stop=True, seed=1000 + index)


def completions_of(calls: Sequence[Generation]) -> list[Completion]:
    """Wait for calls of one prompt and one completion each, and return the completions."""
    return [call.result()[0][0] for call in calls]


def submit_others(client: GeneratorClient, count: int, vocab_size: int, num_tokens: int, seed: int) -> list[Generation]:
    """Submit requests without seeds. Does not wait for answers.

    Prompts and completions have random lengths, so that the batch around the seeded requests changes all the time.
    """
    draw = torch.Generator().manual_seed(seed)
    calls = []
    prompt_lengths = torch.randint(5, 120, (count,), generator=draw).tolist()
    new_tokens = torch.randint(num_tokens // 4, num_tokens + 1, (count,), generator=draw).tolist()
    for length, max_tokens in zip(prompt_lengths, new_tokens, strict=True):
        prompt = torch.randint(2, vocab_size, (length,), generator=draw).tolist()
        calls.append(client.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_stop=True)))
    return calls


def completion_differences(some: Sequence[Completion], others: Sequence[Completion]) -> dict[str, Any]:
    """Differences between two lists of completions of the same requests.

    other_tokens: number of completions whose tokens differ. first_at: the first position, over all completions, at which a token differs.
    logprobs_bit_equal: number of completions whose tokens and logprobs are the same. logprob_difference: the largest difference of logprobs at
    positions before the first token that differs.
    """
    firsts, logprob_differences, num_equal = [], [0.0], 0
    for a, b in zip(some, others, strict=True):
        first = first_difference(a.tokens, b.tokens)
        if first is not None:
            firsts.append(first)
        elif a.logprobs == b.logprobs:
            num_equal += 1
        logprob_differences += [abs(x - y) for x, y in zip(a.logprobs[:first], b.logprobs[:first], strict=True)]
    return {
        "completions": len(some),
        "other_tokens": len(firsts),
        "first_at": min(firsts, default=None),
        "logprobs_bit_equal": num_equal,
        "logprob_difference": max(logprob_differences),
    }


def first_difference(some: Sequence[int], others: Sequence[int]) -> int | None:
    """The first index at which two lists of the same length differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(some, others, strict=True)):
        if a != b:
            return index
    return None


def compare_generator(
    client: GeneratorClient, mode: str, vocab_size: int, num_tokens: int, count: int, failed: list[str]
) -> list[tuple[list[int], Completion]]:
    """Record one result for each comparison. Returns every prompt with the completion of its first request.

    failed: gets the comparisons in which tokens of the batch-invariant generator differ.
    """
    recorded: list[tuple[list[int], Completion]] = []
    for kind, prompts in prompts_by_kind(count, vocab_size).items():
        alone = one_by_one(client, prompts, num_tokens)
        title = f"generator {mode}, {kind} prompts, alone"
        for name, seed in (("among others", 1), ("among others still", 2)):
            others = submit_others(client, 5 * count, vocab_size, num_tokens, seed)
            calls = submit_seeded(client, prompts, num_tokens)
            others += submit_others(client, 2 * count, vocab_size, num_tokens, seed + 10)
            figures = completion_differences(alone, completions_of(calls))
            results.add("determinism", f"{title} and {name}", figures)
            if mode == INVARIANT and figures["other_tokens"]:
                failed.append(f"{title} and {name}")
            completions_of(others)  # waits, so that these requests do not run during the next comparison
        again = one_by_one(client, prompts, num_tokens)
        results.add("determinism", f"{title} twice", completion_differences(alone, again))
        recorded += zip(prompts, alone, strict=True)
    return recorded


def one_by_one(client: GeneratorClient, prompts: Sequence[list[int]], num_tokens: int) -> list[Completion]:
    """Send the requests of submit_seeded one at a time, each after the answer to the previous request. Returns the completions."""
    completions = []
    for i, prompt in enumerate(prompts):
        call = client.generate([prompt], seeded_params(i, num_tokens))
        completions += completions_of([call])
    return completions


# --- trainers -----------------------------------------------------------------------------------------------------


def rollouts(recorded: Sequence[tuple[list[int], Completion]]) -> list[Sample]:
    """The recorded completions as samples. Their advantages alternate between -1 and 1."""
    samples = []
    for i, (prompt, completion) in enumerate(recorded):
        advantage = 1.0 if i % 2 else -1.0
        samples.append(
            Sample.from_tokens(prompt, completion.tokens, old_logprobs=completion.logprobs, advantages=advantage)
        )
    return samples


def submit_steps(client: TrainerClient, samples: Sequence[Sample], num_steps: int) -> list[Call[Answer]]:
    """Submit the calls of all steps. Does not wait for answers."""
    params = OptimParams(learning_rate=1e-5, grad_divisor=num_loss_tokens(samples))
    calls: list[Any] = []
    half = len(samples) // 2
    for _ in range(num_steps):
        for part in (samples[:half], samples[half:]):
            calls.append(client.forward_backward(part, loss=PPO(ratio_high=1.28), entropy=True))
        calls.append(client.optim_step(params))
    return calls


def reported(answer: Answer) -> dict[str, Any]:
    """All values of an answer by name. Floats are given exactly, in hexadecimal or as integers with the same bits."""
    if isinstance(answer, OptimResult):
        return {"grad_norm": answer.grad_norm.hex(), "policy_version": answer.policy_version, "skipped": answer.skipped}
    found: dict[str, Any] = {name: float(value).hex() for name, value in answer.metrics.items()}
    for name in ("logprobs", "entropy"):
        values = torch.cat(getattr(answer, name))
        found[name] = values.view(torch.int32).tolist()
    return found


def compare_trainers(name: str, some: Sequence[Call[Answer]], others: Sequence[Call[Answer]]) -> bool:
    """Compare the answers of two trainers to the same calls. Returns True if no value differs.

    A value is one metric of a call, or all logprobs of a call, or all entropies of a call. Records how many values differ, and for each
    name of a value the index of the first call whose values of this name differ.
    """
    first_at: dict[str, int] = {}
    compared = differing = 0
    for index, (a, b) in enumerate(zip(some, others, strict=True)):
        first, second = reported(a.result()), reported(b.result())
        assert first.keys() == second.keys()
        compared += len(first)
        for value_name in first:
            if first[value_name] != second[value_name]:
                differing += 1
                first_at.setdefault(value_name, index)
    figures = {"calls": len(some), "numbers": compared, "differing": differing, "first_at_call": first_at}
    results.add("determinism", f"trainer {name}", figures | {"bit_equal": not differing})
    return not differing


def start_generators(stack: ExitStack, config: GeneratorConfig, *, only: str | None) -> dict[str, GeneratorClient]:
    """Start a generator for each mode. The batch-invariant generator is left out if there is no GPU or if only trainers are compared."""
    modes = {"as it is": False}
    if torch.cuda.is_available() and only != "trainer":
        modes = {INVARIANT: True} | modes
    clients = {}
    for i, (mode, invariant) in enumerate(modes.items()):
        client = GeneratorClient.spawn(replace(config, batch_invariant=invariant), name=f"generator{i}")
        clients[mode] = stack.enter_context(client)
    return clients


def start_trainers(stack: ExitStack, config: TrainerConfig) -> dict[str, list[TrainerClient]]:
    """Start two trainers with deterministic kernels and two with the default kernels, each in a process of its own."""
    pairs: dict[str, list[TrainerClient]] = {}
    for kind, deterministic in (("deterministic", True), ("as it is", False)):
        kind_config = replace(config, deterministic=deterministic)
        pairs[kind] = []
        for i in range(2):
            client = TrainerClient.spawn(kind_config, name=f"{kind.split()[0]}{i}")
            pairs[kind].append(stack.enter_context(client))
    return pairs


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        choices=["trainer", "generator"],
        help="compare only the trainers or only the generators; a generator still makes the rollouts for the trainers",
    )
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=12 if on_gpu else 4, help="seeded requests for each length of prompt"
    )
    parser.add_argument("--tokens", type=int, default=128 if on_gpu else 32, help="new tokens of a seeded request")
    parser.add_argument(
        "--eager", action="store_true", help="no compiled blocks in the trainers, no CUDA graphs in the generators"
    )
    return parser.parse_args()


def main() -> None:
    began = time.perf_counter()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # few, because four trainers compile at the same time
    on_gpu = torch.cuda.is_available()
    arguments = parse()
    from benchmarks.harness.random_weights import scratch, write

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {text}", flush=True)

    with ExitStack() as stack:
        trainer_options, generator_options = configs_of(arguments.model)
        model = generator_options.model
        directory = str(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch(model)))) / "model")
        write(model, Path(directory), scale=SHARPNESS if on_gpu else 3.0)
        say("weights written")
        generator_options = replace(generator_options, hf_path=directory, enforce_eager=arguments.eager)
        generator_options.gpu = torch.cuda.device_count() - 1 if on_gpu else None
        clients = start_generators(stack, generator_options, only=arguments.only)
        trainer_options = replace(trainer_options, hf_path=directory)
        trainer_options.compile.enable = trainer_options.compile.enable and not arguments.eager
        pairs = {} if arguments.only == "generator" else start_trainers(stack, trainer_options)
        failed: list[str] = []
        recorded: list[tuple[list[int], Completion]] = []
        for mode, client in clients.items():
            with recording_failure(f"generator {mode}", failed):
                client.ready().result()
                say(f"generator {mode}: up")
                if arguments.only == "trainer":
                    prompts = prompts_by_kind(arguments.requests, model.vocab_size)["long"]
                    calls = submit_seeded(client, prompts, arguments.tokens)
                    recorded = list(zip(prompts, completions_of(calls), strict=True))
                else:
                    options = (model.vocab_size, arguments.tokens, arguments.requests)
                    recorded = compare_generator(client, mode, *options, failed)
                say(f"generator {mode}: done")
        samples = rollouts(recorded)
        # All calls are submitted before the first wait for an answer, so that all pairs compute at the same time.
        submitted = {}
        for kind, pair in pairs.items():
            submitted[kind] = [submit_steps(client, samples, arguments.steps) for client in pair]
        for kind, (some, others) in submitted.items():
            with recording_failure(f"trainer {kind}", failed):
                if not compare_trainers(kind, some, others) and kind == "deterministic":
                    failed.append("deterministic trainers differ")
        say("done" if not failed else f"failed: {', '.join(failed)}")
    if failed:
        raise SystemExit(1)


@contextmanager
def recording_failure(name: str, failed: list[str]) -> Iterator[None]:
    """Suppress an exception of the `with` block, so that the other comparisons still run. The exception becomes the result, and `failed` gets `name`."""
    try:
        yield
    except Exception as error:
        failed.append(name)
        results.add("determinism", name, {"error": f"{type(error).__name__}: {error}"[:600]})


if __name__ == "__main__":
    main()
