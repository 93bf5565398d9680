"""vLLM's scheduler, with less work for each token: with a small model it takes longer than the GPU's step.

vLLM sends each token with three arrays for its logprobs, and looks at its request's blocks of the KV
cache. This scheduler sends TOKENS of a request together, and looks at blocks when one is full.
"""

import math
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request

Messages = dict[int, EngineCoreOutputs]  # by client
TOKENS = 16
"""Tokens of a request in a message; fewer at its start, at its end and before an update of weights."""


class Step:
    """In the place of a step's LogprobsLists: vLLM slices it for each request that wants logprobs."""

    def __init__(self, logprobs: LogprobsLists) -> None:
        # one call each, for all requests
        self.columns = logprobs.logprobs.shape[1]
        self.token_ids = logprobs.logprob_token_ids.ravel().tolist()
        self.logprobs = logprobs.logprobs.ravel().tolist()
        self.ranks = logprobs.sampled_token_ranks.tolist()

    def slice_request(self, row: int, count: int) -> "tuple[Step, int]":
        return self, row


class Unsent:
    """Tokens of a request. Flat lists, because objects that stay alive cost garbage collections."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.token_ids: list[int] = []  # of the logprobs, `columns` of each token
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.columns: list[int] = []

    def add(self, output: EngineCoreOutput) -> None:
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            step, row = output.new_logprobs
            columns = slice(row * step.columns, (row + 1) * step.columns)
            self.token_ids += step.token_ids[columns]
            self.logprobs += step.logprobs[columns]
            self.ranks.append(step.ranks[row])
            self.columns.append(step.columns)

    def put_into(self, output: EngineCoreOutput) -> None:
        output.new_token_ids = self.tokens
        output.new_logprobs = None
        if self.ranks:
            ids = np.array(self.token_ids, dtype=np.int32)
            logprobs = np.array(self.logprobs, dtype=np.float32)
            ranks = np.array(self.ranks, dtype=np.int32)
            output.new_logprobs = LogprobsLists(self._table(ids), self._table(logprobs), ranks)

    def _table(self, values: np.ndarray) -> np.ndarray:
        """A row for each token. A step has as many columns as the request of it that wants most."""
        columns = min(self.columns)
        if columns == max(self.columns):
            return values.reshape(-1, columns)
        return np.stack([row[:columns] for row in np.split(values, np.cumsum(self.columns)[:-1])])


class Grouping(Scheduler):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.unsent: dict[str, Unsent] = {}  # by request
        sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        look_at_blocks_when_full(self.kv_cache_manager, math.gcd(*sizes))

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> Messages:
        if result.logprobs is not None:
            result.logprobs = Step(result.logprobs)
        messages = super().update_from_output(scheduled, result)
        for message in messages.values():
            message.outputs = [output for output in message.outputs if self._is_due(output)]
        if self.unsent and self._is_paused():
            self._send_all(messages)
        return messages

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Whether to send it now, and then with the tokens that were kept; else keep its tokens."""
        unsent = self.unsent.get(output.request_id)
        if unsent is None:
            unsent = self.unsent[output.request_id] = Unsent()
        unsent.add(output)
        has_more = output.prefill_stats or output.new_prompt_logprobs_tensors or output.routed_experts is not None
        if not (output.finished or has_more or len(unsent.tokens) >= TOKENS):
            return False
        del self.unsent[output.request_id]
        unsent.put_into(output)
        return True

    def has_finished_requests(self) -> bool:
        """Also while tokens must be sent: vLLM gives a message's tokens the version of its time."""
        return super().has_finished_requests() or bool(self.unsent) and self._is_paused()

    def _is_paused(self) -> bool:
        return self.pause_state == PauseState.PAUSED_ALL

    def _send_all(self, messages: Messages) -> None:
        for request_id, unsent in self.unsent.items():
            output = EngineCoreOutput(request_id, [])
            unsent.put_into(output)
            message = messages.setdefault(self.requests[request_id].client_index, EngineCoreOutputs(outputs=[]))
            message.outputs.append(output)
        self.unsent.clear()

    def finish_requests(self, *arguments: Any) -> list[Request]:
        finished = super().finish_requests(*arguments)
        for request in finished:
            self.unsent.pop(request.request_id, None)
        return finished


def look_at_blocks_when_full(manager: KVCacheManager, block_size: int) -> None:
    """Skip vLLM's work on a running request's blocks of the KV cache at tokens that neither begin nor
    complete one.
    """
    allocate = manager.allocate_slots
    cache = manager.cache_blocks

    def allocate_slots(request: Request, num_new_tokens: int, **options: Any) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and request.num_computed_tokens % block_size and not any(options.values()):
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            cache(request, num_computed_tokens)

    manager.allocate_slots = allocate_slots
    manager.cache_blocks = cache_blocks


def zero_new_blocks() -> None:
    """Make vLLM zero a block of its KV cache before a request gets it; in the processes of core and workers.

    Attention multiplies unused slots by 0, so another request's NaN there would reach the result.
    """
    KVCacheConfig.needs_kv_cache_zeroing = True  # a property of vLLM's


class GroupingAsync(Grouping, AsyncScheduler):
    """With the next step under way."""


def scheduler(**arguments: Any) -> Grouping:
    """For `scheduler_cls`, in a process that may be without a worker."""
    zero_new_blocks()
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    return GroupingAsync(**arguments) if is_async else Grouping(**arguments)
