"""Refused calls change nothing: training steps with and without refused calls have bit-identical results.

The bad samples and bad optimizer parameters are in tables of test_validation.py. The client refuses all of them, except
the samples in TAKEN.
"""

import pytest
import support
from test_validation import BAD_OPTIM_PARAMS, BAD_SAMPLES, LIMITS, assert_in_order

from rl_actors import PPO, MemoryTransport, OptimParams, Sample, TrainerClient

# The client accepts these samples, because it turns lists into tensors. The trainer's ranks would refuse the lists.
TAKEN = {"a list as column"}
# The client turns lists, and tensors of other dtypes, into the right tensors before it checks samples. So its errors for
# these samples differ from the errors in the table.
WORDS = {
    "a list of tokens": ["targets has 4 positions", "tokens has 2"],
    "a list of targets": ["targets has 2 positions", "tokens has 4"],
    "int32 tokens": ["targets has 4 positions", "tokens has 2"],
    "float64 column": ["has the column 'values'", "CrossEntropy reads"],
}
SAMPLES = [
    Sample.from_tokens([7, 3], [9, 4, 11, 30], old_logprobs=-3.0, advantages=1.5),
    Sample.from_tokens([1], [2, 49, 0, 5], old_logprobs=-4.0, advantages=-0.5),
]
PARAMS = OptimParams(learning_rate=1e-3, grad_divisor=8.0)


def two_steps(trainer: TrainerClient, bad=lambda: None) -> list:
    """Results of two steps that start from the initial weights.

    bad: is called before each forward_backward and before each optim_step.
    """
    trainer.load_checkpoint(trainer.start).result()
    answers = []
    for _ in range(2):
        bad()
        output = trainer.forward_backward(SAMPLES, loss=PPO()).result()
        bad()
        result = trainer.optim_step(PARAMS).result()
        answers += [output.metrics["loss:sum"], *(row.tolist() for row in output.logprobs), result]
    return answers


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, ranks):
    """A client of a trainer that has the LIMITS for which the tables in test_validation.py were written.

    The client's attribute `start` is the path of a checkpoint of the initial weights.
    """
    config = support.trainer_config(max_sequence_length=8, tokens_per_row=64, max_call_bytes=LIMITS["max_call_bytes"])
    config.model.vocab_size = LIMITS["vocab_size"]
    client = TrainerClient(ranks(1).spawn("refusals", support.TestTrainer, config, MemoryTransport()))
    client.start = str(tmp_path_factory.mktemp("refusals") / "start")
    client.save_checkpoint(client.start).result().wait().result()
    yield client
    client.close().result()


@pytest.fixture(scope="module")
def undisturbed(trainer):
    return two_steps(trainer)


@pytest.mark.parametrize("name", [name for name in BAD_SAMPLES if name not in TAKEN])
def test_bad_samples_change_nothing(trainer, undisturbed, name):
    samples, loss, error, words = BAD_SAMPLES[name]
    words = WORDS.get(name, words)
    error = ValueError if name in WORDS else error

    def bad() -> None:
        with pytest.raises(error) as caught:
            call = trainer.forward(samples) if loss is None else trainer.forward_backward(samples, loss=loss)
            call.result()
        assert_in_order(str(caught.value), words)

    assert two_steps(trainer, bad) == undisturbed


@pytest.mark.parametrize("field, value, error, limit", BAD_OPTIM_PARAMS)
def test_bad_optim_params_change_nothing(trainer, undisturbed, field, value, error, limit):
    def bad() -> None:
        with pytest.raises(error) as caught:
            trainer.optim_step(OptimParams(**{"learning_rate": 1e-3, field: value})).result()
        assert_in_order(str(caught.value), [f"{field}={value!r}", limit])

    assert two_steps(trainer, bad) == undisturbed


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda t: t.forward_backward(SAMPLES, loss="pppo"), ValueError, ["pppo", "ppo"]),
        (lambda t: t.forward_backward(SAMPLES, loss=None), ValueError, ["unknown loss None"]),
        (lambda t: t.forward_backward(SAMPLES, loss="nowhere:loss"), ValueError, ["nowhere:loss"]),
        (lambda t: t.load_checkpoint("nowhere"), (ValueError, RuntimeError), ["nowhere", "checkpoint"]),
    ],
)
def test_bad_names_and_paths_change_nothing(trainer, undisturbed, call, error, words):
    def bad() -> None:
        if trainer.info().result()[0].state == "open" and words[0] == "nowhere":
            return  # while gradients are accumulated, load_checkpoint fails with any path
        with pytest.raises(error) as caught:
            call(trainer).result()
        assert_in_order(str(caught.value), words)

    assert two_steps(trainer, bad) == undisturbed


def test_a_column_that_is_a_list_is_accepted(trainer):
    (samples, loss, *_) = BAD_SAMPLES["a list as column"]
    assert trainer.forward_backward(samples, loss=loss).result().metrics["loss:sum"] > 0
    trainer.discard_gradients().result()
