"""Measure how the peak memory of forward_backward grows with the tokens of a call. The vocabulary has 151,936 tokens, ModelConfig's default.

One series of measurements computes the logits in chunks, and the other series computes all logits at once. Every measurement runs in a new
process, so that it does not start with the memory of an earlier measurement. A least-squares line of memory over tokens is fitted to each
series, and the slope of each line is printed.
"""

import argparse
import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

from rl_actors import PPO, ModelConfig, OptimParams, Sample, TrainerConfig

ROW = 1024  # positions of a row; one sample fills a row
CHUNKED, WHOLE = (4096, 8192, 16384), (1024, 2048, 4096)  # tokens of the measured calls, for each series


def peak(num_tokens: int, chunk_tokens: int, answer: Connection) -> None:
    """Make an engine and train one step. Then call forward_backward with num_tokens positions in one microbatch. Send the peak memory during
    this call minus the memory before this call, in bytes.

    answer: the end of a pipe into which the number is sent.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from rl_actors.engine.train_engine import TrainEngine

    model = ModelConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    model.num_key_value_heads, model.head_dim = 2, 32
    engine = TrainEngine(
        TrainerConfig(
            model=model,
            max_sequence_length=ROW,
            tokens_per_row=ROW,
            rows_per_microbatch=num_tokens // ROW,
            logprob_chunk_tokens=chunk_tokens,
        )
    )
    draw = torch.Generator().manual_seed(0)

    def samples(count: int) -> list[Sample]:
        made = []
        for _ in range(count):
            first, *others = torch.randint(model.vocab_size, (1 + ROW,), generator=draw).tolist()
            made.append(Sample.from_tokens([first], others, old_logprobs=-12.0, advantages=1.0))
        return made

    # The first step creates the optimizer's state, so that it is part of the memory before the measured call.
    engine.forward_backward(samples(1), PPO())
    engine.optim_step(OptimParams(learning_rate=1e-4, grad_divisor=ROW))
    batch = samples(num_tokens // ROW)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.forward_backward(batch, PPO())
        answer.send(torch.cuda.max_memory_allocated() - before)
    else:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # resets VmHWM, the peak of VmRSS
        before = _status("VmRSS")
        engine.forward_backward(batch, PPO())
        answer.send(_status("VmHWM") - before)
    torch.distributed.destroy_process_group()


def _status(name: str) -> int:
    """The value of a line of /proc/self/status, in bytes. The kernel writes the value in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def measure(num_tokens: int, chunk_tokens: int) -> int:
    """Run `peak` in a new process, and return the number that it sends. Exits if the process fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=peak, args=(num_tokens, chunk_tokens, sender))
    child.start()
    sender.close()
    try:
        value = receiver.recv()
    except EOFError:
        child.join()
        raise SystemExit(
            f"the measurement of {num_tokens} tokens in chunks of {chunk_tokens} has failed: exit status {child.exitcode}"
        ) from None
    child.join()
    return value


def slope(points: dict[int, int]) -> float:
    """Bytes per token: the slope of the least-squares line through the points. points: number of tokens of a call -> bytes."""
    x = torch.tensor(list(points.keys()), dtype=torch.float64)
    y = torch.tensor(list(points.values()), dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--chunk-tokens", type=int, default=1024, help="number of positions in a chunk, for the series with chunks"
    )
    chunk = parser.parse_args().chunk_tokens
    slopes = []
    for name, sizes in (("chunked", CHUNKED), ("whole", WHOLE)):
        points = {}
        for num_tokens in sizes:
            points[num_tokens] = measure(num_tokens, chunk if name == "chunked" else num_tokens)
            print(f"{name:<8} {num_tokens:>6,} tokens: {points[num_tokens] / 2**20:>8,.0f} MiB", flush=True)
        slopes.append(slope(points))
        print(f"{name:<8} {slopes[-1] / 2**10:,.1f} KiB a token", flush=True)
    print(f"ratio of the slopes, chunked to whole: {slopes[0] / slopes[1]:.3f}")


if __name__ == "__main__":
    main()
