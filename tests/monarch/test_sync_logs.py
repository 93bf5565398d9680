"""The generator's `info` and its log name the path by which weights come, such as shared memory. The log names the path
once, not at every pull.
"""

from dataclasses import replace

import pytest
import support
from references import save_random

from rl_actors import GeneratorClient, LogRoute, LoRAConfig, TorchStoreTransport, TrainerClient, WeightsConfig
from rl_actors.clients.call import in_background

NUM_SYNCS = 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, taken, reason, lora",
    [
        ("auto", "shared_memory", "the trainer is on this host", LoRAConfig()),
        ("shared_memory", "shared_memory", "the trainer is on this host", LoRAConfig(rank=4, sync="adapter")),
        ("tcp", "tcp", "the config says so", LoRAConfig()),
        ("point_to_point", "point_to_point", "the config says so, by gloo", LoRAConfig()),
    ],
)
def test_info_and_the_log_name_the_path_and_later_syncs_add_no_log_lines(tmp_path, path, taken, reason, lora):
    transport = TorchStoreTransport(weights=WeightsConfig(path=path))
    in_background(transport.open(), "transport").result()
    route = LogRoute(directory=tmp_path)
    base = save_random(tmp_path / "base", support.model_config())
    trainer_config = support.trainer_config(lora=lora, hf_path=base)
    generator_config = replace(support.generator_config(), lora=lora, hf_path=base)
    logs = (tmp_path / "trainer-0.log", tmp_path / "generator-0.log")
    with (
        TrainerClient.spawn(trainer_config, transport=transport, logs=route) as trainer,
        GeneratorClient.spawn(generator_config, transport=transport, logs=route) as generator,
    ):
        sizes = []
        for seed in range(NUM_SYNCS):
            support.step(trainer, seed=seed)
            generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
            pull = generator.info().result().last_pull
            assert (pull.path, pull.reason) == (taken, reason)
            sizes.append([len(log.read_text().splitlines()) for log in logs])
    in_background(transport.close(), "transport").result()
    # The first two syncs may add lines about the path and about slots. A slot is a rank's memory for one version.
    assert sizes[1] == sizes[-1]
    written, pulled = (log.read_text() for log in logs)
    assert written.count("slots for the weights") == 1 and "in memory of the host" in written
    assert pulled.count(f"the weights come by {taken}: {reason}") == 1
