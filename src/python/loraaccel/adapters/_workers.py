"""Many small decompositions at once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with how many layers are done, and of how many."""

CHUNK = 4  # layers a worker may be ahead by: what bounds the memory


def cores() -> int:
    limit = os.environ.get("LORAACCEL_NUM_THREADS", "")
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(limit), there) if limit.isdigit() and int(limit) > 0 else there


@contextlib.contextmanager
def one_thread_each() -> Iterator[int]:
    """Workers, with BLAS on one thread in each of them. BLAS loses more than it wins where it divides matrices of a
    few hundred rows among threads: twice the time on two cores. Without threadpoolctl, which tells it, there is one
    worker."""
    if importlib.util.find_spec("threadpoolctl") is None or cores() == 1:
        yield 1
        return
    import threadpoolctl

    limits: Any = threadpoolctl.threadpool_limits(1)
    with limits:
        yield cores()


def each(
    work: Callable[[Item], Result], items: Iterable[Item], count: int, progress: Progress | None = None
) -> list[Result]:
    """work(item) for every item, in their order; the first error ends it."""
    results: list[Result] = []

    def done(result: Result) -> None:
        results.append(result)
        if progress is not None:
            progress(len(results), count)

    with one_thread_each() as workers:
        if workers == 1:
            for item in items:
                done(work(item))
            return results
        with ThreadPoolExecutor(workers) as pool:
            waiting: list[Any] = []
            try:
                for item in items:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) >= workers * CHUNK:
                        done(waiting.pop(0).result())
                for future in waiting:
                    done(future.result())
            finally:
                for future in waiting:
                    future.cancel()
    return results
