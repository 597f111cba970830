"""Standard benchmarks: their prompt files as published, the folders that their own tools read, and their rules."""
