"""mergekit's YAML: read into frozen dataclasses, and written."""
