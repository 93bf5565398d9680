"""Reads JSON files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file if it holds anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object")
    return values
