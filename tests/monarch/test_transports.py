"""Tests that every transport must pass. A transport brings weights from a trainer to generators.

The weights that a real sharded trainer publishes must arrive whole and exact.
"""

import asyncio
import os

import pytest
import support
import torch
import torchstore
from published import get_tensors
from waiting import GUARD

from rl_actors import (
    FilesTransport,
    GeneratorClient,
    IndexTransport,
    MemoryTransport,
    TorchStoreTransport,
    TrainerClient,
    WeightsConfig,
)
from rl_actors.generator import expected_tensors
from rl_actors.processes.spawn import spawn_processes
from rl_actors.transports.base import announce, publish, wait_for_manifest

KINDS = ["torchstore", "index", "tcp", "point_to_point", "files", "memory"]
# (data_parallel_shard, tensor_parallel). TP2 shards some weights by rows, some by columns, and replicates others.
LAYOUTS = {"TP2": (1, 2), "FSDP2 x TP2": (2, 2)}


def make_transport(kind: str, directory):
    if kind == "files":
        return FilesTransport(directory)
    if kind in ("tcp", "point_to_point"):
        return IndexTransport(WeightsConfig(path=kind))
    return {"torchstore": TorchStoreTransport, "index": IndexTransport, "memory": MemoryTransport}[kind]()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Known weights, and their Hugging Face directory, from which the trainer starts."""
    directory = tmp_path_factory.mktemp("hf")
    weights = support.random_weights(tied=True, seed=5)
    support.hf_model(weights).save_pretrained(directory)
    return weights, directory


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(layout, id=name, marks=[] if name == "TP2" else [pytest.mark.slow])
        for name, layout in LAYOUTS.items()
    ],
)
def sharded_mesh(request, weights, ranks):
    """A trainer of two or four processes. The fixture `use` gives it a transport."""
    shard, tensor = request.param
    config = support.trainer_config(shard=shard, tensor=tensor, hf_path=str(weights[1]))
    return ranks(shard * tensor).spawn("sharded", support.TestTrainer, config, None)


@pytest.fixture
def sharded(sharded_mesh):
    client = TrainerClient(sharded_mesh, name="sharded")
    client.discard_gradients().result()
    yield client
    client.close().result()


@pytest.fixture
def use(sharded, sharded_mesh):
    """use(transport) makes the sharded trainer publish to this transport. The trainer forgets which versions it has
    published, so its next push publishes the current version.
    """

    def use(transport) -> None:
        sharded_mesh.use_transport.call(transport).get(timeout=GUARD)

    return use


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def open_transport(kind, tmp_path_factory):
    transport = make_transport(kind, tmp_path_factory.mktemp("transport") / "weights")
    asyncio.run(transport.open())
    yield transport
    asyncio.run(transport.close())


def weights_of(trainer, tmp_path) -> dict[str, torch.Tensor]:
    """The trainer's weights under Hugging Face names.

    They are read from a checkpoint, because checkpoints share no code with transports.
    """
    import torch.distributed.checkpoint as dcp
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    from rl_actors.engine.build import qwen3_config

    trainer.save_checkpoint(str(tmp_path / "checkpoint")).result().wait().result()
    stored = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    model = {name: torch.empty(entry.size) for name, entry in stored.items() if name.startswith("model.")}
    dcp.load(model, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    adapter = Qwen3StateDictAdapter(qwen3_config(support.model_config()), None)
    return adapter.to_hf({name.removeprefix("model."): tensor for name, tensor in model.items()})


def assert_equal(tensors, expected, dtype=torch.float32) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name].to(dtype)), name


def test_the_pushed_weights_of_all_ranks_arrive_exactly(open_transport, sharded, use, tmp_path):
    use(open_transport)
    version = sharded.push_model_state_dict().result()
    assert_equal(support.published_weights(open_transport, version), weights_of(sharded, tmp_path))
    assert support.step(sharded) == version + 1
    sharded.push_model_state_dict().result()
    assert_equal(support.published_weights(open_transport, version + 1), weights_of(sharded, tmp_path))


@pytest.mark.slow
def test_weights_travel_in_the_widest_dtype_of_the_generators(kind, sharded, use, tmp_path):
    transport = make_transport(kind, tmp_path / "weights")
    asyncio.run(transport.open())
    use(transport)
    expected = weights_of(sharded, tmp_path)
    for announced, travels in ((None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        if announced:
            asyncio.run(announce(transport, announced))
        for _ in range(2):  # the first push publishes in the new dtype, the second does nothing
            version = sharded.push_model_state_dict().result()
        assert_equal(support.published_weights(transport, version), expected, getattr(torch, travels))
    asyncio.run(transport.close())


@pytest.mark.parametrize("failing", ["first", "last"])
def test_a_push_that_fails_on_one_rank_is_never_readable_and_can_be_repeated(
    open_transport, sharded, sharded_mesh, use, failing
):
    failing_rank = 0 if failing == "first" else len(sharded.info().result()) - 1
    use(open_transport)
    published = sharded.push_model_state_dict().result()
    before = support.published_weights(open_transport, published)
    sharded_mesh.fail_puts.call(failing_rank).get(timeout=GUARD)
    version = support.step(sharded)
    for _ in range(2):
        with pytest.raises(Exception, match=f"rank {failing_rank} lost its disk"):
            sharded.push_model_state_dict().result()
        with pytest.raises(TimeoutError, match=f"version {version} was not published within 0 s"):
            asyncio.run(wait_for_manifest(open_transport, version, 0.0))
        assert_equal(support.published_weights(open_transport, published), before)
    sharded_mesh.fail_puts.call(None).get(timeout=GUARD)
    assert sharded.push_model_state_dict().result() == version
    assert asyncio.run(wait_for_manifest(open_transport, version, 0.0)).version == version
    assert_equal(support.published_weights(open_transport, published), before)


def test_tensors_without_a_manifest_are_not_readable(open_transport):
    """The manifest is the list of a version's tensors. A trainer writes it after it has put the tensors. So a trainer that
    is killed in between leaves tensors without a manifest.
    """

    async def interrupted():
        await open_transport.put_object("latest", ("killed", 10))
        await open_transport.put_tensors("killed/11", {"a": torch.ones(3)}, 0)
        await wait_for_manifest(open_transport, 11, 0.1)

    with pytest.raises(TimeoutError, match=r"version 11 was not published within 0\.1 s; the newest is 10"):
        asyncio.run(interrupted())


def test_the_timeout_error_for_a_missing_version_names_this_version_and_the_newest(open_transport):
    support.publish_from_here(open_transport, {"a": torch.ones(3)}, stream="run", version=4)
    with pytest.raises(TimeoutError, match=r"version 7 was not published within 0\.1 s; the newest is 4"):
        asyncio.run(wait_for_manifest(open_transport, 7, 0.1))


def test_a_version_that_is_published_during_the_wait_for_it_is_found(open_transport):
    async def main():
        waiting = asyncio.create_task(wait_for_manifest(open_transport, 1, GUARD))
        one_rank = {"stream": "run", "version": 1, "rank": 0, "gather": lambda text: [text]}
        await publish(open_transport, {"a": torch.arange(3.0)}, **one_rank)
        return await get_tensors(open_transport, await waiting)

    assert asyncio.run(main())["a"].tolist() == [0, 1, 2]


def test_a_published_version_is_not_pushed_again(open_transport, sharded, use):
    use(open_transport)
    version = sharded.push_model_state_dict().result()
    manifest = asyncio.run(wait_for_manifest(open_transport, version, 0.0))
    asyncio.run(open_transport.put_object(f"{manifest.key}/manifest", "untouched"))
    assert sharded.push_model_state_dict().result() == version
    assert asyncio.run(open_transport.get_object(f"{manifest.key}/manifest")) == "untouched"


def test_only_the_newest_two_versions_are_kept(open_transport, sharded, use):
    use(open_transport)
    manifests = []
    for _ in range(3):
        manifests.append(asyncio.run(wait_for_manifest(open_transport, sharded.push_model_state_dict().result(), 0.0)))
        support.step(sharded)
    with pytest.raises(TimeoutError, match=f"version {manifests[0].version} .*the newest is {manifests[2].version}"):
        asyncio.run(wait_for_manifest(open_transport, manifests[0].version, 0.0))
    for manifest in manifests[1:]:
        assert len(asyncio.run(get_tensors(open_transport, manifest))) == len(manifest.tensors)
    with pytest.raises(Exception):  # noqa: B017  # each transport raises an error of its own
        asyncio.run(get_tensors(open_transport, manifests[0]))


@pytest.mark.slow
def test_two_open_transports_do_not_mix_and_a_closed_transport_leaves_nothing(open_transport, kind, tmp_path):
    support.publish_from_here(open_transport, {"w": torch.zeros(2)}, stream="first", version=1)
    children, segments = support.descendants(os.getpid()), support.shared_memory()
    second = make_transport(kind, tmp_path / "weights")
    asyncio.run(second.open())
    with pytest.raises(TimeoutError, match="version 1 was not published within 0 s; nothing was published yet"):
        asyncio.run(wait_for_manifest(second, 1, 0.0))
    support.publish_from_here(second, {"w": torch.ones(100_000)}, stream="second", version=1)
    assert torch.equal(support.published_weights(second, 1)["w"], torch.ones(100_000))
    assert support.published_weights(open_transport, 1)["w"].tolist() == [0, 0]

    asyncio.run(second.close())
    support.wait_until(lambda: support.descendants(os.getpid()) <= children)
    assert not support.left_in_shared_memory(segments)
    assert not (tmp_path / "weights").exists()
    asyncio.run(second.close())
    assert support.published_weights(open_transport, 1)["w"].tolist() == [0, 0]


@pytest.mark.slow
def test_a_torchstore_that_the_caller_started_is_used_and_not_shut_down(tmp_path):
    async def main():
        processes = await spawn_processes("own_store", 1)
        await torchstore.initialize(store_name="own", mesh=processes.mesh)
        transport = TorchStoreTransport(store_name="own")
        await transport.open()
        await transport.put_object("key", 7)
        await transport.close()
        assert await torchstore.get("key", store_name="own") == 7
        await torchstore.shutdown("own")
        await processes.stop()

    asyncio.run(main())


def test_the_generator_holds_the_weights_of_a_sharded_trainer(
    generator, generator_mesh, transport, sharded, use, tmp_path
):
    """Several ranks push through torchstore. vLLM joins the weights of q, k and v into one parameter, and those of gate
    and up into another. All parameters of vLLM must equal the pushed weights exactly.
    """
    use(transport)
    support.step(sharded)
    version = sharded.push_model_state_dict().result()
    assert generator.pull_model_state_dict(version).result() == version
    held = generator_mesh.held_weights.call_one().get(timeout=GUARD)
    assert_vllm_equal(held, weights_of(sharded, tmp_path), torch.float32)


@pytest.mark.slow
def test_a_bfloat16_generator_holds_the_cast_weights(sharded, use, tmp_path):
    """At first the trainer casts the weights to bfloat16 for a push. After a float32 generator has announced itself,
    the trainer pushes float32, and the bfloat16 generator casts the weights.
    """
    transport = TorchStoreTransport()

    async def start():
        await transport.open()
        return await spawn_processes("bfloat16", 1, env={"OMP_NUM_THREADS": "1"})

    processes = asyncio.run(start())
    config = support.generator_config(dtype="bfloat16")
    mesh = processes.mesh.spawn("bfloat16", support.TestGenerator, config, transport)
    generator = GeneratorClient(mesh)
    generator.ready().result()
    use(transport)
    for travels in (torch.bfloat16, torch.float32):
        version = support.step(sharded)
        sharded.push_model_state_dict().result()
        assert {x.dtype for x in support.published_weights(transport, version).values()} == {travels}
        generator.pull_model_state_dict(version).result()
        held = mesh.held_weights.call_one().get(timeout=GUARD)
        assert_vllm_equal(held, weights_of(sharded, tmp_path), torch.bfloat16)
        asyncio.run(announce(transport, "float32"))
    assert generator.is_alive(GUARD).result()
    asyncio.run(processes.stop())
    assert not generator.is_alive().result()
    asyncio.run(transport.close())


def assert_vllm_equal(held, weights, dtype) -> None:
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    names = set()
    for name, tensor in held.items():
        parts = [name]
        for whole, pieces in fused.items():
            if whole in name:
                parts = [name.replace(whole, piece) for piece in pieces]
        names.update(parts)
        if name == "lm_head.weight":  # the head is tied
            parts = ["model.embed_tokens.weight"]
        expected = torch.cat([weights[part] for part in parts]).to(dtype)
        # vLLM pads the vocabulary.
        assert tensor.dtype == dtype and torch.equal(tensor[: len(expected)], expected), name
    assert names - {"lm_head.weight"} == set(weights)


def test_a_generator_expects_the_names_and_shapes_of_the_tensors_in_the_trainers_directory(weights):
    assert expected_tensors(str(weights[1])) == {name: tuple(tensor.shape) for name, tensor in weights[0].items()}
