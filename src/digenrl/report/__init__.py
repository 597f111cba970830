"""Make summary, trace, plots and report from the files of a run directory, without torch and
without a running process."""
