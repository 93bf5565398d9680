"""Checks sampling requests against the limits of generator and model, and samples the answers.

Uses no HTTP. N tokens of the prompt.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.tinker_server import messages, tinker_pb2
from controllers.tinker_server.beside import beside
from controllers.tinker_server.sampling import Weights
from controllers.tinker_server.targets import Targets
from rl_actors import SamplingParams
from rl_actors.types import Completion
from rl_actors.validation import MAX_TOP_LOGPROBS, validate_prompts, validate_sampling_params

NO_LOGPROB = -99999.0
"""Logprob in TopkLogprobs of a cell without a token, the SDK's constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A checked sampling request."""

    prompt: list[int]
    params: SamplingParams
    stop_strings: tuple[str, ...]  # end a completion
    tokenizer: Any  # of transformers
    targets: Targets | None  # tokens to score at given prompt positions
    body: messages.SampleRequest

    def require_small_answer(self, max_bytes: int) -> None:
        """Raises ValueError if the answer could have more than max_bytes."""
        a_sample = 8 * (1 + self.params.top_logprobs)
        a_prompt = 8 * self.body.topk_prompt_logprobs + 4 * bool(self.body.prompt_logprobs)
        size = self.params.n * self.params.max_tokens * a_sample + len(self.prompt) * a_prompt
        if self.targets is not None:
            size += 4 * len(self.targets.tokens)
        if size > max_bytes:
            raise ValueError(
                f"num_samples={self.params.n}, max_tokens={self.params.max_tokens} and the logprobs that are asked for can make an answer of "
                f"{size} bytes; it must have at most {max_bytes} (max_answer_bytes)"
            )

    async def run(self, weights: Weights) -> tuple[bytes, int]:
        """(bytes of the SampleResponse, number of sampled tokens, with those cut off)."""
        completions = await weights.sample(self.prompt, self.params)
        response = tinker_pb2.SampleResponse(
            prompt_logprobs=await self._scores(weights) if self.body.prompt_logprobs else None,
            target_prompt_logprobs=await self.targets.scores(weights, self.prompt) if self.targets else None,
            topk_prompt_logprobs=await self._topk_of_prompt(weights) if self.body.topk_prompt_logprobs else None,
        )

        def write() -> bytes:
            response.sequences.extend(self._sequence(completion) for completion in completions)
            return response.SerializeToString()

        # stop strings are looked for in every completion's text, which takes long
        num_tokens = sum(len(completion.tokens) for completion in completions)
        return await beside(num_tokens * (1024 if self.stop_strings else 8), write), num_tokens

    async def _scores(self, weights: Weights) -> bytes:
        """[N] prompt logprobs at temperature 1; NaN for the first token and those not asked for."""
        scores = np.full(len(self.prompt), np.nan, "<f4")
        if len(self.prompt) > 1:
            scores[1:] = (await weights.score(self.prompt)).numpy()
        if (last_n := self.body.prompt_logprobs_last_n) is not None:
            scores[:-last_n] = np.nan
        return scores.tobytes()

    async def _topk_of_prompt(self, weights: Weights) -> Any:
        """TopkLogprobs at temperature 1; no tokens at the first and the unwanted positions."""
        params = SamplingParams(max_tokens=1, ignore_stop=True, prompt_top_logprobs=self.body.topk_prompt_logprobs)
        [completion] = await weights.sample(self.prompt, params)
        top = completion.prompt_top
        assert top is not None
        first_row = ((1, 0), (0, 0))
        logprobs = np.pad(top.logprobs.numpy(), first_row, constant_values=-np.inf)
        if (last_n := self.body.prompt_logprobs_last_n) is not None:
            logprobs[:-last_n] = -np.inf
        return _topk(np.pad(top.token_ids.numpy(), first_row), logprobs)

    def _sequence(self, completion: Completion) -> Any:
        tokens = completion.tokens
        count = len(tokens)
        is_stopped = completion.finish_reason == "stop"
        if self._has_stop(tokens):
            # up to the token that completes the first stop string
            count = 1 + bisect_left(range(1, count), True, key=lambda number: self._has_stop(tokens[:number]))
            is_stopped = True
        topk = None
        if completion.top is not None:
            topk = _topk(completion.top.token_ids[:count].numpy(), completion.top.logprobs[:count].numpy())
        return tinker_pb2.SampledSequence(
            stop_reason=0 if is_stopped else 1,
            tokens=np.asarray(tokens[:count], "<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs[:count], "<f4").tobytes(),
            topk_sampled_logprobs=topk,
        )

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens) if self.stop_strings else ""
        return any(string in text for string in self.stop_strings)


def _topk(token_ids: np.ndarray, logprobs: np.ndarray) -> Any:
    """TopkLogprobs of arrays [positions, K]. Tokens with logprob -inf get id 0 and NO_LOGPROB."""
    is_there = np.isfinite(logprobs)
    length, k = logprobs.shape
    return tinker_pb2.TopkLogprobs(
        token_ids=np.where(is_there, token_ids, 0).astype("<i4").tobytes(),
        logprobs=np.where(is_there, logprobs, NO_LOGPROB).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """The limits of the generator and its model."""

    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]  # end a completion if the request has no `stop`
    tokenizer: Any  # of transformers

    def read(self, body: messages.SampleRequest) -> Wanted:
        """Raises ValueError or TypeError naming field, value and limit."""
        if body.prompt_alt_tokens_k:
            raise ValueError("prompt_alt_tokens_k is not supported by this server")
        prompt = prompt_tokens(body.prompt)
        validate_prompts([prompt], max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        most = min(MAX_TOP_LOGPROBS, self.vocab_size)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(body, name) > most:
                raise ValueError(f"{name}={getattr(body, name)}; it must be at most {most}")
        params, stop_strings = self._params(body, len(prompt))
        validate_sampling_params(params, vocab_size=self.vocab_size)
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
            tokenizer=self.tokenizer,
            targets=targets,
            body=body,
        )

    def _params(self, body: messages.SampleRequest, num_prompt: int) -> tuple[SamplingParams, tuple[str, ...]]:
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
            # the generator stops at strings of a single token
            encoded = [self.tokenizer.encode(string, add_special_tokens=False) for string in strings]
            ids = tuple(each for each in stop if isinstance(each, int)) or tuple(
                tokens[0] for tokens in encoded if len(tokens) == 1
            )
        params = SamplingParams(
            max_tokens=room if given.max_tokens is None else min(given.max_tokens, room),
            n=body.num_samples,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=0 if given.top_k == -1 else given.top_k,
            stop_token_ids=ids,
            seed=given.seed,
            ignore_stop=True,  # vLLM then ignores the end tokens of the model's config
            top_logprobs=body.topk_sample_logprobs,
        )
        return params, strings


def prompt_tokens(prompt: messages.Prompt) -> list[int]:
    """The tokens of all chunks. Raises ValueError for a chunk that is not text."""
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise ValueError(f"a chunk of the prompt is {chunk.type}; only encoded text is supported")
        tokens += chunk.tokens
    return tokens


def require_adam(config: Mapping[str, Any] | None) -> None:
    """Raises ValueError for another optimizer than AdamW."""
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise ValueError(f"optimizer_config of type {kind!r}; this server has only 'adamw'")
