"""A task with a tool: the policy multiplies two numbers, and can ask a calculator for the product."""

import ast
import operator
from collections.abc import Callable, Sequence
from random import Random

from controllers.environments.base import Problem
from controllers.environments.episode import Reply
from controllers.environments.held_out import fraction

LONGEST_EXPRESSION = 200
LARGEST_NUMBER = 10**30

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """Raised when the calculator refuses an expression."""


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers, + - * // % and parentheses. For example, calculate("12*34") is 408.

    Names, calls, powers and all other Python syntax are refused, so no expression runs code. An expression has at most LONGEST_EXPRESSION
    characters, and every intermediate number has an absolute value of at most LARGEST_NUMBER. So no expression takes long. Raises
    CalculatorError for an expression that is refused.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise CalculatorError(
            f"the expression has {len(expression)} characters; at most {LONGEST_EXPRESSION} are allowed"
        )
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise CalculatorError(f"{expression!r}: {error}") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            found = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            found = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise CalculatorError(f"only integers, + - * // % and parentheses are allowed, not {type(node).__name__}")
    if abs(found) > LARGEST_NUMBER:
        raise CalculatorError(f"the absolute value of a number is larger than {LARGEST_NUMBER:.0e}")
    return found


class Calculation:
    """The episode of one problem. If a completion begins with "c", the calculator gets the rest of the completion. Any other completion is the
    answer to the problem and ends the episode.

    The calculator replies "=408?" if the value is 408, and "=?" if it refuses the expression.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def reset(self) -> str:
        return self.problem.prompt

    def step(self, completion: str) -> Reply:
        if not completion.startswith("c"):
            return Reply(reward=float(completion == self.problem.answer), is_over=True)
        try:
            return Reply(observation=f"={calculate(completion[1:])}?")
        except CalculatorError:
            return Reply(observation="=?")


class Products:
    """An environment whose problems are products of two two-digit numbers, such as "47*83?". The right answer gets the reward 1, any other
    answer 0.

    num_held_out: number of products that are held out for validation. a*b and b*a count as one product.
    """

    def __init__(self, *, seed: int, num_held_out: int) -> None:
        self.seed = seed
        factors = range(10, 100)
        self._all = [_product(a, b) for a in factors for b in factors]

        # a*b and b*a have the same key. So a run never trains on a*b and validates on b*a.
        kept = sorted({problem.key for problem in self._all}, key=lambda key: fraction(key, seed))
        if not 1 <= num_held_out <= len(kept) // 2:
            raise ValueError(
                f"num_held_out={num_held_out}; it must be in [1, {len(kept) // 2}], at most half of all products"
            )
        held_out = set(kept[:num_held_out])
        self._held_out = list({problem.key: problem for problem in self._all if problem.key in held_out}.values())
        self._training = [problem for problem in self._all if problem.key not in held_out]

    def problem(self, index: int) -> Problem:
        return Random(f"{self.seed}/{index}").choice(self._training)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def episode(self, problem: Problem) -> Calculation:
        return Calculation(problem)

    def demonstration(self, problem: Problem) -> Sequence[str]:
        """The policy's completions in one episode, for the supervised phase before RL.

        One third of the demonstrations ask the calculator and then repeat its answer. The other demonstrations have only one completion: a
        guess from 1000 to 1999. So the demonstrations show the form of a completion, but not that asking the calculator is better. After the
        supervised phase a greedy policy guesses. The rewards then teach it to ask.
        """
        draw = Random(f"{self.seed}/{problem.prompt}")
        if draw.randrange(3):
            return [str(draw.randint(1000, 1999))]
        return [f"c{problem.prompt.removesuffix('?')}", problem.answer]


def _product(a: int, b: int) -> Problem:
    return Problem(prompt=f"{a}*{b}?", answer=str(a * b), key=f"{min(a, b)}*{max(a, b)}")
