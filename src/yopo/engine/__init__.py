"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

A batch goes into `Engine.step`. Before the first, `ready` makes `steps` fast: `forms` puts the
method's own code on a compiled `network` and `capture` records one step of it; later ones are
replays, which read `numbers` and what is `carried`. Tested equal to the plain path; what cannot be
made fast runs plainly, and a line says why.
"""
