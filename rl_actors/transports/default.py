"""The transport of a trainer whose caller names none."""

import atexit
import shutil
import tempfile
import uuid
from importlib.util import find_spec
from pathlib import Path

from rl_actors.transports.base import Transport


def default_transport() -> Transport:
    """A torchstore, or files in the system's temporary folder if torchstore is not installed. The caller opens and closes it."""
    if find_spec("torchstore") is None:
        from rl_actors.transports.files import FilesTransport

        directory = Path(tempfile.gettempdir()) / f"rl_actors_weights_{uuid.uuid4().hex}"
        atexit.register(shutil.rmtree, directory, ignore_errors=True)  # for a program that ends without `close`
        return FilesTransport(directory)
    from rl_actors.transports.torchstore import TorchStoreTransport

    return TorchStoreTransport()
