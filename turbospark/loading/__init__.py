"""From a path or a Hub id to a model with weights."""
