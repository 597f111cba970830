"""Pictures and report.html of a run, pictures in loggers, Weights & Biases."""
