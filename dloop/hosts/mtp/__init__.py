"""Multi-token prediction: Qwen3.5's built-in head and the Gemma 4 assistant."""
