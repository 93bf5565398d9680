"""Tests of pulls that fail, and of the reports of pushes and pulls. If a version cannot be read, the generator keeps its weights. If a pull
fails while it replaces the weights, the generator refuses requests until a pull succeeds.
"""

import asyncio
from dataclasses import replace

import pytest
import support
from support import forward_logprobs, worst
from waiting import GUARD

from rl_actors import SamplingParams
from rl_actors.transports.base import wait_for_manifest
from rl_actors.vllm.requests import NO_VERSION

SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
NUM_TENSORS = 24  # the model has 11 tensors in each of 2 blocks, plus the embedding and the last norm


# loaded: number of tensors that vLLM gets before the pull fails
@pytest.mark.parametrize(
    "loaded", [pytest.param(at, marks=[] if at == 5 else pytest.mark.slow) for at in range(NUM_TENSORS + 1)]
)
def test_if_a_pull_fails_while_it_replaces_the_weights_the_generator_refuses_requests_until_a_pull_succeeds(
    generator, generator_mesh, trainer, synced, loaded
):
    new = support.step(trainer, seed=loaded)
    trainer.push_model_state_dict().result()
    running = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=400))
    support.wait_until(lambda: min(generator_mesh.num_tokens_under_way.call_one().get(), default=0) > 3)
    generator_mesh.fail_load_after.call_one(loaded, "the reader broke").get(timeout=GUARD)
    with pytest.raises(OSError, match="the reader broke"):
        generator.pull_model_state_dict(new).result()
    refused = f"the generator has no usable weights: the pull of version {new} failed while the weights were replaced: .*the reader broke"
    for call in (running, generator.generate([[5, 6, 7]]), generator.compute_logprobs(SEQUENCES)):
        with pytest.raises(RuntimeError, match=refused):
            call.result()
    assert generator.info().result().policy_version == NO_VERSION
    assert generator.pull_model_state_dict(new).result() == new
    assert worst(generator.compute_logprobs(SEQUENCES).result(), forward_logprobs(trainer, SEQUENCES)) < 1e-4
    [[completion]] = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=4)).result()
    assert completion.policy_versions == [new] * 4


def test_if_a_version_cannot_be_read_the_generator_keeps_its_weights(generator, trainer, synced, transport):
    before = generator.compute_logprobs(SEQUENCES).result()
    manifest = asyncio.run(wait_for_manifest(transport, synced, 0.0))
    gone = replace(manifest, stream="gone", version=900, parts=(replace(manifest.parts[0], token=b"x" * 16),))
    latest = asyncio.run(transport.get_object("latest"))
    asyncio.run(transport.put_object("gone/900/manifest", gone))
    asyncio.run(transport.put_object("latest", ("gone", 900)))
    try:
        with pytest.raises(
            RuntimeError,
            match="slot . of trainer rank 0 .* is gone: its pid and file descriptor now belong to another file",
        ):
            generator.pull_model_state_dict(900).result()
    finally:
        asyncio.run(transport.put_object("latest", latest))
    assert generator.info().result().policy_version == synced
    assert worst(generator.compute_logprobs(SEQUENCES).result(), before) == 0
    last = generator.info().result().last_pull
    assert generator.pull_model_state_dict(synced).result() == synced
    assert generator.info().result().last_pull == last  # the second pull of a version copies nothing


def test_a_push_and_a_pull_report_their_bytes_path_and_seconds(generator, trainer, synced):
    num_bytes = 4 * trainer.info().result()[0].num_parameters
    push, pull = trainer.info().result()[0].last_push, generator.info().result().last_pull
    assert (push.policy_version, push.path, push.num_bytes) == (synced, "slots", num_bytes)
    assert (pull.policy_version, pull.path, pull.num_bytes) == (synced, "shared_memory", num_bytes)
    assert pull.reason == "the trainer is on this host"
    assert generator.last_pull == pull
    for transfer, phases in ((push, {"collect", "write"}), (pull, {"read", "load"})):
        assert transfer.phases.keys() == phases and min(transfer.phases.values()) > 0
        assert sum(transfer.phases.values()) <= transfer.seconds
        assert transfer.gb_per_second == pytest.approx(num_bytes / 1e9 / transfer.seconds)
