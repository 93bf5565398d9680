"""The trainer on one rank: forward, backward, optimizer step, weights. Without Monarch."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_actors import layouts
from rl_actors.config import TrainerConfig
from rl_actors.engine import checkpoint, deadlines, hf
from rl_actors.engine.batch import MicrobatchOutput, PackedBatch, make_batch
from rl_actors.engine.build import build
from rl_actors.engine.call_order import StepState
from rl_actors.engine.collectives import on_all_ranks
from rl_actors.engine.gpu import this_machine
from rl_actors.engine.gradients import Gradients, by_layout
from rl_actors.engine.heads import LogprobHead, ValueHead
from rl_actors.engine.logprobs import ChunkedHead
from rl_actors.engine.offload import Offload
from rl_actors.engine.optimizer import named_parameters
from rl_actors.engine.own_time import ComputeTimer, local_modules
from rl_actors.engine.packing import Planner
from rl_actors.engine.pipeline import PipelineRunner
from rl_actors.engine.profiling import StepProfiler
from rl_actors.engine.single_runner import SingleRunner
from rl_actors.engine.tenants import Tenants
from rl_actors.losses import Loss, resolve
from rl_actors.metrics import merge
from rl_actors.parts import PARTS, HostMove, Part, require_parts
from rl_actors.processes.output import LOG_VARIABLE
from rl_actors.transports.base import OpenVersion
from rl_actors.types import FIRST_TENANT, OptimParams, OptimResult, RankOutput, Sample, TrainerInfo
from rl_actors.validation import require_optimizer, require_tenant, validate_optim_params, validate_samples


class TrainEngine:
    """One rank of an SPMD program. Every rank makes the same calls in the same order."""

    def __init__(self, config: TrainerConfig) -> None:
        """Raises ValueError for a wrong config, hf_path or tokenizer_path."""
        config.validate()
        if config.hf_path:
            hf.require_same_tensors(config.model, config.hf_path)
        if config.tokenizer_path:
            hf.require_tokenizer(config.tokenizer_path)
        self.config = config
        self.built = build(config)
        self.memory = Offload(self.built)
        self.head = self._make_head()
        runner_class: type[PipelineRunner | SingleRunner] = PipelineRunner if self.built.stages else SingleRunner
        self.runner = runner_class(self.built, self.head, config)
        self.tenants = Tenants(self.built, self.memory)
        self.checkpoint_writer = checkpoint.CheckpointWriter()
        self.profiler = StepProfiler(torch.distributed.get_rank())
        self.own_time = ComputeTimer(local_modules(self.built.model, config), this_machine())
        self.own_seconds_per_token: float | None = None
        self.parameters_by_layout = by_layout(named_parameters(self.built.model))
        pipeline_mesh = self.built.parallel_dims.get_optional_mesh("pp")
        self.pipeline_group = pipeline_mesh.get_group() if pipeline_mesh is not None else None
        self.data_rank, self.num_data_ranks = self._rank_and_size("batch")
        tensor_rank, _ = self._rank_and_size("tp")
        context_rank, _ = self._rank_and_size("cp")
        self.reports_metrics = self.runner.reports_metrics and tensor_rank == 0
        self.reports_samples = self.reports_metrics and context_rank == 0
        if config.hf_path:
            hf.load(self.built, config.hf_path)
        deadlines.set_timeouts(self.built.parallel_dims, config.collective_timeout)

    def warm_up(self) -> None:
        """Compile for full rows, and then for rows of any length. Changes no numbers."""
        config = self.config
        length = config.max_sequence_length
        num_samples = config.tokens_per_row // length * config.rows_per_microbatch * self.num_data_ranks
        full = [Sample.from_tokens([0], [0] * length)] * num_samples
        for samples in (full, [Sample.from_tokens([0], [0] * (length // 2 + 1))]):
            if config.optimizer is None or config.head != "logprobs":
                self.forward(samples)
            else:
                self.forward_backward(samples, "cross_entropy")
                self.discard_gradients()

    @property
    def step(self) -> StepState:
        return self.tenants.in_use.step

    @property
    def policy_version(self) -> int:
        return self.tenants.in_use.policy_version

    def use(self, tenant: str) -> None:
        """Later calls work on this tenant."""
        self.tenants.use(tenant)

    def new_tenant(self, name: str, seed: int = 0) -> None:
        """Add a tenant with policy_version 0, and put it in use. seed: of its adapters."""
        require_tenant(name, seed, self.config.lora.rank)
        if self.config.model.num_experts and self.config.load_balance_coeff:
            raise ValueError(
                f"new_tenant is not possible with load_balance_coeff={self.config.load_balance_coeff}: every step changes the expert "
                "bias, which belongs to the base model that all tenants share"
            )
        self.tenants.add(name, seed)

    def drop_tenant(self, name: str) -> None:
        """Delete a tenant, even in its step."""
        self.tenants.drop(name)

    def validate(self, samples: Sequence[Sample], loss: Loss | None) -> None:
        """Raises the same ValueError on every rank, before any works on the samples."""
        validate_samples(
            samples,
            loss,
            vocab_size=self.config.model.vocab_size,
            max_sequence_length=self.config.max_sequence_length,
            max_call_bytes=self.config.max_call_bytes,
            head=self.config.head,
        )

    def forward(
        self, samples: Sequence[Sample], loss: str | Loss | None = None, *, entropy: bool = False
    ) -> RankOutput:
        """Logprobs or values, and with a loss its metrics, float32. Changes nothing."""
        loss = None if loss is None else resolve(loss)
        self.step.require("forward")
        self.validate(samples, loss)
        self.memory.onload(["weights"])
        # a loss reads all columns; `validate` has checked that all samples have them
        columns = samples[0].columns if loss is not None else {"target_ids"} & set(samples[0].columns)
        self.built.model.eval()  # torchtitan then does not count the tokens of experts
        try:
            with torch.no_grad():
                return self._output(self.runner.forward(self._batches(samples, columns), loss, with_entropy=entropy))
        finally:
            self.built.model.train()

    def forward_backward(self, samples: Sequence[Sample], loss: str | Loss, *, entropy: bool = False) -> RankOutput:
        """Add d(sum of the loss)/d(parameters) to the gradients, and open a step.

        A GPU's last backward pass may still run, and its failure is raised by the next call.
        """
        require_optimizer("forward_backward", self.config.optimizer)
        loss = resolve(loss)
        self.step.require("forward_backward")
        self.validate(samples, loss)
        self.memory.onload(["weights", "gradients"])
        with self._broken_on_failure():
            batches = self._batches(samples, samples[0].columns)
            outputs = self.runner.forward_backward(batches, loss, with_entropy=entropy)
        self.step.open()
        return self._output(outputs)

    def optim_step(self, params: OptimParams) -> OptimResult:
        """Divide, clip, step, clear. A norm that is not finite skips the step."""
        require_optimizer("optim_step", self.config.optimizer)
        self.step.require("optim_step")
        hyperparameters = self.built.hyperparameters
        assert hyperparameters is not None
        validate_optim_params(params, hyperparameters.name, hyperparameters.supported)
        self.memory.onload()
        with self._broken_on_failure():
            gradients = Gradients(
                self.parameters_by_layout, self.pipeline_group, self.built.weights_device, this_machine().norms
            )
            norm = gradients.norm() / params.grad_divisor
            # before the scaling, with which a GPU goes on while the host waits
            norm_copy = self.built.to_host(norm)
            # FSDP sums (divide factor 1), so one pass over the gradients divides and clips here.
            clip = torch.ones_like(norm)
            if params.grad_clip_norm is not None:
                clip = (params.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients.scale(clip / params.grad_divisor)
            grad_norm = norm_copy.wait().item()
            is_finite = grad_norm < float("inf")
            nonfinite_parameters = () if is_finite else gradients.nonfinite()
        if is_finite:
            with self._broken_on_failure(weights=True):
                hyperparameters.set(params)
                self.built.optimizers.step()
            self.tenants.in_use.policy_version += 1
        else:
            self.tenants.in_use.steps_skipped += 1
        self.own_seconds_per_token = self.own_time.take()
        self._clear()
        self.step.close()
        self.profiler.step_done()
        return OptimResult(
            policy_version=self.policy_version,
            grad_norm=grad_norm,
            skipped=not is_finite,
            nonfinite_parameters=nonfinite_parameters,
        )

    def discard_gradients(self) -> None:
        """Drop the gradients, also incomplete ones, and close the step."""
        self.step.require("discard_gradients")
        self.own_time.take()
        self._clear()
        self.step.close()

    def save_checkpoint(self, path: str, *, optimizer: bool = True) -> "Future[None]":
        """Copy the state, and write a DCP directory while training goes on. Waits for an earlier save.

        The future raises RuntimeError if a rank cannot write.
        """
        self.step.require("save_checkpoint")
        if optimizer:
            require_optimizer("save_checkpoint(optimizer=True)", self.config.optimizer)
        self.checkpoint_writer.wait()
        checkpoint.require_replaceable(path)
        self.memory.onload(["weights", "optimizer"] if optimizer else ["weights"])
        tokenizer = hf.tokenizer_files(self.config.tokenizer_path or self.config.hf_path)
        return self.checkpoint_writer.start(
            self.built, path, self.policy_version, optimizer=optimizer, extra_files=tokenizer
        )

    def load_checkpoint(self, path: str, *, optimizer: bool = True) -> int:
        """Read a checkpoint of any layout. Returns its policy_version."""
        self.step.require("load_checkpoint")
        if optimizer:
            require_optimizer("load_checkpoint(optimizer=True)", self.config.optimizer)
        self.checkpoint_writer.wait()
        self.memory.onload()
        checkpoint.require_checkpoint(self.built, path, optimizer=optimizer)
        with self._broken_on_failure(weights=True):
            self.tenants.in_use.policy_version = checkpoint.load(self.built, path, optimizer=optimizer)
        self.step.close()
        return self.policy_version

    def load_published(self, version: OpenVersion, number: int) -> int:
        """Load a published version, and set policy_version to `number`."""
        self.step.require("pull_model_state_dict")
        if self.config.optimizer is not None or self.config.lora.rank or self.config.head != "logprobs":
            raise ValueError(
                f"pull_model_state_dict is not possible with optimizer={self.config.optimizer and self.config.optimizer.name}, "
                f"lora.rank={self.config.lora.rank} and head={self.config.head!r}: only a language model "
                "without an optimizer and without adapters can load published weights"
            )
        self.memory.onload(["weights"])
        hf.require_same_shapes(self.config.model, version.manifest.shapes, f"version {number}", "this model")
        with self._broken_on_failure(weights=True):
            hf.load_whole(self.built, version.tensors())
        self.step.close()
        self.tenants.in_use.policy_version = number
        return number

    def hf_state_dict(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """What a push publishes, sharded: the adapters under peft's names, or merged weights."""
        self.config.require_hf("push_model_state_dict")
        self.memory.onload(["weights"])
        if self.config.lora.syncs_adapter:
            return hf.adapter_state_dict(self.built, dtype)
        return hf.state_dict(self.built, dtype)

    def export_hf(self, path: str, dtype: str = "float32") -> None:
        """Write config.json, safetensors and tokenizer files, with adapters merged."""
        self.step.require("export_hf")
        self.config.require_hf("export_hf")
        hf.require_free(path, dtype, on_all_ranks)
        self.memory.onload(["weights"])
        source = self.config.tokenizer_path or self.config.hf_path
        hf.export(self.built, self.config.model, path, source=source, dtype=dtype)

    def export_lora(self, path: str) -> None:
        """Write the adapters for peft."""
        self.step.require("export_lora")
        if not self.config.lora.rank:
            raise ValueError("export_lora is not possible with lora.rank=0: there are no adapters; call export_hf")
        hf.require_free(path, "float32", on_all_ranks)
        self.memory.onload(["weights"])
        hf.export_lora(self.built, self.config.lora, path, base=self.config.hf_path)

    def profile(self, directory: str, steps: int) -> None:
        """Trace the next `steps` optimizer steps into <directory>/rank-N.json."""
        require_optimizer("profile", self.config.optimizer)
        self.step.require("profile")
        self.profiler.start(directory, steps)

    def offload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Move the parts to the host. Later calls bring back what they need."""
        require_parts("offload", parts)
        self.step.require("offload")
        return self.memory.offload(parts)

    def onload(self, parts: Collection[Part] = PARTS) -> HostMove:
        """Move the parts back, with the same bytes."""
        require_parts("onload", parts)
        self.step.require("onload")
        return self.memory.onload(parts)

    def info(self, tenant: str | None = None) -> TrainerInfo:
        """tenant: whose version and state; None: the one in use."""
        config = self.config
        asked = self.tenants.in_use if tenant is None else self.tenants.find(tenant)
        return TrainerInfo(
            policy_version=asked.policy_version,
            steps_skipped=asked.steps_skipped,
            state=asked.step.state,
            tenants=tuple(name for name in self.tenants.by_name if name != FIRST_TENANT),
            lora_rank=config.lora.rank,
            num_parameters=self.built.num_parameters,
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.max_sequence_length,
            tokens_per_row=config.tokens_per_row,
            max_call_bytes=config.max_call_bytes,
            layout=layouts.all_degrees(config),
            device=str(self.built.device),
            device_name=this_machine().device_name(),
            dtype=config.compute_dtype,
            head=config.head,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            pid=os.getpid(),
            optimizer=config.optimizer.name if config.optimizer is not None else None,
            optimizer_fields=self.built.hyperparameters.supported if self.built.hyperparameters is not None else (),
            memory_bytes=this_machine().memory_bytes(),
            peak_memory_bytes=this_machine().peak_memory_bytes(),
            on_host=self.memory.num_bytes(),
            offloaded=self.memory.offloaded,
            onloaded=self.memory.onloaded,
            logs=os.environ.get(LOG_VARIABLE, ""),
            own_seconds_per_token=self.own_seconds_per_token,
        )

    def _make_head(self) -> ChunkedHead:
        stages = self.built.stages
        return ChunkedHead(
            stages[-1].submod if stages else self.built.model,
            self.config.logprob_chunk_tokens,
            ValueHead() if self.config.head == "values" else LogprobHead(this_machine().fuse),
            keep_head=self.config.parallelism.fsdp_reshard_after_forward != "always",
            # FSDP reduces the last norm's and the head's gradients together, in one dtype. A
            # pipeline's norm has a float32 gradient, and so has a head of two or more chunks.
            min_chunks=2 if stages else 1,
        )

    def _rank_and_size(self, dimension: str) -> tuple[int, int]:
        """(this rank's index, size) in a dimension of the layout, or (0, 1) without it."""
        mesh = self.built.parallel_dims.get_optional_mesh(dimension)
        return (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)

    def _batches(self, samples: Sequence[Sample], columns: Iterable[str]) -> Iterator[PackedBatch]:
        """This rank's microbatches, each made when it is taken."""
        config = self.config
        planner = Planner(
            tokens_per_row=config.tokens_per_row,
            rows_per_microbatch=config.rows_per_microbatch,
            num_ranks=self.num_data_ranks,
            row_multiple=layouts.row_multiple(config),
            policy=config.packing,
            **self.runner.planned,
        )
        for microbatch in planner.plan([len(sample) for sample in samples])[self.data_rank]:
            yield make_batch(samples, microbatch, columns, self.built.to_device)

    def _output(self, outputs: list[MicrobatchOutput]) -> RankOutput:
        reporting = outputs if self.reports_samples else []
        values = [output.values() for output in reporting]
        joined: dict[str, Tensor] = {}
        for name in values[0] if values else ():
            joined[name] = torch.cat([microbatch[name] for microbatch in values])
        return RankOutput(
            rank=torch.distributed.get_rank(),
            indices=[index for output in reporting for index in output.indices],
            lengths=[length for output in reporting for length in output.lengths],
            values=joined,
            metrics=merge(output.metrics() for output in outputs) if self.reports_metrics else {},
            policy_version=self.policy_version,
        )

    def _clear(self) -> None:
        self.built.optimizers.zero_grad()
        self.memory.forget_gradients()
        self.built.routers.reset()

    @contextmanager
    def _broken_on_failure(self, *, weights: bool = False) -> Iterator[None]:
        """A failure breaks the step, with `weights`, which may have changed, into "inconsistent"."""
        try:
            yield
        except BaseException:
            self.step.mark_broken(weights=weights)
            raise
