"""Measures how much the logprobs of generator and trainer differ in bfloat16, over many steps. The model has an entropy of one to two nats
a token.

A model with random weights has a higher entropy. So the trainer first learns sequences of a Markov chain (benchmarks/float8.py) until the
model's entropy is in this range. Scaling the logits up would also lower the entropy, but it would enlarge their rounding errors.

Then the benchmark repeats a cycle, called a turn. The generator samples completions, and the trainer's forward computes the logprobs of
the same tokens. Then the trainer takes optimizer steps and pushes its weights, and the generator pulls them. The result of a turn has the
mean and the largest absolute difference, the k3 estimate of the KL divergence, the entropy and the token with the largest difference.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.float8 import Chains
from benchmarks.harness import results
from configs.qwen3 import MODELS
from configs.qwen3 import trainer as trainer_config
from configs.tiny import tiny
from rl_actors import (
    PPO,
    FilesTransport,
    ForwardBackwardOutput,
    GeneratorClient,
    GeneratorConfig,
    ModelConfig,
    OptimParams,
    Sample,
    SamplingParams,
    TorchStoreTransport,
    TrainerClient,
    TrainerConfig,
    num_loss_tokens,
)
from rl_actors.clients.call import in_background
from rl_actors.transports.base import Transport

LIMITS = {"difference_mean": 0.02, "kl": 1e-3}  # the summary's "within" is true if both figures are below these limits
MAX_ENTROPY = 1.9  # nats a token; the training on chains ends when the entropy is lower
CHAIN_TOKENS = 16  # number of distinct tokens in the chains
PROMPT_TOKENS = 32  # length of a prompt


class Clock:
    """Seconds since the program began."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        print(f"[{self.seconds():5.1f} s] {text}", flush=True)


def configs_of(name: str, directory: str, attention: str) -> tuple[TrainerConfig, GeneratorConfig]:
    if name == "tiny":
        model = replace(tiny().trainer.model, max_position_embeddings=512, vocab_size=64)
        trainer = TrainerConfig(model=model, hf_path=directory, max_sequence_length=256, tokens_per_row=512)
        trainer.compute_dtype = "bfloat16"
        return trainer, GeneratorConfig(model=model, hf_path=directory, dtype="bfloat16", max_model_len=256)
    trainer = replace(trainer_config(name, tokens_per_row=8192), hf_path=directory, max_sequence_length=2048)
    trainer.attention, trainer.activation_checkpointing = attention, "none"  # type: ignore[assignment]
    generator = GeneratorConfig(model=MODELS[name], hf_path=directory, dtype="bfloat16", max_model_len=2048)
    generator.gpu = min(1, torch.cuda.device_count() - 1)
    # The size of vLLM's KV cache is set here. vLLM cannot measure the free memory, because the trainer starts at the
    # same time.
    generator.gpu_memory_utilization = 0.3
    generator.kv_cache_bytes = 8 << 30
    generator.setup_timeout = 600.0
    return trainer, generator


def close(transport: Transport) -> None:
    in_background(transport.close(), "store").result()


def teach(trainer: TrainerClient, corpus: Chains, clock: Clock, *, on_gpu: bool, most_steps: int) -> float:
    """Train on chains for at most `most_steps` steps, and end earlier if the entropy is below MAX_ENTROPY.

    Returns the entropy in nats per token.
    """
    count, length, rate = (16, 512, 1e-3) if on_gpu else (16, 64, 1e-2)
    entropy = float("inf")
    for step in range(most_steps):
        output = trainer.forward_backward(corpus.samples(count, length), loss="cross_entropy", entropy=True).result()
        entropy = float(torch.cat(output.entropy).mean())
        if step % 5 == 0 or entropy < MAX_ENTROPY:
            loss = output.metrics["loss:sum"] / (count * length)
            clock.say(f"chains, step {step}: loss {loss:.3f} and entropy {entropy:.3f} nats a token")
        if entropy < MAX_ENTROPY:
            trainer.discard_gradients().result()
            break
        params = OptimParams(learning_rate=rate * min(1, (step + 1) / 10), grad_divisor=float(count * length))
        trainer.optim_step(params).result()
    return entropy


def sample(generator: GeneratorClient, corpus: Chains, count: int, num_tokens: int) -> list[Sample]:
    """Sample completions of prompts from the corpus. The samples' advantages are arbitrary: -1 and 1 alternate."""
    prompts = corpus.ids(count, PROMPT_TOKENS).tolist()
    groups = generator.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_stop=True)).result()
    samples = []
    for i, (prompt, [completion]) in enumerate(zip(prompts, groups, strict=True)):
        advantage = 1.0 if i % 2 else -1.0
        samples.append(
            Sample.from_tokens(prompt, completion.tokens, old_logprobs=completion.logprobs, advantages=advantage)
        )
    return samples


def figures_of(samples: list[Sample], output: ForwardBackwardOutput, num_tokens: int) -> dict[str, Any]:
    """Compare both sides' logprobs of the completion tokens, which are the last num_tokens of each sample.

    output: the trainer's output for these samples, with entropies.
    """
    assert output.entropy is not None
    of_trainer = torch.stack([values[-num_tokens:] for values in output.logprobs])
    of_generator = torch.stack([one.columns["old_logprobs"][-num_tokens:] for one in samples])
    differences = (of_trainer - of_generator).abs()
    worst_sample, worst_position = divmod(int(differences.argmax()), num_tokens)
    return {
        "difference_mean": output.metrics["logprob_diff:mean"],
        "difference_max": output.metrics["logprob_diff:max"],
        "kl": output.metrics["kl_policy_generator:mean"],
        "entropy": float(torch.stack([values[-num_tokens:] for values in output.entropy]).mean()),
        "worst_token": int(samples[worst_sample].targets[worst_position - num_tokens]),
        "worst_at": [worst_sample, worst_position],
        "worst_trainer": float(of_trainer[worst_sample, worst_position]),
        "worst_generator": float(of_generator[worst_sample, worst_position]),
        "tokens": of_trainer.numel(),
    }


def parse() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=["fp8"], help="of the generator")
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument(
        "--steps",
        type=int,
        default=50 if on_gpu else 3,
        help="the last turn begins after at most this many optimizer steps",
    )
    parser.add_argument("--updates", type=int, default=2 if on_gpu else 1, help="optimizer steps per turn")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="begin no turn later than this many seconds after the start"
    )
    parser.add_argument("--sequences", type=int, default=64, help="completions per turn")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--teach", type=int, default=80, help="largest number of training steps on chains")
    parser.add_argument("--attention", default="flash4" if on_gpu else "flex", choices=["flex", "flash4"])
    parser.add_argument("--compile", action="store_true", help="compile the trainer's blocks, as the configs do")
    parser.add_argument(
        "--transport",
        default="files",
        choices=["files", "torchstore"],
        help="files: the weights go through files, which are in /dev/shm if there is room",
    )
    return parser.parse_args()


def main() -> None:
    clock = Clock()
    arguments = parse()
    from benchmarks.harness.random_weights import scratch, write

    with ExitStack() as stack:
        trainer_options, generator_options = configs_of(arguments.model, "", arguments.attention)
        model: ModelConfig = trainer_options.model
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch(model))))
        trainer_options.compile.enable = arguments.compile
        write(model, folder / "model")
        generator_options.quantization = arguments.quantization
        trainer_options.hf_path = generator_options.hf_path = str(folder / "model")
        clock.say("weights written")
        transport = FilesTransport(folder / "store") if arguments.transport == "files" else TorchStoreTransport()
        in_background(transport.open(), "store").result()
        stack.callback(close, transport)
        trainer = stack.enter_context(TrainerClient.spawn(trainer_options, transport=transport))
        generator = stack.enter_context(GeneratorClient.spawn(generator_options, transport=transport))
        corpus = Chains(min(CHAIN_TOKENS, model.vocab_size - 2))
        trainer.ready().result()
        clock.say("trainer up")
        teach(trainer, corpus, clock, on_gpu=torch.cuda.is_available(), most_steps=arguments.teach)
        version = trainer.push_model_state_dict().result()
        clock.say("pushed")
        generator.ready().result()
        clock.say("generator up")
        generator.pull_model_state_dict(version).result()
        take_turns(trainer, generator, corpus, clock, arguments)


def take_turns(
    trainer: TrainerClient, generator: GeneratorClient, corpus: Chains, clock: Clock, arguments: argparse.Namespace
) -> None:
    """Take all turns. Records a result for each turn, and a result with the worst figures of all turns."""
    lines: list[dict[str, Any]] = []
    seconds: list[list[float]] = []  # of each turn: sampling, training, push, pull
    for step in range(0, arguments.steps + 1, arguments.updates):
        if clock.seconds() > arguments.seconds:
            clock.say(f"stopped before step {step}, because more than {arguments.seconds:g} s have passed")
            break
        moments = [time.perf_counter()]
        samples = sample(generator, corpus, arguments.sequences, arguments.tokens)
        moments.append(time.perf_counter())
        output = trainer.forward(samples, loss=PPO(), entropy=True).result()
        lines.append(figures_of(samples, output, arguments.tokens))
        results.add("logprob_agreement", f"{arguments.model} step {step}", lines[-1] | {"second": clock.seconds()})
        for i in range(arguments.updates):
            part = samples[i :: arguments.updates]
            trainer.forward_backward(part, loss=PPO())
            params = OptimParams(learning_rate=arguments.learning_rate, grad_divisor=num_loss_tokens(part))
            version = trainer.optim_step(params).result().policy_version
        moments.append(time.perf_counter())
        trainer.push_model_state_dict().result()
        moments.append(time.perf_counter())
        generator.pull_model_state_dict(version).result()
        moments.append(time.perf_counter())
        seconds.append([end - start for start, end in itertools.pairwise(moments)])
    means = [line["difference_mean"] for line in lines]
    medians = [statistics.median(part_seconds) for part_seconds in zip(*seconds, strict=True)]
    summary = {
        "difference_mean": max(means),
        "kl": max(line["kl"] for line in lines),
        "difference_max": max(line["difference_max"] for line in lines),
        "first_turns": statistics.fmean(means[:5]),
        "last_turns": statistics.fmean(means[-5:]),
        "entropy": [min(line["entropy"] for line in lines), max(line["entropy"] for line in lines)],
        "turns": len(lines),
        "steps": arguments.updates * (len(lines) - 1),
        "sample_train_push_pull_seconds": [round(median, 3) for median in medians],
        "attention": arguments.attention,
        "compiled": arguments.compile,
    }
    summary["within"] = all(summary[name] < limit for name, limit in LIMITS.items())
    text = (
        f"mean difference {summary['difference_mean']:.1e}; worst token {summary['difference_max']:.1e}; KL {summary['kl']:.1e}; "
        f"entropy {summary['entropy'][0]:.2f} to {summary['entropy'][1]:.2f} nats; {summary['steps']} steps"
    )
    quantization = f", {arguments.quantization}," if arguments.quantization else ""
    results.add("logprob_agreement", f"{arguments.model}{quantization} worst of all steps", summary, text)


if __name__ == "__main__":
    main()
