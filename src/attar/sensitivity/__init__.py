"""How much a model changes when its weights do, and the reference that changes are measured against."""
