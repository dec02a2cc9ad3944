"""Training an autoregressive draft head by unrolling it over its own states: what EAGLE-3 and MTP heads share."""
