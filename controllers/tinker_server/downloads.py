"""Signed addresses from which the files of exported weights can be downloaded.

A download needs no API key. An address is valid for an hour.
"""

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import quote

from controllers.tinker_server.futures import NotFoundError
from controllers.tinker_server.store import Checkpoint

VALID_SECONDS = 3600


class Downloads:
    """Makes signed addresses, and checks them.

    Only this process has the secret for the signatures, so no address is valid after the server has ended.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def urls(self, checkpoint: Checkpoint, base: str, now: float) -> dict[str, str]:
        """The address of each file of a checkpoint. Key: the file's name.

        base: the server's address, with a slash at the end. now: the time in seconds, as time.time() returns it.
        """
        expires = int(now) + VALID_SECONDS
        found = {}
        for file in sorted(Path(checkpoint.directory).iterdir()):
            signature = self._sign(checkpoint.path, file.name, expires)
            place = quote(checkpoint.path.removeprefix("tinker://"), safe=":/")
            found[file.name] = f"{base}download/{expires}/{signature}/{place}/{quote(file.name)}"
        return found

    def require(self, path: str, name: str, expires: int, signature: str) -> None:
        """Raises NotFoundError if `urls` made no address with these parts, or if the address is no longer valid."""
        expected = self._sign(path, name, expires)
        if expires < time.time() or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise NotFoundError("this address is wrong, or it is no longer valid")

    def _sign(self, path: str, name: str, expires: int) -> str:
        text = f"{expires}\n{path}\n{name}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
