"""Configs that Python code makes are checked against their annotations, as strictly as the values of a config file."""

import dataclasses
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_type_hints

import pytest
import torch

from configs import CONFIGS, SERVERS
from configs.tiny import tiny, tiny_sft
from controllers import config_file
from controllers.environments import EnvironmentConfig, build_environment
from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    LoRAConfig,
    ModelConfig,
    Sample,
    TrainerClient,
    TrainerConfig,
    WeightsConfig,
)
from rl_actors.config import OptimizerConfig, RestartPolicy
from rl_actors.field_types import require_field_types
from rl_actors.losses import GSPO, KL, PPO, LogprobGradient
from rl_actors.validation import validate_samples

nan = math.nan


def parallel(**degrees) -> TrainerConfig:
    config = TrainerConfig()
    for name, value in degrees.items():
        setattr(config.parallelism, name, value)
    return config


TRAINERS = {
    "tokens_per_row=64.5": lambda: TrainerConfig(tokens_per_row=64.5),
    "packing=None": lambda: TrainerConfig(packing=None),
    "call_timeout=nan": lambda: TrainerConfig(call_timeout=nan),
    "setup_timeout=inf": lambda: TrainerConfig(setup_timeout=math.inf),
    "collective_timeout='300'": lambda: TrainerConfig(collective_timeout="300"),
    "float8=1": lambda: TrainerConfig(float8=1),
    "gpu=True": lambda: TrainerConfig(gpu=True),
    "seed=18446744073709551616": lambda: TrainerConfig(seed=1 << 64),
    "hf_path=PosixPath('/models/a')": lambda: TrainerConfig(hf_path=Path("/models/a")),
    "seed=-1": lambda: TrainerConfig(seed=-1),
    "model.vocab_size=True": lambda: TrainerConfig(model=ModelConfig(vocab_size=True)),
    "model.rope_theta=nan": lambda: TrainerConfig(model=ModelConfig(rope_theta=nan)),
    "model.rope_theta=inf": lambda: TrainerConfig(model=ModelConfig(rope_theta=math.inf)),
    "model.mlp_only_layers=[1]": lambda: TrainerConfig(model=ModelConfig(mlp_only_layers=[1])),
    "model.mlp_only_layers[0]=1.0": lambda: TrainerConfig(model=ModelConfig(mlp_only_layers=(1.0,))),
    "model.rope_scaling['factor']=nan": lambda: TrainerConfig(model=ModelConfig(rope_scaling={"factor": nan})),
    "model.rope_scaling[3]=3": lambda: TrainerConfig(model=ModelConfig(rope_scaling={3: 1.0})),
    "lora.rank=8.0": lambda: TrainerConfig(lora=LoRAConfig(rank=8.0)),
    "lora=8": lambda: TrainerConfig(lora=8),
    "lora.sync=None": lambda: TrainerConfig(lora=LoRAConfig(sync=None)),
    "optimizer='AdamW'": lambda: TrainerConfig(optimizer="AdamW"),
    "optimizer.arguments['momentum']='1'": lambda: TrainerConfig(
        optimizer=OptimizerConfig(arguments={"momentum": "1"})
    ),
    "optimizer.groups['a']=(1.0,)": lambda: TrainerConfig(optimizer=OptimizerConfig(groups={"a": (1.0,)})),
    "optimizer.groups['a'][1]=True": lambda: TrainerConfig(optimizer=OptimizerConfig(groups={"a": (1.0, True)})),
    "parallelism.tensor_parallel_degree=2.0": lambda: parallel(tensor_parallel_degree=2.0),
    "parallelism.enable_sequence_parallel=None": lambda: parallel(enable_sequence_parallel=None),
}
GENERATORS = {
    "generator.max_model_len=1.5": {"max_model_len": 1.5},
    "generator.kv_cache_bytes=1e9": {"kv_cache_bytes": 1e9},
    "generator.call_timeout=nan": {"call_timeout": nan},
    "generator.gpu_memory_utilization=nan": {"gpu_memory_utilization": nan},
    "generator.dtype='float16'": {"dtype": "float16"},
    "generator.replicas=True": {"replicas": True},
    "generator.seed=4294967296": {"seed": 1 << 32},
    "generator.model.vocab_size=True": {"model": ModelConfig(vocab_size=True)},
    "generator.restarts.max_per_hour=2.5": {"restarts": RestartPolicy(max_per_hour=2.5)},
    "generator.own_process='no'": {"own_process": "no"},
}


@pytest.mark.parametrize("words", TRAINERS)
def test_a_trainer_is_refused_at_its_spawn_with_the_field_and_the_value(words):
    with pytest.raises(ValueError, match="") as error:
        TrainerClient.spawn(TRAINERS[words]())
    assert words in str(error.value).replace("1000000000.0", "1e9")


@pytest.mark.parametrize("words", GENERATORS)
def test_a_generator_is_refused_at_its_spawn_with_the_field_and_the_value(words):
    with pytest.raises(ValueError, match="") as error:
        GeneratorClient.spawn(GeneratorConfig(**GENERATORS[words]))
    assert words in str(error.value).replace("1000000000.0", "1e9")


@pytest.mark.parametrize("fields", [{"timeout": nan}, {"timeout": True}, {"path": "rdma"}, {"address": None}])
def test_the_config_of_the_weights_is_checked(fields):
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=f"weights.{name}={value!r}"):
        WeightsConfig(**fields).validate()


def edited(**fields):
    """tiny with other values in fields that dotted names give, with __ for the dot."""
    config = tiny()
    for name, value in fields.items():
        *path, last = name.split("__")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 2.5}, "steps=2.5"),
        ({"seed": 1 << 64}, "seed=18446744073709551616; it must be at least 0 and below"),
        ({"trackers": ["tensorboard"]}, "trackers=['tensorboard']"),
        ({"optimizer__beta1": True}, "optimizer.beta1=True"),
        ({"trainer__model__rope_theta": nan}, "trainer.model.rope_theta=nan"),
        ({"rollouts__groups_per_step": "8"}, "rollouts.groups_per_step='8'"),
        ({"environment__reward_timeout": nan}, "environment.reward_timeout=nan"),
        ({"hosts__return_timeout": "soon"}, "hosts.return_timeout='soon'"),
        ({"survival__backoff": None}, "survival.backoff=None"),
        ({"schedule__learning_rate": "1e-4"}, "schedule.learning_rate='1e-4'"),
        ({"evaluation": {"hard": EnvironmentConfig(num_held_out=1.5)}}, "evaluation['hard'].num_held_out=1.5"),
    ],
)
def test_a_run_is_refused_with_the_field_and_the_value(fields, words):
    with pytest.raises(ValueError, match="") as error:
        edited(**fields).validate()
    assert words in str(error.value)


def test_an_environment_that_a_program_builds_is_checked():
    with pytest.raises(ValueError, match=r"num_held_out=1.5 is of type float; it must be an integer"):
        build_environment(replace(tiny().environment, num_held_out=1.5))


@pytest.mark.parametrize("loss", [PPO(kl=KL(coefficient=True)), GSPO(sequence_mean=1), PPO(entropy_coefficient=False)])
def test_options_of_a_loss_are_checked_at_the_call(loss):
    sample = Sample.from_tokens([1], [2], advantages=1.0, old_logprobs=-1.0, ref_logprobs=-1.0)
    limits = {"vocab_size": 8, "max_sequence_length": 8, "max_call_bytes": 1 << 20}
    with pytest.raises(ValueError, match=f"{type(loss).__name__}[.].*is of type"):
        validate_samples([sample], loss, **limits)


def test_every_config_of_the_package_passes():
    for configs in (*CONFIGS.values(), SERVERS):
        for make in configs.values():
            require_field_types(make())
    require_field_types(LogprobGradient())


@dataclass(kw_only=True)
class Inner:
    number: float = 1.0


@dataclass(kw_only=True)
class Everything:
    number: float = 1.0
    count: int = 1
    flag: bool = False
    text: str = ""
    choice: Literal["a", "b"] = "a"
    maybe: int | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    many: tuple[int, ...] = ()
    table: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    inner: Inner = field(default_factory=Inner)


VALUES = [1, 1.5, True, None, "a", "c", ["a"], [1], (1, "a"), (1, 2), (1,), {"a": 1}, {"a": "b"}, {"a": True}, {}, []]


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Everything) if each.name != "inner"])
def test_python_and_files_accept_the_same_values(name):
    for value in VALUES:
        if isinstance(value, tuple | list) and name in ("pair", "many", "names"):
            # A file has only lists, and Python's lists are no tuples.
            value = list(value) if name == "names" else tuple(value)
        try:
            config_file.from_values(Everything, {name: json.loads(json.dumps(value))})
            in_file = True
        except ValueError:
            in_file = False
        value = Path(value) if name == "folder" and isinstance(value, str) else value
        try:
            require_field_types(Everything(**{name: value}))
            in_python = True
        except ValueError:
            in_python = False
        assert in_python == in_file, (name, value)


def test_a_class_whose_annotations_cannot_be_read_is_not_checked():
    @dataclass
    class Own:
        value: "NotImported" = 1  # noqa: F821

    with pytest.raises(NameError):
        get_type_hints(Own)
    require_field_types(Own())


def test_a_supervised_run_is_checked_too():
    config = tiny_sft()
    config.sft.batch_size = 2.5
    with pytest.raises(ValueError, match="sft.batch_size=2.5"):
        config.validate()


TENSORS = {
    "bool": (torch.tensor([True, False]), "torch.bool"),
    "complex": (torch.tensor([1 + 2j, 3]), "torch.complex64"),
    "sparse": (torch.tensor([1, 0]).to_sparse(), "torch.sparse_coo"),
    "meta": (torch.zeros(2, dtype=torch.int64, device="meta"), "meta"),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("where", ["prompt", "completion", "advantages"])
def test_tensors_that_hold_no_numbers_are_refused_by_from_tokens(kind, where):
    tensor, words = TENSORS[kind]
    arguments = {"prompt": [1, 2], "completion": [3, 4], "advantages": [0.5, 0.5], where: tensor}
    with pytest.raises(ValueError, match=f"{where}.*{words}"):
        Sample.from_tokens(**arguments)


@pytest.mark.parametrize(("where", "ids"), [("prompt", [1.5]), ("prompt", [True, 2]), ("completion", [2.0])])
def test_values_that_are_no_token_ids_are_refused_by_from_tokens(where, ids):
    with pytest.raises(ValueError, match=where):
        Sample.from_tokens(**({"prompt": [1], "completion": [2]} | {where: ids}))


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("where", ["tokens", "targets", "advantages"])
def test_tensors_that_hold_no_numbers_are_refused_before_a_call(kind, where):
    from rl_actors.clients.conversion import as_tensors

    tensor, words = TENSORS[kind]
    good = {"tokens": torch.tensor([1, 2]), "targets": torch.tensor([2, 3]), "advantages": torch.ones(2)} | {
        where: tensor
    }
    sample = Sample(
        tokens=good["tokens"],
        targets=good["targets"],
        columns={"loss_weights": torch.ones(2), "advantages": good["advantages"]},
    )
    limits = {"vocab_size": 8, "max_sequence_length": 8, "max_call_bytes": 1 << 20}
    with pytest.raises(ValueError, match=f"sample 1: .*{where}.*{words}"):
        validate_samples(
            as_tensors(
                [
                    replace(
                        sample,
                        tokens=torch.tensor([1, 2]),
                        targets=torch.tensor([2, 3]),
                        columns={"loss_weights": torch.ones(2), "advantages": torch.ones(2)},
                    ),
                    sample,
                ]
            ),
            None,
            **limits,
        )


@pytest.mark.parametrize("temperature", [0, 0.0, nan, math.inf, -1.0, 1e-320, 1e-40, 1e300])
def test_a_temperature_with_which_logprobs_are_not_finite_is_refused(temperature):
    sample = Sample.from_tokens([1], [2], temperature=temperature)
    limits = {"vocab_size": 8, "max_sequence_length": 8, "max_call_bytes": 1 << 20}
    with pytest.raises(ValueError, match="sample 0: temperature=.* must be a positive, finite number"):
        validate_samples([sample], None, **limits)
