"""Other people's packages: callbacks for their training loops, trackers of our runs.

A file for each framework, which imports it; they share `held_out`. `trackers` has all trackers.
"""
