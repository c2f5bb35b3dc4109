"""The planner and the simulator held against E3's figures, formulas and measurements; and forecasts to plan by."""
