"""Draft trees: plain data and algorithms, no model inside."""
