"""Coroutines in tests that are not coroutines themselves."""

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any


def result_of(coroutine: Coroutine) -> Any:
    """Run a coroutine in a thread of its own: browser tests leave an event loop in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
