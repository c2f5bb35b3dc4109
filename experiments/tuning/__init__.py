"""Ramps and thresholds, chosen before and while serving: whether promises are kept, and alarms sound in time."""
