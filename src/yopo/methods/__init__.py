"""Training methods, one file each: `backward(x, y)` fills .grad as `loss.backward()` would.

A batch goes in; a method looks for its perturbation, propagates, and leaves loss, logits, eta and
what that cost. Each algorithm fits on less than 40 lines. `registry` declares each method once.
"""
