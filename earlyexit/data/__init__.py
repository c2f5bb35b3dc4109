"""Reading of data files (texts, images, arrays), and of YAML and JSON files with line numbers in errors."""
