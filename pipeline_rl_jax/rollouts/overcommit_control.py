"""How many prompts beyond the batch are in flight: Δ, from the slope of the reward.

Owns the rule that moves Δ and its state. While rewards rise Δ grows, for the sake of speed; once
they do not it shrinks, for the sake of fresher rollouts. Source: OPPO, arXiv 2509.25762, section
on inter-step overlap and Algorithm 1. The paper gives neither w, nor Δ_max, nor the first Δ.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any, Literal

Variant = Literal["fixed", "additive", "proportional"]


class OvercommitController:
    """Δ for the next step, in groups, from the mean rewards of the steps before.

        s_t = (1/w) Σ_{i=t−w+1..t} (R_i − R_{i−1})
        Δ ← min(Δ_max, Δ + δ) if s_t > 0 else max(Δ_min, Δ − δ)

    `additive`: δ is `change_groups` (the text of the paper). `proportional`: δ = max(1, ⌊Δ/4⌋)
    (its Algorithm 1). `fixed`: Δ stays where it starts. Until w differences are known, Δ stays.
    """

    def __init__(
        self,
        *,
        variant: Variant,
        start_groups: int,
        min_groups: int = 0,
        max_groups: int = 0,
        change_groups: int = 1,
        window_steps: int = 1,
    ) -> None:
        """`fixed` reads `start_groups` only. Raises ValueError."""
        if variant != "fixed":
            if not 0 <= min_groups <= start_groups <= max_groups:
                raise ValueError(
                    f"overcommit: start_groups ({start_groups}) must lie between min_groups "
                    f"({min_groups}) and max_groups ({max_groups}), none of them negative"
                )
            if change_groups < 1 or window_steps < 1:
                raise ValueError(
                    f"overcommit: change_groups ({change_groups}) and window_steps "
                    f"({window_steps}) must be at least 1; use variant fixed to keep Δ as it is"
                )
        self._variant = variant
        self._min_groups = min_groups
        self._max_groups = max_groups
        self._change_groups = change_groups
        self._groups = start_groups
        self._rewards: collections.deque[float] = collections.deque(maxlen=window_steps + 1)

    @property
    def groups(self) -> int:
        """Δ for the next step."""
        return self._groups

    @property
    def slope(self) -> float | None:
        """s_t in reward per step; None until the window is full."""
        rewards = self._rewards
        if len(rewards) < (rewards.maxlen or 0):
            return None
        # Neighbours cancel in the sum of differences.
        return (rewards[-1] - rewards[0]) / (len(rewards) - 1)

    def observe(self, mean_reward: float) -> int:
        """Takes in the mean reward of a step; returns Δ for the next.

        Raises ValueError for a reward that is not finite: it would hold the slope for w steps.
        """
        if not math.isfinite(mean_reward):
            raise ValueError(f"overcommit: mean reward ({mean_reward}) must be finite")
        self._rewards.append(mean_reward)
        slope = self.slope
        if slope is not None and self._variant != "fixed":
            change = self._change() if slope > 0 else -self._change()
            self._groups = min(self._max_groups, max(self._min_groups, self._groups + change))
        return self._groups

    def metrics(self) -> dict[str, float]:
        """The slope is left out until its window is full."""
        slope = self.slope
        return {
            "overcommit/delta_groups": float(self._groups),
            **({} if slope is None else {"overcommit/reward_slope": slope}),
        }

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as plain values that JSON can hold."""
        return {"groups": self._groups, "rewards": list(self._rewards)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on from a snapshot; after a change of settings Δ moves into its new bounds."""
        if self._variant == "fixed":
            return
        self._groups = min(self._max_groups, max(self._min_groups, snapshot["groups"]))
        self._rewards.clear()
        self._rewards.extend(snapshot["rewards"])

    def _change(self) -> int:
        if self._variant == "proportional":
            return max(1, self._groups // 4)
        return self._change_groups
