"""Ray and Ray Serve on one machine: how they start, which processes run, and how applications change."""
