"""What this machine can do at most: multiply-add rate per dtype and read bandwidth, measured by native probes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

NATIVE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
READ_MBYTES = 256  # per thread, several times a last-level cache


@dataclass(frozen=True)
class FmaCeiling:
    """Multiply-add rate in GFLOP/s, by one thread and by all, and the instructions that reached it."""

    isa: str
    one_thread_gflops: float
    all_threads_gflops: float


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the machine with `threads` threads; bandwidth in GB/s, 1e9 bytes."""

    threads: int
    fma: dict[str, FmaCeiling]
    read_gbytes: float

    def merged(self, other: Ceilings) -> Ceilings:
        """The higher of both in everything: what else the machine does only ever lowers a ceiling."""
        fma = {
            name: FmaCeiling(
                a.isa,
                max(a.one_thread_gflops, other.fma[name].one_thread_gflops),
                max(a.all_threads_gflops, other.fma[name].all_threads_gflops),
            )
            for name, a in self.fma.items()
        }
        return Ceilings(self.threads, fma, max(self.read_gbytes, other.read_gbytes))


def _best_sum(probe: Callable[[], float], threads: int, repeats: int) -> float:
    """Sum over `threads` concurrent probes, best of `repeats`: what disturbs a probe only ever slows it down."""
    barrier = Barrier(threads)

    def started_together() -> float:
        barrier.wait()
        return probe()

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            running = [pool.submit(started_together) for _ in range(threads)]
            best = max(best, sum(future.result() for future in running))
    return best


def _fma_ceiling(dtype: str, threads: int, seconds: float) -> FmaCeiling:
    from loraaccel import _core

    probe_seconds = 0.02
    repeats = max(1, round(seconds / probe_seconds))

    def probe() -> float:
        gflops: float = _core.measure_fma(dtype, probe_seconds)[0]
        return gflops

    isa: str = _core.measure_fma(dtype, probe_seconds)[1]
    return FmaCeiling(isa, _best_sum(probe, 1, repeats), _best_sum(probe, threads, repeats))


def measure(threads: int, seconds: float = 0.2) -> Ceilings:
    """Measure all ceilings, each for about `seconds`."""
    from loraaccel import _core

    def read_probe() -> float:
        gbytes: float = _core.measure_read(READ_MBYTES, seconds / 3)
        return gbytes

    fma = {name: _fma_ceiling(native, threads, seconds) for name, native in NATIVE_DTYPES.items()}
    return Ceilings(threads, fma, _best_sum(read_probe, threads, repeats=3))
