"""What everything else rests on: threats, passes, the cut at f0, files and checksums.

Images and a network come in. `propagation` runs them forward and back, for a loss, gradients and
the co-state p (`first_layer`: where f0 ends); `hamiltonian` takes eta up p·f0; `threat` keeps it in
ball and box. Nothing here knows a method, a run or a command.
"""
