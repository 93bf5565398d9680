"""A fixture for the tests in this folder: Tinker servers whose trainer and generator are fakes."""

import asyncio
from pathlib import Path

import pytest
from serving import Api


@pytest.fixture
def api(tmp_path):
    """api(use, **fields) runs the coroutine function `use` with the Api of a new server, whose config has these fields."""

    def run(use, folder: Path = tmp_path, **fields: object):
        async def main():
            async with Api(folder, **fields) as made:
                return await use(made)

        return asyncio.run(main())

    return run
