"""The tokens that end a completion, from the files of a model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stop_token_ids(directory: str | Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else the tokenizer's, else of config.json, else ().

    tokenizer: the directory's; None: loaded if needed. Raises ValueError naming source, value and
    limit.
    """
    generation = Path(directory) / "generation_config.json"
    config = Path(directory) / "config.json"
    source = str(generation)
    found = _entry(generation, "eos_token_id")
    if found is None and (tokenizer is not None or (Path(directory) / "tokenizer_config.json").is_file()):
        tokenizer = tokenizer if tokenizer is not None else _load(directory)
        source = f"the tokenizer of {directory}"
        found = tokenizer.eos_token_id
    if found is None:
        source = str(config)
        found = _entry(config, "eos_token_id")
    if found is None:
        return ()
    ids = tuple(found) if isinstance(found, list) else (found,)
    owner = "model" if tokenizer is None else "tokenizer"
    num_tokens = _entry(config, "vocab_size") if tokenizer is None else len(tokenizer)
    for token in ids:
        if type(token) is not int or token < 0 or (type(num_tokens) is int and token >= num_tokens):
            last = "…" if num_tokens is None else num_tokens - 1
            raise ValueError(f"{source} has eos_token_id={found}, but the {owner} has the tokens 0 to {last}")
    return ids


def _entry(file: Path, name: str) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text()).get(name)
    except (json.JSONDecodeError, AttributeError):
        raise ValueError(f"{file} is not a JSON object") from None


def _load(directory: str | Path) -> "PreTrainedTokenizerBase":
    # AutoTokenizer chooses a subclass, but its import takes a second
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_fast = (Path(directory) / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if has_fast else AutoTokenizer
    return kind.from_pretrained(str(directory), local_files_only=True)
