"""An example task with a graded reward: add 1 to a number. The reward falls with the distance from the right answer.

PYTHONPATH=examples python -m controllers.grpo --config blank --task next_number:NextNumber
"""

from random import Random

from controllers.environments import Problem


class NextNumber:
    """The answer to the prompt "17->" is "18"."""

    def __init__(self, seed: int, num_held_out: int) -> None:
        numbers = Random(seed).sample(range(10, 1000), k=900)
        problems = [Problem(prompt=f"{n}->", answer=str(n + 1), key=str(n)) for n in numbers]
        self.test, self.training = problems[:num_held_out], problems[num_held_out:]

    def held_out(self) -> list[Problem]:
        return self.test

    def problem(self, index: int) -> Problem:
        return self.training[index % len(self.training)]

    def reward(self, problem: Problem, completion: str) -> float:
        """1 for the right number. A wrong number gets 0.1 less for every unit of distance from the right number, but at
        least 0. A completion that is not an integer gets 0.
        """
        try:
            distance = abs(int(completion) - int(problem.answer))
        except ValueError:
            return 0.0
        return max(0.0, 1 - distance / 10)
