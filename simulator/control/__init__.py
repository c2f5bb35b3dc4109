"""The live controller in a simulation: `ControlLoop` itself, on a simulated clock, over replicas that are not there."""
