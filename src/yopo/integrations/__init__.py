"""Callbacks for other people's training loops: held-out accuracy under attack while they train.

A file for each framework, which imports it; they share `held_out`.
"""
