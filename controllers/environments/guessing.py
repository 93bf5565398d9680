"""A guessing game of several turns: find a secret digit by hints of larger or smaller."""

from random import Random

from controllers.environments.base import Problem, Reply

DIGITS = 10


class Game:
    """Replies: "+" if the secret is larger than the guess, "-" smaller, "=" found, "?" no digit."""

    def __init__(self, secret: int, num_guesses: int) -> None:
        self.secret = secret
        self.num_left = num_guesses

    def reset(self) -> str:
        return "?"

    def step(self, completion: str) -> Reply:
        self.num_left -= 1
        if not completion.isdecimal() or len(completion) > 1:
            return Reply(observation="?", is_over=self.num_left == 0)  # counts as a guess
        guess = int(completion)
        if guess == self.secret:
            return Reply(observation="=", reward=1.0, is_over=True)
        return Reply(observation="+" if self.secret > guess else "-", is_over=self.num_left == 0)


class GuessingGame:
    """Ten equally frequent secrets; "held-out", but also trained, are those below num_held_out."""

    def __init__(self, *, seed: int, num_held_out: int, num_guesses: int = 4) -> None:
        if num_guesses < 1:
            raise ValueError(f"num_guesses={num_guesses}; it must be at least 1")
        self.seed = seed
        self.num_held_out = min(num_held_out, DIGITS)
        self.num_guesses = num_guesses

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
