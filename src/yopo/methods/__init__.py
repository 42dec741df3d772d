"""Training methods, one file each: `backward(x, y)` fills .grad as `loss.backward()` would.

A batch goes in; `base` checks it; the method looks for its perturbation by attack passes, then
propagates for the weights, and leaves loss, logits, eta and what that cost. Each algorithm fits on
less than 40 lines. What the rest of the package may ask of a method stands in `Method`; `registry`
declares each once.
"""
