"""The face of a model that generates: OpenAI's routes, Triton's generate extension, and answers that are streams."""
