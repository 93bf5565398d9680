"""Write a Hugging Face directory with random bfloat16 weights of a Qwen3 model: `python -m benchmarks random_weights 4b DIR`.

The directory is for measurements and trials. It has a config.json, and safetensors with the names and shapes of the model's weights. It has
no tokenizer. A run can load it like a directory of trained weights.
"""

import argparse
import math
import shutil
import time
from pathlib import Path

import torch

from configs.qwen3 import MODELS
from rl_actors import ModelConfig
from rl_actors.engine import hf

STD = 0.02


def scratch(model: ModelConfig, times: int = 4) -> str | None:
    """A value for tempfile's argument `dir`: the folder in which to make a temporary folder for weights of this model.

    The value is /dev/shm, whose files are in memory, if `times` copies of the weights fit there. Otherwise the value is
    None, and tempfile uses the system's default.
    """
    memory = Path("/dev/shm")
    num_values = sum(math.prod(shape) for shape in hf.tensor_shapes(model).values())
    needed = times * num_values * torch.bfloat16.itemsize
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free >= needed else None


def write(model: ModelConfig, directory: Path, *, seed: int = 0, scale: float = 1.0) -> None:
    """Write the directory.

    The matrices are drawn from a normal distribution with standard deviation STD. The weights of all norms but the last are 1.

    scale: the value of all weights of the last norm. So the logits are `scale` times as large as with a scale of 1.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    model.save(directory)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, scale if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16)
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, STD, generator=generator).cpu()

    hf.write_safetensors(directory, ((name, draw(name, shape)) for name, shape in hf.tensor_shapes(model).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("directory", type=Path, help="the directory to write; it must not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor that multiplies the logits; with 15 the model 0_6b has an entropy of 1 to 2 nats per token",
    )
    arguments = parser.parse_args()
    if arguments.directory.exists():
        raise SystemExit(f"{arguments.directory} exists; this program overwrites nothing")
    start = time.perf_counter()
    write(MODELS[arguments.model], arguments.directory, seed=arguments.seed, scale=arguments.scale)
    size = sum(file.stat().st_size for file in arguments.directory.iterdir())
    print(f"{arguments.directory}: {size / 1e9:.1f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
