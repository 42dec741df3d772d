"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

A batch goes into `Engine.step`. At the first, `forms` puts the method's own code on a compiled
`network` (`inner`: its inner loop; `overlap`: its second stream), and `capture` records a step of
that; later ones are replays, which read the rate and the radius from `numbers` and what the method
carries from `carried`. Tested equal to the plain path; what cannot be made fast runs plainly, and a
line says why.
"""
