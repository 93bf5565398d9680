"""Tests of the check of all problems before a run, and of the problems that a run skips."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_models import save_tokenizer

from controllers.dpo import DPOConfig
from controllers.environments import EnvironmentConfig, Problem, build_environment
from controllers.environments.mixture import MixedEnvironment, Part
from controllers.grpo import GRPOConfig
from controllers.program import launch
from controllers.rollouts.episodes import EpisodeLimits
from controllers.rollouts.evaluation import EvaluationSet, build_sets
from controllers.rollouts.groups import RolloutConfig, Rollouts
from controllers.rollouts.queue import RolloutQueue
from controllers.rollouts.tokenizer import build_character_tokenizer, load_tokenizer
from controllers.run import problems
from controllers.run.config import RunConfig
from controllers.run.problems import Rule, TrainingProblems, listed, require_fitting
from controllers.sft import SFTConfig, SFTPhase, SFTPhaseConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig

LENGTH, MAX_TOKENS = 32, 8
LONGEST = LENGTH - MAX_TOKENS  # of a prompt
MODEL = ModelConfig(vocab_size=16, max_position_embeddings=LENGTH)
FIELDS = {
    "max_tokens": MAX_TOKENS,
    "alphabet": "0123456789+=",
    "trainer": TrainerConfig(model=MODEL, max_sequence_length=LENGTH, tokens_per_row=LENGTH),
    "generator": GeneratorConfig(model=MODEL, max_model_len=LENGTH),
}


@pytest.fixture
def tokenizer(tmp_path):
    build_character_tokenizer(tmp_path / "tokenizer", FIELDS["alphabet"])
    return load_tokenizer(tmp_path / "tokenizer")


def rows_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1), "rejected": "0"} for n in range(count)]


def write(folder: Path, rows: list[dict[str, str]]) -> str:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "tasks.jsonl")


def check(path: str, kind: type[RunConfig] = GRPOConfig, **more: str) -> None:
    """The check that a run of the file makes before it starts."""
    made = EnvironmentConfig(task=path, num_held_out=8, **more)
    config = kind(environment=made, **FIELDS)
    environment = build_environment(made)
    launch._tokenizer(config, environment, build_sets(environment, {}, seed=0))


@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig, DPOConfig])
def test_an_empty_prompt_is_refused_by_every_kind_of_run(tmp_path, kind):
    rows = rows_of(1100)
    rows[1050]["prompt"] = ""
    rejected = "rejected" if kind is DPOConfig else ""
    with pytest.raises(ValueError, match="tasks.jsonl:1051: the prompt is empty"):
        check(write(tmp_path, rows), kind, rejected_column=rejected)


@pytest.mark.parametrize("row", [3, 1010, 2499])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "1" * 25,
            "the prompt '1111111111111111111111111' has 25 tokens, but with max_tokens=8 a prompt may have at most 24",
        ),
        ("", "the prompt is empty"),
        ("a=", r"\['a'\] of 'a=' are not in the tokenizer's alphabet"),
    ],
)
def test_a_row_that_no_run_can_take_is_refused_wherever_it_is_in_the_file(tmp_path, row, prompt, message):
    rows = rows_of(2500)
    rows[row]["prompt"] = prompt
    with pytest.raises(ValueError, match=rf"tasks.jsonl:{row + 1}: {message}"):
        check(write(tmp_path, rows))


def test_the_longest_prompt_that_leaves_room_for_a_whole_completion_is_accepted(tmp_path):
    rows = rows_of(1100)
    rows[1050]["prompt"] = "1" * LONGEST
    check(write(tmp_path, rows))


def test_the_rows_of_supervised_training_need_room_for_their_answers_only(tmp_path):
    rows = rows_of(1100)
    rows[1050] = {"prompt": "1" * 28, "answer": "1" * 4}
    path = write(tmp_path, rows)
    check(path, SFTConfig)
    rows[1050]["answer"] += "1"
    path = write(tmp_path, rows)
    with pytest.raises(
        ValueError, match="tasks.jsonl:1051: the prompt .* have 33 tokens, but trainer.max_sequence_length=32"
    ):
        check(path, SFTConfig)


@pytest.mark.parametrize("column", ["answer", "rejected"])
def test_both_answers_of_every_pair_are_checked(tmp_path, column):
    rows = rows_of(1100)
    rows[1050][column] = "1" * 40
    with pytest.raises(ValueError, match="tasks.jsonl:1051: .* have 47 tokens, but trainer.max_sequence_length=32"):
        check(write(tmp_path, rows), DPOConfig, rejected_column="rejected")


def test_the_alphabet_of_a_run_has_the_characters_of_every_row(tmp_path):
    rows = rows_of(3000)
    rows[2998] = {"prompt": "7*8=", "answer": "56"}
    made = EnvironmentConfig(task=write(tmp_path, rows), num_held_out=8)
    environment = build_environment(made)
    config = GRPOConfig(environment=made, **FIELDS | {"alphabet": "auto"})
    assert "*" in launch._with_alphabet(config, environment, build_sets(environment, {}, seed=0)).alphabet


class Endless:
    """A source of problems without an end. Problem i is "i+i=", and every third one has a prompt without room for a completion."""

    def problem(self, index: int) -> Problem:
        text = "1" * 30 if index % 3 == 1 else f"{index}+{index}="
        return Problem(prompt=text, answer=str(2 * index), key=text)

    def held_out(self) -> list[Problem]:
        return [Problem(prompt="0+1=", answer="1", key="0+1=")]

    def reward(self, problem: Problem, completion: str) -> float:
        return 1.0


class OneTooLong(Endless):
    def problem(self, index: int) -> Problem:
        return Problem(prompt="1+1=", answer="1" * 30 if index == 1 else "2", key=str(index))


class OnlyLong(Endless):
    def problem(self, index: int) -> Problem:
        return Problem(prompt="1" * 30, answer="1", key="1")


def test_an_endless_source_skips_and_counts_what_does_not_fit_and_names_it_once(tokenizer):
    config = GRPOConfig(**FIELDS)
    source = TrainingProblems(config, tokenizer, Endless())
    assert source.take(0, 4) == ([0, 2, 3, 5], 6)
    metrics, news = source.report()
    assert metrics == {"problems/skipped": 2}
    assert "training problem 1 was skipped: the prompt '1111" in news and "has 30 tokens" in news
    assert source.take(6, 2) == ([6, 8], 9)
    assert source.report() == ({"problems/skipped": 1}, "")
    assert source.report() == ({}, "")


def test_a_problem_that_the_tokenizer_refuses_is_skipped_wherever_it_is(tokenizer):
    class Strange(Endless):
        def problem(self, index: int) -> Problem:
            return Problem(prompt="1+x=" if index == 5 else "1+1=", answer="2", key=str(index))

    config = GRPOConfig(**FIELDS)
    require_fitting(config, tokenizer, Strange(), [])
    assert TrainingProblems(config, tokenizer, Strange()).take(4, 2) == ([4, 6], 7)


def test_a_source_that_is_continued_gives_the_problems_of_one_that_was_not_interrupted(tokenizer):
    config = GRPOConfig(**FIELDS)
    whole, _ = TrainingProblems(config, tokenizer, Endless()).take(0, 40)
    taken, cursor = [], 0
    for count in (1, 7, 2, 30):
        indices, cursor = TrainingProblems(config, tokenizer, Endless()).take(cursor, count)
        taken += indices
    assert taken == whole and cursor == whole[-1] + 1


def test_the_queue_of_rollouts_draws_no_skipped_problem_and_its_state_says_where_it_goes_on(tokenizer):
    config = GRPOConfig(**FIELDS)

    def queue(**state: object) -> RolloutQueue:
        take = TrainingProblems(config, tokenizer, Endless()).take
        limits = EpisodeLimits(max_turns=1, max_tokens=64, max_tokens_per_turn=8)
        rollouts = Rollouts(RolloutConfig(), Endless(), tokenizer, None, limits=limits, seed=0, take=take)
        return RolloutQueue(rollouts, **state)

    first = queue()
    assert [place.index for place in first._draw(4)] == [0, 2, 3, 5]
    assert first.state() == {"cursor": 6, "pending": [0, 2, 3, 5]}
    resumed = queue(**first.state())
    assert [place.index for place in resumed._draw(7)] == [0, 2, 3, 5, 6, 8, 9] and resumed.state()["cursor"] == 10


def test_a_supervised_phase_trains_on_no_skipped_problem_and_its_state_says_where_it_goes_on(tokenizer):
    config = SFTConfig(**FIELDS)
    source = TrainingProblems(config, tokenizer, OneTooLong())
    run = SimpleNamespace(state={}, environment=OneTooLong(), tokenizer=tokenizer, problems=source)
    phase = SFTPhase(run, SFTPhaseConfig(batch_size=3), total_steps=1)
    samples = asyncio.run(phase._next_samples())
    assert [len(sample) for sample in samples] == [5, 5, 5] and phase.state()["cursor"] == 4


def test_an_endless_source_of_which_nothing_fits_is_refused_before_the_run(tokenizer):
    config, sets = GRPOConfig(**FIELDS), build_sets(Endless(), {}, seed=0)
    require_fitting(config, tokenizer, Endless(), sets)
    with pytest.raises(
        ValueError, match="none of the first 1000 problems fits, the first one because the prompt '1111"
    ):
        require_fitting(config, tokenizer, OnlyLong(), sets)
    with pytest.raises(ValueError, match="1000 training problems in a row were skipped, problem 999 because"):
        TrainingProblems(config, tokenizer, OnlyLong()).take(0, 1)


def test_a_held_out_problem_of_an_endless_source_must_fit(tokenizer):
    long = [EvaluationSet(name="", environment=Endless(), problems=[Endless().problem(1)])]
    with pytest.raises(ValueError, match="has 30 tokens, but with max_tokens=8 a prompt may have at most 24"):
        require_fitting(GRPOConfig(**FIELDS), tokenizer, Endless(), long)


def test_the_rows_of_a_part_of_a_mixture_are_checked_and_its_endless_part_is_skipped(tmp_path, tokenizer):
    rows = rows_of(1100)
    rows[1050]["prompt"] = "1" * 25
    environment = build_environment(EnvironmentConfig(task=write(tmp_path, rows), num_held_out=8))
    parts = [Part(name=name, weight=0.5) for name in ("file", "endless")]
    mixed = MixedEnvironment(parts, [environment, Endless()], seed=0)
    assert listed(mixed) == (environment.training_problems, False)
    with pytest.raises(ValueError, match="tasks.jsonl:1051: the prompt .* has 25 tokens"):
        require_fitting(GRPOConfig(**FIELDS), tokenizer, mixed, build_sets(mixed, {}, seed=0))


def test_a_run_takes_the_problems_of_a_file_without_encoding_them_again(tmp_path):
    environment = build_environment(EnvironmentConfig(task=write(tmp_path, rows_of(40)), num_held_out=8))
    assert TrainingProblems(GRPOConfig(**FIELDS), None, environment).take(5, 3) == ([5, 6, 7], 8)


def test_a_long_check_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(problems, "SECONDS_BETWEEN_LINES", 0.0)
    check(write(tmp_path, rows_of(2500)))
    assert "checking the problems: 1,000 of 2,492\n" in capsys.readouterr().err


def test_conversations_without_any_text_are_empty():
    rule = Rule(GRPOConfig(**FIELDS), None, Endless(), is_sampled=True)
    empty = Problem(prompt="", answer="", key="", messages=[{"role": "user", "content": ""}])
    assert rule._of_prompt(empty, 5) == "the prompt is empty"
    answered = replace(empty, messages=[{"role": "user", "content": "1+1="}, {"role": "tool", "content": ""}])
    assert rule._of_prompt(answered, 5) == ""


def test_problems_that_are_encoded_together_get_the_tokens_that_each_gets_alone(tmp_path):
    save_tokenizer(tmp_path)
    llama = json.loads((tmp_path / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    llama["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(llama))
    hf = load_tokenizer(tmp_path)
    texts = ["1+1=", "", "naïve <|im_end|> text", "x" * 300, " \n"]
    plain = [Problem(prompt=text, answer=text[::-1], key=text) for text in texts]
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for batch in (plain, [*plain, replace(plain[0], messages=talk)]):
        assert hf.encode_prompts(batch) == [hf.encode_prompt(each) for each in batch]
        with_text = [each for each in batch if each.prompt]
        assert hf.sample_lengths(with_text) == [len(hf.to_sample(each)) for each in with_text]
    assert hf.encode_prompts([]) == hf.sample_lengths([]) == []
