"""A pretend model server that behaves like the real ones on the wire and in time; it imports nothing of ours.

Read in this order: `profiles` (what it is like), `plan` (what it will say), `engine` (when), `answers` (in which
shape), `endpoints` (to which path), `http` and `memory` (over which wire), `faults` (and what goes wrong).
"""
