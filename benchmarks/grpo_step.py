"""Times of the phases of a synchronous GRPO step, and how busy each GPU is in each phase.

The phases are generate, reward, samples, plan, forward_backward, optim_step, push and pull. In the phase samples the
completions become Samples, and in the phase plan the Samples are divided into microbatches. The phase step is the whole
step. With two or more GPUs the trainer has the first GPU and the generator has the second. With one GPU or none, trainer
and generator share one device. With the model tiny they always share one device.

The weights are random. The policy need not learn anything, so the reward is arbitrary: it is the parity of the sum of a
completion's token ids. nvidia-smi reports how busy a GPU is. A reading is the share of nvidia-smi's last sampling period
in which the GPU was busy.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import results
from benchmarks.harness.gpus import Watch
from configs.qwen3 import MODELS
from configs.qwen3 import trainer as trainer_config
from configs.tiny import tiny
from rl_actors import (
    PPO,
    ForwardBackwardOutput,
    GeneratorClient,
    GeneratorConfig,
    OptimParams,
    Sample,
    SamplingParams,
    TorchStoreTransport,
    TrainerClient,
    TrainerConfig,
    num_loss_tokens,
)
from rl_actors.clients.call import in_background
from rl_actors.engine.packing import Planner

GROUP = 16


class Phases:
    """Measures the times of named phases. Use it as `with phases("push"): …`"""

    def __init__(self) -> None:
        # {name of a phase: [(begin, end) of each run of the phase]}
        self.spans: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans.setdefault(name, []).append((start, time.perf_counter()))


def busy_shares(readings_of_spans: list[dict[int, list[float]]]) -> dict[str, float]:
    """The busy share of each GPU in a phase, as {"gpu0_busy": 0.96, …}.

    readings_of_spans: {GPU: [percent, …]} for every run of the phase. The readings of each run are averaged, and then these means are
    averaged. A long run of the phase has more readings than a short run, but counts no more.
    """
    means: dict[int, list[float]] = {}
    for readings in readings_of_spans:
        for gpu, percentages in readings.items():
            means.setdefault(gpu, []).append(statistics.fmean(percentages) / 100)
    return {f"gpu{gpu}_busy": statistics.fmean(means[gpu]) for gpu in sorted(means)}


def configs_of(name: str, num_gpus: int) -> tuple[TrainerConfig, GeneratorConfig, int, int]:
    """(config of the trainer, config of the generator, number of tokens of a prompt, number of tokens of a completion)."""
    if name == "tiny":
        model = replace(tiny().trainer.model, max_position_embeddings=512)
        trainer = TrainerConfig(model=model, max_sequence_length=256, tokens_per_row=512)
        return trainer, GeneratorConfig(model=model, max_model_len=256, max_num_seqs=64), 16, 32
    has_own_gpu = num_gpus > 1
    trainer = trainer_config(name, tokens_per_row=32_768 if has_own_gpu else 16_384)
    generator = GeneratorConfig(model=MODELS[name], dtype="bfloat16", max_model_len=2048, max_num_seqs=512)
    generator.gpu = min(1, num_gpus - 1)
    generator.gpu_memory_utilization = 0.8 if has_own_gpu else 0.35
    generator.setup_timeout = 600.0
    return trainer, generator, 128, 256


def timed_step(
    trainer: TrainerClient,
    generator: GeneratorClient,
    prompts: list[list[int]],
    phases: Phases,
    *,
    new_tokens: int,
    tokens_per_row: int,
) -> tuple[list[Sample], ForwardBackwardOutput]:
    """Take one GRPO step. Returns its samples and the output of forward_backward."""
    with phases("step"):
        with phases("generate"):
            params = SamplingParams(n=GROUP, max_tokens=new_tokens, ignore_stop=True)
            groups = generator.generate(prompts, params).result()
        with phases("reward"):
            rewards = []
            for group in groups:
                rewards.append([float(sum(completion.tokens) % 2) for completion in group])
        with phases("samples"):
            samples = []
            for prompt, group, group_rewards in zip(prompts, groups, rewards, strict=True):
                mean = statistics.fmean(group_rewards)
                for completion, reward in zip(group, group_rewards, strict=True):
                    samples.append(
                        Sample.from_tokens(
                            prompt, completion.tokens, old_logprobs=completion.logprobs, advantages=reward - mean
                        )
                    )
        with phases("plan"):  # only measures how long a plan takes; every rank makes its own plan in forward_backward
            lengths = [len(sample) for sample in samples]
            Planner(tokens_per_row=tokens_per_row, rows_per_microbatch=1, num_ranks=1).plan(lengths)
        with phases("forward_backward"):
            output = trainer.forward_backward(samples, loss=PPO(ratio_high=1.28)).result()
        with phases("optim_step"):
            step = OptimParams(learning_rate=1e-6, grad_divisor=num_loss_tokens(samples))
            version = trainer.optim_step(step).result().policy_version
        with phases("push"):
            trainer.push_model_state_dict().result()
        with phases("pull"):
            generator.pull_model_state_dict(version).result()
    return samples, output


def main() -> None:
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0_6b" if num_gpus else "tiny", choices=["tiny", *MODELS])
    parser.add_argument(
        "--groups",
        type=int,
        default=32 if num_gpus else 2,
        help=f"number of groups in a step; a group is {GROUP} completions of one prompt",
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps; one step of warm-up runs before them")
    arguments = parser.parse_args()
    trainer_options, generator_options, prompt_tokens, new_tokens = configs_of(arguments.model, num_gpus)
    busy = Watch("utilization.gpu")
    transport = TorchStoreTransport()
    in_background(transport.open(), "store").result()
    with ExitStack() as clients:
        trainer = clients.enter_context(TrainerClient.spawn(trainer_options, transport=transport))
        trainer.ready().result()  # The trainer allocates its memory first, because vLLM measures how much memory is free.
        generator = clients.enter_context(trainer.spawn_generator(generator_options))
        generator.ready().result()
        draw = torch.Generator().manual_seed(0)
        vocab_size = trainer_options.model.vocab_size
        for turn in range(arguments.steps + 1):
            if turn < 2:
                # Step 0 is the warm-up, and its times include compiling. So step 1 begins with an empty Phases.
                phases = Phases()
            prompts = torch.randint(2, vocab_size, (arguments.groups, prompt_tokens), generator=draw).tolist()
            samples, output = timed_step(
                trainer,
                generator,
                prompts,
                phases,
                new_tokens=new_tokens,
                tokens_per_row=trainer_options.tokens_per_row,
            )
            print(f"step {turn}: logprob_diff mean {output.metrics['logprob_diff:mean']:.2e}", flush=True)
    in_background(transport.close(), "store").result()
    busy.stop()
    step_seconds = statistics.median(end - start for start, end in phases.spans["step"])
    figures: dict[str, dict[str, Any]] = {}
    for name, spans in phases.spans.items():
        seconds = statistics.median(end - start for start, end in spans)
        figures[name] = {
            "seconds": seconds,
            "share": seconds / step_seconds,
            **busy_shares([busy.between(*span) for span in spans]),
            "tokens": len(samples) * (prompt_tokens + new_tokens),
            "gpus": num_gpus,
        }
    for name in figures:
        results.add("grpo_step", f"{arguments.model} {name}", figures[name], text(figures) if name == "step" else "")


def text(phases: dict[str, dict[str, Any]]) -> str:
    """Seconds of the step with the idle share of each GPU, and of each phase with the busy shares.

    phases: the figures of each phase. The trainer's GPU comes first.
    """
    parts = [f"step {phases['step']['seconds']:.3g} s{gpu_shares(phases['step'], idle=True)}"]
    parts += [f"{name} {phase['seconds']:.3g} s{gpu_shares(phase)}" for name, phase in phases.items() if name != "step"]
    return "; ".join(parts)


def gpu_shares(figures: dict[str, Any], *, idle: bool = False) -> str:
    """ " (GPUs busy 96% and 3%)"; "" for figures without GPUs."""
    busy = [figures[name] for name in sorted(figures) if name.endswith("_busy")]
    shares = " and ".join(f"{1 - share if idle else share:.0%}" for share in busy)
    return f" (GPUs {'idle' if idle else 'busy'} {shares})" if busy else ""


if __name__ == "__main__":
    main()
