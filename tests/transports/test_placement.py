"""Tests the choice of the memory for a trainer's slots: the GPU's or the host's. A slot holds a rank's part of one version of the weights.

The rule is arithmetic, so the tests need no GPU.
"""

import logging
import re

import pytest
import torch
from test_served_slots import IndexHere

from rl_actors import WeightsConfig
from rl_actors.transports.placement import MARGIN, Place, choose, room_for_slots

GB = 10**9


def on_gpu(num_gb: float, *, room_gb: float, path: str = "auto") -> Place:
    return choose(int(num_gb * GB), weights_on_gpu=True, path=path, room=int(room_gb * GB))


LEVELS = {33: (True, 2, False), 20: (True, 1, False), 16: (False, 2, True), -5: (False, 2, True)}
"""GB that training leaves free on the GPU -> expected place of slots of 16.4 GB, as (on the GPU, number of slots, pinned)."""


@pytest.mark.parametrize("path", ["auto", "point_to_point"])
@pytest.mark.parametrize("room_gb", LEVELS)
def test_slots_are_on_the_gpu_as_far_as_training_leaves_room(room_gb, path):
    place = on_gpu(16.4, room_gb=room_gb, path=path)
    assert (place.on_gpu, place.num_slots, place.pinned) == LEVELS[room_gb]


@pytest.mark.parametrize(
    "room_gb, text",
    [
        (33, "2 on the GPU, each of 16.400 GB, because a version takes 16.4 GB and training leaves 33.0 GB of the GPU"),
        (
            20,
            "1 on the GPU, each of 16.400 GB, because .* leaves 20.0 GB of the GPU, which is too little for two slots",
        ),
        (
            16,
            "2 in memory of the host, each of 16.400 GB, because .* leaves 16.0 GB of the GPU, which is too little for one slot",
        ),
    ],
)
def test_the_trainers_log_says_where_the_slots_are_and_why(room_gb, text, monkeypatch, caplog):
    transport = IndexHere(WeightsConfig())
    transport.training_bytes = int(100 * GB / MARGIN)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((60 + room_gb) * GB, 150 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 * GB)
    with caplog.at_level(logging.INFO):
        place = transport._choose_place(int(16.4 * GB), torch.device("cuda"))
    assert (place.on_gpu, place.num_slots, place.pinned) == LEVELS[room_gb]
    [record] = caplog.records
    # Monarch may add the actor's name in front of the message.
    assert re.search(f"slots for the weights: {text}$", record.getMessage())


@pytest.mark.parametrize("path", ["shared_memory", "tcp"])
def test_slots_are_pinned_on_the_host_for_paths_that_read_them_there(path):
    assert on_gpu(1, room_gb=100, path=path).pinned


@pytest.mark.parametrize("path", ["auto", "shared_memory", "point_to_point", "tcp"])
def test_weights_on_a_cpu_have_two_slots_on_the_host(path):
    assert choose(GB, weights_on_gpu=False, path=path, room=0) == Place()


def test_cuda_ipc_is_refused_where_it_is_not_possible():
    with pytest.raises(ValueError, match='weights.path="cuda_ipc", but the weights of the trainer are on a CPU'):
        choose(GB, weights_on_gpu=False, path="cuda_ipc", room=0)
    with pytest.raises(ValueError, match=r"a version takes 16\.4 GB and training leaves 10\.0 GB of the GPU"):
        on_gpu(16.4, room_gb=10, path="cuda_ipc")


def test_room_is_what_training_leaves_at_its_peak_and_not_what_is_free_now():
    # An 8B model on a GPU of 150 GB, before the first step. Only the weights are allocated, and gradients and Adam's moments will follow.
    free, held, training = 117 * GB, 33 * GB, 131 * GB
    assert room_for_slots(free, held, training) == 150 * GB - int(MARGIN * training)
    # After a step everything is allocated, and the room is the same.
    assert room_for_slots(19 * GB, 131 * GB, training) == room_for_slots(free, held, training)
