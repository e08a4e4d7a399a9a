"""Limits the share of a busy machine that cold reads may use: a share of the broker's CPU time, otherwise unlimited.

`tidelog.storage.reads.turns` divides the event loop between ready tasks, and `tidelog.storage.reads.budget` the
memory. Neither helps when CPU time is scarce: a replay runs as fast as it is served, and takes from producers
the CPU time of its GETs, checks and sends, on the loop and in threads. So CPU *time* is limited.

Every `WINDOW_S` the CPU time of the process is measured, and the part used by cold reads (the *cold lane*: measured in
our code, estimated by bytes for library threads and sends). The broker is *pressed* when its loop waited for a core for
a large part of the time in which it was runnable, or was idle for less than a tenth of the window. There is work to
protect only while the WAL grows: nothing is produced otherwise, no consumer of the newest records has anything to
read, and what the broker uses beside the measured cold lane may well be the replay's own threads, page faults and
sends. While it grows, work is protected when everything else uses a quarter of a core and no less than the cold lane,
or when producers write heavily and the rest would use that much if it got the cores. So a replay alone may use the
whole machine, whatever other processes run on it.

While both hold, the cold lane is limited to a rate (CPU seconds per second). If it has no limit yet, producers write
heavily and the rest uses no less than the cold lane, the rate becomes `cache.cold_busy_share` of the broker's usage at
once: a replay at full speed takes more from producers in half a second than it takes later in ten; and as long as
producers write and no limit applies, a window is only `LOOK_S` long. Otherwise the rate is halved with each such
window, down to that share and no further, so nothing starves. It grows by a quarter with each window that is not
pressed, or doubles with each in which there is nothing to protect, until it limits nothing any more (1.8 and 0.6 s).

Which reads wait: reads of replays proceed in order, each when the reads before it are paid for. A reader's first read,
such as a look-up by timestamp, does not join that queue, and may leave a debt of `FIRST_READS_S`: it waits only when
there are very many first reads. Reads in the newest object of a stream never wait, and their slices are not charged: a
lagging consumer must not lag further. Nor do urgent ones, of partitions that are being opened: after a broker's death
there are very many at once, on a machine that the election presses, and producers wait for them. The first in the queue
never waits longer than `MAX_WAIT_S`.

`ColdShare` is the arithmetic, sans-IO; `ColdThrottle` measures and makes readers wait. Entry: `ColdThrottle`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tidelog.runtime.clock import Clock
from tidelog.runtime.cpu_time import ByteCost, CpuMeter, CpuTimes

WINDOW_S: Final = 0.1
"""Length of a measurement window."""
LOOK_S: Final = 0.05
"""Length while no limit applies and producers write heavily."""
STALE_S: Final = 1.0
"""A window left open for this long is discarded: no cold read ran meanwhile."""
IDLE_SHARE: Final = 0.1
"""The loop is pressed when it is idle for a smaller part of a window."""
WAIT_SHARE: Final = 0.2
"""The loop is pressed when it waits for a core for this part of the time in which it is runnable..."""
MIN_WAIT_SHARE: Final = 0.03
"""... and for this part of the window: a loop that wakes up rarely waits a little each time."""
OTHERS_CORES: Final = 0.25
"""Other work that needs fewer cores gets them from the kernel's scheduler."""
WRITTEN_BYTES_PER_S: Final = 256 << 10
"""Growth of the WAL from which there may be work to protect: one-record requests that use a quarter of a core write
more, and the offsets that a replay commits are far less."""
PRODUCED_BYTES_PER_S: Final = 16 << 20
"""Write rate from which producers are protected on a machine that gives the broker little CPU time."""
GROWTH: Final = 1.25
GROWTH_ALONE: Final = 2.0
"""Growth of the rate with each window in which there is nothing to protect."""
NO_BOUND_CORES: Final = 2.0
"""A rate of this many cores limits nothing: the event loop and its worker threads use less."""
CREDIT_S: Final = 0.02
"""How long an unused rate accumulates: waiting tasks resume late on a busy machine."""
FIRST_READS_S: Final = 0.1
"""Debt that first reads may leave: several slices of replays, so that they start at once."""
MAX_WAIT_S: Final = 1.0
_CHECK_S: Final = 0.05
_CRUMB_S: Final = 1e-6
"""A rounding remainder: a sleep this short might not advance the clock."""
GET_S_A_BYTE: Final = 0.25e-9
"""CPU time of a GET in the threads of the store's client, which is not measured (`bench.cold_read`: bare GETs)."""
SEND_S_A_BYTE: Final = 0.15e-9
READ_S_A_BYTE: Final = 0.7e-9
"""Initial estimates of the cost of a send and of a whole cold read."""
_SMALLEST_READ_BYTES: Final = 64 << 10
"""A read of one record costs about as much as one of this size."""


class ColdShare:
    """The rate that the cold lane may use, and its debt. Sans-IO: the caller passes measured seconds."""

    def __init__(self, share: float) -> None:
        """`share` (0–1] is the part of the process's CPU time; 1: never a limit."""
        assert 0 < share <= 1
        self._share = share
        self._since: tuple[float, CpuTimes, int] | None = None
        self._now = 0.0
        self._owed_s = 0.0
        self.rate = math.inf
        """CPU seconds per second that the cold lane may use now."""

    @property
    def is_off(self) -> bool:
        """Return whether it never limits anything."""
        return self._share == 1

    @property
    def is_bound(self) -> bool:
        """Return whether the rate is a limit now."""
        return self.rate < math.inf

    @property
    def delay_s(self) -> float:
        """Return the seconds until the debt is paid at the present rate."""
        return max(0.0, self._owed_s / self.rate) if self.is_bound else 0.0

    def charge(self, seconds: float) -> None:
        """Add the cost of a read that begins, or a correction of it (may be negative)."""
        if self.is_bound:
            self._owed_s = min(self._owed_s + seconds, MAX_WAIT_S * self.rate)

    def window_is_over(self, now: float, wal_end: int) -> bool:
        """Return whether `close_window` is due; otherwise only time passes. `now` is monotonic seconds."""
        elapsed, self._now = now - self._now, now
        if self.is_bound:
            self._owed_s = max(self._owed_s - elapsed * self.rate, -CREDIT_S * self.rate)
        if self._since is None:
            return True
        window_s = now - self._since[0]
        if window_s >= WINDOW_S:
            return True
        return not self.is_bound and window_s >= LOOK_S and self._produce_in_earnest(window_s, wal_end)

    def close_window(self, times: CpuTimes, spent_s: float, wal_end: int) -> None:
        """Evaluate the time since the last call, in which the cold lane used `spent_s`, and set the rate.

        `times` and the WAL's end offset are those at the `now` of the last `window_is_over`.
        """
        since, self._since = self._since, (self._now, times, wal_end)
        if since is None or self._now - since[0] > STALE_S:
            self._free()
            return
        seconds = self._now - since[0]
        used, run, waited = (
            max(0.0, (after - before) / seconds) for before, after in zip(since[1], times, strict=True)
        )
        cold = min(spent_s / seconds, used)
        others = used - cold
        wanted = others * (run + waited) / run if run else others
        written_rate = (wal_end - since[2]) / seconds
        produced = written_rate >= PRODUCED_BYTES_PER_S
        outweighed = written_rate >= WRITTEN_BYTES_PER_S and others >= max(OTHERS_CORES, cold)
        precious = outweighed or (wanted >= OTHERS_CORES and produced)
        if precious and _pressed(run, waited):
            least = self._share * used
            at_once = outweighed and produced and not self.is_bound
            self.rate = least if at_once else max(min(self.rate, cold) / 2, least)
        elif self.is_bound:
            self.rate *= GROWTH if precious else GROWTH_ALONE
            if self.rate >= NO_BOUND_CORES:
                self._free()

    def _produce_in_earnest(self, seconds: float, wal_end: int) -> bool:
        """Return whether producers have written heavily since the last window ended, `seconds` ago."""
        return self._since is not None and wal_end - self._since[2] >= PRODUCED_BYTES_PER_S * seconds

    def _free(self) -> None:
        self.rate, self._owed_s = math.inf, 0.0


def _pressed(run: float, waited: float) -> bool:
    """Return whether the loop lacks CPU time; both arguments are parts of the window."""
    wanted = run + waited
    return wanted > 1 - IDLE_SHARE or (waited > MIN_WAIT_SHARE and waited > WAIT_SHARE * wanted)


class ColdThrottle:
    """Delays cold reads while the broker is pressed. Used on one event loop."""

    def __init__(self, share: float, clock: Clock, cpu: CpuMeter, wal_end: Callable[[], int] = lambda: 0) -> None:
        """`share`: see `cache.cold_busy_share`. `wal_end` returns the WAL's end offset, as a measure of writes."""
        self._share = ColdShare(share)
        self._clock = clock
        self.thread_s = cpu.thread_s
        """CPU seconds of the calling thread; `spend` takes the cost of a piece of work. Usable in any thread."""
        self._cpu = cpu
        self._wal_end = wal_end
        self._line = asyncio.Lock()
        self._read_cost = ByteCost(READ_S_A_BYTE)
        self._spent_s = 0.0
        self._served_bytes = 0
        self._send_cost = ByteCost(SEND_S_A_BYTE)
        self.waits = 0
        """Reads that had to wait."""
        self.waited_s = 0.0
        """Total time they waited."""

    @property
    def is_bound(self) -> bool:
        """Return whether cold reads are limited to a rate now."""
        return self._share.is_bound

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Charge the `with` block, which must not await, to the cold lane."""
        started = self.thread_s()
        try:
            yield
        finally:
            self.spend(self.thread_s() - started)

    def spend(self, seconds: float) -> None:
        """Charge CPU time to the cold lane."""
        self._spent_s += seconds

    def fetched(self, size: int) -> None:
        """Charge the estimated cost of bytes that came from the bucket."""
        self.spend(size * GET_S_A_BYTE)

    def sent(self, size: int, seconds: float) -> None:
        """Record the CPU time of sending bytes of a large response, whether cold or hot."""
        self._send_cost.note(size, seconds)

    def try_take(self, size: int) -> bool:
        """Begin a read of up to `size` bytes now, if no read waits and the debt is paid."""
        if self._line.locked() or self._delay_s(is_replay=True) > 0:
            return False
        self._share.charge(self._cost_s(size))
        return True

    async def take(self, size: int, *, is_replay: bool) -> None:
        """Begin a read when it is due: see the module. A cancelled wait takes nothing."""
        if not (is_replay and self._line.locked()) and self._delay_s(is_replay) <= 0:
            self._share.charge(self._cost_s(size))
            return
        self.waits += 1
        started = self._clock.monotonic()
        try:
            if is_replay:
                async with self._line:
                    await self._wait(is_replay)
            else:
                await self._wait(is_replay)
        finally:
            self.waited_s += self._clock.monotonic() - started
        self._share.charge(self._cost_s(size))

    async def _wait(self, is_replay: bool) -> None:
        deadline = self._clock.monotonic() + MAX_WAIT_S
        while (delay_s := self._delay_s(is_replay)) > 0 and (left_s := deadline - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(delay_s, left_s, _CHECK_S))

    def settle(self, taken: int, size: int) -> None:
        """Correct the charge of a read that took `taken` bytes and returned `size`."""
        self.spend(size * self._send_cost.seconds_a_byte)
        self._served_bytes += max(size, _SMALLEST_READ_BYTES)
        self._share.charge(self._cost_s(size) - self._cost_s(taken))

    def _cost_s(self, size: int) -> float:
        return max(size, _SMALLEST_READ_BYTES) * self._read_cost.seconds_a_byte

    def _delay_s(self, is_replay: bool) -> float:
        if not self._share.is_off and self._share.window_is_over(self._clock.monotonic(), self._wal_end()):
            self._read_cost.note(self._served_bytes, self._spent_s)
            self._share.close_window(self._cpu.times(), self._spent_s, self._wal_end())
            self._spent_s, self._served_bytes = 0.0, 0
        delay_s = self._share.delay_s - (0.0 if is_replay else FIRST_READS_S)
        return delay_s if delay_s > _CRUMB_S else 0.0
