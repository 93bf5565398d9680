"""Weights from a trainer on a GPU to a generator on a GPU: by CUDA IPC, through pinned memory, and over TCP."""

import multiprocessing
import os

import pytest
import torch

from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    IndexTransport,
    ModelConfig,
    OptimParams,
    Sample,
    SamplingParams,
    TrainerClient,
    TrainerConfig,
    WeightsConfig,
)
from rl_actors.clients.call import in_background
from rl_actors.transports.base import Manifest
from rl_actors.transports.placement import Place
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.snapshot import Snapshot

pytestmark = pytest.mark.gpu

TIMEOUT = 120.0
SHAPES = {"w": (1000, 333), "v": (77,)}


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version), device="cuda") for name, shape in SHAPES.items()}


def write_versions(pipe, place: Place) -> None:
    """A rank with weights on its GPU."""
    snapshot = Snapshot(rank=0, timeout=TIMEOUT, choose_place=lambda num_bytes, device: place)
    version = 0
    while pipe.recv():
        version += 1
        snapshot.write(f"s/{version}", tensors_of(version), torch.bfloat16)
        shapes = {name: (shape, torch.bfloat16) for name, shape in SHAPES.items()}
        pipe.send(Manifest(stream="s", version=version, tensors=shapes, parts=(snapshot.newest.address(None),)))


@pytest.mark.parametrize(
    "place, path",
    [
        (Place(on_gpu=True), "cuda_ipc"),
        (Place(on_gpu=True, num_slots=1), "cuda_ipc"),
        (Place(pinned=True), "shared_memory"),
    ],
    ids=["two slots on the GPU", "one slot on the GPU", "pinned"],
)
def test_a_process_reads_the_slots_of_another_ones_gpu_and_nothing_is_left_behind(place, path):
    torch.zeros(1, device="cuda")  # a reader on a GPU pins what it maps
    before = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    writer = context.Process(target=write_versions, args=(there, place), daemon=True)
    writer.start()
    try:
        for version in range(1, 6):
            here.send(True)
            manifest = here.recv()
            with SlotSource(manifest=manifest, path="auto", timeout=TIMEOUT).open() as opened:
                assert opened.path == path
                for name, pieces in opened.pieces():
                    [piece] = pieces
                    assert piece.values.is_cuda == place.on_gpu
                    on_device = torch.empty(SHAPES[name], dtype=torch.bfloat16, device="cuda")
                    on_device.copy_(piece.values, non_blocking=True)
                    torch.cuda.synchronize()
                    assert (on_device == version).all()
        # A version that is open stays whole when its trainer dies.
        here.send(True)
        with SlotSource(manifest=here.recv(), path="auto", timeout=TIMEOUT).open() as opened:
            writer.kill()
            writer.join()
            for _, [piece] in opened.pieces():
                assert (piece.values.cpu() == 6).all()
    finally:
        writer.kill()
        writer.join()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("torch_", "cuda"))}


MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
)


@pytest.mark.parametrize(
    "path, taken", [("auto", "cuda_ipc"), ("cuda_ipc", "cuda_ipc"), ("shared_memory",) * 2, ("tcp",) * 2]
)
def test_a_generator_on_a_gpu_gets_the_trainers_weights_by_every_path(path, taken):
    transport = IndexTransport(WeightsConfig(path=path))
    in_background(transport.open(), "transport").result()
    config = TrainerConfig(model=MODEL, max_sequence_length=128, tokens_per_row=256)
    generator_config = GeneratorConfig(model=MODEL, max_model_len=128, max_num_seqs=8, kv_cache_bytes=64 << 20)
    sequence = list(range(5, 60))
    sample = Sample.from_tokens(sequence[:1], sequence[1:])
    try:
        with (
            TrainerClient.spawn(config, transport=transport) as trainer,
            GeneratorClient.spawn(generator_config, transport=transport) as generator,
        ):
            for _ in range(4):
                trainer.forward_backward([sample], loss="cross_entropy").result()
                version = (
                    trainer.optim_step(OptimParams(learning_rate=1e-2, grad_divisor=len(sample)))
                    .result()
                    .policy_version
                )
                assert trainer.push_model_state_dict().result() == version
                generator.pull_model_state_dict(version).result()
                [expected] = trainer.forward([sample]).result().logprobs
                [found] = generator.compute_logprobs([sequence]).result()
                assert (found - expected).abs().max() < 1e-2
                [[completion]] = generator.generate([sequence[:8]], SamplingParams(max_tokens=4)).result()
                assert completion.policy_versions == [version] * 4
            pull = generator.info().result().last_pull
            assert pull.path == taken, pull
            print(path, pull, trainer.info().result()[0].last_push)
    finally:
        in_background(transport.close(), "transport").result()
