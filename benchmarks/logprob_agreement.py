"""Differences of the generator's logprobs to the trainer's in bfloat16, at one to two nats a token, over many steps.

Random weights are first trained on chains (benchmarks/chains.py) until they are that sure. Scaling them up instead would also scale the
rounding error of every logit. Then one turn is: the generator samples; the trainer's forward gives its logprobs of the same tokens, from
which come mean and largest difference, the k3 estimate of the KL divergence, the entropy and the worst token; optimizer steps; push; pull.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.chains import Chains
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

LIMITS = {"difference_mean": 0.02, "kl": 1e-3}
SURE_ENOUGH = 1.9  # nats a token at which the training on chains ends
CHAIN_TOKENS = 16
PROMPT_TOKENS = 32


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
    # Trainer and generator start at the same time, so vLLM cannot measure how much memory is left.
    generator.gpu, generator.gpu_memory_utilization = min(1, torch.cuda.device_count() - 1), 0.3
    generator.kv_cache_bytes, generator.setup_timeout = 8 << 30, 600.0
    return trainer, generator


def close(transport: Transport) -> None:
    in_background(transport.close(), "store").result()


def teach(trainer: TrainerClient, corpus: Chains, clock: Clock, *, on_gpu: bool, most_steps: int) -> float:
    """Train on chains until the policy is sure enough. Returns its entropy in nats a token."""
    count, length, rate = (16, 512, 1e-3) if on_gpu else (16, 64, 1e-2)
    entropy = float("inf")
    for turn in range(most_steps):
        output = trainer.forward_backward(corpus.samples(count, length), loss="cross_entropy", entropy=True).result()
        entropy = float(torch.cat(output.entropy).mean())
        if turn % 5 == 0 or entropy < SURE_ENOUGH:
            loss = output.metrics["loss:sum"] / (count * length)
            clock.say(f"chains, step {turn}: {loss:.3f} nats a token, entropy {entropy:.3f}")
        if entropy < SURE_ENOUGH:
            trainer.discard_gradients().result()
            break
        params = OptimParams(learning_rate=rate * min(1, (turn + 1) / 10), grad_divisor=float(count * length))
        trainer.optim_step(params).result()
    return entropy


def sample(generator: GeneratorClient, corpus: Chains, count: int, num_tokens: int) -> list[Sample]:
    """Completions of prompts from the corpus, with an arbitrary advantage of 1 or -1."""
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
    """Differences over the completions' tokens. The output must have entropies."""
    assert output.entropy is not None
    mine = torch.stack([values[-num_tokens:] for values in output.logprobs])
    known = torch.stack([one.columns["old_logprobs"][-num_tokens:] for one in samples])
    differences = (mine - known).abs()
    row, column = divmod(int(differences.argmax()), num_tokens)
    return {
        "difference_mean": output.metrics["logprob_diff:mean"],
        "difference_max": output.metrics["logprob_diff:max"],
        "kl": output.metrics["kl_policy_generator:mean"],
        "entropy": float(torch.stack([values[-num_tokens:] for values in output.entropy]).mean()),
        "worst_token": int(samples[row].targets[column - num_tokens]),
        "worst_at": [row, column],
        "worst_trainer": float(mine[row, column]),
        "worst_generator": float(known[row, column]),
        "tokens": mine.numel(),
    }


def main() -> None:
    clock = Clock()
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--steps", type=int, default=50 if on_gpu else 3, help="optimizer steps of all turns")
    parser.add_argument("--updates", type=int, default=2 if on_gpu else 1, help="optimizer steps of a turn")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no turn after these")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--teach", type=int, default=80, help="most steps on chains")
    parser.add_argument("--attention", default="flash4" if on_gpu else "flex", choices=["flex", "flash4"])
    parser.add_argument("--compile", action="store_true", help="compile the trainer's blocks, as the configs do")
    parser.add_argument(
        "--transport", default="files", choices=["files", "torchstore"], help="files are kept in shared memory"
    )
    arguments = parser.parse_args()
    from benchmarks.harness.random_weights import scratch, write

    with ExitStack() as stack:
        trainer_options, generator_options = configs_of(arguments.model, "", arguments.attention)
        model: ModelConfig = trainer_options.model
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch(model))))
        trainer_options.compile.enable = arguments.compile
        write(model, folder / "model")
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
        teach(trainer, corpus, clock, on_gpu=on_gpu, most_steps=arguments.teach)
        version = trainer.push_model_state_dict().result()
        clock.say("pushed")
        generator.ready().result()
        clock.say("generator up")
        generator.pull_model_state_dict(version).result()
        follow(trainer, generator, corpus, clock, arguments)


def follow(
    trainer: TrainerClient, generator: GeneratorClient, corpus: Chains, clock: Clock, arguments: argparse.Namespace
) -> None:
    """Take the turns. Keeps a line for each, and one with the worst of all."""
    lines: list[dict[str, Any]] = []
    seconds: list[list[float]] = []  # of every turn: sampling, training, push, pull
    for step in range(0, arguments.steps + 1, arguments.updates):
        if clock.seconds() > arguments.seconds:
            clock.say(f"{arguments.seconds:g} s are over before step {step}")
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
        seconds.append([b - a for a, b in zip(moments, moments[1:], strict=False)])
    means = [line["difference_mean"] for line in lines]
    medians = [statistics.median(of_part) for of_part in zip(*seconds, strict=True)]
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
    results.add("logprob_agreement", f"{arguments.model} worst of all steps", summary)


if __name__ == "__main__":
    main()
