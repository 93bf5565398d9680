"""Text to token ids and back, by the tokenizer of a Hugging Face directory, and the tokens that end a
completion.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_actors.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = "<pad>"
EOS = "<eos>"
"""The special tokens of a character-level tokenizer."""
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Encodes prompts as a run does: after the tokenizer's own prefix, see `encode`."""

    hf: "PreTrainedTokenizerBase"
    prefix_token_ids: tuple[int, ...]

    @staticmethod
    def load(directory: str) -> "TextCodec":
        """Raises ValueError if the directory holds no tokenizer."""
        hf = load_hf(directory)
        return TextCodec(hf, prefix_of(hf))

    def encode(self, text: str) -> list[int]:
        return [*self.prefix_token_ids, *encode(self.hf, text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.hf.decode(list(tokens), skip_special_tokens=True)


def load_hf(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a local directory. Raises ValueError if the directory holds none."""
    config = Path(directory) / "tokenizer_config.json"
    if not config.is_file():
        raise ValueError(f"{directory} holds no tokenizer_config.json, so it is not the directory of a tokenizer")
    if '"character_level": true' in config.read_text():
        # AutoTokenizer would choose the same class, but its import takes a second
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def prefix_of(hf: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens that the tokenizer's own rule puts before a text."""
    if hf.init_kwargs.get("character_level"):
        return ()
    text = hf.encode("1", add_special_tokens=False)
    whole = hf.encode("1", add_special_tokens=True)
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return tuple(whole[:start])
    return ()


def encode(hf: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Without special tokens, also if the text spells one. Raises ValueError for a character that a
    character-level tokenizer lacks, and for a lone surrogate.
    """
    require_text(text)
    if hf.init_kwargs.get("character_level"):
        known = hf.get_vocab()
        missing = sorted({character for character in text if character not in known})
        if missing:
            alphabet = "".join(sorted(known.keys() - {PAD, EOS}, key=known.__getitem__))
            shown = repr(alphabet) if len(alphabet) <= 200 else f"of {len(alphabet)} characters"
            raise ValueError(f"{missing} of {text!r} are not in the tokenizer's alphabet {shown}")
    return hf.encode(text, add_special_tokens=False, split_special_tokens=True)


def require_text(text: str) -> None:
    if not text.isascii() and SURROGATE.search(text):
        raise ValueError(f"{text[:80]!a} holds a lone surrogate, which is no text")


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
        tokenizer = tokenizer or load_hf(directory)
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
    return read_object(file).get(name) if file.is_file() else None
