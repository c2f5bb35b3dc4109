"""What each command of the command line does, as functions from a job to a result."""
