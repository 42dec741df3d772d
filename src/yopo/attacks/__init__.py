"""Attacks for evaluation. Each returns the strongest adversarial images it found.

They run the model in eval mode, leave it as it was, and never leave the ball or the box. A name of
`names` becomes an Attack; `pgd` and `cw` offer every iterate to `strongest`, which keeps for each
image the best one; `autoattack` runs the package's stages; `steps` is the size of a step.
"""

from yopo.attacks.cw import cw
from yopo.attacks.pgd import pgd

__all__ = ["cw", "pgd"]
