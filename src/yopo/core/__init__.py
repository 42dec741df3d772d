"""What everything else rests on: threats, one propagation, the cut at f0, files and checksums.

Images and a network come in; out come a loss, gradients, the co-state p and steps in a ball.
Nothing here knows a method, a run or a command.
"""
