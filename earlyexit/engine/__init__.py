"""The batch engine: queues, batches, their order, and the device that runs them."""
