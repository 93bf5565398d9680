"""Measures the loss of each training step in float8, bfloat16 and float32, and how far the float8 and float32 losses are from those in bfloat16.

There are four loss curves over --steps steps (default 100). All curves start from the same weights and train on the same samples, which
are random chains of tokens, in which every token has BRANCHES equally likely successors.
Two curves are in float8. The first has a scale for each tensor, which is the default of
TrainerConfig(float8=True). The second has a scale for each row.
On GPUs all four curves are computed at the same time, each on one GPU. If there are fewer than four GPUs, several curves share a GPU.
On a CPU, torchao emulates float8, the model is tiny, and two curves are computed at a time. float8.png in the folder of the results shows
the curves.
"""

import argparse
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import results
from benchmarks.harness.ranks import Job, Ranks
from rl_actors import ModelConfig, OptimParams, Sample, TrainerConfig

CURVES = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "float8": {"compute_dtype": "bfloat16", "float8": True},
    "float8 rowwise": {"compute_dtype": "bfloat16", "float8": True, "float8_recipe": "rowwise"},
}
"""Name of a curve -> fields of its TrainerConfig."""
WARMUP_STEPS = 10
TAIL = 20  # number of last steps over which the difference of two curves is averaged


BRANCHES = 4
ENTROPY = math.log(BRANCHES)  # nats a token
FIRST_ID = 2


class Chains:
    """A source of chains. Two sources with the same arguments give the same chains in the same order."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        """The tokens are the ids from FIRST_ID to FIRST_ID + num_tokens - 1."""
        self.draw = torch.Generator().manual_seed(seed)
        self.num_tokens = num_tokens
        # Row i of `successors` has the successors of token i. Each column is a cyclic shift of the same permutation. So a token's successors are
        # distinct, and all tokens are equally frequent.
        order = torch.randperm(num_tokens, generator=self.draw)
        self.successors = torch.stack([order.roll(shift) for shift in range(BRANCHES)], dim=1)

    def ids(self, count: int, length: int) -> torch.Tensor:
        """New chains as ids, in a tensor of shape [count, length]."""
        last = torch.randint(self.num_tokens, (count,), generator=self.draw)
        columns = [last]
        for _ in range(length - 1):
            last = self.successors[last, torch.randint(BRANCHES, (count,), generator=self.draw)]
            columns.append(last)
        return FIRST_ID + torch.stack(columns, dim=1)

    def samples(self, count: int, length: int) -> list[Sample]:
        """New chains as samples of `length` positions. All positions count in the loss."""
        ones = torch.ones(length)
        made = []
        for ids in self.ids(count, length + 1):
            made.append(Sample(tokens=ids[:-1], targets=ids[1:].clone(), columns={"loss_weights": ones}))
        return made


def config_here() -> tuple[TrainerConfig, int, int, int]:
    """The config and three numbers: documents in a step, positions in a document, and distinct tokens in the corpus.

    On a GPU the model has four blocks of Qwen3-0.6B's width. On a CPU the model is tiny.
    """
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
    """Train from the weights in `directory`, and return {"losses": […], "grad_norms": […], "seconds": …}.

    The losses are in nats a token. The loss of a step is computed before the step changes the weights. The seconds are the time
    from the start of the engine to the end of the last step.
    """
    from rl_actors.engine.train_engine import TrainEngine

    config, count, length, num_tokens = config_here()
    start = time.perf_counter()
    engine = TrainEngine(replace(config, hf_path=directory, **CURVES[name]))
    corpus = Chains(num_tokens)
    losses, grad_norms = [], []
    for step in range(1, num_steps + 1):
        output = engine.forward_backward(corpus.samples(count, length), "cross_entropy")
        rate = learning_rate * min(1.0, step / WARMUP_STEPS)
        params = OptimParams(learning_rate=rate, grad_divisor=float(count * length))
        grad_norms.append(engine.optim_step(params).grad_norm)
        losses.append(float(output.metrics["loss:sum"]) / (count * length))
        if step % 10 == 0 or step == 1:
            print(f"{name}, step {step}: {losses[-1]:.4f} after {time.perf_counter() - start:.1f} s", flush=True)
    return {"losses": losses, "grad_norms": grad_norms, "seconds": time.perf_counter() - start}


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Write a picture of the losses, and of their differences from the losses in bfloat16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, losses in curves.items():
        left.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.2)
        if name != "bfloat16" and "bfloat16" in curves:
            apart = [a - b for a, b in zip(losses, curves["bfloat16"], strict=True)]
            right.plot(range(1, len(apart) + 1), apart, label=f"{name} - bfloat16", linewidth=1.2)
    left.axhline(ENTROPY, color="gray", linewidth=0.8, linestyle=":", label="entropy of the corpus")
    for axes, title in ((left, "loss, nats a token"), (right, "difference to bfloat16")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def record_curve(name: str, answer: dict) -> None:
    losses = answer["losses"]
    figures = {
        "first": losses[0],
        "last": losses[-1],
        "seconds": answer["seconds"],
        "entropy_of_corpus": ENTROPY,
        "losses": [round(loss, 6) for loss in losses],
        "grad_norms": [round(norm, 6) for norm in answer["grad_norms"]],
    }
    results.add("float8", name, figures)


def record_difference(name: str, losses: list[float], expected: list[float]) -> None:
    """Record the differences between the losses of a curve and `expected`, the losses of the bfloat16 curve."""
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    largest = max(differences)
    tail = differences[-TAIL:]
    figures = {
        "final": losses[-1],
        "final_bfloat16": expected[-1],
        "largest_difference": largest,
        "at_step": differences.index(largest) + 1,
        f"mean_difference_of_last_{TAIL}": sum(tail) / len(tail),
    }
    text = f"last loss {losses[-1]:.4f} against {expected[-1]:.4f}; largest difference {largest:.4f} at step {figures['at_step']}"
    results.add("float8", f"{name} against bfloat16", figures, text)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3 if on_gpu else 1e-2)
    arguments = parser.parse_args()
    began = time.perf_counter()
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Ranks(len(CURVES) if on_gpu else 2) as ranks:
        # This slow import comes after the ranks have started, so that it overlaps with their own imports.
        from benchmarks.harness.random_weights import write

        directory = f"{folder}/model"
        write(config_here()[0].model, Path(directory))
        options = (directory, arguments.steps, arguments.learning_rate)
        jobs = [Job(name=name, work=curve, arguments=(name, *options)) for name in reversed(CURVES)]
        for job, answers, error in ranks.run(jobs):
            print(f"[{time.perf_counter() - began:5.1f} s] {job.name}: {error or 'done'}", flush=True)
            if not error:
                (answer,) = answers
                curves[job.name] = answer["losses"]
                record_curve(job.name, answer)
    if "bfloat16" not in curves or "float8" not in curves:
        raise SystemExit("the curve of bfloat16 or of float8 is missing, so there is nothing to compare")
    for name in curves.keys() - {"bfloat16"}:
        record_difference(name, curves[name], curves["bfloat16"])
    draw(curves, results.FOLDER / "float8.png")


if __name__ == "__main__":
    main()
