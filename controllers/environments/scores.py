"""Functions that score a completion by comparing it with the right answer. They use no model."""

import re
import threading


def exact_match(answer: str, completion: str) -> float:
    return float(completion.strip() == answer.strip())


def math_verify(answer: str, completion: str) -> float:
    """1.0 when both texts have the same mathematical value, such as "0.5" and "$\\frac{1}{2}$"; else 0.0."""
    from math_verify import parse, verify

    # The package implements its timeout with SIGALRM, and Python lets only the main thread handle signals. Other threads use no timeout.
    timeout = 5 if threading.current_thread() is threading.main_thread() else None
    gold, target = (parse(text, parsing_timeout=timeout) for text in (answer, completion))
    return float(verify(gold, target, timeout_seconds=timeout))


def last_match(pattern: str, answer: str, completion: str) -> float:
    """1.0 when the last match of the pattern in the completion equals the last match in the answer; else 0.0.

    If the answer has no match, the whole answer is used instead. If the pattern has groups, only the first group of a match is compared.
    last_match(r"#### (-?\\d+)", "72", "so 70 + 2\\n#### 72") -> 1.0
    """
    found = _last_found(pattern, completion)
    expected = _last_found(pattern, answer)
    return float(found is not None and found == (answer.strip() if expected is None else expected))


def _last_found(pattern: str, text: str) -> str | None:
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    last = found[-1].group(1) if found[-1].re.groups else found[-1].group()
    return (last or "").strip()
