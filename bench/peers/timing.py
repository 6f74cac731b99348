"""Clocks of one call, cold and warm, on a GPU or (for self-checks) on the CPU; and the roofs of a run."""

import statistics
import time

import torch

FLUSH_BYTES = 256 << 20  # several times any L2 cache
SLEEP_CYCLES_PER_SECOND = 2e9  # not slower than any clock: the queue is filled before the sleep ends


STEADY_CALLS, STEADY = 10, 0.02


def steady(times_ms):
    """Whether they lie so near to their median that more calls would tell nothing new."""
    found = spread(times_ms)
    return found["p90_ms"] - found["p10_ms"] <= STEADY * found["median_ms"]


def spread(times_ms):
    ordered = sorted(times_ms)
    return {"median_ms": statistics.median(ordered), "p10_ms": ordered[int(0.1 * (len(ordered) - 1))],
            "p90_ms": ordered[int(0.9 * (len(ordered) - 1) + 0.999)], "calls": len(ordered)}


class GpuClock:
    """Device time of a call by events. The device sleeps while the call is queued, so that the time of Python and
    of launches does not show; calls that wait for the device must use `host`."""

    def __init__(self):
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def synchronize(self):
        torch.cuda.synchronize()

    def layers(self, wanted):
        return wanted

    def _host_seconds(self, call):
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        queued = time.perf_counter() - begin
        torch.cuda.synchronize()
        return queued

    def device(self, call, calls, cold, longest_s=1.5):
        """Spread of `calls` calls; fewer if they would take longer than `longest_s` in all, or once they are steady."""
        sleep = int((1.5 * self._host_seconds(call) + 40e-6) * SLEEP_CYCLES_PER_SECOND)
        times, stop = [], time.perf_counter() + longest_s
        for i in range(calls):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if cold:
                self._flush.fill_(i & 1)
            torch.cuda._sleep(sleep)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
            if time.perf_counter() > stop and len(times) >= 3 or len(times) == STEADY_CALLS and steady(times):
                break
        return spread(times)

    def host(self, call, calls):
        """Wall time of a call, from an idle device to an idle device: Python, launches and all."""
        call()
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return spread(times)


class CpuClock:
    """For self-checks without a GPU: wall time, nothing is flushed."""

    def synchronize(self):
        pass

    def layers(self, wanted):
        return min(wanted, 2)

    def device(self, call, calls, cold, longest_s=0.2):
        return self.host(call, calls)

    def host(self, call, calls):
        times = []
        for _ in range(min(calls, 2)):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        return spread(times)


def matrix_peak(clock, device, side):
    """TFLOP/s of a bf16 product of two square matrices."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    time_ms = clock.device(lambda: torch.matmul(a, b, out=out), 20, cold=False)["median_ms"]
    return 2 * side**3 / time_ms / 1e9


def copy_peak(clock, device, size):
    """GB/s of a device copy, read plus write."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    time_ms = clock.device(lambda: target.copy_(source), 20, cold=False)["median_ms"]
    return 2 * size / time_ms / 1e6
