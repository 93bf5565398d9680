"""The scheduler of an engine core in a process of its own, with a model that gives every position a token of its own."""

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rl_actors import ModelConfig

PROMPT_LENGTH = 20
BLOCK_SIZE = 16


def token_at(request_id: str, position: int) -> int:
    return (int(request_id) * 7919 + position * 31) % 1000


def logprob_at(request_id: str, position: int) -> float:
    return -float(token_at(request_id, position)) / 8


@dataclass
class Received:
    """What a client gets of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False
    num_messages: int = 0


class Simulation:
    """A core without a model. is_async: a step is scheduled before the result of the step before it is known.

    grouping: False is vLLM's own scheduler, which tests/drills/scheduler.py compares.
    """

    def __init__(
        self, directory: str, num_blocks: int, is_async: bool = True, *, grouping: bool = True, max_num_seqs: int = 64
    ) -> None:
        from vllm import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from rl_actors.vllm.scheduler import scheduler

        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_batched_tokens=2048,
            max_num_seqs=max_num_seqs,
            block_size=BLOCK_SIZE,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = is_async
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
        blocks = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        make = scheduler if grouping else AsyncScheduler
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=blocks,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=False,
        )
        self.depth = 2 if is_async else 1
        self.under_way: deque = deque()
        self.received: dict[str, Received] = defaultdict(Received)
        self.version = 1
        self.num_preempted = 0
        self.seconds = 0.0  # of the processor, in the scheduler

    def add(self, request_id: str, max_tokens: int, logprobs: int | None = 0) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
        prompt = [(int(request_id) // 4 + index) % 40 for index in range(PROMPT_LENGTH)]
        request = Request(request_id, prompt, params, None, arrival_time=0.0, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def step(self) -> None:
        """Schedule a step, then give the scheduler the oldest result if enough are under way or nothing was scheduled."""
        begin = time.thread_time()
        scheduled = self.scheduler.schedule()
        self.seconds += time.thread_time() - begin
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        starts = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            [blocks] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            assert len(blocks) * BLOCK_SIZE >= starts[request_id] + count
        self.under_way.append((scheduled, starts))
        if len(self.under_way) == self.depth or not scheduled.num_scheduled_tokens:
            self._finish(*self.under_way.popleft())

    def _finish(self, scheduled, starts: dict[str, int]) -> None:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        ids = list(scheduled.num_scheduled_tokens)
        ends = [starts[request_id] + scheduled.num_scheduled_tokens[request_id] for request_id in ids]
        asking = [
            self.scheduler.requests[name].sampling_params.num_logprobs
            for name in ids
            if name in self.scheduler.requests
        ]
        columns = 1 + max((count for count in asking if count), default=0)
        pairs = list(zip(ids, ends, strict=True))
        tokens = np.array([[token_at(*pair)] * columns for pair in pairs], dtype=np.int32).reshape(-1, columns)
        logprobs = np.array([[logprob_at(*pair)] * columns for pair in pairs], dtype=np.float32).reshape(-1, columns)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[token_at(*pair)] if pair[1] >= PROMPT_LENGTH else [] for pair in pairs],
            logprobs=LogprobsLists(tokens, logprobs, np.ones(len(ids), dtype=np.int32)) if ids else None,
            prompt_logprobs_dict={},
        )
        begin = time.thread_time()
        messages = self.scheduler.update_from_output(scheduled, result)
        self.seconds += time.thread_time() - begin
        for message in messages.values():
            for output in message.outputs:
                received = self.received[output.request_id]
                received.num_messages += 1
                received.tokens += output.new_token_ids
                received.versions += [self.version] * len(output.new_token_ids)
                if output.new_logprobs is not None:
                    received.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                    received.columns.append(output.new_logprobs.logprobs.shape[1])
                received.finished |= output.finished

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()
        while self.under_way:
            self._finish(*self.under_way.popleft())


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    ModelConfig().save(path)
    return str(path)


def check(received: Received, request_id: str, length: int) -> None:
    positions = range(PROMPT_LENGTH, PROMPT_LENGTH + length)
    assert received.tokens == [token_at(request_id, position) for position in positions]
    assert received.logprobs == [logprob_at(request_id, position) for position in positions]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("num_blocks", [400, 22])
def test_every_token_arrives_once_and_in_order_also_after_a_preemption(directory, num_blocks, is_async):
    simulation = Simulation(directory, num_blocks, is_async)
    free = simulation.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    lengths = {str(index): 1 + 7 * index for index in range(12)}
    for request_id, length in lengths.items():
        simulation.add(request_id, length)
    simulation.run()
    for request_id, length in lengths.items():
        received = simulation.received[request_id]
        assert received.finished
        check(received, request_id, length)
        assert simulation.num_preempted or received.num_messages <= 2 + length // 16
    assert bool(simulation.num_preempted) == (num_blocks == 22)
    assert simulation.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not simulation.scheduler.unsent


def test_generated_blocks_are_cached_for_a_later_prompt(directory):
    simulation = Simulation(directory, 400)
    simulation.add("1", 60)
    simulation.run()
    cached = simulation.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    # every full block of prompt and completion; the last token is never an input
    assert len(cached) == (PROMPT_LENGTH + 60 - 1) // BLOCK_SIZE


def test_a_pause_sends_what_was_kept_so_that_its_tokens_have_the_version_before_it(directory):
    from vllm.v1.core.sched.interface import PauseState

    simulation = Simulation(directory, 400)
    for index in range(5):
        simulation.add(str(index), 40 + index)
    for _ in range(25):
        simulation.step()
    counts = {request_id: len(received.tokens) for request_id, received in simulation.received.items()}
    simulation.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    simulation.run()
    sent = {request_id: len(received.tokens) for request_id, received in simulation.received.items()}
    assert all(25 >= sent[request_id] > count for request_id, count in counts.items())
    assert not simulation.scheduler.has_requests() and not simulation.scheduler.unsent
    simulation.version = 2
    simulation.scheduler.set_pause_state(PauseState.UNPAUSED)
    simulation.run()
    for index in range(5):
        received = simulation.received[str(index)]
        check(received, str(index), 40 + index)
        assert received.versions == [1] * sent[str(index)] + [2] * (40 + index - sent[str(index)])


def test_requests_with_and_without_logprobs_and_of_several_widths_share_steps(directory):
    simulation = Simulation(directory, 400)
    simulation.add("0", 50, logprobs=None)
    simulation.add("1", 50, logprobs=0)
    simulation.add("2", 20, logprobs=3)
    simulation.run()
    assert simulation.received["0"].logprobs == []
    check(simulation.received["1"], "1", 50)
    check(simulation.received["2"], "2", 20)
    # a message has as many columns as each of its steps at least, and at least those asked for
    assert min(simulation.received["2"].columns) == 4
    assert simulation.received["1"].columns[0] == 4 and simulation.received["1"].columns[-1] == 1


def test_an_aborted_request_leaves_nothing(directory):
    from vllm.v1.request import RequestStatus

    simulation = Simulation(directory, 400)
    for index in range(3):
        simulation.add(str(index), 60)
    for _ in range(20):
        simulation.step()
    assert "1" in simulation.scheduler.unsent
    simulation.scheduler.finish_requests(["1"], RequestStatus.FINISHED_ABORTED)
    assert "1" not in simulation.scheduler.unsent
    simulation.run()
    assert not simulation.received["1"].finished and not simulation.scheduler.unsent
    check(simulation.received["2"], "2", 60)
