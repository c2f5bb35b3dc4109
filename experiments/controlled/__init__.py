"""The simulated service under the live controller: accelerators and replicas that come and go, loads, and a run."""
