"""Lightning callbacks of the trainer ranks; rollout ranks have none."""
