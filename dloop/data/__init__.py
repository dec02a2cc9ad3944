"""Conversations, templates, masks, the training loader and the benchmarks; no model inside."""
