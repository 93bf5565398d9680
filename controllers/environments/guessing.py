"""A guessing game over several turns: the policy finds a secret digit. Hints say whether the secret is larger or smaller than a guess."""

from random import Random

from controllers.environments.base import Problem
from controllers.environments.episode import Reply

DIGITS = 10


class Game:
    """One game. A guess is one digit. The reply "+" means that the secret is larger, "-" that the secret is smaller, "=" that it was found.

    The reply to a turn that is no digit is "?".
    """

    def __init__(self, secret: int, num_guesses: int) -> None:
        self.secret, self.num_left = secret, num_guesses

    def reset(self) -> str:
        return "?"

    def step(self, completion: str) -> Reply:
        self.num_left -= 1
        if not completion.isdecimal() or len(completion) > 1:
            return Reply(observation="?", is_over=self.num_left == 0)  # no digit: the turn still counts as a guess
        guess = int(completion)
        if guess == self.secret:
            return Reply(observation="=", reward=1.0, is_over=True)
        return Reply(observation="+" if self.secret > guess else "-", is_over=self.num_left == 0)


class GuessingGame:
    """Games in which the ten secrets are equally frequent. The reward of a game is 1 if the secret is found within `num_guesses` guesses.

    There are only ten distinct games, so none can be held out of training. The held-out problems are the games whose secret is below
    num_held_out, and training has these games, too.
    """

    def __init__(self, *, seed: int, num_held_out: int, num_guesses: int = 4) -> None:
        if num_guesses < 1:
            raise ValueError(f"num_guesses={num_guesses}; it must be at least 1")
        self.seed, self.num_held_out, self.num_guesses = seed, min(num_held_out, DIGITS), num_guesses

    def problem(self, index: int) -> Problem:
        secrets = list(range(DIGITS))
        Random(f"{self.seed}/{index // DIGITS}").shuffle(secrets)
        return _problem(secrets[index % DIGITS])

    def held_out(self) -> list[Problem]:
        return [_problem(secret) for secret in range(self.num_held_out)]

    def episode(self, problem: Problem) -> Game:
        return Game(int(problem.answer), self.num_guesses)


def _problem(secret: int) -> Problem:
    return Problem(prompt="?", answer=str(secret), key=str(secret))
