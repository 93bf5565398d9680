"""Finds the directories of models by their ids on the Hugging Face Hub, such as "Qwen/Qwen3-0.6B", in
the program that starts the actors.
"""

import json
import re
from pathlib import Path

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""organization/model"""

FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
"""Files that a run reads: weights, configs, and all forms of a tokenizer."""

OTHER_FILES = ["*/*", "consolidated*"]
"""Not downloaded: subfolders, and the same weights in other formats."""


def find_model(name_or_path: str) -> str:
    """The directory of the model with this Hub id; a path or "" unchanged.

    From the cache, or downloaded unless HF_HUB_OFFLINE is set. Raises ValueError with the id and
    the reason if neither works or the repository lacks files.
    """
    if not is_model_id(name_or_path):
        return name_or_path
    # the import takes 0.3 s, and most programs give a directory
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    reason = f"it is neither a directory nor in the cache {constants.HF_HUB_CACHE}"
    try:
        directory = snapshot_download(
            name_or_path, allow_patterns=FILES, ignore_patterns=OTHER_FILES, local_files_only=True
        )
        lacking = missing_files(directory)
        if not lacking:
            return directory
        reason = f"its copy in the cache lacks {', '.join(lacking)} ({directory})"
    except LocalEntryNotFoundError:
        pass
    if constants.is_offline_mode():
        raise _not_found(name_or_path, f"{reason}, and HF_HUB_OFFLINE is set")
    try:
        directory = snapshot_download(name_or_path, allow_patterns=FILES, ignore_patterns=OTHER_FILES)
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise _not_found(name_or_path, f"{reason}, and the download failed: {first_line}") from error
    lacking = missing_files(directory)
    if lacking:
        raise ValueError(f"{name_or_path} on the Hub has no {', '.join(lacking)}, so no model can be loaded from it")
    return directory


def is_model_id(name_or_path: str) -> bool:
    return MODEL_ID.fullmatch(name_or_path) is not None and not Path(name_or_path).is_dir()


def require_directory(field: str, path: str) -> None:
    """Raises ValueError naming field and remedy if `path` looks like a Hub id."""
    if is_model_id(path):
        raise ValueError(
            f"{field}={path!r} is not a directory; if it is the id of a model on the Hugging Face Hub, "
            f"pass the directory that rl_actors.find_model({path!r}) returns"
        )


def model_name(path: str) -> str:
    """The Hub id of a directory in the Hub's cache, else the directory's name.

    model_name(".../models--Qwen--Qwen3-0.6B/snapshots/c1899de2") -> "Qwen/Qwen3-0.6B"
    """
    for part in Path(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return Path(path).name


def missing_files(directory: str) -> list[str]:
    """Of config.json, a *.safetensors, and all in the index if there is one. Raises ValueError if the
    index is not a JSON object with a weight_map.
    """
    folder = Path(directory)
    wanted = ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted += sorted({str(Path(name)) for name in json.loads(index.read_text())["weight_map"].values()})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is not a JSON object with a weight_map") from None
    lacking = [name for name in wanted if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        lacking.append("*.safetensors")
    return lacking


def require_weights(field: str, path: str) -> None:
    """Raises ValueError naming the field if files are missing or weights cut off, by their headers."""
    from safetensors import SafetensorError, safe_open

    lacking = missing_files(path)
    if lacking:
        raise ValueError(f"{field}={path!r} lacks {', '.join(lacking)}")
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None


def _not_found(name: str, reason: str) -> ValueError:
    return ValueError(f"the model {name} is not on this machine: {reason}; to download it: hf download {name}")
