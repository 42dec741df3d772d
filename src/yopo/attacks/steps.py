"""The one rule for the size of an attack's steps."""

from yopo.core.threat import L2, Threat


def step_size(threat: Threat, steps: int) -> float:
    """2.5·eps/steps, which crosses the ball; in L2 at least eps/4.

    Where pixels are 0 or 1, most of an L2 step points out of the box and is cut off.
    """
    share = 2.5 / max(steps, 1)
    return threat.eps * (max(share, 0.25) if isinstance(threat, L2) else share)
