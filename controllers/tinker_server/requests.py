"""Checks sampling requests against the limits of the generator and its model, and samples the
answers. Uses no HTTP.

N tokens of the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from controllers.tinker_server import messages
from controllers.tinker_server.beside import beside
from controllers.tinker_server.codec import NO_LOGPROB, SampledSequence, TopK, write_sample
from controllers.tinker_server.sampling import Weights
from controllers.tinker_server.targets import Targets
from rl_actors import SamplingParams
from rl_actors.types import Completion, TopLogprobs
from rl_actors.validation import MAX_TOP_LOGPROBS, validate_prompts, validate_sampling_params, validate_sequences


class Tokenizer(Protocol):
    """What stop strings need of a transformers tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """Strings that end a completion."""

    strings: tuple[str, ...]
    tokenizer: Tokenizer

    def cut(self, completion: Completion) -> tuple[int, bool]:
        """(tokens to keep, up to the one that completes the first stop string; whether a stop
        string or stop token ended it).
        """
        tokens = completion.tokens
        if not self._is_in(tokens):
            return len(tokens), completion.finish_reason == "stop"
        shortest = 1
        longest = len(tokens)
        while shortest < longest:
            middle = (shortest + longest) // 2
            if self._is_in(tokens[:middle]):
                longest = middle
            else:
                shortest = middle + 1
        return longest, True

    def _is_in(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A checked sampling request."""

    prompt: list[int]
    params: SamplingParams
    stop_strings: StopStrings | None
    prompt_logprobs: bool
    last_n: int | None  # last prompt tokens whose logprobs are wanted; None: all
    targets: Targets | None  # tokens to score at given prompt positions
    topk_prompt: int  # likeliest tokens at each prompt position

    def require_small_answer(self, max_bytes: int) -> None:
        """Raises ValueError if the answer could have more than max_bytes."""
        a_sample = 8 * (1 + self.params.top_logprobs)
        a_prompt = 8 * self.topk_prompt + 4 * self.prompt_logprobs
        size = self.params.n * self.params.max_tokens * a_sample + len(self.prompt) * a_prompt
        if self.targets is not None:
            size += 4 * len(self.targets.tokens)
        if size > max_bytes:
            raise ValueError(
                f"num_samples={self.params.n}, max_tokens={self.params.max_tokens} and the logprobs that are asked for can make an answer of "
                f"{size} bytes; it must have at most {max_bytes} (max_answer_bytes)"
            )

    async def run(self, weights: Weights) -> tuple[bytes, int]:
        """(bytes of the SampleResponse, number of sampled tokens, with those cut after a stop
        string).
        """
        completions = await weights.sample(self.prompt, self.params)
        scores = await self._scores(weights) if self.prompt_logprobs else None
        num_tokens = sum(len(completion.tokens) for completion in completions)
        cells = await self.targets.scores(weights, self.prompt) if self.targets is not None else None
        topk = await self._topk_of_prompt(weights) if self.topk_prompt else None

        def write() -> bytes:
            sequences = [self._sequence(completion) for completion in completions]
            return write_sample(sequences, prompt_logprobs=scores, topk_prompt=topk, target_prompt=cells)

        # stop strings are looked for in every completion's text, which takes long
        return await beside(num_tokens * (8 if self.stop_strings is None else 1024), write), num_tokens

    async def _scores(self, weights: Weights) -> np.ndarray:
        """[N]: prompt logprobs at temperature 1; NaN for the first token and those not asked for."""
        scores = np.full(len(self.prompt), np.nan, np.float32)
        if len(self.prompt) > 1:
            scores[1:] = (await weights.score(self.prompt)).numpy()
        if self.last_n is not None:
            scores[: -self.last_n] = np.nan
        return scores

    async def _topk_of_prompt(self, weights: Weights) -> TopK:
        """The likeliest tokens at each prompt position, at temperature 1; NO_LOGPROB at the first
        and those not asked for.
        """
        params = SamplingParams(max_tokens=1, ignore_stop=True, prompt_top_logprobs=self.topk_prompt)
        [completion] = await weights.sample(self.prompt, params)
        assert completion.prompt_top is not None
        found = _topk(completion.prompt_top)
        ids = np.zeros((len(self.prompt), self.topk_prompt), np.int32)
        logprobs = np.full(ids.shape, NO_LOGPROB, np.float32)
        first = max(1, len(self.prompt) - self.last_n) if self.last_n is not None else 1
        ids[first:], logprobs[first:] = found.token_ids[first - 1 :], found.logprobs[first - 1 :]
        return TopK(token_ids=ids, logprobs=logprobs)

    def _sequence(self, completion: Completion) -> SampledSequence:
        count = len(completion.tokens)
        is_stopped = completion.finish_reason == "stop"
        if self.stop_strings is not None:
            count, is_stopped = self.stop_strings.cut(completion)
        return SampledSequence(
            tokens=completion.tokens[:count],
            logprobs=completion.logprobs[:count],
            is_stopped=is_stopped,
            topk=_topk(completion.top, count) if completion.top is not None else None,
        )


def _topk(top: TopLogprobs, count: int | None = None) -> TopK:
    """The first `count` positions, or all. Tokens excluded by top_p or top_k get id 0 and
    NO_LOGPROB.
    """
    ids = top.token_ids[:count].numpy().astype(np.int32)
    logprobs = top.logprobs[:count].numpy()
    is_there = np.isfinite(logprobs)
    return TopK(
        token_ids=np.where(is_there, ids, 0).astype(np.int32),
        logprobs=np.where(is_there, logprobs, NO_LOGPROB).astype(np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """The limits of the generator and its model."""

    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]  # end a completion if the request has no `stop`
    tokenizer: Tokenizer

    def read(self, body: messages.Sample) -> Wanted:
        """Raises ValueError or TypeError naming field, value and limit."""
        _refuse_unsupported(body)
        prompt = prompt_tokens(body.prompt)
        validate_prompts([prompt], max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        most = min(MAX_TOP_LOGPROBS, self.vocab_size)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(body, name) > most:
                raise ValueError(f"{name}={getattr(body, name)}; it must be at most {most}")
        params, stop_strings = self._params(body, len(prompt))
        validate_sampling_params(params, vocab_size=self.vocab_size)
        if body.prompt_logprobs:
            validate_sequences([prompt], max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = Targets.read(body.target_prompt_logprobs, prompt, self.vocab_size)
        last_n = body.prompt_logprobs_last_n
        if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < len(prompt)):
            raise ValueError(
                f"prompt_logprobs_last_n={last_n}; it needs prompt_logprobs, and it must be 1 to {len(prompt) - 1}"
            )
        return Wanted(
            prompt=prompt,
            params=params,
            stop_strings=stop_strings,
            prompt_logprobs=bool(body.prompt_logprobs),
            last_n=last_n,
            targets=targets,
            topk_prompt=body.topk_prompt_logprobs,
        )

    def _params(self, body: messages.Sample, num_prompt: int) -> tuple[SamplingParams, StopStrings | None]:
        given = body.sampling_params
        room = self.max_model_len - num_prompt
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        ids = self.end_token_ids
        strings: tuple[str, ...] = ()
        if stop is not None:
            # replaces the model's end tokens, even as an empty list
            strings = tuple(each for each in stop if isinstance(each, str))
            if "" in strings:
                raise ValueError("stop has an empty string")
            ids = tuple(each for each in stop if isinstance(each, int)) or self._ids_of(strings)
        params = SamplingParams(
            max_tokens=room if given.max_tokens is None else min(given.max_tokens, room),
            n=body.num_samples,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0) if given.top_k >= -1 else given.top_k,
            stop_token_ids=ids,
            seed=given.seed,
            ignore_stop=True,  # vLLM then ignores the end tokens of the model's config
            top_logprobs=body.topk_sample_logprobs,
        )
        return params, StopStrings(strings=strings, tokenizer=self.tokenizer) if strings else None

    def _ids_of(self, strings: Sequence[str]) -> tuple[int, ...]:
        """Ids of the stop strings that are a single token, where the generator stops."""
        encoded = [self.tokenizer.encode(string, add_special_tokens=False) for string in strings]
        return tuple(tokens[0] for tokens in encoded if len(tokens) == 1)


def prompt_tokens(prompt: messages.Prompt) -> list[int]:
    """The tokens of all chunks. Raises ValueError for a chunk that is not text."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise ValueError(f"a chunk of the prompt is {chunk.type}; only encoded text is supported")
        tokens += chunk.tokens
    return tokens


def _refuse_unsupported(body: messages.Sample) -> None:
    if body.prompt_alt_tokens_k:
        raise ValueError("prompt_alt_tokens_k is not supported by this server")


def require_adam(config: Mapping[str, Any] | None) -> None:
    """Raises ValueError for another optimizer than AdamW."""
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise ValueError(f"optimizer_config of type {kind!r}; this server has only 'adamw'")
