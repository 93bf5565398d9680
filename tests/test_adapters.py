"""LoRA adapters that a generator loads with `load_adapter`.

The tests check which adapters fit a model, which errors `load_adapter` raises before it returns, and the matrix products
on a CPU. They start no process.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_actors import GeneratorClient, GeneratorConfig, GeneratorInfo, LoRAConfig, ModelConfig, adapters
from rl_actors.clients.generator import check_config
from rl_actors.vllm import cpu, gpu

MODEL = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, tie_word_embeddings=False)
WEIGHTS = {
    "model.layers.0.self_attn.q_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (16, 8),
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def write(directory: Path, *, rank: int = 2, **changed) -> Path:
    """Write an adapter for all linear layers of WEIGHTS, and return its directory.

    changed: maps the name of a tensor to its new value, or to None if the tensor is left out.
    """
    directory.mkdir()
    config = LoRAConfig(rank=rank, train_unembed=True)
    tensors = {name: torch.ones(shape) for name, shape in adapters.shapes(config, WEIGHTS).items()} | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    adapters.write(directory, kept, config, base="base")
    return directory


def test_all_linear_layers_except_experts_and_a_tied_head_may_have_adapters():
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert adapters.served(MODEL) == [*attention, "gate_proj", "down_proj", "up_proj", "lm_head"]
    assert adapters.served(replace(MODEL, num_experts=4, tie_word_embeddings=True)) == attention


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {f"{Q}.lora_A.weight": torch.ones(3, 8)},
            rf"has {Q}.lora_A.weight of shape \(3, 8\); the model needs \(2, 8\)",
        ),
        ({f"{Q}.lora_B.weight": None}, rf"has {Q}.lora_A.weight, but not {Q}.lora_B.weight"),
        (
            {"base_model.model.model.norm.lora_A.weight": torch.ones(2, 8)},
            "has the tensor .*norm.lora_A.weight; this model can have adapters only on",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(tmp_path, changed, message):
    adapters.require_fits(write(tmp_path / "right"), WEIGHTS, adapters.served(MODEL))
    with pytest.raises(ValueError, match=message):
        adapters.require_fits(write(tmp_path / "wrong", **changed), WEIGHTS, adapters.served(MODEL))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("length", [0, 40])
def test_a_file_of_an_adapter_that_was_cut_off_is_refused_with_its_name(tmp_path, name, length):
    file = write(tmp_path / "adapter") / name
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"^{file} is (not valid JSON|cut off or no safetensors file)"):
        adapters.require_fits(tmp_path / "adapter", WEIGHTS, adapters.served(MODEL))


class Loading:
    """A fake client of one generator. Its only work is to load and unload adapters."""

    is_owned = False
    last_pull = None

    def __init__(self, config: GeneratorConfig) -> None:
        limits = {"max_adapters": config.max_adapters, "max_adapter_rank": config.max_adapter_rank}
        self.known = GeneratorInfo(policy_version=-1, max_model_len=8, vocab_size=9, logs="", **limits)
        self.loaded: list[tuple[str, str]] = []

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def load_adapter(self, name: str, directory: str) -> None:
        self.loaded.append((name, directory))
        if name == "torn":
            raise ValueError("torn is refused by the engine")

    async def unload_adapter(self, name: str) -> None:
        self.loaded = [pair for pair in self.loaded if pair[0] != name]


def client_of(monkeypatch, **fields) -> GeneratorClient:
    monkeypatch.setattr(GeneratorClient, "_spawn_one", staticmethod(lambda mesh, *, config, **_: Loading(config)))
    made = GeneratorClient(None, config=GeneratorConfig(**fields))
    made.generator = made._fleet.replicas[0].client
    return made


@pytest.fixture
def client(monkeypatch):
    return client_of(monkeypatch, max_adapters=1, max_adapter_rank=2)


def test_wrong_adapters_are_refused_by_the_call_itself_and_not_by_its_result(client, tmp_path):
    good, bare = write(tmp_path / "good"), tmp_path / "bare"
    bare.mkdir()
    config = json.loads((good / "adapter_config.json").read_text())
    prefix = write(tmp_path / "prefix")
    (prefix / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "PREFIX_TUNING"}))
    with pytest.raises(ValueError, match="missing has no adapter_config.json"):
        client.load_adapter("a", tmp_path / "missing")
    with pytest.raises(ValueError, match="bare has no adapter_config.json"):
        client.load_adapter("a", bare)
    with pytest.raises(ValueError, match="peft_type='PREFIX_TUNING', r=2; it must have peft_type='LORA'"):
        client.load_adapter("a", prefix)
    with pytest.raises(ValueError, match="wide has rank 3, but generator.max_adapter_rank=2"):
        client.load_adapter("a", write(tmp_path / "wide", rank=3))
    with pytest.raises(ValueError, match="name=''; it must be a string that is not empty"):
        client.load_adapter("", good)
    for call in (client.generate, client.generate_each, client.compute_logprobs):
        with pytest.raises(ValueError, match=r"adapter='a' is not loaded; the loaded adapters are none \(0 in all\)"):
            call([[1]], adapter="a")
    assert client.generator.loaded == []


def test_a_name_is_free_again_after_the_adapter_was_unloaded_or_refused(client, tmp_path):
    good = write(tmp_path / "good")
    client.load_adapter("a", good)
    with pytest.raises(ValueError, match="the name 'a' is loaded already; unload it first"):
        client.load_adapter("a", good)
    client.unload_adapter("a").result()
    assert client.generator.loaded == []
    with pytest.raises(ValueError, match="adapter='a' is not loaded"):
        client.unload_adapter("a")
    client.load_adapter("a", good).result()
    assert client.generator.loaded == [("a", str(good))]
    for _ in range(2):
        with pytest.raises(ValueError, match="torn is refused by the engine"):
            client.load_adapter("torn", good).result()
    with pytest.raises(ValueError, match="adapter='torn' is not loaded; the loaded adapters are 'a' "):
        client.generate([[1]], adapter="torn")


def test_with_max_adapters_0_no_adapter_can_be_loaded(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="generator.max_adapters=0, so no adapters can be loaded"):
        client_of(monkeypatch).load_adapter("a", write(tmp_path / "good"))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_adapters": -1}, "generator.max_adapters=-1; it must be at least 0"),
        ({"max_adapter_rank": 513}, "generator.max_adapter_rank=513; it must be 1 to 512"),
        (
            {"max_adapters": 1, "lora": LoRAConfig(rank=1, sync="adapter")},
            'generator.max_adapters=1 with lora.sync="adapter": a generator has either',
        ),
    ],
)
def test_impossible_limits_of_adapters_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_config(GeneratorConfig(**fields))


def test_adapters_that_vllm_cannot_apply_on_this_machine_are_refused():
    experts = GeneratorConfig(max_adapters=2, model=replace(MODEL, num_experts=4), dtype="bfloat16")
    with pytest.raises(ValueError, match="model.num_experts=4 with generator.max_adapters=2 on a CPU"):
        cpu.require_possible(experts)
    with pytest.raises(
        ValueError, match='dtype="float32" with generator.max_adapters=2 .*; set .* generator.max_adapters=0'
    ):
        gpu.require_possible(replace(experts, dtype="float32"))
    gpu.require_possible(experts)


def test_on_a_cpu_each_row_gets_its_own_adapter_and_a_row_without_one_gets_none():
    """In shapes, S is the number of adapters, R their rank, I and O are the numbers of inputs and outputs, and T is the number of rows.

    `places` has the index of each row's adapter, or -1 for a row without an adapter.
    """
    cpu_adapters = pytest.importorskip("rl_actors.vllm.cpu_adapters")
    draw = torch.Generator().manual_seed(0)
    a_S1RI, b_S1OR = torch.randn(3, 1, 2, 8, generator=draw), torch.randn(3, 1, 5, 2, generator=draw)
    x_TI = torch.randn(6, 8, generator=draw)
    for places in ([1, -1, 2, 1, -1, 0], [2] * 6, [-1] * 6):
        wrapper = object.__new__(cpu_adapters.GroupedAdapters)
        wrapper.tokens = wrapper.samples = cpu_adapters.groups(torch.tensor(places))
        rows = [x @ a_S1RI[place, 0].T @ b_S1OR[place, 0].T for place, x in zip(places, x_TI, strict=True)]
        expected = torch.stack([row if place >= 0 else 0 * row for place, row in zip(places, rows, strict=True)])
        found, logits = torch.ones(6, 10), torch.ones(6, 7)
        wrapper.add_lora_linear(found, x_TI, (a_S1RI, a_S1RI), (b_S1OR, b_S1OR), 2.0, (5, 5))
        wrapper.add_lora_logits(logits, x_TI, a_S1RI, b_S1OR, 1.0)
        assert torch.allclose(found - 1, torch.cat([2 * expected, 2 * expected], 1), atol=1e-5)
        assert torch.allclose(logits[:, :5] - 1, expected, atol=1e-5) and (logits[:, 5:] == 1).all()
