"""Servers over fakes for the tests in this folder."""

import asyncio
from pathlib import Path

import pytest
from serving import Api


@pytest.fixture
def api(tmp_path):
    """api(coroutine function of an Api, fields of the config) runs it with a server of its own."""

    def run(use, folder: Path = tmp_path, **fields: object):
        async def main():
            async with Api(folder, **fields) as made:
                return await use(made)

        return asyncio.run(main())

    return run
