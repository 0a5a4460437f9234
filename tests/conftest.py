"""Being here puts ``tests/`` on the path, so that every room can ``import tiny_models``."""
