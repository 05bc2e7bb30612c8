"""Is the candidate faster? Interleaved pairs of blocks on one core, timed by the judge's own clock.

Both sides answer the same message protocol, so the message cost is in both; what rewriting the inputs costs is
measured by blocks without calls and taken off. The estimate is the median of pair ratios, which neighbours' noise
moves least. Some timed outputs, chosen by the judge after the block, are compared like any other.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

from musalib.mooreeval.session import Job

BLOCK_S = 0.001  # at least this much work between two looks at the clock
WINDOW = 8  # outputs of a block that are kept, any of which may be asked for
_core = threading.Lock()  # one timing at a time per judge: two would share a core's caches


@dataclass(frozen=True)
class Timing:
    """Seconds per call and the speedup reference / candidate with a 95 % interval of its median."""

    speedup: float
    low: float
    high: float
    reference_s: float
    candidate_s: float
    pairs: int
    calls: int


class _Side:
    def __init__(self, job: Job, timeout_s: float, window: int) -> None:
        self.job, self.timeout_s, self.window = job, timeout_s, window

    def block(
        self, order: list[int], forward: bool
    ) -> tuple[float, tuple[dict[str, Any], bytearray] | None, int]:
        start = time.perf_counter()
        self.job.ask(
            {"do": "block", "order": order, "forward": forward, "window": self.window},
            timeout_s=self.timeout_s,
        )
        elapsed = time.perf_counter() - start
        if not forward:
            return elapsed, None, 0
        kept = min(self.window, len(order))
        back = random.SystemRandom().randrange(kept)
        sample = self.job.ask({"output": back}, timeout_s=self.timeout_s)
        return elapsed, sample, order[len(order) - kept + back]


def measure(
    reference: Job, candidate: Job, sets: int, pairs: int, timeout_s: float, check: Any, core: int | None
) -> Timing:
    """`check(set_index, sample)` raises JobError when a timed output is wrong. `sets`: input sets both sides hold."""
    rng = random.SystemRandom()
    with _core:
        sides = {
            "reference": _Side(reference, timeout_s, 1),
            "candidate": _Side(candidate, timeout_s, WINDOW),
        }
        if core is not None:
            for side in sides.values():
                side.job.ask({"do": "pin", "core": core}, timeout_s=timeout_s)
        calls = {name: _calls_per_block(side, sets) for name, side in sides.items()}
        blocks: dict[str, list[float]] = {"reference": [], "candidate": []}
        empty: dict[str, list[float]] = {"reference": [], "candidate": []}
        deadline = time.monotonic() + timeout_s
        for index in range(pairs):
            for name in ("reference", "candidate") if index % 2 == 0 else ("candidate", "reference"):
                order = [rng.randrange(sets) for _ in range(calls[name])]
                elapsed, sample, used = sides[name].block(order, True)
                if name == "candidate":
                    check(used, sample)
                blocks[name].append(elapsed)
                empty[name].append(sides[name].block(order, False)[0])
            if time.monotonic() > deadline and index >= 2:
                break
    times = {name: _per_call(blocks[name], empty[name], calls[name]) for name in sides}
    ratios = [r / c for r, c in zip(times["reference"], times["candidate"], strict=True)]
    ordered = sorted(ratios)
    spread = max(1, round(0.98 * len(ordered) ** 0.5))  # binomial interval of the median
    middle = len(ordered) // 2
    return Timing(
        statistics.median(ratios), ordered[max(0, middle - spread)], ordered[min(len(ordered) - 1, middle + spread)],
        statistics.median(times["reference"]), statistics.median(times["candidate"]), len(ratios), calls["candidate"],
    )  # fmt: skip


def _per_call(blocks: list[float], empty: list[float], calls: int) -> list[float]:
    """Seconds per call of each block, less the median cost of rewriting inputs and of the message.

    At most four fifths of a block are taken off: beyond that the difference would be noise, and a speedup made of it.
    """
    overhead = statistics.median(empty)
    return [max(block - overhead, 0.2 * block) / calls for block in blocks]


def _calls_per_block(side: _Side, sets: int) -> int:
    """Enough calls for BLOCK_S, found by doubling; also the warm-up."""
    calls = 1
    while True:
        elapsed, _, _ = side.block([i % sets for i in range(calls)], True)
        if elapsed >= BLOCK_S or calls >= 4096:
            return calls
        calls = min(4096, max(calls * 2, int(calls * BLOCK_S / max(elapsed, 1e-6))))
