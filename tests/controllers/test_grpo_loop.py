"""Tests of a whole GRPO run: its calls to the actors, and the metrics that it records. The real controller runs in one process with fake
actors, which have no model.
"""

import asyncio
import io
import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import ActorOfNothing, Generation, NearTrainer, ParityReward, RandomGenerator, Step
from rich.console import Console

import rl_actors
from configs.tiny import tiny
from controllers.algorithms.kl_control import KLControlConfig
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig, Problem
from controllers.grpo import GRPOConfig, train
from controllers.observe.logger import MetricsLogger
from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.rollouts.evaluation import PassAtKConfig, build_sets
from controllers.rollouts.groups import RolloutConfig
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run.run import open_run
from controllers.sft import SFTPhaseConfig
from rl_actors import num_loss_tokens
from rl_actors.seeds import hashed_seed

NUM_SFT_STEPS, NUM_STEPS, NUM_HELD_OUT, NUM_HARDER = 2, 3, 5, 11


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    config: GRPOConfig
    environment: ParityReward
    tokenizer: object
    records: list[dict]  # of metrics.jsonl
    steps: list[Step]
    training: list[Generation]  # calls of `generate` for training problems
    evaluation: list[Generation]  # greedy calls for held-out problems
    attempts: list[Generation]  # calls for pass@k
    samples: list[dict]  # of evaluation.jsonl

    def rewards(self, generation: Generation, problems: list[Problem]) -> list[list[float]]:
        """Rewards of the completions of every problem."""
        found = []
        for problem, completions in zip(problems, generation.answer, strict=True):
            texts = [self.tokenizer.decode(completion.tokens) for completion in completions]
            found.append([self.environment.reward(problem, text) for text in texts])
        return found

    def prompts(self, problems: list[Problem]) -> list[list[int]]:
        return [self.tokenizer.encode_prompt(problem) for problem in problems]


def make_config() -> GRPOConfig:
    return replace(
        tiny(),
        steps=NUM_STEPS,
        sft_steps=NUM_SFT_STEPS,
        updates_per_step=1,
        epochs_per_step=1,
        samples_per_forward_backward=7,
        evaluate_every=1,
        evaluation={"even": EnvironmentConfig(task="fakes:parity_reward", num_held_out=NUM_HARDER)},
        pass_at_k=PassAtKConfig(num_samples=4, k=(1, 2), temperature=0.7),
        checkpoint_every=0,
        transport="memory",
        rollouts=RolloutConfig(groups_per_step=3, group_size=16, temperature=0.9),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=0.3),
        sft=SFTPhaseConfig(batch_size=4, schedule=ScheduleConfig(learning_rate=0.7)),
    )


async def run_grpo(config: GRPOConfig, folder: RunFolder, environment: ParityReward, tokenizer) -> FinishedRun:
    sets = build_sets(environment, config.evaluation, seed=config.seed)
    log = MetricsLogger(folder, trackers=(), console=Console(file=io.StringIO()))
    async with open_run(config, folder, environment, sets, tokenizer, log=log) as run:
        with log:
            await train(run)
        generations = run.generator.generations
        return FinishedRun(
            config=config,
            environment=environment,
            tokenizer=tokenizer,
            records=read_jsonl(folder.metrics),
            steps=run.trainer.steps,
            training=[generation for generation in generations if generation.params.n == 16],
            evaluation=[generation for generation in generations if generation.params.temperature == 0],
            attempts=[generation for generation in generations if generation.params.n == 4],
            samples=read_jsonl(folder.evaluation),
        )


def seeds_of(generation: Generation) -> list[int]:
    numbers = range(generation.params.n)
    return [hashed_seed(generation.params.seed, p, i) for p in generation.indices for i in numbers]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> FinishedRun:
    """A run of two supervised and three GRPO steps."""
    config, path = make_config(), tmp_path_factory.mktemp("grpo")
    build_character_tokenizer(path / "tokenizer", config.alphabet)
    environment, tokenizer = ParityReward(0.0, NUM_HELD_OUT), load_tokenizer(path / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl_actors, "TrainerClient", NearTrainer, raising=False)
        patch.setattr(rl_actors, "GeneratorClient", RandomGenerator, raising=False)
        return asyncio.run(run_grpo(config, RunFolder(path / "run"), environment, tokenizer))


def test_the_gradient_of_every_step_is_divided_by_the_loss_tokens_of_its_samples(finished):
    assert len(finished.steps) == NUM_SFT_STEPS + NUM_STEPS
    for step in finished.steps:
        assert step.params.grad_divisor == num_loss_tokens(step.samples) > 1


def test_the_learning_rate_schedule_of_grpo_begins_with_the_first_grpo_step(finished):
    rates = [step.params.learning_rate for step in finished.steps]
    assert rates == pytest.approx([0.7, 0.7, 0.3, 0.2, 0.1])
    assert [record["learning_rate"] for record in finished.records if record["step"] > 0] == rates


def test_the_reported_difference_of_logprobs_is_between_trainer_and_generator(finished):
    records = [record for record in finished.records if record["phase"] == "grpo"]
    assert [record["logprob_diff/mean"] for record in records] == pytest.approx([NearTrainer.difference] * NUM_STEPS)
    assert [record["logprob_diff/max"] for record in records] == pytest.approx([NearTrainer.difference] * NUM_STEPS)


def test_no_two_training_completions_of_a_run_are_sampled_with_the_same_seed(finished):
    seeds = [seed for generation in finished.training for seed in seeds_of(generation)]
    assert len(seeds) >= NUM_STEPS * 3 * 16 and len(set(seeds)) == len(seeds)


def test_no_completion_of_an_evaluation_has_a_seed_of_training_or_of_another_set(finished):
    training = {seed for generation in finished.training for seed in seeds_of(generation)}
    own, even = (set(seeds_of(generation)) for generation in finished.attempts[:2])
    assert not training & (own | even) and not own & even


def test_training_problems_are_sampled_at_the_temperature_of_the_config(finished):
    assert {generation.params.temperature for generation in finished.training} == {0.9}
    asked = [prompt for generation in finished.training for prompt in generation.prompts]
    first = NUM_SFT_STEPS * finished.config.sft.batch_size  # the supervised steps took the problems below this index
    problems = [finished.environment.problem(index) for index in range(first, first + len(asked))]
    assert asked == finished.prompts(problems)


def test_the_accuracy_of_each_held_out_set_is_the_mean_reward_of_its_greedy_completions(finished):
    expected = {"eval/reward": NUM_HELD_OUT, "eval/even/reward": NUM_HARDER}
    evaluated = [record for record in finished.records if "eval/reward" in record]
    # The run evaluates before the first step, once after the supervised steps, and after every GRPO step.
    assert [record["step"] for record in evaluated] == [0, NUM_SFT_STEPS, 3, 4, 5]
    assert len(finished.evaluation) == len(expected) * len(evaluated)
    for number, generation in enumerate(finished.evaluation):
        name, num_held_out = list(expected.items())[number % 2]
        held_out = ParityReward(0.0, num_held_out).held_out()
        assert generation.prompts == finished.prompts(held_out)
        passed = finished.rewards(generation, held_out)
        assert evaluated[number // 2][name] == sum(row[0] for row in passed) / num_held_out


def test_pass_at_k_is_estimated_from_the_completions_of_every_problem(finished):
    evaluated = [record for record in finished.records if "eval/reward" in record]
    for record, generation in zip(evaluated, finished.attempts[::2], strict=True):
        assert generation.params.temperature == 0.7
        rewards = finished.rewards(generation, finished.environment.held_out())
        assert record["eval/pass@1"] == pytest.approx(sum(map(sum, rewards)) / (4 * NUM_HELD_OUT))
        pairs = [list(itertools.combinations(row, 2)) for row in rewards]
        found = [sum(max(pair) for pair in row) / len(row) for row in pairs]
        assert record["eval/pass@2"] == pytest.approx(sum(found) / NUM_HELD_OUT)
        assert record["eval/even/pass@2"] >= record["eval/even/pass@1"]


def test_evaluation_jsonl_has_some_completions_of_every_evaluation(finished):
    assert {sample["step"] for sample in finished.samples} == {0, NUM_SFT_STEPS, 3, 4, 5}
    first = [sample for sample in finished.samples if sample["step"] == 0]
    assert [sample["set"] for sample in first] == [""] * NUM_HELD_OUT + ["even"] * 8
    assert {sample["prompt"] for sample in first if not sample["set"]} == {
        problem.prompt for problem in finished.environment.held_out()
    }
    for sample in first:
        assert sample["reward"] == float(sum(map(ord, sample["completion"])) % 2)
        assert sample["samples"] == 4 and 0 <= sample["passed"] <= 4


def test_every_name_of_a_record_is_explained_in_the_docs(finished):
    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    names = set()
    for name in {name for record in finished.records for name in record}:
        general = re.sub(r"pass@\d+", "pass@<k>", name.replace("/even/", "/<name>/"))
        names.add(re.sub(r"age/\d+", "age/<n>", re.sub(r"loss/.*", "loss/<metric>", general)))
    assert {"completion/truncated", "clip_fraction/low", "policy_lag"} <= names
    assert sorted(name for name in names if f"`{name}`" not in explained) == []


def test_the_records_count_the_tokens_of_all_completions(finished):
    records = [record for record in finished.records if record["phase"] == "grpo"]
    num_tokens = 0
    for generation in finished.training:
        for group in generation.answer:
            num_tokens += sum(len(completion.tokens) for completion in group)
    assert sum(record["tokens/generated"] for record in records) == num_tokens
    for record in records:
        assert 1 <= record["completion/length_mean"] <= record["completion/length_max"] <= finished.config.max_tokens
        assert record["completion/truncated"] == 0.0  # the fake generator ends every completion with a stop token


def test_a_record_has_the_speed_of_its_step_and_the_memory_peak_of_the_trainer(finished):
    for record in finished.records:
        assert record["memory/trainer_peak"] == 1.0
        if record["step"] == 0:
            assert record["tokens/s"] is None
            continue
        assert record["tokens/s"] == pytest.approx(record["tokens/trained"] / record["time/step"])
        assert record["tflops/trained"] > 0 and "mfu" not in record  # the peak speed of a CPU is not known


class SomeTooLong(ParityReward):
    """Every third problem leaves no room for a completion."""

    def problem(self, index: int) -> Problem:
        problem = super().problem(index)
        return replace(problem, prompt="1" * 300) if index % 3 == 1 else problem


def test_a_run_skips_problems_that_leave_no_room_and_counts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_actors, "TrainerClient", NearTrainer, raising=False)
    monkeypatch.setattr(rl_actors, "GeneratorClient", RandomGenerator, raising=False)
    config = replace(make_config(), evaluation={}, steps=2)
    build_character_tokenizer(tmp_path / "tokenizer", config.alphabet)
    environment = SomeTooLong(0.0, NUM_HELD_OUT)
    run = asyncio.run(
        run_grpo(config, RunFolder(tmp_path / "run"), environment, load_tokenizer(tmp_path / "tokenizer"))
    )
    drawn = [index for generation in run.training for index in generation.indices]
    # The two supervised steps took the eight problems below 12 that fit.
    assert drawn == [index for index in range(12, 12 + 3 * len(drawn)) if index % 3 != 1][: len(drawn)]
    skipped = {record["step"]: record.get("problems/skipped", 0) for record in run.records}
    assert skipped[1] == 2 and sum(skipped.values()) == (drawn[-1] + 2) // 3


class SavingTrainer(NearTrainer):
    async def save_checkpoint(self, path: str, *, optimizer: bool = True):
        return SimpleNamespace(wait=self.ready)


class LowerReference(ActorOfNothing):
    """Its logprobs are the generator's minus 0.5."""

    async def load_checkpoint(self, path: str, *, optimizer: bool = True) -> None: ...

    async def forward(self, samples):
        return SimpleNamespace(logprobs=[sample.columns["old_logprobs"] - 0.5 for sample in samples])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reward", "loss"])
def test_each_step_takes_the_kl_coefficient_that_the_step_before_returned_also_after_a_resume(
    tmp_path, monkeypatch, kind
):
    actors = {"TrainerClient": SavingTrainer, "GeneratorClient": RandomGenerator, "ReferenceClient": LowerReference}
    for name, fake in actors.items():
        monkeypatch.setattr(rl_actors, name, fake, raising=False)
    config = replace(make_config(), evaluation={}, sft_steps=0, reference_kl=0.1, reference_kl_in=kind)
    config.kl_control = KLControlConfig(target=0.01, gain=0.5)  # every divergence is far above: 1.1 times as much
    build_character_tokenizer(tmp_path / "tokenizer", config.alphabet)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    folder = RunFolder(tmp_path / "run")

    async def take(steps: int, state: dict) -> dict:
        log = MetricsLogger(folder, trackers=(), steps_done=state.get("step", 0), console=Console(file=io.StringIO()))
        more = replace(config, steps=steps)
        async with open_run(more, folder, ParityReward(0.0, 1), [], tokenizer, log=log, state=state) as run:
            with log:
                await train(run)
            return run.supervision.last_state

    asyncio.run(take(5, asyncio.run(take(3, {}))))
    records = [record for record in read_jsonl(folder.metrics) if record["phase"] == "grpo"]
    coefficients = [record["kl/coefficient"] for record in records]
    assert coefficients == pytest.approx([0.1, 0.11, 0.121, 0.1331, 0.14641])
    if kind == "reward":
        for record in records:
            expected = record["kl/coefficient"] * 0.5 * record["completion/length_mean"]
            assert record["reward/kl_penalty"] == pytest.approx(expected)


def minus_a_half(rewards_GN):
    return rewards_GN - 0.5


class AlwaysRight(ParityReward):
    def reward(self, problem, completion):
        return 1.0


@pytest.mark.parametrize(
    "advantage, is_skipped", [pytest.param("grpo", True, marks=pytest.mark.slow), (f"{__name__}:minus_a_half", False)]
)
def test_a_rule_of_ones_own_gets_the_groups_of_equal_rewards(tmp_path, monkeypatch, advantage, is_skipped):
    monkeypatch.setattr(rl_actors, "TrainerClient", NearTrainer, raising=False)
    monkeypatch.setattr(rl_actors, "GeneratorClient", RandomGenerator, raising=False)
    config = replace(make_config(), evaluation={}, sft_steps=0)
    config.rollouts.advantage = advantage
    build_character_tokenizer(tmp_path / "tokenizer", config.alphabet)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    run = asyncio.run(run_grpo(config, RunFolder(tmp_path / "run"), AlwaysRight(0.0, 1), tokenizer))
    steps = [record for record in run.records if record["phase"] == "grpo"]
    assert [bool(record.get("skipped")) for record in steps] == [is_skipped] * NUM_STEPS


def test_a_resume_with_another_reference_kl_takes_it_unless_kl_control_moves_it():
    config = replace(make_config(), reference_kl=0.5)
    assert config.kl(0.1).coefficient == 0.5
    config.kl_control = KLControlConfig(target=0.01)
    assert config.kl(0.1).coefficient == 0.1 and config.kl(None).coefficient == 0.5
    assert replace(config, reference_kl=0.0).kl(0.0).coefficient == 0.0
