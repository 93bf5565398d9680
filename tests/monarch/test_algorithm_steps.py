"""Runs of five GRPO steps with every loss, correction, aggregation, advantage rule and preset.

All runs use the same actors. The configs are parsed from command-line flags.
"""

import asyncio
import io
import math
import string
from dataclasses import dataclass, fields, replace
from itertools import product
from types import SimpleNamespace

import pytest
import support
from fakes import ParityReward
from rich.console import Console

from configs.tiny import tiny
from controllers.algorithms.policy_loss import CORRECTIONS, POLICY_LOSSES, SHARED_OPTIONS, LossConfig
from controllers.algorithms.presets import ALGORITHMS
from controllers.algorithms.schedules import ScheduleConfig
from controllers.grpo import GRPOConfig, train
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.program import cli
from controllers.rollouts.advantages import ADVANTAGES
from controllers.rollouts.evaluation import EvaluationSet
from controllers.rollouts.groups import RolloutConfig
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run.checkpoints import Checkpoints
from controllers.run.run import Run, Supervision
from rl_actors import TrainerClient
from rl_actors.losses import LOSSES, PolicyLoss

NUM_STEPS, NUM_UPDATES = 5, 2
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
# The shared model's vocabulary has these characters and two special tokens.
LETTERS = string.digits + "+-=." + string.ascii_lowercase + "ABCDEF"


def shared() -> GRPOConfig:
    return replace(
        tiny(),
        alphabet=LETTERS,
        max_tokens=6,
        trainer=support.trainer_config(),
        generator=support.generator_config(),
        steps=NUM_STEPS,
        sft_steps=0,
        updates_per_step=NUM_UPDATES,
        epochs_per_step=1,
        rollouts=RolloutConfig(groups_per_step=8, group_size=4, dynamic_sampling_rounds=1, temperature=1.5),
        schedule=ScheduleConfig(learning_rate=1e-5),
        evaluate_every=100,
        evaluate_first=False,
        checkpoint_every=0,
    )


@pytest.fixture(scope="module")
def reference_mesh(ranks, transport):
    return ranks(1).spawn("reference", support.TestTrainer, support.trainer_config(optimizer=None), transport)


@pytest.fixture
def take_steps(trainer, generator, reference_mesh, tmp_path):
    """take_steps("--loss", "cispo", …) takes five steps with these flags. Returns the lines of metrics.jsonl."""

    def take(*flags: str) -> list[dict]:
        invocation = cli.parse("grpo", {"shared": shared}, [*flags, "--output-dir", str(tmp_path / "run")])
        build_character_tokenizer(tmp_path / "tokenizer", LETTERS)
        environment = ParityReward(0.0, 2)
        folder = RunFolder(tmp_path / "run")
        supervision = Supervision(
            folder=folder,
            checkpoints=Checkpoints(folder.checkpoints, keep=1, keep_every=0),
            actors=SimpleNamespace(spawn_reference=lambda: TrainerClient(reference_mesh)),
        )
        with MetricsLogger(folder, trackers=(), console=Console(file=io.StringIO())) as log:
            run = Run(
                config=invocation.config,
                environment=environment,
                evaluation_sets=[EvaluationSet(name="", environment=environment, problems=environment.held_out())],
                tokenizer=load_tokenizer(tmp_path / "tokenizer"),
                trainer=trainer,
                generator=generator,
                log=log,
                supervision=supervision,
            )
            asyncio.run(train(run))
        return read_jsonl(folder.metrics)

    return take


def check(lines: list[dict]) -> None:
    """Check that each of the five steps raised policy_version by NUM_UPDATES, and had a finite loss and a gradient that is not 0."""
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    versions = [line["policy_version"] for line in lines]
    assert [later - earlier for earlier, later in zip(versions, versions[1:], strict=False)] == [NUM_UPDATES] * 4
    for line in lines:
        assert "nonfinite" not in line and "skipped" not in line and line["updates_skipped"] == 0
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0
        assert line["logprob_diff/max"] < 1e-3  # trainer and generator compute in float32


# Each run takes one value from each list, and every value is in some run. The lists do not depend on each other, so the
# runs need not have all combinations.
CHOICES = list(
    zip(
        POLICY_LOSSES,
        ["none", "icepop", "tis", "none", "icepop", "tis"],
        [*AGGREGATIONS, "token_mean", "sequence_mean"],
        [*ADVANTAGES, "grpo", "rloo"],
        strict=True,
    )
)


@pytest.mark.parametrize(
    "loss, correction, aggregation, advantage",
    [*CHOICES[:3], *(pytest.param(*choices, marks=pytest.mark.slow) for choices in CHOICES[3:])],
)
def test_grpo_takes_five_steps_with_every_choice(take_steps, loss, correction, aggregation, advantage):
    lines = take_steps(
        *("--loss", loss, "--correction", correction, "--aggregation", aggregation, "--advantage", advantage)
    )
    check(lines)
    assert ("clip_fraction" in lines[0]) == (loss in ("ppo", "cispo", "gspo"))
    assert ("correction/mean" in lines[0]) == (correction != "none")


def own_loss(logprobs_BL, *, advantages, loss_weights):
    total = -(logprobs_BL * advantages * loss_weights).sum()
    trained = loss_weights != 0
    return total, {"surprise:mean": (-logprobs_BL.detach()[trained].sum(), trained.sum())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Squared(PolicyLoss):
    power: float = 2.0

    def objective(self, logprobs_BL, old_logprobs, advantages, is_trained_BL):
        return -(((logprobs_BL - old_logprobs) - advantages) ** self.power), {}


def test_grpo_trains_with_a_loss_of_ones_own(take_steps):
    lines = take_steps("--loss", f"{__name__}:own_loss")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["loss/surprise/mean"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert "ratio/mean" not in lines[0] and "entropy" not in lines[0]


def test_a_subclass_of_policy_loss_has_the_options_that_all_policy_losses_share(take_steps):
    lines = take_steps("--loss", f"{__name__}:Squared", "--correction", "tis", "--entropy-bonus", "0.01")
    check(lines)
    assert {"correction/mean", "entropy/exact", "loss/advantage/max"} <= lines[0].keys()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--loss", "pop"], "loss='pop'; did you mean ppo"),
        (["--loss", "nothing:loss"], "loss='nothing:loss' cannot be imported: ModuleNotFoundError"),
        (["--loss", f"{__name__}:own_loss", "--entropy-bonus", "0.1"], "is no PolicyLoss, so it has no entropy_bonus"),
        (["--loss", f"{__name__}:own_loss", "--correction", "tis"], "is no PolicyLoss, so it has no correction"),
        (["--loss", f"{__name__}:own_loss", "--loss.beta", "1"], "it has no options"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_before_the_run(flags, error, capsys):
    with pytest.raises(SystemExit):
        cli.parse("grpo", {"shared": shared}, flags)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, name",
    [
        (("--loss", "ppo", "--loss.ratio-low", "0.9", "--loss.ratio-high", "4", "--loss.dual-clip", "3"), None),
        (("--loss", "dro", "--loss.beta", "0.1", "--lr=2e-5"), None),
        (("--correction", "tis", "--correction.cap", "1.5", "--correction.level", "sequence"), "correction/mean"),
        (
            ("--correction", "icepop", "--correction.low=0.9", "--correction.high=1.1", "--correction.reweights=True"),
            "correction/zero",
        ),
        (("--entropy-bonus", "0.01"), "entropy/exact"),
        (("--rollouts.overlong-buffer", "3", "--rollouts.overlong-penalty", "0.5"), "reward/overlong_penalty"),
    ],
)
def test_grpo_takes_five_steps_with_options_of_loss_correction_and_rollouts(take_steps, flags, name):
    lines = take_steps(*flags)
    check(lines)
    assert name is None or all(math.isfinite(line[name]) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grpo_takes_five_steps_with_every_preset_and_prints_the_fields_that_the_preset_sets(
    take_steps, algorithm, capsys
):
    lines = take_steps("--algorithm", algorithm)
    check(lines)
    printed = capsys.readouterr().err
    assert ALGORITHMS[algorithm].paper in printed and "  aggregation = " in printed
    assert ("kl/reference" in lines[0]) == (algorithm == "grpo")


def test_the_choices_have_every_loss_correction_aggregation_and_advantage():
    policy_losses = {name for name, cls in LOSSES.items() if issubclass(cls, PolicyLoss)}
    assert policy_losses == set(POLICY_LOSSES) == {choice[0] for choice in CHOICES}
    assert {"none", *CORRECTIONS} == {choice[1] for choice in CHOICES}
    assert set(AGGREGATIONS) == {choice[2] for choice in CHOICES}
    assert set(ADVANTAGES) == {choice[3] for choice in CHOICES}
    options = {each.name for cls in POLICY_LOSSES.values() for each in fields(cls)} - set(SHARED_OPTIONS)
    assert options == {each.name for each in fields(LossConfig)} - {"name"}


def test_every_correction_can_be_combined_with_every_loss():
    for loss, correction in product(POLICY_LOSSES, CORRECTIONS):
        invocation = cli.parse("grpo", {"shared": shared}, ["--loss", loss, "--correction", correction])
        made = invocation.config.make_loss()
        assert type(made) is POLICY_LOSSES[loss] and type(made.correction) is CORRECTIONS[correction]
