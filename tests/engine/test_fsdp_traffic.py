"""Traffic of two FSDP2 ranks.

The tests count the bytes that each rank reads from a Hugging Face directory, the bytes that it pushes to the generator, and FSDP's all-gathers.
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from layout_work import MODELS, STEP, TRAINED, layout, make_engine, run_processes, samples_with
from references import save_random
from safetensors.torch import load_file

from rl_actors.losses import GSPO

CASES = ("tied", "untied", "experts")


def bytes_by_name(requests: list[tuple[str, int]]) -> Counter:
    total: Counter = Counter()
    for name, num_bytes in requests:
        total[name] += num_bytes
    return total


def count_reads(monkeypatch) -> list[tuple[str, int]]:
    """A list to which every later read from safetensors adds (name, bytes)."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reads: list[tuple[str, int]] = []
    process = HuggingFaceStorageReader._process_read_request

    def counted(self, file, request, planner):
        reads.append((request.storage_index.fqn, request.lengths.numel() * 4))
        process(self, file, request, planner)

    monkeypatch.setattr(HuggingFaceStorageReader, "_process_read_request", counted)
    return reads


def count_gathers(monkeypatch) -> list[str]:
    """A list to which every later all-gather of FSDP adds a name: that of the first parameter in the gathered parameter group."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    gathers: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def counted(fsdp_params, *args, **kwargs):
        gathers.append(fsdp_params[0]._param_fqn)
        return gather(fsdp_params, *args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", counted)
    return gathers


def observe(path: str, fields: dict, policy: str) -> dict:
    """The traffic of this rank: for each tensor the bytes read and pushed, and for each call the number of gathers of every parameter group."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        reads, gathers = count_reads(monkeypatch), count_gathers(monkeypatch)
        engine = make_engine(path, layout(shard=2, fsdp_reshard_after_forward=policy), fields)
        seen: dict = {"reads": bytes_by_name(reads)}
        seen |= pushed(engine)
        samples, policy_samples = samples_with("loss_weights") * 4, samples_with(*TRAINED) * 4
        calls = {
            "forward": lambda: engine.forward(samples),
            "forward of one microbatch": lambda: engine.forward(samples[:2]),
            "forward_backward": lambda: engine.forward_backward(samples, "cross_entropy"),
            "forward in an open step": lambda: engine.forward(samples),
            "forward_backward of whole sequences": lambda: engine.forward_backward(policy_samples, GSPO()),
            "step": lambda: engine.optim_step(STEP),
        }
        for name, call in calls.items():
            gathers.clear()
            answer = call()
            seen[name] = Counter(group.removesuffix(".attention.qkv_linear.wqkv.weight") for group in gathers)
        seen["result"] = answer
        batches = list(engine._batches(samples, ()))
        seen["microbatches"] = len(batches)
        seen["chunks"] = min(engine.head._num_chunks(*batch.tokens_BL.shape) for batch in batches)
    return seen


def pushed(engine) -> dict:
    state = engine.hf_state_dict()
    return {
        "pushed": {name: tensor.to_local().nbytes for name, tensor in state.items()},
        "weights": {name: tensor.full_tensor().clone() for name, tensor in state.items()},
    }


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """observed(model, policy) returns (the model's directory, the result of `observe` on each of two ranks)."""

    @cache
    def run(model: str, policy: str):
        path = save_random(tmp_path_factory.mktemp("model"), MODELS[model][0])
        return path, run_processes(tmp_path_factory, 2, observe, path, MODELS[model][1], policy)

    return run


def stored_bytes(path: str) -> dict[str, int]:
    sizes = {}
    for file in Path(path).glob("*.safetensors"):
        sizes |= {name: tensor.nbytes for name, tensor in load_file(file).items()}
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_each_rank_reads_and_pushes_its_half_of_every_tensor(observed, model):
    path, ranks = observed(model, "default")
    for name, size in stored_bytes(path).items():
        assert [seen["reads"][name] for seen in ranks] == [size // 2] * 2, name
        assert [seen["pushed"][name] for seen in ranks] == [size // 2] * 2, name
    stored = load_file(Path(path) / "model.safetensors")
    for seen in ranks:
        assert seen["weights"].keys() == stored.keys()
        assert all(torch.equal(seen["weights"][name], stored[name]) for name in stored)


def expected_gathers(model: str, policy: str, num_microbatches: int) -> dict[str, dict[str, int]]:
    """Number of gathers of every parameter group, for each call. A group has the name of its first parameter or of its block.

    The last norm and the head are one group. A tied embedding is in that group, too. An untied embedding is gathered as often as a block.
    """
    m = num_microbatches
    block_in_forward, block_in_forward_backward = {
        "default": (1, 2 * m),
        "always": (m, 2 * m),
        "never": (1, m),
    }[policy]
    # With "always" FSDP frees the head's group after the norm. So each microbatch needs one more gather before the head.
    more = 1 if policy == "always" else 0

    def counts(block: int, head: int) -> dict[str, int]:
        names = {"layers.0": block, "layers.1": block}
        if model == "tied":
            return names | {"tok_embeddings.weight": head}
        return names | {"tok_embeddings.weight": block, "norm.weight": head}

    return {
        "forward": counts(block_in_forward, m * (1 + more)),
        "forward of one microbatch": counts(1, 1 + more),
        "forward_backward": counts(block_in_forward_backward, m * (2 + more)),
        "forward in an open step": counts(block_in_forward, m * (1 + more)),
        # A loss over whole sequences, such as GSPO, needs the head twice in the forward pass. Its group is gathered both times, and a third
        # time for the backward pass of the norm, which is in the same group.
        "forward_backward of whole sequences": counts(block_in_forward_backward, m * (3 + more)),
        "step": {},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, policy",
    [
        ("tied", "default"),
        ("untied", "default"),
        ("untied", "always"),
        ("untied", "never"),
        ("experts", "default"),
    ],
)
def test_the_number_of_gathers_depends_on_the_reshard_policy_and_not_on_the_chunks_of_logits(observed, model, policy):
    _, ranks = observed(model, policy)
    for seen in ranks:
        assert seen["microbatches"] == 3 and seen["chunks"] > 1
        expected = expected_gathers(model, policy, seen["microbatches"])
        assert {name: dict(seen[name]) for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_step_with_a_forward_in_it_has_the_same_result_under_every_reshard_policy(observed, policy):
    _, usual = observed("untied", "default")
    _, ranks = observed("untied", policy)
    results = [seen["result"] for seen in (*usual, *ranks)]
    assert results == results[:1] * 4 and results[0].policy_version == 1
