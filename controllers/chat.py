"""Converts conversations to tokens by the model's own chat template. This module does not depend on problems, actors or losses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from controllers.environments import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""Beginning of the Jinja tag {% generation %}. Some templates put this tag before the assistant's text, and {% endgeneration %} after it. For
such a template transformers can return a mask of the assistant's tokens."""

FORMER_TURN = "former turn of the assistant"
"""Text that stands for the assistant's former turn in `continuation`, which needs only the tokens after that turn."""


@dataclass(kw_only=True)
class ChatConfig:
    """Says whether and how the model's chat template is used."""

    enabled: bool = False
    """True: each prompt is a user's message and goes through the template. A problem that has messages goes through the template in any case."""
    system: str = ""
    """System message that is put before each conversation that has no system message. Empty: no system message is added."""
    thinking: bool | None = None
    """Value of enable_thinking, which some templates read, such as Qwen3's. None: the template's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The tokens of a conversation, up to the last token that is trained."""

    tokens: list[int]
    # True for the assistant's tokens. If the template has no GENERATION_MARK, the stop token after a turn of the assistant is one of these
    # tokens.
    is_trained: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The chat template of a tokenizer, with a run's ChatConfig. Every method raises ValueError if the template fails."""

    hf: "PreTrainedTokenizerBase"
    config: ChatConfig
    stop_token_ids: tuple[int, ...]

    def require_usable(self) -> None:
        """Raise ValueError if there is no template, or if `thinking` is set and the template does not read enable_thinking."""
        text = self._text()
        if self.config.thinking is not None and "enable_thinking" not in text:
            raise ValueError(
                f"chat.thinking={self.config.thinking}, but the chat template of {self.hf.name_or_path} does not read enable_thinking"
            )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the conversation and of the beginning of the assistant's next turn.

        If the conversation ends with a turn of the assistant, this turn is left out.
        """
        conversation = self._with_system(messages)
        if conversation[-1]["role"] == "assistant":
            conversation = conversation[:-1]
        return self._tokens(conversation, starts_turn=True)

    def continuation(self, messages: Sequence[Message], *, has_ended: bool) -> list[int]:
        """The tokens after the assistant's former turn: the tokens of `messages` and of the beginning of the assistant's next turn.

        has_ended: True if the tokens of the former turn already end with a stop token. If False, the returned tokens begin with the stop
        token that ends the former turn.
        """
        former = [Message(role="user", content="?"), Message(role="assistant", content=FORMER_TURN)]
        text = self._apply_template([*former, *messages], tokenize=False, add_generation_prompt=True)
        _, _, rest = cast(str, text).rpartition(FORMER_TURN)
        tokens = self.hf.encode(rest, add_special_tokens=False)
        ends = [i for i, token in enumerate(tokens) if token in self.stop_token_ids]
        if not ends:
            raise ValueError(
                f"the chat template of {self.hf.name_or_path} does not end a turn of the assistant with one of the stop tokens "
                f"{list(self.stop_token_ids)}"
            )
        return tokens[ends[0] + has_ended :]

    def turns(self, messages: Sequence[Message]) -> Turns:
        """The tokens of the conversation for training. The tokens of every turn of the assistant are trained.

        If the template has a GENERATION_MARK, the marks say which tokens are the assistant's. Otherwise a turn begins after the tokens that
        the template puts before an answer (its generation prompt), and ends with the next stop token.
        Raises ValueError if there is no turn to train on. Without a GENERATION_MARK also raises ValueError if a turn has no stop token, or if
        the tokens before a turn are not the beginning of the whole conversation's tokens.
        """
        conversation = self._with_system(messages)
        if GENERATION_MARK.search(self._text()):
            tokens, is_trained = self._marked(conversation)
        else:
            tokens = self._tokens(conversation, starts_turn=False)
            is_trained = self._found(conversation, tokens)
        if not any(is_trained):
            raise ValueError(f"the conversation {_shown(conversation)} has no turn of the assistant to train on")
        length = len(is_trained) - is_trained[::-1].index(True)
        return Turns(tokens=tokens[:length], is_trained=is_trained[:length])

    def _marked(self, conversation: list[Message]) -> tuple[list[int], list[bool]]:
        """(tokens, is_trained), for a template that has a GENERATION_MARK."""
        answer = self._apply(conversation, return_assistant_tokens_mask=True)
        return answer["input_ids"], [bool(mark) for mark in answer["assistant_masks"]]

    def _found(self, conversation: list[Message], tokens: list[int]) -> list[bool]:
        """is_trained, for a template without a GENERATION_MARK. Finds each turn of the assistant in the tokens of the conversation."""
        is_trained = [False] * len(tokens)
        for index, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            before = self._tokens(conversation[:index], starts_turn=True)
            if tokens[: len(before)] != before:
                raise ValueError(
                    f"the chat template of {self.hf.name_or_path}: the tokens before message {index} are not the beginning of the whole "
                    f"conversation's tokens, so the tokens of message {index} cannot be found: {_shown(conversation)}"
                )
            ends = [i for i in range(len(before), len(tokens)) if tokens[i] in self.stop_token_ids]
            if not ends:
                raise ValueError(
                    f"the chat template of {self.hf.name_or_path} does not end message {index} with one of the stop tokens "
                    f"{list(self.stop_token_ids)}: {_shown(conversation)}"
                )
            for i in range(len(before), ends[0] + 1):
                is_trained[i] = True
        return is_trained

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if not self.config.system or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [Message(role="system", content=self.config.system), *messages]

    def _tokens(self, conversation: list[Message], *, starts_turn: bool) -> list[int]:
        return self._apply(conversation, add_generation_prompt=starts_turn)["input_ids"]

    def _apply(self, conversation: list[Message], **options: bool) -> Mapping[str, list[int]]:
        answer = self._apply_template(conversation, tokenize=True, return_dict=True, **options)
        return cast(Mapping[str, list[int]], answer)

    def _apply_template(self, conversation: list[Message], **options: bool) -> object:
        from jinja2 import TemplateError

        self._text()
        if self.config.thinking is not None:
            options["enable_thinking"] = self.config.thinking
        try:
            return self.hf.apply_chat_template(cast(list, conversation), **options)
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {self.hf.name_or_path} does not take the conversation {_shown(conversation)}: {error}"
            ) from error

    def _text(self) -> str:
        try:
            return self.hf.get_chat_template()
        except ValueError:
            raise ValueError(
                f"the tokenizer of {self.hf.name_or_path} has no chat template; give it one (chat_template.jinja), or set "
                "chat.enabled=False and use a task without messages"
            ) from None


def _shown(conversation: Sequence[Message]) -> str:
    """The conversation on one line, cut after 200 characters."""
    text = " ".join(f"{message['role']}: {message['content']!r}" for message in conversation)
    return text if len(text) <= 200 else text[:200] + "…"
