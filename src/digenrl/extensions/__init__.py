"""Extensions: what a run can do without. Each folder can be deleted; the core never imports one."""
