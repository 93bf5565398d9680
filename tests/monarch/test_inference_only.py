"""Tests of a trainer without an optimizer. The trainer runs calls that need no optimizer, such as forward and exports.
Calls that train, that trace training steps, or that save or load the optimizer's state are refused before any rank
begins to work.
"""

import pytest
import support
from torch.testing import assert_close

from rl_actors import PPO, FilesTransport, OptimParams, TrainerClient


@pytest.fixture(scope="module")
def frozen(tmp_path_factory, ranks):
    transport = FilesTransport(tmp_path_factory.mktemp("weights"))
    config = support.trainer_config(optimizer=None)
    with TrainerClient.spawn(config, transport=transport, processes=ranks(1), name="frozen") as client:
        yield client


def test_a_trainer_without_an_optimizer_infers_with_loaded_weights_and_passes_them_on(trainer, frozen, tmp_path):
    support.step(trainer)
    saved = trainer.save_checkpoint(str(tmp_path / "trained")).result()
    saved.wait().result()
    assert frozen.load_checkpoint(saved.path, optimizer=False).result() == saved.policy_version
    samples = support.random_samples()
    expected, actual = (client.forward(samples, "cross_entropy").result() for client in (trainer, frozen))
    assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=0)
    assert actual.metrics == expected.metrics and actual.metrics["loss:sum"] > 0
    assert frozen.push_model_state_dict().result() == saved.policy_version
    frozen.export_hf(str(tmp_path / "exported")).result()
    frozen.discard_gradients().result()
    frozen.save_checkpoint(str(tmp_path / "again"), optimizer=False).result().wait().result()
    assert trainer.load_checkpoint(str(tmp_path / "again"), optimizer=False).result() == saved.policy_version
    assert [(info.optimizer, info.state) for info in frozen.info().result()] == [(None, "idle")]
    assert [info.optimizer for info in trainer.info().result()] == ["AdamW"]


CALLS = {
    "forward_backward": lambda client: client.forward_backward(support.random_samples(), loss=PPO()),
    "forward_backward_custom": lambda client: client.forward_backward_custom(
        support.random_samples(), lambda samples, logprobs: (logprobs[0].sum(), {})
    ),
    "optim_step": lambda client: client.optim_step(OptimParams(learning_rate=0.1)),
    "save_checkpoint(optimizer=True)": lambda client: client.save_checkpoint("nowhere"),
    "load_checkpoint(optimizer=True)": lambda client: client.load_checkpoint("nowhere"),
    "profile": lambda client: client.profile("nowhere"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_needs_an_optimizer_is_refused_before_any_rank_works(frozen, call):
    frozen.ready().result()
    sent = frozen.ranks.number
    with pytest.raises(ValueError) as caught:
        CALLS[call](frozen).result()
    assert str(caught.value) == f"{call} is not possible with optimizer=None: this trainer only infers"
    assert frozen.ranks.number == sent
