"""A character-level tokenizer in Hugging Face form, for models that are small enough to train from random weights. Trains no merges.

<pad> is 0, <eos> is 1, and the characters of the alphabet follow in their order.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"


def build_character_tokenizer(directory: str | Path, alphabet: str) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers and vLLM load.

    build_character_tokenizer(path, "01+") -> "0": 2, "1": 3, "+": 4. Raises ValueError when the alphabet is empty or repeats a character.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        raise ValueError(f"alphabet {alphabet!r} is empty or repeats {repeated}; it needs distinct characters")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without this decoder, decoding would put a space between two tokens.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "character_level": True,
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The Hugging Face tokenizer of a local directory. Raises ValueError when the directory holds none."""
    from transformers import AutoTokenizer

    if not (Path(directory) / "tokenizer_config.json").is_file():
        raise ValueError(f"{directory} holds no tokenizer_config.json, so it is not the directory of a tokenizer")
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The token ids of a text, without special tokens. Raises ValueError for a character that a character-level tokenizer lacks."""
    if tokenizer.init_kwargs.get("character_level"):
        known = tokenizer.get_vocab()
        missing = sorted({character for character in text if character not in known})
        if missing:
            alphabet = "".join(sorted(known.keys() - {PAD, EOS}, key=known.__getitem__))
            raise ValueError(f"{missing} of {text!r} are not in the tokenizer's alphabet {alphabet!r}")
    return tokenizer.encode(text, add_special_tokens=False)
