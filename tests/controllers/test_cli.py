"""Tests of a run's command line: the resulting config, the errors for wrong flags, and configs that are written to files
and read again.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import configs
from controllers import config_file
from controllers.algorithms.schedules import ScheduleConfig
from controllers.environments import EnvironmentConfig
from controllers.program import cli
from controllers.run import config as run_config


@dataclass(kw_only=True)
class RunConfig(run_config.RunConfig):
    steps: int = 10
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of the run."""
    group: tuple[int, ...] = (4, 8)
    """A tuple."""
    pair: tuple[str, float] = ("a", 0.5)
    """A pair."""
    scales: dict[int, float] = field(default_factory=lambda: {1: 2.0})
    """A dict."""
    cache: Path | None = None
    """A path."""
    mode: Literal["fast", "slow"] = "fast"
    """A choice."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    short_flags: ClassVar[dict[str, str]] = {"--lr": "--schedule.learning-rate"}

    def with_local_models(self) -> "RunConfig":
        return self

    def validate(self) -> None:
        self.trainer.validate()
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; it must be at least 1")


def tiny() -> RunConfig:
    return RunConfig(environment=EnvironmentConfig(options={"max_digits": 2}))


def tiny_tp2() -> RunConfig:
    config = tiny()
    config.trainer.parallelism.tensor_parallel_degree = 2
    return config


CONFIGS = {"tiny": tiny, "tiny_tp2": tiny_tp2}
PROG = "python -m controllers.grpo"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def parse(*argv: str) -> cli.Invocation:
    return cli.parse(PROG, CONFIGS, argv)


def refusal(capsys, *argv: str) -> str:
    """The message that a refused command line prints to stderr, without the frames and line breaks of tyro's boxes."""
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    return " ".join(err.replace("│", " ").split())


def past_run(config: RunConfig, folder: str = "runs/old") -> str:
    Path(folder).mkdir(parents=True)
    (Path(folder) / "config.json").write_text(config_file.to_json(config))
    return folder


def test_without_flags_the_first_config_runs_in_a_dated_folder():
    invocation = parse()
    assert invocation.config == tiny()
    assert invocation.config_name == "tiny" and invocation.output_dir.match("runs/tiny-????????-??????")
    assert invocation.resume is None and invocation.eval_only is None
    assert not invocation.dry_run and not invocation.verbose
    assert not Path("runs").exists()


def test_flags_with_dashes_or_underscores_edit_the_chosen_config():
    dashes = parse("--config", "tiny_tp2", "--steps", "3", "--trainer.model.hidden-size", "64", "--output-dir", "o")
    lines = parse("--config=tiny_tp2", "--steps=3", "--trainer.model.hidden_size=64", "--output_dir", "o")
    expected = tiny_tp2()
    expected.steps, expected.trainer.model.hidden_size = 3, 64
    expected = replace(expected)  # the generator's model follows the trainer's
    assert dashes == lines and dashes.config == expected
    assert dashes.output_dir == Path("o") and dashes.config_name == "tiny_tp2"


def test_every_kind_of_field_can_be_set():
    config = parse(
        *("--group", "1", "2", "3", "--cache", "c", "--mode", "slow", "--trainer.deterministic"),
        *("--environment.options", '{"operators": ["+"]}', "--trainer.parallelism.tensor-parallel-degree", "4"),
        *("--schedule.total-steps", "7", "--schedule.learning_rate", "1e-3"),
    ).config
    assert (config.group, config.cache, config.mode, config.trainer.deterministic) == (
        (1, 2, 3),
        Path("c"),
        "slow",
        True,
    )
    assert config.environment.options == {"operators": ["+"]}
    assert config.trainer.parallelism.tensor_parallel_degree == 4
    assert (config.schedule.total_steps, config.schedule.learning_rate) == (7, 1e-3)


def test_the_flag_lr_is_short_for_schedule_learning_rate():
    assert (
        parse("--lr", "1e-3").config.schedule.learning_rate == parse("--lr=1e-3").config.schedule.learning_rate == 1e-3
    )


def parse_grpo(*argv: str) -> cli.Invocation:
    return cli.parse(PROG, configs.CONFIGS["controllers.grpo"], argv)


def test_other_flags_override_a_preset_and_the_preset_is_printed_with_its_paper(capsys):
    config = parse_grpo("--algorithm", "dapo", "--loss.ratio-high", "1.4", "--max-tokens", "20").config
    assert (config.algorithm, config.loss.ratio_high, config.rollouts.dynamic_sampling_rounds) == ("dapo", 1.4, 3)
    out, err = capsys.readouterr()
    assert out == "" and "arXiv 2503.14476" in err and "  loss.ratio_high = 1.28\n" in err
    again = parse_grpo("--algorithm", "grpo", "--steps", "3").config
    assert (again.aggregation, again.reference_kl, again.steps) == ("sequence_mean", 0.04, 3)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--seed", str(1 << 64)], "seed=18446744073709551616; it must be at least 0 and below 2**31"),
        (["--seed", "-1"], "seed=-1; it must be at least 0 and below 2**31"),
        (["--trainer.seed", str(1 << 32)], "seed=4294967296; it must be at least 0"),
        (["--generator.seed", str(1 << 32)], "generator.seed=4294967296; it must be at least 0"),
        (["--trainer.model.rope-theta", "nan"], "trainer.model.rope_theta=nan; it must be a number"),
        (["--trainer.model.rope-theta", "inf"], "model.rope_theta=inf; it must be positive and finite"),
        (["--trainer.call-timeout", "nan"], "trainer.call_timeout=nan; it must be a number"),
        (["--trainer.setup-timeout", "nan"], "trainer.setup_timeout=nan; it must be a number"),
        (["--generator.call-timeout", "inf"], "generator.call_timeout=inf; it must be positive and finite"),
        (["--output-dir", "/proc/nothing"], "--output-dir /proc/nothing: nothing can be written to /proc"),
    ],
)
def test_a_value_with_which_no_run_can_start_is_refused_with_the_reason(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        parse_grpo(*argv)
    assert exit.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--algorithm", "dpao"], "--algorithm dpao is not a preset; did you mean dapo"),
        (["--resume", "a", "--algorithm", "dapo"], "cannot be combined with --config, --algorithm or --eval-only"),
        (
            ["--loss", "cispo", "--loss.dual-clip", "3"],
            "loss=cispo has no such option; its options are ratio_low, ratio_high",
        ),
        (["--loss", "reinforce", "--loss.beta", "3"], "loss=reinforce has no such option; it has no options"),
        (["--loss", "ppo", "--loss.ratio-high", "0.5"], "ratio_low=0.8, ratio_high=0.5; it must hold that"),
        (["--correction.cap", "2"], "correction.cap=2.0: correction=none has no such option"),
        (
            ["--correction", "tis", "--correction.low", "0.5"],
            "correction=tis has no such option; its options are cap, level",
        ),
        (["--correction", "tis", "--correction.cap", "0"], "cap=0.0; it must be finite and above 0"),
        (["--entropy-bonus", "nan"], "entropy_bonus=nan; it must be a number"),
        (["--rollouts.overlong-buffer", "-1"], "rollouts.overlong_buffer=-1; it must be at least 0"),
        (["--rollouts.overlong-penalty", "inf"], "rollouts.overlong_penalty=inf; it must be finite"),
        (["--loss", "pppo"], "loss='pppo'; did you mean ppo"),
    ],
)
def test_a_wrong_flag_of_the_algorithm_is_refused_with_the_reason(capsys, argv, message):
    with pytest.raises(SystemExit) as exit:
        parse_grpo(*argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    assert message in " ".join(err.replace("│", " ").split())


def test_dry_run_and_verbose_take_no_value():
    assert parse("--dry-run", "--verbose").dry_run and parse("--dry_run", "--verbose").verbose


def test_help_all_names_every_field_with_meaning_and_default(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--config", "tiny_tp2", "--help", "all")
    text = capsys.readouterr().out
    assert exit.value.code == 0
    names = [name for name, _ in config_file.leaves(json.loads(config_file.to_json(replace(tiny(), scales={}))))]
    for name in [n for n in names if not n.startswith(("environment.options.", "generator."))]:
        assert f"--{name.replace('_', '-')}" in text, name
    flat = " ".join(text.replace("│", " ").split())
    assert "--steps INT Optimizer steps of the run. (default: 10)" in flat
    assert "Tensor Parallelism degree. 1 means disabled. (default: 2)" in flat
    for flag in ("--config", "--output-dir", "--resume", "--eval-only", "--dry-run", "--plan", "--verbose"):
        assert flag in text


def help_text(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        cli.parse(PROG, configs.CONFIGS["controllers.grpo"], argv)
    out, err = capsys.readouterr()
    assert exit.value.code == 0 and not err
    return out


def test_help_is_one_screen_with_every_group_and_short_flag(capsys):
    lines = help_text(capsys, "--help").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    starts = {line.split()[0] for line in lines if line}
    assert {"--config", "--dry-run", "run", "trainer", "generator", "rollouts", "loss", "sft"} <= starts
    assert "--lr (--schedule.learning-rate)" in " ".join(lines)


@pytest.mark.parametrize(
    "group, has, lacks",
    [
        ("rollouts", "--rollouts.group-size INT", "--steps"),
        ("run", "--steps INT", "--rollouts.group-size"),
        ("trainer.lora", "--trainer.lora.rank INT", "--trainer.hf-path"),
        ("pass-at-k", "--pass-at-k.", "--steps"),
    ],
)
def test_help_of_a_group_shows_the_flags_of_this_group_only(capsys, group, has, lacks):
    text = help_text(capsys, "--config", "tiny", "--help", group)
    assert has in text and lacks not in text
    assert "(default:" in text


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--lrr", "there is no flag --lrr; did you mean --schedule.learning-rate (short: --lr)?"),
        ("--learning-rte=3", "--schedule.learning-rate (short: --lr) or --sft.schedule.learning-rate?"),
        ("--group", "--rollouts.groups-per-step (short: --groups)"),
        ("--max-token", "did you mean --max-tokens"),
        ("--verbos", "did you mean --verbose?"),
        ("--nothing-like-it", "--help shows the groups of flags"),
    ],
)
def test_a_wrong_flag_suggests_names_and_short_names(capsys, wrong, message):
    with pytest.raises(SystemExit) as exit:
        cli.parse(PROG, configs.CONFIGS["controllers.grpo"], [wrong, "4"])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--help", "trainr"], "--help trainr: there is no such group of flags; did you mean trainer"),
        (["--config", "tniy"], "--config tniy is neither a config nor a file of JSON, YAML or TOML; did you mean tiny"),
        (["--trainer.model.hiden-size", "3"], "--trainer.model.hidden-size"),
        (["--steps", "many"], "Error parsing --steps"),
        (["--mode", "medium"], "invalid choice 'medium'"),
        (["--steps", "0"], f"{PROG}: error: steps=0; it must be at least 1"),
        (["--trainer.parallelism.context-parallel-load-balancer", ""], "cannot be an empty string"),
        (["--eval-only", "nowhere"], "--eval-only nowhere is not a folder"),
        (["--resume", "nowhere"], "nowhere/config.json does not exist, so no run can be resumed"),
        (["--config", "nowhere.json"], "nowhere.json does not exist"),
        (["--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["--config", "folder.json"], "folder.json is a folder; --config takes the name of a config or a file"),
        (["--save-config", "here.ini"], "--save-config here.ini does not end in one of .json, .yaml, .yml"),
        (["--resume", "a", "--config", "tiny"], "--resume uses the config of its run"),
    ],
)
def test_a_command_line_that_cannot_run_is_refused_with_status_2(capsys, argv, message):
    Path("folder.json").mkdir()
    assert message in refusal(capsys, *argv)


def test_a_config_of_another_controller_is_refused_with_the_name_of_that_controller(capsys):
    everything = configs.CONFIGS
    with pytest.raises(SystemExit):
        cli.parse(PROG, everything["controllers.dpo"], ["--config", "tiny_ppo"], configs_by_controller=everything)
    message = "--config tiny_ppo belongs to controllers.ppo; the configs of this controller: tiny"
    assert message in capsys.readouterr().err
    own = cli.parse(PROG, everything["controllers.dpo"], ["--config", "tiny"], configs_by_controller=everything)
    assert own.config_name == "tiny"


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_a_folder_that_holds_a_run_is_refused_with_the_command_that_resumes_the_run(capsys, file):
    Path("my run").mkdir()
    (Path("my run") / file).write_text("{}")
    message = refusal(capsys, "--output-dir", "my run")
    assert f"my run holds a run; to continue it: {PROG} --resume 'my run'" in message


def test_flags_edit_the_config_that_resume_takes_from_the_run():
    folder = past_run(replace(tiny_tp2(), steps=77, mode="slow"))
    invocation = parse("--resume", folder, "--steps", "99")
    assert invocation.config == replace(tiny_tp2(), steps=99, mode="slow")
    assert invocation.output_dir == invocation.resume == Path(folder)
    assert parse("--resume", folder, "--output-dir", "./runs/old").output_dir == Path(folder)


def test_resume_refuses_a_change_of_model_seed_task_or_folder(capsys):
    folder = past_run(tiny())
    message = refusal(capsys, "--resume", folder, "--trainer.model.head-dim", "64")
    assert "trainer.model.head_dim cannot change from 128 to 64 in a resumed run" in message
    assert "seed cannot change from 0 to 1" in refusal(capsys, "--resume", folder, "--seed", "1")
    message = refusal(capsys, "--resume", folder, "--environment.options", '{"max_digits": 3}')
    assert "environment.options.max_digits cannot change from 2 to 3" in message
    assert "continues the run in its own folder" in refusal(capsys, "--resume", folder, "--output-dir", "other")
    assert parse("--resume", folder, "--trainer.seed", "1", "--seed", "0").config.trainer.seed == 1


def test_eval_only_takes_the_config_of_the_checkpoints_run():
    checkpoint = Path(past_run(replace(tiny(), steps=77))) / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')
    invocation = parse("--eval-only", str(checkpoint))
    assert invocation.config.steps == 77 and invocation.eval_only == checkpoint
    assert invocation.output_dir.match("runs/old-*")
    assert parse("--eval-only", str(checkpoint), "--config", "tiny").config.steps == 10


def test_a_new_run_can_take_the_config_json_of_a_past_run():
    config = replace(tiny(), steps=5)
    invocation = parse("--config", past_run(config) + "/config.json", "--seed", "4")
    assert invocation.config == replace(config, seed=4) and invocation.config_name == "old"


def test_a_config_written_as_json_is_read_back_unchanged():
    config = tiny_tp2()
    config.cache, config.schedule.total_steps, config.group, config.scales = Path("x/y"), 5, (), {3: 1.5, 4: 1.0}
    config.trainer.parallelism.module_fqns_per_model_part = [["a", "b"], ["c"]]
    config.trainer.compile.components = ["model"]
    config.environment.options = {"operators": ["+"], "deep": {"n": None}}
    again = config_file.from_json(RunConfig, config_file.to_json(config))
    assert again == config
    assert isinstance(again.cache, Path) and isinstance(again.group, tuple) and list(again.scales) == [3, 4]
    assert type(again.trainer.parallelism) is type(config.trainer.parallelism)


def test_a_missing_field_of_a_file_takes_its_default():
    assert config_file.from_json(RunConfig, '{"steps": 3}') == RunConfig(steps=3)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"stepz": 3}', "stepz is not a field; did you mean steps"),
        (
            '{"trainer": {"model": {"hiden_size": 3}}}',
            r"trainer.model.hiden_size is not a field; did you mean .*hidden_size",
        ),
        ('{"steps": "3"}', "steps='3': it should be a valid integer"),
        ('{"steps": true}', "steps=True: it should be a valid integer"),
        ('{"steps": 1.0}', "steps=1.0: it should be a valid integer"),
        ('{"mode": "medium"}', "mode='medium': it should be 'fast' or 'slow'"),
        ('{"group": [1, "x"]}', r"group\[1\]='x': it should be a valid integer"),
        ('{"pair": ["a"]}', r"pair\[1\]=.*: Field required"),
        ('{"schedule": {"total_steps": 1.5}}', "schedule.total_steps=1.5: it should be a valid integer"),
        ('{"stepz": 3, "mode": 1}', "(?s)mode=1.*stepz is not a field|stepz is not a field.*mode=1"),
        ("[1]", r"the config=\[1\]: it should be an object"),
        ("{", "not JSON: Expecting property name"),
    ],
)
def test_a_file_with_an_unknown_or_ill_typed_field_is_refused_with_the_name_of_the_field(capsys, text, message):
    with pytest.raises(ValueError, match=message):
        config_file.from_json(RunConfig, text)
    Path("bad.json").write_text(text)
    assert refusal(capsys, "--config", "bad.json").startswith(f"{PROG}: error: bad.json: ")


@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
def test_a_config_is_saved_and_read_again_in_every_format(ending):
    saved = Path(f"folder/saved.{ending}")
    assert parse("--save-config", str(saved)).save_config == saved
    config = replace(tiny(), cache=Path("x/y"), group=(), scales={3: 1.5, 4: 1.0}, pair=("b: c", 1e-5))
    config.environment.options = {"operators": ["+"], "deep": {"n": 1}}
    config_file.write(config, saved)
    invocation = parse("--config", str(saved), "--seed", "4")
    assert invocation.config == replace(config, seed=4) and invocation.config_name == "saved"


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("a.yaml", "steps: [1, 2", "line 1, column 13"),
        ("a.yaml", "steps: 1\nsteps: 2", "the key 'steps' appears twice.*line 2"),
        ("a.yaml", "schedule: {learning_rate: fast}", "schedule.learning_rate='fast': it should be a valid number"),
        ("a.yaml", "", "the config=None: it should be an object"),
        ("a.yaml", "steps: {{n}}", "unhashable"),
        ("a.yaml", "2026-11-23: 1", "keys must be"),
        ("a.toml", "steps = 1\nsteps = 2", "Cannot overwrite a value"),
        ("a.toml", "[schedule\nkind = 1", "line 1"),
        ("a.toml", "[schedul]\nkind = 1", "schedul is not a field; did you mean schedule"),
        ("a.toml", "cache = 2026-11-23", "a date"),
    ],
)
def test_a_wrong_yaml_or_toml_file_is_refused_with_its_name_and_the_error(capsys, file, text, message):
    Path(file).write_text(text)
    found = refusal(capsys, "--config", file)
    assert found.startswith(f"{PROG}: error: {file}: ") and re.search(message, found), found


def test_yaml_takes_a_learning_rate_without_a_dot():
    Path("a.yaml").write_text("schedule:\n  learning_rate: 1e-3\n")
    assert parse("--config", "a.yaml").config.schedule.learning_rate == 1e-3


def dataclasses_in(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every dataclass in a config: () for the config, then ("trainer",), ("trainer", "optimizer") and so on."""
    if is_dataclass(value):
        yield path
        for name in value.__dataclass_fields__:
            yield from dataclasses_in(getattr(value, name), (*path, name))


@pytest.mark.parametrize("controller", configs.CONFIGS)
def test_a_typo_in_any_dataclass_of_a_real_config_is_refused_with_its_dotted_name(controller):
    config = next(iter(configs.CONFIGS[controller].values()))()
    paths = list(dataclasses_in(config))
    assert {(), ("trainer", "optimizer"), ("trainer", "parallelism"), ("generator", "lora")} <= set(paths)
    for path in paths:
        values = json.loads(config_file.to_json(config))
        nested = values
        for name in path:
            nested = nested[name]
        nested["a_typo"] = 3
        with pytest.raises(ValueError) as refused:
            config_file.from_json(type(config), json.dumps(values))
        assert str(refused.value).startswith(f"{'.'.join((*path, 'a_typo'))} is not a field; did you mean ")


def test_a_typo_in_the_optional_optimizer_names_the_field_that_was_meant():
    with pytest.raises(ValueError, match=r"trainer\.optimizer\.nmae is not a field; did you mean name"):
        config_file.from_json(RunConfig, '{"trainer": {"optimizer": {"nmae": "AdamW"}}}')
    with pytest.raises(ValueError, match=r"trainer\.optimizer\.groups.*=.*: Field required"):
        config_file.from_json(RunConfig, '{"trainer": {"optimizer": {"groups": {"norm": [1.0]}}}}')
    assert config_file.from_json(RunConfig, '{"trainer": {"optimizer": null}}').trainer.optimizer is None


def test_print_config_prints_json_that_is_read_as_the_same_config(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    config = replace(tiny(), cache=Path("x" * 100))
    cli.print_config(config)
    assert config_file.from_json(RunConfig, capsys.readouterr().out) == config


@pytest.mark.parametrize("controller", configs.CONFIGS)
def test_every_short_flag_is_short_for_a_field(controller):
    config = next(iter(configs.CONFIGS[controller].values()))()
    fields = {f"--{name.replace('_', '-')}" for name in config_file.leaves_of(config)}
    assert len(config.short_flags) >= 4
    assert set(config.short_flags.values()) <= fields


@pytest.mark.parametrize("controller", configs.CONFIGS)
def test_every_config_is_valid_or_names_the_missing_flag_and_no_two_share_a_model(controller):
    made = {name: make() for name, make in configs.CONFIGS[controller].items()}
    of_a_user = {
        "qwen3": "--trainer.hf-path takes a directory or the id of a model",
        "blank": "environment.task is empty: --task takes a reasoning-gym task",
    }
    for name, config in made.items():
        if name in of_a_user:
            with pytest.raises(ValueError, match=of_a_user[name]):
                config.validate()
        else:
            config.validate()
    assert len({id(config.trainer.model) for config in made.values()}) == len(made)
