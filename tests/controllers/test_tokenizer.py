"""Tests of the character-level tokenizer. Users and vLLM load it through transformers, and so do most of these tests."""

import pytest
import tokenizers

from controllers.rollouts.tokenizer import alphabet_of, build_character_tokenizer, load_tokenizer
from rl_actors.config import ModelConfig

ALPHABET = "0123456789+-*= \n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_character_tokenizer(directory, ALPHABET)
    # The folder of an exported model also has the model's config, and transformers can choose the tokenizer's class by this
    # config. So this folder has a config, too.
    ModelConfig(vocab_size=32).save(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def test_the_ids_of_the_alphabet_follow_the_ids_of_the_two_special_tokens(tokenizer):
    assert (tokenizer.hf.pad_token_id, tokenizer.stop_token_ids, tokenizer.end_token_id, len(tokenizer)) == (
        0,
        (1,),
        1,
        18,
    )
    assert tokenizer.encode(ALPHABET) == list(range(2, 18))
    assert tokenizer.encode("12+34=") == [3, 4, 12, 5, 6, 15]


@pytest.mark.parametrize("text", ["12+34=46", " 1  2 ", "1 + 2 =\n3\n", "=", ""])
def test_decoding_gives_the_text_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode(text), 1, 0, 0]) == text


def test_streamed_decoding_gives_the_text_back_exactly(directory):
    """vLLM decodes token by token with DecodeStream, which needs only the contents of tokenizer.json."""
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
    assert [stream.step(fast, token) for token in [3, 16, 16, 4, 1]] == ["1", " ", " ", "2", None]


def test_encode_refuses_and_names_characters_outside_the_alphabet(tokenizer):
    with pytest.raises(ValueError, match=r"\['a', 'b'\] of '1b\+a' .* alphabet '0123456789\+"):
        tokenizer.encode("1b+a")
    with pytest.raises(ValueError, match="<"):
        tokenizer.encode("1<eos>")


def test_a_saved_copy_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.hf.save_pretrained(tmp_path)
    copy = load_tokenizer(tmp_path)
    assert copy.encode("1 2") == [3, 16, 4]
    with pytest.raises(ValueError, match="'x'"):
        copy.encode("x")


def test_an_empty_alphabet_a_repeated_character_and_a_folder_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"repeats \['1'\]"):
        build_character_tokenizer(tmp_path, "101")
    with pytest.raises(ValueError, match="empty"):
        build_character_tokenizer(tmp_path, "")
    with pytest.raises(ValueError, match="no tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_one_digit_or_letter_brings_all_characters_of_its_kind_into_the_alphabet():
    assert alphabet_of(["7 + b", "?"]) == " +0123456789?abcdefghijklmnopqrstuvwxyz"
    assert alphabet_of(["T"]) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
