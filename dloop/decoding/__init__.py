"""The decode loop, its gate and the target behind it."""
