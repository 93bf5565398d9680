"""Text to token ids and back, by the tokenizer of a Hugging Face directory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = "<pad>"
EOS = "<eos>"
"""The special tokens of a character-level tokenizer."""
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Encodes prompts as a run does: after the tokenizer's own prefix, and without special tokens that the text spells."""

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
        # AutoTokenizer would choose the same class. But importing AutoTokenizer takes a second, because it imports torch's compiler and models.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def prefix_of(hf: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The tokens that the tokenizer's own rule puts before a text. What it puts after a text, such as EOS, is left out."""
    if hf.init_kwargs.get("character_level"):
        return ()
    text = hf.encode("1", add_special_tokens=False)
    whole = hf.encode("1", add_special_tokens=True)
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return tuple(whole[:start])
    return ()


def encode(hf: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The token ids of a text. No special tokens are added, and a text that spells one does not become it.

    Raises ValueError for a character that a character-level tokenizer lacks, and for a lone surrogate.
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
