"""Attacks for evaluation. Each returns the strongest adversarial images it found.

They run the model in eval mode, leave it as it was, and never leave the ball or the box. A name of
`names` becomes an Attack; `pgd` and `cw` offer every iterate to `strongest`, which keeps for each
image the best one; `autoattack` runs the package's stages; `steps` is the size of a step.

Images of half types are rounded towards the clean ones, so that they stay in the ball too. In
bfloat16 the grid is 1/256 wide: an L2 attack, whose moves are small, is weaker than in float32.
"""

from yopo.attacks.cw import cw
from yopo.attacks.pgd import pgd

__all__ = ["cw", "pgd"]
