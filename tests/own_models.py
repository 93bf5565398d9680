"""Model directories like those of users: a tiny Qwen3 or Llama with a byte-level tokenizer, a chat template and a generation_config.json."""

import json
from dataclasses import replace
from pathlib import Path

from references import BASE, save_random

from rl_actors import ModelConfig

END, START = "<|im_end|>", "<|im_start|>"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""A template like Qwen3's. The assistant's text is between {% generation %} and {% endgeneration %}, so that transformers can mark the tokens
of this text."""


def save_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> int:
    """Write the files of a byte-level tokenizer without merges, and return the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", START, END)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    fast.save_pretrained(str(directory))
    return len(fast)


def save_model(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, **dimensions: object) -> ModelConfig:
    """Write a model with random weights and a tokenizer, and return the model's config. generation_config.json has two end tokens.

    dimensions: fields of ModelConfig. As in many published models, vocab_size is larger than the tokenizer's vocabulary by default.
    """
    directory.mkdir(parents=True, exist_ok=True)
    num_tokens = save_tokenizer(directory, chat_template=chat_template)
    values = {"vocab_size": num_tokens + 5, "head_dim": 32, "max_position_embeddings": 512, **dimensions}
    config = replace(BASE, **values)
    save_random(directory, config)
    ends = {"eos_token_id": [num_tokens - 1, num_tokens - 3], "pad_token_id": num_tokens - 3}
    (directory / "generation_config.json").write_text(json.dumps(ends))
    return config


def put_in_hub_cache(cache: Path, model_id: str, revision: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """Make the folder of a model in a Hub cache, in huggingface_hub's layout. The caller writes the model's files to the returned folder."""
    folder = cache / f"models--{model_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return snapshot
