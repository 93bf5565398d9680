"""Starts a Tinker server: prepares the directory of its base model, opens its database, and spawns
its generator.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path

from controllers.rollouts.tokenizer import load_tokenizer
from controllers.tinker_server.config import ServeConfig, tokenizer_id
from controllers.tinker_server.requests import SamplingLimits
from controllers.tinker_server.sampling import VersionedGenerator
from controllers.tinker_server.server import Server, is_abandoned
from controllers.tinker_server.state_folder import require_base
from controllers.tinker_server.store import Store
from controllers.tinker_server.trainers import Trainer, Trainers
from controllers.tinker_server.weights import HfDirectories
from rl_actors import GeneratorClient, TrainerClient, TrainerConfig
from rl_actors.vllm.start import this_machine

logger = logging.getLogger(__name__)


def prepare_base(config: ServeConfig, folder: Path) -> None:
    """Find or write the base model, and put its path and model config into the server's config.
    Sets max_adapters=0 if vLLM cannot apply adapters here.

    Raises ValueError if there is no such directory, or the server cannot serve this model with this
    config.
    """
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
            logger.warning(
                "a sampler of an adapter gets weights with the adapter merged in, because vLLM cannot apply adapters on this machine: %s",
                error,
            )
            config.generator.max_adapters = 0
    tokenizer_id(config.hf_path)  # raises ValueError if the SDK could not load from this path
    config.validate()


async def start_server(config: ServeConfig, folder: Path) -> Server:
    """Start a server, from the folder's earlier state if there is one, and wait for its generator."""
    await asyncio.to_thread(prepare_base, config, folder)
    await asyncio.to_thread(require_base, folder, config.name, Path(config.hf_path))
    limits = await asyncio.to_thread(sampling_limits, config)
    store = Store(folder / "state.sqlite")
    versions = HfDirectories(folder / "samplers")
    client = GeneratorClient.spawn(config.generator, transport=versions)

    def spawn(trainer: TrainerConfig) -> Trainer:
        # a server's trainer never pushes, but without the argument the client would open a default
        # transport
        return TrainerClient.spawn(trainer, transport=versions)

    try:
        trainers = Trainers(config, store, folder / "parked", spawn=spawn, is_abandoned=partial(is_abandoned, store))
        server = Server(
            config, folder, store=store, trainers=trainers, generator=VersionedGenerator(client), sampling=limits
        )
        await client.ready()
    except BaseException:
        await client.close()
        raise
    server.begin()
    return server


def sampling_limits(config: ServeConfig) -> SamplingLimits:
    """Limits of sampling requests, with the base model's tokenizer and end tokens."""
    tokenizer = load_tokenizer(config.hf_path)
    return SamplingLimits(
        max_model_len=config.generator.max_model_len,
        vocab_size=config.trainer.model.vocab_size,
        end_token_ids=tokenizer.stop_token_ids,
        tokenizer=tokenizer.hf,
    )
