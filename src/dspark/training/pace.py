"""How long a run is, when time and not only epochs may end it.

Without ``max_seconds`` the length is fixed, the place in the schedule is ``step / total``, and the
clock is never asked. With it, the number of steps that still fit is estimated again and again from
the median time of the latest ones. A run must not only stop in time: the learning rate must come to
its end as well, or the draft keeps the noise of large steps. So the schedule is not a function of
the step but of a *progress* from 0 to 1, and every step moves it by an equal share of what is left:

    progress += (1 - progress) / steps left

When the machine slows down, fewer steps are left, each moves further, and the rate still arrives at
zero with the time; when it speeds up the rest is stretched. Progress never goes back and never
jumps, whatever the estimates do, and it is part of the training state.
"""

from __future__ import annotations

import statistics
from collections import deque

from dspark.config.recipe import TrainSection
from dspark.training.checkpoint import TrainingState

TIMED_STEPS = 12  # the first plan of a process is made behind them; each plan looks at as many
REPLAN = 0.05  # share of max_seconds after which the rest is planned anew
RESERVE = 0.06  # share of max_seconds kept for the last evaluation and for saving
OVERRUN = 1.1  # times max_seconds, which no step is begun to exceed


class Pace:
    """Keeps the length of a run, ``full`` steps if there is time; ``state`` is where it stands."""

    def __init__(self, section: TrainSection, full: int, state: TrainingState) -> None:
        self.limit, self.full = section.max_seconds, full
        self._times: deque[float] = deque(maxlen=TIMED_STEPS)
        self._steps, self._pauses, self._longest_pause = 0, 0.0, 0.0
        self._planned_at = state.seconds

    def position(self, state: TrainingState) -> float:
        """Place of the next step, from 0, in a schedule of ``state.total`` steps."""
        if self.limit is None:
            return state.step
        last = state.total - state.step == 1
        # The last step of any run has the last rate, also when time ran out all of a sudden.
        progress = max(state.progress, 1 - 1 / state.total) if last else state.progress
        return progress * state.total

    def advance(self, state: TrainingState, took: float) -> None:
        """Count a step of ``took`` seconds, included in ``state.seconds``; plan the rest if due."""
        left = state.total - state.step
        state.step += 1
        if self.limit is None:
            state.progress = state.step / state.total
            return
        state.progress += (1 - state.progress) / left
        self._steps += 1
        # The first step of a process warms caches up: it counts only while there is no other.
        if self._steps == 2:
            self._times.clear()
        self._times.append(took)
        # Behind the last step the schedule has ended, whatever time there would be.
        if left > 1 and self._due(state.seconds, took, self.limit):
            self._planned_at = state.seconds
            state.total = min(self.full, state.step + self._fitting(state.seconds, self.limit))

    def _due(self, used: float, took: float, limit: float) -> bool:
        """Whether it is time to plan the rest anew."""
        if self._steps == 1:
            # Nothing is planned by it, unless another one like it would be too long.
            return used + took > OVERRUN * limit
        return self._steps == TIMED_STEPS or used - self._planned_at >= REPLAN * limit

    def pause(self, took: float) -> None:
        """Time between two steps, for evaluation and saving."""
        self._pauses += took
        self._longest_pause = max(self._longest_pause, took)

    def _fitting(self, used: float, limit: float) -> int:
        """Steps that still fit; one more to end the schedule with, unless even that is too long."""
        each = max(statistics.median(self._times) + self._pauses / self._steps, 1e-6)
        end = self._longest_pause  # the run closes with an evaluation too
        budget = limit - max(RESERVE * limit, end)
        ends_late = used + each + end > OVERRUN * limit
        return max(int((budget - used) / each), 0 if ends_late else 1)
