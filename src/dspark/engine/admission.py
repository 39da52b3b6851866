"""Which requests draft, and how many of their drafted tokens are verified.

The runner asks three times a step: :meth:`Admission.choose` before drafting (on past steps alone),
:meth:`Admission.admit` between drafting and verification, :meth:`Admission.learn` afterwards. The
algorithms are ``dspark.decoding.schedule``'s; this file gives them what they work on: survivals,
costs, and the other requests of the step.

*Three guards*, decided by past steps. Drafting must promise ``min_gain`` over plain decoding, or a
request is bypassed: its context rows are still written, so it can be tried again later at full
acceptance. Drafting must not have lost more than 1 % of the time, or nobody drafts for a while,
whatever is promised. Trimming must have promised ``min_gain`` over verifying everything, or
everything is verified: at low load a few tokens more cost nothing. The first blocks of a mode are
all drafted and verified, to learn from.

Without a cost table nothing can be weighed: ``sync`` and ``async`` then verify all, and
:attr:`Admission.banner` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dspark.config.engine import EngineOptions
from dspark.decoding import schedule
from dspark.decoding.cost import CostTable
from dspark.decoding.estimator import Signals
from dspark.decoding.params import SchedulerName
from dspark.decoding.schedule import Floats, Ints
from dspark.engine.confidence import Confidence, Mode
from dspark.engine.history import SHARED, Debt, Tally, Track
from dspark.engine.request import Request

if TYPE_CHECKING:
    from dspark.engine.drafter import Block
    from dspark.engine.sampler import RequestSampler

# Requests beyond this many are weighed every fourth step, not every step.
MANY = 64
# Steps that repeat a decision to draft for all and verify all, or to draft for nobody, unweighed:
# weighing is little work but on cold caches, about 1 ms in a step of 25 on two cores.
COAST = 7
# Blocks in a row of which nothing was accepted that end such a pause: drafting may no longer pay.
MISSES = 2
# Weight of the newest step in what trimming gains.
RECENT = 0.2


@dataclass
class Live:
    """The blocks of the step at hand: one row each. ``untrimmed``: all were admitted as far as they
    were drafted."""

    requests: list[Request]
    tracks: list[Track]
    signals: Signals
    survival: Floats
    widths: Ints
    untrimmed: bool


Record = Callable[[Live, Ints], None]
"""Told of every step: its blocks, and how many tokens of each were accepted."""


@dataclass
class Admission:
    """Of an engine whose blocks have ``slots`` slots (0 without a draft).

    ``costs`` None: see the module docstring. ``drafting``, ``bypassed`` count request steps.
    ``record`` is told of all blocks, also where nothing is scheduled (calibration).
    """

    slots: int
    options: EngineOptions
    costs: CostTable | None = None
    calibrations: Mapping[Mode, Sequence[float]] = field(default_factory=dict)
    tracks: dict[Request, Track] = field(default_factory=dict)
    drafting: int = 0
    bypassed: int = 0
    trimming_gain: float = 0.0
    record: Record | None = None

    def __post_init__(self) -> None:
        self.confidence = Confidence(self.slots, self.calibrations)
        self._shared: defaultdict[Mode, Tally] = defaultdict(Tally)
        self._live: Live | None = None
        self._steps = 0
        self._weighed = False
        self._coasting: set[Request] = set()
        self._debt, self._unasked = Debt(), False
        self._coast = 0
        self.limit = min(self.slots, self.options.draft_tokens or self.slots)

    @property
    def banner(self) -> str:
        """What decides about drafted tokens here, in a line."""
        name = self.options.scheduler
        if not self.slots:
            return "scheduler: none, there is no draft"
        if self.costs is None:
            tail = "" if name in ("fixed", "threshold") else f" ({name} needs a cost table)"
            if name != "threshold":
                return f"scheduler: no cost table, every drafted token is verified{tail}"
            return "scheduler: threshold; no cost table, so every request drafts"
        modes = ", ".join(f"{m.rule} T={m.temperature:g}" for m in self.confidence.calibrations)
        source = f"head calibrated for {modes}" if modes else "estimator that learns while serving"
        wide = self.slots + 1
        one, block = (1000 * float(self.costs.verify_seconds(wide)[n]) for n in (1, wide))
        draft = 1000 * float(self.costs.draft_seconds(1)[1])
        return (
            f"scheduler: {name}; verifying 1 token {one:.2f} ms, {wide} tokens {block:.2f} ms, "
            f"drafting {draft:.2f} ms; confidence: {source}"
        )

    def choose(
        self, requests: Sequence[Request], samplers: Mapping[Request, RequestSampler]
    ) -> list[Request]:
        """Requests to draft for, of all that decode in this step."""
        self._live, self._weighed = None, False
        able = [r for r in requests if r.room > 1 and self.slots and samplers[r].params.speculate]
        self._steps += 1
        if self._coast and able and set(able) == self._coasting:
            return self._repeat(able)
        self._weighed, self._coast, self._coasting = True, 0, set(able)
        tracks = {r: self.open(r, samplers[r]) for r in able}
        flexible = [r for r in able if self._kind(tracks[r]) != "fixed"]
        self._unasked = len(flexible) < len(able)  # others should not pay back what these lose
        if flexible and self.costs is not None:
            self._weigh(requests, tracks, flexible)
        chosen = [r for r in able if tracks[r].drafts]
        self.drafting += len(chosen)
        self.bypassed += len(able) - len(chosen)
        if able and not chosen and not self.record:
            self._coast = min(COAST, *(tracks[r].due - 1 for r in able))
        return chosen

    def _repeat(self, able: list[Request]) -> list[Request]:
        """What the last step decided for the same requests."""
        self._coast -= 1
        if self.tracks[able[0]].drafts:
            self.drafting += len(able)
            return able
        self.bypassed += len(able)
        for request in able:
            self.tracks[request].rest()
        return []

    def wants(self, requests: Sequence[Request]) -> bool | None:
        """What the drafter must measure: nothing (None), the head (False), all signals (True)."""
        if not self._weighed:
            return None
        tracks = [self.tracks[r] for r in requests]
        if all(self._kind(t) == "fixed" for t in tracks):
            return None if self.record is None else False
        return self.confidence.needs_features([t.mode for t in tracks])

    def admit(self, tokens: int, blocks: Mapping[Request, Block], signals: Signals | None) -> None:
        """Cut ``blocks`` to what is verified; ``tokens`` are verified in any case."""
        if signals is None or not blocks:
            return
        requests = list(blocks)
        tracks = [self.tracks[r] for r in requests]
        survival = self.confidence.survival(signals, [t.mode for t in tracks])
        lengths = np.array([len(b.ids) for b in blocks.values()])
        survival[np.arange(self.slots) >= lengths[:, None]] = 0.0
        kinds = [self._kind(t) for t in tracks]
        widths = self._widths(tokens, survival, lengths, kinds, tracks)
        for block, width in zip(blocks.values(), widths.tolist(), strict=True):
            block.admit(width)
        self._live = Live(
            requests, tracks, signals, survival, widths, bool((widths == lengths).all())
        )

    def learn(
        self,
        accepted: Mapping[Request, int],
        drafted: int,
        drafting: float,
        tokens: int,
        verifying: float,
    ) -> None:
        """What became of the step: accepted tokens by request, and what it took in seconds."""
        if self.costs is not None and self._weighed:
            self.costs.observe(drafted, drafting, tokens, verifying)
        count = len(accepted)
        if self.costs is not None and not (self.costs.frozen or self._unasked):
            if drafted:
                plain = float(self.costs.verify_seconds(count)[count])
                lost = (drafting + verifying) / plain - 1.0 - sum(accepted.values()) / count
                self._debt.add(count, lost)
            else:
                self._debt.pay(count)
        owing = bool(drafted and self._debt.rest(count))
        self._coast *= not owing
        live, self._live = self._live, None
        for request in accepted if drafted else ():
            if (track := self.tracks.get(request)) is not None and track.drafts:
                track.missed = 0 if accepted[request] else track.missed + 1
                if track.missed >= MISSES:
                    self._coast = 0
        if live is None:
            return
        outcome = np.array([accepted[r] for r in live.requests])
        if self.record is not None:
            self.record(live, outcome)
        modes = [t.mode for t in live.tracks]
        self.confidence.learn(live.signals, modes, live.widths, outcome)
        for track, survival, width, got in zip(
            live.tracks, live.survival, live.widths.tolist(), outcome.tolist(), strict=True
        ):
            track.add(survival, width, got)
            self._shared[track.mode].add(survival, width, got, SHARED)
        everyone = live.untrimmed and set(live.requests) == self._coasting and not self.record
        settled = everyone and all(map(self._settled, live.tracks)) and not owing
        # A request that is new is known by what others of its mode did: not for long.
        seen = min(track.own.blocks for track in live.tracks)
        self._coast = min(COAST, 2 ** (seen + 1)) if settled else 0

    def _settled(self, track: Track) -> bool:
        """Whether what was decided for a request, on evidence, may stand for a few steps."""
        kind = self._kind(track)
        return kind == "fixed" or (kind != "threshold" and track.pays and track.missed < MISSES)

    def drop(self, request: Request) -> None:
        """The request is over."""
        self.tracks.pop(request, None)
        self._coasting.discard(request)

    def open(self, request: Request, sampler: RequestSampler) -> Track:
        """The track of a request, begun when it is first seen."""
        track = self.tracks.get(request)
        if track is None:
            greedy = sampler.rule == "greedy"
            mode = self.confidence.mode(
                Mode(sampler.rule, sampler.one_hot or greedy, sampler.params.temperature)
            )
            name = sampler.params.scheduler or self.options.scheduler
            track = self.tracks[request] = Track(mode, name)
        return track

    def _kind(self, track: Track) -> SchedulerName:
        """The scheduler that can serve it: without costs only those that need none."""
        if self.costs is None and track.scheduler in ("sync", "async"):
            return "fixed"
        return track.scheduler

    def _weigh(
        self, requests: Sequence[Request], tracks: Mapping[Request, Track], flexible: list[Request]
    ) -> None:
        """Set ``drafts`` of flexible requests."""
        assert self.costs is not None
        if len(flexible) > MANY and self._steps % 4:
            return
        count, known = len(requests), list[tuple[Track, Floats]]()
        rest = self._debt.rest(count)
        for request in flexible:
            track, shared = tracks[request], self._shared[tracks[request].mode]
            if rest and not shared.young:
                track.pause(rest)
            elif (predicted := track.predict(shared)) is None:
                track.first(shared)
            else:
                predicted[min(request.room - 1, self.limit) :] = 0.0
                known.append((track, predicted))
        if not known:
            return
        sure = [r for r in tracks if self._kind(tracks[r]) == "fixed"]
        tokens, emitted = count, float(count)
        for request in sure:
            predicted = tracks[request].predict(self._shared[tracks[request].mode])
            tokens += min(self.limit, request.room - 1)
            emitted += 0.0 if predicted is None else float(predicted.sum())
        most = tokens + len(known) * self.slots
        worth = schedule.worth_drafting(
            np.stack([predicted for _, predicted in known]),
            self.costs.draft_seconds(count),
            self.costs.verify_seconds(most),
            tokens=tokens,
            emitted=emitted,
            drafting=len(tracks) - len(known),
            gain=self.options.min_gain,
        )
        for (track, _), pays in zip(known, worth.tolist(), strict=True):
            track.decide(pays)
        if any(track.probing for track, _ in known):
            # One pass serves all that are nearly due: most of its cost does not depend on them.
            for track, _ in known:
                if not track.drafts and 2 * track.idle >= track.wait:
                    track.drafts = track.probing = True

    def _widths(
        self,
        tokens: int,
        survival: Floats,
        whole: Ints,
        kinds: list[SchedulerName],
        tracks: list[Track],
    ) -> Ints:
        """Widths [R], at most ``whole``; each kind on top of what the kinds before it admitted."""
        widths = whole.copy()
        rows = {k: [i for i, kind in enumerate(kinds) if kind == k] for k in dict.fromkeys(kinds)}
        if own := rows.get("threshold"):
            widths[own] = schedule.threshold(survival[own], self.options.confidence_threshold)
        if self.costs is None or not {"sync", "async"} & set(rows):
            return widths
        count = len(survival)
        seconds = self.costs.verify_seconds(tokens + count * self.slots)
        seconds = seconds + self.costs.draft_seconds(count)[count]
        settled = rows.get("fixed", []) + rows.get("threshold", [])
        base = tokens + int(widths[settled].sum())
        emitted = tokens + _mass(survival[settled], widths[settled])
        before = (base, emitted)
        flexible: list[SchedulerName] = ["async", "sync"]
        for kind in flexible:
            if own := rows.get(kind):
                live = survival[own]
                if kind == "sync":
                    widths[own] = schedule.sync(live, seconds, base, emitted)
                else:
                    earlier = np.stack([self._earlier(tracks[i]) for i in own])
                    widths[own] = schedule.top(
                        live, schedule.budget(earlier, seconds, base, emitted)
                    )
                base += int(widths[own].sum())
                emitted += _mass(live, widths[own])
        trimmed = [i for kind in flexible for i in rows.get(kind, [])]
        all_tokens = before[0] + int(whole[trimmed].sum())
        everything = (before[1] + float(survival[trimmed].sum())) / seconds[all_tokens]
        gained, wanted = self.trimming_gain, self.options.min_gain
        self.trimming_gain += RECENT * (emitted / seconds[base] / everything - 1.0 - gained)
        for row in trimmed:
            track = tracks[row]
            if self._shared[track.mode].young or (gained < wanted and not track.probing):
                widths[row] = whole[row]
        return widths

    def _earlier(self, track: Track) -> Floats:
        """Survivals [K] two blocks old; all slots, before there are such."""
        return track.recent[0] if len(track.recent) == 2 else np.ones(self.slots)


def _mass(survival: Floats, widths: Ints) -> float:
    """Sum of the admitted survivals."""
    return float(survival[np.arange(survival.shape[1]) < widths[:, None]].sum())
