"""No held-out problem is trained: not by another part of a mixture, not by another row with its prompt, not by a later run."""

import json
import random
from pathlib import Path
from random import Random

import pytest

from configs import CONFIGS
from controllers.environments import EnvironmentConfig, Problem, build_environment
from controllers.environments.held_out import HeldOut, digest_of, digests_of, operands_or_key
from controllers.observe.run_folder import RunFolder
from controllers.program import cli
from controllers.program.launch import _environments, _prepare


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


class Numbers:
    """A user's own task: trains on 10 to 49, of which other parts may hold out some, and holds out numbers below 10."""

    def __init__(self, seed: int, num_held_out: int) -> None:
        self.num_held_out = num_held_out

    def problem(self, index: int) -> Problem:
        text = str(10 + Random(index).randrange(40))
        return Problem(prompt=text, answer=text, key=text)

    def held_out(self) -> list[Problem]:
        return [Problem(prompt=str(n), answer=str(n), key=str(n)) for n in range(min(10, self.num_held_out))]

    def reward(self, problem: Problem, completion: str) -> float:
        return 0.0


def keys(environment, count: int = 400) -> tuple[set[str], set[str]]:
    """(held-out keys, keys of the first training problems)."""
    held_out = {problem.key for problem in environment.held_out()}
    return held_out, {environment.problem(index).key for index in range(count)}


def test_a_file_that_is_mixed_twice_trains_none_of_its_held_out_problems(tmp_path):
    task = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}?", "answer": str(n)} for n in range(400)])
    parts = [{"task": task, "weight": 3, "name": "a", "seed": 1}, {"task": task, "name": "b", "seed": 2}]
    held_out, trained = keys(build_environment(EnvironmentConfig(mixture=parts, num_held_out=75)), 1000)
    assert len(held_out) > 60 and not held_out & trained


PARTS = ("file", "same file", "csv", "reasoning-gym", "own")


@pytest.mark.parametrize("block", range(10))
def test_no_mixture_trains_a_problem_that_one_of_its_parts_holds_out(tmp_path, block):
    texts = [str(n) for n in range(60)]
    jsonl = write(tmp_path / "rows.jsonl", [{"prompt": text, "answer": text} for text in texts])
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\n" + "".join(f"{text} ,{text}\n" for text in texts[20:]))
    sums = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
    }
    for number in range(20):
        draw = random.Random(f"{block}/{number}")
        parts: list[dict[str, object]] = []
        for place, kind in enumerate(draw.choices(PARTS, k=draw.randint(2, 4))):
            own: dict[str, object] = {"task": jsonl}
            if kind == "csv":
                own = {"task": str(table)}
            elif kind == "reasoning-gym":
                own = {"task": "basic_arithmetic", "options": sums, "prompt": "{expression}"}
            elif kind == "own":
                own = {"task": f"{__name__}:Numbers"}
            own |= {"name": str(place), "weight": draw.randint(1, 3), "seed": draw.randrange(5)}
            parts.append(own | {"num_held_out": draw.randint(2, 8)})
        held_out, trained = keys(build_environment(EnvironmentConfig(mixture=parts)), 200)
        assert held_out and trained and not held_out & trained, parts


def test_the_key_of_a_row_is_its_rendered_prompt_without_its_white_space(tmp_path):
    rows = [{"context": f"c{n}", "question": "why?", "expression": "1 + 1", "answer": "a"} for n in range(200)]
    task = write(tmp_path / "rows.jsonl", rows)
    config = EnvironmentConfig(task=task, prompt_column="question", prompt="{context}\n{question}", num_held_out=50)
    environment = build_environment(config)
    held_out, trained = keys(environment)
    assert len(held_out) == 50 and len(trained) == 150 and environment.num_excluded == 0


def test_rows_with_the_prompt_of_a_held_out_row_are_counted_and_not_trained(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": "a"} for n in range(40)]
    again = [{"prompt": f" {n}? ", "answer": "b"} for n in range(40)]  # the same prompts but for white space
    environment = build_environment(
        EnvironmentConfig(task=write(tmp_path / "rows.jsonl", rows + again), num_held_out=10)
    )
    held_out, trained = keys(environment)
    assert len(held_out) == 10 and len(trained) == 30 and environment.num_excluded == 10


def run_config(model: str, task: str, seed: int):
    config = CONFIGS["controllers.grpo"]["blank"]()
    config.seed, config.trainer.hf_path = seed, model
    config.environment = EnvironmentConfig(task=task, num_held_out=10)
    return config


def test_a_run_from_an_export_holds_out_what_the_exported_run_held_out(tmp_path):
    task = write(tmp_path / "rows.jsonl", [{"prompt": f"{n}?", "answer": "a"} for n in range(60)])
    first = run_config("", task, seed=0)
    environment, _ = _environments(first)
    _prepare(RunFolder(tmp_path / "first"), first, environment, "grpo")
    model = tmp_path / "model"
    model.mkdir()
    (model / "held_out.json").write_text((tmp_path / "first" / "held_out.json").read_text())

    unaware, _ = _environments(run_config("", task, seed=7))
    assert keys(unaware)[0] != keys(environment)[0]
    second = run_config(str(model), task, seed=7)
    later, sets = _environments(second)
    assert keys(later)[0] == keys(environment)[0] == {problem.key for problem in sets[0].problems}
    assert not keys(later)[1] & keys(environment)[0]
    second.environment.num_held_out = 4  # the other six are not trained either
    fewer, _ = _environments(second)
    assert len(keys(fewer)[0]) == 4 and not keys(fewer)[1] & keys(environment)[0]
    _prepare(RunFolder(tmp_path / "second"), second, fewer, "grpo")
    kept = HeldOut.read(tmp_path / "second" / "held_out.json")
    assert kept is not None and kept.seed == 0 and kept.digests == set(map(digest_of, keys(environment)[0]))


def test_a_damaged_list_of_held_out_problems_is_refused_by_name(tmp_path):
    (tmp_path / "held_out.json").write_text('{"seed": 1, "keys": ["a"')
    with pytest.raises(ValueError, match="held_out.json is not valid JSON"):
        run_config(str(tmp_path), "count_bits", 0).held_out_before()


def parsed(*flags: str) -> EnvironmentConfig:
    return cli.parse("prog", CONFIGS["controllers.grpo"], ["--config", "tiny", "--dry-run", *flags]).config.environment


def test_another_task_drops_the_options_of_the_configs_own_task(capsys):
    own = parsed("--task", f"{__name__}:Numbers")
    assert (own.options, own.prompt, own.prompt_pattern, own.remove_whitespace) == ({}, "{question}", "", False)
    assert "options, prompt" in capsys.readouterr().err
    assert build_environment(own).held_out()
    given = parsed(
        "--environment.task", "count_bits", "--environment.prompt", "{binary}=", "--environment.options", '{"max_n": 9}'
    )
    assert (given.prompt, given.options) == ("{binary}=", {"max_n": 9})
    assert parsed("--task", "count_bits").held_out_task == ""
    same = parsed("--task", parsed().task)
    assert same == parsed() and same.options


def test_the_held_out_operands_of_one_arithmetic_task_are_not_trained_by_another():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    options |= {"allow_parentheses": False, "allow_negation": False}
    first = build_environment(EnvironmentConfig(options=options, num_held_out=8, prompt="{expression}=", seed=0))
    second = build_environment(
        EnvironmentConfig(options=options, num_held_out=8, prompt="What is {expression}?", seed=7)
    )
    second.exclude(digests_of(first.held_out()))
    excluded = {operands_or_key(problem) for problem in first.held_out()}
    assert excluded.isdisjoint(operands_or_key(second.problem(index)) for index in range(500))
