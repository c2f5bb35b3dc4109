"""Rows of data from files: texts, images, arrays, and source files with line numbers."""
