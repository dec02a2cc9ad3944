"""DLoop: looped speculative decoding. Kept empty of imports so that every `--help` answers at once."""

__version__ = "0.1.0"
