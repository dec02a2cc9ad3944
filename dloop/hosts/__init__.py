"""Draft-model families: network, checkpoint format, drafter and objective, one file each."""
