"""Conversations to tokens by the model's own chat template."""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from controllers.environments import Message
from controllers.environments.base import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")  # from which transformers masks the assistant's tokens
FORMER_TURN = "former turn of the assistant"  # its tokens are cut off again
THINK_TAG = re.compile(r"(</?think>)")
PLACEHOLDER = "QZ{}ZQ"  # formatted with an index: stands for a text, to see whether the template shows it


@dataclass(kw_only=True)
class ChatConfig:
    """Whether and how the model's chat template is used."""

    enabled: bool = False
    """Format each prompt as a user's message. Problems with messages always use the template."""
    system: str = ""
    """System message for conversations without one. Empty: none."""
    thinking: bool | None = None
    """enable_thinking of templates such as Qwen3's. None: the template's default."""


Path = tuple[str | int, ...]
Put = Callable[[Any, str], Any]
"""(value at a path, text) -> the value with the text in its place."""


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
        """The messages or tools with a mark for each such text, but not in the names of fields."""
        if isinstance(value, str):
            return self.pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {name: self.marked(each) for name, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list | tuple) else value

    def split(self, text: str) -> list[str]:
        """Pieces of a rendered text: at odd places the index of a text, else what is between."""
        return re.split(f"\ue000{self.nonce}\\.(\\d+)\ue001", text)


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
            raise self._error(f"does not read enable_thinking, but chat.thinking={self.config.thinking}")

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation, without a last turn of the assistant, and the generation prompt."""
        conversation = self._prepared(messages)
        if conversation[-1]["role"] == "assistant":
            conversation = conversation[:-1]
        self._require_shown(conversation, tools)
        return self._tokens(conversation, tools, starts_turn=True)

    def continuation(self, messages: Sequence[Message], *, has_ended: bool) -> list[int]:
        """The tokens between the assistant's former turn, with its stop token unless that has_ended,
        and its next one."""
        former = [Message(role="user", content="?"), Message(role="assistant", content=FORMER_TURN)]
        self._require_shown([*former, *messages], (), first=len(former))
        spelled = self._spelled()
        text = self._render([*former, *spelled.marked(messages)], (), add_generation_prompt=True)
        _, _, rest = text.partition(FORMER_TURN)
        tokens = self._encode(rest, spelled)
        return tokens[self._end(tokens, 0, "a turn of the assistant", former) + has_ended :]

    def turns(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[list[int], list[float]]:
        """The tokens up to the last trained one, and their weights: the message's in a turn of the
        assistant, else 0.

        Without GENERATION_MARK a turn is what follows the generation prompt, up to the next stop
        token, and the tokens before it must begin the whole conversation's.
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
        return tokens[: last + 1], weights[: last + 1]

    def _marked(self, conversation: list[Message], tools: Tools) -> tuple[list[int], list[float]]:
        spelled = self._spelled()
        spelled.marked([*conversation, *tools])
        if spelled.texts:
            raise ValueError(
                f"the conversation {_shown(conversation)} spells the special token {spelled.texts[0]!r}, and a template with marks of "
                "generation cannot keep such a text apart from the token"
            )
        answer = self._apply(conversation, tools, return_dict=True, return_assistant_tokens_mask=True)
        weights = [float(mark) for mark in answer["assistant_masks"]]
        of_messages = [message.get("weight", 1.0) for message in conversation if message["role"] == "assistant"]
        if set(of_messages) <= {1.0}:
            return answer["input_ids"], weights
        runs = [list(run) for _, run in groupby(range(len(weights)), key=weights.__getitem__)]
        marked = [run for run in runs if weights[run[0]]]
        if len(marked) != len(of_messages):
            raise self._error(
                f"marks {len(marked)} texts for {len(of_messages)} turns of the assistant, so the weights of the turns have no place: "
                f"{_shown(conversation)}"
            )
        for run, weight in zip(marked, of_messages, strict=True):
            for place in run:
                weights[place] = float(weight)
        return answer["input_ids"], weights

    def _found(self, conversation: list[Message], tools: Tools, tokens: list[int]) -> list[float]:
        """The weights by finding each turn in the tokens."""
        weights = [0.0] * len(tokens)
        for index, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            before = self._tokens(conversation[:index], tools, starts_turn=True)
            if tokens[: len(before)] != before:
                raise self._error(
                    f"hides message {index}: the tokens before it are not the beginning of the whole conversation's tokens: "
                    f"{_shown(conversation)}"
                )
            end = self._end(tokens, len(before), f"message {index}", conversation)
            for place in range(len(before), end + 1):
                weights[place] = float(message.get("weight", 1.0))
        return weights

    def _end(self, tokens: list[int], start: int, what: str, conversation: list[Message]) -> int:
        """The place of the first stop token from `start` on."""
        for place in range(start, len(tokens)):
            if tokens[place] in self.stop_token_ids:
                return place
        raise self._error(
            f"does not end {what} with one of the stop tokens {list(self.stop_token_ids)}: {_shown(conversation)}"
        )

    def _require_shown(self, conversation: list[Message], tools: Tools, *, first: int = 0) -> None:
        """Raises ValueError for a text, tool call or tools from `first` on that are dropped.

        Placeholders for all texts must be in the rendered text. The template may have changed one
        that is not, so then the rendered conversation must depend on it.
        """
        asked = max((i for i, message in enumerate(conversation) if message["role"] == "user"), default=-1)
        holders: list[tuple[int, str, Message]] = []
        replaced = list(conversation)
        for index in range(first, len(conversation)):
            for path, put in _replaceable(conversation[index], is_last=index > asked):
                holder = PLACEHOLDER.format(len(holders))
                holders.append((index, holder, _changed(conversation[index], path, put, holder)))
                replaced[index] = _changed(replaced[index], path, put, holder)
        rendered = self._try_render(replaced, tools)
        original = self._render(conversation, tools)
        for index, holder, message in holders:
            if holder in rendered:
                continue
            others = [*conversation[:index], message, *conversation[index + 1 :]]
            if self._try_render(others, tools) == original:
                raise self._error(
                    f"drops a text or a tool call of message {index}, whose role is {conversation[index]['role']!r}: "
                    f"{_shown([conversation[index]])}"
                )
        if tools and self._render(conversation, ()) == original:
            raise self._error(f"drops the tools: {str(tools)[:200]}")

    def _try_render(self, conversation: list[Message], tools: Tools) -> str:
        """ "" if the template does not take the conversation."""
        try:
            return self._render(conversation, tools)
        except ValueError:
            return ""

    def _spelled(self) -> _Spelled:
        return _Spelled([str(token) for token in self.hf.added_tokens_decoder.values() if token.special])

    def _encode(self, text: str, spelled: _Spelled) -> list[int]:
        """The text behind a mark never becomes a special token."""
        tokens: list[int] = []
        for place, piece in enumerate(spelled.split(text)):
            whole = spelled.texts[int(piece)] if place % 2 else piece
            tokens += self.hf.encode(whole, add_special_tokens=False, split_special_tokens=bool(place % 2))
        return tokens

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """With the config's system message, and the content that tool calls need."""
        conversation = [self._with_shown_calls(message) for message in messages]
        if not self.config.system or any(message["role"] == "system" for message in messages):
            return conversation
        return [Message(role="system", content=self.config.system), *conversation]

    def _with_shown_calls(self, message: Message) -> Message:
        """For tool calls without text, the content "" or None, whichever first shows the calls:
        DeepSeek's templates drop the calls beside "", others print None."""
        if not message.get("tool_calls") or text_of(message).strip():
            return message
        holder = PLACEHOLDER.format(0)
        named = _changed(message, _function_of(message, 0), partial(_field, "name"), holder)
        for content in ("", None):
            probe = [Message(role="user", content="?"), {**named, "content": content}]
            if holder in self._try_render(cast(list[Message], probe), ()):
                return cast(Message, {**message, "content": content})
        return message

    def _tokens(self, conversation: list[Message], tools: Tools, *, starts_turn: bool) -> list[int]:
        spelled = self._spelled()
        marked = spelled.marked([conversation, list(tools)])
        return self._encode(self._render(*marked, add_generation_prompt=starts_turn), spelled)

    def _render(self, conversation: list[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        return self._apply(conversation, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, conversation: list[Message], tools: Tools, **options: bool) -> Any:
        from jinja2 import TemplateError

        self._text()
        if self.config.thinking is not None:
            options["enable_thinking"] = self.config.thinking
        try:
            return self.hf.apply_chat_template(cast(list, conversation), tools=list(tools) or None, **options)
        except (TemplateError, TypeError) as error:
            raise self._error(f"does not take the conversation {_shown(conversation)}: {error}") from error

    def _error(self, fault: str) -> ValueError:
        return ValueError(f"the chat template of {self.hf.name_or_path} {fault}")

    def _text(self) -> str:
        try:
            return self.hf.get_chat_template()
        except ValueError:
            raise ValueError(
                f"the tokenizer of {self.hf.name_or_path} has no chat template; give it one (chat_template.jinja), or set "
                "chat.enabled=False and use a task without messages"
            ) from None


def _replaceable(message: Message, *, is_last: bool) -> Iterator[tuple[Path, Put]]:
    """The parts that must be shown. is_last: after the last question; before it many templates drop
    thinking."""
    content = message["content"]
    for part, given in enumerate(content if isinstance(content, list) else [content or ""]):
        text = given if isinstance(given, str) else str(given.get("text") or "")
        # a template may drop only the thinking
        pieces = THINK_TAG.split(text) if is_last else [text]
        path: Path = ("content", part) if isinstance(content, list) else ("content",)
        for piece in range(0, len(pieces), 2):
            if pieces[piece].strip():
                yield path if isinstance(given, str) else (*path, "text"), partial(_piece, piece, is_last)
    if is_last and str(message.get("reasoning_content", "")).strip():
        yield (), partial(_field, "reasoning_content")
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call.get("function", call)
        if function.get("name"):
            yield _function_of(message, index), partial(_field, "name")
        if function.get("arguments"):
            yield _function_of(message, index), _argument


def _function_of(message: Message, index: int) -> Path:
    path = ("tool_calls", index)
    return (*path, "function") if "function" in message["tool_calls"][index] else path


def _changed(value: Any, path: Path, put: Put, text: str) -> Any:
    """A copy with the text put into the value at the path."""
    if not path:
        return put(value, text)
    copy: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copy[path[0]] = _changed(value[path[0]], path[1:], put, text)
    return copy


def _field(name: str, value: Any, text: str) -> Any:
    return {**value, name: text}


def _piece(piece: int, splits: bool, value: str, text: str) -> str:
    pieces = THINK_TAG.split(value) if splits else [value]
    pieces[piece] = text
    return "".join(pieces)


def _argument(value: Any, text: str) -> Any:
    given = value["arguments"]
    changed = {**given, text: text} if isinstance(given, Mapping) else json.dumps({text: text})
    return {**value, "arguments": changed}


def _shown(conversation: Sequence[Message]) -> str:
    """On one line, cut after 200 characters."""
    text = " ".join(f"{message['role']}: {text_of(message)!r}" for message in conversation)
    return text if len(text) <= 200 else text[:200] + "…"
