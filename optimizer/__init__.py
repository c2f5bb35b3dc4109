"""Plans, the planner and exit thresholds: pure decisions, without torch and ray."""
