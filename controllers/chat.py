"""Converts conversations to tokens by the model's own chat template. This module does not depend on problems, actors or losses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from controllers.environments import Message
from controllers.environments.base import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools, which some templates show."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""Beginning of the Jinja tag {% generation %}. Some templates put this tag before the assistant's text, and {% endgeneration %} after it. For
such a template transformers can return a mask of the assistant's tokens."""

FORMER_TURN = "former turn of the assistant"
"""Text that stands for the assistant's former turn in `continuation`, which needs only the tokens after that turn."""

MARK = "\ue000{}\ue001"
"""Stands in a rendered conversation for a text that spells a special token; formatted with an index."""
MARKED = re.compile("\ue000(\\d+)\ue001")


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
    # For each token the weight of its message if it is the assistant's, else 0. If the template has no GENERATION_MARK, the stop token after
    # a turn of the assistant counts as the assistant's.
    weights: list[float]


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

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The tokens of the conversation and of the beginning of the assistant's next turn.

        If the conversation ends with a turn of the assistant, this turn is left out.
        """
        conversation = self._with_system(messages)
        if conversation[-1]["role"] == "assistant":
            conversation = conversation[:-1]
        self._require_shown(conversation, tools)
        return self._tokens(conversation, tools, starts_turn=True)

    def continuation(self, messages: Sequence[Message], *, has_ended: bool) -> list[int]:
        """The tokens after the assistant's former turn: the tokens of `messages` and of the beginning of the assistant's next turn.

        has_ended: True if the tokens of the former turn already end with a stop token. If False, the returned tokens begin with the stop
        token that ends the former turn.
        """
        former = [Message(role="user", content="?"), Message(role="assistant", content=FORMER_TURN)]
        spelled: list[str] = []
        text = self._render([*former, *self._marked_texts(messages, spelled)], (), add_generation_prompt=True)
        _, _, rest = text.partition(FORMER_TURN)
        tokens = self._encode_rendered(rest, spelled)
        ends = [i for i, token in enumerate(tokens) if token in self.stop_token_ids]
        if not ends:
            raise ValueError(
                f"the chat template of {self.hf.name_or_path} does not end a turn of the assistant with one of the stop tokens "
                f"{list(self.stop_token_ids)}"
            )
        return tokens[ends[0] + has_ended :]

    def turns(self, messages: Sequence[Message], tools: Tools = ()) -> Turns:
        """The tokens of the conversation for training. The tokens of every turn of the assistant are trained.

        If the template has a GENERATION_MARK, the marks say which tokens are the assistant's. Otherwise a turn begins after the tokens that
        the template puts before an answer (its generation prompt), and ends with the next stop token.
        Raises ValueError if there is no turn to train on. Without a GENERATION_MARK also raises ValueError if a turn has no stop token, or if
        the tokens before a turn are not the beginning of the whole conversation's tokens.
        """
        conversation = self._with_system(messages)
        if GENERATION_MARK.search(self._text()):
            tokens, weights = self._marked(conversation, tools)
        else:
            tokens = self._tokens(conversation, tools, starts_turn=False)
            weights = self._found(conversation, tools, tokens)
        last = max((place for place, weight in enumerate(weights) if weight), default=None)
        if last is None:
            raise ValueError(f"the conversation {_shown(conversation)} has no turn of the assistant to train on")
        self._require_shown(conversation, tools)
        return Turns(tokens=tokens[: last + 1], weights=weights[: last + 1])

    def _marked(self, conversation: list[Message], tools: Tools) -> tuple[list[int], list[float]]:
        """(tokens, weights), for a template that has a GENERATION_MARK."""
        spelled: list[str] = []
        self._marked_texts(conversation, spelled)
        if spelled:
            raise ValueError(
                f"the conversation {_shown(conversation)} spells the special token {spelled[0]!r}, and a template with marks of "
                "generation cannot keep such a text apart from the token"
            )
        answer = self._apply(conversation, tools, return_assistant_tokens_mask=True)
        marks = [bool(mark) for mark in answer["assistant_masks"]]
        starts = [place for place, mark in enumerate(marks) if mark and not (place and marks[place - 1])]
        of_messages = [message.get("weight", 1.0) for message in conversation if message["role"] == "assistant"]
        if set(of_messages) <= {1.0}:
            return answer["input_ids"], [float(mark) for mark in marks]
        if len(starts) != len(of_messages):
            raise ValueError(
                f"the chat template of {self.hf.name_or_path} marks {len(starts)} texts for {len(of_messages)} turns of the assistant, so "
                f"the weights of the turns have no place: {_shown(conversation)}"
            )
        weights = [0.0] * len(marks)
        for start, weight in zip(starts, of_messages, strict=True):
            for place in range(start, len(marks)):
                if not marks[place]:
                    break
                weights[place] = float(weight)
        return answer["input_ids"], weights

    def _found(self, conversation: list[Message], tools: Tools, tokens: list[int]) -> list[float]:
        """The weights, for a template without a GENERATION_MARK. Finds each turn of the assistant in the tokens of the conversation."""
        weights = [0.0] * len(tokens)
        for index, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            before = self._tokens(conversation[:index], tools, starts_turn=True)
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
                weights[i] = float(message.get("weight", 1.0))
        return weights

    def _require_shown(self, conversation: list[Message], tools: Tools) -> None:
        """Raise ValueError for a message whose text, or whose tool call, the template drops."""
        rendered = self._render(conversation, tools)
        for index, message in enumerate(conversation):
            # Some templates drop the thinking of former turns, which the model does not see again.
            text = text_of(message).split("</think>")[-1].strip()
            is_dropped = bool(text) and text not in rendered and not self._depends_on(conversation, index, tools)
            names = [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls", ())]
            if is_dropped or any(name not in rendered for name in names):
                raise ValueError(
                    f"the chat template of {self.hf.name_or_path} drops message {index}, whose role is {message['role']!r}: "
                    f"{_shown([message])}"
                )

    def _depends_on(self, conversation: list[Message], index: int, tools: Tools) -> bool:
        """True if the rendering changes with the text of a message, which the template may write in another form."""
        others = [cast(Message, {**message}) for message in conversation]
        others[index]["content"] = text_of(conversation[index]) + "."
        return self._render(others, tools) != self._render(conversation, tools)

    def _marked_texts(self, messages: Sequence[Message], spelled: list[str]) -> list[Message]:
        """The messages with a MARK for each text that spells a special token. Adds these texts to `spelled`, in the order of the marks."""
        special = [str(token) for token in self.hf.added_tokens_decoder.values() if token.special]
        if not special:
            return list(messages)
        pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

        def mark(found: re.Match) -> str:
            spelled.append(found.group())
            return MARK.format(len(spelled) - 1)

        def marked(value: object) -> Any:
            if isinstance(value, str):
                return pattern.sub(mark, value)
            if isinstance(value, Mapping):
                return {name: marked(each) for name, each in value.items()}
            return [marked(each) for each in value] if isinstance(value, list) else value

        return [marked(message) for message in messages]

    def _encode_rendered(self, text: str, spelled: Sequence[str]) -> list[int]:
        """The tokens of a rendered conversation. The text behind a MARK never becomes a special token."""
        tokens: list[int] = []
        for place, piece in enumerate(MARKED.split(text)):
            if place % 2:
                tokens += self.hf.encode(spelled[int(piece)], add_special_tokens=False, split_special_tokens=True)
            else:
                tokens += self.hf.encode(piece, add_special_tokens=False)
        return tokens

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if not self.config.system or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [Message(role="system", content=self.config.system), *messages]

    def _tokens(self, conversation: list[Message], tools: Tools, *, starts_turn: bool) -> list[int]:
        spelled: list[str] = []
        marked = self._marked_texts(conversation, spelled)
        if spelled:
            return self._encode_rendered(self._render(marked, tools, add_generation_prompt=starts_turn), spelled)
        return self._apply(conversation, tools, add_generation_prompt=starts_turn)["input_ids"]

    def _render(self, conversation: list[Message], tools: Tools, **options: bool) -> str:
        return cast(str, self._apply_template(conversation, tools, tokenize=False, **options))

    def _apply(self, conversation: list[Message], tools: Tools, **options: bool) -> Mapping[str, list[int]]:
        answer = self._apply_template(conversation, tools, tokenize=True, return_dict=True, **options)
        return cast(Mapping[str, list[int]], answer)

    def _apply_template(self, conversation: list[Message], tools: Tools, **options: bool) -> object:
        from jinja2 import TemplateError

        self._text()
        if self.config.thinking is not None:
            options["enable_thinking"] = self.config.thinking
        try:
            return self.hf.apply_chat_template(cast(list, conversation), tools=list(tools) or None, **options)
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
    text = " ".join(f"{message['role']}: {text_of(message)!r}" for message in conversation)
    return text if len(text) <= 200 else text[:200] + "…"
