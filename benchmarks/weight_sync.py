"""Measures how fast weights go from a trainer to a generator, compared with a plain copy of the same number of bytes in the same run.

On a machine without GPUs, one process writes a snapshot of the weights into shared memory, as a trainer's rank does.
Another process copies the snapshot into its own memory, as a worker of vLLM does. vLLM's own work on the weights is left
out. In each process one thread copies the tensors, as in a push. The snapshot is read in three ways: from shared
memory, over TCP, and by gloo's point-to-point messages. TCP and gloo use the loopback address.

For the plain copy all bytes are one tensor. The first process copies the tensor into shared memory, and the second
process copies it out. Each process copies with all its threads (--threads). Each round measures the plain copy and the
three ways once, so that a slow moment of the machine affects all of them.

With --actors the program also times a push by a real trainer and a pull by a real generator, as their callers see them,
and each phase of the push and the pull. On a machine with GPUs the program leaves out the three ways and their
plain copy, so without --actors it measures nothing there. On such a machine it also times two plain copies of the same
number of bytes, one in each direction, because push and pull together copy the bytes twice. If the weights came by
cuda_ipc, these copies are between the first GPU and the generator's GPU. Otherwise they are between the first GPU and
pinned memory.

With --path point_to_point --network, NCCL may use neither direct access between GPUs nor shared memory. So NCCL sends
the bytes over the network, as between hosts.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from monarch.actor import endpoint
from torch import Tensor

from benchmarks.harness import results
from configs import qwen3
from rl_actors import GeneratorClient, GeneratorConfig, ModelConfig, TrainerClient, TrainerConfig, WeightsConfig
from rl_actors.clients.call import in_background
from rl_actors.engine.hf import tensor_shapes
from rl_actors.policy_trainer import PolicyTrainer
from rl_actors.processes.spawn import spawn_processes
from rl_actors.processes.threads import one_thread
from rl_actors.transports.base import Manifest
from rl_actors.transports.index import default_transport
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.server import SlotServer
from rl_actors.transports.slots import Slot
from rl_actors.transports.snapshot import DoubleBuffer
from rl_actors.types import Transfer

TIMEOUT = 120.0  # seconds
ONLY_NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SECRET = b"benchmark"
# Gigabytes of a model's weights in bfloat16 -> (the model's number of transformer blocks, size of its vocabulary). The
# model's other dimensions are those of Qwen3 0.6B.
SIZES = {"0.1": (3, 8192), "0.5": (15, 8192), "1.2": (28, 151_936)}
PLAIN, SHARED_MEMORY, TCP, POINT_TO_POINT = "plain copy", "shared memory", "tcp", "point to point"
# Way in which the bytes are sent -> path (WeightsConfig.path) with which the reader opens a version.
PATHS = {PLAIN: "shared_memory", SHARED_MEMORY: "shared_memory", TCP: "tcp", POINT_TO_POINT: "point_to_point"}
WAYS = tuple(PATHS)


def model_of(size: str) -> ModelConfig:
    """The model of a key of SIZES, or of a name in qwen3.MODELS."""
    if size not in SIZES:
        return qwen3.MODELS[size]
    num_layers, vocab_size = SIZES[size]
    return replace(ModelConfig(), num_hidden_layers=num_layers, vocab_size=vocab_size, tie_word_embeddings=True)


class Writer:
    """Writes versions of the weights into slots, as one rank of a trainer does. A slot is a block of shared memory.

    A slot of the plain copy holds all bytes as one tensor. A slot of the other ways holds the tensors of the weights.
    """

    def __init__(self, flat: Tensor, weights: Mapping[str, Tensor]) -> None:
        self.tensors = {PLAIN: {"flat": flat}, SHARED_MEMORY: dict(weights)}
        self.snapshots = {way: DoubleBuffer(rank=0, timeout=TIMEOUT) for way in self.tensors}
        self.server = SlotServer(self.snapshots[SHARED_MEMORY].find, host="127.0.0.1", secret=SECRET, timeout=TIMEOUT)

    def write(self, way: str, version: int) -> tuple[float, Manifest]:
        """(seconds of the write, the manifest by which a reader finds the version)."""
        kind = PLAIN if way == PLAIN else SHARED_MEMORY
        tensors = self.tensors[kind]
        begin = time.perf_counter()
        key = f"{way}/{version}"
        slot = self.write_plain(key) if way == PLAIN else self.snapshots[kind].write(key, tensors, None)
        seconds = time.perf_counter() - begin
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        parts = (slot.address(self.server.address),)
        return seconds, Manifest(stream=way, version=version, tensors=shapes, parts=parts)

    def write_plain(self, key: str) -> Slot:
        """Write a version of the plain copy with all threads. DoubleBuffer.write uses one thread, so it is called only to make the two slots."""
        snapshot, tensors = self.snapshots[PLAIN], self.tensors[PLAIN]
        if len(snapshot.slots) < 2:
            return snapshot.write(key, tensors, None)
        [slot] = (slot for slot in snapshot.slots if slot is not snapshot.newest)
        with slot.writing(key, TIMEOUT):
            slot.views["flat"].copy_(tensors["flat"])
        snapshot.before, snapshot.newest = snapshot.newest, slot
        return slot


def read_versions(connection: Connection, num_threads: int) -> None:
    """Program of the reader's process. It receives manifests until it receives None.

    It copies the version of each manifest into its own memory, and sends back (seconds, {tensor: sum of the values}).
    """
    torch.set_num_threads(num_threads)
    kept: dict[str, Tensor] = {}  # memory of the reader, made at the first version
    while (manifest := connection.recv()) is not None:
        source = SlotSource(manifest=manifest, path=PATHS[manifest.stream], timeout=TIMEOUT, secret=SECRET)
        begin = time.perf_counter()
        with source.open() as version, nullcontext() if manifest.stream == PLAIN else one_thread():
            for name, tensor in version.tensors():
                if name not in kept:
                    kept[name] = torch.zeros_like(tensor)
                kept[name].copy_(tensor)
        seconds = time.perf_counter() - begin
        connection.send((seconds, {name: float(kept[name].sum(dtype=torch.float64)) for name in manifest.tensors}))


def measure_bytes(size: str, *, rounds: int, num_threads: int) -> None:
    """Print and record the GB/s of each way: bytes divided by the seconds of a write and a read together."""
    torch.set_num_threads(num_threads)
    shapes = tensor_shapes(model_of(size))
    counts = [torch.Size(shape).numel() for shape in shapes.values()]
    flat = torch.randn(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    pairs = zip(shapes.items(), flat.split(counts), strict=True)
    weights = {name: part.view(shape) for (name, shape), part in pairs}
    writer = Writer(flat, weights)
    here, there = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_versions, args=(there, num_threads), daemon=True)
    reader.start()
    writes: dict[str, list[float]] = defaultdict(list)
    reads: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 2):
        for way in WAYS:
            wrote, manifest = writer.write(way, turn)
            here.send(manifest)
            read, sums = here.recv()
            if turn > 1:  # the first two rounds allocate the slots
                writes[way].append(wrote)
                reads[way].append(read)
                continue
            tensors = writer.tensors[PLAIN if way == PLAIN else SHARED_MEMORY]
            assert sums == {name: float(tensor.sum(dtype=torch.float64)) for name, tensor in tensors.items()}, way
    here.send(None)
    reader.join()
    report_bytes(size, flat.nbytes, num_threads, writes, reads)


def report_bytes(
    size: str, num_bytes: int, num_threads: int, writes: Mapping[str, list[float]], reads: Mapping[str, list[float]]
) -> None:
    print(f"size {size}: {num_bytes / 1e9:.3f} GB, {num_threads} threads, {len(writes[PLAIN])} rounds", flush=True)
    seconds = {way: statistics.median(writes[way]) + statistics.median(reads[way]) for way in WAYS}
    for way in WAYS:
        figures = {
            "gb_per_second": num_bytes / 1e9 / seconds[way],
            "plain_gb_per_second": num_bytes / 1e9 / seconds[PLAIN],
            "ratio": seconds[PLAIN] / seconds[way],
            "write_seconds": statistics.median(writes[way]),
            "read_seconds": statistics.median(reads[way]),
            "bytes": num_bytes,
            "threads": num_threads,
        }
        print(
            f"  {way:<14} write {figures['write_seconds'] * 1e3:8.1f} ms, read {figures['read_seconds'] * 1e3:8.1f} ms, "
            f"{figures['gb_per_second']:6.2f} GB/s, {figures['ratio']:.2f} of the plain copy",
            flush=True,
        )
        if way != PLAIN:
            text = (
                f"{results.against(figures['gb_per_second'], figures['plain_gb_per_second'], 'GB/s', 2)}; "
                f"write {figures['write_seconds'] * 1e3:.0f} ms, read {figures['read_seconds'] * 1e3:.0f} ms"
            )
            results.add("weight_sync", f"{way}, {size} GB", figures, text)


class AgainTrainer(PolicyTrainer):
    """A trainer that can push the same version again, so that the rounds need no training steps."""

    @endpoint
    async def forget_pushes(self) -> None:
        assert self.publisher is not None
        self.publisher.start_stream()


def measure_actors(size: str, *, rounds: int, path: str, ranks: int, network: bool) -> None:
    """Print and record the seconds of a push and a pull between a real trainer and a real generator.

    On a machine with GPUs the trainer's ranks use the first GPUs, and the generator uses the next GPU. If no GPU is
    left, the generator shares the last GPU with a rank.
    """
    limits = {"max_sequence_length": 128, "tokens_per_row": 128}
    config = TrainerConfig(model=model_of(size), optimizer=None, **limits)
    config.parallelism.data_parallel_shard_degree = ranks
    num_gpus = torch.cuda.device_count()
    gpu = min(ranks, num_gpus - 1) if num_gpus else None
    generator_config = replace(
        GeneratorConfig.of(config),
        dtype="bfloat16",
        max_num_seqs=4,
        gpu=gpu,
        gpu_memory_utilization=0.3,
        kv_cache_bytes=256 << 20,  # so that vLLM need not measure the memory of a GPU that it shares
    )
    transport = default_transport(WeightsConfig(path=path))
    in_background(transport.open(), "transport").result()
    processes = in_background(spawn_processes("trainer", ranks), "trainer").result()
    mesh = processes.mesh.spawn("trainer", AgainTrainer, config, transport)
    try:
        with TrainerClient(mesh) as trainer:
            # When vLLM starts, it checks that enough memory of its GPU is free. If it shares the GPU with the trainer, the
            # check must count the trainer's memory, so the trainer allocates this memory first.
            trainer.ready().result()
            with GeneratorClient.spawn(generator_config, transport=transport) as generator:
                generator.ready().result()
                syncs = _syncs(trainer, generator, mesh, rounds)
    finally:
        in_background(processes.stop(), "trainer").result()
        in_background(transport.close(), "transport").result()
    pull = syncs[-1][3]
    plain = None if gpu is None else plain_seconds(pull.num_bytes, f"cuda:{gpu}" if pull.path == "cuda_ipc" else "cpu")
    report_actors(size, f"{path} by network" if network else path, ranks, syncs, plain)


def plain_seconds(num_bytes: int, device: str) -> float:
    """Seconds of a plain copy of num_bytes from the first GPU to another device and a plain copy back.

    The seconds are computed from copies of 1 GiB. device: the other device. "cpu" stands for pinned memory of the host.
    """
    here = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device, pin_memory=device == "cpu")
    num_rounds = 5
    for turn in range(num_rounds + 1):
        if turn == 1:  # the first round is not timed
            begin = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / num_rounds * num_bytes / len(here)


def _syncs(trainer, generator, mesh, rounds: int) -> list[tuple[float, float, Transfer, Transfer]]:
    """(seconds of the push, seconds of the pull, the push, the pull) of every round.

    The first two rounds are left out, because they allocate the slots.
    """
    found = []
    for turn in range(rounds + 2):
        mesh.forget_pushes.call().get()
        begin = time.perf_counter()
        version = trainer.push_model_state_dict().result()
        pushed = time.perf_counter()
        generator.pull_model_state_dict(version).result()
        pulled = time.perf_counter()
        if turn > 1:
            push, pull = trainer.info().result()[0].last_push, generator.info().result().last_pull
            found.append((pushed - begin, pulled - pushed, push, pull))
    return found


def report_actors(
    size: str, path: str, ranks: int, syncs: list[tuple[float, float, Transfer, Transfer]], plain: float | None
) -> None:
    """Print and record the figures of the pushes and pulls.

    path: the path of the weights, as the flags name it. plain: seconds of two plain copies, each of as many bytes as a
    pull copies, or None if these copies were not timed.
    """
    _, _, push, pull = syncs[-1]
    figures: dict[str, Any] = {
        "path": pull.path,
        "reason": pull.reason,
        "bytes": pull.num_bytes,
        "ranks": ranks,
    }
    figures["push_seconds"] = statistics.median(seconds for seconds, _, _, _ in syncs)
    figures["pull_seconds"] = statistics.median(seconds for _, seconds, _, _ in syncs)
    figures["seconds"] = statistics.median(pushed + pulled for pushed, pulled, _, _ in syncs)
    if plain is not None:
        figures["plain_seconds"] = plain
    for phase in push.phases:
        figures[f"{phase}_seconds"] = statistics.median(push.phases[phase] for _, _, push, _ in syncs)
    for phase in pull.phases:
        figures[f"{phase}_seconds"] = statistics.median(pull.phases[phase] for _, _, _, pull in syncs)
    parts = ", ".join(f"{name} {value * 1e3:,.1f} ms" for name, value in figures.items() if name.endswith("seconds"))
    print(f"{size}, {ranks} ranks, {pull.path} ({pull.reason}): {parts}", flush=True)
    text = f"push {figures['push_seconds'] * 1e3:.0f} ms, pull {figures['pull_seconds'] * 1e3:.0f} ms by {pull.path}"
    results.add("weight_sync", f"push and pull, {size}, {ranks} ranks, {path}", figures, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=list(SIZES),
        help="gigabytes (0.1, 0.5, 1.2), or models of configs.qwen3 (such as 0_6b, 4b, 8b)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds that are timed")
    parser.add_argument("--threads", type=int, default=2, help="threads of each of the two processes")
    parser.add_argument("--actors", action="store_true", help="measure a real trainer and a real generator, too")
    parser.add_argument("--path", default="auto", help="weights.path of the actors")
    parser.add_argument("--network", action="store_true", help="let NCCL use only the network, as between hosts")
    parser.add_argument(
        "--ranks", type=int, default=1, help="ranks of the trainer, among which FSDP divides the weights"
    )
    arguments = parser.parse_args()
    if arguments.network:
        os.environ.update(ONLY_NETWORK)  # the actors inherit these variables
    for size in arguments.sizes:
        if not torch.cuda.is_available():
            measure_bytes(size, rounds=arguments.rounds, num_threads=arguments.threads)
        if arguments.actors:
            measure_actors(
                size, rounds=arguments.rounds, path=arguments.path, ranks=arguments.ranks, network=arguments.network
            )


if __name__ == "__main__":
    main()
