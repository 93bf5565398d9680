"""Transfers of weights from a trainer on a GPU to a generator on a GPU: by CUDA IPC, through pinned memory, over TCP, and by NCCL.

A slot is the memory in which a rank keeps its part of one version of the weights.

The tests with NCCL need two GPUs. In the cases "only the network" NCCL may use neither direct access between the GPUs nor shared memory. So it
sends the bytes over the network, as between two hosts.
"""

import multiprocessing
import os
import threading

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
from rl_actors.transports import communicator
from rl_actors.transports.base import Manifest
from rl_actors.transports.placement import Place
from rl_actors.transports.reader import SlotSource
from rl_actors.transports.server import SlotServer
from rl_actors.transports.snapshot import DoubleBuffer

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TIMEOUT = 120.0
SECRET = b"s" * 32
SHAPES = {"w": (1000, 333), "v": (77,)}


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version), device="cuda") for name, shape in SHAPES.items()}


def write_versions(pipe, place: Place) -> None:
    """Whenever the pipe brings True, write a new version to a slot, and send the version's manifest through the pipe. A server serves the slots."""
    snapshot = DoubleBuffer(rank=0, timeout=TIMEOUT, choose_place=lambda num_bytes, device: place)
    server = SlotServer(snapshot.find, host="127.0.0.1", secret=SECRET, timeout=TIMEOUT)
    version = 0
    while pipe.recv():
        version += 1
        snapshot.write(f"s/{version}", tensors_of(version), torch.bfloat16)
        shapes = {name: (shape, torch.bfloat16) for name, shape in SHAPES.items()}
        address = snapshot.newest.address(server.address)
        pipe.send(Manifest(stream="s", version=version, tensors=shapes, parts=(address,)))


@pytest.mark.parametrize(
    "place, path",
    [
        (Place(on_gpu=True), "cuda_ipc"),
        (Place(on_gpu=True, num_slots=1), "cuda_ipc"),
        (Place(pinned=True), "shared_memory"),
    ],
    ids=["two slots on the GPU", "one slot on the GPU", "pinned"],
)
def test_a_process_reads_the_slots_of_another_process_and_nothing_is_left_in_dev_shm(place, path):
    torch.zeros(1, device="cuda")  # starts CUDA, so that this reader pins the memory that it maps
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
        # A reader that has opened a version can read all of it after the trainer's death.
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


@two_gpus
@pytest.mark.parametrize("network", [False, True], ids=["all of NCCL's paths", "only the network"])
@pytest.mark.parametrize("place", [Place(on_gpu=True), Place(pinned=True)], ids=["slots on the GPU", "pinned"])
def test_point_to_point_sends_versions_by_nccl_and_raises_an_error_if_the_trainer_dies(place, network, monkeypatch):
    """Every case starts a new process for the reader, because NCCL reads its environment variables only once in a process."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if network else ():
        monkeypatch.setenv(name, "1")
    reader = multiprocessing.get_context("spawn").Process(target=read_from_trainers_that_are_killed, args=(place,))
    reader.start()
    try:
        reader.join()
    finally:
        reader.kill()
    assert reader.exitcode == 0  # the reader prints the assertion that failed


def read_from_trainers_that_are_killed(place: Place) -> None:
    """Read versions from two trainers, one after the other. The trainers are on GPU 0, the reader is on GPU 1.

    Each trainer is killed while it sends. The reader must survive the death of the trainer.
    """
    communicator.PIECE_BYTES = 100_000  # several pieces
    torch.zeros(1, device="cuda:1")
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        here, there = context.Pipe()
        writer = context.Process(target=send_small_pieces, args=(there, place), daemon=True)
        writer.start()
        try:
            with torch.cuda.device(1):
                for version in range(1, 6):
                    here.send(True)
                    source = SlotSource(manifest=here.recv(), path="point_to_point", timeout=TIMEOUT, secret=SECRET)
                    with source.open() as opened:
                        assert opened.reason == "the config says so, by nccl"
                        for _, [piece] in opened.pieces():
                            assert (piece.values == version).all()
                here.send(True)
                manifest = here.recv()
                threading.Timer(0.5, writer.kill).start()
                with pytest.raises(ConnectionError, match="trainer rank 0"):
                    while True:
                        source = SlotSource(manifest=manifest, path="point_to_point", timeout=TIMEOUT, secret=SECRET)
                        with source.open():
                            pass
        finally:
            writer.kill()
            writer.join()


def send_small_pieces(pipe, place: Place) -> None:
    communicator.PIECE_BYTES = 100_000
    write_versions(pipe, place)


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
    "path, taken",
    [
        ("auto", "cuda_ipc"),
        ("cuda_ipc", "cuda_ipc"),
        ("shared_memory",) * 2,
        ("tcp",) * 2,
        pytest.param(*["point_to_point"] * 2, marks=two_gpus),
    ],
)
def test_a_generator_on_a_gpu_gets_the_trainers_weights_by_every_path(path, taken):
    transport = IndexTransport(WeightsConfig(path=path))
    in_background(transport.open(), "transport").result()
    config = TrainerConfig(model=MODEL, max_sequence_length=128, tokens_per_row=256)
    gpu = 1 if path == "point_to_point" else None  # NCCL cannot connect a GPU with itself
    generator_config = GeneratorConfig(model=MODEL, max_model_len=128, max_num_seqs=8, kv_cache_bytes=64 << 20, gpu=gpu)
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
