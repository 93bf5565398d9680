"""Turns generate and compute_logprobs into requests to vLLM, and collects the results."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from rl_actors.seeds import hashed_seed
from rl_actors.types import Completion, NonFiniteError, SamplingParams, TopLogprobs

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMParams
    from vllm.logprobs import Logprob

T = TypeVar("T")

NO_VERSION = -1
"""policy_version before the first pull, after a failed one, and after sleep(2)."""


class EngineCall(Generic[T]):
    """One call, whose requests finish in any order. The engine's thread puts results in."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        make_params: Callable[[int], list["VLLMParams"]],
        read: Callable[["RequestOutput"], T],
        adapter: str | None = None,
        name: str = "generate",
    ) -> None:
        """make_params: index of a prompt -> parameters of its requests. adapter: of load_adapter;
        None: that of the pulls, if they bring one. name: for error texts.
        """
        self.prompts = prompts
        self.make_params = make_params
        self.read = read
        self.adapter = adapter
        self.name = name
        # Unfinished prompt -> sample_index -> result.
        self._results: dict[int, dict[int, T]] = {index: {} for index in range(len(prompts))}
        self._finished: list[tuple[int, list[T]]] = []  # not taken yet
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiter: tuple[int, Future[list[tuple[int, list[T]]]]] | None = None

    def take(self, at_least: int) -> "Future[list[tuple[int, list[T]]]]":
        """(index, results) of prompts that finished since the last `take`: `at_least`, or all left.

        A later `take` completes it with an empty list.
        """
        future: Future[list[tuple[int, list[T]]]] = Future()
        future.set_running_or_notify_cancel()  # not cancellable, so set_result cannot fail
        with self._lock:
            if self._waiter is not None:
                self._waiter[1].set_result([])
            self._waiter = (at_least, future)
            self._answer()
        return future

    def is_over(self) -> bool:
        """Failed, or all results taken."""
        with self._lock:
            return self._failure is not None or not (self._results or self._finished)

    def put(self, request: "Request[T]", output: "RequestOutput") -> None:
        """Add a request's result. Raises NonFiniteError for a logprob that is not finite."""
        try:
            result = self.read(output)
        except NonFiniteError as error:
            prompt = self.prompts[request.prompt]
            adapter = "" if self.adapter is None else f" with the adapter {self.adapter!r}"
            raise NonFiniteError(
                f"{self.name}{adapter}: {error}, for the prompt of {len(prompt)} tokens that begins with "
                f"{list(prompt[:8])}. The weights are not finite, or so large that the model overflows; use earlier weights"
            ) from None
        with self._lock:
            results = self._results[request.prompt]
            results[request.sample_index] = result
            if len(results) == request.num_of_prompt:
                del self._results[request.prompt]
                self._finished.append((request.prompt, [results[index] for index in range(request.num_of_prompt)]))
                self._answer()

    def fail(self, error: BaseException) -> None:
        """End the call, unless it has finished or failed."""
        with self._lock:
            if self._results and self._failure is None:
                self._failure = error
                self._answer()

    def _answer(self) -> None:
        """Complete the last `take` if it is due. A failure loses what was not taken."""
        if self._waiter is None:
            return
        at_least, future = self._waiter
        if self._failure is not None:
            self._waiter = None
            future.set_exception(self._failure)
        elif len(self._finished) >= at_least or not self._results:
            self._waiter = None
            finished = self._finished
            self._finished = []
            future.set_result(finished)


@dataclass(slots=True, kw_only=True)
class Request(Generic[T]):
    """One completion, or the logprobs of one sequence."""

    call: EngineCall[T]
    prompt: int  # its index
    sample_index: int  # among those of the prompt
    num_of_prompt: int  # requests of the prompt


def vllm_params(params: SamplingParams, prompt: int, model_stops: Sequence[int] = ()) -> list["VLLMParams"]:
    """A request for each completion. prompt: p in SamplingParams.seed."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    stops = params.stop_token_ids if params.ignore_stop else {*params.stop_token_ids, *model_stops}
    requests = []
    for completion in range(params.n):
        request = VLLMParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=list(stops),
            seed=None if params.seed is None else hashed_seed(params.seed, prompt, completion),
            ignore_eos=True,  # `stops` has what vLLM would take from generation_config.json
            logprobs=params.top_logprobs,  # besides the sampled token's
            prompt_logprobs=params.prompt_top_logprobs or None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # no other request has this object
        )
        requests.append(request)
    return requests


def read_completion(params: SamplingParams, output: "RequestOutput") -> Completion:
    """With the policy version of every token."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = [by_token[token].logprob for token, by_token in zip(tokens, completion.logprobs, strict=True)]
    _require_finite("the completion", tokens, logprobs)
    versions: list[int] = []
    for span in completion.weight_versions or []:
        versions += [int(span.version)] * (span.end - span.start)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=completion.finish_reason,
        top=read_top(completion.logprobs, params.top_logprobs),
        prompt_top=read_top(output.prompt_logprobs[1:], params.prompt_top_logprobs) if output.prompt_logprobs else None,
    )


def read_top(positions: Sequence[Mapping[int, "Logprob"]], count: int) -> TopLogprobs | None:
    """The `count` likeliest tokens at each position, without the sequence's own that vLLM adds."""
    if not count:
        return None
    ids = []
    logprobs = []
    for by_token in positions:
        likeliest = sorted(by_token.items(), key=lambda pair: pair[1].rank or 0)[:count]
        ids.append([token for token, _ in likeliest])
        logprobs.append([entry.logprob for _, entry in likeliest])
    return TopLogprobs(
        token_ids=torch.tensor(ids, dtype=torch.int64).reshape(len(ids), count),
        logprobs=torch.tensor(logprobs, dtype=torch.float32).reshape(len(ids), count),
    )


def read_prompt_logprobs(output: "RequestOutput") -> Tensor:
    """[T - 1] float32: the first of T tokens has none."""
    tokens = output.prompt_token_ids[1:]
    logprobs = [by_token[token].logprob for token, by_token in zip(tokens, output.prompt_logprobs[1:], strict=True)]
    _require_finite("the sequence after its first token", tokens, logprobs)
    return torch.tensor(logprobs)


def _require_finite(what: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if not math.isfinite(logprob):
            raise NonFiniteError(f"the logprob of token {token} at position {position} of {what} is {logprob}")
