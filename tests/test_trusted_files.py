"""Files that another user could have written are refused before they are unpickled."""

import asyncio
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rl_actors.engine import export
from rl_actors.transports.files import FilesTransport
from rl_actors.trusted_files import distrust, require_trusted

STRANGER = 54_321  # the number of a user and of a group that do not exist


class Trap:
    """An object that makes the file `path` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for path in (folder / "file", folder / "inner" / "file"):
        path.write_text("content")
        path.chmod(0o644)
    folder.chmod(0o755)
    (folder / "inner").chmod(0o755)
    return folder


def test_files_that_only_their_owner_can_write_are_trusted(folder):
    assert distrust(folder) == "" and distrust(folder / "file") == "" and distrust(folder / "missing") == ""


@pytest.mark.parametrize("path", [".", "file", "inner", "inner/file"])
@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_a_file_or_a_folder_that_others_can_write_is_named_with_its_mode(folder, path, mode):
    (folder / path).chmod(mode | (0o100 if (folder / path).is_dir() else 0))
    with pytest.raises(ValueError, match=rf"{(folder / path).name} can be written by others \(mode \d+\)"):
        require_trusted(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
@pytest.mark.parametrize("path", [".", "file", "inner/file"])
def test_a_file_of_another_user_is_named_with_the_user(folder, path):
    os.chown(folder / path, STRANGER, -1)
    with pytest.raises(ValueError, match=f"belongs to the user {STRANGER}, who could run code"):
        require_trusted(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to any group")
def test_a_group_may_write_only_if_it_is_the_private_group_of_the_owner(folder):
    (folder / "file").chmod(0o664)
    assert distrust(folder) == ""  # the file's group is the private group of root
    os.chown(folder / "file", -1, STRANGER)
    assert "can be written by others (mode 664)" in distrust(folder)


def test_a_checkpoint_and_a_manifest_that_others_can_write_are_not_unpickled(tmp_path):
    checkpoint, mark = tmp_path / "checkpoint", tmp_path / "mark"
    dcp.save({"policy_version": torch.tensor(3)}, checkpoint_id=checkpoint, no_dist=True)
    assert export.policy_version(str(checkpoint)) == 3
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    (checkpoint / ".metadata").chmod(0o666)
    with pytest.raises(ValueError, match="metadata can be written by others"):
        export.policy_version(str(checkpoint))
    transport = FilesTransport(tmp_path / "weights")
    asyncio.run(transport.put_object("1/manifest", "the manifest"))
    assert asyncio.run(transport.get_object("1/manifest")) == "the manifest"
    file = tmp_path / "weights" / "1" / "manifest.pickle"
    file.write_bytes(pickle.dumps(Trap(mark)))
    file.chmod(0o666)
    with pytest.raises(ValueError, match="manifest.pickle can be written by others"):
        asyncio.run(transport.get_object("1/manifest"))
    assert not mark.exists()
