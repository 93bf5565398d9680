"""Signed addresses, valid for an hour, of exported weights' files. They need no API key."""

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
    """Makes and checks signed addresses. The secret ends with this process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def urls(self, checkpoint: Checkpoint, base: str, now: float) -> dict[str, str]:
        """File name -> address. base: the server's address, ending in a slash. now: as time.time()."""
        expires = int(now) + VALID_SECONDS
        found = {}
        for file in sorted(Path(checkpoint.directory).iterdir()):
            signature = self._sign(checkpoint.path, file.name, expires)
            place = quote(checkpoint.path.removeprefix("tinker://"), safe=":/")
            found[file.name] = f"{base}download/{expires}/{signature}/{place}/{quote(file.name)}"
        return found

    def require(self, path: str, name: str, expires: int, signature: str) -> None:
        """Raises NotFoundError for an address that `urls` did not make, or that has expired."""
        expected = self._sign(path, name, expires)
        if expires < time.time() or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise NotFoundError("this address is wrong, or it is no longer valid")

    def _sign(self, path: str, name: str, expires: int) -> str:
        text = f"{expires}\n{path}\n{name}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
