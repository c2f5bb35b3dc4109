"""Servers of generating models over HTTP, side by side: the same weights, threads, prompts and lengths."""
