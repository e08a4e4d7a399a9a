"""How much of a busy machine reads of history may take: a share of the broker's CPU time, and all they want otherwise.

`storage.cold_turns` divides the event loop between those who are ready, and `storage.cold_budget` the memory. Neither
helps when the cores are what there is too little of: a replay is as fast as it is served, and takes from producers what
its GETs, checks and sends cost, on the loop and in threads. So CPU *time* is shared out.

Every `WINDOW_S` it is measured what the process used, and how much of it was for reads of history (the *cold lane*:
measured where it is our code, by the byte for what libraries' threads do and for sends). The broker is *pressed* when
its loop has waited for a core for a good part of the time it wanted one, or was idle for less than a tenth of the time.
There is something to protect when all the rest uses a quarter of a core and not less than the cold lane, or when
producers write in earnest and the rest would use that much if it got the cores: a replay alone may use the whole
machine, whatever other processes do there.

While both are so, the cold lane is held to a rate (CPU seconds a second). Where it has no bound yet, producers write in
earnest and the rest uses no less than it, that is `cache.cold_busy_share` of what the broker uses at once: what a
replay takes from producers at full speed for half a second is more than it takes later in ten; and as long as producers
write and nothing holds it, a window is only `LOOK_S` long. Otherwise the rate is halved with each such window, down to
that share and no further: nothing starves. It grows by a quarter with each window that is not pressed, or doubles with
each in which there is nothing to protect, until it is no bound any more (1.8 and 0.6 s).

Who waits: reads of replays go on in order, each when what was read before it is paid for. A reader's first read, such
as a look-up by timestamp, does not stand in that line, and may leave a debt of `FIRST_READS_S`: it waits only when
there are very many of its kind. Reads in the newest object of a stream never wait, and their slices are not charged: a
consumer that fell behind must not fall behind more. Nobody who is the next waits longer than `MAX_WAIT_S`.

`ColdShare` is the arithmetic, sans-IO; `ColdPace` measures and lets readers wait. Entry: `ColdPace`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from runtime.clock import Clock
from runtime.cpu_time import ByteCost, CpuMeter, CpuTimes

WINDOW_S: Final = 0.1
"""What is measured at a time."""
LOOK_S: Final = 0.05
"""The same while nothing is held back and producers write in earnest."""
STALE_S: Final = 1.0
"""A window that nobody closed for so long says nothing: no history was read meanwhile."""
IDLE_SHARE: Final = 0.1
"""The loop is pressed when it is idle for a smaller part of a window."""
WAIT_SHARE: Final = 0.2
"""The loop is pressed when it waits for a core for this part of the time in which it wants one..."""
MIN_WAIT_SHARE: Final = 0.03
"""... and for this part of the window: a loop that wakes up rarely waits a little each time."""
OTHERS_CORES: Final = 0.25
"""Others that want fewer cores get them from the kernel's scheduler."""
PRODUCED_BYTES_PER_S: Final = 16 << 20
"""What producers write who must be protected on a machine that gives the broker little."""
GROWTH: Final = 1.25
GROWTH_ALONE: Final = 2.0
"""Of the rate with each window in which there is nothing to protect."""
NO_BOUND_CORES: Final = 2.0
"""A rate of so many cores bounds nothing: a loop and the threads that work for it use less."""
CREDIT_S: Final = 0.02
"""How long an unused rate may be saved up: those who wait wake up late on a busy machine."""
FIRST_READS_S: Final = 0.1
"""What first reads may leave to be paid: several slices of replays, so that they go at once."""
MAX_WAIT_S: Final = 1.0
_CHECK_S: Final = 0.05
_CRUMB_S: Final = 1e-6
"""Left over by rounding: a sleep this short might not move the clock."""
GET_S_A_BYTE: Final = 0.25e-9
"""CPU time of a GET in the threads of the store's client, which nobody measures (`bench.cold_read`: bare GETs)."""
SEND_S_A_BYTE: Final = 0.15e-9
READ_S_A_BYTE: Final = 0.7e-9
"""First guesses of what a send and a whole cold read cost."""
_SMALLEST_READ_BYTES: Final = 64 << 10
"""A read of one record costs about as much as one of this size."""


class ColdShare:
    """The rate that the cold lane may use, and what it owes. Sans-IO: seconds come in."""

    def __init__(self, share: float) -> None:
        """`share` (0–1] is the part of the process's CPU time; 1: never bound."""
        assert 0 < share <= 1
        self._share = share
        self._since: tuple[float, CpuTimes, int] | None = None
        self._now = 0.0
        self._owed_s = 0.0
        self.rate = math.inf
        """CPU seconds a second that the cold lane may use now."""

    @property
    def is_off(self) -> bool:
        """Whether it never bounds anything."""
        return self._share == 1

    @property
    def is_bound(self) -> bool:
        """Whether the rate is a bound now."""
        return self.rate < math.inf

    @property
    def delay_s(self) -> float:
        """How long until everything is paid for at the present rate, in seconds."""
        return max(0.0, self._owed_s / self.rate) if self.is_bound else 0.0

    def charge(self, seconds: float) -> None:
        """A read begins that will cost so much, or turned out to cost so much more (less: negative)."""
        if self.is_bound:
            self._owed_s = min(self._owed_s + seconds, MAX_WAIT_S * self.rate)

    def window_is_over(self, now: float, wal_end: int) -> bool:
        """Whether `close_window` is due; otherwise only time passes. `now` is monotonic seconds."""
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
        """Judge the time since the last call, in which the cold lane used `spent_s`, and set the rate.

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
        produced = (wal_end - since[2]) / seconds >= PRODUCED_BYTES_PER_S
        outweighed = others >= max(OTHERS_CORES, cold)
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
        """Whether producers have written so much since the last window ended, `seconds` ago."""
        return self._since is not None and wal_end - self._since[2] >= PRODUCED_BYTES_PER_S * seconds

    def _free(self) -> None:
        self.rate, self._owed_s = math.inf, 0.0


def _pressed(run: float, waited: float) -> bool:
    """Whether the loop lacks time; both are parts of the window."""
    wanted = run + waited
    return wanted > 1 - IDLE_SHARE or (waited > MIN_WAIT_SHARE and waited > WAIT_SHARE * wanted)


class ColdPace:
    """Lets reads of history wait while the broker is pressed. Used on one event loop."""

    def __init__(self, share: float, clock: Clock, cpu: CpuMeter, wal_end: Callable[[], int] = lambda: 0) -> None:
        """`share`: see `cache.cold_busy_share`. `wal_end` is the WAL's end offset: what producers have written."""
        self._share = ColdShare(share)
        self._clock = clock
        self.thread_s = cpu.thread_s
        """CPU seconds of the calling thread: what work takes of them is handed to `spend`. For any thread."""
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
        """How long they waited, all together."""

    @property
    def is_bound(self) -> bool:
        """Whether reads of history are held to a rate now."""
        return self._share.is_bound

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is done inside, without waiting, is work of the cold lane."""
        started = self.thread_s()
        try:
            yield
        finally:
            self.spend(self.thread_s() - started)

    def spend(self, seconds: float) -> None:
        """The cold lane has used so much CPU time."""
        self._spent_s += seconds

    def fetched(self, size: int) -> None:
        """So many bytes came from the bucket."""
        self.spend(size * GET_S_A_BYTE)

    def sent(self, size: int, seconds: float) -> None:
        """A socket took so many bytes of a large response at the cost of so much CPU time, of whatever lane."""
        self._send_cost.note(size, seconds)

    def try_take(self, size: int) -> bool:
        """Begin a read of up to `size` bytes now, if nobody waits and everything is paid for."""
        if self._line.locked() or self._delay_s(is_replay=True) > 0:
            return False
        self._share.charge(self._cost_s(size))
        return True

    async def take(self, size: int, *, is_replay: bool) -> None:
        """Begin a read when it is its turn: see the module. Cancelling the wait takes nothing."""
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
        """The read that took `taken` bytes came to `size`."""
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
