"""What the live control loop decides: pure functions from what was seen to a verdict in words.

`ramps` is a baseline, for experiments alone: a service's ramps are the planner's.
"""
