"""EAGLE-3: one decoder layer drafts token by token from fused target states, then from its own."""
