"""Write the rows of two tasks: boolean expressions with their values (booleans.jsonl), and conversations that ask for
the next number (conversations.jsonl).

Usage: python examples/make_rows.py DIRECTORY
"""

import json
import sys
from pathlib import Path
from random import Random


def expression(random: Random, depth: int) -> str:
    """A random boolean expression in which `depth` operators are nested. For depth 2 it may be "(!T&(F|T))"."""
    if depth == 0:
        return random.choice(["T", "F"])
    if random.random() < 0.2:
        return "!" + expression(random, depth - 1)
    return "(" + expression(random, depth - 1) + random.choice("&|") + expression(random, depth - 1) + ")"


def value(text: str) -> bool:
    python = text.replace("!", " not ").replace("&", " and ").replace("|", " or ")
    return bool(eval(python, {"T": True, "F": False}))


def booleans() -> list[dict[str, object]]:
    random = Random(0)
    rows = {}
    for _ in range(40_000):
        text = expression(random, random.choice([2, 3]))
        rows[text] = value(text)
    return [{"expression": text, "value": known} for text, known in rows.items()]


def conversations() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number in Random(1).sample(range(10, 5000), 3000):
        question = {"role": "user", "content": f"Which number follows {number}?"}
        rows.append({"messages": [question, {"role": "assistant", "content": str(number + 1)}]})
    return rows


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("booleans", booleans()), ("conversations", conversations())):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{directory / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
