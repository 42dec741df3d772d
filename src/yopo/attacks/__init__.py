"""Attacks for evaluation. Each returns the strongest adversarial images it found.

They run the model in eval mode, leave it as it was, and never leave the ball or the box.
"""

from yopo.attacks.cw import cw
from yopo.attacks.pgd import pgd

__all__ = ["cw", "pgd"]
