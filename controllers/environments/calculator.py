"""A task with a tool: the policy multiplies two numbers, and can ask a calculator."""

import ast
import itertools
import operator
from collections.abc import Callable, Sequence
from random import Random

from controllers.environments.base import Problem, Reply
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
    """Refuses an expression."""


def calculate(expression: str) -> int:
    """calculate("12*34") -> 408. Raises CalculatorError for anything that could run code or take long."""
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
    """The completion "c12*34" gets "=408?", or "=?" if refused; any other is the answer."""

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
    """Products of two-digit numbers, such as "47*83?". num_held_out counts a*b and b*a as one."""

    def __init__(self, *, seed: int, num_held_out: int) -> None:
        self.seed = seed
        pairs = itertools.product(range(10, 100), repeat=2)
        products = [Problem(prompt=f"{a}*{b}?", answer=str(a * b), key=f"{min(a, b)}*{max(a, b)}") for a, b in pairs]
        keys = sorted({problem.key for problem in products}, key=lambda key: fraction(key, seed))
        if not 1 <= num_held_out <= len(keys) // 2:
            raise ValueError(
                f"num_held_out={num_held_out}; it must be in [1, {len(keys) // 2}], at most half of all products"
            )
        held_out = set(keys[:num_held_out])
        self._held_out = list({problem.key: problem for problem in products if problem.key in held_out}.values())
        self._training = [problem for problem in products if problem.key not in held_out]

    def problem(self, index: int) -> Problem:
        return Random(f"{self.seed}/{index}").choice(self._training)

    def held_out(self) -> list[Problem]:
        return list(self._held_out)

    def episode(self, problem: Problem) -> Calculation:
        return Calculation(problem)

    def demonstration(self, problem: Problem) -> Sequence[str]:
        """One third ask the calculator and repeat its answer, the others guess a number, so that SFT
        shows the form of a completion, and only RL that asking pays."""
        draw = Random(f"{self.seed}/{problem.prompt}")
        if draw.randrange(3):
            return [str(draw.randint(1000, 1999))]
        return [f"c{problem.prompt.removesuffix('?')}", problem.answer]
