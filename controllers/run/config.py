"""RunConfig, the base class of the configs of all training loops."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from controllers.environments import EnvironmentConfig, Problem
from controllers.environments.files import digest
from controllers.environments.held_out import HeldOut
from controllers.observe.run_folder import RunFolder
from controllers.observe.trackers import TrackerName, validate_trackers
from controllers.rollouts.chat import ChatConfig
from controllers.rollouts.episodes import EpisodeConfig, EpisodeLimits
from controllers.rollouts.evaluation import SETS_AS_JSON, PassAtKConfig, check_sets
from controllers.run.colocation import ColocationConfig, overlap
from controllers.run.gate import Gate
from controllers.run.hosts import HostsConfig
from controllers.run.survival import SurvivalConfig
from rl_actors import GeneratorConfig, ModelConfig, OptimParams, TrainerConfig, WeightsConfig
from rl_actors.field_types import CountingInt, NaturalInt, require_field_types
from rl_actors.hub import find_model, require_weights
from rl_actors.validation import require_seed, validate_optim_params

DEFAULT_PARAMS = OptimParams(learning_rate=0.0)


@dataclass(kw_only=True)
class AdamConfig:
    beta1: float = DEFAULT_PARAMS.beta1
    """Decay of the first moment."""
    beta2: float = DEFAULT_PARAMS.beta2
    """Decay of the second moment."""
    eps: float = DEFAULT_PARAMS.eps
    """Added to the denominator."""
    weight_decay: float = DEFAULT_PARAMS.weight_decay
    """Decoupled weight decay."""
    grad_clip_norm: float | None = DEFAULT_PARAMS.grad_clip_norm
    """Largest gradient norm; a larger gradient is scaled down. None: no clipping."""

    def params(self, *, learning_rate: float, grad_divisor: float) -> OptimParams:
        return OptimParams(learning_rate=learning_rate, grad_divisor=grad_divisor, **asdict(self))


@dataclass(kw_only=True)
class ReferenceConfig:
    gpu: int | None = None
    """First GPU of the reference model. None: the trainer's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    paper: str
    fields: Mapping[str, object]  # dotted name of a field -> its value
    overlong_part: int | None = None  # rollouts.overlong_buffer is max_tokens // overlong_part

    def apply(self, config: "RunConfig") -> Mapping[str, object]:
        """Set the preset's fields in this config. Returns them."""
        values = dict(self.fields)
        if self.overlong_part:
            values["rollouts.overlong_buffer"] = config.max_tokens // self.overlong_part
        for name, value in values.items():
            *path, last = name.split(".")
            owner: object = config
            for part in path:
                owner = getattr(owner, part)
            setattr(owner, last, value)
        return values


@dataclass(kw_only=True)
class RunConfig:
    """Fields that all runs share."""

    steps: CountingInt = 100
    """Training steps, without supervised steps (sft_steps) and critic.warmup_steps."""
    seed: int = 0
    """Of weights, problems and sampling; added to those of trainer, generator and environments."""
    max_tokens: CountingInt = 128
    """Longest completion in tokens."""
    alphabet: str = ""
    """Characters of a tokenizer made for the run. Empty: the tokenizer of trainer.hf_path. "auto":
    the tokenizer and dimensions of trainer.hf_path; without it the characters of the problems."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The task: problems, reward and held-out problems."""
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    """Limits of the episodes of a task with several turns."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Use of the model's chat template."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer: model, layout, precision, packing, optimizer."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """The generators; `model` and `lora` come from `trainer`."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """GPUs of the reference policy."""
    optimizer: AdamConfig = field(default_factory=AdamConfig)
    """Settings of an optimizer step; the learning rate is in `schedule`."""
    transport: Literal["torchstore", "files", "memory"] = "torchstore"
    """Index of the published weights. torchstore: torchstore, or a small actor if it is not
    installed; `weights` says how bytes travel. files: a directory of the run, for debugging.
    memory: a slow fake for tests."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How the bytes get from trainer to generator."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """The machines of the run."""
    colocation: ColocationConfig = field(default_factory=ColocationConfig)
    """Trainer and generator on the same GPUs."""
    survival: SurvivalConfig = field(default_factory=SurvivalConfig)
    """Limits of restarts after deaths."""
    samples_per_forward_backward: CountingInt = 1024
    """Samples in one forward_backward call; a step makes as many calls as it needs."""
    evaluate_every: CountingInt = 10
    """Steps between two evaluations on held-out problems. One follows the last step."""
    evaluate_first: bool = True
    """Evaluate before the first step, too."""
    evaluation: Annotated[dict[str, EnvironmentConfig], SETS_AS_JSON] = field(default_factory=dict)
    """Further held-out sets, as JSON: {"hard": {"task": "hard.jsonl"}} gives eval/hard/reward."""
    gate: str = ""
    """STEP:REWARD: the run ends with status 3 if the first evaluation from STEP on is lower."""
    pass_at_k: PassAtKConfig = field(default_factory=PassAtKConfig)
    """pass@k on every held-out set."""
    checkpoint_every: NaturalInt = 25
    """Steps between two checkpoints; a phase's last step writes one, too. 0: none, so no resume."""
    keep_checkpoints: CountingInt = 2
    """Number of newest checkpoints that are kept."""
    keep_checkpoint_every: NaturalInt = 0
    """Least number of steps between checkpoints that are kept for good. 0: none."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl. A tracker needs the package of its name."""
    tracker_project: str = "rl-actors"
    """Project or experiment in trackers that have projects."""
    wandb_project: str | None = None
    """Replaces tracker_project and adds wandb to the trackers."""

    presets: ClassVar[Mapping[str, Algorithm]] = {}
    """Of --algorithm, by name."""
    short_flags: ClassVar[dict[str, str]] = {
        "--model": "--trainer.hf-path",
        "--task": "--environment.task",
        "--hosts": "--hosts.addresses",
        "--colocate": "--colocation.enabled",
    }
    """Short flag -> full flag."""
    has_generator: ClassVar[bool] = True
    """False if the run samples nothing."""
    samples_problems: ClassVar[bool] = True
    """False if the run samples no completions of its training problems."""
    has_critic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        lora = self.trainer.lora
        base = self.generator.hf_path or (self.trainer.hf_path if lora.syncs_adapter else "")
        # copies, so that the two configs share no object
        sleeps = self.generator.sleep_mode or self.colocation.enabled
        self.generator = replace(
            self.generator, model=replace(self.trainer.model), lora=replace(lora), hf_path=base, sleep_mode=sleeps
        )

    @property
    def is_supervised(self) -> bool:
        return False

    @property
    def has_reference(self) -> bool:
        return False

    def models(self) -> dict[str, TrainerConfig]:
        """The models that torchtitan runs, by name."""
        models = {"trainer": self.trainer}
        if self.has_reference:
            models["reference"] = replace(self.trainer, optimizer=None, gpu=self.or_trainers(self.reference.gpu))
        return models

    def critic_is_colocated(self) -> bool:
        critic = self.models().get("critic")
        if critic is None or not self.colocation.enabled:
            return False
        return overlap(critic.gpus(), self.trainer.gpus()) or overlap(critic.gpus(), self.generator.gpus())

    def or_trainers(self, gpu: int | None) -> int | None:
        """`gpu`, or the trainer's first GPU for None."""
        return self.trainer.gpu if gpu is None else gpu

    @property
    def versions_per_step(self) -> int:
        """Largest number by which one step can raise policy_version."""
        return 1

    def plan_lines(self) -> list[str]:
        """Of --plan, about this kind of run."""
        return []

    def episode_limits(self) -> EpisodeLimits:
        """max_tokens is the limit of one turn."""
        longest = min(self.generator.max_model_len, self.trainer.max_sequence_length)
        return EpisodeLimits(
            max_turns=self.episodes.max_turns,
            max_tokens=min(self.episodes.max_tokens or longest, longest),
            max_tokens_per_turn=self.max_tokens,
        )

    def with_all_answers(self, problem: Problem) -> list[Problem]:
        """A copy of the problem for each text that may be trained on as its answer."""
        return [problem]

    def with_local_models(self) -> Self:
        """A copy with local directories in place of ids on the Hugging Face Hub; with
        alphabet="auto" also with the model's dimensions. Raises ValueError as find_model does."""
        trainer = replace(self.trainer, hf_path=find_model(self.trainer.hf_path))
        generator = replace(self.generator, hf_path=find_model(self.generator.hf_path))
        if self.alphabet == "auto" and trainer.hf_path:
            own = replace(trainer, model=ModelConfig.from_hf(trainer.hf_path))
            return replace(self, trainer=own, generator=generator, alphabet="")
        return replace(self, trainer=trainer, generator=generator)

    def validate(self) -> None:
        """Raises ValueError naming the field, its value and the limit."""
        require_field_types(self)
        require_seed("seed", self.seed)
        self._validate_tokens()
        self.weights.validate()
        self.hosts.validate(self.trainer.num_processes())
        self.colocation.validate(
            has_generator=self.has_generator, trainer=self.trainer.gpus(), generator=self.generator.gpus()
        )
        self.environment.validate()
        check_sets(self.evaluation)
        self.pass_at_k.validate()
        if self.gate:
            Gate.parse(self.gate)
            if not self.has_generator:
                raise ValueError(f"gate={self.gate!r}, but this run samples nothing, so it has no held-out reward")
        validate_trackers(self.all_trackers())
        self._validate_models()

    def _validate_tokens(self) -> None:
        if not self.alphabet and not self.trainer.hf_path:
            raise ValueError(
                "alphabet and trainer.hf_path are both empty; one of them must give a tokenizer: --trainer.hf-path "
                "takes a directory or the id of a model on the Hugging Face Hub, such as Qwen/Qwen3-0.6B"
            )
        if self.trainer.tokenizer_path:
            raise ValueError(
                f"trainer.tokenizer_path={self.trainer.tokenizer_path!r}; a run uses the tokenizer of trainer.hf_path, or "
                "makes its own from alphabet, so this field must be empty"
            )
        limits = {
            "generator.max_model_len": self.generator.max_model_len,
            "trainer.max_sequence_length": self.trainer.max_sequence_length,
        }
        for name, limit in limits.items():
            if self.max_tokens >= limit:
                raise ValueError(f"max_tokens={self.max_tokens} leaves no room for a prompt in {name}={limit}")
        if self.trainer.lora.syncs_adapter and self.generator.hf_path != self.trainer.hf_path:
            raise ValueError(
                f"generator.hf_path={self.generator.hf_path!r} is not trainer.hf_path={self.trainer.hf_path!r}; "
                "the adapters are trained on the weights of trainer.hf_path"
            )

    def _validate_models(self) -> None:
        self.generator.validate()
        for name, model in self.models().items():
            if model.gpu is not None and model.gpu < 0:
                raise ValueError(f"{name}.gpu={model.gpu}; it must be at least 0")
        self.trainer.validate()
        if self.trainer.hf_path:
            require_weights("trainer.hf_path", self.trainer.hf_path)
        if self.trainer.optimizer is None:
            raise ValueError("trainer.optimizer=None; a run needs an optimizer")
        self.trainer.require_hf("generation")
        validate_optim_params(self.optimizer.params(learning_rate=0.0, grad_divisor=1.0))

    def all_trackers(self) -> list[str]:
        return list(dict.fromkeys([*self.trackers, *(["wandb"] if self.wandb_project else [])]))

    def validate_resumed(self, folder: RunFolder) -> None:
        """Raises ValueError if the run in this folder cannot be resumed with this config."""
        if not folder.data.is_file():
            return
        before = json.loads(folder.data.read_text())
        changed = sorted(task for task, digest in self.data_digests().items() if before.get(task, digest) != digest)
        if changed:
            raise ValueError(
                f"{', '.join(changed)} has changed since this run began, so a resumed run would train on other problems; "
                "restore the data, or start a new run"
            )

    def held_out_before(self) -> HeldOut | None:
        """What the run held out whose export this run starts from, or None."""
        return HeldOut.read(Path(self.trainer.hf_path) / "held_out.json") if self.trainer.hf_path else None

    def data_digests(self) -> dict[str, str]:
        """A hash of each file and directory of problems."""
        environments = [self.environment, *self.evaluation.values()]
        return {task: digest(task) for environment in environments for task in environment.data_files()}
