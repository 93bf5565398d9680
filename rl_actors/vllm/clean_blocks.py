"""Makes vLLM fill every block of its KV cache with zeros before a request gets the block.

Attention also reads the unused slots of a request's last block, and multiplies their values by 0. A NaN or an infinity
that another request has left there would make the result NaN. By itself vLLM fills new blocks with zeros only for
models with Mamba layers and for a KV cache of several dtypes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def zero_new_blocks() -> None:
    """Call this in the processes of vLLM's core and of its workers, before the core makes its scheduler."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = True  # a property of vLLM's, which the scheduler and the workers read


def scheduler(**arguments: Any) -> "Scheduler":
    """The scheduler that vLLM makes by itself, for a core in a process of its own.

    If a worker runs in another process, `zero_new_blocks` has not run in the core's process.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    zero_new_blocks()
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    return (AsyncScheduler if is_async else Scheduler)(**arguments)
