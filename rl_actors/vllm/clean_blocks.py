"""Makes vLLM zero every block of its KV cache before a request gets it.

Attention multiplies unused slots by 0, so another request's NaN there would reach the result.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def zero_new_blocks() -> None:
    """In the processes of core and workers, before the scheduler is made."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = True  # a property of vLLM's


def scheduler(**arguments: Any) -> "Scheduler":
    """vLLM's own scheduler, for a core in a process without a worker."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    zero_new_blocks()
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    return (AsyncScheduler if is_async else Scheduler)(**arguments)
