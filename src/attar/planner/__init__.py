"""A budget in, a recipe and its evidence out: ``attar plan``."""
