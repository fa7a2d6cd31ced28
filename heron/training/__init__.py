"""What a run needs beside its step: optimiser, checkpoints, signals, records, report."""
