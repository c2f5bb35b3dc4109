"""The batch engine: queues of inputs, the order in which they form batches, and the device that runs the batches."""
