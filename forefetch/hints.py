"""A hint: which experts of a later layer a step will probably choose. It moves bytes early and changes nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST, REFINED = 0, 1
"""Phases: made at a layer's gate, for the next two MoE layers; made again when that layer's output is known."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertHint:
    """What one worker is told about one layer. A hint for the same step and layer replaces the one before."""

    step: int
    source: int  # layer whose gate (phase 0) or output (phase 1) it was made from
    layer: int  # the layer it is about
    phase: int  # FIRST or REFINED
    experts: npt.NDArray[np.int32]  # [n] the model's indices, distinct, held by the worker, likeliest first
    probabilities: npt.NDArray[np.float32]  # [n] chance that at least one row of the step chooses it
    window_ns: int  # time until the layer's call is expected: a duration, since clocks differ

    @property
    def flaw(self) -> str:
        """What is wrong with its form, "" if nothing. Whether the worker holds the experts is for the worker to see."""
        if self.experts.shape != self.probabilities.shape or self.experts.ndim != 1:
            return f"{self.experts.shape} experts with {self.probabilities.shape} probabilities"
        if min(self.step, self.source, self.layer, self.window_ns) < 0 or self.phase not in (FIRST, REFINED):
            return "a number is out of range"
        if len(np.unique(self.experts)) != len(self.experts):
            return "an expert is named twice"
        if not ((self.probabilities >= 0) & (self.probabilities <= 1)).all():  # NaN is neither
            return "a probability is outside 0..1"
        return ""
