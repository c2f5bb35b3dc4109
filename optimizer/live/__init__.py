"""What the live control loop decides: pure functions from what was seen to a verdict in words.

`ramp_mover` and `best_ramps` are baselines, for experiments alone: a service's ramps are the planner's.
"""
