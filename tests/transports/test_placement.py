"""Where slots are made. The rule is arithmetic, so it is tested without a GPU."""

import pytest

from rl_actors.transports.placement import MARGIN, Place, choose, room_for_slots

GB = 10**9


def on_gpu(num_gb: float, *, room_gb: float, path: str = "auto", only_this_host: bool = True) -> Place:
    return choose(
        int(num_gb * GB), weights_on_gpu=True, path=path, only_this_host=only_this_host, room=int(room_gb * GB)
    )


@pytest.mark.parametrize(
    "room_gb, where", [(33, (True, 2, False)), (20, (True, 1, False)), (16, (False, 2, True)), (-5, (False, 2, True))]
)
def test_slots_are_on_the_gpu_as_far_as_training_leaves_room(room_gb, where):
    place = on_gpu(16.4, room_gb=room_gb)
    assert (place.on_gpu, place.num_slots, place.pinned) == where
    assert f"{max(room_gb, 0):.1f} GB of the GPU" in place.reason


@pytest.mark.parametrize("path, only_this_host", [("shared_memory", True), ("tcp", True), ("auto", False)])
def test_slots_are_pinned_on_the_host_for_readers_without_access_to_the_gpu(path, only_this_host):
    assert on_gpu(1, room_gb=100, path=path, only_this_host=only_this_host).pinned


@pytest.mark.parametrize("path", ["auto", "shared_memory", "tcp"])
def test_weights_on_a_cpu_have_two_slots_on_the_host(path):
    assert choose(GB, weights_on_gpu=False, path=path, only_this_host=True, room=0) == Place()


def test_cuda_ipc_is_refused_where_it_is_not_possible():
    with pytest.raises(ValueError, match='weights.path="cuda_ipc", but the weights of the trainer are on a CPU'):
        choose(GB, weights_on_gpu=False, path="cuda_ipc", only_this_host=True, room=0)
    with pytest.raises(ValueError, match=r"a version takes 16\.4 GB of the GPU, but training leaves 10\.0 GB"):
        on_gpu(16.4, room_gb=10, path="cuda_ipc")
    assert on_gpu(16.4, room_gb=20, path="cuda_ipc", only_this_host=False).on_gpu


def test_room_counts_what_training_will_take_and_not_what_it_holds_yet():
    # 8B on 150 GB before the first step: only the weights are there, gradients and Adam's moments will come.
    free, held, training = 117 * GB, 33 * GB, 131 * GB
    assert room_for_slots(free, held, training) == 150 * GB - int(MARGIN * training)
    # The same after a step, when all of it is there.
    assert room_for_slots(19 * GB, 131 * GB, training) == room_for_slots(free, held, training)
