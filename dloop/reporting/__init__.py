"""From result files to tables and plots: collect, lay out, write. Imports no torch, decodes nothing."""
