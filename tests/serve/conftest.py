"""A fixture for the tests in this folder: Tinker servers whose trainer and generator are fakes."""

import asyncio
from pathlib import Path

import pytest
from serving import Api


@pytest.fixture
def api(tmp_path):
    """api(use, **fields) makes a server whose config has these fields, and runs the coroutine function `use` with the
    server's Api.

    Returns the result of `use`. folder: folder of the server's files.
    """

    def run(use, folder: Path = tmp_path, **fields: object):
        async def main():
            async with Api(folder, **fields) as made:
                return await use(made)

        return asyncio.run(main())

    return run
