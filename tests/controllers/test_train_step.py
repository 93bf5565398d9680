"""Tests of a training step, which divides its batch among optimizer steps, and of the penalty on long completions."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.tiny import tiny
from controllers.grpo import minibatches, train_step
from controllers.rollouts.groups import RolloutConfig
from controllers.run.run import Run
from controllers.sft import SFTPhase, SFTPhaseConfig
from rl_actors import OptimParams, Sample, TruncatedImportanceSampling


class RecordingTrainer:
    """A trainer that computes nothing and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.params: list[OptimParams] = []

    async def forward_backward(self, samples, loss):
        self.calls.append("forward_backward " + "".join(name_of(sample) for sample in samples))
        return SimpleNamespace(loss=loss)

    async def optim_step(self, params):
        self.calls.append("optim_step")
        self.params.append(params)
        return SimpleNamespace()


def named_sample(name: str) -> Sample:
    """A sample whose first token is the code of the letter `name`. A sample named "a" has 1 loss token, "b" has 2, and so on."""
    number = ord(name) - ord("a") + 1
    return Sample.from_tokens([ord(name)], [1] * number)


def name_of(sample: Sample) -> str:
    return chr(int(sample.tokens[0]))


def run_with(trainer: RecordingTrainer, **options) -> Run:
    config = replace(tiny(), **options)
    return SimpleNamespace(config=config, trainer=trainer)


async def train_on(run: Run, names: str):
    samples = [named_sample(name) for name in names]
    return await train_step(run, minibatches(run.config, samples), run.config.make_loss(), 0.5)


@pytest.mark.parametrize(
    ("updates", "epochs", "expected"),
    [
        (1, 1, ["abcde"]),
        (2, 1, ["abc", "de"]),
        (2, 2, ["abc", "de", "abc", "de"]),
        (9, 1, ["a", "b", "c", "d", "e"]),  # never more steps than samples
    ],
)
def test_an_epoch_takes_at_most_updates_per_step_optimizer_steps(updates, epochs, expected):
    trainer = RecordingTrainer()
    run = run_with(trainer, updates_per_step=updates, epochs_per_step=epochs)
    made = asyncio.run(train_on(run, "abcde"))
    assert trainer.calls == [call for part in expected for call in (f"forward_backward {part}", "optim_step")]
    assert [output.loss for update in made for output in update.outputs] == [run.config.make_loss()] * len(expected)
    assert [params.learning_rate for params in trainer.params] == [0.5] * len(expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 1 + 2 + 3), ("sequence_mean", 3), ("sequence_sum", 3), ("constant", 3 * 50)],
)
def test_the_aggregation_decides_the_divisor_of_the_summed_gradient(aggregation, expected):
    trainer = RecordingTrainer()
    run = run_with(trainer, updates_per_step=1, epochs_per_step=1, aggregation=aggregation, max_tokens=50)
    asyncio.run(train_on(run, "abc"))
    assert [params.grad_divisor for params in trainer.params] == [expected]
    assert run.config.make_loss().sequence_mean == (aggregation == "sequence_mean")


@pytest.mark.parametrize(
    ("staleness", "quantization", "correction"),
    [(0, None, None), (4, None, TruncatedImportanceSampling()), (0, "fp8", TruncatedImportanceSampling())],
)
def test_off_policy_completions_are_corrected(staleness, quantization, correction):
    config = tiny()
    config.rollouts.max_staleness = staleness
    config.generator.quantization = quantization
    assert config.make_loss().correction == correction


def test_the_penalty_on_long_completions_grows_over_the_last_tokens_before_the_limit():
    config = RolloutConfig(overlong_buffer=4, overlong_penalty=2.0)
    assert [config.overlong(length, 20) for length in (1, 16, 17, 19, 20)] == [0.0, 0.0, 0.5, 1.5, 2.0]


def test_the_gradient_of_a_part_is_summed_over_calls_and_divided_once_by_the_loss_tokens():
    trainer = RecordingTrainer()
    run = run_with(trainer, updates_per_step=2, epochs_per_step=1, samples_per_forward_backward=2)
    asyncio.run(train_on(run, "abcde"))
    assert trainer.calls == [
        "forward_backward ab",
        "forward_backward c",
        "optim_step",
        "forward_backward de",
        "optim_step",
    ]
    assert [params.grad_divisor for params in trainer.params] == [1 + 2 + 3, 4 + 5]


def test_supervised_steps_stop_only_when_their_window_is_full():
    config = SFTPhaseConfig(stop_at_answer_probability=0.2, stop_window=3)
    phase = SFTPhase(SimpleNamespace(state={"recent": [0.3, 0.3]}), config, total_steps=9)
    assert not phase.should_stop()
    phase.recent.append(0.3)
    assert phase.should_stop()
