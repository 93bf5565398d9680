"""What runs in vLLM's workers: the methods of WeightsExtension, most of them for a pull.

Errors are returned, so that every worker answers.
"""

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor, nn

from rl_actors.processes.errors import sendable
from rl_actors.transports.base import OpenVersion, Source
from rl_actors.vllm.in_place import Plan, is_possible, load_in_place, make_plan
from rl_actors.vllm.scheduler import zero_new_blocks
from rl_actors.vllm.start import this_machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
NO_WEIGHTS_TO_LOAD = {
    "RotaryEmbedding: Failed to load weights",  # a table, in no checkpoint
    # a tied head; a version without an untied one is refused before
    "ParallelLMHead: Failed to load weights",
}
"""Warnings of vLLM's reload about layers without weights of their own."""


class WeightsExtension:
    """Methods that vLLM adds to its worker, called by name through `collective_rpc`."""

    opened: contextlib.ExitStack | None = None
    version: OpenVersion | None = None
    plan: Plan | None = None

    if TYPE_CHECKING:  # of vLLM's worker
        vllm_config: VllmConfig
        model_runner: GPUModelRunner

        def get_model(self) -> nn.Module: ...
        def reload_weights(self, *, weights_iterator: Iterator[tuple[str, Tensor]]) -> None: ...

    def remove_shared_names(self) -> int:
        """Remove the names in /dev/shm of the ranks' shared memory on a CPU, which vLLM would leave
        after a kill; all have opened it. Returns this pid.
        """
        if ident := os.environ.get("VLLM_DIST_IDENT"):
            for segment in SHARED_MEMORY.glob(f"{ident}-*-cpushm_*"):
                segment.unlink(missing_ok=True)
        return os.getpid()

    def releasable_bytes(self) -> int:
        """All of vLLM's own allocator; 0 on a CPU."""
        if not torch.cuda.is_available():
            return 0
        from vllm.device_allocator import get_mem_allocator_instance

        return get_mem_allocator_instance().get_current_usage()

    def answer(self, method: str, *arguments: object) -> tuple[object, bytes]:
        """(result of the method, b""), or (None, the pickled error)."""
        try:
            return getattr(self, method)(*arguments), b""
        except Exception as error:
            logger.exception("%s failed", method)
            return None, cloudpickle.dumps(sendable(error))

    def open_version(self, payload: bytes) -> tuple[str, str, int, float]:
        """Open a pickled Source's version. Returns (path, such as "tcp", reason, bytes, seconds)."""
        begin = time.perf_counter()
        source: Source = pickle.loads(payload)
        self.close_version()
        with contextlib.ExitStack() as stack:
            self.version = version = stack.enter_context(source.open())
            self.opened = stack.pop_all()
        return version.path, version.reason, version.manifest.num_bytes, time.perf_counter() - begin

    def close_version(self) -> None:
        if self.opened is not None:
            self.opened.close()
        self.opened = self.version = None

    def load_version(self) -> float:
        """Replace all weights. Returns the seconds. After a failure the model may mix two versions."""
        begin = time.perf_counter()
        assert self.version is not None
        model = self.get_model()
        plan = self._plan_for(self.version, model)
        if plan:
            load_in_place(plan, self.version)
        else:
            self._reload(self.version, model)
        return time.perf_counter() - begin

    def _plan_for(self, version: OpenVersion, model: nn.Module) -> Plan:
        """The plan of all pulls, made by the first. Empty: vLLM's reload must load."""
        if self.plan is None:
            self.plan = {}
            if is_possible(model, self.vllm_config):
                try:
                    self.plan = make_plan(model, version.manifest.shapes)
                except ValueError as error:
                    logger.warning(
                        "pulls use vLLM's own reload, which is slower than a direct copy of the weights: %s", error
                    )
        return self.plan

    def _reload(self, version: OpenVersion, model: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        config = self.vllm_config.model_config
        with this_machine().reloading(model), filtered_warnings(is_of_a_layer_with_weights):
            try:
                self.reload_weights(weights_iterator=cast_tensors(version, config.dtype))
            except BaseException:
                with filtered_warnings(lambda record: False):  # of every layer
                    finalize_layerwise_reload(model, config)  # so that another reload can begin
                raise

    def apply_to_prompts(self) -> None:
        """Apply adapters of the output projection to prompts too: vLLM only does where it samples."""
        from vllm.lora.layers import LogitsProcessorWithLoRA

        heads = [module for module in self.get_model().modules() if isinstance(module, LogitsProcessorWithLoRA)]
        if heads:
            [head] = heads
            runner = self.model_runner
            runner._get_prompt_logprobs_dict = PromptLogprobs(head, runner._get_prompt_logprobs_dict)

    def load_adapter(self, adapter_id: int, rank: int, alpha: float, modules: list[str]) -> float:
        """Replace the adapter by the open version's tensors. Returns the seconds."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        begin = time.perf_counter()
        assert self.version is not None
        lora = self.model_runner.lora_manager
        dtype = lora.lora_config.lora_dtype
        mapper = getattr(self.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            adapter_id,
            # views may be valid only while the version is open
            {name: tensor.to(dtype, copy=True) for name, tensor in self.version.tensors()},
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=modules),
            device="cpu",
            dtype=dtype,
            model_vocab_size=lora.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager = lora._adapter_manager
        manager.remove_adapter(adapter_id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter_id)
        return time.perf_counter() - begin


class PromptLogprobs:
    """vLLM's computation of prompt logprobs, with a request's adapter at every row.

    T positions, D hidden size, V vocabulary.
    """

    def __init__(self, head: Any, compute: Callable[[Tensor, dict[str, int]], Any]) -> None:
        """head: the output projection with adapters. compute: vLLM's own."""
        self.head = head
        self.compute = compute
        self.hidden_TD = torch.empty(0)

    def __call__(self, hidden_TD: Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        """Compute with this object as the head's punica_wrapper, for `add_lora_logits`."""
        self.hidden_TD = hidden_TD
        self.punica = self.head.punica_wrapper
        self.head.punica_wrapper = self
        try:
            return self.compute(hidden_TD, num_scheduled_tokens)
        finally:
            self.head.punica_wrapper = self.punica
            self.hidden_TD = torch.empty(0)

    def add_lora_logits(self, logits_TV: Tensor, x_TD: Tensor, a_S1RD: Tensor, b_S1VR: Tensor, scale: float) -> Tensor:
        """Add an adapter's term to the logits of one request's prompt. x_TD: rows of `hidden_TD`.

        a_S1RD, b_S1VR: A and B of a step's S adapters, R the largest rank.
        """
        row = (x_TD.storage_offset() - self.hidden_TD.storage_offset()) // self.hidden_TD.stride(0)
        slot = int(self.punica.token_lora_indices[row])
        if slot >= 0:
            low_TR = x_TD.float() @ a_S1RD[slot, 0].float().T
            width = b_S1VR.shape[2]
            logits_TV[:, :width] += (scale * (low_TR @ b_S1VR[slot, 0].float().T)).to(logits_TV.dtype)
        return logits_TV


def cast_tensors(version: OpenVersion, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors in this dtype, one at a time."""
    for name, tensor in version.tensors():
        yield name, tensor.to(dtype)
        del tensor  # free before the next is assembled


@contextlib.contextmanager
def filtered_warnings(keeps: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Drop other warnings of vLLM's reload in the body."""
    reload_logger = logging.getLogger(RELOAD_LOGGER)
    reload_logger.addFilter(keeps)
    try:
        yield
    finally:
        reload_logger.removeFilter(keeps)


def is_of_a_layer_with_weights(record: logging.LogRecord) -> bool:
    return record.getMessage() not in NO_WEIGHTS_TO_LOAD


# vLLM imports this module before a worker loads the model
this_machine().prepare_worker()
zero_new_blocks()
