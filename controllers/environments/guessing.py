"""A guessing game over several turns: the policy looks for a secret digit. After each guess a hint says whether the secret is larger or
smaller."""

from random import Random

from controllers.environments.base import Problem
from controllers.environments.episode import Reply

DIGITS = 10


class Game:
    """One game. In each turn the policy guesses one digit and gets a reply.

    The reply "+" means that the secret is larger than the guess, and "-" that the secret is smaller. "=" means that the
    guess is the secret. "?" means that the completion is not a single digit. The prompt of a game is also "?". A game
    ends with "=", or after the last guess.
    """

    def __init__(self, secret: int, num_guesses: int) -> None:
        self.secret = secret
        self.num_left = num_guesses

    def reset(self) -> str:
        return "?"

    def step(self, completion: str) -> Reply:
        self.num_left -= 1
        if not completion.isdecimal() or len(completion) > 1:
            return Reply(observation="?", is_over=self.num_left == 0)  # the turn still counts as a guess
        guess = int(completion)
        if guess == self.secret:
            return Reply(observation="=", reward=1.0, is_over=True)
        return Reply(observation="+" if self.secret > guess else "-", is_over=self.num_left == 0)


class GuessingGame:
    """The task: games in which the ten secrets are equally frequent. The reward is 1 if the policy finds the secret
    within `num_guesses` guesses, and else 0.

    There are only ten distinct games, so none is kept out of training. The "held-out" problems are the games whose secret
    is below num_held_out. Training has these games, too.
    """

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
