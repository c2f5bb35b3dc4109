"""The routes of models that generate: OpenAI's routes, and Triton's generate extension."""
