"""How robust a network is: attacks on every image, one verdict in float32, and what to doubt.

`evaluate` runs the suite batch by batch, keeps each finished piece in a journal, asks the warnings
whether the numbers can be believed, and ends in a Result with its card.
"""
