"""The default model of the Tinker server: a Qwen3 of a million parameters, over bytes."""

from pathlib import Path
from typing import TYPE_CHECKING

from controllers.tinker_server.config import ServeConfig
from rl_actors import GeneratorConfig, TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{{ message.content + '<|im_end|>' }}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROW_LENGTH = 2048


def tiny_chat() -> ServeConfig:
    """A Tinker server on two CPU cores, with random weights."""
    return ServeConfig(
        name="tiny_chat",
        write_base=write_tiny_chat,
        trainer=TrainerConfig(
            max_sequence_length=ROW_LENGTH,
            tokens_per_row=ROW_LENGTH,
            rows_per_microbatch=2,
            logprob_chunk_tokens=1 << 12,
        ),
        generator=GeneratorConfig(
            max_model_len=ROW_LENGTH,
            max_num_seqs=256,
            max_adapters=8,
            # One thread for vLLM: with two, sampling during training takes several times as long on
            # two cores (`python -m benchmarks serve_overhead together`).
            num_threads=1,
            gpu_memory_utilization=0.3,
            enforce_eager=True,
        ),
    )


def write_tiny_chat(directory: Path) -> None:
    """Write a Qwen3, with the same random weights at each call, and its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    tokenizer = write_chat_tokenizer(partial)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=2 * ROW_LENGTH,
        rope_theta=1000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(partial)
    partial.rename(directory)


def write_chat_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """Write and return a tokenizer of bytes and SPECIAL_TOKENS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)
    return made
