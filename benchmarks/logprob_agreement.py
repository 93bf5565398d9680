"""How far the generator's logprobs are from the trainer's in bfloat16, at random weights sharpened to one or two nats, over steps.

After every optimizer step the weights are pushed and pulled, the generator samples, and the trainer's forward says how likely it
finds each token: mean and largest difference, the k3 estimate of the KL divergence, the entropy.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.random_weights import write
from configs.qwen3 import MODELS
from configs.qwen3 import trainer as trainer_config
from configs.tiny import tiny
from rl_actors import (
    PPO,
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
from rl_actors.calls import in_background


def configs_of(name: str, directory: str) -> tuple[TrainerConfig, GeneratorConfig]:
    if name == "tiny":
        model = replace(tiny().trainer.model, max_position_embeddings=512)
        trainer = TrainerConfig(model=model, hf_path=directory, max_sequence_length=256, tokens_per_row=256)
        return trainer, GeneratorConfig(model=model, max_model_len=256, max_num_seqs=64)
    trainer = replace(trainer_config(name, tokens_per_row=8192), hf_path=directory, max_sequence_length=2048)
    generator = GeneratorConfig(model=MODELS[name], dtype="bfloat16", max_model_len=2048, max_num_seqs=64)
    generator.gpu_memory_utilization, generator.setup_timeout = 0.35, 600.0
    return trainer, generator


def measure(
    trainer: TrainerClient, generator: GeneratorClient, model: ModelConfig, turn: int, num_tokens: int
) -> tuple[list[Sample], dict[str, float]]:
    """What the trainer says of 64 sequences that the generator sampled, and these."""
    draw = torch.Generator().manual_seed(turn)
    prompts = torch.randint(2, model.vocab_size, (64, 32), generator=draw).tolist()
    groups = generator.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_stop=True)).result()
    samples = [
        Sample.from_tokens(prompt, c.tokens, old_logprobs=c.logprobs, advantages=1.0 if i % 2 else -1.0)
        for i, (prompt, (c,)) in enumerate(zip(prompts, groups, strict=True))
    ]
    output = trainer.forward(samples, loss=PPO(), entropy=True).result()
    assert output.entropy is not None
    figures = {
        "difference_mean": output.metrics["logprob_diff:mean"],
        "difference_max": output.metrics["logprob_diff:max"],
        "kl": output.metrics["kl_policy_generator:mean"],
        "entropy": float(torch.cat([values[-num_tokens:] for values in output.entropy]).mean()),
        "tokens": 64 * num_tokens,
    }
    return samples, figures


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0_6b" if on_gpu else "tiny", choices=["tiny", *MODELS])
    parser.add_argument("--scale", type=float, default=15.0 if on_gpu else 3.0, help="of the logits")
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 2, help="optimizer steps")
    parser.add_argument("--tokens", type=int, default=256 if on_gpu else 64, help="new tokens of each of 64 sequences")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    arguments = parser.parse_args()
    model = MODELS[arguments.model] if arguments.model in MODELS else configs_of("tiny", "")[0].model
    with tempfile.TemporaryDirectory() as folder:
        write(model, Path(folder) / "model", scale=arguments.scale)
        trainer_options, generator_options = configs_of(arguments.model, str(Path(folder) / "model"))
        transport = TorchStoreTransport(dtype=getattr(torch, generator_options.dtype))
        in_background(transport.open(), "store").result()
        with TrainerClient.spawn(trainer_options, transport=transport) as trainer:
            trainer.ready().result()  # first: vLLM measures the memory that is left
            with trainer.spawn_generator(generator_options) as generator:
                follow(trainer, generator, model, arguments)
        in_background(transport.close(), "store").result()


def follow(trainer: TrainerClient, generator: GeneratorClient, model: ModelConfig, arguments) -> None:
    worst = dict.fromkeys(("difference_mean", "difference_max", "kl"), 0.0)  # of the steps until then
    for turn in range(arguments.steps + 1):
        samples, figures = measure(trainer, generator, model, turn, arguments.tokens)
        worst = {
            name: float(torch.tensor([value, figures[name]]).max()) for name, value in worst.items()
        }  # keeps a NaN
        figures |= {f"worst_{name}": value for name, value in worst.items()}
        results.add("logprob_agreement", f"{arguments.model} step {turn}", figures)
        if turn == arguments.steps:
            break
        trainer.forward_backward(samples, loss=PPO())
        params = OptimParams(learning_rate=arguments.learning_rate, grad_divisor=num_loss_tokens(samples))
        version = trainer.optim_step(params).result().policy_version
        trainer.push_model_state_dict().result()
        generator.pull_model_state_dict(version).result()


if __name__ == "__main__":
    main()
