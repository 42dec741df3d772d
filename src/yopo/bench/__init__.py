"""What a step costs on this machine: ours beside the paper's loops written out plainly.

`bench` times each method's engine on random images, counts its operations on a few of them, and
times the loop of `literal` for comparison; a Bench of timings comes out, for the screen or a file,
which `reading` reads again.
"""
