"""A mixture of experts made of dense models, by the YAML of ``mergekit-moe``."""
