"""Weights that are not finite are neither published nor exported. The error names them, and nothing is written."""

import asyncio
from pathlib import Path

import pytest
import torch
from layout_work import make_engine as make_engine_of_ranks
from references import BASE, random_samples, save_random
from torch.distributed.tensor import DTensor

from rl_actors import adapters
from rl_actors.config import LoRAConfig
from rl_actors.engine import export, hf
from rl_actors.engine.collectives import by_rank
from rl_actors.finite import nonfinite
from rl_actors.transports.files import FilesTransport
from rl_actors.transports.publisher import Publisher
from rl_actors.types import NonFiniteError, OptimParams

LORA = LoRAConfig(rank=4, alpha=16.0)


def spoil(engine, part: str, value: float) -> str:
    """Put a value into this rank's shard of the first trained parameter whose name contains `part`. Returns the parameter's name."""
    named = engine.built.model.named_parameters()
    name, parameter = next((name, p) for name, p in named if part in name and p.requires_grad)
    shard = parameter.detach()
    (shard.to_local() if isinstance(shard, DTensor) else shard).view(-1)[-1] = value
    return name


def push(engine, publisher: Publisher) -> None:
    asyncio.run(publisher.publish(engine.policy_version, engine.hf_state_dict))


def step(engine) -> None:
    engine.forward_backward(random_samples([31, 7], seed=1), "cross_entropy")
    engine.optim_step(OptimParams(learning_rate=1e-3))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("lora", [LoRAConfig(), LORA], ids=["weights", "adapters"])
def test_a_refused_push_changes_nothing_and_a_checkpoint_repairs_the_trainer(make_engine, tmp_path, lora, value):
    engine = make_engine(save_random(tmp_path / "base", BASE), lora=lora)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "checkpoint")).result()
    publisher = Publisher(FilesTransport(tmp_path / "published"), rank=0, gather=by_rank)
    push(engine, publisher)
    before, published = files_below(tmp_path / "published"), list(publisher.published)
    step(engine)
    spoil(engine, "lora_b" if lora.rank else "wo.weight", value)
    with pytest.raises(
        NonFiniteError, match=r"push of version 2: weights are not finite: .*_proj.*1 in all.*Load a checkpoint"
    ):
        push(engine, publisher)
    assert files_below(tmp_path / "published") == before and publisher.published == published
    assert engine.policy_version == 2 and engine.step.state == "idle"
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    step(engine)
    push(engine, publisher)
    assert publisher.published[-1].version == 2


def test_exports_of_a_trainer_refuse_them_and_write_nothing(make_engine, tmp_path):
    engine = make_engine(save_random(tmp_path / "base", BASE), lora=LORA)
    name = spoil(engine, "lora_b", float("nan"))
    for call, path in ((engine.export_lora, tmp_path / "lora"), (engine.export_hf, tmp_path / "hf")):
        with pytest.raises(NonFiniteError, match=f"{call.__name__}: weights are not finite: "):
            call(str(path))
        assert not path.exists() and not Path(f"{path}.partial").exists()
    assert name.endswith("lora_b.weight")


@pytest.mark.parametrize("lora", [LoRAConfig(), LORA], ids=["weights", "adapters"])
def test_exports_of_a_checkpoint_refuse_them_and_write_nothing(make_engine, tmp_path, lora):
    engine = make_engine(save_random(tmp_path / "base", BASE), lora=lora)
    spoil(engine, "lora_b" if lora.rank else "wo.weight", float("inf"))
    checkpoint = str(tmp_path / "checkpoint")
    engine.save_checkpoint(checkpoint).result()
    calls = [export.export_checkpoint, *([export.export_adapters] if lora.rank else [])]
    for call in calls:
        with pytest.raises(NonFiniteError, match=r"export of .*checkpoint: weights are not finite: .*_proj"):
            call(checkpoint, engine.config, str(tmp_path / "out"))
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_generator_refuses_an_adapter_that_is_not_finite(make_engine, tmp_path):
    engine = make_engine(save_random(tmp_path / "base", BASE), lora=LORA)
    shapes = hf.tensor_shapes(BASE)
    tensors = {name: torch.zeros(shape) for name, shape in adapters.shapes(LORA, shapes).items()}
    (tmp_path / "adapter").mkdir()
    adapters.write(tmp_path / "adapter", tensors, LORA, base="base")
    layers = adapters.modules(LORA)
    adapters.require_fits(tmp_path / "adapter", shapes, layers)
    next(iter(tensors.values()))[0, 0] = float("nan")
    adapters.write(tmp_path / "adapter", tensors, engine.config.lora, base="base")
    with pytest.raises(NonFiniteError, match=f"the adapter in {tmp_path}/adapter: weights are not finite"):
        adapters.require_fits(tmp_path / "adapter", shapes, layers)


def test_large_weights_whose_sum_overflows_are_finite():
    large = torch.full((4,), 3e38)
    assert nonfinite({"large": large, "integers": torch.ones(3, dtype=torch.int64)}) == []
    assert nonfinite({"large": large, "bad": torch.tensor([1.0, float("-inf")])}) == ["bad"]


def refusals_of_ranks(path: str, folder: str) -> list[str]:
    """The errors of a push and of an export, if only the last rank has the shard that is not finite."""
    engine = make_engine_of_ranks(path, {"data_parallel_shard_degree": 2}, {})
    if torch.distributed.get_rank() == 1:
        spoil(engine, "wo.weight", float("nan"))
    publisher = Publisher(FilesTransport(Path(folder) / "published"), rank=torch.distributed.get_rank(), gather=by_rank)
    errors = []
    for call in (lambda: push(engine, publisher), lambda: engine.export_hf(f"{folder}/export")):
        with pytest.raises(NonFiniteError) as failure:
            call()
        errors.append(str(failure.value))
    assert not publisher.published
    return errors


def test_all_ranks_raise_the_error_of_one(run, directory_of, tmp_path):
    first, last = run(2, refusals_of_ranks, directory_of("untied"), str(tmp_path))
    assert first == last
    assert first[0].startswith(
        "push of version 0: weights are not finite: model.layers.0.self_attn.o_proj.weight (1 in all)"
    )
    assert first[1].startswith("export_hf: weights are not finite: ")
    assert not files_below(tmp_path)
