"""Who is there: ranks and roles, the control store, the launchers, and who is alive."""
