"""The theory itself: layers as dynamics, co-states, Hamiltonians, and the two players' best moves.

`dynamics` runs a network layer by layer and back; `adversary` minimises H_0 over the perturbation,
`weights` maximises H_t over θ_t; `diagnose` measures how long a frozen co-state lasts.
"""

from yopo.pmp.dynamics import Dynamics, Regulariser, Trajectory, WeightDecay

__all__ = ["Dynamics", "Regulariser", "Trajectory", "WeightDecay"]
