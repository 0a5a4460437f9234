"""LoRA adapters: added to a model's weights, or extracted from two models."""
