"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

A batch goes in, `Engine.step` replays what the method's own code did on a compiled network. Tested
equal to the plain path; what cannot be made fast runs plainly, and a line says why.
"""
