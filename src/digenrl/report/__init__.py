"""From a run directory's files to its summary, trace, plots and report. No torch and no running process is needed."""
