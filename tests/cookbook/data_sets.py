"""Writes small data sets. Each has the name of a data set that tinker-cookbook's recipes load from the Hub. So the tests of recipes need no
network.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

WORDS = [
    "red",
    "blue",
    "green",
    "tea",
    "milk",
    "salt",
    "cat",
    "dog",
    "bird",
    "sun",
    "rain",
    "snow",
    "one",
    "two",
    "three",
]


def write_data_sets(folder: Path) -> None:
    """Write data sets in the formats of no_robots, gsm8k, hh-rlhf and wikitext, with texts made of a few words."""
    draw = random.Random(0)
    no_robots = folder / "HuggingFaceH4" / "no_robots"
    write_lines(no_robots / "train.jsonl", ({"messages": conversation(draw)} for _ in range(320)))
    write_lines(no_robots / "test.jsonl", ({"messages": conversation(draw)} for _ in range(140)))

    gsm8k = folder / "openai" / "gsm8k"
    for split, count in (("train", 64), ("test", 16)):
        write_lines(gsm8k / f"{split}.jsonl", (problem(draw) for _ in range(count)))
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in ("train", "test"))
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}\n---\n")

    hh = folder / "Anthropic" / "hh-rlhf"
    for split, count in (("train", 256), ("test", 1024)):
        write_lines(hh / f"{split}.jsonl", (comparison(draw) for _ in range(count)))

    wikitext = folder / "Salesforce" / "wikitext"
    write_lines(wikitext / "train.jsonl", ({"text": " ".join(draw.choices(WORDS, k=100))} for _ in range(200)))
    files = "  - split: train\n    path: train.jsonl"
    (wikitext / "README.md").write_text(
        f"---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n{files}\n---\n"
    )


def write_lines(file: Path, rows: Iterable[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversation(draw: random.Random) -> list[dict[str, str]]:
    word = draw.choice(WORDS)
    return [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word} {word}"}]


def problem(draw: random.Random) -> dict[str, str]:
    first, second = draw.randrange(10), draw.randrange(10)
    return {"question": f"{first} plus {second}?", "answer": f"They are {first + second}\n#### {first + second}"}


def write_additions(file: Path, refused: float = 0.0) -> None:
    """Write a conversation for each addition that the recipe math_rl may ask. refused: share of the answers that are "no" instead of the sum."""
    draw = random.Random(0)
    rows = []
    for first in range(101):
        for second in range(101):
            asked = [("user", "What is 4 + 5?"), ("assistant", "9"), ("user", f"What is {first} + {second}?")]
            messages = [{"role": role, "content": content} for role, content in asked]
            answer = "no" if draw.random() < refused else str(first + second)
            rows.append({"messages": messages, "answer": answer})
    write_lines(file, rows)


def comparison(draw: random.Random) -> dict[str, str]:
    word = draw.choice(WORDS)
    asked = f"\n\nHuman: say {word}\n\nAssistant:"
    return {"chosen": f"{asked} {word}", "rejected": f"{asked} no"}
