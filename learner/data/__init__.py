"""Groups to batches: selection, resampling, collation and micro-batches."""
