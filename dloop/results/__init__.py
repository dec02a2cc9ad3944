"""Result files: schema, metrics, provenance, atomic writing; imports no torch."""
