"""Conversations to tokens by the model's own chat template."""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from controllers.environments import Message
from controllers.environments.base import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools for the template."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""Jinja tag before the assistant's text, from which transformers makes a mask of the assistant's
tokens."""

FORMER_TURN = "former turn of the assistant"
"""Stands for the former turn in `continuation`, which needs only the tokens after it."""

THINK_TAG = re.compile(r"(</?think>)")

PLACEHOLDER = "QZ{}ZQ"
"""Stands for a text, to find out whether the template shows it; formatted with an index."""


@dataclass(kw_only=True)
class ChatConfig:
    """Whether and how the model's chat template is used."""

    enabled: bool = False
    """Format each prompt as a user's message. Problems with messages always use the template."""
    system: str = ""
    """System message for conversations without one. Empty: none."""
    thinking: bool | None = None
    """enable_thinking of templates such as Qwen3's. None: the template's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The tokens of a conversation, up to the last trained one."""

    tokens: list[int]
    # by token, of its message if the assistant's, else 0; without GENERATION_MARK the stop token
    # counts
    weights: list[float]


class _Spelled:
    """Texts that spell special tokens, each replaced by a mark with a random part."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.texts: list[str] = []
        self.nonce = secrets.token_hex(8)
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _mark(self, found: re.Match) -> str:
        self.texts.append(found.group())
        return f"\ue000{self.nonce}.{len(self.texts) - 1}\ue001"

    def marked(self, value: Any) -> Any:
        """A message or a tool with a mark for each such text."""
        return _with_texts(value, lambda text: self.pattern.sub(self._mark, text))

    def split(self, text: str) -> list[str]:
        """Pieces of a rendered text: at odd places the index of a text, else what is between."""
        return re.split(f"\ue000{self.nonce}\\.(\\d+)\ue001", text)


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text changed, but not the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_texts(each, change) for name, each in value.items()}
    return [_with_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's chat template with a ChatConfig. Every method raises ValueError if it fails."""

    hf: "PreTrainedTokenizerBase"
    config: ChatConfig
    stop_token_ids: tuple[int, ...]

    def require_usable(self) -> None:
        """Raises ValueError without a template, or for `thinking` that it does not read."""
        text = self._text()
        if self.config.thinking is not None and "enable_thinking" not in text:
            raise ValueError(
                f"chat.thinking={self.config.thinking}, but the chat template of {self.hf.name_or_path} does not read enable_thinking"
            )

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation, without a last turn of the assistant, and the generation prompt."""
        conversation = self._prepared(messages)
        if conversation[-1]["role"] == "assistant":
            conversation = conversation[:-1]
        self._require_shown(conversation, tools)
        return self._tokens(conversation, tools, starts_turn=True)

    def continuation(self, messages: Sequence[Message], *, has_ended: bool) -> list[int]:
        """The tokens between the assistant's former turn and its next one.

        has_ended: whether the former turn has its stop token; if not, the tokens begin with it.
        """
        former = [Message(role="user", content="?"), Message(role="assistant", content=FORMER_TURN)]
        self._require_shown([*former, *messages], (), first=len(former))
        spelled = self._spelled()
        text = self._render([*former, *spelled.marked(messages)], (), add_generation_prompt=True)
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
        """The tokens of a conversation, with weights for every turn of the assistant.

        Without GENERATION_MARK a turn is what follows the generation prompt, up to the next stop
        token. Raises ValueError without a turn to train on, without a stop token, or if the tokens
        before a turn are no prefix of the whole conversation's.
        """
        conversation = self._prepared(messages)
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
        """(tokens, weights) with GENERATION_MARK."""
        spelled = self._spelled()
        spelled.marked([*conversation, *tools])
        if spelled.texts:
            raise ValueError(
                f"the conversation {_shown(conversation)} spells the special token {spelled.texts[0]!r}, and a template with marks of "
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
        """The weights without GENERATION_MARK, by finding each turn in the tokens."""
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

    def _require_shown(self, conversation: list[Message], tools: Tools, *, first: int = 0) -> None:
        """Raises ValueError for a text, tool call or tools from `first` on that are dropped.

        Placeholders for all texts must be in the rendered text. The template may have changed one
        that is not, so then the rendered conversation must depend on it.
        """
        asked = max((i for i, message in enumerate(conversation) if message["role"] == "user"), default=-1)
        holders: list[tuple[int, str, Message]] = []
        replaced = list(conversation)
        for index in range(first, len(conversation)):
            for changed in _replaceable(conversation[index], is_last=index > asked):
                holder = PLACEHOLDER.format(len(holders))
                holders.append((index, holder, changed(conversation[index], holder)))
                replaced[index] = changed(replaced[index], holder)
        rendered = self._try_render(replaced, tools)
        original = self._render(conversation, tools)
        for index, holder, message in holders:
            if holder in rendered:
                continue
            others = [*conversation[:index], message, *conversation[index + 1 :]]
            if self._try_render(others, tools) == original:
                raise ValueError(
                    f"the chat template of {self.hf.name_or_path} drops a text or a tool call of message {index}, whose role is "
                    f"{conversation[index]['role']!r}: {_shown([conversation[index]])}"
                )
        if tools and self._render(conversation, ()) == original:
            raise ValueError(f"the chat template of {self.hf.name_or_path} drops the tools: {str(tools)[:200]}")

    def _try_render(self, conversation: list[Message], tools: Tools) -> str:
        """ "" if the template does not take the conversation."""
        try:
            return self._render(conversation, tools)
        except ValueError:
            return ""

    def _spelled(self) -> _Spelled:
        return _Spelled([str(token) for token in self.hf.added_tokens_decoder.values() if token.special])

    def _encode_rendered(self, text: str, spelled: _Spelled) -> list[int]:
        """The text behind a mark never becomes a special token."""
        tokens: list[int] = []
        for place, piece in enumerate(spelled.split(text)):
            if place % 2:
                whole = spelled.texts[int(piece)]
                tokens += self.hf.encode(whole, add_special_tokens=False, split_special_tokens=True)
            else:
                tokens += self.hf.encode(piece, add_special_tokens=False)
        return tokens

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the config's system message, and the content that tool calls need."""
        conversation = [self._with_shown_calls(message) for message in messages]
        if not self.config.system or any(message["role"] == "system" for message in messages):
            return conversation
        return [Message(role="system", content=self.config.system), *conversation]

    def _with_shown_calls(self, message: Message) -> Message:
        """For tool calls without text, the content "" or None, whichever first shows the calls.

        DeepSeek's templates drop the calls beside "", others print None.
        """
        if not message.get("tool_calls") or text_of(message).strip():
            return message
        holder = PLACEHOLDER.format(0)
        named = _with_call(message, holder, index=0, part="name")
        for content in ("", None):
            probe = [Message(role="user", content="?"), cast(Message, {**named, "content": content})]
            if holder in self._try_render(probe, ()):
                return cast(Message, {**message, "content": content})
        return message

    def _tokens(self, conversation: list[Message], tools: Tools, *, starts_turn: bool) -> list[int]:
        spelled = self._spelled()
        marked = spelled.marked(conversation)
        marked_tools = spelled.marked(list(tools))
        if spelled.texts:
            text = self._render(marked, marked_tools, add_generation_prompt=starts_turn)
            return self._encode_rendered(text, spelled)
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


def _replaceable(message: Message, *, is_last: bool) -> Iterator[Callable[[Message, str], Message]]:
    """By part that the template must show, a function that puts a text in its place.

    is_last: after the last question. Many templates drop the thinking of earlier turns.
    """
    content = message["content"]
    for part, given in enumerate(content if isinstance(content, list) else [content or ""]):
        text = given if isinstance(given, str) else given.get("text")
        # a template may drop only the thinking
        pieces = THINK_TAG.split(str(text or "")) if is_last else [str(text or "")]
        for piece in range(0, len(pieces), 2):
            if pieces[piece].strip():
                yield partial(_with_piece, part=part, piece=piece, is_last=is_last)
    if is_last and str(message.get("reasoning_content", "")).strip():
        yield lambda given, text: cast(Message, {**given, "reasoning_content": text})
    for index, call in enumerate(message.get("tool_calls", ())):
        for name in ("name", "arguments"):
            if call.get("function", call).get(name):
                yield partial(_with_call, index=index, part=name)


def _with_piece(message: Message, text: str, *, part: int, piece: int, is_last: bool) -> Message:
    content = message["content"]
    given = content[part] if isinstance(content, list) else content
    whole = given if isinstance(given, str) else str(given["text"])
    pieces = THINK_TAG.split(whole) if is_last else [whole]
    changed = "".join([*pieces[:piece], text, *pieces[piece + 1 :]])
    if isinstance(content, str):
        return cast(Message, {**message, "content": changed})
    parts = list(content)
    parts[part] = changed if isinstance(given, str) else {**given, "text": changed}
    return cast(Message, {**message, "content": parts})


def _with_call(message: Message, text: str, *, index: int, part: str) -> Message:
    calls = list(message["tool_calls"])
    call = calls[index]
    function = dict(call.get("function", call))
    if part == "arguments":
        given = function[part]
        function[part] = {**given, text: text} if isinstance(given, Mapping) else json.dumps({text: text})
    else:
        function[part] = text
    calls[index] = {**call, "function": function} if "function" in call else function
    return cast(Message, {**message, "tool_calls": calls})


def _shown(conversation: Sequence[Message]) -> str:
    """On one line, cut after 200 characters."""
    text = " ".join(f"{message['role']}: {text_of(message)!r}" for message in conversation)
    return text if len(text) <= 200 else text[:200] + "…"
