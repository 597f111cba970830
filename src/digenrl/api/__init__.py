"""digenrl from Python: runs, samples, scores, plans, and RL steps in this process."""
