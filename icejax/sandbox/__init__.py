"""Programs that strangers wrote, run in a process of their own with limits."""
