"""Starts a Tinker server on a folder of state, of one running server and one base model."""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from controllers.rollouts.tokenizer import load_tokenizer
from controllers.tinker_server.config import ServeConfig, tokenizer_id
from controllers.tinker_server.requests import SamplingLimits
from controllers.tinker_server.server import Server
from controllers.tinker_server.weights import HfDirectories
from rl_actors import GeneratorClient, TrainerClient
from rl_actors.json_files import read_object
from rl_actors.vllm.start import this_machine

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 1 << 20
"""Bytes at each end of a file of weights that the fingerprint reads."""


async def start_server(config: ServeConfig, folder: Path) -> Server:
    """Start a server, from the folder's earlier state if there is one, and wait for its generator."""
    await asyncio.to_thread(prepare_base, config, folder)
    await asyncio.to_thread(require_base, folder, config.name, Path(config.hf_path))
    tokenizer = await asyncio.to_thread(load_tokenizer, config.hf_path)
    limits = SamplingLimits(
        max_model_len=config.generator.max_model_len,
        vocab_size=config.trainer.model.vocab_size,
        end_token_ids=tokenizer.stop_token_ids,
        tokenizer=tokenizer.hf,
    )
    versions = HfDirectories(folder / "samplers")
    client = GeneratorClient.spawn(config.generator, transport=versions)
    # a server's trainer never pushes, but without the argument it would open a default transport
    spawn = partial(TrainerClient.spawn, transport=versions)
    try:
        server = Server(config, folder, spawn=spawn, generator=client, sampling=limits)
        await client.ready()
    except BaseException:
        await client.close()
        raise
    server.begin()
    return server


def prepare_base(config: ServeConfig, folder: Path) -> None:
    """Find or write the base model, and put it into the config. ValueError: it cannot be served."""
    directory = Path(config.hf_path)
    if not config.hf_path:
        if config.write_base is None:
            raise ValueError("hf_path is empty; give the Hugging Face directory of the base model")
        directory = folder / "base" / config.name
        if not (directory / "config.json").is_file():
            config.write_base(directory)
    config.for_base(directory.absolute())
    if config.generator.has_adapters:
        try:
            this_machine().require_possible(config.generator)
        except ValueError as error:
            text = "adapters are merged into the weights of samplers, because vLLM cannot apply adapters on this machine: %s"
            logger.warning(text, error)
            config.generator.max_adapters = 0
    tokenizer_id(config.hf_path)  # raises ValueError if the SDK could not load from this path
    config.validate()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder for this process. Raises ValueError if another server holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} holds the state of a server that is running (process {file.read().strip()}); stop it, or give "
                "another folder to --state"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def require_base(folder: Path, name: str, model: Path) -> None:
    """Record the state's base model. Raises ValueError, with both names, if the record has another."""
    record = folder / "base.json"
    found = fingerprint(model)
    if record.is_file():
        saved = read_object(record)
        if saved.get("fingerprint") != found:
            raise ValueError(
                f"{folder} holds runs of the base model {saved.get('name')!r} ({saved.get('directory')}), so it cannot serve "
                f"{name!r} ({model}); give another folder to --state"
            )
    written = record.with_suffix(".new")
    written.write_text(json.dumps({"name": name, "directory": str(model), "fingerprint": found}, indent=2))
    written.replace(record)  # a file half written by a kill would be refused for ever


def fingerprint(model: Path) -> str:
    """A hash of config.json, and of sizes, beginnings and ends of the files of weights."""
    whole = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            whole.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()
