"""Models that are named by their ids on the Hugging Face Hub, and the errors for a missing model.

The tests use a prepared cache and no network.
"""

import shutil
from dataclasses import replace

import pytest
from own_models import put_in_hub_cache

from configs.qwen3 import qwen3
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig, find_model
from rl_actors.hub import model_name

ID = "Qwen/Qwen3-0.6B"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The path of an empty cache. huggingface_hub is offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def cached(cache, tied_qwen3):
    """The directory of the model `ID` in the cache. The directory has the files of a small model."""
    snapshot = put_in_hub_cache(cache, ID)
    shutil.copytree(tied_qwen3, snapshot, dirs_exist_ok=True)
    return snapshot


def test_find_model_gives_the_cached_directory_of_an_id_and_returns_a_path_unchanged(cached, tied_qwen3):
    assert find_model(ID) == str(cached)
    assert find_model(tied_qwen3) == tied_qwen3
    assert find_model("") == ""
    assert model_name(str(cached)) == ID and model_name("/models/mine") == "mine"


def test_the_config_qwen3_gets_the_model_size_from_the_cache(cached, tied_qwen3):
    config = qwen3()
    unresolved = replace(config, trainer=replace(config.trainer, hf_path=ID))
    found = unresolved.with_local_models()
    assert found.trainer.hf_path == str(cached)
    assert found.trainer.model == found.generator.model == ModelConfig.from_hf(tied_qwen3) != ModelConfig()


def test_the_path_of_a_directory_is_not_an_id_even_if_it_looks_like_an_id(cache, tied_qwen3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tied_qwen3, "models/mine")
    assert find_model("models/mine") == "models/mine"
    assert TrainerConfig(hf_path="models/mine").model == ModelConfig.from_hf(tied_qwen3)


def test_the_error_for_an_id_that_is_not_in_the_cache_has_the_command_that_downloads_it(cache):
    with pytest.raises(ValueError) as caught:
        find_model(ID)
    assert str(caught.value) == (
        f"the model {ID} is not on this machine: it is neither a directory nor in the cache {cache}, and HF_HUB_OFFLINE is set; "
        f"to download it: hf download {ID}"
    )


def test_the_error_after_a_failed_download_has_the_reason(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # no program listens there
    with pytest.raises(ValueError, match=f"the download failed: .*; to download it: hf download {ID}"):
        find_model(ID)


def test_a_cached_model_without_weights_is_refused_and_the_error_names_the_missing_files(cached):
    (cached / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"its copy in the cache lacks \*.safetensors .*to download it: hf download"):
        find_model(ID)


def test_configs_refuse_an_id_that_was_not_looked_up():
    for made in (TrainerConfig(hf_path=ID), GeneratorConfig(hf_path=ID)):
        with pytest.raises(ValueError, match=r"hf_path='Qwen/Qwen3-0.6B' is not a directory; .* rl_actors.find_model"):
            made.validate()
