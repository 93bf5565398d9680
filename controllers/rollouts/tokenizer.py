"""The tokenizer of a run: the model's own, or one of characters: <pad>, <eos>, then an alphabet."""

import json
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from controllers.environments import Message, Observation, Problem
from controllers.rollouts.chat import ChatConfig, ChatTemplate
from rl_actors import Sample, texts
from rl_actors.texts import EOS, PAD, stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SPECIAL_TOKENS = 2


def build_character_tokenizer(directory: str | Path, alphabet: str) -> None:
    """Save it for transformers and vLLM. Raises ValueError for an empty or repeating alphabet."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if not alphabet or repeated:
        raise ValueError(
            f"alphabet {alphabet!r} is empty or repeats {repeated}; it needs at least one character, and no character twice"
        )
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins tokens without spaces
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


def alphabet_of(all_texts: Iterable[str]) -> str:
    """The characters of the texts, ascending, with all digits or letters of a case if one occurs."""
    found = set().union(*all_texts)
    for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if found & set(kind):
            found |= set(kind)
    return "".join(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Turns problems into tokens, and tokens into text."""

    hf: "PreTrainedTokenizerBase"
    chat: ChatTemplate
    stop_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...] = ()  # such as BOS; chat templates write their own

    def __len__(self) -> int:
        return len(self.hf)

    @property
    def end_token_id(self) -> int:
        own = self.hf.eos_token_id
        return own if own in self.stop_token_ids else self.stop_token_ids[0]

    def encode(self, text: str) -> list[int]:
        return texts.encode(self.hf, text)

    def encode_beginning(self, text: str) -> list[int]:
        return [*self.prefix_token_ids, *self.encode(text)]

    def encode_prompt(self, problem: Problem) -> list[int]:
        messages = self._messages(problem)
        return self.chat.prompt(messages, problem.tools) if messages else self.encode_beginning(problem.prompt)

    def encode_prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        """`encode_prompt` of many problems, faster for texts without messages."""
        if not self._is_plain(problems):
            return [self.encode_prompt(problem) for problem in problems]
        return [[*self.prefix_token_ids, *row] for row in self._encode_all([each.prompt for each in problems])]

    def sample_lengths(self, problems: Sequence[Problem]) -> list[int]:
        if not self._is_plain(problems):
            return [len(self.to_sample(problem)) for problem in problems]
        pairs = zip(self.encode_prompts(problems), self._encode_all([each.answer for each in problems]), strict=True)
        # plus the end token, minus the shift of the targets
        return [len(prompt) + len(answer) for prompt, answer in pairs]

    def _is_plain(self, problems: Sequence[Problem]) -> bool:
        return not self.hf.init_kwargs.get("character_level") and not any(map(self._messages, problems))

    def _encode_all(self, all_texts: Sequence[str]) -> list[list[int]]:
        if not all_texts:
            return []
        for text in all_texts:
            texts.require_text(text)
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
        return self.hf(list(all_texts), **options)["input_ids"]

    def encode_observation(self, observation: Observation, *, after: int | None = None) -> list[int]:
        """Token ids as they are. after: last token of the policy's turn before it, if any."""
        messages = observation
        if isinstance(observation, str):
            if not self.chat.config.enabled:
                return self.encode_beginning(observation) if after is None else self.encode(observation)
            messages = [Message(role="user", content=observation)]
        if not messages or not isinstance(messages[0], dict):
            return cast(list[int], list(observation))
        messages = cast(list[Message], messages)
        if after is None:
            return self.chat.prompt(messages)
        return self.chat.continuation(messages, has_ended=after in self.stop_token_ids)

    def to_sample(self, problem: Problem) -> Sample:
        """Trains the answer and its end token; in a conversation all turns of the assistant, the
        answer being the last."""
        messages = self._messages(problem)
        if not messages:
            prompt = self.encode_beginning(problem.prompt)
            return Sample.from_tokens(prompt, [*self.encode(problem.answer), self.end_token_id])
        if messages[-1]["role"] != "assistant":
            messages = [*messages, Message(role="assistant", content=problem.answer)]
        tokens, weights = self.chat.turns(messages, problem.tools)
        first = next(place for place, weight in enumerate(weights) if weight)
        return Sample.from_tokens(tokens[:first], tokens[first:], loss_weights=weights[first:])

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return self.hf.decode(list(tokens), skip_special_tokens=True)

    def decode_turn(self, tokens: Sequence[int]) -> str:
        """With special tokens, but without a stop token at the end."""
        ends = bool(tokens) and tokens[-1] in self.stop_token_ids
        return self.hf.decode(list(tokens[: len(tokens) - ends]), skip_special_tokens=False)

    def decode_prompt(self, tokens: Sequence[int]) -> str:
        """With special tokens, as the policy reads it, but without prefix_token_ids."""
        size = len(self.prefix_token_ids)
        shown = tokens[size:] if tuple(tokens[:size]) == self.prefix_token_ids else tokens
        return self.hf.decode(list(shown), skip_special_tokens=False)

    def _messages(self, problem: Problem) -> list[Message]:
        if problem.messages or not self.chat.config.enabled:
            return problem.messages
        return [Message(role="user", content=problem.prompt)]


def load_tokenizer(directory: str | Path, chat: ChatConfig | None = None) -> Tokenizer:
    """Raises ValueError without tokenizer or end token, or if the template lacks an option."""
    hf = texts.load_hf(directory)
    stops = stop_token_ids(directory, hf)
    if not stops:
        raise ValueError(f"neither a JSON file nor the tokenizer of {directory} has an eos_token_id")
    template = ChatTemplate(hf=hf, config=chat or ChatConfig(), stop_token_ids=stops)
    if template.config != ChatConfig():
        template.require_usable()
    return Tokenizer(hf=hf, chat=template, stop_token_ids=stops, prefix_token_ids=texts.prefix_of(hf))
