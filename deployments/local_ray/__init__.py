"""Ray and Ray Serve on one machine: starting and stopping, ports, and changes of the set of applications."""
