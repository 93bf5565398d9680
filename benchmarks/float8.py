"""Loss curves over 100 steps in float8, in bfloat16 and in float32, from the same weights on the same samples: how far apart they are.

The corpus is benchmarks/chains.py's. float8 has one scale a tensor, as TrainerConfig(float8=True) has it, and once one a row; a CPU
emulates both at a tiny shape. They run side by side on the GPUs that there are; a picture lies beside the figures.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import chains
from benchmarks.chains import Chains
from benchmarks.harness import results
from benchmarks.harness.ranks import Job, Ranks
from rl_actors import ModelConfig, OptimParams, TrainerConfig

CURVES = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float8": {"compute_dtype": "bfloat16", "float8": True},
    "float8 rowwise": {"compute_dtype": "bfloat16", "float8": True, "float8_recipe": "rowwise"},
}
WARMUP_STEPS = 10


def config_here() -> tuple[TrainerConfig, int, int, int]:
    """(config, documents of a step, positions of each, tokens of the corpus): Qwen3-0.6B's width in four blocks; tiny on a CPU."""
    if torch.cuda.is_available():
        model = ModelConfig(vocab_size=4096, num_hidden_layers=4)
        config = TrainerConfig(model=model, max_sequence_length=512, tokens_per_row=4096, logprob_chunk_tokens=4096)
        config.compile.enable = True
        return config, 16, 512, 64
    model = ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return TrainerConfig(model=model, max_sequence_length=64, tokens_per_row=512), 8, 64, 16


def curve(name: str, directory: str, num_steps: int, learning_rate: float) -> dict:
    """{"losses": mean nats a token before each step, "grad_norms": …, "seconds": …}"""
    from rl_actors.engine.train_engine import TrainEngine

    config, count, length, num_tokens = config_here()
    start = time.perf_counter()
    engine = TrainEngine(replace(config, hf_path=directory, **CURVES[name]))
    corpus = Chains(num_tokens)
    losses, grad_norms = [], []
    for turn in range(num_steps):
        output = engine.forward_backward(corpus.samples(count, length), "cross_entropy")
        rate = learning_rate * min(1.0, (turn + 1) / WARMUP_STEPS)
        params = OptimParams(learning_rate=rate, grad_divisor=float(count * length))
        grad_norms.append(engine.optim_step(params).grad_norm)
        losses.append(float(output.metrics["loss:sum"]) / (count * length))
        if turn % 10 == 9 or turn == 0:
            print(f"{name}, step {turn + 1}: {losses[-1]:.4f} after {time.perf_counter() - start:.1f} s", flush=True)
    return {"losses": losses, "grad_norms": grad_norms, "seconds": time.perf_counter() - start}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, losses in curves.items():
        left.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.2)
        if name != "bfloat16" and "bfloat16" in curves:
            apart = [a - b for a, b in zip(losses, curves["bfloat16"], strict=True)]
            right.plot(range(1, len(apart) + 1), apart, label=f"{name} - bfloat16", linewidth=1.2)
    left.axhline(chains.ENTROPY, color="gray", linewidth=0.8, linestyle=":", label="entropy of the corpus")
    for axes, title in ((left, "loss, nats a token"), (right, "difference to bfloat16")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3 if on_gpu else 1e-2)
    arguments = parser.parse_args()
    began = time.perf_counter()
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Ranks(len(CURVES) if on_gpu else 2) as ranks:
        from benchmarks.harness.random_weights import write  # imports while the ranks do

        directory = f"{folder}/model"
        write(config_here()[0].model, Path(directory))
        given = (directory, arguments.steps, arguments.learning_rate)
        jobs = [Job(name=name, work=curve, arguments=(name, *given)) for name in reversed(CURVES)]
        for job, answers, error in ranks.run(jobs):
            print(f"[{time.perf_counter() - began:5.1f} s] {job.name}: {error or 'done'}", flush=True)
            if not error:
                (answer,) = answers
                curves[job.name] = answer["losses"]
                rounded = {name: [round(x, 6) for x in answer[name]] for name in ("losses", "grad_norms")}
                figures = {"first": answer["losses"][0], "last": answer["losses"][-1], "seconds": answer["seconds"]}
                results.add("float8", job.name, {**figures, "entropy_of_corpus": chains.ENTROPY, **rounded})
    if "bfloat16" not in curves or "float8" not in curves:
        raise SystemExit("a curve is missing")
    for name in curves.keys() - {"bfloat16"}:
        apart = [abs(a - b) for a, b in zip(curves[name], curves["bfloat16"], strict=True)]
        worst = max(range(len(apart)), key=apart.__getitem__)
        last = {"final": curves[name][-1], "final_bfloat16": curves["bfloat16"][-1]}
        tail = {"mean_difference_of_last_20": sum(apart[-20:]) / len(apart[-20:])}
        figures = {**last, "largest_difference": apart[worst], "at_step": worst + 1, **tail}
        results.add("float8", f"{name} against bfloat16", figures)
    draw(curves, results.FOLDER / "float8.png")


if __name__ == "__main__":
    main()
