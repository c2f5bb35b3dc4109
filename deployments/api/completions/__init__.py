"""The routes of a model that generates: OpenAI's, and Triton's generate extension."""
